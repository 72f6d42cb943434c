"""The command ``lmm4edit score``: tables, JSON, exit statuses, messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from lmm4edit.cli import app

PHOTOS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "photos"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    Image.new("RGB", (80, 60), "red").save(folder / "a.png")
    Image.new("RGB", (80, 60), "blue").save(folder / "b.png")
    return ["--source", str(folder / "a.png"), "--edited", str(folder / "b.png"), "--instruction", "make it blue"]


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["score", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def test_one_edit_as_a_table_with_the_notice(pair: list[str]) -> None:
    text = run(*pair, "--question", "Is it blue?", "--judge", "tiny", "--device", "cpu").output
    for word in ("quality", "alignment", "preservation", "overall", "answer", "simulated ratings"):
        assert word in text


def test_one_edit_as_json(pair: list[str]) -> None:
    record = json.loads(run(*pair, "--judge", "tiny", "--json", "--device", "cpu").stdout)
    assert set(record) == {
        "quality", "alignment", "preservation", "overall", "answer", "answer_probability", "failure", "read_out",
        "judge", "notice",
    }  # fmt: skip
    assert 0 < record["quality"] < 120 and record["answer"] is None and record["judge"] == "tiny"


def test_the_real_pair_is_scored() -> None:
    if not PHOTOS.is_dir():
        pytest.skip(f"the real photographs are not at {PHOTOS}: the real pair was NOT scored")
    arguments = ["--source", str(PHOTOS / "example_source.jpg"), "--edited", str(PHOTOS / "example_edited.jpg")]
    arguments += ["--instruction", "Remove the red heart shaped object", "--question", "Has the red heart been removed?"]
    record = json.loads(run(*arguments, "--judge", "tiny", "--json", "--device", "cpu").stdout)
    assert all(isinstance(record[name], float) for name in ("quality", "alignment", "preservation", "overall"))
    assert record["answer"] in ("yes", "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "a.png", "--judge", "tiny"], "for one edit --edited, --instruction is missing"),
        (["edits.jsonl", "--source", "a.png", "--judge", "tiny"], "give a manifest or one edit, not both"),
        (["edits.jsonl", "--judge", "tiny"], "say where the table goes"),
        (["edits.jsonl", "--output", "x.csv"], "give the judge's checkpoint, or `tiny`"),
        (["edits.jsonl", "--output", "x.csv", "--judge", "tiny", "--read-out", "tail"], "expected head or text, got 'tail'"),
    ],
)
def test_wrong_usage_says_what_is_missing(arguments: list[str], message: str) -> None:
    output = run(*arguments, code=2).output
    assert message in " ".join(output.replace("│", " ").split())
