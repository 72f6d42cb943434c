"""DeepSeek-VL2 from native parts: the published layout is read as it is, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import load_backbone, set_pixel_limits, special_ids
from lmm4edit.judge.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2ForConditionalGeneration
from lmm4edit.judge.encoding import process_images
from tests.judge.tiny_families import save_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("deepseek_vl_v2", tmp_path_factory.mktemp("deepseek") / "native")


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with configuration and processor settings as the authors publish them."""
    target = tmp_path_factory.mktemp("published") / "model"
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    text, resolutions = config["text_config"], config["candidate_resolutions"]
    kept = [
        key for key in text if key not in ("model_type", "rope_parameters", "dtype", "head_dim", "transformers_version")
    ]
    _write(
        target / "config.json",
        {
            "model_type": "deepseek_vl_v2",
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "candidate_resolutions": resolutions,
            "global_view_pos": "head",
            "tile_tag": "2D",
            "language_config": {
                **{key: text[key] for key in kept},
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "lm_head": True,
                "torch_dtype": "bfloat16",
            },
            "projector_config": {"model_type": "mlp_projector", "input_dim": 16, "n_embed": 32},
            "vision_config": {
                "model_type": "vision",
                "width": 16,
                "mlp_ratio": 2,
                "layers": 3,
                "heads": 2,
                "image_size": 28,
                "patch_size": 4,
            },
        },
    )
    settings = {"processor_class": "DeepseekVLV2Processor", "sft_format": "deepseek", "ignore_id": -100}
    _write(
        target / "processor_config.json",
        {**settings, "candidate_resolutions": resolutions, "patch_size": 4, "downsample_ratio": 2, "normalize": True},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    state = load_file(folder / "model.safetensors")
    state["vision.attn_pool.latent"] = torch.zeros(1, 1, 16)  # published, never used
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_published_layout_gives_the_same_model(folder: Path, published: Path) -> None:
    native, _ = load_backbone(folder)
    loaded, processor = load_backbone(published)
    expected = dict(native.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert loaded.config.image_token_id is None and special_ids(loaded, processor)["image_token_id"] == image


def test_weights_are_saved_under_their_published_names(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    assert {
        "image_newline",
        "view_seperator",  # so spelt
        "vision.pos_embed",
        "vision.patch_embed.proj.weight",
        "vision.blocks.0.attn.qkv.weight",
        "vision.blocks.0.attn.proj.bias",
        "vision.blocks.0.mlp.fc1.weight",
        "vision.blocks.0.norm1.weight",
        "vision.norm.weight",
        "projector.layers.0.weight",
        "projector.layers.2.bias",
        "language.model.embed_tokens.weight",
        "language.model.layers.0.self_attn.q_proj.weight",
        "language.model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "language.model.layers.0.mlp.gate_proj.weight",
        "language.model.layers.1.mlp.gate.weight",
        "language.model.layers.1.mlp.experts.3.up_proj.weight",
        "language.model.layers.1.mlp.shared_experts.down_proj.weight",
        "language.model.norm.weight",
        "language.lm_head.weight",
    } <= names
    assert all(
        name.split(".")[0] in ("image_newline", "view_seperator", "vision", "projector", "language") for name in names
    )


@torch.no_grad()
def test_image_tokens_stand_where_their_pixels_do(folder: Path) -> None:
    """Against a second construction: token by token, from the place in the picture."""
    model, processor = load_backbone(folder)
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (28, 84, 3), dtype=np.uint8))
    (done,) = process_images(processor, [image])
    assert done.size == (28, 84) and done.grid == (4, 7, 7)
    got = model.model.image_features(done.patches, torch.tensor([done.size]))
    crops = model.model.aligner(model.model.vision_model(done.patches).last_hidden_state)
    side = 4  # 7 patches padded to 8, joined 2 x 2
    newline, separator = model.model.image_newline, model.model.view_separator
    expected = []
    for row in range(side):
        expected += [crops[0, row * side + column] for column in range(side)] + [newline]
    expected.append(separator)
    for row in range(side):
        expected += [crops[1 + column // side, row * side + column % side] for column in range(3 * side)] + [newline]
    torch.testing.assert_close(got, torch.stack(expected))
    assert len(expected) == done.tokens == processor.count_tokens((28, 84))
    # The tiles are the picture itself: it has the canvas' size.
    pixels = torch.from_numpy(np.asarray(image)).permute(2, 0, 1) / 255 * 2 - 1
    torch.testing.assert_close(torch.cat(list(done.patches[1:]), dim=2), pixels)


@torch.no_grad()
def test_the_projector_joins_two_by_two_patches(folder: Path) -> None:
    model, _ = load_backbone(folder)
    patches = torch.randn(1, 49, 16, generator=torch.Generator().manual_seed(0))
    got = model.model.aligner(patches)
    square = torch.zeros(8, 8, 16)
    square[:7, :7] = patches[0].view(7, 7, 16)
    # Values of a joint token: for each channel its four patches, row by row.
    joint = square[2:4, 4:6].permute(2, 0, 1).reshape(-1)
    torch.testing.assert_close(got[0, 1 * 4 + 2], model.model.aligner.layers(joint))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla": False}, "has use_mla True, but this checkpoint has False"),
        ({"topk_method": "noaux_tc"}, "has topk_method 'greedy', but this checkpoint has 'noaux_tc'"),
        ({"norm_topk_prob": True}, "has norm_topk_prob False, but this checkpoint has True"),
    ],
)
def test_sizes_with_another_language_model_are_refused(
    published: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((published / "config.json").read_text())
    config["language_config"].update(changes)
    _write(tmp_path / "config.json", config)
    with pytest.raises(ConfigError) as caught:
        load_backbone(tmp_path)
    assert str(caught.value) == (
        f"DeepSeek-VL2: the native deepseek_v2 language model {message}. Of the published sizes only "
        "DeepSeek-VL2-Small fits."
    )


def test_pixel_limits_limit_the_canvas(folder: Path, tmp_path: Path) -> None:
    _, processor = load_backbone(folder)
    image = Image.new("RGB", (84, 28))
    assert process_images(processor, [image])[0].size == (28, 84)
    set_pixel_limits(processor, None, 2 * 28 * 28)
    assert process_images(processor, [image])[0].size == (28, 56)
    with pytest.raises(ConfigError, match=r"^Images are cut into tiles of 784 pixels: expected max_pixels of at least"):
        set_pixel_limits(processor, None, 700)


def test_the_small_size_has_the_published_number_of_parameters() -> None:
    """16.1 billion (arXiv:2412.10302, table 1), from the sizes in the published ``config.json``."""
    language = {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    vision = {"width": 1152, "layers": 27, "heads": 16, "mlp_ratio": 3.7362, "patch_size": 14}
    with torch.device("meta"):
        model = DeepseekVL2ForConditionalGeneration(DeepseekVL2Config(language_config=language, vision_config=vision))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(16.1e9, rel=0.005)
