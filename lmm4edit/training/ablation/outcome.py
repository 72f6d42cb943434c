"""What came of one row with one seed: a small JSON file in its folder, and all of them in ``results.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmm4edit.errors import StoreError
from lmm4edit.json_lines import encode_line
from lmm4edit.training.run_folder import write_atomically

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Measured:
    """One statistic.

    Attributes:
        value: ``None`` comes with a reason.
        n_expected, n_scored: edits with an opinion, and those of them with a prediction.
        reason: why there is no value.
    """

    value: float | None
    n_expected: int
    n_scored: int
    reason: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        row, seed: which.
        status: ``done`` or ``failed``; a failed run is tried again by the next call.
        reason: why it failed.
        measured: target (a dimension, or ``answer``) -> statistic -> value.
        simulated: why the ratings are not people's, or ``None``.
        seconds: of each phase of the call that ended it; a phase that an earlier call had finished is left out.
        settings: resolved configurations of both stages, and the benchmark.
        provenance: versions, commit, machine.
    """

    row: str
    seed: int
    status: Literal["done", "failed"]
    reason: str | None = None
    measured: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    simulated: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def find(self, target: str, statistic: str) -> Measured | None:
        """A statistic, or ``None`` if it was not computed."""
        return self.measured.get(target, {}).get(statistic)


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write ``result.json`` (whole or not at all)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RESULT_FILE, json.dumps(asdict(outcome), indent=1, allow_nan=False) + "\n")


def read_outcome(folder: Path) -> Outcome | None:
    """Read ``result.json``; ``None`` if the run has not ended yet.

    Raises:
        StoreError: if the file is damaged.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = {
            target: {name: Measured(**value) for name, value in statistics.items()}
            for target, statistics in content.pop("measured").items()
        }
        return Outcome(**content, measured=measured)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path}: expected what came of a run, got something unreadable ({error}). Remove the file: the same "
            "command evaluates the run again."
        ) from None


def write_results(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write ``results.jsonl``: one line a run."""
    write_atomically(path, b"".join(encode_line(asdict(outcome)) for outcome in outcomes).decode())
