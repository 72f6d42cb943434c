"""Tables of a report as data: the same cells become CSV (full precision), Markdown and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmm4edit.evaluation.comparison import Comparison
from lmm4edit.evaluation.metrics import ALL, MetricRow, Metrics
from lmm4edit.evaluation.naming import SPLITS, dimensions_of, display_names, group_name, predictors_of
from lmm4edit.evaluation.ranking import OVERALL
from lmm4edit.records import ANSWER

MAIN_STATISTICS = ("srcc", "krcc", "plcc")
FURTHER_STATISTICS = ("plcc_logistic4", "plcc_logistic5", "rmse", "rmse_logistic4", "distinct_values")
LABELS = {
    "srcc": "SRCC",
    "krcc": "KRCC",
    "plcc": "PLCC",
    "plcc_logistic4": "PLCC (logistic 4)",
    "plcc_logistic5": "PLCC (logistic 5)",
    "rmse": "RMSE",
    "rmse_logistic4": "RMSE (logistic 4)",
    "distinct_values": "different values",
    "accuracy": "accuracy",
    "majority_accuracy": "majority class",
}
LOWER_IS_BETTER = frozenset({"rmse", "rmse_logistic4"})
MISSING = "–"

Kind = Literal["text", "count", "number", "percent", "p"]


@dataclass(frozen=True)
class Column:
    """A column: ``key`` in CSV, ``label`` in print, ``group`` above several columns."""

    key: str
    label: str
    kind: Kind = "number"
    group: str = ""
    digits: int = 3


@dataclass(frozen=True)
class Cell:
    """A value with its interval; ``None`` comes with a reason, which print shows on demand."""

    value: float | int | str | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A named table; every row has one cell per column."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Column groups in order, each with its number of columns; empty where no column has a group."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group and column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(group for group, _ in spans) else []


def show(value: float | int | str | None, column: Column) -> str:
    """A value as printed in that column."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if column.kind == "percent":
        return f"{100 * value:.1f} %"
    if column.kind == "count":
        return f"{value:,.0f}"
    if column.kind == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    text = f"{value:.{column.digits}f}"
    # A rounded -0.0004 is printed as 0.000, not as a negative zero.
    return (text if float(text) else text.removeprefix("-")).replace("-", "−")


def show_interval(cell: Cell, column: Column, short: bool = False) -> str:
    """The interval as printed, or an empty text; ``short`` leaves out a decimal and the unit."""
    if cell.low is None or cell.high is None:
        return ""
    if short and column.kind == "number":
        column = replace(column, digits=max(column.digits - 1, 0))
    low, high = show(cell.low, column).removesuffix(" %"), show(cell.high, column)
    return f"{low} to {high.removesuffix(' %') if short else high}"


def to_csv(table: Table) -> str:
    """CSV with full precision; columns with intervals get ``_low`` and ``_high`` beside them; missing cells are "
    "empty."""
    with_interval = [any(row[i].low is not None for row in table.rows) for i in range(len(table.columns))]
    header: list[str] = []
    for column, interval in zip(table.columns, with_interval, strict=True):
        header += [column.key, f"{column.key}_low", f"{column.key}_high"] if interval else [column.key]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        values: list[object] = []
        for cell, interval in zip(row, with_interval, strict=True):
            values += [cell.value, cell.low, cell.high] if interval else [cell.value]
        writer.writerow(["" if v is None else v for v in values])
    return stream.getvalue()


def to_markdown(table: Table) -> str:
    """A Markdown table; intervals stand in brackets, the best value of a column is bold."""
    labels = [markdown_text(f"{c.group} {c.label}".strip()) for c in table.columns]
    lines = [_line(labels), _line(["---" if c.kind == "text" else "---:" for c in table.columns])]
    for row in table.rows:
        texts = []
        for cell, column in zip(row, table.columns, strict=True):
            text = markdown_text(show(cell.value, column))
            text = f"**{text}**" if cell.best else text
            interval = show_interval(cell, column)
            texts.append(f"{text} [{interval}]" if interval else text)
        lines.append(_line(texts))
    return "\n".join(lines)


def agreement_table(metrics: Metrics, group: str = ALL, name: str = "agreement", title: str = "") -> Table:
    """SRCC, KRCC and PLCC of every predictor with every dimension, and n."""
    targets = dimensions_of(metrics)
    return _statistics_table(metrics, group, name, title or "Agreement with the ratings", MAIN_STATISTICS, targets)


def overall_table(metrics: Metrics) -> Table | None:
    """SRCC, KRCC and PLCC with the overall score of Eq. 3; ``None`` where no edit has one."""
    if not any(row.target == OVERALL for row in metrics.rows):
        return None
    title = "Agreement with the overall score (Eq. 3 of the ratings)"
    return _statistics_table(metrics, ALL, "overall", title, MAIN_STATISTICS, [OVERALL])


def further_table(metrics: Metrics) -> Table:
    """The other statistics: PLCC after logistics, RMSE, number of different values."""
    targets = dimensions_of(metrics)
    return _statistics_table(metrics, ALL, "further_statistics", "Further statistics", FURTHER_STATISTICS, targets)


def accuracy_table(metrics: Metrics) -> Table | None:
    """Accuracy of the yes/no answers beside the majority class, overall and by kind; ``None`` without answers."""
    answering = [p for p in predictors_of(metrics) if metrics.find(p, ANSWER, "accuracy") is not None]
    if not answering:
        return None
    groups = list(dict.fromkeys(r.group for r in metrics.rows if r.group.partition("=")[0] in (ALL, *SPLITS)))
    shown = display_names(predictors_of(metrics))
    columns = [
        Column("predictor", "predictor", "text"),
        Column("n_scored", "n scored", "count"),
        Column("n_expected", "n expected", "count"),
        *(Column(f"accuracy_{group_name(g).replace(' ', '_')}", group_name(g), "percent") for g in groups),
        Column("gain_points", "gain", digits=1),
    ]
    rows = []
    for predictor in answering:
        found = [metrics.find(predictor, ANSWER, "accuracy", g) for g in groups]
        base = metrics.find(predictor, ANSWER, "majority_accuracy")
        top = found[0]
        gain = None
        if top is not None and base is not None and top.value is not None and base.value is not None:
            gain = 100 * (top.value - base.value)
        counts = (Cell(top.n_scored), Cell(top.n_expected)) if top is not None else (Cell(None), Cell(None))
        rows.append((Cell(shown[predictor]), *counts, *(_cell(r) for r in found), Cell(gain)))
    majority = [metrics.find(answering[0], ANSWER, "majority_accuracy", g) for g in groups]
    counts = (rows[0][1], rows[0][2])
    rows.append((Cell("majority class"), *counts, *(Cell(r.value if r else None) for r in majority), Cell(0.0)))
    note = "Gain: points of accuracy above the majority class, over all edits."
    return Table("answers", "Accuracy", tuple(columns), tuple(rows), note)


def split_table(metrics: Metrics, label: str) -> Table | None:
    """SRCC of every predictor in each group of a label; ``None`` if there are no such groups."""
    groups = list(dict.fromkeys(r.group for r in metrics.rows if r.group.startswith(f"{label}=")))
    if not groups:
        return None
    dimensions, predictors = dimensions_of(metrics), predictors_of(metrics)
    columns = [Column("predictor", "predictor", "text")]
    columns += [
        Column(f"{d}_{g.partition('=')[2]}", g.partition("=")[2], group=d.capitalize())
        for d in dimensions
        for g in groups
    ]
    shown = display_names(predictors)
    cells = {(p, d, g): _cell(metrics.find(p, d, "srcc", g)) for p in predictors for d in dimensions for g in groups}
    marked = _mark_best(cells, predictors, [(d, g) for d in dimensions for g in groups])
    rows = [(Cell(shown[p]), *(marked[p, d, g] for d in dimensions for g in groups)) for p in predictors]
    return Table(f"by_{label}", f"SRCC by {label.replace('_', ' ')}", tuple(columns), tuple(rows))


def breakdown_table(metrics: Metrics, label: str, predictor: str) -> Table | None:
    """SRCC per dimension in every group of a label, for one predictor."""
    groups = list(dict.fromkeys(r.group for r in metrics.rows if r.group.startswith(f"{label}=")))
    if not groups:
        return None
    dimensions = dimensions_of(metrics)
    columns = [Column(label, label.replace("_", " "), "text"), Column("n", "n", "count")]
    columns += [Column(f"{d}_srcc", d) for d in dimensions]
    rows = []
    for group in groups:
        found = [metrics.find(predictor, d, "srcc", group) for d in dimensions]
        n = max((r.n_scored for r in found if r), default=0)
        rows.append((Cell(group.partition("=")[2]), Cell(n), *(_cell(r) for r in found)))
    title = f"SRCC per {label.replace('_', ' ')}: {display_names(predictors_of(metrics))[predictor]}"
    return Table(f"per_{label}", title, tuple(columns), tuple(rows))


def ranking_table(metrics: Metrics, predictor: str) -> Table | None:
    """Editing models by people's Eq. 3 score beside a predictor's (the layout of the paper's Table 5)."""
    ranking = next((r for r in metrics.rankings if r.predictor == predictor), None)
    if ranking is None:
        return None
    predicted = {m.name: m for m in ranking.predicted}
    dimensions = list(dict.fromkeys(d for m in ranking.people for d in m.means))
    columns = [Column("editing_model", "editing model", "text"), Column("n", "n", "count")]
    for dimension in dimensions:
        group = dimension.capitalize()
        columns.append(Column(f"{dimension}_rated", "rated", group=group, digits=1))
        columns.append(Column(f"{dimension}_predicted", "predicted", group=group, digits=1))
    columns += [
        Column("overall_rated", "rated", group="Overall (Eq. 3)", digits=1),
        Column("overall_predicted", "predicted", group="Overall (Eq. 3)", digits=1),
        Column("rank_rated", "rated", group="Rank", digits=0),
        Column("rank_predicted", "predicted", group="Rank", digits=0),
    ]
    rows = []
    for model in ranking.people:
        other = predicted[model.name]
        cells = [Cell(model.name), Cell(model.n)]
        for dimension in dimensions:
            cells += [Cell(model.means.get(dimension)), Cell(other.means.get(dimension))]
        cells += [Cell(model.overall), Cell(other.overall), Cell(model.rank), Cell(other.rank)]
        rows.append(tuple(cells))
    note = "; ".join(_ranking_note(a.target, a.srcc, a.rmse) for a in ranking.agreement)
    return Table("editing_models", "Editing models", tuple(columns), tuple(rows), note)


def comparison_table(metrics: Metrics, predictor: str) -> Table | None:
    """One predictor against each other one: difference of SRCC with interval, and corrected p, per dimension."""
    shown = display_names(predictors_of(metrics))
    found: dict[tuple[str, str], Comparison] = {}
    for c in metrics.comparisons:
        if predictor in (c.first, c.second):
            found[c.second if c.first == predictor else c.first, c.target] = c
    others = [p for p in predictors_of(metrics) if any(p == other for other, _ in found)]
    targets = [t for t in (*dimensions_of(metrics), OVERALL) if any(t == target for _, target in found)]
    if not others:
        return None
    columns = [Column("against", "against", "text")]
    for target in targets:
        columns.append(Column(f"{target}_difference", "difference", group=target.capitalize()))
        columns.append(Column(f"{target}_p_adjusted", "p (Holm)", "p", target.capitalize()))
        columns.append(Column(f"{target}_n", "n", "count", target.capitalize()))
    rows = []
    for other in others:
        cells = [Cell(shown[other])]
        for target in targets:
            cells += _difference_cells(found.get((other, target)), predictor)
        rows.append(tuple(cells))
    return Table("comparisons", f"SRCC of {shown[predictor]} minus SRCC of the other", tuple(columns), tuple(rows))


def _difference_cells(c: Comparison | None, predictor: str) -> list[Cell]:
    if c is None:
        return [Cell(None, reason="not compared")] * 3
    turn = 1 if c.first == predictor else -1
    limits = sorted(turn * v for v in (c.low, c.high) if v is not None)
    low, high = limits if len(limits) == 2 else (None, None)
    difference = None if c.difference is None else turn * c.difference
    return [Cell(difference, low, high, c.reason), Cell(c.p_adjusted, reason=c.reason), Cell(c.n)]


def failure_table(metrics: Metrics) -> Table | None:
    """Missing predictions by reason; ``None`` if nothing is missing."""
    shown = display_names(predictors_of(metrics))
    rows = tuple(
        (Cell(shown.get(f.predictor, f.predictor)), Cell(f.target), Cell(f.count), Cell(f.reason), Cell(f.example))
        for f in metrics.failures
    )
    columns = (
        Column("predictor", "predictor", "text"),
        Column("target", "target", "text"),
        Column("count", "missing", "count"),
        Column("reason", "reason", "text"),
        Column("example", "for example", "text"),
    )
    return Table("missing", "Missing predictions", columns, rows) if rows else None


def _statistics_table(
    metrics: Metrics, group: str, name: str, title: str, statistics: Sequence[str], targets: Sequence[str]
) -> Table:
    predictors = predictors_of(metrics)
    targets = [t for t in targets if any(r.target == t and r.statistic in statistics for r in metrics.rows)]
    shown = display_names(predictors)
    cells = {(p, t, s): _cell(metrics.find(p, t, s, group)) for p in predictors for t in targets for s in statistics}
    marked = _mark_best(cells, predictors, [(t, s) for t in targets for s in statistics])
    columns = [Column("predictor", "predictor", "text"), Column("n_scored", "n", "count")]
    columns += [
        Column(f"{t}_{s}", LABELS[s], _kind(s), t.capitalize(), _digits(s)) for t in targets for s in statistics
    ]
    rows = []
    for predictor in predictors:
        found = [r for r in metrics.rows if r.predictor == predictor and r.group == group and r.target in targets]
        if not found:
            continue
        counts = {r.n_scored for r in found}
        n: int | str = counts.pop() if len(counts) == 1 else f"{min(counts)}–{max(counts)}"
        rows.append((Cell(shown[predictor]), Cell(n), *(marked[predictor, t, s] for t in targets for s in statistics)))
    return Table(name, title, tuple(columns), tuple(rows))


def _cell(row: MetricRow | None) -> Cell:
    return Cell(None, reason="not computed") if row is None else Cell(row.value, row.low, row.high, row.reason)


def _mark_best(
    cells: dict[tuple[str, str, str], Cell], predictors: Sequence[str], keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str, str], Cell]:
    marked = dict(cells)
    for first, second in keys:
        if second == "distinct_values" or len(predictors) < 2:
            continue
        sign = -1 if second in LOWER_IS_BETTER else 1
        values = {p: v for p in predictors if isinstance(v := cells[p, first, second].value, int | float)}
        if values:
            top = max(values, key=lambda p: sign * values[p])
            cell = marked[top, first, second]
            marked[top, first, second] = Cell(cell.value, cell.low, cell.high, cell.reason, best=True)
    return marked


def _kind(statistic: str) -> Kind:
    return "count" if statistic == "distinct_values" else "number"


def _digits(statistic: str) -> int:
    return 2 if statistic in LOWER_IS_BETTER else 3


def _ranking_note(target: str, correlation: float | None, error: float | None) -> str:
    unit = "ranks" if target == OVERALL else "points"
    shown = "no SRCC" if correlation is None else f"SRCC {correlation:.3f}"
    return f"{target}: {shown}, RMSE {error:.2f} {unit}" if error is not None else f"{target}: {shown}"


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(t.replace("|", "\\|").replace("\n", " ") for t in texts) + " |"


def markdown_text(text: str) -> str:
    """Somebody else's text (ids, instructions, names of models), shown by Markdown as it is: no HTML, no links."""
    shown = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "[": "&#91;", "]": "&#93;", "`": "&#96;"}
    return "".join(shown.get(character, character) for character in text)
