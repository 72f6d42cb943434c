"""What a training run logged, as figures and a table of a few predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lmm4edit.evaluation.plotting import (
    FAINT,
    SavedFigure,
    colour_of,
    marker_of,
    new_figure,
    plain,
    save,
    style,
)
from lmm4edit.evaluation.tables import Cell, Column, Table

Series = tuple[list[float], list[float]]
"""(steps, values)."""

TRAIN_KEYS = (
    "loss",
    "text_loss",
    "qa_loss",
    "score_loss",
    "orthogonality",
    "learning_rate",
    "grad_norm",
    "ranks_kept",
    "edits_per_second",
    "tokens_per_second",
)
VALIDATION_PREFIXES = ("srcc_", "krcc_", "plcc_", "rmse_")


@dataclass(frozen=True)
class Curves:
    """What a training run logged.

    Attributes:
        name: of the run, for example ``stage1``.
        training: value -> series over all steps, of :data:`TRAIN_KEYS`.
        validation: statistic -> series over the steps after which validation ran.
        samples: a few samples of the last validation, each ``{sample_id, rated, predicted, answer}``.
    """

    name: str
    training: Mapping[str, Series]
    validation: Mapping[str, Series]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def read_curves(folder: Path) -> Curves | None:
    """The series of a training folder's ``metrics.jsonl``; ``None`` if it has none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    training: dict[str, Series] = {}
    validation: dict[str, Series] = {}
    samples: Sequence[Mapping[str, Any]] = ()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the torn last line of an interrupted run
        if not isinstance(row, dict) or not _is_number(row.get("step")):
            continue
        if row.get("kind") == "train":
            _add(training, row, [key for key in TRAIN_KEYS if key in row])
        if row.get("kind") == "validation":
            _add(validation, row, [k for k in row if k.startswith(VALIDATION_PREFIXES) or k == "accuracy"])
            samples = row.get("samples") or samples
    return Curves(folder.name, training, validation, tuple(samples)) if training or validation else None


def training_figure(folder: Path, name: str, curves: Curves) -> SavedFigure:
    """Losses apart, penalty, rate, gradient norm, ranks, throughput, and validation statistics of one run."""
    train, found = curves.training, curves.validation
    panels = [
        ("task losses", ["loss", "text_loss", "qa_loss", "score_loss"], train, True),
        ("orthogonality penalty", ["orthogonality"], train, False),
        ("learning rate", ["learning_rate"], train, False),
        ("gradient norm before clipping", ["grad_norm"], train, True),
        ("ranks kept (all matrices)", ["ranks_kept"], train, False),
        ("edits a second", ["edits_per_second"], train, True),
        ("tokens a second", ["tokens_per_second"], train, True),
        ("validation SRCC", [k for k in found if k.startswith("srcc_") and k != "srcc_mean"], found, False),
        ("validation KRCC and PLCC", [k for k in found if k.startswith(("krcc_", "plcc_"))], found, False),
        ("validation RMSE", [k for k in found if k.startswith("rmse_")], found, False),
        ("validation accuracy (yes/no)", ["accuracy"], found, False),
    ]
    drawn = [
        (title, [key for key in keys if key in series], series, smooth)
        for title, keys, series, smooth in panels
        if any(key in series for key in keys)
    ]
    width = min(3, len(drawn))
    height = -(-len(drawn) // width)
    with style():
        figure, axes = new_figure(3.5 * width, 2.5 * height, width, height)
        for axis, (title, keys, series, smooth) in zip(axes, drawn, strict=False):
            _draw(axis, title, keys, series, smooth)
        for axis in axes[len(drawn) :]:
            axis.set_axis_off()
        title = f"{plain(curves.name)}: what training logged"
        note = "Over optimizer steps. Where values jump from step to step, the thick line is their running mean."
        return save(figure, folder, name, title, note)


def samples_table(curves: Curves, name: str) -> Table | None:
    """A few edits of the last validation, rated and predicted; ``None`` if none were written down."""
    dimensions = list(dict.fromkeys(d for sample in curves.samples for d in sample["predicted"]))
    if not dimensions:
        return None
    kinds = ("rated", "predicted")
    columns = [
        Column("sample", "edit", "text"),
        *(Column(f"{d}_{kind}", kind, group=d, digits=1) for d in dimensions for kind in kinds),
        Column("answer", "answer", "text"),
    ]
    rows = tuple(
        (
            Cell(str(sample["sample_id"])),
            *(Cell(sample[kind].get(d)) for d in dimensions for kind in kinds),
            Cell(sample.get("answer")),
        )
        for sample in curves.samples
    )
    title = f"{curves.name}: some validation edits"
    return Table(name, title, tuple(columns), rows, "On the scale of the ratings; predictions after the last step.")


def _draw(axis: Axes, title: str, keys: Sequence[str], series: Mapping[str, Series], smooth: bool) -> None:
    colours, markers = colour_of(keys), marker_of(keys)
    lowest, highest = np.inf, 0.0
    for key in keys:
        steps, values = (np.asarray(v, dtype=float) for v in series[key])
        label = plain(key.replace("_", " "))
        if smooth and len(values) > 5:
            axis.plot(steps, values, color=colours[key], alpha=0.25, linewidth=1)
            axis.plot(steps, _running_mean(values), color=colours[key], linewidth=1.8, label=label)
        else:
            mark = markers[key] if len(values) < 30 else None
            axis.plot(steps, values, marker=mark, linestyle="-", color=colours[key], markersize=3.5, label=label)
        lowest, highest = min(lowest, values.min()), max(highest, values.max())
    if lowest > 0 and highest / lowest > 20 and title != "learning rate":
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_title(title)
    axis.set_xlabel("optimizer step", color=FAINT)
    if len(keys) > 1:
        axis.legend(fontsize=7)


def _running_mean(values: np.ndarray) -> np.ndarray:
    width = max(3, len(values) // 20)
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def _add(series: dict[str, Series], row: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if _is_number(row[key]):
            steps, values = series.setdefault(key, ([], []))
            steps.append(row["step"])
            values.append(row[key])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
