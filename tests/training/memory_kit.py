"""A real optimizer step whose memory is measured by PyTorch's profiler: every allocation and release on the processor.

The prediction counts tensors; the profiler sees the allocator, so neither can repeat the other's mistakes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lmm4edit.config import TrainConfig
from lmm4edit.judge.backbones import special_ids
from lmm4edit.judge.packing import PackedBatch, collate, encode_example, unpack
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS, EditSample
from lmm4edit.training.dataset import MicroBatch
from lmm4edit.training.plan import count_targets, derive_plan
from lmm4edit.training.processes import Processes
from lmm4edit.training.steps import Stepper
from lmm4edit.training.strategy import Strategy, StrategyChoice
from lmm4edit.training.trainee import build_trainee

TEXTS = ["Remove the red heart from the sign on the left of the picture", "The quality score is 54.70", "Yes No"]
MID_SIZE = {"hidden": 256, "layers": 6, "heads": 8, "vision_hidden": 160, "vision_layers": 6, "vision_heads": 8}


def save_mid_size(folder: Path) -> None:
    """A random Qwen2.5-VL of some millions of parameters, two 112-px images of 64 patches each, windows of 56 px."""
    tokenizer = build_tiny_tokenizer(TEXTS * 4, vocab_size=300)
    model = build_tiny_backbone(tokenizer, **MID_SIZE, patch_size=14, image_size=56)
    model.config.vision_config.fullatt_block_indexes = [2, 5]
    processor = build_tiny_processor(tokenizer, patch_size=14, min_pixels=112**2, max_pixels=112**2)
    save_tiny(folder, model, processor, dtype=torch.float32)


class RealStep:
    """A trainee, an optimizer, and one window of micro-batches, as the loop has them."""

    def __init__(self, config: TrainConfig) -> None:
        ratings = {d.name: [20.0, 80.0] for d in BUILT_IN_DIMENSIONS}
        samples = [
            EditSample(str(i), "", "", "", "go", mos={name: values[i % 2] for name, values in ratings.items()})
            for i in range(100)
        ]
        plan = derive_plan(config, count_targets(samples, BUILT_IN_DIMENSIONS))
        self.trainee = build_trainee(config, plan, BUILT_IN_DIMENSIONS, samples, torch.device("cpu"))
        self.trainee.model.train()
        self.stepper = Stepper(self.trainee, config, plan, Strategy(Processes(), StrategyChoice("replicated")))
        self.window = [
            MicroBatch(self.batch(config), config.batch.micro_batch_size)
            for _ in range(config.batch.gradient_accumulation)
        ]
        self.steps = 0

    def batch(self, config: TrainConfig) -> PackedBatch:
        """A micro-batch with every question."""
        encoding = self.trainee.encoding(config)
        blank = Image.new("RGB", (112, 112), "white")
        scores: dict[str, Any] = {d.name: 54.7 for d in BUILT_IN_DIMENSIONS}
        answers = {**(scores if encoding.words else {}), **({ANSWER: "yes"} if encoding.answer_words else {})}
        example = encode_example(
            self.trainee.processor,
            self.trainee.prompts,
            TEXTS[0],
            blank,
            blank,
            BUILT_IN_DIMENSIONS,
            "Is the heart gone?",
            answers,
            targets={**scores, ANSWER: 1.0},
        )
        examples = [example] * config.batch.micro_batch_size
        rows = examples if config.batch.packed else [row for e in examples for row in unpack(e)]
        return collate(rows, **special_ids(self.trainee.model.backbone, self.trainee.processor))

    def take(self) -> None:
        """One optimizer step."""
        self.stepper.take(self.window, self.steps)
        self.steps += 1

    def peak(self) -> int:
        """Bytes at the fullest moment of a step in mid-run."""
        self.take()  # the optimizer makes its state in the first
        held = self.held()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.take()
        changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(changes, key=lambda e: e.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return held + peak

    def held(self) -> int:
        """Bytes of what is there between two steps."""
        trainee = self.trainee
        optimizer: Any = self.stepper._strategy.optimizer
        tensors: list[Tensor] = [
            *trainee.model.parameters(),
            *trainee.model.buffers(),
            *(v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)),
            *(v for key, v in trainee.allocator._averages.items()),
            *(v for micro in self.window for v in vars(micro.batch).values() if isinstance(v, Tensor)),
        ]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
