"""``lmm4edit ranks`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.errors import CheckpointError
from lmm4edit.judge.ranks import LANGUAGE, VISION, read_ranks
from lmm4edit.shipped import shipped_path

WIDE = {"COLUMNS": "120", "NO_COLOR": "1"}


def test_the_ranks_are_shown_by_layer() -> None:
    ranks = read_ranks(shipped_path("checkpoints/tiny/judge"))
    result = CliRunner().invoke(app, ["ranks", "tiny"], env=WIDE)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    for part in (VISION, LANGUAGE):
        total = sum(matrix.rank for matrix in ranks.of(part))
        assert f"{part}: {total} in {len(ranks.of(part))} matrices" in result.output
    assert "down" in result.output and "│     0 │" in result.output
    count, gone = len(ranks.matrices), sum(matrix.rank == 0 for matrix in ranks.matrices)
    mean = ranks.total / count
    expected = f"adalora: {ranks.total} in {count} matrices, mean {mean:.2f}, 12 at the start; {gone} pruned to rank 0"
    assert lines[-1] == expected


def test_json_and_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ranks", "tiny", "--json", "--out", str(tmp_path / "r")], env=WIDE)
    content = json.loads(result.stdout)
    ranks = read_ranks(shipped_path("checkpoints/tiny/judge"))
    assert content["kind"] == "adalora" and content["total"] == ranks.total
    assert [matrix["rank"] for matrix in content["matrices"]] == [matrix.rank for matrix in ranks.matrices]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["ranks.csv", "ranks.png"]


def test_a_folder_without_a_judge_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ranks", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError)
    assert str(result.exception) == (
        f"{tmp_path}: expected the folder of a checkpoint (with judge.json) or of a finished run (with checkpoint/), "
        "got neither. A run has its checkpoint when it is finished."
    )


@pytest.mark.parametrize("name", ["nowhere"])
def test_a_misspelt_judge_is_refused(name: str) -> None:
    result = CliRunner().invoke(app, ["ranks", name])
    assert str(result.exception).startswith("nowhere: there is no such judge.")
