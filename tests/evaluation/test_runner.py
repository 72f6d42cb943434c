"""Samples in, predictions file out: resume, failures as rows, labels, changed weights refused, simulated ratings "
"noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fake_run as fake
import pytest

from lmm4edit.errors import ScorerError, StoreError
from lmm4edit.evaluation import runner
from lmm4edit.evaluation.runner import read_run, read_run_folder, run_scorers, why_simulated
from lmm4edit.records import EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo


class Counting:
    """Scores the length of the sample's id and remembers what it was asked for."""

    def __init__(self, name: str = "counting", fingerprint: str = "v1", fail: tuple[str, ...] = ()) -> None:
        self.info = ScorerInfo(name, "test", frozenset({"edited"}), fingerprint=fingerprint)
        self.asked: list[list[str]] = []
        self.fail = fail

    def score(self, samples: list[EditSample]) -> list[list[Prediction]]:
        self.asked.append([s.sample_id for s in samples])
        return [[self._one(s)] for s in samples]

    def _one(self, s: EditSample) -> Prediction:
        if s.sample_id in self.fail:
            return Prediction(s.sample_id, self.info.name, "score", None, failure="no image")
        return Prediction(s.sample_id, self.info.name, "score", float(len(s.sample_id)))


@pytest.fixture
def scorers(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    table: dict[str, object] = {}
    monkeypatch.setattr(runner, "build_scorer", lambda spec, **options: table[spec])
    return table


@pytest.fixture
def edits(tmp_path: Path) -> list[EditSample]:
    return fake.samples(tmp_path, sources_per_task=1)[:7]


def test_everything_is_stored_and_read_back(tmp_path: Path, edits: list[EditSample], scorers: dict) -> None:
    scorers["counting"] = counting = Counting(fail=(edits[2].sample_id,))
    seen: list[tuple[str, int, int]] = []
    trained = tmp_path / "stage2"
    trained.mkdir()
    (trained / "metrics.jsonl").write_text("")
    path = run_scorers(
        edits,
        ["counting"],
        tmp_path / "run",
        3,
        lambda *a: seen.append(a),
        benchmark="toy",
        simulated="why",
        training=[str(trained)],
    )
    assert path == tmp_path / "run" / "predictions.jsonl"
    assert [len(batch) for batch in counting.asked] == [3, 3, 1]
    assert seen == [("counting", 0, 7), ("counting", 3, 7), ("counting", 6, 7), ("counting", 7, 7)]
    content = read_run_folder(tmp_path / "run")
    assert [p.value for p in content.predictions] == [
        None if i == 2 else float(len(e.sample_id)) for i, e in enumerate(edits)
    ]
    assert content.predictions[2].failure == "no image"
    for read, edit in zip(content.samples, edits, strict=True):
        assert Path(read.edited_image).samefile(edit.edited_image)
        paths = {"source_image": "", "edited_image": "", "location": None}
        assert replace(read, **paths) == replace(edit, **paths)
    assert (content.run.benchmark, content.run.simulated) == ("toy", "why")
    assert content.run.training == (str(trained),)
    assert content.run.scorers == {"counting": counting.info}


def test_a_second_run_computes_only_what_is_missing(tmp_path: Path, edits: list[EditSample], scorers: dict) -> None:
    out = tmp_path / "run"
    scorers["counting"] = Counting(fail=(edits[1].sample_id,))
    run_scorers(edits, ["counting"], out, 4)
    lines = (out / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    # Interrupted after three predictions and a half.
    (out / "predictions.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:20])
    scorers["counting"] = again = Counting()
    scorers["other"] = Counting("other")
    run_scorers(edits, ["counting", "other"], out, 4)
    assert again.asked == [[e.sample_id for e in edits[3:]]]
    values = {(p.predictor, p.item_id): p.value for p in read_run_folder(out).predictions}
    assert len(values) == 14
    assert values["counting", edits[1].sample_id] is None
    scorers["counting"] = third = Counting()
    run_scorers(edits, ["counting"], out, 4, retry_failures=True)
    assert third.asked == [[edits[1].sample_id]]
    assert set(read_run(out).scorers) == {"counting", "other"}
    values = {(p.predictor, p.item_id): p.value for p in read_run_folder(out).predictions}
    assert values["counting", edits[1].sample_id] == float(len(edits[1].sample_id))


def test_predictions_carry_the_label(tmp_path: Path, edits: list[EditSample], scorers: dict) -> None:
    scorers["judge:runs/lr=1e-4/checkpoint"] = Counting("judge:runs/lr=1e-4/checkpoint")
    spec = "judge:runs/lr=1e-4/checkpoint"
    run_scorers(edits, [spec, f"stage 2={spec}"], tmp_path / "run")
    content = read_run_folder(tmp_path / "run")
    assert {p.predictor for p in content.predictions} == {spec, "stage 2"}
    assert content.run.scorers["stage 2"].name == "stage 2"


def test_changed_weights_are_refused(tmp_path: Path, edits: list[EditSample], scorers: dict) -> None:
    scorers["counting"] = Counting(fingerprint="a" * 20)
    out = tmp_path / "run"
    run_scorers(edits, ["counting"], out)
    scorers["counting"] = Counting(fingerprint="b" * 20)
    with pytest.raises(StoreError) as caught:
        run_scorers(edits, ["counting"], out)
    assert str(caught.value) == (
        f"{out / 'predictions.jsonl'}: holds predictions of 'counting' with fingerprint 'aaaaaaaaaaaa', but that "
        "scorer now has 'bbbbbbbbbbbb': its weights or settings changed. Write to another folder, or label the new "
        "one: --scorers NEW=counting."
    )


def test_other_samples_are_refused_but_corrected_ratings_are_not(
    tmp_path: Path, edits: list[EditSample], scorers: dict
) -> None:
    scorers["counting"] = Counting()
    out = tmp_path / "run"
    run_scorers(edits, ["counting"], out)
    corrected = [replace(e, mos={**e.mos, "quality": 12.5}) for e in edits]
    scorers["counting"] = again = Counting()
    run_scorers(corrected, ["counting"], out)
    assert again.asked == []
    assert read_run_folder(out).samples[0].mos["quality"] == 12.5
    with pytest.raises(StoreError, match="expected the settings that the file was begun with"):
        run_scorers([replace(edits[0], instruction="something else"), *edits[1:]], ["counting"], out)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "Expected at least one scorer, got none. For example: --scorers psnr,ssim."),
        (
            ["counting", "counting"],
            "Scorer 'counting' is given twice. Leave one out, or label it: --scorers OTHER=counting.",
        ),
    ],
)
def test_wrong_lists_of_scorers(tmp_path: Path, edits: list, scorers: dict, specs: list[str], message: str) -> None:
    scorers["counting"] = Counting()
    with pytest.raises(ScorerError) as caught:
        run_scorers(edits, specs, tmp_path / "run")
    assert str(caught.value) == message


def test_a_scorer_that_returns_too_few_or_foreign_rows_is_stopped(
    tmp_path: Path, edits: list[EditSample], scorers: dict
) -> None:
    short = Counting("short")
    short.score = lambda samples: []  # type: ignore[method-assign]
    scorers["short"] = short
    with pytest.raises(ScorerError) as caught:
        run_scorers(edits, ["short"], tmp_path / "a")
    assert str(caught.value) == "Scorer 'short': expected one row for each of 7 samples, got 0."
    mixed = Counting("mixed")
    mixed.score = lambda samples: [[mixed._one(samples[0])] for _ in samples]  # type: ignore[method-assign]
    scorers["mixed"] = mixed
    with pytest.raises(ScorerError) as caught:
        run_scorers(edits, ["mixed"], tmp_path / "b")
    assert str(caught.value) == (
        f"Scorer 'mixed' returned item {edits[0].sample_id!r} in the row of {edits[1].sample_id!r}."
    )


def test_simulated_ratings_are_noticed(tmp_path: Path) -> None:
    edits = fake.samples(sources_per_task=1)
    people = [replace(e, groups={}) for e in edits]
    manifest = tmp_path / "test.jsonl"
    assert why_simulated(edits) == f"{len(edits)} of {len(edits)} edits carry the label ratings=simulated"
    assert why_simulated(people, manifest) is None
    (tmp_path / "SIMULATED.md").write_text("yes")
    assert why_simulated(people, manifest) == "a file SIMULATED.md stands beside the manifest"


def test_a_folder_that_is_no_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Give the folder that `lmm4edit evaluate --out` wrote"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 7}))
    with pytest.raises(StoreError) as caught:
        read_run(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'run.json'}: expected format_version 1, got 7. Use the LMM4Edit version that wrote the folder, "
        "or evaluate again."
    )
