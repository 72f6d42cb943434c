"""A training run, for both stages: data, plan, steps, validation, states, checkpoint.

Everything a step does is a function of the configuration, the data and the state before it, so an interrupted run that
continues ends with the same tensors as one that was never interrupted.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import backbone_spec, plain_model
from lmm4edit.judge.checkpoint import save_checkpoint
from lmm4edit.judge.published import describe_backbone
from lmm4edit.judge.ranks import read_ranks
from lmm4edit.process_lock import ProcessLock
from lmm4edit.provenance import collect_provenance, jsonable
from lmm4edit.records import BUILT_IN_DIMENSIONS, EditSample
from lmm4edit.training.before_after import compare, render
from lmm4edit.training.dataset import EditDataset, MicroBatch, iterate_micro_batches
from lmm4edit.training.objectives import TrainingError
from lmm4edit.training.order import DataOrder
from lmm4edit.training.plan import (
    TrainingPlan,
    count_targets,
    derive_plan,
    describe_rank_schedule,
    render_plan,
)
from lmm4edit.training.processes import Processes
from lmm4edit.training.progress import RunProgress, describe_validation
from lmm4edit.training.run_folder import RunFolder, RunStatus, lock_folder, write_atomically
from lmm4edit.training.samples import LoadedSamples, retention_samples, training_samples, validation_samples
from lmm4edit.training.state import (
    TrainingState,
    latest_state,
    load_state,
    restore_random_state,
    save_state,
)
from lmm4edit.training.steps import Stepper, StepResult
from lmm4edit.training.strategy import Strategy, StrategyChoice, build_strategy, check_strategy, choose_strategy
from lmm4edit.training.tracking import Tracker, read_metrics
from lmm4edit.training.trainee import (
    build_trainee,
    count_without_weights,
    parameters_by_part,
    run_dimensions,
)
from lmm4edit.training.validation import validate

FAILED_PART = 0.01
"""A run stops when more than this part of its edits (and more than ten) have become unreadable on the way."""

_SHOWN_ROWS = 5


@dataclass(frozen=True)
class RunResult:
    """How a call of :func:`run` ended.

    Attributes:
        status: ``trained``; ``finished before``: there was nothing left to do; ``dry run``: only checked and planned.
        folder: of the run.
        checkpoint: the trained judge; ``None`` after a dry run.
        plan: the derived numbers; ``None`` if the run was finished before.
        validation: the last validation row, if there was one.
    """

    status: Literal["trained", "finished before", "dry run"]
    folder: Path
    checkpoint: Path | None
    plan: TrainingPlan | None
    validation: Mapping[str, Any] | None = None


def run(
    config: TrainConfig,
    *,
    restart: bool = False,
    dry_run: bool = False,
    planned_processes: int | None = None,
    accept_changes: bool = False,
    console: Console | None = None,
    on_row: Callable[[Mapping[str, Any]], None] | None = None,
) -> RunResult:
    """Train, or continue an interrupted run, or find that it is finished.

    Args:
        config: what to do.
        restart: remove what the run folder holds and begin anew.
        dry_run: check configuration and data, print the plan, and stop; writes nothing and loads no weights.
        planned_processes: plan a dry run for so many processes; default: those of this launch.
        accept_changes: continue an interrupted run although configuration, data or number of processes changed.
        console: where the plan and the progress go; default: the terminal.
        on_row: called with every row of ``metrics.jsonl``; whoever gives it shows progress itself, and no bar is drawn.

    Raises:
        ConfigError: if configuration, data and run folder do not fit each other.
        ManifestError, CheckpointError: if data or the starting judge cannot be read.
        TrainingError: if training cannot go on; the same command continues from the last state.
    """
    choice = choose_strategy(config, os.environ)
    processes = Processes()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    shown = console or Console()
    if not processes.is_first:
        shown = Console(quiet=True)
    folder = RunFolder(Path(config.run_dir))
    if dry_run:
        return _dry_run(config, processes, choice, shown, folder, planned_processes)
    strategy = build_strategy(choice, config, processes)
    locks: list[ProcessLock] = []
    # Held by the first process alone, for all.
    processes.first(lambda: locks.append(lock_folder(folder)))
    try:
        return _Run(config, strategy, shown, folder, accept_changes, on_row).go(restart)
    finally:
        for lock in locks:
            lock.release()


def _dry_run(
    config: TrainConfig,
    processes: Processes,
    choice: StrategyChoice,
    console: Console,
    folder: RunFolder,
    planned_processes: int | None,
) -> RunResult:
    world_size = planned_processes or processes.world_size
    check_strategy(choice, config, world_size)
    start = config.starting_checkpoint()
    if start is not None and not start.exists():
        console.print(f"The starting judge {start} is not there yet; the run would need it.", highlight=False)
        dimensions = config.build_dimensions() or BUILT_IN_DIMENSIONS
    else:
        dimensions = run_dimensions(config)
    data = processes.first(lambda: training_samples(config, dimensions))
    _print_skipped(console, data, "")
    # A release is often read before its images are unpacked: the plan does not depend on them, but it is no success.
    without_images = None
    if not data.samples:
        without_images = processes.first(lambda: training_samples(config, dimensions, check_images=False))
    counted = without_images or data
    plan = derive_plan(config, count_targets(counted.samples, dimensions, len(counted.skipped)), world_size)
    processes.first(lambda: validation_samples(config, dimensions))
    parameters, assumed = None, None
    if processes.is_first:
        described, assumed = describe_backbone(config.backbone.name_or_path)
        parameters = count_without_weights(described, config, len(dimensions)) if described is not None else None
    console.print(render_plan(config, plan, parameters, describe_rank_schedule(config, plan)))
    if assumed:
        console.print(f"Assumed: {assumed}.", highlight=False)
    console.print(f"Strategy: {choice.describe(world_size)}.", highlight=False)
    if without_images is not None:
        raise ConfigError(
            f"{config.data.train}: of its {len(without_images.samples):,} samples none has both images in a readable "
            "state (above: why). This plan counts them all; a run would refuse them. Unpack the images where the "
            "manifest looks for them, or give their folder with data.image_root=FOLDER."
        )
    return RunResult("dry run", folder.path, None, plan)


class _Run:
    """One call of :func:`run` that trains."""

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        console: Console,
        folder: RunFolder,
        accept_changes: bool,
        on_row: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        self.config, self.console, self.folder = config, console, folder
        self.strategy, self.processes = strategy, strategy.processes
        self.accept_changes, self.on_row = accept_changes, on_row
        self.best: float | None = None
        self.failed = 0
        self.failed_ids: list[str] = []
        self.validation: dict[str, Any] | None = None

    def go(self, restart: bool) -> RunResult:
        config, processes, folder = self.config, self.processes, self.folder
        _refuse_own_start(config, folder)
        # What is there is removed only when everything a new run needs has been found to be in order.
        found = (
            RunStatus.NEW
            if restart
            else processes.first(lambda: folder.open(config, accept_changes=self.accept_changes))
        )
        if found is RunStatus.FINISHED:
            self.console.print(
                f"{folder.path}: this run is finished; its judge is {folder.checkpoint}. Nothing was trained. "
                "Add --restart to train anew, or choose another run_dir.",
                highlight=False,
            )
            return RunResult(
                "finished before", folder.path, folder.checkpoint, None, folder.read_summary()["validation"]
            )
        dimensions = run_dimensions(config)
        data = processes.first(lambda: training_samples(config, dimensions))
        if not data.samples:
            _print_skipped(self.console, data, "")
        self.plan = derive_plan(
            config, count_targets(data.samples, dimensions, len(data.skipped)), processes.world_size
        )
        to_validate = processes.first(lambda: validation_samples(config, dimensions))
        to_retain = processes.first(lambda: retention_samples(config, dimensions))
        self.trainee = build_trainee(config, self.plan, dimensions, data.samples, self.strategy.load_device)
        if restart:
            processes.first(lambda: folder.begin_anew(config))
        self._announce(data)
        self.stepper = Stepper(self.trainee, config, self.plan, self.strategy)
        self.facts = {
            "data": data.fingerprint(),
            "world_size": processes.world_size,
            # Whole optimizer states are interchangeable, divided ones fit their own strategy alone.
            "optimizer": self.strategy.choice.kind if self.strategy.sharded_optimizer else "whole",
        }
        self.provenance = self._provenance(data)
        _seed_everything(config.seed, processes.rank)
        first_step = self._resume()
        self.tracker = Tracker(config, folder.path, first_step or None) if processes.is_first else None
        try:
            self._train(data, to_validate, to_retain, first_step)
        finally:
            if self.tracker is not None:
                self.tracker.close()
        self._finish()
        return RunResult("trained", folder.path, folder.checkpoint, self.plan, self.validation)

    def _train(
        self, data: LoadedSamples, to_validate: list[EditSample], to_retain: list[EditSample], first_step: int
    ) -> None:
        config, plan, processes = self.config, self.plan, self.processes
        cache = config.data.cache_megabytes
        dataset = EditDataset(data.samples, self.trainee.encoding(config), cache)
        asking = self.trainee.encoding(config, teach=False)
        validation_set = EditDataset(to_validate, asking, cache)
        retention_set = EditDataset(to_retain, asking, cache)
        batch = config.batch
        order = DataOrder(
            n_edits=len(dataset),
            micro_batch_size=batch.micro_batch_size,
            gradient_accumulation=batch.gradient_accumulation,
            seed=config.seed,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        micro_batches = iterate_micro_batches(dataset, order, first_step, plan.total_steps, config.data.num_workers)
        self.trainee.model.train()
        visible = processes.is_first and self.on_row is None
        since, edits, tokens = time.perf_counter(), 0, 0
        with RunProgress(self.console, f"stage {config.stage}", plan.total_steps, first_step, visible) as self.progress:
            if first_step == 0 and self.trainee.starts_with_head:
                self._validate(0, validation_set)
                self._validate(0, retention_set, "retention")
                since = time.perf_counter()
            for step in range(first_step, plan.total_steps):
                result = self.stepper.take(_next_window(micro_batches, len(order.window(step))), step)
                edits, tokens = edits + result.n_edits, tokens + result.n_tokens
                done = step + 1
                self._note_failures(result, done)
                if done % config.log_every_steps == 0 or done == plan.total_steps:
                    seconds = time.perf_counter() - since
                    row = self._step_row(result, done, edits / seconds, tokens / seconds)
                    self._write(row)
                    self.progress.advance(row)
                    since, edits, tokens = time.perf_counter(), 0, 0
                if done in plan.validation_steps:
                    pause = time.perf_counter()
                    self._validate(done, validation_set)
                    since += time.perf_counter() - pause
                if done % plan.save_every_steps == 0 and done < plan.total_steps:
                    self._save_state(done)
            if self.trainee.starts_with_head:
                self._validate(plan.total_steps, retention_set, "retention")

    def _step_row(
        self, result: StepResult, done: int, edits_per_second: float, tokens_per_second: float
    ) -> dict[str, Any]:
        return {
            "kind": "train",
            "step": done,
            "epoch": round(self.plan.epoch_after(done), 4),
            **result.losses.as_row(),
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "ranks_kept": self.stepper.ranks_kept(),
            "edits": result.n_edits,
            "edits_per_second": round(edits_per_second, 3),
            "tokens_per_second": round(tokens_per_second, 1),
        }

    def _validate(self, done: int, dataset: EditDataset, kind: str = "validation") -> None:
        if not len(dataset):
            return
        config = self.config
        with self.strategy.whole():
            values = validate(
                self.trainee.model,
                dataset,
                self.processes,
                read_out="text" if config.stage == 1 else "head",
                batch_size=config.validation.batch_size or config.batch.micro_batch_size,
                mixed_precision=config.backbone.dtype == "bfloat16",
            )
        row = {"kind": kind, "step": done, "epoch": round(self.plan.epoch_after(done), 4), **values}
        self._write(row)
        self.progress.line(describe_validation(row))
        if kind != "validation" or not done:
            return
        self.validation = row
        value = row["srcc_mean"]
        if config.checkpoint.keep_best and value is not None and (self.best is None or value > self.best):
            self.best = value
            whole = self.strategy.whole_tensors()
            self.processes.first(lambda: self._save_judge(self.folder.best, whole))

    def _note_failures(self, result: StepResult, done: int) -> None:
        for failure in result.failures:
            self.failed += 1
            self.failed_ids.append(failure.sample_id)
            self._write({"kind": "failure", "step": done, "sample_id": failure.sample_id, "reason": failure.reason})
            self.progress.line(f"step {done}: sample {failure.sample_id!r} was left out: {failure.reason}")
        limit = max(10, int(FAILED_PART * self.plan.counts.edits))
        if self.failed > limit:
            raise TrainingError(
                f"Optimizer step {done}: {self.failed} samples have become unreadable since the start of the run, more "
                f"than {limit}: {', '.join(self.failed_ids[-3:])} and others (metrics.jsonl says why). Look at the "
                "disk; the same command continues from the last training state."
            )

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.write(row)
            if self.on_row is not None:
                self.on_row(row)

    def _save_state(self, done: int) -> None:
        facts = {**self.facts, "best": self.best, "failed": self.failed}
        state = TrainingState(
            step=done,
            tensors=self.strategy.tensors(),
            optimizer=self.strategy.optimizer_state(),
            ranks=self.trainee.allocator.state_dict(),
            facts=facts,
        )
        save_state(
            self.folder.states,
            state,
            keep_last=self.config.checkpoint.keep_last,
            rank=self.processes.rank,
            divided=self.strategy.sharded_optimizer,
            barrier=self.processes.barrier,
        )

    def _resume(self) -> int:
        """Steps taken by an earlier call, whose state is put back; 0 if there was none."""
        path = self.processes.first(lambda: latest_state(self.folder.states))
        if path is None:
            return 0
        state = load_state(path, self.processes.rank)
        problems = [
            f"  {name}: {state.facts[key]} there, {self.facts[key]} now"
            for key, name in (("data", "fingerprint of the training samples"), ("world_size", "number of processes"))
            if state.facts[key] != self.facts[key]
        ]
        if problems and not self.accept_changes:
            raise ConfigError(
                f"{path}: the run was interrupted with other data or processes:\n" + "\n".join(problems) + "\n"
                "Put them back, add --accept-changes to continue with the new ones, or --restart to begin anew."
            )
        divided = self.strategy.sharded_optimizer
        if state.facts.get("optimizer", "whole") != self.facts["optimizer"] or (
            divided and state.facts["world_size"] != self.processes.world_size
        ):
            raise ConfigError(
                f"{path}: the optimizer's state is divided among other processes or by another strategy than now. "
                "Launch as before, or add --restart to begin anew."
            )
        self.strategy.restore(state.tensors, str(path))
        self.strategy.restore_optimizer(state.optimizer)
        self.trainee.allocator.load_state_dict(state.ranks)
        # With fewer or more processes than before there is no state of one's own; the fresh seed stands.
        if state.facts["world_size"] == self.processes.world_size:
            restore_random_state(path, self.processes.rank)
        self.best, self.failed = state.facts["best"], state.facts["failed"]
        self.console.print(f"Continuing after step {state.step:,} from {path}.", highlight=False)
        return state.step

    def _finish(self) -> None:
        self.trainee.allocator.finish()
        changes = compare(read_metrics(self.folder.metrics), self.plan.total_steps) if self.processes.is_first else []
        summary = {
            "steps": self.plan.total_steps,
            "failed_samples": self.failed,
            "validation": self.validation,
            "before_after": changes,
        }

        whole = self.strategy.whole_tensors()

        def write() -> None:
            self._save_judge(self.folder.checkpoint, whole)
            if self.config.adapter.kind in ("adalora", "lora"):
                from lmm4edit.evaluation.rank_figure import write_rank_files  # loads matplotlib

                write_rank_files(read_ranks(self.folder.checkpoint), self.folder.path)
            self.folder.finish(summary)

        self.processes.first(write)
        if changes:
            self.console.print(render(changes))
        self.console.print(
            f"Trained {self.plan.total_steps:,} steps. The judge is {self.folder.checkpoint}.", highlight=False
        )

    def _save_judge(self, folder: Path, whole: Mapping[str, torch.Tensor] | None) -> None:
        trainee = self.trainee
        save_checkpoint(
            folder,
            trainee.model,
            trainee.processor,
            trainee.prompts,
            self.config.model_dump(mode="json"),
            self.provenance,
            self.config.stage,
            whole,
        )

    def _announce(self, data: LoadedSamples) -> None:
        _print_skipped(self.console, data)
        spec = backbone_spec(plain_model(self.trainee.model.backbone))
        parameters = parameters_by_part(self.trainee.model, spec)
        ranks = describe_rank_schedule(self.config, self.plan)
        self.console.print(render_plan(self.config, self.plan, parameters, ranks))
        self.console.print(f"Strategy: {self.strategy.describe()}.", highlight=False)
        for note in self.trainee.notes:
            self.console.print(f"Note: {note}.", highlight=False)

    def _provenance(self, data: LoadedSamples) -> dict[str, Any]:
        provenance = collect_provenance(
            stage=self.config.stage,
            seed=self.config.seed,
            processes=self.processes.world_size,
            threads=torch.get_num_threads(),
            device=self.processes.device.type,
            strategy=self.strategy.describe(),
            training_samples=len(data.samples),
            ratings="simulated" if any(s.groups.get("ratings") == "simulated" for s in data.samples) else None,
            training_samples_sha256=data.fingerprint(),
            skipped_rows=[str(row) for row in data.skipped],
        )
        if self.processes.is_first:
            write_atomically(self.folder.provenance, json.dumps(jsonable(provenance), indent=2) + "\n")
        return provenance


def _print_skipped(console: Console, data: LoadedSamples, where: str = ", all listed in provenance.json") -> None:
    for row in data.skipped[:_SHOWN_ROWS]:
        console.print(f"left out: {row}", highlight=False, markup=False)
    if (rest := len(data.skipped) - _SHOWN_ROWS) > 0:
        console.print(f"left out: {rest:,} more rows{where}", highlight=False)


def _refuse_own_start(config: TrainConfig, folder: RunFolder) -> None:
    start = config.starting_checkpoint()
    if start is not None and folder.path.resolve() in (start.resolve(), *start.resolve().parents):
        raise ConfigError(
            f"init_from: expected a judge outside of this run's folder {folder.path}, got {start}, which the run would "
            "replace. Choose another run_dir."
        )


def _next_window(micro_batches: Iterator[MicroBatch], size: int) -> list[MicroBatch]:
    return [next(micro_batches) for _ in range(size)]


def _seed_everything(seed: int, rank: int) -> None:
    """Every process drops out other values; initial weights were drawn before, the same in all."""
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed)
