"""One JSON value per line, as bytes: what manifests, predictions and logs are written in.

Lines end with ``\\n`` alone: the Unicode separators that ``str.splitlines`` also splits at may stand inside a text.
"""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """An object gives one key twice, of which JSON readers would silently keep the last."""


def encode_line(value: object) -> bytes:
    """The line of one value, with its line end.

    Raises:
        ValueError: if a number is NaN or infinite, which is not JSON.
        TypeError: if the value has no form in JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair (a file name that is no UTF-8, a cut-off answer) has no UTF-8, but an escape.
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def decode_line(text: str) -> Any:
    """The value of one line.

    Raises:
        DuplicateKeyError: if an object gives a key twice.
        ValueError: if the line is no JSON; the message says what is wrong and where in the line.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {twice!r} stands twice")
    return values
