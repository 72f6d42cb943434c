"""What is trained, that it gets gradients, and that the penalty is there."""

from __future__ import annotations

import copy
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
    regrow_ranks,
    train_further,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scale_of_an_adapter_is_never_trained(kit: Kit, dtype: torch.dtype) -> None:
    """PEFT makes ``ranknum`` a trained parameter on a bfloat16 backbone, and saves it nowhere: the judge would change
    when it is read back."""
    backbone = attach_adapters(kit.backbone.to(dtype), AdapterConfig(init_r=3, target_r=2))
    scales = {name: p for name, p in backbone.named_parameters() if "ranknum" in name}
    assert len(scales) == 24
    assert all(p.dtype == torch.float32 and p.item() == 3 and not p.requires_grad for p in scales.values())
    assert all(p.dtype == torch.float32 for name, p in backbone.named_parameters() if ".lora_" in name)


def _with_ranks(kit: Kit, ranks: list[int]) -> torch.nn.Module:
    """An AdaLoRA judge's backbone of init_r 3 whose matrices were cut to these ranks, in turn, by PEFT itself."""
    judge = kit.judge()
    pattern = {
        f"{name}.lora_E.default": [i < ranks[index % len(ranks)] for i in range(3)]
        for index, name in enumerate(adalora_layers(judge.backbone))
    }
    judge.backbone.resize_modules_by_rank_pattern(pattern, "default")  # type: ignore[operator]
    judge.backbone.peft_config["default"].rank_pattern = pattern  # type: ignore[index, union-attr]
    return judge.backbone


@pytest.mark.parametrize("rank", [3, 5])
def test_regrown_ranks_leave_the_outputs_as_they_are(kit: Kit, rank: int) -> None:
    """Also where a matrix had none left (PEFT divides its update by 0), and where init_r was another."""
    backbone = _with_ranks(kit, [0, 1, 3])
    batch = kit.batch([kit.example(0), kit.example(1)])
    with torch.no_grad():
        before = last_hidden_states(backbone, batch)
        state = torch.random.get_rng_state()
        regrow_ranks(backbone, AdapterConfig(init_r=rank, target_r=2), seed=1)
        assert torch.equal(state, torch.random.get_rng_state())
        torch.testing.assert_close(last_hidden_states(backbone, batch), before, atol=1e-5, rtol=1e-5)
    layers = adalora_layers(backbone)
    assert {tuple(layer.values.shape) for layer in layers.values()} == {(rank, 1)}
    assert [int((layer.values != 0).sum()) for layer in layers.values()] == [0, 1, 3] * 8
    new = torch.cat([layer.right[-1] for layer in list(layers.values())[::3]])
    assert 0.015 < new.std() < 0.025  # as PEFT draws fresh factors
    settings = backbone.peft_config["default"]  # type: ignore[index, union-attr]
    assert (settings.init_r, settings.target_r, settings.rank_pattern) == (rank, 2, None)


def test_regrown_matrices_learn_again(kit: Kit) -> None:
    backbone = _with_ranks(kit, [0])
    regrow_ranks(backbone, AdapterConfig(init_r=3, target_r=2))
    assert orthogonality_penalty(backbone).item() > 0  # type: ignore[union-attr]
    parameters = trainable_parameters(backbone)
    assert sum("lora_E" in name for name in parameters) == 24 and not any("ranknum" in name for name in parameters)
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=1.0)
    last_hidden_states(backbone, kit.batch([kit.example(0)])).pow(2).mean().backward()
    optimizer.step()
    assert set(effective_ranks(backbone).values()) == {3}


def test_the_same_seed_regrows_the_same_triplets(kit: Kit) -> None:
    backbone = _with_ranks(kit, [1])
    regrown = []
    for seed in (0, 0, 1):
        again = copy.deepcopy(backbone)
        regrow_ranks(again, AdapterConfig(init_r=3, target_r=2), seed=seed)
        regrown.append(next(iter(adalora_layers(again).values())).left.detach())
    assert torch.equal(regrown[0], regrown[1]) and not torch.equal(regrown[0], regrown[2])


def test_ranks_that_cannot_be_regrown_are_refused(kit: Kit) -> None:
    with pytest.raises(ConfigError) as caught:
        regrow_ranks(kit.judge().backbone, AdapterConfig(init_r=2, target_r=1))
    assert str(caught.value) == (
        "adapter.init_r: ranks are grown again to it, so expected at least 3, the largest rank of the starting judge, "
        "got 2. Raise it, or set adapter.ranks: continue."
    )


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_only_adalora_has_ranks_to_regrow(kit: Kit, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        regrow_ranks(kit.judge(kind).backbone, AdapterConfig())
    assert str(caught.value) == "Ranks can be grown again in AdaLoRA's matrices alone, and this judge has none."


def test_an_adapter_that_is_trained_further_takes_the_new_dropout_and_keeps_its_scale(kit: Kit) -> None:
    backbone = kit.judge(dropout=0.5).backbone
    batch = kit.batch([kit.example(0)])
    backbone.eval()
    with torch.no_grad():
        before = last_hidden_states(backbone, batch)
        assert train_further(backbone, AdapterConfig(init_r=3, dropout=0.0)) == ()
        backbone.train()
        assert torch.equal(last_hidden_states(backbone, batch), before)
        notes = train_further(backbone, AdapterConfig(init_r=4, dropout=0.5, lora_alpha=8))
        assert not torch.equal(last_hidden_states(backbone, batch), before)
    assert notes == (
        "adapter.lora_alpha: the starting judge's 32 is kept, not the configuration's 8",
        "adapter.init_r: the starting judge's 3 is kept, not the configuration's 4",
    )
    assert train_further(kit.backbone, AdapterConfig("none")) == ()
