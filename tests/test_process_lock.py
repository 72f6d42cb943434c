"""The lock that dies with its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmm4edit.process_lock import AlreadyLockedError, ProcessLock

HOLDER = """
import sys, time
from lmm4edit.process_lock import ProcessLock
lock = ProcessLock(sys.argv[1])
print("locked", flush=True)
time.sleep(600)
"""


def holder(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    target = tmp_path / "file"
    process = holder(target)
    with pytest.raises(AlreadyLockedError, match=rf"^process {process.pid} on \S+, since [-\d]+ [:\d]+ UTC$"):
        ProcessLock(target)
    process.kill()
    process.wait()
    assert (tmp_path / "file.lock").exists(), "a killed process leaves its lock file behind"
    ProcessLock(target).release()
    assert os.listdir(tmp_path) == []


def test_one_process_cannot_lock_twice_whatever_the_path_is_called(tmp_path: Path) -> None:
    target = tmp_path / "file"
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(target)
    lock = ProcessLock(target)
    for same in (target, tmp_path / "folder" / ".." / "file", tmp_path / "link"):
        with pytest.raises(AlreadyLockedError, match=f"^process {os.getpid()}, which is this one$"):
            ProcessLock(same)
    lock.release()
    lock.release()
    ProcessLock(tmp_path / "link").release()


def test_a_stale_lock_file_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "file.lock").write_text("process 1 on another-host, since 2001-01-01 00:00:00 UTC, and more")
    ProcessLock(tmp_path / "file").release()
    assert os.listdir(tmp_path) == []


def test_of_many_threads_one_gets_the_lock(tmp_path: Path) -> None:
    results: list[bool] = []
    start = threading.Barrier(8)

    def attempt() -> None:
        start.wait()
        try:
            ProcessLock(tmp_path / "file")
            results.append(True)
        except AlreadyLockedError:
            results.append(False)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ProcessLock(tmp_path / "gone" / "file")
