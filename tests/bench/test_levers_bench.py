"""The benchmark of the levers runs; its ratios of memory point the right way. Its speeds are no test's affair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_lever_is_measured(tmp_path: Path) -> None:
    words = [sys.executable, "bench/levers.py", "--quick", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "out.json").read_text())
    ratios = {result["lever"]: result["memory_ratio"] for result in content["results"]}
    saving = [key for key, ratio in ratios.items() if ratio < 1]
    assert saving == ["backbone.gradient_checkpointing=true", "backbone.dtype=bfloat16", "backbone.max_pixels: 9/16"]
    assert all(result["seconds_an_edit"]["median"] > 0 for result in content["results"])
    assert len(ratios) == 6 and ratios["batch.packed=false"] > 2
