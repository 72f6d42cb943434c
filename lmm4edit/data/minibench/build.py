"""Writes the mini benchmark to disk: images, manifests, raw ratings, and a note that all of it is simulated.

Deterministic from the seed to the byte: every source draws from its own generator, so that adding a source or an editor
changes no other.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from lmm4edit.data.manifest import write_manifest
from lmm4edit.data.minibench.editing_models import SIMULATED_EDITORS, edit_with
from lmm4edit.data.minibench.objects import pick
from lmm4edit.data.minibench.opinions import DIMENSIONS, EditFacts, answer, draw_raters, rate, true_opinions
from lmm4edit.data.minibench.scenes import (
    TEST_PHOTOGRAPHS,
    TRAIN_PHOTOGRAPHS,
    crop_photograph,
    generate_scene,
    to_image,
)
from lmm4edit.data.minibench.tasks import HIGH_LEVEL_TASKS, TASKS, build_case
from lmm4edit.data.mos import Rating, mean_opinion_scores
from lmm4edit.records import EditSample

VERSION = "1"
"""Raised whenever the same seed would give other images or ratings."""

SPLITS: dict[str, tuple[int, int]] = {"train": (3, 11), "validation": (1, 1), "test": (2, 2)}
"""Sources per task: (photographs, generated scenes). Train and validation together against test are 4 to 1."""

NOTICE = """# Simulated

Everything in this folder was made by `lmm4edit data minibench`: the edits by image operations, the editing models and
the
raters by simulation. Photographs are crops of those bundled with scikit-image. No person rated anything here, and no
number computed from it says anything about a real editing model or about agreement with real people.
"""


@dataclass(frozen=True)
class MinibenchSummary:
    """What was written.

    Attributes:
        counts: edits per split.
        sources: sources per split and content (``"test/photo"``).
        digest: SHA-256 over all manifests, ratings and images: the same seed gives the same digest.
        outlier_fraction: share of ratings removed by the screening (paper 3.4 reports 2.26 % for its own).
    """

    counts: dict[str, int]
    sources: dict[str, int]
    digest: str
    outlier_fraction: dict[str, float]
    rejected_raters: dict[str, list[str]]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Edit:
    sample: EditSample
    split: str
    facts: EditFacts


def build_minibench(
    out: Path,
    seed: int = 0,
    size: int = 168,
    sources_per_task: int | None = None,
    splits: Sequence[str] = tuple(SPLITS),
    progress: Callable[[int, int], None] | None = None,
) -> MinibenchSummary:
    """Write the mini benchmark into ``out``.

    Args:
        out: folder for ``images/``, ``train.jsonl``, ``validation.jsonl``, ``test.jsonl``, ``ratings.csv``,
            ``facts.jsonl``, ``SIMULATED.md`` and ``minibench.json``.
        seed: decides everything.
        size: side of all images, pixels.
        sources_per_task: at most so many sources of each split and content per task (for quick tests).
        splits: which splits to make; the images of a split are the same whatever else is made, its MOS depend
            (slightly) on all edits that are rated together.
        progress: called with (sources done, sources in all).
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "images").mkdir(exist_ok=True)
    plan = [row for row in _plan(sources_per_task) if row[1] in splits]
    edits: list[_Edit] = []
    for done, (task, split, content, index) in enumerate(plan, start=1):
        edits.extend(_edits_of_source(out, seed, size, task, split, content, index))
        if progress:
            progress(done, len(plan))
    ratings, answers = _collect_ratings(edits, seed)
    samples: dict[str, list[EditSample]] = {split: [] for split in splits}
    scores, outliers, rejected, warnings = {}, {}, {}, []
    for dimension in DIMENSIONS:
        result = mean_opinion_scores(ratings[dimension])
        scores[dimension] = result.mos
        outliers[dimension] = result.outlier_fraction
        rejected[dimension] = list(result.rejected_subjects)
        warnings += [f"{dimension}: {warning}" for warning in result.warnings]
    for edit in edits:
        sample_id = edit.sample.sample_id
        mos = {dimension: round(scores[dimension][sample_id], 4) for dimension in DIMENSIONS}
        samples[edit.split].append(replace(edit.sample, mos=mos, answer=answers[sample_id]))
    for split, rows in samples.items():
        write_manifest(out / f"{split}.jsonl", rows, relative_to=out)
    _write_ratings(out / "ratings.csv", ratings)
    with (out / "facts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for edit in edits:
            file.write(json.dumps({"sample_id": edit.sample.sample_id, **asdict(edit.facts)}) + "\n")
    (out / "SIMULATED.md").write_text(NOTICE, encoding="utf-8")
    summary = MinibenchSummary(
        {split: len(rows) for split, rows in samples.items()},
        _count_sources(edits),
        _digest(out),
        outliers,
        rejected,
        warnings,
    )
    settings = {
        "version": VERSION,
        "seed": seed,
        "size": size,
        "sources_per_task": sources_per_task,
        "editors": [e.name for e in SIMULATED_EDITORS],
    }
    (out / "minibench.json").write_text(json.dumps({**settings, **asdict(summary)}, indent=2) + "\n", encoding="utf-8")
    return summary


def _plan(limit: int | None) -> Iterator[tuple[str, str, str, int]]:
    for task in TASKS:
        for split, (photographs, scenes) in SPLITS.items():
            for content, count in (("photo", photographs), ("scene", scenes)):
                for index in range(count if limit is None else min(limit, count)):
                    yield task, split, content, index


def _edits_of_source(
    out: Path, seed: int, size: int, task: str, split: str, content: str, index: int
) -> Iterator[_Edit]:
    key = [seed, list(TASKS).index(task), list(SPLITS).index(split), ("photo", "scene").index(content), index]
    rng = np.random.default_rng(key)
    photograph = pick(rng, TEST_PHOTOGRAPHS if split == "test" else TRAIN_PHOTOGRAPHS) if content == "photo" else ""

    def draw() -> np.ndarray:
        return crop_photograph(photograph, rng, size) if photograph else generate_scene(rng, size)

    case, base = build_case(task, draw, rng)
    name = f"{content}-{Path(photograph).stem}" if photograph else content
    source_id = f"{task}-{split}-{name}-{index:02d}"
    source_path = out / "images" / f"{source_id}.png"
    to_image(case.source).save(source_path, compress_level=6)
    for number, editor in enumerate(SIMULATED_EDITORS):
        outcome = edit_with(editor, case, base, np.random.default_rng([*key, number]))
        sample_id = f"{source_id}-{editor.name}"
        edited_path = out / "images" / f"{sample_id}.png"
        to_image(outcome.image).save(edited_path, compress_level=6)
        groups = {
            "content": content,
            "level": "high" if task in HIGH_LEVEL_TASKS else "low",
            "ratings": "simulated",
            "outcome": outcome.kind,
            **({"photograph": Path(photograph).stem} if photograph else {}),
        }
        yield _Edit(
            EditSample(
                sample_id=sample_id,
                source_id=source_id,
                source_image=str(source_path),
                edited_image=str(edited_path),
                instruction=case.instruction,
                source_description=case.source_description,
                target_description=case.target_description,
                prompt_type="description" if editor.prompt_type == "description" else "instruction",
                edit_task=task,
                editing_model=editor.name,
                question=case.question,
                groups=groups,
            ),
            split,
            outcome.facts,
        )


def _collect_ratings(edits: list[_Edit], seed: int) -> tuple[dict[str, list[Rating]], dict[str, str]]:
    """Ratings of every edit by every simulated rater, and the majority's answer to its question."""
    raters = draw_raters(np.random.default_rng([seed, 1001]))
    ratings: dict[str, list[Rating]] = {dimension: [] for dimension in DIMENSIONS}
    answers = {}
    for edit in edits:
        sample_id = edit.sample.sample_id
        rng = np.random.default_rng([seed, int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:6], "big")])
        opinions = true_opinions(edit.facts)
        for dimension in DIMENSIONS:
            for rater in raters:
                ratings[dimension].append(Rating(rater.name, sample_id, rate(rater, opinions[dimension], rng)))
        votes = sum(answer(rater, opinions["alignment"], rng) for rater in raters)
        answers[sample_id] = "yes" if votes * 2 > len(raters) else "no"
    return ratings, answers


def _write_ratings(path: Path, ratings: dict[str, list[Rating]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dimension", "subject", "item", "value"])
        for dimension, rows in ratings.items():
            writer.writerows([dimension, row.subject, row.item, row.value] for row in rows)


def _count_sources(edits: list[_Edit]) -> dict[str, int]:
    seen: dict[str, set[str]] = {}
    for edit in edits:
        seen.setdefault(f"{edit.split}/{edit.sample.groups['content']}", set()).add(edit.sample.source_id)
    return {key: len(ids) for key, ids in sorted(seen.items())}


def _digest(out: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*out.glob("*.jsonl"), out / "ratings.csv", *(out / "images").glob("*.png")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
