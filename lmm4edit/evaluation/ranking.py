"""The overall score (paper Eq. 3) and the ranking of editing models by their mean scores (paper Table 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmm4edit.evaluation.correlation import rmse, srcc

OVERALL_WEIGHTS: dict[str, float] = {"quality": 0.3, "alignment": 0.4, "preservation": 0.3}
"""Exponents of Eq. 3; they sum to one, so the overall score stays on the dimensions' scale."""

OVERALL = "overall"


def overall_score(scores: Mapping[str, float | None]) -> float | None:
    """Overall score ``quality^0.3 * alignment^0.4 * preservation^0.3`` (paper Eq. 3), on the scale of the scores.

    Args:
        scores: dimension -> score, higher is better; further dimensions are ignored.

    Returns:
        ``None`` if one of the three is missing or negative: a power of a negative score means nothing.
    """
    product = 1.0
    for name, weight in OVERALL_WEIGHTS.items():
        value = scores.get(name)
        if value is None or not math.isfinite(value) or value < 0:
            return None
        product *= value**weight
    return product


@dataclass(frozen=True)
class RankedModel:
    """One editing model's standing.

    Attributes:
        name: the editing model.
        means: dimension -> mean score over its edits.
        overall: Eq. 3 of the means.
        rank: 1 is best; equal overall scores share the average rank; ``None`` without an overall score.
        n: edits the means are taken over.
    """

    name: str
    means: dict[str, float]
    overall: float | None
    rank: float | None
    n: int = 0


@dataclass(frozen=True)
class RankingAgreement:
    """How well predicted means agree with people's, over editing models (the bottom rows of Table 5).

    Attributes:
        target: dimension, or ``overall`` for the ranks by Eq. 3.
        srcc: between the two columns of means (of ranks for ``overall``).
        rmse: between them, in points (in ranks for ``overall``).
        n: number of editing models.
        reason: why a value is missing.
    """

    target: str
    srcc: float | None
    rmse: float | None
    n: int
    reason: str | None = None


def rank_models(means: Mapping[str, Mapping[str, float]], counts: Mapping[str, int] | None = None) -> list[RankedModel]:
    """Editing models from best to worst by the overall score of their means (Eq. 3, Table 5).

    Args:
        means: editing model -> dimension -> mean score, 0-100, higher is better.
        counts: editing model -> number of edits, for the record.
    """
    overall = {name: overall_score(values) for name, values in means.items()}
    known = {name: value for name, value in overall.items() if value is not None}
    ranks = dict(zip(known, _descending_ranks(list(known.values())), strict=True))
    models = [
        RankedModel(name, dict(values), overall[name], ranks.get(name), (counts or {}).get(name, 0))
        for name, values in means.items()
    ]
    return sorted(models, key=lambda m: (m.rank is None, m.rank or 0.0, m.name))


def compare_rankings(
    people: Mapping[str, Mapping[str, float]], predicted: Mapping[str, Mapping[str, float]]
) -> list[RankingAgreement]:
    """SRCC and RMSE of editing models' means per dimension, and of their ranks by Eq. 3 (Table 5).

    Args:
        people, predicted: editing model -> dimension -> mean; compared over the models and dimensions both have.
    """
    models = [name for name in people if name in predicted]
    dimensions = _in_order(dim for name in models for dim in people[name])
    found = []
    for dimension in dimensions:
        pairs = [
            (predicted[m][dimension], people[m][dimension])
            for m in models
            if dimension in people[m] and dimension in predicted[m]
        ]
        if pairs:
            found.append(_agreement(dimension, pairs))
    # Ranks are taken among the models that both rank, so that the two lists count the same places.
    both = [m for m in models if overall_score(people[m]) is not None and overall_score(predicted[m]) is not None]
    if both:
        left = {m.name: m.rank for m in rank_models({name: predicted[name] for name in both})}
        right = {m.name: m.rank for m in rank_models({name: people[name] for name in both})}
        found.append(_agreement(OVERALL, [(float(left[m] or 0), float(right[m] or 0)) for m in both]))
    return found


def model_means(
    editing_models: Sequence[str], values: Mapping[str, Sequence[float | None]]
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Mean of each dimension per editing model, over the edits that have a value.

    Args:
        editing_models: [N] editing model of each edit.
        values: dimension -> [N] scores, ``None`` where missing.

    Returns:
        editing model -> dimension -> mean, and editing model -> number of edits with a value in every dimension.
    """
    names = _in_order(editing_models)
    means: dict[str, dict[str, float]] = {name: {} for name in names}
    counts = dict.fromkeys(names, 0)
    for row, name in enumerate(editing_models):
        counts[name] += all(column[row] is not None for column in values.values())
    for dimension, column in values.items():
        for name in names:
            mine = [v for v, m in zip(column, editing_models, strict=True) if m == name and v is not None]
            if mine:
                means[name][dimension] = float(np.mean(mine))
    return means, counts


def _agreement(target: str, pairs: Sequence[tuple[float, float]]) -> RankingAgreement:
    predicted, people = [p[0] for p in pairs], [p[1] for p in pairs]
    correlation = srcc(predicted, people)
    reason = None if correlation is not None else f"{len(pairs)} editing models, too few or all equal"
    return RankingAgreement(target, correlation, rmse(predicted, people), len(pairs), reason)


def _descending_ranks(values: Sequence[float]) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    return [float((array > v).sum() + ((array == v).sum() + 1) / 2) for v in array]


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
