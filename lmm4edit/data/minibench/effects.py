"""Image operations that tasks and artefacts are made of: weather, damage, styles, patterns.

Images are float arrays of shape (size, size, 3), values 0-1; sizes of effects are fractions of the side, so that an
effect looks the same at any resolution.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageFilter

from lmm4edit.data.minibench.objects import COLOURS
from lmm4edit.data.minibench.scenes import brightness, smooth_noise, to_float, to_image


def gaussian_blur(image: np.ndarray, radius: float) -> np.ndarray:
    """Blur with a standard deviation of ``radius`` (fraction of the side)."""
    return to_float(to_image(image).filter(ImageFilter.GaussianBlur(radius * len(image))))


def pattern(kind: str, size: int, colour: str) -> np.ndarray:
    yy, xx = (np.mgrid[0:size, 0:size].astype(np.float32) + 0.5) / size
    if kind == "striped":
        on = np.sin(2 * np.pi * 9 * (xx + yy)) > 0
    elif kind == "checkered":
        on = (np.floor(xx * 10) + np.floor(yy * 10)) % 2 > 0
    else:
        on = np.hypot((xx * 9) % 1 - 0.5, (yy * 9) % 1 - 0.5) < 0.3
    ink = np.asarray(COLOURS[colour], np.float32)
    contrast = np.float32(0.98) if ink.mean() < 0.6 else np.float32(0.05)
    return np.where(on[..., None], contrast, ink).astype(np.float32)


def stylise(image: np.ndarray, style: str) -> np.ndarray:
    """The image in a named style: sepia, a pencil sketch, black and white, a poster, a negative."""
    grey = brightness(image)[..., None]
    if style == "sepia photo":
        return np.clip(grey * np.array([1.1, 0.86, 0.58], np.float32) + np.array([0.08, 0.03, 0.0], np.float32), 0, 1)
    if style == "pencil sketch":
        edges = np.abs(grey - gaussian_blur(np.repeat(grey, 3, -1), 0.02)[..., :1])
        return np.repeat(np.clip(0.97 - 6 * edges, 0, 1), 3, -1)
    if style == "black and white film":
        return np.repeat(np.clip((grey - 0.5) * 1.3 + 0.5, 0, 1), 3, -1)
    if style == "pop art poster":
        return np.clip(np.round((image - 0.5) * 2.2 + 1) / 2, 0, 1).astype(np.float32)
    return 1 - image


STYLES = ("sepia photo", "pencil sketch", "black and white film", "pop art poster", "photo negative")


def weather(image: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """The image in other weather, season or hour: snowy, foggy, autumn, night, rainy."""
    size = len(image)
    grey = brightness(image)[..., None]
    if kind == "snowy":
        return snow(np.clip(image * 0.5 + 0.45, 0, 1), rng, 0.9)
    if kind == "foggy":
        return haze(image, 0.8)
    if kind == "autumn":
        return np.clip(
            image * 0.35 + grey * np.array([1.05, 0.5, 0.1], np.float32) + np.array([0.12, 0.04, 0], np.float32), 0, 1
        )
    if kind == "night":
        return np.clip(grey * 0.25 + image * 0.1 + np.array([0.0, 0.01, 0.13], np.float32), 0, 1)
    return rain(np.clip(image * 0.6 + smooth_noise(rng, size, 4, 1) * 0.1, 0, 1), rng, 0.9)


def haze(image: np.ndarray, strength: float) -> np.ndarray:
    """Blend towards airlight."""
    return (image * (1 - strength) + np.float32(0.83) * strength).astype(np.float32)


def snow(image: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    """White flakes, about 3 % of the side wide."""
    cells = 28
    flakes = (rng.random((cells, cells)) < 0.1).astype(np.uint8) * 255
    big = (
        np.asarray(Image.fromarray(flakes).resize((len(image),) * 2, Image.Resampling.BICUBIC), np.float32)[..., None]
        / 255
    )
    return np.clip(image + np.clip(big * 1.6, 0, 1) * strength * (1 - image), 0, 1)


def rain(image: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    """Slanted bright streaks."""
    size = len(image)
    drops = (rng.random((12, 40)) < 0.22).astype(np.uint8) * 255
    streaks = np.asarray(Image.fromarray(drops).resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255
    shift = np.arange(size) // 4
    streaks = streaks[np.arange(size)[:, None], (np.arange(size)[None, :] + shift[:, None]) % size][..., None]
    return np.clip(image * (1 - 0.12 * strength) + streaks * 0.75 * strength * (1 - image * 0.6), 0, 1)


WEATHERS = ("snowy", "foggy", "autumn", "night", "rainy")


def grain(image: np.ndarray, rng: np.random.Generator, sigma: float) -> np.ndarray:
    """Noise with grains 1/56 of the side wide, so that it survives a change of resolution."""
    noise = rng.normal(0, sigma, (56, 56, 3)).astype(np.float32)
    fine = max(1, round(len(image) / 56))
    full = noise.repeat(fine, 0).repeat(fine, 1)
    if len(full) != len(image):
        index = np.minimum((np.arange(len(image)) * len(full)) // len(image), len(full) - 1)
        full = full[index][:, index]
    return full
