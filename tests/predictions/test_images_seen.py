"""A picture that is replaced under its name does not keep its old score; a copy of the data does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmm4edit.errors import StoreError
from lmm4edit.predictions.images_seen import ImagesSeen
from lmm4edit.records import EditSample


@pytest.fixture
def sample(tmp_path: Path) -> EditSample:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    return EditSample("one", "a", str(tmp_path / "a.png"), str(tmp_path / "b.png"), "do it")


def test_a_replaced_file_is_named_even_with_the_same_size(tmp_path: Path, sample: EditSample) -> None:
    ImagesSeen(tmp_path / "seen.jsonl").note([sample])
    ImagesSeen(tmp_path / "seen.jsonl").check([sample], "Remedy.")
    (tmp_path / "b.png").write_bytes(b"c.png" * 10)
    os.utime(tmp_path / "b.png", ns=(1, 1))
    with pytest.raises(StoreError) as error:
        ImagesSeen(tmp_path / "seen.jsonl").check([sample], "Remedy.")
    assert str(error.value) == (
        f"{tmp_path / 'seen.jsonl'}: the pictures of 1 files have changed since they were scored: "
        f"one ({tmp_path / 'b.png'}). Remedy."
    )


def test_a_copy_with_another_time_and_a_file_that_is_gone_are_no_reason_to_stop(
    tmp_path: Path, sample: EditSample
) -> None:
    ImagesSeen(tmp_path / "seen.jsonl").note([sample])
    os.utime(tmp_path / "a.png", ns=(1, 1))
    (tmp_path / "b.png").unlink()
    ImagesSeen(tmp_path / "seen.jsonl").check([sample], "Remedy.")


def test_scoring_again_is_noted_again_and_a_torn_line_is_none(tmp_path: Path, sample: EditSample) -> None:
    path = tmp_path / "seen.jsonl"
    ImagesSeen(path).note([sample])
    ImagesSeen(path).note([sample])
    assert len(path.read_bytes().splitlines()) == 1
    (tmp_path / "b.png").write_bytes(b"another picture")
    ImagesSeen(path).note([sample])
    with path.open("ab") as file:
        file.write(b'{"sample_id": "one", "ima')
    seen = ImagesSeen(path)
    seen.check([sample], "Remedy.")
    assert len(path.read_bytes().splitlines()) == 3


def test_images_in_the_manifest_are_left_to_it(tmp_path: Path) -> None:
    inside = EditSample("one", "a", "data:;base64,AAAA", "data:;base64,BBBB", "do it")
    ImagesSeen(tmp_path / "seen.jsonl").note([inside])
    ImagesSeen(tmp_path / "seen.jsonl").check([inside], "Remedy.")
    assert not (tmp_path / "seen.jsonl").exists()
