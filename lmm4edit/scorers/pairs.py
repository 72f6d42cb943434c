"""Decoded image pairs for scorers that compare pixels, with one policy for sizes that differ.

*Size policy of full-reference scorers.* The source is the reference. An edited image of another size is resized to the
source's size with Pillow's antialiased bicubic filter, whatever its aspect ratio.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lmm4edit.data.images import decode_image
from lmm4edit.records import EditSample

CACHE_BYTES = 256 * 2**20

Pixels = NDArray[np.uint8]


class ImagePair(NamedTuple):
    """Two images of one size.

    Attributes:
        source, edited: uint8 [H, W, 3], RGB; read-only.
        resized: whether the edited image was resized to the source's size.
    """

    source: Pixels
    edited: Pixels
    resized: bool


class _PixelCache:
    """Least recently used images up to a number of bytes, keyed by path, change time and size on disk."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.images: OrderedDict[tuple[str, int, int], Pixels] = OrderedDict()

    def get(self, path: str) -> Pixels:
        try:
            stat = Path(path).stat()
        except OSError:
            return _pixels(path)  # the decoder has the better message
        key = (path, stat.st_mtime_ns, stat.st_size)
        if key in self.images:
            self.images.move_to_end(key)
            return self.images[key]
        pixels = _pixels(path)
        self.images[key] = pixels
        self.held += pixels.nbytes
        while self.held > self.limit and len(self.images) > 1:
            self.held -= self.images.popitem(last=False)[1].nbytes
        return pixels


_CACHE = _PixelCache(CACHE_BYTES)


def load_pair(sample: EditSample) -> ImagePair:
    """Decode both images of a sample and bring them to the source's size.

    Several scorers that look at the same samples share the decoding.

    Raises:
        ImageError: one of the images is missing, damaged or refused; the message names it.
    """
    source, edited = _CACHE.get(sample.source_image), _CACHE.get(sample.edited_image)
    if source.shape == edited.shape:
        return ImagePair(source, edited, False)
    size = (source.shape[1], source.shape[0])
    resized = np.asarray(Image.fromarray(edited).resize(size, Image.Resampling.BICUBIC))
    return ImagePair(source, resized, True)


def _pixels(path: str) -> Pixels:
    pixels = np.array(decode_image(path), dtype=np.uint8)
    pixels.flags.writeable = False
    return pixels
