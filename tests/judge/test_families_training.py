"""Both stages through the training loop, for every backbone family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

import lmm4edit
from lmm4edit.config import build_config
from lmm4edit.judge.backbones import backbone_spec, plain_model
from lmm4edit.judge.encoding import encode_example
from lmm4edit.training.loop import run
from tests.judge.family_claims import shows
from tests.judge.kit import Kit
from tests.judge.tiny_families import save_family
from tests.training.conftest import edits as edits


def _config(folder: Path, stage: int, backbone: Path, edits: Path, **changes: Any) -> Any:
    words, scores = {"text_ce": 1.0, "qa_ce": 1.0}, {"score_mse": 1.0, "qa_ce": 0.1}
    return build_config(
        {
            "stage": stage,
            "run_dir": str(folder),
            "epochs": 1,
            "backbone": {"name_or_path": str(backbone)},
            "data": {"train": str(edits / "train.jsonl")},
            "adapter": {"init_r": 4, "target_r": 2, "dropout": 0.1},
            "objective": {**(words if stage == 1 else scores), "orthogonality": 0.1},
            "optimizer": {"learning_rate": 1e-2},
            "batch": {"micro_batch_size": 4},
            "checkpoint": {"save_every_steps": 1000},
            **changes,
        }
    )


@shows("training")
def test_both_stages_train_and_the_judge_scores_a_pair(family: str, tmp_path: Path, edits: Path) -> None:
    backbone = save_family(family, tmp_path / "backbone")
    quiet = Console(quiet=True)
    run(_config(tmp_path / "stage1", 1, backbone, edits), console=quiet)
    first = tmp_path / "stage1" / "checkpoint"
    run(_config(tmp_path / "stage2", 2, backbone, edits, init_from=str(first)), console=quiet)
    steps = [json.loads(line) for line in (tmp_path / "stage2" / "metrics.jsonl").read_text().splitlines()]
    assert steps
    judge = lmm4edit.load_judge(tmp_path / "stage2" / "checkpoint")
    generator = torch.Generator().manual_seed(0)
    source, edited = (
        Image.fromarray(torch.randint(0, 256, (40, 60, 3), generator=generator).numpy().astype("uint8"))
        for _ in range(2)
    )
    score = judge.score(source, edited, "remove the cat", "Is the cat gone?")
    assert set(score.scores) == {"quality", "alignment", "preservation"}
    assert all(value is not None and math.isfinite(value) for value in score.scores.values())
    # The judge asks in the family's own chat format, and sees what training sees.
    kit = Kit(plain_model(judge.model.backbone), judge.processor, judge.prompts)
    example = encode_example(
        judge.processor, judge.prompts, "remove the cat", source, edited, judge.dimensions, "Is the cat gone?"
    )
    with torch.no_grad():
        direct = judge.model(kit.batch([example])).scores[0].tolist()
    assert [score.scores[d.name] for d in judge.dimensions] == pytest.approx(direct, abs=1e-4)
    assert backbone_spec(kit.backbone).chat.image_token in judge.processor.tokenizer.decode(example.prefix_ids)
    assert judge.score(source, edited, "remove the cat").scores != judge.score(source, source, "remove the cat").scores
