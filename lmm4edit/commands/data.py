"""``lmm4edit data ...``: manifests, and what they are made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmm4edit.commands.data_import import app as import_app
from lmm4edit.commands.data_import import counted
from lmm4edit.commands.data_mos import mos
from lmm4edit.commands.data_split import split
from lmm4edit.commands.progress import progress_bar

if TYPE_CHECKING:
    from lmm4edit.data.check import ManifestReport
    from lmm4edit.data.problems import Problem
    from lmm4edit.records import Dimension

app = typer.Typer(no_args_is_help=True)
app.add_typer(import_app, name="import")
app.command()(split)
app.command()(mos)


@app.callback()
def data() -> None:
    """Check, make and convert manifests: tables with one judged edit a row."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Manifest: .jsonl, .json, .csv, .parquet, or a `datasets` folder.")],
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths are relative to; default: the manifest's.")
    ] = None,
    decode: Annotated[
        bool, typer.Option(help="Decode every image, or (--no-decode) only look whether it is there.")
    ] = True,
    images: Annotated[bool, typer.Option(help="Look at images, or (--no-images) check everything else.")] = True,
    dimensions_file: Annotated[
        Path | None,
        typer.Option("--dimensions", help="File of your own dimensions; default: dimensions.yaml beside the manifest."),
    ] = None,
    dimension: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:LOW:HIGH]", help="Also expect scores of your own dimension (repeatable)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")] = False,
) -> None:
    """List everything that is wrong with a manifest and its images.

    Exit status 0: no problem. 1: problems, each with its line, what was expected, what came, and what to do.

    Example:

        lmm4edit data check edits.jsonl --image-root images/
    """
    from lmm4edit.data.check import inspect_manifest

    dimensions = _dimensions(file, dimensions_file, dimension or [])
    with progress_bar(quiet=as_json) as progress:
        report = inspect_manifest(file, image_root, decode, dimensions, progress, look_at_images=images)
    if as_json:
        typer.echo(json.dumps({"file": str(file), **asdict(report)}, indent=2))
    elif report.problems:
        _print_problems(file, report.problems, report.n_rows)
    else:
        typer.echo(
            _summary(file, report, "not looked at" if not images else "decoded" if decode else "found, not decoded")
        )
    if report.problems:
        raise typer.Exit(1)


@app.command()
def minibench(
    out: Annotated[Path, typer.Option(help="Folder to write images, manifests and ratings into.")],
    seed: Annotated[int, typer.Option(help="Decides everything: the same seed gives the same bytes.")] = 0,
    size: Annotated[int, typer.Option(min=28, help="Side of the images, pixels.")] = 168,
    sources_per_task: Annotated[
        int | None, typer.Option(min=1, help="At most so many sources of each kind per task (for a quick look).")
    ] = None,
) -> None:
    """Make the mini benchmark: simulated edits of photographs and scenes, with simulated ratings.

    21 tasks, 7 simulated editing models, 15 simulated raters, split by source. Everything in it is labelled as
    simulated.

    Example:

        lmm4edit data minibench --out runs/minibench --seed 0
    """
    from lmm4edit.data.minibench.build import build_minibench

    with progress_bar(what="sources") as progress:
        summary = build_minibench(out, seed, size, sources_per_task, progress=progress)
    edits = ", ".join(f"{split} {count}" for split, count in summary.counts.items())
    typer.echo(
        f"{out}: simulated edits: {edits}. Held-out sources: {summary.sources['test/photo']} crops of photographs, "
        f"{summary.sources['test/scene']} generated scenes. SHA-256 {summary.digest[:16]}."
    )
    for warning in summary.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _dimensions(manifest: Path, file: Path | None, texts: Sequence[str]) -> tuple[Dimension, ...]:
    """The manifest's dimensions and those of ``--dimension``; one of the same name takes the place of another."""
    from lmm4edit.data.dimensions import dimensions_of_manifest, load_dimensions, merge_dimensions
    from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

    known = dimensions_of_manifest(manifest)
    if file is not None:
        known = merge_dimensions(BUILT_IN_DIMENSIONS, load_dimensions(file))
    found = []
    for text in texts:
        name, *bounds = text.split(":")
        try:
            if len(bounds) not in (0, 2):
                raise ValueError("expected NAME or NAME:LOW:HIGH")
            low, high = (float(bound) for bound in bounds) if bounds else (0.0, 100.0)
            found.append(Dimension(name, f"Rate the {name}.", low, high))
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: {error}", param_hint="--dimension") from None
    return merge_dimensions(known, found)


def _print_problems(file: Path, problems: Sequence[Problem], n_rows: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("row" if file.suffix == ".parquet" or file.is_dir() else "line", justify="right", no_wrap=True)
    table.add_column("column", max_width=18, overflow="fold")
    table.add_column("problem, and what to do", overflow="fold")
    for problem in problems:
        # Text, not markup: what came from the file may hold square brackets.
        told = Text.assemble(
            f"expected {problem.expected}, got ", (problem.got, "bold"), ".\n", (f"→ {problem.remedy}", "cyan")
        )
        table.add_row(str(problem.line or "all"), Text(problem.field or "(all)"), told)
    console.print(table)
    count = counted(len(problems), "problem")
    console.print(Text(f"{count} in {counted(n_rows, 'row')} of {file}"), soft_wrap=True)


def _summary(file: Path, report: ManifestReport, looked: str) -> str:
    scores = ", ".join(f"{name} {count}" for name, count in report.n_mos.items())
    return (
        f"{file}: no problems. {counted(report.n_samples, 'edit')} of {counted(report.n_sources, 'source')}; "
        f"{counted(report.n_images, 'image')} {looked}; scores: {scores}; {counted(report.n_answers, 'answer')}."
    )
