"""Stored predictions as columns aligned with the samples, each knowing its direction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmm4edit.errors import StoreError
from lmm4edit.evaluation.ranking import OVERALL, OVERALL_WEIGHTS, overall_score
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS, SCORE, Dimension, EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo


@dataclass(frozen=True)
class Column:
    """One predictor's values for one target, aligned with the samples.

    Attributes:
        predictor, target: names.
        values: [N] value, or ``None``; numbers are as the scorer gave them.
        failures: [N] reason where the value is missing.
        sign: +1 or -1, what to multiply by so that larger means better.
        on_opinion_scale: whether the numbers are meant as MOS.
    """

    predictor: str
    target: str
    values: tuple[Any, ...]
    failures: tuple[str | None, ...]
    sign: int = 1
    on_opinion_scale: bool = False

    @property
    def signed(self) -> list[float | None]:
        """[N] numbers turned so that larger means better."""
        return [None if v is None else self.sign * float(v) for v in self.values]


def predicted_columns(
    samples: Sequence[EditSample],
    predictions: Iterable[Prediction],
    scorers: Mapping[str, ScorerInfo],
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
) -> list[Column]:
    """Predictions as columns aligned with the samples: one per predictor and target that the samples have opinions of.

    A scorer with the single target ``score`` gives one column per dimension, and one who predicts all three dimensions
    of Eq. 3 a further column ``overall``.
    """
    index = {sample.sample_id: row for row, sample in enumerate(samples)}
    cells: dict[str, dict[str, dict[int, Prediction]]] = defaultdict(lambda: defaultdict(dict))
    names = _variant_names(predictions := list(predictions))
    for prediction, name in zip(predictions, names, strict=True):
        row = index.get(prediction.item_id)
        if row is None:
            raise StoreError(
                f"Predictions hold item {prediction.item_id!r} of {prediction.predictor!r}, which is not among the "
                f"{len(samples)} samples. Evaluate with the manifest that was scored."
            )
        if prediction.predictor not in scorers:
            known = ", ".join(sorted(scorers))
            raise StoreError(
                f"Predictions hold the scorer {prediction.predictor!r}, of which nothing is known. Known: {known}."
            )
        if row in cells[name][prediction.target]:
            raise StoreError(
                f"Two predictions of {name!r} for {prediction.target!r} of item {prediction.item_id!r}. Keep one."
            )
        cells[name][prediction.target][row] = prediction
    bearer = {name: prediction.predictor for prediction, name in zip(predictions, names, strict=True)}
    opinions = _mos_names(samples, dimensions)
    direction = {d.name: 1 if d.higher_is_better else -1 for d in dimensions}
    columns: list[Column] = []
    for name, targets in cells.items():
        info = scorers[bearer[name]]
        sign = 1 if info.higher_is_better else -1
        for target, cell in targets.items():
            if target == SCORE:
                rated = [*opinions, *([OVERALL] if _has_overall(opinions) else [])]
                columns += [_column(name, d, cell, len(samples), sign * direction.get(d, 1), False) for d in rated]
            elif target == ANSWER:
                if any(s.answer for s in samples):
                    columns.append(_column(name, ANSWER, cell, len(samples), 1, False))
            elif target in opinions:
                columns.append(_column(name, target, cell, len(samples), sign, info.on_opinion_scale))
        if _has_overall(targets) and _has_overall(opinions):
            columns.append(_overall_column([c for c in columns if c.predictor == name], name, info))
    order = {target: place for place, target in enumerate([*opinions, OVERALL, ANSWER])}
    return sorted(columns, key=lambda c: (list(cells).index(c.predictor), order[c.target]))


def opinions_of(samples: Sequence[EditSample], target: str) -> list[Any]:
    """[N] what people said: MOS of a dimension, Eq. 3 of the three, or the right answer; ``None`` where there is "
    "none."""
    if target == ANSWER:
        return [s.answer for s in samples]
    if target == OVERALL:
        return [overall_score(s.mos) for s in samples]
    return [s.mos.get(target) for s in samples]


def _column(name: str, target: str, cell: Mapping[int, Prediction], n: int, sign: int, on_scale: bool) -> Column:
    values: list[Any] = [None] * n
    failures: list[str | None] = ["not in the predictions file"] * n
    for row, prediction in cell.items():
        value, failure = prediction.value, prediction.failure
        if value is not None and target != ANSWER and not isinstance(value, int | float):
            value, failure = None, f"expected a number, got {type(value).__name__}"
        values[row], failures[row] = value, failure
    return Column(name, target, tuple(values), tuple(failures), sign, on_scale)


def _overall_column(columns: Sequence[Column], name: str, info: ScorerInfo) -> Column:
    parts = {c.target: c for c in columns if c.target in OVERALL_WEIGHTS}
    n = len(next(iter(parts.values())).values)
    values = [overall_score({d: c.values[i] for d, c in parts.items()}) for i in range(n)]
    failures: list[str | None] = [
        None if v is not None else "a dimension is missing or negative (Eq. 3)" for v in values
    ]
    return Column(
        name, OVERALL, tuple(values), tuple(failures), 1 if info.higher_is_better else -1, info.on_opinion_scale
    )


def _variant_names(predictions: Sequence[Prediction]) -> list[str]:
    """Predictor names, told apart by setting and repeat where one predictor has several."""
    variants: dict[str, set[tuple[tuple[tuple[str, str], ...], int]]] = defaultdict(set)
    keys = [(tuple(sorted(p.setting.items())), p.repeat) for p in predictions]
    for prediction, key in zip(predictions, keys, strict=True):
        variants[prediction.predictor].add(key)
    names = []
    for prediction, (setting, repeat) in zip(predictions, keys, strict=True):
        if len(variants[prediction.predictor]) == 1:
            names.append(prediction.predictor)
            continue
        parts = [f"{k}={v}" for k, v in setting] + [f"repeat={repeat}"]
        names.append(f"{prediction.predictor} [{', '.join(parts)}]")
    return names


def _mos_names(samples: Sequence[EditSample], dimensions: Sequence[Dimension]) -> list[str]:
    present = {name for sample in samples for name in sample.mos}
    known = [d.name for d in dimensions if d.name in present]
    return known + sorted(present - set(known))


def _has_overall(names: Iterable[str]) -> bool:
    return set(OVERALL_WEIGHTS) <= set(names)
