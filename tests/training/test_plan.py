"""The plan: derived numbers, checked and printed before step 1."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from lmm4edit.errors import ConfigError
from lmm4edit.records import BUILT_IN_DIMENSIONS, EditSample
from lmm4edit.training.plan import TargetCounts, count_targets, derive_plan, describe_rank_schedule, render_plan

COUNTS = TargetCounts(edits=100, skipped=2, scores={"quality": 100, "alignment": 90, "preservation": 80}, answers=70)


def sample(index: int, **changes: Any) -> EditSample:
    return EditSample(str(index), "s", "a.png", "b.png", "go", **changes)


def test_targets_are_counted_where_they_are_known() -> None:
    samples = [
        sample(0, mos={"quality": 1.0, "mood": 2.0}, question="?", answer="yes"),
        sample(1, mos={"quality": 1.0, "alignment": 2.0}, question="?"),
        sample(2, answer="no"),
    ]
    counts = count_targets(samples, BUILT_IN_DIMENSIONS, skipped=4)
    assert counts == TargetCounts(3, 4, {"quality": 2, "alignment": 1, "preservation": 0}, 1)
    assert counts.question_rows == 4


def test_steps_follow_from_data_processes_accumulation_and_epochs(make_config: Any) -> None:
    config = make_config(
        epochs=3, batch__micro_batch_size=2, batch__gradient_accumulation=4, optimizer__warmup_ratio=0.1
    )
    plan = derive_plan(config, COUNTS, world_size=3)
    assert plan.edits_per_step == 24
    assert plan.steps_per_epoch == 5
    assert plan.total_steps == 15
    assert plan.warmup_steps == 1
    assert (plan.tinit, plan.tfinal, plan.delta_t) == (1, 4, 1)
    assert plan.save_every_steps == 2
    assert plan.validation_steps == frozenset()
    assert plan.epoch_after(10) == 2.0


def test_max_steps_ends_the_schedule_early(make_config: Any) -> None:
    assert derive_plan(make_config(max_steps=7), COUNTS).total_steps == 7
    assert derive_plan(make_config(max_steps=7000), COUNTS).total_steps == 50


def test_validation_comes_after_epochs_or_steps_and_always_at_the_end(make_config: Any) -> None:
    by_epoch = make_config(epochs=2, data__validation="v.jsonl", validation__every_epochs=1)
    assert derive_plan(by_epoch, COUNTS).validation_steps == {50, 100}
    by_steps = make_config(data__validation="v.jsonl", validation__every_steps=20)
    assert derive_plan(by_steps, COUNTS).validation_steps == {20, 40, 50}


def test_ranks_are_pruned_in_a_run_that_starts_from_the_backbone_or_reallocates(make_config: Any) -> None:
    fresh = make_config()
    plan = derive_plan(fresh, COUNTS)
    assert describe_rank_schedule(fresh, plan) == ("mean 12 -> 8 (AdaLoRA): pruned every 1 steps from step 5 to 35")
    later = make_config(stage=2, objective={"score_mse": 1.0}, init_from="runs/one/checkpoint")
    plan = derive_plan(later, COUNTS)
    assert (plan.tinit, plan.tfinal, plan.delta_t) == (None, None, None)
    assert describe_rank_schedule(later, plan) == "kept from the starting judge (adapter.ranks: continue)"
    anew = make_config(
        stage=2, objective={"score_mse": 1.0}, init_from="runs/one/checkpoint", adapter__ranks="reallocate"
    )
    plan = derive_plan(anew, COUNTS)
    assert (plan.tinit, plan.tfinal, plan.delta_t) == (5, 15, 1)
    assert describe_rank_schedule(anew, plan) == (
        "every matrix of the starting judge grown to 12 (adapter.ranks: reallocate), then mean 12 -> 8 (AdaLoRA): "
        "pruned every 1 steps from step 5 to 35"
    )
    lora = make_config(adapter__kind="lora")
    assert describe_rank_schedule(lora, derive_plan(lora, COUNTS)) == "12 (LoRA: fixed)"
    full = make_config(adapter__kind="full")
    assert describe_rank_schedule(full, derive_plan(full, COUNTS)) == "none (adapter kind full)"


def test_a_run_too_short_for_its_rank_schedule_is_refused(make_config: Any) -> None:
    with pytest.raises(ConfigError) as error:
        derive_plan(make_config(adapter__tinit=30, adapter__tfinal=20), COUNTS)
    assert str(error.value) == (
        "adapter: AdaLoRA prunes after tinit=30 and before the last tfinal=20 steps, but the run has only 50. Train "
        "longer (epochs, max_steps, a smaller batch), lower tinit and tfinal, or use kind: lora."
    )


def test_nothing_to_train_on_is_refused(make_config: Any) -> None:
    with pytest.raises(ConfigError) as error:
        derive_plan(make_config(), TargetCounts(0, 5, {"quality": 0}, 0))
    assert str(error.value) == "train.jsonl: no usable sample (5 were left out)."


def test_a_dimension_without_any_score_is_refused_unless_only_answers_are_trained(make_config: Any) -> None:
    counts = TargetCounts(4, 0, {"quality": 4, "mood": 0}, 4)
    with pytest.raises(ConfigError) as error:
        derive_plan(make_config(), counts)
    assert str(error.value) == "train.jsonl: no sample has mos_mood. Add the columns, or leave the dimensions out."
    assert derive_plan(make_config(objective={"qa_ce": 1.0}), counts).total_steps == 2


def test_the_table_shows_what_will_happen(make_config: Any) -> None:
    config = make_config(batch__gradient_accumulation=4, optimizer__warmup_ratio=0.1)
    plan = derive_plan(config, COUNTS)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    parameters = {"vision": (10, 1000), "projector": (50, 50), "llm": (0, 2000)}
    console.print(render_plan(config, plan, parameters, describe_rank_schedule(config, plan)))
    text = console.export_text()
    for expected in [
        "Stage 1: runs/x",
        "100 (2 left out)",
        "340 (100 quality, 90 alignment, 80 preservation, 70 yes/no)",
        "8 = 1 processes x 2 edits x 4 passes, packed",
        "13 (13 an epoch, 1.00 epochs)",
        "0.001, 1 steps of warm-up, then cosine",
        "1 text_ce + 1 qa_ce + 0.5 orthogonality",
        "10 of 1,000",
        "frozen (2,000)",
        "60",
        "mean 12 -> 8",
    ]:
        assert expected in text, text
    console.print(render_plan(config, plan, None, ""))
    assert "not known without the files of b" in console.export_text()
