"""Levers of memory and speed change what a step costs, and not what it learns; what cannot be used here is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lmm4edit.config import TrainConfig, load_config
from lmm4edit.errors import ConfigError
from lmm4edit.judge import acceleration
from lmm4edit.judge.acceleration import apply_liger, check_acceleration
from lmm4edit.judge.adapters import adalora_layers
from lmm4edit.judge.backbones import BACKBONES, check_attention, load_backbone, plain_model
from lmm4edit.training.strategy import StrategyChoice, check_strategy
from tests.training.memory_kit import RealStep

Make = Callable[..., TrainConfig]


@pytest.fixture
def learn(tmp_path: Path, run_config: Make) -> Callable[..., tuple[float, dict[str, Tensor], RealStep]]:
    """Loss and gradients of one batch under a configuration, with adapters that are not at their start (all 0)."""

    def learn(**changes: Any) -> tuple[float, dict[str, Tensor], RealStep]:
        config = run_config(tmp_path, **{"adapter__dropout": 0.0, "batch__micro_batch_size": 2, **changes})
        step = RealStep(config)
        model = step.trainee.model
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for factors in adalora_layers(model.backbone).values():
                factors.values.copy_(torch.randn(factors.values.shape, generator=generator))
        mixed = config.backbone.dtype == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(step.window[0].batch, config.objective).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(gradient is not None for gradient in gradients.values())
        return float(loss.detach()), gradients, step

    return learn


def difference(one: dict[str, Tensor], other: dict[str, Tensor], where: str = "") -> float:
    """Of gradients, as a part of their norm."""
    names = [name for name in one if where in name]
    assert names and one.keys() == other.keys()
    flat = [torch.cat([g[name].flatten().float() for name in names]) for g in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.parametrize("stage", [1, 2])
def test_checkpointing_is_not_reentrant_and_the_vision_adapters_learn_the_same(learn: Any, stage: int) -> None:
    start = {"stage": 2, "objective": {"score_mse": 1.0, "qa_ce": 0.1}, "init_from": "backbone"} if stage == 2 else {}
    loss, gradients, _ = learn(**start)
    same, recomputed, step = learn(backbone__gradient_checkpointing=True, **start)
    layers = [m for m in plain_model(step.trainee.model.backbone).modules() if getattr(m, "gradient_checkpointing", 0)]
    calls = [m._gradient_checkpointing_func for m in layers if hasattr(m, "_gradient_checkpointing_func")]
    assert len(calls) >= 4, "two vision blocks and two layers of the language model"
    assert all(call.keywords["use_reentrant"] is False for call in calls)
    assert same == pytest.approx(loss, rel=1e-6)
    for part in ("visual", "language_model", ""):
        assert difference(gradients, recomputed, part) < 1e-5
    vision = [g for name, g in recomputed.items() if "visual" in name and "lora_" in name]
    assert len(vision) == 2 * 5 * 3 and all(float(g.norm()) > 0 for g in vision)


def test_both_attentions_learn_the_same(learn: Any) -> None:
    loss, gradients, _ = learn()
    other, eager, _ = learn(backbone__attn_implementation="eager")
    assert other == pytest.approx(loss, rel=1e-5)
    assert difference(gradients, eager) < 1e-4


def test_bfloat16_is_for_frozen_weights_and_learns_nearly_the_same(learn: Any) -> None:
    loss, gradients, _ = learn()
    rounded, other, step = learn(backbone__dtype="bfloat16")
    # PEFT keeps the number of ranks as a frozen parameter of its own.
    weights = {name: p for name, p in step.trainee.model.named_parameters() if "ranknum" not in name}
    kinds = {(p.requires_grad, p.dtype) for p in weights.values()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert rounded == pytest.approx(loss, rel=0.02)
    assert difference(gradients, other) < 0.1
    step.take()
    assert all(torch.isfinite(p).all() for p in step.trainee.model.parameters())


def test_packing_learns_the_same(learn: Any) -> None:
    loss, gradients, _ = learn()
    other, separate, _ = learn(batch__packed=False)
    assert other == pytest.approx(loss, rel=1e-5)
    assert difference(gradients, separate) < 1e-3


def test_flash_attention_is_refused_for_packing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_attention("flash_attention_2")
    assert str(error.value) == (
        "attn_implementation 'flash_attention_2' cannot be used: FlashAttention takes no mask for packed questions and "
        "would guess sequences from restarting positions. Use 'sdpa'."
    )
    path = Path(__file__).parents[2] / "configs" / "tiny" / "stage1.yaml"
    with pytest.raises(ConfigError, match="backbone.attn_implementation"):
        load_config(path, ["backbone.attn_implementation=flash_attention_2"])


def test_the_budget_of_pixels_decides_the_number_of_image_tokens(learn: Any) -> None:
    *_, small = learn(backbone__min_pixels=28 * 28, backbone__max_pixels=28 * 28)
    *_, large = learn(backbone__min_pixels=28 * 28, backbone__max_pixels=84 * 84)
    grids = [step.window[0].batch.image_grid_thw.tolist() for step in (small, large)]
    assert grids[0] == [[1, 4, 4]] * 4 and grids[1] == [[1, 12, 12]] * 4  # patches of 7 pixels, 2 x 2 a token
    tokens = [int(step.window[0].batch.mm_token_type_ids.sum()) for step in (small, large)]
    assert tokens == [4 * 4, 4 * 36]
    *_, enlarged = learn(backbone__min_pixels=140 * 140, backbone__max_pixels=140 * 140)
    assert enlarged.window[0].batch.image_grid_thw.tolist() == [[1, 20, 20]] * 4


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"backbone__liger": True},
            "backbone.liger=true needs the package liger-kernel, which is not installed. pip install liger-kernel, or "
            "set backbone.liger=false.",
        ),
        (
            {"backbone__quantization": "4bit"},
            "backbone.quantization=4bit needs the package bitsandbytes, which is not installed. pip install "
            "bitsandbytes, or set backbone.quantization=null.",
        ),
    ],
)
def test_what_is_not_installed_is_refused_with_the_command(
    tmp_path: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(acceleration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        RealStep(run_config(tmp_path, **change))
    assert str(error.value) == message


@pytest.mark.parametrize("options", [{"liger": True}, {"quantization": "4bit"}])
def test_without_a_gpu_both_are_refused(
    tiny_backbone: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(acceleration.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs a GPU with CUDA, and torch sees none here\. Train where there is"):
        load_backbone(tiny_backbone, **options)


def test_liger_is_asked_for_everything_but_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    kernels = ModuleType("liger_kernel.transformers")
    kernels.apply_liger_kernel_to_qwen2_5_vl = lambda **options: seen.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    model = object()
    apply_liger(model, BACKBONES["qwen2_5_vl"])
    assert seen == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    with pytest.raises(ConfigError) as error:
        apply_liger(model, BACKBONES["deepseek_vl"])
    assert "has no kernels for deepseek_vl" in str(error.value)


def test_what_does_not_go_together_is_refused(tmp_path: Path, run_config: Make) -> None:
    with pytest.raises(ConfigError, match="4bit weights cannot be trained, and adapter.kind is full"):
        run_config(tmp_path, backbone__quantization="4bit", adapter__kind="full")
    with pytest.raises(ConfigError, match="4bit weights are not divided among processes, and fsdp2 would have to"):
        check_strategy(StrategyChoice("fsdp2"), run_config(tmp_path, backbone__quantization="4bit"), 2)
    with pytest.raises(ConfigError, match="expected 4bit or null, got '8bit'"):
        check_acceleration(quantization="8bit")
