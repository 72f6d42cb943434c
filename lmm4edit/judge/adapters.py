"""What of a backbone is trained: AdaLoRA (the paper's choice), LoRA, whole parts, or nothing; and the projector.

PEFT builds the layers and defines the file layout. The two things it leaves to the training script, the orthogonality
penalty and the moment of pruning, are ours, because both fail silently there; so is growing pruned ranks again. See
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
from lmm4edit.judge.backbones import (
    BackboneSpec,
    adapter_patterns,
    backbone_spec,
    module_names,
    plain_model,
    projector_modules,
)

ADAPTER = "default"
"""PEFT's name of the adapter; a judge has exactly one."""

# PEFT 0.21's: added to the divisor of an update, and standard deviation of fresh factors (tested against it).
_SCALE_EPSILON = 1e-5
_FACTOR_SD = 0.02


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
        freeze_scales(wrapped)
        forbid_add_adapter(wrapped)
        return wrapped
    parts = []
    if config.kind == "full":
        parts += [spec.vision_module] if config.vision else []
        parts += [spec.llm_module] if config.llm else []
    for name in parts:
        backbone.get_submodule(name).requires_grad_(True)
    # The projector lies inside the vision encoder: it follows its own switch, whatever its surroundings do.
    for name in projector_modules(backbone):
        backbone.get_submodule(name).requires_grad_(config.projector)
    return backbone


def freeze_scales(backbone: nn.Module) -> None:
    """Make AdaLoRA's divisor of the update (PEFT's ``ranknum``) a float32 constant in every matrix.

    On a bfloat16 backbone PEFT re-registers it as a trained parameter, which is in no checkpoint: the judge would be
    another one when it is read back.
    """
    for _, module in _lora_layers(backbone):
        if ADAPTER in getattr(module, "ranknum", {}):
            scale = module.ranknum[ADAPTER]
            scale.requires_grad_(False)
            scale.data = scale.data.float()


def train_further(backbone: nn.Module, config: AdapterConfig) -> tuple[str, ...]:
    """Give a starting judge's adapters this run's dropout, and say which other settings they keep.

    Scale and ranks are part of what the judge is; dropout is a matter of training, and PEFT would keep the old one.

    Args:
        backbone: a judge's, read with ``adapter_trainable=True``; changed in place.
        config: of the run.

    Returns:
        A note for each setting that the configuration gives otherwise.
    """
    if adapter_kind(backbone) is None:
        return ()
    settings = cast(Any, backbone).peft_config[ADAPTER]
    settings.lora_dropout = config.dropout
    for _, module in _lora_layers(backbone):
        module.lora_dropout[ADAPTER] = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
    rank = settings.init_r if adapter_kind(backbone) == "adalora" else settings.r
    return tuple(
        f"adapter.{key}: the starting judge's {kept:g} is kept, not the configuration's {configured:g}"
        for key, kept, configured in (
            ("lora_alpha", settings.lora_alpha, config.lora_alpha),
            ("init_r", rank, config.init_r),
        )
        if kept != configured
    )


def regrow_ranks(backbone: nn.Module, config: AdapterConfig, seed: int = 0) -> None:
    """Give every AdaLoRA matrix ``config.init_r`` triplets again, also one pruned to rank 0. Outputs stay as they are.

    New triplets are drawn as those of a fresh adapter, with the value 0. A :class:`~.rank_allocator.RankAllocator` made
    afterwards prunes all matrices again.

    Args:
        backbone: a judge's, read with ``adapter_trainable=True``; changed in place.
        config: of the run, for its ``init_r`` and ``target_r``.
        seed: of the new triplets. The global random state is left alone.

    Raises:
        ConfigError: without AdaLoRA, or if a matrix has more triplets than ``config.init_r``.
    """
    layers = adalora_layers(backbone)
    if not layers:
        raise ConfigError("Ranks can be grown again in AdaLoRA's matrices alone, and this judge has none.")
    largest = max(layer.values.shape[0] for layer in layers.values())
    if largest > config.init_r:
        raise ConfigError(
            f"adapter.init_r: ranks are grown again to it, so expected at least {largest}, the largest rank of the "
            f"starting judge, got {config.init_r}. Raise it, or set adapter.ranks: continue."
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in _lora_layers(backbone):
            _regrow(module, layers[name], config.init_r, generator)
    settings = cast(Any, backbone).peft_config[ADAPTER]
    # A pattern of before would cut the grown matrices when they are saved.
    settings.init_r, settings.target_r, settings.rank_pattern = config.init_r, config.target_r, None


def _regrow(module: Any, factors: Factors, rank: int, generator: torch.Generator) -> None:
    missing = rank - factors.values.shape[0]
    scale = module.ranknum[ADAPTER]
    # The update is divided by this number: by 0 in a matrix pruned to rank 0, by another if init_r was another.
    ratio = (rank + _SCALE_EPSILON) / (scale.item() + _SCALE_EPSILON)
    scale.fill_(float(rank))

    def drawn(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * _FACTOR_SD).to(factors.values)

    values = factors.values if ratio == 1 else factors.values * ratio
    inputs, outputs = factors.right.shape[1], factors.left.shape[0]
    module.lora_E[ADAPTER] = nn.Parameter(torch.cat([values, values.new_zeros(missing, 1)]))
    module.lora_A[ADAPTER] = nn.Parameter(torch.cat([factors.right, drawn(missing, inputs)]))
    module.lora_B[ADAPTER] = nn.Parameter(torch.cat([factors.left, drawn(outputs, missing)], dim=1))
    module.r[ADAPTER] = rank


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

    patterns = adapter_patterns(backbone, vision=config.vision, llm=config.llm)
    if not patterns:
        raise ConfigError(f"Adapter kind {config.kind!r} with vision and llm both off adapts nothing. Use kind 'none'.")
    for pattern in patterns:
        if not module_names(backbone, pattern):
            raise ConfigError(
                f"No module of this backbone matches {pattern!r}: the row {spec.model_type!r} in "
                "lmm4edit/judge/backbone_table.py does not fit this version of Transformers."
            )
    common: dict[str, Any] = {
        "target_modules": "|".join(f"({pattern})" for pattern in patterns),
        "modules_to_save": [spec.projector_name, *projector_modules(backbone)[1:]] if config.projector else None,
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
