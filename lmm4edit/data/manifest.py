"""Manifests: tables with one judged edit a row, and the samples read from them.

Columns (any order; the first four are required):

====================================== ================================================================================
``sample_id``                          unique
``source_image``, ``edited_image``     path, relative to the image root (default: the manifest's folder); or embedded
``instruction``                        what the editor was told
``source_id``                          identity of the source image; default: ``source_image`` as written
``source_description``,                texts that description-based editors were given
``target_description``
``prompt_type``                        ``instruction`` or ``description``
``edit_task``, ``editing_model``       labels
``mos_<dimension>``                    mean opinion score, a number
``question``, ``answer``               a yes/no question, and people's answer to it
``split``                              ``train``, ...; read into ``groups["split"]``
``group_<name>``                       any further label; read into ``groups["<name>"]``
====================================== ================================================================================

A cell that is empty, blank or null is a missing value. Image columns of ``datasets`` and Parquet files may embed the
image file (``{"bytes": ..., "path": ...}``); it becomes a ``data:`` URI, which the decoder takes.
"""

from __future__ import annotations

import base64
import difflib
import math
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from lmm4edit.data.dimensions import dimensions_of_manifest
from lmm4edit.data.problems import Kind, Problem, location, manifest_error, shown
from lmm4edit.data.rows import Row, read_rows, write_rows
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension, EditSample

REQUIRED_COLUMNS = ("sample_id", "source_image", "edited_image", "instruction")
TEXT_COLUMNS = ("source_description", "target_description", "question")
LABEL_COLUMNS = ("source_id", "edit_task", "editing_model", "split")
WORD_COLUMNS: dict[str, tuple[str, ...]] = {"prompt_type": ("instruction", "description"), "answer": ("yes", "no")}

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def read_manifest_rows(path: str | Path) -> Iterator[Row]:
    """Raw rows with their locations; see :func:`lmm4edit.data.rows.read_rows`."""
    return read_rows(path)


def read_manifest(
    path: str | Path,
    image_root: str | Path | None = None,
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    on_error: Literal["raise", "skip"] = "raise",
    problems: list[Problem] | None = None,
) -> list[EditSample]:
    """Read a whole manifest. Images are not opened: their paths are resolved.

    Args:
        path: ``.jsonl``, ``.json``, ``.csv``, ``.parquet``, or a folder written by ``datasets``' ``save_to_disk``.
        image_root: what relative image paths are relative to; default: the manifest's folder.
        dimensions: whose ``mos_<name>`` columns to read. Columns of other known dimensions (the built-in ones, those of
            a ``dimensions.yaml`` beside the manifest) are left out; those of unknown dimensions are refused.
        on_error: ``"raise"`` at the end with all problems, or ``"skip"`` rows that have any.
        problems: receives what was wrong with skipped rows; without it, skipping warns with their number.

    Raises:
        ManifestError: if the file cannot be read, has an unknown column, or holds no usable row; and, unless skipping,
            if any row is wrong. A MOS outside its dimension's range is *not* refused (Eq. 1 of the paper can leave it);
            :func:`lmm4edit.data.check.check_manifest` reports it.
        ConfigError: if there is a ``dimensions.yaml`` beside the manifest and it is wrong.
    """
    parser = RowParser(path, image_root, dimensions)
    samples, found = [], []
    for row in read_rows(path):
        parsed = parser.parse(row)
        found += parsed.problems
        if parsed.sample is not None:
            samples.append(parsed.sample)
    found = parser.unknown_column_problems() + found
    if parser.unknown_columns or (found and on_error == "raise"):
        raise manifest_error(found)
    if not samples:
        raise manifest_error([*found, parser.no_rows_problem()])
    if found and problems is not None:
        problems += found
    elif found:
        lines = {problem.line for problem in found}
        count = f"{len(lines)} row{'s' if len(lines) > 1 else ''}"
        warnings.warn(f"{path}: {count} skipped; the first: {found[0]}", stacklevel=2)
    return samples


def iter_manifest(
    path: str | Path, image_root: str | Path | None = None, dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS
) -> Iterator[EditSample]:
    """Samples one after the other; of former rows only the ids are kept in memory.

    Raises:
        ManifestError: as :func:`read_manifest`, at the first wrong row.
    """
    parser = RowParser(path, image_root, dimensions)
    empty = True
    for row in read_rows(path):
        parsed = parser.parse(row)
        wrong = parser.unknown_column_problems() + parsed.problems
        if parsed.sample is None or wrong:
            raise manifest_error(wrong)
        empty = False
        yield parsed.sample
    if empty:
        raise manifest_error([parser.no_rows_problem()])


def write_manifest(path: str | Path, samples: Iterable[EditSample], relative_to: str | Path | None = None) -> None:
    """Write samples as ``.jsonl``, ``.csv`` or ``.parquet``, the same bytes for the same samples.

    Args:
        relative_to: folder that image paths are written relative to (usually the manifest's); without it they are
            absolute.

    Raises:
        ManifestError: if the suffix is another, or a text has no UTF-8 (CSV and Parquet).
        ValueError: if a MOS is NaN or infinite.
    """
    rows = [_row_of(sample, relative_to) for sample in samples]
    present = {name for row in rows for name, value in row.items() if value is not None}
    fixed = [*REQUIRED_COLUMNS, "source_id", *TEXT_COLUMNS[:2], "prompt_type", "edit_task", "editing_model"]
    mos = _in_order_of_appearance(rows, "mos_")
    groups = sorted(name for name in present if name.startswith("group_"))
    columns = [*fixed, *mos, "question", "answer", "split", *groups]
    write_rows(path, rows, [name for name in columns if name in REQUIRED_COLUMNS or name in present])


@dataclass(frozen=True)
class ParsedRow:
    """What a row of a manifest says.

    Attributes:
        number: as in :class:`lmm4edit.data.rows.Row`.
        sample: ``None`` if anything is wrong with the row.
        problems: everything that is wrong with it.
        images: column -> resolved path or URI, as far as they are given.
        mos: dimension -> score, as far as they are numbers.
    """

    number: int
    sample: EditSample | None
    problems: list[Problem]
    images: dict[str, str] = field(default_factory=dict)
    mos: dict[str, float] = field(default_factory=dict)


class RowParser:
    """Turns the rows of one manifest into samples.

    Attributes:
        unknown_columns: column -> (line of its first row, number of rows).
    """

    def __init__(
        self,
        path: str | Path,
        image_root: str | Path | None = None,
        dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    ) -> None:
        self.file = str(path)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.image_root = Path(image_root) if image_root is not None else folder
        self.dimensions = {dimension.name: dimension for dimension in dimensions}
        self.unknown_columns: dict[str, tuple[int, int]] = {}
        known = (*dimensions_of_manifest(path), *dimensions)
        self._known_mos = {f"mos_{dimension.name}" for dimension in known}
        self._lines_by_id: dict[str, int] = {}

    def parse(self, row: Row) -> ParsedRow:
        """Read one row; the id is held against those of the rows before it."""
        if row.problem is not None:
            return ParsedRow(row.number, None, [row.problem])
        cells = _Cells(self.file, row)
        self._note_unknown(row)
        sample_id = cells.label("sample_id", required=True)
        found = {name: cells.image(name, self.image_root) for name in ("source_image", "edited_image")}
        images = {name: path for name, path in found.items() if path is not None}
        instruction = cells.text("instruction", required=True)
        prompt_type = cells.word("prompt_type")
        question, answer = cells.text("question"), cells.word("answer")
        if answer is not None and question is None:
            cells.report(
                "question", "the question that the answer belongs to", "nothing", "Give it, or leave out the answer."
            )
        scores = {name: cells.number(f"mos_{name}") for name in self.dimensions}
        mos = {name: score for name, score in scores.items() if score is not None}
        names = [name for name in row.values if name.startswith("group_") and name not in ("group_", "group_split")]
        groups = {name.removeprefix("group_"): cells.label(name) for name in names}
        groups["split"] = cells.label("split")
        written = row.values.get("source_image")
        source_id = cells.label("source_id") or (written if isinstance(written, str) else images.get("source_image"))
        descriptions = [cells.text("source_description"), cells.text("target_description")]
        labels = [cells.label("edit_task"), cells.label("editing_model")]
        if sample_id is not None:
            self._note_id(cells, sample_id, row.number)
        if cells.problems:
            return ParsedRow(row.number, None, cells.problems, images, mos)
        sample = EditSample(
            sample_id=str(sample_id),
            source_id=str(source_id),
            **images,
            instruction=str(instruction),
            source_description=descriptions[0],
            target_description=descriptions[1],
            prompt_type=prompt_type,  # type: ignore[arg-type]
            edit_task=labels[0],
            editing_model=labels[1],
            mos=mos,
            question=question,
            answer=answer,
            groups={name: label for name, label in groups.items() if label is not None},
            location=location(self.file, row.number),
        )
        return ParsedRow(row.number, sample, [], images, mos)

    def unknown_column_problems(self) -> list[Problem]:
        """One problem for each unknown column met so far."""
        problems = []
        for name, (line, count) in self.unknown_columns.items():
            near = self._near_column(name)
            hint = f"Did you mean {near!r}? " if near else ""
            keep = "To keep it as a label, call it group_<name>; otherwise remove it."
            if name.startswith("mos_"):
                keep = "For ratings of a dimension of your own, pass that dimension; otherwise remove the column."
            got = f"{name!r} in {count} row{'s' if count > 1 else ''}"
            remedy = f"{hint}{keep}"
            problems.append(Problem(self.file, line, name, "a known column", got, remedy, "unknown_column"))
        return problems

    def no_rows_problem(self) -> Problem:
        """That the manifest holds nothing."""
        remedy = "Check that the file is the right one and was written to its end."
        return Problem(self.file, None, None, "at least one usable row", "none", remedy, "no_rows")

    def _note_unknown(self, row: Row) -> None:
        for name in row.values:
            if not self._is_known(name):
                line, count = self.unknown_columns.get(name, (row.number, 0))
                self.unknown_columns[name] = (line, count + 1)

    def _is_known(self, name: str) -> bool:
        if name.startswith("group_"):
            return name not in ("group_", "group_split")
        listed: Collection[str] = (*REQUIRED_COLUMNS, *TEXT_COLUMNS, *LABEL_COLUMNS, *WORD_COLUMNS)
        return name in listed or name in self._known_mos

    def _near_column(self, name: str) -> str | None:
        if name == "group_split":
            return "split"
        # Without the common prefix, or else every score is near to every other.
        prefix = "mos_" if name.startswith("mos_") else ""
        listed = self._known_mos if prefix else [*REQUIRED_COLUMNS, *TEXT_COLUMNS, *LABEL_COLUMNS, *WORD_COLUMNS]
        known = [column.removeprefix(prefix) for column in sorted(listed)]
        near = difflib.get_close_matches(name.removeprefix(prefix), known, n=1)
        return prefix + near[0] if near else None

    def _note_id(self, cells: _Cells, sample_id: str, line: int) -> None:
        first = self._lines_by_id.setdefault(sample_id, line)
        if first != line:
            got = f"{sample_id!r} again, first in {location(self.file, first)}"
            cells.report("sample_id", "an id of its own", got, "Rename or remove one of the rows.", "duplicate_id")


_LARGEST_SCORE = 1_000_000_000
"""No scale of opinions reaches it, and squares of larger numbers leave the range of floats."""


class _Cells:
    """The cells of one row, read by what they should be, with what is wrong collected on the way."""

    def __init__(self, file: str, row: Row) -> None:
        self._file = file
        self._row = row
        self.problems: list[Problem] = []

    def report(self, field: str, expected: str, got: str, remedy: str, kind: Kind = "bad_value") -> None:
        self.problems.append(Problem(self._file, self._row.number, field, expected, got, remedy, kind))

    def text(self, name: str, required: bool = False) -> str | None:
        value = self._present(name, required)
        if value is None or isinstance(value, str):
            return value
        self.report(name, "text", f"{type(value).__name__} {shown(value)}", "Write it as text, in quotes.")
        return None

    def label(self, name: str, required: bool = False) -> str | None:
        """A text, or a whole number as text."""
        value = self._present(name, required)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        self.report(name, "text or a whole number", f"{type(value).__name__} {shown(value)}", "Write it as text.")
        return None

    def word(self, name: str) -> str | None:
        value = self._present(name)
        if value is None:
            return None
        word = value.strip().lower() if isinstance(value, str) else None
        if word in WORD_COLUMNS[name]:
            return word
        expected = " or ".join(repr(known) for known in WORD_COLUMNS[name])
        self.report(name, expected, shown(value), "Write one of them, or leave the cell empty.")
        return None

    def number(self, name: str) -> float | None:
        value = self._present(name)
        number = number_of(value)
        if value is not None and number is None:
            remedy = "Write it with a decimal point, or leave the cell empty if there is no score."
            self.report(name, "a finite number", shown(value), remedy, "not_a_number")
        if number is not None and abs(number) > _LARGEST_SCORE:
            expected = f"a number between -{_LARGEST_SCORE:,} and {_LARGEST_SCORE:,}"
            self.report(name, expected, shown(value), "Correct it, or leave the cell empty.", "not_a_number")
            return None
        return number

    def image(self, name: str, root: Path) -> str | None:
        value = self._present(name, required=True)
        if isinstance(value, Mapping) and {"bytes", "path"} >= set(value):
            content = value.get("bytes")
            if isinstance(content, bytes):
                return f"data:;base64,{base64.b64encode(content).decode()}"
            if content is not None:
                got = f"{type(content).__name__} {shown(content)}"
                self.report(name, "the bytes of an image file", got, "Save the images as `datasets` does.")
                return None
            value = value.get("path")
            if value is None:
                self.report(name, "an image", "an empty one", "Fill it in, or remove the row.", "missing_value")
                return None
        if value is None:
            return None
        if not isinstance(value, str):
            remedy = "Write the path as text."
            self.report(name, "a path", f"{type(value).__name__} {shown(value)}", remedy)
            return None
        if value.startswith("data:"):
            return value
        if "://" in value:
            self.report(name, "a path on this machine", shown(value), "Download the image, and give its path.")
            return None
        return str((root / value).absolute())

    def _present(self, name: str, required: bool = False) -> Any:
        """The value, with blank texts as ``None``."""
        value = self._row.values.get(name)
        if isinstance(value, str) and not value.strip():
            value = None
        if isinstance(value, str) and (broken := lone_surrogate(value)):
            self.report(name, "whole characters", f"half of one, {broken}", "Write the text again; it was cut off.")
            return None
        if value is None and required:
            got = "nothing" if name not in self._row.values else shown(self._row.values[name])
            self.report(name, "a value", got, "Fill it in, or remove the row.", "missing_value")
        return value


def lone_surrogate(text: str) -> str | None:
    """Half of a character (JSON can hold it, UTF-8 and tokenizers cannot), escaped; ``None`` if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def number_of(value: object) -> float | None:
    """A cell as a finite number: a number, or text with a decimal point; ``None`` for anything else."""
    is_digits = isinstance(value, str) and _NUMBER.fullmatch(value.strip()) is not None
    if isinstance(value, bool) or not (is_digits or isinstance(value, int | float | Decimal)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _row_of(sample: EditSample, relative_to: str | Path | None) -> dict[str, str | float | None]:
    groups = dict(sample.groups)
    row: dict[str, str | float | None] = {
        "sample_id": sample.sample_id,
        "source_image": _written_path(sample.source_image, relative_to),
        "edited_image": _written_path(sample.edited_image, relative_to),
        "instruction": sample.instruction,
        "source_id": sample.source_id,
        "source_description": sample.source_description,
        "target_description": sample.target_description,
        "prompt_type": sample.prompt_type,
        "edit_task": sample.edit_task,
        "editing_model": sample.editing_model,
        "question": sample.question,
        "answer": sample.answer,
        "split": groups.pop("split", None),
    }
    for name, score in sample.mos.items():
        if not math.isfinite(score):
            raise ValueError(f"Sample {sample.sample_id!r}: expected a finite mos_{name}, got {score}. Leave it out.")
        row[f"mos_{name}"] = float(score)
    return row | {f"group_{name}": label for name, label in groups.items()}


def _written_path(path: str, relative_to: str | Path | None) -> str:
    if path.startswith("data:"):
        return path
    absolute = Path(path).absolute()
    if relative_to is None:
        return str(absolute)
    return Path(os.path.relpath(absolute, relative_to)).as_posix()


def _in_order_of_appearance(rows: Iterable[Mapping[str, Any]], prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))
