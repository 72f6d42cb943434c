"""From samples to micro-batches."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lmm4edit.judge.backbones import load_backbone, special_ids
from lmm4edit.judge.packing import IGNORE, PackedExample
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS
from lmm4edit.training.dataset import EditDataset, Encoding, Failure, iterate_micro_batches
from lmm4edit.training.order import FILLER, DataOrder
from lmm4edit.training.samples import load_samples


@pytest.fixture(scope="module")
def encoding(tiny_backbone: Path) -> Encoding:
    model, processor = load_backbone(tiny_backbone)
    return Encoding(
        processor,
        load_prompts(),
        BUILT_IN_DIMENSIONS,
        words=True,
        answer_words=True,
        **special_ids(model, processor),
    )


@pytest.fixture
def dataset(encoding: Encoding, edits: Path) -> EditDataset:
    return EditDataset(load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples, encoding)


def words_of(dataset: EditDataset, index: int) -> dict[str, str]:
    example = dataset[index]
    assert isinstance(example, PackedExample)
    tokenizer = dataset.encoding.processor.tokenizer
    return {suffix.key: tokenizer.decode(suffix.answer_ids) for suffix in example.suffixes}


def test_a_sample_carries_words_and_targets(dataset: EditDataset) -> None:
    assert words_of(dataset, 11) == {
        "quality": " 20.00<|im_end|>",
        "alignment": " 80.00<|im_end|>",
        "preservation": " 30.00<|im_end|>",
        ANSWER: " Yes<|im_end|>",
    }
    example = dataset[11]
    assert isinstance(example, PackedExample)
    assert example.targets == {"quality": 20.0, "alignment": 80.0, "preservation": 30.0, ANSWER: 1.0}


def test_a_missing_score_is_asked_and_not_taught(dataset: EditDataset) -> None:
    batch = dataset.collate([dataset[1]]).batch
    column = batch.suffix_keys.index("alignment")
    assert words_of(dataset, 1)["alignment"] == ""
    assert torch.isnan(batch.targets[0, column])
    assert batch.readout_index[0, column] >= 0
    taught = batch.segment_ids[batch.labels != IGNORE].unique().tolist()
    assert taught == [index + 1 for index, key in enumerate(batch.suffix_keys) if key != "alignment"]


def test_a_missing_question_is_not_asked(dataset: EditDataset) -> None:
    batch = dataset.collate(dataset.__getitems__([1, 2])).batch
    column = batch.suffix_keys.index(ANSWER)
    assert batch.readout_index[:, column].ge(0).tolist() == [True, False]
    assert torch.isnan(batch.targets[:, column]).tolist() == [False, True]


def test_stage_2_teaches_no_score_words_but_may_teach_answers(dataset: EditDataset) -> None:
    dataset.encoding = dataclasses.replace(dataset.encoding, words=False)
    assert words_of(dataset, 0) == {"quality": "", "alignment": "", "preservation": "", ANSWER: " No<|im_end|>"}
    dataset.encoding = dataclasses.replace(dataset.encoding, answer_words=False)
    assert set(words_of(dataset, 0).values()) == {""}


def test_one_question_a_row_holds_the_same_labels(dataset: EditDataset) -> None:
    items = dataset.__getitems__([0, 1, 2])
    packed = dataset.collate(items)
    dataset.encoding = dataclasses.replace(dataset.encoding, packed=False)
    separate = dataset.collate(items)
    assert len(packed.batch) == 3 and len(separate.batch) == 11
    assert packed.batch.labels.ne(IGNORE).sum() == separate.batch.labels.ne(IGNORE).sum()
    assert sorted(packed.batch.targets[packed.batch.targets.isfinite()].tolist()) == sorted(
        separate.batch.targets[separate.batch.targets.isfinite()].tolist()
    )
    assert packed.n_edits == separate.n_edits == 3


def test_a_file_that_vanishes_is_a_named_failure_and_not_a_crash(
    encoding: Encoding, tmp_path: Path, rows: Any, write_rows: Any
) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "soon_gone.png")
    rows[0]["edited_image"] = "soon_gone.png"
    dataset = EditDataset(load_samples(write_rows(tmp_path / "t.jsonl", rows), BUILT_IN_DIMENSIONS).samples, encoding)
    (tmp_path / "soon_gone.png").unlink()
    micro = dataset.collate(dataset.__getitems__([0, 1]))
    assert micro.n_edits == 1 and micro.batch.sample_ids == ["e1"]
    (failure,) = micro.failures
    assert failure.sample_id == "e0" and "soon_gone.png" in failure.reason
    alone = dataset.collate(dataset.__getitems__([0]))
    assert alone.n_edits == 0 and alone.batch.labels.eq(IGNORE).all() and alone.batch.targets.isnan().all()


def test_a_sample_too_long_for_the_prompt_is_a_named_failure(
    encoding: Encoding, tmp_path: Path, rows: Any, write_rows: Any
) -> None:
    rows[0]["instruction"] = "zq " * 3000
    dataset = EditDataset(load_samples(write_rows(tmp_path / "t.jsonl", rows), BUILT_IN_DIMENSIONS).samples, encoding)
    item = dataset[0]
    assert isinstance(item, Failure) and item.sample_id == "e0" and "more than the limit of 2048" in item.reason


def test_a_filler_teaches_nothing_but_asks_everything(dataset: EditDataset) -> None:
    micro = dataset.collate(dataset.__getitems__([FILLER]))
    assert micro.n_edits == 0
    assert micro.batch.labels.eq(IGNORE).all() and micro.batch.targets.isnan().all()
    assert sorted(micro.batch.suffix_keys) == sorted([*(d.name for d in BUILT_IN_DIMENSIONS), ANSWER])
    assert micro.batch.pixel_values is not None


def test_samples_fetched_together_equal_samples_fetched_alone(dataset: EditDataset) -> None:
    for alone, together in zip([dataset[i] for i in range(4)], dataset.__getitems__([0, 1, 2, 3]), strict=True):
        assert isinstance(alone, PackedExample) and isinstance(together, PackedExample)
        assert alone.pixel_values is not None and together.pixel_values is not None
        torch.testing.assert_close(alone.pixel_values, together.pixel_values, rtol=0, atol=1e-6)
        assert alone.suffixes == together.suffixes and alone.prefix_ids == together.prefix_ids


def test_the_cache_gives_the_same_pixels_without_decoding_again(
    encoding: Encoding, edits: Path, monkeypatch: Any
) -> None:
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    plain, cached = EditDataset(samples, encoding), EditDataset(samples, encoding, cache_megabytes=8)
    first = cached.__getitems__([0, 1])
    monkeypatch.setattr("lmm4edit.training.dataset.decode_image", lambda path: pytest.fail(f"decoded {path} again"))
    second = cached.__getitems__([0, 1])
    monkeypatch.undo()
    for a, b, c in zip(first, second, plain.__getitems__([0, 1]), strict=True):
        assert torch.equal(a.pixel_values, b.pixel_values) and torch.equal(a.pixel_values, c.pixel_values)  # type: ignore[union-attr, arg-type]


def test_the_cache_notices_a_changed_file(encoding: Encoding, tmp_path: Path, rows: Any, write_rows: Any) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (28, 28), "black").save(path)
    rows[0]["edited_image"] = "a.png"
    samples = load_samples(write_rows(tmp_path / "t.jsonl", rows[:1]), BUILT_IN_DIMENSIONS).samples
    dataset = EditDataset(samples, encoding, cache_megabytes=8)
    before = dataset[0]
    Image.fromarray(np.full((28, 28, 3), 255, np.uint8)).save(path)
    os.utime(path, ns=(1, 1))
    after = dataset[0]
    assert not torch.equal(before.pixel_values, after.pixel_values)  # type: ignore[union-attr, arg-type]


def test_the_cache_keeps_within_its_limit(encoding: Encoding, edits: Path) -> None:
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    dataset = EditDataset(samples, encoding, cache_megabytes=1)
    dataset._cache._limit = 60_000  # three images of 16 patches x 294 values x 4 bytes
    dataset.__getitems__(list(range(12)))
    assert 0 < dataset._cache._bytes <= 60_000
    assert len(dataset._cache._images) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_come_in_order_and_leave_the_random_state_alone(dataset: EditDataset, workers: int) -> None:
    order = DataOrder(len(dataset), 3, 2, seed=5)
    before = torch.get_rng_state()
    got = [micro.batch.sample_ids for micro in iterate_micro_batches(dataset, order, 1, 4, workers)]
    assert torch.equal(torch.get_rng_state(), before)
    assert got == [[f"e{index}" for index in batch] for batch in order.micro_batches(1, 4)]
