"""The parts of a report page: which figures and tables, under which heading, with which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmm4edit.evaluation import tables
from lmm4edit.evaluation.cases import CaseGroup, pick_cases
from lmm4edit.evaluation.columns import Column, opinions_of
from lmm4edit.evaluation.figures import (
    Points,
    agreement_figure,
    breakdown_figure,
    metric_rows,
    ranking_figure,
    scatter_figure,
)
from lmm4edit.evaluation.metrics import MetricRow, Metrics
from lmm4edit.evaluation.naming import SPLITS, dimensions_of, display_names, group_name, predictors_of
from lmm4edit.evaluation.plotting import SavedFigure
from lmm4edit.evaluation.runner import Run, RunContent
from lmm4edit.evaluation.tables import Table
from lmm4edit.evaluation.training_curves import read_curves, samples_table, training_figure
from lmm4edit.records import ANSWER, EditSample


@dataclass(frozen=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    detail: str
    versus: str
    fraction: float


@dataclass(frozen=True)
class Section:
    """A part of the page: text, figures and tables under one heading."""

    anchor: str
    title: str
    text: str = ""
    figures: tuple[SavedFigure, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()
    cases: tuple[CaseGroup, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class PageBuilder:
    """Puts the parts of a report together; holds what all of them need."""

    def __init__(
        self, content: RunContent, metrics: Metrics, columns: Sequence[Column], out: Path, training: Sequence[str]
    ) -> None:
        self.run: Run = content.run
        self.samples: list[EditSample] = content.samples
        self.metrics = metrics
        self.columns = columns
        self.figures = out / "figures"
        self.training = list(dict.fromkeys(training))
        self.predictors = predictors_of(metrics)
        self.shown = display_names(self.predictors)
        self.dimensions = dimensions_of(metrics)
        on_scale = {c.predictor for c in columns if c.on_opinion_scale}
        self.judge = next((p for p in self.predictors if p in on_scale), None)
        self.rated = "rating (simulated MOS)" if self.run.simulated else "rating (MOS)"

    def context(self, sections: Sequence[Section]) -> dict[str, Any]:
        return {
            "benchmark": self.run.benchmark,
            "counts": self.metrics.counts,
            "n_predictors": len(self.predictors),
            "simulated": self.run.simulated,
            "tiles": self._tiles(),
            "tiles_of": self.shown.get(self.judge or "", "") or self.shown.get(self.predictors[0], ""),
            "sections": sections,
            "warnings": self.metrics.warnings,
            "scorers": [(self.run.scorers[p.partition(" [")[0]], self.shown[p]) for p in self.predictors],
        }

    def sections(self) -> list[Section]:
        made = [
            self._agreement(),
            self._answers(),
            *self._splits(),
            self._scatter(),
            self._tasks(),
            self._models(),
            self._comparison(),
            self._curves(),
            self._cases(),
            self._missing(),
        ]
        return [section for section in made if section is not None]

    def _tiles(self) -> list[Tile]:
        if not self.predictors:
            return []
        lead = self.judge or self.predictors[0]
        tiles = []
        for dimension in self.dimensions:
            row = self.metrics.find(lead, dimension, "srcc")
            others = [
                (r.value, p)
                for p in self.predictors
                if self._kind_of(p) != self._kind_of(lead)
                and (r := self.metrics.find(p, dimension, "srcc")) is not None
                and r.value is not None
            ]
            best = max(others, default=None)
            versus = f"best other: {self.shown[best[1]]} {_number(best[0])}" if best else ""
            tiles.append(_tile(f"{dimension} SRCC", row, versus))
        row = self.metrics.find(lead, ANSWER, "accuracy")
        majority = self.metrics.find(lead, ANSWER, "majority_accuracy")
        if row is not None:
            base = "" if majority is None or majority.value is None else f"majority class {100 * majority.value:.1f} %"
            tiles.append(_tile("yes/no accuracy", row, base, percent=True))
        return tiles

    def _kind_of(self, predictor: str) -> bool:
        info = self.run.scorers.get(predictor.partition(" [")[0])
        return bool(info and info.on_opinion_scale)

    def _agreement(self) -> Section:
        rows = metric_rows(self.metrics, self.predictors, self.dimensions)
        figures = []
        if rows:
            title = "SRCC of each predictor with each dimension"
            figures.append(agreement_figure(self.figures, "agreement", title, rows, self.shown))
        text = (
            "Correlations are signed, with each scorer's direction applied: a positive number means that it agrees. "
            "In small print, 95 % intervals from resampling whole sources. PLCC is of the raw values."
        )
        main = tables.agreement_table(self.metrics)
        overall = tables.overall_table(self.metrics)
        further = (*([overall] if overall else []), tables.further_table(self.metrics))
        return Section("agreement", "Agreement with the ratings", text, tuple(figures), (main,), further)

    def _answers(self) -> Section | None:
        table = tables.accuracy_table(self.metrics)
        if table is None:
            return None
        text = "The majority class is what always giving the commonest right answer would reach on the same edits."
        return Section("answers", "Yes/no questions", text, tables=(table,))

    def _splits(self) -> list[Section]:
        parts = [table for label in SPLITS if (table := tables.split_table(self.metrics, label))]
        if not parts:
            return []
        figures = []
        groups = [g for g in dict.fromkeys(r.group for r in self.metrics.rows) if g.startswith("content=")]
        if groups:
            rows: dict[tuple[str, str], MetricRow] = {}
            for group in groups:
                for dimension in self.dimensions:
                    for p in self.predictors:
                        row = self.metrics.find(p, dimension, "srcc", group)
                        if row is not None:
                            rows[p, f"{dimension}: {group_name(group)}"] = row
            wide = len(self.dimensions)
            figures.append(agreement_figure(self.figures, "by_content", "SRCC by content", rows, self.shown, wide))
        text = "The same statistic within each kind of edit; a judge that only knows one kind shows here."
        shown = tuple(table for table in parts if table.name == "by_content") or (parts[0],)
        folded = tuple(table for table in parts if table not in shown)
        return [Section("splits", "Kinds of edits apart", text, tuple(figures), shown, folded)]

    def _scatter(self) -> Section | None:
        figures = []
        for predictor in self.predictors:
            panels = [p for d in self.dimensions if (p := self._points(predictor, d)) is not None]
            if panels:
                name = f"scatter_{self.predictors.index(predictor):02d}"
                title = f"{self.shown[predictor]}: rating against prediction"
                figures.append(scatter_figure(self.figures, name, title, panels, self.rated))
        if not figures:
            return None
        return Section("scatter", "Rating against prediction", "", tuple(figures), extra={"fold_after": 1})

    def _points(self, predictor: str, dimension: str) -> Points | None:
        column = next((c for c in self.columns if c.predictor == predictor and c.target == dimension), None)
        if column is None:
            return None
        opinions = opinions_of(self.samples, dimension)
        kept = [i for i, o in enumerate(opinions) if o is not None and column.values[i] is not None]
        row = self.metrics.find(predictor, dimension, "srcc")
        return Points(
            dimension,
            [float(column.values[i]) for i in kept],
            [opinions[i] for i in kept],
            [self.samples[i].groups.get("content", "") for i in kept],
            row.value if row else None,
            column.on_opinion_scale,
        )

    def _tasks(self) -> Section | None:
        return self._breakdown("edit_task", "tasks", "Per task")

    def _breakdown(self, label: str, anchor: str, title: str) -> Section | None:
        rows = {
            (r.predictor, r.target, group_name(r.group)): r
            for p in self.predictors
            for r in self.metrics.rows
            if r.predictor == p and r.group.startswith(f"{label}=") and r.statistic == "srcc"
            if r.target in self.dimensions
        }
        lead = self.judge or (self.predictors[0] if self.predictors else None)
        if not rows or lead is None:
            return None
        rows = dict(sorted(rows.items(), key=lambda item: item[0][0] != lead))
        overall = {
            (lead, d): r.value
            for d in self.dimensions
            if (r := self.metrics.find(lead, d, "srcc")) is not None and r.value is not None
        }
        caption = f"SRCC {title.lower()}: bars {self.shown[lead]}, marks the others"
        figure = breakdown_figure(self.figures, f"per_{label}", caption, rows, self.shown, overall)
        table = tables.breakdown_table(self.metrics, label, lead)
        return Section(anchor, title, "", (figure,), folded=(table,) if table else ())

    def _models(self) -> Section | None:
        ranking = next((r for r in self.metrics.rankings if r.predictor == self.judge), None)
        if ranking is None or self.judge is None:
            return None
        figures = []
        if any(m.overall is not None for m in ranking.people):
            title = "Editing models by overall score"
            figures.append(ranking_figure(self.figures, "editing_models", title, ranking, self.shown[self.judge]))
        table = tables.ranking_table(self.metrics, self.judge)
        text = (
            "Mean scores per editing model, combined by Eq. 3 of the paper: quality^0.3 · alignment^0.4 · "
            "preservation^0.3. Both columns are means over the same edits."
        )
        return Section("models", "Ranking of editing models", text, tuple(figures), (table,) if table else ())

    def _comparison(self) -> Section | None:
        lead = self.judge or (self.predictors[0] if self.predictors else None)
        table = tables.comparison_table(self.metrics, lead) if lead else None
        if table is None:
            return None
        text = (
            "Paired bootstrap over sources, on the edits that both scored; p values are two-sided and corrected by "
            "Holm's method over all comparisons of the run."
        )
        return Section("comparison", "Is the difference real?", text, tables=(table,))

    def _curves(self) -> Section | None:
        runs = [curves for folder in self.training if (curves := read_curves(Path(folder))) is not None]
        if not runs:
            return None
        figures = [training_figure(self.figures, f"training_{i}", run) for i, run in enumerate(runs, start=1)]
        found = [table for i, run in enumerate(runs, start=1) if (table := samples_table(run, f"samples_{i}"))]
        text = (
            "The task's losses apart from AdaLoRA's penalty, which is no part of them. Agreement is measured on "
            "validation edits, as in the tables above but without intervals."
        )
        return Section("training", "Training", text, tuple(figures), folded=tuple(found))

    def _cases(self) -> Section | None:
        groups = pick_cases(self.samples, self.columns, self.judge) if self.judge else []
        if not groups or self.judge is None:
            return None
        text = (
            f"Chosen by the mean difference between {self.shown[self.judge]} and the rating alone, from different "
            "sources and tasks."
        )
        return Section("cases", "Best and worst cases", text, cases=tuple(groups))

    def _missing(self) -> Section | None:
        table = tables.failure_table(self.metrics)
        if table is None:
            return None
        text = "Nothing was filled in for these: they count as expected and not as scored."
        return Section("missing", "Missing predictions", text, tables=(table,))


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _tile(label: str, row: MetricRow | None, versus: str, percent: bool = False) -> Tile:
    if row is None or row.value is None:
        return Tile(label, tables.MISSING, row.reason or "" if row else "not computed", versus, 0.0)
    column = tables.Column("", "", "percent" if percent else "number")
    interval = tables.show_interval(tables.Cell(row.value, row.low, row.high), column)
    detail = f"95 % interval {interval}" if interval else (row.reason or "")
    return Tile(label, tables.show(row.value, column), detail, versus, max(0.0, min(1.0, row.value)))
