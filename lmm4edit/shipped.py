"""Where the files that come with LMM4Edit lie: in the repository's root, or inside the installed package."""

from __future__ import annotations

from pathlib import Path

from lmm4edit.errors import ConfigError


def shipped_path(relative: str) -> Path:
    """Path of a shipped file or folder, such as ``checkpoints/tiny/backbone`` or ``configs/tiny/stage1.yaml``.

    Raises:
        ConfigError: if this installation does not have it.
    """
    package = Path(__file__).resolve().parent
    for root in (package.parent, package / "shipped"):
        path = root / relative
        if path.exists():
            return path
    raise ConfigError(
        f"{relative} was not found beside the package ({package.parent}) or inside it ({package / 'shipped'}). "
        "Reinstall LMM4Edit, or run from a clone of the repository."
    )
