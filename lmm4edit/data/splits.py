"""Splits by source: all edits of one source image are in one split, in the same share of every task (paper 5.1: 4:1).

Which source goes where depends on the seed and the source's id alone, not on the order of the rows, the machine or the
version of a random generator: sources are ordered by SHA-256 of seed and id, task by task. Shares that are no whole
number of sources are evened out from one task to the next, so that the split as a whole has the share asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmm4edit.errors import ManifestError
from lmm4edit.records import EditSample

NO_TASK = "(no task)"
"""Label of samples without ``edit_task`` in counts."""


@dataclass(frozen=True)
class Leak:
    """Something that stands in more than one split.

    Attributes:
        kind: ``"source"`` (one source id) or ``"photograph"`` (several ids, one picture).
        sources: the source ids.
        splits: where they stand, sorted.
    """

    kind: str
    sources: tuple[str, ...]
    splits: tuple[str, ...]


def split_sources(
    tasks: Mapping[str, str],
    fractions: Mapping[str, float],
    rest: str = "train",
    seed: int = 0,
    clusters: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Assign every source to a split.

    Args:
        tasks: source id -> its task, for stratification.
        fractions: split -> share of the sources, above 0 and below 1, together below 1.
        rest: the split of all other sources.
        seed: another seed, another split.
        clusters: source id -> name of its cluster, for sources that must stay together; others are on their own. A
            cluster counts as one, in the task that most of its sources have.

    Returns:
        Source id -> split, in the order of ``tasks``.

    Raises:
        ManifestError: if a share is out of range, or leaves a split without any source.
    """
    for name, fraction in fractions.items():
        if not 0 < fraction < 1:
            raise ManifestError(
                f"{name}: expected a share above 0 and below 1, got {fraction:g}. Give 0.2 for a fifth."
            )
    if sum(fractions.values()) >= 1:
        shares = " + ".join(f"{value:g}" for value in fractions.values())
        raise ManifestError(f"Expected shares that together leave something for {rest!r}, got {shares}. Lower them.")
    cluster_of = {source: (clusters or {}).get(source, source) for source in tasks}
    strata: dict[str, list[str]] = {}
    for cluster, task in sorted(_task_of_cluster(tasks, cluster_of).items()):
        strata.setdefault(task, []).append(cluster)
    place: dict[str, str] = {}
    wanted, taken = dict.fromkeys(fractions, 0.0), dict.fromkeys(fractions, 0)
    for _, members in sorted(strata.items()):
        queue = sorted(members, key=lambda name: _draw(seed, name))
        for split, fraction in fractions.items():
            wanted[split] += fraction * len(members)
            count = min(len(queue), math.floor(wanted[split] - taken[split] + 0.5 + 1e-9))
            taken[split] += count
            place.update(dict.fromkeys(queue[:count], split))
            queue = queue[count:]
        place.update(dict.fromkeys(queue, rest))
    if empty := [split for split in (*fractions, rest) if split not in place.values()]:
        raise ManifestError(
            f"Expected at least one source in every split, got none in {', '.join(empty)}: {len(place)} sources that "
            "can be told apart are too few for these shares. Raise the share, or give more sources."
        )
    return {source: place[cluster_of[source]] for source in tasks}


def tasks_by_source(samples: Iterable[EditSample]) -> dict[str, str]:
    """Source id -> task (the first of several), in order of appearance."""
    tasks: dict[str, str] = {}
    for sample in samples:
        tasks.setdefault(sample.source_id, sample.edit_task or NO_TASK)
    return tasks


def find_leaks(splits: Mapping[str, Sequence[EditSample]], photographs: Iterable[Sequence[str]] = ()) -> list[Leak]:
    """Sources, and photographs, that stand in more than one split.

    Args:
        splits: split -> its samples.
        photographs: groups of source ids that show one photograph
            (:attr:`lmm4edit.data.photographs.PhotographReport.groups`).
    """
    places: dict[str, set[str]] = {}
    for split, samples in splits.items():
        for sample in samples:
            places.setdefault(sample.source_id, set()).add(split)
    leaks = [Leak("source", (source,), tuple(sorted(found))) for source, found in places.items() if len(found) > 1]
    for group in photographs:
        found = set().union(*(places.get(source, set()) for source in group))
        if len(found) > 1:
            leaks.append(Leak("photograph", tuple(group), tuple(sorted(found))))
    return leaks


def _draw(seed: int, name: str) -> bytes:
    # A name may hold half a surrogate pair, which JSON can escape and UTF-8 cannot hold.
    return hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()


def _task_of_cluster(tasks: Mapping[str, str], cluster_of: Mapping[str, str]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for source, task in tasks.items():
        counts.setdefault(cluster_of[source], Counter())[task] += 1
    # Of equally frequent tasks the first by name, whatever the order of the rows.
    return {cluster: min(counter, key=lambda task: (-counter[task], task)) for cluster, counter in counts.items()}
