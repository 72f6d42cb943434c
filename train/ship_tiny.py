"""Make checkpoints/tiny/judge from a finished demo: the judge, and what was measured with it.

lmm4edit demo --out runs/demo
python train/ship_tiny.py runs/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from lmm4edit.evaluation.runner import read_run_folder
from lmm4edit.evaluation.stored import current_metrics
from lmm4edit.judge.checkpoint import load_checkpoint, save_checkpoint

NOTE = (
    "held-out edits of the mini benchmark; editing models and ratings are simulated: "
    "a demonstration, no measure of real edits"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of a finished demo")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny/judge"))
    arguments = parser.parse_args()

    trained = arguments.demo / "stage2" / "checkpoint"
    loaded = load_checkpoint(trained, adapter_trainable=True)
    config = yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))
    provenance = json.loads((trained / "provenance.json").read_text(encoding="utf-8"))
    save_checkpoint(arguments.out, loaded.model, loaded.processor, loaded.prompts, config, provenance, stage=2)

    folder = arguments.demo / "evaluation"
    metrics = current_metrics(folder, read_run_folder(folder))
    judge = next(p for p in {row.predictor for row in metrics.rows} if p.startswith("judge:"))
    measured: dict[str, object] = {"note": NOTE, "srcc": {}, "n": None}
    for row in metrics.rows:
        if row.predictor == judge and row.group == "all" and row.statistic == "srcc":
            measured["srcc"][row.target] = round(row.value, 4)  # type: ignore[index,arg-type]
            measured["n"] = row.n_scored
        if row.predictor == judge and row.group == "all" and row.statistic == "accuracy":
            measured["accuracy"] = round(row.value, 4)  # type: ignore[arg-type]
    (arguments.out / "measured.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {json.dumps(measured)}")


if __name__ == "__main__":
    main()
