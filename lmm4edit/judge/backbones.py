"""How a backbone of any family is loaded, saved and run; what differs stands in its row of the table."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.acceleration import apply_liger, check_acceleration, quantized_loading
from lmm4edit.judge.backbone_table import BACKBONES, BackboneSpec, backbone_spec, processor_spec, register_own_classes
from lmm4edit.judge.packing import PackedBatch, position_ids, sequence_positions

__all__ = [
    "BACKBONES",
    "DTYPES",
    "BackboneSpec",
    "PrefixBatch",
    "adapter_patterns",
    "backbone_spec",
    "cast_projector_inputs",
    "check_attention",
    "last_hidden_states",
    "load_backbone",
    "module_names",
    "plain_model",
    "prefill",
    "processor_spec",
    "projector_modules",
    "register_own_classes",
    "save_backbone",
    "set_pixel_limits",
    "shortest_side",
    "special_ids",
    "token_logits",
]


DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_backbone(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    liger: bool = False,
    quantization: str | None = None,
) -> tuple[nn.Module, Any]:
    """Load a backbone and its processor.

    Args:
        name_or_path: a folder, or a name on the Hugging Face Hub.
        dtype: ``float32``, ``bfloat16``, ``float16`` or a torch dtype.
        attn_implementation: ``sdpa`` or ``eager``; packing needs an arbitrary mask.
        trust_remote_code: passed on; code from the Hub runs only if the user says so.
        device: where to put the weights.
        min_pixels, max_pixels: override the processor's limits on an image's pixels.
        liger, quantization: see :mod:`lmm4edit.judge.acceleration`. A quantized model lies on this process's GPU,
            whatever ``device`` says.

    Returns:
        The model in evaluation mode, and the processor.

    Raises:
        ConfigError: for an unusable attention, dtype or model type.
        CheckpointError: if there is nothing to load, or weights are missing, left over or of the wrong shape.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    register_own_classes()
    check_attention(attn_implementation)
    check_acceleration(liger=liger, quantization=quantization)
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
            # Refused below with the names; Transformers would name them in its log alone.
            ignore_mismatched_sizes=True,
            **(quantized_loading(spec, torch_dtype) if quantization else {}),
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
    if liger:
        apply_liger(model, spec)
    return (model if quantization else model.to(device)).eval(), processor


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
    processor_spec(processor).images.set_limits(processor, min_pixels, max_pixels)


def plain_model(backbone: Any) -> Any:
    """The Transformers model, whether or not PEFT wraps it. Injected adapters stay active in it."""
    return (
        backbone.get_base_model()
        if hasattr(backbone, "peft_config") and hasattr(backbone, "get_base_model")
        else backbone
    )


@dataclass(frozen=True)
class PrefixBatch:
    """Keys and values that the rows of a batch continue. B rows, T tokens (padded on the right).

    Attributes:
        keys, values: one [B, heads, T, head size] a layer; copied, never written to.
        lengths: [B]; tokens of each row's prefix.
        next_positions: [B]; position of the first token after it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    lengths: Tensor
    next_positions: Tensor


def last_hidden_states(backbone: nn.Module, batch: PackedBatch, prefixes: PrefixBatch | None = None) -> Tensor:
    """Run a packed batch through a backbone, without the language-model head.

    Args:
        backbone: plain or with adapters.
        batch: on its device.
        prefixes: what the rows continue; ``None``: they begin anew.

    Returns:
        [B, L, hidden size], in the backbone's dtype.
    """
    model = plain_model(backbone)
    mask, positions = batch.attention_mask, _positions(model, batch)
    if prefixes is None:
        return _run(model, batch, mask, positions).last_hidden_state
    from transformers import DynamicCache

    known = torch.arange(prefixes.keys[0].shape[2], device=mask.device) < prefixes.lengths[:, None]
    mask = torch.cat([known[:, None, None].expand(-1, -1, mask.shape[2], -1), mask], dim=3)
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(prefixes.keys, prefixes.values, strict=True)):
        cache.update(keys, values, layer)
    return _run(model, batch, mask, positions + prefixes.next_positions[:, None], cache).last_hidden_state


def prefill(backbone: nn.Module, batch: PackedBatch) -> tuple[Any, list[int]]:
    """Run prefixes through a backbone and keep their keys and values.

    Returns:
        A Transformers cache (its ``layers`` hold ``keys`` and ``values``, [B, heads, L, head size]), and for each row
        the position of the first token after the prefix, which must end with text.
    """
    from transformers import DynamicCache

    model = plain_model(backbone)
    cache, positions = DynamicCache(), _positions(model, batch)
    _run(model, batch, batch.attention_mask, positions, cache)
    return cache, (positions.reshape(-1, *batch.input_ids.shape).amax((0, 2)) + 1).tolist()


def _positions(model: Any, batch: PackedBatch) -> Tensor:
    """[3, B, L] or [B, L]."""
    return position_ids(model, batch) if backbone_spec(model).positions == "mrope" else sequence_positions(batch)


def _run(model: Any, batch: PackedBatch, mask: Tensor, positions: Tensor, cache: Any = None) -> Any:
    spec = backbone_spec(model)
    if model.config._attn_implementation == "eager":
        # Eager attention adds its mask: a boolean one would be taken for zeros and ones.
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
    held = {} if cache is None else {_cache_argument(model.model.forward): cache}
    if batch.image_features is None:
        images: dict[str, Any] = spec.images.arguments(batch)
    else:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features: Any = tuple(batch.image_features)  # one tensor an image, as the model itself would make them
        images = {
            "mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=features)},
            "mm_token_type_ids": batch.mm_token_type_ids,
        }
    return model.model(
        input_ids=batch.input_ids,
        attention_mask={"full_attention": mask} if spec.mask_style == "dict" else mask,
        position_ids=positions,
        **images,
        **held,
        use_cache=cache is not None,
    )


def _cache_argument(forward: Any) -> str:
    """The argument's name, which changed in Transformers 5."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def token_logits(backbone: nn.Module, hidden: Tensor) -> Tensor:
    """Logits [..., vocabulary] of chosen hidden states [..., hidden size]; never of a whole sequence."""
    head = plain_model(backbone).get_output_embeddings()
    # A language model trained in full is float32; its frozen head may be bfloat16.
    return head(hidden.to(head.weight.dtype))


def special_ids(backbone: nn.Module, processor: Any) -> dict[str, int]:
    """``image_token_id`` and ``pad_token_id``, as :func:`lmm4edit.judge.packing.collate` wants them.

    Raises:
        ConfigError: if the tokenizer has no padding token, or is not the backbone's: it lacks the chat format's markers
            or gives its image token another number.
    """
    spec, config = backbone_spec(plain_model(backbone)), plain_model(backbone).config
    added = processor.tokenizer.added_tokens_encoder
    for marker, expected in [(spec.chat.image_token, config.image_token_id), (spec.chat.end_of_answer, None)]:
        if marker not in added or expected not in (None, added[marker]):
            raise ConfigError(
                f"The tokenizer does not fit a backbone of type {spec.model_type!r}: expected the token {marker!r}"
                + (f" with the number {expected}" if expected is not None else "")
                + f", got {added.get(marker, 'no such token')}. Give the processor that was saved with the backbone."
            )
    pad = processor.tokenizer.pad_token_id
    if pad is None:
        raise ConfigError("The tokenizer has no padding token; set tokenizer.pad_token and save the processor again.")
    return {"image_token_id": added[spec.chat.image_token], "pad_token_id": pad}


def shortest_side(processor: Any) -> int:
    """Side in pixels below which an image is enlarged before the processor sees it."""
    return processor_spec(processor).images.shortest_side(processor)


def projector_modules(model: nn.Module) -> list[str]:
    """Full paths of the modules between vision encoder and language model, the main one first."""
    spec = backbone_spec(model)
    return [spec.projector, *(module_names(model, spec.more_projectors) if spec.more_projectors else [])]


def cast_projector_inputs(backbone: nn.Module) -> None:
    """Let projectors in float32 stand behind a vision encoder in bfloat16; what follows takes its own type again.

    What is trained is kept in float32 whatever the frozen weights are, and most projectors refuse a mixture.
    """
    model = plain_model(backbone)
    if backbone_spec(model).cast_projector:
        for name in projector_modules(model):
            model.get_submodule(name).register_forward_pre_hook(_to_own_dtype)


def _to_own_dtype(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # PEFT keeps the trained copy beside the untouched one.
    copies = getattr(module, "modules_to_save", None)
    used: Any = next(iter(copies.values())) if copies else module
    dtype = next(used.parameters()).dtype
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def adapter_patterns(model: nn.Module, *, vision: bool, llm: bool) -> list[str]:
    """Full-match patterns of the linear layers that adapters go to, without vision layers whose output nobody reads."""
    spec = backbone_spec(model)
    unused = spec.unused_vision(model.config) if spec.unused_vision is not None else None
    in_vision = f"(?!{unused}){spec.vision_regex}" if unused else spec.vision_regex
    return [in_vision] * vision + [spec.llm_regex] * llm


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
        if keys := sorted(_described(key) for key in (info.get(kind) or ())):
            shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
            problems.append(f"{len(keys)} weights are {explanation}: {shown}")
    if problems:
        raise CheckpointError(
            f"Backbone {name!r} is incomplete or of another version: {'; '.join(problems)}. Download it again, or use "
            "the Transformers version it was saved with."
        )


def _described(key: Any) -> str:
    """A weight's name; of a mismatched one with the shapes in the file and in the model."""
    if isinstance(key, tuple) and len(key) == 3:
        name, stored, wanted = key
        return f"{name} (expected {list(wanted)}, got {list(stored)})"
    return str(key)


def _check_supported(model: nn.Module, spec: BackboneSpec) -> None:
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    layers = getattr(text, "layer_types", None)
    if "sliding_attention" in (layers or ()) or (not layers and getattr(text, "sliding_window", None)):
        raise ConfigError(
            f"Backbone {spec.model_type!r} uses sliding-window attention, which packing does not support. Set "
            "use_sliding_window to false (or sliding_window to null) in its config.json."
        )
