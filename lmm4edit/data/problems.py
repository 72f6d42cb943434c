"""What can be wrong with a manifest, told so that a person can repair it and a program can count it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmm4edit.errors import ManifestError

Kind = Literal[
    "unreadable_file",
    "no_rows",
    "bom",
    "bad_line",
    "missing_column",
    "unknown_column",
    "missing_value",
    "bad_value",
    "not_a_number",
    "out_of_range",
    "duplicate_id",
    "duplicate_edit",
    "same_image",
    "missing_image",
    "bad_image",
    "small_image",
    "extreme_shape",
]

_LISTED = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        file: the manifest.
        line: line of a text file (the first one of the row), or number of the row in a Parquet file or ``datasets``
            folder, or number of the item in a ``.json`` list, counted from 1; ``None`` if the whole file is meant.
        field: the column, or ``None`` if the whole row or file is meant.
        expected, got: as they fit into "expected ..., got ...".
        remedy: what to do, a sentence.
        kind: for counting and filtering.
    """

    file: str
    line: int | None
    field: str | None
    expected: str
    got: str
    remedy: str
    kind: Kind

    @property
    def where(self) -> str:
        """``test.jsonl:17`` for lines of text, ``test.parquet, row 17`` for rows."""
        return location(self.file, self.line)

    def __str__(self) -> str:
        field = f" {self.field}:" if self.field else ""
        return f"{self.where}:{field} expected {self.expected}, got {self.got}. {self.remedy}"


def location(file: str, line: int | None) -> str:
    """Where a row stands, for messages."""
    if line is None:
        return file
    return f"{file}:{line}" if file.lower().endswith((".jsonl", ".json", ".csv")) else f"{file}, row {line}"


def manifest_error(problems: Sequence[Problem]) -> ManifestError:
    """One error for all problems; its text lists the first ones and says how to see the rest."""
    if len(problems) == 1:
        return ManifestError(str(problems[0]), problems)
    lines = [f"{problems[0].file}: {len(problems)} problems:", *(f"  {problem}" for problem in problems[:_LISTED])]
    if len(problems) > _LISTED:
        lines.append(f"  and {len(problems) - _LISTED} more: `lmm4edit data check {problems[0].file}` lists all.")
    return ManifestError("\n".join(lines), problems)


def shown(value: object, limit: int = 60) -> str:
    """A value as it stands in a message: quoted, on one line, cut if long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-17:]}"
