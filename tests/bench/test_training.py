"""The training benchmark runs, and refuses to compare what is not equal. Its speeds are no test's affair."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_bench():
    spec = importlib.util.spec_from_file_location("bench_training", ROOT / "bench" / "training.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_training"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_measures_both_stages_and_names_the_machine(tmp_path: Path) -> None:
    words = [sys.executable, "bench/training.py", "--quick", "--repeats", "1", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "times as fast" in done.stdout and "cores" in done.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert [result["stage"] for result in content["results"]] == [1, 2]
    for result in content["results"]:
        assert result["gradient_difference"] <= 1e-3
        assert result["loss_packed"] == pytest.approx(result["loss_separate"], rel=1e-5)
        assert set(result["peak_megabytes"]) == set(result["edits_per_second"]) == {"packed", "one question a row"}
        tensors = result["peak_tensor_megabytes"]
        assert tensors["packed"] < tensors["one question a row"]
        assert result["ratio"] > 0
    assert content["provenance"]["cpu_count"]


def test_unequal_gradients_are_not_compared() -> None:
    bench = load_bench()
    setup = bench.Setup(bench.SHAPES["quick"], 2, 2)
    assert bench.compare(setup)["gradient_difference"] <= 1e-3
    setup.batches["packed"].targets[0, 0] += 30.0
    with pytest.raises(AssertionError, match="losses differ"):
        bench.compare(setup)
