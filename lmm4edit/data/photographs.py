"""Photographs that recur: the same picture under several source ids, also resized, recompressed, or lightly degraded.

In EBench-18K some photographs are the source of several tasks. If one of them is in the training split and another in
the test split, the test has seen the picture, though not the edit.

How they are found: each source image becomes a 24 x 24 thumbnail in grey, its mean taken off and scaled to length 1.
Two with a correlation of at least :data:`SAME_PHOTOGRAPH` count as one photograph. That is a choice of ours: it finds
copies in another size or JPEG quality, and not crops, mirrored copies, or copies with strong rain or darkness. Each
pair is reported with its correlation, for a person to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lmm4edit.data.images import decode_image
from lmm4edit.errors import ImageError

SAME_PHOTOGRAPH = 0.99
"""Correlation of two thumbnails from which on they count as one photograph."""

_SIDE = 24
_FLAT = 1.0
"""Grey levels: below this standard deviation a thumbnail says nothing about which photograph it is."""


@dataclass(frozen=True)
class PhotographReport:
    """Which sources show the same photograph.

    Attributes:
        groups: sources of one photograph, each group sorted, those with one source left out.
        correlations: (source, source) -> correlation of their thumbnails (0.99-1), for every pair found.
        n_compared: sources whose image was looked at.
        not_compared: source -> why its image says nothing (missing, damaged, without contrast).
    """

    groups: tuple[tuple[str, ...], ...]
    correlations: dict[tuple[str, str], float]
    n_compared: int
    not_compared: dict[str, str]

    def cluster_of(self) -> dict[str, str]:
        """Source -> the first source of its photograph, for those in a group."""
        return {source: group[0] for group in self.groups for source in group}


def find_recurring_photographs(
    images: Mapping[str, str], progress: Callable[[int, int], None] | None = None
) -> PhotographReport:
    """Compare the source images of a data set, all with all.

    Args:
        images: source id -> path of its image (or ``data:`` URI).
        progress: called with (images read, images in all).
    """
    signatures: list[np.ndarray] = []
    names: list[str] = []
    reasons: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        looks = pool.map(_signature, images.values())
        for done, (name, signature) in enumerate(zip(images, looks, strict=True), start=1):
            if isinstance(signature, str):
                reasons[name] = signature
            else:
                names.append(name)
                signatures.append(signature)
            if progress:
                progress(done, len(images))
    pairs = _pairs(names, signatures)
    return PhotographReport(tuple(groups_of(pairs)), pairs, len(names), reasons)


def groups_of(pairs: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups of names that the pairs connect, directly or through others; sorted."""
    group_of: dict[str, set[str]] = {}
    for first, second in pairs:
        joined = group_of.get(first, {first}) | group_of.get(second, {second})
        for name in joined:
            group_of[name] = joined
    return sorted({tuple(sorted(group)) for group in group_of.values()})


def _signature(path: str) -> np.ndarray | str:
    try:
        image = decode_image(path)
    except ImageError as error:
        return error.got or str(error)
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float64).ravel()
    if grey.std() < _FLAT:
        return "an image without contrast"
    centred = grey - grey.mean()
    return np.asarray(centred / np.linalg.norm(centred))


def _pairs(names: Sequence[str], signatures: Sequence[np.ndarray]) -> dict[tuple[str, str], float]:
    if not names:
        return {}
    table = np.stack(signatures)
    pairs = {}
    for place, name in enumerate(names):
        correlations = table[place + 1 :] @ table[place]
        for other in np.flatnonzero(correlations >= SAME_PHOTOGRAPH):
            pairs[name, names[place + 1 + int(other)]] = round(float(min(1.0, correlations[other])), 6)
    return pairs
