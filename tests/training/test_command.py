"""The command line of the launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lmm4edit.config import TrainConfig, dump_config
from lmm4edit.errors import LMM4EditError
from lmm4edit.training import loop
from lmm4edit.training.command import run_from_command_line

ROOT = Path(__file__).parents[2]
Make = Callable[..., TrainConfig]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, dict[str, Any]]]:
    """What the command asks the loop for."""
    seen: list[tuple[TrainConfig, dict[str, Any]]] = []
    monkeypatch.setattr(loop, "run", lambda config, **options: seen.append((config, options)))
    return seen


def test_options_and_overrides_reach_the_loop(tmp_path: Path, make_config: Make, calls: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(make_config(stage=2, objective={"score_mse": 1.0}, init_from="backbone")))
    start = "runs/it's here/checkpoint"
    status = run_from_command_line(
        2, ["--config", str(path), "optimizer.learning_rate=2e-4", "--init-from", start, "--restart", "seed=7"]
    )
    assert status == 0
    ((config, options),) = calls
    assert (config.optimizer.learning_rate, config.seed, config.init_from) == (2e-4, 7, start)
    assert options == {"restart": True, "dry_run": False, "planned_processes": None, "accept_changes": False}


def test_a_configuration_of_the_other_stage_is_refused(
    tmp_path: Path, make_config: Make, calls: Any, capsys: Any
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(make_config()))
    assert run_from_command_line(2, ["--config", str(path)]) == 1
    assert capsys.readouterr().err == (
        f"Error: {path}: stage: expected 2 in this launcher, got 1. Use train/stage1.py.\n"
    )
    assert calls == []


def test_an_error_is_said_once_in_a_launch_of_several_processes(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run_from_command_line(1, ["--config", str(tmp_path / "none.yaml")]) == 1
    assert capsys.readouterr().err == ""


def test_an_interruption_says_how_to_go_on(
    tmp_path: Path, make_config: Make, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", interrupted)
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(make_config()))
    assert run_from_command_line(1, ["--config", str(path)]) == 130
    assert capsys.readouterr().err == ("Interrupted. The same command continues from the last saved training state.\n")


def test_a_mistake_is_answered_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from lmm4edit.training.command import run_from_command_line\n"
        f"status = run_from_command_line(1, ['--config', {str(tmp_path / 'none.yaml')!r}])\n"
        "sys.exit(0 if status == 1 and 'torch' not in sys.modules else 1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_the_launchers_explain_themselves(stage: int) -> None:
    script = ROOT / "train" / f"stage{stage}.py"
    assert len(script.read_text().splitlines()) < 80
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True, env=environment
    )
    assert f"Train stage {stage} of a judge" in done.stdout
    assert f"  accelerate launch train/stage{stage}.py --config configs/tiny/stage{stage}.yaml" in done.stdout


@pytest.mark.parametrize("failure", [None, LMM4EditError("the disk is full"), KeyboardInterrupt(), ValueError("a bug")])
def test_the_group_of_processes_is_left_before_the_process_exits(
    tmp_path: Path, make_config: Make, monkeypatch: pytest.MonkeyPatch, failure: BaseException | None
) -> None:
    # Its threads abort an interpreter that exits beside them, and the launcher calls a complete run failed.
    def run(config: TrainConfig, **options: Any) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        if failure is not None:
            raise failure

    monkeypatch.setattr(loop, "run", run)
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(make_config()))
    try:
        if isinstance(failure, ValueError):
            with pytest.raises(ValueError, match="a bug"):
                run_from_command_line(1, ["--config", str(path)])
        else:
            expected = {type(None): 0, LMM4EditError: 1, KeyboardInterrupt: 130}[type(failure)]
            assert run_from_command_line(1, ["--config", str(path)]) == expected
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_group_that_the_launcher_made_is_left_to_it(
    tmp_path: Path, make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "run", lambda config, **options: None)
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(make_config()))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert run_from_command_line(1, ["--config", str(path)]) == 0
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
