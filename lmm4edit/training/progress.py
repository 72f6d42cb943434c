"""What a person sees while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class RunProgress:
    """A progress bar, and lines above it.

    Args:
        console: where to.
        title: what runs.
        total: optimizer steps.
        done: steps taken before.
        visible: ``False`` in all processes but the first, or where the caller shows progress itself.
    """

    def __init__(self, console: Console, title: str, total: int, done: int = 0, visible: bool = True) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not visible,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, values="")
        self._visible = visible

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, row: Mapping[str, Any]) -> None:
        """Show a step's row."""
        values = f"loss {row['loss']:.4f}  {row['edits_per_second']:.1f} edits/s"
        self._progress.update(self._task, completed=row["step"], values=values)

    def line(self, text: str) -> None:
        """Print above the bar."""
        if self._visible:
            self._progress.console.print(text, highlight=False, markup=False)


def describe_validation(row: Mapping[str, Any]) -> str:
    """A validation row in one line: SRCC by dimension, accuracy, and in words how many answers could be read."""
    names = [key.removeprefix("srcc_") for key in row if key.startswith("srcc_") and key != "srcc_mean"]
    parts = [f"SRCC {name} {_number(row[f'srcc_{name}'])}" for name in names]
    parts.append(f"accuracy {_number(row['accuracy'])}")
    readable = [row[f"parsed_{name}"] for name in names if row.get(f"parsed_{name}") is not None]
    if readable:
        parts.append(f"readable answers {sum(readable) / len(readable):.0%}")
    if row["failed"]:
        parts.append(f"{row['failed']} samples failed")
    when = f"after step {row['step']}" if row["step"] else "of the starting judge"
    return f"{row['kind']} {when} ({row['read_out']}): " + ", ".join(parts)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
