"""Artefacts (which lower perceptual quality) and collateral changes (which lower attribute preservation), of known
level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from lmm4edit.data.minibench.effects import gaussian_blur, grain
from lmm4edit.data.minibench.objects import random_thing
from lmm4edit.data.minibench.scenes import generate_scene, to_float, to_image

ARTEFACTS = ("noise", "blur", "blocks", "ringing", "ghosting")
COLLATERALS = ("patch", "object", "tone", "backdrop")


def add_artefact(image: np.ndarray, kind: str, level: float, rng: np.random.Generator) -> np.ndarray:
    """The image with an artefact.

    Args:
        kind: one of :data:`ARTEFACTS`.
        level: 0 none, 1 severe; visible from about 0.1, and growing steadily.
    """
    if level <= 0:
        return image
    size = len(image)
    if kind == "noise":
        return np.clip(image + grain(image, rng, 0.03 + 0.25 * level), 0, 1)
    if kind == "blur":
        return gaussian_blur(image, 0.008 + 0.045 * level)
    if kind == "blocks":
        cells = int(round(30 - 22 * level))
        small = to_image(image).resize((cells, cells), Image.Resampling.BOX)
        coarse = to_float(small.resize((size, size), Image.Resampling.NEAREST))
        return image + (coarse - image) * np.float32(0.5 + 0.5 * level)
    if kind == "ringing":
        return np.clip(image + (image - gaussian_blur(image, 0.025)) * np.float32(0.8 + 5 * level), 0, 1)
    step = max(1, round(size * (0.04 + 0.06 * level)))
    double = np.roll(image, (step // 2, step), axis=(0, 1))
    return image + (double - image) * np.float32(0.15 + 0.35 * level)


@dataclass(frozen=True)
class Collateral:
    """An image with a change nobody asked for, and where it is: ``mask`` (size, size), 0-1."""

    image: np.ndarray
    mask: np.ndarray


def add_collateral(
    image: np.ndarray, kind: str, level: float, region: np.ndarray, rng: np.random.Generator
) -> Collateral:
    """The image with a change outside the edit's region (anywhere, where the whole image is meant to change).

    Args:
        kind: one of :data:`COLLATERALS`.
        level: 0 none, 1 severe: both area and contrast grow with it.
        region: (size, size), 0-1, where the edit is meant to happen.
    """
    size = len(image)
    if level <= 0:
        return Collateral(image, np.zeros((size, size), np.float32))
    outside = np.ones_like(region) if float(region.mean()) > 0.6 else 1 - region
    if kind == "tone":
        gain = np.float32(1) + np.float32(0.75 * level) * rng.choice([-1.0, 1.0], 3).astype(np.float32)
        changed, mask = np.clip(image * gain, 0, 1), outside
    elif kind == "backdrop":
        changed, mask = generate_scene(rng, size), outside * np.float32(0.15 + 0.85 * level)
    elif kind == "object":
        thing = random_thing(rng, radius=(0.1 + 0.12 * level, 0.13 + 0.16 * level))
        mask = thing.mask(size) * outside
        changed = thing.paint(image)
    else:
        side = round(size * (0.2 + 0.4 * level))
        top, left = (int(v) for v in rng.integers(0, size - side + 1, 2))
        mask = np.zeros((size, size), np.float32)
        mask[top : top + side, left : left + side] = 0.45 + 0.55 * level
        mask *= outside
        changed = generate_scene(rng, size)
    return Collateral(image + (changed - image) * mask[..., None], mask)
