"""How images become what a backbone's vision encoder reads, one way for each kind of image processor.

A backbone's row names one of the :class:`ImageInput` values at the end of this file. Everything else in the package
sees :class:`ProcessedImage` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lmm4edit.errors import ConfigError


class ProcessedImage(NamedTuple):
    """One image, ready for the vision encoder.

    Attributes:
        patches: what the encoder reads. Cut into patches (Qwen): [time*height*width, patch values]; whole crops
            (others): [crops, 3, height, width].
        grid: (time or crops, height, width) in patches.
        tokens: how many tokens it takes in the prompt.
        size: height and width in pixels, before the processor (LLaVA-NeXT needs it) or of the canvas that is cut into
            tiles (DeepSeek-VL2).
    """

    patches: Tensor
    grid: tuple[int, int, int]
    tokens: int
    size: tuple[int, int]


@dataclass(frozen=True)
class ImageInput:
    """One way from images to a backbone's arguments.

    Attributes:
        process: (processor, images) to one :class:`ProcessedImage` an image. Raises ``ValueError`` for an image that
            the processor refuses.
        arguments: a packed batch to the image arguments of the model's ``forward``.
        shortest_side: (processor) to the side in pixels below which an image has to be enlarged first.
        set_limits: (processor, min_pixels, max_pixels) changes the processor in place; ``None`` leaves a limit as it
            is. Raises :class:`~lmm4edit.errors.ConfigError` for limits that cannot be kept.
    """

    process: Callable[[Any, Sequence[Any]], list[ProcessedImage]]
    arguments: Callable[[Any], dict[str, Tensor | None]]
    shortest_side: Callable[[Any], int]
    set_limits: Callable[[Any, int | None, int | None], None]


def _cut_into_patches(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    out = processor.image_processor(images=list(images), return_tensors="pt")
    grids = [(int(t), int(h), int(w)) for t, h, w in out["image_grid_thw"].tolist()]
    pieces = torch.split(out["pixel_values"], [t * h * w for t, h, w in grids])
    merged = processor.image_processor.merge_size**2
    return [
        ProcessedImage(patches, (t, h, w), t * h * w // merged, _size(image))
        for patches, (t, h, w), image in zip(pieces, grids, images, strict=True)
    ]


def _patch_arguments(batch: Any) -> dict[str, Tensor | None]:
    return {
        "pixel_values": batch.pixel_values,
        "image_grid_thw": batch.image_grid_thw,
        "mm_token_type_ids": batch.mm_token_type_ids,
    }


def _merged_patch(processor: Any) -> int:
    return processor.image_processor.patch_size * processor.image_processor.merge_size


def _limit_pixels(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    images = processor.image_processor
    low = images.size["shortest_edge"] if min_pixels is None else min_pixels
    high = images.size["longest_edge"] if max_pixels is None else max_pixels
    side = _merged_patch(processor)
    if not 0 < low <= high or high < side * side:
        raise ConfigError(
            f"Expected 0 < min_pixels <= max_pixels and max_pixels >= {side * side} (one token of {side} x {side} "
            f"pixels), got min_pixels={low} and max_pixels={high}."
        )
    images.size = {"shortest_edge": low, "longest_edge": high}


def _crop_arguments(batch: Any) -> dict[str, Tensor | None]:
    return {"pixel_values": batch.pixel_values}


def _any_side(_: Any) -> int:
    return 1


def _refuse_limits(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    if min_pixels is not None or max_pixels is not None:
        raise ConfigError(
            f"{type(processor).__name__} resizes every image to one fixed size, so min_pixels={min_pixels} and "
            f"max_pixels={max_pixels} cannot be kept. Leave both out."
        )


def _llava_squares(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    # The published processor cuts off what is beyond the middle square; an edit there would never be seen. LLaVA 1.5
    # was trained on images padded to a square with the mean colour (Liu et al. 2023, arXiv:2310.03744).
    colour = tuple(round(255 * mean) for mean in processor.image_processor.image_mean)
    squares = [_pad_to_square(_as_image(image), colour) for image in images]
    pixels = processor.image_processor(images=squares, return_tensors="pt")["pixel_values"]
    _, _, height, width = pixels.shape
    rows, columns = height // _patch_side(processor), width // _patch_side(processor)
    tokens = rows * columns + _extra_tokens(processor)
    return [
        ProcessedImage(pixel[None], (1, rows, columns), tokens, _size(image))
        for pixel, image in zip(pixels, images, strict=True)
    ]


def _deepseek_squares(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    # One by one: images of different sizes come to different sizes before they are padded.
    side = isqrt(processor.num_image_tokens)
    done = []
    for image in images:
        pixels = processor.image_processor(images=[_as_image(image)], return_tensors="pt")["pixel_values"]
        done.append(ProcessedImage(pixels, (1, side, side), processor.num_image_tokens, _size(image)))
    return done


def _internvl_tiles(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    settings = processor.image_processor
    # crop_to_patches is a default of the processor's call, not always of the image processor it holds.
    defaults = getattr(processor, "images_kwargs", None) or {}
    tiled = defaults.get("crop_to_patches", settings.crop_to_patches)
    out = settings(images=[_as_image(image) for image in images], crop_to_patches=tiled, return_tensors="pt")
    counts = [int(count) for count in out["num_patches"]]
    side = 2 * isqrt(processor.image_seq_length)  # pixel shuffle makes one token of 2 x 2 patches
    return [
        ProcessedImage(tiles, (count, side, side), count * processor.image_seq_length, _size(image))
        for tiles, count, image in zip(torch.split(out["pixel_values"], counts), counts, images, strict=True)
    ]


def _limit_tiles(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    settings = processor.image_processor
    tile = settings.size["height"] * settings.size["width"]
    if min_pixels is not None or (max_pixels is not None and max_pixels < tile):
        raise ConfigError(
            f"Images are cut into tiles of {tile} pixels: expected max_pixels of at least that and no min_pixels, got "
            f"min_pixels={min_pixels} and max_pixels={max_pixels}."
        )
    if max_pixels is not None:
        settings.max_patches = max_pixels // tile


def _llava_next_crops(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    # One by one: in one call the crops of all images are padded to the largest number.
    done = []
    for image in images:
        out = processor.image_processor(images=[_as_image(image)], return_tensors="pt")
        crops = out["pixel_values"][0]
        size = (int(out["image_sizes"][0][0]), int(out["image_sizes"][0][1]))
        side = crops.shape[-1] // _patch_side(processor)
        tokens = side * side + _unpadded_tokens(processor, size, crops.shape[-1], side) + _extra_tokens(processor)
        done.append(ProcessedImage(crops, (len(crops), side, side), tokens, size))
    return done


def _unpadded_tokens(processor: Any, size: tuple[int, int], crop: int, side: int) -> int:
    """Tokens of the crops of one image without its padding, and one at the end of every row."""
    from transformers.image_processing_utils import select_best_resolution

    best = select_best_resolution(size, processor.image_processor.image_grid_pinpoints)
    rows, columns = (length // crop * side for length in best)
    height, width = size
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
    return rows * columns + rows


def _deepseek_tiles(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    side = processor.tile // processor.patch_size
    done = []
    for image in images:
        crops, canvas = processor.crops(_as_image(image))
        done.append(ProcessedImage(crops, (len(crops), side, side), processor.count_tokens(canvas), canvas))
    return done


def _deepseek_tile_arguments(batch: Any) -> dict[str, Tensor | None]:
    return {**_sized_crop_arguments(batch), "mm_token_type_ids": batch.mm_token_type_ids}


def _limit_canvas(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    least = processor.tile**2
    if min_pixels is not None or (max_pixels is not None and max_pixels < least):
        raise ConfigError(
            f"Images are cut into tiles of {least} pixels: expected max_pixels of at least that and no min_pixels, got "
            f"min_pixels={min_pixels} and max_pixels={max_pixels}."
        )
    if max_pixels is not None:
        sizes = processor.candidate_resolutions
        processor.candidate_resolutions = [[width, height] for width, height in sizes if width * height <= max_pixels]


def _sized_crop_arguments(batch: Any) -> dict[str, Tensor | None]:
    return {"pixel_values": batch.pixel_values, "image_sizes": batch.image_sizes}


def _patch_side(processor: Any) -> int:
    if not processor.patch_size:
        raise ConfigError(
            f"{type(processor).__name__} does not say its patch_size, so image tokens cannot be counted. Set "
            "patch_size (14 for CLIP-L/14), num_additional_image_tokens (1) and vision_feature_select_strategy "
            "('default') in its processor_config.json."
        )
    return processor.patch_size


def _extra_tokens(processor: Any) -> int:
    """Tokens beside the patches: CLIP's class token, which the strategy ``default`` takes away again."""
    return processor.num_additional_image_tokens - (processor.vision_feature_select_strategy == "default")


def _as_image(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    array = image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) else image
    return Image.fromarray(np.ascontiguousarray(array))


def _size(image: Any) -> tuple[int, int]:
    """Height and width of a PIL image, an array [height, width, 3] or a tensor [3, height, width]."""
    if isinstance(image, Image.Image):
        return image.height, image.width
    height, width = image.shape[-2:] if isinstance(image, Tensor) else image.shape[:2]
    return int(height), int(width)


def _pad_to_square(image: Image.Image, colour: tuple[int, ...]) -> Image.Image:
    if image.width == image.height:
        return image
    side = max(image.size)
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


PATCHES = ImageInput(_cut_into_patches, _patch_arguments, _merged_patch, _limit_pixels)
"""Qwen-VL: any size, cut into patches; the number of tokens follows the number of pixels."""

LLAVA_SQUARES = ImageInput(_llava_squares, _crop_arguments, _any_side, _refuse_limits)
"""LLaVA 1.5: padded to a square, resized to one fixed size."""

DEEPSEEK_SQUARES = ImageInput(_deepseek_squares, _crop_arguments, _any_side, _refuse_limits)
"""DeepSeek-VL: resized and padded to one fixed square by its own processor."""

INTERNVL_TILES = ImageInput(_internvl_tiles, _crop_arguments, _any_side, _limit_tiles)
"""InternVL: cut into square tiles and, if there are several, a thumbnail; ``max_pixels`` limits the tiles."""

LLAVA_NEXT_CROPS = ImageInput(_llava_next_crops, _sized_crop_arguments, _any_side, _refuse_limits)
"""LLaVA-NeXT: the whole image and square crops of it at the best of some resolutions; padding takes no tokens."""

DEEPSEEK_TILES = ImageInput(_deepseek_tiles, _deepseek_tile_arguments, _any_side, _limit_canvas)
"""DeepSeek-VL2: the whole image and square tiles of a canvas; ``max_pixels`` limits the canvas."""
