"""The head and the scale of its targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmm4edit.errors import ConfigError
from lmm4edit.judge.score_head import ScoreHead, TargetScale


def test_each_question_reads_its_own_output() -> None:
    torch.manual_seed(0)
    head = ScoreHead(6, 3, inner=4)
    hidden = torch.randn(2, 3, 6)
    got = head(hidden)
    assert got.shape == (2, 3)
    for row in range(2):
        for d in range(3):
            layers = torch.nn.functional.gelu(head.first(hidden[row, d]))
            assert got[row, d].item() == pytest.approx(head.second(layers)[d].item(), abs=1e-6)


def test_gradients_of_one_question_leave_the_other_outputs_alone() -> None:
    head = ScoreHead(6, 3)
    assert head.inner == 6
    head(torch.randn(5, 3, 6))[:, 1].sum().backward()
    assert head.second.weight.grad is not None
    assert head.second.weight.grad[1].abs().sum() > 0
    assert head.second.weight.grad[[0, 2]].abs().sum() == 0


def test_computes_in_float32_even_under_autocast() -> None:
    """huggingface/trl#1391: a bfloat16 score cannot be written down, and has three digits."""
    torch.manual_seed(0)
    head = ScoreHead(64, 1)
    hidden = torch.randn(8, 1, 64).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = head(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, head(hidden.float()), atol=1e-6, rtol=0)


def test_the_scale_of_training_scores() -> None:
    scale = TargetScale.from_scores({"quality": [40.0, 60.0], "alignment": [0.0, 50.0, 100.0]})
    assert scale.mean == (50.0, 50.0)
    assert scale.sd == pytest.approx((10.0, (2 * 50**2 / 3) ** 0.5))


@given(st.lists(st.floats(-20, 120), min_size=2, max_size=2))
def test_restoring_inverts_standardising(scores: list[float]) -> None:
    scale = TargetScale((51.3, 36.31), (14.2, 7.7))
    values = torch.tensor([scores], dtype=torch.float64)
    torch.testing.assert_close(scale.restore(scale.standardise(values)), values, atol=1e-9, rtol=0)


def test_labels_are_not_rounded() -> None:
    """modelscope/ms-swift#3260: label 36.31 must reach the loss as 36.31."""
    got = TargetScale((0.0,), (1.0,)).standardise(torch.tensor([[36.31]]))
    assert got.item() == pytest.approx(36.31, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "n", "different"), [([], 0, 0), ([5.0], 1, 1), ([5.0, 5.0, 5.0], 3, 1)], ids=["none", "one", "constant"]
)
def test_constant_scores_are_refused(values: list[float], n: int, different: int) -> None:
    with pytest.raises(ConfigError) as caught:
        TargetScale.from_scores({"quality": values})
    assert str(caught.value) == (
        f"Dimension 'quality': expected at least two different training scores, got {n} scores with {different} "
        "different values. Give samples with mos_quality, or leave the dimension out."
    )


@pytest.mark.parametrize(("mean", "sd"), [((1.0,), (0.0,)), ((float("nan"),), (1.0,)), ((1.0, 2.0), (1.0,))])
def test_impossible_scales_are_refused(mean: tuple[float, ...], sd: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        TargetScale(mean, sd)
    assert str(caught.value) == (
        f"A target scale needs as many finite means as positive standard deviations, got mean={mean} and sd={sd}."
    )
