"""A lock that one process holds on a file or folder, and that dies with the process.

The operating system keeps the lock (POSIX record lock on ``NAME.lock``), so ``kill -9`` or a power cut frees it at
once: a ``.lock`` file that is left behind means nothing and is taken over. Forked workers do not inherit the lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path

_held: dict[str, int] = {}
"""Locked path -> process. Record locks do not exclude a second lock of the same process; a fork copies this table."""

_table = threading.Lock()


class AlreadyLockedError(Exception):
    """Another process, or another object of this one, holds the lock; the text says which."""


class ProcessLock:
    """Held from construction until :meth:`release`, or until the process ends in whatever way.

    Args:
        target: what to protect; the lock itself is ``target`` with ``.lock`` appended, in the same folder.

    Raises:
        AlreadyLockedError: at once, without waiting.
        OSError: if the lock file cannot be made, or the file system has no locks.
    """

    def __init__(self, target: str | Path) -> None:
        self.path = Path(f"{os.path.realpath(target)}.lock")
        self._pid = os.getpid()
        with _table:
            if _held.get(str(self.path)) == self._pid:
                raise AlreadyLockedError(f"process {self._pid}, which is this one")
            self._file: int | None = _acquire(self.path)
            _held[str(self.path)] = self._pid
        note = f"process {self._pid} on {socket.gethostname()}, since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, note.encode(), 0)

    def release(self) -> None:
        """Free the lock and remove its file; harmless when repeated, and in a forked child."""
        if self._file is None or self._pid != os.getpid():
            return
        with _table:
            # Removed before it is freed: nobody can lock the name in between, and `_acquire` notices a removed file.
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(self._file)
            self._file = None
            _held.pop(str(self.path), None)


def _acquire(path: Path) -> int:
    import fcntl

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            os.close(file)
            raise AlreadyLockedError(holder) from None
        except BaseException:
            os.close(file)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)  # the holder removed this file between our opening and locking it: lock its successor
