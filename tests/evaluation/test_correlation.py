"""Statistics against SciPy to 1e-12, ties and constants included; values of resamples against SciPy on copied rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from lmm4edit.evaluation.bootstrap import draw_resamples, percentile_interval
from lmm4edit.evaluation.correlation import (
    Statistic,
    _pearson,
    _tau,
    accuracy,
    agreement,
    krcc,
    plcc,
    rmse,
    spearman_resampled,
    srcc,
)

FLOATS = st.floats(-1e3, 1e3, allow_nan=False).map(lambda v: round(v, 3))
TIED = st.integers(0, 4).map(float)
PAIRS = st.one_of(
    st.lists(st.tuples(FLOATS, FLOATS), min_size=3, max_size=60),
    st.lists(st.tuples(TIED, TIED), min_size=3, max_size=60),
    st.lists(st.tuples(TIED, FLOATS), min_size=3, max_size=60),
)


def by_name(statistics: list[Statistic]) -> dict[str, Statistic]:
    return {s.name: s for s in statistics}


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_equal_to_scipy(pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs).T
    assume(np.ptp(x) > 1e-9 * np.abs(x).max() and np.ptp(y) > 1e-9 * np.abs(y).max())
    assert srcc(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert krcc(x, y) == pytest.approx(stats.kendalltau(x, y, variant="b").statistic, abs=1e-12)
    assert plcc(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)
    assert rmse(x, y) == pytest.approx(float(np.sqrt(np.mean((x - y) ** 2))), abs=1e-12)


def test_equal_to_scipy_at_the_size_of_a_benchmark() -> None:
    rng = np.random.default_rng(3)
    x = np.round(rng.normal(50, 10, 3000), 1)
    y = x + np.round(rng.normal(0, 8, 3000), 0)
    assert srcc(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert krcc(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)
    assert plcc(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)


def test_a_large_offset_loses_no_digits() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=100), rng.normal(size=100)
    assert plcc(x + 1e6, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-9)


def test_resampled_values_are_those_of_copied_rows() -> None:
    rng = np.random.default_rng(0)
    clusters = [f"s{i}" for i in rng.integers(0, 9, 50)]
    x, y = rng.integers(0, 8, 50).astype(float), rng.integers(0, 20, 50).astype(float)
    draws = draw_resamples(clusters, 40, seed=5)
    spearman, pearson, tau = spearman_resampled(x, y, draws), _pearson(x, y, draws.weights), _tau(x, y, draws)
    for b in range(40):
        rows = np.repeat(np.arange(50), draws.weights[:, b].astype(int))
        assert spearman[b] == pytest.approx(stats.spearmanr(x[rows], y[rows]).statistic, abs=1e-12)
        assert pearson[b] == pytest.approx(stats.pearsonr(x[rows], y[rows]).statistic, abs=1e-12)
        assert tau[b] == pytest.approx(stats.kendalltau(x[rows], y[rows]).statistic, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.randoms(use_true_random=False))
def test_order_and_direction(pairs: list[tuple[float, float]], random) -> None:
    x, y = np.array(pairs).T
    assume(np.ptp(x) > 1e-9 * np.abs(x).max() and np.ptp(y) > 1e-9 * np.abs(y).max())
    order = list(range(len(x)))
    random.shuffle(order)
    for statistic in (srcc, krcc, plcc):
        value = statistic(x, y)
        assert statistic(x[order], y[order]) == pytest.approx(value, abs=1e-9)
        assert statistic(-x, y) == pytest.approx(-value, abs=1e-9)
        assert statistic(y, x) == pytest.approx(value, abs=1e-9)
        assert -1 <= value <= 1


def test_a_scorer_where_lower_is_better_is_turned_and_never_made_absolute() -> None:
    rng = np.random.default_rng(1)
    mos = rng.uniform(20, 80, 60)
    error = 100 - mos + rng.normal(0, 3, 60)
    good = by_name(agreement(error, mos, sign=-1, resamples=0))
    bad = by_name(agreement(error, mos, sign=1, resamples=0))
    for name in ("srcc", "krcc", "plcc", "plcc_logistic4"):
        assert good[name].value > 0.8
        assert bad[name].value == pytest.approx(-good[name].value, abs=1e-6)
    assert good["rmse_logistic4"].value == pytest.approx(bad["rmse_logistic4"].value, abs=1e-4)
    assert good["rmse_logistic4"].value < 4
    assert "rmse" not in good


def test_rmse_of_a_scorer_on_the_opinion_scale_is_plain() -> None:
    found = by_name(agreement([1.0, 2.0, 4.0], [1.0, 4.0, 4.0], on_opinion_scale=True, resamples=0))
    assert found["rmse"].value == pytest.approx((4 / 3) ** 0.5)
    assert found["rmse_logistic4"] == Statistic(
        "rmse_logistic4", None, None, None, 3, "only 3 pairs, a logistic needs at least 20"
    )


@pytest.mark.parametrize(
    ("x", "y", "sign", "reason"),
    [
        ([42.0] * 30, list(range(30)), 1, "all 30 predictions equal 42"),
        ([42.0] * 30, list(range(30)), -1, "all 30 predictions equal 42"),
        ([42.0 + 1e-13 * (i % 2) for i in range(30)], list(range(30)), 1, "all 30 predictions equal 42"),
        ([0.0] * 5, list(range(5)), 1, "all 5 predictions equal 0"),
        (list(range(5)), [7.5] * 5, 1, "all 5 opinions equal 7.5"),
        ([1.0, 2.0], [1.0, 2.0], 1, "only 2 pairs, at least 3 needed"),
        ([], [], 1, "only 0 pairs, at least 3 needed"),
    ],
)
def test_constants_and_too_few_have_no_value_and_say_why(x, y, sign, reason, recwarn) -> None:
    found = by_name(agreement(x, y, sign=sign))
    for name in ("srcc", "krcc", "plcc", "plcc_logistic4", "plcc_logistic5", "rmse_logistic4"):
        assert found[name].value is None and found[name].low is None
    for name in ("srcc", "krcc", "plcc", "plcc_logistic4", "plcc_logistic5"):
        assert found[name].reason == reason
    assert srcc(x, y) is None and krcc(x, y) is None and plcc(x, y) is None
    assert not list(recwarn)


LEFT_OUT = "Leave missing values out and count them; a statistic never drops rows silently."


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1.0, float("nan")], [1, 2], f"Expected finite predictions, got nan at index 1 (1 in all). {LEFT_OUT}"),
        ([1.0, 2.0], [1, float("inf")], f"Expected finite opinions, got inf at index 1 (1 in all). {LEFT_OUT}"),
        ([1.0, 2.0], [1, 2, 3], "Expected two one-dimensional arrays of equal length, got shapes (2,) and (3,)."),
        (
            np.ones((4, 2)),
            np.ones((4, 2)),
            "Expected two one-dimensional arrays of equal length, got shapes (4, 2) and (4, 2).",
        ),
    ],
)
def test_wrong_input_is_refused(x, y, message) -> None:
    with pytest.raises(ValueError) as caught:
        agreement(x, y)
    assert str(caught.value) == message


def test_intervals_cover_the_truth_about_as_often_as_they_claim() -> None:
    # Population SRCC of a bivariate normal with r = 0.8 is 6/pi asin(0.4); 60 sources of 4 correlated edits each.
    truth = 6 / np.pi * np.arcsin(0.4)
    covered = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        source = rng.normal(size=(60, 1)).repeat(4, 1)
        shared = rng.normal(size=(60, 1)).repeat(4, 1)
        x = np.sqrt(0.5) * (source + rng.normal(size=(60, 4)))
        y = 0.8 * x + 0.6 * np.sqrt(0.5) * (shared + rng.normal(size=(60, 4)))
        found = by_name(agreement(x.ravel(), y.ravel(), np.repeat(np.arange(60), 4), resamples=300, seed=seed))
        covered += found["srcc"].low <= truth <= found["srcc"].high
    assert 52 <= covered <= 60


def test_intervals_grow_when_rows_belong_to_few_sources_and_are_the_same_from_the_same_seed() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=(20, 2)).repeat(10, axis=0)
    x, y = base[:, 0] + base[:, 1] + rng.normal(0, 0.01, 200), base[:, 1] + rng.normal(0, 0.01, 200)
    clusters = np.arange(20).repeat(10)
    together = by_name(agreement(x, y, clusters))["srcc"]
    apart = by_name(agreement(x, y))["srcc"]
    assert together.high - together.low > 2 * (apart.high - apart.low)
    assert by_name(agreement(x, y, clusters))["srcc"] == together
    assert by_name(agreement(x, y, clusters, seed=1))["srcc"] != together


def test_no_interval_from_few_sources_or_mostly_undefined_resamples() -> None:
    found = by_name(agreement([1.0, 2, 3, 4], [1.0, 3, 2, 4], ["a", "a", "b", "b"]))["srcc"]
    assert found.value == pytest.approx(0.8)
    assert (found.low, found.high, found.reason) == (None, None, "no interval: 2 sources, at least 5 needed")
    undefined = percentile_interval(np.array([0.5] * 90 + [np.nan] * 10), 8)
    assert undefined == (None, None, "no interval: defined in only 90 of 100 resamples")


def test_resamples_draw_whole_clusters() -> None:
    draws = draw_resamples(["a", "b", "a", "c"], 50, seed=0)
    assert draws.counts.sum(axis=1).tolist() == [3.0] * 50
    assert (draws.weights[0] == draws.weights[2]).all()
    with pytest.raises(ValueError, match="Expected at least one row and one resample, got 0 rows and 5 resamples."):
        draw_resamples([], 5)


def test_logistic_five_is_never_worse_than_a_line_and_four_never_worse_than_flat() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=40)
        y = rng.normal(size=40) + 0.3 * seed * x
        found = by_name(agreement(x, y, resamples=0))
        assert abs(found["plcc_logistic5"].value) >= abs(found["plcc"].value) - 1e-9
        assert found["rmse_logistic4"].value <= y.std() + 1e-9


def test_accuracy_and_the_majority_baseline() -> None:
    answers = ["yes"] * 6 + ["no"] * 4
    given_ = ["yes"] * 5 + ["no"] * 5
    found = by_name(accuracy(given_, answers, list(range(10))))
    assert found["accuracy"].value == pytest.approx(0.9)
    assert found["majority_accuracy"].value == pytest.approx(0.6)
    assert found["accuracy"].low < 0.9 < found["accuracy"].high <= 1
    assert found["accuracy"].n == 10
    assert accuracy([], [])[0] == Statistic("accuracy", None, None, None, 0, "no pairs")
    with pytest.raises(ValueError, match="Expected one prediction per answer, got 1 and 2."):
        accuracy(["yes"], ["yes", "no"])
