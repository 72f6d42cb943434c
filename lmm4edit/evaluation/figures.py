"""The figures of a report. Each takes numbers that are already computed and returns a saved figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lmm4edit.evaluation.logistic import fit_logistic
from lmm4edit.evaluation.metrics import MetricRow, Metrics, PredictorRanking
from lmm4edit.evaluation.plotting import (
    ACCENT,
    COLOURS,
    FAINT,
    INK,
    LINE,
    PEOPLE,
    SavedFigure,
    colour_of,
    marker_of,
    new_figure,
    plain,
    save,
    style,
)

MANY_POINTS = 3000


@dataclass(frozen=True)
class Points:
    """One panel of a scatter plot.

    Attributes:
        dimension: its name.
        predicted, rated: [N] pairs.
        emphasis: [N] label that colours a point (``photo``, ``scene``), or empty.
        srcc: to print in the panel.
        on_opinion_scale: whether a point on the diagonal is a perfect prediction.
    """

    dimension: str
    predicted: Sequence[float]
    rated: Sequence[float]
    emphasis: Sequence[str]
    srcc: float | None
    on_opinion_scale: bool


def scatter_figure(folder: Path, name: str, title: str, panels: Sequence[Points], rated_label: str) -> SavedFigure:
    """Rating against prediction per dimension, with the fitted four-parameter logistic."""
    with style():
        figure, axes = new_figure(3.45 * len(panels), 3.6, len(panels))
        for axis, points in zip(axes, panels, strict=True):
            draw_scatter(axis, points, rated_label)
        note = "Each point is one edit; the curve is the fitted four-parameter logistic"
        note += ", the dashed line marks equality." if panels and panels[0].on_opinion_scale else "."
        return save(figure, folder, name, title, note)


def draw_scatter(axis: Axes, points: Points, rated_label: str, legend: bool = True) -> None:
    """One panel of :func:`scatter_figure`."""
    x, y = np.asarray(points.predicted, dtype=float), np.asarray(points.rated, dtype=float)
    labels = list(dict.fromkeys(points.emphasis))
    for index, label in enumerate(labels):
        mask = np.array([e == label for e in points.emphasis])
        axis.scatter(
            x[mask],
            y[mask],
            s=13,
            marker=("o", "^", "s", "D")[index % 4],
            color=(ACCENT, COLOURS[1], COLOURS[2], COLOURS[4])[index % 4],
            alpha=0.5,
            linewidths=0,
            label=plain(label),
            rasterized=len(x) > MANY_POINTS,
        )
    if points.on_opinion_scale and len(x):
        low, high = min(0.0, x.min(), y.min()), max(100.0, x.max(), y.max())
        axis.plot([low, high], [low, high], linestyle=(0, (4, 3)), color=FAINT, linewidth=0.9, zorder=1)
        axis.set(xlim=(low - 2, high + 2), ylim=(low - 2, high + 2))
    fit = fit_logistic(x, y, 4) if len(x) >= 20 and np.ptp(x) > 0 else None
    if fit is not None:
        grid = np.linspace(x.min(), x.max(), 200)
        axis.plot(grid, fit(grid), color=INK, linewidth=1.8)
    shown = "no SRCC" if points.srcc is None else f"SRCC {points.srcc:.3f}".replace("-", "−")
    axis.set_title(f"{plain(points.dimension.capitalize())}   ", loc="left")
    axis.set_title(shown, loc="right", fontweight="normal", color=FAINT, fontsize=9)
    axis.set(xlabel="predicted", ylabel=rated_label)
    if legend and len(labels) > 1:
        axis.legend(loc="lower right", handletextpad=0.1, markerscale=1.6, borderpad=0.1)


def agreement_figure(
    folder: Path,
    name: str,
    title: str,
    rows: Mapping[tuple[str, str], MetricRow],
    shown: Mapping[str, str],
    columns: int | None = None,
) -> SavedFigure:
    """SRCC of every predictor with every dimension, as points with 95 % intervals.

    Args:
        rows: (predictor, panel) -> row; panels and predictors are drawn in their order.
        shown: predictor -> printed name.
        columns: panels side by side; default: all.
    """
    predictors, panels = _keys(rows)
    columns = columns or len(panels)
    lines = -(-len(panels) // columns)
    height = (0.75 + 0.34 * len(predictors)) * lines
    with style():
        figure, axes = new_figure(10.4, height, columns, lines, sharey=True, sharex=True)
        for axis, panel in zip(axes, panels, strict=False):
            draw_intervals(axis, [rows.get((p, panel)) for p in predictors], predictors, shown)
            axis.set_title(plain(panel[:1].upper() + panel[1:]))
        for axis in axes[-columns:]:
            axis.set_xlabel("SRCC")
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        return save(figure, folder, name, title, "Points are SRCC, bars 95 % bootstrap intervals over sources.")


def draw_intervals(
    axis: Axes, rows: Sequence[MetricRow | None], predictors: Sequence[str], shown: Mapping[str, str]
) -> None:
    """Points with intervals, the first predictor on top."""
    colours, markers = colour_of(predictors), marker_of(predictors)
    for place, (row, predictor) in enumerate(zip(rows, predictors, strict=True)):
        if row is None or row.value is None:
            axis.text(0.02, place, "not defined", color=FAINT, fontsize=8, va="center")
            continue
        if row.low is not None and row.high is not None:
            axis.plot([row.low, row.high], [place, place], color=colours[predictor], linewidth=2.4, alpha=0.55)
        axis.plot([row.value], [place], markers[predictor], color=colours[predictor], markersize=7)
    lowest = min([0.0, *(r.low if r.low is not None else r.value or 0.0 for r in rows if r is not None)])
    axis.set_xlim(min(axis.get_xlim()[0], lowest - 0.05), 1.02)
    axis.axvline(0, color=FAINT, linewidth=0.8)
    axis.set_yticks(range(len(predictors)), [plain(shown[p]) for p in predictors], color=INK)
    axis.set_ylim(len(predictors) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def breakdown_figure(
    folder: Path,
    name: str,
    title: str,
    rows: Mapping[tuple[str, str, str], MetricRow],
    shown: Mapping[str, str],
    overall: Mapping[tuple[str, str], float],
) -> SavedFigure:
    """SRCC per group (task, editing model): bars for the first predictor, marks for the others.

    Args:
        rows: (predictor, dimension, group) -> row.
        overall: (predictor, dimension) -> SRCC over all groups, drawn as a line for the first predictor.
    """
    predictors = list(dict.fromkeys(p for p, _, _ in rows))
    dimensions = list(dict.fromkeys(d for _, d, _ in rows))
    groups = list(dict.fromkeys(g for _, _, g in rows))
    first = predictors[0]

    def mean(group: str) -> float:
        values = [rows[first, d, group].value for d in dimensions if (first, d, group) in rows]
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if known else -2.0

    groups = sorted(groups, key=mean, reverse=True)
    colours, markers = colour_of(predictors), marker_of(predictors)
    with style():
        figure, axes = new_figure(10.4, 1.35 + 0.235 * len(groups), len(dimensions), sharey=True, sharex=True)
        for axis, dimension in zip(axes, dimensions, strict=True):
            for place, group in enumerate(groups):
                for predictor in reversed(predictors):
                    row = rows.get((predictor, dimension, group))
                    if row is None or row.value is None:
                        continue
                    if predictor == first:
                        axis.barh(place, row.value, height=0.62, color=ACCENT, alpha=0.82)
                        if row.low is not None and row.high is not None:
                            axis.plot([row.low, row.high], [place, place], color=INK, linewidth=1)
                    else:
                        mark = Line2D([row.value], [place], color=colours[predictor], marker=markers[predictor])
                        mark.set(linestyle="", markersize=4.6, markeredgewidth=0, alpha=0.9)
                        axis.add_line(mark)
            if (first, dimension) in overall:
                axis.axvline(overall[first, dimension], color=INK, linewidth=1, linestyle=(0, (4, 3)))
            axis.axvline(0, color=FAINT, linewidth=0.8)
            axis.set_title(plain(dimension.capitalize()))
            axis.set_xlabel("SRCC")
            axis.set_yticks(range(len(groups)), [plain(g.replace("_", " ")) for g in groups], color=INK)
            axis.set_ylim(len(groups) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
        handles = [Line2D([], [], color=ACCENT, linewidth=7, alpha=0.82, label=plain(shown[first]))]
        handles += [
            Line2D([], [], color=colours[p], marker=markers[p], linestyle="", markersize=5, label=plain(shown[p]))
            for p in predictors[1:]
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), columnspacing=1.4)
        return save(figure, folder, name, title, "Dashed: SRCC over all edits. Groups are small; read them with care.")


def ranking_figure(folder: Path, name: str, title: str, ranking: PredictorRanking, judge: str) -> SavedFigure:
    """Editing models: rated and predicted overall score with ranks, and the means of each dimension beside them."""
    dimensions = list(dict.fromkeys(d for m in ranking.people for d in m.means))
    with style():
        width_ratios = [1.25, *[1.0] * len(dimensions)]
        height = 1.0 + 0.33 * len(ranking.people)
        figure, axes = new_figure(10.4, height, len(width_ratios), sharey=True, width_ratios=width_ratios)
        draw_ranking(axes[0], ranking, judge)
        predicted = {m.name: m for m in ranking.predicted}
        models = [m for m in ranking.people if m.overall is not None]
        for axis, dimension in zip(axes[1:], dimensions, strict=True):
            for place, model in enumerate(models):
                _dumbbell(axis, place, model.means.get(dimension), predicted[model.name].means.get(dimension))
            axis.set_title(plain(dimension.capitalize()))
            axis.set_xlabel("mean score")
            axis.grid(axis="y", visible=False)
        note = "Diamonds: rated; circles: predicted; beside the overall score (Eq. 3 of the means), the two ranks."
        return save(figure, folder, name, title, note)


def draw_ranking(axis: Axes, ranking: PredictorRanking, judge: str) -> None:
    """Overall scores of :func:`ranking_figure` with ranks and a legend."""
    predicted = {m.name: m for m in ranking.predicted}
    models = [m for m in ranking.people if m.overall is not None]
    for place, model in enumerate(models):
        other = predicted[model.name]
        _dumbbell(axis, place, model.overall, other.overall)
        ranks = f"{model.rank:g} / {other.rank:g}" if other.rank is not None else f"{model.rank:g} / –"
        _beside(axis, place, ranks, 8.5)
    _beside(axis, -0.75, "rank", 8)
    axis.set_yticks(range(len(models)), [plain(m.name) for m in models], color=INK)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.set_xlabel("overall score (Eq. 3)")
    axis.grid(axis="y", visible=False)
    handles = [
        Line2D([], [], color=PEOPLE, marker="D", linestyle="", markersize=6, label="rated"),
        Line2D([], [], color=ACCENT, marker="o", linestyle="", markersize=7, label=plain(judge)),
    ]
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handletextpad=0.1, borderpad=0)


def _dumbbell(axis: Axes, place: float, rated: float | None, predicted: float | None) -> None:
    if rated is not None and predicted is not None:
        axis.plot([rated, predicted], [place, place], color=LINE, linewidth=3.2, zorder=1)
    if rated is not None:
        axis.plot([rated], [place], "D", color=PEOPLE, markersize=6.5, zorder=2)
    if predicted is not None:
        axis.plot([predicted], [place], "o", color=ACCENT, markersize=7.5, zorder=3, alpha=0.9)


def _beside(axis: Axes, place: float, text: str, size: float) -> None:
    axis.annotate(
        text,
        (1.0, place),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        ha="left",
        fontsize=size,
        color=FAINT,
        annotation_clip=False,
    )


def _keys(rows: Mapping[tuple[str, str], MetricRow]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(p for p, _ in rows)), list(dict.fromkeys(k for _, k in rows))


def metric_rows(
    metrics: Metrics, predictors: Sequence[str], dimensions: Sequence[str], statistic: str = "srcc"
) -> dict[tuple[str, str], MetricRow]:
    """(predictor, dimension) -> row over all edits, for :func:`agreement_figure`."""
    found = {(p, d): metrics.find(p, d, statistic) for p in predictors for d in dimensions}
    return {key: row for key, row in found.items() if row is not None}
