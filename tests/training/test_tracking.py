"""Rows of numbers: on disk at once, cut back on resume, mirrored to wandb only on request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lmm4edit.errors import ConfigError
from lmm4edit.training.tracking import MetricsLog, Tracker, read_metrics


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"kind": "train", "step": 1, "loss": 0.1})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 1, "loss": 0.1}]
    log.close()


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsLog(tmp_path / "metrics.jsonl").close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resume_drops_steps_that_are_taken_again_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    log = MetricsLog(path, resume_after=2)
    log.write({"step": 3})
    log.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_undefined_numbers_are_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.write({"step": 1, "loss": float("nan")})
    log.close()


def test_wandb_is_not_touched_unless_enabled(tmp_path: Path, make_config: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracker(make_config(), tmp_path).close()


def test_wandb_missing_is_told_with_the_remedy(tmp_path: Path, make_config: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as error:
        Tracker(make_config(wandb__enabled=True), tmp_path)
    assert str(error.value) == (
        "wandb.enabled: the package wandb is not installed. Install lmm4edit[train], or set wandb.enabled: false."
    )


class FakeWandb:
    """Records what it is given."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.rows: list[tuple[dict[str, Any], int]] = []
        self.finished = 0

    def init(self, **options: Any) -> FakeWandb:
        self.options.append(options)
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((row, step))

    def finish(self) -> None:
        self.finished += 1


def test_one_key_turns_wandb_on_and_a_resumed_run_is_the_same_run(
    tmp_path: Path, make_config: Any, monkeypatch: Any
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = make_config(wandb__enabled=True, wandb__mode="offline")
    for resume_after in (None, 1):
        tracker = Tracker(config, tmp_path, resume_after)
        tracker.write({"kind": "train", "step": 1, "loss": 0.5, "srcc_quality": None, "note": "x"})
        tracker.close()
    first, second = fake.options
    assert first["mode"] == "offline" and first["project"] == "lmm4edit" and first["name"] == tmp_path.name
    assert first["config"]["objective"]["text_ce"] == 1.0
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert fake.rows[0] == ({"train/loss": 0.5}, 1)
    assert fake.finished == 2
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
