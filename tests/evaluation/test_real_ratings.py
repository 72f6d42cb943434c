"""Real ratings and another model's real predictions through our statistics, against SciPy, at the size of a "
"benchmark."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from lmm4edit.evaluation.comparison import compare_predictors
from lmm4edit.evaluation.correlation import agreement

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = {"quality": ("test_v.json", "v_score"), "alignment": ("test_e.json", "e_score")}


def key(path: str) -> tuple[str, str]:
    """Editing model and file name, which both releases share."""
    parts = path.split("/")
    return parts[-2], parts[-1]


def load(dimension: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    ratings, predictions = DATA / "ebench18k" / FILES[dimension][0], DATA / "reasonedit" / "predictions.csv"
    if not ratings.exists() or not predictions.exists():
        pytest.skip(f"the EBench-18K test ratings and ReasonEdit's predictions are not at {DATA}")
    with predictions.open(encoding="utf-8", newline="") as file:
        given = {key(row["edited"]): float(row[FILES[dimension][1]]) for row in csv.DictReader(file)}
    rated: dict[tuple[str, str], float] = {}
    for line in ratings.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rated[key(row["images"][1])] = float(re.findall(r"[\d.]+", row["response"])[-1])
    assert rated.keys() == given.keys() and len(rated) == 3672
    keys = sorted(rated)
    return np.array([given[k] for k in keys]), np.array([rated[k] for k in keys]), [k[1] for k in keys]


@pytest.mark.parametrize("dimension", list(FILES))
def test_equal_to_scipy_with_216_sources_of_17_edits(dimension: str) -> None:
    predicted, rated, sources = load(dimension)
    counts: dict[str, int] = defaultdict(int)
    for source in sources:
        counts[source] += 1
    assert len(counts) == 216 and set(counts.values()) == {17}
    found = {s.name: s for s in agreement(predicted, rated, sources, resamples=100)}
    assert found["srcc"].value == pytest.approx(stats.spearmanr(predicted, rated).statistic, abs=1e-12)
    assert found["krcc"].value == pytest.approx(stats.kendalltau(predicted, rated).statistic, abs=1e-12)
    assert found["plcc"].value == pytest.approx(stats.pearsonr(predicted, rated).statistic, abs=1e-12)
    for name in ("srcc", "krcc", "plcc", "plcc_logistic4", "plcc_logistic5", "rmse_logistic4"):
        assert found[name].low < found[name].value < found[name].high
    assert found["plcc_logistic5"].value >= abs(found["plcc"].value) - 1e-12
    assert found["srcc"].value > 0.5


def test_a_worsened_copy_is_found_worse() -> None:
    predicted, rated, sources = load("quality")
    noise = np.random.default_rng(0).normal(0, 0.5 * predicted.std(), len(predicted))
    found = compare_predictors(
        "quality", ("real", predicted), ("noisy", predicted + noise), rated, sources, resamples=200
    )
    assert found.low > 0 and found.p < 1e-6
