"""The logistic mappings recover curves they were drawn from, in both directions and at any scale of the input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit

from lmm4edit.evaluation.logistic import fit_logistic


def four(x, low, high, centre, width):
    return low + (high - low) / (1 + np.exp(-(x - centre) / width))


def five(x, b1, b2, b3, b4, b5):
    return b1 * (0.5 - 1 / (1 + np.exp(b2 * (x - b3)))) + b4 * x + b5


@pytest.mark.parametrize("scale", [1e-3, 1.0, 5e4])
@pytest.mark.parametrize("direction", [1, -1])
def test_a_noiseless_curve_is_recovered(scale: float, direction: int) -> None:
    x = np.linspace(-3, 4, 60)
    y = four(direction * x, 10, 90, 0.4, 0.7)
    fit = fit_logistic(x * scale, y, 4)
    assert fit is not None and fit.increasing is (direction > 0)
    assert fit(x * scale) == pytest.approx(y, abs=1e-4)
    y5 = five(x, 40 * direction, 1.3, 0.2, 4.0 * direction, 50)
    fit5 = fit_logistic(x * scale, y5, 5)
    assert fit5 is not None
    assert fit5(x * scale) == pytest.approx(y5, abs=1e-3)


def test_as_good_as_curve_fit_from_the_true_parameters() -> None:
    rng = np.random.default_rng(0)
    for width in (0.2, 0.8, 3.0):
        x = rng.normal(size=200)
        y = four(x, 20, 80, 0.1, width) + rng.normal(0, 4, 200)
        truth, _ = curve_fit(four, x, y, p0=[20, 80, 0.1, width], maxfev=20_000)
        fit = fit_logistic(x, y, 4)
        assert fit is not None
        ours, theirs = np.sum((fit(x) - y) ** 2), np.sum((four(x, *truth) - y) ** 2)
        assert ours <= theirs * (1 + 1e-4)


def test_a_step_does_not_overflow() -> None:
    x = np.arange(40.0)
    y = np.where(x < 17, 10.0, 90.0)
    for parameters in (4, 5):
        fit = fit_logistic(x, y, parameters)
        assert fit is not None
        assert np.abs(fit(x) - y).max() < 8


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 100)), min_size=20, max_size=50, unique_by=lambda p: p[0]))
def test_any_data_gives_a_finite_curve_no_worse_than_a_constant(points: list[tuple[float, float]]) -> None:
    x, y = np.array(points).T
    if np.ptp(x) < 1e-6:
        return
    for parameters in (4, 5):
        fit = fit_logistic(x, y, parameters)
        assert fit is not None
        assert np.isfinite(fit(x)).all()
        assert np.sum((fit(x) - y) ** 2) <= np.sum((y - y.mean()) ** 2) + 1e-6


@pytest.mark.parametrize(
    ("x", "parameters", "message"),
    [
        ([1.0, 2, 3, 4], 3, "Expected 4 or 5 logistic parameters, got 3."),
        ([1.0, 2, 3], 4, "Expected at least 4 points for 4 parameters, got 3."),
        ([2.0] * 9, 4, "Expected predictions that differ, got a constant: there is no curve to fit."),
    ],
)
def test_refusals(x: list[float], parameters: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        fit_logistic(x, x, parameters)
    assert str(caught.value) == message


def test_the_same_data_give_the_same_curve_to_the_last_bit_wherever_they_lie_in_memory() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=41), np.where(np.arange(41) % 5 == 0, 70.0, 30.0) + rng.normal(size=41)
    found = set()
    for offset in range(8):
        copies = [np.empty(len(x) + 8)[offset : offset + len(x)] for _ in range(2)]
        copies[0][:], copies[1][:] = x, y
        for parameters in (4, 5):
            fit = fit_logistic(*copies, parameters)
            assert fit is not None
            found.add(fit.parameters)
    assert len(found) == 2
