"""Everything that is wrong with a manifest and its images, in one list."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath

from lmm4edit.data.images import MAX_ASPECT, decode_image
from lmm4edit.data.manifest import REQUIRED_COLUMNS, ParsedRow, RowParser
from lmm4edit.data.problems import Kind, Problem, location, shown
from lmm4edit.data.rows import find_byte_order_marks, read_rows
from lmm4edit.errors import ImageError, ManifestError
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

SMALLEST_SIDE = 28
"""Pixels: one merged patch of Qwen2.5-VL. Smaller images are enlarged for a model, which then judges interpolation."""

MANY_IMAGES = 20
"""From so many images on, a manifest without a single one of them has one problem, and not one for each."""


@dataclass(frozen=True)
class ManifestReport:
    """What a manifest holds, and what is wrong with it.

    Attributes:
        n_rows: rows met, good or bad.
        n_samples: rows that can be read.
        n_sources: different ``source_id`` among them.
        n_images: different images among them.
        n_mos: scores per dimension.
        n_answers: answered questions.
        problems: in the order of the file; those of the whole file come first.
    """

    n_rows: int
    n_samples: int
    n_sources: int
    n_images: int
    n_mos: dict[str, int]
    n_answers: int
    problems: list[Problem]


@dataclass
class _Use:
    """Where an image is used: its first row and column there, as written, and the number of rows."""

    line: int
    column: str
    written: str
    count: int = 1


@dataclass(frozen=True)
class _Look:
    """What was found at a path: the size of an image in pixels, or an error, or nothing at all."""

    size: tuple[int, int] | None = None
    error: ImageError | None = None
    missing: bool = False


def check_manifest(
    path: str | Path,
    image_root: str | Path | None = None,
    decode_images: bool = True,
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
) -> list[Problem]:
    """Everything that is wrong with a manifest; see :func:`inspect_manifest`."""
    return inspect_manifest(path, image_root, decode_images, dimensions).problems


def inspect_manifest(
    path: str | Path,
    image_root: str | Path | None = None,
    decode_images: bool = True,
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    progress: Callable[[int, int], None] | None = None,
    look_at_images: bool = True,
) -> ManifestReport:
    """Read a manifest, look at every image it names, and report. Never raises for what it finds.

    Args:
        path: the manifest.
        image_root: what relative image paths are relative to; default: the manifest's folder.
        decode_images: whether to decode every image, or only to look whether it is there.
        dimensions: whose scores to expect, with their ranges.
        progress: called with (images done, images in all).
        look_at_images: ``False`` leaves images alone: for a manifest whose images are not here.
    """
    parser = RowParser(path, image_root, dimensions)
    problems: list[Problem] = []
    rows: list[ParsedRow] = []
    uses: dict[str, _Use] = {}
    try:
        for row in read_rows(path):
            rows.append(parser.parse(row))
            _note_images(uses, rows[-1], row.values)
        problems += _byte_order_marks(path)
    except ManifestError as error:
        problems += error.problems
    problems += _merge_missing_columns(parser.file, rows)
    problems += parser.unknown_column_problems()
    if not problems and not rows:
        problems.append(parser.no_rows_problem())
    problems += _row_problems(parser, rows)
    if look_at_images:
        found = list(_image_problems(parser, uses, image_root is not None, decode_images, progress))
        problems += _merge_missing_images(parser, uses, found)
    samples = [row.sample for row in rows if row.sample is not None]
    return ManifestReport(
        n_rows=len(rows),
        n_samples=len(samples),
        n_sources=len({sample.source_id for sample in samples}),
        n_images=len(uses),
        n_mos={name: sum(name in sample.mos for sample in samples) for name in parser.dimensions},
        n_answers=sum(sample.answer is not None for sample in samples),
        problems=sorted(problems, key=lambda problem: problem.line or 0),
    )


def _byte_order_marks(path: str | Path) -> list[Problem]:
    remedy = "Save the file as UTF-8 without it; joining such files leaves one in the middle."
    return [
        Problem(str(path), line, None, "text without a byte order mark", "one (EF BB BF)", remedy, "bom")
        for line in find_byte_order_marks(path)
    ]


def _merge_missing_columns(file: str, rows: Sequence[ParsedRow]) -> list[Problem]:
    """The rows' own problems, in which a column that every row lacks is one problem."""
    problems = [problem for row in rows for problem in row.problems]
    n_readable = sum(not any(problem.kind == "bad_line" for problem in row.problems) for row in rows)
    for column in reversed(REQUIRED_COLUMNS):
        others = [p for p in problems if (p.kind, p.field, p.got) != ("missing_value", column, "nothing")]
        if n_readable and len(problems) - len(others) == n_readable:
            remedy = "Add it, or rename the column that holds it."
            merged = Problem(file, None, column, f"a column {column!r}", "no such column", remedy, "missing_column")
            problems = [merged, *others]
    return problems


def _row_problems(parser: RowParser, rows: Iterable[ParsedRow]) -> Iterator[Problem]:
    """What a reader lets pass, but a person should know."""
    first_by_edit: dict[tuple[str | None, ...], int] = {}
    for row in rows:
        for name, score in row.mos.items():
            low, high = parser.dimensions[name].low, parser.dimensions[name].high
            if not low <= score <= high:
                remedy = "Bring the scores to that scale, or state the dimension with the range they have."
                expected = f"a number from {low:g} to {high:g}"
                yield Problem(parser.file, row.number, f"mos_{name}", expected, f"{score:g}", remedy, "out_of_range")
        source, edited = row.images.get("source_image"), row.images.get("edited_image")
        if source is not None and source == edited:
            remedy = "Give the path of the edit; if the editor changed nothing, save its output as a file of its own."
            expected, got = "another image than the source", shown(edited, 200)
            yield Problem(parser.file, row.number, "edited_image", expected, got, remedy, "same_image")
        if row.sample is not None:
            edit = (source, edited, row.sample.instruction, row.sample.question)
            first = first_by_edit.setdefault(edit, row.number)
            if first != row.number:
                got = f"images, instruction and question of {location(parser.file, first)}"
                remedy = "Remove one of the two rows: the edit would count twice."
                yield Problem(parser.file, row.number, None, "an edit of its own", got, remedy, "duplicate_edit")


def _note_images(uses: dict[str, _Use], row: ParsedRow, values: Mapping[str, object]) -> None:
    for column, image in row.images.items():
        written = values.get(column)
        use = uses.setdefault(image, _Use(row.number, column, written if isinstance(written, str) else "", 0))
        if use.count == 0 or use.line != row.number:
            use.count += 1


def _image_problems(
    parser: RowParser,
    uses: Mapping[str, _Use],
    has_root: bool,
    decode: bool,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Problem]:
    """Problems of every image, each told once for all rows that use it."""
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    try:
        looks = pool.map(_look_into if decode else _look_for, uses)
        for done, (look, (image, use)) in enumerate(zip(looks, uses.items(), strict=True), start=1):
            found = _problem_of(look, image, use, parser.image_root if has_root else None)
            if found is not None:
                more = f" (used in {use.count} rows)" if use.count > 1 else ""
                expected, got, remedy, kind = found
                yield Problem(parser.file, use.line, use.column, expected, f"{got}{more}", remedy, kind)
            if progress:
                progress(done, len(uses))
    finally:
        # Without this, Ctrl-C would wait for all images still to come.
        pool.shutdown(cancel_futures=True)


def _merge_missing_images(parser: RowParser, uses: Mapping[str, _Use], found: list[Problem]) -> list[Problem]:
    """The images' problems, in which many images of which not one is there are one problem."""
    if len(uses) < MANY_IMAGES or [problem.kind for problem in found] != ["missing_image"] * len(uses):
        return found
    expected, got = f"the {len(uses)} images it names", f"none of them, the first {found[0].got}"
    remedy = f"{found[0].remedy} To check the rest without images: --no-images."
    return [Problem(parser.file, None, "source_image, edited_image", expected, got, remedy, "missing_image")]


def _look_for(image: str) -> _Look:
    return _Look(missing=not image.startswith("data:") and not os.path.lexists(image))


def _look_into(image: str) -> _Look:
    look = _look_for(image)
    if look.missing:
        return look
    try:
        return _Look(size=decode_image(image).size)
    except ImageError as error:
        return _Look(error=error)


def _problem_of(look: _Look, image: str, use: _Use, image_root: Path | None) -> tuple[str, str, str, Kind] | None:
    """Expected, got, remedy and kind of what is wrong with an image."""
    if look.missing:
        return (
            "an image file",
            f"nothing at {shown(image, 200)}",
            _remedy_for_missing(image, use, image_root),
            "missing_image",
        )
    if look.error is not None:
        return look.error.expected, f"{look.error.got}: {shown(use.written)}", look.error.remedy, "bad_image"
    if look.size is None:
        return None
    width, height = look.size
    short, long = sorted(look.size)
    if long > MAX_ASPECT * short:
        got = f"{width} x {height} px, a ratio of {long / short:.1f}"
        expected = f"a ratio of at most {MAX_ASPECT:g} between the sides"
        return expected, got, "Crop the image, or leave the row out.", "extreme_shape"
    if short < SMALLEST_SIDE:
        remedy = "Give a larger image, or leave the row out: the image would be enlarged before it is judged."
        return f"sides of at least {SMALLEST_SIDE} px", f"{width} x {height} px", remedy, "small_image"
    return None


def _remedy_for_missing(image: str, use: _Use, image_root: Path | None) -> str:
    near = _near_file(image)
    if near is not None:
        return f"Did you mean {near!r}?"
    if "\\" in use.written:
        return "Write the path with / instead of \\."
    if PurePath(use.written).is_absolute() or PureWindowsPath(use.written).is_absolute():
        if image_root is None:
            return "The path is absolute: make it relative and pass --image-root, or write where the image lies here."
        return "The path is absolute, so --image-root does not apply to it: make it relative."
    return "Check the path, or pass the folder that it is relative to as --image-root."


def _near_file(image: str) -> str | None:
    """A file in the same folder whose name differs by case, Unicode form, or little else."""
    folder, name = os.path.split(image)
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        return None
    wanted = unicodedata.normalize("NFC", name).casefold()
    alike = [other for other in names if unicodedata.normalize("NFC", other).casefold() == wanted]
    return next(iter(alike or difflib.get_close_matches(name, names[:1000], n=1, cutoff=0.85)), None)
