"""A small evaluation with known answers: sources, editing models, opinions, and predictors of known quality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lmm4edit.records import EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo

TASKS = ("remove", "color", "deblur", "dehaze")
MODELS = ("sim-careful", "sim-bold", "sim-grainy", "sim-smooth", "sim-polished")
DIMENSIONS = ("quality", "alignment", "preservation")
SCORERS = {
    "psnr": ScorerInfo("psnr", "fr_handcrafted", frozenset({"source", "edited"}), low=0, high=100),
    "mse": ScorerInfo("mse", "fr_handcrafted", frozenset({"source", "edited"}), higher_is_better=False, low=0),
    "judge:runs/demo/stage2/checkpoint": ScorerInfo(
        "judge:runs/demo/stage2/checkpoint",
        "lmm",
        frozenset({"source", "edited", "instruction", "question"}),
        targets=(*DIMENSIONS, "answer"),
        on_opinion_scale=True,
    ),
}
JUDGE = "judge:runs/demo/stage2/checkpoint"


def samples(folder: Path | None = None, sources_per_task: int = 3, seed: int = 0) -> list[EditSample]:
    """Opinions spread around each editing model's level; images are written only if a folder is given."""
    rng = np.random.default_rng(seed)
    made = []
    for task in TASKS:
        for index in range(sources_per_task):
            content = "photo" if index % 2 == 0 else "scene"
            source_id = f"{task}-{content}-{index}"
            source = _picture(rng) if folder else None
            source_path = _save(folder, source_id, source)
            for number, model in enumerate(MODELS):
                level = 30 + 10 * number
                mos = {d: float(np.clip(level + rng.normal(0, 12), 1, 99)) for d in DIMENSIONS}
                edited = _picture(rng) if folder else None
                made.append(
                    EditSample(
                        sample_id=f"{source_id}-{model}",
                        source_id=source_id,
                        source_image=source_path,
                        edited_image=_save(folder, f"{source_id}-{model}", edited),
                        instruction=f"{task} the <b>red</b> heart",
                        edit_task=task,
                        editing_model=model,
                        mos=mos,
                        question=f"Was the heart changed ({task})?",
                        answer="yes" if mos["alignment"] > 45 else "no",
                        groups={"content": content, "ratings": "simulated"},
                    )
                )
    return made


def predictions(edits: list[EditSample], seed: int = 1, failures: bool = True) -> list[Prediction]:
    """A good judge, a weak metric and its mirror image where lower is better; every 17th judge row fails."""
    rng = np.random.default_rng(seed)
    made = []
    for index, edit in enumerate(edits):
        failed = failures and index % 17 == 5
        for dimension in DIMENSIONS:
            value = None if failed else edit.mos[dimension] + float(rng.normal(0, 5))
            failure = "cannot identify the image" if failed else None
            made.append(Prediction(edit.sample_id, JUDGE, dimension, value, failure=failure))
        wrong = rng.random() < 0.1
        answer = None if failed else (edit.answer if not wrong else ("no" if edit.answer == "yes" else "yes"))
        made.append(Prediction(edit.sample_id, JUDGE, "answer", answer, failure="no answer" if failed else None))
        psnr = 20 + edit.mos["preservation"] / 10 + float(rng.normal(0, 3))
        made.append(Prediction(edit.sample_id, "psnr", "score", psnr))
        made.append(Prediction(edit.sample_id, "mse", "score", 255**2 / 10 ** (psnr / 10)))
    return made


def _picture(rng: np.random.Generator) -> Image.Image:
    return Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((48, 48))


def _save(folder: Path | None, name: str, image: Image.Image | None) -> str:
    if folder is None or image is None:
        return f"{name}.png"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    path = folder / "images" / f"{name}.png"
    image.save(path)
    return str(path)
