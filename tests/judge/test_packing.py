"""Packed equals separate, a batch equals its rows alone, and nothing else than the answer is learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmm4edit.errors import PromptError
from lmm4edit.judge.backbones import last_hidden_states
from lmm4edit.judge.packing import (
    IGNORE,
    PADDING,
    PREFIX,
    PackedExample,
    Suffix,
    collate,
    packed_length,
    position_ids,
    unpack,
)
from tests.judge.kit import STAGE_1, STAGE_2, Kit

TOLERANCE = 2e-5


def _separate_states(kit: Kit, example: PackedExample) -> list[Tensor]:
    """States of each question's tokens by plain causal attention and the backbone's own positions."""
    states = []
    for row in unpack(example):
        batch = kit.batch([row])
        out = kit.backbone.model(
            input_ids=batch.input_ids,
            attention_mask=torch.ones_like(batch.input_ids),
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            mm_token_type_ids=batch.mm_token_type_ids,
        ).last_hidden_state
        states.append(out[0, len(row.prefix_ids) :])
    return states


@torch.no_grad()
def test_packed_states_equal_one_question_alone(shared_kit: Kit) -> None:
    examples = [shared_kit.taught(index) for index in range(3)]
    batch = shared_kit.batch(examples)
    packed = last_hidden_states(shared_kit.backbone, batch)
    for row, example in enumerate(examples):
        for suffix, alone in zip(example.suffixes, _separate_states(shared_kit, example), strict=True):
            segment = batch.suffix_keys.index(suffix.key) + 1
            together = packed[row, batch.segment_ids[row] == segment]
            torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=0)
    assert packed.abs().mean() > 0.1  # equality of zeros would prove nothing


@torch.no_grad()
def test_eager_attention_gives_the_same_states(kit: Kit) -> None:
    batch = kit.batch([kit.taught(0), kit.taught(1)])
    expected = last_hidden_states(kit.backbone, batch)
    kit.backbone.set_attn_implementation("eager")
    torch.testing.assert_close(last_hidden_states(kit.backbone, batch), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("objective", [STAGE_1, STAGE_2], ids=["stage1", "stage2"])
def test_packed_loss_and_gradients_equal_separate(
    kit: Kit, objective: Any, gradients: Callable[[torch.nn.Module], dict[str, Tensor]]
) -> None:
    judge = kit.judge()
    examples = [kit.taught(index) for index in range(3)]
    results = []
    for batch in (kit.batch(examples), kit.separate(examples)):
        judge.zero_grad()
        output = judge(batch, objective)
        output.loss.backward()
        results.append((output, gradients(judge)))
    (packed, packed_gradients), (separate, separate_gradients) = results
    assert packed.counts == separate.counts
    assert packed.loss.item() == pytest.approx(separate.loss.item(), rel=1e-5)
    for term in ("text", "qa", "score"):
        if packed.sums[term] is not None:
            assert packed.sums[term].item() == pytest.approx(separate.sums[term].item(), rel=1e-5)
    touched = 0
    for name, gradient in packed_gradients.items():
        scale = separate_gradients[name].abs().max()
        torch.testing.assert_close(gradient, separate_gradients[name], atol=2e-4 * float(scale) + 1e-7, rtol=0)
        touched += bool(scale > 0)
    assert touched > len(packed_gradients) / 2


@torch.no_grad()
def test_a_batch_equals_its_rows_alone(kit: Kit) -> None:
    judge = kit.judge()
    examples = [kit.example(0), kit.example(1, question=None), kit.example(2), kit.example(3, question=None)]
    together = judge(kit.batch(examples))
    for row, example in enumerate(examples):
        alone = judge(kit.batch([example]))
        torch.testing.assert_close(together.scores[row], alone.scores[0], atol=1e-3, rtol=0)
        if alone.answer_logits is None:
            assert together.answer_logits[row].isnan().all()
        else:
            torch.testing.assert_close(together.answer_logits[row], alone.answer_logits[0], atol=1e-4, rtol=0)
    assert together.scores.std(0).min() > 1e-2  # the rows do differ


@torch.no_grad()
def test_the_order_of_the_questions_is_irrelevant(kit: Kit) -> None:
    judge = kit.judge()
    example = kit.example(0)
    reversed_order = replace(example, suffixes=example.suffixes[::-1])
    first, second = judge(kit.batch([example])), judge(kit.batch([reversed_order]))
    torch.testing.assert_close(first.scores, second.scores, atol=1e-3, rtol=0)
    torch.testing.assert_close(first.answer_logits, second.answer_logits, atol=1e-4, rtol=0)
    mixed = judge(kit.batch([example, reversed_order]))
    torch.testing.assert_close(mixed.scores[0], mixed.scores[1], atol=1e-3, rtol=0)


def test_positions_equal_the_backbones_own(shared_kit: Kit) -> None:
    examples = [shared_kit.taught(index) for index in range(4)]
    batch = shared_kit.batch(examples)
    ours = position_ids(shared_kit.backbone, batch)
    for row, example in enumerate(examples):
        for single in unpack(example):
            alone = shared_kit.batch([single])
            theirs, _ = shared_kit.backbone.model.get_rope_index(
                alone.input_ids, mm_token_type_ids=alone.mm_token_type_ids, image_grid_thw=alone.image_grid_thw
            )
            prefix = len(example.prefix_ids)
            assert torch.equal(ours[:, row, :prefix], theirs[:, 0, :prefix])
            segment = batch.suffix_keys.index(single.suffixes[0].key) + 1
            assert torch.equal(ours[:, row][:, batch.segment_ids[row] == segment], theirs[:, 0, prefix:])


def test_positions_refuse_images_that_lack_tokens(shared_kit: Kit) -> None:
    example = shared_kit.example(2)
    image = shared_kit.backbone.config.image_token_id
    cut = [token for token in example.prefix_ids if token != image]
    tokens = len(example.prefix_ids) - len(cut)
    batch = shared_kit.batch([replace(example, prefix_ids=cut)])
    with pytest.raises(PromptError) as caught:
        position_ids(shared_kit.backbone, batch)
    assert str(caught.value) == (
        f"The batch has 0 image tokens, but its images need {tokens}. Was a sequence truncated?"
    )


def test_only_answer_tokens_are_labelled(shared_kit: Kit) -> None:
    example = shared_kit.example(0, answers={"alignment": 9.31, "answer": "yes"})
    batch = shared_kit.batch([example])
    end = shared_kit.tokenizer.convert_tokens_to_ids("<|im_end|>")
    words = shared_kit.tokenizer.decode(batch.labels[0][batch.labels[0] != IGNORE].tolist())
    assert words == " 9.31<|im_end|> Yes<|im_end|>"
    for suffix in example.suffixes:
        index = int(batch.readout_index[0, batch.suffix_keys.index(suffix.key)])
        label = int(batch.labels[0, index])
        assert label == (suffix.answer_ids[0] if suffix.answer_ids else IGNORE)
        if suffix.answer_ids:
            assert suffix.answer_ids[-1] == end
            # every labelled place predicts the token that is read next
            length = len(suffix.answer_ids)
            assert batch.labels[0, index : index + length].tolist() == suffix.answer_ids
            assert batch.input_ids[0, index + 1 : index + length].tolist() == suffix.answer_ids[:-1]


@pytest.mark.parametrize("score", [45.5, 9.31, 100.00, 0.00])
def test_the_answer_never_moves_the_read_out(kit: Kit, score: float) -> None:
    """IntMeGroup/LMM4Edit evaluate.py: an offset from the end moves with the label."""
    judge = kit.judge()
    without = kit.example(0)
    scores = {d: score for d in ("quality", "alignment", "preservation")}
    taught = kit.example(0, answers={**scores, "answer": "no"})
    for one, other in zip(without.suffixes, taught.suffixes, strict=True):
        assert one.ids == other.ids
    first, second = kit.batch([without]), kit.batch([taught])
    stems = [shared.ids[-1] for shared in without.suffixes]
    for batch in (first, second):
        assert batch.input_ids[0, batch.readout_index[0]].tolist() == stems
    with torch.no_grad():
        torch.testing.assert_close(judge(first).scores, judge(second).scores, atol=1e-3, rtol=0)


def test_targets_are_nan_where_unknown(shared_kit: Kit) -> None:
    batch = shared_kit.batch(
        [shared_kit.example(0, targets={"quality": 36.31}), shared_kit.example(1, targets={"answer": 1.0})]
    )
    assert batch.suffix_keys == ["quality", "alignment", "preservation", "answer"]
    expected = np.array([[36.31, np.nan, np.nan, np.nan], [np.nan, np.nan, np.nan, 1.0]], dtype=np.float32)
    np.testing.assert_array_equal(batch.targets.numpy(), expected)


def test_collate_refuses_what_cannot_be_answered() -> None:
    ids = {"image_token_id": 9, "pad_token_id": 0}
    twice = PackedExample([1], [], None, [Suffix("quality", [2]), Suffix("quality", [3])], sample_id="a")
    with pytest.raises(PromptError, match=r"^Sample 'a': question 'quality' is asked twice\.$"):
        collate([twice], **ids)
    empty = PackedExample([1], [], None, [Suffix("quality", [])], sample_id="b")
    with pytest.raises(PromptError, match=r"^Sample 'b': question 'quality' is without a stem\.$"):
        collate([empty], **ids)
    with pytest.raises(ValueError, match=r"^Expected at least one example to collate, got none\.$"):
        collate([], **ids)


_SUFFIXES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 6), st.integers(0, 5)),
    min_size=0,
    max_size=4,
    unique_by=lambda suffix: suffix[0],
)
_EXAMPLES = st.lists(st.tuples(st.integers(1, 12), _SUFFIXES), min_size=1, max_size=4)


@given(_EXAMPLES)
@settings(max_examples=60, deadline=None)
def test_any_lengths_pack_into_the_right_places(shapes: list[tuple[int, list[tuple[str, int, int]]]]) -> None:
    """Against a second, naive construction: token by token."""
    counter = iter(range(100, 10_000))
    examples = [
        PackedExample(
            [next(counter) for _ in range(prefix)],
            [],
            None,
            [
                Suffix(key, [next(counter) for _ in range(n)], [next(counter) for _ in range(m)])
                for key, n, m in suffixes
            ],
        )
        for prefix, suffixes in shapes
    ]
    batch = collate(examples, image_token_id=1, pad_token_id=0)
    length = max(map(packed_length, examples))
    mask = batch.attention_mask
    assert batch.input_ids.shape == (len(examples), length) and mask.shape == (len(examples), 1, length, length)
    for row, example in enumerate(examples):
        tokens, owners, labels, offsets = list(example.prefix_ids), [], [], []
        owners += [PREFIX] * len(tokens)
        labels += [IGNORE] * len(tokens)
        offsets += [0] * len(tokens)
        for suffix in example.suffixes:
            question = batch.suffix_keys.index(suffix.key)
            assert int(batch.readout_index[row, question]) == len(tokens) + len(suffix.ids) - 1
            own = suffix.ids + suffix.answer_ids[:-1]
            learn = [IGNORE] * (len(suffix.ids) - 1) + (suffix.answer_ids or [IGNORE])
            tokens += own
            owners += [question + 1] * len(own)
            labels += learn
            offsets += range(len(own))
        padding = length - len(tokens)
        assert batch.input_ids[row].tolist() == tokens + [0] * padding
        assert batch.segment_ids[row].tolist() == owners + [PADDING] * padding
        assert batch.labels[row].tolist() == labels + [IGNORE] * padding
        assert batch.suffix_offsets[row].tolist() == offsets + [0] * padding
        owners += [PADDING] * padding
        for i in range(length):
            sees = [
                j
                for j in range(length)
                if j == i or (j < i and owners[i] != PADDING and owners[j] in (PREFIX, owners[i]))
            ]
            assert mask[row, 0, i].nonzero().view(-1).tolist() == sees


@given(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_random_token_sequences_pack_as_if_alone(shared_kit: Kit, prefix: int, suffixes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return rng.integers(0, 256, n).tolist()

    example = PackedExample(draw(prefix), [], None, [Suffix(f"q{index}", draw(n)) for index, n in enumerate(suffixes)])
    with torch.no_grad():
        batch = shared_kit.batch([example])
        packed = last_hidden_states(shared_kit.backbone, batch)
        for index, row in enumerate(unpack(example)):
            alone = last_hidden_states(shared_kit.backbone, shared_kit.batch([row]))
            together = packed[0, batch.segment_ids[0] == index + 1]
            torch.testing.assert_close(together, alone[0, prefix:], atol=TOLERANCE, rtol=0)
