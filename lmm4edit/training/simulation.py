"""One forward and backward pass without numbers: the real judge on tensors that have shapes and no contents.

Nothing is estimated: the judge's own code runs, with its adapters, its checkpointing and its mixed precision, and every
tensor it would make is counted (:mod:`lmm4edit.training.live_memory`). What indexes others (token ids, masks, the
images' grids) is real, weights and activations are fakes. Two or three layers of each kind are enough, because the
others repeat them: the pass is cut at the layers' edges and put together at full depth.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lmm4edit.config import TrainConfig
from lmm4edit.judge.adapters import AdapterConfig, attach_adapters
from lmm4edit.judge.model import JudgeModel, ObjectiveWeights
from lmm4edit.judge.packing import PackedBatch
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import Dimension
from lmm4edit.training.live_memory import LiveMemory
from lmm4edit.training.strategy_fsdp import layers_to_divide


@dataclass(frozen=True)
class Segment:
    """A stretch of the pass between two edges of layers. Bytes beyond weights, gradients and optimizer state.

    Attributes:
        layer: number of the layer that runs in it, or ``None`` between the towers and around the loss.
        change: alive at its end minus alive at its start.
        peak: the most alive within, minus alive at its start.
        weights, trained: bytes of the layer's weights, and of those that are trained; 0 without a layer.
    """

    layer: int | None
    change: int
    peak: int
    weights: int = 0
    trained: int = 0


@dataclass(frozen=True)
class StepTrace:
    """What a pass over one micro-batch holds, in the order of time, the batch itself left out.

    Gradients are there before it starts, so that the backward pass adds to them in place.
    """

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]

    @property
    def saved(self) -> int:
        """Bytes alive when the forward pass has ended: what it keeps for the backward pass."""
        return sum(segment.change for segment in self.forward)

    def at_depth(self, towers: Sequence[Sequence[int]], *, penalty: bool) -> StepTrace:
        """The trace of a deeper model.

        Args:
            towers: for each tower, and in it for each layer of the deeper model, the layer here that it is like.
            penalty: whether the loss has AdaLoRA's penalty. Its gradients are the first of the backward pass, and wait
                for those of the layers to be added to them.
        """
        backward = _deepen(self.backward, [tower[::-1] for tower in towers])
        if penalty:
            waiting = sum(s.trained for s in backward) - sum(s.trained for s in self.backward)
            first = backward[0]
            more = dataclasses.replace(first, change=first.change + waiting, peak=first.peak + waiting)
            backward = (more, *backward[1:])
        return StepTrace(_deepen(self.forward, towers), backward)


def shrink(described: Any) -> tuple[Any, list[list[int]]] | None:
    """A shallower configuration of a backbone, and how its layers stand for those of the whole one.

    Args:
        described: a Transformers configuration.

    Returns:
        The configuration and the towers for :meth:`StepTrace.at_depth`; ``None`` if there is nothing to save, or it is
        not known of this backbone which layers are alike.
    """
    if described.model_type not in ("qwen2_5_vl", "qwen2_vl"):
        return None
    small = copy.deepcopy(described)
    vision, text = small.vision_config, small.text_config
    full = set(getattr(vision, "fullatt_block_indexes", ()))
    depth, layers = vision.depth, text.num_hidden_layers
    vision_tower, text_tower = list(range(depth)), list(range(layers))
    if depth > 4:
        # First and last stand for themselves; between them there are blocks with windows and without.
        kinds = [0 in full, False, True, depth - 1 in full]
        vision.depth = 4
        if full:
            vision.fullatt_block_indexes = [index for index, is_full in enumerate(kinds) if is_full]
        vision_tower = [0, *(2 if index in full else 1 for index in range(1, depth - 1)), 3]
    if layers > 3:
        text.num_hidden_layers = 3
        text.layer_types = text.layer_types[:3]
        text_tower = [0, *[1] * (layers - 2), 2]
    if depth <= 4 and layers <= 3:
        return None
    return small, [vision_tower, [vision.depth + index for index in text_tower]]


def trace_step(
    config: TrainConfig, described: Any, batch: PackedBatch, dimensions: Sequence[Dimension], *, whole: bool = False
) -> StepTrace:
    """Run one micro-batch forward and backward, without weights.

    Args:
        config: of the run; its paths are not looked at.
        described: the backbone's Transformers configuration.
        batch: on the processor; of ``pixel_values`` only the shape is read.
        dimensions: what the judge judges.
        whole: go through every layer, also where fewer would do.

    Raises:
        RuntimeError, NotImplementedError: if the backbone's code asks for the contents of a tensor that has none
            (DeepSeek-VL2's experts, which tokens choose).
    """
    # It would log such an error at length, and whoever called is told anyway.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    shrunk = None if whole else shrink(described)
    model = build_judge_without_weights(config, shrunk[0] if shrunk else described, dimensions)
    trace = _trace(model, batch, config)
    if shrunk is None:
        return trace
    return trace.at_depth(shrunk[1], penalty=config.adapter.kind == "adalora" and config.objective.orthogonality > 0)


def build_judge_without_weights(config: TrainConfig, described: Any, dimensions: Sequence[Dimension]) -> JudgeModel:
    """The judge of a run's first step on the device ``meta``, ready to be trained.

    A run that starts from a judge is built like a fresh one, with every rank that AdaLoRA may have pruned since.
    """
    from transformers import AutoModelForImageTextToText

    settings = {field.name: getattr(config.adapter, field.name) for field in dataclasses.fields(AdapterConfig)}
    with torch.device("meta"):
        backbone = AutoModelForImageTextToText.from_config(
            copy.deepcopy(described),
            dtype=getattr(torch, config.backbone.dtype),
            attn_implementation=config.backbone.attn_implementation,
        )
        model = JudgeModel(attach_adapters(backbone, AdapterConfig(**settings)), dimensions, answer_tokens=(0, 1))
        if config.stage == 2:
            n = len(dimensions)
            head = ScoreHead(model.hidden_size, n, config.score_head.inner)
            model.attach_score_head(head, TargetScale((0.0,) * n, (1.0,) * n))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if config.backbone.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model.train()


def _trace(model: JudgeModel, batch: PackedBatch, config: TrainConfig) -> StepTrace:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    _make_fake(model, fakes)
    if batch.pixel_values is not None:
        with fakes:
            pixels = torch.empty(batch.pixel_values.shape, dtype=batch.pixel_values.dtype)
        batch = dataclasses.replace(batch, pixel_values=pixels)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    memory, indices = LiveMemory(), _RealIndices(fakes)
    batch = _FakeMaskBatch(**vars(batch))
    batch.indices = indices
    memory.leave_out([*held, *(v for v in vars(batch).values() if isinstance(v, Tensor))])
    edges = _Edges(memory, layers_to_divide(model))
    objective = config.objective
    weights = ObjectiveWeights(objective.text_ce, objective.qa_ce, objective.score_mse, objective.orthogonality)
    mixed = config.backbone.dtype == "bfloat16"
    with memory, indices, edges:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = model(batch, weights)
        edges.turn()
        assert output.loss is not None
        output.loss.backward()
        edges.end()
    return StepTrace(tuple(edges.forward), tuple(edges.backward))


def _make_fake(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Replace weights on ``meta`` by fakes that pass for the processor's (mixed precision asks for the device)."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:  # tied weights stay tied
            with fakes:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        return made[id(tensor)]

    for module in model.modules():
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in own:
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = fake(tensor)


class _RealIndices(TorchDispatchMode):
    """Lets real tensors meet fakes: where a mask of known contents selects, the size of the result is known."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self.all_fake = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            out = func(*args, **kwargs)
            return tree_map(self._to_fake, out) if self.all_fake else out
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [part for index in args[1] for part in _positions(index)])
        args, kwargs = tree_map(self._to_fake, (args, kwargs))
        return func(*args, **kwargs)

    def _to_fake(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            return self._fakes.from_tensor(value)
        return value


class _FakeMaskBatch(PackedBatch):
    """A batch whose mask has no contents: it is the one index that grows with the square of the length."""

    indices: _RealIndices

    @property
    def attention_mask(self) -> Tensor:
        self.indices.all_fake = True
        try:
            return dataclasses.replace(self._plain(), segment_ids=self.segment_ids + 0).attention_mask
        finally:
            self.indices.all_fake = False

    def _plain(self) -> PackedBatch:
        return PackedBatch(**{field.name: getattr(self, field.name) for field in dataclasses.fields(PackedBatch)})


def _positions(index: Tensor | None) -> list[Tensor | None]:
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    return list(index.nonzero().unbind(1))


class _Edges:
    """Cuts a pass at the edges of layers. In the backward pass an edge is where the gradient of a layer's output, or of
    the first one's input, is complete.
    """

    def __init__(self, memory: LiveMemory, layers: Sequence[nn.Module]) -> None:
        self.forward: list[Segment] = []
        self.backward: list[Segment] = []
        self._memory, self._layers = memory, layers
        self._now = self.forward
        self._open: int | None = None
        self._start = 0
        self._last_output: int | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> _Edges:
        for index, layer in enumerate(self._layers):
            self._handles += [
                layer.register_forward_pre_hook(lambda _, a, k, i=index: self._enter(i, a, k), with_kwargs=True),
                layer.register_forward_hook(lambda _, __, out, i=index: self._leave(i, out)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def turn(self) -> None:
        """The forward pass has ended."""
        self._close(None)
        self._now = self.backward

    def end(self) -> None:
        """The backward pass has ended."""
        self._close(None)

    def _enter(self, index: int, args: Any, kwargs: Any) -> None:
        if self._now is self.backward:  # recomputed for a checkpoint
            return
        self._close(index)
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()), None)
        if first is not None and first.requires_grad and id(first) != self._last_output:
            first.register_hook(lambda _: self._close(None))

    def _leave(self, index: int, out: Any) -> None:
        if self._now is self.backward:
            return
        self._close(None)
        tensor = out[0] if isinstance(out, tuple) else out
        self._last_output = id(tensor)  # alive until the next layer has taken it, so its id is its own
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._close(index))

    def _close(self, following: int | None) -> None:
        """End the open segment and begin that of a layer, or of what stands between."""
        live, peak = self._memory.live, self._memory.restart_peak()
        layer = self._open
        if layer is not None or live != self._start or peak != self._start:
            sizes = _sizes(self._layers[layer]) if layer is not None else (0, 0)
            self._now.append(Segment(layer, live - self._start, peak - self._start, *sizes))
        self._start, self._open = live, following


def _sizes(layer: nn.Module) -> tuple[int, int]:
    parameters = list(layer.parameters())
    return sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if p.requires_grad)


def _deepen(segments: Sequence[Segment], towers: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    by_layer = {segment.layer: segment for segment in segments}
    found: list[Segment] = []
    done: set[int] = set()
    for segment in segments:
        if segment.layer is None:
            found.append(segment)
            continue
        tower = next(index for index, layers in enumerate(towers) if segment.layer in layers)
        if tower not in done:  # all its layers at once: between them there is nothing else
            done.add(tower)
            found += [by_layer[layer] for layer in towers[tower]]
    return tuple(found)
