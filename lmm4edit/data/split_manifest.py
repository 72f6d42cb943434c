"""One manifest divided into the manifests of its splits, with a check for leaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmm4edit.data.dimensions import DIMENSIONS_FILE, dimensions_of_manifest, write_dimensions
from lmm4edit.data.manifest import read_manifest, write_manifest
from lmm4edit.data.output_folder import count_by, output_folder, summary_name, write_json
from lmm4edit.data.photographs import find_recurring_photographs
from lmm4edit.data.splits import find_leaks, split_sources, tasks_by_source
from lmm4edit.errors import ManifestError
from lmm4edit.provenance import collect_provenance, file_sha256
from lmm4edit.records import BUILT_IN_DIMENSIONS


@dataclass(frozen=True)
class SplitManifest:
    """What a split made: what ``split_summary.json`` holds, and sentences for a person."""

    summary: dict[str, Any]
    notes: list[str]


def split_manifest(
    manifest: str | Path,
    out: str | Path,
    fractions: Mapping[str, float],
    seed: int = 0,
    image_root: str | Path | None = None,
    compare_photographs: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SplitManifest:
    """Write ``<split>.jsonl`` for each split, ``dimensions.yaml`` if the manifest has one, and ``split_summary.json``.

    Args:
        manifest: read with the dimensions of a ``dimensions.yaml`` beside it.
        out: folder; image paths are written relative to it.
        fractions: split -> share of the sources (0-1); the rest is ``train``. A share of 0 makes no such split.
        seed, image_root: see :func:`lmm4edit.data.splits.split_sources` and
            :func:`lmm4edit.data.manifest.read_manifest`.
        compare_photographs: keep sources that show one photograph together.
        overwrite: replace the files of an earlier run.
        progress: called with (source images compared, source images in all).

    Raises:
        ManifestError: if a row of the manifest is wrong, the shares do not work out, or ``out`` cannot be written.
    """
    dimensions = dimensions_of_manifest(manifest)
    samples = read_manifest(manifest, image_root, dimensions)
    wanted = {name: share for name, share in fractions.items() if share != 0}
    if not wanted:
        raise ManifestError(
            "Expected a share for at least one split beside train, got none above 0. Give --test 0.2 for a fifth."
        )
    notes = []
    photographs = None
    if compare_photographs:
        images = {sample.source_id: sample.source_image for sample in reversed(samples)}
        photographs = find_recurring_photographs(images, progress)
        if photographs.not_compared:
            name, reason = next(iter(photographs.not_compared.items()))
            notes.append(
                f"{len(photographs.not_compared)} of {len(images)} source images could not be compared (first "
                f"{name}: {reason}): a photograph that recurs among them may be in two splits."
            )
        if photographs.groups:
            notes.append(
                f"Photographs that recur under several source ids: {len(photographs.groups)}; each is in one split."
            )
    else:
        notes.append("Source images were not compared: a photograph under two source ids may be in two splits.")
    tasks = tasks_by_source(samples)
    place = split_sources(tasks, wanted, seed=seed, clusters=photographs.cluster_of() if photographs else None)
    names = ("train", *wanted)
    splits = {
        name: [replace(s, groups={**s.groups, "split": name}) for s in samples if place[s.source_id] == name]
        for name in names
    }
    leaks = find_leaks(splits, photographs.groups if photographs else ())
    lacking = {
        name: sorted({*tasks.values()} - {tasks[source] for source, split in place.items() if split == name})
        for name in names
    }
    notes += [f"{name} has no source of {', '.join(tasks)}." for name, tasks in lacking.items() if tasks]
    summary: dict[str, Any] = {
        "kind": "split by source",
        "shares": dict(wanted),
        "seed": seed,
        "splits": {
            name: {
                "samples": len(rows),
                "sources": len({s.source_id for s in rows}),
                "sources_by_task": count_by(tasks_by_source(rows).values()),
            }
            for name, rows in splits.items()
        },
        "recurring_photographs": [list(group) for group in photographs.groups] if photographs else None,
        "leaks": [asdict(leak) for leak in leaks],
        "caveats": notes,
    }
    with output_folder(out, "split", overwrite, inputs=(manifest,)) as staging:
        for name, rows in splits.items():
            write_manifest(staging / f"{name}.jsonl", rows, relative_to=Path(out).absolute())
        if dimensions != BUILT_IN_DIMENSIONS:
            write_dimensions(staging / DIMENSIONS_FILE, dimensions)
        outputs = {path.name: file_sha256(path) for path in sorted(staging.iterdir())}
        inputs = {Path(manifest).name: file_sha256(manifest)} if Path(manifest).is_file() else {}
        summary["provenance"] = collect_provenance(inputs=inputs, outputs=outputs)
        write_json(staging / summary_name("split"), summary)
    return SplitManifest(summary, notes)
