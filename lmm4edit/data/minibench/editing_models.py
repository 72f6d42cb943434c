"""Simulated editing models: each a character, a distribution over how much of an edit is done and what goes wrong.

None of them is a real editing model, and no result on them says anything about one: they exist so that a judge has
something to rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lmm4edit.data.minibench.flaws import ARTEFACTS, COLLATERALS, add_artefact, add_collateral
from lmm4edit.data.minibench.opinions import EditFacts
from lmm4edit.data.minibench.scenes import brightness
from lmm4edit.data.minibench.tasks import LOW_LEVEL_TASKS, EditCase, build_case


@dataclass(frozen=True)
class SimulatedEditor:
    """A character.

    Attributes:
        degree_high, degree_low: mean degree of edit on high-level and low-level tasks, 0-1.
        artefact, collateral: mean level, 0-1.
        clean, faithful: how often there is no artefact, no collateral change at all.
        wrong, confused, idle: how often another edit is made, an attribute is mistaken, nothing is done.
        artefacts, collaterals: which kinds it is prone to.
        prompt_type: whether it is told the instruction or the descriptions (paper Table 2).
    """

    name: str
    degree_high: float
    degree_low: float
    artefact: float
    collateral: float
    clean: float = 0.25
    faithful: float = 0.3
    wrong: float = 0.06
    confused: float = 0.1
    idle: float = 0.05
    artefacts: tuple[str, ...] = ARTEFACTS
    collaterals: tuple[str, ...] = COLLATERALS
    prompt_type: str = field(default="instruction")


SIMULATED_EDITORS: tuple[SimulatedEditor, ...] = (
    SimulatedEditor("sim-careful", 0.55, 0.6, 0.2, 0.15, clean=0.5, faithful=0.6, idle=0.12, wrong=0.02),
    SimulatedEditor("sim-bold", 0.85, 0.8, 0.35, 0.55, faithful=0.15, idle=0.0, prompt_type="description"),
    SimulatedEditor("sim-restorer", 0.3, 0.88, 0.15, 0.25, clean=0.5, wrong=0.1, artefacts=("ringing", "blur")),
    SimulatedEditor("sim-grainy", 0.65, 0.45, 0.6, 0.3, clean=0.08, artefacts=("noise", "blocks")),
    SimulatedEditor(
        "sim-smooth", 0.6, 0.4, 0.5, 0.25, clean=0.1, artefacts=("blur", "ghosting"), prompt_type="description"
    ),
    SimulatedEditor(
        "sim-dreamer", 0.5, 0.5, 0.35, 0.75, faithful=0.05, wrong=0.14, collaterals=("backdrop", "patch", "tone")
    ),
    SimulatedEditor(
        "sim-polished", 0.9, 0.85, 0.12, 0.2, clean=0.6, faithful=0.55, wrong=0.02, confused=0.04, idle=0.01
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What an editor made of a case: the image and the facts, with per-pixel maps of where what happened.

    Attributes:
        image: (size, size, 3), 0-1.
        kind: ``"right"``, ``"confused"``, ``"wrong"`` or ``"idle"``.
        intended, collateral, artefact: (size, size) maps of absolute change by cause.
    """

    image: np.ndarray
    facts: EditFacts
    kind: str
    artefact_kind: str | None
    collateral_kind: str | None
    intended: np.ndarray
    collateral: np.ndarray
    artefact: np.ndarray


def spread(rng: np.random.Generator, mean: float, concentration: float = 2.2) -> float:
    """A value in 0-1 around a mean, widely spread (Beta distribution)."""
    mean = float(np.clip(mean, 0.03, 0.97))
    return float(rng.beta(mean * concentration, (1 - mean) * concentration))


def edit_with(editor: SimulatedEditor, case: EditCase, base: np.ndarray, rng: np.random.Generator) -> Outcome:
    """What a simulated editor makes of a case."""
    restoration = case.task in LOW_LEVEL_TASKS
    degree = spread(rng, editor.degree_low if restoration else editor.degree_high)
    artefact = 0.0 if rng.random() < editor.clean else spread(rng, editor.artefact)
    collateral = 0.0 if rng.random() < editor.faithful else spread(rng, editor.collateral)
    draw = rng.random()
    kind = "right"
    if draw < editor.idle:
        kind = "idle"
    elif draw < editor.idle + editor.wrong:
        kind = "wrong"
    elif draw < editor.idle + editor.wrong + editor.confused and case.confused is not None:
        kind = "confused"
    return carry_out(
        case,
        base,
        rng,
        kind=kind,
        degree=degree,
        artefact=(editor.artefacts[int(rng.integers(len(editor.artefacts)))], artefact),
        collateral=(editor.collaterals[int(rng.integers(len(editor.collaterals)))], collateral),
    )


def carry_out(
    case: EditCase,
    base: np.ndarray,
    rng: np.random.Generator,
    *,
    kind: str,
    degree: float,
    artefact: tuple[str, float],
    collateral: tuple[str, float],
) -> Outcome:
    """Edit with everything given: what is done, how far, with which artefact and which collateral change, and how
    strong."""
    fidelity = 1.0
    region = case.region
    if kind == "confused" and case.confused is not None:
        edited, fidelity = case.confused(degree), 0.25
    elif kind == "wrong":
        edited, fidelity = _another_edit(case, degree, rng), 0.0
    elif kind == "idle":
        edited, degree = case.source, 0.0
    else:
        edited = case.render(degree)
    edited = np.asarray(edited, np.float32)
    intended = brightness(np.abs(edited - case.source))
    changed = add_collateral(edited, collateral[0], collateral[1], region, rng)
    final = np.clip(add_artefact(changed.image, artefact[0], artefact[1], rng), 0, 1).astype(np.float32)
    facts = EditFacts(degree, fidelity, artefact[1], collateral[1], case.task in LOW_LEVEL_TASKS)
    return Outcome(
        final,
        facts,
        kind,
        artefact[0] if artefact[1] > 0 else None,
        collateral[0] if collateral[1] > 0 else None,
        intended,
        brightness(np.abs(changed.image - edited)),
        brightness(np.abs(final - changed.image)),
    )


_FOREIGN = ("add", "style", "weather_season")


def _another_edit(case: EditCase, degree: float, rng: np.random.Generator) -> np.ndarray:
    """Something else is done to the source than what was asked."""
    task = [t for t in _FOREIGN if t != case.task][int(rng.integers(len(_FOREIGN) - (case.task in _FOREIGN)))]
    other, _ = build_case(task, lambda: case.source, rng, attempts=3)
    return other.render(max(degree, 0.4))
