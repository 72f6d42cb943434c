"""The paired comparison finds a real difference, finds none where there is none, and corrects for many."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from lmm4edit.evaluation.comparison import Comparison, compare_predictors, correct_for_many
from lmm4edit.evaluation.correlation import srcc


def data(seed: int, noise_a: float, noise_b: float, n_sources: int = 40, per_source: int = 5):
    rng = np.random.default_rng(seed)
    mos = rng.normal(50, 10, n_sources * per_source)
    a = mos + rng.normal(0, noise_a, len(mos))
    b = mos + rng.normal(0, noise_b, len(mos))
    return a, b, mos, np.arange(n_sources).repeat(per_source)


def test_a_better_predictor_is_found_better_and_the_mirror_is_exact() -> None:
    a, b, mos, sources = data(0, 4, 14)
    found = compare_predictors("quality", ("a", a), ("b", b), mos, sources)
    assert found.difference == pytest.approx(srcc(a, mos) - srcc(b, mos), abs=1e-12)
    assert 0 < found.low < found.difference < found.high
    # The interval is nearly normal, so its width gives the p value, approximately.
    error = (found.high - found.low) / (2 * norm.isf(0.025))
    assert norm.isf(found.p / 2) == pytest.approx(found.difference / error, rel=0.1)
    assert (found.n, found.n_sources) == (200, 40)
    mirrored = compare_predictors("quality", ("b", b), ("a", a), mos, sources)
    expected = (-found.difference, -found.high, -found.low)
    assert (mirrored.difference, mirrored.low, mirrored.high) == pytest.approx(expected)
    assert mirrored.p == found.p


def test_a_predictor_against_itself_differs_by_nothing() -> None:
    a, _, mos, sources = data(1, 5, 5)
    found = compare_predictors("quality", ("a", a), ("a2", a), mos, sources)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_equal_predictors_are_rarely_called_different() -> None:
    p_values = []
    for seed in range(60):
        a, b, mos, sources = data(100 + seed, 8, 8)
        p_values.append(compare_predictors("q", ("a", a), ("b", b), mos, sources, resamples=200).p)
    assert sum(p < 0.05 for p in p_values) <= 9


def test_pairing_beats_two_separate_intervals() -> None:
    # Both share most of their error: the difference is known far better than either value.
    rng = np.random.default_rng(5)
    mos = rng.normal(size=300)
    shared = mos + rng.normal(0, 1.0, 300)
    found = compare_predictors(
        "q", ("a", shared + 0.05 * rng.normal(size=300)), ("b", shared + 0.4 * rng.normal(size=300)), mos, range(300)
    )
    assert found.low > 0


def test_constants_and_few_sources_give_a_reason() -> None:
    a, b, mos, sources = data(2, 5, 5)
    found = compare_predictors("q", ("flat", np.full(len(a), 3.0)), ("b", b), mos, sources)
    assert (found.difference, found.p) == (None, None)
    assert found.reason == "no SRCC for flat: too few pairs or all values equal"
    few = compare_predictors("q", ("a", a), ("b", b), mos, np.arange(len(a)) % 3)
    assert (few.low, few.p, few.reason) == (None, None, "no interval: 3 sources, at least 5 needed")
    assert few.difference is not None


def test_holm() -> None:
    def with_p(p: float | None) -> Comparison:
        return Comparison("q", "a", "b", 0.5, 0.4, 0.1, 0.0, 0.2, p, 10, 10)

    corrected = correct_for_many([with_p(p) for p in (0.01, 0.04, None, 0.03, 0.005)])
    # Worked by hand: sorted .005*4, .01*3, .03*2, max(.06, .04*1).
    assert [c.p_adjusted for c in corrected] == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert correct_for_many([]) == []
