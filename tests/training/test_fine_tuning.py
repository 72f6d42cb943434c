"""A judge trained further: with its own settings, on other dimensions, and compared with what it was."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.training.before_after import compare, render
from lmm4edit.training.command import run_from_command_line
from lmm4edit.training.fine_tuning import fine_tuning_config
from lmm4edit.training.loop import run
from lmm4edit.training.tracking import read_metrics

Make = Callable[..., TrainConfig]
QUIET = Console(quiet=True)
SHARPNESS = {"name": "sharpness", "question": "Rate the sharpness."}


def options(edits: Path, folder: Path, **more: str) -> list[str]:
    values = {"data.train": str(edits / "train.jsonl"), "run_dir": str(folder), **more}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def test_it_takes_the_judges_settings_and_none_of_its_data(stage2: Path, edits: Path, tmp_path: Path) -> None:
    judge = stage2 / "checkpoint"
    config = fine_tuning_config(judge, options(edits, tmp_path / "run", **{"data.validation": "v.jsonl"}))
    assert (config.stage, config.init_from, config.adapter.init_r) == (2, str(judge), 4)
    assert config.data.validation == "v.jsonl" and config.validation.every_epochs == 1
    assert Path(config.backbone.name_or_path).is_dir() and config.prompts is None
    assert fine_tuning_config(judge, [*options(edits, tmp_path / "run"), "epochs=7"]).epochs == 7


def test_what_is_no_judge_with_a_head_is_refused(stage1: Path, edits: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a judge from stage 2, got stage 1.*--config"):
        fine_tuning_config(stage1 / "checkpoint", options(edits, tmp_path / "run"))
    with pytest.raises(ConfigError, match="expected the folder of a trained judge"):
        fine_tuning_config(tmp_path / "nowhere", options(edits, tmp_path / "run"))


def test_the_launcher_needs_no_configuration_for_it(
    stage2: Path, edits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--init-from", str(stage2 / "checkpoint"), "--run-dir", str(tmp_path / "run")]
    assert run_from_command_line(2, words) == 1
    assert "Expected --data: a run needs --config" in capsys.readouterr().err
    words += ["--data", str(edits / "train.jsonl"), "--validation", str(edits / "test.jsonl")]
    words += ["--retention", str(edits / "test.jsonl"), "epochs=1"]
    assert run_from_command_line(2, words) == 0
    out = capsys.readouterr().out
    assert "Before and after" in out and "old data" in out and "srcc quality" in out
    kinds = [(row["kind"], row["step"]) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == [
        *(("validation", 0), ("retention", 0), ("train", 1), ("train", 2), ("train", 3)),
        *(("validation", 3), ("retention", 3)),
    ]
    rows = json.loads((tmp_path / "run" / "finished.json").read_text())["before_after"]
    assert {row["data"] for row in rows} == {"validation", "retention"}
    before = next(row for row in rows if row["statistic"] == "rmse_quality" and row["data"] == "retention")
    assert before["n"] == 6 and before["before"] != before["after"]
    # Judged before step 1: the starting judge itself.
    expected = load_checkpoint(stage2 / "checkpoint").meta.has_head
    assert expected


def test_stage_1_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_from_command_line(1, ["--data", "x.jsonl"]) == 1
    assert "Expected --config" in capsys.readouterr().err


def test_an_interrupted_fine_tuning_still_knows_the_starting_judge(
    stage2: Path, edits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"data.validation": str(edits / "test.jsonl")}
    words = [*options(edits, tmp_path / "run", **more), "checkpoint.save_every_steps=1", "epochs=1"]
    config = fine_tuning_config(stage2 / "checkpoint", words)
    import lmm4edit.training.loop as loop

    class Killed(Exception):
        pass

    take, calls = loop.Stepper.take, []

    def take_two(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return take(self, *arguments)

    monkeypatch.setattr(loop.Stepper, "take", take_two)
    with pytest.raises(Killed):
        run(config, console=QUIET)
    monkeypatch.setattr(loop.Stepper, "take", take)
    run(config, console=QUIET)
    rows = json.loads((tmp_path / "run" / "finished.json").read_text())["before_after"]
    assert rows and all(row["before"] is not None for row in rows if row["statistic"].startswith("rmse"))
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"]
    assert steps == [0, 3]


def test_other_dimensions_keep_what_the_head_can_do_and_add_what_it_cannot(
    stage2: Path,
    run_config: Make,
    edits: Path,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    rows: list[dict[str, Any]],
) -> None:
    start = stage2 / "checkpoint"
    mine = write_rows(
        tmp_path / "mine.jsonl", [{**row, "mos_sharpness": 10.0 + 5 * index} for index, row in enumerate(rows)]
    )
    config = run_config(
        tmp_path / "run",
        stage=2,
        init_from=str(start),
        data__train=str(mine),
        dimensions=["preservation", SHARPNESS, "quality"],
        optimizer__learning_rate=1e-12,
        max_steps=1,
    )
    seen = Console(record=True, quiet=False, file=io.StringIO(), width=200)
    run(config, console=seen)
    text = seen.export_text()
    assert "start from chance: sharpness" in text and "left out: alignment" in text
    old, new = load_checkpoint(start), load_checkpoint(tmp_path / "run" / "checkpoint")
    assert [d.name for d in new.meta.dimensions] == ["preservation", "sharpness", "quality"]
    before, after = old.model.score_head, new.model.score_head
    assert before is not None and after is not None
    assert old.model.target_scale is not None and new.model.target_scale is not None
    torch.testing.assert_close(after.first.weight, before.first.weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(after.second.weight[[0, 2]], before.second.weight[[2, 0]], atol=1e-6, rtol=0)
    assert new.model.target_scale.mean[2] == old.model.target_scale.mean[0]
    assert new.model.target_scale.mean[1] == pytest.approx(sum(10.0 + 5 * i for i in range(12)) / 12)


def test_a_dimension_of_the_same_name_and_another_question_is_refused(
    tmp_path: Path, run_config: Make, stage1: Path
) -> None:
    other = {"name": "quality", "question": "Rate something else."}
    start = str(stage1 / "checkpoint")
    with pytest.raises(ConfigError, match="dimensions: quality: defined otherwise than in the starting judge"):
        run(run_config(tmp_path / "a", stage=2, init_from=start, dimensions=[other]), console=QUIET)


def test_a_new_dimension_without_scores_is_named(tmp_path: Path, run_config: Make, stage2: Path) -> None:
    config = run_config(
        tmp_path / "a", stage=2, init_from=str(stage2 / "checkpoint"), dimensions=["quality", SHARPNESS]
    )
    with pytest.raises(ConfigError, match="'sharpness': expected at least two different training scores, got 0 scores"):
        run(config, console=QUIET)


def test_new_data_need_not_rate_all_that_the_judge_knows(
    tmp_path: Path,
    run_config: Make,
    stage1: Path,
    stage2: Path,
    write_rows: Callable[..., Path],
    rows: list[dict[str, Any]],
) -> None:
    some = [{key: value for key, value in row.items() if key != "mos_quality"} for row in rows]
    path = write_rows(tmp_path / "some.jsonl", some)
    changes = {"data__train": str(path), "max_steps": 1}
    seen = Console(record=True, file=io.StringIO(), width=200)
    run(run_config(tmp_path / "b", stage=2, init_from=str(stage2 / "checkpoint"), **changes), console=seen)
    assert "not rated in the training data, so its output is not trained: quality" in seen.export_text()
    # From the backbone, or from a judge without a head, there is nothing that could be kept.
    for start in ("backbone", str(stage1 / "checkpoint")):
        with pytest.raises(ConfigError, match="quality"):
            run(run_config(tmp_path / f"c{len(start)}", stage=2, init_from=start, **changes), console=QUIET)


def test_the_comparison_shows_signs_and_leaves_out_what_was_not_measured() -> None:
    rows = [
        {"kind": "validation", "step": 0, "srcc_a": 0.5, "n_a": 9, "rmse_a": 3.0, "accuracy": None, "n_answers": 0},
        {"kind": "train", "step": 4, "loss": 1.0},
        {"kind": "validation", "step": 4, "srcc_a": None, "n_a": 9, "rmse_a": 2.5, "accuracy": None, "n_answers": 0},
    ]
    found = compare(rows, 4)
    assert found[0] == {"data": "validation", "statistic": "srcc_a", "before": 0.5, "after": None, "n": 9}
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render(found))
    text = console.export_text()
    assert "undefined" in text and "-0.500" in text and "accuracy" not in text.split("\n", 3)[3]
    assert compare(rows[1:], 4) == []
