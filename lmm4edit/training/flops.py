"""Floating-point operations of a training step, counted by formula.

A multiplication and its addition are two operations. A token that passes a matrix of N weights costs 2 N forward, 2 N
for the gradient of its input, and 2 N more for the gradient of the weights, if these are trained: a frozen layer costs
4 N, not the usual 6 N. Attention over a rectangle of q queries and k keys with width d costs 4 q k d forward and twice
that backward; masked places are counted, because a kernel with a free mask computes them. Left out: norms, activations,
embeddings, the optimizer. Recomputed layers (gradient checkpointing) are work of the machine, not of the model:
utilisation is counted without them, as in Chowdhery et al. 2022 (arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lmm4edit.judge.adapters import adalora_layers
from lmm4edit.judge.backbones import BackboneSpec, backbone_spec, plain_model
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.packing import IGNORE, PackedBatch


@dataclass(frozen=True)
class StepFlops:
    """Operations of one micro-batch, forward and backward.

    Attributes:
        forward: of the forward pass.
        activations: gradients of activations.
        weights: gradients of trained weights.
        recomputed: a second forward pass through the layers, if gradients are checkpointed.
    """

    forward: float
    activations: float
    weights: float
    recomputed: float

    @property
    def model(self) -> float:
        """What training needs; utilisation is this, divided by time and the device's peak."""
        return self.forward + self.activations + self.weights

    @property
    def hardware(self) -> float:
        """What the machine does: with recomputation."""
        return self.model + self.recomputed


def count_flops(model: JudgeModel, batch: PackedBatch, *, checkpointing: bool = False) -> StepFlops:
    """Count one micro-batch's operations.

    Args:
        model: the judge, whose weights may lie on ``meta``.
        batch: packed, or one question a row; padding is counted.
        checkpointing: whether the layers are recomputed.
    """
    backbone = plain_model(model.backbone)
    spec = backbone_spec(backbone)
    grids = batch.image_grid_thw.tolist() if batch.image_grid_thw is not None else []
    passing = {
        "projector": int(batch.mm_token_type_ids.sum()),
        "vision": sum(t * h * w for t, h, w in grids),
        "text": batch.input_ids.numel(),
        # Answer tokens, and one place a yes/no question; never a whole sequence.
        "head": int((batch.labels != IGNORE).sum()) + len(batch),
    }
    factors = adalora_layers(backbone)
    matrices = [
        *((name, m.weight) for name, m in backbone.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)),
        *((name, p) for name, f in factors.items() for p in (f.right, f.left)),
    ]
    forward = dict.fromkeys(passing, 0.0)
    weights = 0.0
    trained = set()
    for name, matrix in matrices:
        if ".original_module." in f".{name}.":  # PEFT's untouched copy of what is trained in full
            continue
        part = _part(name, spec)
        cost = 2.0 * matrix.numel() * passing[part]
        forward[part] += cost
        if matrix.requires_grad:
            weights += cost
            trained.add(part)
    vision, text = _attention(backbone, batch, grids)
    into_vision = (forward["vision"] + 2 * vision) * ("vision" in trained)
    into_projector = forward["projector"] * bool(into_vision)
    backward = forward["text"] + 2 * text + forward["head"] + into_vision + into_projector
    layers = forward["text"] + text + forward["vision"] + vision
    total = layers + forward["projector"] + forward["head"]
    return StepFlops(total, backward, weights, layers if checkpointing else 0.0)


def _part(name: str, spec: BackboneSpec) -> str:
    """Which vectors pass a matrix: patches, image tokens, all tokens, or those whose logits are wanted."""
    path = f"{name}."
    if spec.in_projector(name):
        return "projector"
    if path.startswith(f"{spec.vision_module}."):
        return "vision"
    return "text" if path.startswith(f"{spec.llm_module}.") else "head"


def _attention(backbone: Any, batch: PackedBatch, grids: list[list[int]]) -> tuple[float, float]:
    """Forward operations in the vision encoder and in the language model."""
    text = backbone.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows, length = batch.input_ids.shape
    in_text = 4.0 * text.num_hidden_layers * rows * length**2 * width * text.num_attention_heads
    vision = backbone.config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    windowed = depth - len(getattr(vision, "fullatt_block_indexes", None) or range(depth))
    window = getattr(vision, "window_size", 0)
    side = window // vision.patch_size if window else max(map(max, grids), default=1)
    in_vision = 0.0
    for t, h, w in grids:
        in_windows = sum((a * b) ** 2 for a in _pieces(h, side) for b in _pieces(w, side))
        in_vision += 4.0 * hidden * t * ((depth - windowed) * (h * w) ** 2 + windowed * in_windows)
    return in_vision, in_text


def _pieces(length: int, side: int) -> list[int]:
    """A length cut into windows."""
    return [min(side, length - start) for start in range(0, length, side)]
