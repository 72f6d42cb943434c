"""The records: general enough for what later parts pass on, strict about missing values."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension, EditSample, Prediction, Question


def test_the_built_in_dimensions_are_the_papers_in_its_order() -> None:
    assert [dimension.name for dimension in BUILT_IN_DIMENSIONS] == ["quality", "alignment", "preservation"]
    assert {(d.low, d.high, d.higher_is_better) for d in BUILT_IN_DIMENSIONS} == {(0.0, 100.0, True)}
    assert all(d.question.endswith(".") and d.definition for d in BUILT_IN_DIMENSIONS)


def test_a_dimension_of_the_user() -> None:
    artefacts = Dimension("artefacts", "How many artefacts?", low=1, high=5, higher_is_better=False)
    assert (artefacts.low, artefacts.high, artefacts.definition) == (1, 5, "")


@pytest.mark.parametrize("name", ["Quality", "two words", "", "3d", "a-b"])
def test_names_that_cannot_be_columns(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        Dimension(name, "?")
    assert str(caught.value) == (
        f"Dimension name must be a lower-case identifier such as 'quality', got {name!r}: "
        "it becomes the column mos_<name> of manifests. Rename the dimension."
    )


@pytest.mark.parametrize(("low", "high"), [(5, 1), (3, 3), (0, float("nan"))])
def test_ranges_that_are_none(low: float, high: float) -> None:
    with pytest.raises(ValueError) as caught:
        Dimension("x", "?", low, high)
    assert str(caught.value) == (
        f"Dimension 'x': expected low < high, got low={low} and high={high}. "
        "For a scale where a smaller number is better, keep low < high and set higher_is_better: false."
    )


@pytest.mark.parametrize("value", [0.0, 54.7, "", "yes", (), ("A", "C")])
def test_values_of_every_kind(value: object) -> None:
    assert Prediction("1", "p", "t", value).value == value  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "failure"), [(None, None), (0.5, "refused"), ("", "refused")])
def test_a_prediction_has_a_value_or_a_reason(value: object, failure: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        Prediction("1", "ssim", "score", value, failure=failure)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Prediction '1' of 'ssim' for 'score': exactly one of value and failure must be given, "
        f"got value={value!r} and failure={failure!r}."
    )


def test_a_missing_value_keeps_its_reason_and_the_models_words() -> None:
    prediction = Prediction("1", "p", "answer", None, raw_answer="I cannot say.", failure="no yes or no")
    assert (prediction.value, prediction.failure, prediction.raw_answer) == (None, "no yes or no", "I cannot say.")


def test_defaults_are_not_shared_between_records() -> None:
    one, other = (EditSample(name, "s", "a", "b", "do it") for name in "12")
    assert one.mos is not other.mos
    assert one.groups is not other.groups
    assert (one.mos, one.question, one.answer, one.location) == ({}, None, None, None)


def test_records_do_not_change() -> None:
    question = Question("q1", ("a.png", "b.png"), "Which is better?", "choice", gold="A")
    for record, name in (
        (question, "gold"),
        (BUILT_IN_DIMENSIONS[0], "low"),
        (Prediction("1", "p", "t", 1.0), "value"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, 1)


def test_records_load_nothing_heavy() -> None:
    code = (
        "import sys, lmm4edit.records; "
        "print([n for n in ('torch', 'numpy', 'PIL', 'pydantic', 'transformers') if n in sys.modules])"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
