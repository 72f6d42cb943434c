"""Samples for training: read, checked once at the start, the broken ones named and left out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmm4edit.config import TrainConfig
from lmm4edit.data.images import decode_image, fit_for_patches
from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.problems import Problem
from lmm4edit.errors import ConfigError, ImageError
from lmm4edit.provenance import fingerprint
from lmm4edit.records import Dimension, EditSample


@dataclass(frozen=True)
class SkippedRow:
    """A row of a manifest that is not used, and why."""

    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


@dataclass(frozen=True)
class LoadedSamples:
    """Usable samples and the rows left out."""

    samples: list[EditSample]
    skipped: list[SkippedRow]

    def fingerprint(self) -> str:
        """SHA-256 of everything that is learnt from, in order; independent of where the images lie."""
        return fingerprint([[s.sample_id, s.instruction, s.mos, s.question, s.answer] for s in self.samples])


def load_samples(
    manifest: str | Path,
    dimensions: Sequence[Dimension],
    *,
    image_root: str | Path | None = None,
    scores: bool = True,
    answers: bool = True,
    check_images: Literal["decode", "header", "none"] = "decode",
    max_samples: int | None = None,
) -> LoadedSamples:
    """Read a manifest and keep the rows that can be trained on.

    Left out, with the reason: rows the manifest reader refuses, images that are missing or cannot be decoded, samples
    without any value that is wanted.

    Args:
        manifest: see :func:`lmm4edit.data.manifest.read_manifest`.
        dimensions: whose scores are wanted.
        image_root: what relative image paths are relative to.
        scores, answers: which values are wanted.
        check_images: ``decode`` every image, only open the files (``header``), or believe the manifest (``none``).
        max_samples: keep the first so many usable samples.

    Raises:
        ManifestError: if the manifest itself cannot be read.
    """
    problems: list[Problem] = []
    read = read_manifest(manifest, image_root, dimensions, on_error="skip", problems=problems)
    skipped = [
        SkippedRow(problem.where, str(problem).removeprefix(f"{problem.where}: ").strip()) for problem in problems
    ]
    wanted = []
    for sample in read:
        if reason := _nothing_to_learn(sample, dimensions, scores, answers):
            skipped.append(SkippedRow(sample.location or sample.sample_id, f"sample {sample.sample_id!r}: {reason}"))
        else:
            wanted.append(sample)
    broken: dict[str, str] = {}
    if check_images != "none":
        paths = sorted({path for s in wanted for path in (s.source_image, s.edited_image)})
        broken = _broken_images(paths, check_images)
    usable = []
    for sample in wanted:
        reasons = [broken[path] for path in (sample.source_image, sample.edited_image) if path in broken]
        if reasons:
            skipped.append(
                SkippedRow(sample.location or sample.sample_id, f"sample {sample.sample_id!r}: {reasons[0]}")
            )
        else:
            usable.append(sample)
    return LoadedSamples(usable[:max_samples], skipped)


def training_samples(
    config: TrainConfig, dimensions: Sequence[Dimension], *, check_images: bool = True
) -> LoadedSamples:
    """The samples that a run learns from: those with a value that its objective reads.

    Args:
        check_images: ``False`` counts rows whose images are not there, to plan a run before they are.

    Raises:
        ConfigError: if there is no manifest.
        ManifestError: if it cannot be read.
    """
    if not Path(config.data.train).exists():
        raise ConfigError(
            f"data.train: expected a manifest, got nothing at {config.data.train}. Make one (`lmm4edit data import "
            "--help`: a release or a table of yours; `lmm4edit data minibench`: simulated ratings), or give the path "
            "of yours with --data FILE."
        )
    return load_samples(
        config.data.train,
        dimensions,
        image_root=config.data.image_root,
        scores=config.needs_scores(),
        answers=config.objective.qa_ce > 0,
        check_images=config.data.check_images if check_images else "none",
        max_samples=config.data.max_samples,
    )


def validation_samples(config: TrainConfig, dimensions: Sequence[Dimension]) -> list[EditSample]:
    """The samples that statistics are taken on while training; none if that is switched off."""
    if config.data.validation is None:
        return []
    root = config.data.image_root
    loaded = load_samples(config.data.validation, dimensions, image_root=root, check_images="header")
    return spread_evenly(loaded.samples, config.validation.max_samples)


def retention_samples(config: TrainConfig, dimensions: Sequence[Dimension]) -> list[EditSample]:
    """The samples of the old kind that a fine-tuned judge is measured on before and after; none if not asked for."""
    if config.data.retention is None:
        return []
    root = config.data.image_root
    loaded = load_samples(config.data.retention, dimensions, image_root=root, check_images="header")
    return spread_evenly(loaded.samples, config.validation.max_samples)


def spread_evenly(samples: Sequence[EditSample], count: int | None) -> list[EditSample]:
    """``count`` samples at equal distances, so that a sorted manifest is not judged by its first rows."""
    if count is None or count >= len(samples):
        return list(samples)
    return [samples[index * len(samples) // count] for index in range(count)]


def _nothing_to_learn(sample: EditSample, dimensions: Sequence[Dimension], scores: bool, answers: bool) -> str | None:
    has_score = any(dimension.name in sample.mos for dimension in dimensions)
    has_answer = sample.question is not None and sample.answer is not None
    if (scores and has_score) or (answers and has_answer):
        return None
    expected = [f"mos_{d.name}" for d in dimensions if scores] + (["question and answer"] if answers else [])
    return f"nothing to learn: expected at least one of {', '.join(expected)}, got none."


def _broken_images(paths: Sequence[str], check: Literal["decode", "header"]) -> dict[str, str]:
    """Reasons by path. Decoding frees the interpreter's lock, so threads help."""
    probe = _why_undecodable if check == "decode" else _why_unreadable
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        reasons = pool.map(probe, paths)
        return {path: reason for path, reason in zip(paths, reasons, strict=True) if reason is not None}


def _why_undecodable(path: str) -> str | None:
    try:
        # Qwen's 28 pixels; other factors enlarge more or less, but refuse the same shapes.
        fit_for_patches(decode_image(path), factor=28, name=path)
    except ImageError as error:
        return str(error)
    return None


def _why_unreadable(path: str) -> str | None:
    if path.startswith("data:"):
        return None
    try:
        with open(path, "rb") as file:
            return None if file.read(1) else f"{path}: the file is empty."
    except OSError as error:
        return f"{path}: the image cannot be read: {error.strerror}."
