"""How much memory a training step takes, before a weight is loaded: by category, strategy, and lever.

Weights, gradients and optimizer state follow from the judge's parameters. What the passes hold besides comes from
:mod:`lmm4edit.training.simulation`, which runs the judge's own code on tensors without contents. What several processes
divide is arithmetic on top of it, as :mod:`lmm4edit.training.strategy` divides it. Predicted is the peak of live
tensors; what a device loses to its context and to fragmentation is :data:`CONTEXT` and :data:`FRAGMENTATION`, assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from lmm4edit.config import TrainConfig
from lmm4edit.judge.adapters import adalora_layers
from lmm4edit.judge.backbones import plain_model
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.packing import PackedBatch
from lmm4edit.records import Dimension
from lmm4edit.training.simulation import Segment, StepTrace, build_judge_without_weights, trace_step
from lmm4edit.training.strategy import StrategyChoice
from lmm4edit.training.strategy_fsdp import layers_to_divide

GIB = 2**30
CONTEXT = 1 * GIB
"""Assumed: what a CUDA context and its libraries take of a GPU besides tensors."""
FRAGMENTATION = 0.05
"""Assumed: part of the tensors' peak that the caching allocator holds beyond them."""

FOUR_BIT = 4.127 / 8
"""Bytes of a weight in 4-bit NormalFloat with doubly quantized scales (QLoRA, arXiv:2305.14314, section 3)."""
_BUCKET = 2**25 * 4
_ZERO_BUCKET = 500_000_000 * 4
_ZERO_GATHERED = 1_000_000_000 * 4
# The two are DeepSpeed's reduce_bucket_size and stage3_max_live_parameters, in float32.


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process at the fullest moment of a step in mid-run.

    Attributes:
        frozen_weights: the backbone as it is loaded, PEFT's untouched copy of the projector included.
        trained_weights: adapters, projector, score head (or whole towers), in float32.
        gradients: of these, with the copies that exchanging them needs.
        optimizer_state: AdamW's two averages, and AdaLoRA's two of importance while ranks are still pruned.
        activations: what the forward pass keeps for the backward pass, and the batch itself.
        temporaries: logits, recomputed activations, gradients of activations, gathered layers, the optimizer's own.
        moment: when that is: ``forward pass``, ``backward pass`` or ``optimizer step``.
    """

    frozen_weights: int
    trained_weights: int
    gradients: int
    optimizer_state: int
    activations: int
    temporaries: int
    moment: str

    @property
    def peak(self) -> int:
        """All of them: the peak of live tensors."""
        return sum(self.by_category().values())

    @property
    def on_device(self) -> int:
        """With the assumed context and fragmentation: what a GPU must have free."""
        return CONTEXT + round(self.peak * (1 + FRAGMENTATION))

    def by_category(self) -> dict[str, int]:
        """Bytes by category."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}


@dataclass(frozen=True)
class JudgeSizes:
    """Bytes of a judge's parameters.

    Attributes:
        frozen, trained: of all parameters.
        factors: of AdaLoRA's factors, among the trained.
        largest_trained: of the largest trained parameter.
        layers: of the weights in layers that FSDP2 divides, one number a layer, frozen and trained.
        frozen_linear: of the frozen linear layers inside these layers, which 4-bit would shrink; values, not bytes.
        largest_linear: values of the largest of them.
        frozen_itemsize: bytes of a frozen value.
    """

    frozen: int
    trained: int
    factors: int
    largest_trained: int
    layers: tuple[int, ...]
    frozen_linear: int
    largest_linear: int
    frozen_itemsize: int


def predict_memory(
    config: TrainConfig,
    described: Any,
    batch: PackedBatch,
    dimensions: Sequence[Dimension],
    choice: StrategyChoice,
    *,
    world_size: int = 1,
    device: Literal["cpu", "cuda"] = "cuda",
) -> MemoryEstimate:
    """Predict the peak memory of one process's training step.

    Args:
        config: of the run.
        described: the backbone's Transformers configuration.
        batch: one micro-batch of the run's largest; of ``pixel_values`` only the shape is read.
        dimensions: what is judged.
        choice, world_size: how many processes divide what.
        device: on a GPU AdamW works on all parameters at once, which takes a copy of them; and a batch is copied there.

    Raises:
        RuntimeError: if the backbone cannot be run without contents.
    """
    sizes = measure_sizes(build_judge_without_weights(config, described, dimensions))
    trace = trace_step(config, described, batch, dimensions)
    held = sum(v.nbytes for v in vars(batch).values() if hasattr(v, "nbytes"))
    # On the processor the whole window of micro-batches waits in the same memory.
    held *= config.batch.gradient_accumulation if device == "cpu" else 1
    return _compose(config, sizes, trace, held, choice, world_size, device)


def measure_sizes(model: JudgeModel) -> JudgeSizes:
    """Add up a judge's parameters; they may lie on ``meta``."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    layers = layers_to_divide(model)
    linear = [
        module.weight
        for layer in layers
        for module in layer.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    ]
    factors = [p for f in adalora_layers(model.backbone).values() for p in (f.values, f.right, f.left)]
    return JudgeSizes(
        frozen=sum(p.nbytes for p in parameters if not p.requires_grad),
        trained=sum(p.nbytes for p in trained),
        factors=sum(p.nbytes for p in factors),
        largest_trained=max((p.nbytes for p in trained), default=0),
        layers=tuple(sum(p.nbytes for p in layer.parameters()) for layer in layers),
        frozen_linear=sum(p.numel() for p in linear),
        largest_linear=max((p.numel() for p in linear), default=0),
        frozen_itemsize=plain_model(model.backbone).dtype.itemsize,
    )


@dataclass(frozen=True)
class _Divided:
    """What one process holds of the judge, in bytes.

    Attributes:
        frozen, trained, gradients, state: its part of weights, gradients and optimizer state.
        exchange: copies of gradients that exchanging them needs, as long as there are gradients.
        gathered: weights of other processes that are whole here while they are used.
        stepped: weights that its optimizer step changes.
        step_temporaries: what the step needs besides.
    """

    frozen: int
    trained: int
    gradients: int
    state: int
    exchange: int
    gathered: int
    stepped: int
    step_temporaries: int


def _compose(
    config: TrainConfig,
    sizes: JudgeSizes,
    trace: StepTrace,
    held: int,
    choice: StrategyChoice,
    world_size: int,
    device: str,
) -> MemoryEstimate:
    divided = _divide(config, sizes, choice, world_size)
    late = 0.0
    if config.batch.gradient_accumulation == 1:
        in_layers = sum(segment.trained for segment in trace.backward)
        late = in_layers * divided.gradients / max(1, sizes.trained)
    if device == "cuda":  # AdamW takes the roots of all second moments at once
        step = divided.stepped
    else:
        step = 4 * sizes.largest_trained if sizes.factors else 2 * sizes.largest_trained
    moments = [
        *_moments("forward pass", trace.forward, 0, divided.gradients if not late else 0, 0.0),
        *_moments("backward pass", trace.backward, trace.saved, divided.gradients - late, late),
        ("optimizer step", divided.gradients, 0, step + divided.step_temporaries),
    ]
    moment, gradients, activations, temporaries = max(moments, key=lambda m: m[1] + m[2] + m[3])
    return MemoryEstimate(
        frozen_weights=divided.frozen,
        trained_weights=divided.trained,
        gradients=round(gradients) + divided.exchange,
        optimizer_state=divided.state,
        activations=activations + held,
        temporaries=temporaries + (divided.gathered if moment != "optimizer step" else 0),
        moment=moment,
    )


def _moments(
    name: str, segments: Sequence[Segment], live: int, early: float, late: float
) -> list[tuple[str, float, int, int]]:
    """Moments of a pass: (its name, gradients, activations, temporaries).

    Args:
        name: of the pass.
        segments: its stretches.
        live: bytes alive at its start.
        early, late: gradients that are there from the start, and those that come each with its layer.
    """
    in_layers = max(1, sum(segment.trained for segment in segments))
    done = 0
    moments = []
    for segment in segments:
        done += segment.trained
        moments.append((name, early + late * done / in_layers, max(0, live), segment.peak))
        live += segment.change
    return moments


def _divide(config: TrainConfig, sizes: JudgeSizes, choice: StrategyChoice, world_size: int) -> _Divided:
    """Who holds what; see ``docs/distributed.md``. For one process and DDP it is tested, for the others it is sums."""
    frozen, trained = sizes.frozen, sizes.trained
    if config.backbone.quantization == "4bit":
        frozen -= round(sizes.frozen_linear * (sizes.frozen_itemsize - FOUR_BIT))
    state = 2 * trained
    allocates = config.starting_checkpoint() is None or config.adapter.ranks == "reallocate"
    ranks = 2 * sizes.factors * allocates
    dequantized = sizes.largest_linear * sizes.frozen_itemsize if config.backbone.quantization else 0
    if choice.kind == "replicated" or world_size == 1:
        exchange = trained if world_size > 1 else 0  # DDP keeps its buckets beside the gradients
        return _Divided(frozen, trained, trained, state + ranks, exchange, dequantized, trained, 0)
    whole = config.adapter.kind != "full"
    outside = max(0, frozen + trained * (not whole) - sum(sizes.layers))
    two_layers = 2 * max(sizes.layers, default=0)  # the next is gathered while one is used
    if choice.kind == "fsdp2":
        part = 1 if whole else world_size
        gathered = outside + two_layers if choice.reshard_after_forward else frozen + trained * (not whole)
        # Ours averages gradients in flat copies; FSDP2's own reduce-scatter takes a layer at a time.
        step = 2 * min(trained, _BUCKET) if whole else 0
        mine = trained // part
        return _Divided(frozen // world_size, mine, mine, 2 * mine + ranks, 0, gathered, mine, step)
    factors = 2 * sizes.factors  # read from all processes and clipped apart, for the allocator
    mine = trained // world_size
    if choice.kind == "zero2":  # a float32 copy of its part of the weights, and a bucket of gradients
        return _Divided(frozen, trained + mine, mine, 2 * mine + ranks, _ZERO_BUCKET, 0, mine, factors)
    gathered = min(frozen, _ZERO_GATHERED)
    held = (trained if whole else 0) + 2 * mine
    return _Divided(frozen // world_size, held, mine, 2 * mine + ranks, _ZERO_BUCKET, gathered, mine, factors)


@dataclass(frozen=True)
class Lever:
    """A change of the configuration that saves memory.

    Attributes:
        overrides: what to write on the command line.
        costs: what is paid for it, in words.
        image_side: of square images with fewer pixels, if it changes them.
        harmless: whether the judge is the same, but for rounding, on the same number of GPUs.
    """

    overrides: tuple[str, ...]
    costs: str
    image_side: int | None = None
    harmless: bool = False


def levers(config: TrainConfig, choice: StrategyChoice, image_pixels: int) -> list[Lever]:
    """What would lower the memory of this run, in the order in which it should be tried.

    Args:
        config: of the run.
        choice: its strategy.
        image_pixels: pixels of the images that were planned with.
    """
    found = []
    backbone, batch = config.backbone, config.batch
    if backbone.dtype == "float32" and choice.kind not in ("zero2", "zero3"):
        found.append(Lever(("backbone.dtype=bfloat16",), "frozen weights rounded to three digits", harmless=True))
    if not backbone.gradient_checkpointing:
        found.append(Lever(("backbone.gradient_checkpointing=true",), "one more forward pass a step", harmless=True))
    if batch.micro_batch_size > 1:
        more = batch.gradient_accumulation * batch.micro_batch_size
        found.append(
            Lever(
                ("batch.micro_batch_size=1", f"batch.gradient_accumulation={more}"),
                "the same step in more passes",
                harmless=True,
            )
        )
    if not batch.packed:
        found.append(Lever(("batch.packed=true",), "nothing: the same loss and gradients", harmless=True))
    side = int((image_pixels / 2) ** 0.5) // 28 * 28
    if side >= 112:
        text: tuple[str, ...] = (f"backbone.max_pixels={side * side}",)
        if backbone.min_pixels and backbone.min_pixels > side * side:
            text += (f"backbone.min_pixels={side * side}",)
        found.append(Lever(text, "finer artefacts are no longer seen", image_side=side))
    if choice.kind == "replicated":
        found.append(Lever(("distributed.strategy=fsdp2",), "several GPUs, and traffic between them"))
    if backbone.quantization is None and choice.kind == "replicated" and config.adapter.kind != "full":
        found.append(Lever(("backbone.quantization=4bit",), "slower layers, frozen weights in 4 bits; needs CUDA"))
    together = [lever for lever in found if lever.harmless]
    if len(together) > 1:
        words = tuple(text for lever in together for text in lever.overrides)
        found.append(Lever(words, "as each of them"))
    return found
