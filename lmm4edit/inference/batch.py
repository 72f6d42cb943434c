"""Scoring a whole manifest into one table: resumable, every row accounted for.

While it runs, every output is appended to ``OUTPUT.part.jsonl``, batch by batch and on disk; when all rows are done the
table is written whole. Interrupted at any moment, the same command continues where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.problems import Problem
from lmm4edit.data.rows import write_rows
from lmm4edit.errors import ConfigError, StoreError
from lmm4edit.evaluation.ranking import overall_score
from lmm4edit.folders import make_folder
from lmm4edit.inference.order import by_source
from lmm4edit.predictions.images_seen import ImagesSeen
from lmm4edit.predictions.store import PredictionKey, PredictionStore, key_of, read_predictions
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import ANSWER, EditSample, Prediction

if TYPE_CHECKING:
    from lmm4edit.inference.judge import Judge
    from lmm4edit.inference.result import EditScore, ReadOut

PROBABILITY = "answer_probability"
"""Target under which the probability of yes is stored."""

WINDOW = 4096
"""Rows of a manifest among which edits of one source are brought together."""

FORMATS = (".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class FailedRow:
    """A row without (all of) its outputs: where it stands, which sample, and why."""

    where: str
    sample_id: str | None
    reason: str

    def __str__(self) -> str:
        sample = f" {self.sample_id}" if self.sample_id else ""
        return f"{self.where}:{sample} {self.reason}"


@dataclass(frozen=True)
class BatchReport:
    """What a run over a manifest did.

    Attributes:
        output: the table.
        n_rows: usable rows of the manifest.
        n_scored: rows with all their outputs.
        n_new: rows scored by this run; the rest was there already.
        failed: every row that lacks something, broken manifest rows included.
    """

    output: Path
    n_rows: int
    n_scored: int
    n_new: int
    failed: list[FailedRow]


def part_path(output: Path) -> Path:
    """The file that grows while a table is being made."""
    return output.with_name(output.name + ".part.jsonl")


def check_output(output: Path, manifest: Path) -> None:
    """Refuse a table that cannot or must not be written, before anything large is loaded.

    Raises:
        ConfigError: for an ending other than :data:`FORMATS`, or if a folder or the manifest stands under the name.
    """
    if output.suffix.lower() not in FORMATS:
        got = repr(output.suffix) if output.suffix else "no ending"
        raise ConfigError(f"{output}: expected an output ending in {', '.join(FORMATS)}, got {got}.")
    if output.is_dir():
        raise ConfigError(f"{output}: expected the name of a table to write, got a folder. Choose another name.")
    if output.exists() and manifest.exists() and output.samefile(manifest):
        raise ConfigError(
            f"{output}: expected another file than the manifest, which it would replace. Choose another name."
        )


def score_manifest(
    judge: Judge,
    manifest: str | Path,
    output: str | Path,
    *,
    image_root: str | Path | None = None,
    read_out: ReadOut = "head",
    batch_size: int = 8,
    progress: Callable[[int, int, int], None] | None = None,
) -> BatchReport:
    """Score every edit of a manifest and write a table.

    Args:
        judge: the judge.
        manifest: see :func:`lmm4edit.data.manifest.read_manifest`.
        output: ``.csv``, ``.jsonl`` or ``.parquet``; columns ``sample_id``, one a dimension, ``overall``, ``answer``,
            ``answer_probability``, ``failure``.
        image_root: what relative image paths are relative to.
        read_out: ``head`` or ``text``.
        batch_size: edits in one forward pass; changes no score beyond float rounding.
        progress: called with (rows done, rows in all, rows failed).

    Raises:
        ConfigError: see :func:`check_output`.
        ManifestError: if the manifest as a whole cannot be read.
        StoreError: if the output was begun with another judge, precision, manifest, read-out or other pictures, or
            another process is writing it, or the disk is full.
    """
    output = Path(output)
    check_output(output, Path(manifest))
    make_folder(output.parent)
    problems: list[Problem] = []
    samples = read_manifest(manifest, image_root, judge.dimensions, on_error="skip", problems=problems)
    settings = {
        "judge": judge.fingerprint(),
        "dtype": judge.dtype,
        "manifest": _manifest_identity(Path(manifest)),
        "image_root": str(image_root) if image_root is not None else None,
        "read_out": read_out,
    }
    part = part_path(output)
    n_new = 0
    images = ImagesSeen(output.with_name(output.name + ".part.images.jsonl"))
    with PredictionStore(part, settings, collect_provenance(batch_size=batch_size)) as store:
        finished = store.done_keys(failures=False)
        left = _left_to_do(samples, judge, finished)
        unfinished = {sample.sample_id for sample in left}
        images.check(
            (sample for sample in samples if sample.sample_id not in unfinished),
            f"Write to another output, or remove {output} with {part.name} to score everything again.",
        )
        done = len(samples) - len(left)
        n_failed = len(problems)
        if progress:
            progress(done, len(samples), n_failed)
        # Edits of one source come side by side, so that it is run through the backbone once.
        stream = (sample for _, sample in by_source(left, WINDOW))
        while batch := list(islice(stream, batch_size)):
            images.note(batch)
            results = list(judge.score_many(batch, batch_size, read_out))
            rows = [p for sample, result in zip(batch, results, strict=True) for p in _predictions(sample, result)]
            store.append(p for p in rows if key_of(p) not in finished)
            n_new += len(batch)
            done += len(batch)
            n_failed += sum(bool(result.failure or result.failures) for result in results)
            if progress:
                progress(done, len(samples), n_failed)
        failed = _write_table(output, part, samples, judge)
    broken = [FailedRow(p.where, None, str(p).removeprefix(f"{p.where}: ").strip()) for p in problems]
    return BatchReport(output, len(samples), len(samples) - len(failed), n_new, broken + failed)


def _manifest_identity(path: Path) -> str:
    if path.is_dir():
        return " ".join(file_sha256(file) for file in sorted(path.rglob("*")) if file.is_file())
    return file_sha256(path)


def _targets(sample: EditSample, judge: Judge) -> list[str]:
    names = [dimension.name for dimension in judge.dimensions]
    return [*names, ANSWER, PROBABILITY] if sample.question is not None else names


def _left_to_do(samples: Sequence[EditSample], judge: Judge, finished: set[PredictionKey]) -> list[EditSample]:
    """Samples that lack an output; what failed before is tried again."""
    done = {(key.item_id, key.target) for key in finished}
    return [s for s in samples if any((s.sample_id, target) not in done for target in _targets(s, judge))]


def _predictions(sample: EditSample, result: EditScore) -> list[Prediction]:
    def stored(target: str, value: float | str | None, raw: str | None = None) -> Prediction:
        reason = result.failure or result.failures.get(target) or result.failures.get(ANSWER) or "no value"
        failure = None if value is not None else reason
        return Prediction(sample.sample_id, "judge", target, value, raw_answer=raw, failure=failure)

    rows = [stored(name, value, result.words.get(name)) for name, value in result.scores.items()]
    if sample.question is not None:
        rows += [stored(ANSWER, result.answer), stored(PROBABILITY, result.answer_probability)]
    return rows


def _write_table(output: Path, part: Path, samples: Sequence[EditSample], judge: Judge) -> list[FailedRow]:
    """Write the table in the manifest's order; gives the rows that lack something."""
    by_sample: dict[str, dict[str, Prediction]] = {}
    for prediction in read_predictions(part).predictions:
        by_sample.setdefault(prediction.item_id, {})[prediction.target] = prediction
    names = [dimension.name for dimension in judge.dimensions]
    failed: list[FailedRow] = []
    rows: list[Mapping[str, str | float | None]] = []
    for sample in samples:
        found = by_sample.get(sample.sample_id, {})
        reasons = list(dict.fromkeys(p.failure for p in found.values() if p.failure))
        if reasons:
            failed.append(FailedRow(sample.location or str(output), sample.sample_id, "; ".join(reasons)))
        values = {target: p.value for target, p in found.items()}
        scores = {name: _number(values.get(name)) for name in names}
        rows.append(
            {
                "sample_id": sample.sample_id,
                **scores,
                "overall": overall_score(scores),
                ANSWER: str(values[ANSWER]) if values.get(ANSWER) is not None else None,
                PROBABILITY: _number(values.get(PROBABILITY)),
                "failure": "; ".join(reasons) or None,
            }
        )
    try:
        write_rows(output, rows, ["sample_id", *names, "overall", ANSWER, PROBABILITY, "failure"], nulls=True)
    except OSError as error:  # a full disk, most of the time
        raise StoreError(
            f"{output}: the table cannot be written: {error.strerror or error}. Every score is safe in {part}; make "
            "room, and give the same command again."
        ) from None
    return failed


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
