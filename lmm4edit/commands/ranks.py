"""``lmm4edit ranks``: where a judge's low-rank adapters have kept their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lmm4edit.judge.ranks import AdapterRanks


def ranks(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, a run's, or tiny.")],
    out: Annotated[Path | None, typer.Option(help="Write ranks.csv and ranks.png into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry a matrix.")] = False,
) -> None:
    """Show the rank of every matrix that AdaLoRA or LoRA adapts, per part of the backbone, layer and matrix.

    Reads the adapter's files alone: no backbone is needed and nothing is loaded. Every training run leaves the same
    table and picture in its folder.

    Example:

        lmm4edit ranks runs/stage1/checkpoint --out runs/stage1
    """
    from lmm4edit.judge.ranks import read_ranks

    found = read_ranks(_checkpoint_of(checkpoint))
    if as_json:
        import json
        from dataclasses import asdict

        content = {"kind": found.kind, "total": found.total, "matrices": [asdict(m) for m in found.matrices]}
        typer.echo(json.dumps(content, indent=1))
    else:
        _print(found)
    if out is not None:
        from lmm4edit.evaluation.rank_figure import write_rank_files

        paths = write_rank_files(found, out)
        # Beside JSON on the standard output nothing else may stand.
        typer.echo("\n".join(map(str, paths)), err=as_json)


def _checkpoint_of(name: str) -> Path:
    """The checkpoint that a folder is, or that of a finished run in it."""
    from lmm4edit.errors import CheckpointError
    from lmm4edit.inference.folder import judge_folder

    folder = judge_folder(name)
    for candidate in (folder, folder / "checkpoint"):
        if (candidate / "judge.json").is_file():
            return candidate
    raise CheckpointError(
        f"{folder}: expected the folder of a checkpoint (with judge.json) or of a finished run (with checkpoint/), got "
        "neither. A run has its checkpoint when it is finished."
    )


def _print(ranks: AdapterRanks) -> None:
    from rich.console import Console
    from rich.table import Table

    from lmm4edit.judge.ranks import layer_table

    console = Console()
    for part in ranks.parts:
        matrices = ranks.of(part)
        layers, names, rows = layer_table(matrices)
        total = sum(m.rank for m in matrices)
        table = Table(title=f"{part}: {total} in {len(matrices)} matrices", title_justify="left")
        table.add_column("layer", justify="right")
        short = [name.rpartition(".")[2].removesuffix("_proj") for name in names]
        for name in short if len(set(short)) == len(names) else names:
            table.add_column(name, justify="right")
        for layer, row in zip(layers, rows, strict=True):
            table.add_row("–" if layer is None else str(layer), *("" if rank is None else str(rank) for rank in row))
        console.print(table)
    count, gone = len(ranks.matrices), sum(m.rank == 0 for m in ranks.matrices)
    line = f"{ranks.kind}: {ranks.total} in {count} matrices, mean {ranks.total / count:.2f}"
    if ranks.kind == "adalora":
        line += f", {ranks.matrices[0].initial_rank} at the start; {gone} pruned to rank 0"
    console.print(line, highlight=False)
