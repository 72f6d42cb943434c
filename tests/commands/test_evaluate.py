"""``lmm4edit evaluate`` and ``lmm4edit report`` as a user runs them, with the pixel metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter
from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.data.manifest import write_manifest
from lmm4edit.errors import ScorerError, StoreError
from lmm4edit.records import EditSample


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    edits = []
    for source in range(6):
        image = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize(
            (64, 64), Image.Resampling.BICUBIC
        )
        image.save(tmp_path / f"s{source}.png")
        for strength in range(1, 5):
            name = f"s{source}_e{strength}"
            image.filter(ImageFilter.GaussianBlur(strength)).save(tmp_path / f"{name}.png")
            edits.append(
                EditSample(
                    name,
                    f"s{source}",
                    str(tmp_path / f"s{source}.png"),
                    str(tmp_path / f"{name}.png"),
                    "blur it",
                    edit_task="blur",
                    editing_model=f"m{strength}",
                    mos={"preservation": 80 - 15 * strength + float(rng.normal(0, 3))},
                )
            )
    (tmp_path / "s5_e4.png").write_bytes(b"not an image")
    path = tmp_path / "edits.jsonl"
    write_manifest(path, edits, relative_to=tmp_path)
    return path


def test_evaluate_then_report(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        "evaluate",
        "--manifest",
        str(manifest),
        "--scorers",
        "mse, psnr,ssim",
        "--out",
        str(out),
        "--resamples",
        "200",
    ]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert "23 of 24" in done.output
    assert "warning: mse: 1 of 24 edits have no preservation prediction" in done.output
    metrics = json.loads((out / "metrics.json").read_text())
    rows = {(r["predictor"], r["statistic"]): r for r in metrics["rows"] if r["group"] == "all"}
    assert rows["psnr", "srcc"]["value"] > 0.8
    assert rows["mse", "srcc"]["value"] == rows["psnr", "srcc"]["value"]
    assert (rows["ssim", "srcc"]["n_scored"], rows["ssim", "srcc"]["n_expected"]) == (23, 24)
    assert metrics["benchmark"] == "edits"
    assert "s5_e4.png" in metrics["failures"][0]["reason"]
    stored = (out / "predictions.jsonl").read_text().count('"item_id"')
    assert stored == 72
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert (out / "predictions.jsonl").read_text().count('"item_id"') == stored
    done = CliRunner().invoke(app, ["report", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert str(out / "report" / "report.html") in done.output
    assert (out / "report" / "report.html").stat().st_size > 20_000


def test_an_unknown_scorer_stops_before_anything_is_written(manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["evaluate", "--manifest", str(manifest), "--scorers", "pnsr", "--out", str(out)]
    with pytest.raises(ScorerError, match="Unknown scorer 'pnsr'. Did you mean 'psnr'?"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not (out / "predictions.jsonl").exists()


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_help_has_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert f"lmm4edit {command}" in " ".join(done.output.split())


def evaluate(manifest: Path, out: Path, *more: str, scorers: str = "mse"):
    words = ["evaluate", "--manifest", str(manifest), "--scorers", scorers, "--out", str(out), "--resamples", "0"]
    return CliRunner().invoke(app, [*words, *more])


def test_what_has_no_value_is_said_with_its_reason(manifest: Path, tmp_path: Path) -> None:
    for image in tmp_path.glob("s0_e*.png"):
        image.write_bytes(b"no image")
    done = evaluate(manifest, tmp_path / "some")
    assert done.exit_code == 0
    assert re.search(r"mse: 5 of 24 values are missing, the first because of s0_e\d: ", done.output), done.output[-600:]
    for image in tmp_path.glob("s*.png"):
        image.write_bytes(b"no image")
    assert evaluate(manifest, tmp_path / "none").exit_code == 3


def test_edits_without_ratings_make_no_report_and_say_so(manifest: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    bare = [{k: v for k, v in row.items() if not k.startswith("mos_") and k != "answer"} for row in rows]
    path = manifest.with_name("bare.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in bare))
    assert evaluate(path, tmp_path / "run").exit_code == 0
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert isinstance(done.exception, StoreError)
    assert "expected edits with ratings or answers to compare with, got none" in str(done.exception)


def test_pictures_replaced_between_two_calls_are_noticed(manifest: Path, tmp_path: Path) -> None:
    evaluate(manifest, tmp_path / "run")
    Image.new("RGB", (64, 64)).save(tmp_path / "s0_e1.png")
    again = evaluate(manifest, tmp_path / "run")
    assert isinstance(again.exception, StoreError) and "have changed since they were scored: s0_e1" in str(
        again.exception
    )


def test_bad_places_are_named(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, words in [(tmp_path / "file", ()), (tmp_path / "file" / "run", ())]:
        assert "expected a folder to write into" in str(evaluate(manifest, out, *words).exception)
    missing = evaluate(manifest, tmp_path / "run", "--training", str(tmp_path / "nowhere"))
    assert "nowhere: expected the folder of a training run" in str(missing.exception)


def test_markdown_of_a_report_holds_no_html_or_links_of_others(manifest: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    for row in rows:
        row["editing_model"] = "<script>alert(1)</script>"
        row["instruction"] = "[click](javascript:alert(1)) <img src=x onerror=alert(1)>"
    path = manifest.with_name("hostile.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(path, tmp_path / "run", "--name", "<b>bold</b>")
    CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    text = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "<script" not in text and "<b>" not in text and "<img" not in text and "[click]" not in text
    assert "&lt;b&gt;bold" in text
