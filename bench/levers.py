"""What each lever of memory costs and saves: time and peak of live tensors of a training step, with and without it.

    python bench/levers.py             # a mid-size Qwen2.5-VL shape, random weights: some minutes
    python bench/levers.py --quick     # a small shape, seconds: whether it works, no figure to quote

One edit a step, packed, stage 1, AdaLoRA on both towers and the projector. Each lever is pulled alone and measured in
turns with the default; a ratio below 1 is a saving. On a processor bfloat16 and recomputation cost other shares of the
time than on a GPU; the memory is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.training import SHAPES, WAYS, Setup, Shape, peak_of_tensors
from lmm4edit.judge.backbones import plain_model
from lmm4edit.provenance import collect_provenance


def _checkpointing(setup: Setup) -> None:
    setup.model.train()
    setup.model.enable_gradient_checkpointing()


def _bfloat16(setup: Setup) -> None:
    for parameter in setup.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    setup.mixed = True


def _eager(setup: Setup) -> None:
    plain_model(setup.model.backbone).set_attn_implementation("eager")


def _nothing(_: Setup) -> None:
    pass


def _fewer_pixels(shape: Shape) -> Shape:
    """Three quarters of the side, so 9/16 of the pixels."""
    return dataclasses.replace(shape, image_side=shape.image_side * 3 // 4)


@dataclasses.dataclass(frozen=True)
class Lever:
    """A lever: its keys, what it does to a set-up and to the shape, and which way the batch is presented."""

    keys: str
    apply: Callable[[Setup], None] = _nothing
    reshape: Callable[[Shape], Shape] | None = None
    edits: int = 1
    way: str = WAYS[0]


DEFAULT = Lever("default")
LEVERS = [
    Lever("backbone.gradient_checkpointing=true", _checkpointing),
    Lever("backbone.dtype=bfloat16", _bfloat16),
    Lever("backbone.attn_implementation=eager", _eager),
    Lever("backbone.max_pixels: 9/16", reshape=_fewer_pixels),
    Lever("batch.micro_batch_size=2", edits=2),
    Lever("batch.packed=false", way=WAYS[1]),
]


class Case:
    """A set-up with its lever pulled."""

    def __init__(self, lever: Lever, shape: Shape) -> None:
        self.lever = lever
        self.setup = Setup(lever.reshape(shape) if lever.reshape else shape, 1, lever.edits)
        lever.apply(self.setup)
        self.optimizer, self.allocator = self.setup.learner()
        self.seconds: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self.setup.step(self.lever.way, self.optimizer, self.allocator)
        return (time.perf_counter() - started) / self.lever.edits

    def result(self, default: Case) -> dict[str, Any]:
        mine, other = statistics.median(self.seconds), statistics.median(default.seconds)
        peak, base = (peak_of_tensors(c.setup, c.lever.way, c.optimizer, c.allocator) for c in (self, default))
        return {
            "lever": self.lever.keys,
            "seconds_an_edit": {"median": mine, "min": min(self.seconds), "max": max(self.seconds)},
            "time_ratio": mine / other,
            "peak_tensor_megabytes": peak,
            "memory_ratio": peak / base,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small shape")
    parser.add_argument("--repeats", type=int, help="steps of each (default: 7; quick: 1)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name = "quick" if arguments.quick else "mid"
    repeats = arguments.repeats or (1 if arguments.quick else 7)
    machine = collect_provenance(threads=arguments.threads)
    print(f"{machine['cpu']}, {machine['cpu_count']} cores, {arguments.threads} threads; torch {torch.__version__}")
    print(f"shape {name}: {SHAPES[name]}; medians of {repeats} steps, ratios to the default")
    results = []
    for lever in LEVERS:
        default, case = Case(DEFAULT, SHAPES[name]), Case(lever, SHAPES[name])
        for repeat in range(repeats + 1):
            for each in (default, case) if repeat % 2 else (case, default):
                seconds = each.step()
                if repeat:  # the first time is for warming up
                    each.seconds.append(seconds)
        result = case.result(default)
        results.append(result)
        spread = result["seconds_an_edit"]
        print(
            f"  {lever.keys:40} {spread['median']:7.3f} s an edit ({spread['min']:.3f} to {spread['max']:.3f}), "
            f"{result['time_ratio']:.2f} of the time, {result['memory_ratio']:.2f} of the memory "
            f"({result['peak_tensor_megabytes']:.0f} MB)"
        )
    if arguments.json:
        content = {"shape": dataclasses.asdict(SHAPES[name]), "results": results, "provenance": machine}
        arguments.json.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
