"""What is trained, that it gets gradients, and that the penalty is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmm4edit.errors import ConfigError
from lmm4edit.judge.adapters import (
    AdapterConfig,
    adalora_layers,
    attach_adapters,
    effective_ranks,
    orthogonality_penalty,
    trainable_parameters,
)
from lmm4edit.judge.backbones import backbone_spec, last_hidden_states
from lmm4edit.judge.model import JudgeModel, parameter_groups
from tests.judge.kit import STAGE_1, Kit

GOLDEN = Path(__file__).parent / "golden"


def test_trainable_parameters_are_the_golden_list(kit: Kit) -> None:
    """Regenerate with ``python -m tests.judge.write_golden`` and read the difference."""
    judge = kit.judge()
    lines = [f"{name} {size}" for name, size in trainable_parameters(judge).items()]
    assert lines == (GOLDEN / "trainable_parameters.txt").read_text(encoding="utf-8").splitlines()
    groups = parameter_groups(judge)
    assert len(groups["score_head"]) == 4
    assert len(groups["adapters"]) == len(lines) - 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdapterConfig("adalora", projector=False), {"vision"}),
        (AdapterConfig("adalora", vision=False, projector=False), {"llm"}),
        (AdapterConfig("lora", llm=False), {"vision", "projector"}),
        (AdapterConfig("full"), {"vision", "llm", "projector"}),
        (AdapterConfig("full", projector=False, llm=False), {"vision"}),
        (AdapterConfig("none"), {"projector"}),
        (AdapterConfig("none", projector=False), set()),
    ],
    ids=lambda value: value.kind if isinstance(value, AdapterConfig) else "",
)
def test_each_switch_trains_its_part(kit: Kit, config: AdapterConfig, expected: set[str]) -> None:
    if config.kind == "adalora" and config.llm and config.vision:
        expected = {"vision", "llm"}
    backbone = attach_adapters(kit.backbone, config)
    spec = backbone_spec(backbone)
    parts = set()
    for name in trainable_parameters(backbone):
        if f".{spec.projector_name}." in name:
            parts.add("projector")
        else:
            parts.add("vision" if ".visual." in name else "llm")
    assert parts == expected


@pytest.mark.parametrize("kind", ["adalora", "lora", "full", "none"])
def test_fresh_adapters_change_nothing(kit: Kit, kind: Any) -> None:
    batch = kit.batch([kit.example(0)])
    with torch.no_grad():
        before = last_hidden_states(kit.backbone, batch)
        state = torch.random.get_rng_state()
        backbone = attach_adapters(kit.backbone, AdapterConfig(kind), seed=1)
        assert torch.equal(state, torch.random.get_rng_state())
        assert torch.equal(last_hidden_states(backbone, batch), before)


def test_trained_adapters_change_the_output_and_switch_off(kit: Kit) -> None:
    batch = kit.batch([kit.example(0)])
    with torch.no_grad():
        before = last_hidden_states(kit.backbone, batch)
        judge = kit.judge()
        after = last_hidden_states(judge.backbone, batch)
        assert (after - before).abs().max() > 1e-3
        with judge.backbone.disable_adapter():  # type: ignore[operator]
            torch.testing.assert_close(last_hidden_states(judge.backbone, batch), before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_trained_parameter_has_a_gradient(
    kit: Kit, checkpointing: bool, gradients: Callable[[torch.nn.Module], dict[str, Tensor]]
) -> None:
    """2U1/Qwen-VL-Series-Finetune#193: reentrant checkpointing starves the vision encoder."""
    judge = kit.judge()
    if checkpointing:
        judge.enable_gradient_checkpointing()
    judge.train()
    batch = kit.batch([kit.taught(0), kit.taught(1)])
    output = judge(batch, STAGE_1)
    output.loss.backward()
    visual = {name: g for name, g in gradients(judge).items() if ".visual." in name}
    assert len(visual) == 2 * 5 * 3 + 5  # two blocks, five matrices, three factors; the projector's five tensors
    for name, gradient in gradients(judge).items():
        if not name.startswith("score_head."):
            assert gradient.abs().max() > 0, name


def test_gradient_checkpointing_changes_no_gradient(
    kit: Kit, gradients: Callable[[torch.nn.Module], dict[str, Tensor]]
) -> None:
    judge = kit.judge().train()
    batch = kit.batch([kit.taught(0), kit.taught(1)])
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            judge.enable_gradient_checkpointing()
        judge.zero_grad()
        output = judge(batch, STAGE_1)
        output.loss.backward()
        results.append((output.loss.detach(), gradients(judge)))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-7, rtol=1e-5)


def test_the_penalty_is_the_papers_formula_in_both_stages(kit: Kit) -> None:
    judge = kit.judge()
    terms = []
    for layer in adalora_layers(judge.backbone).values():
        for factor in (layer.right, layer.left.T):
            product = (factor @ factor.T).detach().double()
            terms.append((product - torch.eye(len(product), dtype=torch.float64)).pow(2).sum().sqrt())
    expected = float(torch.stack(terms).mean())
    assert len(terms) == 2 * 24 and expected > 0.1
    penalty = orthogonality_penalty(judge.backbone)
    assert penalty is not None and penalty.item() == pytest.approx(expected, rel=1e-5)


def test_the_penalty_pulls_towards_orthogonal_factors(kit: Kit) -> None:
    judge = kit.judge()
    factors = [p for layer in adalora_layers(judge.backbone).values() for p in (layer.right, layer.left)]
    optimizer = torch.optim.SGD(factors, lr=5.0)
    values = []
    for _ in range(5):
        optimizer.zero_grad()
        penalty = orthogonality_penalty(judge.backbone)
        assert penalty is not None
        penalty.backward()
        optimizer.step()
        values.append(penalty.item())
    assert values == sorted(values, reverse=True) and values[-1] < 0.99 * values[0]


def test_there_is_no_penalty_without_adalora(kit: Kit) -> None:
    assert orthogonality_penalty(kit.judge("lora").backbone) is None


def test_effective_ranks_count_what_lives(kit: Kit) -> None:
    judge = kit.judge()
    layers = adalora_layers(judge.backbone)
    first = next(iter(layers))
    with torch.no_grad():
        layers[first].values[:2] = 0
    ranks = effective_ranks(judge.backbone)
    assert ranks.pop(first) == 1
    assert set(ranks.values()) == {3} and len(ranks) == 23
    assert first.endswith("visual.blocks.0.attn.qkv")


def test_lora_ranks_are_fixed(kit: Kit) -> None:
    assert set(effective_ranks(kit.judge("lora").backbone).values()) == {3}


def test_add_adapter_is_refused(kit: Kit) -> None:
    """huggingface/peft#3373: it would make AdaLoRA plain LoRA, silently."""
    import peft

    message = (
        "add_adapter() turns AdaLoRA into plain LoRA without a word, because nothing prunes its ranks. "
        "Use lmm4edit.judge.adapters.attach_adapters on a backbone without adapters."
    )
    judge = kit.judge()
    config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"])
    for model in (judge.backbone, judge.backbone.get_base_model()):  # type: ignore[operator]
        with pytest.raises(ConfigError) as caught:
            model.add_adapter(config)
        assert str(caught.value) == message


def test_a_backbone_with_foreign_adapters_is_refused(kit: Kit) -> None:
    import peft

    peft.inject_adapter_in_model(peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"]), kit.backbone)
    with pytest.raises(ConfigError, match="turns AdaLoRA into plain LoRA"):
        attach_adapters(kit.backbone, AdapterConfig())
    with pytest.raises(ConfigError, match="turns AdaLoRA into plain LoRA"):
        JudgeModel(kit.backbone, (), (0, 1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            AdapterConfig(vision=False, llm=False),
            "Adapter kind 'adalora' with vision and llm both off adapts nothing. Use kind 'none'.",
        ),
        (
            AdapterConfig(init_r=4, target_r=8),
            "AdaLoRA only lowers ranks: expected target_r of at most init_r=4, got 8.",
        ),
    ],
)
def test_configurations_that_adapt_nothing_are_refused(kit: Kit, config: AdapterConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attach_adapters(kit.backbone, config)
    assert str(caught.value) == message


def test_adapters_are_attached_once(kit: Kit) -> None:
    judge = kit.judge()
    with pytest.raises(ConfigError) as caught:
        attach_adapters(judge.backbone, AdapterConfig())
    assert str(caught.value) == ("The backbone already has adapters. Load it afresh, or continue from a checkpoint.")
