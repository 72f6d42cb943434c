"""Where the numbers of a run go: ``metrics.jsonl`` always, Weights & Biases if switched on."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmm4edit.config import TrainConfig, WandbSection
from lmm4edit.errors import ConfigError
from lmm4edit.json_lines import decode_line, encode_line


class MetricsLog:
    """Appends rows to ``metrics.jsonl``; every row is on disk before the next step begins.

    Args:
        path: the file.
        resume_after: on resume, rows of later steps are dropped, since those steps are taken again.
    """

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= resume_after] if resume_after is not None else []
        path.parent.mkdir(parents=True, exist_ok=True)
        # A rewrite by renaming: a kill in between leaves the longer file, which the next resume shortens again.
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(b"".join(encode_line(row) for row in kept))
        os.replace(temporary, path)
        self._file = open(path, "ab")  # noqa: SIM115 (lives as long as the run)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Infinite and undefined numbers are refused."""
        self._file.write(encode_line(dict(row)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbRun:
    """Mirrors numeric values to Weights & Biases. The library is loaded here and nowhere else.

    Raises:
        ConfigError: if wandb is not installed.
    """

    def __init__(self, section: WandbSection, config: TrainConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "wandb.enabled: the package wandb is not installed. Install lmm4edit[train], or set "
                "wandb.enabled: false."
            ) from None
        id_file = folder / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._run = wandb.init(
            project=section.project,
            name=section.name or folder.name,
            mode=section.mode,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Log a row's numbers under its kind, at its step."""
        numbers = {
            f"{row['kind']}/{key}": value
            for key, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
        }
        self._run.log(numbers, step=row["step"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Tracker:
    """All places that rows go to."""

    def __init__(self, config: TrainConfig, folder: Path, resume_after: int | None = None) -> None:
        self._places: list[MetricsLog | WandbRun] = [MetricsLog(folder / "metrics.jsonl", resume_after)]
        if config.wandb.enabled:
            self._places.append(WandbRun(config.wandb, config, folder))

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row everywhere."""
        for place in self._places:
            place.write(row)

    def close(self) -> None:
        """Close everything."""
        for place in self._places:
            place.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``; a torn last line, left by a kill, is no row."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [decode_line(line) for line in lines[:-1]]
