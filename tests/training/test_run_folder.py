"""A run folder is begun, continued or left alone, never mixed up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmm4edit.config import load_config
from lmm4edit.errors import ConfigError
from lmm4edit.training.run_folder import RunFolder, RunStatus, lock_folder, write_atomically


def test_the_life_of_a_run(tmp_path: Path, make_config: Any) -> None:
    folder, config = RunFolder(tmp_path / "run"), make_config()
    assert folder.open(config) is RunStatus.NEW
    assert load_config(folder.config) == config
    assert folder.open(config) is RunStatus.INTERRUPTED
    folder.states.mkdir()
    folder.finish({"steps": 3})
    assert folder.read_summary() == {"steps": 3}
    assert not folder.states.exists()
    assert folder.open(config) is RunStatus.FINISHED


def test_a_changed_configuration_is_refused_with_its_keys(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.open(make_config())
    folder.metrics.write_text("")
    changed = make_config(epochs=2, adapter__dropout=0.5, data__num_workers=3, wandb__enabled=True)
    with pytest.raises(ConfigError) as error:
        folder.open(changed)
    assert str(error.value) == (
        f"{tmp_path} holds an interrupted run with another configuration:\n"
        "  epochs: 1 there, 2 now\n"
        "  adapter.dropout: 0.0 there, 0.5 now\n"
        "Put the values back, choose another run_dir, add --accept-changes to continue with the new ones, or --restart "
        "to begin anew."
    )
    assert folder.open(changed, accept_changes=True) is RunStatus.INTERRUPTED
    assert load_config(folder.config) == changed


def test_a_run_that_was_refused_before_its_first_step_binds_nobody(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.open(make_config(init_from="gone"))
    corrected = make_config(init_from="there")
    assert folder.open(corrected) is RunStatus.INTERRUPTED
    assert load_config(folder.config) == corrected


def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path: Path, make_config: Any) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=f"{path}: expected a folder to write into, got: "):
            lock_folder(RunFolder(path))
        with pytest.raises(ConfigError, match=f"{path}: expected a folder to write into, got: "):
            RunFolder(path).open(make_config())


def test_what_is_watched_or_kept_may_change(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.open(make_config())
    assert folder.open(make_config(wandb__enabled=True, checkpoint__keep_last=5, log_every_steps=9)) is (
        RunStatus.INTERRUPTED
    )


def test_a_finished_run_does_not_take_another_configuration_even_if_told_to(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.open(make_config())
    folder.finish({})
    with pytest.raises(ConfigError) as error:
        folder.open(make_config(seed=1), accept_changes=True)
    assert str(error.value) == (
        f"{tmp_path} holds a finished run with another configuration:\n"
        "  seed: 0 there, 1 now\n"
        "Choose another run_dir, or add --restart to train anew."
    )


def test_a_checkpoint_of_unknown_origin_is_not_overwritten(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoint.mkdir()
    with pytest.raises(ConfigError) as error:
        folder.open(make_config())
    assert str(error.value) == (
        f"{tmp_path}: expected an empty folder or a run's, but checkpoint lies there without a config.yaml. Choose "
        "another run_dir, or add --restart to remove it."
    )


def test_clearing_removes_what_a_run_wrote_and_nothing_else(tmp_path: Path, make_config: Any) -> None:
    folder = RunFolder(tmp_path)
    folder.open(make_config())
    for path in (folder.checkpoint, folder.states, folder.best):
        path.mkdir()
    folder.metrics.write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_commands_cannot_train_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lock = lock_folder(folder)
    with pytest.raises(
        ConfigError, match=r"run: training is going on in this folder \(process \d+.*\)\. Wait for it, or"
    ):
        lock_folder(folder)
    lock.release()
    lock_folder(folder).release()
    assert list(folder.path.iterdir()) == []


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, json.dumps({"a": 1}))
    write_atomically(path, json.dumps({"a": 2}))
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
