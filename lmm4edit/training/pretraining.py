"""Pretraining of the tiny backbone, from scratch, on generated lessons with dense supervision.

The big backbones come pretrained from a hub; the tiny one, which makes the demo run on a laptop, has to be taught
what an
image, an edit and a question are. Three signals at once, in one packed pass: cross-entropy on answers in words, the
three
opinions regressed at the judge's own read-out tokens, and, at every token of the edited image, how much of it changed
by intent, as a side effect, and through an artefact. The regression heads are thrown away; only the backbone is kept.

Interrupting it and running the same command continues from the last saved state, optimizer included.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lmm4edit.data.minibench.lessons import Lesson, generate_lessons
from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import last_hidden_states, token_logits
from lmm4edit.judge.packing import (
    IGNORE,
    PackedBatch,
    collate,
    encode_example,
    encode_suffix,
    process_images,
)
from lmm4edit.judge.prompts import PromptSet
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS
from lmm4edit.training.muon import Muon

LEVEL_SCALE = (60.0, 25.0)
"""Centre and spread of the opinions in the lessons, 0-100 scale."""

HELD_OUT_SEED = (0, 99)
"""The lessons that measure are the same for every recipe, so that runs can be compared."""

CELL_SCALE = 0.2
"""Typical square root of a cell's mean change, 0-1."""


def prompt_corpus(prompts: PromptSet, repeats: int = 300) -> Iterator[str]:
    """The wording and the chat markers' words, often enough that a tokenizer keeps them whole (short prompts cost
    less)."""
    for _ in range(repeats):
        yield prompts.system
        yield from ("system\n", "user\n", "assistant\n", prompts.source_label, prompts.edited_label)
        yield prompts.instruction.format(instruction="")
        yield f"{prompts.answer_stem}{prompts.yes_answer}"
        yield f"{prompts.answer_stem}{prompts.no_answer}"
        for dimension in BUILT_IN_DIMENSIONS:
            for part in prompts.render_suffix(dimension):
                if not part.control:
                    yield part.text


@dataclass(frozen=True)
class PretrainingRecipe:
    """Everything that decides the result, stored beside it. ``batch_size`` is that of one process."""

    seed: int = 0
    processes: int = 1
    steps: int = 3600
    batch_size: int = 32
    learning_rate: float = 2.5e-3
    adamw_share: float = 0.6
    warmup_steps: int = 150
    decay_fraction: float = 0.4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    render_size: int = 84
    image_side: int = 56
    grid: int = 4
    dialogue_per_lesson: int = 1
    reuse: float = 0.15
    buffer_size: int = 12000
    opinion_weight: float = 1.0
    cell_weight: float = 1.0
    text_weight: float = 0.3
    score_words: bool = True

    def learning_rate_at(self, step: int) -> float:
        """Warm-up, constant, then a cosine to 2 % over the last ``decay_fraction`` (so that a run can be prolonged)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        start = self.steps * (1 - self.decay_fraction)
        if step < start:
            return self.learning_rate
        progress = (step - start) / max(1, self.steps - start)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class LessonHeads(nn.Module):
    """The regression heads of pretraining: opinions at the read-out tokens, changes at the edited image's tokens."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.opinions = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.cells = nn.Linear(hidden, 3)


@dataclass
class LessonBatch:
    """A packed batch of lessons with its regression targets."""

    packed: PackedBatch
    opinions: torch.Tensor
    cells: torch.Tensor


def lesson_batches(
    recipe: PretrainingRecipe, processor: Any, prompts: PromptSet, start: int, rank: int
) -> Iterator[LessonBatch]:
    """Endless packed batches; most of each is taken again from a buffer, since drawing costs as much as learning."""
    rng = np.random.default_rng([recipe.seed, 17, start, rank])
    lessons = generate_lessons(rng, recipe.render_size, recipe.image_side, recipe.grid)
    buffer: list[Lesson] = []
    while True:
        batch: list[Lesson] = []
        while len(batch) < recipe.batch_size:
            if len(buffer) > 10 * recipe.batch_size and rng.random() < recipe.reuse:
                batch.append(buffer[int(rng.integers(len(buffer)))])
                continue
            lesson = next(lessons)
            batch.append(lesson)
            if len(buffer) < recipe.buffer_size:
                buffer.append(lesson)
            else:
                buffer[int(rng.integers(len(buffer)))] = lesson
        yield pack_lessons(batch, recipe, processor, prompts, rng)


def pack_lessons(
    lessons: list[Lesson], recipe: PretrainingRecipe, processor: Any, prompts: PromptSet, rng: np.random.Generator
) -> LessonBatch:
    """Lessons as one packed batch, each with the three dimensions, its yes/no question and some of its dialogue."""
    tokenizer = processor.tokenizer
    images = process_images(processor, [image for lesson in lessons for image in (lesson.source, lesson.edited)])
    examples = []
    for index, lesson in enumerate(lessons):
        opinions = zip(BUILT_IN_DIMENSIONS, lesson.opinions.tolist(), strict=True)
        scores: dict[str, float | str] = {dimension.name: round(value, 2) for dimension, value in opinions}
        example = encode_example(
            processor,
            prompts,
            lesson.instruction,
            images[2 * index],
            images[2 * index + 1],
            BUILT_IN_DIMENSIONS,
            lesson.question,
            {ANSWER: lesson.answer, **(scores if recipe.score_words else {})},
        )
        chosen = rng.choice(len(lesson.dialogue), recipe.dialogue_per_lesson, replace=False)
        further = [
            encode_suffix(tokenizer, f"dialogue_{n}", prompts.render_question(question, stem), answer)
            for n, (question, stem, answer) in enumerate(lesson.dialogue[int(c)] for c in chosen)
        ]
        examples.append(replace(example, suffixes=[*example.suffixes, *further]))
    packed = collate(
        examples,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    values = torch.from_numpy(np.stack([lesson.opinions for lesson in lessons]))
    cells = torch.from_numpy(np.stack([lesson.cells for lesson in lessons])).flatten(1, 2)
    return LessonBatch(packed, values, cells)


def lesson_losses(
    backbone: nn.Module, heads: LessonHeads, batch: LessonBatch, recipe: PretrainingRecipe, image_token_id: int
) -> dict[str, torch.Tensor]:
    """The three losses of one batch, and the predicted opinions (batch, 3) on the 0-100 scale."""
    packed = batch.packed
    hidden = last_hidden_states(backbone, packed)
    rows = torch.arange(len(hidden))[:, None]
    standardized = heads.opinions(hidden[rows, packed.readout_index[:, :3]])[..., 0]
    centre, spread = LEVEL_SCALE
    opinion_loss = nn.functional.mse_loss(standardized, (batch.opinions - centre) / spread)
    count = batch.cells.shape[1]
    image_positions = (packed.input_ids == image_token_id).nonzero()[:, 1].view(len(hidden), -1)[:, -count:]
    cell_loss = nn.functional.mse_loss(heads.cells(hidden[rows, image_positions]), batch.cells / CELL_SCALE)
    spoken = packed.labels != IGNORE
    logits, labels = token_logits(backbone, hidden[spoken]), packed.labels[spoken]
    text_loss = nn.functional.cross_entropy(logits, labels)
    right = (logits.argmax(-1) == labels).float()
    answers = torch.zeros_like(spoken)
    answers[rows[:, 0], packed.readout_index[:, 3]] = True
    loss = recipe.opinion_weight * opinion_loss + recipe.cell_weight * cell_loss + recipe.text_weight * text_loss
    return {
        "loss": loss,
        "opinion_loss": opinion_loss,
        "cell_loss": cell_loss,
        "text_loss": text_loss,
        "token_accuracy": right.mean(),
        "answer_accuracy": right[answers[spoken]].mean(),
        "opinions": standardized * spread + centre,
    }


@torch.no_grad()
def evaluate(
    backbone: nn.Module,
    heads: LessonHeads,
    batches: list[LessonBatch],
    recipe: PretrainingRecipe,
    image_token_id: int,
) -> dict[str, float]:
    """Signed SRCC per dimension (higher is better), token accuracy and cell loss on held-out generated lessons."""
    from scipy.stats import spearmanr

    backbone.eval()
    parts = [lesson_losses(backbone, heads, batch, recipe, image_token_id) for batch in batches]
    backbone.train()
    predicted = torch.cat([part["opinions"] for part in parts]).numpy()
    true = torch.cat([batch.opinions for batch in batches]).numpy()
    result = {
        f"srcc_{name}": float(spearmanr(predicted[:, i], true[:, i])[0])
        for i, name in enumerate(("quality", "alignment", "preservation"))
    }
    for key in ("token_accuracy", "answer_accuracy", "cell_loss", "text_loss"):
        result[key] = float(torch.stack([part[key] for part in parts]).mean())
    return result


def build_optimizers(backbone: nn.Module, heads: nn.Module, recipe: PretrainingRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, output layers, norms and biases."""
    outer = ("embed_tokens", "lm_head")
    inside = [p for name, p in backbone.named_parameters() if p.ndim == 2 and not any(key in name for key in outer)]
    known = {id(p) for p in inside}
    rest = [p for p in (*backbone.parameters(), *heads.parameters()) if id(p) not in known]
    return [
        Muon(inside, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            rest, lr=recipe.learning_rate * recipe.adamw_share, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        ),
    ]


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Mean of the gradients over all processes; nothing to do for one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def pretrain(
    backbone: nn.Module,
    processor: Any,
    prompts: PromptSet,
    recipe: PretrainingRecipe,
    run_dir: Path,
    *,
    save_every: int = 200,
    held_out_batches: int = 8,
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Train the backbone in place; the state is saved in ``run_dir`` and continued from there.

    Returns:
        The last evaluation on held-out generated lessons (empty in processes other than the first).

    Raises:
        ConfigError: if ``run_dir`` holds a state of another recipe (other than the number of steps and the decay).
        FloatingPointError: if the loss is not finite.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    run_dir.mkdir(parents=True, exist_ok=True)
    image_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        heads = LessonHeads(backbone.config.text_config.hidden_size)  # type: ignore[union-attr,arg-type]
    parameters = [*backbone.parameters(), *heads.parameters()]
    optimizers = build_optimizers(backbone, heads, recipe)
    peaks = [optimizer.param_groups[0]["lr"] / recipe.learning_rate for optimizer in optimizers]
    state_path = run_dir / "state.pt"
    step = _restore(state_path, backbone, heads, optimizers, recipe)
    if step and rank == 0:
        report(f"continuing from step {step}")
    held_out = list(_held_out(recipe, processor, prompts, held_out_batches)) if rank == 0 else []
    batches = lesson_batches(recipe, processor, prompts, step, rank)
    backbone.train()
    sums: dict[str, float] = {}
    started, since = time.monotonic(), step
    result: dict[str, float] = {}
    with (run_dir / "metrics.jsonl" if rank == 0 else Path(os.devnull)).open("a", encoding="utf-8") as log:
        while step < recipe.steps:
            losses = lesson_losses(backbone, heads, next(batches), recipe, image_token_id)
            if not torch.isfinite(losses["loss"]):
                raise FloatingPointError(f"step {step}: the loss is {losses['loss'].item()}; stopping.")
            losses["loss"].backward()
            average_gradients(parameters)
            norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = recipe.learning_rate_at(step) * peak
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            for key in ("loss", "opinion_loss", "cell_loss", "text_loss", "token_accuracy"):
                sums[key] = sums.get(key, 0.0) + losses[key].item()
            sums["grad_norm"] = sums.get("grad_norm", 0.0) + float(norm)
            if rank:
                continue
            if step % 50 == 0 or step == recipe.steps:
                span = max(1, step - since)
                row = {"kind": "train", "step": step, **{k: round(v / span, 5) for k, v in sums.items()}}
                row["learning_rate"] = recipe.learning_rate_at(step - 1)
                row["seconds_per_step"] = round((time.monotonic() - started) / span, 4)
                log.write(json.dumps(row) + "\n")
                report(" ".join(f"{k}={v}" for k, v in row.items() if k != "kind"))
                sums, started, since = {}, time.monotonic(), step
            if step % save_every == 0 or step == recipe.steps:
                result = evaluate(backbone, heads, held_out, recipe, image_token_id)
                log.write(json.dumps({"kind": "validation", "step": step, **result}) + "\n")
                log.flush()
                report(f"step {step} held-out: " + " ".join(f"{k}={v:.3f}" for k, v in result.items()))
                _save(state_path, backbone, heads, optimizers, step, recipe)
                started = time.monotonic()
    return result


def _restore(
    path: Path,
    backbone: nn.Module,
    heads: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    recipe: PretrainingRecipe,
) -> int:
    """Load the saved state, if there is one, and give its step."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    free = ("steps", "decay_fraction", "processes", "reuse", "buffer_size", "score_words")
    changed = [k for k, value in asdict(recipe).items() if k not in free and state["recipe"].get(k) != value]
    if changed:
        raise ConfigError(
            f"{path}: this run was started with another recipe (changed: {', '.join(changed)}). "
            "Use the same recipe to continue, or another --run-dir to begin anew."
        )
    backbone.load_state_dict(state["backbone"])
    heads.load_state_dict(state["heads"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def _held_out(recipe: PretrainingRecipe, processor: Any, prompts: PromptSet, batches: int) -> Iterator[LessonBatch]:
    rng = np.random.default_rng(HELD_OUT_SEED)
    lessons = generate_lessons(rng, recipe.render_size, recipe.image_side, recipe.grid)
    for _ in range(batches):
        yield pack_lessons([next(lessons) for _ in range(64)], recipe, processor, prompts, rng)


def _save(
    path: Path,
    backbone: nn.Module,
    heads: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    recipe: PretrainingRecipe,
) -> None:
    """Written beside and moved into place, so that a killed run never leaves half a state."""
    part = path.with_suffix(".part")
    state = {
        "backbone": backbone.state_dict(),
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    torch.save(state, part)
    part.replace(path)
