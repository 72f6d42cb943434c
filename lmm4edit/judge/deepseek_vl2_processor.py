"""Images and tokenizer of DeepSeek-VL2: the published settings, read by Transformers' ``AutoProcessor``.

An image is looked at whole, padded to a square, and again in square tiles of the canvas that suits its shape best
(arXiv:2412.10302, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin
from transformers.image_processing_utils import select_best_resolution

from lmm4edit.judge.deepseek_vl2 import PUBLISHED_RESOLUTIONS, DeepseekVL2Config

IMAGE_TOKEN, PAD_TOKEN = "<image>", "<｜▁pad▁｜>"
CHAT_TOKENS = ("<|User|>", "<|Assistant|>")


class DeepseekVLV2Processor(ProcessorMixin):
    """Tokenizer and image settings; named as in the published ``processor_config.json``.

    Args:
        tokenizer: the markers it lacks are added, as the published processor does.
        candidate_resolutions: width and height of the canvases to choose from; the first is the size of a tile.
        patch_size, downsample_ratio: of vision encoder and projector.
        image_mean, image_std: per channel, of pixels between 0 and 1.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        candidate_resolutions: Sequence[Sequence[int]] = PUBLISHED_RESOLUTIONS,
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        chat_template: str | None = None,
        **_: Any,
    ) -> None:
        self.candidate_resolutions = [[int(width), int(height)] for width, height in candidate_resolutions]
        self.patch_size = patch_size
        self.downsample_ratio = downsample_ratio
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
        known = tokenizer.added_tokens_encoder
        if missing := [token for token in (IMAGE_TOKEN, *CHAT_TOKENS) if token not in known]:
            tokenizer.add_tokens(missing, special_tokens=True)
        super().__init__(tokenizer, chat_template=chat_template)

    @property
    def image_processor(self) -> DeepseekVLV2Processor:
        """Itself: the published layout keeps the image settings with the processor."""
        return self

    @property
    def tile(self) -> int:
        """Side of a crop in pixels."""
        return self.candidate_resolutions[0][0]

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the canvas for an image of this size."""
        choices = [(rows, columns) for columns, rows in self.candidate_resolutions]
        rows, columns = select_best_resolution((height, width), choices)
        return int(rows), int(columns)

    def crops(self, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """One image's crops and its canvas.

        Returns:
            [1 + tiles, 3, side, side], the whole first, then the tiles row by row; height and width of the canvas.
        """
        height, width = self.canvas(image.height, image.width)
        colour = tuple(int(255 * mean) for mean in self.image_mean)
        side = self.tile
        canvas = ImageOps.pad(image, (width, height), color=colour)
        pictures = [ImageOps.pad(image, (side, side), color=colour)]
        pictures += [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2) / 255
        mean, deviation = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return (pixels - mean) / deviation, (height, width)

    def count_tokens(self, canvas: tuple[int, int]) -> int:
        """Tokens of an image on a canvas: whole and tiles with a newline a row, and a separator."""
        side = ceil(self.tile // self.patch_size / self.downsample_ratio)
        rows, columns = (length // self.tile for length in canvas)
        return side * (side + 1) + 1 + rows * side * (columns * side + 1)


AutoProcessor.register(DeepseekVL2Config, DeepseekVLV2Processor, exist_ok=True)
