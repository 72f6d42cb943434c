"""Cells become CSV with full precision, Markdown and short print; names are shortened without becoming ambiguous."""

from __future__ import annotations

import csv
import io

import fake_run as fake
import pytest

from lmm4edit.evaluation import tables
from lmm4edit.evaluation.metrics import Metrics, compute_metrics
from lmm4edit.evaluation.naming import display_names, predictors_of
from lmm4edit.evaluation.tables import Cell, Column, Table


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    edits = fake.samples()
    return compute_metrics("fake", edits, fake.predictions(edits), fake.SCORERS, resamples=100)


def test_csv_keeps_every_digit_and_markdown_marks_the_best() -> None:
    table = Table(
        "t",
        "T",
        (Column("name", "name", "text"), Column("srcc", "SRCC", group="Quality"), Column("n", "n", "count")),
        (
            (Cell("a|b"), Cell(0.123456789, 0.1, 0.2, best=True), Cell(1234)),
            (Cell("c"), Cell(None, reason="constant"), Cell(5)),
        ),
    )
    assert tables.to_csv(table) == "name,srcc,srcc_low,srcc_high,n\na|b,0.123456789,0.1,0.2,1234\nc,,,,5\n"
    assert tables.to_markdown(table) == (
        "| name | Quality SRCC | n |\n| --- | ---: | ---: |\n"
        "| a\\|b | **0.123** [0.100 to 0.200] | 1,234 |\n| c | – | 5 |"
    )
    assert table.groups == [("", 1), ("Quality", 1), ("", 1)]


@pytest.mark.parametrize(
    ("value", "column", "text"),
    [
        (None, Column("", ""), "–"),
        (-0.0004, Column("", ""), "0.000"),
        (-0.25, Column("", ""), "−0.250"),
        (0.5625, Column("", "", "percent"), "56.2 %"),
        (0.0002, Column("", "", "p"), "< 0.001"),
        (0.0421, Column("", "", "p"), "0.042"),
        ("words", Column("", ""), "words"),
        (12345.0, Column("", "", "count"), "12,345"),
    ],
)
def test_print(value: float | str | None, column: Column, text: str) -> None:
    assert tables.show(value, column) == text


def test_intervals_in_print() -> None:
    cell = Cell(0.5, 0.4321, 0.5678)
    assert tables.show_interval(cell, Column("", "")) == "0.432 to 0.568"
    assert tables.show_interval(cell, Column("", ""), short=True) == "0.43 to 0.57"
    assert tables.show_interval(cell, Column("", "", "percent")) == "43.2 to 56.8 %"
    assert tables.show_interval(Cell(0.5), Column("", "")) == ""


def test_names_are_short_while_they_differ() -> None:
    assert display_names(["psnr", "judge:runs/a/checkpoint"]) == {"psnr": "psnr", "judge:runs/a/checkpoint": "judge"}
    two = ["judge:runs/a/checkpoint", "judge:runs/b/checkpoint"]
    assert list(display_names(two).values()) == ["judge a/checkpoint", "judge b/checkpoint"]
    same = ["judge:x", "judge:x/"]
    assert list(display_names(same).values()) == same


def test_the_main_table_holds_what_metrics_hold(metrics: Metrics) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(tables.agreement_table(metrics)))))
    assert [r["predictor"] for r in rows][0] == "judge"
    assert float(rows[0]["quality_srcc"]) == metrics.find(fake.JUDGE, "quality", "srcc").value
    assert float(rows[0]["preservation_plcc_high"]) == metrics.find(fake.JUDGE, "preservation", "plcc").high
    assert rows[0]["n_scored"] == "56"
    assert "overall_srcc" not in rows[0]
    assert predictors_of(metrics)[0] == fake.JUDGE


def test_the_best_of_an_error_is_the_smallest(metrics: Metrics) -> None:
    table = tables.further_table(metrics)
    keys = [c.key for c in table.columns]
    place = keys.index("quality_rmse_logistic4")
    values = {row[0].value: row[place] for row in table.rows}
    best = [name for name, cell in values.items() if cell.best]
    assert best == [min(values, key=lambda name: values[name].value)]
    assert not any(row[keys.index("quality_distinct_values")].best for row in table.rows)


def test_answers_stand_beside_the_majority_class(metrics: Metrics) -> None:
    table = tables.accuracy_table(metrics)
    assert [row[0].value for row in table.rows] == ["judge", "majority class"]
    keys = [c.key for c in table.columns]
    assert keys == [
        "predictor",
        "n_scored",
        "n_expected",
        "accuracy_all_edits",
        "accuracy_photo",
        "accuracy_scene",
        "gain_points",
    ]
    judge, majority = table.rows
    gain = judge[keys.index("gain_points")].value
    assert gain == pytest.approx(100 * (judge[3].value - majority[3].value))


def test_comparisons_are_seen_from_the_judge(metrics: Metrics) -> None:
    table = tables.comparison_table(metrics, fake.JUDGE)
    assert [row[0].value for row in table.rows] == [p for p in predictors_of(metrics) if p != fake.JUDGE]
    keys = [c.key for c in table.columns]
    judge, psnr = (metrics.find(p, "quality", "srcc") for p in (fake.JUDGE, "psnr"))
    row = next(r for r in table.rows if r[0].value == "psnr")
    cell = row[keys.index("quality_difference")]
    assert cell.value == pytest.approx(judge.value - psnr.value, abs=0.1)
    assert cell.low < cell.value < cell.high


def test_the_ranking_table_has_the_papers_layout(metrics: Metrics) -> None:
    table = tables.ranking_table(metrics, fake.JUDGE)
    assert table.groups == [
        ("", 1),
        ("", 1),
        ("Quality", 2),
        ("Alignment", 2),
        ("Preservation", 2),
        ("Overall (Eq. 3)", 2),
        ("Rank", 2),
    ]
    assert [row[0].value for row in table.rows][0] == "sim-polished"
    assert "overall: SRCC" in table.note
    assert tables.ranking_table(metrics, "psnr") is None
