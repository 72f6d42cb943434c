"""A grid of trainings from beginning to end on a random backbone, and everything that can be wrong with one."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from lmm4edit.cli import app
from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.process_lock import ProcessLock
from lmm4edit.training.ablation.grid import load_grid
from lmm4edit.training.ablation.outcome import read_outcome
from lmm4edit.training.steps import Stepper

Make = Callable[..., TrainConfig]


def write_grid(folder: Path, run_config: Make, edits: Path, **changes: Any) -> Path:
    """Two rows over two seeds of four steps a stage; base configurations beside the grid."""
    folder.mkdir(exist_ok=True)
    for stage in (1, 2):
        start = {"init_from": "later"} if stage == 2 else {}
        values = run_config(folder / "unused", stage, adapter__dropout=0.0, max_steps=4, **start).model_dump(
            mode="json"
        )
        (folder / f"stage{stage}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    grid: dict[str, Any] = {
        "out": str(folder / "out"),
        "stage1": str(folder / "stage1.yaml"),
        "stage2": str(folder / "stage2.yaml"),
        "benchmark": {"manifest": str(edits / "test.jsonl"), "name": "micro"},
        "seeds": [0, 1],
        "rows": [
            {"name": "whole", "label": "vision, LLM and projector", "paper_row": 4},
            {"name": "vision", "paper_row": 1, "both": {"adapter": {"llm": False}, "adapter.projector": False}},
        ],
    }
    grid.update(changes)
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(grid), encoding="utf-8")
    return path


def ablate(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["ablate", "--config", str(path), *options], env={"COLUMNS": "250", "NO_COLOR": "1"})


def table(path: Path) -> list[dict[str, str]]:
    with (path.parent / "out" / "table.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_config: Make, edits: Path) -> tuple[Path, Result]:
    path = write_grid(tmp_path_factory.mktemp("ablation") / "grid", run_config, edits)
    return path, ablate(path)


@pytest.mark.slow
def test_a_grid_runs_to_its_table(finished: tuple[Path, Result]) -> None:
    path, result = finished
    assert result.exit_code == 0, result.output
    out = path.parent / "out"
    outcomes = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(o["row"], o["seed"], o["status"]) for o in outcomes] == [
        ("whole", 0, "done"), ("whole", 1, "done"), ("vision", 0, "done"), ("vision", 1, "done"),
    ]  # fmt: skip
    for outcome in outcomes:
        assert outcome["measured"]["quality"]["srcc"]["n_scored"] == 6
        assert outcome["settings"]["stage2"]["seed"] == outcome["seed"]
        assert sorted(outcome["seconds"]) == ["evaluation", "stage1", "stage2"]
        assert outcome["provenance"]["packages"]["torch"]
    rows = table(path)
    assert len(rows) == 2 * 2 + 6  # ours and the paper's, then the paper's that the grid lacks
    assert (rows[0]["source"], rows[0]["projector"], rows[0]["llm"], rows[0]["n_seeds"]) == ("ours", "✓", "✓", "2")
    assert (rows[2]["projector"], rows[2]["vision"], rows[2]["llm"]) == ("", "✓", "")
    values = [o["measured"]["quality"]["srcc"]["value"] for o in outcomes[:2]]
    assert float(rows[0]["quality_srcc"]) == pytest.approx(sum(values) / 2)
    assert float(rows[0]["quality_srcc_low"]) <= sum(values) / 2 <= float(rows[0]["quality_srcc_high"])
    assert (rows[1]["quality_srcc"], rows[1]["qa_accuracy"]) == ("0.9136", "0.878")
    assert rows[-1]["missing"] == "ours: not among these rows"
    markdown = (out / "table.md").read_text(encoding="utf-8")
    assert "| Table 6, row 4 | paper |" in markdown and "Student's t" in markdown and "Grid: " in markdown
    assert (out / "whole/seed-0/stage2/ranks.png").exists()
    assert "mean 4 -> 2 (AdaLoRA)" in (out / "whole/seed-0/log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_finished_grid_trains_nothing_again(finished: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = finished
    before = (path.parent / "out" / "table.csv").read_bytes()
    monkeypatch.setattr(Stepper, "take", None)
    result = ablate(path)
    assert result.exit_code == 0, result.output
    assert result.output.count("done before; SRCC quality") == 4
    assert (path.parent / "out" / "table.csv").read_bytes() == before


@pytest.mark.slow
def test_an_interrupted_grid_goes_on_and_ends_alike(
    finished: tuple[Path, Result], tmp_path: Path, run_config: Make, edits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_grid(
        tmp_path / "grid", run_config, edits, both={"checkpoint.save_every_steps": 1}
    )  # harmless: decides nothing that is learnt
    original, calls = Stepper.take, [0]

    def take(self: Stepper, window: Any, number: int) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raise KeyboardInterrupt
        return original(self, window, number)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "take", take)
        result = ablate(path, "--only", "whole", "--seeds", "0")
    assert result.exit_code == 130 and "Interrupted. The same command continues." in result.output
    assert not (tmp_path / "grid/out/whole/seed-0/result.json").exists()
    result = ablate(path, "--only", "whole", "--seeds", "0")
    assert result.exit_code == 0, result.output
    log = (tmp_path / "grid/out/whole/seed-0/log.txt").read_text(encoding="utf-8")
    assert "this run is finished" in log and "Continuing after step 2" in log
    one, two = (read_outcome(p / "out/whole/seed-0") for p in (finished[0].parent, tmp_path / "grid"))
    assert one is not None and two is not None and one.measured == two.measured
    rows = table(path)
    assert rows[0]["n_seeds"] == "1" and rows[0]["quality_srcc"]
    vision = next(row for row in rows if row["row"] == "vision")
    assert (vision["quality_srcc"], vision["missing"]) == ("", "seed 0: not run yet")


@pytest.mark.slow
def test_a_row_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path, run_config: Make, edits: Path) -> None:
    rows = [
        {"name": "broken", "paper_row": 6, "both": {"backbone.name_or_path": str(tmp_path / "none")}},
        {"name": "lora", "both": {"adapter.kind": "lora"}},
    ]
    path = write_grid(tmp_path / "grid", run_config, edits, rows=rows, seeds=[0])
    result = ablate(path)
    assert result.exit_code == 1
    assert "broken, seed 0: failed: Backbone" in result.output and "lora, seed 0: done in" in result.output
    assert "1 of 2 runs failed:" in result.output and "The same command tries them again." in result.output
    broken, paper, lora = table(path)[:3]
    assert (broken["quality_srcc"], broken["n_seeds"]) == ("", "0")
    assert broken["missing"].startswith("seed 0: Backbone '")
    assert paper["quality_srcc"] == "0.8836" and lora["adapter"] == "LoRA" and lora["quality_srcc"]
    # Another process at work is left alone, and is no failure.
    folder = tmp_path / "grid/out/broken/seed-0"
    held = ProcessLock(folder / "run")
    try:
        again = ablate(path)
    finally:
        held.release()
    assert again.exit_code == 0 and "broken, seed 0: another process is at it; left to that one" in again.output


def test_a_dry_run_shows_every_run_and_trains_nothing(tmp_path: Path, run_config: Make, edits: Path) -> None:
    path = write_grid(tmp_path / "grid", run_config, edits)
    result = ablate(path, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "grid/out").exists()
    for name in ("whole", "vision"):
        for seed in (0, 1):
            assert f"{name}, seed {seed} (to do): {tmp_path}" in result.output
    assert result.output.count("mean 4 -> 2 (AdaLoRA)") == 2
    assert result.output.count("kept from the starting judge (adapter.ranks: continue)") == 2
    assert "4 runs in 2 rows; nothing was trained." in result.output


def test_a_dry_run_without_data_says_what_is_missing(tmp_path: Path, run_config: Make, edits: Path) -> None:
    path = write_grid(tmp_path / "grid", run_config, edits, both={"data.train": str(tmp_path / "none.jsonl")})
    result = ablate(path, "--dry-run", "--seeds", "3")
    assert result.exit_code == 0
    assert result.output.count(": no plan here: ") == 4 and "none.jsonl" in result.output
    result = ablate(path)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        f"{path}: expected these manifests, which are not there: {tmp_path / 'none.jsonl'}. Make them (for the mini "
        "benchmark: lmm4edit data minibench), or run from the folder that their paths start in."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "visoin"], "{path}: there is no row 'visoin'. Did you mean 'vision'?"),
        (["--seeds", "0,x"], "--seeds: expected whole numbers with commas between, such as 0,1,2, got '0,x'."),
    ],
)
def test_wrong_options(tmp_path: Path, run_config: Make, edits: Path, options: list[str], message: str) -> None:
    path = write_grid(tmp_path / "grid", run_config, edits)
    result = ablate(path, *options)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == message.format(path=path)


def test_a_folder_of_another_grid_is_refused_with_its_keys(
    tmp_path: Path, run_config: Make, edits: Path, write_rows: Any, rows: Any
) -> None:
    from lmm4edit.training.ablation.grid import keep_grid

    train = write_rows(tmp_path / "train.jsonl", rows)
    path = write_grid(tmp_path / "grid", run_config, edits, both={"data.train": str(train)})
    grid = load_grid(path)
    keep_grid(grid)
    keep_grid(grid)
    more = [
        {"name": "whole", "stage2": {"optimizer.learning_rate": 2e-2}},
        {"name": "new", "both": {"data.num_workers": 1}},
    ]
    write_grid(tmp_path / "grid", run_config, edits, both={"data.train": str(train)}, rows=more, seeds=[5])
    write_rows(train, rows[:8])
    with pytest.raises(ConfigError) as error:
        keep_grid(load_grid(path))
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path / 'grid/out'} holds another ablation than {path}:"
    assert lines[1:3] == [
        "  rows.whole.stage2.optimizer.learning_rate: 0.01 there, 0.02 now",
        "  rows.vision: there, but not in the grid now",
    ]
    assert lines[3].startswith(f"  {train}: its content was sha256 ")
    assert lines[4] == "Put the values back, choose another folder (--out), or remove this one."


def test_new_rows_seeds_and_harmless_settings_may_join(tmp_path: Path, run_config: Make, edits: Path) -> None:
    from lmm4edit.training.ablation.grid import keep_grid

    path = write_grid(tmp_path / "grid", run_config, edits)
    keep_grid(load_grid(path))
    both = {"checkpoint.save_every_steps": 3}
    whole = {"name": "whole", "both": both}
    vision = {"name": "vision", "both": {**both, "adapter.llm": False, "adapter.projector": False}}
    rows = [whole, {"name": "lora", "both": {"adapter.kind": "lora"}}, vision]
    write_grid(tmp_path / "grid", run_config, edits, rows=rows, seeds=[7])
    keep_grid(load_grid(path))
    content = json.loads((tmp_path / "grid/out/grid.json").read_text())
    assert list(content["rows"]) == ["whole", "lora", "vision"]


def test_rows_with_the_same_stage_1_train_it_once(tmp_path: Path, run_config: Make, edits: Path) -> None:
    rows = [
        {"name": "one"},
        {"name": "lora", "both": {"adapter.kind": "lora"}},
        {"name": "anew", "stage2": {"adapter.ranks": "reallocate"}},
    ]
    path = write_grid(tmp_path / "grid", run_config, edits, rows=rows)
    runs = load_grid(path).runs(only=["anew", "lora"])
    out = tmp_path / "grid/out"
    assert [(r.row.name, r.seed, r.stage1_of) for r in runs] == [
        ("lora", 0, out / "lora/seed-0"),
        ("anew", 0, out / "one/seed-0"),
        ("lora", 1, out / "lora/seed-1"),
        ("anew", 1, out / "one/seed-1"),
    ]
    assert runs[1].stage1.run_dir == str(out / "one/seed-0/stage1") and runs[1].stage1.seed == 0
    assert runs[1].stage2.init_from == str(out / "one/seed-0/stage1/checkpoint")
    assert runs[3].stage2.run_dir == str(out / "anew/seed-1/stage2") and runs[3].stage2.seed == 1


def test_all_problems_of_a_grid_are_named(tmp_path: Path, run_config: Make, edits: Path) -> None:
    rows = [{"name": "A b", "colour": 1}, {"name": "b", "paper_row": 9}]
    path = write_grid(tmp_path / "grid", run_config, edits, rows=rows, seeds=[])
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    assert str(error.value) == (
        f"{path}: 4 problems in the configuration:\n"
        "  seeds: expected List should have at least 1 item after validation, not 0, got [].\n"
        "  rows.0.name: expected lower-case letters, digits, - and _, got 'A b': it names a folder.\n"
        "  rows.0.colour: unknown key. Known: name, label, paper_row, both, stage1, stage2.\n"
        "  rows.1.paper_row: expected less than or equal to 8, got 9."
    )


def test_problems_of_rows_are_named_together_with_their_configuration(
    tmp_path: Path, run_config: Make, edits: Path
) -> None:
    rows = [{"name": "a", "both": {"adapter.knid": "lora"}}, {"name": "b", "stage2": {"epochs": "x"}}]
    path = write_grid(tmp_path / "grid", run_config, edits, rows=rows)
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    folder = tmp_path / "grid"
    assert str(error.value) == "\n".join(
        f"{path}: row {row}, stage {stage} (from {folder / f'stage{stage}.yaml'}): 1 problem in the configuration:\n"
        f"  {problem}"
        for row, stage, problem in [
            ("a", 1, "adapter.knid: unknown key. Did you mean 'kind'?"),
            ("a", 2, "adapter.knid: unknown key. Did you mean 'kind'?"),
            ("b", 2, "epochs: expected a valid integer, got 'x'."),
        ]
    )


def test_a_benchmark_that_is_trained_on_is_refused(tmp_path: Path, run_config: Make, edits: Path) -> None:
    path = write_grid(tmp_path / "grid", run_config, edits, benchmark={"manifest": str(edits / "train.jsonl")})
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    assert str(error.value).splitlines()[0] == (
        f"{path}: benchmark.manifest: row whole trains on {edits / 'train.jsonl'} itself (stage 1). Give edits of "
        "other sources."
    )


def test_a_launch_of_several_processes_is_refused(
    tmp_path: Path, run_config: Make, edits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = ablate(write_grid(tmp_path / "grid", run_config, edits))
    assert str(result.exception).startswith("ablate: expected one process, got a launch of several.")


def test_what_the_grid_sets_itself_cannot_be_changed_by_a_row(tmp_path: Path, run_config: Make, edits: Path) -> None:
    rows = [{"name": "a", "stage2": {"init_from": "x"}}, {"name": "a", "both": {"seed": 3}}]
    path = write_grid(tmp_path / "grid", run_config, edits, rows=rows)
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    assert str(error.value) == (
        f"{path}: 3 problems in the configuration:\n"
        "  rows: each name may stand once, repeated: a.\n"
        "  rows.0.stage2.init_from: the grid sets it itself for every run. Leave it out.\n"
        "  rows.1.both.seed: the grid sets it itself for every run. Leave it out."
    )
