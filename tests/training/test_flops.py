"""The formula of a step's operations against PyTorch's own counter, which sees every matrix product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from lmm4edit.config import TrainConfig
from lmm4edit.training.flops import count_flops
from tests.training.memory_kit import RealStep, save_mid_size

Make = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mid") / "backbone"
    save_mid_size(folder)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch__packed": False},
        {"adapter__kind": "lora"},
        {"adapter__kind": "full"},
        {"adapter__vision": False},
        {"adapter__vision": False, "adapter__projector": False},
        {"backbone__gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_formula_counts_what_is_computed(
    mid_size: Path, tmp_path: Path, run_config: Make, changes: dict[str, Any]
) -> None:
    # Eager attention is made of products that the counter sees. The penalty is no work of the model.
    plain = {"backbone__attn_implementation": "eager", "objective__orthogonality": 0.0}
    config = run_config(tmp_path, backbone__name_or_path=str(mid_size), **plain, **changes)
    step = RealStep(config)
    model, batch = step.trainee.model, step.window[0].batch
    expected = count_flops(model, batch, checkpointing=config.backbone.gradient_checkpointing)
    with FlopCounterMode(display=False) as forward:
        loss = model(batch, config.objective).loss
    assert expected.forward == pytest.approx(forward.get_total_flops(), rel=0.01)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    counted = backward.get_total_flops()
    # The first vision block's input needs no gradient; the formula does not go into such things.
    assert expected.activations + expected.weights + expected.recomputed == pytest.approx(counted, rel=0.05)
