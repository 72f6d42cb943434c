"""The command `lmm4edit data`: exit status, the table for people, JSON for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from lmm4edit.commands.data import app

ROW = {"sample_id": "1", "source_image": "a.png", "edited_image": "b.png", "instruction": "remove [red] hat [/]"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        Image.new("RGB", (64, 48), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def manifest(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, ["check", *map(str, arguments)], env={"COLUMNS": "80"})


def test_a_good_manifest(folder: Path) -> None:
    path = manifest(folder, {**ROW, "mos_quality": 5, "question": "Gone?", "answer": "yes"})
    result = run(path)
    assert result.exit_code == 0
    assert result.output == (
        f"{path}: no problems. 1 edit of 1 source; 2 images decoded; "
        "scores: quality 1, alignment 0, preservation 0; 1 answer.\n"
    )
    assert "2 images found, not decoded" in run(path, "--no-decode").output


def test_problems_as_a_table_of_eighty_columns(folder: Path) -> None:
    far = "/far/away/" + "very_long_name_" * 8 + ".png"
    path = manifest(folder, ROW, {**ROW, "sample_id": "2", "edited_image": far, "mos_quality": 101})
    result = run(path)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    start = lines[1].index("problem")
    told = "".join(line[start:].rstrip(" ") for line in lines[:-1])
    assert far in told, "long paths are folded, not cut"
    assert any(line.split()[:2] == ["2", "mos_quality"] for line in lines)
    assert "→ Bring the scores to that scale" in result.output
    assert lines[-1] == f"2 problems in 2 rows of {path}"


def test_square_brackets_of_a_file_are_text(folder: Path) -> None:
    result = run(manifest(folder, {**ROW, "answer": "[bold]no[/bold]", "question": "[/]"}))
    assert result.exit_code == 1
    assert "'[bold]no[/bold]'" in result.output


def test_problems_as_json(folder: Path) -> None:
    path = manifest(folder, {**ROW, "mos_quality": 101})
    result = run(path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "file": str(path),
        "n_rows": 1,
        "n_samples": 1,
        "n_sources": 1,
        "n_images": 2,
        "n_mos": {"quality": 1, "alignment": 0, "preservation": 0},
        "n_answers": 0,
        "problems": [
            {
                "file": str(path),
                "line": 1,
                "field": "mos_quality",
                "expected": "a number from 0 to 100",
                "got": "101",
                "remedy": "Bring the scores to that scale, or state the dimension with the range they have.",
                "kind": "out_of_range",
            }
        ],
    }
    clean = run(manifest(folder, ROW), "--json")
    assert (clean.exit_code, json.loads(clean.output)["problems"]) == (0, [])


def test_all_problems_are_listed_however_many(folder: Path) -> None:
    path = manifest(folder, *({**ROW, "sample_id": str(number), "instruction": ""} for number in range(200)))
    result = run(path)
    assert result.output.count("→ Fill it in") == 200
    assert f"200 problems in 200 rows of {path}\n" in result.output


def test_image_root_and_dimensions(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = manifest(tmp_path_factory.mktemp("elsewhere"), {**ROW, "mos_realism": 4})
    assert run(path).exit_code == 1
    assert run(path, "--image-root", folder, "--dimension", "realism:1:5").exit_code == 0
    assert run(path, "--image-root", folder, "--dimension", "realism:1:3").exit_code == 1


@pytest.mark.parametrize("text", ["realism:1", "realism:5:1", "realism:a:b", "Not a name"])
def test_a_dimension_that_is_none(folder: Path, text: str) -> None:
    result = run(manifest(folder, ROW), "--dimension", text)
    assert result.exit_code == 2
    assert "--dimension" in result.output


def test_help_has_an_example() -> None:
    assert "lmm4edit data check edits.jsonl" in CliRunner().invoke(app, ["check", "--help"]).output
    assert "check" in CliRunner().invoke(app, ["--help"]).output
