"""Edits that share a source get the scores they get alone, and what they share is computed once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmm4edit.data.manifest import read_manifest
from lmm4edit.errors import ConfigError
from lmm4edit.inference.judge import Judge, load_judge
from lmm4edit.inference.order import by_source
from lmm4edit.judge.bounded_cache import BoundedCache
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.judge.image_features import image_digest
from lmm4edit.judge.image_inputs import ProcessedImage
from lmm4edit.records import EditSample

NAMES = ("quality", "alignment", "preservation")


@pytest.fixture
def samples(edits: Path) -> list[EditSample]:
    """Two sources with four edits each in turn, one of them with two instructions, and an edit of a third source."""
    one, two, three = read_manifest(edits / "edits.jsonl")[:3]
    rows = []
    for index in range(4):
        edited = str(edits / f"e{index}.png")
        rows.append(replace(one, sample_id=f"a{index}", edited_image=edited))
        rows.append(replace(two, sample_id=f"b{index}", edited_image=edited, question="Is it gone?" if index else None))
    rows.append(replace(one, sample_id="other", instruction="do something else"))
    return [*rows, replace(three, sample_id="lone")]


@pytest.fixture
def sharing(judge_folder_2: Path) -> Any:
    return load_judge(judge_folder_2, device="cpu")


def scores(judge: Any, samples: list[EditSample], **options: Any) -> list[list[float | None]]:
    results = list(judge.score_many(samples, **options))
    assert [r.sample_id for r in results] == [s.sample_id for s in samples]
    return [[r.scores[name] for name in NAMES] + [r.answer_probability] for r in results]


def assert_equal(got: list[list[float | None]], expected: list[list[float | None]]) -> None:
    for row, other in zip(got, expected, strict=True):
        for value, wanted in zip(row, other, strict=True):
            assert value == (None if wanted is None else pytest.approx(wanted, abs=1e-3))


@pytest.mark.parametrize(("batch_size", "window"), [(1, None), (4, None), (10, None), (3, 10), (4, 7)])
def test_shared_scores_equal_those_without_sharing(
    sharing: Any, judge_folder_2: Path, samples: list[EditSample], batch_size: int, window: int | None
) -> None:
    plain = load_judge(judge_folder_2, device="cpu", share_sources=False)
    expected = scores(plain, samples, batch_size=1)
    assert_equal(scores(sharing, samples, batch_size=batch_size, window=window), expected)
    assert_equal(scores(sharing, samples[::-1], batch_size=batch_size, window=window), expected[::-1])
    assert len({round(row[0], 2) for row in expected if row[0] is not None}) > 5  # the edits do differ


def test_a_source_is_run_once_for_all_its_edits(sharing: Any, samples: list[EditSample]) -> None:
    calls: list[int] = []
    vision = sharing.model.backbone.get_base_model().model.visual
    vision.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    list(sharing.score_many(samples, batch_size=10))
    # Four edited images (the lone edit's and the other instruction's are among them) and three sources.
    assert sum(calls) == 7
    assert sharing.sharing.prefixes_computed == 4
    calls.clear()
    list(sharing.score_many(samples, batch_size=4))
    assert sum(calls) == 0 and sharing.sharing.prefixes_computed == 4  # kept from batch to batch
    sharing.sharing.clear()
    list(sharing.score_many(samples[-1:], batch_size=1))
    assert calls == [2] and sharing.sharing.prefixes_computed == 4  # nothing recurs: one pass


def test_other_pixels_under_one_path_and_one_picture_under_two(
    sharing: Any, judge_folder_2: Path, edits: Path, tmp_path: Path, samples: list[EditSample]
) -> None:
    plain = load_judge(judge_folder_2, device="cpu", share_sources=False)
    source = tmp_path / "source.png"
    rows = [replace(sample, source_image=str(source)) for sample in samples[0:4:2]]
    values = []
    for picture in ("s0.png", "s3.png"):
        shutil.copy(edits / picture, source)
        values.append(scores(sharing, rows, batch_size=2))
        assert_equal(values[-1], scores(plain, rows, batch_size=2))
    assert all(abs(a[0] - b[0]) > 1e-2 for a, b in zip(*values, strict=True))
    computed = sharing.sharing.prefixes_computed
    shutil.copy(edits / "s0.png", tmp_path / "copy.png")
    again = [replace(row, source_image=str(tmp_path / "copy.png")) for row in rows]
    assert_equal(scores(sharing, again, batch_size=2), values[0])
    assert sharing.sharing.prefixes_computed == computed


def test_in_the_papers_order_features_are_shared(judge_folder_2: Path, samples: list[EditSample]) -> None:
    loaded = load_checkpoint(judge_folder_2, device="cpu", dtype="float32")
    loaded = replace(loaded, prompts=loaded.prompts.model_copy(update={"order": "paper"}))
    judge, plain = Judge(loaded), Judge(loaded, share_sources=False)
    assert (judge.sharing.how, plain.sharing.how) == ("features", "none")
    assert_equal(scores(judge, samples, batch_size=4), scores(plain, samples, batch_size=1))
    assert judge.sharing.images_encoded == 7 and judge.sharing.prefixes_computed == 0


def test_bad_windows_are_refused(sharing: Any, samples: list[EditSample]) -> None:
    with pytest.raises(ConfigError, match="window of at least the batch size, 8, got 3"):
        list(sharing.score_many(samples, 8, window=3))


def test_nothing_is_read_ahead_of_the_window(sharing: Any, samples: list[EditSample]) -> None:
    taken: list[str] = []

    def stream() -> Iterator[EditSample]:
        for sample in samples:
            taken.append(sample.sample_id)
            yield sample

    results = sharing.score_many(stream(), batch_size=2, window=4)
    next(results)
    assert len(taken) == 4


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1))),
    st.integers(1, 9),
)
def test_every_row_comes_once_and_sources_stay_together(pairs: list[tuple[int, int]], window: int) -> None:
    rows = [
        EditSample(sample_id=str(i), source_id="", source_image=f"s{s}", edited_image="e", instruction=f"do {t}")
        for i, (s, t) in enumerate(pairs)
    ]
    ordered = list(by_source(rows, window))
    assert sorted(place for place, _ in ordered) == list(range(len(rows)))
    assert all(rows[place] is sample for place, sample in ordered)
    for first in range(0, len(rows), window):
        part = ordered[first : first + window]
        assert {place for place, _ in part} == set(range(first, min(first + window, len(rows))))
        keys = [(sample.source_image, sample.instruction) for _, sample in part]
        changes = sum(a != b for a, b in zip(keys, keys[1:], strict=False))
        assert changes == max(0, len(set(keys)) - 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60))))
def test_the_cache_stays_within_its_memory_and_keeps_what_was_used_last(steps: list[tuple[int, int]]) -> None:
    cache: BoundedCache[int, bytes] = BoundedCache(100, len)
    for name, size in steps:
        if cache.get(name) is None:
            cache.put(name, bytes(size))
        assert name in cache  # the newest always fits
        assert cache.bytes <= 100
    assert cache.bytes == sum(map(len, cache._kept.values()))


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: BoundedCache[int, bytes] = BoundedCache(100, len)
    cache.put(1, bytes(60))
    cache.put(2, bytes(101))
    assert len(cache) == 1 and 1 in cache
    cache.put(3, bytes(41))
    assert cache.get(1) is None and 3 in cache
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_digests_tell_pixels_shapes_and_sizes_apart() -> None:
    patches = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    images = [
        ProcessedImage(patches, (1, 2, 2), 1, (28, 28)),
        ProcessedImage(patches, (1, 4, 1), 1, (28, 28)),
        ProcessedImage(patches, (1, 2, 2), 1, (28, 29)),
        ProcessedImage(patches + 1e-6, (1, 2, 2), 1, (28, 28)),
        ProcessedImage(patches.double(), (1, 2, 2), 1, (28, 28)),
    ]
    assert len({image_digest(image) for image in images}) == len(images)
    assert image_digest(images[0]) == image_digest(ProcessedImage(patches.t().contiguous().t(), (1, 2, 2), 1, (28, 28)))
