"""What a run will do, derived and checked before the model is built, and printed before step 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.records import Dimension, EditSample
from lmm4edit.training.order import DataOrder


@dataclass(frozen=True)
class TargetCounts:
    """What the samples can teach.

    Attributes:
        edits: samples that are used.
        skipped: rows left out because they are broken.
        scores: for each dimension, how many edits have a human score.
        answers: edits with a question and its answer.
    """

    edits: int
    skipped: int
    scores: Mapping[str, int]
    answers: int

    @property
    def question_rows(self) -> int:
        """Questions with a known answer: what the paper counts as one sample of a batch."""
        return sum(self.scores.values()) + self.answers


@dataclass(frozen=True)
class TrainingPlan:
    """Derived numbers of a run. Steps are optimizer steps.

    Attributes:
        counts: see :class:`TargetCounts`.
        world_size: processes.
        edits_per_step: edits in a full optimizer step.
        steps_per_epoch, total_steps, warmup_steps: of the schedule.
        tinit, tfinal, delta_t: AdaLoRA's schedule, ``None`` where ranks do not change in this run.
        save_every_steps: distance of two training states.
        validation_steps: steps after which validation runs.
    """

    counts: TargetCounts
    world_size: int
    edits_per_step: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    tinit: int | None
    tfinal: int | None
    delta_t: int | None
    save_every_steps: int
    validation_steps: frozenset[int]

    def epoch_after(self, step: int) -> float:
        """Passes over the data that ``step`` steps make."""
        return step / self.steps_per_epoch


def count_targets(samples: Sequence[EditSample], dimensions: Sequence[Dimension], skipped: int = 0) -> TargetCounts:
    """Count what the samples can teach."""
    return TargetCounts(
        edits=len(samples),
        skipped=skipped,
        scores={d.name: sum(d.name in sample.mos for sample in samples) for d in dimensions},
        answers=sum(sample.question is not None and sample.answer is not None for sample in samples),
    )


def derive_plan(config: TrainConfig, counts: TargetCounts, world_size: int = 1) -> TrainingPlan:
    """Derive the schedule from data size, processes, accumulation and epochs.

    Raises:
        ConfigError: if there is nothing to train on, a dimension has no score, or the phases do not fit in the run.
    """
    problems = []
    if not counts.edits:
        problems.append(f"{config.data.train}: no usable sample ({counts.skipped} were left out).")
    elif config.needs_scores() and (absent := _without_scores(config, counts)):
        columns = ", ".join(f"mos_{name}" for name in absent)
        problems.append(f"{config.data.train}: no sample has {columns}. Add the columns, or leave the dimensions out.")
    if problems:
        raise ConfigError("\n".join(problems))

    order = DataOrder(
        counts.edits, config.batch.micro_batch_size, config.batch.gradient_accumulation, world_size=world_size
    )
    total = order.steps_per_epoch * config.epochs
    if config.max_steps is not None:
        total = min(total, config.max_steps)
    tinit, tfinal, delta_t = _rank_schedule(config, total)
    return TrainingPlan(
        counts=counts,
        world_size=world_size,
        edits_per_step=order.edits_per_step,
        steps_per_epoch=order.steps_per_epoch,
        total_steps=total,
        warmup_steps=math.floor(config.optimizer.warmup_ratio * total),
        tinit=tinit,
        tfinal=tfinal,
        delta_t=delta_t,
        save_every_steps=config.checkpoint.save_every_steps or max(1, math.ceil(total / 10)),
        validation_steps=_validation_steps(config, total, order.steps_per_epoch),
    )


def _without_scores(config: TrainConfig, counts: TargetCounts) -> list[str]:
    """Dimensions that cannot be learnt. A judge that is trained further may know some that the new data do not rate."""
    absent = [name for name, n in counts.scores.items() if not n]
    return absent if config.starting_checkpoint() is None or len(absent) == len(counts.scores) else []


def render_plan(
    config: TrainConfig,
    plan: TrainingPlan,
    parameters: Mapping[str, tuple[int, int]] | None,
    ranks: str,
) -> Table:
    """The plan as a table for people.

    Args:
        config: of the run.
        plan: its derived numbers.
        parameters: for each part of the model (trained parameters, all parameters); ``None`` if not known here.
        ranks: one line on the adapters' ranks.
    """
    table = Table(title=f"Stage {config.stage}: {config.run_dir}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    counts = plan.counts
    left_out = f" ({counts.skipped:,} left out)" if counts.skipped else ""
    table.add_row("edits", f"{counts.edits:,}{left_out}")
    rows = ", ".join([*(f"{n:,} {name}" for name, n in counts.scores.items()), f"{counts.answers:,} yes/no"])
    table.add_row("question-rows", f"{counts.question_rows:,} ({rows})")
    batch = config.batch
    table.add_row(
        "edits a step",
        f"{plan.edits_per_step:,} = {plan.world_size} processes x {batch.micro_batch_size} edits x "
        f"{batch.gradient_accumulation} passes, {'packed' if batch.packed else 'one question a sequence'}",
    )
    table.add_row(
        "optimizer steps",
        f"{plan.total_steps:,} ({plan.steps_per_epoch:,} an epoch, {plan.epoch_after(plan.total_steps):.2f} epochs)",
    )
    optimizer = config.optimizer
    table.add_row(
        "learning rate",
        f"{optimizer.learning_rate:g}, {plan.warmup_steps:,} steps of warm-up, then {optimizer.schedule}",
    )
    objective = {key: weight for key, weight in config.objective.model_dump().items() if weight}
    table.add_row("objective", " + ".join(f"{weight:g} {key}" for key, weight in objective.items()))
    table.add_row("start", config.init_from or "backbone")
    if parameters is None:
        table.add_row("trained parameters", f"not known without the files of {config.backbone.name_or_path}")
    else:
        for part, (trained, everything) in parameters.items():
            share = f" of {everything:,}" if everything != trained else ""
            table.add_row(f"trained: {part}", f"{trained:,}{share}" if trained else f"frozen ({everything:,})")
        total = sum(trained for trained, _ in parameters.values())
        table.add_row("trained: total", f"{total:,}")
    table.add_row("ranks", ranks)
    table.add_row("states", f"every {plan.save_every_steps:,} steps, the last {config.checkpoint.keep_last} kept")
    validations = len(plan.validation_steps)
    table.add_row("validation", f"{validations:,} times, {config.data.validation}" if validations else "off")
    return table


def describe_rank_schedule(config: TrainConfig, plan: TrainingPlan) -> str:
    """One line on what happens to the adapters' ranks in this run."""
    adapter = config.adapter
    if adapter.kind == "lora":
        return f"{adapter.init_r} (LoRA: fixed)"
    if adapter.kind != "adalora":
        return f"none (adapter kind {adapter.kind})"
    if plan.tinit is None or plan.tfinal is None:
        return "kept from the starting judge (adapter.ranks: continue)"
    last = plan.total_steps - plan.tfinal
    regrown = ""
    if config.starting_checkpoint() is not None:
        regrown = f"every matrix of the starting judge grown to {adapter.init_r} (adapter.ranks: reallocate), then "
    return (
        f"{regrown}mean {adapter.init_r} -> {adapter.target_r} (AdaLoRA): pruned every {plan.delta_t} steps from step "
        f"{plan.tinit:,} to {last:,}"
    )


def _rank_schedule(config: TrainConfig, total: int) -> tuple[int | None, int | None, int | None]:
    adapter = config.adapter
    # A judge that is trained further keeps its ranks unless told otherwise: pruning undoes part of what it has learnt.
    keeps = config.starting_checkpoint() is not None and adapter.ranks == "continue"
    if adapter.kind != "adalora" or keeps:
        return None, None, None
    tinit = adapter.tinit if adapter.tinit is not None else total // 10
    tfinal = adapter.tfinal if adapter.tfinal is not None else max(1, round(0.3 * total))
    if tinit + tfinal >= total:
        raise ConfigError(
            f"adapter: AdaLoRA prunes after tinit={tinit} and before the last tfinal={tfinal} steps, but the run "
            f"has only {total}. Train longer (epochs, max_steps, a smaller batch), lower tinit and tfinal, or use "
            "kind: lora."
        )
    return tinit, tfinal, adapter.delta_t or max(1, (total - tinit - tfinal) // 50)


def _validation_steps(config: TrainConfig, total: int, per_epoch: int) -> frozenset[int]:
    validation = config.validation
    every = validation.every_steps or (validation.every_epochs or 0) * per_epoch
    # The end of the run is always validated, so that the last row describes the checkpoint.
    return frozenset([*range(every, total + 1, every), total]) if every else frozenset()
