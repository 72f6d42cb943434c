"""Statistics of a run folder, computed when they are not there yet or no longer fit what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmm4edit.evaluation.bootstrap import RESAMPLES
from lmm4edit.evaluation.metrics import Metrics, compute_metrics, read_metrics, write_metrics
from lmm4edit.evaluation.runner import RunContent
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension


def current_metrics(
    folder: str | Path,
    content: RunContent,
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    *,
    resamples: int | None = None,
    **options: Any,
) -> Metrics:
    """``metrics.json`` if it belongs to the predictions and the manifest as they are, else computed and written.

    Args:
        folder: the run folder.
        content: what :func:`~lmm4edit.evaluation.runner.read_run_folder` gave for it.
        resamples: bootstrap resamples; default: those of what is stored, else the usual number.
        options: passed to :func:`~lmm4edit.evaluation.metrics.compute_metrics`.
    """
    folder = Path(folder)
    path = folder / "metrics.json"
    sources = {name: file_sha256(folder / f"{name}.jsonl") for name in ("predictions", "manifest")}
    if path.exists():
        metrics = read_metrics(path)
        known = metrics.provenance
        same = known.get("sources") == sources and metrics.benchmark == content.run.benchmark
        if same and resamples in (None, known.get("resamples")):
            return metrics
    metrics = compute_metrics(
        content.run.benchmark,
        content.samples,
        content.predictions,
        content.run.scorers,
        dimensions=dimensions,
        resamples=RESAMPLES if resamples is None else resamples,
        provenance=collect_provenance(sources=sources, scored=dict(content.run.provenance)),
        **options,
    )
    write_metrics(path, metrics)
    return metrics
