"""The folder of a run: what lies in it, and whether a command begins, continues or leaves a run alone.

```
config.yaml        the resolved configuration          metrics.jsonl     one row a step and a validation
provenance.json    versions, commit, machine           training_state/   where an interrupted run continues
checkpoint/        the trained judge                   checkpoint-best/  the best by validation, if kept
ranks.csv, .png    ranks of the adapters (AdaLoRA and LoRA)
finished.json      written last: the run is complete
```
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lmm4edit.config import TrainConfig, dump_config, load_config
from lmm4edit.errors import ConfigError
from lmm4edit.folders import make_folder
from lmm4edit.process_lock import AlreadyLockedError, ProcessLock

# Keys that change what is watched or kept, never what is learned. Everything else must stay as it was on resume.
HARMLESS_KEYS = (
    "run_dir",
    "log_every_steps",
    "data.num_workers",
    "data.cache_megabytes",
    "checkpoint.save_every_steps",
    "checkpoint.keep_last",
    "wandb.",
)


class RunStatus(Enum):
    """What a command finds."""

    NEW = "new"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def provenance(self) -> Path:
        """Versions, commit, machine, command."""
        return self.path / "provenance.json"

    @property
    def metrics(self) -> Path:
        """One JSON row a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def states(self) -> Path:
        """Training states of an unfinished run."""
        return self.path / "training_state"

    @property
    def checkpoint(self) -> Path:
        """The trained judge."""
        return self.path / "checkpoint"

    @property
    def best(self) -> Path:
        """The best judge by validation."""
        return self.path / "checkpoint-best"

    @property
    def finished(self) -> Path:
        """Written last."""
        return self.path / "finished.json"

    def status(self) -> RunStatus:
        """Look at the disk."""
        if self.finished.exists():
            return RunStatus.FINISHED
        return RunStatus.INTERRUPTED if self.config.exists() else RunStatus.NEW

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else that lies in the folder."""
        # The marker goes first: without it, a half-cleared folder counts as unfinished.
        names = ("wandb_id.txt", "ranks.csv", "ranks.png")
        for file in (self.finished, self.config, self.provenance, self.metrics, *(self.path / n for n in names)):
            file.unlink(missing_ok=True)
        for folder in (self.states, self.checkpoint, self.best):
            shutil.rmtree(folder, ignore_errors=True)

    def open(self, config: TrainConfig, *, accept_changes: bool = False) -> RunStatus:
        """Check that ``config`` belongs to this folder, and store it. Returns what was found before.

        Raises:
            ConfigError: if the folder holds a run with another configuration (each differing key is named), or a
                checkpoint that no run of ours wrote.
        """
        status = self.status()
        if status is RunStatus.NEW:
            strangers = [p.name for p in (self.checkpoint, self.states, self.metrics) if p.exists()]
            if strangers:
                raise ConfigError(
                    f"{self.path}: expected an empty folder or a run's, but {', '.join(strangers)} lies there without "
                    "a config.yaml. Choose another run_dir, or add --restart to remove it."
                )
        # A run that was refused before its first step has nothing that another configuration could falsify.
        elif status is RunStatus.FINISHED or self._has_begun():
            self._check_unchanged(config, status, accept_changes)
        if status is not RunStatus.FINISHED:
            make_folder(self.path)
            write_atomically(self.config, dump_config(config))
        return status

    def begin_anew(self, config: TrainConfig) -> None:
        """:meth:`clear`, then :meth:`open`."""
        self.clear()
        self.open(config)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as complete and drop the states it would have continued from."""
        write_atomically(self.finished, json.dumps(dict(summary), indent=2, allow_nan=False) + "\n")
        shutil.rmtree(self.states, ignore_errors=True)

    def read_summary(self) -> dict[str, Any]:
        """What :meth:`finish` stored."""
        return dict(json.loads(self.finished.read_text(encoding="utf-8")))

    def _has_begun(self) -> bool:
        return any(path.exists() for path in (self.metrics, self.states, self.checkpoint, self.best))

    def _check_unchanged(self, config: TrainConfig, status: RunStatus, accept_changes: bool) -> None:
        changed = {
            key: values
            for key, values in load_config(self.config).differences(config).items()
            if not key.startswith(HARMLESS_KEYS)
        }
        if not changed or (accept_changes and status is RunStatus.INTERRUPTED):
            return
        lines = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in changed.items())
        remedy = (
            "Put the values back, choose another run_dir, add --accept-changes to continue with the new ones, or "
            "--restart to begin anew."
            if status is RunStatus.INTERRUPTED
            else "Choose another run_dir, or add --restart to train anew."
        )
        kind = "an interrupted" if status is RunStatus.INTERRUPTED else "a finished"
        raise ConfigError(f"{self.path} holds {kind} run with another configuration:\n{lines}\n{remedy}")


def lock_folder(folder: RunFolder) -> ProcessLock:
    """Keep other commands from training in this folder until the lock is released or the process dies.

    Raises:
        ConfigError: if somebody trains in it already, or it cannot be made or written into.
    """
    make_folder(folder.path)
    try:
        return ProcessLock(folder.path / "training")
    except OSError as error:
        raise ConfigError(
            f"{folder.path}: expected a folder to write into, got: {error.strerror}. Choose another run_dir."
        ) from None
    except AlreadyLockedError as error:
        raise ConfigError(
            f"{folder.path}: training is going on in this folder ({error}). Wait for it, or choose another run_dir."
        ) from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
