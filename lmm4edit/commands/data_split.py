"""``lmm4edit data split``: one manifest becomes several, divided by source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmm4edit.commands.progress import progress_bar


def split(
    file: Annotated[Path, typer.Argument(help="Manifest.")],
    out: Annotated[Path, typer.Option(help="Folder to write train.jsonl, validation.jsonl and test.jsonl into.")],
    test: Annotated[float, typer.Option(min=0, max=0.99, help="Share of the sources that are held out.")] = 0.2,
    validation: Annotated[float, typer.Option(min=0, max=0.99, help="Share of the sources to watch a run on.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed, another split.")] = 0,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths are relative to; default: the manifest's.")
    ] = None,
    photographs: Annotated[
        bool,
        typer.Option(help="Compare source images and keep sources that show one photograph in one split."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the files of an earlier run in --out.")
    ] = False,
) -> None:
    """Split a manifest by source, in the same shares of every task.

    All edits of one source image go into one split; so do sources that show the same photograph, where images can be
    read. The same manifest, images and seed give the same split on every machine.

    Example:

        lmm4edit data split manifest.jsonl --out data/mine --test 0.2 --validation 0.1 --seed 0
    """
    from lmm4edit.commands.data_import import counted, tell_notes
    from lmm4edit.data.split_manifest import split_manifest

    with progress_bar(what="source images") as progress:
        done = split_manifest(
            file,
            out,
            {"validation": validation, "test": test},
            seed=seed,
            image_root=image_root,
            compare_photographs=photographs,
            overwrite=overwrite,
            progress=progress,
        )
    for name, counts in done.summary["splits"].items():
        typer.echo(
            f"{out / f'{name}.jsonl'}: {counted(counts['samples'], 'edit')} of {counted(counts['sources'], 'source')}."
        )
    tell_notes(done.notes)
