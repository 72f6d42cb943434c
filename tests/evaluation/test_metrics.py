"""Rows of metrics.json against SciPy on the same pairs; counts, reasons, directions, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_run as fake
import numpy as np
import pytest
from scipy import stats

from lmm4edit.errors import StoreError
from lmm4edit.evaluation.columns import predicted_columns
from lmm4edit.evaluation.metrics import Metrics, compute_metrics, group_labels, make_groups, read_metrics, write_metrics
from lmm4edit.evaluation.ranking import overall_score
from lmm4edit.records import Dimension, Prediction


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    edits = fake.samples()
    return compute_metrics("fake", edits, fake.predictions(edits), fake.SCORERS, resamples=200)


def pairs(target: str, content: str | None = None) -> tuple[list[float], list[float]]:
    edits = fake.samples()
    by_id = {(p.item_id, p.target): p.value for p in fake.predictions(edits) if p.predictor == fake.JUDGE}
    kept = [e for e in edits if by_id[e.sample_id, target] is not None and content in (None, e.groups["content"])]
    return [by_id[e.sample_id, target] for e in kept], [e.mos[target] for e in kept]


@pytest.mark.parametrize("dimension", fake.DIMENSIONS)
def test_judge_rows_equal_scipy(metrics: Metrics, dimension: str) -> None:
    for group, content in (("all", None), ("content=photo", "photo")):
        x, y = pairs(dimension, content)
        for name, oracle in (("srcc", stats.spearmanr), ("krcc", stats.kendalltau), ("plcc", stats.pearsonr)):
            row = metrics.find(fake.JUDGE, dimension, name, group)
            assert row is not None
            assert row.value == pytest.approx(oracle(x, y).statistic, abs=1e-12)
            assert row.low < row.value < row.high
            assert row.n_scored == len(x)
    x, y = pairs(dimension)
    row = metrics.find(fake.JUDGE, dimension, "rmse")
    assert row.value == pytest.approx(float(np.sqrt(np.mean((np.array(x) - y) ** 2))))


def test_missing_predictions_are_counted_with_their_reason(metrics: Metrics) -> None:
    row = metrics.find(fake.JUDGE, "quality", "srcc")
    assert (row.n_expected, row.n_scored) == (60, 56)
    failure = next(f for f in metrics.failures if f.predictor == fake.JUDGE and f.target == "quality")
    assert (failure.reason, failure.count) == ("cannot identify the image", 4)
    assert failure.example == fake.samples()[5].sample_id
    assert f"{fake.JUDGE}: 4 of 60 edits have no quality prediction" in metrics.warnings
    absent = compute_metrics(
        "fake", fake.samples(), fake.predictions(fake.samples())[:6], fake.SCORERS, group_by=[], resamples=0
    )
    reasons = {(f.predictor, f.target): (f.reason, f.count) for f in absent.failures}
    assert reasons["psnr", "quality"] == ("not in the predictions file", 59)


def test_mse_and_psnr_agree_once_each_is_turned_by_its_direction(metrics: Metrics) -> None:
    for statistic in ("srcc", "krcc"):
        psnr, mse = (metrics.find(name, "preservation", statistic) for name in ("psnr", "mse"))
        assert psnr.value > 0.1
        assert mse.value == pytest.approx(psnr.value, abs=1e-12)
        assert (mse.low, mse.high) == pytest.approx((psnr.low, psnr.high), abs=1e-12)
    assert metrics.find("psnr", "quality", "rmse") is None
    assert metrics.find("psnr", "quality", "rmse_logistic4").value > 0


def test_a_lower_is_better_dimension_turns_single_scores_but_not_its_own_predictions() -> None:
    edits = [replace(e, mos={"harm": 100 - e.mos["quality"]}) for e in fake.samples()]
    harm = Dimension("harm", "Rate the harm.", higher_is_better=False)
    scorer = fake.SCORERS["psnr"]
    judge = replace(fake.SCORERS[fake.JUDGE], targets=("harm",))
    rows = [Prediction(e.sample_id, "psnr", "score", 100 - e.mos["harm"]) for e in edits]
    rows += [Prediction(e.sample_id, fake.JUDGE, "harm", e.mos["harm"]) for e in edits]
    found = compute_metrics(
        "fake", edits, rows, {"psnr": scorer, fake.JUDGE: judge}, dimensions=[harm], group_by=[], resamples=0
    )
    assert found.find("psnr", "harm", "srcc").value == pytest.approx(1)
    assert found.find(fake.JUDGE, "harm", "srcc").value == pytest.approx(1)


def test_answers_are_compared_with_the_majority(metrics: Metrics) -> None:
    edits = fake.samples()
    given = {p.item_id: p.value for p in fake.predictions(edits) if p.target == "answer"}
    scored = [(given[e.sample_id], e.answer) for e in edits if given[e.sample_id]]
    row = metrics.find(fake.JUDGE, "answer", "accuracy")
    assert row.value == pytest.approx(sum(g == a for g, a in scored) / len(scored))
    assert (row.n_expected, row.n_scored) == (60, 56)
    majority = metrics.find(fake.JUDGE, "answer", "majority_accuracy")
    yes = sum(a == "yes" for _, a in scored)
    assert majority.value == pytest.approx(max(yes, len(scored) - yes) / len(scored))


def test_overall_is_eq_3_of_both_sides(metrics: Metrics) -> None:
    edits = fake.samples()
    given: dict[str, dict[str, float | None]] = {}
    for p in fake.predictions(edits):
        if p.predictor == fake.JUDGE and p.target != "answer":
            given.setdefault(p.item_id, {})[p.target] = p.value
    both = [(overall_score(given[e.sample_id]), overall_score(e.mos)) for e in edits]
    x, y = zip(*[(a, b) for a, b in both if a is not None], strict=True)
    row = metrics.find(fake.JUDGE, "overall", "srcc")
    assert row.value == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_groups_are_those_worth_showing(metrics: Metrics) -> None:
    edits = fake.samples()
    assert group_labels(edits) == ["edit_task", "editing_model", "content"]
    groups = make_groups(edits, group_labels(edits))
    assert list(groups)[:5] == ["all", "edit_task=color", "edit_task=deblur", "edit_task=dehaze", "edit_task=remove"]
    assert sum(len(v) for k, v in groups.items() if k.startswith("edit_task=")) == len(edits)
    assert {r.group for r in metrics.rows} == set(groups)
    few = metrics.find(fake.JUDGE, "quality", "srcc", "edit_task=remove")
    assert few.value is not None and few.low is None
    assert few.reason == "no interval: 3 sources, at least 5 needed"


def test_editing_models_are_ranked_over_the_edits_that_have_both(metrics: Metrics) -> None:
    (ranking,) = metrics.rankings
    assert ranking.predictor == fake.JUDGE
    assert [m.name for m in ranking.people][0] == "sim-polished"
    assert sum(m.n for m in ranking.people) == 56
    assert {a.target for a in ranking.agreement} == {*fake.DIMENSIONS, "overall"}
    assert next(a for a in ranking.agreement if a.target == "quality").srcc > 0.8


def test_comparisons_are_paired_and_corrected(metrics: Metrics) -> None:
    found = {(c.target, c.first, c.second): c for c in metrics.comparisons}
    judge = next(c for key, c in found.items() if key[0] == "quality" and fake.JUDGE in key and "psnr" in key)
    assert judge.n == 56
    assert judge.p_adjusted >= judge.p
    mirror = next(c for key, c in found.items() if key[0] == "quality" and fake.JUDGE not in key)
    assert mirror.difference == pytest.approx(0, abs=1e-12)


def test_collapsed_scores_are_reported() -> None:
    edits = fake.samples()
    rows = [Prediction(e.sample_id, "psnr", "score", float(i % 3)) for i, e in enumerate(edits)]
    found = compute_metrics("fake", edits, rows, fake.SCORERS, group_by=[], resamples=0)
    assert found.warnings[0] == (
        "psnr gives only 3 different values for quality over 60 edits: its scores have collapsed, or its scale is very "
        "coarse"
    )


def test_settings_and_repeats_are_kept_apart() -> None:
    edits = fake.samples()[:4]
    rows = [
        Prediction(e.sample_id, "psnr", "score", float(i + k), setting={"crop": c}, repeat=k)
        for i, e in enumerate(edits)
        for k, c in ((0, "none"), (1, "none"), (0, "centre"))
    ]
    names = {c.predictor for c in predicted_columns(edits, rows, fake.SCORERS)}
    assert names == {"psnr [crop=none, repeat=0]", "psnr [crop=none, repeat=1]", "psnr [crop=centre, repeat=0]"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Prediction("nobody", "psnr", "score", 1.0),
            "Predictions hold item 'nobody' of 'psnr', which is not among the 60 samples. Evaluate with the manifest "
            "that was scored.",
        ),
        (
            Prediction("remove-photo-0-sim-bold", "lpips", "score", 1.0),
            "Predictions hold the scorer 'lpips', of which nothing is known. Known: judge:runs/demo/stage2/checkpoint, "
            "mse, psnr.",
        ),
    ],
)
def test_foreign_predictions_are_refused(row: Prediction, message: str) -> None:
    with pytest.raises(StoreError) as caught:
        compute_metrics("fake", fake.samples(), [row], fake.SCORERS)
    assert str(caught.value) == message


def test_words_where_numbers_belong_are_failures() -> None:
    edits = fake.samples()
    rows = [Prediction(e.sample_id, "psnr", "score", "high") for e in edits]
    found = compute_metrics("fake", edits, rows, fake.SCORERS, group_by=[], resamples=0)
    row = found.find("psnr", "quality", "srcc")
    assert (row.value, row.n_scored, row.reason) == (None, 0, "only 0 pairs, at least 3 needed")
    assert found.failures[0].reason == "expected a number, got str"


def test_the_file_survives_a_round_trip_and_holds_the_promised_rows(metrics: Metrics, tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_metrics(path, metrics)
    assert read_metrics(path) == replace(metrics, provenance=dict(metrics.provenance), counts=dict(metrics.counts))
    first = json.loads(path.read_text())["rows"][0]
    names = "benchmark predictor target group statistic value low high n_expected n_scored reason"
    assert list(first) == names.split()
    path.write_text('{"format_version": 99}')
    with pytest.raises(StoreError) as caught:
        read_metrics(path)
    assert str(caught.value) == (
        f"{path}: expected metrics of format_version 1, got 99. Delete the file: `lmm4edit report` computes it again "
        "from the predictions."
    )


def test_scoring_again_needs_no_model() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft', 'lmm4edit.judge'): sys.modules[name] = None\n"
        "import fake_run as fake\n"
        "from lmm4edit.evaluation.metrics import compute_metrics\n"
        "e = fake.samples()\n"
        "m = compute_metrics('fake', e, fake.predictions(e), fake.SCORERS, group_by=[], resamples=50)\n"
        "assert m.find('psnr', 'quality', 'srcc').value is not None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
