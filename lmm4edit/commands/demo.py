"""``lmm4edit demo``: the main job end to end on a laptop, and a report to look at."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

STAGES = ("mini benchmark", "stage 1: words", "stage 2: score head", "evaluation", "report")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the mini benchmark and of training.")] = 0,
    scorers: Annotated[
        str, typer.Option(help="Classic metrics to compare with, separated by commas.")
    ] = "mse,psnr,ssim",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a training setting in both stages, e.g. --set epochs=1 (repeatable)."),
    ] = None,
    sources_per_task: Annotated[
        int | None, typer.Option(help="Use at most so many sources of each kind per task (a quick look).")
    ] = None,
) -> None:
    """Train a judge in two stages on simulated ratings, score held-out edits, compare, and write a report.

    Interrupt it and run the same command again: what is done stays done. Everything it shows is a demonstration on
    simulated ratings.

    Example:

        lmm4edit demo --out runs/demo
    """
    from rich.console import Console
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights, between our own
    console = Console()
    started = time.monotonic()
    bench = out / "minibench"
    _title(console, 0)
    _minibench(console, bench, seed, sources_per_task)
    checkpoints: list[Path] = []
    for stage in (1, 2):
        _title(console, stage)
        checkpoints.append(_train(stage, out, bench, seed, checkpoints[-1] if checkpoints else None, overrides or []))
    _title(console, 3)
    _evaluate(out, bench, scorers.split(","), checkpoints)
    _title(console, 4)
    page = _report(out)
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\nDone in {minutes:.1f} minutes. Ratings, raters and editing models are [bold]simulated[/bold]: the numbers "
        "above show that the pipeline works, not how well it agrees with people.\n"
        f"Look at the report:  {page}\n"
        f"Score your own edit: lmm4edit score --source A.png --edited B.png --instruction '...' "
        f"--judge {checkpoints[-1]}"
    )


def _title(console, index: int) -> None:  # type: ignore[no-untyped-def]
    console.rule(f"[bold]{index + 1}/{len(STAGES)}  {STAGES[index]}", align="left")


def _minibench(console, bench: Path, seed: int, limit: int | None) -> None:  # type: ignore[no-untyped-def]
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lmm4edit.data.minibench.build import VERSION, build_minibench

    done = bench / "minibench.json"
    wanted = {"version": VERSION, "seed": seed, "sources_per_task": limit}
    if done.exists():
        found = json.loads(done.read_text(encoding="utf-8"))
        if {key: found.get(key) for key in wanted} == wanted:
            console.print(f"already there: {bench} ({found['counts']['train']} edits to train on)")
            return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("sources", total=None)
        summary = build_minibench(
            bench,
            seed,
            sources_per_task=limit,
            progress=lambda n, total: progress.update(task, completed=n, total=total),
        )
    counts = ", ".join(f"{count} edits to {split}" for split, count in summary.counts.items())
    console.print(
        f"{counts}; held-out sources: {summary.sources['test/photo']} photographs' crops, "
        f"{summary.sources['test/scene']} generated scenes"
    )


def _train(stage: int, out: Path, bench: Path, seed: int, start: Path | None, overrides: list[str]) -> Path:
    from lmm4edit.config import load_config
    from lmm4edit.shipped import shipped_path
    from lmm4edit.training.loop import run

    settings = [
        f"run_dir={json.dumps(str(out / f'stage{stage}'))}",
        f"seed={seed}",
        f"backbone.name_or_path={json.dumps(_from_here(shipped_path('checkpoints/tiny/backbone')))}",
        f"data.train={json.dumps(str(bench / 'train.jsonl'))}",
        f"data.validation={json.dumps(str(bench / 'validation.jsonl'))}",
        *([f"init_from={json.dumps(str(start))}"] if start else []),
        *overrides,
    ]
    run(load_config(shipped_path(f"configs/tiny/stage{stage}.yaml"), settings))
    return out / f"stage{stage}" / "checkpoint"


def _from_here(path: Path) -> str:
    """Relative to the working directory where it lies below it: checkpoints then name no folder of this machine."""
    here = Path.cwd().resolve()
    return str(path.resolve().relative_to(here)) if here in path.resolve().parents else str(path)


def _evaluate(out: Path, bench: Path, classic: list[str], checkpoints: list[Path]) -> None:
    from lmm4edit.commands.evaluate import evaluate

    words, head = checkpoints
    evaluate(
        manifest=bench / "test.jsonl",
        scorers=",".join([*classic, f"judge-text:{words}", f"judge:{head}"]),
        out=out / "evaluation",
        training=[out / "stage1", out / "stage2"],
        name="minibench",
    )


def _report(out: Path) -> Path:
    from lmm4edit.evaluation.report import build_report

    build_report(out / "evaluation")
    return out / "evaluation" / "report" / "report.html"
