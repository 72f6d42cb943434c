"""A tiny but real Qwen2.5-VL: same classes, same files, a thousandth of the size. Trains on a laptop's processor.

*Measured*: with ``patch_size`` 7 and ``initializer_range`` 0.08 it learns in minutes what the usual
14 and 0.02 do not learn in an hour.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import save_backbone

SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Plain ChatML with Qwen-VL's image markers, for callers that use apply_chat_template; the judge renders its own
# prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer(texts: Iterable[str], vocab_size: int = 600, max_length: int = 2048) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer with Qwen's pre-tokenizer (digits stand singly) and special tokens.

    Args:
        texts: what to learn merges from; any text can be encoded afterwards, bytes are the fall-back.
        vocab_size: number of ordinary tokens, at least 256; the special tokens come on top.
        max_length: longest sequence, stored with the tokenizer.

    Raises:
        ConfigError: if ``vocab_size`` is below 256.
    """
    if vocab_size < 256:
        raise ConfigError(f"vocab_size must be at least 256 (one token for each byte), got {vocab_size}.")
    qwen = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    bpe = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=cast(Any, [tuple(merge) for merge in bpe["merges"]]),
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=max_length,
    )


def build_tiny_backbone(
    tokenizer: Qwen2Tokenizer,
    *,
    hidden: int = 128,
    layers: int = 3,
    heads: int = 4,
    vision_hidden: int = 96,
    vision_layers: int = 3,
    vision_heads: int = 4,
    patch_size: int = 7,
    image_size: int = 56,
    initializer_range: float = 0.08,
    rope_theta: float = 10.0,
    tie_word_embeddings: bool = False,
    max_length: int = 2048,
    seed: int = 0,
) -> Qwen2_5_VLForConditionalGeneration:
    """Build an untrained tiny backbone, the same weights for the same seed (the global random state is left alone).

    Args:
        tokenizer: from :func:`build_tiny_tokenizer`.
        hidden, layers, heads: of the language model; ``heads`` must be even (two query heads share one key/value head).
        vision_hidden, vision_layers, vision_heads: of the vision encoder. The last block attends over the whole image.
        patch_size: side of a patch in pixels; 2 x 2 patches make one token.
        image_size: side of the images in pixels the model is meant for (a window of the vision encoder covers one).
        initializer_range: standard deviation of the initial weights.
        rope_theta: base of the rotary positions. m-RoPE gives the width the lowest frequencies; with the usual 10,000
            and a head of 32 a step to the right turns by 0.003 rad, which cannot be told from none; with 10 it turns
            by 0.1-0.2.
        tie_word_embeddings: share input and output embeddings, as the 3B model does and the 7B does not.
        max_length: longest sequence.
        seed: of the initial weights.

    Raises:
        ConfigError: if the sizes do not divide.
    """
    if hidden % heads or (hidden // heads) % 8 or heads % 2:
        raise ConfigError(
            "The language model needs an even number of heads and a head size that is a multiple of 8, got "
            f"hidden={hidden} and heads={heads}."
        )
    if vision_hidden % vision_heads or (vision_hidden // vision_heads) % 4:
        raise ConfigError(
            f"The vision encoder needs a head size that is a multiple of 4, got vision_hidden={vision_hidden} and "
            f"vision_heads={vision_heads}."
        )
    if image_size % (2 * patch_size):
        raise ConfigError(f"image_size must be a multiple of 2 x patch_size={2 * patch_size}, got {image_size}.")
    half_head = hidden // heads // 2
    # m-RoPE sections (time, height, width) must sum to half the head size.
    time_section = half_head // 4
    height_section = (half_head - time_section) // 2
    token: Any = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": max_length,
            "initializer_range": initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [time_section, height_section, half_head - time_section - height_section],
                "rope_theta": rope_theta,
            },
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": vision_heads,
            "out_hidden_size": hidden,
            "patch_size": patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": image_size,
            "fullatt_block_indexes": [vision_layers - 1],
            "initializer_range": initializer_range,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=tie_word_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def build_tiny_processor(
    tokenizer: Qwen2Tokenizer, *, patch_size: int = 7, min_pixels: int = 56 * 56, max_pixels: int = 56 * 56
) -> Qwen2_5_VLProcessor:
    """A real Qwen2.5-VL processor; images are resized to between ``min_pixels`` and ``max_pixels``."""
    sizes: dict[str, Any] = {"patch_size": patch_size, "min_pixels": min_pixels, "max_pixels": max_pixels}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=patch_size),
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny(
    folder: str | Path,
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Save model and processor so that :func:`lmm4edit.judge.backbones.load_backbone` loads them like any Qwen2.5-VL.

    The weights are rounded to ``dtype`` in the files; the model passed in is left as it is.
    """
    save_backbone(folder, model, processor, dtype=dtype)
