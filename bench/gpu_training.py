"""Training steps at the shape of Qwen2.5-VL-7B on one GPU, random weights: edits/s, tokens/s, memory, utilisation.

    python bench/gpu_training.py                      # both stages as configs/ebench18k, 7B, bfloat16: under 5 minutes
    python bench/gpu_training.py --json out.json batch.micro_batch_size=4 backbone.gradient_checkpointing=false
    python bench/gpu_training.py --device cpu --shape tiny    # whether it works; no figure to quote

Weights are made on the device in the type they are trained with, so nothing is downloaded and no float32 copy is ever
held. The steps are those of the training loop: forward, backward, clipping, AdamW, AdaLoRA's allocator. Utilisation is
model FLOPs over time over the device's dense bfloat16 peak; the formula stands in lmm4edit/training/flops.py: 2 N a
token forward, 2 N for the gradients of activations (frozen weights need no more), 2 N more for trained matrices, and
attention; recomputation is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lmm4edit.judge.published import SHAPES, published_config

ROOT = Path(__file__).resolve().parents[1]

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A6000": 155.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 peaks of the makers' data sheets, by a part of the device's name; the first that fits counts."""

EDITS = 14_688
"""Training edits of EBench-18K: they set the rank schedule, which a few steps only begin."""


def describe(shape: str) -> Any:
    """The Transformers configuration of a shape: a published size, or ``tiny``."""
    if shape in SHAPES:
        return published_config(shape)
    described = published_config("3B")
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    described.text_config.update({**text, "layer_types": ["full_attention"] * 2, "vocab_size": 151936})
    described.text_config.rope_parameters["mrope_section"] = [2, 3, 3]
    described.vision_config.update({"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2})
    described.vision_config.update({"out_hidden_size": 64, "fullatt_block_indexes": [1]})
    return described


def measure(stage: int, arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Build a judge, take its steps, and say what they took."""
    import torch
    from transformers import AutoModelForImageTextToText

    from lmm4edit.config import load_config
    from lmm4edit.judge.adapters import AdapterConfig, attach_adapters
    from lmm4edit.judge.model import JudgeModel
    from lmm4edit.judge.rank_allocator import RankAllocator, RankSchedule
    from lmm4edit.judge.score_head import ScoreHead, TargetScale
    from lmm4edit.records import BUILT_IN_DIMENSIONS
    from lmm4edit.training.dataset import MicroBatch
    from lmm4edit.training.flops import count_flops
    from lmm4edit.training.live_memory import LiveMemory
    from lmm4edit.training.memory import predict_memory
    from lmm4edit.training.plan import TargetCounts, derive_plan
    from lmm4edit.training.planned_batch import plan_batch
    from lmm4edit.training.processes import Processes
    from lmm4edit.training.steps import Stepper
    from lmm4edit.training.strategy import Strategy, StrategyChoice
    from lmm4edit.training.trainee import Trainee

    cuda = arguments.device == "cuda"
    config = load_config(
        ROOT / "configs" / "ebench18k" / f"stage{stage}.yaml", [*overrides, "init_from=backbone", "data.num_workers=0"]
    )
    described, dimensions = describe(arguments.shape), BUILT_IN_DIMENSIONS
    plan = derive_plan(config, TargetCounts(EDITS, 0, {d.name: EDITS for d in dimensions}, EDITS))
    started = time.perf_counter()
    torch.manual_seed(config.seed)
    with torch.device(arguments.device):
        backbone = AutoModelForImageTextToText.from_config(
            described,
            dtype=getattr(torch, config.backbone.dtype),
            attn_implementation=config.backbone.attn_implementation,
        )
    settings = {field.name: getattr(config.adapter, field.name) for field in dataclasses.fields(AdapterConfig)}
    model = JudgeModel(attach_adapters(backbone, AdapterConfig(**settings)), dimensions, answer_tokens=(0, 1))
    if stage == 2:
        head = ScoreHead(model.hidden_size, len(dimensions), config.score_head.inner)
        model.attach_score_head(head, TargetScale((50.0,) * 3, (15.0,) * 3))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.to(arguments.device).train()
    if config.backbone.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    schedule = RankSchedule(
        total_steps=plan.total_steps,
        tinit=plan.tinit or 0,
        tfinal=plan.tfinal or 0,
        delta_t=plan.delta_t or 1,
        target_r=config.adapter.target_r,
    )
    allocator = RankAllocator(model.backbone, schedule if config.adapter.kind == "adalora" else None)
    choice = StrategyChoice("replicated")
    stepper = Stepper(Trainee(model, None, None, allocator), config, plan, Strategy(Processes(), choice))  # type: ignore[arg-type]
    built = time.perf_counter() - started

    batch = plan_batch(config, described, dimensions)
    assert batch.pixel_values is not None
    shape = batch.pixel_values.shape
    window = [
        MicroBatch(dataclasses.replace(batch, pixel_values=torch.randn(shape)), config.batch.micro_batch_size)
        for _ in range(config.batch.gradient_accumulation)
    ]
    seconds, losses = [], []
    for step in range(arguments.warm_up + arguments.steps):
        _wait(cuda)
        begun = time.perf_counter()
        losses.append(stepper.take(window, step).losses.loss)
        _wait(cuda)
        seconds.append(time.perf_counter() - begun)
    measured = seconds[arguments.warm_up :]
    if cuda:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        with LiveMemory() as memory:
            held = [*model.parameters(), *model.buffers()]
            held += [v for micro in window for v in vars(micro.batch).values() if torch.is_tensor(v)]
            state: Any = stepper._strategy.optimizer.state
            held += [v for values in state.values() for v in values.values() if torch.is_tensor(v)]
            memory.add([*held, *allocator._averages.values()])
            stepper.take(window, len(losses))
        peak, reserved = memory.peak, None
    micro_batch = count_flops(model, batch, checkpointing=config.backbone.gradient_checkpointing)
    passes = len(window)
    median = statistics.median(measured)
    edits = passes * config.batch.micro_batch_size
    predicted = predict_memory(config, described, batch, dimensions, choice, device="cuda" if cuda else "cpu")
    achieved = micro_batch.model * passes / median / 1e12
    return {
        "stage": stage,
        "parameters": sum(p.numel() for name, p in model.named_parameters() if ".original_module." not in name),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dtype": config.backbone.dtype,
        "gradient_checkpointing": config.backbone.gradient_checkpointing,
        "micro_batch_size": config.batch.micro_batch_size,
        "gradient_accumulation": passes,
        "tokens_of_an_edit": int((batch.segment_ids >= 0).sum()) // config.batch.micro_batch_size,
        "seconds_to_build": built,
        "seconds_a_step": {"median": median, "min": min(measured), "max": max(measured)},
        "edits_per_second": edits / median,
        "tokens_per_second": int((batch.segment_ids >= 0).sum()) * passes / median,
        "losses": losses,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "predicted_peak_bytes": predicted.peak,
        "model_tflop_a_step": micro_batch.model * passes / 1e12,
        "tflops": achieved,
        "hardware_tflops": micro_batch.hardware * passes / median / 1e12,
        "utilisation": achieved / arguments.peak_tflops if arguments.peak_tflops else None,
    }


def _wait(cuda: bool) -> None:
    """Until the device has done what it was given."""
    if cuda:
        import torch

        torch.cuda.synchronize()


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    from lmm4edit.provenance import collect_provenance

    return str(collect_provenance()["cpu"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="7B")
    parser.add_argument("--stages", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    parser.add_argument("--steps", type=int, default=5, help="measured optimizer steps of each stage")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bfloat16 peak; default: by its name")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="changes of the configuration")
    arguments = parser.parse_intermixed_args()
    if arguments.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch

    from lmm4edit.errors import LMM4EditError

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "Error: no GPU is at hand (torch sees none). Run this where there is one, or say --device cpu --shape tiny "
            "to see whether it works.",
            file=sys.stderr,
        )
        return 2
    name = _device_name(arguments.device)
    if arguments.peak_tflops is None:
        arguments.peak_tflops = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    print(f"{name}; torch {torch.__version__}; shape {arguments.shape}, random weights")
    try:
        results = []
        for stage in arguments.stages:
            if arguments.device == "cuda":
                gc.collect()  # the stage before
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            results.append(measure(stage, arguments, arguments.overrides))
            _print(results[-1], arguments)
    except LMM4EditError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        content = {
            "device": name,
            "torch": torch.__version__,
            "shape": arguments.shape,
            "peak_tflops": arguments.peak_tflops,
            "results": results,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _print(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    seconds, gib = result["seconds_a_step"], 2**30
    checkpointing = "with" if result["gradient_checkpointing"] else "without"
    print(
        f"stage {result['stage']}: {result['parameters'] / 1e9:.3g} B parameters in {result['dtype']}, "
        f"{result['trained'] / 1e6:.3g} M trained; {result['gradient_accumulation']} x {result['micro_batch_size']} "
        f"edits a step of {result['tokens_of_an_edit']} tokens, {checkpointing} gradient checkpointing"
    )
    print(
        f"  {result['edits_per_second']:.3g} edits/s, {result['tokens_per_second']:.4g} tokens/s; a step takes "
        f"{seconds['median']:.3g} s ({seconds['min']:.3g} to {seconds['max']:.3g}), building "
        f"{result['seconds_to_build']:.3g} s"
    )
    reserved = f", {result['reserved_bytes'] / gib:.4g} GiB reserved" if result["reserved_bytes"] else ""
    print(
        f"  peak {result['peak_bytes'] / gib:.4g} GiB{reserved} (predicted {result['predicted_peak_bytes'] / gib:.4g})"
    )
    share = result["utilisation"]
    print(
        f"  {result['tflops']:.3g} TFLOP/s of the model"
        + (
            f": {share:.1%} of {arguments.peak_tflops:g}"
            if share is not None
            else "; utilisation needs --peak-tflops (this device is not in the table)"
        )
        + f"; {result['hardware_tflops']:.3g} with recomputation: give lmm4edit plan --tflops this"
    )


if __name__ == "__main__":
    sys.exit(main())
