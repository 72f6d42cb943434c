"""Runs of a few steps: reproducible, normalised, resumable, and honest about what went wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lmm4edit.config import TrainConfig
from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import adalora_layers, effective_ranks
from lmm4edit.judge.backbones import last_hidden_states
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.judge.rank_allocator import RankAllocator
from lmm4edit.records import BUILT_IN_DIMENSIONS
from lmm4edit.training import loop
from lmm4edit.training.loop import RunResult, run
from lmm4edit.training.objectives import TrainingError
from lmm4edit.training.plan import count_targets, derive_plan
from lmm4edit.training.samples import load_samples
from lmm4edit.training.steps import Stepper
from lmm4edit.training.tracking import read_metrics
from lmm4edit.training.trainee import build_trainee

Make = Callable[..., TrainConfig]
GOLDEN = Path(__file__).with_name("golden.json")


def train(config: TrainConfig, **options: Any) -> RunResult:
    return run(config, console=Console(quiet=True), **options)


def rows(folder: Path | str, kind: str = "train") -> list[dict[str, Any]]:
    """Rows of a run, without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if not key.endswith("_per_second")}
        for row in read_metrics(Path(folder) / "metrics.jsonl")
        if row["kind"] == kind
    ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a trained judge."""
    files = sorted((folder / "checkpoint").rglob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_tensors(one: Path, two: Path) -> None:
    first, second = tensors(one), tensors(two)
    assert first and first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def stored(key: str, now: Any) -> Any:
    """Golden values. RECORD_GOLDEN=1 writes what is computed now, for a change that was meant."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if os.environ.get("RECORD_GOLDEN"):
        golden[key] = now
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    return golden[key]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make step number ``step`` fail once, before it is taken."""
    original = Stepper.take

    def take(self: Stepper, window: Any, number: int) -> Any:
        if number == step:
            raise KeyboardInterrupt
        return original(self, window, number)

    monkeypatch.setattr(Stepper, "take", take)


def test_the_same_seed_gives_the_same_losses_to_the_bit(tmp_path: Path, run_config: Make) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(run_config(tmp_path / name, seed=seed, epochs=1, adapter__tinit=0, adapter__tfinal=1))
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert len(a) == 3 and a == b
    assert [row["loss"] for row in a] != [row["loss"] for row in c]
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_losses_follow_the_stored_sequence(stage1: Path, stage2: Path) -> None:
    golden = stored("losses", {f.name: [row["loss"] for row in rows(f)] for f in (stage1, stage2)})
    assert [row["loss"] for row in rows(stage1)] == pytest.approx(golden["stage1"], rel=2e-3)
    assert [row["loss"] for row in rows(stage2)] == pytest.approx(golden["stage2"], rel=2e-2)


def test_what_is_trained_is_written_down(tmp_path: Path, run_config: Make, edits: Path) -> None:
    config = run_config(tmp_path, stage=2, init_from="backbone")
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    plan = derive_plan(config, count_targets(samples, BUILT_IN_DIMENSIONS))
    model = build_trainee(config, plan, BUILT_IN_DIMENSIONS, samples, torch.device("cpu")).model
    trained = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    assert trained == stored("trained", trained)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, run_config: Make) -> Path:
    """A run without dropout, which others are compared with."""
    folder = tmp_path_factory.mktemp("steady") / "run"
    train(run_config(folder, adapter__dropout=0.0))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__micro_batch_size": 1, "batch__gradient_accumulation": 4},
        {"batch__packed": False},
        {"backbone__gradient_checkpointing": True},
        {"data__cache_megabytes": 8, "data__num_workers": 1},
    ],
    ids=["accumulation", "one question a sequence", "gradient checkpointing", "workers"],
)
def test_how_a_step_is_computed_does_not_change_the_run(
    steady: Path, tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    calls: list[int] = []
    original = RankAllocator.step
    monkeypatch.setattr(RankAllocator, "step", lambda self: (calls.append(1), original(self))[1])
    result = train(run_config(tmp_path / "run", adapter__dropout=0.0, **changes))
    assert result.plan is not None and result.plan.total_steps == 6
    # One call an optimizer step, whatever the accumulation.
    assert len(calls) == 6
    for key in ("loss", "grad_norm", "edits", "ranks_kept", "orthogonality"):
        expected = [row[key] for row in rows(steady)]
        assert [row[key] for row in rows(tmp_path / "run")] == pytest.approx(expected, rel=1e-3), key


def test_the_penalty_stands_apart_in_both_stages(stage1: Path, stage2: Path) -> None:
    for row in rows(stage1):
        assert row["orthogonality"] > 0
        assert row["loss"] == pytest.approx(row["text_loss"] + row["qa_loss"]) and row["score_loss"] is None
    for row in rows(stage2):
        assert row["orthogonality"] > 0
        assert row["loss"] == pytest.approx(row["score_loss"] + 0.1 * (row["qa_loss"] or 0.0))
        assert row["text_loss"] is None


def test_the_penalty_moves_the_weights(steady: Path, tmp_path: Path, run_config: Make) -> None:
    train(run_config(tmp_path / "strong", adapter__dropout=0.0, objective__orthogonality=100.0))
    train(run_config(tmp_path / "none", adapter__dropout=0.0, objective__orthogonality=0.0, max_steps=2))
    assert rows(tmp_path / "strong")[-1]["orthogonality"] < rows(steady)[-1]["orthogonality"]
    assert [row["orthogonality"] for row in rows(tmp_path / "none")] == [None, None]


def test_ranks_end_at_the_target(stage1: Path) -> None:
    backbone = load_checkpoint(stage1 / "checkpoint").model.backbone
    layers = adalora_layers(backbone)
    assert len(layers) == 24
    assert sum(effective_ranks(backbone).values()) == 2 * len(layers)
    assert rows(stage1)[-1]["ranks_kept"] == 2 * len(layers)


def test_stage_2_begins_with_stage_1_s_backbone_outputs(
    stage1: Path, tmp_path: Path, run_config: Make, edits: Path
) -> None:
    config = run_config(tmp_path, stage=2, init_from=str(stage1 / "checkpoint"))
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    plan = derive_plan(config, count_targets(samples, BUILT_IN_DIMENSIONS))
    trainee = build_trainee(config, plan, BUILT_IN_DIMENSIONS, samples, torch.device("cpu"))
    trainee.model.eval()
    trained = load_checkpoint(stage1 / "checkpoint").model
    dataset = loop.EditDataset(samples, trainee.encoding(config, teach=False))
    batch = dataset.collate(dataset.__getitems__([0, 1, 2])).batch
    with torch.no_grad():
        assert torch.equal(
            last_hidden_states(trainee.model.backbone, batch), last_hidden_states(trained.backbone, batch)
        )
    assert trainee.model.has_head and not trained.has_head
    names = {n for n, p in trainee.model.named_parameters() if p.requires_grad}
    assert (
        any("lora_A" in n for n in names)
        and any("merger" in n for n in names)
        and any("score_head" in n for n in names)
    )


def test_stage_2_keeps_pruned_ranks_pruned(stage1: Path, stage2: Path) -> None:
    before, after = (effective_ranks(load_checkpoint(f / "checkpoint").model.backbone) for f in (stage1, stage2))
    assert after == before and sum(after.values()) == 48


def test_the_stages_differ_in_what_they_have_learnt(stage1: Path, stage2: Path) -> None:
    one, two = tensors(stage1), tensors(stage2)
    adapters = [name for name in one if name.startswith("adapter_model") and one[name].numel()]
    assert adapters and all(not torch.equal(one[name], two[name]) for name in adapters)


def test_validation_rows_and_the_last_one_in_the_summary(stage1: Path) -> None:
    found = rows(stage1, "validation")
    assert [row["step"] for row in found] == [3, 6]
    assert all(row["read_out"] == "text" and row["n_answers"] == 5 for row in found)
    summary = json.loads((stage1 / "finished.json").read_text())
    assert summary["validation"]["step"] == 6 and summary["steps"] == 6


def test_the_run_folder_says_what_was_done(stage1: Path) -> None:
    assert sorted(path.name for path in stage1.iterdir()) == [
        "checkpoint",
        "config.yaml",
        "finished.json",
        "metrics.jsonl",
        "provenance.json",
        "ranks.csv",
        "ranks.png",
    ]
    provenance = json.loads((stage1 / "provenance.json").read_text())
    assert (provenance["stage"], provenance["seed"], provenance["training_samples"]) == (1, 0, 12)
    assert json.loads((stage1 / "checkpoint" / "provenance.json").read_text()) == provenance


@pytest.mark.parametrize(("stage", "cuts"), [(1, [3]), (2, [3, 5])])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    tmp_path: Path,
    run_config: Make,
    stage1: Path,
    edits: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    cuts: list[int],
) -> None:
    changes: dict[str, Any] = {"checkpoint__save_every_steps": 2}
    if stage == 2:
        validation = {"data__validation": str(edits / "test.jsonl"), "validation__every_steps": 2}
        changes |= {"init_from": str(stage1 / "checkpoint"), "checkpoint__keep_best": True, **validation}
    train(run_config(tmp_path / "whole", stage, **changes))
    for step in cuts:
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(run_config(tmp_path / "cut", stage, **changes))
    assert not (tmp_path / "cut" / "checkpoint").exists()
    assert train(run_config(tmp_path / "cut", stage, **changes)).status == "trained"
    assert_same_tensors(tmp_path / "whole", tmp_path / "cut")
    for kind in ("train", "validation"):
        assert rows(tmp_path / "whole", kind) == rows(tmp_path / "cut", kind)


def test_a_run_interrupted_before_its_first_state_begins_again(
    steady: Path, tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(run_config(tmp_path / "cut", adapter__dropout=0.0))
    assert len(rows(tmp_path / "cut")) == 2
    train(run_config(tmp_path / "cut", adapter__dropout=0.0))
    assert rows(tmp_path / "cut") == rows(steady)


def test_a_changed_configuration_or_changed_data_is_refused_on_resume(
    tmp_path: Path, run_config: Make, edits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(edits, tmp_path / "data")
    changes = {"data__train": str(data / "train.jsonl"), "checkpoint__save_every_steps": 1}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(run_config(tmp_path / "run", **changes))
    with pytest.raises(
        ConfigError, match=r"interrupted run with another configuration:\n  optimizer.learning_rate: 0.01 the"
    ):
        train(run_config(tmp_path / "run", optimizer__learning_rate=0.02, **changes))
    text = (data / "train.jsonl").read_text().replace('"add noise 0"', '"add more noise"')
    (data / "train.jsonl").write_text(text)
    with pytest.raises(ConfigError) as error:
        train(run_config(tmp_path / "run", **changes))
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path / 'run' / 'training_state' / 'step-00000002'}: the run was interrupted with other data or "
        "processes:\n  fingerprint of the training samples: "
    )
    assert message.endswith(
        "Put them back, add --accept-changes to continue with the new ones, or --restart to begin anew."
    )
    assert train(run_config(tmp_path / "run", **changes), accept_changes=True).status == "trained"


def test_a_finished_run_is_not_trained_again_unless_told_to(
    tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path / "run", max_steps=2)
    train(config)
    (tmp_path / "run" / "mine.txt").write_text("keep")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0)
        console = Console(width=500, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
        result = run(config, console=console)
    assert result.status == "finished before" and result.checkpoint == tmp_path / "run" / "checkpoint"
    assert console.export_text() == (
        f"{tmp_path / 'run'}: this run is finished; its judge is {tmp_path / 'run' / 'checkpoint'}. Nothing was trained"
        ". Add --restart to train anew, or choose another run_dir.\n"
    )
    before = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns
    assert train(config, restart=True).status == "trained"
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns != before
    assert (tmp_path / "run" / "mine.txt").exists()


def test_a_restart_that_cannot_begin_removes_nothing(tmp_path: Path, run_config: Make) -> None:
    config = run_config(tmp_path / "run", max_steps=2)
    train(config)
    own = str(tmp_path / "run" / "checkpoint")
    stage_2 = {"stage": 2, "init_from": own}
    for changed in (
        run_config(tmp_path / "run", data__train=str(tmp_path / "none.jsonl")),
        run_config(tmp_path / "run", stage=2, init_from=str(tmp_path / "none")),
        run_config(tmp_path / "run", **stage_2),
    ):
        with pytest.raises((ConfigError, CheckpointError)):
            train(changed, restart=True)
        assert load_checkpoint(tmp_path / "run" / "checkpoint") and (tmp_path / "run" / "finished.json").exists()
    with pytest.raises(ConfigError, match="init_from: expected a judge outside of this run's folder"):
        train(run_config(tmp_path / "run", **stage_2), restart=True)


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path, run_config: Make) -> None:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    config = run_config(tmp_path / "run", stage=2, init_from=str(tmp_path / "later"))
    result = run(config, dry_run=True, console=console)
    assert result.status == "dry run" and result.plan is not None and result.plan.total_steps == 6
    assert list(tmp_path.iterdir()) == []
    text = console.export_text()
    assert "later is not there yet; the run would need it." in text
    assert "trained: score head" in text and "12 quality, 9 alignment, 12 preservation, 9 yes/no" in text


def test_a_dry_run_before_the_images_are_there_shows_the_plan_and_fails(
    tmp_path: Path, run_config: Make, rows: Any, write_rows: Any
) -> None:
    for row in rows:
        row["source_image"] = f"later/{row['source_image']}"
    config = run_config(tmp_path / "run", data__train=str(write_rows(tmp_path / "t.jsonl", rows)))
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with pytest.raises(ConfigError, match=f"of its {len(rows)} samples none has both images in a readable state"):
        run(config, dry_run=True, console=console)
    text = console.export_text()
    assert f"│ {len(rows)} " in text and "optimizer steps" in text
    assert "left out: " in text and "expected an image file, got nothing there" in text
    with pytest.raises(ConfigError, match="no usable sample"):
        train(config)


def test_without_a_manifest_it_is_said_how_to_make_one(tmp_path: Path, run_config: Make) -> None:
    config = run_config(tmp_path / "run", data__train=str(tmp_path / "none.jsonl"))
    for dry in (True, False):
        with pytest.raises(ConfigError, match=r"data\.train: expected a manifest, .*`lmm4edit data import"):
            run(config, dry_run=dry, console=Console(quiet=True))


def test_a_dry_run_counts_published_shapes_without_their_files(tmp_path: Path, run_config: Make) -> None:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    name = "Qwen/Qwen2.5-VL-7B-Instruct"
    run(run_config(tmp_path / "run", backbone__name_or_path=name), dry_run=True, console=console)
    text = console.export_text()
    assert "trained: projector │ 44,574,464" in " ".join(text.split())
    assert f"Assumed: the published shape of Qwen2.5-VL 7B, for the files of {name} are not on this machine." in text


def test_a_dry_run_counts_what_the_run_trains(tmp_path: Path, run_config: Make) -> None:
    texts = []
    for dry in (True, False):
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        run(run_config(tmp_path / "run", max_steps=4, stage=2, init_from="backbone"), dry_run=dry, console=console)
        texts.append([line for line in console.export_text().splitlines() if "trained" in line and "│" in line])
    assert texts[0] == texts[1] and len(texts[0]) == 5


def test_broken_rows_are_named_counted_and_left_out(
    tmp_path: Path, run_config: Make, rows: Any, write_rows: Any
) -> None:
    rows[3]["edited_image"] = "gone.png"
    manifest = write_rows(tmp_path / "t.jsonl", rows)
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    result = run(run_config(tmp_path / "run", data__train=str(manifest), max_steps=2), console=console)
    assert result.plan is not None and (result.plan.counts.edits, result.plan.counts.skipped) == (11, 1)
    text = console.export_text()
    assert f"left out: {manifest}:4: sample 'e3': " in text and "11 (1 left out)" in text
    (skipped,) = json.loads((tmp_path / "run" / "provenance.json").read_text())["skipped_rows"]
    assert skipped.startswith(f"{manifest}:4: sample 'e3': ")


def test_a_sample_that_breaks_on_the_way_is_left_out_and_reported(
    tmp_path: Path, run_config: Make, edits: Path, write_rows: Any
) -> None:
    data = shutil.copytree(edits, tmp_path / "data")
    # Its header is sound, so only decoding finds the damage.
    (data / "edit5.png").write_bytes((data / "edit5.png").read_bytes()[:300])
    changes = {"data__train": str(data / "train.jsonl"), "data__check_images": "header"}
    assert train(run_config(tmp_path / "run", **changes)).status == "trained"
    failures = read_metrics(tmp_path / "run" / "metrics.jsonl")
    failures = [row for row in failures if row["kind"] == "failure"]
    assert [row["sample_id"] for row in failures] == ["e5", "e5"] and "edit5.png" in failures[0]["reason"]
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["failed_samples"] == 2
    for index in range(1, 12):
        (data / f"edit{index}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(
        TrainingError, match="samples have become unreadable since the start of the run, more than 10: e"
    ):
        train(run_config(tmp_path / "worse", **changes))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_samples(tmp_path: Path, run_config: Make) -> None:
    config = run_config(tmp_path / "run", optimizer__learning_rate=1e30, checkpoint__save_every_steps=1)
    with pytest.raises(TrainingError) as error:
        train(config)
    message = str(error.value)
    assert message.startswith("Optimizer step 2: expected a finite loss, got text ")
    assert "Samples of the batches concerned: e" in message
    assert message.endswith(
        "The step was not taken. Look at these samples, or lower optimizer.learning_rate; the same command continues "
        "from the last training state."
    )
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]


def test_the_best_judge_by_validation_is_kept(tmp_path: Path, run_config: Make, edits: Path) -> None:
    changes = {
        "data__validation": str(edits / "test.jsonl"),
        "validation__every_steps": 1,
        "checkpoint__keep_best": True,
    }
    train(run_config(tmp_path / "run", stage=2, init_from="backbone", **changes))
    values = [row["srcc_mean"] for row in rows(tmp_path / "run", "validation")]
    assert len(values) == 6 and None not in values
    assert load_checkpoint(tmp_path / "run" / "checkpoint-best").meta.has_head


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("lora", {}),
        ("full", {"adapter__vision": False}),
        pytest.param("none", {}, marks=pytest.mark.slow),
        pytest.param("adalora", {"adapter__projector": False}, marks=pytest.mark.slow),
        pytest.param("adalora", {"adapter__vision": False}, marks=pytest.mark.slow),
    ],
)
def test_other_adapters_train_through_both_stages(
    tmp_path: Path, run_config: Make, kind: str, changes: dict[str, Any]
) -> None:
    changes = {"adapter__kind": kind, **changes}
    train(run_config(tmp_path / "one", max_steps=4, **changes))
    two = run_config(tmp_path / "two", stage=2, max_steps=2, init_from=str(tmp_path / "one" / "checkpoint"), **changes)
    assert train(two).status == "trained"
    assert load_checkpoint(tmp_path / "two" / "checkpoint").meta.has_head
    assert all(row["ranks_kept"] is None for row in rows(tmp_path / "two")) is (kind != "adalora")


def test_a_starting_judge_with_other_adapters_is_refused(tmp_path: Path, run_config: Make, stage1: Path) -> None:
    start = str(stage1 / "checkpoint")
    with pytest.raises(ConfigError) as error:
        train(run_config(tmp_path / "a", stage=2, init_from=start, adapter__kind="lora"))
    assert str(error.value) == (
        f"{start}: the starting judge has other adapters than this configuration describes:\n"
        "  adapter.kind: expected adalora, got lora.\n"
        "Put in the expected values, or start from the backbone."
    )
    with pytest.raises(ConfigError, match="adapter.vision: expected true, got false"):
        train(run_config(tmp_path / "b", stage=2, init_from=start, adapter__vision=False))


def test_a_judge_is_trained_further_with_its_head_and_scale(tmp_path: Path, run_config: Make, stage2: Path) -> None:
    start = str(stage2 / "checkpoint")
    train(run_config(tmp_path / "run", stage=2, max_steps=1, optimizer__learning_rate=1e-12, init_from=start))
    before, after = (load_checkpoint(folder / "checkpoint").model for folder in (stage2, tmp_path / "run"))
    assert before.target_scale == after.target_scale
    assert before.score_head is not None and after.score_head is not None
    torch.testing.assert_close(after.score_head.first.weight, before.score_head.first.weight)


def test_bfloat16_freezes_in_bfloat16_and_trains_in_float32(tmp_path: Path, run_config: Make, edits: Path) -> None:
    changes = {"data__validation": str(edits / "test.jsonl"), "validation__every_epochs": 1}
    config = run_config(
        tmp_path / "run", stage=2, epochs=1, init_from="backbone", backbone__dtype="bfloat16", **changes
    )
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    plan = derive_plan(config, count_targets(samples, BUILT_IN_DIMENSIONS))
    model = build_trainee(config, plan, BUILT_IN_DIMENSIONS, samples, torch.device("cpu")).model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    frozen = {p.dtype for n, p in model.named_parameters() if not p.requires_grad and "ranknum" not in n}
    assert frozen == {torch.bfloat16}
    assert train(config).status == "trained"


def test_rows_reach_a_caller_that_shows_its_own_progress(tmp_path: Path, run_config: Make) -> None:
    seen: list[Any] = []
    train(run_config(tmp_path / "run", log_every_steps=4), on_row=seen.append)
    assert [row["step"] for row in seen] == [4, 6]
    assert seen == read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["edits_per_second"] > 0 for row in seen)


def test_a_dimension_of_one_s_own_is_trained(tmp_path: Path, run_config: Make, rows: Any, write_rows: Any) -> None:
    for index, row in enumerate(rows):
        row["mos_mood"] = 1 + index % 5
    own = {"name": "mood", "question": "Rate the mood.", "low": 1, "high": 5}
    changes = {
        "data__train": str(write_rows(tmp_path / "t.jsonl", rows)),
        "dimensions": ["quality", own],
    }
    train(run_config(tmp_path / "run", stage=2, max_steps=2, init_from="backbone", **changes))
    judge = load_checkpoint(tmp_path / "run" / "checkpoint")
    assert [d.name for d in judge.meta.dimensions] == ["quality", "mood"]
    assert judge.model.target_scale is not None and judge.model.target_scale.mean[1] == pytest.approx(2.75)
