"""What a run will take, before a GPU is spent on it: steps, trained parameters, memory, time, and what could be done.

Loads no weights. Where the backbone's configuration is not on this machine either, the published shape of its name
stands in for it, and the forecast says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmm4edit.config import TrainConfig, build_config
from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import backbone_spec, plain_model
from lmm4edit.judge.packing import PackedBatch
from lmm4edit.judge.published import SHAPES, describe_backbone
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension
from lmm4edit.training.flops import StepFlops, count_flops
from lmm4edit.training.memory import GIB, Lever, MemoryEstimate, levers, predict_memory
from lmm4edit.training.plan import TargetCounts, TrainingPlan, count_targets, derive_plan, describe_rank_schedule
from lmm4edit.training.planned_batch import plan_batch
from lmm4edit.training.samples import load_samples
from lmm4edit.training.simulation import build_judge_without_weights
from lmm4edit.training.strategy import StrategyChoice, check_strategy, choose_strategy
from lmm4edit.training.trainee import parameters_by_part, run_dimensions
from lmm4edit.validated_yaml import apply_override

ASSUMED_TFLOPS = 100.0
"""Assumed throughput of one process, in 10^12 operations a second: a third of an A100's 312 in bfloat16."""


@dataclass(frozen=True)
class LeverEstimate:
    """A lever and the memory it would leave, in ``processes`` processes."""

    lever: Lever
    memory: MemoryEstimate
    processes: int


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        plan: its derived numbers; ``None`` if there are no samples to count.
        ranks: one line on AdaLoRA's schedule; empty without a plan.
        parameters: for each part of the judge (trained parameters, all parameters).
        strategy: how the processes divide the work, in words.
        processes: of the launch.
        tokens, patches: of one edit, all rows together.
        memory: of one process, as configured.
        other_memory: the same with gradient checkpointing switched the other way.
        gpu_memory: bytes of one GPU, if it was given.
        levers: what would lower the memory; empty where it fits, unless asked for.
        flops: of one edit.
        tflops: throughput of one process that ``hours`` rests on, in 10^12 operations a second.
        hours: of training, without validation and saving; ``None`` without a plan.
        assumptions: what is not known but assumed, in words.
    """

    plan: TrainingPlan | None
    ranks: str
    parameters: dict[str, tuple[int, int]]
    strategy: str
    processes: int
    tokens: int
    patches: int
    memory: MemoryEstimate
    other_memory: MemoryEstimate
    gpu_memory: int | None
    levers: tuple[LeverEstimate, ...]
    flops: StepFlops
    tflops: float
    hours: float | None
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether a GPU of the given memory suffices; ``None`` if none was given."""
        return None if self.gpu_memory is None else self.memory.on_device <= self.gpu_memory


def forecast(
    config: TrainConfig,
    *,
    processes: int = 1,
    gpu_memory: float | None = None,
    image_size: tuple[int, int] | None = None,
    edits: int | None = None,
    tflops: float | None = None,
    show_levers: bool = False,
) -> Forecast:
    """Forecast a run.

    Args:
        config: of the run.
        processes: of the launch, one a GPU.
        gpu_memory: of each GPU, in GiB (2^30 bytes).
        image_size: width and height of the images in pixels; ``None``: as large as the configuration allows.
        edits: number of training samples, instead of reading the manifest.
        tflops: what a process achieves, in 10^12 operations a second; ``None``: :data:`ASSUMED_TFLOPS`.
        show_levers: estimate the levers also where the run fits.

    Raises:
        ConfigError: if the strategy cannot work, or the backbone's shape is not known here.
        ManifestError: if there is a training manifest that cannot be read.
    """
    choice = choose_strategy(config, {})
    check_strategy(choice, config, processes)
    described, processor, assumptions = _describe(config)
    dimensions = _dimensions(config)
    plan = _plan(config, dimensions, processes, edits)
    if plan is None:
        assumptions.append(f"steps and hours need {config.data.train}, which is not there, or --edits")
    batch = plan_batch(config, described, dimensions, image_size, processor)
    options: dict[str, Any] = {"world_size": processes}
    try:
        memory = predict_memory(config, described, batch, dimensions, choice, **options)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"Memory of a {described.model_type} backbone cannot be planned: its code asks for the contents of tensors "
            f"({str(error).splitlines()[0]}). Train a few steps and look at the device instead."
        ) from error
    toggled = _changed(config, [f"backbone.gradient_checkpointing={not config.backbone.gradient_checkpointing}"])
    other = predict_memory(toggled, described, batch, dimensions, choice, **options)
    model = build_judge_without_weights(config, described, dimensions)
    checkpointing = config.backbone.gradient_checkpointing
    flops = _of_one(count_flops(model, batch, checkpointing=checkpointing), config.batch.micro_batch_size)
    if tflops is None:
        assumptions.append(
            f"{ASSUMED_TFLOPS:g} TFLOP/s in each process (a third of an A100's bfloat16 peak); measure it with "
            "bench/gpu_training.py and give it with --tflops"
        )
    rate = tflops or ASSUMED_TFLOPS
    hours = None
    if plan is not None:
        seen = min(plan.total_steps * plan.edits_per_step, plan.counts.edits * config.epochs)
        hours = seen * flops.hardware / (rate * 1e12 * processes) / 3600
    limit = None if gpu_memory is None else round(gpu_memory * GIB)
    found: tuple[LeverEstimate, ...] = ()
    if show_levers or (limit is not None and memory.on_device > limit):
        found = tuple(_try(config, described, processor, dimensions, choice, processes, image_size, batch))
    assumptions.append("1 GiB for the CUDA context and 5 % of fragmentation beside the tensors")
    if choice.kind in ("fsdp2", "zero2", "zero3"):
        assumptions.append(f"what {choice.kind} divides is arithmetic, not measured on GPUs")
    if config.backbone.quantization:
        assumptions.append("4-bit weights are arithmetic, not measured")
    return Forecast(
        plan=plan,
        ranks=describe_rank_schedule(config, plan) if plan is not None else "",
        parameters=parameters_by_part(model, backbone_spec(plain_model(model.backbone))),
        strategy=choice.describe(processes),
        processes=processes,
        tokens=int((batch.segment_ids >= 0).sum()) // config.batch.micro_batch_size,
        patches=_patches(batch) // config.batch.micro_batch_size,
        memory=memory,
        other_memory=other,
        gpu_memory=limit,
        levers=found,
        flops=flops,
        tflops=rate,
        hours=hours,
        assumptions=tuple(assumptions),
    )


def _describe(config: TrainConfig) -> tuple[Any, Any, list[str]]:
    """The backbone's configuration and processor, and what is assumed instead."""
    from transformers import AutoProcessor

    name = config.backbone.name_or_path
    described, assumed = describe_backbone(name)
    if described is None:
        raise ConfigError(
            f"backbone.name_or_path: the configuration of {name} is not on this machine, and it is not one of "
            f"Qwen/Qwen2.5-VL-({'|'.join(SHAPES)})-Instruct, whose shapes are known. Download its config.json."
        )
    assumptions = [assumed] if assumed else []
    try:
        processor = AutoProcessor.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        processor = None
        assumptions.append("four characters of text a token, for the tokenizer is not on this machine")
    return described, processor, assumptions


def _dimensions(config: TrainConfig) -> tuple[Dimension, ...]:
    start = config.starting_checkpoint()
    if start is not None and not start.exists():
        return config.build_dimensions() or BUILT_IN_DIMENSIONS
    return tuple(run_dimensions(config))


def _plan(
    config: TrainConfig, dimensions: Sequence[Dimension], processes: int, edits: int | None
) -> TrainingPlan | None:
    if edits is not None:
        counts = TargetCounts(edits, 0, {d.name: edits for d in dimensions}, edits)
    elif not Path(config.data.train).exists():
        return None
    else:
        loaded = load_samples(
            config.data.train,
            dimensions,
            image_root=config.data.image_root,
            scores=config.needs_scores(),
            answers=config.objective.qa_ce > 0,
            check_images="header",
            max_samples=config.data.max_samples,
        )
        counts = count_targets(loaded.samples, dimensions, len(loaded.skipped))
    return derive_plan(config, counts, processes)


def _try(
    config: TrainConfig,
    described: Any,
    processor: Any,
    dimensions: Sequence[Dimension],
    choice: StrategyChoice,
    processes: int,
    image_size: tuple[int, int] | None,
    batch: PackedBatch,
) -> list[LeverEstimate]:
    """Every lever alone."""
    found = []
    pixels = _patches(batch) // (2 * config.batch.micro_batch_size)
    if not config.batch.packed:
        pixels //= len(batch) // config.batch.micro_batch_size
    pixels *= getattr(described.vision_config, "patch_size", 14) ** 2
    for lever in levers(config, choice, pixels):
        changed = _changed(config, lever.overrides)
        kind = choose_strategy(changed, {})
        world = max(2, processes) if kind.kind == "fsdp2" else processes
        size = (lever.image_side, lever.image_side) if lever.image_side else image_size
        other = plan_batch(changed, described, dimensions, size, processor)
        estimate = predict_memory(changed, described, other, dimensions, kind, world_size=world)
        found.append(LeverEstimate(lever, estimate, world))
    if choice.kind != "replicated":
        twice = 2 * processes
        estimate = predict_memory(config, described, batch, dimensions, choice, world_size=twice)
        found.append(LeverEstimate(Lever((f"--processes {twice}",), "twice the GPUs"), estimate, twice))
    return found


def _changed(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    values = config.model_dump(mode="json")
    for text in overrides:
        apply_override(values, text.replace("=True", "=true").replace("=False", "=false"))
    return build_config(values, origin="with " + " ".join(overrides))


def _of_one(flops: StepFlops, edits: int) -> StepFlops:
    return StepFlops(*(value / edits for value in (flops.forward, flops.activations, flops.weights, flops.recomputed)))


def _patches(batch: PackedBatch) -> int:
    return int(batch.image_grid_thw.prod(dim=1).sum()) if batch.image_grid_thw is not None else 0
