"""A tiny random model of the real class of every backbone family, with its real processor. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from lmm4edit.judge.backbones import save_backbone
from lmm4edit.judge.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2ForConditionalGeneration
from lmm4edit.judge.deepseek_vl2_processor import DeepseekVLV2Processor
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer

HIDDEN = 32
WIDE = 0.2
"""Standard deviation of the initial weights, so that states differ between tokens."""


def _texts() -> list[str]:
    prompts = load_prompts()
    words = ["Instruction: remove the cat", "The quality score is", "system\nuser\nassistant\n Yes No"]
    return [prompts.system, *words] * 3


def _qwen_tokenizer() -> Qwen2Tokenizer:
    return build_tiny_tokenizer(_texts(), vocab_size=400)


def _byte_level() -> dict[str, Any]:
    return json.loads(_qwen_tokenizer().backend_tokenizer.to_str())["model"]


def _sentencepiece_tokenizer() -> LlamaTokenizer:
    """As Llama's: a space before every text, digits singly, bytes for what is unknown."""
    special = ["<unk>", "<s>", "</s>", "<image>", "<pad>"]
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace("\u2581", "first"), pre_tokenizers.Digits(individual_digits=True)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    trained.train_from_iterator(_texts(), trainer)
    bpe = json.loads(trained.to_str())["model"]
    return LlamaTokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],  # type: ignore[arg-type]
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        model_max_length=2048,
    )


def _text(tokenizer: Any, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": WIDE,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _encoder(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "initializer_range": WIDE,
        **more,
    }


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    token = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def _qwen_images(patch: int) -> dict[str, Any]:
    side = 2 * patch
    return {
        "image_processor": transformers.Qwen2VLImageProcessor(
            patch_size=patch, min_pixels=side**2, max_pixels=16 * side**2
        ),
        "video_processor": transformers.Qwen2VLVideoProcessor(patch_size=patch),
    }


def _qwen2_5_vl() -> tuple[Any, Any]:
    tokenizer = _qwen_tokenizer()
    model = build_tiny_backbone(
        tokenizer, hidden=HIDDEN, layers=2, vision_hidden=16, vision_layers=2, image_size=28, initializer_range=WIDE
    )
    return model, build_tiny_processor(tokenizer, min_pixels=14 * 14, max_pixels=56 * 56)


def _qwen2_vl() -> tuple[Any, Any]:
    tokenizer = _qwen_tokenizer()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10.0}
    config = transformers.Qwen2VLConfig(
        text_config={**_text(tokenizer, "qwen2_vl_text"), "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "num_heads": 2,
            "hidden_size": HIDDEN,
            "patch_size": 7,
            "mlp_ratio": 2,
            "initializer_range": WIDE,
        },
        **_qwen_ids(tokenizer),
        tie_word_embeddings=False,
    )
    processor = transformers.Qwen2VLProcessor(tokenizer=tokenizer, **_qwen_images(7))
    return transformers.Qwen2VLForConditionalGeneration(config), processor


def _qwen3_vl() -> tuple[Any, Any]:
    tokenizer = _qwen_tokenizer()
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10.0}
    text = _text(tokenizer, "qwen3_vl_text")
    config = transformers.Qwen3VLConfig(
        text_config={**text, "head_dim": 8, "num_hidden_layers": 3, "rope_parameters": rope},
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": WIDE,
        },
        **_qwen_ids(tokenizer),
        tie_word_embeddings=False,
    )
    processor = transformers.Qwen3VLProcessor(tokenizer=tokenizer, **_qwen_images(8))
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def _llava() -> tuple[Any, Any]:
    tokenizer = _sentencepiece_tokenizer()
    config = transformers.LlavaConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config=_encoder("clip_vision_model"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _llava_next() -> tuple[Any, Any]:
    tokenizer = _sentencepiece_tokenizer()
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config=_encoder("clip_vision_model"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def _internvl() -> tuple[Any, Any]:
    bpe = _byte_level()
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],  # type: ignore[arg-type]
        eos_token="<|im_end|>",
        extra_special_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        model_max_length=2048,
    )
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    config = transformers.InternVLConfig(
        text_config=_text(tokenizer, "qwen2"),
        vision_config=_encoder("internvl_vision", image_size=[28, 28], patch_size=[7, 7]),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, max_patches=4),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size={"height": 28, "width": 28}),
        image_seq_length=4,
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def _deepseek_vl() -> tuple[Any, Any]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_qwen_tokenizer().backend_tokenizer,
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
        pad_token="<｜▁pad▁｜>",
        extra_special_tokens={"image_token": "<image_placeholder>"},
        model_max_length=2048,
    )
    config = transformers.DeepseekVLConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config=_encoder("siglip_vision_model"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image_placeholder>"),
        tie_word_embeddings=False,
    )
    processor = transformers.DeepseekVLProcessor(
        image_processor=transformers.DeepseekVLImageProcessor(size={"height": 28, "width": 28}, min_size=7),
        tokenizer=tokenizer,
        num_image_tokens=16,
    )
    return transformers.DeepseekVLForConditionalGeneration(config), processor


def _deepseek_vl2() -> tuple[Any, Any]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_qwen_tokenizer().backend_tokenizer,
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
        model_max_length=2048,
    )
    resolutions = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
    processor = DeepseekVLV2Processor(tokenizer, resolutions, patch_size=4)
    text = {
        **_text(tokenizer, "deepseek_v2"),
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    config = DeepseekVL2Config(
        text_config=text,
        vision_config=_encoder("siglip_vision_model", patch_size=4, vision_use_head=False),
        candidate_resolutions=resolutions,
    )
    return DeepseekVL2ForConditionalGeneration(config), processor


BUILDERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "internvl": _internvl,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_v2": _deepseek_vl2,
}


def save_family(model_type: str, folder: Path) -> Path:
    """Save the tiny random model of a family, the same weights every time, and its processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, processor = BUILDERS[model_type]()
    save_backbone(folder, model, processor)
    return folder
