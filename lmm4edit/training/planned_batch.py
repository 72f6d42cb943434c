"""The micro-batch that a plan is made for: as many tokens and patches as a run's batch, without its images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError, ImageError
from lmm4edit.judge.backbones import BackboneSpec, backbone_spec, set_pixel_limits, shortest_side
from lmm4edit.judge.encoding import PackedExample, Suffix, encode_example
from lmm4edit.judge.image_inputs import PATCHES
from lmm4edit.judge.packing import PackedBatch, collate, unpack
from lmm4edit.judge.prompts import ImagePart, Part, PromptSet, TextPart, load_prompts
from lmm4edit.judge.published import MAX_PIXELS, MIN_PIXELS
from lmm4edit.records import ANSWER, Dimension

CHARACTERS_A_TOKEN = 4.0
"""Assumed of English text where the backbone's tokenizer is not on this machine."""

INSTRUCTION = "Remove the red heart from the sign on the left, and keep the rest of the picture as it is."
QUESTION = "Has the red heart been removed from the sign on the left of the picture?"


def plan_batch(
    config: TrainConfig,
    described: Any,
    dimensions: Sequence[Dimension],
    image_size: tuple[int, int] | None = None,
    processor: Any = None,
) -> PackedBatch:
    """A full micro-batch of a run: every edit with all dimensions' questions and a yes/no question.

    Args:
        config: of the run.
        described: the backbone's Transformers configuration.
        dimensions: what is asked.
        image_size: width and height of both images in pixels before they are resized; ``None``: as large as the
            configuration lets them be, square (backbones that cut images into patches), else 512 x 512.
        processor: the backbone's, which then does what it does in training; without one, text is taken to have
            :data:`CHARACTERS_A_TOKEN`.

    Raises:
        ConfigError: for an image size that the backbone cannot take, or a family that cannot be planned without its
            processor.
    """
    spec = backbone_spec(described)
    prompts = load_prompts(config.prompts or "default")
    words = {d.name: (d.low + d.high) / 2 for d in dimensions} if config.objective.text_ce else {}
    answers: dict[str, float | str] = {**words, **({ANSWER: "yes"} if config.objective.qa_ce else {})}
    targets = {**{d.name: (d.low + d.high) / 2 for d in dimensions}, ANSWER: 1.0}
    pad, image_token = 0, int(getattr(described, "image_token_id", None) or 0)
    if processor is not None:
        pad = processor.tokenizer.pad_token_id or 0
        image_token = processor.tokenizer.added_tokens_encoder[spec.chat.image_token]
        example = _encoded(config, processor, prompts, dimensions, image_size, answers, targets, spec)
    elif spec.images is PATCHES:
        grid, patch_values = image_grid(config, described, image_size)
        tokens = grid[1] * grid[2] // described.vision_config.spatial_merge_size**2
        parts = prompts.render_prefix(INSTRUCTION, dimensions, spec.chat)
        asked = [(d.name, prompts.render_suffix(d, spec.chat)) for d in dimensions]
        asked.append((ANSWER, prompts.render_answer_suffix(QUESTION, spec.chat)))
        taught = {key: prompts.answer_text(value, key) for key, value in answers.items()}
        example = PackedExample(
            prefix_ids=_estimated_prefix(parts, tokens, image_token),
            image_grids=[grid, grid],
            pixel_values=torch.empty(2 * grid[1] * grid[2], patch_values),
            suffixes=[
                Suffix(key, [0] * sum(map(_tokens, rendered)), [0] * _answer_tokens(taught.get(key)))
                for key, rendered in asked
            ],
            targets=targets,
        )
    else:
        raise ConfigError(
            f"Memory of a {spec.model_type} backbone cannot be planned without its processor's files, which decide how "
            f"many tokens an image takes. Download {config.backbone.name_or_path} first."
        )
    rows = [example] * config.batch.micro_batch_size
    if not config.batch.packed:
        rows = [row for edit in rows for row in unpack(edit)]
    return collate(rows, image_token_id=image_token, pad_token_id=pad)


def _encoded(
    config: TrainConfig,
    processor: Any,
    prompts: PromptSet,
    dimensions: Sequence[Dimension],
    image_size: tuple[int, int] | None,
    answers: dict[str, float | str],
    targets: dict[str, float],
    spec: BackboneSpec,
) -> PackedExample:
    processor = copy.deepcopy(processor)
    set_pixel_limits(processor, config.backbone.min_pixels, config.backbone.max_pixels)
    if image_size is None and spec.images is PATCHES:
        side = shortest_side(processor)
        largest = int(processor.image_processor.size["longest_edge"] ** 0.5) // side * side
        image_size = (largest, largest)
    blank = Image.new("RGB", image_size or (512, 512), "white")
    try:
        return encode_example(
            processor,
            prompts,
            INSTRUCTION,
            blank,
            blank,
            dimensions,
            QUESTION,
            answers,
            targets=targets,
            chat=spec.chat,
        )
    except ImageError as error:
        raise ConfigError(f"The image size {blank.width}x{blank.height} cannot be planned with: {error}") from None


def image_grid(
    config: TrainConfig, described: Any, image_size: tuple[int, int] | None = None
) -> tuple[tuple[int, int, int], int]:
    """The (time, height, width) in patches that an image comes to (Qwen-VL), and the values of a patch.

    Raises:
        ConfigError: for an image size that the backbone cannot take.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    vision = described.vision_config
    low, high = config.backbone.min_pixels or MIN_PIXELS, config.backbone.max_pixels or MAX_PIXELS
    side = vision.patch_size * vision.spatial_merge_size
    largest = int(high**0.5) // side * side
    width, height = image_size or (largest, largest)
    try:
        height, width = smart_resize(height, width, factor=side, min_pixels=low, max_pixels=high)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"The image size {width}x{height} cannot be planned with: {error}.") from None
    channels, frames = getattr(vision, "in_channels", 3), getattr(vision, "temporal_patch_size", 1)
    return (1, height // vision.patch_size, width // vision.patch_size), channels * frames * vision.patch_size**2


def _estimated_prefix(parts: Sequence[Part], image_tokens: int, image_token_id: int) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += [image_token_id] * image_tokens if isinstance(part, ImagePart) else [0] * _tokens(part)
    return ids


def _tokens(part: TextPart) -> int:
    if part.control:  # markers, line breaks and a role: one token each
        return part.text.count("<|") + part.text.count("\n") + 1
    return round(len(part.text) / CHARACTERS_A_TOKEN)


def _answer_tokens(text: str | None) -> int:
    """Qwen's tokenizer takes digits one by one; an end-of-turn token closes the answer."""
    if text is None:
        return 0
    return 1 + (len(text) if any(c.isdigit() for c in text) else 1)
