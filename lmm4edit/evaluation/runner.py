"""Samples in, predictions file out. Everything to the right of that file needs no model.

A run folder holds::

    predictions.jsonl   every value and every failure, written batch by batch; an interrupted run continues
    manifest.jsonl      the samples that were scored, with opinions and answers
    run.json            the benchmark's name, what each scorer says of itself, whether ratings are simulated, ...
    metrics.json        all statistics (written by ``evaluate`` and ``report``)
    report/             what to look at
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lmm4edit.data.manifest import read_manifest, write_manifest
from lmm4edit.errors import ConfigError, ScorerError, StoreError
from lmm4edit.folders import make_folder
from lmm4edit.predictions.images_seen import ImagesSeen
from lmm4edit.predictions.store import PredictionStore, key_of, read_predictions
from lmm4edit.provenance import collect_provenance, fingerprint
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension, EditSample, Prediction
from lmm4edit.scorers.base import Scorer, ScorerInfo, build_scorer

FORMAT_VERSION = 1

Progress = Callable[[str, int, int], None]
"""Called with (predictor, samples done, samples in all)."""


@dataclass(frozen=True)
class Run:
    """What a run folder says of itself (``run.json``).

    Attributes:
        benchmark: its name, for tables.
        scorers: predictor -> description.
        simulated: why the ratings do not come from people, or ``None``.
        training: folders of the training runs behind the judge, for their curves.
        provenance: of the scoring process.
    """

    benchmark: str
    scorers: dict[str, ScorerInfo]
    simulated: str | None = None
    training: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContent:
    """Everything in a run folder that statistics and reports are made of."""

    run: Run
    samples: list[EditSample]
    predictions: list[Prediction]


def run_scorers(
    samples: Sequence[EditSample],
    specs: Sequence[str],
    out_dir: str | Path,
    batch_size: int = 16,
    progress: Progress | None = None,
    *,
    benchmark: str = "edits",
    simulated: str | None = None,
    training: Sequence[str | Path] = (),
    scorer_options: Mapping[str, object] | None = None,
    retry_failures: bool = False,
) -> Path:
    """Score every sample with every scorer and store each value.

    Run again with the same folder, it computes only what is missing; further scorers may be added.

    Args:
        samples: what to score; ids must be unique.
        specs: ``name``, ``name:argument``, or ``label=...`` of either, to store the predictions under that label.
        batch_size: samples handed to a scorer at a time; does not change any value.
        simulated: reason why ratings are not people's (see :func:`why_simulated`).
        training: folders of training runs to show in the report.
        scorer_options: passed to every scorer that takes an argument (``device``...).
        retry_failures: score again what failed before.

    Returns:
        path of ``predictions.jsonl``.

    Raises:
        ScorerError: unknown or unusable scorer, two with the same name; a scorer that returns the wrong number of rows.
        StoreError: the folder holds predictions of other samples, or of a scorer that has changed since.
    """
    out = make_folder(out_dir)
    for folder in training:
        if not (Path(folder) / "metrics.jsonl").exists():
            raise ConfigError(f"{folder}: expected the folder of a training run, with metrics.jsonl in it.")
    scorers = _build(specs, scorer_options or {})
    run_path, path = out / "run.json", out / "predictions.jsonl"
    known = read_run(out).scorers if run_path.exists() and path.exists() else {}
    for label, scorer in scorers.items():
        if label in known and known[label].fingerprint != scorer.info.fingerprint:
            raise StoreError(
                f"{path}: holds predictions of {label!r} with fingerprint {known[label].fingerprint[:12]!r}, but that "
                f"scorer now has {scorer.info.fingerprint[:12]!r}: its weights or settings changed. Write to another "
                f"folder, or label the new one: --scorers NEW={label}."
            )
    provenance = collect_provenance(batch_size=batch_size)
    settings = {"samples": fingerprint([_identity(sample) for sample in samples])}
    with PredictionStore(path, settings, provenance) as store:
        write_manifest(out / "manifest.jsonl", samples, relative_to=out)
        infos = {**known, **{label: replace(scorer.info, name=label) for label, scorer in scorers.items()}}
        write_run(out, Run(benchmark, infos, simulated, tuple(str(Path(t)) for t in training), provenance))
        done = {(key.predictor, key.item_id) for key in store.done_keys(failures=not retry_failures)}
        images = ImagesSeen(out / "images.jsonl")
        scored = {item for _, item in done}
        remedy = f"Evaluate into another folder, or remove {out} to score everything again."
        images.check((s for s in samples if s.sample_id in scored), remedy)
        for label, scorer in scorers.items():
            left = [s for s in samples if (label, s.sample_id) not in done]
            _score(label, scorer, left, store, images, batch_size, len(samples), progress)
    return path


def read_run(out_dir: str | Path) -> Run:
    """Read ``run.json``.

    Raises:
        StoreError: the folder is no run folder, or its format is another.
    """
    path = Path(out_dir) / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: expected the description of an evaluation run, got none that can be read ({error}). Give the "
            "folder that `lmm4edit evaluate --out` wrote."
        ) from error
    if not isinstance(content, dict):
        raise StoreError(f"{path}: expected a JSON object, got {type(content).__name__}. Evaluate again.")
    if content.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{path}: expected format_version {FORMAT_VERSION}, got {content.get('format_version')!r}. Use the "
            "LMM4Edit version that wrote the folder, or evaluate again."
        )
    scorers = {name: ScorerInfo.from_record(record) for name, record in content["scorers"].items()}
    return Run(
        content["benchmark"], scorers, content["simulated"], tuple(content["training"]), content.get("provenance", {})
    )


def write_run(out_dir: str | Path, run: Run) -> None:
    """Write ``run.json`` (whole or not at all)."""
    path = Path(out_dir) / "run.json"
    scorers = {name: info.as_record() for name, info in run.scorers.items()}
    content = {"format": "lmm4edit-run", "format_version": FORMAT_VERSION, **asdict(replace(run, scorers={}))}
    partial = path.with_suffix(".json.partial")
    text = json.dumps({**content, "scorers": scorers}, indent=1, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def read_run_folder(out_dir: str | Path, dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS) -> RunContent:
    """Read a run folder: description, samples, predictions.

    Raises:
        StoreError: something is missing or damaged.
        ManifestError: the copied manifest is damaged.
    """
    out = Path(out_dir)
    run = read_run(out)
    return RunContent(
        run,
        read_manifest(out / "manifest.jsonl", dimensions=dimensions),
        read_predictions(out / "predictions.jsonl").predictions,
    )


def why_simulated(samples: Sequence[EditSample], manifest: str | Path | None = None) -> str | None:
    """Why the ratings must not be read as people's, or ``None`` where nothing says so.

    Args:
        samples: labelled ``ratings=simulated`` by the mini benchmark.
        manifest: a file ``SIMULATED.md`` beside it says the same.
    """
    labelled = sum(sample.groups.get("ratings") == "simulated" for sample in samples)
    if labelled:
        return f"{labelled} of {len(samples)} edits carry the label ratings=simulated"
    if manifest is not None and (Path(manifest).parent / "SIMULATED.md").exists():
        return "a file SIMULATED.md stands beside the manifest"
    return None


def _build(specs: Sequence[str], options: Mapping[str, object]) -> dict[str, Scorer]:
    if not specs:
        raise ScorerError("Expected at least one scorer, got none. For example: --scorers psnr,ssim.")
    scorers: dict[str, Scorer] = {}
    for written in specs:
        # A label stands before the first "=", unless that belongs to the argument (judge:runs/lr=1e-4).
        head, equals, tail = written.partition("=")
        label, spec = (head, tail) if equals and ":" not in head else ("", written)
        scorer = build_scorer(spec, **(options if ":" in spec else {}))
        name = label or scorer.info.name
        if name in scorers:
            raise ScorerError(f"Scorer {name!r} is given twice. Leave one out, or label it: --scorers OTHER={spec}.")
        scorers[name] = scorer
    return scorers


def _identity(sample: EditSample) -> dict[str, str | None]:
    """What of a sample decides its values; opinions and labels may be corrected without scoring again."""
    return {
        "sample_id": sample.sample_id,
        "source_image": Path(sample.source_image).name if not sample.source_image.startswith("data:") else None,
        "edited_image": Path(sample.edited_image).name if not sample.edited_image.startswith("data:") else None,
        "instruction": sample.instruction,
        "question": sample.question,
        "source_description": sample.source_description,
        "target_description": sample.target_description,
    }


def _score(
    label: str,
    scorer: Scorer,
    samples: Sequence[EditSample],
    store: PredictionStore,
    images: ImagesSeen,
    batch_size: int,
    total: int,
    progress: Progress | None,
) -> None:
    done = total - len(samples)
    if progress:
        progress(label, done, total)
    for first in range(0, len(samples), batch_size):
        batch = samples[first : first + batch_size]
        images.note(batch)
        rows = scorer.score(batch)
        if len(rows) != len(batch):
            raise ScorerError(f"Scorer {label!r}: expected one row for each of {len(batch)} samples, got {len(rows)}.")
        # A sample that failed for one target only is scored again as a whole; what it had stays.
        finished = store.done_keys(failures=False)
        named = []
        for sample, row in zip(batch, rows, strict=True):
            wrong = [p.item_id for p in row if p.item_id != sample.sample_id]
            if wrong:
                raise ScorerError(f"Scorer {label!r} returned item {wrong[0]!r} in the row of {sample.sample_id!r}.")
            named += [replace(p, predictor=label) for p in row]
        store.append(p for p in named if key_of(p) not in finished)
        done += len(batch)
        if progress:
            progress(label, done, total)
