"""The one image decoder: whatever comes in, an upright 8-bit RGB picture comes out, or an error that names the image.

What it decides, once for training, scoring and every metric:

* EXIF orientation is applied; unreadable EXIF data counts as none.
* Transparency (RGBA, LA, palette and grey ``tRNS``) is composited on white.
* 16-bit channels keep their high byte, which is how Pillow reads 16-bit colour; 32-bit integers are read as 16-bit.
* CMYK, YCbCr, LAB, palettes and grey are converted by Pillow; embedded colour profiles are not applied.
* Of an animation the first frame counts.
* Truncated files are refused, even where another library told Pillow to accept them; so are files with more than
  :data:`MAX_PIXELS` pixels, before anything is decoded.
* Formats: :data:`FORMATS`. Not EPS and the like, whose decoding runs another program.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from lmm4edit.data.problems import shown
from lmm4edit.errors import ImageError

MAX_PIXELS = 89_478_485
"""Largest number of pixels decoded. Pillow warns from here on (and refuses twice as many): a file of 20 kilobytes can
hold that many, and costs gigabytes in a model's processor. ``max_pixels`` of :func:`decode_image` raises it."""

MAX_ASPECT = 200.0
"""Largest ratio of the longer to the shorter side: Qwen's processors raise an error beyond it."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""Pillow's names; its JPEG reader also takes MPO, the format of many cameras."""

ImageSource = str | Path | bytes | Image.Image | np.ndarray
"""A path, a ``data:`` URI, the bytes of a file, a Pillow image, or an array (see :func:`decode_image`)."""

_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FORMAT_NAMES = "PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or PPM"
_tolerance = threading.Lock()


def decode_image(source: ImageSource, name: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image.

    Args:
        source: path; ``data:`` URI; bytes of an image file; Pillow image (its current frame); or array of shape
            (height, width), (height, width, 1), (height, width, 3) or (height, width, 4), of uint8, uint16, or floats
            in [0, 1].
        name: what error messages call it; default: the path.
        max_pixels: larger images are refused.

    Returns:
        RGB, 8 bit, upright, loaded; a new image, never ``source`` itself.

    Raises:
        ImageError: if it is missing, damaged, too large, or none of the above; the message names it and says what to
            do.
    """
    if isinstance(source, Image.Image):
        name = name or str(getattr(source, "filename", "") or "image in memory")
        return _decode(lambda: source, name, max_pixels)
    if isinstance(source, np.ndarray):
        name = name or "array"
        pixels = _checked_array(source, name)
        return _decode(lambda: Image.fromarray(pixels), name, max_pixels)
    if isinstance(source, bytes):
        return _decode_file(io.BytesIO(source), name or f"image of {len(source)} bytes", max_pixels)
    if isinstance(source, str) and source.startswith("data:"):
        data = _decode_uri(source, name or "data: URI")
        return _decode_file(io.BytesIO(data), name or f"data: URI of {len(data)} bytes", max_pixels)
    if isinstance(source, str | Path):
        name = name or str(source)
        with _open(source, name) as file:
            return _decode_file(file, name, max_pixels)
    expected = "a path, a data: URI, bytes, a Pillow image or an array"
    raise ImageError.from_parts(name or "image", expected, type(source).__name__, "Convert it to one of them.")


def pixel_hash(image: Image.Image) -> str:
    """SHA-256 of an image's size and pixels, in hexadecimal: equal for equal pictures, whatever file they came from."""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def fit_for_patches(
    image: Image.Image, factor: int, max_aspect: float = MAX_ASPECT, name: str | None = None
) -> Image.Image:
    """Enlarge an image that is smaller than one patch; refuse one that no processor takes.

    Args:
        image: decoded.
        factor: side of one merged patch in pixels (Qwen2.5-VL: 14 * 2 = 28).
        max_aspect: largest ratio of the longer to the shorter side.
        name: what the error message calls the image.

    Returns:
        The same image if both sides have ``factor`` pixels; else one enlarged (bicubic) in proportion, so that the
        shorter side has them.

    Raises:
        ImageError: if the ratio of the sides exceeds ``max_aspect``.
    """
    short, long = sorted(image.size)
    if long > max_aspect * short:
        got = f"{image.width} x {image.height} px, a ratio of {long / short:.1f}"
        expected = f"a ratio of at most {max_aspect:g} between the sides"
        raise ImageError.from_parts(name or "image", expected, got, "Crop it, or leave it out.")
    if short >= factor:
        return image
    scale = factor / short
    width, height = (max(factor, math.floor(side * scale + 1e-9)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _open(path: str | Path, name: str) -> BinaryIO:
    expected = "an image file"
    try:
        # A pipe or device would block or never end.
        if os.path.exists(path) and not os.path.isfile(path):
            kind = "a folder" if os.path.isdir(path) else "a pipe or device"
            raise ImageError.from_parts(name, expected, kind, "Give the path of a file.")
        return open(path, "rb")
    except FileNotFoundError:
        remedy = "Check the path and the image root."
        raise ImageError.from_parts(name, expected, "nothing there", remedy) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        got = f"one that cannot be opened: {reason}"
        raise ImageError.from_parts(name, expected, got, "Check the path and its permissions.") from None


def _decode_uri(uri: str, name: str) -> bytes:
    head, _, content = uri.partition(",")
    expected, remedy = "data:<type>;base64,<content>", "Encode the file again."
    if not head.endswith(";base64"):
        raise ImageError.from_parts(name, expected, shown(head), remedy)
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ImageError.from_parts(name, expected, f"content that is no base64: {error}", remedy) from None


def _decode_file(file: BinaryIO, name: str, max_pixels: int) -> Image.Image:
    expected = "an image file"
    try:
        head = file.read(64)
        file.seek(0)
    except OSError as error:  # a bad disk, a network drive that went away
        got = f"one that cannot be read: {error.strerror or error}"
        raise ImageError.from_parts(name, expected, got, "Look at the disk, then try again.") from None
    if not head:
        raise ImageError.from_parts(name, expected, "an empty file", "Copy or download it again.")
    if head.startswith(b"version https://git-lfs"):
        raise ImageError.from_parts(name, expected, "a Git LFS pointer", "Run `git lfs pull`.")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise ImageError.from_parts(name, expected, "a web page", "The download failed: repeat it.")
    return _decode(lambda: Image.open(file, formats=_formats()), name, max_pixels)


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those of the accepted formats that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _decode(opening: Callable[[], Image.Image], name: str, max_pixels: int) -> Image.Image:
    """Everything between an opened image and the result, with all errors of decoding told in our words."""
    try:
        image = opening()
        width, height = image.size
        if width * height > max_pixels:
            raise _too_large(name, f"{width} x {height} = {width * height:,}", max_pixels, "max_pixels")
        if not width or not height:
            raise ImageError.from_parts(name, "at least one pixel", f"{width} x {height}", "Leave it out.")
        _load_strictly(image)
        orientation = _orientation(image)
        rgb = _to_rgb(image, name)
        upright = rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb
        # Or else decoding the result once more would turn it and make a colour transparent once more.
        upright.info = {}
        return upright
    except ImageError:
        raise
    except UnidentifiedImageError:
        got = "a file that is none of them, or damaged at its beginning"
        raise ImageError.from_parts(name, _FORMAT_NAMES, got, "Convert it, or copy it again.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        got, limit = re.findall(r"\d+", str(error))[:2]
        raise _too_large(name, f"{int(got):,}", int(limit), "PIL.Image.MAX_IMAGE_PIXELS") from None
    except MemoryError:
        raise ImageError.from_parts(name, "an image that fits in memory", "one that does not", "Shrink it.") from None
    except Exception as error:  # decoders raise errors of any kind for damaged bytes
        got = "one that is cut off before its end" if "truncated" in str(error) else f"one that is damaged ({error})"
        raise ImageError.from_parts(name, "a whole image file", got, "Copy or download it again.") from error


def _too_large(name: str, got: str, limit: int, setting: str) -> ImageError:
    remedy = f"Shrink it, or raise {setting} if you trust where it comes from."
    return ImageError.from_parts(name, f"at most {limit:,} pixels", got, remedy)


def _load_strictly(image: Image.Image) -> None:
    # Other libraries switch this on for the whole process, and half-grey pictures then pass as whole.
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        image.load()
        return
    with _tolerance:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            image.load()
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = True


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged EXIF data says nothing about the pixels
        return 1


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I"):
        return _sixteen_bit_to_rgb(image, name)
    if image.mode == "F":
        got = "floating-point ones, whose range the file does not state"
        raise ImageError.from_parts(name, "whole-number pixels", got, "Save it with 8 or 16 bits.")
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode == "RGBa" or image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _sixteen_bit_to_rgb(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        got = f"{values.min()} to {values.max()}"
        raise ImageError.from_parts(name, "pixels from 0 to 65535", got, "Save it with 8 or 16 bits.")
    grey = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _checked_array(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """The array as uint8 of shape (height, width) or (height, width, 3 or 4)."""
    channels = array.shape[2] if array.ndim == 3 else None
    if array.ndim not in (2, 3) or channels not in (None, 1, 3, 4) or array.size == 0:
        first = array.shape[0] if array.ndim == 3 else None
        remedy = "Move the channels last." if first in (1, 3, 4) else "Pass one image at a time."
        expected = "an array of shape (height, width) or (height, width, 1, 3 or 4)"
        raise ImageError.from_parts(name, expected, str(array.shape), remedy)
    if channels == 1:
        array = array[:, :, 0]
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            got = f"{array.min():g} to {array.max():g}"
            raise ImageError.from_parts(name, "floats from 0 to 1", got, "Scale and clip them first.")
        return np.rint(array.astype(np.float64) * 255).astype(np.uint8)
    expected = "uint8, uint16, or floats from 0 to 1"
    raise ImageError.from_parts(name, expected, str(array.dtype), "Convert the array first.")
