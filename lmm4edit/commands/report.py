"""``lmm4edit report``: tables, figures and one HTML page from a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder that `lmm4edit evaluate` wrote.")],
    training: Annotated[
        list[Path] | None, typer.Option(help="Further training folder whose curves to show (repeatable).")
    ] = None,
) -> None:
    """Write DIR/report: report.html (self-contained), report.md, overview.png, figures and tables.

    Needs no model and no GPU: everything comes from the stored predictions. Images are read only for the example edits.

    Example:

        lmm4edit report runs/eval
    """
    from rich.console import Console

    from lmm4edit.evaluation.report import build_report

    console = Console()
    with console.status("Making the report"):
        paths = build_report(run_dir, training or [])
    console.print(f"{paths.html}\n{paths.markdown}\n{paths.overview}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(paths.tables)} tables, {len(paths.figures)} figure files", highlight=False)
