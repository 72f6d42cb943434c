"""The loss of an optimizer step: sums over its whole window of micro-batches and processes, divided once.

Dividing each micro-batch by its own counts would weigh an edit by the company it keeps: one beside edits with missing
scores, or in a smaller last batch, would count for more. Here accumulation 1 x 4 and 4 x 1 give the same loss.

Stage 1 is cross-entropy on answer tokens, stage 2 squared error on standardised scores (paper, section 4.2). Scores and
answers that a sample lacks are neither in the sums nor in the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from lmm4edit.errors import LMM4EditError
from lmm4edit.judge.packing import IGNORE, PackedBatch
from lmm4edit.records import ANSWER


class TrainingError(LMM4EditError):
    """Training cannot go on: the loss is not finite, or too many samples have become unreadable."""


@dataclass(frozen=True)
class TermCounts:
    """What the terms of the loss are divided by.

    Attributes:
        text: answer tokens of score sentences.
        qa: answer tokens of yes/no answers.
        score: score targets.
    """

    text: int = 0
    qa: int = 0
    score: int = 0

    def __add__(self, other: TermCounts) -> TermCounts:
        return TermCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count_terms(batch: PackedBatch, dimensions: Sequence[str]) -> TermCounts:
    """Count what a batch teaches, on the processor it lies on, before any forward pass.

    Args:
        batch: packed or one question a row.
        dimensions: names of the dimensions; the remaining question is :data:`lmm4edit.records.ANSWER`.
    """
    keys = batch.suffix_keys
    tokens = int((batch.labels != IGNORE).sum())
    qa = 0
    if ANSWER in keys:
        qa = int(((batch.labels != IGNORE) & (batch.segment_ids == keys.index(ANSWER) + 1)).sum())
    columns = [index for index, key in enumerate(keys) if key in set(dimensions)]
    known = torch.isfinite(batch.targets[:, columns]) & (batch.readout_index[:, columns] >= 0)
    return TermCounts(text=tokens - qa, qa=qa, score=int(known.sum()))


def sum_counts(counts: Iterable[TermCounts]) -> TermCounts:
    """Counts of several batches together."""
    return sum(counts, TermCounts())


@dataclass(frozen=True)
class StepLosses:
    """The loss of one optimizer step, by terms. ``None``: nothing of the kind was taught in this step.

    Attributes:
        loss: weighted sum of the task's terms, without the penalty.
        text_loss, qa_loss: mean cross-entropy of an answer token, in nats.
        score_loss: mean squared error in target standard deviations.
        orthogonality: AdaLoRA's penalty, unweighted; never part of ``loss``.
    """

    loss: float
    text_loss: float | None
    qa_loss: float | None
    score_loss: float | None
    orthogonality: float | None

    def as_row(self) -> dict[str, float | None]:
        """Values by name."""
        return {
            "loss": self.loss,
            "text_loss": self.text_loss,
            "qa_loss": self.qa_loss,
            "score_loss": self.score_loss,
            "orthogonality": self.orthogonality,
        }


TERMS = (("text", "text_ce"), ("qa", "qa_ce"), ("score", "score_mse"))
"""Names of a term in :class:`TermCounts` and of its weight in the configuration."""


def task_loss(sums: dict[str, Tensor | None], counts: TermCounts, weights: Any) -> Tensor:
    """A micro-batch's part of the step's loss.

    Args:
        sums: for each term (``text``, ``qa``, ``score``) the sum over this micro-batch, or ``None`` if not computed.
        counts: of the whole window and all processes.
        weights: with the attributes ``text_ce``, ``qa_ce``, ``score_mse``.

    Returns:
        Scalar; summed over the window and all processes it is the step's loss. A term with nothing to teach adds 0 and
        stays in the graph, which data-parallel training needs.
    """
    parts = []
    for name, weight_name in TERMS:
        total = sums[name]
        if total is not None and getattr(weights, weight_name):
            parts.append(getattr(weights, weight_name) * total / max(1, getattr(counts, name)))
    return torch.stack(parts).sum()


def step_losses(sums: dict[str, float], counts: TermCounts, weights: Any, orthogonality: float | None) -> StepLosses:
    """Means of a whole step from sums over all its micro-batches and processes."""
    means = {
        name: sums[name] / getattr(counts, name) if getattr(weights, weight) and getattr(counts, name) else None
        for name, weight in TERMS
    }
    loss = sum(getattr(weights, weight) * (means[name] or 0.0) for name, weight in TERMS)
    return StepLosses(loss, means["text"], means["qa"], means["score"], orthogonality)
