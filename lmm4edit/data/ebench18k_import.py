"""From the EBench-18K release to manifests: four files a split become one row an edit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lmm4edit.data.check import inspect_manifest
from lmm4edit.data.ebench18k import (
    DIMENSION_OF_KIND,
    INSTRUCTION_BASED,
    Kind,
    ReleaseRow,
    file_of_release,
    read_release_row,
)
from lmm4edit.data.ebench18k_summary import (
    IMAGE_FOLDERS,
    describe_photographs,
    describe_samples,
    explain_answers,
    tell_import,
)
from lmm4edit.data.manifest import write_manifest
from lmm4edit.data.output_folder import count_by, output_folder, summary_name, write_json, write_problems
from lmm4edit.data.photographs import PhotographReport, find_recurring_photographs
from lmm4edit.data.problems import Problem, shown
from lmm4edit.data.rows import read_rows
from lmm4edit.data.splits import find_leaks, split_sources, tasks_by_source
from lmm4edit.errors import ManifestError
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import EditSample

TEST_SHARE = 0.2
"""Of the sources, where the release is one whole: 4:1 (paper 5.1)."""


@dataclass(frozen=True)
class ImportedRelease:
    """What an import made.

    Attributes:
        summary: what ``import_summary.json`` holds.
        problems: every bad row, also listed in ``import_problems.jsonl``.
        notes: sentences for a person.
    """

    summary: dict[str, Any]
    problems: list[Problem]
    notes: list[str]


@dataclass
class _Draft:
    """One edit while its files are read."""

    first: ReleaseRow
    file: str
    values: dict[Kind, float | str] = field(default_factory=dict)
    question: str | None = None
    dropped_zeros: int = 0
    foreign_paths: int = 0


def import_ebench18k(
    release: str | Path,
    out: str | Path,
    image_root: str | Path | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    compare_photographs: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImportedRelease:
    """Read a release and write ``train.jsonl``, ``validation.jsonl``, ``test.jsonl`` (those there are) and a summary.

    The release's own split is kept. Files without a split in their name (``v.json``) are one whole, which is split 4:1
    by source within each task.

    Args:
        release: folder with the annotation files, or with a folder ``data`` that has them.
        out: folder to write into; see :func:`lmm4edit.data.output_folder.output_folder`.
        image_root: folder that holds ``sourceimg_h/`` ...; default: the release's folder, if they are there. Without
            images, paths are written relative to ``out``.
        validation_fraction: share of the training sources that becomes ``validation.jsonl``; 0: none.
        seed: of what is split here.
        compare_photographs: look for photographs that recur under several source ids, where images are there.
        overwrite: replace the files of an earlier import.
        progress: called with (source images compared, source images in all).

    Raises:
        ManifestError: if there is no annotation file, no row can be used, or ``out`` cannot be written.
    """
    files = _find_files(Path(release))
    problems: list[Problem] = []
    drafts = {split: _read_split(paths, problems, release) for split, paths in files.items()}
    if not any(drafts.values()):
        first = f" The first problem: {problems[0]}" if problems else ""
        raise ManifestError(f"{release}: expected at least one usable row, got none.{first}")
    root, found_images = _image_root(Path(release), image_root)
    base = Path(out).absolute() if root is None else root
    missing: dict[str, dict[str, dict[str, int]]] = {}
    splits = {}
    for split, rows in drafts.items():
        splits[split] = [_sample(draft, split, base) for draft in rows.values()]
        missing[split] = _count_missing(rows.values(), files[split], problems)
    images = _count_images(splits) if found_images else None
    photographs = _photographs(splits, progress) if images and images["found"] and compare_photographs else None
    splits, made = _make_splits(splits, validation_fraction, seed, photographs.cluster_of() if photographs else {})
    leaks = find_leaks(splits, photographs.groups if photographs else ())
    summary: dict[str, Any] = {
        "kind": "import of EBench-18K",
        "splits": {name: describe_samples(samples) for name, samples in splits.items()},
        "made_here": made,
        "bad_rows": len(problems),
        "missing_values": missing,
        "labels_with_dropped_zeros": sum(d.dropped_zeros for rows in drafts.values() for d in rows.values()),
        "rows_with_foreign_absolute_paths": sum(d.foreign_paths for rows in drafts.values() for d in rows.values()),
        "images": images or {"expected": _n_images(splits), "found": 0, "root": None},
        "recurring_photographs": describe_photographs(photographs, bool(images), compare_photographs),
        "leaks": [asdict(leak) for leak in leaks],
        "answers": explain_answers(splits),
    }
    with output_folder(out, "import", overwrite) as staging:
        for name, samples in splits.items():
            write_manifest(staging / f"{name}.jsonl", samples, relative_to=Path(out).absolute())
        write_problems(staging, problems, "import")
        summary["check"] = {name: _check(staging / f"{name}.jsonl") for name in splits}
        notes = tell_import(summary, files, leaks, Path(out), image_root)
        digests = {path.name: file_sha256(path) for paths in files.values() for path in paths.values()}
        outputs = {path.name: file_sha256(path) for path in sorted(staging.iterdir())}
        summary |= {"caveats": notes, "provenance": collect_provenance(inputs=digests, outputs=outputs, seed=seed)}
        write_json(staging / summary_name("import"), summary)
    return ImportedRelease(summary, problems, notes)


def _find_files(release: Path) -> dict[str, dict[Kind, Path]]:
    """Annotation files by split and kind, splits in the order train, validation, test."""
    if not release.is_dir():
        what = "a file" if release.exists() else "nothing there"
        raise ManifestError(f"{release}: expected the release's folder, got {what}. Check the path.")
    files: dict[str, dict[Kind, Path]] = {}
    for folder in (release, release / "data"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            found = file_of_release(path.name)
            if found is None or not path.is_file():
                continue
            split, kind = found
            taken = files.setdefault(split, {}).setdefault(kind, path)
            if taken != path:
                raise ManifestError(
                    f"{release}: expected one file for {split} {kind}, got {taken.name} and {path.name}. Move one away."
                )
        if files:
            break
    if not files:
        raise ManifestError(
            f"{release}: expected the release's annotation files (train_v.json, train_e.json, train_c.json, "
            "train_yn.json, test_v.json, ...), got none of them. Give the folder that holds them."
        )
    if "all" in files and len(files) > 1:
        names = sorted(path.name for paths in files.values() for path in paths.values())
        raise ManifestError(
            f"{release}: expected either files of splits or files of the whole (without a split in the name), got "
            f"both: {', '.join(names)}. Move one kind away."
        )
    order = ("all", "train", "validation", "test")
    kinds: tuple[Kind, ...] = ("v", "e", "c", "yn")
    return {s: {kind: files[s][kind] for kind in kinds if kind in files[s]} for s in order if s in files}


def _read_split(paths: Mapping[Kind, Path], problems: list[Problem], release: str | Path) -> dict[str, _Draft]:
    drafts: dict[str, _Draft] = {}
    for kind, path in paths.items():
        file = path.relative_to(release).as_posix()
        lines: dict[str, int] = {}
        for row in read_rows(path):
            parsed = read_release_row(row, file, kind)
            problem = parsed if isinstance(parsed, Problem) else _merge(drafts, lines, parsed, kind, file)
            if problem is not None:
                problems.append(replace(problem, file=file))
    return drafts


def _merge(drafts: dict[str, _Draft], lines: dict[str, int], row: ReleaseRow, kind: Kind, file: str) -> Problem | None:
    first = lines.setdefault(row.sample_id, row.line)
    if first != row.line:
        got = f"{row.sample_id} again, first in {file}:{first}"
        remedy = "Remove one of the two; the first is used."
        return Problem(file, row.line, "images", "an edit of its own", got, remedy, "duplicate_id")
    draft = drafts.setdefault(row.sample_id, _Draft(row, file))
    if draft.first.instruction != row.instruction:
        expected = f"the instruction of {draft.file}:{draft.first.line}, {shown(draft.first.instruction)}"
        remedy = "Make the files agree; this value is not used."
        return Problem(file, row.line, "query", expected, shown(row.instruction), remedy, "bad_value")
    draft.values[kind] = row.value
    draft.question = row.question or draft.question
    draft.dropped_zeros += row.dropped_zeros
    draft.foreign_paths += row.foreign_path
    return None


def _sample(draft: _Draft, split: str, base: Path) -> EditSample:
    row = draft.first
    scores = {DIMENSION_OF_KIND[kind]: value for kind, value in draft.values.items() if isinstance(value, float)}
    answer = draft.values.get("yn")
    return EditSample(
        sample_id=row.sample_id,
        source_id=row.source_id,
        source_image=str(base / row.source_path),
        edited_image=str(base / row.edited_path),
        instruction=row.instruction,
        prompt_type="instruction" if row.editing_model in INSTRUCTION_BASED else "description",
        edit_task=row.edit_task,
        editing_model=row.editing_model,
        mos={name: scores[name] for name in DIMENSION_OF_KIND.values() if name in scores},
        question=draft.question if answer is not None else None,
        answer=str(answer) if answer is not None else None,
        groups={"split": split, "level": "high" if row.source_id.startswith("H") else "low"},
    )


def _count_missing(
    drafts: Iterable[_Draft], paths: Mapping[Kind, Path], problems: Sequence[Problem]
) -> dict[str, dict[str, int]]:
    """Value -> why it is missing -> number of edits."""
    counts: dict[str, dict[str, int]] = {}
    bad_files = {Path(problem.file).name for problem in problems}
    for draft in drafts:
        for kind, name in (*DIMENSION_OF_KIND.items(), ("yn", "answer")):
            if kind in draft.values:
                continue
            path = paths.get(kind)  # type: ignore[call-overload]
            if path is None:
                reason = "the release's folder has no file for it"
            elif path.name in bad_files:
                reason = f"no usable row in {path.name} (its bad rows are listed)"
            else:
                reason = f"no row in {path.name}"
            inner = counts.setdefault(name, {})
            inner[reason] = inner.get(reason, 0) + 1
    return counts


def _make_splits(
    splits: dict[str, list[EditSample]], validation_fraction: float, seed: int, clusters: Mapping[str, str]
) -> tuple[dict[str, list[EditSample]], list[str]]:
    """The splits to write, and sentences on those that were made here."""
    made = []
    if "all" in splits:
        fractions = {"test": TEST_SHARE}
        splits = _apply(splits["all"], fractions, seed, clusters)
        made.append(f"train and test: {1 - TEST_SHARE:g} : {TEST_SHARE:g} by source within each task, seed {seed}")
    if validation_fraction:
        if "validation" in splits:
            raise ManifestError("The release has a validation split already: leave out --validation-fraction.")
        if "train" not in splits:
            raise ManifestError(
                "--validation-fraction: expected training files to take the share from, got none. Leave it out, or "
                "add train_v.json and the others."
            )
        divided = _apply(splits["train"], {"validation": validation_fraction}, seed, clusters)
        splits = {name: divided.get(name, splits.get(name, [])) for name in ("train", "validation", "test")}
        splits = {name: samples for name, samples in splits.items() if samples}
        made.append(f"validation: {validation_fraction:g} of the training sources within each task, seed {seed}")
    return splits, made


def _apply(
    samples: Sequence[EditSample], fractions: Mapping[str, float], seed: int, clusters: Mapping[str, str]
) -> dict[str, list[EditSample]]:
    place = split_sources(tasks_by_source(samples), fractions, seed=seed, clusters=clusters)
    names = ("train", *fractions)
    return {
        name: [replace(s, groups={**s.groups, "split": name}) for s in samples if place[s.source_id] == name]
        for name in names
    }


def _image_root(release: Path, given: str | Path | None) -> tuple[Path | None, bool]:
    """Where images lie, and whether there are any."""
    if given is not None:
        root = Path(given).absolute()
        if not any((root / name).is_dir() for name in IMAGE_FOLDERS):
            raise ManifestError(
                f"{given}: expected the folder that holds {', '.join(f'{name}/' for name in IMAGE_FOLDERS)}, got one "
                "without any of them. Give that folder as --image-root, or leave it out to import without images."
            )
        return root, True
    for root in (release.absolute(), release.absolute() / "data"):
        if any((root / name).is_dir() for name in IMAGE_FOLDERS):
            return root, True
    return None, False


def _images(splits: Mapping[str, Sequence[EditSample]]) -> Iterator[str]:
    seen = {path: None for rows in splits.values() for s in rows for path in (s.source_image, s.edited_image)}
    return iter(seen)


def _n_images(splits: Mapping[str, Sequence[EditSample]]) -> int:
    return sum(1 for _ in _images(splits))


def _count_images(splits: Mapping[str, Sequence[EditSample]]) -> dict[str, Any]:
    absent = [path for path in _images(splits) if not os.path.isfile(path)]
    expected = _n_images(splits)
    folders = count_by(str(Path(path).parent.parent.name) for path in absent)
    return {"expected": expected, "found": expected - len(absent), "missing_by_folder": folders}


def _photographs(
    splits: Mapping[str, Sequence[EditSample]], progress: Callable[[int, int], None] | None
) -> PhotographReport:
    images: dict[str, str] = {}
    for samples in splits.values():
        for sample in samples:
            if sample.source_id not in images and os.path.isfile(sample.source_image):
                images[sample.source_id] = sample.source_image
    return find_recurring_photographs(images, progress)


def _check(path: Path) -> dict[str, Any]:
    """What ``lmm4edit data check --no-images`` finds in a manifest that was written."""
    report = inspect_manifest(path, look_at_images=False)
    return {"problems": count_by(problem.kind for problem in report.problems), "rows": report.n_rows}
