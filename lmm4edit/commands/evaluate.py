"""``lmm4edit evaluate``: score a benchmark with any scorers, store every value, compute the statistics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from lmm4edit.evaluation.metrics import MetricRow, Metrics
    from lmm4edit.evaluation.tables import Column


def evaluate(
    manifest: Annotated[Path, typer.Option(help="Edits with ratings: .jsonl, .csv, .parquet or a datasets folder.")],
    scorers: Annotated[
        str,
        typer.Option(
            help="With commas between: mse, psnr, ssim, judge:PATH, judge-text:PATH; LABEL=judge:PATH renames."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Run folder; run again to continue or to add scorers.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Edits given to a scorer at a time.")] = 16,
    image_root: Annotated[Path | None, typer.Option(help="Folder that relative image paths start from.")] = None,
    training: Annotated[
        list[Path] | None, typer.Option(help="Training folder whose curves belong in the report (repeatable).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the benchmark; default: the manifest's name.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where judges run: cpu, cuda, cuda:1; default: best there is.")
    ] = None,
    retry_failures: Annotated[bool, typer.Option("--retry-failures", help="Score again what failed before.")] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples of the intervals; 0 for none.")] = 1000,
) -> None:
    """Score edits with any scorers and compare with the ratings: SRCC, KRCC, PLCC, RMSE, accuracy, with intervals.

    Every value goes to OUT/predictions.jsonl first, so an interrupted run continues; statistics are computed from that
    file into OUT/metrics.json. `lmm4edit report OUT` makes the report. What has no value is said at the end.

    Exit status 0: done. 3: done, but a scorer has no value for any edit.

    Example:

        lmm4edit evaluate --manifest test.jsonl --scorers mse,psnr,ssim,judge:checkpoints/tiny/judge --out runs/eval
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lmm4edit.data.manifest import read_manifest
    from lmm4edit.evaluation.runner import read_run_folder, run_scorers, why_simulated
    from lmm4edit.evaluation.stored import current_metrics

    console = Console()
    samples = read_manifest(manifest, image_root)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        run_scorers(
            samples,
            [spec.strip() for spec in scorers.split(",") if spec.strip()],
            out,
            batch_size,
            show,
            benchmark=name or manifest.stem,
            simulated=why_simulated(samples, manifest),
            training=training or [],
            scorer_options={"device": device} if device else {},
            retry_failures=retry_failures,
        )
        metrics = current_metrics(
            out,
            read_run_folder(out),
            resamples=resamples,
            progress=lambda done, total: show("statistics", done, total),
        )
    print_metrics(console, metrics, simulated=why_simulated(samples, manifest) is not None)
    console.print(
        f"Statistics: {out / 'metrics.json'}   Report: lmm4edit report {out}", highlight=False, soft_wrap=True
    )
    if _print_failures(console, out):
        raise typer.Exit(3)


def _print_failures(console: Console, out: Path) -> bool:
    """Say what has no value and why; gives whether a scorer has no value at all."""
    from lmm4edit.predictions.store import read_predictions

    by_predictor: dict[str, list[bool]] = {}
    reasons: dict[str, str] = {}
    for prediction in read_predictions(out / "predictions.jsonl").predictions:
        by_predictor.setdefault(prediction.predictor, []).append(prediction.failure is not None)
        if prediction.failure is not None:
            reasons.setdefault(prediction.predictor, f"{prediction.item_id}: {prediction.failure}")
    for predictor, reason in reasons.items():
        failed = by_predictor[predictor]
        console.print(
            f"{predictor}: {sum(failed)} of {len(failed)} values are missing, the first because of {reason}",
            style="yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return any(all(failed) for failed in by_predictor.values())


def print_metrics(console: Console, metrics: Metrics, simulated: bool) -> None:
    """Print SRCC per dimension and accuracy with 95 % intervals and n, one predictor a line."""
    from rich.table import Table

    from lmm4edit.evaluation import naming, tables
    from lmm4edit.records import ANSWER

    dimensions, predictors = naming.dimensions_of(metrics), naming.predictors_of(metrics)
    names = naming.display_names(predictors)
    answers = [p for p in predictors if metrics.find(p, ANSWER, "accuracy")]
    title = f"{metrics.benchmark}: SRCC with 95 % intervals" + (" (simulated ratings)" if simulated else "")
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("predictor", no_wrap=True)
    for dimension in dimensions:
        table.add_column(dimension, justify="right")
    if answers:
        table.add_column("yes/no", justify="right")
    table.add_column("n", justify="right")
    for predictor in predictors:
        rows = [metrics.find(predictor, d, "srcc") for d in dimensions]
        cells = [_printed(row, tables.Column("", "")) for row in rows]
        if answers:
            cells.append(_printed(metrics.find(predictor, ANSWER, "accuracy"), tables.Column("", "", "percent")))
        counts = sorted({(r.n_scored, r.n_expected) for r in rows if r})
        n = "\n".join(str(s) if s == e else f"{s} of {e}" for s, e in counts)
        table.add_row(names[predictor], *cells, n)
    if answers:
        majority = metrics.find(answers[0], ANSWER, "majority_accuracy")
        if majority is not None and majority.value is not None:
            table.caption = f"yes/no: accuracy; always giving the commonest answer reaches {majority.value:.1%}"
    console.print(table)
    for warning in metrics.warnings:
        console.print("warning:", warning, style="yellow", highlight=False, markup=False)


def _printed(row: MetricRow | None, column: Column) -> str:
    from lmm4edit.evaluation import tables

    if row is None or row.value is None:
        return tables.MISSING
    interval = tables.show_interval(tables.Cell(row.value, row.low, row.high), column, short=True)
    value = tables.show(row.value, column)
    return f"{value}\n[dim]{interval}[/dim]" if interval else value
