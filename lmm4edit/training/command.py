"""The command line that both launchers share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from lmm4edit.config import load_config
from lmm4edit.errors import ConfigError, LMM4EditError


def run_from_command_line(stage: int, arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        stage: which stage the launcher is for; the configuration must be of the same.
        arguments: the words after the launcher's name; ``None``: this process's.

    Returns:
        Exit status: 0 if the run is complete (or was before), 1 if something has to be repaired first; then the
        reason stands on the error output.
    """
    options = _parser(stage).parse_intermixed_args(arguments)
    overrides = list(options.overrides)
    if options.init_from is not None:
        overrides.append(f"init_from={json.dumps(options.init_from)}")
    try:
        config = load_config(options.config, overrides)
        if config.stage != stage:
            raise ConfigError(
                f"{options.config}: stage: expected {stage} in this launcher, got {config.stage}. "
                f"Use train/stage{config.stage}.py."
            )
        # Only now: a mistake in the configuration is answered without loading torch.
        from lmm4edit.training.loop import run

        run(config, restart=options.restart, dry_run=options.dry_run, accept_changes=options.accept_changes)
    except LMM4EditError as error:
        # Every process of a launch meets the same error: one says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command continues from the last saved training state.", file=sys.stderr)
        return 130
    return 0


def _parser(stage: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Train stage {stage} of a judge. Interrupted runs continue when the same command is given again.",
        epilog=f"example: accelerate launch train/stage{stage}.py --config configs/tiny/stage{stage}.yaml "
        "optimizer.learning_rate=5e-4 wandb.enabled=true",
    )
    parser.add_argument("--config", required=True, help="configuration (YAML)")
    parser.add_argument("--init-from", metavar="DIR", help="checkpoint to start from (overrides init_from)")
    parser.add_argument("--dry-run", action="store_true", help="check configuration and data, print the plan, stop")
    parser.add_argument("--restart", action="store_true", help="remove what the run folder holds and begin anew")
    parser.add_argument(
        "--accept-changes", action="store_true", help="continue an interrupted run although the configuration changed"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the configuration's")
    return parser
