"""Bootstrap resampling by cluster: edits of one source image are not independent, so whole sources are drawn.

A resample is kept as *how often each row occurs*, never as a copy of rows: every statistic is then a weighted sum, and
a thousand resamples are a few matrix products.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 1000
MIN_CLUSTERS = 5
MIN_DEFINED = 0.95


class Interval(NamedTuple):
    """A 95 % interval, or why there is none."""

    low: float | None
    high: float | None
    reason: str | None


class Resamples(NamedTuple):
    """Which clusters were drawn, and which cluster each row belongs to.

    Attributes:
        counts: [B, K] how often each of K clusters was drawn in each of B resamples.
        cluster_of: [N] cluster of each row.
    """

    counts: Floats
    cluster_of: NDArray[np.intp]

    @property
    def weights(self) -> Floats:
        """[N, B] how often each row occurs; rows first, for then all work runs along memory."""
        return np.ascontiguousarray(self.counts.T)[self.cluster_of]

    @property
    def n_clusters(self) -> int:
        return self.counts.shape[1]


def draw_resamples(clusters: Sequence[Hashable], resamples: int = RESAMPLES, seed: int = 0) -> Resamples:
    """Draw K of K clusters with replacement, ``resamples`` times; the same seed and order of rows give the same draws.

    Args:
        clusters: [N] the cluster of each row (a ``source_id``).

    Raises:
        ValueError: ``clusters`` is empty or ``resamples`` is not positive.
    """
    if not len(clusters) or resamples < 1:
        raise ValueError(
            f"Expected at least one row and one resample, got {len(clusters)} rows and {resamples} resamples."
        )
    index: dict[Hashable, int] = {}
    cluster_of = np.array([index.setdefault(cluster, len(index)) for cluster in clusters], dtype=np.intp)
    k = len(index)
    drawn = np.random.default_rng(seed).integers(0, k, size=(resamples, k))
    offsets = np.arange(resamples)[:, None] * k
    counts = np.bincount((drawn + offsets).ravel(), minlength=resamples * k).reshape(resamples, k)
    return Resamples(counts.astype(np.float64), cluster_of)


def percentile_interval(values: Floats, n_clusters: int) -> Interval:
    """The central 95 % of a statistic's resampled values.

    Args:
        values: [B]; NaN where the statistic is not defined for a resample (all predictions drawn are equal).
        n_clusters: number of clusters drawn from; fewer than five give no interval, for it would be far too narrow.
    """
    if n_clusters < MIN_CLUSTERS:
        return Interval(None, None, f"no interval: {n_clusters} sources, at least {MIN_CLUSTERS} needed")
    defined = values[~np.isnan(values)]
    if len(defined) < MIN_DEFINED * len(values):
        return Interval(None, None, f"no interval: defined in only {len(defined)} of {len(values)} resamples")
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high), None)
