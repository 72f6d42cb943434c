"""The files of a checkpoint: ``judge.json`` and its checks, tensors read strictly, folders replaced whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmm4edit.errors import CheckpointError

FORMAT_VERSION = 1
"""Of the folder; raised when an older reader would misread a newer folder."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DimensionEntry(_Strict):
    """A dimension, and the mean and standard deviation of its training scores (``None`` without a score head)."""

    name: str
    question: str
    low: float
    high: float
    higher_is_better: bool
    definition: str
    target_mean: float | None
    target_sd: float | None


class BackboneEntry(_Strict):
    """Which backbone, and where it may lie; see :func:`lmm4edit.judge.backbone_files.describe_place`."""

    model_type: str
    name: str | None
    relative_path: str | None
    sha256: str


class HeadEntry(_Strict):
    """Sizes of the score head."""

    hidden: int
    inner: int


class JudgeFile(_Strict):
    """What ``judge.json`` holds."""

    format_version: Literal[1]
    stage: int
    has_head: bool
    head: HeadEntry | None
    adapter: Literal["adalora", "lora"] | None
    trained_weights: list[str]
    dimensions: list[DimensionEntry]
    backbone: BackboneEntry
    image_processor: str


def read_judge_file(folder: Path) -> JudgeFile:
    """Read and check ``judge.json``.

    Raises:
        CheckpointError: if it is missing, unreadable, of another version, or contradicts itself.
    """
    path = require(folder, "judge.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}.") from None
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: expected format_version {FORMAT_VERSION}, got {version!r}. Use the LMM4Edit version that wrote "
            "it."
        )
    try:
        entry = JudgeFile.model_validate(data)
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{path}: {lines}.") from None
    if entry.has_head != (entry.head is not None):
        raise CheckpointError(f"{path}: has_head is {entry.has_head}, but head is {entry.head}.")
    return entry


def read_tensors(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, which must be exactly the expected ones.

    Raises:
        CheckpointError: naming every tensor that is missing, left over, empty, of another shape, or not finite.
    """
    try:
        state = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}. Copy the checkpoint again.") from None
    problems = [f"missing {key}" for key in sorted(set(shapes) - set(state))]
    problems += [f"unexpected {key}" for key in sorted(set(state) - set(shapes))]
    for key in sorted(set(state) & set(shapes)):
        if state[key].shape != shapes[key]:
            kind = "empty" if not state[key].numel() else "of the wrong shape"
            problems.append(f"{key} is {kind}: expected {list(shapes[key])}, got {list(state[key].shape)}")
        elif not torch.isfinite(state[key]).all():
            problems.append(f"{key} has values that are not finite")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{path}: {len(problems)} weights do not fit: {'; '.join(problems[:8])}{more}. Nothing was loaded: take "
            "the whole folder from one training run, written with this version."
        )
    return state


def save_tensors(path: Path, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write tensors; ``target`` names the checkpoint in errors.

    Raises:
        CheckpointError: if a value is not finite.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{target}: {name} has values that are not finite; the judge is not saved.")
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, str(path))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def require(folder: Path, name: str) -> Path:
    """The path of a file or folder that a checkpoint must have.

    Raises:
        CheckpointError: if it is missing.
    """
    path = folder / name
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing. Expected the folder of a judge's checkpoint, with judge.json and all that "
            "save_checkpoint wrote."
        )
    return path


def replace_folder(new: Path, target: Path) -> None:
    """Put ``new`` in ``target``'s place. A folder cannot be replaced in one move; the old one steps aside first."""
    if not target.exists():
        os.rename(new, target)
        return
    old = new.with_name(f"{new.name}.old")
    os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old)
