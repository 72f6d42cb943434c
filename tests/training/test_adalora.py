"""AdaLoRA over two stages: ranks continued or allocated again, the penalty apart, one allocation an optimizer step."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.adapters import adalora_layers, effective_ranks
from lmm4edit.judge.backbones import last_hidden_states
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.rank_allocator import RankAllocator
from lmm4edit.records import BUILT_IN_DIMENSIONS, EditSample
from lmm4edit.training.dataset import EditDataset
from lmm4edit.training.loop import run
from lmm4edit.training.plan import count_targets, derive_plan
from lmm4edit.training.samples import load_samples
from lmm4edit.training.steps import Stepper
from lmm4edit.training.tracking import read_metrics
from lmm4edit.training.trainee import Trainee, build_trainee

Make = Callable[..., TrainConfig]
N_MATRICES = 24


def train(config: TrainConfig) -> str:
    """Train, and give what was printed."""
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    run(config, console=console)
    return console.export_text()


def rows(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.endswith("_per_second")} for row in found if row["kind"] == kind]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoint").rglob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def trainee_of(config: TrainConfig, edits: Path) -> tuple[Trainee, list[EditSample]]:
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    plan = derive_plan(config, count_targets(samples, BUILT_IN_DIMENSIONS))
    return build_trainee(config, plan, BUILT_IN_DIMENSIONS, samples, torch.device("cpu")), samples


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory, run_config: Make) -> Path:
    """A stage 1 run that ends with matrices of many ranks, some of rank 0."""
    folder = tmp_path_factory.mktemp("pruned") / "run"
    train(run_config(folder, adapter__target_r=1, adapter__tinit=0, adapter__tfinal=1, adapter__dropout=0.0))
    ranks = effective_ranks(load_checkpoint(folder / "checkpoint").model.backbone)
    assert 0 in ranks.values() and len(set(ranks.values())) > 2 and sum(ranks.values()) == N_MATRICES
    return folder


def reallocating(run_config: Make, folder: Path, start: Path, **changes: Any) -> TrainConfig:
    settings = {"adapter__ranks": "reallocate", "adapter__dropout": 0.0, "epochs": 3, "adapter__tfinal": 3}
    return run_config(folder, 2, init_from=str(start / "checkpoint"), **{**settings, **changes})


def test_reallocation_begins_with_the_starting_judge_s_outputs(
    pruned: Path, tmp_path: Path, run_config: Make, edits: Path
) -> None:
    config = reallocating(run_config, tmp_path / "run", pruned)
    trainee, samples = trainee_of(config, edits)
    model = trainee.model.eval()
    before = load_checkpoint(pruned / "checkpoint").model
    dataset = EditDataset(samples, trainee.encoding(config, teach=False))
    batch = dataset.collate(dataset.__getitems__([0, 1, 2])).batch
    with torch.no_grad():
        torch.testing.assert_close(
            last_hidden_states(model.backbone, batch), last_hidden_states(before.backbone, batch), atol=1e-5, rtol=0
        )
    assert {layer.values.shape[0] for layer in adalora_layers(model.backbone).values()} == {4}
    assert effective_ranks(model.backbone) == effective_ranks(before.backbone)
    allocator = trainee.allocator
    assert (allocator.initial_budget, allocator.target_budget) == (4 * N_MATRICES, 2 * N_MATRICES)


def test_a_reallocated_run_grows_and_prunes_again(pruned: Path, tmp_path: Path, run_config: Make) -> None:
    text = train(reallocating(run_config, tmp_path / "run", pruned, adapter__tinit=2))
    assert "every matrix of the starting judge grown to 4 (adapter.ranks: reallocate), then mean 4 -> 2" in text
    kept = [row["ranks_kept"] for row in rows(tmp_path / "run")]
    assert kept[:2] == [4 * N_MATRICES] * 2 and kept == sorted(kept, reverse=True)
    assert kept[5:] == [2 * N_MATRICES] * 4
    loaded = load_checkpoint(tmp_path / "run" / "checkpoint").model.backbone
    before = effective_ranks(load_checkpoint(pruned / "checkpoint").model.backbone)
    after = effective_ranks(loaded)
    assert sum(after.values()) == 2 * N_MATRICES
    assert any(after[name] for name, rank in before.items() if rank == 0)
    assert [layer.values.shape[0] for layer in adalora_layers(loaded).values()] == list(after.values())


def test_continued_ranks_are_the_default_and_stay(pruned: Path, tmp_path: Path, run_config: Make) -> None:
    config = run_config(tmp_path / "run", 2, init_from=str(pruned / "checkpoint"), max_steps=2)
    assert "kept from the starting judge (adapter.ranks: continue)" in train(config)
    assert [row["ranks_kept"] for row in rows(tmp_path / "run")] == [N_MATRICES] * 2
    one, two = (load_checkpoint(f / "checkpoint").model.backbone for f in (pruned, tmp_path / "run"))
    assert effective_ranks(one) == effective_ranks(two)


def test_a_reallocated_judge_scores_the_same_when_it_is_read_back(
    pruned: Path, tmp_path: Path, run_config: Make, edits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmm4edit.training import loop

    seen: list[torch.Tensor] = []
    original = loop.save_checkpoint

    def score(model: JudgeModel, trainee: Trainee) -> torch.Tensor:
        samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples[:3]
        dataset = EditDataset(samples, trainee.encoding(config, teach=False))
        with torch.no_grad():
            return model.eval()(dataset.collate(dataset.__getitems__([0, 1, 2])).batch).scores

    def save(folder: Any, model: JudgeModel, *others: Any, **more: Any) -> None:
        seen.append(score(model, trainee))
        original(folder, model, *others, **more)

    config = reallocating(run_config, tmp_path / "run", pruned)
    trainee, _ = trainee_of(config, edits)
    monkeypatch.setattr(loop, "save_checkpoint", save)
    train(config)
    loaded = load_checkpoint(tmp_path / "run" / "checkpoint").model
    torch.testing.assert_close(score(loaded, trainee), seen[0], atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("cuts", [[4], [3, 8]], ids=["while pruning", "and when final"])
def test_an_interrupted_reallocation_ends_like_an_uninterrupted_one(
    pruned: Path, tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch, cuts: list[int]
) -> None:
    changes = {"checkpoint__save_every_steps": 1, "adapter__dropout": 0.1}
    train(reallocating(run_config, tmp_path / "whole", pruned, **changes))
    original = Stepper.take
    for step in cuts:

        def take(self: Stepper, window: Any, number: int, step: int = step) -> Any:
            if number == step:
                raise KeyboardInterrupt
            return original(self, window, number)

        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "take", take)
            with pytest.raises(KeyboardInterrupt):
                train(reallocating(run_config, tmp_path / "cut", pruned, **changes))
    assert "Continuing after step " in train(reallocating(run_config, tmp_path / "cut", pruned, **changes))
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert one.keys() == two.keys() and [name for name in one if not torch.equal(one[name], two[name])] == []
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


def test_a_changed_policy_is_refused_on_resume(pruned: Path, tmp_path: Path, run_config: Make) -> None:
    train(run_config(tmp_path / "run", 2, init_from=str(pruned / "checkpoint"), max_steps=1, adapter__dropout=0.0))
    with pytest.raises(ConfigError, match="  adapter.ranks: 'continue' there, 'reallocate' now"):
        train(reallocating(run_config, tmp_path / "run", pruned))


def test_ranks_above_the_new_initial_rank_are_refused(pruned: Path, tmp_path: Path, run_config: Make) -> None:
    config = reallocating(run_config, tmp_path / "run", pruned, adapter__init_r=1, adapter__target_r=1)
    with pytest.raises(ConfigError, match="adapter.init_r: ranks are grown again to it, so expected at least [234]"):
        train(config)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_allocation_an_optimizer_step_whatever_the_accumulation(
    pruned: Path, tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    calls: list[int] = []
    original = RankAllocator.step
    monkeypatch.setattr(RankAllocator, "step", lambda self: (calls.append(1), original(self))[1])
    results = {}
    for size, accumulation in ((4, 1), (1, 4)):
        calls.clear()
        folder = tmp_path / f"{size}x{accumulation}"
        changes = {"batch__micro_batch_size": size, "batch__gradient_accumulation": accumulation}
        if stage == 1:
            train(run_config(folder, adapter__dropout=0.0, **changes))
        else:
            train(reallocating(run_config, folder, pruned, **changes))
        results[accumulation] = rows(folder)
        assert len(calls) == len(results[accumulation]) == (6 if stage == 1 else 9)
    for key in ("ranks_kept", "orthogonality", "loss"):
        one, four = ([row[key] for row in results[accumulation]] for accumulation in (1, 4))
        assert four == pytest.approx(one, rel=1e-3), key


@pytest.mark.parametrize("stage", [1, 2])
def test_no_penalty_enters_validation(
    tmp_path: Path, run_config: Make, edits: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """PEFT's own would: it adds its penalty to every loss, those of validation included."""
    from lmm4edit.judge import model as judge_model
    from lmm4edit.training import loop

    computed: list[bool] = []
    inside = [False]
    penalty, validate = judge_model.orthogonality_penalty, loop.validate

    def counted(backbone: Any) -> Any:
        computed.append(inside[0])
        return penalty(backbone)

    def watched(*arguments: Any, **options: Any) -> Any:
        inside[0] = True
        values = validate(*arguments, **options)
        inside[0] = False
        return values

    monkeypatch.setattr(judge_model, "orthogonality_penalty", counted)
    monkeypatch.setattr(loop, "validate", watched)
    changes: dict[str, Any] = {"data__validation": str(edits / "test.jsonl"), "validation__every_steps": 1}
    if stage == 2:
        changes["init_from"] = "backbone"
    train(run_config(tmp_path / "run", stage, max_steps=4, **changes))
    assert computed == [False] * 4  # once a step, never in the four validations between
    assert all(row["orthogonality"] > 0 for row in rows(tmp_path / "run"))
    validations = rows(tmp_path / "run", "validation")
    assert len(validations) == 4
    assert not {key for row in validations for key in row if "loss" in key or "orthogonality" in key}


def test_a_finished_run_leaves_its_ranks(pruned: Path, tmp_path: Path, run_config: Make) -> None:
    with (pruned / "ranks.csv").open(encoding="utf-8", newline="") as file:
        listed = {row["module"]: (int(row["initial_rank"]), int(row["rank"])) for row in csv.DictReader(file)}
    ranks = effective_ranks(load_checkpoint(pruned / "checkpoint").model.backbone)
    assert listed == {name: (4, rank) for name, rank in ranks.items()}
    assert (pruned / "ranks.png").stat().st_size > 5000
    train(run_config(tmp_path / "none", adapter__kind="none", max_steps=1))
    assert not list((tmp_path / "none").glob("ranks.*"))
