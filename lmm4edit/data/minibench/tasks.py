"""The 21 editing tasks of EBench-18K (paper section 3.1) as image operations with a continuous degree of edit.

Each builder takes a base image and gives an :class:`EditCase`: the source image, the instruction, and
``render(degree)``,
the image after 0-100 % of the edit. Sizes of all effects are fractions of the image's side, so that the same edit looks
the same at any resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from lmm4edit.data.minibench.effects import (
    STYLES,
    WEATHERS,
    gaussian_blur,
    grain,
    haze,
    pattern,
    rain,
    snow,
    stylise,
    weather,
)
from lmm4edit.data.minibench.objects import (
    COLOURS,
    PLACES,
    face_mask,
    figure_mask,
    pick,
    random_thing,
)
from lmm4edit.data.minibench.scenes import brightness, to_float, to_image

Render = Callable[[float], np.ndarray]


@dataclass(frozen=True)
class EditCase:
    """One source image with an instruction, and the edit at any degree.

    Attributes:
        task: one of :data:`TASKS`.
        source: (size, size, 3) float 0-1.
        render: degree 0-1 -> the edited image; ``render(0)`` is the source, ``render(1)`` the finished edit.
        region: (size, size) 0-1, where the edit is meant to happen; everything else should stay.
        question: a yes/no question whose answer is yes when the edit was carried out.
        confused: the same edit with a wrong attribute (another colour, place, number), where the task has one.
    """

    task: str
    source: np.ndarray
    instruction: str
    source_description: str
    target_description: str
    question: str
    render: Render
    region: np.ndarray
    confused: Render | None = None


def _blend(source: np.ndarray, target: np.ndarray) -> Render:
    return lambda degree: source + (target - source) * np.float32(degree)


def _everywhere(image: np.ndarray) -> np.ndarray:
    return np.ones(image.shape[:2], np.float32)


def _phrase(rng: np.random.Generator, *templates: str) -> str:
    return templates[int(rng.integers(len(templates)))]


def _add(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    place = pick(rng, tuple(PLACES))
    thing = random_thing(rng, place)
    other = replace(
        random_thing(rng, pick(rng, tuple(PLACES), (place,))), colour=pick(rng, tuple(COLOURS), (thing.colour,))
    )
    return EditCase(
        "add",
        base,
        _phrase(rng, f"Add a {thing.name} at the {place}", f"Put a {thing.name} in the {place}"),
        "A picture",
        f"A picture with a {thing.name} at the {place}",
        f"Is there a {thing.name} at the {place}?",
        lambda d: thing.paint(base, d),
        thing.mask(len(base)),
        lambda d: other.paint(base, d),
    )


def _remove(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    thing = random_thing(rng)
    source = thing.paint(base)
    return EditCase(
        "remove",
        source,
        _phrase(rng, f"Remove the {thing.name}", f"Take away the {thing.name}"),
        f"A picture with a {thing.name}",
        f"A picture without the {thing.name}",
        f"Has the {thing.name} been removed?",
        _blend(source, base),
        thing.mask(len(base)),
    )


def _replace(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    old = random_thing(rng)
    new = replace(random_thing(rng), x=old.x, y=old.y, radius=old.radius)
    while new.colour == old.colour or new.shape == old.shape:
        new = replace(random_thing(rng), x=old.x, y=old.y, radius=old.radius)
    wrong = replace(new, colour=pick(rng, tuple(COLOURS), (old.colour, new.colour)))
    source, size = old.paint(base), len(base)
    return EditCase(
        "replace",
        source,
        _phrase(rng, f"Replace the {old.name} with a {new.name}", f"Swap the {old.name} for a {new.name}"),
        f"A picture with a {old.name}",
        f"A picture with a {new.name}",
        f"Has the {old.name} become a {new.name}?",
        _blend(source, new.paint(base)),
        np.maximum(old.mask(size), new.mask(size)),
        _blend(source, wrong.paint(base)),
    )


def _color(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    old = random_thing(rng, radius=(0.2, 0.28))
    new = replace(old, colour=pick(rng, tuple(COLOURS), (old.colour,)))
    wrong = replace(old, colour=pick(rng, tuple(COLOURS), (old.colour, new.colour)))
    source = old.paint(base)
    return EditCase(
        "color",
        source,
        _phrase(rng, f"Make the {old.name} {new.colour}", f"Change the color of the {old.name} to {new.colour}"),
        f"A picture with a {old.name}",
        f"A picture with a {new.name}",
        f"Is the {old.shape} {new.colour} now?",
        _blend(source, new.paint(base)),
        old.mask(len(base)),
        _blend(source, wrong.paint(base)),
    )


def _texture(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    thing = random_thing(rng, radius=(0.22, 0.3))
    kinds = ("striped", "checkered", "dotted")
    kind = pick(rng, kinds)
    wrong = pick(rng, kinds, (kind,))
    source, size = thing.paint(base), len(base)
    return EditCase(
        "texture",
        source,
        _phrase(rng, f"Give the {thing.name} a {kind} texture", f"Make the surface of the {thing.name} {kind}"),
        f"A picture with a plain {thing.name}",
        f"A picture with a {kind} {thing.name}",
        f"Does the {thing.shape} have a {kind} texture?",
        _blend(source, thing.paint(base, texture=pattern(kind, size, thing.colour))),
        thing.mask(size),
        _blend(source, thing.paint(base, texture=pattern(wrong, size, thing.colour))),
    )


def _style(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    style = pick(rng, STYLES)
    return EditCase(
        "style",
        base,
        _phrase(rng, f"Turn the picture into a {style}", f"Make it look like a {style}"),
        "A picture",
        f"A {style}",
        f"Does the picture look like a {style}?",
        _blend(base, stylise(base, style)),
        _everywhere(base),
        _blend(base, stylise(base, pick(rng, STYLES, (style,)))),
    )


def _ink(base: np.ndarray, x: float, y: float) -> np.ndarray:
    """A colour that stands out from the image around a place."""
    size = len(base)
    around = base[
        int(size * max(0, y - 0.2)) : int(size * (y + 0.2)), int(size * max(0, x - 0.2)) : int(size * (x + 0.2))
    ]
    return np.asarray((0.97, 0.95, 0.9) if around.mean() < 0.5 else (0.04, 0.05, 0.1), np.float32)


def _action(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    x, y, height = rng.uniform(0.35, 0.65), rng.uniform(0.42, 0.58), rng.uniform(0.55, 0.75)
    size, ink = len(base), _ink(base, x, y)
    poses = {
        "raise both arms": (-1, 0.2, 1, 0.2),
        "lower both arms": (1, 0.2, -1, 0.2),
        "spread the legs": (-0.6, 0, -0.6, 1),
    }
    action = pick(rng, tuple(poses))
    arms0, legs0, arms1, legs1 = poses[action]

    def pose(arms: float, legs: float) -> np.ndarray:
        mask = figure_mask(size, x, y, height, arms, legs)[..., None]
        return base * (1 - mask) + ink * mask

    def render(degree: float) -> np.ndarray:
        return pose(arms0 + (arms1 - arms0) * degree, legs0 + (legs1 - legs0) * degree)

    masks = [
        figure_mask(size, x, y, height, arms0 + (arms1 - arms0) * d, legs0 + (legs1 - legs0) * d) for d in (0, 0.5, 1)
    ]
    return EditCase(
        "action",
        render(0.0),
        _phrase(rng, f"Make the figure {action}", f"Let the person {action}"),
        "A figure stands there",
        f"A figure told to {action}",
        f"Did the figure {action}?",
        render,
        np.maximum.reduce(masks),
    )


_EXPRESSIONS = {"smiling": (1.0, 0.0), "sad": (-1.0, 0.0), "surprised": (0.0, 1.0)}


def _expression(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    x, y, radius = rng.uniform(0.38, 0.62), rng.uniform(0.38, 0.62), rng.uniform(0.27, 0.34)
    size = len(base)
    before = pick(rng, tuple(_EXPRESSIONS))
    after = pick(rng, tuple(_EXPRESSIONS), (before,))
    wrong = pick(rng, tuple(_EXPRESSIONS), (before, after))

    def face(curve: float, opening: float) -> np.ndarray:
        disc, marks = face_mask(size, x, y, radius, curve, opening)
        image = base * (1 - disc[..., None]) + np.asarray((0.99, 0.84, 0.3), np.float32) * disc[..., None]
        return image * (1 - marks[..., None]) + np.float32(0.05) * marks[..., None]

    (c0, o0), (c1, o1), (c2, o2) = _EXPRESSIONS[before], _EXPRESSIONS[after], _EXPRESSIONS[wrong]
    source = face(c0, o0)
    return EditCase(
        "expression",
        source,
        _phrase(rng, f"Make the {before} face {after}", f"Change the expression of the face to {after}"),
        f"A {before} face",
        f"A {after} face",
        f"Is the face {after}?",
        _blend(source, face(c1, o1)),
        face_mask(size, x, y, radius, 0, 0)[0],
        _blend(source, face(c2, o2)),
    )


def _weather(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    kind = pick(rng, WEATHERS)
    wrong = pick(rng, WEATHERS, (kind,))
    what = {"autumn": "an autumn scene", "night": "a night scene"}.get(kind, f"a {kind} day")
    return EditCase(
        "weather_season",
        base,
        _phrase(rng, f"Make it {what}", f"Change the scene to {what}"),
        "A scene",
        f"{what[0].upper()}{what[1:]}",
        f"Does it look like {what}?",
        _blend(base, weather(base, kind, rng)),
        _everywhere(base),
        _blend(base, weather(base, wrong, rng)),
    )


def _background(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    thing = random_thing(rng, radius=(0.18, 0.26))
    size = len(base)
    colour = pick(rng, tuple(COLOURS), (thing.colour,))
    wrong = pick(rng, tuple(COLOURS), (thing.colour, colour))
    source = thing.paint(base)
    return EditCase(
        "background",
        source,
        _phrase(rng, f"Change the background to plain {colour}", f"Put the {thing.name} on a {colour} background"),
        f"A {thing.name} in a scene",
        f"A {thing.name} on a {colour} background",
        f"Is the background {colour}?",
        _blend(source, thing.paint(np.broadcast_to(np.asarray(COLOURS[colour], np.float32), base.shape))),
        1 - thing.mask(size),
        _blend(source, thing.paint(np.broadcast_to(np.asarray(COLOURS[wrong], np.float32), base.shape))),
    )


_NUMBERS = ("zero", "one", "two", "three", "four", "five")


def _counting(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    model = random_thing(rng, radius=(0.12, 0.15))
    spots = [(0.2, 0.22), (0.5, 0.2), (0.8, 0.22), (0.3, 0.75), (0.7, 0.75)]
    order = rng.permutation(5)
    things = [model.moved(*(np.array(spots[i]) + rng.uniform(-0.03, 0.03, 2))) for i in order]
    before = int(rng.integers(1, 4))
    after = int(pick(rng, [n for n in "12345"], (str(before),)))

    def show(count: float) -> np.ndarray:
        image = base
        for index, thing in enumerate(things):
            opacity = float(np.clip(count - index, 0, 1))
            image = thing.paint(image, opacity) if opacity > 0 else image
        return image

    few, many = min(before, after), max(before, after)
    region = np.maximum.reduce([t.mask(len(base)) for t in things[few:many]])
    plural = f"{model.name}{'es' if model.shape == 'cross' else 's'}"
    noun = model.name if after == 1 else plural
    return EditCase(
        "counting",
        show(before),
        _phrase(rng, f"Make it {_NUMBERS[after]} {noun}", f"Change the number of {plural} to {_NUMBERS[after]}"),
        f"A picture with {_NUMBERS[before]} {model.name if before == 1 else plural}",
        f"A picture with {_NUMBERS[after]} {noun}",
        f"Are there exactly {_NUMBERS[after]} {noun}?" if after > 1 else f"Is there exactly one {noun}?",
        lambda d: show(before + (after - before) * d),
        region,
    )


def _position(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    start = pick(rng, tuple(PLACES))
    goal = pick(rng, tuple(PLACES), (start,))
    wrong = pick(rng, tuple(PLACES), (start, goal))
    thing = random_thing(rng, start)
    size = len(base)

    def moved(place: str) -> Render:
        end = PLACES[place]
        return lambda d: thing.moved(thing.x + (end[0] - thing.x) * d, thing.y + (end[1] - thing.y) * d).paint(base)

    return EditCase(
        "position",
        thing.paint(base),
        _phrase(rng, f"Move the {thing.name} to the {goal}", f"Put the {thing.name} in the {goal} instead"),
        f"A {thing.name} at the {start}",
        f"A {thing.name} at the {goal}",
        f"Is the {thing.shape} at the {goal}?",
        moved(goal),
        np.maximum.reduce(
            [
                thing.moved(thing.x + (PLACES[goal][0] - thing.x) * d, thing.y + (PLACES[goal][1] - thing.y) * d).mask(
                    size
                )
                for d in (0, 0.33, 0.67, 1)
            ]
        ),
        moved(wrong),
    )


def _size(base: np.ndarray, rng: np.random.Generator) -> EditCase:
    grow = rng.random() < 0.5
    thing = random_thing(rng, radius=(0.12, 0.15) if grow else (0.27, 0.33))
    factor = 2.4 if grow else 0.4
    word = pick(rng, ("larger", "bigger")) if grow else pick(rng, ("smaller", "tiny"))

    def scaled(end: float) -> Render:
        return lambda d: replace(thing, radius=thing.radius * (1 + (end - 1) * d)).paint(base)

    return EditCase(
        "size",
        thing.paint(base),
        _phrase(rng, f"Make the {thing.name} much {word}", f"Change the size of the {thing.name}: much {word}").replace(
            "much tiny", "tiny"
        ),
        f"A {thing.name}",
        f"A much {word} {thing.name}".replace("much tiny", "tiny"),
        f"Is the {thing.shape} clearly {'larger' if grow else 'smaller'}?",
        scaled(factor),
        np.maximum(thing.mask(len(base)), replace(thing, radius=thing.radius * max(1.0, factor)).mask(len(base))),
        scaled(0.55 if grow else 1.45),
    )


def _restoration(task: str, damaged: np.ndarray, base: np.ndarray, words: tuple[str, ...], flaw: str, rng) -> EditCase:
    return EditCase(
        task,
        damaged,
        _phrase(rng, *words),
        f"A picture with {flaw}",
        "A clean picture",
        f"Is the picture free of {flaw}?",
        _blend(damaged, base),
        _everywhere(base),
    )


def _deblur(base, rng):
    words = ("Remove the blur", "Make the blurry picture sharp")
    return _restoration("deblur", gaussian_blur(base, rng.uniform(0.03, 0.045)), base, words, "blur", rng)


def _dehaze(base, rng):
    return _restoration(
        "dehaze",
        haze(base, rng.uniform(0.6, 0.8)),
        base,
        ("Remove the haze", "Clear the haze from the picture"),
        "haze",
        rng,
    )


def _denoise(base, rng):
    noise = grain(base, rng, rng.uniform(0.14, 0.22))
    words = ("Remove the noise", "Clean the noisy picture")
    return replace(
        _restoration("denoise", np.clip(base + noise, 0, 1), base, words, "noise", rng),
        render=lambda d: np.clip(base + noise * np.float32(1 - d), 0, 1),
    )


def _derain(base, rng):
    return _restoration(
        "derain", rain(base, rng, 1.0), base, ("Remove the rain", "Take away the rain streaks"), "rain", rng
    )


def _desnow(base, rng):
    return _restoration(
        "desnow", snow(base, rng, 1.0), base, ("Remove the snow", "Take away the snowflakes"), "snow", rng
    )


def _low_light(base, rng):
    words = ("Brighten the dark picture", "Enhance the low light picture")
    dark = base * np.float32(rng.uniform(0.18, 0.3))
    return replace(
        _restoration("low_light_enhancement", dark, base, words, "darkness", rng),
        question="Is the picture bright now?",
    )


def _shadow_removal(base, rng):
    size = len(base)
    angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-0.12, 0.12)
    yy, xx = (np.mgrid[0:size, 0:size].astype(np.float32) + 0.5) / size - 0.5
    edge = np.cos(angle) * xx + np.sin(angle) * yy + 0.08 * np.sin(8 * (xx - yy)) - offset
    shade = (1 / (1 + np.exp(-np.clip(edge * 40, -30, 30))))[..., None].astype(np.float32)
    case = _restoration(
        "shadow_removal",
        base * (1 - shade * np.float32(rng.uniform(0.6, 0.75))),
        base,
        ("Remove the shadow", "Lift the shadow from the picture"),
        "shadow",
        rng,
    )
    return replace(case, region=shade[..., 0])


def _super_resolution(base, rng):
    cells = int(rng.integers(11, 16))
    small = to_image(base).resize((cells, cells), Image.Resampling.BOX)
    coarse = to_float(small.resize((len(base),) * 2, Image.Resampling.NEAREST))
    words = ("Increase the resolution", "Make the low resolution picture detailed")
    return _restoration("super_resolution", coarse, base, words, "large pixels", rng)


Builder = Callable[[np.ndarray, np.random.Generator], EditCase]

HIGH_LEVEL_TASKS: dict[str, Builder] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "color": _color,
    "texture": _texture,
    "style": _style,
    "action": _action,
    "expression": _expression,
    "weather_season": _weather,
    "background": _background,
    "counting": _counting,
    "position": _position,
    "size": _size,
}
LOW_LEVEL_TASKS: dict[str, Builder] = {
    "deblur": _deblur,
    "dehaze": _dehaze,
    "denoise": _denoise,
    "derain": _derain,
    "desnow": _desnow,
    "low_light_enhancement": _low_light,
    "shadow_removal": _shadow_removal,
    "super_resolution": _super_resolution,
}
TASKS: dict[str, Builder] = {**HIGH_LEVEL_TASKS, **LOW_LEVEL_TASKS}
"""The paper's 21 tasks, in its order (section 3.1)."""


def visible_change(case: EditCase) -> float:
    """How visible the finished edit is: 1.0 is enough, less is too faint to judge.

    Mean absolute difference against 0.2 inside a local region, or against 0.03 where the whole image is meant to change
    (a restored blur changes little on average, yet everywhere).
    """
    change = brightness(np.abs(case.render(1.0) - case.source))
    inside = float((change * case.region).sum() / (case.region.sum() + 1e-6))
    return inside / (0.03 if float(case.region.mean()) > 0.95 else 0.2)


def build_case(
    task: str, draw_base: Callable[[], np.ndarray], rng: np.random.Generator, attempts: int = 10
) -> tuple[EditCase, np.ndarray]:
    """An edit case of a task, drawn again (base image too) until the finished edit can be seen; the most visible
    otherwise.

    A restoration of a picture without detail, or a white cross on snow, would teach nothing.

    Returns:
        The case and the base image it was built on.
    """
    best: tuple[float, EditCase, np.ndarray] | None = None
    for _ in range(attempts):
        base = draw_base()
        case = TASKS[task](base, rng)
        seen = visible_change(case)
        if best is None or seen > best[0]:
            best = (seen, case, base)
        if seen >= 1:
            break
    assert best is not None
    return best[1], best[2]
