"""One process of a real launch: trains as train/stage1.py and train/stage2.py do, and writes down how it was divided.

torchrun --nproc-per-node 2 tests/training/distributed_worker.py FACTS STAGE --config ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import lmm4edit.training.loop as loop
from lmm4edit.training.command import run_from_command_line


def facts(strategy: Any) -> dict[str, Any]:
    """World size, and how many values of the frozen and the trained parameters this process holds."""
    counts = {"frozen": [0, 0], "trained": [0, 0]}
    for parameter in strategy.model.parameters():
        if hasattr(parameter, "ds_tensor"):
            whole = parameter.ds_numel
            here = whole if parameter.ds_persist else parameter.ds_tensor.numel()
        elif isinstance(parameter, DTensor):
            here, whole = parameter.to_local().numel(), parameter.numel()
        else:
            here = whole = parameter.numel()
        count = counts["trained" if parameter.requires_grad else "frozen"]
        count[0], count[1] = count[0] + here, count[1] + whole
    flat = strategy._flat_parts() if hasattr(strategy, "_flat_parts") else []
    return {
        "world_size": dist.get_world_size(),
        "module": type(strategy.module).__name__,
        **counts,
        "optimizer_values": sum(part.numel() for part in flat),
    }


def main() -> int:
    path, stage, *arguments = sys.argv[1:]
    build = loop.build_strategy

    def build_and_tell(*given: Any) -> Any:
        strategy = build(*given)
        prepare = strategy.prepare

        def prepare_and_tell(*given: Any) -> None:
            prepare(*given)
            rank = dist.get_rank()
            Path(f"{path}-{rank}.json").write_text(json.dumps(facts(strategy)), encoding="utf-8")

        strategy.prepare = prepare_and_tell
        return strategy

    loop.build_strategy = build_and_tell
    return run_from_command_line(int(stage), arguments)


if __name__ == "__main__":
    sys.exit(main())
