"""Pretraining of the tiny backbone: resumable, its recipe guarded, its losses on the right tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lmm4edit.data.minibench.lessons import corpus, generate_lessons
from lmm4edit.errors import ConfigError
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer
from lmm4edit.training.muon import Muon, orthogonalize
from lmm4edit.training.pretraining import PretrainingRecipe, pack_lessons, pretrain, prompt_corpus

RECIPE = PretrainingRecipe(steps=4, batch_size=2, warmup_steps=1, render_size=56, buffer_size=8)


@pytest.fixture(scope="module")
def parts():
    prompts = load_prompts("tiny")
    tokenizer = build_tiny_tokenizer(
        [*corpus(np.random.default_rng(0), 50), *prompt_corpus(prompts, 5)], vocab_size=400
    )
    return prompts, build_tiny_processor(tokenizer)


def small_backbone(processor):
    return build_tiny_backbone(processor.tokenizer, hidden=64, layers=2, vision_hidden=32, vision_layers=1)


def train(parts, recipe, folder: Path):
    prompts, processor = parts
    backbone = small_backbone(processor)
    pretrain(backbone, processor, prompts, recipe, folder, save_every=2, held_out_batches=1, report=lambda text: None)
    return backbone


def test_it_continues_from_the_saved_state_and_does_no_step_twice(parts, tmp_path: Path) -> None:
    train(parts, replace(RECIPE, steps=2), tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2
    backbone = train(parts, RECIPE, tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 2, 4, 4]  # a row of training and one of validation each
    assert any(not torch.equal(v, state["backbone"][k]) for k, v in backbone.state_dict().items())


def test_a_finished_run_is_not_trained_further(parts, tmp_path: Path) -> None:
    first = train(parts, RECIPE, tmp_path)
    again = train(parts, RECIPE, tmp_path)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in first.state_dict().items())


def test_another_recipe_on_the_same_folder_is_refused(parts, tmp_path: Path) -> None:
    train(parts, RECIPE, tmp_path)
    with pytest.raises(ConfigError) as error:
        train(parts, replace(RECIPE, seed=1, text_weight=0.5), tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'state.pt'}: this run was started with another recipe (changed: seed, text_weight). "
        "Use the same recipe to continue, or another --run-dir to begin anew."
    )


@pytest.mark.parametrize("score_words", [True, False])
def test_text_loss_lies_on_answers_alone_and_on_scores_only_if_wanted(parts, score_words: bool) -> None:
    prompts, processor = parts
    recipe = replace(RECIPE, score_words=score_words)
    lessons = generate_lessons(np.random.default_rng(1), 56, 56, 4)
    batch = pack_lessons([next(lessons) for _ in range(3)], recipe, processor, prompts, np.random.default_rng(0))
    packed = batch.packed
    assert packed.suffix_keys[:4] == ["quality", "alignment", "preservation", "answer"]
    spoken = packed.labels != -100
    dimensions = (packed.segment_ids >= 1) & (packed.segment_ids <= 3)
    assert (spoken & ~dimensions).any() and bool((spoken & dimensions).any()) == score_words
    assert not (spoken & (packed.segment_ids <= 0)).any()  # neither the prefix nor padding
    assert batch.opinions.shape == (3, 3) and batch.cells.shape == (3, 16, 3)


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    recipe = PretrainingRecipe(steps=1000, warmup_steps=100, decay_fraction=0.4)
    rates = [recipe.learning_rate_at(step) for step in (0, 99, 300, 599, 800, 999)]
    assert rates[0] < rates[1] == rates[2] == rates[3] == recipe.learning_rate
    assert rates[3] > rates[4] > rates[5] > 0


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_muons_updates_are_near_orthogonal(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(4, *shape, generator=generator)))
    assert values.min() > 0.5 and values.max() < 1.5


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"Muon takes matrices, got a parameter of shape \(3,\)\."):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=1e-3)


def test_muon_learns_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(8, 8, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.05)
    x = torch.randn(64, 8, generator=generator)
    losses = []
    for _ in range(200):
        loss = ((x @ weight.T - x @ goal.T) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.slow
def test_a_finished_backbone_is_taught_further_from_its_weights(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    start = root / "checkpoints" / "tiny" / "backbone"
    words = ["--init-from", str(start), "--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    subprocess.run(
        [sys.executable, str(root / "train" / "pretrain_tiny.py"), *words, "--steps", "1", "--batch-size", "2"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changes = [float((after[name].float() - before[name].float()).abs().max()) for name in before]
    assert 0 < max(changes) < 0.1
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["init_from"] == str(start)
