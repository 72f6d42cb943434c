"""The order in which rows are scored: edits of one source side by side. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from lmm4edit.records import EditSample


def by_source(samples: Iterable[EditSample], window: int) -> Iterator[tuple[int, EditSample]]:
    """Samples with their places in the stream, rows of one source and instruction side by side within each window.

    Args:
        samples: a stream; at most ``window`` of it are held at a time.
        window: rows in which neighbours are looked for; 1 leaves the order as it is.
    """
    stream = enumerate(samples)
    while rows := list(islice(stream, window)):
        seen: dict[tuple[str, str], int] = {}
        # In the order in which sources first appear, which keeps what is read from disk together as it lay.
        ranks = [seen.setdefault((sample.source_image, sample.instruction), len(seen)) for _, sample in rows]
        yield from (rows[index] for index in sorted(range(len(rows)), key=ranks.__getitem__))
