"""Running a grid: stage 1, stage 2, evaluation, through the same functions as the launchers and ``lmm4edit evaluate``.

Each step continues where an earlier call was interrupted. A run that fails leaves its reason and does not stop the
others. Several calls may share a grid (one GPU each): a run that another process is at is left to it.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lmm4edit.config import TrainConfig
from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import ConfigError, LMM4EditError
from lmm4edit.evaluation.metrics import MetricRow, compute_metrics
from lmm4edit.evaluation.runner import read_run_folder, run_scorers, why_simulated
from lmm4edit.judge.checkpoint_files import read_judge_file
from lmm4edit.process_lock import AlreadyLockedError, ProcessLock
from lmm4edit.provenance import collect_provenance
from lmm4edit.records import Dimension
from lmm4edit.training.ablation.grid import BenchmarkSection, Grid, PlannedRun
from lmm4edit.training.ablation.outcome import Measured, Outcome, read_outcome, write_outcome

JUDGE = "judge"
"""Label of the trained judge in every evaluation."""

PHASES = ("stage1", "stage2", "evaluation")

Watch = Callable[[PlannedRun, str, int, int | None], None]
"""Called with (run, phase, done, total): steps of a stage (the total may be unknown), or edits of the evaluation."""


@dataclass(frozen=True)
class Attempt:
    """What a call did about a run.

    Attributes:
        run: which.
        what: ``done`` or ``failed`` now; ``done before``; ``elsewhere``: another process is at it.
        outcome: ``None`` while another process is at it.
    """

    run: PlannedRun
    what: Literal["done", "failed", "done before", "elsewhere"]
    outcome: Outcome | None


def run_grid(
    grid: Grid, runs: Sequence[PlannedRun], watch: Watch | None = None, on_end: Callable[[Attempt], None] | None = None
) -> list[Attempt]:
    """Do every run that is not done yet.

    Args:
        grid: see :func:`~lmm4edit.training.ablation.grid.keep_grid`, which is to be called before.
        runs: from :meth:`~lmm4edit.training.ablation.grid.Grid.runs`.
        watch: shows progress.
        on_end: called after each run.
    """
    attempts = []
    for planned in runs:
        attempt = _attempt(planned, grid.benchmark, watch or (lambda *_: None))
        attempts.append(attempt)
        if on_end:
            on_end(attempt)
    return attempts


def require_manifests(grid: Grid) -> None:
    """Refuse to begin where the data is not there: every run would fail with the same words.

    Raises:
        ConfigError: naming what is missing.
    """
    if missing := [str(path) for path in grid.manifests() if not path.exists()]:
        raise ConfigError(
            f"{grid.path}: expected these manifests, which are not there: {', '.join(missing)}. Make them (for the "
            "mini benchmark: lmm4edit data minibench), or run from the folder that their paths start in."
        )


def _attempt(planned: PlannedRun, benchmark: BenchmarkSection, watch: Watch) -> Attempt:
    known = read_outcome(planned.folder)
    if known is not None and known.status == "done":
        return Attempt(planned, "done before", known)
    try:
        with _locked(planned):
            # Once more: whoever held the lock until now may have done it.
            known = read_outcome(planned.folder)
            if known is not None and known.status == "done":
                return Attempt(planned, "done before", known)
            outcome = _outcome(planned, benchmark, watch)
            write_outcome(planned.folder, outcome)
    except AlreadyLockedError:
        return Attempt(planned, "elsewhere", None)
    return Attempt(planned, outcome.status, outcome)


@contextmanager
def _locked(planned: PlannedRun) -> Iterator[None]:
    with ExitStack() as stack:
        for folder in dict.fromkeys([planned.folder, planned.stage1_of]):
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(ProcessLock(folder / "run").release)
        yield


def _outcome(planned: PlannedRun, benchmark: BenchmarkSection, watch: Watch) -> Outcome:
    settings = {
        "stage1": planned.stage1.model_dump(mode="json"),
        "stage2": planned.stage2.model_dump(mode="json"),
        "benchmark": benchmark.model_dump(),
    }
    seconds: dict[str, float] = {}
    measured: Mapping[str, Mapping[str, Measured]] = {}
    simulated = reason = None
    with (planned.folder / "log.txt").open("a", encoding="utf-8") as log:
        console = Console(file=log, width=120)
        try:
            for phase, config in zip(PHASES, (planned.stage1, planned.stage2), strict=False):
                _train(planned, phase, config, console, watch, seconds)
            started = time.monotonic()
            measured, simulated = _evaluate(planned, benchmark, watch)
            seconds["evaluation"] = round(time.monotonic() - started, 1)
        except LMM4EditError as error:
            reason = str(error)
        except Exception as error:  # memory, disk, a library: the next run may do better, and nothing is hidden
            reason = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=log)
        if reason is not None:
            console.print(f"failed: {reason}", markup=False, highlight=False)
    _free_memory()
    status: Literal["done", "failed"] = "done" if reason is None else "failed"
    provenance = collect_provenance(seed=planned.seed)
    return Outcome(planned.row.name, planned.seed, status, reason, measured, simulated, seconds, settings, provenance)


def _train(
    planned: PlannedRun, phase: str, config: TrainConfig, console: Console, watch: Watch, seconds: dict[str, float]
) -> None:
    from lmm4edit.training.loop import run

    def on_row(row: Mapping[str, Any]) -> None:
        if row["kind"] == "train":
            watch(planned, phase, row["step"], _total_steps(config, row))

    watch(planned, phase, 0, None)
    started = time.monotonic()
    result = run(config, console=console, on_row=on_row)
    if result.status == "trained":
        seconds[phase] = round(time.monotonic() - started, 1)


def _total_steps(config: TrainConfig, row: Mapping[str, Any]) -> int | None:
    if not row["epoch"]:
        return None
    total = round(row["step"] / row["epoch"] * config.epochs)
    return total if config.max_steps is None else min(total, config.max_steps)


def _evaluate(
    planned: PlannedRun, benchmark: BenchmarkSection, watch: Watch
) -> tuple[dict[str, dict[str, Measured]], str | None]:
    checkpoint = Path(planned.stage2.run_dir) / "checkpoint"
    dimensions = [
        Dimension(**entry.model_dump(exclude={"target_mean", "target_sd"}))
        for entry in read_judge_file(checkpoint).dimensions
    ]
    samples = read_manifest(benchmark.manifest, benchmark.image_root, dimensions=dimensions)
    out = planned.folder / "evaluation"
    simulated = why_simulated(samples, benchmark.manifest)
    run_scorers(
        samples,
        [f"{JUDGE}=judge:{checkpoint}"],
        out,
        benchmark.batch_size,
        lambda _, done, total: watch(planned, "evaluation", done, total),
        benchmark=benchmark.name or Path(benchmark.manifest).stem,
        simulated=simulated,
        training=[planned.stage1.run_dir, planned.stage2.run_dir],
        scorer_options={"device": benchmark.device} if benchmark.device else {},
    )
    content = read_run_folder(out, dimensions)
    # Its spread is that over seeds; `lmm4edit report` computes groups and bootstrap intervals from the same folder.
    metrics = compute_metrics(
        content.run.benchmark,
        content.samples,
        content.predictions,
        content.run.scorers,
        dimensions=dimensions,
        group_by=(),
        resamples=0,
    )
    measured: dict[str, dict[str, Measured]] = {}
    for row in metrics.rows:
        measured.setdefault(row.target, {})[row.statistic] = _measured(row)
    return measured, simulated


def _measured(row: MetricRow) -> Measured:
    reason = row.reason if row.value is None else None
    return Measured(row.value, row.n_expected, row.n_scored, reason)


def _free_memory() -> None:
    """Give back what a judge held, also one that died of too little."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
