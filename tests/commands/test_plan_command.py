"""``lmm4edit plan`` as a user runs it: offline, without weights, and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.errors import ConfigError

ROOT = Path(__file__).parents[2]
STAGE_1 = str(ROOT / "configs" / "ebench18k" / "stage1.yaml")
WIDE = {"COLUMNS": "160", "NO_COLOR": "1"}
EDITS = 14_688


def plan(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--config", STAGE_1, *words], env=WIDE)
    assert result.exit_code == 0, (result.output, result.exception)
    return " ".join(result.output.split())


def plan_json(*words: str) -> dict[str, Any]:
    return json.loads(
        CliRunner().invoke(app, ["plan", "--config", STAGE_1, "--json", *words], env=WIDE).stdout,
    )


def test_the_papers_setting_fits_its_gpu_with_the_levers_of_our_configuration() -> None:
    text = plan("--gpu-memory", "40", "--edits", str(EDITS))
    assert "Fits: 19." in text and "of 40.00 GiB" in text and "Warning" not in text
    assert "3,672 (3,672 an epoch, 1.00 epochs)" in text
    assert "trained: projector │ 44,574,464" in text and "trained: language model │ 30,279,984 of 7,6" in text
    assert "Assumed: the published shape of Qwen2.5-VL 7B, for the files of Qwen/Qwen2.5-VL-7B-Instruct are not" in text
    assert "Assumed: 100 TFLOP/s in each process" in text and "Hours: " in text
    assert "with gradient checkpointing) ┃ without gradient checkpointing" in text


@pytest.mark.slow
def test_without_them_it_is_warned_of_and_told_what_to_do() -> None:
    # Batch 1 and accumulation 16, one question a row, all weights in float32: the paper's numbers, taken by the word.
    words = ["backbone.dtype=float32", "backbone.gradient_checkpointing=false", "batch.packed=false"]
    found = plan_json("--gpu-memory", "40", *words, "batch.gradient_accumulation=16")
    assert found["fits"] is False and found["plan"] is None and found["hours"] is None
    alone = found["levers"][:-1]
    together = found["levers"][-1]
    assert [entry["lever"]["overrides"][0] for entry in alone] == [
        "backbone.dtype=bfloat16",
        "backbone.gradient_checkpointing=true",
        "batch.packed=true",
        "backbone.max_pixels=112896",
        "distributed.strategy=fsdp2",
        "backbone.quantization=4bit",
    ]
    assert all(entry["memory"]["on_device"] < found["memory"]["on_device"] for entry in alone)
    assert together["memory"]["on_device"] < 40 * 2**30
    text = plan("--gpu-memory", "40", *words[:2])
    assert "Warning: this will not fit: " in text and "40.00 GiB given" in text
    assert "backbone.gradient_checkpointing=true" in text and "fits" in text


def test_processes_and_throughput_are_taken_into_account() -> None:
    one = plan_json("--edits", "4000", "--tflops", "200", "--image-size", "280x280")
    four = plan_json("--edits", "4000", "--tflops", "200", "--image-size", "280x280", "--processes", "4")
    assert four["plan"]["total_steps"] * 4 == one["plan"]["total_steps"]
    assert four["hours"] == pytest.approx(one["hours"] / 4)
    assert four["strategy"] == "DDP, 4 processes" and four["memory"]["gradients"] > one["memory"]["gradients"]
    per_edit = sum(one["flops"].values())
    assert one["hours"] == pytest.approx(4000 * per_edit / 200e12 / 3600)
    # 8.3e9 parameters see under 600 tokens, patches and tokens of a projector: between 4 and 6 operations each.
    assert one["patches"] == 2 * 20 * 20 and not any("TFLOP" in text for text in one["assumptions"])


def test_stage_2_and_a_backbone_whose_files_are_here(tmp_path: Path) -> None:
    tiny = str(ROOT / "checkpoints" / "tiny" / "backbone")
    words = [f"backbone.name_or_path={tiny}", "backbone.min_pixels=null", "backbone.max_pixels=null", "prompts=tiny"]
    found = plan_json("--gpu-memory", "2", "--levers", *words)
    assert not any("published shape" in text or "characters" in text for text in found["assumptions"])
    assert found["fits"] is True and found["levers"] and found["memory"]["peak"] < 2**27
    assert found["parameters"]["language model"][1] < 1_000_000


@pytest.mark.parametrize(
    "words, error",
    [
        (["backbone.name_or_path=someone/else"], "the configuration of someone/else is not on this machine"),
        (["--processes", "1", "distributed.strategy=fsdp2"], "this launch has one"),
        (["--image-size", "30x9000"], "The image size 30x9000 cannot be planned with"),
        (["backbone.nonsense=1"], "backbone.nonsense"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(words: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--config", STAGE_1, *words], env=WIDE)
    assert isinstance(result.exception, ConfigError) and error in str(result.exception)


def test_an_image_size_is_two_numbers() -> None:
    result = CliRunner().invoke(app, ["plan", "--config", STAGE_1, "--image-size", "big"], env=WIDE)
    assert result.exit_code == 2 and "expected WIDTHxHEIGHT in pixels" in result.output


@pytest.mark.parametrize("option", ["--gpu-memory", "--tflops"])
@pytest.mark.parametrize("number", ["inf", "nan"])
def test_what_is_no_amount_is_refused_at_once(option: str, number: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--config", STAGE_1, option, number], env=WIDE)
    assert result.exit_code == 2 and option in result.output


def test_help_and_mistakes_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from lmm4edit.cli import app\n"
        "for words in (['plan', '--help'], ['plan', '--config', 'none.yaml']):\n"
        "    try: app(words)\n"
        "    except BaseException: pass\n"
        "names = ('torch', 'transformers', 'numpy', 'peft')\n"
        "print([name for name in names if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
