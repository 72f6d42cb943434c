"""Lessons for the tiny backbone: generated edits with dense supervision, endless and never the same.

A lesson is an edit of a generated scene (or of a training photograph's crop; never a test photograph), made at random
strength without any editing model's character, together with everything that is known of it: the opinions, where what
changed, and questions with short answers in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from lmm4edit.data.minibench.editing_models import Outcome, carry_out
from lmm4edit.data.minibench.flaws import ARTEFACTS, COLLATERALS
from lmm4edit.data.minibench.objects import COLOURS, SHAPES, pick
from lmm4edit.data.minibench.opinions import DIMENSIONS, EditFacts, true_opinions
from lmm4edit.data.minibench.scenes import TRAIN_PHOTOGRAPHS, brightness, crop_photograph, generate_scene, to_image
from lmm4edit.data.minibench.tasks import LOW_LEVEL_TASKS, TASKS, EditCase, build_case

NONSENSE = ("bla bla", "lorem ipsum dolor", "qwerty", "the the of and", "x y z", "do it do it")


@dataclass(frozen=True)
class Lesson:
    """One generated edit and what is known of it.

    Attributes:
        source, edited: RGB images, ``side`` pixels square.
        opinions: (3,) quality, alignment, preservation, 0-100.
        cells: (grid, grid, 3) square roots of the mean intended, collateral and artefact change in each cell.
        question, answer: the task's yes/no question.
        dialogue: further (question, answer stem, answer) triples.
    """

    source: Image.Image
    edited: Image.Image
    instruction: str
    opinions: np.ndarray
    cells: np.ndarray
    question: str
    answer: str
    dialogue: tuple[tuple[str, str, str], ...]


class BasePool:
    """Base images at a low cost: a pool of scenes, turned and recoloured at every use and replaced little by little."""

    def __init__(self, rng: np.random.Generator, size: int, capacity: int = 192, photographs: float = 0.3) -> None:
        self.rng, self.size, self.capacity, self.photographs = rng, size, capacity, photographs
        self.images: list[np.ndarray] = []

    def draw(self) -> np.ndarray:
        """A base image (size, size, 3), 0-1."""
        rng = self.rng
        if len(self.images) < self.capacity or rng.random() < 0.2:
            if rng.random() < self.photographs:
                new = crop_photograph(pick(rng, TRAIN_PHOTOGRAPHS), rng, self.size)
            else:
                new = generate_scene(rng, self.size)
            if len(self.images) < self.capacity:
                self.images.append(new)
            else:
                self.images[int(rng.integers(self.capacity))] = new
        image = self.images[int(rng.integers(len(self.images)))]
        image = np.rot90(image, int(rng.integers(4)))
        if rng.random() < 0.5:
            image = image[:, ::-1]
        if rng.random() < 0.5:
            image = image[..., rng.permutation(3)]
        gain, offset = rng.uniform(0.75, 1.2), rng.uniform(-0.08, 0.08)
        return np.clip((image - 0.5) * np.float32(gain) + np.float32(0.5 + offset), 0, 1).astype(np.float32)


def generate_lessons(rng: np.random.Generator, size: int, side: int, grid: int) -> Iterator[Lesson]:
    """Endless lessons.

    Args:
        size: side at which the edit is rendered, pixels.
        side: side of the images given out, pixels (rendered larger and shrunk, as a real picture would be).
        grid: number of cells along a side in which the changes are reported.
    """
    pool = BasePool(rng, size)
    tasks = tuple(TASKS)
    while True:
        task = tasks[int(rng.integers(len(tasks)))]
        case, base = build_case(task, pool.draw, rng, attempts=4)
        yield _lesson(case, base, rng, side, grid)


def _level(rng: np.random.Generator, none: float) -> float:
    return 0.0 if rng.random() < none else float(rng.random())


def _lesson(case: EditCase, base: np.ndarray, rng: np.random.Generator, side: int, grid: int) -> Lesson:
    draw = rng.random()
    kind = "idle" if draw < 0.06 else "wrong" if draw < 0.14 else "confused" if draw < 0.26 else "right"
    if kind == "confused" and case.confused is None:
        kind = "right"
    outcome = carry_out(
        case,
        base,
        rng,
        kind=kind,
        degree=float(rng.random()),
        artefact=(pick(rng, ARTEFACTS), _level(rng, 0.3)),
        collateral=(pick(rng, COLLATERALS), _level(rng, 0.3)),
    )
    opinions = true_opinions(outcome.facts)
    instruction = case.instruction
    if kind == "right" and rng.random() < 0.05:  # an instruction that was never followed
        instruction = pick(rng, NONSENSE)
        opinions["alignment"] = true_opinions(replace(outcome.facts, fidelity=0.0))["alignment"]
    if rng.random() < 0.02:
        outcome, opinions = _ruined(case, rng)
    values = np.array([opinions[name] for name in DIMENSIONS], np.float32)
    changes = np.stack([outcome.intended, outcome.collateral, outcome.artefact], -1)
    cell = len(changes) // grid
    cells = np.sqrt(changes[: cell * grid, : cell * grid].reshape(grid, cell, grid, cell, 3).sum((1, 3)) / cell**2)
    return Lesson(
        _shrink(case.source, side),
        _shrink(outcome.image, side),
        instruction,
        values,
        cells.astype(np.float32),
        case.question,
        "yes" if opinions["alignment"] > 50 else "no",
        _dialogue(case, outcome, opinions, cells),
    )


def _ruined(case: EditCase, rng: np.random.Generator) -> tuple[Outcome, dict[str, float]]:
    """An edited image that is black, white, flat or pure noise."""
    shape = case.source.shape
    fill = int(rng.integers(4))
    image = rng.random(shape) if fill == 3 else np.full(shape, (0.0, 1.0, rng.random())[fill])
    change = brightness(np.abs(image - case.source))
    zero = np.zeros_like(change)
    facts = EditFacts(0.0, 0.0, 1.0, 1.0, case.task in LOW_LEVEL_TASKS)
    outcome = Outcome(image.astype(np.float32), facts, "wrong", None, None, zero, change, change)
    return outcome, dict.fromkeys(DIMENSIONS, 4.0)


def _shrink(image: np.ndarray, side: int) -> Image.Image:
    picture = to_image(image)
    return picture if picture.width == side else picture.resize((side, side), Image.Resampling.BICUBIC)


def _dialogue(
    case: EditCase, outcome: Outcome, opinions: dict[str, float], cells: np.ndarray
) -> tuple[tuple[str, str, str], ...]:
    facts = outcome.facts
    done = round(100 * facts.degree * facts.fidelity)
    artefact = f"{outcome.artefact_kind} level {round(9 * facts.artefact)}" if outcome.artefact_kind else "none"
    collateral = f"{outcome.collateral_kind} level {round(9 * facts.collateral)}" if outcome.collateral_kind else "none"
    if outcome.collateral_kind:
        collateral += f" {_place(cells[..., 1])}"
    happened = {"right": "done", "confused": "wrong attribute", "wrong": "another edit", "idle": "nothing"}[
        outcome.kind
    ]
    level = ("bad", "poor", "fair", "good", "excellent")
    words = {name: level[min(4, int(opinions[name] // 20))] for name in DIMENSIONS}
    return (
        ("How much of the edit is done, in percent?", "The degree is", f" {done}"),
        ("Which artefact does the edited image have?", "The artefact is", f" {artefact}"),
        ("What changed that should not?", "The side effect is", f" {collateral}"),
        ("What happened?", "The edit is", f" {case.task} {happened} {_place(cells[..., 0])}"),
        ("What does the source show?", "It shows", f" {case.source_description.lower()}"),
        ("Describe the three levels.", "They are", f" {words['quality']} {words['alignment']} {words['preservation']}"),
    )


def _place(change: np.ndarray) -> str:
    """Where in the image a map of change has its weight, in words."""
    half = len(change) // 2
    total = float(change.sum())
    if total < 0.02 * change.size:
        return "nowhere"
    parts = {
        "top left": change[:half, :half],
        "top right": change[:half, half:],
        "bottom left": change[half:, :half],
        "bottom right": change[half:, half:],
    }
    place, most = max(((name, float(part.sum())) for name, part in parts.items()), key=lambda item: item[1])
    return place if most > 0.45 * total else "everywhere"


def corpus(rng: np.random.Generator, count: int) -> Iterator[str]:
    """Texts in the words of the lessons, to train a tokenizer on."""
    for lesson, _ in zip(generate_lessons(rng, 32, 32, 4), range(count), strict=False):
        yield lesson.instruction
        yield f"{lesson.question} {lesson.answer}"
        for question, stem, answer in lesson.dialogue:
            yield f"{question} {stem}{answer}"
    for colour in COLOURS:
        for shape in SHAPES:
            yield f" {colour} {shape}"
