"""Which pictures stored values belong to: a file that is replaced under the same name must not keep its old scores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmm4edit.errors import StoreError
from lmm4edit.json_lines import decode_line, encode_line
from lmm4edit.provenance import file_sha256
from lmm4edit.records import EditSample

_SHOWN = 3


class ImagesSeen:
    """A file beside the predictions: for each sample, size, time and SHA-256 of its image files when it was scored.

    Files whose size and time are as they were are taken for the same; others are read, so that a copy of the data on
    another disk goes on. Images inside the manifest are the manifest's own affair.

    Args:
        path: of the file; created at the first :meth:`note`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, dict[str, list[object]]] = {}
        if path.exists():
            for raw in path.read_bytes().split(b"\n")[:-1]:  # what follows the last line end was cut off by a kill
                try:
                    row = decode_line(raw.decode("utf-8"))
                    self._seen[str(row["sample_id"])] = dict(row["images"])
                except (ValueError, TypeError, KeyError):
                    continue

    def note(self, samples: Sequence[EditSample]) -> None:
        """Write down the images of samples that are about to be scored."""
        lines: list[bytes] = []
        for sample in samples:
            known = self._seen.get(sample.sample_id, {})
            images: dict[str, list[object]] = {}
            for name, path in _files(sample):
                now, before = _look(path, digest=False), known.get(name)
                if now is not None and not (before and before[:2] == now[:2]):
                    before = _look(path, digest=True)
                if now is not None and before:
                    images[name] = before
            if images != known:
                self._seen[sample.sample_id] = images
                lines.append(encode_line({"sample_id": sample.sample_id, "images": images}))
        if lines:
            with self._path.open("ab") as file:
                file.write(b"".join(lines))

    def check(self, samples: Iterable[EditSample], remedy: str) -> None:
        """Refuse to go on with stored values of pictures that have been replaced.

        Args:
            samples: already scored.
            remedy: what to do, for the message.

        Raises:
            StoreError: naming the first of them. One that is gone is no reason: its value is still that picture's.
        """
        changed = [
            f"{sample.sample_id} ({path})"
            for sample in samples
            for name, path in _files(sample)
            if (before := self._seen.get(sample.sample_id, {}).get(name)) and _is_other(path, before)
        ]
        if changed:
            more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise StoreError(
                f"{self._path}: the pictures of {len(changed)} files have changed since they were scored: "
                f"{', '.join(changed[:_SHOWN])}{more}. {remedy}"
            )


def _files(sample: EditSample) -> list[tuple[str, str]]:
    named = (("source_image", sample.source_image), ("edited_image", sample.edited_image))
    return [(name, path) for name, path in named if not path.startswith("data:")]


def _look(path: str, digest: bool) -> list[object] | None:
    try:
        if not os.path.isfile(path):
            return None
        status = os.stat(path)
        return [status.st_size, status.st_mtime_ns, file_sha256(path) if digest else ""]
    except (OSError, ValueError):  # the decoder says what is wrong with it
        return None


def _is_other(path: str, before: list[object]) -> bool:
    now = _look(path, digest=False)
    if now is None or now[:2] == before[:2]:
        return False
    full = _look(path, digest=True)
    return full is not None and full[2] != before[2]
