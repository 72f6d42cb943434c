"""``lmm4edit data mos``: raw ratings become mean opinion scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mos(
    ratings: Annotated[Path, typer.Argument(help="Table with one rating a row: .csv, .jsonl, .parquet, ...")],
    out: Annotated[Path, typer.Option(help="Folder to write into.")],
    manifest: Annotated[
        Path | None, typer.Option(help="Manifest whose sample_ids the items are: written again with the scores.")
    ] = None,
    image_root: Annotated[Path | None, typer.Option(help="Folder that the manifest's paths are relative to.")] = None,
    dimensions: Annotated[
        Path | None, typer.Option(help="File of your own dimensions (needed for their questions only).")
    ] = None,
    dimension: Annotated[
        str | None, typer.Option(help="The one dimension that was rated, if the table has no column for it.")
    ] = None,
    subject_column: Annotated[str, typer.Option(help="Column of who rated.")] = "subject",
    item_column: Annotated[str, typer.Option(help="Column of what was rated.")] = "item",
    value_column: Annotated[str, typer.Option(help="Column of the rating, higher is better, on any scale.")] = "value",
    dimension_column: Annotated[str, typer.Option(help="Column of the dimension.")] = "dimension",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run in --out.")
    ] = False,
) -> None:
    """Screen raw ratings and raters and compute mean opinion scores (paper 3.4, Eq. 1; ITU-R BT.500).

    Writes mos.csv, subjects.csv, mos_summary.json; with --manifest also manifest.jsonl with the scores in it. Exit
    status 0: every row was read. 1: some were not; each is listed in mos_problems.jsonl.

    Example:

        lmm4edit data mos ratings.csv --out runs/mos --manifest edits.jsonl
    """
    from lmm4edit.commands.data_import import counted, tell_notes, tell_problems
    from lmm4edit.data.dimensions import load_dimensions
    from lmm4edit.data.output_folder import problems_name
    from lmm4edit.data.ratings import RatingColumns, rate_items

    columns = RatingColumns(subject_column, item_column, value_column, dimension_column, dimension)
    definitions = load_dimensions(dimensions) if dimensions is not None else ()
    done = rate_items(ratings, out, columns, manifest, image_root, definitions, overwrite)
    for name, told in done.summary["dimensions"].items():
        typer.echo(
            f"{name}: MOS for {told['items_with_mos']} of {counted(told['items'], 'item')}, from "
            f"{counted(told['ratings'], 'rating')} by {counted(told['subjects'], 'subject')}; "
            f"{told['outlier_share']:.2%} of the ratings are outliers, "
            f"{counted(len(told['rejected_subjects']), 'subject')} rejected."
        )
    typer.echo(f"{out / 'mos.csv'}, {out / 'subjects.csv'}: every score and every subject.")
    tell_notes(done.notes)
    tell_problems(done.problems, out / problems_name("mos"))
