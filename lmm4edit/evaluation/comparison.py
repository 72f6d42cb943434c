"""Is one predictor better than another? Paired, on the same edits, with whole sources resampled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from lmm4edit.evaluation.bootstrap import RESAMPLES, draw_resamples, percentile_interval
from lmm4edit.evaluation.correlation import spearman_resampled, srcc


@dataclass(frozen=True)
class Comparison:
    """The difference of two predictors' SRCC with one dimension.

    Attributes:
        target: the dimension.
        first, second: the predictors.
        srcc_first, srcc_second: over the edits that both scored, direction applied.
        difference: first minus second; positive means that the first agrees better with people.
        low, high: its 95 % interval.
        p: two-sided p value of "no difference", from the difference over its bootstrap standard error (a normal
            approximation: counting resamples could not go below 2 / resamples, too coarse to correct for many).
        p_adjusted: after Holm's correction over all comparisons made together; ``None`` until corrected.
        n, n_sources: edits and sources compared.
        reason: why a value is missing.
    """

    target: str
    first: str
    second: str
    srcc_first: float | None
    srcc_second: float | None
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    n_sources: int
    reason: str | None = None
    p_adjusted: float | None = None


def compare_predictors(
    target: str,
    first: tuple[str, ArrayLike],
    second: tuple[str, ArrayLike],
    opinions: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare two predictors' SRCC by a paired bootstrap clustered by source.

    Args:
        target: the dimension, for the record.
        first, second: name and [N] predictions of the same edits, larger meaning better for both.
        opinions: [N] mean opinion scores.
        clusters: [N] source of each edit.
    """
    (name_a, a), (name_b, b) = first, second
    n, n_sources = len(clusters), len(set(clusters))
    value_a, value_b = srcc(a, opinions), srcc(b, opinions)
    if value_a is None or value_b is None:
        culprit = name_a if value_a is None else name_b
        reason = f"no SRCC for {culprit}: too few pairs or all values equal"
        return Comparison(target, name_a, name_b, value_a, value_b, None, None, None, None, n, n_sources, reason)
    if resamples < 2:
        reason = f"no interval: {resamples} resamples, at least 2 needed"
        difference = value_a - value_b
        return Comparison(target, name_a, name_b, value_a, value_b, difference, None, None, None, n, n_sources, reason)
    draws = draw_resamples(clusters, resamples, seed)
    drawn = spearman_resampled(a, opinions, draws) - spearman_resampled(b, opinions, draws)
    interval = percentile_interval(drawn, n_sources)
    p = None
    if interval.reason is None:
        error = float(np.std(drawn[~np.isnan(drawn)], ddof=1))
        p = 1.0 if value_a == value_b else float(2 * ndtr(-abs(value_a - value_b) / error)) if error > 0 else 0.0
    return Comparison(
        target, name_a, name_b, value_a, value_b, value_a - value_b, interval.low, interval.high, p, n, n_sources,
        interval.reason,
    )  # fmt: skip


def correct_for_many(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Fill ``p_adjusted`` by Holm's step-down method over the comparisons that have a p value (Holm 1979)."""
    tested = sorted((i for i, c in enumerate(comparisons) if c.p is not None), key=lambda i: comparisons[i].p or 0.0)
    corrected = list(comparisons)
    running = 0.0
    for place, index in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - place) * (comparisons[index].p or 0.0)))
        corrected[index] = replace(comparisons[index], p_adjusted=running)
    return corrected
