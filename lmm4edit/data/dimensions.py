"""Files of user-defined dimensions: the same list as ``dimensions:`` of a training configuration, in a file of its own.

.. code-block:: yaml

    dimensions:
      - quality # a built-in one, by name
      - name: realism
        question: Rate the realism.
        definition: "Realism: whether the edited image could be a photograph."
        low: 0
        high: 100
        higher_is_better: true

A file ``dimensions.yaml`` beside a manifest describes that manifest: imports write it, and reading the manifest takes
its ``mos_<name>`` columns as known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError

from lmm4edit.config import DimensionSection, Section
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension
from lmm4edit.validated_yaml import config_error, describe_errors, near_name, read_yaml

DIMENSIONS_FILE = "dimensions.yaml"
"""Name under which imports write the dimensions of the manifests beside it."""


def _by_name(value: Any) -> Any:
    known = {dimension.name: asdict(dimension) for dimension in BUILT_IN_DIMENSIONS}
    if not isinstance(value, str):
        return value
    if value in known:
        return known[value]
    raise ValueError(
        f"expected a built-in dimension or a definition with name and question, got {value!r}.{near_name(value, known)}"
    )


DimensionEntry = Annotated[DimensionSection, BeforeValidator(_by_name)]
"""One entry of a list of dimensions: a built-in name, or a definition."""


class _DimensionsFile(Section):
    dimensions: Annotated[list[DimensionEntry], Field(min_length=1)]


def load_dimensions(path: str | Path) -> tuple[Dimension, ...]:
    """Read a file of dimensions, in its order.

    Raises:
        ConfigError: if it cannot be read, a key is unknown, a range is empty, or a name stands twice; all problems
            together, each by its key.
    """
    try:
        entries = _DimensionsFile.model_validate(read_yaml(path)).dimensions
    except ValidationError as error:
        raise config_error(str(path), describe_errors(error, _DimensionsFile)) from None
    if repeated := repeated_names(entry.name for entry in entries):
        raise config_error(str(path), [f"dimensions: each may stand once, repeated: {', '.join(repeated)}."])
    return tuple(entry.build() for entry in entries)


def write_dimensions(path: str | Path, dimensions: Sequence[Dimension]) -> None:
    """Write a file that :func:`load_dimensions` reads as the same dimensions."""
    entries = [asdict(dimension) for dimension in dimensions]
    text = yaml.safe_dump({"dimensions": entries}, sort_keys=False, allow_unicode=True, width=10_000)
    Path(path).write_text(text, encoding="utf-8")


def dimensions_of_manifest(manifest: str | Path) -> tuple[Dimension, ...]:
    """The dimensions of a manifest: the built-in ones, and those of the ``dimensions.yaml`` beside it.

    Raises:
        ConfigError: if there is such a file and it is wrong.
    """
    path = Path(manifest)
    beside = (path if path.is_dir() else path.parent) / DIMENSIONS_FILE
    return merge_dimensions(BUILT_IN_DIMENSIONS, load_dimensions(beside)) if beside.is_file() else BUILT_IN_DIMENSIONS


def merge_dimensions(*several: Iterable[Dimension]) -> tuple[Dimension, ...]:
    """All dimensions in order of first appearance; of one name the last definition counts."""
    by_name = {dimension.name: dimension for dimensions in several for dimension in dimensions}
    return tuple(by_name.values())


def repeated_names(names: Iterable[str]) -> list[str]:
    """Names that stand more than once, sorted."""
    listed = list(names)
    return sorted({name for name in listed if listed.count(name) > 1})
