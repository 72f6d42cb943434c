"""Any table through a mapping: what is filled, converted, refused and counted."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lmm4edit.data.check import check_manifest
from lmm4edit.data.dimensions import load_dimensions
from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.mapping import ScoreSource, TableMapping, fill, load_mapping
from lmm4edit.data.table_import import ImportedTable, import_table
from lmm4edit.errors import ConfigError, ManifestError
from lmm4edit.records import QUALITY, Dimension

SIMPLE = """
columns: {sample_id: id, source_image: before, edited_image: after, instruction: prompt}
scores:
  quality: {column: stars, low: 1, high: 5}
"""
ROW = {"id": "1", "before": "a.png", "after": "b.png", "prompt": "Add a hat", "stars": "3"}


def write_table(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder: Path, mapping: str, *rows: dict[str, Any], name: str = "t.csv", **options: Any) -> ImportedTable:
    (folder / "mapping.yaml").write_text(mapping, encoding="utf-8")
    table = write_table(folder / name, *rows)
    return import_table(table, folder / "mapping.yaml", folder / "out", **options)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out" / "manifest.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_every_kind_of_table(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, SIMPLE, ROW, {**ROW, "id": "2", "stars": "4.5"}, name=name)
    assert written(tmp_path) == [
        {
            "sample_id": "1",
            "source_image": "../a.png",
            "edited_image": "../b.png",
            "instruction": "Add a hat",
            "source_id": "a.png",
            "mos_quality": 50.0,
        },
        {
            "sample_id": "2",
            "source_image": "../a.png",
            "edited_image": "../b.png",
            "instruction": "Add a hat",
            "source_id": "a.png",
            "mos_quality": 87.5,
        },
    ]
    assert done.problems == []
    assert done.summary["formulas"] == ["mos_quality = 0 + (stars - 1) / (5 - 1) * (100 - 0)"]
    assert set(done.summary["provenance"]["inputs"]) == {name, "mapping.yaml"}
    assert done.summary["check"] == {"duplicate_edit": 1}


def test_everything_a_mapping_can_say(tmp_path: Path) -> None:
    mapping = """
columns:
  instruction: prompt
  editing_model: method
  group_city: city
constants:
  edit_task: remove
  question: Is it {gone}?
templates:
  sample_id: "{n}-{method}"
  source_image: "sources/{n}.png"
  edited_image: "edits/{method}/{n}.png"
  source_id: "photo {{{n}}}"
scores:
  quality: {column: dmos, low: 0, high: 1, higher_is_better: false}
  realism: {column: real, low: -3, high: 3}
  naturalness: {column: real, low: -3, high: 3}
dimensions:
  - {name: realism, question: Rate the realism., low: 1, high: 7}
  - {name: naturalness, question: Rate how unnatural it is., higher_is_better: false}
answer: {column: ok, yes_values: [accepted, true], no_values: [rejected, no]}
missing: ["", "-", -1]
"""
    row = {"n": 7.0, "method": "M {n}", "prompt": " =HYPERLINK(x)", "city": None, "dmos": 0.25, "real": 1.5}
    rows = [
        {**row, "ok": True},
        {**row, "n": 8.0, "ok": False, "dmos": -1.0},
        {**row, "n": 9.0, "ok": None, "real": None},
    ]
    done = run(tmp_path, mapping, *rows, name="t.parquet")
    first, second, third = written(tmp_path)
    assert first == {
        "sample_id": "7-M {n}",
        "source_image": "../sources/7.png",
        "edited_image": "../edits/M {n}/7.png",
        "instruction": " =HYPERLINK(x)",
        "source_id": "photo {7}",
        "edit_task": "remove",
        "editing_model": "M {n}",
        "mos_quality": 75.0,
        "mos_realism": 5.5,
        "mos_naturalness": 25.0,
        "question": "Is it {gone}?",
        "answer": "yes",
    }
    assert second["answer"] == "no" and "mos_quality" not in second
    assert "answer" not in third and "mos_realism" not in third
    assert done.summary["missing_values"] == {
        "group_city": {"the column 'city' is blank or missing": 3},
        "quality": {"the column 'dmos' is blank or missing": 1},
        "realism": {"the column 'real' is blank or missing": 1},
        "naturalness": {"the column 'real' is blank or missing": 1},
        "answer": {"the column 'ok' is blank or missing": 1},
    }
    assert done.summary["formulas"] == [
        "mos_quality = 0 + (1 - dmos) / (1 - 0) * (100 - 0); turned round, because a smaller dmos is better",
        "mos_realism = 1 + (real - -3) / (3 - -3) * (7 - 1)",
        "mos_naturalness = 0 + (3 - real) / (3 - -3) * (100 - 0); turned round, because a smaller mos_naturalness is "
        "better",
    ]
    names = [dimension.name for dimension in load_dimensions(tmp_path / "out" / "dimensions.yaml")]
    assert names == ["quality", "alignment", "preservation", "realism", "naturalness"]
    samples = read_manifest(
        tmp_path / "out" / "manifest.jsonl", dimensions=load_dimensions(tmp_path / "out" / "dimensions.yaml")
    )
    assert samples[0].mos == {"quality": 75.0, "realism": 5.5, "naturalness": 25.0}


@given(
    low=st.floats(-1e3, 1e3),
    span=st.floats(0.1, 1e3),
    share=st.floats(0, 1),
    better=st.booleans(),
    direction=st.booleans(),
)
def test_conversion_keeps_ends_order_and_direction(
    low: float, span: float, share: float, better: bool, direction: bool
) -> None:
    source = ScoreSource(column="x", low=low, high=low + span, higher_is_better=better)
    dimension = Dimension("d", "Rate.", 0, 100, higher_is_better=direction)
    ends = [source.convert(source.low, dimension), source.convert(source.high, dimension)]
    assert ends == pytest.approx([0, 100] if better == direction else [100, 0], abs=1e-9)
    expected = share if better == direction else 1 - share
    assert source.convert(low + share * span, dimension) == pytest.approx(100 * expected, abs=1e-6)


def test_bad_cells_are_listed_and_the_rest_goes_on(tmp_path: Path) -> None:
    mapping = SIMPLE + "constants: {question: 'Done?'}\nanswer: {column: ok}\n"
    row = {**ROW, "ok": "yes"}
    rows = [
        row,
        {**row, "id": "2", "stars": "6"},
        {**row, "id": "3", "stars": "4,5"},
        {**row, "id": "4", "stars": "n/a"},
        {**row, "id": "1"},
        {**row, "id": ""},
        {**row, "id": "7", "before": "/etc/passwd"},
        {**row, "id": "8", "after": "x/../../y.png"},
        {**row, "id": "9", "after": "C:\\x.png"},
        {**row, "id": "10", "after": "https://example.org/x.png"},
        {**row, "id": "11", "prompt": "a\0b"},
        {**row, "id": "12", "prompt": "x" * 20_000},
        {**row, "id": "13", "ok": "perhaps"},
        {**row, "id": "14", "after": "..\\x.png"},
    ]
    done = run(tmp_path, mapping, *rows, name="t.jsonl")
    table = tmp_path / "t.jsonl"
    below = "Give a path below the image root; strip_prefix in the mapping takes off a foreign beginning."
    assert [str(problem).removeprefix(f"{table}:") for problem in done.problems] == [
        "2: stars: expected a number from 1 to 5, got 6. Correct scores.quality.low and high in the mapping, or set "
        "its outside: keep.",
        "3: stars: expected a finite number, got '4,5'. Write it with a decimal point, or add the cell's text to "
        "missing in the mapping.",
        f"5: sample_id: expected an id of its own, got '1' again, first in {table}:1. Map another column, or a "
        "template of several, to sample_id.",
        "6: sample_id: expected a value, got a missing one. Fill it in, or remove the row.",
        f"7: source_image: expected a relative path, got the absolute path '/etc/passwd'. {below}",
        f"8: edited_image: expected a path below the image root, got one with '..': 'x/../../y.png'. {below}",
        f"9: edited_image: expected a relative path, got the absolute path 'C:\\\\x.png'. {below}",
        "10: edited_image: expected a path on this machine, got 'https://example.org/x.png'. Download the image, and "
        "give its path.",
        "11: instruction: expected a text without NUL bytes, got 'a\\x00b'. Remove them, or remove the row.",
        f"12: instruction: expected a text of at most 10000 characters, got 20000 characters, beginning '{'x' * 40}'. "
        "Check that the cell is the right one.",
        "13: ok: expected a value that means yes or no, got 'perhaps'. Add it to yes_values or no_values in the "
        "mapping, or to missing.",
        f"14: edited_image: expected a path below the image root, got one with '..': '..\\\\x.png'. {below}",
    ]
    assert [row["sample_id"] for row in written(tmp_path)] == ["1", "2", "3", "4", "13"]
    assert done.summary["rows_left_out"] == 9 and done.summary["rows"] == 14
    assert done.summary["missing_values"]["quality"] == {
        "the cell of 'stars' is bad (listed)": 2,
        "the column 'stars' is blank or missing": 1,
    }
    assert done.summary["missing_values"]["answer"] == {"the cell of 'ok' is bad (listed)": 1}
    assert len((tmp_path / "out" / "import_problems.jsonl").read_text().splitlines()) == 12


def test_a_foreign_beginning_of_paths_is_taken_off(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 40), "red" if name[0] == "a" else "blue").save(tmp_path / name)
    row = {**ROW, "before": "/data/x/a.png", "after": "/data/x/b.png"}
    run(tmp_path, SIMPLE + "strip_prefix: /data/x/\n", row)
    assert written(tmp_path)[0]["source_id"] == "a.png"
    assert check_manifest(tmp_path / "out" / "manifest.jsonl") == []


def test_scores_beyond_the_ends_can_be_kept(tmp_path: Path) -> None:
    done = run(tmp_path, SIMPLE.replace("high: 5", "high: 5, outside: keep"), {**ROW, "stars": "5.2"})
    assert written(tmp_path)[0]["mos_quality"] == 105.0
    assert done.summary["check"] == {"out_of_range": 1} and done.problems == []
    assert any("out_of_range 1" in note for note in done.notes)


def test_embedded_images_are_written_once_each(tmp_path: Path) -> None:
    def png(colour: str) -> bytes:
        data = io.BytesIO()
        Image.new("RGB", (40, 40), colour).save(data, "PNG")
        return data.getvalue()

    rows = [
        {**ROW, "id": str(number), "before": {"bytes": png("red"), "path": None}, "after": {"bytes": data, "path": "x"}}
        for number, data in enumerate((png("blue"), png("green"), b"no image"))
    ]
    done = run(tmp_path, SIMPLE, *rows, name="t.parquet")
    assert "expected the bytes of an image file, got 8 bytes of something else" in str(done.problems[0])
    assert done.summary["images_embedded"] == 3 and done.summary["samples"] == 2
    assert done.summary["sources"] == 1
    assert check_manifest(tmp_path / "out" / "manifest.jsonl") == []
    assert not any("Images are missing" in note for note in done.notes)


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    for name in "ab":
        Image.new("RGB", (40, 40), "red" if name == "a" else "blue").save(tmp_path / f"{name}.png")
    columns = {"n": [1], "prompt": ["Add"], "stars": [2], "before": [str(tmp_path / "a.png")]}
    table = datasets.Dataset.from_dict({**columns, "after": [str(tmp_path / "b.png")]})
    for name in ("before", "after"):
        table = table.cast_column(name, datasets.Image())
    table.save_to_disk(tmp_path / "table")
    (tmp_path / "mapping.yaml").write_text(SIMPLE.replace("sample_id: id, ", ""))
    done = import_table(tmp_path / "table", tmp_path / "mapping.yaml", tmp_path / "out")
    assert done.problems == [] and done.summary["images_embedded"] == 2
    assert written(tmp_path)[0]["sample_id"] == "table-1"
    assert check_manifest(tmp_path / "out" / "manifest.jsonl") == []
    assert any("The mapping has no sample_id" in note for note in done.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("columns:", "colums:"), "colums: unknown key. Did you mean 'columns'?"),
        (("instruction: prompt", "instrucion: prompt"), "columns: instrucion: expected a column of manifests"),
        (("instruction: prompt", "mos_quality: prompt"), "mos_quality: scores are mapped under scores, as quality."),
        (("instruction: prompt", "answer: prompt"), "answer: answers are mapped under answer"),
        ((", instruction: prompt", ""), "instruction: required, but missing. Fill each under columns"),
        (("high: 5", "high: 1"), "scores.quality: expected low < high, got low 1 and high 1."),
        (("high: 5", "hi: 5"), "scores.quality.hi: unknown key. Did you mean 'high'?"),
        (("high: 5", "high: true"), "scores.quality.high: expected a number, got true."),
        (("quality:", "realism:"), "scores.realism: expected a dimension, built-in or defined under dimensions."),
        (("column: stars, ", ""), "scores.quality.column: required, but missing."),
        (("scores:", "answer: {column: ok}\nscores:"), "answer: expected a question beside it."),
        (("scores:", "answer: {column: ok, no_values: [yes]}\nscores:"), "answer: expected every value on one side"),
        (
            ("scores:", "constants: {instruction: x}\nscores:"),
            "given more than once in columns, constants and template",
        ),
        (("scores:", "dimensions: [{name: r}]\nscores:"), "dimensions.0.question: required, but missing."),
        (
            ("scores:", "templates: {edit_task: '{a.b}'}\nscores:"),
            "expected the name of a column between braces, got {a",
        ),
        (("scores:", "templates: {edit_task: '{a[0]}'}\nscores:"), "got {a[0]}. A template takes no attributes"),
        (("scores:", "templates: {edit_task: '{a!r}'}\nscores:"), "got {a!r}. A template takes no attributes"),
        (("scores:", "templates: {edit_task: '{a:>9}'}\nscores:"), "got {a:>9}. A template takes no attributes"),
        (("scores:", "templates: {edit_task: '{}'}\nscores:"), "got {}. A template takes no attributes"),
        (("scores:", "templates: {edit_task: 'a}b{'}\nscores:"), "expected every brace closed, got 'a}b{'."),
        (("after, instruction", "after, source_image: x, instruction"), "the key 'source_image' stands twice"),
    ],
)
def test_mappings_that_are_wrong(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in SIMPLE
    (tmp_path / "mapping.yaml").write_text(SIMPLE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        load_mapping(tmp_path / "mapping.yaml")
    assert message in str(caught.value) and str(tmp_path / "mapping.yaml") in str(caught.value)


def test_a_mapping_that_would_not_fit_in_memory_if_it_were_shown(tmp_path: Path) -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "mapping.yaml").write_text("\n".join(["l0: &l0 [x]", *levels, "columns: *l11"]))
    with pytest.raises(ConfigError) as caught:
        load_mapping(tmp_path / "mapping.yaml")
    assert "  columns: expected keys and values, got [[[" in str(caught.value) and len(str(caught.value)) < 5_000


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_column_that_the_table_lacks(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, SIMPLE.replace("column: stars", "column: star"), ROW, name=name)
    assert str(caught.value) == (
        f"{tmp_path}/mapping.yaml: the mapping does not fit the table:\n  scores.quality.column: expected a column of "
        f"{tmp_path}/{name}, got 'star'. Did you mean 'stars'?"
    )
    assert sorted(os.listdir(tmp_path)) == sorted(["mapping.yaml", name])


def test_a_table_without_a_usable_row(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="expected at least one usable row, got none. The first problem: "):
        run(tmp_path, SIMPLE, {**ROW, "prompt": ""})


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lmm4edit.data.table_import.write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SIMPLE, ROW)
    assert sorted(os.listdir(tmp_path)) == ["mapping.yaml", "t.csv"]


def test_cells_are_text_whatever_they_hold() -> None:
    mapping = TableMapping.model_validate(
        {"columns": {"source_image": "a", "edited_image": "b", "instruction": "c"}, "missing": [0]}
    )
    values = {"x": "{y} {x.__class__}", "y": 3.0, "z": 0}
    assert fill("{x}/{y}/{{z}}", values, mapping).text == "{y} {x.__class__}/3/{z}"
    assert (fill("{z}", values, mapping).text, fill("{z}", values, mapping).missing) == (None, "z")
    assert QUALITY.name in [dimension.name for dimension in mapping.all_dimensions()]
