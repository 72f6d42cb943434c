"""Mappings: a YAML file that says which column of somebody's table is what in a manifest.

No code and no format strings: a template holds ``{column}`` and nothing else between braces, and a column is looked up
by its literal name. Every key is checked before the table is opened (see ``docs/data.md`` for examples).
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from lmm4edit.config import Number, Section
from lmm4edit.data.dimensions import DimensionEntry, merge_dimensions, repeated_names
from lmm4edit.data.manifest import LABEL_COLUMNS, REQUIRED_COLUMNS, TEXT_COLUMNS
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension
from lmm4edit.validated_yaml import config_error, describe_errors, near_name, read_yaml

FIELDS = (*REQUIRED_COLUMNS, *LABEL_COLUMNS, *TEXT_COLUMNS, "prompt_type")
"""What a mapping can fill, beside ``group_<name>``, ``scores`` and ``answer``."""

IMAGE_FIELDS = ("source_image", "edited_image")

MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Cells that count as missing by default, in any case."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class ScoreSource(Section):
    """Where a dimension's scores stand, and on which scale.

    Attributes:
        column: of the table.
        low, high: ends of the scale that the cells are on.
        higher_is_better: direction of that scale; ``false`` for DMOS and other scales of impairment.
        outside: what to do with a number beyond the ends: ``refuse`` (a bad cell), or ``keep`` (convert it all the
            same, for MOS that may leave its range).
    """

    column: Annotated[str, Field(min_length=1)]
    low: Number = 0.0
    high: Number = 100.0
    higher_is_better: bool = True
    outside: Literal["refuse", "keep"] = "refuse"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError(
                f"expected low < high, got low {self.low:g} and high {self.high:g}. Where a smaller number is better, "
                "keep low < high and set higher_is_better: false."
            )
        return self

    def convert(self, value: float, dimension: Dimension) -> float:
        """A number of this scale on the dimension's; see :meth:`formula`."""
        share = (value - self.low) / (self.high - self.low)
        if self.higher_is_better != dimension.higher_is_better:
            share = 1 - share
        return dimension.low + share * (dimension.high - dimension.low)

    def formula(self, dimension: Dimension) -> str:
        """``mos_quality = 0 + (mos - 1) / (5 - 1) * (100 - 0)``: how a score comes from its column."""
        turned = self.higher_is_better != dimension.higher_is_better
        above = f"({self.high:g} - {self.column})" if turned else f"({self.column} - {self.low:g})"
        span = f"({self.high:g} - {self.low:g})"
        reach = f"({dimension.high:g} - {dimension.low:g})"
        smaller = f"mos_{dimension.name}" if self.higher_is_better else self.column
        why = f"; turned round, because a smaller {smaller} is better" if turned else ""
        return f"mos_{dimension.name} = {dimension.low:g} + {above} / {span} * {reach}{why}"


class AnswerSource(Section):
    """Where the answers to yes/no questions stand.

    Attributes:
        column: of the table.
        yes_values, no_values: cells that mean yes or no, in any case; ``true`` also stands for a boolean's text.
    """

    column: Annotated[str, Field(min_length=1)]
    yes_values: Annotated[list[str | bool | int | float], Field(min_length=1)] = ["yes", True, 1]
    no_values: Annotated[list[str | bool | int | float], Field(min_length=1)] = ["no", False, 0]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if both := _spellings(self.yes_values) & _spellings(self.no_values):
            raise ValueError(f"expected every value on one side, got {', '.join(sorted(both))} on both.")
        return self

    def read(self, value: object) -> str | None:
        """``"yes"``, ``"no"``, or ``None`` if the cell is neither."""
        spelt = _spellings([value])
        if spelt & _spellings(self.yes_values):
            return "yes"
        return "no" if spelt & _spellings(self.no_values) else None


class TableMapping(Section):
    """What is what in a table.

    Attributes:
        columns: field of the manifest -> column of the table.
        constants: field -> one text for all rows.
        templates: field -> text with ``{column}`` in it (``{{`` and ``}}`` are braces).
        scores: dimension -> where its scores stand.
        dimensions: of the user's own: definitions with ``name`` and ``question``.
        answer: where answers stand; needs a ``question`` among the fields.
        missing: cells that count as missing, in any case; blank cells always do.
        strip_prefix: taken off the beginning of image paths (``/data/of/the/authors/``).
    """

    columns: dict[str, str] = {}
    constants: dict[str, str | int] = {}
    templates: dict[str, str] = {}
    scores: dict[str, ScoreSource] = {}
    dimensions: list[DimensionEntry] = []
    answer: AnswerSource | None = None
    missing: list[str | int | float | bool] = list(MISSING)
    strip_prefix: str | None = None

    @field_validator("columns", "constants", "templates")
    @classmethod
    def _known_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            is_group = name.startswith("group_") and name not in ("group_", "group_split")
            if name not in FIELDS and not is_group:
                if name.startswith("mos_"):
                    raise ValueError(f"{name}: scores are mapped under scores, as {name.removeprefix('mos_')}.")
                if name == "answer":
                    raise ValueError("answer: answers are mapped under answer, with column, yes_values and no_values.")
                near = near_name(name, FIELDS)
                raise ValueError(f"{name}: expected a column of manifests, or group_<name> for a label.{near}")
        return value

    @field_validator("templates")
    @classmethod
    def _plain_templates(cls, value: dict[str, str]) -> dict[str, str]:
        for name, template in value.items():
            for match in _PLACEHOLDER.finditer(template):
                inner = match[1]
                if match[0] in ("{{", "}}"):
                    continue
                if inner is None:
                    raise ValueError(f"{name}: expected every brace closed, got {template!r}. Write {{{{ for a brace.")
                if not inner.strip() or re.search(r"[.\[\]!:]", inner):
                    raise ValueError(
                        f"{name}: expected the name of a column between braces, got {{{inner}}}. A template takes no "
                        "attributes, indices, conversions or formats."
                    )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [*self.columns, *self.constants, *self.templates]
        if twice := repeated_names(given):
            raise ValueError(
                f"each field may be filled once, given more than once in columns, constants and templates: "
                f"{', '.join(twice)}."
            )
        if lacking := [name for name in REQUIRED_COLUMNS if name not in given and name != "sample_id"]:
            raise ValueError(
                f"{', '.join(lacking)}: required, but missing. Fill each under columns, constants or templates."
            )
        if self.answer is not None and "question" not in given:
            raise ValueError("answer: expected a question beside it. Fill question under columns or constants.")
        if repeated := repeated_names(entry.name for entry in self.dimensions):
            raise ValueError(f"dimensions: each may stand once, repeated: {', '.join(repeated)}.")
        known = [dimension.name for dimension in self.all_dimensions()]
        for name in self.scores:
            if name not in known:
                near = near_name(name, known)
                raise ValueError(f"scores.{name}: expected a dimension, built-in or defined under dimensions.{near}")
        return self

    def all_dimensions(self) -> tuple[Dimension, ...]:
        """The built-in dimensions and the user's own."""
        return merge_dimensions(BUILT_IN_DIMENSIONS, (entry.build() for entry in self.dimensions))

    def used_columns(self) -> dict[str, str]:
        """Column of the table -> key of the mapping that reads it."""
        used = {column: f"columns.{name}" for name, column in self.columns.items()}
        used |= {column: f"templates.{name}" for name, text in self.templates.items() for column in placeholders(text)}
        used |= {source.column: f"scores.{name}.column" for name, source in self.scores.items()}
        return used | ({self.answer.column: "answer.column"} if self.answer else {})

    def is_missing(self, value: object) -> bool:
        """Whether a cell says that there is no value."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return True
        return value != value or bool(_spellings([value]) & _spellings(self.missing))


@dataclass(frozen=True)
class Filled:
    """A template filled with a row's cells; ``text`` is ``None`` if a cell is missing, and ``missing`` names it."""

    text: str | None
    missing: str | None = None


def load_mapping(path: str | Path) -> TableMapping:
    """Read and check a mapping.

    Raises:
        ConfigError: if it cannot be read or anything is wrong with it; each problem by its key.
    """
    try:
        return TableMapping.model_validate(read_yaml(path))
    except ValidationError as error:
        raise config_error(str(path), describe_errors(error, TableMapping)) from None


def placeholders(template: str) -> list[str]:
    """Columns that a template names, in order."""
    return [match[1] for match in _PLACEHOLDER.finditer(template) if match[1] is not None]


def fill(template: str, values: MappingType[str, Any], mapping: TableMapping) -> Filled:
    """Put a row's cells in a template. What a cell holds is text, also where it holds braces."""
    pieces, end = [], 0
    for match in _PLACEHOLDER.finditer(template):
        pieces.append(template[end : match.start()])
        end = match.end()
        if match[1] is None:
            pieces.append(match[0][0])
            continue
        value = values.get(match[1])
        if mapping.is_missing(value):
            return Filled(None, match[1])
        pieces.append(cell_text(value))
    return Filled("".join([*pieces, template[end:]]))


def cell_text(value: object) -> str:
    """A cell as text; whole floats as whole numbers (Parquet turns a column of ids with gaps into floats)."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def looks_like_formula(text: str) -> bool:
    """Whether a spreadsheet would run the text as a formula. We keep it: it may be an instruction."""
    return text.lstrip()[:1] in ("=", "+", "-", "@")


def _spellings(values: list[Any]) -> set[str]:
    """How cells may be spelt; YAML reads ``yes`` and ``no`` as booleans, so those stand for their words too."""
    spelt = set()
    for value in values:
        if isinstance(value, bool):
            spelt |= {"true", "yes"} if value else {"false", "no"}
        elif isinstance(value, int | float):
            spelt.add(f"{value:g}")
        else:
            spelt.add(str(value).strip().lower())
    return spelt
