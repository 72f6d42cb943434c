"""The judge as a Python object: batches equal single rows, bad rows are named, nothing is made up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import lmm4edit
from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import CheckpointError, ConfigError, ImageError, PromptError
from lmm4edit.inference.judge import load_judge
from lmm4edit.judge.words import read_score


def test_a_batch_equals_its_rows_scored_alone_in_any_order(judge, edits: Path) -> None:
    samples = read_manifest(edits / "edits.jsonl")
    alone = {s.sample_id: next(judge.score_many([s], 1)) for s in samples}
    for order in (samples, samples[::-1]):
        for result in judge.score_many(order, batch_size=4):
            single = alone[result.sample_id]
            for name in ("quality", "alignment", "preservation"):
                assert result.scores[name] == pytest.approx(single.scores[name], abs=1e-3)
            assert (result.answer_probability is None) == (single.answer_probability is None)
            if single.answer_probability is not None:
                assert result.answer_probability == pytest.approx(single.answer_probability, abs=1e-4)


def test_the_four_outputs_and_the_overall_score(judge, edits: Path) -> None:
    result = judge.score(edits / "s0.png", edits / "e0.png", "remove the red heart", "Is the heart gone?")
    assert set(result.scores) == {"quality", "alignment", "preservation"}
    q, a, p = result.quality, result.alignment, result.preservation
    assert result.overall == pytest.approx(q**0.3 * a**0.4 * p**0.3)
    assert result.answer in ("yes", "no") and 0 <= result.answer_probability <= 1
    assert (result.answer == "yes") == (result.answer_probability > 0.5)
    assert judge.score(edits / "s0.png", edits / "e0.png", "remove the red heart").answer is None


def test_paths_bytes_arrays_and_pil_images_score_alike(judge, edits: Path) -> None:
    forms = []
    for load in (str, Path, lambda p: Path(p).read_bytes(), Image.open, lambda p: np.asarray(Image.open(p))):
        forms.append(judge.score(load(str(edits / "s1.png")), load(str(edits / "e1.png")), "remove it").quality)
    assert max(forms) - min(forms) < 1e-6


def test_every_input_matters(judge, edits: Path) -> None:
    base = judge.score(edits / "s1.png", edits / "e1.png", "remove the heart").scores
    for changed in (
        judge.score(edits / "s2.png", edits / "e1.png", "remove the heart"),
        judge.score(edits / "s1.png", edits / "e2.png", "remove the heart"),
        judge.score(edits / "s1.png", edits / "e1.png", "add a green dog"),
    ):
        assert any(abs(changed.scores[name] - base[name]) > 1e-4 for name in base)


def test_a_bad_image_is_a_named_failure_and_its_neighbours_are_scored(judge, edits: Path, tmp_path: Path) -> None:
    good = read_manifest(edits / "edits.jsonl")[:3]
    (tmp_path / "cut.png").write_bytes((edits / "e0.png").read_bytes()[:60])
    Image.new("RGB", (4096, 18)).save(tmp_path / "wide.png")
    bad = [
        replace(good[0], sample_id="missing", edited_image=str(tmp_path / "none.png")),
        replace(good[0], sample_id="cut", edited_image=str(tmp_path / "cut.png")),
        replace(good[0], sample_id="wide", source_image=str(tmp_path / "wide.png")),
        replace(good[0], sample_id="blank", instruction="  "),
    ]
    results = {r.sample_id: r for r in judge.score_many([good[0], *bad, good[1]], batch_size=6)}
    assert [k for k, r in results.items() if r.failure] == ["missing", "cut", "wide", "blank"]
    for name, part in (
        ("missing", "none.png"),
        ("cut", "cut.png"),
        ("wide", "wide.png"),
        ("blank", "instruction is blank"),
    ):
        assert part in results[name].failure
        assert all(value is None for value in results[name].scores.values())
    alone = next(judge.score_many([good[1]]))
    assert results["e1"].quality == pytest.approx(alone.quality, abs=1e-3)


def test_one_edit_raises_its_problem(judge, edits: Path) -> None:
    with pytest.raises(ImageError, match="nowhere.png"):
        judge.score(edits / "nowhere.png", edits / "e0.png", "remove it")
    with pytest.raises(PromptError, match="The instruction is blank"):
        judge.score(edits / "s0.png", edits / "e0.png", " ")


@pytest.mark.parametrize("size", [(1, 1), (332, 27), (27, 332), (3, 500)])
def test_odd_sizes_are_scored(judge, size: tuple[int, int]) -> None:
    source, edited = Image.new("RGB", size, "red"), Image.new("RGB", (40, 50), "blue")
    result = judge.score(source, edited, "make it blue")
    assert all(math.isfinite(value) for value in result.scores.values())


def test_a_stage_1_judge_answers_in_words_and_its_head_is_refused(judge_folder_1: Path, edits: Path) -> None:
    judge = load_judge(judge_folder_1, device="cpu")
    with pytest.raises(CheckpointError) as error:
        judge.score(edits / "s0.png", edits / "e0.png", "remove it")
    assert str(error.value) == (
        "This judge has no score head: it is a stage-1 checkpoint, which answers in words. Read it with the text "
        "read-out, or train stage 2 from it."
    )
    result = judge.score(edits / "s0.png", edits / "e0.png", "remove it", "Is it gone?", read_out="text")
    for name, value in result.scores.items():
        assert value == read_score(result.words[name])
        assert (value is None) == (name in result.failures)
    assert result.answer in ("yes", "no")


def test_words_are_the_same_in_a_batch_and_alone(judge_folder_1: Path, edits: Path) -> None:
    judge = load_judge(judge_folder_1, device="cpu")
    samples = read_manifest(edits / "edits.jsonl")[:4]
    together = [r.words for r in judge.score_many(samples, 4, "text")]
    assert together == [next(judge.score_many([s], 1, "text")).words for s in samples]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (" 54.70", 54.7),
        ("0.00", 0.0),
        ("100.00", 100.0),
        (" -3.10", -3.1),
        (" 54.70.", None),
        ("54.70 or 60", None),
        ("about 50", None),
        ("", None),
        ("5 4", None),
        ("１２", None),
        ("1e3", None),
        ("nan", None),
        ("54,70", None),
    ],
)
def test_only_a_number_counts_as_a_score(words: str, value: float | None) -> None:
    assert read_score(words) == value


@given(st.floats(-999, 9999).map(lambda number: f" {number:.2f}"))
def test_every_answer_of_the_taught_form_is_read_exactly(words: str) -> None:
    assert read_score(words) == float(words)


@given(st.text(alphabet=" 0123456789.-+eE,%/:nainfscore\n", max_size=12))
def test_any_words_give_a_finite_number_that_they_spell_or_none(words: str) -> None:
    value = read_score(words)
    if value is not None:
        assert math.isfinite(value) and float(words) == value


def test_bfloat16_scores_are_plain_finite_numbers(judge_folder_2: Path, edits: Path) -> None:
    judge = load_judge(judge_folder_2, device="cpu", dtype="bfloat16")
    record = judge.score(edits / "s0.png", edits / "e0.png", "remove it", "Is it gone?").as_record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert all(type(record[name]) is float for name in ("quality", "alignment", "preservation", "answer_probability"))


def test_a_fresh_process_gives_the_same_scores(judge, judge_folder_2: Path, edits: Path) -> None:
    code = (
        "import sys, json, lmm4edit\n"
        "j = lmm4edit.load_judge(sys.argv[1], device='cpu')\n"
        "print(json.dumps(j.score(sys.argv[2], sys.argv[3], 'remove it', 'Is it gone?').as_record()))"
    )
    arguments = [str(judge_folder_2), str(edits / "s0.png"), str(edits / "e0.png")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    fresh = json.loads(done.stdout.splitlines()[-1])
    here = judge.score(edits / "s0.png", edits / "e0.png", "remove it", "Is it gone?").as_record()
    for name in ("quality", "alignment", "preservation", "answer_probability"):
        assert fresh[name] == pytest.approx(here[name], abs=1e-6)


def test_unknown_judges_and_read_outs_are_refused(judge, edits: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load_judge(tmp_path / "none")
    assert str(error.value) == (
        f"{tmp_path / 'none'}: there is no such judge. Expected the folder of a checkpoint (for example "
        "runs/demo/stage2/checkpoint), or 'tiny' for the demonstration judge that comes with LMM4Edit."
    )
    with pytest.raises(ConfigError, match="Expected the read-out to be 'head' or 'text', got 'tail'."):
        judge.score(edits / "s0.png", edits / "e0.png", "remove it", read_out="tail")
    with pytest.raises(ConfigError, match="Expected a batch size of at least 1, got 0."):
        next(judge.score_many([], 0))


def test_a_missing_device_is_an_error_and_not_the_processor(judge_folder_2: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so cuda is not missing here")
    for device in ("cuda:0", "abacus"):
        with pytest.raises(ConfigError) as error:
            load_judge(judge_folder_2, device=device)
        assert str(error.value).startswith(f"Expected a device of this machine, got {device!r}: ")
        assert str(error.value).endswith(" Use 'cpu', or leave the device out.")


def test_a_judge_of_simulated_ratings_says_so(judge) -> None:
    assert judge.notice == (
        "a demonstration: this judge was trained on simulated ratings and says nothing about real edits"
    )


def test_the_package_offers_the_judge_without_loading_torch() -> None:
    assert lmm4edit.load_judge is load_judge
    code = "import sys, lmm4edit; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
