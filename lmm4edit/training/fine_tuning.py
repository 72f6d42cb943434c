"""Training a judge further on new ratings with the settings it was trained with itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmm4edit.config import TrainConfig, build_config
from lmm4edit.errors import ConfigError
from lmm4edit.validated_yaml import apply_override, read_yaml


def fine_tuning_config(judge: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration of stage 2 for a judge that is trained further.

    Data and run folder must come with ``overrides``; validation is on, every epoch, if they name a manifest for it.

    Args:
        judge: folder of a judge with a score head.
        overrides: see :func:`lmm4edit.config.load_config`; they win over the judge's settings.

    Raises:
        ConfigError: if the folder is no such judge, or for any problem of the values.
        CheckpointError: if the judge's backbone is not found.
    """
    path = Path(judge) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{judge}: expected the folder of a trained judge, with config.yaml in it.")
    values = read_yaml(path)
    if values.get("stage") != 2:
        raise ConfigError(
            f"{path}: expected a judge from stage 2, got stage {values.get('stage')}. Its settings are not those of "
            "stage 2: give a --config for it, such as configs/tiny/stage2.yaml."
        )
    data = values.get("data") or {}
    # Manifests, image folders and limits were those of the old data; how images are read is a matter of the machine.
    kept: dict[str, Any] = {key: data[key] for key in ("num_workers", "check_images", "cache_megabytes") if key in data}
    validated = any(text.startswith("data.validation=") for text in overrides)
    values |= {
        "init_from": str(judge),
        "prompts": None,
        "dimensions": None,
        "max_steps": None,
        "data": kept,
        "validation": {"every_epochs": 1, "batch_size": 32} if validated else {},
        "wandb": {},
    }
    values["backbone"] = {**values["backbone"], "name_or_path": _backbone(Path(judge))}
    values["checkpoint"] = {**values["checkpoint"], "keep_best": False}
    problems = [problem for text in overrides if (problem := apply_override(values, text))]
    return build_config(values, origin=f"{path} with the command's options", problems=problems)


def _backbone(judge: Path) -> str:
    """Where the judge's backbone lies now; inside the current folder by its relative path, which can be shared."""
    from lmm4edit.judge.backbone_files import find_backbone
    from lmm4edit.judge.checkpoint_files import read_judge_file

    entry = read_judge_file(judge).backbone
    found = find_backbone({"name": entry.name, "relative_path": entry.relative_path}, judge.resolve())
    relative = os.path.relpath(found)
    return relative if Path(found).is_dir() and not relative.startswith("..") else found
