"""Where a judge lies. Loads no torch, so that a misspelt path is answered at once."""

from __future__ import annotations

from pathlib import Path

from lmm4edit.errors import CheckpointError
from lmm4edit.shipped import shipped_path

TINY = "tiny"
"""Name of the judge that comes with LMM4Edit: a demonstration trained on simulated ratings."""


def judge_folder(path_or_name: str | Path) -> Path:
    """The folder of a judge: a path, or :data:`TINY` for the one that comes with LMM4Edit.

    Raises:
        CheckpointError: if there is no such folder.
    """
    if str(path_or_name) == TINY and not Path(TINY).is_dir():
        return shipped_path("checkpoints/tiny/judge")
    folder = Path(path_or_name)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such judge. Expected the folder of a checkpoint (for example "
            f"runs/demo/stage2/checkpoint), or {TINY!r} for the demonstration judge that comes with LMM4Edit."
        )
    return folder
