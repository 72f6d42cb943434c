"""Making a folder that results go to."""

from __future__ import annotations

from pathlib import Path

from lmm4edit.errors import ConfigError


def make_folder(folder: str | Path) -> Path:
    """Make a folder with all above it; one that is there already is fine.

    Raises:
        ConfigError: if it cannot be made, with the reason.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{folder}: expected a folder to write into, got: {reason}. Choose another place.") from None
    return folder
