"""Rows of table files, streamed: JSON Lines, CSV, Parquet, and folders written by ``datasets``' ``save_to_disk``.

Knows nothing of what the columns mean. A line that cannot be read is a row with a problem instead of values, so that
one bad line hides none of the others.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lmm4edit.data.problems import Problem, manifest_error, shown
from lmm4edit.errors import ManifestError
from lmm4edit.json_lines import decode_line, encode_line

READABLE = ".jsonl, .json (one object per line, or one list of objects), .csv, .parquet, or a `datasets` folder"
WRITABLE = (".jsonl", ".csv", ".parquet")

_BOM = b"\xef\xbb\xbf"

_LONGEST_CELL = 2**30


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        number: see :attr:`lmm4edit.data.problems.Problem.line`.
        values: column -> value; empty cells of CSV files are empty texts. Empty if ``problem`` is given.
        problem: why the row cannot be read.
    """

    number: int
    values: Mapping[str, Any]
    problem: Problem | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of a file, one after the other, in constant memory (a ``.json`` list is read whole).

    Raises:
        ManifestError: if there is no such file, its kind is unknown, or it cannot be read as what it claims to be.
    """
    path = Path(path)
    if path.is_dir():
        return _read_datasets(path)
    suffix = path.suffix.lower()
    reader = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}.get(suffix)
    if not path.is_file():
        got = "a pipe or device" if path.exists() else "nothing there"
        raise _unreadable(path, "a file or folder", got, "Check the path.")
    if reader is None:
        raise _unreadable(path, READABLE, f"the suffix {suffix!r}", "Convert the file, or give it the right suffix.")
    return reader(path)


def write_rows(
    path: str | Path,
    rows: Iterable[Mapping[str, str | float | None]],
    columns: Sequence[str],
    *,
    nulls: bool = False,
) -> None:
    """Write rows with text and float64 values to a ``.jsonl``, ``.csv`` or ``.parquet`` file: whole or not at all.

    The same rows give the same bytes.

    Args:
        rows: missing and ``None`` values become an absent key (JSONL), an empty cell (CSV), or null (Parquet).
        columns: names, in order. A column of floats holds floats and ``None`` only.
        nulls: write missing values as null in JSONL too, so that every row has every key.

    Raises:
        ManifestError: if the suffix is another, or a text cannot be written in UTF-8 (CSV and Parquet).
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in WRITABLE:
        raise _unreadable(path, f"one of {', '.join(WRITABLE)} to write", f"the suffix {suffix!r}", "Rename it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[..., None]] = {
        ".jsonl": partial(_write_json_lines, nulls=nulls),
        ".csv": _write_csv,
        ".parquet": _write_parquet,
    }
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        # What stands under the name already stays whole until its successor is, and may be where the rows come from.
        writers[suffix](unfinished, rows, columns)
        unfinished.replace(path)
    except UnicodeEncodeError as error:
        got = f"the character {error.object[error.start]!r}"
        raise _unreadable(path, "text that UTF-8 can hold", got, "Write .jsonl instead, which escapes it.") from None
    finally:
        unfinished.unlink(missing_ok=True)


def find_byte_order_marks(path: str | Path) -> list[int]:
    """Lines of a text file that begin with a UTF-8 byte order mark; reading drops these marks."""
    if Path(path).suffix.lower() not in (".jsonl", ".json", ".csv"):
        return []
    with Path(path).open("rb") as file:
        return [number for number, raw in enumerate(file, start=1) if raw.startswith(_BOM)]


def _read_json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, text, problem in _text_lines(path, file):
            if problem:
                yield Row(number, {}, problem)
            elif text.strip():
                yield _json_row(path, number, text)


def _json_row(path: Path, number: int, text: str) -> Row:
    text = text.rstrip()
    try:
        values = decode_line(text)
    except json.JSONDecodeError as error:
        got = f"{shown(text.strip())}: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        got = f"{shown(text.strip())}: {error}"
    else:
        if isinstance(values, dict):
            return Row(number, values)
        got = shown(values)
    return Row(number, {}, _bad_line(path, number, "one JSON object on the line", got, "Repair the line."))


def _read_json(path: Path) -> Iterator[Row]:
    """JSON Lines, as the EBench-18K release is; or one list of objects."""
    with _open(path) as file:
        head = file.read(4096).removeprefix(_BOM).lstrip()
    if not head.startswith(b"["):
        yield from _read_json_lines(path)
        return
    try:
        items = decode_line(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise _unreadable(path, "a JSON list of objects", f"one that cannot be read: {error}", "Repair it.") from None
    for number, values in enumerate(items, start=1):
        if isinstance(values, dict):
            yield Row(number, values)
        else:
            expected = "one JSON object for each item of the list"
            yield Row(number, {}, _bad_line(path, number, expected, shown(values), "Repair the item."))


def _read_csv(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        lines = _CsvLines(path, file)
        # An image embedded in a cell is longer than the module's own limit; the file's size bounds it anyway.
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
        reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        while True:
            first = lines.number + 1
            lines.problem = None
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                expected, got = "comma-separated values with closed quotes", f"a row that breaks off: {error}"
                remedy = "Quote texts that hold commas, quotes or line ends, and close every quote."
                yield Row(first, {}, _bad_line(path, first, expected, got, remedy))
                continue
            if lines.problem:
                yield Row(first, {}, lines.problem)
            elif header is None and cells:
                header = _checked_header(path, first, cells)
            elif header is not None and len(cells) > len(header) and not any(cells[len(header) :]):
                yield Row(first, dict(zip(header, cells, strict=False)))
            elif header is not None and len(cells) == len(header):
                yield Row(first, dict(zip(header, cells, strict=True)))
            elif header is not None and cells:
                remedy = "Quote texts that hold commas, and give every row the same columns."
                expected = f"{len(header)} cells as in the header"
                yield Row(first, {}, _bad_line(path, first, expected, str(len(cells)), remedy))


def _checked_header(path: Path, line: int, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    while header and not header[-1]:  # spreadsheets save empty columns at the end
        header.pop()
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise _unreadable(path, "each column once in the header", f"{twice!r} twice", "Remove or rename one.", line)
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise _unreadable(path, "columns separated by commas", name, "Save the file with commas.", line)
    return header


class _CsvLines:
    """Lines for the CSV reader, which remember where they stand and what was wrong with the latest."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._lines = _text_lines(path, file)
        self.number = 0
        self.problem: Problem | None = None

    def __iter__(self) -> Iterator[str]:
        for number, text, problem in self._lines:
            self.number = number
            self.problem = self.problem or problem
            yield text


def _text_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str, Problem | None]]:
    """Number, text and problem of each line; lines end at ``\\n`` alone."""
    for number, raw in enumerate(file, start=1):
        if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise _unreadable(path, "UTF-8 text", "UTF-16 text", "Save the file as UTF-8.")
        content = raw.removeprefix(_BOM)
        try:
            yield number, content.decode(), None
        except UnicodeDecodeError as error:
            got = f"the byte 0x{content[error.start]:02x} at position {error.start + 1}"
            problem = _bad_line(path, number, "UTF-8 text", got, "Save the file as UTF-8.")
            yield number, content.decode(errors="replace"), problem


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise _unreadable(path, "each column once", f"{twice!r} twice", "Remove or rename one.")
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(
            path, "a Parquet file", f"one that cannot be read: {error}", "Write it again, or copy it again."
        ) from None


def _read_datasets(path: Path) -> Iterator[Row]:
    if (path / "dataset_dict.json").is_file():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            splits = [str(name) for name in splits]
        except (ValueError, TypeError, KeyError, OSError) as error:
            got = f"one whose dataset_dict.json cannot be read: {error}"
            raise _unreadable(path, "a `datasets` folder", got, "Save the data set again.") from None
        remedy = f"Give the folder of one: {', '.join(str(path / name) for name in splits)}."
        raise _unreadable(path, "the folder of one split", f"a folder of {len(splits)} splits", remedy)
    if not (path / "dataset_info.json").is_file():
        raise _unreadable(
            path, "a folder written by datasets' save_to_disk", "one without dataset_info.json", "Check the path."
        )
    return _rows_of_dataset(path)


def _rows_of_dataset(path: Path) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises errors of many kinds for damaged folders
        got = f"one that cannot be read: {error}"
        raise _unreadable(path, "a `datasets` folder", got, "Save the data set again.") from None
    table = table.with_format(None)
    for name, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
    for number, values in enumerate(table, start=1):
        yield Row(number, values)


def _write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, nulls: bool) -> None:
    with path.open("wb") as file:
        for row in rows:
            file.write(encode_line({name: row.get(name) for name in columns if nulls or row.get(name) is not None}))


def _write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        plain = csv.writer(file, lineterminator="\n")
        # The module leaves a lone carriage return unquoted, where readers take it for the end of the row.
        quoting = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
        plain.writerow(columns)
        for row in rows:
            cells = ["" if row.get(name) is None else row[name] for name in columns]
            writer = quoting if any(isinstance(cell, str) and "\r" in cell for cell in cells) else plain
            writer.writerow(cells)


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    listed = list(rows)
    arrays = []
    for name in columns:
        values = [row.get(name) for row in listed]
        numbers = any(isinstance(value, float) for value in values)
        arrays.append(pa.array(values, pa.float64() if numbers else pa.string()))
    pq.write_table(pa.table(arrays, names=list(columns)), path)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        got = f"one that cannot be opened: {error.strerror}"
        raise _unreadable(path, "a readable file", got, "Check its permissions.") from None


def _bad_line(path: Path, number: int, expected: str, got: str, remedy: str) -> Problem:
    return Problem(str(path), number, None, expected, got, remedy, "bad_line")


def _unreadable(path: Path, expected: str, got: str, remedy: str, line: int | None = None) -> ManifestError:
    return manifest_error([Problem(str(path), line, None, expected, got, remedy, "unreadable_file")])
