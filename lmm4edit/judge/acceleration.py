"""Two optional levers of a backbone, Liger's fused kernels and a base in 4 bits: used as asked for, or refused.

Neither was run by this project: both need a GPU (docs/memory.md). Tested is that nothing is left out in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbone_table import BackboneSpec

_PACKAGES = {
    "liger": ("backbone.liger", "liger_kernel", "liger-kernel"),
    "4bit": ("backbone.quantization", "bitsandbytes", "bitsandbytes"),
}


def check_acceleration(*, liger: bool = False, quantization: str | None = None) -> None:
    """Refuse, before anything is loaded, what cannot be used here.

    Raises:
        ConfigError: for an unknown quantization, a package that is not installed, or a machine without a GPU.
    """
    if quantization not in (None, "4bit"):
        raise ConfigError(f"backbone.quantization: expected 4bit or null, got {quantization!r}.")
    for lever in ["liger"] * liger + ["4bit"] * (quantization is not None):
        key, module, package = _PACKAGES[lever]
        value = "true" if lever == "liger" else lever
        off = "false" if lever == "liger" else "null"
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{key}={value} needs the package {package}, which is not installed. pip install {package}, or set "
                f"{key}={off}."
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{key}={value} needs a GPU with CUDA, and torch sees none here. Train where there is one, or set "
                f"{key}={off}."
            )


def quantized_loading(spec: BackboneSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments for ``from_pretrained`` that load the linear layers in 4-bit NormalFloat (QLoRA, arXiv:2305.14314).

    Projector and output embeddings stay as they are: the one is trained in full, the other gives the logits. Weights
    are quantized as they arrive, so they go straight to this process's GPU.

    Args:
        spec: the backbone's row.
        dtype: what the layers compute in.
    """
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # Matched against module names by their components.
        llm_int8_skip_modules=["lm_head", spec.projector_name],
    )
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device()}}


def apply_liger(model: Any, spec: BackboneSpec) -> None:
    """Replace norms, rotary positions and MLPs of a loaded backbone by Liger's kernels.

    Not its cross-entropy: the judge takes logits at answer tokens only, which leaves nothing to fuse.

    Raises:
        ConfigError: if Liger has no kernels for the family.
    """
    kernels = importlib.import_module("liger_kernel.transformers")
    apply = getattr(kernels, f"apply_liger_kernel_to_{spec.model_type}", None)
    if apply is None:
        raise ConfigError(
            f"backbone.liger: this version of liger-kernel has no kernels for {spec.model_type}. pip install --upgrade "
            "liger-kernel, or set backbone.liger=false."
        )
    apply(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
