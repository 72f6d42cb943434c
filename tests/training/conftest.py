"""Small things to train on: a tiny random backbone, a dozen generated edits, configurations for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lmm4edit.config import TrainConfig, build_config

N_EDITS = 12
SIDE = 28


@pytest.fixture
def make_config() -> Callable[..., TrainConfig]:
    """Build a configuration from the least that is needed and changes: ``section__key=value``."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "stage": 1,
            "run_dir": "runs/x",
            "epochs": 1,
            "backbone": {"name_or_path": "b"},
            "data": {"train": "train.jsonl"},
            "objective": {"text_ce": 1.0, "qa_ce": 1.0},
            "optimizer": {"learning_rate": 1e-3},
            "batch": {"micro_batch_size": 2},
        }
        for path, value in changes.items():
            *sections, key = path.split("__")
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[key] = value
        return build_config(values)

    return make


@pytest.fixture(scope="session")
def run_config(tiny_backbone: Path, edits: Path) -> Callable[..., TrainConfig]:
    """Build the configuration of a run of a few steps: ``run_config(folder, stage, section__key=value)``."""

    def make(folder: Path, stage: int = 1, **changes: Any) -> TrainConfig:
        words, scores = {"text_ce": 1.0, "qa_ce": 1.0}, {"score_mse": 1.0, "qa_ce": 0.1}
        values: dict[str, Any] = {
            "stage": stage,
            "run_dir": str(folder),
            "epochs": 2,
            "backbone": {"name_or_path": str(tiny_backbone)},
            "data": {"train": str(edits / "train.jsonl")},
            "adapter": {"init_r": 4, "target_r": 2, "dropout": 0.1},
            "objective": {**(words if stage == 1 else scores), "orthogonality": 0.1},
            "optimizer": {"learning_rate": 1e-2},
            "batch": {"micro_batch_size": 4},
            "checkpoint": {"save_every_steps": 1000},
        }
        for path, value in changes.items():
            *sections, key = path.split("__")
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[key] = value
        return build_config(values)

    return make


@pytest.fixture(scope="session")
def stage1(tmp_path_factory: pytest.TempPathFactory, run_config: Callable[..., TrainConfig], edits: Path) -> Path:
    """Folder of a finished stage 1 run, with validation."""
    from rich.console import Console

    from lmm4edit.training.loop import run

    folder = tmp_path_factory.mktemp("runs") / "stage1"
    changes = {"data__validation": str(edits / "test.jsonl"), "validation__every_epochs": 1}
    run(run_config(folder, **changes), console=Console(quiet=True))
    return folder


@pytest.fixture(scope="session")
def stage2(stage1: Path, run_config: Callable[..., TrainConfig]) -> Path:
    """Folder of a finished stage 2 run that started from ``stage1``."""
    from rich.console import Console

    from lmm4edit.training.loop import run

    folder = stage1.parent / "stage2"
    run(run_config(folder, stage=2, init_from=str(stage1 / "checkpoint")), console=Console(quiet=True))
    return folder


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random backbone with two narrow layers."""
    from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny

    folder = tmp_path_factory.mktemp("tiny") / "backbone"
    tokenizer = build_tiny_tokenizer(["The quality score is 54.70", "Is the heart gone? Yes No"] * 4, vocab_size=300)
    model = build_tiny_backbone(
        tokenizer, hidden=32, layers=2, vision_hidden=16, vision_layers=2, patch_size=7, image_size=SIDE
    )
    processor = build_tiny_processor(tokenizer, patch_size=7, min_pixels=SIDE**2, max_pixels=SIDE**2)
    save_tiny(folder, model, processor)
    return folder


@pytest.fixture(scope="session")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a dozen edits of three sources, ``train.jsonl`` and ``test.jsonl``. More noise, lower scores."""
    folder = tmp_path_factory.mktemp("edits")
    rng = np.random.default_rng(0)
    rows = []
    for index in range(N_EDITS):
        source = f"source{index % 3}.png"
        if not (folder / source).exists():
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(folder / source)
        pixels = np.asarray(Image.open(folder / source)).astype(float)
        strength = index / (N_EDITS - 1)
        noisy = np.clip(pixels + rng.normal(0, 120 * strength, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"edit{index}.png")
        row: dict[str, Any] = {
            "sample_id": f"e{index}",
            "source_id": source,
            "source_image": source,
            "edited_image": f"edit{index}.png",
            "instruction": f"add noise {index}",
            "mos_quality": 80 - 60 * strength,
            "mos_alignment": 20 + 60 * strength,
            "mos_preservation": 70 - 40 * strength,
            "question": "Is there noise?",
            "answer": "yes" if strength > 0.5 else "no",
        }
        if index % 4 == 1:
            del row["mos_alignment"]
        if index % 4 == 2:
            del row["question"], row["answer"]
        rows.append(row)
    _write(folder / "train.jsonl", rows)
    _write(folder / "test.jsonl", rows[:6])
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, list[dict[str, Any]]], Path]:
    """Write JSON Lines."""
    return _write


@pytest.fixture
def rows(edits: Path) -> list[dict[str, Any]]:
    """The edits' rows with absolute paths, for manifests elsewhere."""
    read = [json.loads(line) for line in (edits / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{**row, **{key: str(edits / row[key]) for key in ("source_image", "edited_image")}} for row in read]
