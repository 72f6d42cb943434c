"""How well predictions agree with opinions: SRCC, KRCC (tau-b), PLCC (raw and through logistics), RMSE, accuracy.

Every statistic is written once, for weighted rows. With weights of one it is the value; with a resample's counts as
weights it is that resample's value. So intervals cost a few matrix products, and one oracle tests both.

Sign: predictions are turned by the scorer's direction first, so a positive correlation always means agreement. Nothing
is made absolute. What is not defined (constant or too few values) has no value and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmm4edit.evaluation.bootstrap import (
    MIN_CLUSTERS,
    RESAMPLES,
    Interval,
    Resamples,
    draw_resamples,
    percentile_interval,
)
from lmm4edit.evaluation.logistic import LogisticFit, fit_logistic

Floats = NDArray[np.float64]

MIN_PAIRS = 3
MIN_LOGISTIC_PAIRS = 20

CORRELATIONS = ("srcc", "krcc", "plcc", "plcc_logistic4", "plcc_logistic5")


@dataclass(frozen=True)
class Statistic:
    """One statistic of one set of pairs.

    Attributes:
        name: ``srcc``, ``krcc``, ``plcc``, ``plcc_logistic4``, ``plcc_logistic5``, ``rmse``, ``rmse_logistic4``,
            ``accuracy``, ``majority_accuracy`` or ``distinct_values``.
        value: correlations -1 to 1, accuracies 0-1, RMSE in points of the opinion scale; ``None`` if not defined.
        low, high: 95 % interval from resampling sources; ``None`` where there is none.
        n: pairs it is computed from.
        reason: why the value, or the interval, is missing.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    reason: str | None = None


def agreement(
    predicted: ArrayLike,
    opinions: ArrayLike,
    clusters: Sequence[Hashable] | None = None,
    *,
    sign: int = 1,
    on_opinion_scale: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Statistic]:
    """All agreement statistics of one scorer with one dimension.

    Args:
        predicted: [N] finite predictions.
        opinions: [N] finite mean opinion scores.
        clusters: [N] source of each edit; ``None`` treats every row as its own source.
        sign: +1 where a larger prediction means a larger opinion, -1 where a smaller one does.
        on_opinion_scale: predictions are meant as MOS, so plain ``rmse`` is reported too. Other scorers have only
            ``rmse_logistic4``, the error after the four-parameter mapping.
        resamples: bootstrap resamples; 0 gives no intervals.

    Intervals of the logistic statistics keep the curve fitted to all pairs and so leave out its own uncertainty.

    Raises:
        ValueError: lengths differ, a value is not finite, or ``sign`` is not +1 or -1.
    """
    if sign not in (1, -1):
        raise ValueError(f"Expected sign +1 or -1, got {sign!r}.")
    x, y = _pair(predicted, opinions)
    x = sign * x
    n = len(x)
    names = [*CORRELATIONS, *(["rmse"] if on_opinion_scale else []), "rmse_logistic4", "distinct_values"]
    reason = _undefined(x, y, sign)
    draws = (
        draw_resamples(list(range(n)) if clusters is None else clusters, resamples, seed) if n and resamples else None
    )
    if draws is not None and len(draws.cluster_of) != n:
        raise ValueError(
            f"Expected one cluster per prediction, got {len(draws.cluster_of)} clusters and {n} predictions."
        )
    weights = draws.weights if draws is not None else None
    fits, fit_reason = _fits(x, y) if reason is None else ({}, reason)

    def correlate(name: str) -> Statistic:
        if reason is not None:
            return Statistic(name, None, None, None, n, reason)
        if name == "krcc":
            return _with_interval(name, _tau(x, y, None), lambda: _tau(x, y, draws), draws, n)
        if name == "srcc":
            return _weighted(name, lambda w: _spearman(x, y, w), weights, draws, n)
        if name == "plcc":
            return _weighted(name, lambda w: _pearson(x, y, w), weights, draws, n)
        fit = fits.get(name[-1])
        if fit is None:
            return Statistic(name, None, None, None, n, fit_reason)
        mapped = fit(x) if fit.increasing else -fit(x)
        if _constant(mapped):
            return Statistic(name, None, None, None, n, "the fitted logistic is flat")
        return _weighted(name, lambda w: _pearson(mapped, y, w), weights, draws, n)

    def error(name: str) -> Statistic:
        if n == 0:
            return Statistic(name, None, None, None, n, "no pairs")
        if name == "rmse":
            return _weighted(name, lambda w: _rms(sign * x - y, w), weights, draws, n)
        fit = fits.get("4")
        if fit is None:
            return Statistic(name, None, None, None, n, fit_reason)
        return _weighted(name, lambda w: _rms(fit(x) - y, w), weights, draws, n)

    made = [correlate(name) if name in CORRELATIONS else error(name) for name in names[:-1]]
    return [*made, Statistic("distinct_values", float(len(np.unique(x))), None, None, n)]


def accuracy(
    predicted: Sequence[str],
    answers: Sequence[str],
    clusters: Sequence[Hashable] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Statistic]:
    """Share of right answers, and the share that always giving the commonest right answer would reach.

    Args:
        predicted, answers: [N] words; compared as they are.

    Returns:
        ``accuracy`` and ``majority_accuracy`` (over the same rows), 0-1, with intervals clustered by source.
    """
    if len(predicted) != len(answers):
        raise ValueError(f"Expected one prediction per answer, got {len(predicted)} and {len(answers)}.")
    n = len(answers)
    if n == 0:
        return [Statistic(name, None, None, None, 0, "no pairs") for name in ("accuracy", "majority_accuracy")]
    draws = draw_resamples(list(range(n)) if clusters is None else clusters, resamples, seed) if resamples else None
    weights = draws.weights if draws is not None else None
    right = np.array([p == a for p, a in zip(predicted, answers, strict=True)], dtype=np.float64)
    commonest = max(sorted(set(answers)), key=list(answers).count)
    majority = np.array([a == commonest for a in answers], dtype=np.float64)
    return [
        _weighted("accuracy", lambda w: _mean(right, w), weights, draws, n),
        _weighted("majority_accuracy", lambda w: _mean(majority, w), weights, draws, n),
    ]


def srcc(x: ArrayLike, y: ArrayLike) -> float | None:
    """Spearman's rank correlation with average ranks for ties, -1 to 1; ``None`` if constant or fewer than 3 pairs."""
    return _plain(_spearman, x, y)


def krcc(x: ArrayLike, y: ArrayLike) -> float | None:
    """Kendall's tau-b, -1 to 1; ``None`` if constant or fewer than 3 pairs."""
    return _plain(lambda a, b, _: _tau(a, b, None), x, y)


def plcc(x: ArrayLike, y: ArrayLike) -> float | None:
    """Pearson's linear correlation of the raw values, -1 to 1; ``None`` if constant or fewer than 3 pairs."""
    return _plain(_pearson, x, y)


def rmse(x: ArrayLike, y: ArrayLike) -> float | None:
    """Root mean squared difference, in the values' own unit, lower is better; ``None`` without pairs."""
    a, b = _pair(x, y)
    return float(_rms(a - b, np.ones((len(a), 1)))[0]) if len(a) else None


def spearman_resampled(x: ArrayLike, y: ArrayLike, draws: Resamples) -> Floats:
    """[B] SRCC of each resample, NaN where not defined."""
    a, b = _pair(x, y)
    return _spearman(a, b, draws.weights)


def _plain(statistic: Callable[[Floats, Floats, Floats], Floats], x: ArrayLike, y: ArrayLike) -> float | None:
    a, b = _pair(x, y)
    if _undefined(a, b, 1) is not None:
        return None
    return float(statistic(a, b, np.ones((len(a), 1)))[0])


def _pair(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"Expected two one-dimensional arrays of equal length, got shapes {a.shape} and {b.shape}.")
    for name, values in (("predictions", a), ("opinions", b)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise ValueError(
                f"Expected finite {name}, got {values[bad[0]]} at index {bad[0]} ({len(bad)} in all). Leave missing "
                "values out and count them; a statistic never drops rows silently."
            )
    return a, b


def _undefined(x: Floats, y: Floats, sign: int) -> str | None:
    if len(x) < MIN_PAIRS:
        return f"only {len(x)} pairs, at least {MIN_PAIRS} needed"
    if _constant(x):
        return f"all {len(x)} predictions equal {sign * x[0]:g}"
    if _constant(y):
        return f"all {len(y)} opinions equal {y[0]:g}"
    return None


def _constant(values: Floats) -> bool:
    # Differences in the last bits are rounding; ranking them would invent a correlation.
    return bool(np.ptp(values) <= 1e-12 * np.max(np.abs(values)))


def _fits(x: Floats, y: Floats) -> tuple[dict[str, LogisticFit], str | None]:
    if len(x) < MIN_LOGISTIC_PAIRS:
        return {}, f"only {len(x)} pairs, a logistic needs at least {MIN_LOGISTIC_PAIRS}"
    found = {str(k): fit_logistic(x, y, k) for k in (4, 5)}
    return {k: fit for k, fit in found.items() if fit is not None}, "the logistic fit did not converge"


def _weighted(
    name: str, statistic: Callable[[Floats], Floats], weights: Floats | None, draws: Resamples | None, n: int
) -> Statistic:
    return _with_interval(
        name,
        statistic(np.ones((n, 1))),
        lambda: statistic(weights if weights is not None else np.ones((n, 1))),
        draws,
        n,
    )


def _with_interval(
    name: str, value: Floats, resampled: Callable[[], Floats], draws: Resamples | None, n: int
) -> Statistic:
    if draws is None:
        interval = Interval(None, None, None)
    elif draws.n_clusters < MIN_CLUSTERS:
        interval = percentile_interval(np.empty(0), draws.n_clusters)
    else:
        interval = percentile_interval(resampled(), draws.n_clusters)
    return Statistic(name, float(value[0]), interval.low, interval.high, n, interval.reason)


def _mean(values: Floats, w: Floats) -> Floats:
    return (values @ w) / w.sum(axis=0)


def _rms(difference: Floats, w: Floats) -> Floats:
    return np.sqrt(_mean(difference**2, w))


def _pearson(x: Floats, y: Floats, w: Floats) -> Floats:
    """[B] Pearson correlation; NaN where one side has no spread in a resample."""
    # Shifted and scaled by the whole sample first: the differences of sums below then lose no digits to an offset.
    x, y = (x - x.mean()) / np.max(np.abs(x - x.mean())), (y - y.mean()) / np.max(np.abs(y - y.mean()))
    mean_x, mean_y, square_x, square_y, product = (np.stack([x, y, x * x, y * y, x * y]) @ w) / w.sum(axis=0)
    var_x, var_y = square_x - mean_x**2, square_y - mean_y**2
    defined = (var_x > 1e-13 * square_x) & (var_y > 1e-13 * square_y)
    return _ratio(product - mean_x * mean_y, var_x, var_y, defined)


def _spearman(x: Floats, y: Floats, w: Floats) -> Floats:
    """[B] Spearman correlation with average ranks; NaN where one side has no spread in a resample."""
    ranks_x, squares_x = _centred_ranks(x, w)
    ranks_y, squares_y = _centred_ranks(y, w)
    ranks_x *= w
    return _ratio(np.einsum("nb,nb->b", ranks_x, ranks_y), squares_x, squares_y, (squares_x > 0) & (squares_y > 0))


def _ratio(covariance: Floats, var_x: Floats, var_y: Floats, defined: NDArray[np.bool_]) -> Floats:
    scale = np.sqrt(np.where(defined, var_x, 1.0)) * np.sqrt(np.where(defined, var_y, 1.0))
    return np.where(defined, np.clip(covariance / scale, -1.0, 1.0), np.nan)


def _centred_ranks(values: Floats, w: Floats) -> tuple[Floats, Floats]:
    """[N, B] average rank minus the mean rank, rows counted as often as they were drawn, and [B] the sum of squares."""
    unique, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ties = w[order]
    if len(unique) < len(values):
        ties = np.add.reduceat(ties, np.searchsorted(inverse[order], np.arange(len(unique))), axis=0)
    total = w.sum(axis=0)
    # Counts are whole numbers, so this closed form of the sum of squares is exact, and exactly 0 for a constant.
    squares: Floats = (total**3 - total - (np.einsum("ub,ub,ub->b", ties, ties, ties) - ties.sum(axis=0))) / 12
    centred: Floats = np.cumsum(ties, axis=0)
    ties *= 0.5
    centred -= ties
    centred -= total / 2
    return centred[inverse], squares


def _tau(x: Floats, y: Floats, draws: Resamples | None) -> Floats:
    """[B] tau-b. Concordance is summed per pair of clusters once; a resample is then a small quadratic form."""
    n = len(x)
    k = 1 if draws is None else draws.n_clusters
    cluster = np.zeros(n, dtype=np.intp) if draws is None else draws.cluster_of
    order = np.argsort(cluster, kind="stable")
    x, y = x[order], y[order]
    starts = np.searchsorted(cluster[order], np.arange(k))
    forms = np.zeros((3, k, k))
    block = max(1, 4_000_000 // n)
    for first in range(0, n, block):
        rows = slice(first, min(first + block, n))
        dx = np.sign(x[rows, None] - x[None, :])
        dy = np.sign(y[rows, None] - y[None, :])
        owner = cluster[order][rows]
        for index, product in enumerate((dx * dy, np.abs(dx), np.abs(dy))):
            np.add.at(forms[index], owner, np.add.reduceat(product, starts, axis=1))
    counts = np.ones((1, 1)) if draws is None else draws.counts
    both, only_x, only_y = (np.einsum("bk,bk->b", counts @ form, counts) for form in forms)
    with np.errstate(divide="ignore", invalid="ignore"):
        tau = both / (np.sqrt(only_x) * np.sqrt(only_y))
    return np.where((only_x > 0) & (only_y > 0), np.clip(tau, -1.0, 1.0), np.nan)
