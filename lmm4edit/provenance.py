"""Where a result comes from: versions, commit, machine, command; and fingerprints of settings and files.

Nothing here imports the packages it names: versions are read from their installed metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "torchvision", "transformers", "tokenizers", "peft", "accelerate", "safetensors", "datasets"),
    *("numpy", "scipy", "pillow", "scikit-image", "pyarrow"),
)
"""Packages whose version can move a number."""


def collect_provenance(**extra: Any) -> dict[str, Any]:
    """What is needed to say later how a result came about.

    Args:
        extra: further entries, such as ``seed=0`` or ``manifest_sha256=...``; they stand beside the collected ones.

    Returns:
        JSON-able: ``lmm4edit`` (version, commit, dirty), ``python``, ``packages`` (``None`` = not installed),
        ``platform``, ``cpu``, ``cpu_count``, ``time`` (UTC, ISO 8601), ``argv`` (paths below the current folder and the
        home folder are shortened), then ``extra``. Holds no name of a person or host.

    Raises:
        ValueError: if an entry of ``extra`` has the name of a collected one.
    """
    collected = {
        "lmm4edit": {"version": _version("lmm4edit"), **_commit()},
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *(_shorten(argument) for argument in sys.argv[1:])],
    }
    taken = collected.keys() & extra.keys()
    if taken:
        raise ValueError(f"Provenance collects {', '.join(sorted(taken))} itself: give the entry another name.")
    return {**collected, **extra}


def fingerprint(value: object) -> str:
    """SHA-256 of the canonical JSON of a value, in hexadecimal.

    Independent of the order of keys. Dataclasses count as mappings, tuples as lists, sets as sorted lists, paths as
    text; ``1`` and ``1.0`` differ.

    Raises:
        TypeError: if a part has no form in JSON.
        ValueError: if a number is NaN or infinite.
    """
    canonical = json.dumps(jsonable(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def jsonable(value: object) -> Any:
    """The value made of dictionaries with text keys, lists, texts, numbers, booleans and ``None`` alone.

    Raises:
        TypeError: if a part is something else, naming it.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"Expected text as key, got {wrong[0]!r}.")
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=json.dumps)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [jsonable(item) for item in value]
    raise TypeError(f"Expected something that JSON can hold, got {type(value).__name__} {value!r}.")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """Commit and cleanness of the checkout that this package runs from, or ``None`` and the reason."""
    root = Path(__file__).resolve().parent.parent
    top = _git(root, "rev-parse", "--show-toplevel")
    # An environment installed inside somebody's repository must not report that repository's commit.
    if top is None or Path(top).resolve() != root:
        unreadable = (root / ".git").exists()
        reason = "git cannot read the checkout" if unreadable else "not running from a git checkout"
        return {"commit": None, "dirty": None, "commit_reason": reason}
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None, "commit_reason": "the checkout has no commit"}
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Inside a hook of another repository these variables would answer for that one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _shorten(argument: str) -> str:
    """An argument without the place of the current folder or the home folder in it."""
    for folder, short in ((str(Path.cwd()), "."), (str(Path.home()), "~")):
        # The root folder is a prefix of every path and says nothing.
        if len(folder) > 1 and (f"{argument}/".startswith(f"{folder}/") or f"={folder}/" in f"{argument}/"):
            return argument.replace(folder, short, 1)
    return argument
