"""From raw ratings to mean opinion scores: screening of ratings and subjects, z-scores, MOS (paper 3.4, Eq. 1).

In order, for one dimension at a time:

1. *Outlying ratings* (ITU-R BT.500). Per item, over all its ratings: mean, sample standard deviation S, and the
   kurtosis coefficient ``m4 / m2**2``. Between 2 and 4 the ratings count as normal and one farther than 2 S from the
   mean is an outlier; otherwise one farther than sqrt(20) S is.
2. *Outlying subjects*. More than 5 % of a subject's ratings are outliers: all of them are dropped. BT.500 also asks
   that the outliers fall on both sides of the mean; the paper does not, and neither do we.
3. *z-scores*. Mean and sample SD of a subject are taken over the ratings left after 1 and 2.
4. *MOS* of an item: ``100 * (mean z + 3) / 6`` over its valid ratings. It leaves 0-100 where the mean z is beyond 3,
   which is reported as a warning and not clipped.

Source of choices the paper leaves open: the sample (n - 1) standard deviation throughout, as BT.500 writes it; one pass
of screening; a subject whose remaining ratings are all equal has no z-score and is dropped with that reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NORMAL_KURTOSIS = (2.0, 4.0)
NORMAL_LIMIT = 2.0
OTHER_LIMIT = math.sqrt(20.0)
MAX_OUTLIER_SHARE = 0.05


class Rating(NamedTuple):
    """One subject's opinion of one item, on whatever scale that subject used.

    Attributes:
        subject: who rated.
        item: what was rated (a ``sample_id``).
        value: the rating; any finite number, higher is better.
    """

    subject: str
    item: str
    value: float


@dataclass(frozen=True)
class SubjectSummary:
    """What the screening made of one subject.

    Attributes:
        n_ratings: ratings given.
        n_outliers: of those, outliers.
        mean, sd: of the ratings left after screening; ``None`` for a rejected subject.
    """

    n_ratings: int
    n_outliers: int
    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class MosResult:
    """Mean opinion scores of one dimension and how they came about.

    Attributes:
        mos: item -> MOS, nominally 0-100, higher is better; items without a valid rating are absent.
        missing: item -> why it has no MOS.
        n_valid: item -> number of ratings its MOS is the mean of (0 for a missing one).
        rejected_subjects: subject -> why all ratings of that subject were dropped.
        outlier_fraction: outlying ratings over all ratings, 0-1 (the paper reports 2.26 %).
        removed_fraction: ratings that entered no MOS over all ratings, 0-1: outliers and those of rejected subjects.
        warnings: what a reader of the numbers should know.
        subjects: subject -> :class:`SubjectSummary`.
    """

    mos: dict[str, float]
    missing: dict[str, str]
    n_valid: dict[str, int]
    rejected_subjects: dict[str, str]
    outlier_fraction: float
    removed_fraction: float
    warnings: tuple[str, ...]
    subjects: dict[str, SubjectSummary]


def mean_opinion_scores(ratings: Iterable[Rating | tuple[str, str, float]]) -> MosResult:
    """Screen ratings and turn them into mean opinion scores (module docstring; paper 3.4, Eq. 1).

    Args:
        ratings: one dimension's ratings, in any order; not every subject need rate every item.

    Raises:
        ValueError: no ratings; a rating that is not a finite number; the same subject rating the same item twice.
    """
    rows = [Rating(*row) for row in ratings]
    _check(rows)
    subjects = _index(row.subject for row in rows)
    items = _index(row.item for row in rows)
    subject_of = np.array([subjects[row.subject] for row in rows])
    item_of = np.array([items[row.item] for row in rows])
    value = np.array([row.value for row in rows], dtype=np.float64)

    outlier, blind = _outliers(item_of, value, len(items))
    given = np.bincount(subject_of, minlength=len(subjects))
    outliers = np.bincount(subject_of, weights=outlier, minlength=len(subjects)).astype(int)

    rejected: dict[str, str] = {}
    summaries: dict[str, SubjectSummary] = {}
    z = np.full(len(rows), np.nan)
    for name, index in subjects.items():
        mine = (subject_of == index) & ~outlier
        left = value[mine]
        reason = _reason_to_reject(int(given[index]), int(outliers[index]), left)
        mean = sd = None
        if reason is None:
            mean, sd = float(left.mean()), float(left.std(ddof=1))
            z[mine] = (left - mean) / sd
        else:
            rejected[name] = reason
        summaries[name] = SubjectSummary(int(given[index]), int(outliers[index]), mean, sd)

    valid = ~np.isnan(z)
    counts = np.bincount(item_of[valid], minlength=len(items))
    sums = np.bincount(item_of[valid], weights=z[valid], minlength=len(items))
    mos = {name: float(100 * (sums[i] / counts[i] + 3) / 6) for name, i in items.items() if counts[i]}
    missing = {
        name: f"none of its {int((item_of == i).sum())} ratings is left after screening"
        for name, i in items.items()
        if not counts[i]
    }
    return MosResult(
        mos=mos,
        missing=missing,
        n_valid={name: int(counts[i]) for name, i in items.items()},
        rejected_subjects=rejected,
        outlier_fraction=float(outlier.mean()),
        removed_fraction=float(1 - valid.mean()),
        warnings=tuple(_warnings(mos, missing, rejected, len(subjects), blind, len(items))),
        subjects=summaries,
    )


def _check(rows: list[Rating]) -> None:
    if not rows:
        raise ValueError("Expected at least one rating, got none.")
    seen: set[tuple[str, str]] = set()
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.value, int | float | np.number) or not math.isfinite(row.value):
            raise ValueError(
                f"Rating {number} (subject {row.subject!r}, item {row.item!r}): expected a finite number, got "
                f"{row.value!r}. Leave missing ratings out instead of writing a placeholder."
            )
        if (row.subject, row.item) in seen:
            raise ValueError(
                f"Rating {number}: subject {row.subject!r} has already rated item {row.item!r}. Keep one rating per "
                "subject and item, or give repeated sessions their own subject names."
            )
        seen.add((row.subject, row.item))


def _index(names: Iterable[str]) -> dict[str, int]:
    index: dict[str, int] = {}
    for name in names:
        index.setdefault(name, len(index))
    return index


def _outliers(item_of: NDArray[np.intp], value: NDArray[np.float64], n_items: int) -> tuple[NDArray[np.bool_], int]:
    """Which ratings are outliers, and how many items are not normal yet too small for any rating to lie outside."""
    count = np.bincount(item_of, minlength=n_items)
    mean = np.bincount(item_of, weights=value, minlength=n_items) / count
    deviation = value - mean[item_of]
    squares = np.bincount(item_of, weights=deviation**2, minlength=n_items)
    fourths = np.bincount(item_of, weights=deviation**4, minlength=n_items)
    # Deviations of equal ratings are rounding errors, not a spread to measure in.
    scale = np.zeros(n_items)
    np.maximum.at(scale, item_of, np.abs(value))
    spread = squares > count * (1e-12 * scale) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        sd = np.sqrt(squares / (count - 1))
        kurtosis = (fourths / count) / (squares / count) ** 2
        # No rating among n can lie farther than this many sample SDs from their mean.
        reachable = (count - 1) / np.sqrt(count)
    normal = (kurtosis >= NORMAL_KURTOSIS[0]) & (kurtosis <= NORMAL_KURTOSIS[1])
    limit = np.where(normal, NORMAL_LIMIT, OTHER_LIMIT)
    usable = spread & (count > 1)
    with np.errstate(invalid="ignore"):
        outlier = usable[item_of] & (np.abs(deviation) > (limit * sd)[item_of])
    blind = usable & ~normal & (reachable <= OTHER_LIMIT)
    return outlier, int(blind.sum())


def _reason_to_reject(given: int, outliers: int, left: NDArray[np.float64]) -> str | None:
    # Counts are compared in whole numbers, so that exactly 5 % is never lost to rounding.
    if outliers * 100 > given * round(MAX_OUTLIER_SHARE * 100):
        return f"{outliers} of {given} ratings ({outliers / given:.1%}) are outliers, more than {MAX_OUTLIER_SHARE:.0%}"
    if len(left) < 2:
        return f"only {len(left)} of {given} ratings left: a z-score needs at least 2"
    if np.ptp(left) == 0:
        return f"all {len(left)} ratings are equal ({left[0]:g}): there is no z-score"
    return None


def _warnings(
    mos: dict[str, float], missing: dict[str, str], rejected: dict[str, str], n_subjects: int, blind: int, n_items: int
) -> Iterable[str]:
    if rejected:
        yield f"{len(rejected)} of {n_subjects} subjects rejected: " + "; ".join(
            f"{k}: {v}" for k, v in rejected.items()
        )
    if missing:
        yield f"{len(missing)} of {n_items} items have no valid rating and so no MOS, first {next(iter(missing))!r}"
    outside = [name for name, score in mos.items() if not 0 <= score <= 100]
    if outside:
        yield (
            f"{len(outside)} of {len(mos)} items have a MOS outside 0-100 (mean z beyond 3), "
            f"first {outside[0]!r} with {mos[outside[0]]:.2f}; they are kept as they are"
        )
    if blind:
        yield (
            f"{blind} of {n_items} items are not normal by kurtosis and have fewer than 22 ratings: no rating can lie "
            "beyond sqrt(20) SD there, so nothing was screened in them"
        )
