"""``lmm4edit ablate``: a grid of two-stage trainings beside the paper's Table 6."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from lmm4edit.evaluation.tables import Cell, Table
    from lmm4edit.training.ablation.grid import Grid, PlannedRun
    from lmm4edit.training.ablation.outcome import Outcome
    from lmm4edit.training.ablation.runs import Attempt


def ablate(
    config: Annotated[Path, typer.Option(help="The grid (YAML), for example configs/ablations/tiny.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of everything it makes, instead of the grid's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this row alone (repeatable).")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds with commas between, instead of the grid's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the grid, print every run's plan, train nothing.")
    ] = False,
) -> None:
    """Train and evaluate every row of a grid with every seed, and print the paper's Table 6 beside the result.

    Interrupt it and give the same command again: finished runs are skipped, the interrupted one continues. A run that
    fails is recorded with its reason and tried again by the next call. Several calls may work on one grid at a time.

    Example:

        lmm4edit ablate --config configs/ablations/tiny.yaml --dry-run
        lmm4edit ablate --config configs/ablations/tiny.yaml --only vision --seeds 0
    """
    from rich.console import Console

    from lmm4edit.training.ablation.grid import keep_grid, load_grid

    console = Console()
    grid = load_grid(config).with_out(out)
    chosen = _seeds(seeds)
    runs = grid.runs(only or (), chosen)
    if dry_run:
        _print_plans(console, runs)
        return
    from transformers.utils import logging

    from lmm4edit.training.ablation.runs import require_manifests

    _refuse_launchers()
    require_manifests(grid)
    keep_grid(grid)
    logging.disable_progress_bar()  # of loading weights, between our own
    try:
        attempts = _run(console, grid, runs)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command continues.")
        raise typer.Exit(130) from None
    _finish(console, grid, attempts, only or (), chosen or grid.seeds)


def _refuse_launchers() -> None:
    """Processes of one launch would fight for the runs and then wait for each other."""
    import os

    from lmm4edit.errors import ConfigError

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "ablate: expected one process, got a launch of several. Start it without torchrun or accelerate launch; "
            "for several GPUs, give several calls other rows (--only) or seeds (--seeds), each its own GPU."
        )


def _seeds(text: str | None) -> list[int]:
    from lmm4edit.errors import ConfigError

    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds: expected whole numbers with commas between, such as 0,1,2, got {text!r}.")
    return list(dict.fromkeys(map(int, parts)))


def _print_plans(console: Console, runs: Sequence[PlannedRun]) -> None:
    """Every run and its state; the two plans of a row once, since the seed changes none of their numbers."""
    from lmm4edit.errors import LMM4EditError
    from lmm4edit.training.ablation.outcome import read_outcome
    from lmm4edit.training.loop import run

    shown: set[str] = set()
    for planned in runs:
        outcome = read_outcome(planned.folder)
        state = "to do" if outcome is None else outcome.status
        shared = "" if planned.stage1_of == planned.folder else f"; stage 1 is that of {planned.stage1_of}"
        console.print(f"{planned.title} ({state}): {planned.folder}{shared}", **_PLAIN)
        if planned.row.name in shown:
            continue
        shown.add(planned.row.name)
        console.print(f"  {_summary(planned)}", **_PLAIN)
        for stage in (planned.stage1, planned.stage2):
            # Decoding every image for a plan of every row would take longer than reading it.
            data = stage.data.model_copy(update={"check_images": "header"})
            try:
                run(stage.model_copy(update={"data": data}), dry_run=True, console=console)
            except LMM4EditError as error:
                console.print(f"  stage {stage.stage}: no plan here: {error}", **_PLAIN)
    console.print(f"{len(runs)} runs in {len(shown)} rows; nothing was trained.", highlight=False)


def _summary(planned: PlannedRun) -> str:
    """What a run trains, from its configurations alone."""
    one, two = planned.stage1, planned.stage2
    adapter = two.adapter
    towers = {"vision encoder": adapter.vision, "language model": adapter.llm}
    where = " and ".join(part for part, on in towers.items() if on and adapter.kind != "none")
    ranks = {
        "adalora": f", rank {adapter.init_r} -> {adapter.target_r}, stage 2: {adapter.ranks}",
        "lora": f", rank {adapter.init_r}",
    }
    return (
        f"{two.backbone.name_or_path}; {adapter.kind}{f' on {where}' if where else ''}"
        f"{ranks.get(adapter.kind, '')}; projector {'trained' if adapter.projector else 'frozen'}; "
        f"epochs {one.epochs} + {two.epochs}"
    )


def _run(console: Console, grid: Grid, runs: Sequence[PlannedRun]) -> list[Attempt]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lmm4edit.training.ablation.runs import run_grid

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=len(runs))
        current = progress.add_task("", total=None, visible=False)
        phase_shown = ""

        def watch(planned: PlannedRun, phase: str, done: int, total: int | None) -> None:
            nonlocal phase_shown
            title = f"{planned.title}: {phase}"
            if title != phase_shown:
                phase_shown = title
                progress.reset(current, description=title, total=total, completed=done, visible=True)
            progress.update(current, total=total, completed=done)

        def on_end(attempt: Attempt) -> None:
            progress.advance(whole)
            console.print(_line(attempt), **_PLAIN)

        return run_grid(grid, runs, watch, on_end)


def _line(attempt: Attempt) -> str:
    title, outcome = attempt.run.title, attempt.outcome
    if outcome is None:
        return f"{title}: another process is at it; left to that one"
    if outcome.status == "failed":
        return f"{title}: failed: {outcome.reason}"
    srcc = [
        f"{target} {statistics['srcc'].value:.3f}"
        for target, statistics in outcome.measured.items()
        if "srcc" in statistics and statistics["srcc"].value is not None
    ]
    took = f" in {sum(outcome.seconds.values()) / 60:.1f} min" if attempt.what == "done" else ""
    return f"{title}: {attempt.what}{took}; SRCC {', '.join(srcc)}"


def _finish(
    console: Console, grid: Grid, attempts: Sequence[Attempt], only: Sequence[str], seeds: Sequence[int]
) -> None:
    """Table and files of everything the folder holds, whichever call made it."""
    from lmm4edit.evaluation.tables import to_csv, to_markdown
    from lmm4edit.training.ablation.outcome import read_outcome, write_results
    from lmm4edit.training.ablation.table import ablation_table
    from lmm4edit.training.run_folder import write_atomically

    outcomes = []
    for row in grid.rows:
        folders = sorted((grid.out / row.name).glob("seed-*"), key=lambda path: int(path.name.removeprefix("seed-")))
        outcomes += [o for folder in folders if (o := read_outcome(folder)) is not None]
    write_results(grid.out / "results.jsonl", outcomes)
    table = ablation_table(grid.rows, outcomes, seeds)
    write_atomically(grid.out / "table.csv", to_csv(table))
    markdown = f"# {table.title}\n\n{to_markdown(table)}\n\n{table.note}\n\n{_provenance(grid, outcomes)}\n"
    write_atomically(grid.out / "table.md", markdown)
    shown = table
    if only:
        shown = ablation_table([row for row in grid.rows if row.name in only], outcomes, seeds)
    _print_table(console, shown)
    files = ", ".join(str(grid.out / name) for name in ("table.md", "table.csv", "results.jsonl"))
    console.print(files, highlight=False, markup=False, soft_wrap=True)
    failed = [a for a in attempts if a.what == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(attempts)} runs failed:", style="bold red", highlight=False)
        for attempt in failed:
            log = attempt.run.folder / "log.txt"
            reason = attempt.outcome.reason if attempt.outcome else ""
            console.print(f"  {attempt.run.title}: {reason} (log: {log})", **_PLAIN)
        console.print("The same command tries them again.")
        raise typer.Exit(1)


def _provenance(grid: Grid, outcomes: Sequence[Outcome]) -> str:
    known = [o.provenance for o in outcomes if o.provenance]
    versions = [p["lmm4edit"] for p in known]
    commits = sorted({f"{v.get('commit')}{' with changes' if v.get('dirty') else ''}" for v in versions})
    packages = sorted({f"torch {p['packages']['torch']}, peft {p['packages']['peft']}" for p in known})
    machines = sorted({f"{p['cpu']}, {p['cpu_count']} cores" for p in known})
    return (
        f"Grid: {grid.path}. Commit: {', '.join(commits) or 'none'}. {'; '.join(packages)}. {'; '.join(machines)}. "
        "Settings and provenance of every run: results.jsonl."
    )


def _print_table(console: Console, table: Table) -> None:
    """One line of the terminal's table holds our mean, its interval and the paper's value, one below the other."""
    from rich.table import Table as RichTable

    from lmm4edit.evaluation.tables import MISSING

    # A narrow terminal gets the column that people read first; table.md holds all.
    wide = console.width >= _WIDE
    numbers = [i for i, c in enumerate(table.columns) if c.group and (wide or c.label in ("SRCC", "Acc"))]
    shown = RichTable(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    shown.add_column("row", no_wrap=True)
    for i in numbers:
        shown.add_column(f"{table.columns[i].group[:_GROUP_WIDTH]}\n{table.columns[i].label}", justify="right")
    rows, index = table.rows, 0
    while index < len(rows):
        ours = rows[index] if rows[index][1].value == "ours" else None
        index += ours is not None
        paper = rows[index] if index < len(rows) and rows[index][1].value == "paper" else None
        if ours is not None and paper is not None and paper[-1].value:
            paper = None  # one that the grid lacks: it stands alone
        index += paper is not None
        shown.add_row(_name(ours, paper), *(_number(table, i, ours, paper) for i in numbers))
    console.print(shown)
    for row in rows:
        if row[-1].value:
            console.print(f"{MISSING} {row[0].value}: {row[-1].value}", **_PLAIN)


_PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}
_WIDE = 150
_GROUP_WIDTH = 7


def _name(ours: Sequence[Cell] | None, paper: Sequence[Cell] | None) -> str:
    from rich.markup import escape

    lines = []
    if ours is not None:
        names = ("projector", "vision", "LLM")
        parts = [name for name, cell in zip(names, ours[3:6], strict=True) if cell.value]
        lines = [escape(str(ours[0].value)), f"[dim]{' + '.join(parts) or 'head alone'}"]
        lines[1] += f", {escape(str(ours[6].value))}, n={ours[7].value}[/dim]"
    if paper is not None:
        lines.append(f"[dim]paper, {escape(str(paper[0].value))}: {escape(str(paper[2].value))}[/dim]")
    return "\n".join(lines)


def _number(table: Table, index: int, ours: Sequence[Cell] | None, paper: Sequence[Cell] | None) -> str:
    from dataclasses import replace

    from lmm4edit.evaluation.tables import show

    column = replace(table.columns[index], digits=3)
    lines = []
    if ours is not None:
        cell = ours[index]
        lines = [show(cell.value, column).removesuffix(" %"), ""]
        if cell.low is not None and cell.high is not None:
            half = (cell.high - cell.low) / 2
            lines[1] = f"[dim]±{100 * half:.1f}[/dim]" if column.kind == "percent" else f"[dim]±{half:.3f}[/dim]"
    if paper is not None:
        lines.append(f"[dim]{show(paper[index].value, column).removesuffix(' %')}[/dim]")
    return "\n".join(lines)
