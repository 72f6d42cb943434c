"""YAML files that are checked whole: strict reading, ``key.sub=value`` overrides, and errors told by key path."""

from __future__ import annotations

import difflib
import reprlib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lmm4edit.errors import ConfigError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a file of keys and values.

    Raises:
        ConfigError: if it cannot be read, is no YAML, gives a key twice (YAML would silently take the last), or holds
            something else than keys and values.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}. Check the path.") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not readable as YAML: {getattr(error, 'problem', None) or error}.") from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path}: expected keys and values, got {found}.")
    return values


def apply_override(values: dict[str, Any], text: str) -> str | None:
    """Set one value in nested ``values``; returns what is wrong with ``text``, or ``None``.

    Args:
        values: changed in place.
        text: ``key.sub=value``; the value is read as YAML.
    """
    path, equals, raw = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"override {text!r}: expected key.sub=value, such as optimizer.learning_rate=1e-4."
    try:
        value = yaml.load(raw, Loader=_StrictLoader)
    except yaml.YAMLError:
        return f"override {text!r}: the value {raw!r} is not readable as YAML. Quote it."
    target = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = target.setdefault(key, {})
        if inner is None:
            inner = target[key] = {}
        if not isinstance(inner, dict):
            return f"override {text!r}: {'.'.join(keys[:depth])} is the value {inner!r} and has no keys in it."
        target = inner
    target[keys[-1]] = value
    return None


def describe_errors(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each problem: key path, what was expected, what came, and the near name of an unknown key."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        got = "" if isinstance(item["input"], dict) else f", got {_shown(item['input'])}"
        if item["type"] == "extra_forbidden":
            known = _keys_at(model, item["loc"][:-1])
            lines.append(f"{path}: unknown key.{near_name(str(item['loc'][-1]), known)}")
        elif item["type"] == "missing":
            lines.append(f"{path}: required, but missing.")
        elif item["type"] == "literal_error":
            expected = item["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
            near = near_name(str(item["input"]), expected, or_all=False)
            lines.append(f"{path}: expected one of {', '.join(expected)}{got}.{near}")
        elif item["type"] in ("model_type", "dict_type"):
            lines.append(f"{path}: expected keys and values, got {_shown(item['input'])}.")
        elif item["type"] == "value_error":
            lines.append(f"{path}: {item['ctx']['error']}")
        else:
            message = item["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
            lines.append(f"{path}: expected {message}{got}.")
    return lines


def config_error(origin: str, problems: Iterable[str]) -> ConfigError:
    """All problems of one file as one error."""
    listed = list(problems)
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    return ConfigError(f"{origin}: {count} in the configuration:\n" + "\n".join(f"  {line}" for line in listed))


def near_name(name: str, known: Iterable[str], or_all: bool = True) -> str:
    """`` Did you mean 'x'?`` with the nearest of ``known``; where none is near, all of them or nothing."""
    choices = [str(choice) for choice in known]
    near = difflib.get_close_matches(name, choices, n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(choices)}." if choices and or_all else ""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the keys that may stand at a path of nested models."""
    current: type[BaseModel] | None = model
    users_own = False  # the next part is a key of a dictionary
    for part in path:
        if isinstance(part, int) or users_own:
            users_own = False
            continue
        field = current.model_fields.get(part) if current else None
        users_own = field is not None and typing.get_origin(field.annotation) is dict
        current = _model_in(field.annotation) if field else None
    return list(current.model_fields) if current else []


def _shown(value: Any) -> str:
    """A value on one line, cut: aliases of YAML can make one that would not fit in memory."""
    cut = reprlib.Repr()
    cut.maxlevel, cut.maxstring, cut.maxother = 3, 200, 200
    return cut.repr(value)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as ``Annotated[list[Model], ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
