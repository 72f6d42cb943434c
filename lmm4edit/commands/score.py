"""``lmm4edit score``: one edit on the screen, or a manifest into a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lmm4edit.inference.judge import Judge
    from lmm4edit.inference.result import EditScore, ReadOut

SOME_FAILED = 3
"""Exit status when rows failed; everything else was scored."""


def score(
    manifest: Annotated[
        Path | None, typer.Argument(help="Manifest of edits (.jsonl, .csv, .parquet, or a `datasets` folder).")
    ] = None,
    judge: Annotated[
        str, typer.Option(help="Folder of a judge's checkpoint, or `tiny` for the demonstration judge.")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Table to write: .csv, .jsonl or .parquet.")] = None,
    source: Annotated[Path | None, typer.Option(help="Source image (for one edit).")] = None,
    edited: Annotated[Path | None, typer.Option(help="Edited image (for one edit).")] = None,
    instruction: Annotated[str | None, typer.Option(help="What the editor was told (for one edit).")] = None,
    question: Annotated[str | None, typer.Option(help="A yes/no question about the edit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")] = False,
    read_out: Annotated[
        str, typer.Option(help="`head`: the score head (stage 2). `text`: the numbers the judge writes (stage 1).")
    ] = "head",
    batch_size: Annotated[int, typer.Option(min=1, help="Edits in one forward pass.")] = 8,
    image_root: Annotated[Path | None, typer.Option(help="Folder that image paths are relative to.")] = None,
    device: Annotated[
        str | None, typer.Option(help="For example cuda:0 or cpu; default: the accelerator, if any.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the backbone: float32 or bfloat16.")] = "float32",
    backbone: Annotated[
        str | None, typer.Option(help="Where the backbone lies, if not where the checkpoint remembers it.")
    ] = None,
) -> None:
    """Score one edit, or every edit of a manifest.

    Quality, alignment and preservation (0-100, higher is better), the overall score of Eq. 3, and the answer to a
    yes/no question. A manifest can be interrupted and continued with the same command; rows that fail are listed at the
    end and never stop the run. Exit status: 0 all scored, 3 some rows failed, 2 nothing could be done.

    Examples:

        lmm4edit score --source a.png --edited b.png --instruction "remove the red heart" --judge tiny

        lmm4edit score edits.jsonl --judge runs/demo/stage2/checkpoint --output scores.parquet
    """
    reader = _read_out(read_out)
    if not judge:
        raise typer.BadParameter(
            "give the judge's checkpoint, or `tiny` for the demonstration judge.", param_hint="--judge"
        )

    from lmm4edit.inference.folder import judge_folder

    if manifest is not None:
        extra = {"--source": source, "--edited": edited, "--instruction": instruction, "--question": question}
        if given := [name for name, value in extra.items() if value is not None]:
            raise typer.BadParameter(f"give a manifest or one edit, not both (got MANIFEST and {', '.join(given)}).")
        if output is None:
            raise typer.BadParameter("say where the table goes, for example scores.parquet.", param_hint="--output")
        folder = judge_folder(judge)
        _score_manifest(
            lambda: _load(folder, device, dtype, backbone), manifest, output, image_root, reader, batch_size, as_json
        )
        return
    pair = {"--source": source, "--edited": edited, "--instruction": instruction}
    if missing := [name for name, value in pair.items() if value is None]:
        raise typer.BadParameter(f"give a manifest, or one edit; for one edit {', '.join(missing)} is missing.")
    if output is not None:
        raise typer.BadParameter("a table is written for a manifest; for one edit use --json.", param_hint="--output")
    assert source is not None and edited is not None and instruction is not None

    from lmm4edit.data.images import decode_image

    folder = judge_folder(judge)
    for image in (source, edited):
        decode_image(image)  # a wrong path is answered before a large judge is loaded
    loaded = _load(folder, device, dtype, backbone)
    _show_edit(loaded, judge, loaded.score(source, edited, instruction, question, reader), as_json)


def _read_out(name: str) -> ReadOut:
    if name == "head":
        return "head"
    if name == "text":
        return "text"
    raise typer.BadParameter(f"expected head or text, got {name!r}.", param_hint="--read-out")


def _load(folder: Path, device: str | None, dtype: str, backbone: str | None) -> Judge:
    from transformers.utils import logging

    from lmm4edit.inference.judge import load_judge

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # of loading weights, in somebody's log
    return load_judge(folder, device=device, dtype=dtype, backbone=backbone)


def _show_edit(loaded: Judge, name: str, result: EditScore, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        record = {**result.as_record(), "read_out": result.read_out, "judge": name, "notice": loaded.notice}
        record.pop("sample_id")
        if result.words:
            record["words"] = dict(result.words)
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        table = Table(caption=f"judge {name}, read-out {result.read_out}; 0-100, higher is better")
        table.add_column("output")
        table.add_column("value", justify="right")
        for key, value in result.lines():
            table.add_row(key, value)
        console = Console(highlight=False)
        console.print(table)
        for key, reason in result.failures.items():
            console.print(f"{key}: {reason}", markup=False)
        if loaded.notice:
            console.print(loaded.notice, style="yellow", markup=False)
    if result.failures:
        raise typer.Exit(SOME_FAILED)


def _score_manifest(
    load: Callable[[], Judge],
    manifest: Path,
    output: Path,
    image_root: Path | None,
    read_out: ReadOut,
    batch_size: int,
    as_json: bool,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lmm4edit.data.rows import read_rows
    from lmm4edit.inference.batch import check_output, part_path, score_manifest

    check_output(output, manifest)
    read_rows(manifest)
    loaded = load()
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("scoring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("failed {task.fields[failed]}"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("scoring", total=None, failed=0)
            report = score_manifest(
                loaded,
                manifest,
                output,
                image_root=image_root,
                read_out=read_out,
                batch_size=batch_size,
                progress=lambda done, total, failed: bar.update(task, completed=done, total=total, failed=failed),
            )
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. Nothing is lost: {part_path(output)} holds what is done; run the same command again."
        )
        raise typer.Exit(130) from None
    if as_json:
        record = {
            "output": str(report.output),
            "n_rows": report.n_rows,
            "n_scored": report.n_scored,
            "n_new": report.n_new,
            "failed": [{"where": f.where, "sample_id": f.sample_id, "reason": f.reason} for f in report.failed],
            "notice": loaded.notice,
        }
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        already = report.n_rows - report.n_new
        earlier = f", {already} of them by an earlier run" if already else ""
        typer.echo(f"{report.output}: {report.n_scored} edits scored{earlier}, {len(report.failed)} failed.")
        for failed in report.failed:
            typer.echo(f"  {failed}", err=True)
        if loaded.notice:
            typer.echo(f"note: {loaded.notice}", err=True)
    if report.failed:
        raise typer.Exit(SOME_FAILED)
