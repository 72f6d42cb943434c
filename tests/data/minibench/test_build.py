"""The mini benchmark on disk: deterministic, split by source and photograph, labelled as simulated."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from lmm4edit.data.manifest import read_manifest
from lmm4edit.data.minibench.build import SPLITS, _plan, build_minibench
from lmm4edit.data.minibench.lessons import generate_lessons
from lmm4edit.data.minibench.opinions import EditFacts, true_opinions
from lmm4edit.data.minibench.scenes import TEST_PHOTOGRAPHS
from lmm4edit.data.minibench.tasks import TASKS


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("minibench")
    build_minibench(out, seed=3, size=56, sources_per_task=1)
    return out


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(bench: Path, tmp_path: Path) -> None:
    again = build_minibench(tmp_path / "a", seed=3, size=56, sources_per_task=1)
    assert again.digest == json.loads((bench / "minibench.json").read_text())["digest"]
    other = build_minibench(tmp_path / "b", seed=4, size=56, sources_per_task=1)
    assert other.digest != again.digest


def test_every_task_is_split_four_to_one_with_at_least_60_sources_held_out() -> None:
    held_out = {"photo": 0, "scene": 0}
    for task in TASKS:
        plan = [(split, content) for name, split, content, _ in _plan(None) if name == task]
        test = [content for split, content in plan if split == "test"]
        assert len(plan) == 5 * len(test)
        for content in test:
            held_out[content] += 1
    assert held_out["photo"] + held_out["scene"] >= 60 and held_out["photo"] >= 30


def test_no_source_and_no_photograph_is_in_two_splits(bench: Path) -> None:
    splits = {split: read_manifest(bench / f"{split}.jsonl") for split in SPLITS}
    where: dict[str, set[str]] = defaultdict(set)
    for split, samples in splits.items():
        for sample in samples:
            where[sample.source_id].add(split)
    assert all(len(found) == 1 for found in where.values())
    seen = {s.groups.get("photograph") for name in ("train", "validation") for s in splits[name]} - {None}
    held_out = {s.groups.get("photograph") for s in splits["test"]} - {None}
    assert held_out and not seen & held_out
    assert held_out <= {Path(name).stem for name in TEST_PHOTOGRAPHS}


def test_lessons_never_show_a_test_photograph(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmm4edit.data.minibench import lessons

    used = set()
    real = lessons.crop_photograph

    def spy(name: str, rng: np.random.Generator, size: int) -> np.ndarray:
        used.add(name)
        return real(name, rng, size)

    monkeypatch.setattr(lessons, "crop_photograph", spy)
    stream = generate_lessons(np.random.default_rng(0), 56, 56, 4)
    for _ in range(60):
        next(stream)
    assert used and not used & set(TEST_PHOTOGRAPHS)


def test_samples_are_complete_and_labelled_simulated(bench: Path) -> None:
    assert "simulation" in (bench / "SIMULATED.md").read_text()
    for split in SPLITS:
        for sample in read_manifest(bench / f"{split}.jsonl"):
            assert set(sample.mos) == {"quality", "alignment", "preservation"}
            assert sample.answer in ("yes", "no") and sample.question
            assert sample.groups["ratings"] == "simulated"
            assert sample.editing_model is not None and sample.editing_model.startswith("sim-")
            assert Path(sample.source_image).exists() and Path(sample.edited_image).exists()


def test_mos_of_15_raters_follow_the_true_opinions(bench: Path) -> None:
    facts = {}
    for line in (bench / "facts.jsonl").read_text().splitlines():
        row = json.loads(line)
        sample_id = row.pop("sample_id")
        facts[sample_id] = EditFacts(**row)
    samples = [s for split in SPLITS for s in read_manifest(bench / f"{split}.jsonl")]
    for dimension in ("quality", "alignment", "preservation"):
        truth = [true_opinions(facts[s.sample_id])[dimension] for s in samples]
        assert spearmanr(truth, [s.mos[dimension] for s in samples])[0] > 0.95
    answers = [s.answer for s in samples]
    assert 0.25 < answers.count("yes") / len(answers) < 0.75


def test_raw_ratings_are_kept(bench: Path) -> None:
    with (bench / "ratings.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["subject"] for row in rows}) == 15
    edits = sum(len(read_manifest(bench / f"{split}.jsonl")) for split in SPLITS)
    assert len(rows) == edits * 3 * 15
    assert all(1 <= float(row["value"]) <= 5 for row in rows)
