"""``lmm4edit data import ...``: other people's data as manifests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmm4edit.commands.progress import progress_bar

if TYPE_CHECKING:
    from lmm4edit.data.problems import Problem

app = typer.Typer(no_args_is_help=True)

_LISTED = 10

OutOption = Annotated[Path, typer.Option(help="Folder to write into.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run in --out.")]


@app.callback()
def import_() -> None:
    """Make a manifest from a release or from any table.

    Example:

        lmm4edit data import ebench18k EBench-18K/ --out data/ebench18k

        lmm4edit data import table ratings.csv --mapping mapping.yaml --out data/mine
    """


@app.command()
def ebench18k(
    folder: Annotated[Path, typer.Argument(help="The release: the folder with train_v.json, test_v.json, ...")],
    out: OutOption,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that holds sourceimg_h/ and so on; default: FOLDER, if they are there.")
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of the training sources that becomes validation.jsonl.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the splits made here.")] = 0,
    photographs: Annotated[
        bool, typer.Option(help="Look for photographs that recur under several sources (needs the images).")
    ] = True,
    overwrite: OverwriteOption = False,
) -> None:
    """Import the EBench-18K release as it is, with or without its images.

    Writes train.jsonl and test.jsonl (those there are), import_summary.json, and import_problems.jsonl if a row is bad.
    Exit status 0: every row was read. 1: some were not; each is listed with its line, and the others are imported.

    Example:

        lmm4edit data import ebench18k EBench-18K/ --out data/ebench18k --validation-fraction 0.1
    """
    from lmm4edit.data.ebench18k_import import import_ebench18k
    from lmm4edit.data.output_folder import problems_name

    with progress_bar(what="source images") as progress:
        done = import_ebench18k(
            folder,
            out,
            image_root=image_root,
            validation_fraction=validation_fraction,
            seed=seed,
            compare_photographs=photographs,
            overwrite=overwrite,
            progress=progress,
        )
    for name, split in done.summary["splits"].items():
        scores = ", ".join(f"{dimension} {count}" for dimension, count in split["scores"].items())
        typer.echo(
            f"{out / f'{name}.jsonl'}: {counted(split['samples'], 'edit')} of {counted(split['sources'], 'source')} "
            f"by {counted(split['editing_models'], 'editing model')}; scores: {scores}; "
            f"{counted(sum(split['answers'].values()), 'answer')}."
        )
    tell_missing(done.summary["missing_values"])
    tell_notes(done.notes)
    tell_problems(done.problems, out / problems_name("import"))


@app.command()
def table(
    file: Annotated[Path, typer.Argument(help="Table: .csv, .jsonl, .json, .parquet, or a `datasets` folder.")],
    mapping: Annotated[Path, typer.Option(help="YAML file that says which column is what.")],
    out: OutOption,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths are relative to; default: the table's.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Import any table of edits through a mapping, which docs/data.md describes.

    Writes manifest.jsonl, import_summary.json, dimensions.yaml if the mapping defines dimensions, images/ if the table
    embeds images, and import_problems.jsonl if a cell is bad. Exit status 0: every cell was read. 1: some were not;
    each is listed.

    Example:

        lmm4edit data import table ratings.csv --mapping mapping.yaml --out data/mine --image-root photos/
    """
    from lmm4edit.data.output_folder import problems_name
    from lmm4edit.data.table_import import import_table

    with progress_bar(what="rows") as progress:
        done = import_table(file, mapping, out, image_root=image_root, overwrite=overwrite, progress=progress)
    summary = done.summary
    scores = ", ".join(f"{dimension} {count}" for dimension, count in summary["scores"].items())
    typer.echo(
        f"{out / 'manifest.jsonl'}: {counted(summary['samples'], 'edit')} of {counted(summary['sources'], 'source')}, "
        f"from {counted(summary['rows'], 'row')}; scores: {scores}; {counted(summary['answers'], 'answer')}."
    )
    for formula in summary["formulas"]:
        typer.echo(f"  {formula}")
    tell_missing({"": summary["missing_values"]})
    tell_notes(done.notes)
    tell_problems(done.problems, out / problems_name("import"))


def tell_missing(missing: dict[str, dict[str, dict[str, Any]]]) -> None:
    """How many values are missing, and why."""
    for split, names in missing.items():
        for name, reasons in names.items():
            for reason, count in reasons.items():
                typer.echo(f"missing: {f'{split} ' if split else ''}{name} of {counted(count, 'edit')}: {reason}")


def tell_notes(notes: Sequence[str]) -> None:
    """What a reader of the numbers should know."""
    for note in notes:
        typer.echo(f"note: {note}")


def tell_problems(problems: Sequence[Problem], listed_in: Path) -> None:
    """List the first bad rows and end with exit status 1, if there are any."""
    if not problems:
        return
    for problem in problems[:_LISTED]:
        typer.echo(f"bad: {problem}", err=True)
    more = f", the first {_LISTED} above" if len(problems) > _LISTED else ""
    typer.echo(f"{counted(len(problems), 'problem')}{more}; all in {listed_in}. The rest was written.", err=True)
    raise typer.Exit(1)


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
