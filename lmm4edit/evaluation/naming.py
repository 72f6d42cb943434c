"""What things are called in print, and in which order they stand there."""

from __future__ import annotations

from collections.abc import Sequence

from lmm4edit.evaluation.metrics import ALL, Metrics
from lmm4edit.evaluation.ranking import OVERALL
from lmm4edit.records import ANSWER

SPLITS = ("content", "level", "prompt_type")
"""Labels whose groups are shown side by side in the report."""


def group_name(group: str) -> str:
    """A group as printed: ``content=photo`` becomes ``photo``."""
    return "all edits" if group == ALL else group.partition("=")[2]


def display_names(predictors: Sequence[str]) -> dict[str, str]:
    """Short names for print: what stands before the colon where that is enough, else with the last parts of the "
    "path."""
    short = {name: name.partition(":")[0] for name in predictors}
    for depth in range(1, 12):
        doubled = {n for n in predictors if list(short.values()).count(short[n]) > 1}
        if not doubled:
            break
        for name in doubled:
            head, _, path = name.partition(":")
            short[name] = f"{head} {'/'.join(path.rstrip('/').split('/')[-depth:])}".strip()
    return short if len(set(short.values())) == len(short) else {name: name for name in predictors}


def dimensions_of(metrics: Metrics) -> list[str]:
    """Dimensions that were evaluated, in order."""
    return list(dict.fromkeys(r.target for r in metrics.rows if r.target not in (OVERALL, ANSWER)))


def predictors_of(metrics: Metrics) -> list[str]:
    """Predictors by their mean SRCC over the dimensions, best first; those without any come last."""
    names = list(dict.fromkeys(row.predictor for row in metrics.rows))
    dimensions = dimensions_of(metrics)

    def standing(name: str) -> tuple[int, float]:
        rows = [metrics.find(name, d, "srcc") for d in dimensions]
        values = [r.value for r in rows if r is not None and r.value is not None]
        # Rounded, so that MSE and PSNR, which rank alike, do not change places by the last bit.
        return (-len(values), -round(sum(values) / len(values), 9)) if values else (1, 0.0)

    return sorted(names, key=standing)
