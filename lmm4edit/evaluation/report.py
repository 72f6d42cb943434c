"""The report of an evaluation run: tables, figures, Markdown and one self-contained HTML page, all from stored "
"files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lmm4edit.errors import StoreError
from lmm4edit.evaluation import tables
from lmm4edit.evaluation.columns import predicted_columns
from lmm4edit.evaluation.overview import overview_figure
from lmm4edit.evaluation.runner import read_run_folder
from lmm4edit.evaluation.sections import PageBuilder
from lmm4edit.evaluation.stored import current_metrics
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

SIMULATED_NOTE = (
    "The opinions behind every number on this page were simulated, and so were the editing models: no person rated "
    "these edits. The page shows that the pipeline works and what its output looks like. It says nothing about how "
    "well any method agrees with people."
)


@dataclass(frozen=True)
class ReportPaths:
    """What was written."""

    html: Path
    markdown: Path
    overview: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]


def build_report(
    run_dir: str | Path,
    training: Sequence[str | Path] = (),
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
) -> ReportPaths:
    """Write ``report/`` in a run folder: ``report.html``, ``report.md``, ``overview.png``, ``tables/``, ``figures/``.

    Statistics come from ``metrics.json`` if it was computed from the predictions as they are now, else they are
    computed again. No model is loaded.

    Args:
        run_dir: folder that ``lmm4edit evaluate`` wrote.
        training: further training folders whose curves to show.

    Raises:
        StoreError: the folder is no run folder, or is damaged.
    """
    folder = Path(run_dir)
    content = read_run_folder(folder, dimensions)
    metrics = current_metrics(folder, content, dimensions)
    if not metrics.rows:
        raise StoreError(
            f"{folder}: expected edits with ratings or answers to compare with, got none: a report would be empty. "
            "Evaluate a manifest that has mos_<dimension> columns, or question and answer."
        )
    columns = predicted_columns(content.samples, content.predictions, content.run.scorers, dimensions)
    out = folder / "report"
    for part in ("tables", "figures"):
        shutil.rmtree(out / part, ignore_errors=True)
        (out / part).mkdir(parents=True)
    page = PageBuilder(content, metrics, columns, out, [*content.run.training, *map(str, training)])
    sections = page.sections()
    overview = out / "overview.png"
    overview_figure(overview, metrics, content.samples, columns, content.run)
    context = {
        **page.context(sections),
        "simulated_note": SIMULATED_NOTE,
        "provenance": _provenance_rows(metrics.provenance),
        "markdown": tables.to_markdown,
    }
    environment = Environment(
        loader=PackageLoader("lmm4edit.evaluation"),
        autoescape=lambda name: bool(name) and ".html" in str(name),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = tables.markdown_text
    environment.globals |= {"show": tables.show, "show_interval": tables.show_interval, "markup": Markup}
    html, markdown = out / "report.html", out / "report.md"
    html.write_text(environment.get_template("report.html.jinja").render(context), encoding="utf-8")
    markdown.write_text(environment.get_template("report.md.jinja").render(context), encoding="utf-8")
    written = []
    for section in sections:
        for table in (*section.tables, *section.folded):
            path = out / "tables" / f"{table.name}.csv"
            path.write_text(tables.to_csv(table), encoding="utf-8")
            written.append(path)
    figures = tuple(path for section in sections for f in section.figures for path in (f.png, f.svg))
    return ReportPaths(html, markdown, overview, tuple(written), figures)


def _provenance_rows(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the footer shows, in words."""
    package = provenance.get("lmm4edit") or {}
    commit = package.get("commit")
    state = " with local changes" if package.get("dirty") else ""
    versions = {k: v for k, v in (provenance.get("packages") or {}).items() if v}
    scored = provenance.get("scored") or {}
    rows = [
        ("LMM4Edit", f"{package.get('version') or 'not installed'}, commit {commit[:12]}{state}" if commit else
         f"{package.get('version') or 'not installed'}, {package.get('commit_reason') or 'commit unknown'}"),
        ("scored", str(scored.get("time") or "unknown")),
        ("statistics", str(provenance.get("time") or "unknown")),
        ("bootstrap", f"{provenance.get('resamples')} resamples of sources, seed {provenance.get('bootstrap_seed')}"),
        ("machine", f"{provenance.get('cpu')} ({provenance.get('cpu_count')} cores), {provenance.get('platform')}"),
        ("Python", str(provenance.get("python"))),
        ("packages", ", ".join(f"{k} {v}" for k, v in versions.items())),
        ("command", " ".join(map(str, scored.get("argv") or provenance.get("argv") or []))),
        ("predictions", str((provenance.get("sources") or {}).get("predictions", ""))),
    ]  # fmt: skip
    return [(name, text) for name, text in rows if text]
