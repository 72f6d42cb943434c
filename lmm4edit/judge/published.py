"""Published shapes of Qwen2.5-VL, so that memory and time can be planned without a single file of the backbone.

The numbers stand in the ``config.json`` of Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct (Qwen2.5-VL technical report,
arXiv:2502.13923, Table 1). Their parameters add up to the published counts (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmm4edit.judge.backbone_table import register_own_classes


@dataclass(frozen=True)
class PublishedShape:
    """What differs between the four sizes.

    Attributes:
        hidden, intermediate, layers, heads, key_value_heads, vocabulary: of the language model.
        tied: whether input and output embeddings are one.
        vision_intermediate: of the vision encoder, which is else the same in all.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    vision_intermediate: int


SHAPES = {
    "3B": PublishedShape(2048, 11008, 36, 16, 2, 151936, True, 3420),
    "7B": PublishedShape(3584, 18944, 28, 28, 4, 152064, False, 3420),
    "32B": PublishedShape(5120, 27648, 64, 40, 8, 152064, False, 3456),
    "72B": PublishedShape(8192, 29568, 80, 64, 8, 152064, False, 3456),
}
"""By the size in the model's name."""

MIN_PIXELS, MAX_PIXELS = 56 * 56, 12_845_056
"""Bounds of an image's pixels in the published processor's files."""


def published_size(name_or_path: str) -> str | None:
    """The size that a name says (``7B`` for ``Qwen/Qwen2.5-VL-7B-Instruct``); ``None`` for other models."""
    name = name_or_path.rstrip("/").rsplit("/", 1)[-1].lower()
    if not name.startswith("qwen2.5-vl-"):
        return None
    return next((size for size in SHAPES if f"-{size.lower()}" in name), None)


def published_config(size: str) -> Any:
    """The Transformers configuration of a published size."""
    from transformers import Qwen2_5_VLConfig

    shape = SHAPES[size]
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_value_heads,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "pad_token_id": 151643,
            "use_sliding_window": False,
            "tie_word_embeddings": shape.tied,
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": shape.vision_intermediate,
            "num_heads": 16,
            "out_hidden_size": shape.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        tie_word_embeddings=shape.tied,
    )


def describe_backbone(name_or_path: str) -> tuple[Any | None, str | None]:
    """A backbone's Transformers configuration, from its files if they are on this machine; else the published shape.

    Returns:
        The configuration (``None``: not known here), and what was assumed to get it, in words (``None``: nothing).
    """
    from transformers import AutoConfig

    register_own_classes()
    try:
        return AutoConfig.from_pretrained(name_or_path, local_files_only=True), None
    except (OSError, ValueError):
        size = published_size(name_or_path)
    if size is None:
        return None, None
    assumed = f"the published shape of Qwen2.5-VL {size}, for the files of {name_or_path} are not on this machine"
    return published_config(size), assumed
