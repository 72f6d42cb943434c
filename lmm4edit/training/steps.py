"""One optimizer step: from a window of micro-batches to changed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from lmm4edit.config import TrainConfig
from lmm4edit.judge.adapters import adalora_layers
from lmm4edit.judge.model import JudgeOutput, ObjectiveWeights
from lmm4edit.judge.packing import PADDING
from lmm4edit.training.dataset import Failure, MicroBatch
from lmm4edit.training.objectives import (
    TERMS,
    StepLosses,
    TermCounts,
    TrainingError,
    count_terms,
    step_losses,
    sum_counts,
    task_loss,
)
from lmm4edit.training.plan import TrainingPlan
from lmm4edit.training.schedule import learning_rate_factor
from lmm4edit.training.strategy import Strategy
from lmm4edit.training.trainee import Trainee, optimizer_groups


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        losses: by terms.
        learning_rate: of adapters and projector.
        grad_norm: before clipping.
        n_edits, n_tokens: edits and tokens (without padding) it saw, over all processes.
        failures: samples that had to be left out, over all processes.
    """

    losses: StepLosses
    learning_rate: float
    grad_norm: float
    n_edits: int
    n_tokens: int
    failures: tuple[Failure, ...]


class Stepper:
    """Takes optimizer steps. Every process has one and calls it at the same time.

    Args:
        trainee: what is trained.
        config, plan: of the run.
        strategy: how the processes divide the model.
    """

    def __init__(self, trainee: Trainee, config: TrainConfig, plan: TrainingPlan, strategy: Strategy) -> None:
        self._trainee = trainee
        self._config = config
        self._plan = plan
        self._strategy = strategy
        self._processes = strategy.processes
        self._names = [dimension.name for dimension in trainee.model.dimensions]
        strategy.prepare(
            trainee.model,
            lambda: torch.optim.AdamW(optimizer_groups(trainee.model, config), betas=config.optimizer.betas),
        )

    def take(self, window: Sequence[MicroBatch], step: int) -> StepResult:
        """Take step number ``step`` (counted from 0) on this process's part of the window.

        Raises:
            TrainingError: if the loss or the gradients are not finite; the samples are named and no weight was changed.
        """
        factor = self._learning_rate_factor(step)
        for group in self._strategy.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        counts, n_edits, n_tokens, n_failures = self._count(window)
        sums, orthogonality, broken = self._accumulate(window, counts)
        totals = self._processes.sum(sums).tolist()
        if not all(map(_finite, totals)) or (orthogonality is not None and not _finite(orthogonality)):
            self._stop(step, dict(zip([name for name, _ in TERMS], totals, strict=True)), orthogonality, broken)
        grad_norm = self._strategy.clip(self._config.optimizer.max_grad_norm)
        if not _finite(grad_norm):
            self._stop(step, {"gradient norm": grad_norm}, None, [i for m in window for i in m.batch.sample_ids])
        self._strategy.step(self._trainee.allocator)
        values = dict(zip([name for name, _ in TERMS], totals, strict=True))
        failures = [failure for micro in window for failure in micro.failures]
        return StepResult(
            losses=step_losses(values, counts, self._config.objective, orthogonality),
            learning_rate=self._config.optimizer.learning_rate * factor,
            grad_norm=grad_norm,
            n_edits=n_edits,
            n_tokens=n_tokens,
            failures=tuple(self._processes.gather(failures)) if n_failures else (),
        )

    def ranks_kept(self) -> int | None:
        """Triplets of all matrices that are not pruned; ``None`` without AdaLoRA."""
        layers = adalora_layers(self._trainee.model.backbone)
        return int(torch.stack([(f.values != 0).sum() for f in layers.values()]).sum()) if layers else None

    def _learning_rate_factor(self, step: int) -> float:
        settings = self._config.optimizer
        return learning_rate_factor(
            step,
            total_steps=self._plan.total_steps,
            warmup_steps=self._plan.warmup_steps,
            schedule=settings.schedule,
            final_ratio=settings.final_ratio,
        )

    def _count(self, window: Sequence[MicroBatch]) -> tuple[TermCounts, int, int, int]:
        """Counts of the window over all processes: terms, edits, tokens, failures."""
        counts = sum_counts(count_terms(micro.batch, self._names) for micro in window)
        n_edits, n_failures = sum(m.n_edits for m in window), sum(len(m.failures) for m in window)
        n_tokens = sum(int((m.batch.segment_ids != PADDING).sum()) for m in window)
        local = torch.tensor([*astuple(counts), n_edits, n_tokens, n_failures], device=self._processes.device)
        *terms, n_edits, n_tokens, n_failures = self._processes.sum(local).tolist()
        return TermCounts(*terms), n_edits, n_tokens, n_failures

    def _accumulate(self, window: Sequence[MicroBatch], counts: TermCounts) -> tuple[Tensor, float | None, list[str]]:
        """Add up the window's gradients.

        Returns:
            Sums of the terms [3], the penalty, and the ids of batches whose terms are not finite.
        """
        device, objective = self._processes.device, self._config.objective
        totals = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        orthogonality: Tensor | None = None
        broken: list[str] = []
        for index, micro in enumerate(window):
            last = index == len(window) - 1
            # The penalty is a function of the weights alone, so once a step is enough.
            penalty = objective.orthogonality if last else 0.0
            weights = ObjectiveWeights(objective.text_ce, objective.qa_ce, objective.score_mse, penalty)
            with self._strategy.accumulating(last=last):
                output = self._forward(micro, weights)
                # Data parallelism averages gradients over processes; the counts are those of all processes already.
                loss = task_loss(output.sums, counts, objective) * self._processes.world_size
                if output.orthogonality is not None:
                    orthogonality = output.orthogonality
                    loss = loss + penalty * orthogonality
                self._strategy.backward(loss)
            parts = [output.sums[name] for name, _ in TERMS]
            here = torch.stack([torch.zeros((), device=device) if p is None else p.detach() for p in parts]).double()
            totals += here
            if not torch.isfinite(here).all():
                broken += micro.batch.sample_ids
        return totals, None if orthogonality is None else float(orthogonality.detach()), broken

    def _forward(self, micro: MicroBatch, weights: ObjectiveWeights) -> JudgeOutput:
        mixed = self._config.backbone.dtype == "bfloat16"
        batch = micro.batch.to(self._processes.device, non_blocking=True)
        with torch.autocast(self._processes.device.type, torch.bfloat16, enabled=mixed):
            return self._strategy.module(batch, weights)

    def _stop(self, step: int, values: dict[str, Any], orthogonality: float | None, sample_ids: list[str]) -> None:
        named = list(dict.fromkeys(self._processes.gather(sample_ids)))
        shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
        if orthogonality is not None:
            shown += f", orthogonality {orthogonality:g}"
        raise TrainingError(
            f"Optimizer step {step + 1}: expected a finite loss, got {shown}. Samples of the batches concerned: "
            f"{', '.join(named) or 'none, the weights themselves are to blame'}. The step was not taken. Look at these "
            "samples, or lower optimizer.learning_rate; the same command continues from the last training state."
        )


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
