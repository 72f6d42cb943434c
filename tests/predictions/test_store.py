"""The predictions file: everything comes back, nothing is stored twice, and no interruption loses more than a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmm4edit.errors import StoreError
from lmm4edit.predictions.store import PredictionKey, PredictionStore, key_of, read_predictions
from lmm4edit.records import Prediction

SETTINGS = {"manifest": "abc", "scorers": ["ssim"], "judge": {"prompts": "v1", "size": 56}}


def number(item: str, value: object = 0.5, **changes: object) -> Prediction:
    return Prediction(item, "ssim", "score", value, **changes)  # type: ignore[arg-type]


def failed(item: str) -> Prediction:
    return Prediction(item, "ssim", "score", None, failure="no image")


def message_of(call, *arguments: object) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "predictions.jsonl"


# --- storing and reading -------------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=8)  # with halves of surrogate pairs, as cut-off answers hold them
values = st.floats(allow_nan=False, allow_infinity=False) | texts | st.lists(texts, max_size=3).map(tuple) | st.none()


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    value = draw(values)
    return Prediction(
        item_id=draw(texts),
        predictor=draw(texts),
        target=draw(texts),
        value=value,
        raw_answer=draw(st.none() | texts),
        failure=draw(texts) if value is None else None,
        setting=draw(st.dictionaries(texts, texts, max_size=2)),
        repeat=draw(st.integers(0, 3)),
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_predictions=st.lists(predictions(), max_size=6, unique_by=key_of), cut=st.integers(0, 6))
def test_everything_comes_back(tmp_path: Path, given_predictions: list[Prediction], cut: int) -> None:
    path = tmp_path / "p.jsonl"
    path.unlink(missing_ok=True)
    for part in (given_predictions[:cut], given_predictions[cut:]):
        with PredictionStore(path, SETTINGS) as store:
            store.append(part)
    assert store.done_keys() == {key_of(p) for p in given_predictions}
    header, read, torn = read_predictions(path)
    assert (header.settings, torn) == (SETTINGS, False)
    assert read == given_predictions
    assert [type(p.value) for p in read] == [type(p.value) for p in given_predictions]


def test_values_of_all_kinds_in_order(path: Path) -> None:
    stored = [
        number("1", 54.7),
        number("2", "yes", raw_answer="Yes.\nIt is."),
        number("3", ("A", "C")),
        number("4", ()),
        failed("5"),
        number("6", 3, setting={"order": "swapped"}, repeat=2),
    ]
    with PredictionStore(path, SETTINGS, {"version": "1"}) as store:
        store.append(stored[:2])
        store.append(stored[2:])
        store.append([])
    content = read_predictions(path)
    assert content.predictions == stored
    assert content.header.provenance == {"version": "1"}
    assert content.header.continued == ()
    assert [json.loads(line) for line in path.read_text().splitlines()[5:]] == [
        {"item_id": "5", "predictor": "ssim", "target": "score", "value": None, "failure": "no image"},
        {
            "item_id": "6",
            "predictor": "ssim",
            "target": "score",
            "value": 3.0,
            "setting": {"order": "swapped"},
            "repeat": 2,
        },
    ]


def test_numpy_numbers_become_numbers(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1", np.float32(0.5)), number("2", np.int64(3)), number("3", np.float64(0.1))])
    assert [p.value for p in read_predictions(path).predictions] == [0.5, 3.0, 0.1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "expected a finite number, got nan. Store None, and the reason as failure."),
        (float("-inf"), "expected a finite number, got -inf. Store None, and the reason as failure."),
        (np.float32("nan"), "expected a finite number, got nan. Store None, and the reason as failure."),
        (True, "expected a number, a word, a tuple of words or None as value, got True."),
        (["A"], "expected a number, a word, a tuple of words or None as value, got ['A']."),
        ((1, 2), "expected a number, a word, a tuple of words or None as value, got (1, 2)."),
    ],
)
def test_values_that_are_refused(path: Path, value: object, reason: str) -> None:
    with PredictionStore(path, SETTINGS) as store:
        assert message_of(store.append, [number("1"), number("2", value)]) == (
            f"{path}: prediction '2' of 'ssim' for 'score': {reason}"
        )
    assert read_predictions(path).predictions == [], "a batch is stored whole or not at all"


def test_keys_and_settings_that_are_no_text(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        assert message_of(store.append, [number("1", setting={"swap": 1})]) == (
            f"{path}: prediction '1' of 'ssim' for 'score': expected text in setting, got {{'swap': 1}}."
        )
        assert message_of(store.append, [number(7)]) == (  # type: ignore[arg-type]
            f"{path}: prediction 7 of 'ssim' for 'score': expected text in item_id, got 7."
        )


def test_duplicates_are_refused(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1")])
        expected = (
            f"{path}: expected one prediction for each key, got a second one for item '{{}}', predictor 'ssim', "
            "target 'score'. Skip the keys in done_keys()."
        )
        assert message_of(store.append, [number("1", 0.6)]) == expected.format("1")
        assert message_of(store.append, [number("2"), number("2")]) == expected.format("2")
        store.append([number("1", repeat=1), number("1", setting={"swap": "yes"})])
        assert message_of(store.append, [number("1", setting={"swap": "yes"}, repeat=0)]) == (
            f"{path}: expected one prediction for each key, got a second one for item '1', predictor 'ssim', "
            "target 'score', swap=yes. Skip the keys in done_keys()."
        )
    assert len(read_predictions(path).predictions) == 3


def test_a_failure_can_be_tried_again(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([failed("1"), number("2")])
        assert store.done_keys() == {PredictionKey("1", "ssim", "score"), PredictionKey("2", "ssim", "score")}
        assert store.done_keys(failures=False) == {PredictionKey("2", "ssim", "score")}
        store.append([number("1", 0.9)])
        assert "second one for item '1'" in message_of(store.append, [failed("1")])
    assert [(p.item_id, p.value) for p in read_predictions(path).predictions] == [("1", 0.9), ("2", 0.5)]


def test_a_closed_store(path: Path) -> None:
    store = PredictionStore(path, SETTINGS)
    store.close()
    store.close()
    assert message_of(store.append, [number("1")]) == (
        f"{path}: expected an open store, got one that is closed. Open it again to append."
    )


# --- continuing ----------------------------------------------------------------------------------------------------


def test_continuing_keeps_what_is_there(path: Path) -> None:
    with PredictionStore(path, SETTINGS, {"session": 1}) as store:
        store.append([number("1"), number("2", setting={"b": "2", "a": "1"}, repeat=3)])
    again = {"judge": {"size": 56, "prompts": "v1"}, "scorers": ("ssim",), "manifest": "abc"}
    with PredictionStore(path, again, {"session": 2}) as store:
        assert store.recovered is None
        assert store.done_keys() == {
            PredictionKey("1", "ssim", "score"),
            PredictionKey("2", "ssim", "score", (("a", "1"), ("b", "2")), 3),
        }
        store.append([number("3")])
    header, stored, _ = read_predictions(path)
    assert [p.item_id for p in stored] == ["1", "2", "3"]
    assert (header.provenance, header.continued) == ({"session": 1}, ({"session": 2},))


def test_other_settings_are_refused_by_key(path: Path) -> None:
    PredictionStore(path, SETTINGS).close()
    before = path.read_bytes()
    other = {"manifest": "xyz", "scorers": ["ssim"], "judge": {"prompts": "v2"}, "extra": None}
    assert message_of(PredictionStore, path, other) == (
        f"{path}: expected the settings that the file was begun with, got others:\n"
        "  extra: absent in the file, None now\n"
        "  judge.prompts: 'v1' in the file, 'v2' now\n"
        "  judge.size: 56 in the file, absent now\n"
        "  manifest: 'abc' in the file, 'xyz' now\n"
        "Write to another file, or move this one away to begin anew."
    )
    assert path.read_bytes() == before
    PredictionStore(path, SETTINGS).close()


def test_a_torn_last_line_is_removed_and_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1"), number("2")])
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last)):
        path.write_bytes(whole[:-cut])
        content = read_predictions(path)
        assert ([p.item_id for p in content.predictions], content.torn) == (["1"], len(last) - cut > 0)
    path.write_bytes(whole[:-5])
    with PredictionStore(path, SETTINGS) as store:
        assert store.recovered == (
            f"{path}: the last line was cut off by an interruption; its {len(last) - 5} bytes were removed, "
            "and what it held will be computed again."
        )
        assert caplog.messages == [store.recovered]
        assert store.done_keys() == {PredictionKey("1", "ssim", "score")}
        store.append([number("2", 0.7)])
    content = read_predictions(path)
    assert ([p.value for p in content.predictions], content.torn) == ([0.5, 0.7], False)


def test_a_block_of_zeros_after_a_power_cut_is_a_torn_line(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1")])
    with path.open("ab") as file:
        file.write(b'{"item' + b"\0" * 4000)
    with PredictionStore(path, SETTINGS) as store:
        assert store.recovered is not None and "4006 bytes were removed" in store.recovered
    assert len(read_predictions(path).predictions) == 1


def test_an_empty_file_is_begun(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1")])
    assert len(read_predictions(path).predictions) == 1


@pytest.mark.parametrize(
    "content", ["one line without an end", "notes\nof somebody\n", '{"format": "other"}\n', "[]\n", "\n"]
)
def test_a_file_of_another_kind_is_left_as_it_is(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    expected = (
        f"{path}:1: expected the header of a predictions file, got {content.splitlines()[0]!r}. "
        "Give the path of a predictions file, or of one that does not exist yet."
    )
    assert message_of(PredictionStore, path, SETTINGS) == expected
    assert message_of(read_predictions, path) == expected
    assert path.read_text() == content


def test_a_header_without_its_line_end_is_not_taken_for_a_torn_line(path: Path) -> None:
    PredictionStore(path, SETTINGS).close()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert "expected the header of a predictions file" in message_of(PredictionStore, path, SETTINGS)


def damage(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (1, '"format_version": 1', '"format_version": 9', "expected format_version 1, got 9. "
         "Read the file with the LMM4Edit version that wrote it, or begin a new one."),
        (1, '"abc"', '"abd"', "the settings do not have their fingerprint: the header was edited. Restore it."),
        (1, '"settings"', '"setting"', "the header lacks 'settings'. "
         "Give the path of a predictions file, or of one that does not exist yet."),
        (2, '"value": 0.5}', '"val', "expected one JSON object on the line, "
         'got \'{"item_id": "1", "predictor": "ssim", "target": "score", ...\': '
         "Unterminated string starting at: line 1 column 58 (char 57). "
         "Only the last line can be torn by an interruption, so the file was changed or the disk damaged it: "
         "restore the file, or delete this line to compute its prediction again."),
        (2, '"value": 0.5', '"value": NaN',
         "expected a finite number, got nan. Store None, and the reason as failure."),
        (2, '"value": 0.5', '"value": null', "Prediction '1' of 'ssim' for 'score': exactly one of value and failure "
         "must be given, got value=None and failure=None."),
        (2, '"target"', '"targets"', "expected the keys of a prediction, got no target, unknown targets."),
        (2, '"item_id": "1"', '"item_id": "2"', ""),
    ],
)  # fmt: skip
def test_damage_elsewhere_is_named_by_line(path: Path, line: int, old: str, new: str, message: str) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1"), number("2")])
    damage(path, line, old, new)
    found = message_of(read_predictions, path)
    if message:
        assert found == f"{path}:{line}: {message}"
    else:
        assert found == (
            f"{path}:3: expected one prediction for each key, got a second one for item '2', predictor 'ssim', "
            "target 'score'. Two files were joined, or the file was edited: remove one of the lines."
        )


def test_a_file_that_is_not_there(path: Path) -> None:
    assert message_of(read_predictions, path) == (
        f"{path}: expected a predictions file, but it cannot be read: No such file or directory."
    )


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "predictions.jsonl"
    assert message_of(PredictionStore, path, SETTINGS) == (
        f"{path}: cannot be opened for writing: File exists. Check the folder."
    )


def test_a_full_disk_leaves_the_file_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1")])
        before = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            message = message_of(store.append, [number("2")])
        assert message == (
            f"{path}: 71 bytes could not be written: No space left on device. "
            "What was stored before is intact: make room, and run the same command again."
        )
        assert path.read_bytes() == before
        store.append([number("2")])
    assert len(read_predictions(path).predictions) == 2


def test_reading_while_another_process_writes(path: Path) -> None:
    with PredictionStore(path, SETTINGS) as store:
        store.append([number("1")])
        assert len(read_predictions(path).predictions) == 1
        store.append([number("2")])


# --- several processes, and kill -9 --------------------------------------------------------------------------------

WRITER = """
import sys, time
from lmm4edit.predictions.store import PredictionStore
from lmm4edit.records import Prediction

path, settings, start, pause = sys.argv[1], {"manifest": "abc"}, int(sys.argv[2]), float(sys.argv[3])
with PredictionStore(path, settings) as store:
    done = {key.item_id for key in store.done_keys()}
    print("open", flush=True)
    for number in range(start, start + 100_000):
        if str(number) not in done:
            store.append([Prediction(str(number), "p", target, float(number)) for target in "abc"])
            print(number, flush=True)
            time.sleep(pause)
"""


def writer(path: Path, start: int = 0, pause: float = 0.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(start), str(pause)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    return output


def test_a_second_process_is_refused_and_told_who_writes(path: Path) -> None:
    first = writer(path, pause=0.05)
    try:
        assert first.stdout is not None and first.stdout.readline() == "open\n"
        message = message_of(PredictionStore, path, {"manifest": "abc"})
        assert message.startswith(
            f"{path}: expected to be the only process that writes to it, but it is in use by process {first.pid} on "
        )
        assert message.endswith(" UTC. Wait for it, or write to another file.")
        second = writer(path)
        _, error = second.communicate()
        assert second.returncode == 1
        assert f"in use by process {first.pid} on " in error
    finally:
        kill(first)
    with PredictionStore(path, {"manifest": "abc"}):
        pass
    assert sorted(os.listdir(path.parent)) == ["predictions.jsonl"], "no lock or temporary file is left behind"


def test_a_second_store_of_the_same_process_is_refused(path: Path) -> None:
    with PredictionStore(path, SETTINGS):
        assert message_of(PredictionStore, path, SETTINGS) == (
            f"{path}: expected to be the only process that writes to it, but it is in use by process {os.getpid()}, "
            "which is this one. Wait for it, or write to another file."
        )
    PredictionStore(path, SETTINGS).close()


def test_kill_9_loses_nothing_that_was_stored_and_frees_the_lock(path: Path) -> None:
    for round_number in range(5):
        process = writer(path)
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        time.sleep(0.03 * round_number)
        told = [int(line) for line in kill(process).split()]
        stored = [int(p.item_id) for p in read_predictions(path).predictions if p.target == "c"]
        assert set(told) <= set(stored)
        assert stored == list(range(len(stored))), "each once, in order"
    with PredictionStore(path, {"manifest": "abc"}) as store:
        assert len(store.done_keys()) == len(read_predictions(path).predictions) > 0
    assert len(read_predictions(path).header.continued) == 5


def _append_in_fork(store: PredictionStore, queue) -> None:  # type: ignore[no-untyped-def]
    try:
        store.append([number("2")])
    except StoreError as error:
        queue.put(str(error))
    store.close()


def test_a_fork_may_not_write_and_does_not_free_the_lock(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with PredictionStore(path, SETTINGS) as store:
        child = context.Process(target=_append_in_fork, args=(store, queue))
        child.start()
        message = queue.get(timeout=30)
        child.join()
        assert message == (
            f"{path}: expected to be written by process {os.getpid()}, which opened it, got a batch from its fork "
            f"{child.pid}. Send predictions to the process that opened the file."
        )
        store.append([number("1")])
        refused = subprocess.run(
            [sys.executable, "-c", WRITER, str(path), "0", "0"], capture_output=True, text=True, check=False
        )
        assert f"in use by process {os.getpid()} on " in refused.stderr
