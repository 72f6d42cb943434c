"""The EBench-18K release as it is: its names, and how one of its rows is read.

The release is JSON Lines despite ``.json``: ``{train|test}_{v|e|c|yn}.json``, a file for each of quality (v), alignment
(e), preservation (c) and the yes/no question (yn); keys ``query``, ``response``, ``images`` (source, edited). The first
bracket of ``query`` holds the instruction, later ones are hints on the format of the answer. Paths are absolute ones of
the authors' disk; their end says everything else: ``targetimg_h/model00/H_00_04.jpg`` is what editing model 00 made of
source 04 of high-level task 00.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmm4edit.data.manifest import lone_surrogate
from lmm4edit.data.problems import Problem, shown
from lmm4edit.data.rows import Row

Kind = Literal["v", "e", "c", "yn"]

DIMENSION_OF_KIND: dict[str, str] = {"v": "quality", "e": "alignment", "c": "preservation"}
"""Which dimension a file's letter stands for (paper 3.3); ``yn`` holds answers."""

EDITING_MODELS = (
    *("Text2LIVE", "EDICT", "IP2P", "DDPM", "MasaCtrl", "CDS", "Magicbrush", "PnP", "Any2Pix", "InfEdit", "ZONE"),
    *("ReNoise", "HQEdit", "RFSE", "FlowEdit (SD3)", "FlowEdit (FLUX)", "ACE++"),
)
"""Editing models by the release's number (``model00`` ...), named as in the paper's Table 5. The release has no names:
they were recovered by matching the means of Table 5's human columns to 0.01."""

INSTRUCTION_BASED = frozenset({"IP2P", "Magicbrush", "Any2Pix", "ZONE", "HQEdit", "ACE++"})
"""Editing models that were given the instruction; the others were given descriptions (paper, Table 2)."""

EDIT_TASKS: dict[str, str] = {
    "H_00": "add",
    "H_01": "remove",
    "H_02": "replace",
    "H_03": "color",
    "H_04": "texture",
    "H_05": "style",
    "H_06": "action",
    "H_07": "expression",
    "H_08": "weather_season",
    "H_09": "background",
    "H_10": "counting",
    "H_11": "position",
    "H_12": "size",
    "L_00": "deblur",
    "L_01": "denoise",
    "L_02": "derain",
    "L_03": "desnow",
    "L_04": "dehaze",
    "L_05": "low_light_enhancement",
    "L_06": "shadow_removal",
    "L_07": "super_resolution",
}
"""Task by the beginning of a file's name; the names of paper 3.1, assigned by reading the instructions."""

MAX_TEXT = 10_000
"""Characters: a longer instruction is not one."""

_FILE_NAME = re.compile(r"(?:(?P<split>[a-z]+)_)?(?P<kind>v|e|c|yn)\.jsonl?", re.IGNORECASE)
_SPLITS = {None: "all", "all": "all", "train": "train", "test": "test", "val": "validation", "validation": "validation"}
_IMAGE = re.compile(
    r"(?:^|[/\\])(?P<role>source|target)img_(?P<level>[hl])[/\\]model(?P<model>\d{2,3})[/\\]"
    r"(?P<task>[HL]_\d{2})_(?P<index>\d{2,4})\.(?P<suffix>jpe?g|png|webp|bmp)$",
    re.IGNORECASE,
)
_INSTRUCTION_END = re.compile(r"\]\s*,?\s*the source image", re.IGNORECASE)
_SCORE = re.compile(r"(?:.*score is\s+)?([+-]?\d{1,6}(?:\.\d{0,10})?)\s*\.?", re.IGNORECASE | re.DOTALL)
_QUESTION = re.compile(r"target image\s*<image>\s*\.\s*(?P<question>[^\[\]]*\?)", re.IGNORECASE)


@dataclass(frozen=True)
class ReleaseRow:
    """What one line of the release says.

    Attributes:
        line: number of the line.
        source_id: ``"H_00_04"``: a source image is one whichever editing model's folder holds a copy of it.
        model: number of the editing model, 0-16.
        edit_task: one of :data:`EDIT_TASKS`.
        instruction: as released, without space around it.
        source_path, edited_path: relative: ``sourceimg_h/model00/H_00_04.jpg``.
        value: MOS (nominally 0-100) or ``"yes"``/``"no"``.
        question: of a ``yn`` row.
        dropped_zeros: whether the label has fewer than two decimals (``42.3`` for 42.30).
        foreign_path: whether the path was another disk's.
    """

    line: int
    source_id: str
    model: int
    edit_task: str
    instruction: str
    source_path: str
    edited_path: str
    value: float | str
    question: str | None
    dropped_zeros: bool
    foreign_path: bool

    @property
    def editing_model(self) -> str:
        """The editing model's name."""
        return EDITING_MODELS[self.model]

    @property
    def sample_id(self) -> str:
        """Unique in the release: ``H_00_04-model00``."""
        return f"{self.source_id}-model{self.model:02d}"


def file_of_release(name: str) -> tuple[str, Kind] | None:
    """Split (``train``, ``test``, ``validation``, ``all``) and kind of a file, by its name; ``None`` for others."""
    match = _FILE_NAME.fullmatch(name)
    split = _SPLITS.get(match["split"].lower() if match["split"] else None) if match else None
    return (split, match["kind"].lower()) if match and split else None  # type: ignore[return-value]


def read_release_row(row: Row, file: str, kind: Kind) -> ReleaseRow | Problem:
    """Read one line; what is wrong with it otherwise (the first thing found)."""
    if row.problem is not None:
        return row.problem
    try:
        return _read(row, kind)
    except _BadCellError as error:
        return Problem(file, row.number, error.field, error.expected, error.got, error.remedy, "bad_value")


class _BadCellError(Exception):
    def __init__(self, field: str, expected: str, got: str, remedy: str = "Repair the line, or remove it.") -> None:
        super().__init__(expected)
        self.field, self.expected, self.got, self.remedy = field, expected, got, remedy


def _read(row: Row, kind: Kind) -> ReleaseRow:
    query = _text(row.values, "query")
    images = row.values.get("images")
    if not isinstance(images, list) or len(images) != 2 or not all(isinstance(image, str) for image in images):
        raise _BadCellError("images", "two paths, the source's and the edited image's", shown(images))
    source, edited = (_image(path, role) for path, role in zip(images, ("source", "target"), strict=True))
    for part in ("model", "task", "index"):
        if source[part].upper() != edited[part].upper():
            got = f"{shown(images[0], 100)} and {shown(images[1], 100)}"
            raise _BadCellError("images", "two images of one edit", got)
    model, task = int(edited["model"]), edited["task"].upper()
    if model >= len(EDITING_MODELS):
        expected = f"a model from model00 to model{len(EDITING_MODELS) - 1}"
        remedy = "The names of the editing models are known for these alone."
        raise _BadCellError("images", expected, f"model{edited['model']}", remedy)
    if task not in EDIT_TASKS:
        raise _BadCellError("images", "a task H_00 to H_12 or L_00 to L_07", task)
    value, dropped = _answer(row.values) if kind == "yn" else _score(row.values)
    return ReleaseRow(
        line=row.number,
        source_id=f"{task}_{edited['index']}",
        model=model,
        edit_task=EDIT_TASKS[task],
        instruction=_instruction(query),
        source_path=_relative(source),
        edited_path=_relative(edited),
        value=value,
        question=_question(query) if kind == "yn" else None,
        dropped_zeros=dropped,
        foreign_path=any(image.startswith(("/", "\\")) or image[1:2] == ":" for image in images),
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str) or not text.strip():
        raise _BadCellError(name, "a text", "nothing" if name not in values else shown(text))
    if "\0" in text:
        raise _BadCellError(name, "a text without NUL bytes", shown(text))
    if broken := lone_surrogate(text):
        raise _BadCellError(name, "whole characters", f"half of one, {broken}")
    return text


def _image(path: str, role: str) -> dict[str, str]:
    # Only the end of the path is used, so that no path can lead out of the image root.
    match = _IMAGE.search(path) if "\0" not in path else None
    if match is None or match["role"].lower() != role or match["level"].upper() != match["task"][0].upper():
        expected = f".../{role}img_{{h|l}}/modelNN/{{H|L}}_TASK_INDEX.jpg"
        raise _BadCellError("images", expected, shown(path, 120), "The path's end says which edit it is: restore it.")
    return match.groupdict()


def _relative(parts: Mapping[str, str]) -> str:
    folder = f"{parts['role'].lower()}img_{parts['level'].lower()}/model{parts['model']}"
    return f"{folder}/{parts['task'].upper()}_{parts['index']}.{parts['suffix']}"


def _instruction(query: str) -> str:
    start = query.find("[") + 1
    end = _INSTRUCTION_END.search(query, start)
    stop = end.start() if end else _closing(query, start)
    instruction = query[start:stop].strip() if start and stop > start else ""
    if not instruction:
        raise _BadCellError("query", "the instruction in the first pair of square brackets", shown(query, 120))
    if len(instruction) > MAX_TEXT:
        raise _BadCellError("query", f"an instruction of at most {MAX_TEXT} characters", f"{len(instruction)}")
    return instruction


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens before ``start`` is closed, inner pairs aside; -1 if nowhere."""
    depth = 1
    for place, character in enumerate(text[start:], start):
        depth += (character == "[") - (character == "]")
        if depth == 0:
            return place
    return -1


def _score(values: Mapping[str, Any]) -> tuple[float, bool]:
    response = values.get("response")
    if isinstance(response, int | float) and not isinstance(response, bool):
        response = repr(response)
    match = _SCORE.fullmatch(response.strip()) if isinstance(response, str) else None
    if match is None:
        got = "nothing" if "response" not in values else shown(response)
        raise _BadCellError("response", "'The quality score is XX.XX'", got)
    return float(match[1]), len(match[1].partition(".")[2]) < 2


def _answer(values: Mapping[str, Any]) -> tuple[str, bool]:
    response = values.get("response")
    word = response.strip().rstrip(".").strip("[]").lower() if isinstance(response, str) else None
    if word not in ("yes", "no"):
        got = "nothing" if "response" not in values else shown(response)
        raise _BadCellError("response", "'Yes' or 'No'", got)
    return word, False


def _question(query: str) -> str:
    match = _QUESTION.search(query)
    if match is None:
        raise _BadCellError("query", "a question after 'the target image <image>.'", shown(query, 120))
    return match["question"].strip()
