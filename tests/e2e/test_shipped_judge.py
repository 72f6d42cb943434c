"""The judge that comes with LMM4Edit, on held-out edits of the mini benchmark: agreement, sensitivity, reload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr

from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.minibench.build import build_minibench
from lmm4edit.inference.judge import load_judge
from lmm4edit.scorers.base import build_scorer

ROOT = Path(__file__).resolve().parents[2]
DIMENSIONS = ("quality", "alignment", "preservation")


@pytest.fixture(scope="module")
def judge():
    return load_judge("tiny", device="cpu")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory):
    """Held-out edits of another seed than the demo's: other scenes, crops, editors' choices and raters."""
    out = tmp_path_factory.mktemp("held_out")
    build_minibench(out, seed=11, sources_per_task=1, splits=("test",))
    return read_manifest(out / "test.jsonl")


def scores(judge, samples) -> np.ndarray:
    results = list(judge.score_many(samples, batch_size=32))
    assert not [r for r in results if r.failure or r.failures]
    return np.array([[r.scores[d] for d in DIMENSIONS] for r in results])


@pytest.fixture(scope="module")
def normal(judge, held_out) -> np.ndarray:
    return scores(judge, held_out)


def test_it_agrees_with_the_simulated_raters_and_beats_the_pixel_metrics(normal, held_out) -> None:
    human = np.array([[s.mos[d] for d in DIMENSIONS] for s in held_out])
    ours = [spearmanr(normal[:, i], human[:, i])[0] for i in range(3)]
    floors = json.loads((ROOT / "checkpoints/tiny/judge/measured.json").read_text())["srcc"]
    for index, name in enumerate(DIMENSIONS):
        # another seed, fewer edits: allow for the sampling error of n = 294
        assert ours[index] > floors[name] - 0.1, (name, ours)
    for metric in ("mse", "psnr", "ssim"):
        scorer = build_scorer(metric)
        sign = 1 if scorer.info.higher_is_better else -1
        values = [sign * row[0].value for row in scorer.score(held_out)]
        for index, name in enumerate(DIMENSIONS):
            assert ours[index] > spearmanr(values, human[:, index])[0], (metric, name)


def test_a_nonsense_instruction_lowers_alignment(judge, held_out, normal) -> None:
    changed = scores(judge, [replace(s, instruction="bla bla") for s in held_out])
    followed = np.array([s.mos["alignment"] for s in held_out]) > 50
    assert (changed - normal)[followed, 1].mean() < -2


def test_a_black_image_lowers_everything(judge, held_out, normal, tmp_path: Path) -> None:
    Image.new("RGB", (168, 168)).save(tmp_path / "black.png")
    changed = scores(judge, [replace(s, edited_image=str(tmp_path / "black.png")) for s in held_out])
    assert ((changed - normal).mean(0) < -5).all()


def test_an_unedited_copy_lowers_alignment_and_raises_preservation(judge, held_out, normal) -> None:
    change = (scores(judge, [replace(s, edited_image=s.source_image) for s in held_out]) - normal).mean(0)
    assert change[1] < -3 and change[2] > 3


def test_everything_about_it_says_that_it_is_a_demonstration(judge) -> None:
    assert judge.notice is not None and "simulated ratings" in judge.notice
    assert "simulated" in json.loads((ROOT / "checkpoints/tiny/judge/measured.json").read_text())["note"]


def test_the_shipped_files_are_small_and_safetensors_only() -> None:
    files = [path for path in (ROOT / "checkpoints/tiny").rglob("*") if path.is_file()]
    assert files and not [path for path in files if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    assert sum(path.stat().st_size for path in (ROOT / "checkpoints/tiny/backbone").rglob("*") if path.is_file()) < 12e6
    assert sum(path.stat().st_size for path in files) < 20e6
