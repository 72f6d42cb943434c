"""The command ``lmm4edit score``: tables, JSON, exit statuses, messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from lmm4edit.cli import main
from lmm4edit.inference.judge import Judge
from tests.inference.kit import save_random_backbone, save_random_judge, write_broken, write_edits

PHOTOS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "photos"
NOTICE = "a demonstration: this judge was trained on simulated ratings and says nothing about real edits"


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``lmm4edit score`` with these arguments, in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["lmm4edit", "score", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return Done(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A stage-1 judge, and a stage-2 judge of simulated ratings; both random."""
    folder = tmp_path_factory.mktemp("judges")
    backbone = save_random_backbone(folder / "backbone")
    return [
        save_random_judge(folder / "stage1", backbone, 1),
        save_random_judge(folder / "stage2", backbone, 2, {"ratings": "simulated"}),
    ]


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edits(tmp_path_factory.mktemp("edits"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    Image.new("RGB", (80, 60), "red").save(folder / "a.png")
    Image.new("RGB", (80, 60), "blue").save(folder / "b.png")
    return ["--source", str(folder / "a.png"), "--edited", str(folder / "b.png"), "--instruction", "make it blue"]


def test_one_edit_as_a_table_with_the_notice(run: Run, pair: list[str], judges: list[Path]) -> None:
    done = run(*pair, "--question", "Is it blue?", "--judge", judges[1], "--device", "cpu")
    assert done.code == 0
    for word in ("quality", "alignment", "preservation", "overall", "answer", "probability of yes", NOTICE):
        assert word in done.out


def test_one_edit_as_json(run: Run, pair: list[str], judges: list[Path]) -> None:
    done = run(*pair, "--judge", judges[1], "--json", "--device", "cpu")
    record = json.loads(done.out)
    assert done.code == 0
    assert list(record) == [
        "quality", "alignment", "preservation", "overall", "answer", "answer_probability", "failure", "read_out",
        "judge", "notice",
    ]  # fmt: skip
    assert type(record["quality"]) is float and record["answer"] is None and record["failure"] is None
    assert (record["read_out"], record["judge"], record["notice"]) == ("head", str(judges[1]), NOTICE)


def test_words_that_are_no_numbers_are_failures_and_not_scores(run: Run, pair: list[str], judges: list[Path]) -> None:
    done = run(*pair, "--judge", judges[0], "--read-out", "text", "--json", "--device", "cpu")
    record = json.loads(done.out)
    assert done.code == 3 and record["overall"] is None
    for name in ("quality", "alignment", "preservation"):
        assert record[name] is None
        assert (
            f"{name}: expected a number after the stem, the judge wrote {record['words'][name]!r}" in record["failure"]
        )


def test_the_head_of_a_stage_1_judge_is_refused(run: Run, pair: list[str], judges: list[Path]) -> None:
    done = run(*pair, "--judge", judges[0], "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: This judge has no score head: it is a stage-1 checkpoint")


def test_the_real_pair_is_scored(run: Run) -> None:
    if not PHOTOS.is_dir():
        pytest.skip(f"the real photographs are not at {PHOTOS}: the real pair was NOT scored")
    arguments = ["--source", PHOTOS / "example_source.jpg", "--edited", PHOTOS / "example_edited.jpg"]
    arguments += [
        "--instruction",
        "Remove the red heart shaped object",
        "--question",
        "Has the red heart been removed?",
    ]
    done = run(*arguments, "--judge", "tiny", "--json", "--device", "cpu")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert all(0 < record[name] < 120 for name in ("quality", "alignment", "preservation", "overall"))
    assert record["answer"] in ("yes", "no") and record["notice"] == NOTICE


def test_a_manifest_without_failures(run: Run, edits: Path, judges: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "new" / "scores.csv"
    arguments = [edits / "edits.jsonl", "--judge", judges[1], "--output", output, "--device", "cpu"]
    done = run(*arguments)
    assert (done.code, done.out) == (0, f"{output}: 7 edits scored, 0 failed.\n")
    assert f"note: {NOTICE}" in done.err
    again = run(*arguments)
    assert (again.code, again.out) == (0, f"{output}: 7 edits scored, 7 of them by an earlier run, 0 failed.\n")


def test_failed_rows_are_listed_at_the_end(run: Run, edits: Path, judges: list[Path], tmp_path: Path) -> None:
    broken = write_broken(edits, tmp_path / "broken.jsonl")
    output = tmp_path / "scores.parquet"
    done = run(broken, "--judge", judges[1], "--output", output, "--device", "cpu")
    assert (done.code, done.out) == (3, f"{output}: 7 edits scored, 2 failed.\n")
    listed = [line for line in done.err.splitlines() if line.startswith("  ")]
    assert [line.split(": ")[0].strip() for line in listed] == [f"{broken}:6", f"{broken}:3"]
    assert "gone" in listed[1] and "gone.png" in listed[1]

    done = run(broken, "--judge", judges[1], "--output", output, "--device", "cpu", "--json")
    record = json.loads(done.out)
    assert done.code == 3
    assert (record["output"], record["n_rows"], record["n_scored"], record["n_new"]) == (str(output), 8, 7, 1)
    assert [(f["where"], f["sample_id"]) for f in record["failed"]] == [(f"{broken}:6", None), (f"{broken}:3", "gone")]


def test_ctrl_c_loses_nothing(
    run: Run, edits: Path, judges: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scores.csv"
    arguments = [edits / "edits.jsonl", "--judge", judges[1], "--output", output, "--device", "cpu", "--batch-size", 3]
    batches = []
    original = Judge.score_many

    def interrupted(self, samples, *rest):
        if batches:
            raise KeyboardInterrupt
        batches.append(samples)
        return original(self, samples, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "score_many", interrupted)
        done = run(*arguments)
    assert done.code == 130 and not output.exists()
    assert done.err.strip() == (
        f"Interrupted. Nothing is lost: {output}.part.jsonl holds what is done; run the same command again."
    )
    assert run(*arguments).out == f"{output}: 7 edits scored, 3 of them by an earlier run, 0 failed.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{none}.jsonl", "--output", "{tmp}/x.csv"], "{none}.jsonl: expected a file or folder, got nothing there."),
        (["{edits}", "--output", "{tmp}/x.xlsx"], "{tmp}/x.xlsx: expected an output ending in .csv, .jsonl, .parquet"),
        (["--source", "{none}.png", "--edited", "{none}.png", "--instruction", "x"], "{none}.png: expected"),
    ],
)
def test_wrong_paths_are_answered_before_the_judge_is_loaded(
    run: Run, edits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def load(*_: object) -> Judge:
        raise AssertionError("the judge was loaded")

    monkeypatch.setattr("lmm4edit.commands.score._load", load)
    places = {"none": tmp_path / "none", "edits": edits / "edits.jsonl", "tmp": tmp_path}
    done = run(*(argument.format(**places) for argument in arguments), "--judge", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: " + message.format(**places))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "a.png", "--judge", "tiny"], "for one edit --edited, --instruction is missing"),
        (["edits.jsonl", "--source", "a.png", "--judge", "tiny"], "give a manifest or one edit, not both"),
        (["edits.jsonl", "--question", "?", "--judge", "tiny"], "not both (got MANIFEST and --question)"),
        (["edits.jsonl", "--judge", "tiny"], "say where the table goes"),
        (["edits.jsonl", "--output", "x.csv"], "give the judge's checkpoint, or `tiny`"),
        (
            ["e.jsonl", "--output", "x.csv", "--judge", "tiny", "--read-out", "tail"],
            "expected head or text, got 'tail'",
        ),
        (["e.jsonl", "--output", "x.csv", "--judge", "tiny", "--batch-size", "0"], "Invalid value for '--batch-size'"),
    ],
)
def test_wrong_usage_says_what_is_missing(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.code == 2 and message in " ".join(done.err.replace("│", " ").split())
