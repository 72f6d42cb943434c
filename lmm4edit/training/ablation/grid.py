"""The grid of an ablation: one YAML file of rows, each a change of two training configurations. No torch here.

Every row becomes a stage 1 and a stage 2 for each seed, validated whole before anything starts. What a row is (which
parts are trained, by which adapter, on which backbone) is read from its resolved configuration, never stated beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from lmm4edit.config import Section, TrainConfig, Whole, build_config
from lmm4edit.errors import ConfigError
from lmm4edit.provenance import file_sha256, fingerprint, jsonable
from lmm4edit.training.run_folder import HARMLESS_KEYS, write_atomically
from lmm4edit.validated_yaml import apply_override, config_error, describe_errors, flatten, near_name, read_yaml

FORMAT_VERSION = 1
GRID_FILE = "grid.json"

OWN_KEYS = ("run_dir", "seed", "init_from", "stage")
"""Keys of a training configuration that the grid sets itself."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def _dotted(value: Any) -> Any:
    """Changes as ``section.key: value``; nested sections are the same thing."""
    return flatten(value) if isinstance(value, Mapping) else value


class RowSection(Section):
    """One row of the table.

    Attributes:
        name: folder and name on the command line: lower-case letters, digits, ``-`` and ``_``.
        label: what the table calls it; ``None``: the name.
        paper_row: number of the row in the paper's Table 6 (1 to 8) that it repeats; ``None``: a row of ours.
        both, stage1, stage2: changes over the base configurations, ``section.key: value``.
    """

    name: str
    label: str | None = None
    paper_row: Annotated[Whole, Field(ge=1, le=8)] | None = None
    both: dict[str, Any] = {}
    stage1: dict[str, Any] = {}
    stage2: dict[str, Any] = {}

    _flatten = field_validator("both", "stage1", "stage2", mode="before")(_dotted)

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"expected lower-case letters, digits, - and _, got {value!r}: it names a folder.")
        return value


class BenchmarkSection(Section):
    """What every trained judge is evaluated on, as by ``lmm4edit evaluate``.

    Attributes:
        manifest: edits with ratings that no run may train on.
        name: of the benchmark; ``None``: the manifest's.
        image_root: what relative image paths are relative to; ``None``: the manifest's folder.
        batch_size: edits in one forward pass.
        device: where judges run; ``None``: the best there is.
    """

    manifest: str
    name: str | None = None
    image_root: str | None = None
    batch_size: Annotated[Whole, Field(gt=0)] = 16
    device: str | None = None


class GridConfig(Section):
    """An ablation.

    Attributes:
        out: folder of everything it makes.
        stage1, stage2: base training configurations (YAML files).
        benchmark: the evaluation.
        seeds: each row is trained once with each.
        both: changes for both stages of all rows.
        rows: in the order of the table.
    """

    out: str
    stage1: str
    stage2: str
    benchmark: BenchmarkSection
    seeds: Annotated[list[Annotated[Whole, Field(ge=0)]], Field(min_length=1)] = [0]
    both: dict[str, Any] = {}
    rows: Annotated[list[RowSection], Field(min_length=1)]

    _flatten = field_validator("both", mode="before")(_dotted)


@dataclass(frozen=True)
class Row:
    """A row with its resolved configurations, whose seed and folders are still the base's."""

    name: str
    label: str
    paper_row: int | None
    stage1: TrainConfig
    stage2: TrainConfig


@dataclass(frozen=True)
class PlannedRun:
    """One row with one seed.

    Attributes:
        row, seed: which.
        folder: of the run, with ``stage2``, ``evaluation``, ``result.json`` and ``log.txt``.
        stage1, stage2: resolved configurations.
        stage1_of: folder of the run in which stage 1 is trained: this one's, or that of an earlier row with the very
            same stage 1.
    """

    row: Row
    seed: int
    folder: Path
    stage1: TrainConfig
    stage2: TrainConfig
    stage1_of: Path

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.row.name}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """A validated ablation."""

    path: str
    out: Path
    seeds: tuple[int, ...]
    benchmark: BenchmarkSection
    rows: tuple[Row, ...]

    def runs(self, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[PlannedRun]:
        """Every row with every seed, all rows of a seed before the next seed: an early stop leaves a whole table.

        Args:
            only: names of rows; empty: all.
            seeds: instead of the grid's.

        Raises:
            ConfigError: for a row that is not there.
        """
        names = [row.name for row in self.rows]
        if unknown := [name for name in only if name not in names]:
            raise ConfigError(f"{self.path}: there is no row {unknown[0]!r}.{near_name(unknown[0], names)}")
        planned = []
        for seed in seeds or self.seeds:
            owners: dict[str, Path] = {}
            for row in self.rows:
                # Over all rows, whatever was chosen: a stage 1 lies in the same place in every call.
                folder = self.out / row.name / f"seed-{seed}"
                owner = owners.setdefault(_learnt_by(row.stage1), folder)
                first = owner / "stage1"
                if not only or row.name in only:
                    planned.append(
                        PlannedRun(
                            row,
                            seed,
                            folder,
                            _resolve(row.stage1, run_dir=str(first), seed=seed),
                            _resolve(
                                row.stage2,
                                run_dir=str(folder / "stage2"),
                                seed=seed,
                                init_from=str(first / "checkpoint"),
                            ),
                            owner,
                        )
                    )
        return planned

    def with_out(self, out: str | Path | None) -> Grid:
        """The same grid in another folder; ``None`` leaves it."""
        return self if out is None else replace(self, out=Path(out))

    def manifests(self) -> list[Path]:
        """Every manifest that a run reads."""
        paths = [self.benchmark.manifest]
        for config in (c for row in self.rows for c in (row.stage1, row.stage2)):
            paths += [config.data.train, *([config.data.validation] if config.data.validation else [])]
        return [Path(path) for path in dict.fromkeys(paths)]


def load_grid(path: str | Path) -> Grid:
    """Read and validate an ablation: the grid, its base configurations, every row's two configurations.

    Raises:
        ConfigError: naming every problem by row and key path.
    """
    values = read_yaml(path)
    try:
        config = GridConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(str(path), describe_errors(error, GridConfig)) from None
    names = [row.name for row in config.rows]
    problems = [
        f"rows: each name may stand once, repeated: {n}." for n in sorted({n for n in names if names.count(n) > 1})
    ]
    problems += [
        f"{where}.{key}: the grid sets it itself for every run. Leave it out."
        for where, changes in _all_changes(config)
        for key in changes
        if key in OWN_KEYS
    ]
    if problems:
        raise config_error(str(path), problems)
    bases = {1: read_yaml(config.stage1), 2: read_yaml(config.stage2)}
    rows: list[Row] = []
    found: list[str] = []
    for section in config.rows:
        stages = []
        for number, base, own in ((1, config.stage1, section.stage1), (2, config.stage2, section.stage2)):
            origin = f"{path}: row {section.name}, stage {number} (from {base})"
            try:
                stages.append(_build(bases[number], [config.both, section.both, own], number, origin))
            except ConfigError as error:
                found.append(str(error))
        if len(stages) == 2:
            rows.append(Row(section.name, section.label or section.name, section.paper_row, *stages))
    found += [
        f"{path}: benchmark.manifest: row {row.name} trains on {stage.data.train} itself (stage {stage.stage}). Give "
        "edits of other sources."
        for row in rows
        for stage in (row.stage1, row.stage2)
        if Path(stage.data.train) == Path(config.benchmark.manifest)
    ]
    if found:
        raise ConfigError("\n".join(found))
    return Grid(str(path), Path(config.out), tuple(dict.fromkeys(config.seeds)), config.benchmark, tuple(rows))


def keep_grid(grid: Grid) -> None:
    """Make sure that the folder belongs to this grid, and write down what it is.

    New rows and seeds may join; rows that are there must be what they were, and so must the manifests' content.

    Raises:
        ConfigError: naming every key that differs.
    """
    path = grid.out / GRID_FILE
    now = _description(grid)
    if path.exists():
        before = _read_description(path)
        if lines := _differences(before, grid, now):
            raise ConfigError(
                f"{grid.out} holds another ablation than {grid.path}:\n"
                + "\n".join(f"  {line}" for line in lines)
                + "\nPut the values back, choose another folder (--out), or remove this one."
            )
        now["files"] = {**before["files"], **now["files"]}
    grid.out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(now, indent=1) + "\n")


def _build(base: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], stage: int, origin: str) -> TrainConfig:
    values = json.loads(json.dumps(base))  # a copy, since changes go deep into it
    problems = []
    # Folders and seed are each run's own; stage 2 always starts from its stage 1.
    own: dict[str, Any] = {"init_from": "stage1/checkpoint"} if stage == 2 else {}
    for key, value in {**{k: v for change in changes for k, v in change.items()}, **own}.items():
        if problem := apply_override(values, f"{key}={json.dumps(value)}"):
            problems.append(problem)
    config = build_config(values, origin=origin, problems=problems)
    if config.stage != stage:
        raise config_error(origin, [f"stage: expected a configuration of stage {stage}, got one of {config.stage}."])
    return config


def _resolve(config: TrainConfig, **values: Any) -> TrainConfig:
    # Through validation, not model_copy: what is trained is always a checked configuration.
    return build_config({**config.model_dump(mode="json"), **values})


def _learnt_by(config: TrainConfig) -> str:
    """What decides the judge that a stage makes, given the seed."""
    flat = flatten(config.model_dump(mode="json"))
    return fingerprint({k: v for k, v in flat.items() if not k.startswith((*HARMLESS_KEYS, "seed"))})


def _all_changes(config: GridConfig) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = [("both", config.both)]
    for index, row in enumerate(config.rows):
        found += [(f"rows.{index}.{part}", getattr(row, part)) for part in ("both", "stage1", "stage2")]
    return found


def _description(grid: Grid) -> dict[str, Any]:
    rows = {
        row.name: {"stage1": row.stage1.model_dump(mode="json"), "stage2": row.stage2.model_dump(mode="json")}
        for row in grid.rows
    }
    files = {str(path): file_sha256(path) for path in grid.manifests() if path.is_file()}
    return {
        "format_version": FORMAT_VERSION,
        "benchmark": jsonable(grid.benchmark.model_dump()),
        "rows": rows,
        "files": files,
    }


def _read_description(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the description of an ablation ({error}). Choose another folder.") from None
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: expected format_version {FORMAT_VERSION}, got {version!r}. Use the LMM4Edit version that wrote "
            "it, or another folder."
        )
    return dict(content)


def _differences(before: Mapping[str, Any], grid: Grid, now: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in now["benchmark"].items():
        # How many go at a time, and where, changes no value.
        if key not in ("batch_size", "device") and before["benchmark"].get(key) != value:
            lines.append(f"benchmark.{key}: {before['benchmark'].get(key)!r} there, {value!r} now")
    rows = {row.name: row for row in grid.rows}
    for name, stages in before["rows"].items():
        if name not in rows:
            lines.append(f"rows.{name}: there, but not in the grid now")
            continue
        for stage in ("stage1", "stage2"):
            # Through validation, so that a key that is newer than the file counts with its default.
            old = build_config(stages[stage])
            differing = old.differences(getattr(rows[name], stage))
            lines += [
                f"rows.{name}.{stage}.{key}: {one!r} there, {two!r} now"
                for key, (one, two) in differing.items()
                if not key.startswith((*HARMLESS_KEYS, "seed"))
            ]
    for path, digest in now["files"].items():
        if (known := before["files"].get(path, digest)) != digest:
            lines.append(f"{path}: its content was sha256 {known[:12]}, now {digest[:12]}")
    return lines
