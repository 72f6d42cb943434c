"""From what is in an edit to what people would say of it: simulated true opinions and simulated raters.

Nothing here is a human rating. The formulas below fix how degree of edit, artefacts and collateral changes map to the
three dimensions; :func:`rate` then has simulated raters with bias, spread, noise and slips give 1-5 ratings, which go
through the real MOS code (:mod:`lmm4edit.data.mos`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DIMENSIONS = ("quality", "alignment", "preservation")


@dataclass(frozen=True)
class EditFacts:
    """What was really done, known exactly because we did it.

    Attributes:
        degree: 0-1, how much of the edit was carried out.
        fidelity: 1 the right edit, 0.25 the right edit with a wrong attribute, 0 another edit or none.
        artefact: 0-1 level.
        collateral: 0-1 level.
        restoration: whether the source was damaged, so that what is left of the damage also lowers the quality.
    """

    degree: float
    fidelity: float
    artefact: float
    collateral: float
    restoration: bool


def true_opinions(facts: EditFacts) -> dict[str, float]:
    """The opinion an unbiased observer would hold, per dimension, 0-100, higher is better."""
    left_over = (1 - facts.degree * facts.fidelity) if facts.restoration else 0.0
    quality = 92 - 62 * facts.artefact**0.8 - 24 * left_over
    alignment = 8 + 84 * facts.degree * facts.fidelity - 5 * facts.artefact
    preservation = (
        94 - 72 * facts.collateral**0.8 - 10 * facts.artefact - (14 * facts.degree if facts.fidelity < 1 else 0)
    )
    return {
        "quality": float(np.clip(quality, 2, 98)),
        "alignment": float(np.clip(alignment, 2, 98)),
        "preservation": float(np.clip(preservation, 2, 98)),
    }


@dataclass(frozen=True)
class Rater:
    """A simulated subject: offset and gain on the 1-5 scale, noise, how often a finger slips, and strictness of the
    yes."""

    name: str
    bias: float
    gain: float
    noise: float
    slips: float
    threshold: float


def draw_raters(rng: np.random.Generator, count: int = 15) -> list[Rater]:
    """Simulated raters with different biases; about 1 % of all ratings are slips."""
    return [
        Rater(
            name=f"sim_rater_{index:02d}",
            bias=float(rng.normal(0, 0.25)),
            gain=float(rng.uniform(0.8, 1.15)),
            noise=float(rng.uniform(0.2, 0.45)),
            slips=float(rng.uniform(0.0, 0.02)),
            threshold=float(rng.normal(50, 5)),
        )
        for index in range(count)
    ]


def rate(rater: Rater, opinion: float, rng: np.random.Generator) -> float:
    """One rating on the 5-point continuous scale (paper section 3.3) of an opinion on 0-100."""
    if rng.random() < rater.slips:
        return round(float(rng.uniform(1, 5)), 2)
    centred = 3 + (opinion - 50) / 25 * rater.gain + rater.bias + rng.normal(0, rater.noise)
    return round(float(np.clip(centred, 1, 5)), 2)


def answer(rater: Rater, alignment: float, rng: np.random.Generator) -> bool:
    """Whether the rater answers yes to the task's question."""
    return bool(alignment + rng.normal(0, 6) > rater.threshold)
