"""The format of the predictions file: JSON Lines, read and written line by line.

The first line is the header: format, settings (what decides the values) with their fingerprint, provenance. Then one
prediction a line, and, for every continuation, one line with the provenance of the process that continued::

    {"format": "lmm4edit-predictions", "format_version": 1, "fingerprint": ..., "settings": {...}, "provenance": {...}}
    {"item_id": "remove-01", "predictor": "ssim", "target": "score", "value": 0.93}
    {"item_id": "remove-02", "predictor": "ssim", "target": "score", "value": null, "failure": "..."}

A value is a number, a word, a list of words (a tuple in Python), or null with a failure. A later line may replace a
*failure* with the same key, so that a run can be repeated for what failed; anything else given twice is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from lmm4edit.errors import StoreError
from lmm4edit.json_lines import decode_line, encode_line
from lmm4edit.provenance import fingerprint, jsonable
from lmm4edit.records import Prediction, Value

FORMAT = "lmm4edit-predictions"
FORMAT_VERSION = 1


class PredictionKey(NamedTuple):
    """What there may be one prediction of. ``setting`` holds sorted pairs."""

    item_id: str
    predictor: str
    target: str
    setting: tuple[tuple[str, str], ...] = ()
    repeat: int = 0


@dataclass(frozen=True)
class StoreHeader:
    """The head of a predictions file.

    Attributes:
        settings: what decides the values: manifest, judge, prompts, sizes.
        fingerprint: SHA-256 of the settings.
        provenance: of the process that began the file.
        continued: provenance of each process that continued it.
    """

    settings: dict[str, Any]
    fingerprint: str
    provenance: dict[str, Any]
    continued: tuple[dict[str, Any], ...] = ()


class StoredPredictions(NamedTuple):
    """Content of a predictions file; ``torn`` is True if its last line was cut off and is not among them."""

    header: StoreHeader
    predictions: list[Prediction]
    torn: bool = False


def key_of(prediction: Prediction) -> PredictionKey:
    """The key under which a prediction is stored."""
    return PredictionKey(
        prediction.item_id,
        prediction.predictor,
        prediction.target,
        tuple(sorted(prediction.setting.items())),
        prediction.repeat,
    )


def read_predictions(path: str | Path) -> StoredPredictions:
    """Read a predictions file, also while another process appends to it.

    Returns:
        header, predictions in the order of their keys' first lines (a replaced failure gives its replacement), and
        whether the last line was cut off.

    Raises:
        StoreError: if there is no such file, it is no predictions file, or a line other than the last is damaged.
    """
    content = read_file(Path(path))
    return StoredPredictions(content.header, content.predictions, content.torn_bytes > 0)


@dataclass(frozen=True)
class FileContent:
    """What stands in a file of ``size`` bytes, the last ``torn_bytes`` of which are a line without its end."""

    header: StoreHeader
    predictions: list[Prediction]
    size: int
    torn_bytes: int


def read_file(path: Path) -> FileContent:
    """Read a file whole; a last line without its end is counted, not read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: expected a predictions file, but it cannot be read: {error.strerror}.") from None
    end = data.rfind(b"\n") + 1
    lines = data[:end].split(b"\n")[:-1]
    header = _parse_header(path, lines[0] if lines else data, complete=bool(lines))
    continued: list[dict[str, Any]] = []
    found: dict[PredictionKey, Prediction] = {}
    for number, line in enumerate(lines[1:], start=2):
        values = _parse_line(path, number, line)
        if set(values) == {"continued"}:
            continued.append(values["continued"])
            continue
        prediction = _parse_prediction(path, number, values)
        key = key_of(prediction)
        if key in found and found[key].value is not None:
            raise StoreError(
                f"{path}:{number}: expected one prediction for each key, got a second one for {show_key(key)}. "
                "Two files were joined, or the file was edited: remove one of the lines."
            )
        found[key] = prediction
    header = StoreHeader(header.settings, header.fingerprint, header.provenance, tuple(continued))
    return FileContent(header, list(found.values()), len(data), len(data) - end)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = decode_line(line.decode())
    except ValueError as error:
        raise StoreError(
            f"{path}:{number}: expected one JSON object on the line, got {_excerpt(line)}: {error}. "
            "Only the last line can be torn by an interruption, so the file was changed or the disk damaged it: "
            "restore the file, or delete this line to compute its prediction again."
        ) from None
    if not isinstance(values, dict):
        raise StoreError(f"{path}:{number}: expected one JSON object on the line, got {_excerpt(line)}.")
    return values


def _parse_header(path: Path, line: bytes, complete: bool) -> StoreHeader:
    advice = "Give the path of a predictions file, or of one that does not exist yet."
    try:
        values = decode_line(line.decode())
    except ValueError:
        values = None
    if not complete or not isinstance(values, dict) or values.get("format") != FORMAT:
        raise StoreError(f"{path}:1: expected the header of a predictions file, got {_excerpt(line)}. {advice}")
    if values.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{path}:1: expected format_version {FORMAT_VERSION}, got {values.get('format_version')!r}. "
            "Read the file with the LMM4Edit version that wrote it, or begin a new one."
        )
    try:
        header = StoreHeader(values["settings"], values["fingerprint"], values["provenance"])
    except KeyError as error:
        raise StoreError(f"{path}:1: the header lacks {error}. {advice}") from None
    if header.fingerprint != fingerprint(header.settings):
        raise StoreError(f"{path}:1: the settings do not have their fingerprint: the header was edited. Restore it.")
    return header


def _parse_prediction(path: Path, number: int, values: dict[str, Any]) -> Prediction:
    required, optional = {"item_id", "predictor", "target", "value"}, {"raw_answer", "failure", "setting", "repeat"}
    if not required <= set(values) <= required | optional:
        problem = [f"no {key}" for key in sorted(required - set(values))]
        problem += [f"unknown {key}" for key in sorted(set(values) - required - optional)]
        raise StoreError(f"{path}:{number}: expected the keys of a prediction, got {', '.join(problem)}.")
    value = values["value"]
    if isinstance(value, list):
        value = tuple(value)
    try:
        return Prediction(**{**values, "value": _checked_value(value)})
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}:{number}: {error}") from None


def prediction_line(path: Path, prediction: Prediction) -> bytes:
    """The line of one prediction. Raises :class:`StoreError` if its value is none that the record allows."""
    where = f"{path}: prediction {prediction.item_id!r} of {prediction.predictor!r} for {prediction.target!r}"
    try:
        value = _checked_value(prediction.value)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where}: {error}") from None
    for name, text in (("setting", prediction.setting), ("item_id", {"": prediction.item_id})):
        if any(not isinstance(part, str) for pair in text.items() for part in pair):
            raise StoreError(f"{where}: expected text in {name}, got {getattr(prediction, name)!r}.")
    values: dict[str, Any] = {
        "item_id": prediction.item_id,
        "predictor": prediction.predictor,
        "target": prediction.target,
        "value": value,
    }
    if prediction.raw_answer is not None:
        values["raw_answer"] = prediction.raw_answer
    if prediction.failure is not None:
        values["failure"] = prediction.failure
    if prediction.setting:
        values["setting"] = dict(prediction.setting)
    if prediction.repeat:
        values["repeat"] = prediction.repeat
    return encode_line(values)


def _checked_value(value: object) -> Value:
    """The value as the record holds it; NumPy numbers become floats."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple) and all(isinstance(word, str) for word in value):
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"expected a finite number, got {number}. Store None, and the reason as failure.")
        return number
    raise TypeError(f"expected a number, a word, a tuple of words or None as value, got {value!r}.")


def header_line(settings: Mapping[str, object], provenance: Mapping[str, object]) -> bytes:
    """The first line of a file."""
    return encode_line(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint(settings),
            "settings": jsonable(settings),
            "provenance": jsonable(provenance),
        }
    )


def show_key(key: PredictionKey) -> str:
    """A key as it stands in messages."""
    extra = [f"{name}={text}" for name, text in key.setting] + ([f"repeat {key.repeat}"] if key.repeat else [])
    return ", ".join([f"item {key.item_id!r}", f"predictor {key.predictor!r}", f"target {key.target!r}", *extra])


def _excerpt(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
