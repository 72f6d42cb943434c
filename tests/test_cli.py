"""The command line: quick, without torch, and every command shows an example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmm4edit import __version__
from lmm4edit.cli import app
from lmm4edit.threads import wait_politely

COMMANDS = [
    ["demo"],
    ["score"],
    ["evaluate"],
    ["report"],
    ["plan"],
    ["ranks"],
    ["ablate"],
    ["backbones"],
    ["data", "check"],
    ["data", "import"],
    ["data", "minibench"],
    ["data", "mos"],
    ["data", "split"],
    ["judge", "import"],
]


def test_help_loads_no_torch_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from lmm4edit.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "names = ('torch', 'transformers', 'scipy', 'numpy', 'matplotlib', 'pyarrow', 'skimage', 'pandas', 'PIL')\n"
        "heavy = [name for name in names if name in sys.modules]\n"
        "print('HEAVY', heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stdout + done.stderr


def test_every_command_is_listed_here() -> None:
    import typer.main

    group = typer.main.get_command(app)
    found = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found += [[name, sub] for sub in command.commands] if hasattr(command, "commands") else [[name]]
    assert sorted(found) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_in_its_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert f"lmm4edit {' '.join(command)}" in result.output.split("Example", 1)[1]


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"lmm4edit {__version__}\n"


def test_known_errors_are_one_message_without_a_traceback(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lmm4edit.cli",
        "score",
        "x.jsonl",
        "--judge",
        str(tmp_path / "none"),
        "--output",
        "y.csv",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {tmp_path / 'none'}: there is no such judge.")
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_threads_soon_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    for given, expected in [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ]:
        environment = dict(given)
        wait_politely(environment)
        assert environment == expected
    code = (
        "import os, sys\n"
        "from lmm4edit.cli import main\n"
        "sys.argv = ['lmm4edit', '--version']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "1000 False"
