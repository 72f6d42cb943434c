"""From a predictions file to ``metrics.json``: every statistic of every predictor, per dimension and per group.

Needs the samples, their predictions and what each scorer says of itself; no model, no images. Rows count what was
expected and what was scored; missing predictions are listed with their reasons and never filled in.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from lmm4edit.errors import StoreError
from lmm4edit.evaluation.bootstrap import RESAMPLES
from lmm4edit.evaluation.columns import Column, opinions_of, predicted_columns
from lmm4edit.evaluation.comparison import Comparison, compare_predictors, correct_for_many
from lmm4edit.evaluation.correlation import Statistic, accuracy, agreement
from lmm4edit.evaluation.ranking import (
    OVERALL,
    RankedModel,
    RankingAgreement,
    compare_rankings,
    model_means,
    rank_models,
)
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS, Dimension, EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo

FORMAT_VERSION = 1
FEW_DISTINCT = 10
MAX_GROUPS = 40
ALL = "all"


@dataclass(frozen=True)
class MetricRow:
    """One number of the evaluation.

    Attributes:
        benchmark: name of the benchmark.
        predictor: the scorer (with its setting in brackets where it has several).
        target: dimension, ``overall`` (Eq. 3) or ``answer``.
        group: ``all`` or ``label=value``, for example ``edit_task=remove``.
        statistic: see :class:`~lmm4edit.evaluation.correlation.Statistic`.
        value, low, high: value and its 95 % interval clustered by source; ``None`` with a reason.
        n_expected: edits of the group that have an opinion (or a right answer).
        n_scored: of those, edits with a prediction.
        reason: why value or interval is missing.
    """

    benchmark: str
    predictor: str
    target: str
    group: str
    statistic: str
    value: float | None
    low: float | None
    high: float | None
    n_expected: int
    n_scored: int
    reason: str | None = None


@dataclass(frozen=True)
class FailureCount:
    """Why predictions are missing, with one example each."""

    predictor: str
    target: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class PredictorRanking:
    """Editing models ranked by one predictor, beside people's ranking over the same edits."""

    predictor: str
    people: tuple[RankedModel, ...]
    predicted: tuple[RankedModel, ...]
    agreement: tuple[RankingAgreement, ...]


@dataclass(frozen=True)
class Metrics:
    """Everything that ``metrics.json`` holds."""

    benchmark: str
    rows: tuple[MetricRow, ...]
    failures: tuple[FailureCount, ...] = ()
    rankings: tuple[PredictorRanking, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    warnings: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def find(self, predictor: str, target: str, statistic: str, group: str = ALL) -> MetricRow | None:
        """The row of that name, or ``None``."""
        for row in self.rows:
            if (row.predictor, row.target, row.statistic, row.group) == (predictor, target, statistic, group):
                return row
        return None


def compute_metrics(
    benchmark: str,
    samples: Sequence[EditSample],
    predictions: Iterable[Prediction],
    scorers: Mapping[str, ScorerInfo],
    *,
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    group_by: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Metrics:
    """Compute all statistics from stored predictions.

    Args:
        samples: the benchmark's edits, with opinions and right answers.
        predictions: what the scorers gave for them.
        scorers: predictor -> its description (direction, scale).
        dimensions: directions of the dimensions; a MOS column not among them counts as higher is better.
        group_by: labels to break down by; default :func:`group_labels`.
        progress: called with (columns done, columns in all).

    Raises:
        StoreError: predictions of unknown samples or unknown scorers, or two for the same key.
    """
    columns = predicted_columns(samples, predictions, scorers, dimensions)
    groups = make_groups(samples, group_labels(samples) if group_by is None else group_by)
    rows: list[MetricRow] = []
    for done, column in enumerate(columns, start=1):
        expected = opinions_of(samples, column.target)
        for group, members in groups.items():
            rows.extend(
                _rows(benchmark, group, column, [expected[i] for i in members], members, samples, resamples, seed)
            )
        if progress:
            progress(done, len(columns))
    return Metrics(
        benchmark=benchmark,
        rows=tuple(rows),
        failures=tuple(_failures(samples, columns)),
        rankings=tuple(_rankings(samples, columns)),
        comparisons=tuple(_comparisons(samples, columns, resamples, seed)),
        warnings=tuple(_warnings(rows)),
        counts={
            "samples": len(samples),
            "sources": len({s.source_id for s in samples}),
            "editing_models": len({s.editing_model for s in samples if s.editing_model}),
            "edit_tasks": len({s.edit_task for s in samples if s.edit_task}),
        },
        provenance={**(provenance or {}), "resamples": resamples, "bootstrap_seed": seed},
    )


def group_labels(samples: Sequence[EditSample]) -> list[str]:
    """Labels worth breaking down by: task, editing model, prompt type and own labels with 2 to 40 different values."""
    own = dict.fromkeys(label for sample in samples for label in sample.groups)
    labels = ["edit_task", "editing_model", "prompt_type", *own]
    return [label for label in labels if 2 <= len({_label(s, label) for s in samples} - {None}) <= MAX_GROUPS]


def make_groups(samples: Sequence[EditSample], labels: Sequence[str]) -> dict[str, list[int]]:
    """``all`` and ``label=value`` -> indices of the samples, values in alphabetical order within a label."""
    groups: dict[str, list[int]] = {ALL: list(range(len(samples)))}
    for label in labels:
        members: dict[str, list[int]] = defaultdict(list)
        for row, sample in enumerate(samples):
            value = _label(sample, label)
            if value is not None:
                members[value].append(row)
        groups |= {f"{label}={value}": members[value] for value in sorted(members)}
    return groups


def write_metrics(path: Path, metrics: Metrics) -> None:
    """Write ``metrics.json`` (whole or not at all)."""
    content = {"format": "lmm4edit-metrics", "format_version": FORMAT_VERSION, **asdict(metrics)}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_metrics(path: Path) -> Metrics:
    """Read ``metrics.json``.

    Raises:
        StoreError: missing, unreadable, or of another format version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: expected a metrics file, got none that can be read ({error}). Run `lmm4edit report`."
        ) from error
    if content.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{path}: expected metrics of format_version {FORMAT_VERSION}, got {content.get('format_version')!r}. "
            "Delete the file: `lmm4edit report` computes it again from the predictions."
        )
    return Metrics(
        benchmark=content["benchmark"],
        rows=tuple(MetricRow(**row) for row in content["rows"]),
        failures=tuple(FailureCount(**row) for row in content["failures"]),
        rankings=tuple(
            PredictorRanking(
                r["predictor"],
                tuple(RankedModel(**m) for m in r["people"]),
                tuple(RankedModel(**m) for m in r["predicted"]),
                tuple(RankingAgreement(**a) for a in r["agreement"]),
            )
            for r in content["rankings"]
        ),
        comparisons=tuple(Comparison(**row) for row in content["comparisons"]),
        warnings=tuple(content["warnings"]),
        counts=content["counts"],
        provenance=content["provenance"],
    )


def _rows(
    benchmark: str,
    group: str,
    column: Column,
    expected: Sequence[Any],
    members: Sequence[int],
    samples: Sequence[EditSample],
    resamples: int,
    seed: int,
) -> list[MetricRow]:
    asked = [i for i, opinion in zip(members, expected, strict=True) if opinion is not None]
    if not asked:
        return []
    opinion_of = dict(zip(members, expected, strict=True))
    scored = [i for i in asked if column.values[i] is not None]
    clusters = [samples[i].source_id for i in scored]
    statistics: list[Statistic]
    if column.target == ANSWER:
        given = [str(column.values[i]).lower() for i in scored]
        right = [str(opinion_of[i]).lower() for i in scored]
        statistics = accuracy(given, right, clusters, resamples=resamples, seed=seed)
    else:
        statistics = agreement(
            [float(column.values[i]) for i in scored],
            [opinion_of[i] for i in scored],
            clusters,
            sign=column.sign,
            on_opinion_scale=column.on_opinion_scale,
            resamples=resamples,
            seed=seed,
        )
    return [
        MetricRow(
            benchmark, column.predictor, column.target, group, s.name, s.value, s.low, s.high, len(asked), s.n, s.reason
        )
        for s in statistics
    ]


def _label(sample: EditSample, label: str) -> str | None:
    if label in ("edit_task", "editing_model", "prompt_type"):
        value = getattr(sample, label)
        return None if value is None else str(value)
    return sample.groups.get(label)


def _failures(samples: Sequence[EditSample], columns: Sequence[Column]) -> Iterable[FailureCount]:
    for column in columns:
        missing = [
            (r, s.sample_id) for r, v, s in zip(column.failures, column.values, samples, strict=True) if v is None
        ]
        counted = Counter(str(reason) for reason, _ in missing)
        for reason, count in counted.most_common():
            example = next(sample_id for r, sample_id in missing if str(r) == reason)
            yield FailureCount(column.predictor, column.target, reason, count, example)


def _rankings(samples: Sequence[EditSample], columns: Sequence[Column]) -> Iterable[PredictorRanking]:
    """People's and a predictor's means per editing model, both over the edits that have both."""
    named = [i for i, s in enumerate(samples) if s.editing_model]
    models = [str(samples[i].editing_model) for i in named]
    if len(set(models)) < 2:
        return
    for predictor in dict.fromkeys(c.predictor for c in columns if c.on_opinion_scale):
        parts = [c for c in columns if c.predictor == predictor and c.target not in (OVERALL, ANSWER)]
        people: dict[str, list[float | None]] = {}
        predicted: dict[str, list[float | None]] = {}
        for column in parts:
            mos = [samples[i].mos.get(column.target) for i in named]
            given = [column.values[i] for i in named]
            people[column.target] = [m if v is not None else None for m, v in zip(mos, given, strict=True)]
            predicted[column.target] = [v if m is not None else None for m, v in zip(mos, given, strict=True)]
        human_means, counts = model_means(models, people)
        predicted_means, _ = model_means(models, predicted)
        yield PredictorRanking(
            predictor,
            tuple(rank_models(human_means, counts)),
            tuple(rank_models(predicted_means, counts)),
            tuple(compare_rankings(human_means, predicted_means)),
        )


def _comparisons(
    samples: Sequence[EditSample], columns: Sequence[Column], resamples: int, seed: int
) -> Sequence[Comparison]:
    made = []
    for target in dict.fromkeys(c.target for c in columns if c.target != ANSWER):
        opinions = opinions_of(samples, target)
        rivals = [c for c in columns if c.target == target]
        for a, b in combinations(rivals, 2):
            both = [i for i, o in enumerate(opinions) if None not in (o, a.values[i], b.values[i])]
            if not both:
                continue
            signed_a, signed_b = a.signed, b.signed
            made.append(
                compare_predictors(
                    target,
                    (a.predictor, [signed_a[i] or 0.0 for i in both]),
                    (b.predictor, [signed_b[i] or 0.0 for i in both]),
                    [opinions[i] for i in both],
                    [samples[i].source_id for i in both],
                    resamples=resamples,
                    seed=seed,
                )
            )
    return correct_for_many(made)


def _warnings(rows: Sequence[MetricRow]) -> Iterable[str]:
    for row in rows:
        if row.group != ALL:
            continue
        few = row.statistic == "distinct_values" and row.value is not None and row.n_scored >= 2 * FEW_DISTINCT
        if few and row.value < FEW_DISTINCT:  # type: ignore[operator]
            yield (
                f"{row.predictor} gives only {row.value:.0f} different values for {row.target} over {row.n_scored} "
                "edits: its scores have collapsed, or its scale is very coarse"
            )
        if row.statistic in ("srcc", "accuracy") and row.n_scored < row.n_expected:
            missing = row.n_expected - row.n_scored
            yield f"{row.predictor}: {missing} of {row.n_expected} edits have no {row.target} prediction"
        if row.value is not None and not math.isfinite(row.value):
            yield f"{row.predictor}: {row.statistic} of {row.target} is {row.value}"
