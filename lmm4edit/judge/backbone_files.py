"""Where a backbone's weights lie, and which weights they are."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from pathlib import Path

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.provenance import file_sha256
from lmm4edit.shipped import shipped_path

_SHA256 = re.compile(r"[0-9a-f]{64}")


def backbone_fingerprint(name_or_path: str | Path) -> str:
    """SHA-256 of a backbone's weight files, in hexadecimal: equal for equal files, wherever they lie.

    Files that the Hugging Face cache names by their hash are not read again; others are (a 7B model: seconds).

    Raises:
        CheckpointError: if there are no weights in safetensors.
    """
    folder = weights_folder(name_or_path)
    digests = sorted(_digest(path) for path in _weight_files(folder))
    if not digests:
        raise CheckpointError(
            f"Backbone {str(name_or_path)!r}: expected model*.safetensors in {folder}, found none. Save it with "
            "save_pretrained, or download the safetensors files."
        )
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def weights_folder(name_or_path: str | Path) -> Path:
    """The folder itself, or where the Hugging Face cache keeps a downloaded model.

    Raises:
        CheckpointError: if it is neither.
    """
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(str(name_or_path), local_files_only=True, allow_patterns=["*.safetensors", "*.json"])
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Backbone {str(name_or_path)!r} is neither a folder nor a downloaded model of the Hugging Face Hub "
            f"({type(error).__name__})."
        ) from error
    return Path(found)


def describe_place(backbone: str, checkpoint: Path) -> dict[str, str | None]:
    """How a checkpoint remembers where its backbone lies.

    Returns:
        ``name``: as it was given, unless that is an absolute path, which would mean nothing elsewhere;
        ``relative_path``: from the checkpoint's folder, for a folder on disk.
    """
    folder = Path(backbone)
    if not folder.is_dir():
        return {"name": backbone, "relative_path": None}
    relative = os.path.relpath(folder.resolve(), checkpoint.resolve())
    return {"name": None if folder.is_absolute() else backbone, "relative_path": Path(relative).as_posix()}


def find_backbone(place: dict[str, str | None], checkpoint: Path, override: str | Path | None = None) -> str:
    """Where to load a checkpoint's backbone from.

    Sought in this order: the override, beside the checkpoint, from the current folder, with the package, on the Hub.

    Raises:
        CheckpointError: if it is nowhere, listing where it was sought.
    """
    if override is not None:
        return str(override)
    name, relative = place["name"], place["relative_path"]
    candidates = [(checkpoint / relative).resolve()] if relative else []
    candidates += [Path(name)] if name and relative else []
    for candidate in candidates:
        if candidate.is_dir():
            return str(candidate.resolve())
    if name and relative:
        try:
            return str(shipped_path(name))
        except ConfigError:
            pass
    if name and not relative:
        return name
    raise CheckpointError(
        f"{checkpoint}: its backbone was not found at {[str(c) for c in candidates]}. Put it there, or say where it "
        "lies with the backbone option."
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("model*.safetensors"))


def _digest(path: Path) -> str:
    real = path.resolve()
    if _SHA256.fullmatch(real.name):
        return real.name
    if not real.is_file():
        raise CheckpointError(f"{path}: the weight file is missing. Download the backbone again.")
    stat = real.stat()
    return _digest_of(str(real), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of(path: str, size: int, modified: int) -> str:
    return file_sha256(path)
