"""docs/data.md: every command in it runs, on the files that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.mapping import FIELDS, AnswerSource, ScoreSource, TableMapping
from tests.data.release import write_images, write_release

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"
SOURCES = {"train": [f"H_00_{n:02d}" for n in range(5)], "test": ["H_01_01"]}


def blocks() -> list[tuple[str, str, str]]:
    """Language, file name (may be empty) and text of every fenced block."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)[ ]?(\S*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    names = [f"photos/{n}.png" for n in ("cat", "dog", "1", "2")]
    names += [f"edits/{m}/{n}.png" for m in ("ip2p", "pnp") for n in ("cat", "dog", "1", "2")]
    for number, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(name)
    write_release(Path("EBench-18K"), SOURCES, models=2)
    write_images(Path("images"), [source for sources in SOURCES.values() for source in sources], models=2)
    for _, name, text in blocks():
        if name:
            Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_every_command_of_the_guide_runs(folder: Path) -> None:
    ran = 0
    for language, _, text in blocks():
        for line in text.splitlines() if language == "bash" else ():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "lmm4edit"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
            ran += 1
    assert ran == 11
    assert {path.name for path in Path("data/mine").iterdir()} == {
        *("manifest.jsonl", "dimensions.yaml", "import_summary.json"),
        *("train.jsonl", "test.jsonl", "split_summary.json"),
    }
    scored = {s.sample_id: s.mos for s in read_manifest("runs/mos/manifest.jsonl")}
    assert scored["4"].keys() == {"quality"} and len(scored) == 4


def test_the_formula_in_the_guide_is_the_one_printed(folder: Path) -> None:
    arguments = ["data", "import", "table", "ratings_of_edits.csv", "--mapping", "mapping.yaml", "--out", "x"]
    output = CliRunner().invoke(app, arguments).output
    printed = [line.strip() for line in output.splitlines() if line.strip().startswith("mos_quality =")]
    assert len(printed) == 1 and f"`{printed[0]}`" in GUIDE.read_text(encoding="utf-8")


def test_the_guide_names_every_key_and_column() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    keys = {*TableMapping.model_fields, *ScoreSource.model_fields, *AnswerSource.model_fields, *FIELDS}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []
