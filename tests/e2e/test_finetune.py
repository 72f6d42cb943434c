"""Fine-tuning the shipped judge on ratings of another kind, by the command of the tutorial."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


@pytest.mark.slow
def test_it_learns_the_new_ratings_and_says_what_it_lost_of_the_old(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "lmm4edit.cli", "data", "minibench", "--out", str(tmp_path / "old")]
    subprocess.run([*made, "--sources-per-task", "1"], check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    # People who mean something else by alignment: they rate what the others call preservation.
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / "old" / f"{name}.jsonl").read_text().splitlines()]
        mine = [{**row, "mos_alignment": row["mos_preservation"]} for row in rows]
        (tmp_path / "old" / f"mine_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
    words = [sys.executable, "train/stage2.py", "--init-from", "checkpoints/tiny/judge"]
    words += ["--data", str(tmp_path / "old" / "mine_train.jsonl")]
    words += ["--validation", str(tmp_path / "old" / "mine_test.jsonl")]
    words += ["--retention", str(tmp_path / "old" / "test.jsonl"), "--run-dir", str(tmp_path / "run"), "epochs=4"]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Before and after" in done.stdout
    rows = json.loads((tmp_path / "run" / "finished.json").read_text())["before_after"]
    found = {(row["data"], row["statistic"]): row for row in rows}
    new, old = found["validation", "srcc_alignment"], found["retention", "srcc_alignment"]
    assert new["n"] == old["n"] == 294
    # It measured .3 to .8 on the new kind and .85 to .3 on the old when this was written; half of either must remain.
    assert new["after"] > new["before"] + 0.2
    assert old["after"] < old["before"] - 0.1
    # What the new ratings leave alone stays.
    assert found["retention", "srcc_quality"]["after"] > found["retention", "srcc_quality"]["before"] - 0.1


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    commands = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(commands) == 4
    for name in ("train", "configs", "checkpoints"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = [sys.executable, "-m", "lmm4edit.cli", "data", "minibench", "--out", "data/old", "--sources-per-task", "1"]
    subprocess.run(made, check=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True)
    _write_ratings(tmp_path)
    (tmp_path / "mapping.yaml").write_text(re.search(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env={**ENVIRONMENT, "PATH": path, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-2000:]
    scores = (tmp_path / "runs" / "realism" / "scores.csv").read_text().splitlines()
    assert "realism" in scores[0].split(",")
    rows = json.loads((tmp_path / "runs" / "mine" / "finished.json").read_text())["before_after"]
    assert {row["data"] for row in rows} == {"validation", "retention"}
    assert (tmp_path / "runs" / "mine-eval" / "report" / "report.html").exists()


def _write_ratings(folder: Path) -> None:
    """``ratings.csv`` as the tutorial shows it, from a small mini benchmark."""
    rows = [json.loads(line) for line in (folder / "data" / "old" / "train.jsonl").read_text().splitlines()]
    with (folder / "ratings.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "photo", "before", "after", "prompt", "editor", "fits", "keeps", "realism"])
        for row in rows:
            before, after = (f"data/old/{row[key]}" for key in ("source_image", "edited_image"))
            scores = [f"{1 + 4 * row[f'mos_{key}'] / 100:.3f}" for key in ("alignment", "preservation", "quality")]
            names = [row["sample_id"], row["source_id"], before, after, row["instruction"], row["editing_model"]]
            table.writerow([*names, *scores])
