"""A small release in the layout of EBench-18K, written from nothing: no text or number of the real one is in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = "/mnt/disk7/somebody/editing_all"
ASKED = {"v": "visual quality", "e": "editing correspondence", "c": "attribute preservation"}


def query(kind: str, instruction: str) -> str:
    head = f"With the image editing prompt [{instruction}], the source image <image> is edited to generate the "
    if kind == "yn":
        return f"{head}target image <image>. Was the edit carried out? Just reply [Yes] or [No]"
    return (
        f"{head}target image <image>. Please rate the {ASKED[kind]} of the target image on a scale of 0-100. Just "
        "reply a sentence in the following format: [The quality score is XX.XX (a number with two decimal)]"
    )


def images(source: str, model: int, root: str = ROOT) -> list[str]:
    level = source[0].lower()
    return [f"{root}/{role}img_{level}/model{model:02d}/{source}.jpg" for role in ("source", "target")]


def line(kind: str, source: str, model: int, value: object, instruction: str = "Add a kite") -> dict[str, Any]:
    response = value if kind == "yn" else f"The quality score is {value}"
    return {"query": query(kind, instruction), "response": response, "images": images(source, model)}


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def score(kind: str, source: str, model: int) -> float:
    """A score that differs by everything, with 0, 1 or 2 decimals: labels drop zeros."""
    place = "vec".index(kind) * 7 + int(source[2:4]) * 3 + int(source[5:]) + model * 2
    return round(20 + place % 50 + (0.0, 0.5, 0.25)[place % 3], 2)


def write_release(folder: Path, splits: Mapping[str, Iterable[str]], models: int = 17) -> None:
    """``{split}_{kind}.json`` for every split; a split named "" gives ``v.json`` and so on."""
    for split, sources in splits.items():
        edits = [(source, model) for model in range(models) for source in sources]
        prefix = f"{split}_" if split else ""
        for kind in ASKED:
            lines = [line(kind, s, m, f"{score(kind, s, m):g}", f"Do task {s[:4]} on {s}") for s, m in edits]
            write_lines(folder / f"{prefix}{kind}.json", lines)
        answers = [("Yes" if score("e", s, m) > 45 else "No", s, m) for s, m in edits]
        lines = [line("yn", s, m, answer, f"Do task {s[:4]} on {s}") for answer, s, m in answers]
        write_lines(folder / f"{prefix}yn.json", lines)


def write_images(root: Path, sources: Iterable[str], models: int = 17, same: tuple[str, str] | None = None) -> None:
    """Random pictures; the second of ``same`` shows the first, smaller and compressed harder."""
    for source in sources:
        shown = same[0] if same and source == same[1] else source
        rng = np.random.default_rng(list(shown.encode()))
        picture = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((96, 64), Image.Resampling.BICUBIC)
        size, quality = ((48, 40), 60) if shown != source else ((96, 64), 95)
        for model in range(models):
            for path in images(source, model, str(root)):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                picture.resize(size).save(path, quality=quality)
