"""Loading any backbone by one code path, and refusing what would silently be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.backbone_files import backbone_fingerprint, describe_place, find_backbone
from lmm4edit.judge.backbones import (
    BACKBONES,
    backbone_spec,
    load_backbone,
    module_names,
    set_pixel_limits,
    special_ids,
)
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny


@pytest.fixture
def copy(backbone_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(backbone_folder, tmp_path / "copy"))


def test_the_tiny_backbone_is_a_real_one(backbone_folder: Path) -> None:
    model, processor = load_backbone(backbone_folder)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert next(model.parameters()).dtype == torch.float32 and not model.training
    assert special_ids(model, processor) == {
        "image_token_id": processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "pad_token_id": processor.tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}], add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_survives_saving_and_splits_digits(backbone_folder: Path) -> None:
    _, processor = load_backbone(backbone_folder)
    tokenizer = processor.tokenizer
    assert tokenizer.tokenize(" 54.70") == ["Ġ", "5", "4", ".", "7", "0"]
    assert tokenizer.decode(tokenizer.encode("naïve 試 🎨")) == "naïve 試 🎨"
    assert tokenizer.model_max_length == 2048 and tokenizer.eos_token == "<|im_end|>"


def test_same_seed_same_weights_and_the_global_seed_is_left_alone() -> None:
    tokenizer = build_tiny_tokenizer(["a b c"], vocab_size=256)
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "vision_hidden": 16, "vision_layers": 1, "image_size": 28}
    before = torch.random.get_rng_state()
    first, second = (build_tiny_backbone(tokenizer, seed=3, **sizes) for _ in range(2))
    other = build_tiny_backbone(tokenizer, seed=4, **sizes)
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_tied_embeddings_survive_saving(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(["a b c"], vocab_size=256)
    model = build_tiny_backbone(
        tokenizer,
        hidden=32,
        layers=1,
        vision_hidden=16,
        vision_layers=1,
        image_size=28,
        tie_word_embeddings=True,
    )
    save_tiny(tmp_path, model, build_tiny_processor(tokenizer), dtype=torch.float32)
    loaded, _ = load_backbone(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.lm_head.weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden": 36},
            "The language model needs an even number of heads and a head size that is a multiple of 8, got hidden=36 "
            "and heads=4.",
        ),
        (
            {"vision_hidden": 20},
            "The vision encoder needs a head size that is a multiple of 4, got vision_hidden=20 and vision_heads=4.",
        ),
        ({"image_size": 50}, "image_size must be a multiple of 2 x patch_size=14, got 50."),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tiny_backbone(build_tiny_tokenizer(["a"], vocab_size=256), **sizes)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_too_small_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_tiny_tokenizer(["a"], vocab_size=100)
    assert str(caught.value) == "vocab_size must be at least 256 (one token for each byte), got 100."


def test_regular_expressions_find_every_linear_layer(backbone_folder: Path) -> None:
    model, _ = load_backbone(backbone_folder)
    spec = backbone_spec(model)
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    vision, llm = set(module_names(model, spec.vision_regex)), set(module_names(model, spec.llm_regex))
    assert vision == {n for n in linear if n.startswith(f"{spec.vision_module}.blocks.")}
    assert llm == {n for n in linear if n.startswith(f"{spec.llm_module}.layers.")}
    assert len(vision) == 2 * 5 and len(llm) == 2 * 7
    assert isinstance(model.get_submodule(spec.projector), torch.nn.Module)
    assert spec.projector.endswith(spec.projector_name)
    assert all(row.model_type == key for key, row in BACKBONES.items())


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (
            "flash_attention_2",
            "attn_implementation 'flash_attention_2' cannot be used: FlashAttention takes no mask for packed questions "
            "and would guess sequences from restarting positions. Use 'sdpa'.",
        ),
        ("magic", "attn_implementation must be 'sdpa' or 'eager', got 'magic'."),
    ],
)
def test_attention_that_cannot_pack_is_refused(backbone_folder: Path, attention: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_backbone(backbone_folder, attn_implementation=attention)
    assert str(caught.value) == message


def test_unknown_dtype_is_refused(backbone_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_backbone(backbone_folder, dtype="int8")
    assert str(caught.value) == "dtype must be one of ['bfloat16', 'float16', 'float32'], got 'int8'."


def test_unknown_model_type_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "blip"}))
    with pytest.raises(ConfigError) as caught:
        load_backbone(copy)
    assert str(caught.value) == (
        f"No backbone of type 'blip' is known; expected one of {sorted(BACKBONES)}. A new one is a new row in "
        "lmm4edit/judge/backbone_table.py."
    )


def test_incomplete_weights_are_refused_by_name(copy: Path) -> None:
    path = copy / "model.safetensors"
    state = load_file(path)
    (key,) = [name for name in state if name.endswith("merger.mlp.0.weight")]
    state[key.replace("mlp.0.weight", "renamed")] = state.pop(key)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_backbone(copy)
    assert str(caught.value) == (
        f"Backbone {str(copy)!r} is incomplete or of another version: 1 weights are missing from the files (they would "
        "be random): model.visual.merger.mlp.0.weight; 1 weights are in the files but not in the model: "
        "model.visual.merger.renamed. Download it again, or use the Transformers version it was saved with."
    )


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*Expected a folder with config\.json, weights in"):
        load_backbone(tmp_path)


def test_pixel_limits(backbone_folder: Path) -> None:
    _, processor = load_backbone(backbone_folder, min_pixels=28 * 28, max_pixels=28 * 28)
    assert dict(processor.image_processor.size) == {"shortest_edge": 784, "longest_edge": 784}
    set_pixel_limits(processor, None, 56 * 56)
    assert dict(processor.image_processor.size) == {"shortest_edge": 784, "longest_edge": 3136}
    for low, high in [(100, 50), (0, 784), (1, 195)]:
        with pytest.raises(ConfigError) as caught:
            set_pixel_limits(processor, low, high)
        assert str(caught.value) == (
            "Expected 0 < min_pixels <= max_pixels and max_pixels >= 196 (one token of 14 x 14 pixels), got "
            f"min_pixels={low} and max_pixels={high}."
        )


def test_fingerprint_follows_the_weights(backbone_folder: Path, copy: Path) -> None:
    original = backbone_fingerprint(backbone_folder)
    assert backbone_fingerprint(copy) == original and len(original) == 64
    state = load_file(copy / "model.safetensors")
    state["lm_head.weight"][0, 0] += 1
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    assert backbone_fingerprint(copy) != original
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        backbone_fingerprint(copy)
    assert str(caught.value) == (
        f"Backbone {str(copy)!r}: expected model*.safetensors in {copy}, found none. Save it with save_pretrained, or "
        "download the safetensors files."
    )


def test_sharded_weights_have_a_fingerprint_and_lack_no_part(backbone_folder: Path, tmp_path: Path) -> None:
    model, processor = load_backbone(backbone_folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and len(backbone_fingerprint(tmp_path)) == 64
    shards[0].unlink()
    with pytest.raises(CheckpointError) as caught:
        backbone_fingerprint(tmp_path)
    assert str(caught.value) == f"{shards[0]}: the weight file is missing. Download the backbone again."


def test_a_backbone_beside_the_checkpoint_moves_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, checkpoint = tmp_path / "a" / "backbone", tmp_path / "a" / "judge"
    backbone.mkdir(parents=True)
    place = describe_place(str(backbone), checkpoint)
    assert place == {"name": None, "relative_path": "../backbone"}  # an absolute path means nothing elsewhere
    (tmp_path / "a").rename(tmp_path / "b")
    assert find_backbone(place, tmp_path / "b" / "judge") == str(tmp_path / "b" / "backbone")

    monkeypatch.chdir(tmp_path / "b")
    assert describe_place("backbone", Path("judge")) == {"name": "backbone", "relative_path": "../backbone"}
    elsewhere = {"name": "backbone", "relative_path": "../../gone"}
    assert find_backbone(elsewhere, Path("judge").resolve()) == str(tmp_path / "b" / "backbone")
    assert describe_place("Qwen/Qwen2.5-VL-7B-Instruct", Path("judge"))["relative_path"] is None
    hub = {"name": "Qwen/Qwen2.5-VL-7B-Instruct", "relative_path": None}
    assert find_backbone(hub, Path("judge")) == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert find_backbone(hub, Path("judge"), "x/y") == "x/y"
    missing = {"name": None, "relative_path": "../gone"}
    with pytest.raises(CheckpointError) as caught:
        find_backbone(missing, Path("judge"))
    assert str(caught.value) == (
        f"judge: its backbone was not found at ['{tmp_path}/b/gone']. Put it there, or say where it lies with the "
        "backbone option."
    )
