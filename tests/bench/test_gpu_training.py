"""The GPU benchmark runs on the processor when it is told to, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/gpu_training.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)


def test_both_stages_run_at_a_small_shape_and_the_memory_is_as_predicted(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--device", "cpu", "--shape", "tiny", "--steps", "1", "--warm-up", "1", "--peak-tflops", "1"]
    done = bench(*words, "--json", str(out), "backbone.max_pixels=50176", "batch.gradient_accumulation=2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "edits/s" in done.stdout and "tokens/s" in done.stdout and "% of 1" in done.stdout
    content = json.loads(out.read_text())
    assert [result["stage"] for result in content["results"]] == [1, 2]
    for result in content["results"]:
        assert result["dtype"] == "bfloat16" and result["gradient_checkpointing"]
        assert len(result["losses"]) == 2 and all(loss > 0 for loss in result["losses"])
        assert result["edits_per_second"] > 0 and 0 < result["utilisation"] < 1
        assert result["hardware_tflops"] > result["tflops"]
        assert result["predicted_peak_bytes"] == pytest.approx(result["peak_bytes"], rel=0.08)


def test_without_a_gpu_it_says_so_and_does_not_take_the_processor() -> None:
    done = bench()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("Error: no GPU is at hand")
    assert "--device cpu --shape tiny" in done.stderr
