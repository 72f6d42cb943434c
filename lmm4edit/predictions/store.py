"""Append to the predictions file, and continue it after an interruption.

One process at a time, each batch whole and on disk before the next begins. The format stands in
:mod:`lmm4edit.predictions.format`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from lmm4edit.errors import StoreError
from lmm4edit.json_lines import encode_line
from lmm4edit.predictions.format import (
    PredictionKey,
    StoredPredictions,
    StoreHeader,
    header_line,
    key_of,
    prediction_line,
    read_file,
    read_predictions,
    show_key,
)
from lmm4edit.process_lock import AlreadyLockedError, ProcessLock
from lmm4edit.provenance import fingerprint, jsonable
from lmm4edit.records import Prediction

__all__ = ["PredictionKey", "PredictionStore", "StoreHeader", "StoredPredictions", "key_of", "read_predictions"]

logger = logging.getLogger(__name__)


class PredictionStore:
    """An open predictions file, for one process at a time.

    Use it as a context manager. Opening a file that exists continues it.

    Args:
        path: the file, usually ``predictions.jsonl``; its folder is made.
        settings: what decides the values. A file begun with others is refused.
        provenance: of this process (:func:`lmm4edit.provenance.collect_provenance`); recorded, never compared.

    Attributes:
        recovered: what had to be repaired on opening (a line torn by an interruption), or ``None``.

    Raises:
        StoreError: if the file is in use by another process, was begun with other settings, is of another format, or is
            damaged anywhere but in its last line.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, object], provenance: Mapping[str, object] | None = None
    ) -> None:
        self.path = Path(path)
        self.recovered: str | None = None
        head = header_line(settings, provenance or {})
        self._pid = os.getpid()
        self._lock = _lock(self.path)
        try:
            self._failed_by_key: dict[PredictionKey, bool] = {}
            if self.path.exists() and self.path.stat().st_size > 0:
                self._continue(settings, provenance or {})
            else:
                _write_whole(self.path, head)
                self._file = self.path.open("ab", buffering=0)
        except BaseException:
            self._lock.release()
            raise

    def _continue(self, settings: Mapping[str, object], provenance: Mapping[str, object]) -> None:
        content = read_file(self.path)
        _refuse_other_settings(self.path, content.header, settings)
        for prediction in content.predictions:
            self._failed_by_key[key_of(prediction)] = prediction.value is None
        self._file = self.path.open("ab", buffering=0)
        if content.torn_bytes:
            self.recovered = (
                f"{self.path}: the last line was cut off by an interruption; its {content.torn_bytes} bytes were "
                "removed, and what it held will be computed again."
            )
            logger.warning(self.recovered)
            self._file.truncate(content.size - content.torn_bytes)
        self._write(encode_line({"continued": jsonable(provenance)}))

    def done_keys(self, failures: bool = True) -> set[PredictionKey]:
        """Keys of what is stored, to be skipped on resuming.

        Args:
            failures: whether a stored failure counts as done; pass ``False`` to try the failed ones again.
        """
        return {key for key, failed in self._failed_by_key.items() if failures or not failed}

    def append(self, predictions: Iterable[Prediction]) -> None:
        """Store a batch: all of it or nothing, and on disk when this returns.

        Raises:
            StoreError: if a prediction is stored already or stands twice in the batch, if a value is NaN, infinite or
                of another type than the record allows, if the store is closed, or if the disk refuses.
        """
        if self._pid != os.getpid():
            raise StoreError(
                f"{self.path}: expected to be written by process {self._pid}, which opened it, got a batch from its "
                f"fork {os.getpid()}. Send predictions to the process that opened the file."
            )
        if self._file.closed:
            raise StoreError(f"{self.path}: expected an open store, got one that is closed. Open it again to append.")
        batch: dict[PredictionKey, bool] = {}
        lines = []
        for prediction in predictions:
            line = prediction_line(self.path, prediction)
            key = key_of(prediction)
            if key in batch or not self._failed_by_key.get(key, True):
                raise StoreError(
                    f"{self.path}: expected one prediction for each key, got a second one for {show_key(key)}. "
                    "Skip the keys in done_keys()."
                )
            batch[key] = prediction.value is None
            lines.append(line)
        if lines:
            self._write(b"".join(lines))
            self._failed_by_key.update(batch)

    def _write(self, data: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except BaseException as error:
            # Also on Ctrl-C: the next line must not be glued to a part of this one.
            self._file.truncate(start)
            if not isinstance(error, OSError):
                raise
            raise StoreError(
                f"{self.path}: {len(data)} bytes could not be written: {error.strerror}. "
                "What was stored before is intact: make room, and run the same command again."
            ) from error

    def close(self) -> None:
        """Close the file and free its lock; harmless when repeated."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_other_settings(path: Path, header: StoreHeader, settings: Mapping[str, object]) -> None:
    if header.fingerprint == fingerprint(settings):
        return
    before, now = _flat(header.settings), _flat(jsonable(settings))
    differing = [
        f"  {key}: {before.get(key, 'absent')} in the file, {now.get(key, 'absent')} now"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    raise StoreError(
        f"{path}: expected the settings that the file was begun with, got others:\n"
        + "\n".join(differing)
        + "\nWrite to another file, or move this one away to begin anew."
    )


def _flat(values: object, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys and printable values."""
    if isinstance(values, dict) and values:
        parts = [_flat(value, f"{prefix}.{name}" if prefix else name) for name, value in values.items()]
        return {key: text for part in parts for key, text in part.items()}
    return {prefix: repr(values)}


def _lock(path: Path) -> ProcessLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return ProcessLock(path)
    except AlreadyLockedError as holder:
        raise StoreError(
            f"{path}: expected to be the only process that writes to it, but it is in use by {holder}. "
            "Wait for it, or write to another file."
        ) from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}. Check the folder.") from error


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it never exists with a part of its content."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
