"""The learning rate: warm-up, then the chosen fall."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmm4edit.training.schedule import Schedule, learning_rate_factor


def factors(schedule: Schedule, total: int, warmup: int, final_ratio: float = 0.0) -> list[float]:
    return [
        learning_rate_factor(step, total_steps=total, warmup_steps=warmup, schedule=schedule, final_ratio=final_ratio)
        for step in range(total)
    ]


def test_cosine_with_warm_up() -> None:
    expected = [0.5, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]
    assert factors("cosine", 6, 2) == pytest.approx(expected)


def test_linear_and_constant() -> None:
    assert factors("linear", 4, 0) == [1.0, 0.75, 0.5, 0.25]
    assert factors("constant", 3, 1) == [1.0, 1.0, 1.0]


def test_the_fall_ends_at_the_final_ratio() -> None:
    assert factors("linear", 4, 0, final_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


@settings(deadline=None)
@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 50), st.data())
def test_no_step_is_taken_with_a_rate_of_zero(schedule: Schedule, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    values = factors(schedule, total, warmup)
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1.0
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
