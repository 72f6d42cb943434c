"""Broken rows are named, counted and left out at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lmm4edit.errors import ManifestError
from lmm4edit.records import BUILT_IN_DIMENSIONS
from lmm4edit.training.samples import load_samples, spread_evenly

Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Path]


def test_sound_rows_are_all_used(edits: Path) -> None:
    loaded = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS)
    assert [sample.sample_id for sample in loaded.samples] == [f"e{index}" for index in range(12)]
    assert loaded.skipped == []


def test_broken_rows_are_named_and_left_out(tmp_path: Path, edits: Path, rows: Rows, write_rows: Write) -> None:
    (tmp_path / "cut.png").write_bytes((edits / "edit3.png").read_bytes()[:200])
    Image.new("RGB", (3, 900)).save(tmp_path / "thin.png")
    rows[1]["edited_image"] = "gone.png"
    rows[3]["edited_image"] = "cut.png"
    rows[4]["source_image"] = "thin.png"
    rows[5]["mos_quality"] = "good"
    for key in ("mos_quality", "mos_alignment", "mos_preservation", "question", "answer"):
        rows[7].pop(key, None)
    manifest = write_rows(tmp_path / "train.jsonl", rows)
    loaded = load_samples(manifest, BUILT_IN_DIMENSIONS)
    assert [sample.sample_id for sample in loaded.samples] == ["e0", "e2", "e6", "e8", "e9", "e10", "e11"]
    reasons = {row.location: row.reason for row in loaded.skipped}
    assert sorted(reasons) == sorted(f"{manifest}:{line}" for line in (2, 4, 5, 6, 8))
    assert "sample 'e1': " in reasons[f"{manifest}:2"] and "gone.png" in reasons[f"{manifest}:2"]
    assert "cut.png" in reasons[f"{manifest}:4"]
    assert "thin.png" in reasons[f"{manifest}:5"] and "a ratio of 300.0" in reasons[f"{manifest}:5"]
    assert reasons[f"{manifest}:6"].startswith("mos_quality: expected a finite number, got 'good'.")
    assert reasons[f"{manifest}:8"] == (
        "sample 'e7': nothing to learn: expected at least one of mos_quality, mos_alignment, mos_preservation, "
        "question and answer, got none."
    )


def test_what_is_not_wanted_does_not_keep_a_row(tmp_path: Path, rows: Rows, write_rows: Write) -> None:
    for key in ("mos_quality", "mos_alignment", "mos_preservation"):
        rows[0].pop(key, None)
    manifest = write_rows(tmp_path / "train.jsonl", rows[:2])
    assert len(load_samples(manifest, BUILT_IN_DIMENSIONS).samples) == 2
    without_answers = load_samples(manifest, BUILT_IN_DIMENSIONS, answers=False)
    assert [sample.sample_id for sample in without_answers.samples] == ["e1"]
    assert len(without_answers.skipped) == 1


def test_opening_the_files_finds_missing_and_empty_ones(tmp_path: Path, rows: Rows, write_rows: Write) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    rows[0]["edited_image"], rows[1]["edited_image"] = "gone.png", "empty.png"
    loaded = load_samples(write_rows(tmp_path / "t.jsonl", rows[:3]), BUILT_IN_DIMENSIONS, check_images="header")
    assert [str(row).partition(": ")[2] for row in loaded.skipped] == [
        f"sample 'e0': {tmp_path / 'gone.png'}: the image cannot be read: No such file or directory.",
        f"sample 'e1': {tmp_path / 'empty.png'}: the file is empty.",
    ]


def test_the_first_usable_samples_are_taken(tmp_path: Path, rows: Rows, write_rows: Write) -> None:
    rows[0]["edited_image"] = "gone.png"
    loaded = load_samples(write_rows(tmp_path / "t.jsonl", rows), BUILT_IN_DIMENSIONS, max_samples=2)
    assert [sample.sample_id for sample in loaded.samples] == ["e1", "e2"]


def test_a_manifest_without_usable_rows_is_refused(tmp_path: Path, write_rows: Write) -> None:
    with pytest.raises(ManifestError):
        load_samples(write_rows(tmp_path / "t.jsonl", [{"sample_id": "a"}]), BUILT_IN_DIMENSIONS)


def test_the_fingerprint_follows_what_is_learnt_and_not_where_it_lies(
    tmp_path: Path, edits: Path, rows: Rows, write_rows: Write
) -> None:
    here = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).fingerprint()
    assert load_samples(write_rows(tmp_path / "moved.jsonl", rows), BUILT_IN_DIMENSIONS).fingerprint() == here
    rows[0]["mos_quality"] += 0.01
    assert load_samples(write_rows(tmp_path / "moved.jsonl", rows), BUILT_IN_DIMENSIONS).fingerprint() != here


def test_a_part_is_spread_over_the_whole(edits: Path) -> None:
    samples = load_samples(edits / "train.jsonl", BUILT_IN_DIMENSIONS).samples
    assert [sample.sample_id for sample in spread_evenly(samples, 4)] == ["e0", "e3", "e6", "e9"]
    assert spread_evenly(samples, 100) == samples
    assert spread_evenly(samples, None) == samples
