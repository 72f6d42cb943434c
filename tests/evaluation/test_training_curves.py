"""The training page: every series that was logged is drawn, and a few predictions are shown."""

from __future__ import annotations

import json
from pathlib import Path

from lmm4edit.evaluation.training_curves import read_curves, samples_table, training_figure


def write_log(folder: Path, steps: int = 12) -> Path:
    folder.mkdir()
    rows = []
    for step in range(1, steps + 1):
        rows.append(
            {
                "kind": "train",
                "step": step,
                "loss": 2.0 / step,
                "text_loss": None,
                "score_loss": 2.0 / step,
                "orthogonality": 0.1,
                "learning_rate": 1e-3 / step,
                "grad_norm": 1.0,
                "ranks_kept": 100 - step,
                "edits_per_second": 9.0,
                "tokens_per_second": 900.0,
            }
        )
    sample = {"sample_id": "a<b", "rated": {"quality": 41.0}, "predicted": {"quality": None}, "answer": "yes"}
    rows.append({"kind": "validation", "step": steps, "srcc_quality": 0.5, "krcc_quality": 0.4, "plcc_quality": 0.6})
    rows[-1] |= {"rmse_quality": 9.0, "accuracy": None, "samples": [sample]}
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "train", "st'
    (folder / "metrics.jsonl").write_text(text + "\n[1]\n", encoding="utf-8")
    return folder


def test_every_logged_series_is_read_and_drawn(tmp_path: Path) -> None:
    curves = read_curves(write_log(tmp_path / "stage2"))
    assert curves is not None
    assert set(curves.training) == {
        *("loss", "score_loss", "orthogonality", "learning_rate", "grad_norm", "ranks_kept"),
        *("edits_per_second", "tokens_per_second"),
    }
    assert set(curves.validation) == {"srcc_quality", "krcc_quality", "plcc_quality", "rmse_quality"}
    figure = training_figure(tmp_path / "figures", "training_1", curves)
    assert figure.png.stat().st_size > 1000
    svg = figure.svg.read_text(encoding="utf-8")
    for title in ("task losses", "orthogonality penalty", "ranks kept", "tokens a second", "validation KRCC and PLCC"):
        assert title in svg
    assert "validation accuracy" not in svg  # undefined: no empty panel


def test_samples_are_shown_with_what_is_missing(tmp_path: Path) -> None:
    curves = read_curves(write_log(tmp_path / "stage2"))
    assert curves is not None
    table = samples_table(curves, "samples_1")
    assert table is not None
    assert [column.key for column in table.columns] == ["sample", "quality_rated", "quality_predicted", "answer"]
    assert [cell.value for cell in table.rows[0]] == ["a<b", 41.0, None, "yes"]


def test_a_run_without_validation_has_no_samples(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "stage2")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    curves = read_curves(folder)
    assert curves is not None and samples_table(curves, "samples_1") is None
    training_figure(tmp_path / "figures", "training_1", curves)
