"""The command ``lmm4edit``. Nothing here loads torch: every command imports what it needs when it runs."""

from __future__ import annotations

import sys
import warnings

import typer

from lmm4edit.commands import data as data_commands
from lmm4edit.commands import judge as judge_commands
from lmm4edit.commands.ablate import ablate
from lmm4edit.commands.backbones import backbones
from lmm4edit.commands.demo import demo
from lmm4edit.commands.evaluate import evaluate
from lmm4edit.commands.plan import plan
from lmm4edit.commands.ranks import ranks
from lmm4edit.commands.report import report
from lmm4edit.commands.score import score
from lmm4edit.errors import LMM4EditError
from lmm4edit.threads import wait_politely

app = typer.Typer(
    name="lmm4edit",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Judges of image edits: train them, score edits, compare with people.",
)
app.command()(demo)
app.command()(score)
app.command()(evaluate)
app.command()(report)
app.command()(ranks)
app.command()(ablate)
app.command()(backbones)
app.command()(plan)
app.add_typer(data_commands.app, name="data")
app.add_typer(judge_commands.app, name="judge")


def _version(show: bool) -> None:
    if show:
        from lmm4edit import __version__

        typer.echo(f"lmm4edit {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Judges of image edits: train them, score edits, compare with people.

    Example:

        lmm4edit score --source a.png --edited b.png --instruction "remove the red heart" --judge tiny
    """


def main() -> None:
    """Run the command line; known errors end with one clear message and exit status 2."""
    wait_politely()
    # Of libraries to each other; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    try:
        app(prog_name="lmm4edit")
    except LMM4EditError as error:
        from rich.console import Console

        Console(stderr=True, highlight=False, soft_wrap=True).print("Error:", style="bold red", end=" ")
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
