"""Terms of the loss, counted over the window and not over the micro-batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmm4edit.judge.adapters import AdapterConfig, attach_adapters
from lmm4edit.judge.backbones import load_backbone, special_ids
from lmm4edit.judge.encoding import answer_token_ids
from lmm4edit.judge.model import JudgeModel, ObjectiveWeights
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import BUILT_IN_DIMENSIONS
from lmm4edit.training.dataset import EditDataset, Encoding
from lmm4edit.training.objectives import TermCounts, count_terms, step_losses, sum_counts, task_loss
from lmm4edit.training.order import FILLER
from lmm4edit.training.samples import load_samples

NAMES = [dimension.name for dimension in BUILT_IN_DIMENSIONS]
WEIGHTS = ObjectiveWeights(text_ce=1.0, qa_ce=0.5, score_mse=2.0)


@pytest.fixture(scope="module")
def judge(tiny_backbone: Path) -> tuple[JudgeModel, Encoding]:
    backbone, processor = load_backbone(tiny_backbone)
    prompts = load_prompts()
    ids = special_ids(backbone, processor)
    adapted = attach_adapters(backbone, AdapterConfig(init_r=2, target_r=1))
    torch.manual_seed(0)
    model = JudgeModel(
        adapted,
        BUILT_IN_DIMENSIONS,
        answer_token_ids(processor.tokenizer, prompts),
        ScoreHead(32, 3),
        TargetScale((50.0,) * 3, (20.0,) * 3),
    )
    return model, Encoding(processor, prompts, BUILT_IN_DIMENSIONS, words=True, answer_words=True, **ids)


@pytest.fixture
def dataset(judge: tuple[JudgeModel, Encoding], edits: Path) -> EditDataset:
    return EditDataset(load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples, judge[1])


def test_counts_before_the_pass_are_the_counts_of_the_pass(
    judge: tuple[JudgeModel, Encoding], dataset: EditDataset
) -> None:
    for indices in ([0], [1, 2], [0, 1, 2, 3], [FILLER]):
        batch = dataset.collate(dataset.__getitems__(indices)).batch
        output = judge[0](batch, WEIGHTS)
        counts = count_terms(batch, NAMES)
        assert {"text": counts.text, "qa": counts.qa, "score": counts.score} == output.counts


def test_known_counts(dataset: EditDataset) -> None:
    # " 80.00" is six characters, which the tokenizer keeps apart, and the end of the turn.
    counts = count_terms(dataset.collate(dataset.__getitems__([0])).batch, NAMES)
    example = dataset[0]
    lengths = {s.key: len(s.answer_ids) for s in example.suffixes}  # type: ignore[union-attr]
    assert counts == TermCounts(text=sum(lengths[name] for name in NAMES), qa=lengths["answer"], score=3)
    assert lengths["quality"] == 7
    # Sample 1 lacks its alignment score, sample 2 its question.
    assert count_terms(dataset.collate(dataset.__getitems__([1])).batch, NAMES).score == 2
    assert count_terms(dataset.collate(dataset.__getitems__([2])).batch, NAMES).qa == 0


def test_counts_add_up() -> None:
    assert sum_counts([TermCounts(1, 2, 3), TermCounts(10, 20, 30)]) == TermCounts(11, 22, 33)
    assert sum_counts([]) == TermCounts(0, 0, 0)


def test_a_window_cut_in_four_has_the_loss_and_gradients_of_the_whole(
    judge: tuple[JudgeModel, Encoding], dataset: EditDataset
) -> None:
    model = judge[0]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(parts: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
        batches = [dataset.collate(dataset.__getitems__(part)).batch for part in parts]
        counts = sum_counts(count_terms(batch, NAMES) for batch in batches)
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = task_loss(model(batch, WEIGHTS).sums, counts, WEIGHTS)
            loss.backward()
            total += loss.item()
        return total, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]

    whole, parts = gradients([[0, 1, 2, 3]]), gradients([[0], [1], [2], [3]])
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    for one, four in zip(whole[1], parts[1], strict=True):
        torch.testing.assert_close(four, one, rtol=1e-3, atol=1e-6)
    # The mean of the parts' own means is another number, since the parts teach different amounts.
    naive = [model(dataset.collate(dataset.__getitems__([i])).batch, WEIGHTS).loss for i in range(4)]
    assert float(torch.stack(naive).mean()) != pytest.approx(whole[0], rel=1e-4)


def test_a_filler_adds_zero_and_reaches_every_trained_parameter_it_would_in_earnest(
    judge: tuple[JudgeModel, Encoding], dataset: EditDataset
) -> None:
    model = judge[0]

    def reached(indices: list[int]) -> set[str]:
        model.zero_grad(set_to_none=True)
        output = model(dataset.collate(dataset.__getitems__(indices)).batch, WEIGHTS)
        task_loss(output.sums, TermCounts(1, 1, 1), WEIGHTS).backward()
        return {name for name, p in model.named_parameters() if p.grad is not None}

    assert reached([FILLER]) == reached([0])
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None) is False
    reached([FILLER])
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_terms_are_weighted_and_left_out_by_the_objective() -> None:
    sums = {"text": torch.tensor(6.0), "qa": torch.tensor(4.0), "score": torch.tensor(9.0)}
    counts = TermCounts(text=3, qa=2, score=3)
    assert float(task_loss(sums, counts, WEIGHTS)) == 1.0 * 2 + 0.5 * 2 + 2.0 * 3
    only_scores = SimpleNamespace(text_ce=0.0, qa_ce=0.0, score_mse=1.0)
    assert float(task_loss({"text": None, "qa": None, "score": sums["score"]}, counts, only_scores)) == 3.0


def test_means_of_a_step_keep_the_penalty_apart() -> None:
    losses = step_losses({"text": 6.0, "qa": 4.0, "score": 0.0}, TermCounts(3, 2, 0), WEIGHTS, 1.5)
    assert losses.as_row() == {
        "loss": 3.0,
        "text_loss": 2.0,
        "qa_loss": 2.0,
        "score_loss": None,
        "orthogonality": 1.5,
    }
