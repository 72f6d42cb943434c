"""Manifests: what is read, what is refused, and that writing and reading give the same samples back."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from lmm4edit.data.images import decode_image
from lmm4edit.data.manifest import iter_manifest, read_manifest, read_manifest_rows, write_manifest
from lmm4edit.errors import ManifestError
from lmm4edit.records import QUALITY, Dimension, EditSample

ROW = {"sample_id": "1", "source_image": "s/a.png", "edited_image": "e/a.png", "instruction": "remove the hat"}
FULL = {
    **ROW,
    "source_id": "a",
    "source_description": "a man with a hat",
    "target_description": "a man",
    "prompt_type": "Instruction",
    "edit_task": "remove",
    "editing_model": "IP2P",
    "mos_quality": 54.7,
    "mos_alignment": 0,
    "mos_preservation": "9.31",
    "question": "Is the hat gone?",
    "answer": "YES",
    "split": "test",
    "group_content": "photo",
    "group_level": 2,
}


def jsonl(tmp_path: Path, *rows: dict[str, object], name: str = "m.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def message_of(path: Path, **options: object) -> str:
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


# --- what is read -------------------------------------------------------------------------------------------------


def test_all_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path, FULL)
    assert read_manifest(path) == [
        EditSample(
            sample_id="1",
            source_id="a",
            source_image=str(tmp_path / "s/a.png"),
            edited_image=str(tmp_path / "e/a.png"),
            instruction="remove the hat",
            source_description="a man with a hat",
            target_description="a man",
            prompt_type="instruction",
            edit_task="remove",
            editing_model="IP2P",
            mos={"quality": 54.7, "alignment": 0.0, "preservation": 9.31},
            question="Is the hat gone?",
            answer="yes",
            groups={"content": "photo", "level": "2", "split": "test"},
            location=f"{path}:1",
        )
    ]


def test_required_columns_alone(tmp_path: Path) -> None:
    (sample,) = read_manifest(jsonl(tmp_path, ROW))
    assert sample.source_id == "s/a.png", "the source image as it is written"
    assert (sample.mos, sample.groups, sample.question, sample.answer) == ({}, {}, None, None)


@pytest.mark.parametrize("empty", [None, "", "  "])
def test_empty_cells_are_missing_values(tmp_path: Path, empty: object) -> None:
    optional = {name: empty for name in FULL if name not in ROW}
    (sample,) = read_manifest(jsonl(tmp_path, {**ROW, **optional}))
    assert sample == read_manifest(jsonl(tmp_path, ROW))[0]


def test_relative_paths_belong_to_the_manifest_or_the_image_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path, {**ROW, "source_image": "/abs/a.png", "edited_image": "../b.png"})
    (sample,) = read_manifest(path)
    assert (sample.source_image, sample.edited_image) == ("/abs/a.png", f"{tmp_path}/../b.png")
    (sample,) = read_manifest(path, image_root="/images")
    assert (sample.source_image, sample.edited_image) == ("/abs/a.png", "/images/../b.png")
    monkeypatch.chdir(tmp_path)
    (sample,) = read_manifest("m.jsonl")
    assert sample.edited_image == f"{tmp_path}/../b.png", "absolute, so that a later change of folder does not matter"


def test_dimensions_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    (sample,) = read_manifest(jsonl(tmp_path, FULL), dimensions=[QUALITY])
    assert sample.mos == {"quality": 54.7}


def test_dimensions_of_the_user(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {**ROW, "mos_realism": 3.5})
    realism = Dimension("realism", "How real?", 1, 5)
    assert read_manifest(path, dimensions=[realism])[0].mos == {"realism": 3.5}
    assert message_of(path) == (
        f"{path}:1: mos_realism: expected a known column, got 'mos_realism' in 1 row. "
        "For ratings of a dimension of your own, pass that dimension; otherwise remove the column."
    )


def test_scores_outside_the_range_are_read(tmp_path: Path) -> None:
    """Eq. 1 of the paper leaves 0-100 where |z| > 3; `lmm4edit data check` reports it."""
    assert read_manifest(jsonl(tmp_path, {**ROW, "mos_quality": 101.3}))[0].mos == {"quality": 101.3}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("45.5", 45.5),
        ("9.31", 9.31),
        ("100.00", 100.0),
        ("0.00", 0.0),
        (" 7 ", 7.0),
        ("1e1", 10.0),
        (".5", 0.5),
        (3, 3.0),
    ],
)
def test_numbers(tmp_path: Path, written: object, read: float) -> None:
    assert read_manifest(jsonl(tmp_path, {**ROW, "mos_quality": written}))[0].mos["quality"] == read


def test_whole_numbers_as_ids_in_every_format(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {**ROW, "sample_id": 17, "source_id": 3, "mos_quality": Decimal("5.5")}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "m.parquet")
    (tmp_path / "m.csv").write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    jsonl(tmp_path, {**row, "mos_quality": 5.5})
    for name in ("m.parquet", "m.csv", "m.jsonl"):
        (sample,) = read_manifest(tmp_path / name)
        assert (sample.sample_id, sample.source_id, sample.mos) == ("17", "3", {"quality": 5.5})


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    plain = read_manifest(jsonl(tmp_path, FULL))
    for name in ("m.jsonl", "m.csv"):
        write_manifest(tmp_path / name, plain, relative_to=tmp_path)
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + data)
        assert [without_location(sample) for sample in read_manifest(tmp_path / name)] == [
            without_location(sample) for sample in plain
        ]


def test_raw_rows_carry_their_lines(tmp_path: Path) -> None:
    rows = list(read_manifest_rows(jsonl(tmp_path, ROW, FULL)))
    assert [(row.number, row.values["sample_id"]) for row in rows] == [(1, "1"), (2, "1")]


def test_locations(tmp_path: Path) -> None:
    samples = [sample(f"{number}") for number in range(2)]
    for name, expected in (("m.jsonl", "m.jsonl:2"), ("m.csv", "m.csv:3"), ("m.parquet", "m.parquet, row 2")):
        write_manifest(tmp_path / name, samples)
        assert read_manifest(tmp_path / name)[1].location == f"{tmp_path}/{expected}"


def test_a_datasets_folder_with_embedded_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (1, 2, 3)).save(buffer, "PNG")
    (tmp_path / "on_disk.png").write_bytes(buffer.getvalue())
    features = datasets.Features(
        {
            **{name: datasets.Value("string") for name in ("sample_id", "instruction", "source_id")},
            **{name: datasets.Image() for name in ("source_image", "edited_image")},
        }
    )
    embedded, on_disk = (
        {"bytes": buffer.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "on_disk.png")},
    )
    row = {"sample_id": "1", "instruction": "x", "source_id": "a", "source_image": embedded, "edited_image": on_disk}
    datasets.Dataset.from_list([row], features=features).save_to_disk(tmp_path / "folder")
    (read,) = read_manifest(tmp_path / "folder")
    assert read.source_image == f"data:;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    assert decode_image(read.source_image).getpixel((0, 0)) == (1, 2, 3)
    assert decode_image(read.edited_image).size == (8, 6)
    assert read.location == f"{tmp_path}/folder, row 1"
    write_manifest(tmp_path / "again.jsonl", [read])
    assert read_manifest(tmp_path / "again.jsonl")[0].source_image == read.source_image


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction": " "}, "instruction: expected a value, got ' '. Fill it in, or remove the row."),
        ({"instruction": None}, "instruction: expected a value, got None. Fill it in, or remove the row."),
        ({"instruction": 5}, "instruction: expected text, got int 5. Write it as text, in quotes."),
        ({"sample_id": 5.0}, "sample_id: expected text or a whole number, got float 5.0. Write it as text."),
        ({"sample_id": True}, "sample_id: expected text or a whole number, got bool True. Write it as text."),
        ({"source_image": 7}, "source_image: expected a path, got int 7. Write the path as text."),
        (
            {"edited_image": "https://example.org/a.png"},
            "edited_image: expected a path on this machine, got 'https://example.org/a.png'. "
            "Download the image, and give its path.",
        ),
        (
            {"mos_quality": "54,7"},
            "mos_quality: expected a finite number, got '54,7'. "
            "Write it with a decimal point, or leave the cell empty if there is no score.",
        ),
        (
            {"mos_quality": float("nan")},
            "mos_quality: expected a finite number, got nan. "
            "Write it with a decimal point, or leave the cell empty if there is no score.",
        ),
        (
            {"mos_quality": "1_000"},
            "mos_quality: expected a finite number, got '1_000'. "
            "Write it with a decimal point, or leave the cell empty if there is no score.",
        ),
        (
            {"mos_quality": True},
            "mos_quality: expected a finite number, got True. "
            "Write it with a decimal point, or leave the cell empty if there is no score.",
        ),
        (
            {"question": "Gone?", "answer": "yes."},
            "answer: expected 'yes' or 'no', got 'yes.'. Write one of them, or leave the cell empty.",
        ),
        (
            {"question": "Gone?", "answer": True},
            "answer: expected 'yes' or 'no', got True. Write one of them, or leave the cell empty.",
        ),
        (
            {"prompt_type": "descriptions"},
            "prompt_type: expected 'instruction' or 'description', got 'descriptions'. "
            "Write one of them, or leave the cell empty.",
        ),
        (
            {"answer": "no"},
            "question: expected the question that the answer belongs to, got nothing. "
            "Give it, or leave out the answer.",
        ),
        (
            {"mos_qualty": 5},
            "mos_qualty: expected a known column, got 'mos_qualty' in 1 row. Did you mean 'mos_quality'? "
            "For ratings of a dimension of your own, pass that dimension; otherwise remove the column.",
        ),
        (
            {"instructions": "x"},
            "instructions: expected a known column, got 'instructions' in 1 row. Did you mean 'instruction'? "
            "To keep it as a label, call it group_<name>; otherwise remove it.",
        ),
        (
            {"zzz": 5},
            "zzz: expected a known column, got 'zzz' in 1 row. "
            "To keep it as a label, call it group_<name>; otherwise remove it.",
        ),
        (
            {"group_split": "test"},
            "group_split: expected a known column, got 'group_split' in 1 row. Did you mean 'split'? "
            "To keep it as a label, call it group_<name>; otherwise remove it.",
        ),
        ({"group_x": [1]}, "group_x: expected text or a whole number, got list [1]. Write it as text."),
    ],
)
def test_bad_cells(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = jsonl(tmp_path, {**ROW, "sample_id": "0"}, {**ROW, **changes})
    assert message_of(path) == f"{path}:2: {message}"
    with pytest.raises(ManifestError) as caught:
        list(iter_manifest(path))
    assert str(caught.value) == f"{path}:2: {message}"


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROW, {**ROW, "sample_id": "2"}, ROW)
    assert message_of(path) == (
        f"{path}:3: sample_id: expected an id of its own, got '1' again, first in {path}:1. "
        "Rename or remove one of the rows."
    )


def test_all_problems_come_at_once_and_the_error_carries_them(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *({**ROW, "sample_id": str(number), "instruction": ""} for number in range(7)))
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    first = [
        f"  {path}:{line}: instruction: expected a value, got ''. Fill it in, or remove the row."
        for line in range(1, 6)
    ]
    assert str(caught.value).splitlines() == [
        f"{path}: 7 problems:",
        *first,
        f"  and 2 more: `lmm4edit data check {path}` lists all.",
    ]
    assert [problem.line for problem in caught.value.problems] == list(range(1, 8))


def test_an_empty_manifest(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    expected = (
        f"{path}: expected at least one usable row, got none. "
        "Check that the file is the right one and was written to its end."
    )
    assert message_of(path) == expected
    with pytest.raises(ManifestError) as caught:
        list(iter_manifest(path))
    assert str(caught.value) == expected


def test_skipping_is_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROW, {**ROW, "sample_id": "2", "instruction": "", "mos_quality": "x"})
    found: list = []
    assert [s.sample_id for s in read_manifest(path, on_error="skip", problems=found)] == ["1"]
    assert [(problem.line, problem.kind) for problem in found] == [(2, "missing_value"), (2, "not_a_number")]
    with pytest.warns(UserWarning) as caught:
        read_manifest(path, on_error="skip")
    assert str(caught[0].message) == (
        f"{path}: 1 row skipped; the first: {path}:2: instruction: expected a value, got ''. "
        "Fill it in, or remove the row."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_manifest(jsonl(tmp_path, ROW), on_error="skip")) == 1


def test_skipping_never_skips_a_column_or_everything(tmp_path: Path) -> None:
    unknown = jsonl(tmp_path, {**ROW, "mos_qualty": 5})
    assert "Did you mean 'mos_quality'?" in message_of(unknown, on_error="skip")
    nothing_left = jsonl(tmp_path, {**ROW, "instruction": ""})
    assert "expected at least one usable row, got none" in message_of(nothing_left, on_error="skip")


# --- writing and reading -------------------------------------------------------------------------------------------


def sample(sample_id: str, **changes: object) -> EditSample:
    return EditSample(sample_id, "s", "/images/a.png", f"/images/{sample_id}.png", "do it", **changes)  # type: ignore[arg-type]


def without_location(of: EditSample) -> EditSample:
    return replace(of, location=None)


def resolved(of: EditSample) -> EditSample:
    paths = {name: os.path.normpath(getattr(of, name)) for name in ("source_image", "edited_image")}
    return replace(of, **paths)


def test_paths_are_written_relative_or_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = EditSample("1", "s", str(tmp_path / "images" / "a.png"), "images/b.png", "do it")
    write_manifest("data/m.jsonl", [here], relative_to="data")
    row = json.loads(Path("data/m.jsonl").read_text())
    assert (row["source_image"], row["edited_image"]) == ("../images/a.png", "../images/b.png")
    write_manifest("data/m.jsonl", [here])
    row = json.loads(Path("data/m.jsonl").read_text())
    assert (row["source_image"], row["edited_image"]) == (f"{tmp_path}/images/a.png", f"{tmp_path}/images/b.png")


def test_columns_of_a_written_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path / "m.csv", read_manifest(jsonl(tmp_path, FULL)), relative_to=tmp_path)
    with (tmp_path / "m.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {
        **{name: str(value) for name, value in FULL.items()},
        "prompt_type": "instruction",
        "answer": "yes",
        "mos_alignment": "0.0",
    }
    write_manifest(tmp_path / "small.csv", [sample("1")])
    assert (tmp_path / "small.csv").read_text().splitlines()[0] == (
        "sample_id,source_image,edited_image,instruction,source_id"
    )


def test_a_score_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        write_manifest(tmp_path / "m.jsonl", [sample("1", mos={"quality": float("nan")})])
    assert str(caught.value) == "Sample '1': expected a finite mos_quality, got nan. Leave it out."


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda text: text.strip())
names = texts.filter(lambda text: not text.startswith("data:") and "://" not in text and "\0" not in text)
paths = names.map(lambda name: f"/images/{name.replace('/', '_').strip('.') or 'x'}").filter(
    lambda path: path.strip() == path
)
scores = st.floats(-1e9, 1e9)
labels = st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), texts, max_size=2)


@st.composite
def samples(draw: st.DrawFn) -> EditSample:
    question = draw(st.none() | texts)
    return EditSample(
        sample_id=draw(texts),
        source_id=draw(texts),
        source_image=draw(paths),
        edited_image=draw(paths),
        instruction=draw(texts),
        source_description=draw(st.none() | texts),
        target_description=draw(st.none() | texts),
        prompt_type=draw(st.sampled_from([None, "instruction", "description"])),
        edit_task=draw(st.none() | texts),
        editing_model=draw(st.none() | texts),
        mos=draw(st.dictionaries(st.sampled_from(["quality", "alignment", "preservation"]), scores)),
        question=question,
        answer=draw(st.sampled_from([None, "yes", "no"])) if question else None,
        groups=draw(labels),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.lists(samples(), min_size=1, max_size=4, unique_by=lambda s: s.sample_id))
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("relative", [True, False])
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str, relative: bool, written: list[EditSample]) -> None:
    path = tmp_path / f"m{suffix}"
    write_manifest(path, written, relative_to=tmp_path if relative else None)
    read = read_manifest(path)
    if relative:
        assert all(f"{tmp_path}/.." in sample.source_image for sample in read)
    assert [without_location(resolved(sample)) for sample in read] == [resolved(sample) for sample in written]
    assert list(iter_manifest(path)) == read


def test_reading_manifests_loads_no_torch() -> None:
    code = "import sys; import lmm4edit.data.manifest, lmm4edit.data.check; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_image": {}}, "source_image: expected an image, got an empty one"),
        ({"source_image": {"bytes": None, "path": None}}, "source_image: expected an image, got an empty one"),
        ({"edited_image": {"bytes": "abc"}}, "edited_image: expected the bytes of an image file, got str 'abc'"),
        ({"edited_image": {"bytes": 7}}, "edited_image: expected the bytes of an image file, got int 7"),
        ({"instruction": "cut \ud83d"}, "instruction: expected whole characters, got half of one, \\ud83d"),
        ({"sample_id": "cut \ud83d"}, "sample_id: expected whole characters, got half of one, \\ud83d"),
        ({"mos_quality": 1e308}, "mos_quality: expected a number between -1,000,000,000 and 1,000,000,000"),
    ],
)
def test_values_that_would_crash_later_are_reported_here(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({**ROW, **changes}) + "\n" + json.dumps({**ROW, "sample_id": "2"}) + "\n")
    with pytest.raises(ManifestError) as error:
        read_manifest(path)
    assert message in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [sample.sample_id for sample in read_manifest(path, on_error="skip")] == ["2"]


def test_an_image_of_any_length_fits_in_a_csv_cell(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    content = "data:;base64," + "A" * 400_000
    path.write_text(f'sample_id,source_image,edited_image,instruction\n1,"{content}",b.png,do it\n')
    assert read_manifest(path)[0].source_image == content


def test_empty_columns_at_the_end_of_a_spreadsheet_are_none(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("sample_id,source_image,edited_image,instruction,,\n1,a.png,b.png,do it,,\n2,a.png,c.png,do it\n")
    assert [sample.sample_id for sample in read_manifest(path)] == ["1", "2"]
    path.write_text("sample_id,source_image,edited_image,instruction,,\n1,a.png,b.png,do it,,left over\n")
    with pytest.raises(ManifestError, match="expected 4 cells as in the header"):
        read_manifest(path)


def test_a_parquet_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [*ROW, "instruction"]
    arrays = [pa.array([str(ROW.get(name))]) for name in names]
    pq.write_table(pa.Table.from_arrays(arrays, names=names), tmp_path / "m.parquet")
    with pytest.raises(ManifestError, match="expected each column once, got 'instruction' twice"):
        read_manifest(tmp_path / "m.parquet")


@pytest.mark.parametrize("content", ["[1]", "{", "{}", '{"splits": 3}'])
def test_a_damaged_folder_of_splits_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(ManifestError, match="one whose dataset_dict.json cannot be read"):
        read_manifest(tmp_path)


def test_a_pipe_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.jsonl")
    with pytest.raises(ManifestError, match="expected a file or folder, got a pipe or device"):
        read_manifest(tmp_path / "m.jsonl")
