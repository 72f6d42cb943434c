"""Two real processes for every strategy: divided as promised, training like one process on the same global batch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lmm4edit.config import TrainConfig, dump_config
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.training.loop import run
from lmm4edit.training.state import latest_state
from lmm4edit.training.tracking import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("distributed_worker.py")
STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
Make = Callable[..., TrainConfig]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
}
# 9 edits in windows of 4: the last window of an epoch has one, so that one process gets a filler.
COMMON: dict[str, Any] = {"data__max_samples": 9, "adapter__dropout": 0.0, "checkpoint__save_every_steps": 2}
DIVIDED: dict[str, Any] = {"batch__micro_batch_size": 1, "batch__gradient_accumulation": 2}


@pytest.fixture(autouse=True)
def _deepspeed(request: pytest.FixtureRequest) -> None:
    if "zero" in request.node.name:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: ZeRO is NOT TESTED here")


def command(config: TrainConfig, folder: Path, strategy: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    path = folder / f"{Path(config.run_dir).name}.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    facts = folder / f"facts-{Path(config.run_dir).name}"
    return [
        *launch,
        str(WORKER),
        str(facts),
        str(config.stage),
        "--config",
        str(path),
        f"distributed.strategy={strategy}",
    ]


def launch(config: TrainConfig, folder: Path, strategy: str) -> list[dict[str, Any]]:
    """Train in two processes; the facts of both."""
    done = subprocess.run(
        command(config, folder, strategy), capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    name = Path(config.run_dir).name
    return [json.loads((folder / f"facts-{name}-{rank}.json").read_text()) for rank in (0, 1)]


def rows(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind]


def check_division(facts: list[dict[str, Any]], strategy: str, kind: str) -> None:
    """Two processes, and of what is to be divided each holds about half (odd sizes are padded)."""
    assert [fact["world_size"] for fact in facts] == [2, 2]
    frozen, trained = facts[0]["frozen"], facts[0]["trained"]

    def is_half(counts: list[int]) -> bool:
        return 0.5 <= counts[0] / counts[1] < 0.6

    whole_trained = kind != "full"
    if strategy == "ddp":
        assert facts[0]["module"] == "DistributedDataParallel"
        assert frozen[0] == frozen[1] and trained[0] == trained[1]
    elif strategy == "fsdp2":
        assert facts[0]["module"].startswith("FSDP")
        assert is_half(frozen)
        assert trained[0] == trained[1] if whole_trained else is_half(trained)
    else:
        assert facts[0]["module"] == "DeepSpeedEngine"
        assert is_half([facts[0]["optimizer_values"], trained[1]])
        if strategy == "zero2":
            assert frozen[0] == frozen[1] and trained[0] == trained[1]
        else:
            assert is_half(frozen)
            assert trained[0] == trained[1] if whole_trained else is_half(trained)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoint").rglob("*.safetensors"))
    assert files
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["adalora", "lora", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_are_divided_and_train_like_one(
    tmp_path: Path, run_config: Make, edits: Path, strategy: str, kind: str, stage: int
) -> None:
    changes = {**COMMON, "adapter__kind": kind}
    if stage == 2:
        changes["init_from"] = "backbone"
    # Stage 2 validates (through the score head), so that the judge is called by processes with unequal shares.
    if stage == 2:
        changes |= {"data__validation": str(edits / "test.jsonl"), "validation__every_epochs": 1}
        changes |= {"validation__max_samples": 5, "validation__batch_size": 1, "checkpoint__keep_best": True}
    one, two = tmp_path / "one", tmp_path / "two"
    run(run_config(one, stage, batch__micro_batch_size=4, **changes), console=Console(quiet=True))
    facts = launch(run_config(two, stage, **DIVIDED, **changes), tmp_path / "launch", strategy)
    check_division(facts, strategy, kind)
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in rows(one)]
        assert [row[key] for row in rows(two)] == pytest.approx(expected, rel=5e-4), key
    for key in ("step", "ranks_kept", "edits", "n_quality"):
        assert [row.get(key) for row in rows(two)] == [row.get(key) for row in rows(one)]
    if stage == 2:
        for first, second in zip(rows(one, "validation"), rows(two, "validation"), strict=True):
            assert second["rmse_quality"] == pytest.approx(first["rmse_quality"], rel=1e-3)
    expected_tensors, got = tensors(one), tensors(two)
    # A matrix that AdaLoRA pruned to rank 0 is empty in both; nothing else is.
    assert {name: t.shape for name, t in got.items()} == {name: t.shape for name, t in expected_tensors.items()}
    for name, tensor in expected_tensors.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=5e-2, atol=5e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert load_checkpoint(two / "checkpoint").meta.has_head is (stage == 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_backbone_in_bfloat16_trains_in_two_processes_like_in_one(
    tmp_path: Path, run_config: Make, strategy: str
) -> None:
    changes = {**COMMON, "backbone__dtype": "bfloat16"}
    one, two = tmp_path / "one", tmp_path / "two"
    run(run_config(one, 1, batch__micro_batch_size=4, **changes), console=Console(quiet=True))
    check_division(launch(run_config(two, 1, **DIVIDED, **changes), tmp_path / "launch", strategy), strategy, "adalora")
    # bfloat16 keeps three digits, and sums of other lengths round otherwise.
    assert [row["loss"] for row in rows(two)] == pytest.approx([row["loss"] for row in rows(one)], rel=2e-2)
    assert [row["ranks_kept"] for row in rows(two)] == [row["ranks_kept"] for row in rows(one)]
    got = tensors(two)
    assert {name: t.shape for name, t in got.items()} == {name: t.shape for name, t in tensors(one).items()}
    trained = [t for name, t in got.items() if "lora" in name or "projector" in name or "merger" in name]
    assert trained and all(t.dtype is torch.float32 for t in trained)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_ranks_are_allocated_again_in_two_processes_like_in_one(
    tmp_path: Path, run_config: Make, strategy: str
) -> None:
    first = tmp_path / "first"
    run(run_config(first, 1, batch__micro_batch_size=4, **COMMON), console=Console(quiet=True))
    changes = {**COMMON, "adapter__ranks": "reallocate", "init_from": str(first / "checkpoint")}
    one, two = tmp_path / "one", tmp_path / "two"
    run(run_config(one, 2, batch__micro_batch_size=4, **changes), console=Console(quiet=True))
    launch(run_config(two, 2, **DIVIDED, **changes), tmp_path / "launch", strategy)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows(two)] == pytest.approx([row[key] for row in rows(one)], rel=5e-4), key
    assert [row["ranks_kept"] for row in rows(two)] == [row["ranks_kept"] for row in rows(one)]
    assert {name: t.shape for name, t in tensors(two).items()} == {name: t.shape for name, t in tensors(one).items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_process_whose_images_are_all_unreadable_stays_in_step(
    tmp_path: Path, run_config: Make, edits: Path, strategy: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(edits, data)
    for index in (0, 3, 6):  # cut short: the check of headers at the start finds nothing
        image = data / f"edit{index}.png"
        image.write_bytes(image.read_bytes()[:-400])
    changes = {**COMMON, "data__max_samples": None, "data__train": str(data / "train.jsonl")}
    changes |= {"data__check_images": "header", "epochs": 1}
    launch(run_config(tmp_path / "run", 1, **DIVIDED, **changes), tmp_path / "launch", strategy)
    assert sorted(row["sample_id"] for row in rows(tmp_path / "run", "failure")) == ["e0", "e3", "e6"]
    assert sum(row["edits"] for row in rows(tmp_path / "run")) == 9
    assert all(row["loss"] < 100 for row in rows(tmp_path / "run"))


def launch_and_kill(config: TrainConfig, folder: Path, strategy: str, victim: str) -> None:
    """Kill one process, or all of a launch, once three steps are on disk."""
    run_dir = Path(config.run_dir)
    process = subprocess.Popen(
        command(config, folder, strategy),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while (newest := latest_state(run_dir / "training_state")) is None or int(newest.name.removeprefix("step-")) < 3:
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)
    if victim == "one process":
        listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(listed.stdout.split()[-1]), signal.SIGKILL)
    else:
        # torchrun gives each worker a session of its own; they end when their launcher and fellows are gone.
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        for child in children.stdout.split():
            os.kill(int(child), signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=120)
    assert not (run_dir / "finished.json").exists()


@pytest.mark.parametrize("victim", ["one process", "all processes"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_killed_at_any_moment_end_like_those_that_were_not(
    tmp_path: Path, run_config: Make, strategy: str, victim: str
) -> None:
    changes = {**COMMON, "adapter__dropout": 0.1, "epochs": 3, "checkpoint__save_every_steps": 1}
    launch(run_config(tmp_path / "whole", 1, **DIVIDED, **changes), tmp_path / "launch", strategy)
    cut = run_config(tmp_path / "cut", 1, **DIVIDED, **changes)
    launch_and_kill(cut, tmp_path / "launch", strategy, victim)
    launch(cut, tmp_path / "launch", strategy)
    first, second = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert [row["loss"] for row in rows(tmp_path / "cut")] == [row["loss"] for row in rows(tmp_path / "whole")]


def test_zero_leaves_an_optimizer_that_no_other_strategy_continues(tmp_path: Path, run_config: Make) -> None:
    config = run_config(tmp_path / "run", 1, **DIVIDED, **{**COMMON, "checkpoint__save_every_steps": 1, "epochs": 3})
    launch_and_kill(config, tmp_path / "launch", "zero2", "all processes")
    for strategy in ("zero3", "ddp"):
        words = [*command(config, tmp_path / "launch", strategy), "--accept-changes"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=600)
        assert done.returncode != 0
        assert "optimizer's state is divided among other processes or by another strategy" in done.stderr
