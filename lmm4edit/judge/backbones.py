"""The table of backbones, and how one is loaded and saved.

Adding a backbone is adding a row to :data:`BACKBONES`: names, regular expressions and rules, no code path of its own.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.packing import PackedBatch, position_ids
from lmm4edit.judge.prompts import CHATML, ChatFormat


@dataclass(frozen=True)
class BackboneSpec:
    """What differs between backbones.

    Attributes:
        model_type: ``config.model_type`` of the Transformers configuration.
        vision_regex, llm_regex: full-match patterns of the linear layers that adapters go to (paper, section 4.2).
        projector: full module path of the projector inside the model (Qwen calls it merger).
        projector_name: its last component, as PEFT's ``modules_to_save`` wants it.
        vision_module, llm_module: module paths of the vision encoder and the language model.
        mask_style: how the model takes a packed mask: ``dict`` (``{"full_attention": mask}``) or ``tensor``.
        chat: chat markers.
        notes: what a user should know.
    """

    model_type: str
    vision_regex: str
    llm_regex: str
    projector: str
    projector_name: str
    vision_module: str
    llm_module: str
    mask_style: Literal["dict", "tensor"]
    chat: ChatFormat = CHATML
    notes: str = ""


BACKBONES: dict[str, BackboneSpec] = {
    spec.model_type: spec
    for spec in [
        BackboneSpec(
            model_type="qwen2_5_vl",
            vision_regex=r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate_proj|up_proj|down_proj))",
            llm_regex=r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate_proj|up_proj|down_proj))",
            projector="model.visual.merger",
            projector_name="merger",
            vision_module="model.visual",
            llm_module="model.language_model",
            mask_style="dict",
            notes="Default. Qwen/Qwen2.5-VL-3B-Instruct ties its embeddings, -7B-Instruct does not.",
        ),
    ]
}

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def backbone_spec(model_or_config: Any) -> BackboneSpec:
    """The table's row for a model (plain or wrapped by PEFT) or its configuration.

    Raises:
        ConfigError: for a model type that the table lacks.
    """
    config = getattr(model_or_config, "config", model_or_config)
    model_type = getattr(config, "model_type", None)
    if model_type not in BACKBONES:
        raise ConfigError(
            f"No backbone of type {model_type!r} is known; expected one of {sorted(BACKBONES)}. A new one is a new row "
            "in lmm4edit/judge/backbones.py."
        )
    return BACKBONES[model_type]


def load_backbone(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> tuple[nn.Module, Any]:
    """Load a backbone and its processor.

    Args:
        name_or_path: a folder, or a name on the Hugging Face Hub.
        dtype: ``float32``, ``bfloat16``, ``float16`` or a torch dtype.
        attn_implementation: ``sdpa`` or ``eager``; packing needs an arbitrary mask.
        trust_remote_code: passed on; code from the Hub runs only if the user says so.
        device: where to put the weights.
        min_pixels, max_pixels: override the processor's limits on an image's pixels.

    Returns:
        The model in evaluation mode, and the processor.

    Raises:
        ConfigError: for an unusable attention, dtype or model type.
        CheckpointError: if there is nothing to load, or weights are missing, left over or of the wrong shape.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    check_attention(attn_implementation)
    torch_dtype = _dtype(dtype)
    name = str(name_or_path)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        spec = backbone_spec(config)
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            name,
            config=config,
            dtype=torch_dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Backbone {name!r} cannot be loaded: {error} Expected a folder with config.json, weights in safetensors "
            "and processor files, or a name on the Hugging Face Hub."
        ) from error
    model, info = loaded
    _check_complete(name, info)
    _check_supported(model, spec)
    set_pixel_limits(processor, min_pixels, max_pixels)
    return model.to(device).eval(), processor


def save_backbone(folder: str | Path, model: nn.Module, processor: Any, dtype: torch.dtype | None = None) -> None:
    """Save a plain backbone and its processor for :func:`load_backbone`; ``dtype`` rounds the saved weights only."""
    saved = copy.deepcopy(model).to(dtype) if dtype is not None else model
    saved.save_pretrained(str(folder), safe_serialization=True)  # type: ignore[operator]
    processor.save_pretrained(str(folder))


def check_attention(attn_implementation: str) -> None:
    """Refuse attentions that cannot take a packed mask.

    Raises:
        ConfigError: for anything but ``sdpa`` and ``eager``.
    """
    if attn_implementation in ("sdpa", "eager"):
        return
    if "flash" in attn_implementation:
        raise ConfigError(
            f"attn_implementation {attn_implementation!r} cannot be used: FlashAttention takes no mask for packed "
            "questions and would guess sequences from restarting positions. Use 'sdpa'."
        )
    raise ConfigError(f"attn_implementation must be 'sdpa' or 'eager', got {attn_implementation!r}.")


def set_pixel_limits(processor: Any, min_pixels: int | None, max_pixels: int | None) -> None:
    """Change how many pixels an image is resized to; ``None`` leaves a limit as it is.

    Raises:
        ConfigError: if the limits contradict each other or leave no room for one token.
    """
    images = processor.image_processor
    low = images.size["shortest_edge"] if min_pixels is None else min_pixels
    high = images.size["longest_edge"] if max_pixels is None else max_pixels
    side = images.patch_size * images.merge_size
    if not 0 < low <= high or high < side * side:
        raise ConfigError(
            f"Expected 0 < min_pixels <= max_pixels and max_pixels >= {side * side} (one token of {side} x {side} "
            f"pixels), got min_pixels={low} and max_pixels={high}."
        )
    images.size = {"shortest_edge": low, "longest_edge": high}


def plain_model(backbone: Any) -> Any:
    """The Transformers model, whether or not PEFT wraps it. Injected adapters stay active in it."""
    return (
        backbone.get_base_model()
        if hasattr(backbone, "peft_config") and hasattr(backbone, "get_base_model")
        else backbone
    )


def last_hidden_states(backbone: nn.Module, batch: PackedBatch) -> Tensor:
    """Run a packed batch through a backbone, without the language-model head.

    Returns:
        [B, L, hidden size], in the backbone's dtype.
    """
    model = plain_model(backbone)
    spec = backbone_spec(model)
    mask = batch.attention_mask
    if model.config._attn_implementation == "eager":
        # Eager attention adds its mask: a boolean one would be taken for zeros and ones.
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
    return model.model(
        input_ids=batch.input_ids,
        attention_mask={"full_attention": mask} if spec.mask_style == "dict" else mask,
        position_ids=position_ids(model, batch),
        pixel_values=batch.pixel_values,
        image_grid_thw=batch.image_grid_thw,
        mm_token_type_ids=batch.mm_token_type_ids,
        use_cache=False,
    ).last_hidden_state


def token_logits(backbone: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., vocabulary] of chosen hidden states [..., hidden size]; never of a whole sequence."""
    return plain_model(backbone).get_output_embeddings()(hidden)


def special_ids(backbone: nn.Module, processor: Any) -> dict[str, int]:
    """``image_token_id`` and ``pad_token_id``, as :func:`lmm4edit.judge.packing.collate` wants them.

    Raises:
        ConfigError: if the tokenizer has no padding token.
    """
    pad = processor.tokenizer.pad_token_id
    if pad is None:
        raise ConfigError("The tokenizer has no padding token; set tokenizer.pad_token and save the processor again.")
    return {"image_token_id": plain_model(backbone).config.image_token_id, "pad_token_id": pad}


def module_names(model: nn.Module, pattern: str) -> list[str]:
    """Names of the modules whose full path matches ``pattern``."""
    compiled = re.compile(pattern)
    return [name for name, _ in model.named_modules() if compiled.fullmatch(name)]


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}.")
    return DTYPES[dtype]


def _check_complete(name: str, info: Any) -> None:
    problems = []
    for kind, explanation in [
        ("missing_keys", "missing from the files (they would be random)"),
        ("unexpected_keys", "in the files but not in the model"),
        ("mismatched_keys", "of another shape than the model's"),
        ("error_msgs", "failed to load"),
    ]:
        if keys := sorted(str(key) for key in (info.get(kind) or ())):
            shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
            problems.append(f"{len(keys)} weights are {explanation}: {shown}")
    if problems:
        raise CheckpointError(
            f"Backbone {name!r} is incomplete or of another version: {'; '.join(problems)}. Download it again, or use "
            "the Transformers version it was saved with."
        )


def _check_supported(model: nn.Module, spec: BackboneSpec) -> None:
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"Backbone {spec.model_type!r} uses sliding-window attention, which packing does not support. Set "
            "use_sliding_window to false in its config.json."
        )
