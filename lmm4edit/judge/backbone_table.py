"""The table of backbones: one row a family, names and rules, no code path of its own.

What is proven of each row stands in :mod:`lmm4edit.judge.families`, which loads no torch; the tests hold both together.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lmm4edit.errors import ConfigError
from lmm4edit.judge.chat_formats import DEEPSEEK, DEEPSEEK_VL2, INTERNVL_CHATML, VICUNA
from lmm4edit.judge.image_inputs import (
    DEEPSEEK_SQUARES,
    DEEPSEEK_TILES,
    INTERNVL_TILES,
    LLAVA_NEXT_CROPS,
    LLAVA_SQUARES,
    PATCHES,
    ImageInput,
)
from lmm4edit.judge.prompts import CHATML, ChatFormat


@dataclass(frozen=True)
class BackboneSpec:
    """What differs between backbones.

    Attributes:
        model_type: ``config.model_type`` of the Transformers configuration.
        processor: class name of the family's processor.
        vision_regex, llm_regex: full-match patterns of the linear layers that adapters go to (paper, section 4.2).
        projector: full module path of the projector inside the model (Qwen calls it merger).
        projector_name: its last component, as PEFT's ``modules_to_save`` wants it.
        vision_module, llm_module: module paths of the vision encoder and the language model.
        mask_style: how the model takes a packed mask: ``dict`` (``{"full_attention": mask}``) or ``tensor``.
        chat: chat markers.
        images: how images become arguments of the model.
        positions: ``mrope`` (time, height, width; Qwen) or ``sequence`` (one number a token).
        more_projectors: full-match pattern of further projector modules (Qwen3's for its deeper layers), or empty.
        unused_vision: (configuration) to a pattern of the beginnings of names in the vision encoder whose outputs
            nobody reads, or ``None``. They would never get a gradient, so adapters leave them out.
        own_classes: modules of this package to import first, where Transformers has no class of the family.
        outside_features: whether the model takes image features that were computed before.
        cast_projector: whether a projector in float32 on a backbone in bfloat16 must be handed float32.
    """

    model_type: str
    vision_regex: str
    llm_regex: str
    projector: str
    projector_name: str
    vision_module: str
    llm_module: str
    mask_style: Literal["dict", "tensor"]
    processor: str
    chat: ChatFormat = CHATML
    images: ImageInput = PATCHES
    positions: Literal["mrope", "sequence"] = "mrope"
    more_projectors: str = ""
    unused_vision: Callable[[Any], str | None] | None = None
    own_classes: tuple[str, ...] = ()
    outside_features: bool = False
    cast_projector: bool = True

    def in_projector(self, name: str) -> bool:
        """Whether a parameter or module of a judge, wrapped by PEFT or not, belongs to a projector."""
        patterns = [re.escape(self.projector), *([self.more_projectors] if self.more_projectors else [])]
        return any(re.search(rf"(^|\.){pattern}\.", f"{name}.") for pattern in patterns)


def _beyond_feature_layer(layers: str) -> Callable[[Any], str | None]:
    """Vision layers behind the one whose states the projector reads (LLaVA: the last), which lie at ``layers``."""

    def pattern(config: Any) -> str | None:
        total, chosen = config.vision_config.num_hidden_layers, config.vision_feature_layer
        read = max(
            index if index >= 0 else total + 1 + index for index in ([chosen] if isinstance(chosen, int) else chosen)
        )
        unread = [rf"{layers}\.{index}" for index in range(read, total)]
        return rf".*({'|'.join(unread)})\." if unread else None

    return pattern


_LLM_REGEX = r".*language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate_proj|up_proj|down_proj))"
_CLIP_REGEX = r".*vision_tower\.encoder\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|mlp\.fc[12])"


BACKBONES: dict[str, BackboneSpec] = {
    spec.model_type: spec
    for spec in [
        BackboneSpec(
            model_type="qwen2_5_vl",
            processor="Qwen2_5_VLProcessor",
            outside_features=True,
            cast_projector=False,  # its norm does it
            vision_regex=r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate_proj|up_proj|down_proj))",
            llm_regex=_LLM_REGEX,
            projector="model.visual.merger",
            projector_name="merger",
            vision_module="model.visual",
            llm_module="model.language_model",
            mask_style="dict",
        ),
        BackboneSpec(
            model_type="qwen2_vl",
            processor="Qwen2VLProcessor",
            outside_features=True,
            vision_regex=r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc[12])",
            llm_regex=_LLM_REGEX,
            projector="model.visual.merger",
            projector_name="merger",
            vision_module="model.visual",
            llm_module="model.language_model",
            mask_style="dict",
        ),
        BackboneSpec(
            model_type="qwen3_vl",
            processor="Qwen3VLProcessor",
            vision_regex=r".*visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])",
            llm_regex=_LLM_REGEX,
            projector="model.visual.merger",
            projector_name="merger",
            more_projectors=r"model\.visual\.deepstack_merger_list\.\d+",
            vision_module="model.visual",
            llm_module="model.language_model",
            mask_style="tensor",
        ),
        BackboneSpec(
            model_type="llava",
            processor="LlavaProcessor",
            vision_regex=_CLIP_REGEX,
            llm_regex=_LLM_REGEX,
            projector="model.multi_modal_projector",
            projector_name="multi_modal_projector",
            vision_module="model.vision_tower",
            llm_module="model.language_model",
            mask_style="tensor",
            chat=VICUNA,
            images=LLAVA_SQUARES,
            positions="sequence",
            unused_vision=_beyond_feature_layer(r"vision_tower\.encoder\.layers"),
        ),
        BackboneSpec(
            model_type="llava_next",
            processor="LlavaNextProcessor",
            vision_regex=_CLIP_REGEX,
            llm_regex=_LLM_REGEX,
            projector="model.multi_modal_projector",
            projector_name="multi_modal_projector",
            vision_module="model.vision_tower",
            llm_module="model.language_model",
            mask_style="tensor",
            chat=VICUNA,
            images=LLAVA_NEXT_CROPS,
            positions="sequence",
            unused_vision=_beyond_feature_layer(r"vision_tower\.encoder\.layers"),
        ),
        BackboneSpec(
            model_type="internvl",
            processor="InternVLProcessor",
            vision_regex=(
                r".*vision_tower\.encoder\.layer\.\d+\."
                r"(attention\.(q_proj|k_proj|v_proj|projection_layer)|mlp\.fc[12])"
            ),
            llm_regex=_LLM_REGEX,
            projector="model.multi_modal_projector",
            projector_name="multi_modal_projector",
            vision_module="model.vision_tower",
            llm_module="model.language_model",
            mask_style="tensor",
            chat=INTERNVL_CHATML,
            images=INTERNVL_TILES,
            positions="sequence",
            unused_vision=_beyond_feature_layer(r"vision_tower\.encoder\.layer"),
        ),
        BackboneSpec(
            model_type="deepseek_vl",
            processor="DeepseekVLProcessor",
            vision_regex=r".*vision_model\.encoder\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|mlp\.fc[12])",
            llm_regex=_LLM_REGEX,
            projector="model.aligner",
            projector_name="aligner",
            vision_module="model.vision_model",
            llm_module="model.language_model",
            mask_style="tensor",
            chat=DEEPSEEK,
            images=DEEPSEEK_SQUARES,
            positions="sequence",
        ),
        BackboneSpec(
            model_type="deepseek_vl_v2",
            processor="DeepseekVLV2Processor",
            vision_regex=r".*vision_model\.encoder\.layers\.\d+\.(self_attn\.([qkv]|out)_proj|mlp\.fc[12])",
            llm_regex=(
                r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
                r"|mlp\.(shared_experts\.)?(gate_proj|up_proj|down_proj))"
            ),
            projector="model.aligner",
            projector_name="aligner",
            vision_module="model.vision_model",
            llm_module="model.language_model",
            mask_style="tensor",
            chat=DEEPSEEK_VL2,
            images=DEEPSEEK_TILES,
            positions="sequence",
            own_classes=("lmm4edit.judge.deepseek_vl2", "lmm4edit.judge.deepseek_vl2_processor"),
        ),
    ]
}

_BY_PROCESSOR = {spec.processor: spec for spec in BACKBONES.values()}


def register_own_classes() -> None:
    """Make the classes of families that Transformers lacks known to its Auto classes."""
    for spec in BACKBONES.values():
        for module in spec.own_classes:
            importlib.import_module(module)


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
            "in lmm4edit/judge/backbone_table.py."
        )
    return BACKBONES[model_type]


def processor_spec(processor: Any) -> BackboneSpec:
    """The table's row for a processor.

    Raises:
        ConfigError: for a processor that the table lacks.
    """
    name = type(processor).__name__
    if name not in _BY_PROCESSOR:
        raise ConfigError(
            f"No backbone with a processor {name!r} is known; expected one of {sorted(_BY_PROCESSOR)}. A new one is a "
            "new row in lmm4edit/judge/backbone_table.py."
        )
    return _BY_PROCESSOR[name]
