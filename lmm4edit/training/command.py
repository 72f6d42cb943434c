"""The command line that both launchers share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lmm4edit.config import TrainConfig, load_config
from lmm4edit.errors import ConfigError, LMM4EditError
from lmm4edit.threads import wait_politely


def run_from_command_line(stage: int, arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        stage: which stage the launcher is for; the configuration must be of the same.
        arguments: the words after the launcher's name; ``None``: this process's.

    Returns:
        Exit status: 0 if the run is complete (or was before), 1 if something has to be repaired first; then the
        reason stands on the error output.
    """
    wait_politely()
    options = _parser(stage).parse_intermixed_args(arguments)
    try:
        config = _configuration(stage, options)
        if config.stage != stage:
            raise ConfigError(
                f"{options.config}: stage: expected {stage} in this launcher, got {config.stage}. "
                f"Use train/stage{config.stage}.py."
            )
        # Only now: a mistake in the configuration is answered without loading torch.
        from lmm4edit.training.loop import run
        from lmm4edit.training.processes import leaving_the_group

        with leaving_the_group():
            run(
                config,
                restart=options.restart,
                dry_run=options.dry_run,
                planned_processes=options.processes,
                accept_changes=options.accept_changes,
            )
    except LMM4EditError as error:
        # Every process of a launch meets the same error: one says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command continues from the last saved training state.", file=sys.stderr)
        return 130
    return 0


def _configuration(stage: int, options: argparse.Namespace) -> TrainConfig:
    """The configuration with the options' values in it; without one, the starting judge's own."""
    overrides = list(options.overrides)
    for key, value in [
        ("init_from", options.init_from),
        ("run_dir", options.run_dir),
        ("data.train", options.data),
        ("data.validation", options.validation),
        ("data.retention", options.retention),
    ]:
        if value is not None:
            overrides.append(f"{key}={json.dumps(value)}")
    if options.dimensions is not None:
        from lmm4edit.data.dimensions import load_dimensions

        overrides.append(f"dimensions={json.dumps([asdict(d) for d in load_dimensions(options.dimensions)])}")
    if options.config is not None:
        return load_config(options.config, overrides)
    missing = [name for name in ("init_from", "data", "run_dir") if getattr(options, name) is None]
    if stage != 2 or missing:
        what = "--config" if stage != 2 else " ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(
            f"Expected {what}: a run needs --config; or, to fine-tune a judge with the settings it was trained with, "
            "--init-from JUDGE --data FILE --run-dir DIR."
        )
    from lmm4edit.training.fine_tuning import fine_tuning_config

    return fine_tuning_config(options.init_from, overrides)


def _parser(stage: int) -> argparse.ArgumentParser:
    examples = [
        f"accelerate launch train/stage{stage}.py --config configs/tiny/stage{stage}.yaml "
        "optimizer.learning_rate=5e-4 wandb.enabled=true"
    ]
    if stage == 2:
        examples.append(
            "accelerate launch train/stage2.py --init-from checkpoints/tiny/judge --data mine/train.jsonl "
            "--validation mine/test.jsonl --run-dir runs/mine"
        )
    parser = argparse.ArgumentParser(
        description=f"Train stage {stage} of a judge. Interrupted runs continue when the same command is given again.",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="configuration (YAML); fine-tuning takes the starting judge's without it")
    parser.add_argument("--data", metavar="FILE", help="manifest to train on (overrides data.train)")
    parser.add_argument("--validation", metavar="FILE", help="manifest to validate on (overrides data.validation)")
    parser.add_argument(
        "--retention",
        metavar="FILE",
        help="manifest of the old kind, judged before and after (overrides data.retention)",
    )
    parser.add_argument(
        "--dimensions", metavar="FILE", help="dimensions.yaml of an import (overrides dimensions); new ones start fresh"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run (overrides run_dir)")
    parser.add_argument("--init-from", metavar="DIR", help="checkpoint to start from (overrides init_from)")
    parser.add_argument("--dry-run", action="store_true", help="check configuration and data, print the plan, stop")
    parser.add_argument("--processes", type=int, metavar="N", help="with --dry-run: plan for N processes (GPUs)")
    parser.add_argument("--restart", action="store_true", help="remove what the run folder holds and begin anew")
    parser.add_argument(
        "--accept-changes", action="store_true", help="continue an interrupted run although the configuration changed"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the configuration's")
    return parser
