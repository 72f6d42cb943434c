"""A tiny judge and a few edits to ask it about. Everything is random and seeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lmm4edit.judge.adapters import AdapterConfig, adalora_layers, attach_adapters
from lmm4edit.judge.backbones import backbone_spec, special_ids
from lmm4edit.judge.model import JudgeModel, ObjectiveWeights
from lmm4edit.judge.packing import PackedBatch, PackedExample, answer_token_ids, collate, encode_example, unpack
from lmm4edit.judge.prompts import PromptSet, load_prompts
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny
from lmm4edit.records import BUILT_IN_DIMENSIONS

SCALE = TargetScale((52.0, 48.0, 61.0), (14.0, 20.0, 11.0))
STAGE_1 = ObjectiveWeights(text_ce=1.0, qa_ce=0.5, orthogonality=0.1)
STAGE_2 = ObjectiveWeights(score_mse=1.0, qa_ce=0.5, orthogonality=0.1)


def save_kit_backbone(folder: Path) -> None:
    """A random backbone (two narrow layers each), images of 14 to 56 pixels, rounded to float16."""
    prompts = load_prompts()
    texts = [prompts.system, "Instruction: remove the cat", "The quality score is", "system\nuser\nassistant\n Yes No"]
    tokenizer = build_tiny_tokenizer(texts * 3, vocab_size=400)
    model = build_tiny_backbone(
        tokenizer, hidden=32, layers=2, vision_hidden=16, vision_layers=2, image_size=28, initializer_range=0.2
    )
    save_tiny(folder, model, build_tiny_processor(tokenizer, min_pixels=14 * 14, max_pixels=56 * 56))


@dataclass
class Kit:
    """A backbone with what is needed to ask it."""

    backbone: Any
    processor: Any
    prompts: PromptSet

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    def example(
        self, index: int = 0, *, dimensions: Sequence[Any] = BUILT_IN_DIMENSIONS, **options: Any
    ) -> PackedExample:
        """One edit; images differ in size and content with the index."""
        rng = np.random.default_rng(index)
        sizes = [(28, 42), (56, 14), (28, 28), (14, 42)]
        images = [Image.fromarray(rng.integers(0, 256, (*sizes[(index + k) % 4], 3), dtype=np.uint8)) for k in range(2)]
        options.setdefault("question", f"Is thing {index} gone?")
        options.setdefault("sample_id", f"s{index}")
        options.setdefault("chat", backbone_spec(self.backbone).chat)
        instruction = options.pop("instruction", "remove the cat" + " and the dog" * (index % 3))
        return encode_example(self.processor, self.prompts, instruction, *images, dimensions, **options)

    def taught(self, index: int = 0, **options: Any) -> PackedExample:
        """One edit with everything to learn."""
        scores = {"quality": 45.5 + index, "alignment": 9.31, "preservation": 100.0}
        answer = "yes" if index % 2 else "no"
        return self.example(
            index, answers={**scores, "answer": answer}, targets={**scores, "answer": float(index % 2)}, **options
        )

    def batch(self, examples: Sequence[PackedExample]) -> PackedBatch:
        return collate(examples, **special_ids(self.backbone, self.processor))

    def separate(self, examples: Sequence[PackedExample]) -> PackedBatch:
        """One question a row."""
        return self.batch([row for example in examples for row in unpack(example)])

    def judge(self, kind: str = "adalora", head: bool = True, **adapter: Any) -> JudgeModel:
        """A judge on this backbone whose adapters and head are random, as if trained."""
        config = dataclasses.replace(AdapterConfig(kind=kind, init_r=3, target_r=2), **adapter)  # type: ignore[arg-type]
        backbone = attach_adapters(self.backbone, config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for layer in adalora_layers(backbone).values():
                layer.values.copy_(torch.randn(layer.values.shape, generator=generator))
            for name, parameter in backbone.named_parameters():
                if "lora_B" in name and kind == "lora":
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        torch.manual_seed(2)
        score_head = ScoreHead(32, 3, 16) if head else None
        return JudgeModel(
            backbone,
            BUILT_IN_DIMENSIONS,
            answer_token_ids(self.tokenizer, self.prompts),
            score_head,
            SCALE if head else None,
        ).eval()
