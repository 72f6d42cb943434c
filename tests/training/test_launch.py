"""The real launchers: processes that are started, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmm4edit.config import TrainConfig, dump_config
from lmm4edit.training.state import latest_state
from lmm4edit.training.tracking import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Make = Callable[..., TrainConfig]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
}


def write(config: TrainConfig, path: Path) -> Path:
    path.write_text(dump_config(config), encoding="utf-8")
    return path


def call(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **changes}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False)


def script(stage: int) -> str:
    return str(ROOT / "train" / f"stage{stage}.py")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


def assert_same_tensors(one: Path, two: Path) -> None:
    for file in sorted(path.relative_to(one) for path in one.glob("checkpoint/**/*.safetensors")):
        first, second = load_file(one / file), load_file(two / file)
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_accelerate_launch_makes_a_dry_run(tmp_path: Path, run_config: Make) -> None:
    path = write(run_config(tmp_path / "run"), tmp_path / "c.yaml")
    done = call(
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"),
        *(script(1), "--config", str(path), "--dry-run", "batch.gradient_accumulation=2"),
    )
    assert done.returncode == 0, done.stderr
    assert "8 = 1 processes x 4 edits x 2 passes, packed" in done.stdout
    assert "mean 4 -> 2 (AdaLoRA)" in done.stdout
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_trains_both_stages(tmp_path: Path, run_config: Make) -> None:
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1")
    for stage in (1, 2):
        start = {"init_from": str(tmp_path / "elsewhere")} if stage == 2 else {}
        path = write(run_config(tmp_path / f"run{stage}", stage, **start), tmp_path / f"c{stage}.yaml")
        from_stage_1 = ("--init-from", str(tmp_path / "run1" / "checkpoint")) if stage == 2 else ()
        done = call(*launch, script(stage), "--config", str(path), *from_stage_1)
        assert done.returncode == 0, done.stderr
        assert f"Trained 6 steps. The judge is {tmp_path / f'run{stage}' / 'checkpoint'}." in done.stdout
    again = call(*launch, script(2), "--config", str(path), *from_stage_1)
    assert again.returncode == 0 and "this run is finished" in again.stdout


@pytest.mark.parametrize(("stage", "start"), [(1, None), (2, "backbone"), (2, "reallocated stage 1")])
def test_a_run_killed_at_any_moment_ends_like_one_that_was_not(
    tmp_path: Path, run_config: Make, stage: int, start: str | None, request: pytest.FixtureRequest
) -> None:
    changes: dict[str, Any] = {"epochs": 6, "checkpoint__save_every_steps": 1}
    if start == "backbone":
        changes["init_from"] = start
    elif start is not None:
        changes["init_from"] = str(request.getfixturevalue("stage1") / "checkpoint")
        changes["adapter__ranks"] = "reallocate"
    whole = write(run_config(tmp_path / "whole", stage, **changes), tmp_path / "whole.yaml")
    cut = write(run_config(tmp_path / "cut", stage, **changes), tmp_path / "cut.yaml")
    assert call(sys.executable, script(stage), "--config", str(whole)).returncode == 0
    command = [sys.executable, script(stage), "--config", str(cut)]
    kills = 0
    # Killed while it writes states, takes steps, and starts up: after 3 steps, 3 more, then at odd delays.
    for more, delay in ((3, 0.0), (3, 0.05), (1, 0.11)):
        known = latest_state(tmp_path / "cut" / "training_state")
        reached = int(known.name.removeprefix("step-")) if known else 0
        process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None:
            newest = latest_state(tmp_path / "cut" / "training_state")
            if newest is not None and int(newest.name.removeprefix("step-")) >= reached + more:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                break
            time.sleep(0.01)
    assert kills == 3 and not (tmp_path / "cut" / "finished.json").exists()
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert "Continuing after step " in done.stdout
    assert_same_tensors(tmp_path / "whole", tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("stage", [1, 2])
def test_two_processes_train_like_one_with_the_same_global_batch(
    tmp_path: Path, run_config: Make, stage: int, edits: Path
) -> None:
    # 11 edits in windows of 4: the last window has 3, so one process gets an edit less.
    common: dict[str, Any] = {"data__max_samples": 11, "adapter__dropout": 0.0, "checkpoint__save_every_steps": 2}
    common |= {"data__validation": str(edits / "test.jsonl"), "validation__every_epochs": 1}
    if stage == 2:
        common["init_from"] = "backbone"
    one = write(run_config(tmp_path / "one", stage, batch__micro_batch_size=4, **common), tmp_path / "one.yaml")
    two = write(
        run_config(tmp_path / "two", stage, batch__micro_batch_size=1, batch__gradient_accumulation=2, **common),
        tmp_path / "two.yaml",
    )
    assert call(sys.executable, script(stage), "--config", str(one)).returncode == 0
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = call(*torchrun, script(stage), "--config", str(two))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "provenance.json").read_text())["processes"] == 2
    assert done.stdout.count("Trained 6 steps") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    metrics = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for key in ("edits", "ranks_kept", "n_quality"):
        first, second = ([row.get(key) for row in rows] for rows in metrics)
        assert first == second


def test_an_error_in_one_process_ends_all(tmp_path: Path, run_config: Make) -> None:
    path = write(run_config(tmp_path / "run", data__train=str(tmp_path / "none.jsonl")), tmp_path / "c.yaml")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = call(*torchrun, script(1), "--config", str(path))
    assert done.returncode != 0
    assert done.stderr.count("Error: ") >= 1 and "none.jsonl" in done.stderr


def test_wandb_is_switched_on_by_one_key_and_works_offline(tmp_path: Path, run_config: Make) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    path = write(run_config(tmp_path / "run", max_steps=4), tmp_path / "c.yaml")
    done = call(sys.executable, script(1), "--config", str(path), "wandb.enabled=true", "wandb.mode=offline")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
