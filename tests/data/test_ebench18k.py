"""The import of EBench-18K: on a synthetic release everywhere, and on the real test files where they are."""

from __future__ import annotations

import csv
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lmm4edit.data.check import check_manifest, inspect_manifest
from lmm4edit.data.ebench18k import EDIT_TASKS, EDITING_MODELS, ReleaseRow, file_of_release, read_release_row
from lmm4edit.data.ebench18k_import import import_ebench18k
from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.minibench.tasks import TASKS
from lmm4edit.data.problems import Problem
from lmm4edit.data.rows import Row
from lmm4edit.errors import ManifestError
from tests.data.release import ROOT, images, line, query, score, write_images, write_lines, write_release

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "ebench18k"
TRAIN, TEST = [f"H_00_{n:02d}" for n in range(8)], ["H_00_20", "L_04_21"]


def manifest_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def parsed(values: dict[str, Any], kind: str = "e") -> ReleaseRow | Problem:
    return read_release_row(Row(3, values), "test_e.json", kind)  # type: ignore[arg-type]


@pytest.mark.skipif(not REAL.is_dir(), reason="the release's files are not here: NOT compared with the paper's Table 5")
def test_the_real_test_files_have_the_means_of_the_papers_table_5(tmp_path: Path) -> None:
    done = import_ebench18k(REAL, tmp_path / "out")
    samples = read_manifest(tmp_path / "out" / "test.jsonl")
    assert len(samples) == 3672
    assert len({sample.source_id for sample in samples}) == 216
    assert len({sample.sample_id for sample in samples}) == 3672
    assert {sample.editing_model for sample in samples} == set(EDITING_MODELS)
    assert done.problems == [] and done.summary["missing_values"] == {"test": {}}
    table = resources.files("lmm4edit") / "published" / "lmm4edit_table5_editing_models.csv"
    published = {row["editing_model"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert published.keys() == set(EDITING_MODELS)
    # 51.115 to four decimals: the paper rounds it down.
    roundings = {("PnP", "preservation")}
    for name, row in published.items():
        mine = [sample for sample in samples if sample.editing_model == name]
        assert len(mine) == 216
        for dimension in ("quality", "alignment", "preservation"):
            mean = sum(sample.mos[dimension] for sample in mine) / len(mine)
            limit = 0.0051 if (name, dimension) in roundings else 0.005
            assert mean == pytest.approx(float(row[f"{dimension}_human"]), abs=limit + 1e-9), (name, dimension)
    by_task = {task: len({s.source_id for s in samples if s.edit_task == task}) for task in EDIT_TASKS.values()}
    assert list(by_task.values()) == [8] * 13 + [14] * 8
    assert done.summary["answers"]["answers_follow_from_alignment"]
    assert done.summary["answers"]["majority_share"] == pytest.approx(0.5626, abs=5e-5)
    assert done.summary["labels_with_dropped_zeros"] == 358 + 495 + 340
    assert done.summary["rows_with_foreign_absolute_paths"] == 4 * 3672
    assert done.summary["splits"]["test"]["scores_outside_0_100"] == 0
    assert inspect_manifest(tmp_path / "out" / "test.jsonl", look_at_images=False).problems == []


def test_tasks_have_the_names_of_the_mini_benchmark() -> None:
    assert set(EDIT_TASKS.values()) == set(TASKS) and len(EDITING_MODELS) == 17


def test_a_release_of_train_and_test_without_images(tmp_path: Path) -> None:
    write_release(tmp_path / "release" / "data", {"train": TRAIN, "test": TEST})
    done = import_ebench18k(tmp_path / "release", tmp_path / "out", validation_fraction=0.25)
    rows = {name: manifest_rows(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "validation", "test")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 6 * 17, "validation": 2 * 17, "test": 2 * 17}
    sources = {name: {row["source_id"] for row in found} for name, found in rows.items()}
    assert sources["train"] | sources["validation"] == set(TRAIN) and sources["test"] == set(TEST)
    assert not sources["train"] & sources["validation"]
    assert rows["test"][1] == {
        "sample_id": "L_04_21-model00",
        "source_image": "sourceimg_l/model00/L_04_21.jpg",
        "edited_image": "targetimg_l/model00/L_04_21.jpg",
        "instruction": "Do task L_04 on L_04_21",
        "source_id": "L_04_21",
        "prompt_type": "description",
        "edit_task": "dehaze",
        "editing_model": "Text2LIVE",
        "mos_quality": score("v", "L_04_21", 0),
        "mos_alignment": score("e", "L_04_21", 0),
        "mos_preservation": score("c", "L_04_21", 0),
        "question": "Was the edit carried out?",
        "answer": "yes" if score("e", "L_04_21", 0) > 45 else "no",
        "split": "test",
        "group_level": "low",
    }
    assert done.problems == [] and not (tmp_path / "out" / "import_problems.jsonl").exists()
    assert any(note.startswith(f"Images are missing: 0 of {10 * 17 * 2} found.") for note in done.notes)
    assert any("Recurring photographs were not looked for (the images are not here)" in note for note in done.notes)
    assert done.summary["made_here"] == ["validation: 0.25 of the training sources within each task, seed 0"]
    for name in rows:
        assert inspect_manifest(tmp_path / "out" / f"{name}.jsonl", look_at_images=False).problems == []
    (problem,) = check_manifest(tmp_path / "out" / "train.jsonl")
    assert str(problem).startswith(
        f"{tmp_path}/out/train.jsonl: source_image, edited_image: expected the 204 images it"
    )
    assert str(problem).endswith("To check the rest without images: --no-images.")


def test_the_summary_says_where_it_comes_from(tmp_path: Path) -> None:
    write_release(tmp_path / "release", {"test": TEST}, models=2)
    import_ebench18k(tmp_path / "release", tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "import_summary.json").read_text())
    assert set(summary["provenance"]["inputs"]) == {"test_v.json", "test_e.json", "test_c.json", "test_yn.json"}
    assert set(summary["provenance"]["outputs"]) == {"test.jsonl"}
    assert {"lmm4edit", "packages", "time", "python"} <= set(summary["provenance"])
    assert summary["splits"]["test"]["samples"] == 4
    assert summary["caveats"][0] == "The release's folder has no train files: that part is not imported."
    assert str(tmp_path) not in json.dumps({k: v for k, v in summary.items() if k not in ("provenance", "caveats")})


def test_with_images_and_a_photograph_that_recurs(tmp_path: Path) -> None:
    sources = [*TRAIN, *TEST]
    write_release(tmp_path / "release", {"train": TRAIN, "test": TEST}, models=2)
    write_images(tmp_path / "photos", sources, models=2, same=("H_00_03", "L_04_21"))
    done = import_ebench18k(tmp_path / "release", tmp_path / "out", image_root=tmp_path / "photos")
    assert check_manifest(tmp_path / "out" / "train.jsonl") == []
    assert check_manifest(tmp_path / "out" / "test.jsonl") == []
    assert done.summary["images"] == {"expected": 40, "found": 40, "missing_by_folder": {}}
    assert done.summary["recurring_photographs"]["groups"] == [["H_00_03", "L_04_21"]]
    assert done.summary["leaks"] == [
        {"kind": "photograph", "sources": ("H_00_03", "L_04_21"), "splits": ("test", "train")}
    ]
    (tmp_path / "photos" / "targetimg_h" / "model01" / "H_00_20.jpg").unlink()
    again = import_ebench18k(tmp_path / "release", tmp_path / "out", image_root=tmp_path / "photos", overwrite=True)
    assert any("1 of 40 images are missing (targetimg_h 1)" in note for note in again.notes)


def test_images_are_found_in_the_releases_folder(tmp_path: Path) -> None:
    write_release(tmp_path / "release", {"test": TEST}, models=1)
    write_images(tmp_path / "release", TEST, models=1)
    import_ebench18k(tmp_path / "release", tmp_path / "out")
    assert check_manifest(tmp_path / "out" / "test.jsonl") == []


def test_an_image_root_without_images(tmp_path: Path) -> None:
    write_release(tmp_path / "release", {"test": TEST}, models=1)
    with pytest.raises(ManifestError, match="expected the folder that holds sourceimg_h/"):
        import_ebench18k(tmp_path / "release", tmp_path / "out", image_root=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_release_in_one_piece_is_split_four_to_one(tmp_path: Path) -> None:
    sources = [f"{task}_{n:02d}" for task in ("H_00", "H_05", "L_07") for n in range(10)]
    write_release(tmp_path / "release", {"": sources}, models=2)
    done = import_ebench18k(tmp_path / "release", tmp_path / "out")
    rows = manifest_rows(tmp_path / "out" / "test.jsonl")
    assert sorted(row["source_id"][:4] for row in rows) == sorted(["H_00", "H_05", "L_07"] * 2 * 2)
    assert done.summary["splits"]["train"]["sources"] == 24
    assert {row["split"] for row in rows} == {"test"}


def test_bad_rows_are_listed_and_the_rest_goes_on(tmp_path: Path) -> None:
    release = tmp_path / "release"
    write_release(release, {"test": TEST}, models=2)
    good = [json.loads(text) for text in (release / "test_e.json").read_text().splitlines()]
    swapped = {**good[1], "images": good[1]["images"][::-1]}
    bad = [
        good[0],
        swapped,
        {**good[2], "response": "The quality score is high"},
        '{"query": "With the',
        {**good[0], "response": "The quality score is 1"},
        {**good[3], "query": query("e", "Do something else")},
        {**good[3], "images": images("H_13_00", 0)},
        {**good[3], "images": images("H_00_00", 17)},
        {**good[3], "images": [images("H_00_00", 0)[0], images("H_00_01", 0)[1]]},
        {**good[3], "images": None},
        {"response": "x"},
    ]
    write_lines(release / "test_e.json", bad)
    done = import_ebench18k(release, tmp_path / "out")
    told = [str(problem) for problem in done.problems]
    starts = [
        "test_e.json:2: images: expected .../sourceimg_{h|l}/modelNN/{H|L}_TASK_INDEX.jpg, got '/mnt/disk7/",
        "test_e.json:3: response: expected 'The quality score is XX.XX', got 'The quality score is high'.",
        'test_e.json:4: expected one JSON object on the line, got \'{"query": "With the\': Unterminated string',
        "test_e.json:5: images: expected an edit of its own, got H_00_20-model00 again, first in test_e.json:1.",
        "test_e.json:6: query: expected the instruction of test_v.json:4, 'Do task L_04 on L_04_21', got 'Do somet",
        "test_e.json:7: images: expected a task H_00 to H_12 or L_00 to L_07, got H_13.",
        "test_e.json:8: images: expected a model from model00 to model16, got model17.",
        "test_e.json:9: images: expected two images of one edit, got ",
        "test_e.json:10: images: expected two paths, the source's and the edited image's, got None.",
        "test_e.json:11: query: expected a text, got nothing.",
    ]
    assert [text[: len(start)] for text, start in zip(told, starts, strict=True)] == starts
    listed = manifest_rows(tmp_path / "out" / "import_problems.jsonl")
    assert [row["message"] for row in listed] == told and done.summary["bad_rows"] == 10
    samples = read_manifest(tmp_path / "out" / "test.jsonl")
    assert [("alignment" in sample.mos) for sample in samples] == [True, False, False, False]
    reason = "no usable row in test_e.json (its bad rows are listed)"
    assert done.summary["missing_values"] == {"test": {"alignment": {reason: 3}}}


def test_files_that_are_not_there_and_a_source_in_both_splits(tmp_path: Path) -> None:
    write_release(tmp_path / "release", {"train": TRAIN, "test": [TRAIN[0]]}, models=1)
    (tmp_path / "release" / "test_yn.json").unlink()
    done = import_ebench18k(tmp_path / "release", tmp_path / "out")
    assert done.summary["missing_values"]["test"] == {"answer": {"the release's folder has no file for it": 1}}
    assert done.summary["leaks"] == [{"kind": "source", "sources": ("H_00_00",), "splits": ("test", "train")}]
    assert "Sources that stand in more than one split: 1, first H_00_00." in done.notes
    assert "question" not in manifest_rows(tmp_path / "out" / "test.jsonl")[0]


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("Paint [OPEN] on the door", "Paint [OPEN] on the door"),
        ("  Add  two   ducks ", "Add  two   ducks"),
        ("Add a ] to the wall", "Add a ] to the wall"),
    ],
)
def test_instructions_in_brackets(text: str, instruction: str) -> None:
    row = parsed(line("e", "H_00_04", 0, 5, text))
    assert isinstance(row, ReleaseRow) and row.instruction == instruction


def test_another_wording_after_the_instruction() -> None:
    row = parsed({**line("e", "H_00_04", 0, 5), "query": "Prompt: [Add [2] cats]. Rate [0-100]"})
    assert isinstance(row, ReleaseRow) and row.instruction == "Add [2] cats"


@pytest.mark.parametrize("text", ["no brackets", "[], the source image", "[never closed", "[ ] x", "[a\0b], the"])
def test_no_instruction(text: str) -> None:
    problem = parsed({**line("e", "H_00_04", 0, 5), "query": text})
    assert isinstance(problem, Problem) and problem.field == "query"


@pytest.mark.parametrize(
    ("response", "value", "dropped"),
    [
        ("The quality score is 42.3", 42.3, True),
        ("The quality score is 42.30", 42.3, False),
        ("The quality score is 0", 0.0, True),
        ("the quality score is 100.00.", 100.0, False),
        ("-3.25", -3.25, False),
        (17.5, 17.5, True),
    ],
)
def test_labels(response: object, value: float, dropped: bool) -> None:
    row = parsed({**line("e", "H_00_04", 0, 5), "response": response})
    assert isinstance(row, ReleaseRow) and (row.value, row.dropped_zeros) == (value, dropped)


@pytest.mark.parametrize(
    "response", ["", "nan", "The quality score is", "score is 4,5", "4 / 5", True, None, ["5"], "1e5"]
)
def test_labels_that_are_none(response: object) -> None:
    problem = parsed({**line("e", "H_00_04", 0, 5), "response": response})
    assert isinstance(problem, Problem) and problem.field == "response"


def test_answers() -> None:
    for response, value in (("Yes", "yes"), ("no.", "no"), ("[No]", "no")):
        row = parsed(line("yn", "H_00_04", 0, response), "yn")
        assert isinstance(row, ReleaseRow) and (row.value, row.question) == (value, "Was the edit carried out?")
    problem = parsed(line("yn", "H_00_04", 0, "Maybe"), "yn")
    assert (
        str(problem) == "test_e.json:3: response: expected 'Yes' or 'No', got 'Maybe'. Repair the line, or remove it."
    )


@pytest.mark.parametrize("root", [ROOT, "C:\\data\\all", "", "../../..", "/etc/../x"])
def test_paths_cannot_lead_out_of_the_image_root(root: str) -> None:
    row = parsed({**line("e", "H_00_04", 0, 5), "images": [path.lstrip("/") for path in images("H_00_04", 0, root)]})
    assert isinstance(row, ReleaseRow) and row.edited_path == "targetimg_h/model00/H_00_04.jpg"


@pytest.mark.parametrize("path", ["targetimg_h/model00/../../x/H_00_04.jpg", "targetimg_h/model00/H_00_04.jpg\0", "x"])
def test_paths_of_another_form(path: str) -> None:
    problem = parsed({**line("e", "H_00_04", 0, 5), "images": [images("H_00_04", 0)[0], path]})
    assert isinstance(problem, Problem) and problem.field == "images"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("train_v.json", ("train", "v")),
        ("test_yn.jsonl", ("test", "yn")),
        ("val_c.json", ("validation", "c")),
        ("e.json", ("all", "e")),
        ("dev_e.json", None),
        ("test_x.json", None),
        ("import_summary.json", None),
    ],
)
def test_names_of_files(name: str, found: tuple[str, str] | None) -> None:
    assert file_of_release(name) == found


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda f: None, "expected the release's annotation files"),
        (
            lambda f: write_release(f, {"": ["H_00_01"], "test": ["H_00_02"]}, 1),
            "got both: c.json, e.json, test_c.json, ",
        ),
        (
            lambda f: write_lines(f / "test_v.json", ["{}"]),
            "expected at least one usable row, got none. The first problem",
        ),
        (
            lambda f: [write_lines(f / name, []) for name in ("test_v.json", "test_v.jsonl")],
            "expected one file for test v, got test_v.json and test_v.jsonl",
        ),
    ],
)
def test_folders_that_are_no_release(tmp_path: Path, prepare: Any, message: str) -> None:
    (tmp_path / "release").mkdir()
    prepare(tmp_path / "release")
    with pytest.raises(ManifestError) as caught:
        import_ebench18k(tmp_path / "release", tmp_path / "out")
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_a_finished_import_is_not_overwritten_unasked(tmp_path: Path) -> None:
    write_release(tmp_path / "release", {"test": TEST}, models=1)
    import_ebench18k(tmp_path / "release", tmp_path / "out")
    before = (tmp_path / "out" / "test.jsonl").read_bytes()
    with pytest.raises(ManifestError, match="or --overwrite to replace such files"):
        import_ebench18k(tmp_path / "release", tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("kept")
    import_ebench18k(tmp_path / "release", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "test.jsonl").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "import_summary.json",
        "mine.txt",
        "test.jsonl",
    ]
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
