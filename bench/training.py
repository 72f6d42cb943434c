"""Packed training against one question a row: edits a second, peak memory, and that both learn the same.

    python bench/training.py             # a mid-size Qwen2.5-VL shape, random weights, two 224-px images: some minutes
    python bench/training.py --quick     # a small shape, seconds: whether it works, no figure to quote
    python bench/training.py --json out.json

Both ways take full optimizer steps (forward, backward, clipping, AdamW, AdaLoRA's allocator) on the same edits with the
same weights, in turns, in one process. Memory is measured twice: resident, beyond what a process of its own held before
(each way), and as the peak of live tensors. A ratio above 1 speaks for packing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image

from lmm4edit.judge.adapters import AdapterConfig, attach_adapters
from lmm4edit.judge.encoding import answer_token_ids, encode_example, process_images
from lmm4edit.judge.model import JudgeModel, ObjectiveWeights
from lmm4edit.judge.packing import PackedBatch, collate, unpack
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.rank_allocator import RankAllocator, RankSchedule
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor
from lmm4edit.provenance import collect_provenance
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS
from lmm4edit.shipped import shipped_path
from lmm4edit.training.live_memory import LiveMemory

OBJECTIVES = {
    1: ObjectiveWeights(text_ce=1.0, qa_ce=1.0, orthogonality=0.1),
    2: ObjectiveWeights(score_mse=1.0, qa_ce=0.1, orthogonality=0.1),
}
WAYS = ("packed", "one question a row")


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5-VL's sizes."""

    hidden: int
    layers: int
    heads: int
    vision_hidden: int
    vision_layers: int
    vision_heads: int
    patch_size: int
    image_side: int


SHAPES = {
    "mid": Shape(512, 6, 8, 384, 6, 6, 14, 224),
    "quick": Shape(64, 2, 4, 32, 2, 4, 7, 56),
}


class Setup:
    """A judge of random weights and a batch of edits, in both forms."""

    def __init__(self, shape: Shape, stage: int, n_edits: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(shipped_path("checkpoints/tiny/backbone")))
        pixels = shape.image_side**2
        self.processor = build_tiny_processor(
            tokenizer, patch_size=shape.patch_size, min_pixels=pixels, max_pixels=pixels
        )
        backbone = build_tiny_backbone(
            tokenizer,
            hidden=shape.hidden,
            layers=shape.layers,
            heads=shape.heads,
            vision_hidden=shape.vision_hidden,
            vision_layers=shape.vision_layers,
            vision_heads=shape.vision_heads,
            patch_size=shape.patch_size,
            image_size=shape.image_side,
        )
        self.parameters = sum(p.numel() for p in backbone.parameters())
        self.prompts = load_prompts("tiny")
        adapted = attach_adapters(backbone, AdapterConfig())
        self.model = JudgeModel(adapted, BUILT_IN_DIMENSIONS, answer_token_ids(tokenizer, self.prompts))
        if stage == 2:
            torch.manual_seed(0)
            self.model.attach_score_head(ScoreHead(shape.hidden, 3), TargetScale((50.0,) * 3, (15.0,) * 3))
        self.objective = OBJECTIVES[stage]
        self.mixed = False  # bfloat16, for frozen weights that are
        examples = [self._example(np.random.default_rng(seed), shape.image_side, stage) for seed in range(n_edits)]
        ids: dict[str, Any] = {
            "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            "pad_token_id": tokenizer.pad_token_id,
        }
        self.batches: dict[str, PackedBatch] = {
            WAYS[0]: collate(examples, **ids),
            WAYS[1]: collate([row for example in examples for row in unpack(example)], **ids),
        }

    def _example(self, rng: np.random.Generator, side: int, stage: int) -> Any:
        images = [Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(2)]
        source, edited = process_images(self.processor, images)
        scores = {d.name: float(rng.uniform(20, 80)) for d in BUILT_IN_DIMENSIONS}
        return encode_example(
            self.processor,
            self.prompts,
            "Replace the red heart with a blue ring",
            source,
            edited,
            BUILT_IN_DIMENSIONS,
            "Is there a blue ring?",
            {ANSWER: "yes", **(scores if stage == 1 else {})},
            targets={**scores, ANSWER: 1.0},
        )

    def learner(self) -> tuple[torch.optim.Optimizer, RankAllocator]:
        """An optimizer and an allocator for the judge as it is now."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        schedule = RankSchedule(total_steps=1000, tinit=0, tfinal=300, delta_t=1, target_r=8)
        return torch.optim.AdamW(trained, lr=1e-5), RankAllocator(self.model.backbone, schedule)

    def step(self, way: str, optimizer: torch.optim.Optimizer, allocator: RankAllocator) -> float:
        """One optimizer step; gives the loss before it."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            loss = self.model(self.batches[way], self.objective).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        allocator.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compare(setup: Setup) -> dict[str, float]:
    """Losses and gradients of both ways on the same weights.

    Raises:
        AssertionError: if they differ by more than float tolerance: losses 1e-5, gradients 1e-3 of their norm.
    """
    found: dict[str, tuple[float, torch.Tensor]] = {}
    for way in WAYS:
        setup.model.zero_grad(set_to_none=True)
        loss = setup.model(setup.batches[way], setup.objective).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in setup.model.parameters() if p.grad is not None]
        found[way] = float(loss.detach()), torch.cat(gradients)
    setup.model.zero_grad(set_to_none=True)
    (one, first), (other, second) = found[WAYS[0]], found[WAYS[1]]
    difference = float((first - second).norm() / second.norm())
    assert abs(one - other) <= 1e-5 * max(1.0, abs(other)), f"losses differ: {one} packed, {other} one question a row"
    assert difference <= 1e-3, f"gradients differ by {difference:.2e} of their norm"
    return {"loss_packed": one, "loss_separate": other, "gradient_difference": difference}


def measure(shape_name: str, stage: int, n_edits: int, repeats: int) -> dict[str, Any]:
    """Equality and speed of one stage."""
    setup = Setup(SHAPES[shape_name], stage, n_edits)
    equality = compare(setup)
    optimizer, allocator = setup.learner()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way in WAYS if repeat % 2 else reversed(WAYS):  # in turns, so that neither has the quieter machine
            started = time.perf_counter()
            setup.step(way, optimizer, allocator)
            if repeat:  # the first time is for warming up
                seconds[way].append(time.perf_counter() - started)
    rates = {way: [n_edits / value for value in values] for way, values in seconds.items()}
    packed = setup.batches[WAYS[0]]
    return {
        "stage": stage,
        "parameters": setup.parameters,
        "edits": n_edits,
        "tokens_of_one_edit_packed": int((packed.segment_ids[0] >= 0).sum()),
        "tokens_of_its_prefix": int((packed.segment_ids[0] == 0).sum()),
        **equality,
        "edits_per_second": {
            way: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for way, values in rates.items()
        },
        "ratio": statistics.median(rates[WAYS[0]]) / statistics.median(rates[WAYS[1]]),
        "peak_megabytes": {way: _peak(shape_name, stage, n_edits, index) for index, way in enumerate(WAYS)},
        "peak_tensor_megabytes": {way: peak_of_tensors(setup, way, optimizer, allocator) for way in WAYS},
    }


def peak_of_tensors(setup: Setup, way: str, optimizer: torch.optim.Optimizer, allocator: RankAllocator) -> float:
    """Peak of live tensors in one more step, in megabytes: weights, batch and all that the step makes."""
    with LiveMemory() as memory:
        held = [*setup.model.parameters(), *setup.model.buffers(), *vars(setup.batches[way]).values()]
        held += [value for state in optimizer.state.values() for value in state.values()]
        memory.add([*(v for v in held if isinstance(v, torch.Tensor)), *allocator._averages.values()])
        setup.step(way, optimizer, allocator)
    return memory.peak / 2**20


def _peak(shape_name: str, stage: int, n_edits: int, way: int) -> float:
    """Peak memory of two steps beyond what the process had before them, in megabytes, in a process of its own."""
    words = [sys.executable, __file__, "--peak-of", f"{shape_name},{stage},{n_edits},{way}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _print_peak(words: str) -> None:
    shape_name, stage, n_edits, way = words.split(",")
    setup = Setup(SHAPES[shape_name], int(stage), int(n_edits))
    optimizer, allocator = setup.learner()
    # Forget the peak so far: a started process even inherits that of the one that started it.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak_resident()
    for _ in range(2):
        setup.step(WAYS[int(way)], optimizer, allocator)
    print(_peak_resident() - before)


def _peak_resident() -> float:
    """Peak resident memory since it was last forgotten, in megabytes (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape")
    parser.add_argument("--edits", type=int, default=4, help="edits in a step")
    parser.add_argument("--repeats", type=int, help="steps of each way (default: 7; quick: 2)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak_of:
        _print_peak(arguments.peak_of)
        return
    shape = "quick" if arguments.quick else "mid"
    repeats = arguments.repeats or (2 if arguments.quick else 7)
    results = [measure(shape, stage, arguments.edits, repeats) for stage in (1, 2)]
    machine = collect_provenance(threads=arguments.threads)
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, {arguments.threads} threads, {platform.platform()}")
    print(
        f"torch {torch.__version__}; shape {shape}: {results[0]['parameters'] / 1e6:.1f} M parameters, {SHAPES[shape]}"
    )
    for result in results:
        rates, peaks = result["edits_per_second"], result["peak_megabytes"]
        print(f"stage {result['stage']}, {result['edits']} edits a step, 4 questions each; medians of {repeats} steps:")
        for way in WAYS:
            r = rates[way]
            print(
                f"  {way:20} {r['median']:8.2f} edits/s ({r['min']:.2f} to {r['max']:.2f}), peak {peaks[way]:8.0f} MB, "
                f"{result['peak_tensor_megabytes'][way]:.0f} MB of tensors"
            )
        print(
            f"  packed: {result['ratio']:.2f} times as fast, {peaks[WAYS[0]] / peaks[WAYS[1]]:.2f} of the memory; "
            f"losses {result['loss_packed']:.6f} and {result['loss_separate']:.6f}, gradients differ by "
            f"{result['gradient_difference']:.1e} of their norm"
        )
    if arguments.json:
        content = {"shape": asdict(SHAPES[shape]), "results": results, "provenance": machine}
        arguments.json.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
