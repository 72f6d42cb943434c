"""Folders that a command makes: written beside their place, moved into it when complete."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lmm4edit.data.problems import Problem
from lmm4edit.errors import ManifestError
from lmm4edit.json_lines import encode_line

Command = Literal["import", "split", "mos"]
"""What makes a folder. Each has a summary of its own, so that one folder can hold what an import and a split made."""


def summary_name(command: Command) -> str:
    """``import_summary.json``: written last, so that a folder without it is unfinished."""
    return f"{command}_summary.json"


def problems_name(command: Command) -> str:
    """``import_problems.jsonl``: every bad row, with file, line, column, what was expected, what came, what to do."""
    return f"{command}_problems.jsonl"


@contextmanager
def output_folder(
    out: str | Path, command: Command, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()
) -> Iterator[Path]:
    """A fresh folder to write into; on leaving, its files are moved into ``out``. After an error nothing is moved.

    A new ``out`` appears whole. In one that exists, files are moved one by one, the summary last, and everything else
    in it (images, for example) is left alone.

    Args:
        out: the folder.
        command: whose summary marks the end.
        overwrite: replace files that another run wrote. Equal ones may always be written again.
        inputs: files that were read, which are never replaced.

    Raises:
        ManifestError: if ``out`` cannot be made, a file in it would be replaced and ``overwrite`` is not given, or an
            input would be replaced.
    """
    place = Path(out).absolute()
    if place.exists() and not place.is_dir():
        raise ManifestError(f"{out}: expected a folder to write into, got a file. Give another --out.")
    if (place / summary_name(command)).exists() and not overwrite:
        raise _would_replace(out, summary_name(command))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    except OSError as error:
        raise ManifestError(f"{out}: the folder cannot be made: {error.strerror or error}. Check --out.") from None
    try:
        staging.chmod(0o755)
        yield staging
        for name in _replaced(staging, place):
            if any(path is not None and (place / name).samefile(path) for path in inputs if _exists(path)):
                raise ManifestError(f"{place / name}: expected another place to write to, got an input. Change --out.")
            if not overwrite:
                raise _would_replace(out, name)
        _move(staging, place, command)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a line end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def write_problems(folder: Path, problems: Iterable[Problem], command: Command) -> None:
    """Write :func:`problems_name`, if there are any."""
    lines = [encode_line({**asdict(problem), "message": str(problem)}) for problem in problems]
    if lines:
        (folder / problems_name(command)).write_bytes(b"".join(lines))


def count_by(values: Iterable[Any]) -> dict[str, int]:
    """How often each value stands, the most frequent first."""
    counts: dict[str, int] = {}
    for value in values:
        counts[str(value)] = counts.get(str(value), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def nested_counts(counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The same without empty entries, as plain dictionaries."""
    return {name: dict(inner) for name, inner in counts.items() if inner}


def _exists(path: str | Path | None) -> bool:
    return path is not None and Path(path).exists()


def _would_replace(out: str | Path, name: str) -> ManifestError:
    return ManifestError(
        f"{out}: expected a folder without {name}, got one that has it from an earlier run. Give another --out, or "
        "--overwrite to replace such files."
    )


def _replaced(staging: Path, place: Path) -> Iterator[str]:
    """Files of ``place`` that would be other ones after the move."""
    for path in sorted(staging.rglob("*")):
        name = str(path.relative_to(staging))
        target = place / name
        if path.is_file() and target.exists() and not (target.is_file() and filecmp.cmp(path, target, shallow=False)):
            yield name


def _move(staging: Path, place: Path, command: Command) -> None:
    if not place.exists():
        staging.rename(place)
        return
    # Until the new summary stands there, the folder counts as unfinished; stale files of the last run go with it.
    for name in (summary_name(command), problems_name(command)):
        (place / name).unlink(missing_ok=True)
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == summary_name(command)):
        target = place / path.relative_to(staging)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
