"""Things drawn into a scene with soft edges: coloured shapes, a face, a stick figure.

A thing is an opacity mask of shape (size, size), 0-1, computed from a signed distance, so that it can be moved, scaled
and bent by a continuous degree of edit. Positions and radii are fractions of the image's side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.10, 0.12),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.12, 0.25, 0.92),
    "yellow": (0.98, 0.90, 0.12),
    "purple": (0.58, 0.14, 0.75),
    "orange": (1.00, 0.52, 0.05),
    "white": (0.98, 0.98, 0.98),
    "black": (0.03, 0.03, 0.03),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
PLACES: dict[str, tuple[float, float]] = {
    "top left": (0.26, 0.26),
    "top right": (0.74, 0.26),
    "bottom left": (0.26, 0.74),
    "bottom right": (0.74, 0.74),
    "centre": (0.5, 0.5),
}


@dataclass(frozen=True)
class Thing:
    """A coloured shape at a place: ``x``, ``y`` and ``radius`` in fractions of the side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    def mask(self, size: int) -> np.ndarray:
        """Opacity (size, size), 0-1."""
        xx, yy = _grid(size)
        u, v = (xx - self.x) / self.radius, (yy - self.y) / self.radius
        return _soften(_DISTANCES[self.shape](u, v) * self.radius, size)

    def paint(self, image: np.ndarray, opacity: float = 1.0, texture: np.ndarray | None = None) -> np.ndarray:
        """The image with the thing on it; ``texture`` (size, size, 3) replaces the flat colour."""
        alpha = (self.mask(len(image)) * opacity)[..., None]
        return image * (1 - alpha) + alpha * (
            np.asarray(COLOURS[self.colour], np.float32) if texture is None else texture
        )

    def moved(self, x: float, y: float) -> Thing:
        return replace(self, x=x, y=y)


def random_thing(
    rng: np.random.Generator, place: str | None = None, radius: tuple[float, float] = (0.16, 0.24)
) -> Thing:
    """A random coloured shape, at a named place if given, else anywhere that keeps it inside."""
    shape, colour = pick(rng, SHAPES), pick(rng, tuple(COLOURS))
    x, y = PLACES[place] if place else rng.uniform(0.24, 0.76, 2)
    jitter = rng.uniform(-0.03, 0.03, 2) if place else (0.0, 0.0)
    return Thing(shape, colour, float(x + jitter[0]), float(y + jitter[1]), float(rng.uniform(*radius)))


def pick(rng: np.random.Generator, options: tuple[str, ...] | list[str], exclude: tuple[str, ...] = ()) -> str:
    """One of the options that is not excluded."""
    left = [o for o in options if o not in exclude]
    return left[int(rng.integers(len(left)))]


def face_mask(
    size: int, x: float, y: float, radius: float, curve: float, opening: float
) -> tuple[np.ndarray, np.ndarray]:
    """Opacity of a face's disc, and of its eyes and mouth.

    Args:
        curve: -1 a sad mouth, +1 a smile.
        opening: 0 a closed mouth, 1 a round open one.
    """
    xx, yy = _grid(size)
    u, v = (xx - x) / radius, (yy - y) / radius
    disc = _soften((np.hypot(u, v) - 1) * radius, size)
    eyes = np.minimum(np.hypot(u - 0.38, v + 0.3), np.hypot(u + 0.38, v + 0.3)) - 0.16
    mouth_v = 0.42 + 0.32 * curve * (0.35 - (u / 0.6) ** 2 * 0.7)
    line = np.maximum(np.abs(v - mouth_v) - 0.1, np.abs(u) - 0.58)
    hole = np.hypot(u / (0.2 + 0.12 * opening), (v - 0.45) / (0.06 + 0.3 * opening)) - 1
    mouth = line * (1 - opening) + np.where(opening > 0, hole * 0.25, 0) * opening
    return disc, _soften(np.minimum(eyes, mouth) * radius, size)


def figure_mask(size: int, x: float, y: float, height: float, arms: float, legs: float) -> np.ndarray:
    """Opacity of a stick figure.

    Args:
        height: head to feet, a fraction of the side.
        arms: -1 hanging, 0 level, +1 raised.
        legs: 0 together, 1 wide apart.
    """
    xx, yy = _grid(size)
    u, v = (xx - x) / height, (yy - y) / height
    head = np.hypot(u, v + 0.4) - 0.12
    body = _segment(u, v, (0, -0.3), (0, 0.12))
    reach_u, reach_v = 0.3 * np.cos(arms * 1.1), -0.3 * np.sin(arms * 1.1)
    foot = 0.06 + 0.26 * legs
    limbs = [_segment(u, v, (0, -0.2), (side * reach_u, -0.2 + reach_v)) for side in (-1, 1)] + [
        _segment(u, v, (0, 0.12), (side * foot, 0.48)) for side in (-1, 1)
    ]
    distance = np.minimum.reduce([head, *(part - 0.055 for part in [body, *limbs])])
    return _soften(distance * height, size)


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    yy, xx = np.mgrid[0:size, 0:size].astype(np.float32)
    return (xx + 0.5) / size, (yy + 0.5) / size


def _soften(distance: np.ndarray, size: int) -> np.ndarray:
    """Opacity from a signed distance in fractions of the side, with an edge one pixel wide."""
    return np.clip(0.5 - distance * size, 0.0, 1.0).astype(np.float32)


def _segment(u: np.ndarray, v: np.ndarray, a: tuple[float, float], b: tuple[float, float]) -> np.ndarray:
    du, dv = b[0] - a[0], b[1] - a[1]
    t = np.clip(((u - a[0]) * du + (v - a[1]) * dv) / (du * du + dv * dv + 1e-9), 0, 1)
    return np.hypot(u - a[0] - t * du, v - a[1] - t * dv)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    angle = np.arctan2(u, -v)
    return np.hypot(u, v) - (0.72 + 0.38 * np.cos(5 * angle))


_DISTANCES = {
    "circle": lambda u, v: np.hypot(u, v) - 0.9,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) - 0.8,
    # apex up: the sides rise towards (0, -0.9), the base lies at v = 0.75
    "triangle": lambda u, v: np.maximum(np.abs(u) * 0.87 - (v + 0.9) * 0.5, v - 0.75),
    "star": _star,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.72) - 0.24,
    "cross": lambda u, v: np.minimum(
        np.maximum(np.abs(u) - 0.3, np.abs(v) - 0.95), np.maximum(np.abs(v) - 0.3, np.abs(u) - 0.95)
    ),
}
