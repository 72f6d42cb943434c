"""The table of an ablation: the paper's figures as printed, intervals by Student's t, reasons instead of zeros."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from lmm4edit.evaluation.tables import to_csv, to_markdown
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS
from lmm4edit.training.ablation.grid import Row
from lmm4edit.training.ablation.outcome import Measured, Outcome
from lmm4edit.training.ablation.table import ablation_table, paper_rows, seed_interval


def outcome(seed: int, value: float | None, row: str = "whole", **changes: Any) -> Outcome:
    reason = None if value is not None else "constant predictions"
    measured = {
        **{d.name: dict.fromkeys(("srcc", "krcc", "plcc"), Measured(value, 9, 9, reason)) for d in BUILT_IN_DIMENSIONS},
        ANSWER: {"accuracy": Measured(0.75, 8, 8)},
    }
    return Outcome(row, seed, "done", measured=changes.pop("measured", measured), **changes)


@pytest.fixture
def row(make_config: Any) -> Row:
    two = make_config(stage=2, objective={"score_mse": 1.0}, init_from="x", adapter__vision=False)
    return Row("whole", "the method", 4, make_config(), two)


def test_the_papers_table_is_as_printed() -> None:
    rows = paper_rows()
    assert [r.number for r in rows] == list(range(1, 9))
    assert [(r.projector, r.vision, r.llm, r.adapter) for r in rows[:5]] == [
        (False, True, False, "AdaLoRA"),
        (False, False, True, "AdaLoRA"),
        (False, True, True, "AdaLoRA"),
        (True, True, True, "AdaLoRA"),
        (True, True, True, "LoRA"),
    ]
    assert [r.backbone for r in rows[4:]] == ["Qwen2.5-VL", "InternVL2.5", "DeepSeekVL2", "LLaVA-NeXT"]
    assert rows[3].values["quality", "srcc"] == 0.9136 and rows[7].values["preservation", "plcc"] == 0.8494
    assert rows[0].values[ANSWER, "accuracy"] == pytest.approx(0.843)


def test_intervals_are_student_s() -> None:
    values = [0.7, 0.75, 0.71]
    cell = seed_interval(values)
    low, high = stats.t.interval(0.95, 2, loc=sum(values) / 3, scale=stats.sem(values))
    assert cell.value == pytest.approx(0.72)
    assert (cell.low, cell.high) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))
    assert seed_interval([0.5]).low is None and seed_interval([0.5]).reason == "one seed has no interval"
    same = seed_interval([0.1, 0.1, 0.1])
    assert (same.low, same.value, same.high) == (pytest.approx(0.1),) * 3


def test_ours_stands_above_the_papers_row(row: Row) -> None:
    table = ablation_table([row], [outcome(0, 0.6), outcome(1, 0.8)], [0, 1])
    ours, paper = table.rows[:2]
    assert [cell.value for cell in ours[:8]] == ["the method", "ours", "b", "✓", "", "✓", "AdaLoRA", 2]
    assert ours[8].value == pytest.approx(0.7) and ours[-1].value == ""
    assert [cell.value for cell in paper[:4]] == ["Table 6, row 4", "paper", "Qwen2.5-VL", "✓"]
    assert paper[8].value == 0.9136 and paper[-2].value == pytest.approx(0.878)
    assert len(table.rows) == 2 + 7
    assert "0.7000 [" in to_markdown(table) and to_csv(table).count("\n") == 10


def test_what_is_missing_has_a_reason_and_is_never_0(row: Row) -> None:
    failed = Outcome("whole", 1, "failed", "CheckpointError: no weights")
    table = ablation_table([row], [outcome(0, None), failed], [0, 1, 2])
    ours = table.rows[0]
    assert ours[7].value == 1 and ours[8].value is None
    assert ours[8].reason == "seed 0: quality srcc: constant predictions"
    assert str(ours[-1].value).startswith(
        "seed 1: CheckpointError: no weights; seed 2: not run yet; seed 0: quality srcc: constant predictions"
    )
    assert ours[-2].value == 0.75  # accuracy
    line = to_csv(table).splitlines()[1].split(",")
    assert line[8:11] == ["", "", ""]


def test_a_row_without_any_run_is_empty(row: Row) -> None:
    ours = ablation_table([row], [], [0]).rows[0]
    assert {cell.value for cell in ours[8:-1]} == {None} and ours[-1].value == "seed 0: not run yet"
    assert {cell.reason for cell in ours[8:-1]} == {"seed 0: not run yet"}


def test_edits_that_were_not_scored_are_told(row: Row) -> None:
    part = {"quality": {"srcc": Measured(0.5, 9, 7)}}
    ours = ablation_table([row], [outcome(0, 0.5, measured=part)], [0]).rows[0]
    assert "seed 0: quality: 7 of 9 edits scored" in str(ours[-1].value)
    assert "seed 0: alignment srcc: not computed" in str(ours[-1].value)


def test_dimensions_of_the_users_own_stand_beside_the_papers(row: Row) -> None:
    own = {"mood": dict.fromkeys(("srcc", "krcc", "plcc"), Measured(0.5, 9, 9))}
    table = ablation_table([row], [outcome(0, 0.5, measured=own)], [0])
    index = [column.key for column in table.columns].index("mood_srcc")
    assert table.rows[0][index].value == 0.5
    assert table.rows[1][index].value is None and table.rows[1][index].reason == "not in the paper"


def test_simulated_ratings_are_named(row: Row) -> None:
    note = ablation_table([row], [outcome(0, 0.5, simulated="9 of 9 edits carry it")], [0]).note
    assert "simulated (9 of 9 edits carry it)" in note and "values cannot" in note
    assert "simulated" not in ablation_table([row], [outcome(0, 0.5)], [0]).note
