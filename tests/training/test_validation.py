"""Statistics while training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lmm4edit.judge import words as judge_words
from lmm4edit.judge.backbones import load_backbone, special_ids
from lmm4edit.judge.encoding import PackedExample, answer_token_ids
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.judge.words import complete, read_score
from lmm4edit.records import BUILT_IN_DIMENSIONS
from lmm4edit.training import validation
from lmm4edit.training.dataset import EditDataset, Encoding
from lmm4edit.training.processes import Processes
from lmm4edit.training.samples import load_samples
from lmm4edit.training.validation import Judged, validate


@pytest.fixture(scope="module")
def model(tiny_backbone: Path) -> JudgeModel:
    backbone, processor = load_backbone(tiny_backbone)
    torch.manual_seed(0)
    tokens = answer_token_ids(processor.tokenizer, load_prompts())
    return JudgeModel(
        backbone, BUILT_IN_DIMENSIONS, tokens, ScoreHead(32, 3), TargetScale((50.0,) * 3, (20.0,) * 3)
    ).eval()


@pytest.fixture
def dataset(tiny_backbone: Path, edits: Path, model: JudgeModel) -> EditDataset:
    _, processor = load_backbone(tiny_backbone)
    ids = special_ids(model.backbone, processor)
    encoding = Encoding(processor, load_prompts(), BUILT_IN_DIMENSIONS, words=False, answer_words=False, **ids)
    return EditDataset(load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples, encoding)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (" 54.70", 54.7),
        ("54.70", 54.7),
        (" 9.31 ", 9.31),
        (" 100.00", 100.0),
        (" 0.00", 0.0),
        (" -3.5", -3.5),
        (" 7", 7.0),
    ],
)
def test_a_number_is_read(words: str, value: float) -> None:
    assert read_score(words) == value


@pytest.mark.parametrize(
    "words", ["", " ", " 54.70.", " about 54", " 4/5", " 54,7", " .5", " 5.", " 1e3", " nan", " 12345"]
)
def test_anything_but_a_number_is_no_score(words: str) -> None:
    assert read_score(words) is None


def test_completions_equal_generation_one_question_at_a_time(model: JudgeModel, dataset: EditDataset) -> None:
    examples = [item for item in dataset.__getitems__([0, 3]) if isinstance(item, PackedExample)]
    encoding = dataset.encoding
    tokenizer = encoding.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    done = complete(model.backbone, examples, encoding.collate, tokenizer)
    for example, words in zip(examples, done, strict=True):
        assert sorted(words) == ["alignment", "preservation", "quality"]
        for suffix in example.suffixes:
            if suffix.key not in words:
                continue
            ids = torch.tensor([example.prefix_ids + suffix.ids])
            generated = model.backbone.generate(  # type: ignore[operator, union-attr]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=example.pixel_values,
                image_grid_thw=torch.tensor(example.image_grids),
                mm_token_type_ids=(ids == encoding.image_token_id).long(),
                max_new_tokens=judge_words.MAX_NEW_TOKENS,
                do_sample=False,
                eos_token_id=end,
            )
            new = generated[0, ids.shape[1] :].tolist()
            assert words[suffix.key] == tokenizer.decode(new[: new.index(end)] if end in new else new)


def test_an_answer_stops_at_its_end(model: JudgeModel, dataset: EditDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backbone that always says the same three tokens."""
    tokenizer = dataset.encoding.processor.tokenizer
    script = [*tokenizer.encode(" 7"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    steps = iter(range(100))

    def logits(_: Any, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*hidden.shape[:-1], len(tokenizer))
        out[..., script[next(steps)]] = 1.0
        return out

    monkeypatch.setattr(judge_words, "token_logits", logits)
    examples = [item for item in dataset.__getitems__([0, 1]) if isinstance(item, PackedExample)]
    done = complete(model.backbone, examples, dataset.encoding.collate, tokenizer)
    assert done == [{"quality": " 7", "alignment": " 7", "preservation": " 7"}] * 2
    assert next(steps) == len(script)


@pytest.mark.parametrize("packed", [True, False])
def test_the_head_s_scores_are_compared_with_people(model: JudgeModel, dataset: EditDataset, packed: bool) -> None:
    dataset.encoding = dataclasses.replace(dataset.encoding, packed=packed)
    row = validate(model, dataset, Processes(), read_out="head", batch_size=5)
    assert (row["n_quality"], row["n_alignment"], row["n_answers"], row["failed"]) == (12, 9, 9, 0)
    assert row["distinct_quality"] == 12
    assert -1 <= row["srcc_quality"] <= 1 and 0 <= row["accuracy"] <= 1
    assert row["srcc_mean"] == pytest.approx(
        (row["srcc_quality"] + row["srcc_alignment"] + row["srcc_preservation"]) / 3
    )
    assert "parsed_quality" not in row and not any("orthogonality" in key or "loss" in key for key in row)


def test_words_are_the_same_packed_and_one_question_a_row(
    model: JudgeModel, dataset: EditDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "read_score", lambda text: float(sum(map(ord, text))))
    found = []
    for packed in (True, False):
        dataset.encoding = dataclasses.replace(dataset.encoding, packed=packed)
        found.append(validate(model, dataset, Processes(), read_out="text", batch_size=4))
    assert found[0] == found[1] and found[0]["n_alignment"] == 9 and found[0]["parsed_quality"] == 1.0


def test_batches_do_not_move_the_statistics(model: JudgeModel, dataset: EditDataset) -> None:
    rows = [validate(model, dataset, Processes(), read_out="head", batch_size=size) for size in (1, 12)]
    shown = [row.pop("samples") for row in rows]
    assert rows[0] == pytest.approx(rows[1], abs=1e-5)
    assert len(shown[0]) == validation.SHOWN
    for one, other in zip(*shown, strict=True):
        assert (one["sample_id"], one["rated"], one["answer"]) == (other["sample_id"], other["rated"], other["answer"])
        assert one["predicted"] == pytest.approx(other["predicted"], abs=1e-4)


def test_validation_leaves_the_mode_and_the_random_state_alone(model: JudgeModel, dataset: EditDataset) -> None:
    model.train()
    before = torch.get_rng_state()
    validate(model, dataset, Processes(), read_out="text", batch_size=12)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    model.eval()


def test_statistics_from_what_was_judged() -> None:
    judged = [
        Judged("a", {"quality": 10.0, "answer": 1.0}, {"quality": 1.0}, "yes"),
        Judged("b", {"quality": 20.0, "answer": 0.0}, {"quality": 2.0}, "yes"),
        Judged("c", {"quality": 30.0}, {"quality": 4.0}, None),
        Judged("d", {"quality": 40.0}, {"quality": None}, None),
        Judged("e", {}, {"quality": 99.0}, None),
    ]
    row = validation._compare(judged, ["quality", "mood"], failed=2, read_out="text")
    assert row["srcc_quality"] == pytest.approx(1.0) and row["n_quality"] == 3 and row["parsed_quality"] == 0.75
    assert row["accuracy"] == 0.5 and row["n_answers"] == 2 and row["failed"] == 2
    assert row["srcc_mood"] is None and row["n_mood"] == 0 and row["parsed_mood"] is None and row["srcc_mean"] is None
