"""`lmm4edit data import | split | mos`: what they print, their exit status, and errors without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmm4edit.commands.data import app
from lmm4edit.data.output_folder import output_folder
from lmm4edit.errors import ManifestError
from tests.data.release import line, write_lines, write_release


def run(*arguments: object):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "80"})


def test_an_import_tells_counts_and_what_is_missing(tmp_path: Path) -> None:
    write_release(tmp_path / "r", {"train": ["H_00_01", "L_00_01"], "test": ["H_00_02"]}, models=3)
    (tmp_path / "r" / "test_c.json").unlink()
    result = run("import", "ebench18k", tmp_path / "r", "--out", tmp_path / "o")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[:3] == [
        f"{tmp_path}/o/train.jsonl: 6 edits of 2 sources by 3 editing models; scores: quality 6, alignment 6, "
        "preservation 6; 6 answers.",
        f"{tmp_path}/o/test.jsonl: 3 edits of 1 source by 3 editing models; scores: quality 3, alignment 3, "
        "preservation 0; 3 answers.",
        "missing: test preservation of 3 edits: the release's folder has no file for it",
    ]
    assert lines[3] == "note: test: no file for c; those values are missing in every row."
    assert run("check", tmp_path / "o" / "train.jsonl", "--no-images").exit_code == 0
    assert run("check", tmp_path / "o" / "train.jsonl").exit_code == 1


def test_bad_rows_end_with_status_1_and_are_listed(tmp_path: Path) -> None:
    good = [line("v", f"H_00_{n:02d}", 0, 50) for n in range(3)]
    write_lines(tmp_path / "r" / "test_v.json", [*good, *["{"] * 12])
    result = run("import", "ebench18k", tmp_path / "r", "--out", tmp_path / "o")
    assert result.exit_code == 1
    assert result.output.count("bad: test_v.json:") == 10
    assert (
        f"12 problems, the first 10 above; all in {tmp_path}/o/import_problems.jsonl. The rest was written."
        in result.output
    )
    assert len((tmp_path / "o" / "test.jsonl").read_text().splitlines()) == 3


def test_a_table_tells_its_formulas(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        "columns: {source_image: a, edited_image: b, instruction: c}\nscores: {quality: {column: d, low: 1, high: 5}}\n"
    )
    (tmp_path / "t.csv").write_text("a,b,c,d,e\nx.png,y.png,Add,3,=1\nx.png,z.png,Add,9,-\n")
    result = run("import", "table", tmp_path / "t.csv", "--mapping", tmp_path / "m.yaml", "--out", tmp_path / "o")
    assert result.exit_code == 1
    assert "manifest.jsonl: 2 edits of 1 source, from 2 rows; scores: quality 1; 0 answers." in result.output
    assert "  mos_quality = 0 + (d - 1) / (5 - 1) * (100 - 0)\n" in result.output
    assert "missing: quality of 1 edit: the cell of 'd' is bad (listed)" in result.output
    assert "note: Columns of the table that the mapping does not use: 'e'." in result.output
    assert "1 problem; all in" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "ebench18k", "none", "--out", "o"], "none: expected the release's folder, got nothing there."),
        (
            ["import", "table", "none.csv", "--mapping", "none.yaml", "--out", "o"],
            "none.yaml: the configuration cannot be read: No such file or directory. Check the path.",
        ),
        (["split", "none.jsonl", "--out", "o"], "none.jsonl: expected a file or folder, got nothing there."),
        (["mos", "none.csv", "--out", "o"], "none.csv: expected a file or folder, got nothing there. Check the path."),
        (["mos", "none.csv", "--out", "o", "--dimensions", "d.yaml"], "d.yaml: the configuration cannot be read"),
    ],
)
def test_errors_are_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "lmm4edit.cli", "data", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {message}") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "o").write_text("mine")
    with (
        pytest.raises(ManifestError, match="expected a folder to write into, got a file"),
        output_folder(tmp_path / "o", "import"),
    ):
        pass
    assert (tmp_path / "o").read_text() == "mine"
    with pytest.raises(ManifestError, match="cannot be made"), output_folder(tmp_path / "o" / "inside", "import"):
        pass


def test_stale_problems_go_with_the_run_they_belong_to(tmp_path: Path) -> None:
    with output_folder(tmp_path / "o", "import") as staging:
        (staging / "import_summary.json").write_text("1")
        (staging / "import_problems.jsonl").write_text("old")
        (staging / "images").mkdir()
        (staging / "images" / "a.png").write_text("a")
    with output_folder(tmp_path / "o", "import", overwrite=True) as staging:
        (staging / "import_summary.json").write_text("2")
        (staging / "images").mkdir()
        (staging / "images" / "b.png").write_text("b")
    files = sorted(str(path.relative_to(tmp_path / "o")) for path in (tmp_path / "o").rglob("*") if path.is_file())
    assert files == ["images/a.png", "images/b.png", "import_summary.json"]
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "o", "import", overwrite=True) as staging:
        (staging / "import_summary.json").write_text("3")
        raise ZeroDivisionError
    assert (tmp_path / "o" / "import_summary.json").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_another_commands_files_are_not_replaced_unasked_and_an_input_never(tmp_path: Path) -> None:
    write_release(tmp_path / "r", {"test": [f"H_00_{n:02d}" for n in range(5)]}, models=1)
    run("import", "ebench18k", tmp_path / "r", "--out", tmp_path / "o")
    words = ("split", tmp_path / "o" / "test.jsonl", "--out", tmp_path / "o", "--no-photographs")
    before = (tmp_path / "o" / "test.jsonl").read_bytes()
    for more in ((), ("--overwrite",)):
        result = run(*words, *more)
        assert str(result.exception) == (
            f"{tmp_path}/o/test.jsonl: expected another place to write to, got an input. Change --out."
        )
    (tmp_path / "m.jsonl").write_bytes(before)
    result = run("split", tmp_path / "m.jsonl", "--out", tmp_path / "o", "--no-photographs")
    assert str(result.exception) == (
        f"{tmp_path}/o: expected a folder without test.jsonl, got one that has it from an earlier run. Give another "
        "--out, or --overwrite to replace such files."
    )
    assert (tmp_path / "o" / "test.jsonl").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["import_summary.json", "test.jsonl"]
    result = run("split", tmp_path / "m.jsonl", "--out", tmp_path / "p", "--test", "0")
    assert str(result.exception).startswith("Expected a share for at least one split beside train, got none above 0.")


def test_an_import_can_be_checked_as_json(tmp_path: Path) -> None:
    write_release(tmp_path / "r", {"test": ["H_00_02"]}, models=1)
    run("import", "ebench18k", tmp_path / "r", "--out", tmp_path / "o")
    result = run("check", tmp_path / "o" / "test.jsonl", "--no-images", "--json")
    assert json.loads(result.output)["problems"] == []
