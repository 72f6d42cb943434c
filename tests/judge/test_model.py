"""One forward pass: scores, answers and the terms of the loss."""

from __future__ import annotations

import math

import pytest
import torch

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.backbones import last_hidden_states, plain_model
from lmm4edit.judge.model import JudgeModel, ObjectiveWeights, answer_probability
from lmm4edit.judge.packing import IGNORE
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import BUILT_IN_DIMENSIONS, QUALITY, Dimension
from tests.judge.kit import SCALE, STAGE_1, STAGE_2, Kit


@torch.no_grad()
def test_scores_are_read_at_the_stems_and_on_the_mos_scale(kit: Kit) -> None:
    judge = kit.judge()
    batch = kit.batch([kit.example(0), kit.example(1)])
    output = judge(batch)
    states = last_hidden_states(judge.backbone, batch)
    assert output.loss is None and output.sums == {}
    for row in range(2):
        for d, dimension in enumerate(BUILT_IN_DIMENSIONS):
            place = int(batch.readout_index[row, batch.suffix_keys.index(dimension.name)])
            torch.testing.assert_close(output.hidden[row, d], states[row, place])
            inner = torch.nn.functional.gelu(judge.score_head.first(states[row, place]))  # type: ignore[union-attr]
            standardised = judge.score_head.second(inner)[d]  # type: ignore[union-attr]
            assert output.scores[row, d].item() == pytest.approx(
                standardised.item() * SCALE.sd[d] + SCALE.mean[d], abs=1e-3
            )
    assert output.scores.dtype == torch.float32 and output.asked.all()


@torch.no_grad()
def test_answer_logits_are_those_of_no_and_yes_after_the_stem(kit: Kit) -> None:
    judge = kit.judge(head=False)
    batch = kit.batch([kit.example(0), kit.example(1, question=None)])
    output = judge(batch)
    place = int(batch.readout_index[0, batch.suffix_keys.index("answer")])
    states = last_hidden_states(judge.backbone, batch)
    logits = plain_model(judge.backbone).lm_head(states[0, place])
    words = [kit.tokenizer.encode(word)[0] for word in (" No", " Yes")]
    torch.testing.assert_close(output.answer_logits[0], logits[words])
    assert output.answer_logits[1].isnan().all()
    expected = 1 / (1 + math.exp(float(logits[words[0]] - logits[words[1]])))
    assert answer_probability(output.answer_logits)[0].item() == pytest.approx(expected, abs=1e-5)
    assert judge(kit.batch([kit.example(0, question=None)])).answer_logits is None


@torch.no_grad()
def test_what_is_not_asked_is_nan_and_not_a_number_from_nowhere(kit: Kit) -> None:
    judge = kit.judge()
    output = judge(kit.batch([kit.example(0, dimensions=BUILT_IN_DIMENSIONS[1:2]), kit.example(0)]))
    assert output.asked.tolist() == [[False, True, False], [True, True, True]]
    assert output.scores.isnan().tolist() == [[True, False, True], [False, False, False]]


@torch.no_grad()
def test_a_batch_that_lacks_a_dimension_entirely(kit: Kit) -> None:
    judge = kit.judge()
    output = judge(kit.batch([kit.example(0, dimensions=BUILT_IN_DIMENSIONS[:1], targets={"quality": 50.0})]), STAGE_2)
    assert output.asked.tolist() == [[True, False, False]]
    assert output.counts["score"] == 1 and output.sums["score"].isfinite()


def test_text_loss_is_cross_entropy_over_the_answer_tokens_alone(kit: Kit) -> None:
    judge = kit.judge(head=False)
    batch = kit.batch([kit.taught(0), kit.example(1), kit.taught(2)])
    objective = ObjectiveWeights(text_ce=1.0, qa_ce=2.0)
    output = judge(batch, objective)
    logits = plain_model(judge.backbone).lm_head(last_hidden_states(judge.backbone, batch))
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.labels, ignore_index=IGNORE, reduction="none"
    )
    taught = batch.labels != IGNORE
    qa = taught & (batch.segment_ids == batch.suffix_keys.index("answer") + 1)
    assert output.counts == {"text": int((taught & ~qa).sum()), "qa": 4, "score": 6}
    assert output.sums["text"].item() == pytest.approx(losses[taught & ~qa].sum().item(), rel=1e-5)
    assert output.sums["qa"].item() == pytest.approx(losses[qa].sum().item(), rel=1e-5)
    assert output.sums["score"] is None and output.orthogonality is None
    expected = losses[taught & ~qa].mean() + 2 * losses[qa].mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_score_loss_is_squared_error_in_standard_deviations(kit: Kit) -> None:
    judge = kit.judge()
    examples = [kit.example(0, targets={"quality": 36.31, "preservation": 80.0}), kit.example(1, targets={})]
    output = judge(kit.batch(examples), ObjectiveWeights(score_mse=1.0))
    wanted = [(36.31 - SCALE.mean[0]) / SCALE.sd[0], (80.0 - SCALE.mean[2]) / SCALE.sd[2]]
    got = [output.standardised[0, 0].item(), output.standardised[0, 2].item()]
    expected = sum((a - b) ** 2 for a, b in zip(got, wanted, strict=True))
    assert output.counts["score"] == 2
    assert output.sums["score"].item() == pytest.approx(expected, rel=1e-5)
    assert output.loss.item() == pytest.approx(expected / 2, rel=1e-5)


def test_the_penalty_is_reported_apart_and_added_once(kit: Kit) -> None:
    judge = kit.judge()
    batch = kit.batch([kit.taught(0)])
    with_penalty = judge(batch, STAGE_1)
    without = judge(batch, ObjectiveWeights(STAGE_1.text_ce, STAGE_1.qa_ce))
    assert without.orthogonality is None and with_penalty.orthogonality > 0.1
    assert with_penalty.loss.item() == pytest.approx(
        (without.loss + STAGE_1.orthogonality * with_penalty.orthogonality).item(), rel=1e-6
    )
    assert judge(batch, STAGE_2).orthogonality.item() == with_penalty.orthogonality.item()


def test_nothing_taught_gives_a_zero_that_can_be_propagated(kit: Kit) -> None:
    """Data-parallel training needs every process to take part, also one whose batch teaches nothing."""
    judge = kit.judge()
    output = judge(kit.batch([kit.example(0)]), ObjectiveWeights(text_ce=1.0, qa_ce=1.0, score_mse=1.0))
    assert output.counts == {"text": 0, "qa": 0, "score": 0}
    assert output.loss.item() == 0.0
    output.loss.backward()
    gradients = [p.grad for p in judge.parameters() if p.grad is not None]
    assert gradients and all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@torch.no_grad()
def test_bfloat16_backbone_gives_float32_scores(kit: Kit) -> None:
    judge = kit.judge()
    expected = judge(kit.batch([kit.example(0)])).scores
    judge.backbone.to(torch.bfloat16)
    scores = judge(kit.batch([kit.example(0)])).scores
    assert scores.dtype == torch.float32
    assert (scores - expected).abs().max() < 5
    assert scores.numpy().shape == (1, 3)


def test_without_a_head_there_are_no_scores(kit: Kit) -> None:
    judge = kit.judge(head=False)
    output = judge(kit.batch([kit.example(0)]))
    assert output.scores is None and output.standardised is None
    with pytest.raises(CheckpointError) as caught:
        judge.require_head()
    assert str(caught.value) == (
        "This judge has no score head: it is a stage-1 checkpoint, which answers in words. Read it with the text "
        "read-out, or train stage 2 from it."
    )
    with pytest.raises(ConfigError) as caught_config:
        judge(kit.batch([kit.taught(0)]), STAGE_2)
    assert str(caught_config.value) == (
        "objective.score_mse needs a score head: attach one first (stage 2), or set it to 0."
    )


def test_attaching_a_head_leaves_the_words_alone(kit: Kit) -> None:
    """Stage 2 starts where stage 1 ended."""
    judge = kit.judge(head=False)
    batch = kit.batch([kit.taught(0)])
    with torch.no_grad():
        before = judge(batch, STAGE_1)
        judge.attach_score_head(ScoreHead(32, 3), SCALE)
        after = judge(batch, STAGE_1)
    assert torch.equal(before.hidden, after.hidden) and torch.equal(before.answer_logits, after.answer_logits)
    assert before.loss == after.loss and after.scores is not None
    judge.require_head()


def test_an_objective_of_zeros_is_refused(kit: Kit) -> None:
    with pytest.raises(ConfigError) as caught:
        kit.judge()(kit.batch([kit.taught(0)]), ObjectiveWeights())
    assert str(caught.value) == "Every weight of the objective is 0: there is nothing to learn."


def test_parts_that_do_not_fit_are_refused(kit: Kit) -> None:
    with pytest.raises(ConfigError) as caught:
        JudgeModel(kit.backbone, BUILT_IN_DIMENSIONS, (0, 1), ScoreHead(32, 2), SCALE)
    assert str(caught.value) == (
        "Expected a score head of (hidden size, outputs, scales) = (32, 3, 3) for dimensions "
        "['quality', 'alignment', 'preservation'], got (32, 2, 3)."
    )
    with pytest.raises(ConfigError) as caught:
        JudgeModel(kit.backbone, BUILT_IN_DIMENSIONS, (0, 1), ScoreHead(32, 3))
    assert str(caught.value) == "A score head and a target scale belong together: give both or neither."
    for dimensions in ((), (QUALITY, QUALITY)):
        with pytest.raises(ConfigError, match="Expected at least one dimension and no name twice"):
            JudgeModel(kit.backbone, dimensions, (0, 1))


@torch.no_grad()
def test_dimensions_are_data(kit: Kit) -> None:
    style = Dimension("style", "Rate the style.", low=1, high=5)
    judge = JudgeModel(kit.backbone, [style, QUALITY], (0, 1), ScoreHead(32, 2), TargetScale((3.0, 50.0), (1.0, 10.0)))
    output = judge(kit.batch([kit.example(0, dimensions=[QUALITY, style])]))
    swapped = judge(kit.batch([kit.example(0, dimensions=[QUALITY, style], question=None)]))
    assert output.scores.shape == (1, 2)
    torch.testing.assert_close(output.scores, swapped.scores, atol=1e-4, rtol=0)
