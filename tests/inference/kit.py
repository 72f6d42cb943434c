"""A small judge with random weights, on disk, and images to judge. Everything is seeded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lmm4edit.judge.adapters import AdapterConfig, attach_adapters
from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.checkpoint import save_checkpoint
from lmm4edit.judge.encoding import answer_token_ids
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny
from lmm4edit.records import BUILT_IN_DIMENSIONS

SIDE = 28


def save_random_backbone(folder: Path) -> Path:
    """Two narrow layers each; images of 28 to 56 pixels a side."""
    tokenizer = build_tiny_tokenizer(["The quality score is 54.70", "Is the heart gone? Yes No"] * 4, vocab_size=300)
    model = build_tiny_backbone(tokenizer, hidden=32, layers=2, vision_hidden=16, vision_layers=2, image_size=SIDE)
    save_tiny(folder, model, build_tiny_processor(tokenizer, min_pixels=SIDE**2, max_pixels=4 * SIDE**2))
    return folder


def save_random_judge(folder: Path, backbone: Path, stage: int, provenance: dict[str, Any] | None = None) -> Path:
    """A judge whose adapters and head are random, so that every part decides the scores."""
    model, processor = load_backbone(str(backbone))
    prompts = load_prompts("default")
    wrapped = attach_adapters(model, AdapterConfig(init_r=4, target_r=2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_E" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    head = scale = None
    if stage == 2:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            head = ScoreHead(32, 3)
        scale = TargetScale((50.0, 40.0, 60.0), (10.0, 20.0, 15.0))
    judge = JudgeModel(wrapped, BUILT_IN_DIMENSIONS, answer_token_ids(processor.tokenizer, prompts), head, scale)
    save_checkpoint(folder, judge, processor, prompts, {}, provenance or {}, stage)
    return folder


def write_edits(folder: Path) -> Path:
    """Seven edits of unequal sizes and the manifest ``edits.jsonl``; every second one has a question."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(7):
        for kind in ("s", "e"):
            height, width = (int(v) for v in rng.integers(20, 90, 2))
            pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{kind}{index}.png")
        row = {
            "sample_id": f"e{index}",
            "source_image": f"s{index}.png",
            "edited_image": f"e{index}.png",
            "instruction": "remove the red heart" + " and more" * index,
        }
        if index % 2 == 0:
            row["question"] = "Is the heart gone?"
        rows.append(row)
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def write_broken(edits: Path, path: Path) -> Path:
    """The seven edits with absolute paths, and among them a row with a missing image and a line that is no JSON."""
    rows = [json.loads(line) for line in (edits / "edits.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["source_image"], row["edited_image"] = str(edits / row["source_image"]), str(edits / row["edited_image"])
    rows.insert(2, {**rows[0], "sample_id": "gone", "edited_image": str(edits / "gone.png")})
    lines = [json.dumps(row) for row in rows]
    lines.insert(5, "{not json")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
