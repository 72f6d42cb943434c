"""From any table and a mapping to a manifest: every cell that does not fit is named, the rest goes on."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from lmm4edit.data.check import inspect_manifest
from lmm4edit.data.dimensions import DIMENSIONS_FILE, write_dimensions
from lmm4edit.data.manifest import lone_surrogate, number_of, write_manifest
from lmm4edit.data.mapping import IMAGE_FIELDS, TableMapping, cell_text, fill, load_mapping, looks_like_formula
from lmm4edit.data.output_folder import (
    count_by,
    nested_counts,
    output_folder,
    summary_name,
    write_json,
    write_problems,
)
from lmm4edit.data.problems import Kind, Problem, location, shown
from lmm4edit.data.rows import Row, read_rows
from lmm4edit.errors import ConfigError, ManifestError
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import BUILT_IN_DIMENSIONS, EditSample
from lmm4edit.validated_yaml import near_name

MAX_CELL = 10_000
"""Characters: a longer text is no label, path or instruction."""

_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}


@dataclass(frozen=True)
class ImportedTable:
    """What an import made: what ``import_summary.json`` holds, every bad cell or row, and sentences for a person."""

    summary: dict[str, Any]
    problems: list[Problem]
    notes: list[str]


def import_table(
    table: str | Path,
    mapping_file: str | Path,
    out: str | Path,
    image_root: str | Path | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportedTable:
    """Write ``manifest.jsonl`` and what belongs to it; see :mod:`lmm4edit.data.mapping`.

    A row without a usable id, image path or instruction is left out; a bad score or answer makes that value missing.
    Both are listed.

    Args:
        table: ``.csv``, ``.jsonl``, ``.json``, ``.parquet`` or a ``datasets`` folder; embedded images are written to
            ``out/images``, each once.
        mapping_file: the YAML file.
        out: folder to write into; see :func:`lmm4edit.data.output_folder.output_folder`.
        image_root: what image paths are relative to; default: the table's folder.
        overwrite: replace the files of an earlier import.
        progress: called with (rows read, rows read).

    Raises:
        ConfigError: if the mapping is wrong, or names a column that the table lacks.
        ManifestError: if the table cannot be read, no row can be used, or ``out`` cannot be written.
    """
    mapping = load_mapping(mapping_file)
    folder = Path(table) if Path(table).is_dir() else Path(table).parent
    root = Path(image_root) if image_root is not None else folder
    with output_folder(out, "import", overwrite, inputs=(table, mapping_file)) as staging:
        reader = _TableReader(table, mapping_file, mapping, root.absolute(), staging, Path(out).absolute())
        for count, row in enumerate(read_rows(table), start=1):
            if row.problem is None:
                reader.note_columns(row)
            reader.read(row)
            if progress and count % 100 == 0:
                progress(count, count)
        reader.check_columns()
        if not reader.samples:
            why = f"The first problem: {reader.problems[0]}" if reader.problems else "Check that it is the right file."
            raise ManifestError(f"{table}: expected at least one usable row, got none. {why}")
        manifest = staging / "manifest.jsonl"
        write_manifest(manifest, reader.samples, relative_to=Path(out).absolute())
        dimensions = mapping.all_dimensions()
        if dimensions != BUILT_IN_DIMENSIONS:
            write_dimensions(staging / DIMENSIONS_FILE, dimensions)
        write_problems(staging, reader.problems, "import")
        summary = reader.summary()
        report = inspect_manifest(manifest, dimensions=dimensions, look_at_images=False)
        summary["check"] = count_by(problem.kind for problem in report.problems)
        notes = reader.notes(summary["check"])
        inputs = {path.name: file_sha256(path) for path in map(Path, (table, mapping_file)) if path.is_file()}
        outputs = {path.name: file_sha256(path) for path in sorted(staging.iterdir()) if path.is_file()}
        summary |= {"caveats": notes, "mapping": mapping.model_dump(mode="json", exclude_defaults=True)}
        summary["provenance"] = collect_provenance(inputs=inputs, outputs=outputs)
        write_json(staging / summary_name("import"), summary)
    return ImportedTable(summary, reader.problems, notes)


class _BadCellError(Exception):
    def __init__(self, expected: str, got: str, remedy: str, kind: Kind = "bad_value") -> None:
        super().__init__(expected)
        self.expected, self.got, self.remedy, self.kind = expected, got, remedy, kind


class _TableReader:
    """Turns the rows of one table into samples, and counts what is missing and what is wrong."""

    def __init__(
        self,
        file: str | Path,
        mapping_file: str | Path,
        mapping: TableMapping,
        root: Path,
        staging: Path,
        out: Path,
    ) -> None:
        self.file, self.mapping_file, self.mapping = str(file), str(mapping_file), mapping
        self.root, self.staging, self.out = root, staging, out
        self.dimensions = {dimension.name: dimension for dimension in mapping.all_dimensions()}
        self.samples: list[EditSample] = []
        self.problems: list[Problem] = []
        self._missing: dict[str, dict[str, int]] = {}
        self._columns: dict[str, None] = {}
        self._lines: dict[str, int] = {}
        self._n_rows = self._n_left_out = self._n_formulas = self._n_embedded = 0

    def note_columns(self, row: Row) -> None:
        """Remember the table's columns. All rows have the same, except in JSON, where a key may be left out."""
        first = not self._columns
        self._columns |= dict.fromkeys(row.values)
        if first and not self.file.lower().endswith((".jsonl", ".json")):
            self.check_columns()

    def check_columns(self) -> None:
        """Hold the columns met against those that the mapping names.

        Raises:
            ConfigError: naming each key of the mapping whose column is nowhere.
        """
        lines = [
            f"  {key}: expected a column of {self.file}, got {column!r}.{near_name(column, self._columns)}"
            for column, key in self.mapping.used_columns().items()
            if column not in self._columns
        ]
        if lines and self._columns:
            raise ConfigError(f"{self.mapping_file}: the mapping does not fit the table:\n" + "\n".join(lines))

    def read(self, row: Row) -> None:
        """Read one row; what is wrong with it is listed."""
        self._n_rows += 1
        if row.problem is not None:
            self.problems.append(row.problem)
            self._n_left_out += 1
            return
        before = len(self.problems)
        fields = {name: self._field(name, row) for name in self._field_names()}
        if "sample_id" not in fields:
            fields["sample_id"] = f"{Path(self.file).stem}-{row.number}"
        images = {name: fields[name] for name in IMAGE_FIELDS}
        required = ("sample_id", *IMAGE_FIELDS, "instruction")
        for name in required:
            if fields[name] is None and not any(problem.field == name for problem in self.problems[before:]):
                self._report(row, name, "a value", "a missing one", "Fill it in, or remove the row.", "missing_value")
        prompt_type = self._prompt_type(row, fields.get("prompt_type"))
        sample_id = fields["sample_id"]
        if sample_id is not None and self._lines.setdefault(sample_id, row.number) != row.number:
            got = f"{sample_id!r} again, first in {location(self.file, self._lines[sample_id])}"
            remedy = "Map another column, or a template of several, to sample_id."
            self._report(row, "sample_id", "an id of its own", got, remedy, "duplicate_id")
        left_out = len(self.problems) > before
        if left_out:
            self._n_left_out += 1
            return
        question, answer = fields.get("question"), None
        if self.mapping.answer is not None:
            answer = self._answer(row, question)
        scores = {name: self._score(row, name) for name in self.mapping.scores}
        groups = {name.removeprefix("group_"): text for name, text in fields.items() if name.startswith("group_")}
        groups["split"] = fields.get("split")
        written = self._written_source(row)
        self._n_formulas += any(text is not None and looks_like_formula(text) for text in fields.values())
        self.samples.append(
            EditSample(
                sample_id=str(sample_id),
                source_id=fields.get("source_id") or written or Path(str(images["source_image"])).name,
                source_image=str(images["source_image"]),
                edited_image=str(images["edited_image"]),
                instruction=str(fields["instruction"]),
                source_description=fields.get("source_description"),
                target_description=fields.get("target_description"),
                prompt_type=prompt_type,  # type: ignore[arg-type]
                edit_task=fields.get("edit_task"),
                editing_model=fields.get("editing_model"),
                mos={name: score for name, score in scores.items() if score is not None},
                question=question,
                answer=answer,
                groups={name: text for name, text in groups.items() if text is not None},
            )
        )

    def summary(self) -> dict[str, Any]:
        """Counts, formulas and what was left."""
        used = self.mapping.used_columns()
        return {
            "kind": "import of a table",
            "rows": self._n_rows,
            "samples": len(self.samples),
            "rows_left_out": self._n_left_out,
            "problems": len(self.problems),
            "sources": len({sample.source_id for sample in self.samples}),
            "scores": {name: sum(name in s.mos for s in self.samples) for name in self.mapping.scores},
            "answers": sum(sample.answer is not None for sample in self.samples),
            "missing_values": nested_counts(self._missing),
            "formulas": [source.formula(self.dimensions[name]) for name, source in self.mapping.scores.items()],
            "columns_not_used": [name for name in self._columns if name not in used],
            "images_embedded": self._n_embedded,
        }

    def notes(self, checked: Mapping[str, int]) -> list[str]:
        """What a person should know."""
        notes = []
        unused = [name for name in self._columns if name not in self.mapping.used_columns()]
        if unused:
            notes.append(f"Columns of the table that the mapping does not use: {', '.join(map(repr, unused))}.")
        if "sample_id" not in self._field_names():
            notes.append("The mapping has no sample_id: ids are the table's name and the number of the line.")
        if "source_id" not in self._field_names():
            notes.append("The mapping has no source_id: edits with the same source_image count as one source.")
        paths = {path for s in self.samples for path in (s.source_image, s.edited_image)}
        absent = sum(not os.path.isfile(path) and not self._is_embedded(path) for path in paths)
        if absent:
            notes.append(
                f"Images are missing: {absent} of {len(paths)} are not below the image root. Put them there, or import "
                "again with --image-root FOLDER --overwrite; `lmm4edit data check --no-images` checks the rest."
            )
        if self._n_formulas:
            notes.append(
                f"{self._n_formulas} rows hold a text that begins like a formula of a spreadsheet (=, +, -, @): it is "
                "kept as text; take care when you open the data in one."
            )
        if checked:
            kinds = ", ".join(f"{kind} {count}" for kind, count in checked.items())
            notes.append(f"`lmm4edit data check` has remarks on the manifest: {kinds}.")
        return notes

    def _field_names(self) -> list[str]:
        return [*self.mapping.columns, *self.mapping.constants, *self.mapping.templates]

    def _field(self, name: str, row: Row) -> str | None:
        """A field's text, checked; ``None`` if it is missing (counted) or wrong (listed)."""
        try:
            return self._checked_field(name, row)
        except _BadCellError as error:
            self._report(row, name, error.expected, error.got, error.remedy, error.kind)
        return None

    def _checked_field(self, name: str, row: Row) -> str | None:
        if name in self.mapping.constants:
            text = str(self.mapping.constants[name])
        elif name in self.mapping.templates:
            filled = fill(self.mapping.templates[name], row.values, self.mapping)
            if filled.text is None:
                self._count_missing(name, f"the column {filled.missing!r} is blank or missing")
                return None
            text = filled.text
        else:
            column = self.mapping.columns[name]
            value = row.values.get(column)
            if name in IMAGE_FIELDS and isinstance(value, Mapping) and value.get("bytes") is not None:
                return self._embedded(value["bytes"])
            if isinstance(value, Mapping) and {"bytes", "path"} >= set(value):
                value = value.get("path")
            if self.mapping.is_missing(value):
                self._count_missing(name, f"the column {column!r} is blank or missing")
                return None
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                raise _BadCellError("text", f"{type(value).__name__} {shown(value)}", "Write it as text.")
            text = cell_text(value)
        text = _checked_text(text)
        return str(self.root / self._image_path(text)) if name in IMAGE_FIELDS else text

    def _image_path(self, text: str) -> str:
        path = text.removeprefix(self.mapping.strip_prefix) if self.mapping.strip_prefix else text
        remedy = "Give a path below the image root; strip_prefix in the mapping takes off a foreign beginning."
        if "://" in path or path.startswith("data:"):
            raise _BadCellError("a path on this machine", shown(text), "Download the image, and give its path.")
        if path.startswith(("/", "\\", "~")) or PureWindowsPath(path).drive:
            raise _BadCellError("a relative path", f"the absolute path {shown(text, 120)}", remedy)
        if ".." in path.replace("\\", "/").split("/"):
            raise _BadCellError("a path below the image root", f"one with '..': {shown(text, 120)}", remedy)
        return path

    def _embedded(self, data: bytes) -> str:
        """Write an embedded image beside the manifest, once for each content, and give its future path."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                suffix = _SUFFIXES.get(str(image.format), str(image.format).lower())
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            expected, remedy = "the bytes of an image file", "Write the data set again."
            raise _BadCellError(expected, f"{len(data)} bytes of something else", remedy, "bad_image") from None
        name = f"images/{hashlib.sha256(data).hexdigest()[:24]}.{suffix}"
        target = self.staging / name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
            self._n_embedded += 1
        return str(self.out / name)

    def _is_embedded(self, path: str) -> bool:
        return Path(path).parent == self.out / "images" and (self.staging / "images" / Path(path).name).exists()

    def _written_source(self, row: Row) -> str | None:
        """The source image's path as the manifest's reader would take it for the source's identity."""
        column = self.mapping.columns.get("source_image")
        value = row.values.get(column) if column else None
        if isinstance(value, str):
            return self._image_path(value)
        if "source_image" in self.mapping.templates:
            return fill(self.mapping.templates["source_image"], row.values, self.mapping).text
        return None

    def _score(self, row: Row, name: str) -> float | None:
        source, dimension = self.mapping.scores[name], self.dimensions[name]
        value = row.values.get(source.column)
        if self.mapping.is_missing(value):
            self._count_missing(name, f"the column {source.column!r} is blank or missing")
            return None
        number = number_of(value)
        if number is None:
            remedy = "Write it with a decimal point, or add the cell's text to missing in the mapping."
            self._report(row, source.column, "a finite number", shown(value), remedy, "not_a_number")
        elif source.outside == "refuse" and not source.low <= number <= source.high:
            expected = f"a number from {source.low:g} to {source.high:g}"
            remedy = f"Correct scores.{name}.low and high in the mapping, or set its outside: keep."
            self._report(row, source.column, expected, f"{number:g}", remedy, "out_of_range")
        else:
            # Without the last digits of the conversion: 3.7 on 1-5 is 67.5 and not 67.50000000000001.
            return float(f"{source.convert(number, dimension):.12g}")
        self._count_missing(name, f"the cell of {source.column!r} is bad (listed)")
        return None

    def _answer(self, row: Row, question: str | None) -> str | None:
        source = self.mapping.answer
        assert source is not None
        value = row.values.get(source.column)
        if self.mapping.is_missing(value):
            self._count_missing("answer", f"the column {source.column!r} is blank or missing")
            return None
        answer = source.read(value)
        if answer is None:
            remedy = "Add it to yes_values or no_values in the mapping, or to missing."
            self._report(row, source.column, "a value that means yes or no", shown(value), remedy)
            self._count_missing("answer", f"the cell of {source.column!r} is bad (listed)")
        elif question is None:
            self._count_missing("answer", "there is an answer, but no question")
            answer = None
        return answer

    def _prompt_type(self, row: Row, text: str | None) -> str | None:
        word = text.strip().lower() if text else None
        if word not in (None, "instruction", "description"):
            expected, remedy = "'instruction' or 'description'", "Map another column, or leave prompt_type out."
            self._report(row, "prompt_type", expected, shown(text), remedy)
            return None
        return word

    def _count_missing(self, name: str, reason: str) -> None:
        inner = self._missing.setdefault(name, {})
        inner[reason] = inner.get(reason, 0) + 1

    def _report(self, row: Row, name: str, expected: str, got: str, remedy: str, kind: Kind = "bad_value") -> None:
        self.problems.append(Problem(self.file, row.number, name, expected, got, remedy, kind))


def _checked_text(text: str) -> str:
    if "\0" in text:
        raise _BadCellError("a text without NUL bytes", shown(text), "Remove them, or remove the row.")
    if broken := lone_surrogate(text):
        raise _BadCellError("whole characters", f"half of one, {broken}", "Write the text again; it was cut off.")
    if len(text) > MAX_CELL:
        got = f"{len(text)} characters, beginning {shown(text[:40])}"
        raise _BadCellError(f"a text of at most {MAX_CELL} characters", got, "Check that the cell is the right one.")
    return text
