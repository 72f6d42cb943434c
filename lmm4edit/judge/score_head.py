"""The score head: from the hidden state before an answer to a score; and the scale that scores are learnt on.

Paper, section 4.1: in the second stage a quality score decoder, here a two-layer perceptron, replaces the text decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmm4edit.errors import ConfigError


class ScoreHead(nn.Module):
    """A two-layer perceptron with GELU and one output for each dimension's question.

    The first layer is shared; each question reads its own output. Computes in float32 whatever the backbone's dtype
    is, so that scores are not rounded to the three digits of bfloat16.

    Args:
        hidden: size of the backbone's hidden states.
        n_dimensions: number of questions.
        inner: width of the first layer; default: ``hidden``.
    """

    def __init__(self, hidden: int, n_dimensions: int, inner: int | None = None) -> None:
        super().__init__()
        self.hidden, self.n_dimensions, self.inner = hidden, n_dimensions, inner or hidden
        self.first = nn.Linear(self.hidden, self.inner)
        self.second = nn.Linear(self.inner, n_dimensions)

    def forward(self, hidden: Tensor) -> Tensor:
        """Standardised scores [..., D] of hidden states [..., D, hidden], one state for each question."""
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            inner = nn.functional.gelu(
                nn.functional.linear(hidden.float(), self.first.weight.float(), self.first.bias.float())
            )
            return (inner * self.second.weight.float()).sum(-1) + self.second.bias.float()


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of the training set's MOS, one of each for every dimension.

    The head learns standardised scores; what users see is on the MOS scale, unclipped.
    """

    mean: tuple[float, ...]
    sd: tuple[float, ...]

    def __post_init__(self) -> None:
        values = (*self.mean, *self.sd)
        if len(self.mean) != len(self.sd) or not all(map(math.isfinite, values)) or any(sd <= 0 for sd in self.sd):
            raise ConfigError(
                f"A target scale needs as many finite means as positive standard deviations, got mean={self.mean} and "
                f"sd={self.sd}."
            )

    @classmethod
    def from_scores(cls, scores: Mapping[str, Sequence[float]]) -> TargetScale:
        """Scale of training scores by dimension, in the mapping's order. The standard deviation is the population's.

        Raises:
            ConfigError: if a dimension has fewer than two different scores: nothing could be learnt from them.
        """
        means, deviations = [], []
        for name, values in scores.items():
            if len(set(values)) < 2:
                raise ConfigError(
                    f"Dimension {name!r}: expected at least two different training scores, got {len(values)} scores "
                    f"with {len(set(values))} different values. Give samples with mos_{name}, or leave the dimension "
                    "out."
                )
            tensor = torch.tensor(list(values), dtype=torch.float64)
            means.append(float(tensor.mean()))
            deviations.append(float(tensor.std(correction=0)))
        return cls(tuple(means), tuple(deviations))

    def standardise(self, scores: Tensor) -> Tensor:
        """[..., D] on the MOS scale to [..., D] in standard deviations from the mean."""
        return (scores - scores.new_tensor(self.mean)) / scores.new_tensor(self.sd)

    def restore(self, standardised: Tensor) -> Tensor:
        """The inverse of :meth:`standardise`."""
        return standardised * standardised.new_tensor(self.sd) + standardised.new_tensor(self.mean)
