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
from lmm4edit.training.processes import Processes
from lmm4edit.training.schedule import learning_rate_factor
from lmm4edit.training.trainee import Trainee, optimizer_groups


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        losses: by terms.
        learning_rate: of adapters and projector.
        grad_norm: before clipping.
        n_edits: edits it saw, over all processes.
        failures: samples that had to be left out, over all processes.
    """

    losses: StepLosses
    learning_rate: float
    grad_norm: float
    n_edits: int
    failures: tuple[Failure, ...]


class Stepper:
    """Takes optimizer steps. Every process has one and calls it at the same time.

    Args:
        trainee: what is trained, already on the processes' device.
        config, plan: of the run.
        processes: this process among its fellows.
    """

    def __init__(self, trainee: Trainee, config: TrainConfig, plan: TrainingPlan, processes: Processes) -> None:
        self._trainee = trainee
        self._config = config
        self._plan = plan
        self._processes = processes
        self._names = [dimension.name for dimension in trainee.model.dimensions]
        self._model = processes.wrap(trainee.model)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(optimizer_groups(trainee.model, config), betas=settings.betas)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def take(self, window: Sequence[MicroBatch], step: int) -> StepResult:
        """Take step number ``step`` (counted from 0) on this process's part of the window.

        Raises:
            TrainingError: if the loss or the gradients are not finite; the samples are named and no weight was changed.
        """
        factor = self._learning_rate_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        counts, n_edits, n_failures = self._count(window)
        sums, orthogonality, broken = self._accumulate(window, counts)
        totals = self._processes.sum(sums).tolist()
        if not all(map(_finite, totals)) or (orthogonality is not None and not _finite(orthogonality)):
            self._stop(step, dict(zip([name for name, _ in TERMS], totals, strict=True)), orthogonality, broken)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.optimizer.max_grad_norm))
        if not _finite(grad_norm):
            self._stop(step, {"gradient norm": grad_norm}, None, [i for m in window for i in m.batch.sample_ids])
        self.optimizer.step()
        # The allocator reads this step's gradients and prunes what the step has just moved: between the two lines.
        self._trainee.allocator.step()
        self.optimizer.zero_grad(set_to_none=True)
        values = dict(zip([name for name, _ in TERMS], totals, strict=True))
        failures = [failure for micro in window for failure in micro.failures]
        return StepResult(
            losses=step_losses(values, counts, self._config.objective, orthogonality),
            learning_rate=self._config.optimizer.learning_rate * factor,
            grad_norm=grad_norm,
            n_edits=n_edits,
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

    def _count(self, window: Sequence[MicroBatch]) -> tuple[TermCounts, int, int]:
        """Counts of the window over all processes: terms, edits, failures."""
        counts = sum_counts(count_terms(micro.batch, self._names) for micro in window)
        n_edits, n_failures = sum(m.n_edits for m in window), sum(len(m.failures) for m in window)
        local = torch.tensor([*astuple(counts), n_edits, n_failures], device=self._processes.device)
        *terms, n_edits, n_failures = self._processes.sum(local).tolist()
        return TermCounts(*terms), n_edits, n_failures

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
            with self._processes.accumulating(self._model, last=last):
                output = self._forward(micro, weights)
                # Data parallelism averages gradients over processes; the counts are those of all processes already.
                loss = task_loss(output.sums, counts, objective) * self._processes.world_size
                if output.orthogonality is not None:
                    orthogonality = output.orthogonality
                    loss = loss + penalty * orthogonality
                loss.backward()
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
            return self._model(batch, weights)

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
