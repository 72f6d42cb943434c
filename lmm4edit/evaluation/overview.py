"""One picture of a run (1600 x 900), for a README or a slide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image

from lmm4edit.data.images import decode_image
from lmm4edit.errors import ImageError
from lmm4edit.evaluation.columns import Column
from lmm4edit.evaluation.figures import Points, draw_intervals, draw_ranking, draw_scatter
from lmm4edit.evaluation.metrics import Metrics
from lmm4edit.evaluation.naming import dimensions_of, display_names, predictors_of
from lmm4edit.evaluation.plotting import ACCENT, COLOURS, FAINT, INK, LINE, PEOPLE, plain, style
from lmm4edit.evaluation.ranking import overall_score
from lmm4edit.evaluation.runner import Run
from lmm4edit.records import ANSWER, EditSample

MAX_PREDICTORS = 7
MAX_DIMENSIONS = 3
IMAGE_SIDE = 340


def overview_figure(
    path: Path, metrics: Metrics, samples: Sequence[EditSample], columns: Sequence[Column], run: Run
) -> None:
    """Write the picture: scatter plots of the best predictor, agreement of all, editing models, two example edits.

    The examples are one highly and one poorly rated edit on which the judge's error is typical (nearest to its median).
    """
    predictors = predictors_of(metrics)[:MAX_PREDICTORS]
    dimensions = dimensions_of(metrics)[:MAX_DIMENSIONS]
    shown = display_names(predictors_of(metrics))
    on_scale = {c.predictor for c in columns if c.on_opinion_scale}
    judge = next((p for p in predictors if p in on_scale), None)
    lead = judge or predictors[0]
    with style():
        figure = Figure(figsize=(16, 9), dpi=100)
        _header(figure, metrics, run, shown[lead])
        top = GridSpec(1, 3, figure, left=0.045, right=0.715, top=0.815, bottom=0.49, wspace=0.24)
        for place, dimension in enumerate(dimensions):
            axis = figure.add_subplot(top[0, place])
            column = next((c for c in columns if c.predictor == lead and c.target == dimension), None)
            if column is not None:
                draw_scatter(axis, _points(metrics, samples, column), "rated", legend=place == 0)
        _heading(figure, 0.045, 0.408, "Agreement of every predictor (SRCC)")
        low = GridSpec(1, 3, figure, left=0.085, right=0.42, top=0.36, bottom=0.105, wspace=0.12)
        axes = [figure.add_subplot(low[0, place]) for place in range(len(dimensions))]
        for place, (axis, dimension) in enumerate(zip(axes, dimensions, strict=True)):
            if place:
                axis.sharex(axes[0])
            draw_intervals(axis, [metrics.find(p, dimension, "srcc") for p in predictors], predictors, shown)
            axis.set_title(plain(dimension), fontweight="normal", color=FAINT, fontsize=10)
            axis.tick_params(axis="y", labelleft=place == 0)
        ranking = next((r for r in metrics.rankings if r.predictor == judge), None)
        if ranking is not None and any(m.overall is not None for m in ranking.people):
            _heading(figure, 0.465, 0.408, "Editing models, ranked by Eq. 3")
            draw_ranking(figure.add_axes((0.532, 0.105, 0.15, 0.255)), ranking, shown[lead])
        if judge is not None:
            for row, index in enumerate(_typical(samples, columns, judge)):
                _example(figure, 0.815 - 0.41 * row, samples[index], columns, judge, index)
        figure.savefig(path, facecolor="white", metadata={"Software": None})


def _heading(figure: Figure, x: float, y: float, text: str) -> None:
    figure.text(x, y, plain(text), fontsize=11.5, fontweight="bold", color=INK)


def _header(figure: Figure, metrics: Metrics, run: Run, lead: str) -> None:
    counts = metrics.counts
    parts = [f"{counts['samples']:,} edits", f"{counts['sources']:,} sources"]
    if counts["editing_models"]:
        parts.append(f"{counts['editing_models']} editing models")
    if counts["edit_tasks"]:
        parts.append(f"{counts['edit_tasks']} tasks")
    figure.text(0.022, 0.945, f"LMM4Edit on {plain(run.benchmark)}", fontsize=24, fontweight="bold", color=INK)
    figure.text(0.022, 0.908, plain("   ·   ".join([f"predictor shown: {lead}", *parts])), fontsize=12, color=FAINT)
    if run.simulated:
        figure.text(
            0.985, 0.945, "SIMULATED RATINGS", fontsize=13, fontweight="bold", color="#7a4b00", ha="right",
            bbox={"boxstyle": "round,pad=0.5", "facecolor": "#fff1d6", "edgecolor": COLOURS[1]},
        )  # fmt: skip
        figure.text(
            0.985,
            0.908,
            "a demonstration; says nothing about agreement with people",
            fontsize=10.5,
            color=FAINT,
            ha="right",
        )
    legend = (
        "Points and bars: SRCC with 95 % bootstrap intervals over sources. Curves: fitted 4-parameter logistic. "
        "Dashed: equality. Examples have typical (median) error; bar and first number predicted, diamond and second "
        "rated."
    )
    figure.text(0.022, 0.022, legend, fontsize=9.5, color=FAINT)


def _points(metrics: Metrics, samples: Sequence[EditSample], column: Column) -> Points:
    kept = [i for i, s in enumerate(samples) if column.values[i] is not None and column.target in s.mos]
    row = metrics.find(column.predictor, column.target, "srcc")
    return Points(
        column.target,
        [float(column.values[i]) for i in kept],
        [samples[i].mos[column.target] for i in kept],
        [samples[i].groups.get("content", "") for i in kept],
        row.value if row else None,
        column.on_opinion_scale,
    )


def _typical(samples: Sequence[EditSample], columns: Sequence[Column], judge: str) -> list[int]:
    """A highly rated and a poorly rated edit whose error is nearest to the median error."""
    mine = [c for c in columns if c.predictor == judge and any(c.target in s.mos for s in samples)]
    known: list[tuple[int, float, float]] = []
    for index, sample in enumerate(samples):
        overall = overall_score(sample.mos)
        if overall is None or any(c.values[index] is None or c.target not in sample.mos for c in mine):
            continue
        error = float(np.mean([abs(float(c.values[index]) - sample.mos[c.target]) for c in mine]))
        known.append((index, overall, error))
    if len(known) < 10:
        return []
    median = float(np.median([error for _, _, error in known]))
    low, high = np.quantile([overall for _, overall, _ in known], [0.1, 0.9])
    best = [k for k in known if k[1] >= high]
    worst = [k for k in known if k[1] <= low]
    chosen = [min(part, key=lambda k: (abs(k[2] - median), k[0]))[0] for part in (best, worst)]
    return chosen


def _example(figure: Figure, top: float, sample: EditSample, columns: Sequence[Column], judge: str, index: int) -> None:
    """One edit in the right-hand column, its upper edge at ``top`` (a fraction of the figure)."""
    left, width = 0.748, 0.237
    _heading(figure, left, top, _short(f"“{sample.instruction}”", 42))
    side = 0.112
    for place, (path, label) in enumerate(((sample.source_image, "source"), (sample.edited_image, "edited"))):
        axis = figure.add_axes((left + place * (side + 0.013), top - 0.035 - side * 16 / 9, side, side * 16 / 9))
        axis.set_axis_off()
        axis.set_title(label, fontsize=9, color=FAINT, fontweight="normal", pad=3)
        try:
            image = decode_image(path)
        except ImageError:
            axis.text(0.5, 0.5, "no image", ha="center", color=FAINT, transform=axis.transAxes)
            continue
        image.thumbnail((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.LANCZOS)
        axis.imshow(np.asarray(image), interpolation="lanczos")
    _bars(figure.add_axes((left, top - 0.343, width, 0.092)), sample, columns, judge, index)


def _bars(axis: Axes, sample: EditSample, columns: Sequence[Column], judge: str, index: int) -> None:
    mine = [c for c in columns if c.predictor == judge and c.target in sample.mos]
    for place, column in enumerate(mine):
        predicted, rated = float(column.values[index]), sample.mos[column.target]
        axis.text(0, place, plain(column.target), va="center", fontsize=9, color=INK)
        axis.barh(place, 100, left=44, height=0.36, color=LINE)
        axis.barh(place, min(max(predicted, 0), 100), left=44, height=0.36, color=ACCENT)
        axis.plot([44 + rated], [place], "D", color=PEOPLE, markersize=7, markeredgecolor="white")
        axis.text(150, place, f"{predicted:.0f} / {rated:.0f}", va="center", fontsize=9, color=INK)
    axis.set(xlim=(0, 178), ylim=(len(mine) - 0.5, -0.5))
    axis.set_axis_off()
    answer = next((c.values[index] for c in columns if c.predictor == judge and c.target == ANSWER), None)
    if answer is not None and sample.question:
        said = _short(f"{sample.question} {str(answer).capitalize()}", 58)
        axis.text(0, len(mine) - 0.1, said, va="center", fontsize=8.5, color=FAINT)


def _short(text: str, limit: int) -> str:
    return plain(text if len(text) <= limit else f"{text[: limit - 1]}…")
