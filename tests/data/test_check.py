"""`lmm4edit data check`'s findings: each problem with its whole text, and all of them at once."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from lmm4edit.data.check import check_manifest, inspect_manifest
from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import ManifestError
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

PHOTOS = Path(__file__).parents[2].parent / "shared" / "data" / "photos"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("a", "red"), ("b", "blue"), ("c", "green")):
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{name}.png")
    return tmp_path


def row(number: str, **changes: object) -> dict[str, object]:
    images = {"source_image": "a.png", "edited_image": "b.png"}
    return {"sample_id": number, **images, "instruction": f"instruction {number}", **changes}


def manifest(folder: Path, *rows: dict[str, object], prefix: bytes = b"") -> Path:
    path = folder / "m.jsonl"
    path.write_bytes(prefix + b"".join(json.dumps(values).encode() + b"\n" for values in rows))
    return path


def found(path: Path, **options: object) -> list[str]:
    return [str(problem) for problem in check_manifest(path, **options)]  # type: ignore[arg-type]


def test_a_good_manifest_has_no_problems(folder: Path) -> None:
    scores = {"mos_quality": 0, "mos_alignment": 100.0}
    path = manifest(folder, row("1", **scores), row("2", edited_image="c.png", question="Gone?", answer="no"))
    report = inspect_manifest(path)
    assert report.problems == []
    assert (report.n_rows, report.n_samples, report.n_sources, report.n_images) == (2, 2, 1, 3)
    assert report.n_mos == {"quality": 1, "alignment": 1, "preservation": 0}
    assert report.n_answers == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mos_quality": 100.01},
            "mos_quality: expected a number from 0 to 100, got 100.01. "
            "Bring the scores to that scale, or state the dimension with the range they have.",
        ),
        (
            {"mos_alignment": -1},
            "mos_alignment: expected a number from 0 to 100, got -1. "
            "Bring the scores to that scale, or state the dimension with the range they have.",
        ),
        (
            {"mos_quality": "good"},
            "mos_quality: expected a finite number, got 'good'. "
            "Write it with a decimal point, or leave the cell empty if there is no score.",
        ),
        (
            {"edited_image": "./a.png"},
            "edited_image: expected another image than the source, got '{folder}/a.png'. Give the path of the edit; "
            "if the editor changed nothing, save its output as a file of its own.",
        ),
        (
            {"edited_image": "gone/x.png"},
            "edited_image: expected an image file, got nothing at '{folder}/gone/x.png'. "
            "Check the path, or pass the folder that it is relative to as --image-root.",
        ),
        (
            {"edited_image": "B.png"},
            "edited_image: expected an image file, got nothing at '{folder}/B.png'. Did you mean 'b.png'?",
        ),
        (
            {"edited_image": "images\\b.png"},
            "edited_image: expected an image file, got nothing at '{folder}/images\\\\b.png'. "
            "Write the path with / instead of \\.",
        ),
        (
            {"edited_image": "/disk/of/the/authors/x.png"},
            "edited_image: expected an image file, got nothing at '/disk/of/the/authors/x.png'. "
            "The path is absolute: make it relative and pass --image-root, or write where the image lies here.",
        ),
        ({"instruction": ""}, "instruction: expected a value, got ''. Fill it in, or remove the row."),
        (
            {"answer": "maybe", "question": "Gone?"},
            "answer: expected 'yes' or 'no', got 'maybe'. Write one of them, or leave the cell empty.",
        ),
    ],
)
def test_one_problem_of_a_row(folder: Path, changes: dict[str, object], message: str) -> None:
    path = manifest(folder, row("1"), row("2", **changes))
    assert found(path) == [f"{path}:2: {message.replace('{folder}', str(folder))}"]
    decoded_or_not = found(path, decode_images=False)
    assert decoded_or_not == found(path)


def test_a_missing_absolute_path_with_an_image_root(folder: Path) -> None:
    path = manifest(folder, row("1", edited_image="/elsewhere/x.png"))
    assert found(path, image_root=folder) == [
        f"{path}:1: edited_image: expected an image file, got nothing at '/elsewhere/x.png'. "
        "The path is absolute, so --image-root does not apply to it: make it relative."
    ]


def test_the_same_name_in_another_unicode_form_is_found(folder: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Schön.png") for form in ("NFC", "NFD"))
    Image.new("RGB", (64, 64)).save(folder / decomposed)
    (message,) = found(manifest(folder, row("1", edited_image=composed)))
    assert message.endswith(f"got nothing at '{folder}/{composed}'. Did you mean '{decomposed}'?")


def test_damaged_images(folder: Path) -> None:
    data = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "text.png").write_text("no image")
    path = manifest(folder, row("1", edited_image="cut.png"), row("2", source_image="text.png"))
    first, second = found(path)
    assert first.startswith(f"{path}:1: edited_image: expected a whole image file, got one that is ")
    assert first.endswith(": 'cut.png'. Copy or download it again.")
    assert second == (
        f"{path}:2: source_image: expected PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or PPM, got a file that is "
        "none of them, or damaged at its beginning: 'text.png'. Convert it, or copy it again."
    )
    assert found(path, decode_images=False) == []


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        (
            (4096, 18),
            "expected a ratio of at most 200 between the sides, got 4096 x 18 px, a ratio of 227.6. "
            "Crop the image, or leave the row out.",
        ),
        (
            (332, 27),
            "expected sides of at least 28 px, got 332 x 27 px. "
            "Give a larger image, or leave the row out: the image would be enlarged before it is judged.",
        ),
        (
            (1, 1),
            "expected sides of at least 28 px, got 1 x 1 px. "
            "Give a larger image, or leave the row out: the image would be enlarged before it is judged.",
        ),
    ],
)
def test_shapes_in_row_five(folder: Path, size: tuple[int, int], problem: str) -> None:
    Image.new("RGB", size).save(folder / "odd.png")
    rows = [row(str(number)) for number in range(1, 5)]
    path = manifest(folder, *rows, row("5", edited_image="odd.png"), row("6"))
    assert found(path) == [f"{path}:5: edited_image: {problem}"]
    assert len(read_manifest(path)) == 6, "images are looked at by `data check` and when they are used, not on reading"


def test_an_image_of_many_rows_is_one_problem(folder: Path) -> None:
    path = manifest(folder, *(row(str(number), source_image="gone.png") for number in range(17)))
    assert found(path) == [
        f"{path}:1: source_image: expected an image file, got nothing at '{folder}/gone.png' (used in 17 rows). "
        "Check the path, or pass the folder that it is relative to as --image-root."
    ]


def test_a_byte_order_mark(folder: Path) -> None:
    path = manifest(folder, row("1"), prefix=b"\xef\xbb\xbf")
    assert found(path) == [
        f"{path}:1: expected text without a byte order mark, got one (EF BB BF). "
        "Save the file as UTF-8 without it; joining such files leaves one in the middle."
    ]


def test_an_edit_given_twice(folder: Path) -> None:
    path = manifest(folder, row("1", instruction="x"), row("2", instruction="x"), row("3", instruction="y"))
    assert found(path) == [
        f"{path}:2: expected an edit of its own, got images, instruction and question of {path}:1. "
        "Remove one of the two rows: the edit would count twice."
    ]
    questions = [row(str(number), instruction="x", question=f"{number}?") for number in range(2)]
    assert found(manifest(folder, *questions)) == [], "another question about the same edit is another row"


def test_a_duplicate_id(folder: Path) -> None:
    path = manifest(folder, row("1"), row("2"), row("1", instruction="other"))
    assert found(path) == [
        f"{path}:3: sample_id: expected an id of its own, got '1' again, first in {path}:1. "
        "Rename or remove one of the rows."
    ]


def test_columns_are_told_once(folder: Path) -> None:
    rows = [{**row(str(number)), "mos_qualty": 5} for number in range(3)]
    for values in rows:
        values["instructions"] = values.pop("instruction")
    path = manifest(folder, *rows)
    assert found(path) == [
        f"{path}: instruction: expected a column 'instruction', got no such column. "
        "Add it, or rename the column that holds it.",
        f"{path}:1: mos_qualty: expected a known column, got 'mos_qualty' in 3 rows. Did you mean 'mos_quality'? "
        "For ratings of a dimension of your own, pass that dimension; otherwise remove the column.",
        f"{path}:1: instructions: expected a known column, got 'instructions' in 3 rows. "
        "Did you mean 'instruction'? To keep it as a label, call it group_<name>; otherwise remove it.",
    ]


def test_a_column_that_some_rows_lack_is_told_for_each(folder: Path) -> None:
    rows = [row("1"), row("2"), row("3")]
    del rows[1]["instruction"]
    path = manifest(folder, *rows)
    assert found(path) == [f"{path}:2: instruction: expected a value, got nothing. Fill it in, or remove the row."]


def test_missing_columns_of_a_csv_file(folder: Path) -> None:
    path = folder / "m.csv"
    path.write_text("id,source_image,edited_image\n1,a.png,b.png\n")
    assert found(path)[:2] == [
        f"{path}: sample_id: expected a column 'sample_id', got no such column. "
        "Add it, or rename the column that holds it.",
        f"{path}: instruction: expected a column 'instruction', got no such column. "
        "Add it, or rename the column that holds it.",
    ]


def test_everything_at_once_in_the_order_of_the_file(folder: Path) -> None:
    path = manifest(
        folder,
        row("1", instruction="", edited_image="gone1.png", mos_quality=101, mos_alignment="x"),
        row("1", source_image="gone2.png", edited_image="gone2.png"),
        prefix=b'\xef\xbb\xbf{"broken\n',
    )
    assert [(problem.line, problem.field, problem.kind) for problem in check_manifest(path)] == [
        (1, None, "bom"),
        (1, None, "bad_line"),
        (2, "instruction", "missing_value"),
        (2, "mos_alignment", "not_a_number"),
        (2, "mos_quality", "out_of_range"),
        (2, "edited_image", "missing_image"),
        (3, "sample_id", "duplicate_id"),
        (3, "edited_image", "same_image"),
        (3, "source_image", "missing_image"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "m.jsonl",
            b"",
            "expected at least one usable row, got none. "
            "Check that the file is the right one and was written to its end.",
        ),
        (
            "m.csv",
            b"sample_id,source_image,edited_image,instruction\n",
            "expected at least one usable row, got none. "
            "Check that the file is the right one and was written to its end.",
        ),
        ("m.jsonl", "x".encode("utf-16"), "expected UTF-8 text, got UTF-16 text. Save the file as UTF-8."),
        (
            "m.txt",
            b"",
            "expected .jsonl, .json (one object per line, or one list of objects), .csv, .parquet, or a `datasets` "
            "folder, got the suffix '.txt'. Convert the file, or give it the right suffix.",
        ),
    ],
)
def test_files_that_hold_no_manifest(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert found(path) == [f"{path}: {message}"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "gone.jsonl"
    assert found(path) == [f"{path}: expected a file or folder, got nothing there. Check the path."]


def test_dimensions_with_a_range_of_their_own(folder: Path) -> None:
    path = manifest(folder, row("1", mos_realism=5.5, mos_quality=50))
    realism = Dimension("realism", "How real?", 1, 5)
    assert found(path, dimensions=[*BUILT_IN_DIMENSIONS, realism]) == [
        f"{path}:1: mos_realism: expected a number from 1 to 5, got 5.5. "
        "Bring the scores to that scale, or state the dimension with the range they have."
    ]


@pytest.mark.parametrize(
    "changes",
    [{"instruction": ""}, {"mos_quality": "x"}, {"mos_qualty": 1}, {"answer": "no"}, {"sample_id": None}, {"a": 1}],
)
def test_what_reading_refuses_is_reported_and_nothing_else(folder: Path, changes: dict[str, object]) -> None:
    path = manifest(folder, row("1", **changes))
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    reported = check_manifest(path)
    assert [problem.field for problem in reported] == [problem.field for problem in caught.value.problems]


def test_progress_counts_images(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = manifest(folder, row("1"), row("2", edited_image="c.png"))
    inspect_manifest(path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_real_pair_of_photographs(tmp_path: Path) -> None:
    if not (PHOTOS / "example_source.jpg").exists():
        pytest.skip("NOT TESTED: no real photographs in the folder shared/data/photos beside the repository")
    pair = {"source_image": "example_source.jpg", "edited_image": "example_edited.jpg"}
    path = manifest(tmp_path, row("1", **pair, instruction="Remove the red heart shaped object"))
    assert found(path, image_root=PHOTOS) == []
    assert len(found(path)) == 2, "without the image root neither is found"
