"""What of a backbone is trained: AdaLoRA (the paper's choice), LoRA, whole parts, or nothing; and the projector.

PEFT builds the layers and defines the file layout. The two things it leaves to the training script, the orthogonality
penalty and the moment of pruning, are ours, because both fail silently there: see
:func:`orthogonality_penalty` and :class:`lmm4edit.judge.rank_allocator.RankAllocator`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn

from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import BackboneSpec, backbone_spec, module_names, plain_model

ADAPTER = "default"
"""PEFT's name of the adapter; a judge has exactly one."""


@dataclass(frozen=True)
class AdapterConfig:
    """What is adapted and how (paper, sections 4.2 and 5.4).

    Attributes:
        kind: ``adalora``, ``lora``, ``full`` fine-tuning of the chosen parts, or ``none``.
        vision, llm: whether the vision encoder and the language model are adapted.
        projector: whether the projector is trained, always in full.
        init_r: rank each matrix starts with; LoRA's only rank.
        target_r: mean rank at the end (AdaLoRA).
        lora_alpha: scale of the update.
        dropout: on the adapters' input.
    """

    kind: Literal["adalora", "lora", "full", "none"] = "adalora"
    vision: bool = True
    llm: bool = True
    projector: bool = True
    init_r: int = 12
    target_r: int = 8
    lora_alpha: float = 32.0
    dropout: float = 0.0


def attach_adapters(backbone: nn.Module, config: AdapterConfig, seed: int = 0) -> nn.Module:
    """Freeze a backbone and make trainable what the configuration says.

    Args:
        backbone: a plain Transformers model; it is changed in place.
        config: what to train.
        seed: of the adapters' initial weights. The global random state is left alone.

    Returns:
        The backbone wrapped by PEFT for ``adalora`` and ``lora``, else the backbone itself. The new judge's outputs
        equal the backbone's until it is trained.

    Raises:
        ConfigError: if nothing matches, or the backbone already has adapters.
    """
    refuse_foreign_adapters(backbone)
    if plain_model(backbone) is not backbone:
        raise ConfigError("The backbone already has adapters. Load it afresh, or continue from a checkpoint.")
    spec = backbone_spec(backbone)
    backbone.requires_grad_(False)
    if config.kind in ("adalora", "lora"):
        import peft

        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(seed)
            # PEFT warns that it cannot find modules to save by name in every layer; ours is checked below.
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            wrapped: nn.Module = peft.get_peft_model(cast(Any, backbone), _peft_config(backbone, config, spec))
        forbid_add_adapter(wrapped)
        return wrapped
    parts = []
    if config.kind == "full":
        parts += [spec.vision_module] if config.vision else []
        parts += [spec.llm_module] if config.llm else []
    for name in parts:
        backbone.get_submodule(name).requires_grad_(True)
    # The projector lies inside the vision encoder: it follows its own switch, whatever its surroundings do.
    backbone.get_submodule(spec.projector).requires_grad_(config.projector)
    return backbone


def orthogonality_penalty(backbone: nn.Module) -> Tensor | None:
    """AdaLoRA's penalty: mean over all factors P of ``||P P^T - I||`` (Frobenius), unweighted.

    Zhang et al. 2023 (arXiv:2303.10512), equation 4. PEFT adds it only to losses it computes itself, so an outside loss
    would lose it without a word.

    Returns:
        Scalar in float32 with gradient, at least 0; ``None`` if there are no AdaLoRA factors.
    """
    terms = []
    for factors in adalora_layers(backbone).values():
        if not factors.values.numel():
            continue
        eye = torch.eye(factors.values.shape[0], device=factors.values.device)
        right, left = factors.right.float(), factors.left.float()
        terms += [torch.linalg.norm(right @ right.T - eye), torch.linalg.norm(left.T @ left - eye)]
    return torch.stack(terms).mean() if terms else None


@dataclass(frozen=True)
class Factors:
    """The triplets of one adapted matrix: update = left @ diag(values) @ right.

    Attributes:
        values: [rank, 1]; PEFT's ``lora_E``. A pruned triplet has the value 0.
        right: [rank, inputs]; ``lora_A``.
        left: [outputs, rank]; ``lora_B``.
    """

    values: nn.Parameter
    right: nn.Parameter
    left: nn.Parameter


def adalora_layers(backbone: nn.Module) -> dict[str, Factors]:
    """AdaLoRA's factors by module name (as the plain model names it), in the model's order; empty without AdaLoRA."""
    return {
        name: Factors(module.lora_E[ADAPTER], module.lora_A[ADAPTER], module.lora_B[ADAPTER])
        for name, module in _lora_layers(backbone)
        if ADAPTER in getattr(module, "lora_E", {})
    }


def effective_ranks(backbone: nn.Module) -> dict[str, int]:
    """Rank of each adapted matrix by module name: for AdaLoRA the triplets that are not pruned, for LoRA its rank.

    An untrained AdaLoRA adapter has rank 0 everywhere, because its values start at 0.
    """
    return {
        name: int((module.lora_E[ADAPTER] != 0).sum())
        if ADAPTER in getattr(module, "lora_E", {})
        else module.r[ADAPTER]
        for name, module in _lora_layers(backbone)
    }


def trainable_parameters(model: nn.Module) -> dict[str, int]:
    """Names and sizes of the parameters that are trained."""
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def refuse_foreign_adapters(backbone: Any) -> None:
    """Refuse a model whose adapters came through ``add_adapter`` or ``inject_adapter_in_model``.

    Raises:
        ConfigError: nothing prunes or saves such adapters: AdaLoRA would silently be plain LoRA.
    """
    if plain_model(backbone) is backbone and any(hasattr(module, "lora_A") for module in backbone.modules()):
        _refuse_add_adapter()


def adapter_kind(backbone: Any) -> Literal["adalora", "lora"] | None:
    """Kind of the adapters PEFT has put into a model."""
    if plain_model(backbone) is backbone:
        return None
    return "adalora" if backbone.peft_config[ADAPTER].peft_type == "ADALORA" else "lora"


def _peft_config(backbone: nn.Module, config: AdapterConfig, spec: BackboneSpec) -> Any:
    import peft

    patterns = [spec.vision_regex] * config.vision + [spec.llm_regex] * config.llm
    if not patterns:
        raise ConfigError(f"Adapter kind {config.kind!r} with vision and llm both off adapts nothing. Use kind 'none'.")
    for pattern in patterns:
        if not module_names(backbone, pattern):
            raise ConfigError(
                f"No module of this backbone matches {pattern!r}: the row {spec.model_type!r} in "
                "lmm4edit/judge/backbones.py does not fit this version of Transformers."
            )
    common: dict[str, Any] = {
        "target_modules": "|".join(f"({pattern})" for pattern in patterns),
        "modules_to_save": [spec.projector_name] if config.projector else None,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.dropout,
    }
    if config.kind == "lora":
        return peft.LoraConfig(r=config.init_r, **common)
    if config.target_r > config.init_r:
        raise ConfigError(
            f"AdaLoRA only lowers ranks: expected target_r of at most init_r={config.init_r}, got {config.target_r}."
        )
    # The schedule in PEFT's own configuration is never used: our allocator prunes. It must only be a valid one.
    return peft.AdaLoraConfig(init_r=config.init_r, target_r=config.target_r, total_step=1, **common)


def _lora_layers(backbone: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in plain_model(backbone).named_modules():
        if ADAPTER in getattr(module, "lora_A", {}):
            yield name, module


def forbid_add_adapter(wrapped: nn.Module) -> None:
    """Make ``add_adapter`` raise on a wrapped model and on the model inside."""
    for model in (wrapped, plain_model(wrapped)):
        model.add_adapter = _refuse_add_adapter


def _refuse_add_adapter(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "add_adapter() turns AdaLoRA into plain LoRA without a word, because nothing prunes its ranks. "
        "Use lmm4edit.judge.adapters.attach_adapters on a backbone without adapters."
    )
