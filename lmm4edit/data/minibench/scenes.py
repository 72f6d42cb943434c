"""Source images: generated scenes, and crops of the photographs bundled with scikit-image.

All images are float arrays of shape (size, size, 3), values 0-1.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

TRAIN_PHOTOGRAPHS = (
    "brick.png",
    "cell.png",
    "chelsea.png",
    "clock_motion.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "microaneurysms.png",
    "moon.png",
    "page.png",
    "retina.jpg",
    "text.png",
)
"""Photographs whose crops may be seen in training. ``motorcycle_right`` is left out: it shows a test photograph's
scene."""

TEST_PHOTOGRAPHS = ("astronaut.png", "camera.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
"""Photographs that no training ever sees: the split is by photograph, never by crop."""

_LONGEST_USEFUL_SIDE = 640


@lru_cache(maxsize=64)
def load_photograph(name: str) -> np.ndarray:
    """One bundled photograph as (height, width, 3) uint8, shrunk so that its short side is at most 640 px.

    Raises:
        FileNotFoundError: if the installed scikit-image does not ship the file.
    """
    import skimage

    from lmm4edit.data.images import decode_image

    image = decode_image(Path(skimage.__file__).parent / "data" / name)
    scale = _LONGEST_USEFUL_SIDE / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    return np.asarray(image)


def crop_photograph(name: str, rng: np.random.Generator, size: int) -> np.ndarray:
    """A random square crop of a bundled photograph, 45-100 % of its short side."""
    photograph = load_photograph(name)
    height, width = photograph.shape[:2]
    side = int(min(height, width) * rng.uniform(0.45, 1.0))
    top, left = int(rng.integers(0, height - side + 1)), int(rng.integers(0, width - side + 1))
    crop = Image.fromarray(photograph[top : top + side, left : left + side])
    return to_float(crop.resize((size, size), Image.Resampling.BICUBIC))


def to_float(image: Image.Image) -> np.ndarray:
    """(height, width, 3) float32 in 0-1."""
    return np.asarray(image, dtype=np.float32) / 255.0


def to_image(array: np.ndarray) -> Image.Image:
    """The 8-bit RGB image of a float array in 0-1."""
    return Image.fromarray((np.clip(array, 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8))


def brightness(image: np.ndarray) -> np.ndarray:
    """Mean over the three channels: (height, width). Several times faster than a reduction over an axis of length 3."""
    return (image[..., 0] + image[..., 1] + image[..., 2]) * np.float32(1 / 3)


def smooth_noise(rng: np.random.Generator, size: int, cells: int, channels: int = 3) -> np.ndarray:
    """Random values on a cells x cells lattice, interpolated to size x size: shape (size, size, channels), 0-1."""
    lattice = (rng.random((cells, cells, channels)) * 255).astype(np.uint8)
    if channels == 1:
        return (
            np.asarray(Image.fromarray(lattice[..., 0]).resize((size, size), Image.Resampling.BICUBIC))[..., None]
            / 255.0
        )
    return np.asarray(Image.fromarray(lattice).resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32) / 255.0


def generate_scene(rng: np.random.Generator, size: int) -> np.ndarray:
    """A random scene: a graded or cloudy ground, a horizon or stripes, textures at several scales, and a few things
    on it.

    Varied enough that a model cannot learn the scenes by heart: every number of it is drawn anew.
    """
    yy, xx = np.mgrid[0:size, 0:size].astype(np.float32) / size
    angle = rng.uniform(0, 2 * np.pi)
    ramp = np.cos(angle) * xx + np.sin(angle) * yy
    ramp = ((ramp - ramp.min()) / (np.ptp(ramp) + 1e-6))[..., None]
    scene = _random_colour(rng) * (1 - ramp) + _random_colour(rng) * ramp
    if rng.random() < 0.4:  # ground and sky
        horizon = rng.uniform(0.35, 0.75) + 0.04 * np.sin(2 * np.pi * rng.uniform(0.5, 2) * xx + rng.uniform(0, 6))
        ground = 1.0 / (1.0 + np.exp(np.clip((horizon - yy) * 80, -30, 30)))[..., None]
        scene = scene * (1 - ground) + _random_colour(rng) * ground * (0.7 + 0.6 * ramp)
    if rng.random() < 0.6:
        weight = rng.uniform(0.1, 0.6)
        scene = scene * (1 - weight) + smooth_noise(rng, size, int(rng.integers(3, 9))) * weight
    if rng.random() < 0.5:
        fine = smooth_noise(rng, size, int(rng.integers(10, 30)), channels=1) - 0.5
        scene = scene + fine * rng.uniform(0.05, 0.3)
    if rng.random() < 0.35:
        wave = np.sin(2 * np.pi * rng.uniform(2, 12) * (np.cos(angle) * yy + np.sin(angle) * xx) + rng.uniform(0, 6))
        scene = scene + wave[..., None] * rng.uniform(0.03, 0.18) * rng.random(3)
    canvas = to_image(scene)
    draw = ImageDraw.Draw(canvas)
    for _ in range(int(rng.integers(0, 7))):
        x, y = rng.integers(-size // 8, size, 2)
        w, h = rng.integers(size // 14, size // 2, 2)
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        kind = int(rng.integers(4))
        if kind == 0:
            draw.ellipse([x, y, x + w, y + h], fill=colour)
        elif kind == 1:
            draw.rectangle([x, y, x + w, y + h], fill=colour)
        elif kind == 2:
            draw.polygon([(x, y + h), (x + w, y + h), (x + w // 2, y)], fill=colour)
        else:
            draw.line(
                [x, y, x + 2 * w - size // 4, y + h], fill=colour, width=max(1, size // int(rng.integers(16, 56)))
            )
    return to_float(canvas)


def _random_colour(rng: np.random.Generator) -> np.ndarray:
    return (rng.random(3) * 0.9 + 0.05).astype(np.float32)
