"""Screening and MOS against the definitions written out by hand, and their invariances."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmm4edit.data.mos import Rating, mean_opinion_scores


def table(rows: dict[str, dict[str, float]]) -> list[Rating]:
    return [Rating(subject, item, value) for subject, items in rows.items() for item, value in items.items()]


def by_hand(ratings: list[Rating]) -> tuple[dict[str, float], set[tuple[str, str]]]:
    """Paper 3.4 with loops and the standard library: the oracle."""
    outliers = set()
    for item in {r.item for r in ratings}:
        values = [r.value for r in ratings if r.item == item]
        if len(values) < 2 or len(set(values)) == 1:
            continue
        mean, sd = statistics.mean(values), statistics.stdev(values)
        m2 = statistics.mean((v - mean) ** 2 for v in values)
        m4 = statistics.mean((v - mean) ** 4 for v in values)
        limit = 2.0 if 2 <= m4 / m2**2 <= 4 else math.sqrt(20)
        outliers |= {(r.subject, r.item) for r in ratings if r.item == item and abs(r.value - mean) > limit * sd}
    z: dict[str, list[float]] = {}
    for subject in {r.subject for r in ratings}:
        mine = [r for r in ratings if r.subject == subject]
        left = [r for r in mine if (r.subject, r.item) not in outliers]
        if (len(mine) - len(left)) / len(mine) > 0.05 or len({r.value for r in left}) < 2:
            continue
        mean, sd = statistics.mean(r.value for r in left), statistics.stdev(r.value for r in left)
        for r in left:
            z.setdefault(r.item, []).append((r.value - mean) / sd)
    return {item: 100 * (statistics.mean(values) + 3) / 6 for item, values in z.items()}, outliers


def on_the_edge(ratings: list[Rating]) -> bool:
    """Whether a limit is met so exactly that rounding decides."""
    for item in {r.item for r in ratings}:
        values = [r.value for r in ratings if r.item == item]
        mean = statistics.mean(values)
        m2 = statistics.mean((v - mean) ** 2 for v in values)
        if m2 < 1e-9:
            continue
        kurtosis = statistics.mean((v - mean) ** 4 for v in values) / m2**2
        far = [abs(v - mean) / statistics.stdev(values) for v in values]
        edges = [(kurtosis, 2.0), (kurtosis, 4.0), *((f, limit) for f in far for limit in (2.0, math.sqrt(20)))]
        if any(abs(value - edge) < 1e-9 for value, edge in edges):
            return True
    return False


def test_two_subjects_worked_by_hand() -> None:
    # z of 1, 3 and of 2, 4 is -+ 1/sqrt(2) for both subjects.
    result = mean_opinion_scores(table({"ann": {"a": 1, "b": 3}, "bob": {"a": 2, "b": 4}}))
    assert result.mos == pytest.approx(
        {"a": 100 * (3 - 1 / math.sqrt(2)) / 6, "b": 100 * (3 + 1 / math.sqrt(2)) / 6}, abs=1e-12
    )
    assert result.n_valid == {"a": 2, "b": 2}
    assert result.outlier_fraction == 0
    assert result.subjects["ann"].mean == 2 and result.subjects["ann"].sd == pytest.approx(math.sqrt(2))


def test_a_normal_items_far_rating_is_removed_and_enters_no_z_score() -> None:
    # Item "x" has kurtosis between 2 and 4 and one rating 2.2 SD out; 30 quiet items keep its giver below 5 %.
    x = [2.6, 2.8, 2.9, 3.0, 3.0, 3.1, 3.1, 3.2, 3.3, 3.4, 2.5, 4.0]
    rows: dict[str, dict[str, float]] = {}
    for index, value in enumerate(x):
        rows[f"s{index}"] = {f"q{k}": 1 + k / 10 + (0.05 if (index + k) % 2 else 0) for k in range(30)} | {"x": value}
    ratings = table(rows)
    expected, outliers = by_hand(ratings)
    assert outliers == {("s11", "x")}
    result = mean_opinion_scores(ratings)
    assert result.n_valid["x"] == 11
    assert result.outlier_fraction == pytest.approx(1 / len(ratings))
    assert result.rejected_subjects == {}
    assert result.mos == pytest.approx(expected, abs=1e-9)
    without = mean_opinion_scores([r for r in ratings if (r.subject, r.item) != ("s11", "x")])
    assert result.subjects["s11"].mean == pytest.approx(without.subjects["s11"].mean)
    assert result.subjects["s11"].n_outliers == 1


def test_a_peaked_item_uses_the_wide_limit() -> None:
    # Kurtosis far above 4: sqrt(20) SD applies, and 30 ratings are enough for one to lie beyond it.
    rows = {f"s{i}": {"x": 3.0 + 0.01 * (i % 3), **{f"q{k}": float(k + i % 2) for k in range(30)}} for i in range(29)}
    rows["far"] = {"x": 9.0, **{f"q{k}": float(k) for k in range(30)}}
    result = mean_opinion_scores(table(rows))
    assert result.n_valid["x"] == 29
    # The same rating among 15 cannot reach sqrt(20) SD, and the result says so.
    few = {name: rows[name] for name in [*list(rows)[:14], "far"]}
    result = mean_opinion_scores(table(few))
    assert result.n_valid["x"] == 15
    assert any("fewer than 22 ratings: no rating can lie beyond sqrt(20) SD there" in w for w in result.warnings)


def shaky(n_items: int, n_wrong: int) -> list[Rating]:
    """Ten calm subjects with normal-looking spread, and one who is far out on the first ``n_wrong`` items."""
    offsets = [-0.4, -0.3, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.3, 0.4]
    rows = {f"s{i}": {f"i{k:02d}": 10 + k + off for k in range(n_items)} for i, off in enumerate(offsets)}
    rows["shaky"] = {f"i{k:02d}": 10 + k + (0.75 if k < n_wrong else 0.0) for k in range(n_items)}
    return table(rows)


def test_exactly_five_percent_outliers_keep_a_subject_and_more_drop_it() -> None:
    kept = mean_opinion_scores(shaky(20, 1))
    assert kept.rejected_subjects == {} and kept.subjects["shaky"].n_outliers == 1
    dropped = mean_opinion_scores(shaky(20, 2))
    assert dropped.rejected_subjects == {"shaky": "2 of 20 ratings (10.0%) are outliers, more than 5%"}
    assert dropped.subjects["shaky"].mean is None
    assert set(dropped.n_valid.values()) == {10}
    assert dropped.removed_fraction == pytest.approx(20 / 220)
    assert dropped.outlier_fraction == pytest.approx(2 / 220)
    assert dropped.warnings[0] == (
        "1 of 11 subjects rejected: shaky: 2 of 20 ratings (10.0%) are outliers, more than 5%"
    )


def test_a_subject_without_spread_is_dropped_with_a_reason_and_orphaned_items_are_named() -> None:
    result = mean_opinion_scores(table({"ann": {"a": 1, "b": 3}, "flat": {"a": 4, "b": 4, "c": 4}, "once": {"d": 2}}))
    assert result.rejected_subjects == {
        "flat": "all 3 ratings are equal (4): there is no z-score",
        "once": "only 1 of 1 ratings left: a z-score needs at least 2",
    }
    assert result.missing == {
        "c": "none of its 1 ratings is left after screening",
        "d": "none of its 1 ratings is left after screening",
    }
    assert "c" not in result.mos and result.n_valid["c"] == 0
    assert "2 of 4 items have no valid rating and so no MOS, first 'c'" in result.warnings


def test_scores_outside_0_to_100_are_kept_and_reported() -> None:
    ratings = table({f"s{i}": {"top": 100.0, **{f"q{k}": k % 2 for k in range(60)}} for i in range(3)})
    result = mean_opinion_scores(ratings)
    assert result.mos["top"] > 100
    assert result.warnings == (
        f"1 of 61 items have a MOS outside 0-100 (mean z beyond 3), first 'top' with {result.mos['top']:.2f}; "
        "they are kept as they are",
    )


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([], "Expected at least one rating, got none."),
        (
            [("ann", "a", 1.0), ("ann", "b", math.nan)],
            "Rating 2 (subject 'ann', item 'b'): expected a finite number, got nan. Leave missing ratings out instead "
            "of writing a placeholder.",
        ),
        (
            [("ann", "a", "4")],
            "Rating 1 (subject 'ann', item 'a'): expected a finite number, got '4'. Leave missing ratings out instead "
            "of writing a placeholder.",
        ),
        (
            [("ann", "a", 1.0), ("ann", "a", 2.0)],
            "Rating 2: subject 'ann' has already rated item 'a'. Keep one rating per subject and item, or give "
            "repeated sessions their own subject names.",
        ),
    ],
)
def test_bad_ratings_are_refused(ratings: list[Rating], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        mean_opinion_scores(ratings)
    assert str(caught.value) == message


RATING_TABLES = st.integers(2, 9).flatmap(
    lambda n_subjects: st.integers(2, 12).flatmap(
        lambda n_items: st.lists(
            st.lists(st.integers(10, 50), min_size=n_items, max_size=n_items), min_size=n_subjects, max_size=n_subjects
        )
    )
)


@settings(max_examples=60, deadline=None)
@given(RATING_TABLES)
def test_equals_the_definition_on_random_tables(values: list[list[int]]) -> None:
    ratings = [Rating(f"s{i}", f"i{j}", v / 10) for i, row in enumerate(values) for j, v in enumerate(row)]
    assume(not on_the_edge(ratings))
    expected, outliers = by_hand(ratings)
    result = mean_opinion_scores(ratings)
    assert result.mos == pytest.approx(expected, abs=1e-8)
    assert round(result.outlier_fraction * len(ratings)) == len(outliers)


@settings(max_examples=40, deadline=None)
@given(RATING_TABLES, st.randoms(use_true_random=False))
def test_order_of_rows_and_a_subjects_own_scale_do_not_matter(values: list[list[int]], random) -> None:
    ratings = [Rating(f"s{i}", f"i{j}", float(v)) for i, row in enumerate(values) for j, v in enumerate(row)]
    assume(not on_the_edge(ratings))
    first = mean_opinion_scores(ratings)
    shuffled = list(ratings)
    random.shuffle(shuffled)
    assert mean_opinion_scores(shuffled).mos == pytest.approx(first.mos, abs=1e-9)
    # Doubling everybody's scale is exact in floating point, so screening cannot tip over.
    doubled = mean_opinion_scores([Rating(r.subject, r.item, 2 * r.value) for r in ratings])
    assert doubled.mos == pytest.approx(first.mos, abs=1e-9)
