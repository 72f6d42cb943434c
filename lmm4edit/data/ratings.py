"""Tables of raw ratings: read, screened and turned into mean opinion scores by :mod:`lmm4edit.data.mos`.

One row is one person's opinion of one item in one dimension. What is dropped on the way is counted: blank cells are
missing ratings; cells that are no number and second ratings of the same item by the same person are listed as bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmm4edit.data.dimensions import DIMENSIONS_FILE, dimensions_of_manifest, merge_dimensions, write_dimensions
from lmm4edit.data.manifest import lone_surrogate, number_of, read_manifest, write_manifest
from lmm4edit.data.mapping import MISSING, cell_text, looks_like_formula
from lmm4edit.data.mos import MosResult, Rating, mean_opinion_scores
from lmm4edit.data.output_folder import output_folder, summary_name, write_json, write_problems
from lmm4edit.data.problems import Kind, Problem, location, shown
from lmm4edit.data.rows import Row, read_rows, write_rows
from lmm4edit.errors import ManifestError
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension
from lmm4edit.validated_yaml import near_name

LARGEST_RATING = 1e9
"""No scale of opinions reaches it, and squares of larger numbers leave the range of floats."""

MAX_NAME = 1_000
"""Characters: a longer text names no subject or item."""


@dataclass(frozen=True)
class RatingColumns:
    """Which column of the table is what; ``dimension`` may be absent from it if ``only_dimension`` names the one."""

    subject: str = "subject"
    item: str = "item"
    value: str = "value"
    dimension: str = "dimension"
    only_dimension: str | None = None


@dataclass(frozen=True)
class RatedItems:
    """What the command made: what ``mos_summary.json`` holds, every bad row, and sentences for a person."""

    summary: dict[str, Any]
    problems: list[Problem]
    notes: list[str]


@dataclass
class _Table:
    ratings: dict[str, list[Rating]]
    problems: list[Problem]
    n_rows: int = 0
    n_blank: int = 0


def rate_items(
    table: str | Path,
    out: str | Path,
    columns: RatingColumns | None = None,
    manifest: str | Path | None = None,
    image_root: str | Path | None = None,
    dimensions: Sequence[Dimension] = (),
    overwrite: bool = False,
) -> RatedItems:
    """Write ``mos.csv``, ``subjects.csv``, ``mos_summary.json``; with a manifest also a scored ``manifest.jsonl``.

    Args:
        table: ratings in rows: .csv, .jsonl, .json, .parquet or a ``datasets`` folder.
        out: folder to write into; see :func:`lmm4edit.data.output_folder.output_folder`.
        columns: names of the table's columns.
        manifest: whose ``sample_id`` the items are; scores it has already in a rated dimension are replaced.
        image_root: what the manifest's image paths are relative to.
        dimensions: definitions of the user's own dimensions. A rated dimension without a definition gets a plain
            question, which is noted.
        overwrite: replace the files of an earlier run.

    Raises:
        ManifestError: if a column is absent, no rating can be used, the manifest is wrong, or ``out`` cannot be
            written.
    """
    read = _read_ratings(table, columns or RatingColumns())
    results = {name: mean_opinion_scores(rows) for name, rows in read.ratings.items()}
    notes = [f"{name}: {warning}" for name, result in results.items() for warning in result.warnings]
    if read.n_blank:
        notes.insert(0, f"{read.n_blank} of {read.n_rows} ratings are blank and count as missing.")
    names = {name for rows in read.ratings.values() for row in rows for name in (row.subject, row.item)}
    if formulas := sum(looks_like_formula(name) for name in names):
        notes.append(
            f"{formulas} names begin like a formula of a spreadsheet (=, +, -, @): they are kept as text; take care "
            "when you open the files in one."
        )
    described = {name: _describe(read.ratings[name], result) for name, result in results.items()}
    summary: dict[str, Any] = {
        "kind": "mean opinion scores (LMM4Edit paper 3.4, Eq. 1; ITU-R BT.500)",
        "scale": "0-100, higher is better: 100 * (mean z + 3) / 6",
        "rows": read.n_rows,
        "blank_ratings": read.n_blank,
        "bad_rows": len(read.problems),
        "dimensions": described,
    }
    with output_folder(out, "mos", overwrite, inputs=(table, manifest)) as staging:
        write_rows(staging / "mos.csv", _mos_rows(results, read.ratings), MOS_COLUMNS)
        write_rows(staging / "subjects.csv", _subject_rows(results), SUBJECT_COLUMNS)
        if manifest is not None:
            summary["manifest"] = _score_manifest(staging, Path(out), manifest, image_root, results, dimensions, notes)
        write_problems(staging, read.problems, "mos")
        paths = [Path(path) for path in (table, manifest) if path is not None]
        summary |= {"caveats": notes}
        summary["provenance"] = collect_provenance(
            inputs={path.name: file_sha256(path) for path in paths if path.is_file()},
            outputs={path.name: file_sha256(path) for path in sorted(staging.iterdir())},
        )
        write_json(staging / summary_name("mos"), summary)
    return RatedItems(summary, read.problems, notes)


MOS_COLUMNS = ("dimension", "item", "mos", "n_ratings", "n_valid", "missing_reason")
"""Of ``mos.csv``: an item without a MOS has a blank cell and the reason."""

SUBJECT_COLUMNS = ("dimension", "subject", "n_ratings", "n_outliers", "mean", "sd", "rejected_reason")
"""Of ``subjects.csv``: mean and SD of the ratings left after screening, on the subject's own scale."""


def _read_ratings(table: str | Path, columns: RatingColumns) -> _Table:
    read = _Table({}, [])
    first_line: dict[tuple[str, str, str], int] = {}
    for row in read_rows(table):
        if row.problem is not None:
            read.n_rows += 1
            read.problems.append(row.problem)
            continue
        if read.n_rows == len(read.problems):
            _check_columns(table, row.values, columns)
        read.n_rows += 1
        _read_rating(read, str(table), row, columns, first_line)
    if not read.ratings:
        first = f" The first problem: {read.problems[0]}" if read.problems else ""
        raise ManifestError(f"{table}: expected at least one rating, got none.{first}")
    return read


def _check_columns(table: str | Path, values: Mapping[str, Any], columns: RatingColumns) -> None:
    wanted = {"subject": columns.subject, "item": columns.item, "value": columns.value}
    if columns.only_dimension is None:
        wanted["dimension"] = columns.dimension
    if lacking := {option: name for option, name in wanted.items() if name not in values}:
        told = "; ".join(
            f"no column {name!r}.{near_name(name, values)} Name it with --{option}-column"
            + (", or the only dimension with --dimension" if option == "dimension" else "")
            for option, name in lacking.items()
        )
        raise ManifestError(f"{table}: expected a column for {', '.join(lacking)}, got {told}.")


def _read_rating(
    read: _Table, file: str, row: Row, columns: RatingColumns, first_line: dict[tuple[str, str, str], int]
) -> None:
    def report(name: str, expected: str, got: str, remedy: str, kind: Kind = "bad_value") -> None:
        read.problems.append(Problem(file, row.number, name, expected, got, remedy, kind))

    names = []
    for column in (columns.subject, columns.item, *(() if columns.only_dimension else (columns.dimension,))):
        value = row.values.get(column)
        text = cell_text(value).strip() if isinstance(value, str | int | float) else ""
        if not text or "\0" in text or len(text) > MAX_NAME or lone_surrogate(text):
            report(column, f"a name of at most {MAX_NAME} characters", shown(value), "Fill it in, or remove the row.")
            return
        names.append(text)
    subject, item = names[0], names[1]
    dimension = columns.only_dimension or names[2]
    if not dimension.isidentifier() or dimension != dimension.lower():
        remedy = "Rename the dimension: its scores stand in the column mos_<name> of manifests."
        report(columns.dimension, "a dimension's name, such as quality", shown(dimension), remedy)
        return
    value = row.values.get(columns.value)
    if value is None or value != value or (isinstance(value, str) and value.strip().lower() in MISSING):
        read.n_blank += 1
        return
    number = number_of(value)
    if number is None or abs(number) > LARGEST_RATING:
        remedy = "Write it with a decimal point, or leave the cell empty."
        report(columns.value, "a number of at most nine digits", shown(value), remedy, "not_a_number")
        return
    first = first_line.setdefault((dimension, subject, item), row.number)
    if first != row.number:
        got = f"a second one by {subject!r} of {item!r}, first in {location(file, first)}"
        remedy = "Keep one, or give repeated sessions their own subject names; the first is used."
        report(columns.value, "one rating for each subject and item", got, remedy, "duplicate_id")
        return
    read.ratings.setdefault(dimension, []).append(Rating(subject, item, number))


def _describe(ratings: Sequence[Rating], result: MosResult) -> dict[str, Any]:
    return {
        "ratings": len(ratings),
        "items": len(result.n_valid),
        "items_with_mos": len(result.mos),
        "missing": result.missing,
        "subjects": len(result.subjects),
        "rejected_subjects": result.rejected_subjects,
        "outlier_share": result.outlier_fraction,
        "removed_share": result.removed_fraction,
        "outside_0_100": sum(not 0 <= score <= 100 for score in result.mos.values()),
        "warnings": list(result.warnings),
    }


def _mos_rows(
    results: Mapping[str, MosResult], ratings: Mapping[str, Sequence[Rating]]
) -> Iterable[dict[str, str | float | None]]:
    for name, result in results.items():
        given: dict[str, int] = {}
        for rating in ratings[name]:
            given[rating.item] = given.get(rating.item, 0) + 1
        for item, valid in result.n_valid.items():
            yield {
                "dimension": name,
                "item": item,
                "mos": result.mos.get(item),
                "n_ratings": str(given[item]),
                "n_valid": str(valid),
                "missing_reason": result.missing.get(item),
            }


def _subject_rows(results: Mapping[str, MosResult]) -> Iterable[dict[str, str | float | None]]:
    for name, result in results.items():
        for subject, told in result.subjects.items():
            yield {
                "dimension": name,
                "subject": subject,
                "n_ratings": str(told.n_ratings),
                "n_outliers": str(told.n_outliers),
                "mean": told.mean,
                "sd": told.sd,
                "rejected_reason": result.rejected_subjects.get(subject),
            }


def _score_manifest(
    staging: Path,
    out: Path,
    manifest: str | Path,
    image_root: str | Path | None,
    results: Mapping[str, MosResult],
    definitions: Sequence[Dimension],
    notes: list[str],
) -> dict[str, Any]:
    """Write the manifest with the scores in it, and what of both did not find its counterpart."""
    known = merge_dimensions(dimensions_of_manifest(manifest), definitions)
    new = [name for name in results if name not in {dimension.name for dimension in known}]
    if new:
        notes.append(
            f"No definition of {', '.join(new)}: the question in {DIMENSIONS_FILE} is a plain one. Edit it there, or "
            "give a file of dimensions with --dimensions."
        )
    dimensions = merge_dimensions(known, (Dimension(name, f"Rate the {name}.") for name in new))
    samples = read_manifest(manifest, image_root, dimensions)
    ids = {sample.sample_id for sample in samples}
    scored = []
    replaced = 0
    for sample in samples:
        scores = {name: r.mos[sample.sample_id] for name, r in results.items() if sample.sample_id in r.mos}
        kept = {name: score for name, score in sample.mos.items() if name not in results}
        replaced += len(sample.mos) - len(kept)
        scored.append(replace(sample, mos={**kept, **scores}))
    write_manifest(staging / "manifest.jsonl", scored, relative_to=out.absolute())
    if dimensions != BUILT_IN_DIMENSIONS:
        write_dimensions(staging / DIMENSIONS_FILE, dimensions)
    not_rated = {name: len(ids - result.mos.keys()) for name, result in results.items() if ids - result.mos.keys()}
    strangers = sorted({item for result in results.values() for item in result.n_valid} - ids)
    notes += [f"{count} of {len(ids)} edits of the manifest have no {name} score." for name, count in not_rated.items()]
    if strangers:
        notes.append(f"{len(strangers)} rated items are not in the manifest, first {strangers[0]!r}; see mos.csv.")
    if replaced:
        notes.append(f"{replaced} scores that the manifest had in the rated dimensions were replaced.")
    return {
        "samples": len(scored),
        "dimensions": [asdict(dimension) for dimension in dimensions],
        "edits_without_score": not_rated,
        "items_not_in_manifest": strangers,
        "scores_replaced": replaced,
    }
