"""Training states: all that an interrupted run needs to go on as if nothing had happened.

A state holds the trained tensors, the optimizer, the rank allocator's averages, the random generators of every process,
and the number of steps taken; learning rate and data order are functions of that number. It is written beside its final
place and renamed, so a half-written one never counts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lmm4edit.errors import CheckpointError

_PREFIX = "step-"


@dataclass(frozen=True)
class TrainingState:
    """What :func:`save_state` writes and :func:`load_state` reads.

    Attributes:
        step: optimizer steps taken.
        tensors: trained parameters by name.
        optimizer: the optimizer's ``state_dict``, or this process's part of it.
        ranks: the rank allocator's state.
        facts: plain values that must agree on resume (data fingerprint, processes) or go on (best validation value).
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    ranks: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that training changes, on the processor, in the model's order."""
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def check_tensors(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    origin: str,
    shape: Callable[[torch.Tensor], torch.Size] = lambda p: p.shape,
) -> None:
    """Make sure that saved tensors are the model's. ``shape`` gives a parameter's, however it is divided.

    Raises:
        CheckpointError: if names or shapes differ; each is named.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    problems = [f"  {name}: missing in the state" for name in trained if name not in tensors]
    problems += [f"  {name}: not in the model" for name in tensors if name not in trained]
    problems += [
        f"  {name}: {tuple(shape(p))} in the model, {tuple(tensors[name].shape)} in the state"
        for name, p in trained.items()
        if name in tensors and shape(p) != tensors[name].shape
    ]
    if problems:
        raise CheckpointError(
            f"{origin}: the training state does not fit the model:\n"
            + "\n".join(problems)
            + "\nAdd --restart to begin anew."
        )


def restore_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copy saved tensors into the model.

    Raises:
        CheckpointError: if names or shapes differ; each is named.
    """
    check_tensors(model, tensors, origin)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(tensors[name])


def save_state(
    folder: Path,
    state: TrainingState,
    *,
    keep_last: int,
    rank: int = 0,
    divided: bool = False,
    barrier: Callable[[], object] = lambda: None,
) -> Path:
    """Write a state atomically and drop old ones.

    Called by all processes: each writes its random generators (and its part of a divided optimizer), rank 0 the rest.

    Args:
        folder: where the states of a run lie.
        state: what to write (looked at on rank 0 only).
        keep_last: number of states to keep.
        rank: this process.
        divided: every process holds another part of the optimizer's state.
        barrier: waits for all processes.
    """
    target, temporary = folder / f"{_PREFIX}{state.step:08d}", folder / f".tmp-{state.step:08d}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    barrier()
    torch.save(_random_state(), temporary / f"random-{rank:05d}.pt")
    if divided:
        torch.save(dict(state.optimizer), temporary / f"optimizer-{rank:05d}.pt")
    barrier()
    if rank == 0:
        save_file(dict(state.tensors), temporary / "trained.safetensors")
        if not divided:
            torch.save(dict(state.optimizer), temporary / "optimizer.pt")
        torch.save(dict(state.ranks), temporary / "ranks.pt")
        facts = {"step": state.step, **state.facts}
        (temporary / "state.json").write_text(json.dumps(facts, indent=2, allow_nan=False), encoding="utf-8")
        for file in temporary.iterdir():
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        _sync(folder)
        for old in _states(folder)[:-keep_last]:
            shutil.rmtree(old)
    barrier()
    return target


def latest_state(folder: Path) -> Path | None:
    """The newest complete state, or ``None``."""
    return next(reversed(_states(folder)), None)


def load_state(path: Path, rank: int = 0) -> TrainingState:
    """Read a state, everything on the processor; of a divided optimizer, this process's part.

    Raises:
        CheckpointError: if a file is missing or unreadable.
    """
    try:
        facts = json.loads((path / "state.json").read_text(encoding="utf-8"))
        part = path / f"optimizer-{rank:05d}.pt"
        optimizer = part if any(path.glob("optimizer-*.pt")) else path / "optimizer.pt"
        return TrainingState(
            step=facts.pop("step"),
            tensors=load_file(path / "trained.safetensors"),
            optimizer=torch.load(optimizer, map_location="cpu", weights_only=True),
            ranks=torch.load(path / "ranks.pt", map_location="cpu", weights_only=True),
            facts=facts,
        )
    except Exception as error:  # damaged files fail in many ways, all with one remedy
        raise CheckpointError(
            f"{path}: the training state cannot be read ({type(error).__name__}: {error}). "
            "Remove this folder to continue from the state before it."
        ) from error


def restore_random_state(path: Path, rank: int = 0) -> None:
    """Put this process's random generators where they were when the state was written."""
    saved = torch.load(path / f"random-{rank:05d}.pt", map_location="cpu", weights_only=True)
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
