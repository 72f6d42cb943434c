"""Our judge as a scorer: the same numbers as the judge's own, on the protocol of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import CheckpointError, ScorerError
from lmm4edit.scorers.base import Scorer, build_scorer
from tests.inference.kit import save_random_backbone, save_random_judge, write_edits

NAMES = ("quality", "alignment", "preservation")


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("judges")
    backbone = save_random_backbone(folder / "backbone")
    return [
        save_random_judge(folder / "stage1", backbone, 1),
        save_random_judge(folder / "stage2", backbone, 2, {"ratings": "simulated"}),
    ]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory):
    return read_manifest(write_edits(tmp_path_factory.mktemp("edits")) / "edits.jsonl")


@pytest.fixture(scope="module")
def scorer(judges: list[Path]):
    return build_scorer(f"judge:{judges[1]}", device="cpu")


def test_it_says_what_it_is(scorer, judges: list[Path]) -> None:
    assert isinstance(scorer, Scorer)
    info = scorer.info
    assert info.name == f"judge:{judges[1]}" and info.targets == (*NAMES, "answer")
    assert info.needs == {"source", "edited", "instruction", "question"}
    assert info.higher_is_better and info.on_opinion_scale and "simulated ratings" in info.notes
    assert info.fingerprint != build_scorer(f"judge-text:{judges[1]}", device="cpu").info.fingerprint
    assert info.fingerprint != build_scorer(f"judge:{judges[1]}", device="cpu", dtype="bfloat16").info.fingerprint


def test_its_predictions_are_the_judges_scores(scorer, samples) -> None:
    rows = scorer.score(samples)
    assert len(rows) == len(samples)
    for sample, row in zip(samples, rows, strict=True):
        own = scorer.judge.score(sample.source_image, sample.edited_image, sample.instruction, sample.question)
        assert [p.target for p in row] == [*NAMES, *(["answer"] if sample.question is not None else [])]
        assert {(p.item_id, p.predictor) for p in row} == {(sample.sample_id, scorer.info.name)}
        for prediction in row[:3]:
            assert prediction.value == pytest.approx(own.scores[prediction.target], abs=1e-3)
        if sample.question is not None:
            assert row[3].value == own.answer
    assert scorer.score([]) == []


def test_a_bad_image_fails_in_every_target_with_its_name(scorer, samples, tmp_path: Path) -> None:
    bad = replace(samples[0], sample_id="bad", edited_image=str(tmp_path / "none.png"))
    row, good = scorer.score([bad, samples[0]])
    assert [p.target for p in row] == [*NAMES, "answer"]
    assert all(p.value is None and "none.png" in str(p.failure) for p in row)
    assert all(p.failure is None for p in good)


def test_words_that_are_no_numbers_are_kept_beside_the_reason(judges: list[Path], samples) -> None:
    (row,) = build_scorer(f"judge-text:{judges[0]}", device="cpu").score(samples[:1])
    for prediction in row[:3]:
        assert prediction.value is None and prediction.raw_answer is not None
        assert prediction.failure == f"expected a number after the stem, the judge wrote {prediction.raw_answer!r}"
    assert row[3].value in ("yes", "no")


def test_a_judge_without_a_head_or_a_path_is_refused_when_built(judges: list[Path]) -> None:
    with pytest.raises(CheckpointError, match="This judge has no score head"):
        build_scorer(f"judge:{judges[0]}", device="cpu")
    with pytest.raises(ScorerError, match="Scorer 'judge' needs a checkpoint folder: write judge:PATH."):
        build_scorer("judge")
