"""What the table of backbone families says, proven with a tiny random model of each family's real class."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import adalora_layers, effective_ranks, trainable_parameters
from lmm4edit.judge.backbone_table import BACKBONES
from lmm4edit.judge.backbones import (
    adapter_patterns,
    backbone_spec,
    last_hidden_states,
    load_backbone,
    module_names,
    plain_model,
    projector_modules,
    set_pixel_limits,
    special_ids,
)
from lmm4edit.judge.checkpoint import load_checkpoint, save_checkpoint
from lmm4edit.judge.encoding import encode_example, process_images
from lmm4edit.judge.families import FAMILIES, PROOFS
from lmm4edit.judge.image_features import encode_images, takes_features
from lmm4edit.judge.packing import PackedBatch, PackedExample, unpack
from lmm4edit.judge.prefix_cache import compute_prefixes, split_example, stack_prefixes
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.records import BUILT_IN_DIMENSIONS
from tests.judge.family_claims import SHOWN, shows
from tests.judge.kit import STAGE_1, STAGE_2, Kit
from tests.judge.tiny_families import BUILDERS, save_family

TOLERANCE = 2e-5
SIZES = [(28, 42), (56, 14), (28, 28), (61, 90), (7, 40), (150, 149)]
"""Heights and widths."""

CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "deepseek_vl_v2": "DeepseekVL2ForConditionalGeneration",
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the saved tiny models, by family."""
    parent = tmp_path_factory.mktemp("families")
    return {family: save_family(family, parent / family) for family in BUILDERS}


@pytest.fixture
def kit(family: str, folders: dict[str, Path]) -> Kit:
    """A freshly loaded backbone of the family."""
    model, processor = load_backbone(folders[family])
    return Kit(model, processor, load_prompts())


def test_table_rows_and_claims_name_the_same_families() -> None:
    assert [family.model_type for family in FAMILIES] == list(BACKBONES) == list(BUILDERS) == list(CLASSES)
    for family in FAMILIES:
        assert set(family.proven) <= set(PROOFS) and family.checkpoints and family.licence
    assert len({spec.processor for spec in BACKBONES.values()}) == len(BACKBONES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_table_says_how_large_the_tested_model_is(family: Any, folders: dict[str, Path]) -> None:
    model, _ = load_backbone(folders[family.model_type])
    assert sum(parameter.numel() for parameter in model.parameters()) == family.tested_parameters


@shows("class")
def test_the_tiny_model_is_of_the_real_class(family: str, kit: Kit) -> None:
    model, spec = kit.backbone, backbone_spec(kit.backbone)
    assert type(model).__name__ == CLASSES[family] and type(model).__module__.startswith("transformers.")
    assert type(kit.processor).__name__ == spec.processor
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    vision, llm = (set(module_names(model, pattern)) for pattern in (spec.vision_regex, spec.llm_regex))
    layers = ("blocks.", "encoder.layers.", "encoder.layer.")
    assert vision == {n for n in linear if n.startswith(tuple(f"{spec.vision_module}.{layer}" for layer in layers))}
    assert llm == {n for n in linear if n.startswith(f"{spec.llm_module}.layers.")}
    assert vision and llm and spec.projector.endswith(spec.projector_name)
    projectors = projector_modules(model)
    between = {n for n in linear - vision - llm if n != "lm_head" and ".head." not in n}
    assert between == {n for n in linear if n.startswith(tuple(f"{path}." for path in projectors))}


@shows("tokens")
def test_images_take_the_tokens_that_the_processor_says(family: str, kit: Kit) -> None:
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]
    side = backbone_spec(kit.backbone).images.shortest_side(kit.processor)
    images = [image.resize((max(side, image.width), max(side, image.height))) for image in images]
    marker = backbone_spec(kit.backbone).chat.image_token
    token = special_ids(kit.backbone, kit.processor)["image_token_id"]
    together = process_images(kit.processor, images)
    for image, done in zip(images, together, strict=True):
        theirs = kit.processor(images=[image], text=[marker], return_tensors="pt")
        assert done.tokens == int((theirs["input_ids"] == token).sum())
        assert done.size == (image.height, image.width)
        (alone,) = process_images(kit.processor, [np.asarray(image)])
        assert alone.grid == done.grid and torch.allclose(alone.patches, done.patches, atol=1e-5)
        if image.width == image.height:
            torch.testing.assert_close(done.patches, theirs["pixel_values"].reshape(done.patches.shape))
    assert len({done.patches.sum().item() for done in together}) == len(SIZES)


def _separate_states(kit: Kit, example: PackedExample) -> list[Tensor]:
    """States of each question's tokens by plain causal attention and the backbone's own positions."""
    states = []
    for row in unpack(example):
        batch = kit.batch([row])
        arguments = backbone_spec(kit.backbone).images.arguments(batch)
        out = kit.backbone.model(
            input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids), **arguments
        )
        states.append(out.last_hidden_state[0, len(row.prefix_ids) :])
    return states


@shows("packed")
@torch.no_grad()
def test_packed_states_equal_one_question_alone(family: str, kit: Kit) -> None:
    examples = [kit.taught(index) for index in range(3)]
    batch = kit.batch(examples)
    packed = last_hidden_states(kit.backbone, batch)
    for row, example in enumerate(examples):
        for suffix, alone in zip(example.suffixes, _separate_states(kit, example), strict=True):
            together = packed[row, batch.segment_ids[row] == batch.suffix_keys.index(suffix.key) + 1]
            torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=0)
    assert packed.abs().mean() > 0.1  # equality of zeros would prove nothing
    kit.backbone.set_attn_implementation("eager")
    eager = last_hidden_states(kit.backbone, batch)
    inside = batch.segment_ids >= 0
    torch.testing.assert_close(eager[inside], packed[inside], atol=TOLERANCE, rtol=0)


@shows("gradients")
@pytest.mark.parametrize("objective", [STAGE_1, STAGE_2], ids=["stage1", "stage2"])
def test_packed_loss_and_gradients_equal_separate(
    family: str, kit: Kit, objective: Any, gradients: Callable[[torch.nn.Module], dict[str, Tensor]]
) -> None:
    judge = kit.judge()
    examples = [kit.taught(index) for index in range(2)]
    results = []
    for batch in (kit.batch(examples), kit.separate(examples)):
        judge.zero_grad()
        output = judge(batch, objective)
        output.loss.backward()
        results.append((output, gradients(judge)))
    (packed, packed_gradients), (separate, separate_gradients) = results
    assert packed.loss.item() == pytest.approx(separate.loss.item(), rel=1e-5)
    for name, gradient in packed_gradients.items():
        scale = float(separate_gradients[name].abs().max())
        torch.testing.assert_close(gradient, separate_gradients[name], atol=2e-4 * scale + 1e-7, rtol=0)


@shows("rows")
@torch.no_grad()
def test_a_batch_equals_its_rows_alone(family: str, kit: Kit) -> None:
    judge = kit.judge()
    examples = [kit.example(0), kit.example(1, question=None), kit.example(2)]
    together = judge(kit.batch(examples))
    for row, example in enumerate(examples):
        alone = judge(kit.batch([example]))
        torch.testing.assert_close(together.scores[row], alone.scores[0], atol=1e-3, rtol=0)
    assert together.scores.std(0).min() > 1e-2  # the rows do differ


@shows("prefix")
@torch.no_grad()
def test_edits_that_continue_a_kept_prefix_equal_whole_ones(family: str, kit: Kit) -> None:
    rng = np.random.default_rng(3)
    sizes = [(28, 42), (42, 28), (28, 28), (14, 42), (56, 28)]
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    sources, edited = process_images(kit.processor, images)[:2], process_images(kit.processor, images)[2:]
    asked = [(0, 0), (1, 1), (0, 2), (0, 1)]  # source, edit
    instructions = ["remove the cat and the dog", "add a hat, a coat, two scarves and a pair of boots"]
    examples = [
        encode_example(
            kit.processor,
            kit.prompts,
            instructions[source],
            sources[source],
            edited[edit],
            BUILT_IN_DIMENSIONS,
            "Is it gone?" if edit else None,
            chat=backbone_spec(kit.backbone).chat,
        )
        for source, edit in asked
    ]
    token = special_ids(kit.backbone, kit.processor)["image_token_id"]
    parts = [split_example(example, sources[s], token) for example, (s, _) in zip(examples, asked, strict=True)]
    prefixes = compute_prefixes(kit.backbone, kit.batch([parts[0][0], parts[1][0]]))
    assert len(prefixes[0]) != len(prefixes[1])
    batch, rest = kit.batch(examples), kit.batch([rest for _, rest in parts])
    for attention in ("sdpa", "eager"):
        kit.backbone.set_attn_implementation(attention)
        whole = last_hidden_states(kit.backbone, batch)
        kept = [tuple(part.clone() for part in (*p.keys, *p.values)) for p in prefixes]
        for _ in range(2):  # the second time proves that nothing was written into the prefixes
            continued = last_hidden_states(kit.backbone, rest, stack_prefixes(prefixes, [s for s, _ in asked]))
            for row, example in enumerate(examples):
                for suffix in example.suffixes:
                    a, b = _states_of(whole, batch, row, suffix.key), _states_of(continued, rest, row, suffix.key)
                    torch.testing.assert_close(b, a, atol=TOLERANCE, rtol=0)
        for prefix, before in zip(prefixes, kept, strict=True):
            for part, copy in zip((*prefix.keys, *prefix.values), before, strict=True):
                assert torch.equal(part, copy)
    # All rows of one source: its prefix is expanded instead of copied.
    alone = kit.batch([parts[row][1] for row in (0, 2)])
    continued = last_hidden_states(kit.backbone, alone, stack_prefixes(prefixes[:1], [0, 0]))
    a, b = _states_of(whole, batch, 2, "quality"), _states_of(continued, alone, 1, "quality")
    torch.testing.assert_close(b, a, atol=TOLERANCE, rtol=0)


@shows("features")
@torch.no_grad()
def test_features_from_outside_give_the_same_states(family: str, kit: Kit) -> None:
    rng = np.random.default_rng(3)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in [(28, 42), (56, 28)]]
    processed = process_images(kit.processor, images)
    example = encode_example(kit.processor, kit.prompts, "remove it", *processed, BUILT_IN_DIMENSIONS)
    assert takes_features(kit.backbone)
    batch = kit.batch([example])
    given = replace(batch, image_features=encode_images(kit.backbone, processed), pixel_values=None)
    expected = last_hidden_states(kit.backbone, batch)
    torch.testing.assert_close(last_hidden_states(kit.backbone, given), expected, atol=TOLERANCE, rtol=0)


def _states_of(states: Tensor, batch: PackedBatch, row: int, key: str) -> Tensor:
    """States of one question's tokens."""
    return states[row, batch.segment_ids[row] == batch.suffix_keys.index(key) + 1]


@shows("adapters")
def test_everything_that_is_trained_gets_a_gradient(family: str, kit: Kit) -> None:
    spec = backbone_spec(kit.backbone)
    patterns = adapter_patterns(kit.backbone, vision=True, llm=True)
    expected = {name for pattern in patterns for name in module_names(kit.backbone, pattern)}
    projectors = projector_modules(kit.backbone)
    judge = kit.judge()
    assert set(adalora_layers(judge.backbone)) == set(effective_ranks(judge.backbone)) == expected
    assert any(name.startswith(spec.vision_module) for name in expected)
    judge(kit.batch([kit.taught(0), kit.taught(1)]), STAGE_2).loss.backward()
    trained = trainable_parameters(judge)
    without = [n for n, p in judge.named_parameters() if n in trained and (p.grad is None or not p.grad.abs().sum())]
    assert without == []
    for path in projectors:
        assert any(f"{path}.modules_to_save." in name for name in trained)


@shows("bfloat16")
@pytest.mark.parametrize("objective", [STAGE_1, STAGE_2], ids=["stage1", "stage2"])
def test_a_backbone_in_bfloat16_trains_in_float32(
    family: str, kit: Kit, objective: Any, folders: dict[str, Path]
) -> None:
    model, processor = load_backbone(folders[family], dtype="bfloat16")
    examples = [kit.taught(0), kit.taught(1)]
    expected = kit.judge()(kit.batch(examples), objective).loss.item()
    judge = Kit(model, processor, kit.prompts).judge()
    for parameter in judge.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    loss = judge(kit.batch(examples), objective).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.05)
    trained = [p for p in judge.backbone.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(BUILDERS))
def test_lora_and_full_fine_tuning_work_too(
    family: str, dtype: str, kit: Kit, folders: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("lora", "full"):
        model, processor = load_backbone(folders[family], dtype=dtype)
        judge = Kit(model, processor, kit.prompts).judge(kind)
        for parameter in judge.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        judge.enable_gradient_checkpointing()
        judge.train()
        batch = kit.batch([kit.taught(0)])
        judge(batch, STAGE_2).loss.backward()
        judge.eval()
        reached = [name for name, p in judge.backbone.named_parameters() if p.requires_grad and p.grad is not None]
        assert len(reached) > 10
        if dtype == "float32":
            folder = tmp_path / kind
            save_checkpoint(folder, judge, processor, kit.prompts, {}, {}, 2)
            with torch.no_grad():
                expected, got = judge(batch).scores, load_checkpoint(folder).model(batch).scores
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@shows("reload")
def test_a_saved_judge_gives_the_same_scores(family: str, kit: Kit, tmp_path: Path) -> None:
    judge = kit.judge()
    with torch.no_grad():
        for name, parameter in judge.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.05)  # as if trained
    batch = kit.batch([kit.example(0), kit.example(1)])
    with torch.no_grad():
        expected = judge(batch)
    save_checkpoint(tmp_path / "judge", judge, kit.processor, kit.prompts, {}, {}, 2)
    loaded = load_checkpoint(tmp_path / "judge")
    again = Kit(plain_model(loaded.model.backbone), loaded.processor, loaded.prompts)
    with torch.no_grad():
        got = loaded.model(again.batch([again.example(0), again.example(1)]))
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.answer_logits, expected.answer_logits, atol=1e-6, rtol=1e-6)


@shows("refusal")
def test_a_wrong_or_incomplete_checkpoint_is_refused_by_name(
    family: str, kit: Kit, folders: dict[str, Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(folders[family], tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    (key,) = [name for name in state if name.endswith("layers.0.mlp.up_proj.weight")]
    state[key.replace("up_proj", "renamed")] = state.pop(key)
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is incomplete or of another version") as caught:
        load_backbone(broken)
    assert "missing from the files (they would be random): " in str(caught.value)
    assert "layers.0.mlp.up_proj.weight" in str(caught.value) and "layers.0.mlp.renamed.weight" in str(caught.value)
    # Weights of another family under this family's config.json.
    other = "qwen2_vl" if family != "qwen2_vl" else "llava"
    shutil.copy(folders[other] / "model.safetensors", broken / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_backbone(broken)
    assert "weights are missing from the files" in str(caught.value)
    assert "weights are in the files but not in the model" in str(caught.value)
    # The right names, but another size.
    state = load_file(folders[family] / "model.safetensors")
    (key,) = [name for name in state if name.endswith("layers.0.mlp.up_proj.weight")]
    state[key] = state[key][:-1]
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_backbone(broken)
    assert "1 weights are of another shape than the model's: " in str(caught.value)
    assert "layers.0.mlp.up_proj.weight (expected [64, 32], got [63, 32])" in str(caught.value)


@pytest.mark.parametrize("family", ["llava"])
def test_a_tokenizer_of_another_family_is_refused(family: str, kit: Kit, folders: dict[str, Path]) -> None:
    _, other = load_backbone(folders["deepseek_vl"])
    with pytest.raises(ConfigError) as caught:
        special_ids(kit.backbone, other)
    assert str(caught.value) == (
        f"The tokenizer does not fit a backbone of type 'llava': expected the token '<image>' with the number "
        f"{kit.backbone.config.image_token_id}, got no such token. Give the processor that was saved with the backbone."
    )


@pytest.mark.parametrize("family", ["llava", "llava_next", "deepseek_vl"])
def test_pixel_limits_of_a_fixed_size_are_refused(family: str, kit: Kit) -> None:
    set_pixel_limits(kit.processor, None, None)
    with pytest.raises(ConfigError) as caught:
        set_pixel_limits(kit.processor, None, 3136)
    assert str(caught.value) == (
        f"{type(kit.processor).__name__} resizes every image to one fixed size, so min_pixels=None and max_pixels=3136 "
        "cannot be kept. Leave both out."
    )


@pytest.mark.parametrize("family", ["internvl"])
def test_pixel_limits_of_tiles_limit_the_tiles(family: str, kit: Kit, tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8))
    (before,) = process_images(kit.processor, [image])
    set_pixel_limits(kit.processor, None, 28 * 28)
    (after,) = process_images(kit.processor, [image])
    assert (before.grid[0], after.grid[0], after.tokens) == (5, 1, 4)
    with pytest.raises(ConfigError) as caught:
        set_pixel_limits(kit.processor, None, 100)
    assert str(caught.value) == (
        "Images are cut into tiles of 784 pixels: expected max_pixels of at least that and no min_pixels, got "
        "min_pixels=None and max_pixels=100."
    )


@pytest.mark.parametrize("family", ["llava"])
def test_nothing_of_an_image_is_cut_off(family: str, kit: Kit) -> None:
    pixels = np.full((20, 80, 3), 200, dtype=np.uint8)
    changed = pixels.copy()
    changed[:, :5] = 0  # far from the middle square
    first, second = process_images(kit.processor, [pixels, changed])
    assert (first.patches - second.patches).abs().max() > 0.5


@pytest.mark.parametrize("family", ["llava"])
def test_a_sentencepiece_tokenizer_puts_no_space_into_running_text(family: str, kit: Kit) -> None:
    """Its answers would all begin with the same token, and pieces of a prompt would not be the prompt."""
    example = kit.taught(0)
    pieces = kit.tokenizer.decode(example.suffixes[0].ids)
    assert pieces.endswith("quality. ASSISTANT: The quality score is")
    judge = kit.judge()
    assert kit.tokenizer.convert_ids_to_tokens(list(judge.answer_tokens)) == ["\u2581No", "\u2581Yes"]
    assert kit.tokenizer.decode(example.prefix_ids).startswith("<s>You judge image edits. USER: Instruction: remove")


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_the_vision_layer_that_nobody_reads_has_no_adapter(family: str, kit: Kit) -> None:
    (vision,) = adapter_patterns(kit.backbone, vision=True, llm=False)
    assert {name.split("layers.")[1][0] for name in module_names(kit.backbone, vision)} == {"0", "1"}
    kit.backbone.config.vision_feature_layer = -1
    (vision,) = adapter_patterns(kit.backbone, vision=True, llm=False)
    assert {name.split("layers.")[1][0] for name in module_names(kit.backbone, vision)} == {"0", "1", "2"}


def test_every_proof_is_a_test() -> None:
    import tests.judge.test_families_training  # noqa: F401  (registers what it shows)

    assert {claim: (proof.file, proof.test) for claim, proof in PROOFS.items()} == SHOWN
