"""``lmm4edit demo``, the real command, small: benchmark, both stages, evaluation, report; a second run adds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_demo_runs_end_to_end_and_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "lmm4edit.cli", "demo", "--out", str(out), "--sources-per-task", "1"]
    command += ["--set", "epochs=1", "--set", "num_threads=1", "--set", "validation.max_samples=8"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert "simulated" in first.stdout and "report.html" in first.stdout

    rows = json.loads((out / "evaluation" / "metrics.json").read_text(encoding="utf-8"))["rows"]
    keys = {
        "benchmark", "predictor", "target", "group", "statistic", "value", "low", "high", "n_expected", "n_scored",
    }  # fmt: skip
    assert rows and all(keys <= set(row) for row in rows)
    assert {row["predictor"].split(":")[0] for row in rows} == {"mse", "psnr", "ssim", "judge-text", "judge"}
    page = (out / "evaluation" / "report" / "report.html").read_text(encoding="utf-8")
    assert "Simulated ratings" in page and "http://" not in page.replace("http://www.w3.org", "")
    steps = {stage: (out / stage / "metrics.jsonl").read_text(encoding="utf-8") for stage in ("stage1", "stage2")}
    predictions = (out / "evaluation" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()

    _stages_differ(out)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert "already there" in again.stdout
    for stage, text in steps.items():
        assert (out / stage / "metrics.jsonl").read_text(encoding="utf-8") == text
    scored = [line for line in predictions if '"item_id"' in line]
    later = (out / "evaluation" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [line for line in later if '"item_id"' in line] == scored


def _stages_differ(out: Path) -> None:
    """Hidden states at the read-out: the bare backbone's, stage 1's and stage 2's are three different things."""
    import torch

    from lmm4edit.data.manifest import read_manifest
    from lmm4edit.inference.judge import load_judge
    from lmm4edit.judge.backbones import last_hidden_states, load_backbone
    from lmm4edit.judge.encoding import encode_example, process_images
    from lmm4edit.judge.packing import collate

    sample = read_manifest(out / "minibench" / "test.jsonl")[0]
    judges = [load_judge(out / stage / "checkpoint", device="cpu") for stage in ("stage1", "stage2")]
    bare, processor = load_backbone(str(ROOT / "checkpoints/tiny/backbone"))
    from PIL import Image

    images = process_images(processor, [Image.open(path) for path in (sample.source_image, sample.edited_image)])
    example = encode_example(processor, judges[0].prompts, sample.instruction, *images, judges[0].dimensions)
    batch = collate(
        [example],
        image_token_id=bare.config.image_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    with torch.inference_mode():
        states = [
            last_hidden_states(model, batch)[0, batch.readout_index[0]]
            for model in (bare.eval(), judges[0].model.backbone, judges[1].model.backbone)
        ]
    for one in range(3):
        for other in range(one):
            assert (states[one] - states[other]).abs().max() > 1e-2
