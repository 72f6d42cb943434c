"""DeepSeek-VL2, which Transformers does not have, put together from parts that it has.

SigLIP vision encoder, two-layer projector over 2 x 2 patches, ``deepseek_v2`` language model (Wu et al. 2024,
arXiv:2412.10302). Reads the published files as they are: configuration, weight names, processor settings. Only the
size with latent attention and plain softmax routing fits the native language model: DeepSeek-VL2-Small.

Importing this module makes the classes known to Transformers' Auto classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Model
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from lmm4edit.errors import ConfigError

MODEL_TYPE = "deepseek_vl_v2"
PUBLISHED_RESOLUTIONS = tuple(
    (384 * columns, 384 * rows) for columns in range(1, 10) for rows in range(1, 10) if columns * rows <= 9
)
"""Width and height of the canvases that an image is cut into tiles on (arXiv:2412.10302, section 2)."""


class DeepseekVL2Config(PreTrainedConfig):
    """Configuration; takes the published ``config.json`` and what this package saves.

    Raises:
        ConfigError: for a published size whose language model is not a native ``deepseek_v2``.
    """

    model_type = MODEL_TYPE
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "text_config": DeepseekV2Config,
        "vision_config": SiglipVisionConfig,
    }

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    candidate_resolutions: list | tuple = PUBLISHED_RESOLUTIONS
    image_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        language = kwargs.pop("language_config", None)
        if language is not None:
            self.text_config = _native_text(dict(language))
        if isinstance(self.vision_config, dict) and "width" in self.vision_config:
            self.vision_config = _native_vision(self.vision_config)
        for key, expected in (("tile_tag", "2D"), ("global_view_pos", "head")):
            if (got := kwargs.pop(key, expected)) != expected:
                raise ConfigError(f"DeepSeek-VL2: expected {key} {expected!r}, got {got!r}. No published size has it.")
        kwargs.pop("projector_config", None)  # its sizes follow from the two others
        super().__post_init__(**kwargs)


def _native_text(language: dict[str, Any]) -> dict[str, Any]:
    """The published ``language_config`` for the native class, with its own defaults where it is silent."""
    defaults = {"use_mla": True, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    for key, expected in defaults.items():
        if (got := language.pop(key, expected)) != expected:
            raise ConfigError(
                f"DeepSeek-VL2: the native deepseek_v2 language model has {key} {expected!r}, but this checkpoint has "
                f"{got!r}. Of the published sizes only DeepSeek-VL2-Small fits."
            )
    for key in ("architectures", "auto_map", "lm_head", "rm_head", "torch_dtype", "model_type"):
        language.pop(key, None)
    return {"q_lora_rank": None, **language, "topk_method": "greedy"}


def _native_vision(vision: dict[str, Any]) -> dict[str, Any]:
    width, ratio = vision["width"], vision.get("mlp_ratio", 4)
    return {
        "hidden_size": width,
        "intermediate_size": int(width * ratio),
        "num_hidden_layers": vision.get("layers", 24),
        "num_attention_heads": vision.get("heads", 16),
        "image_size": vision.get("image_size", 384),
        "patch_size": vision.get("patch_size", 16),
        "vision_use_head": False,
    }


class DeepseekVL2Projector(nn.Module):
    """Patches [crops, side * side, vision size] to tokens [crops, ceil(side / 2) ** 2, hidden size]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden = config.text_config.hidden_size
        self.layers = nn.Sequential(
            nn.Linear(4 * config.vision_config.hidden_size, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Join every 2 x 2 patches (an odd side is padded with zeros) and project them."""
        side = int(patches.shape[1] ** 0.5)
        square = patches.transpose(1, 2).unflatten(2, (side, side))
        square = nn.functional.pad(square, (0, side % 2, 0, side % 2))
        return self.layers(nn.functional.unfold(square, 2, stride=2).transpose(1, 2))


class DeepseekVL2PreTrainedModel(PreTrainedModel):
    """What Transformers wants to know of both classes below."""

    config_class = DeepseekVL2Config
    config: Any
    base_model_prefix = "model"
    input_modalities: Any = ("image", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    # SigLIP's pooling head: published, never used.
    _keys_to_ignore_on_load_unexpected: Any = (r"attn_pool\.",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekVL2Model):
            for parameter in (module.image_newline, module.view_separator):
                nn.init.normal_(parameter, std=self.config.text_config.hidden_size**-0.5)


class DeepseekVL2Model(DeepseekVL2PreTrainedModel):
    """Vision encoder, projector and language model, without the output head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_model = SiglipVisionModel._from_config(config.vision_config)
        self.aligner = DeepseekVL2Projector(config)
        self.language_model = DeepseekV2Model._from_config(config.text_config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.view_separator = nn.Parameter(torch.empty(config.text_config.hidden_size))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Of the language model."""
        return self.language_model.get_input_embeddings()

    def image_features(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        """Tokens of all images.

        Args:
            pixel_values: [crops of all images, 3, side, side]; of each image the whole first, then its tiles row by
                row.
            image_sizes: [images, 2]; height and width of the canvas that the tiles cover.

        Returns:
            [tokens, hidden size]: of each image the whole, a separator, the tiles; rows end with a newline.
        """
        crop = self.config.vision_config.image_size
        crops = self.aligner(self.vision_model(pixel_values.to(self.vision_model.dtype)).last_hidden_state)
        crops = crops.to(self.image_newline.dtype)
        side = int(crops.shape[1] ** 0.5)
        done, first = [], 0
        for height, width in image_sizes.tolist():
            rows, columns = height // crop, width // crop
            whole = crops[first].unflatten(0, (side, side))
            tiles = crops[first + 1 : first + 1 + rows * columns].unflatten(1, (side, side))
            tiles = tiles.unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            done += [self._with_newlines(whole), self.view_separator[None], self._with_newlines(tiles)]
            first += 1 + rows * columns
        return torch.cat(done)

    def _with_newlines(self, square: Tensor) -> Tensor:
        newlines = self.image_newline.expand(square.shape[0], 1, -1)
        return torch.cat([square, newlines], dim=1).flatten(0, 1)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of the language model.

        Args:
            input_ids: [B, L].
            attention_mask, position_ids, use_cache: for the language model.
            pixel_values, image_sizes: see :meth:`image_features`.
            mm_token_type_ids: [B, L]; 1 where the next token of the images stands.
        """
        embeddings = self.get_input_embeddings()(input_ids)
        if pixel_values is not None and image_sizes is not None and mm_token_type_ids is not None:
            features = self.image_features(pixel_values, image_sizes).to(embeddings.dtype)
            here = mm_token_type_ids.bool()
            if int(here.sum()) != len(features):
                raise ValueError(f"Expected {len(features)} image tokens for these images, got {int(here.sum())}.")
            embeddings = embeddings.masked_scatter(here[..., None], features)
        return self.language_model(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )


class DeepseekVL2ForConditionalGeneration(DeepseekVL2PreTrainedModel):
    """The model with its output head. The judge calls both apart."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = DeepseekVL2Model(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Of the language model."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def forward(self, **kwargs: Any) -> Tensor:
        """Logits [B, L, vocabulary]; arguments as :meth:`DeepseekVL2Model.forward`."""
        return self.lm_head(self.model(**kwargs).last_hidden_state)


class _FirstAxis(ConversionOps):
    """Drop the published position embedding's leading axis of one, or (``add``) put it back."""

    def __init__(self, add: bool = False) -> None:
        self.add = add

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> Any:
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: tensor[None] if self.add else tensor[0]}

    @property
    def reverse_op(self) -> ConversionOps:
        return _FirstAxis(not self.add)


_VISION = "model.vision_model"
_HALVES = [
    WeightConverter(
        source_patterns=f"attn.qkv.{kind}",
        target_patterns=[f"self_attn.{name}_proj.{kind}" for name in "qkv"],
        operations=[Chunk(dim=0)],
    )
    for kind in ("weight", "bias")
]
for _half in _HALVES:
    # The language model's q_proj must stay what it is when the names are turned back.
    _half.scope_prefix, _half.base_model_prefix = "vision_model", "model"

register_checkpoint_conversion_mapping(
    MODEL_TYPE,
    [
        WeightRenaming(r"^language\.lm_head\.", "lm_head."),
        WeightRenaming(r"^language\.model\.", "model.language_model."),
        WeightRenaming(r"^projector\.", "model.aligner."),
        WeightRenaming(r"^image_newline", "model.image_newline"),
        WeightRenaming(r"^view_seperator", "model.view_separator"),
        WeightRenaming(r"^vision\.blocks\.", f"{_VISION}.encoder.layers."),
        WeightRenaming(r"^vision\.patch_embed\.proj\.", f"{_VISION}.embeddings.patch_embedding."),
        WeightRenaming(r"^vision\.norm\.", f"{_VISION}.post_layernorm."),
        WeightRenaming(r"\.norm1\.", ".layer_norm1."),
        WeightRenaming(r"\.norm2\.", ".layer_norm2."),
        WeightRenaming(r"\.attn\.proj\.", ".self_attn.out_proj."),
        WeightConverter(
            source_patterns="vision.pos_embed",
            target_patterns=f"{_VISION}.embeddings.position_embedding.weight",
            operations=[_FirstAxis()],
        ),
        *_HALVES,
    ],
    overwrite=True,
)
AutoConfig.register(MODEL_TYPE, DeepseekVL2Config, exist_ok=True)
AutoModelForImageTextToText.register(DeepseekVL2Config, DeepseekVL2ForConditionalGeneration, exist_ok=True)
