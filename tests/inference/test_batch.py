"""Scoring a manifest: every row accounted for, interrupted runs continued, other judges refused."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lmm4edit.errors import ConfigError, StoreError
from lmm4edit.inference import batch
from lmm4edit.inference.batch import part_path, score_manifest
from lmm4edit.inference.judge import load_judge
from tests.inference.kit import write_broken


def read_table(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def broken(edits: Path, tmp_path: Path) -> Path:
    return write_broken(edits, tmp_path / "broken.jsonl")


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_every_format_holds_every_row_in_order(judge, edits: Path, tmp_path: Path, ending: str) -> None:
    report = score_manifest(judge, edits / "edits.jsonl", tmp_path / f"scores{ending}", batch_size=3)
    assert (report.n_rows, report.n_scored, report.n_new, report.failed) == (7, 7, 7, [])
    rows = read_table(report.output)
    assert [row["sample_id"] for row in rows] == [f"e{i}" for i in range(7)]
    assert list(rows[0]) == [
        "sample_id", "quality", "alignment", "preservation", "overall", "answer", "answer_probability", "failure",
    ]  # fmt: skip
    for index, row in enumerate(rows):
        assert float(row["quality"]) == pytest.approx(
            judge.score(
                edits / f"s{index}.png", edits / f"e{index}.png", "remove the red heart" + " and more" * index
            ).quality,
            abs=1e-3,
        )
        assert bool(row["answer"]) == (index % 2 == 0)


def test_bad_rows_are_named_and_the_others_scored(judge, broken: Path, tmp_path: Path) -> None:
    report = score_manifest(judge, broken, tmp_path / "scores.jsonl", batch_size=4)
    assert report.n_scored == 7
    assert [failed.where for failed in report.failed] == [f"{broken}:6", f"{broken}:3"]
    assert "gone.png" in report.failed[1].reason and report.failed[1].sample_id == "gone"
    gone = next(row for row in read_table(report.output) if row["sample_id"] == "gone")
    assert gone["quality"] is None and "gone.png" in gone["failure"]


def test_a_second_run_scores_only_what_failed(judge, broken: Path, edits: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"
    score_manifest(judge, broken, output)
    before = read_table(output)
    (edits / "gone.png").write_bytes((edits / "e1.png").read_bytes())
    try:
        report = score_manifest(judge, broken, output)
    finally:
        (edits / "gone.png").unlink()
    assert (report.n_new, report.n_scored) == (1, 8)
    after = read_table(output)
    assert [row for row in after if row["sample_id"] != "gone"] == [row for row in before if row["sample_id"] != "gone"]


def test_a_run_cut_short_anywhere_continues_to_the_same_table(judge, edits: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    score_manifest(judge, edits / "edits.jsonl", whole, batch_size=2)
    data = part_path(whole).read_bytes()
    header = data.index(b"\n") + 1  # the header is written whole or not at all
    for cut in range(header, len(data), (len(data) - header) // 5):
        output = tmp_path / f"cut{cut}.jsonl"
        part_path(output).write_bytes(data[:cut])
        score_manifest(judge, edits / "edits.jsonl", output, batch_size=2)
        for one, other in zip(read_table(output), read_table(whole), strict=True):
            assert one["sample_id"] == other["sample_id"] and one["answer"] == other["answer"]
            for name in ("quality", "alignment", "preservation"):
                assert one[name] == pytest.approx(other[name], abs=1e-3)


def test_another_judge_manifest_or_read_out_under_the_same_output_is_refused(
    judge, judge_folder_1: Path, edits: Path, tmp_path: Path
) -> None:
    output = tmp_path / "scores.csv"
    score_manifest(judge, edits / "edits.jsonl", output)
    with pytest.raises(StoreError, match="judge"):
        score_manifest(load_judge(judge_folder_1, device="cpu"), edits / "edits.jsonl", output, read_out="text")
    with pytest.raises(StoreError, match="read_out"):
        score_manifest(judge, edits / "edits.jsonl", output, read_out="text")
    other = tmp_path / "other.jsonl"
    other.write_text((edits / "edits.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(StoreError, match="manifest"):
        score_manifest(judge, other, output, image_root=edits)


def test_tables_that_cannot_or_must_not_be_written_are_refused(judge, broken: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    before = broken.read_bytes()
    expected = {
        "scores.xlsx": "expected an output ending in .csv, .jsonl, .parquet, got '.xlsx'.",
        "scores": "expected an output ending in .csv, .jsonl, .parquet, got no ending.",
        "folder.csv": "expected the name of a table to write, got a folder. Choose another name.",
        broken.name: "expected another file than the manifest, which it would replace. Choose another name.",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError) as error:
            score_manifest(judge, broken, tmp_path / name)
        assert str(error.value) == f"{tmp_path / name}: {message}"
    assert broken.read_bytes() == before


def test_what_fails_again_is_counted_once_and_goes_on_being_tried(judge, broken: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores.jsonl"
    first = score_manifest(judge, broken, output)
    second = score_manifest(judge, broken, output)
    assert (second.n_new, second.n_scored, second.failed) == (1, first.n_scored, first.failed)
    assert [row["sample_id"] for row in read_table(output)].count("gone") == 1


def test_another_precision_under_the_same_output_is_refused(
    judge, judge_folder_2: Path, edits: Path, tmp_path: Path
) -> None:
    output = tmp_path / "scores.csv"
    score_manifest(judge, edits / "edits.jsonl", output)
    with pytest.raises(StoreError, match="dtype: 'float32' in the file, 'bfloat16' now"):
        score_manifest(load_judge(judge_folder_2, device="cpu", dtype="bfloat16"), edits / "edits.jsonl", output)


@pytest.mark.slow
def test_kill_9_while_scoring_then_the_same_command_finishes(judge_folder_2: Path, edits: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (edits / "edits.jsonl").read_text().splitlines()]
    many = tmp_path / "many.jsonl"
    with many.open("w") as file:
        for index in range(120):
            row = {**rows[index % 7], "sample_id": f"r{index}"}
            row["source_image"], row["edited_image"] = (
                str(edits / row["source_image"]),
                str(edits / row["edited_image"]),
            )
            file.write(json.dumps(row) + "\n")
    output = tmp_path / "scores.jsonl"
    command = [sys.executable, "-m", "lmm4edit.cli", "score", str(many), "--judge", str(judge_folder_2)]
    command += ["--output", str(output), "--batch-size", "2", "--device", "cpu"]
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = part_path(output).stat().st_size if part_path(output).exists() else 0
        while process.poll() is None:
            if part_path(output).exists() and part_path(output).stat().st_size > size + 3000:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.02)
        process.wait()
    assert killed >= 1
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = read_table(output)
    assert [row["sample_id"] for row in table] == [f"r{index}" for index in range(120)]
    judge = load_judge(judge_folder_2, device="cpu")
    for index in (0, 3, 60, 119):
        row = json.loads(many.read_text().splitlines()[index])
        single = judge.score(row["source_image"], row["edited_image"], row["instruction"], row.get("question"))
        assert table[index]["quality"] == pytest.approx(single.quality, abs=1e-3)


@pytest.mark.slow
def test_two_processes_on_one_output_are_refused(judge_folder_2: Path, judge, edits: Path, tmp_path: Path) -> None:
    from lmm4edit.predictions.store import PredictionStore

    output = tmp_path / "scores.jsonl"
    command = [
        sys.executable,
        "-m",
        "lmm4edit.cli",
        "score",
        str(edits / "edits.jsonl"),
        "--judge",
        str(judge_folder_2),
    ]
    command += ["--output", str(output), "--device", "cpu"]
    with PredictionStore(part_path(output), {"held": "by a test"}):
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "it is in use by process" in done.stderr and "Traceback" not in done.stderr


def test_pictures_replaced_under_their_names_are_not_given_their_old_scores(judge, edits: Path, tmp_path: Path) -> None:
    copied = tmp_path / "edits"
    shutil.copytree(edits, copied)
    output = tmp_path / "scores.jsonl"
    score_manifest(judge, copied / "edits.jsonl", output)
    assert score_manifest(judge, copied / "edits.jsonl", output).n_new == 0
    shutil.copy(edits / "e0.png", copied / "e1.png")
    os.utime(copied / "e1.png", ns=(1, 1))
    with pytest.raises(StoreError, match="pictures of 1 files have changed since they were scored: e1 "):
        score_manifest(judge, copied / "edits.jsonl", output)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_scored(judge, edits: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: expected a folder to write into, got: "):
        score_manifest(judge, edits / "edits.jsonl", tmp_path / "file" / "scores.csv")


def test_a_full_disk_at_the_end_loses_no_score(
    judge, edits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "scores.csv"
    with monkeypatch.context() as patch:
        patch.setattr(batch, "write_rows", full)
        with pytest.raises(StoreError, match="No space left on device. Every score is safe in .*scores.csv.part.jsonl"):
            score_manifest(judge, edits / "edits.jsonl", output)
    report = score_manifest(judge, edits / "edits.jsonl", output)
    assert (report.n_new, report.n_scored) == (0, 7)
