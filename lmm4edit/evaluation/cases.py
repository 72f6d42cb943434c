"""Single edits worth looking at: where a judge agrees best and worst with the ratings, as image pairs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lmm4edit.data.images import decode_image
from lmm4edit.errors import ImageError
from lmm4edit.evaluation.columns import Column
from lmm4edit.records import ANSWER, EditSample

SIDE = 320


@dataclass(frozen=True)
class CaseScore:
    """One dimension of a case: the rating, the prediction, both on the opinion scale."""

    dimension: str
    rated: float
    predicted: float


@dataclass(frozen=True)
class Case:
    """One edit to show.

    Attributes:
        sample: the edit.
        scores: per dimension.
        error: mean absolute difference over the dimensions, in points.
        answer: the judge's answer to the question, if it gave one.
        source, edited: pictures as ``data:`` URIs, or ``None`` with the reason in ``image_failure``.
    """

    sample: EditSample
    scores: tuple[CaseScore, ...]
    error: float
    answer: str | None
    source: str | None
    edited: str | None
    image_failure: str | None = None


@dataclass(frozen=True)
class CaseGroup:
    """Cases under one heading."""

    title: str
    note: str
    cases: tuple[Case, ...]


def pick_cases(
    samples: Sequence[EditSample], columns: Sequence[Column], predictor: str, count: int = 6
) -> list[CaseGroup]:
    """The edits where a predictor on the opinion scale comes closest to the ratings and goes farthest from them.

    At most one edit per source and, while there are enough, per task in each group, so that the cases differ. Chosen by
    the error alone, and shown whatever they are.

    Args:
        columns: of :func:`~lmm4edit.evaluation.columns.predicted_columns`.
        predictor: whose; without predictions on the opinion scale there are no cases.
        count: cases in each group.
    """
    mine = [c for c in columns if c.predictor == predictor and c.on_opinion_scale and c.target in _rated(samples)]
    if not mine:
        return []
    errors: dict[int, float] = {}
    for row, sample in enumerate(samples):
        differences = [
            abs(float(c.values[row]) - sample.mos[c.target])
            for c in mine
            if c.values[row] is not None and c.target in sample.mos
        ]
        if len(differences) == len(mine):
            errors[row] = float(np.mean(differences))
    answers = next((c for c in columns if c.predictor == predictor and c.target == ANSWER), None)
    by_error = sorted(errors, key=lambda row: (errors[row], samples[row].sample_id))
    # With few edits the two groups must not show the same ones.
    count = min(count, len(by_error) // 2)
    groups = (
        ("Closest", "Smallest mean difference between prediction and rating.", _varied(by_error, samples, count)),
        ("Farthest", "Largest mean difference.", _varied(by_error[::-1], samples, count)),
    )
    return [
        CaseGroup(title, note, tuple(_case(samples[r], mine, answers, r, errors[r]) for r in rows))
        for title, note, rows in groups
        if rows
    ]


def picture_uri(path: str, side: int = SIDE) -> str:
    """An image as a ``data:`` URI, at most ``side`` pixels wide and high.

    Raises:
        ImageError: it cannot be read.
    """
    image = decode_image(path)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _rated(samples: Sequence[EditSample]) -> set[str]:
    return {name for sample in samples for name in sample.mos}


def _varied(rows: Sequence[int], samples: Sequence[EditSample], count: int) -> list[int]:
    """First rows of different sources, and of different tasks as far as possible, in their order."""
    chosen: list[int] = []
    for distinct_tasks in (True, False):
        for row in rows:
            if len(chosen) == count:
                break
            sources = {samples[c].source_id for c in chosen}
            tasks = {samples[c].edit_task for c in chosen}
            new_task = samples[row].edit_task is None or samples[row].edit_task not in tasks
            if row not in chosen and samples[row].source_id not in sources and (new_task or not distinct_tasks):
                chosen.append(row)
    return sorted(chosen, key=list(rows).index)


def _case(sample: EditSample, columns: Sequence[Column], answers: Column | None, row: int, error: float) -> Case:
    scores = tuple(CaseScore(c.target, sample.mos[c.target], float(c.values[row])) for c in columns)
    answer = answers.values[row] if answers is not None else None
    try:
        source, edited, failure = picture_uri(sample.source_image), picture_uri(sample.edited_image), None
    except ImageError as problem:
        source, edited, failure = None, None, str(problem)
    return Case(sample, scores, error, answer, source, edited, failure)
