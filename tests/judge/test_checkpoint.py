"""Saving and strict loading: the same scores again, or an error that names what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmm4edit.errors import CheckpointError
from lmm4edit.judge.adapters import adalora_layers, effective_ranks, trainable_parameters
from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.checkpoint import load_checkpoint, save_checkpoint
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.judge.rank_allocator import RankAllocator, RankSchedule
from tests.judge.kit import SCALE, STAGE_1, STAGE_2, Kit, save_kit_backbone

KEY = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A"


def _save(kit: Kit, judge: JudgeModel, folder: Path, stage: int = 2) -> Path:
    save_checkpoint(folder, judge, kit.processor, kit.prompts, {"seed": 0}, {"python": "3.11"}, stage)
    return folder


def _scores(kit: Kit, judge: JudgeModel) -> torch.Tensor:
    with torch.no_grad():
        return judge(kit.batch([kit.example(0), kit.example(1)])).scores


def _prune(judge: JudgeModel, kit: Kit) -> None:
    """A short training that ends with pruned ranks, one matrix at rank 0."""
    allocator = RankAllocator(judge.backbone, RankSchedule(3, 0, 1, 1, 1))
    starved = next(iter(adalora_layers(judge.backbone).values()))
    optimizer = torch.optim.SGD([p for p in judge.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        judge(kit.batch([kit.taught(0)]), STAGE_1).loss.backward()
        for parameter in (starved.values, starved.right, starved.left):
            parameter.grad = None
        optimizer.step()
        allocator.step()
        optimizer.zero_grad()
    assert allocator.is_final


@pytest.fixture(scope="module")
def saved(backbone_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained and pruned stage-2 judge; nobody may change it."""
    model, processor = load_backbone(backbone_folder)
    kit = Kit(model, processor, load_prompts())
    judge = kit.judge()
    _prune(judge, kit)
    return _save(kit, judge, tmp_path_factory.mktemp("judge") / "checkpoint")


@pytest.fixture
def broken(saved: Path) -> Any:
    """A copy beside the original, to break."""
    copy = saved.with_name("broken")
    shutil.copytree(saved, copy)
    yield copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("kind", ["adalora", "lora", "full", "none"])
def test_scores_come_back(kit: Kit, backbone_folder: Path, tmp_path: Path, kind: str) -> None:
    judge = kit.judge(kind)
    for name, parameter in judge.backbone.named_parameters():
        if parameter.requires_grad and ("merger" in name or kind == "full"):
            with torch.no_grad():
                parameter.mul_(1.3)  # trained weights are not the backbone's
    expected = _scores(kit, judge)
    loaded = load_checkpoint(_save(kit, judge, tmp_path / "judge"))
    assert torch.equal(_scores(kit, loaded.model), expected)
    untouched, _ = load_backbone(backbone_folder)
    bare = JudgeModel(untouched, judge.dimensions, judge.answer_tokens, judge.score_head, SCALE)
    assert (_scores(kit, bare) - expected).abs().max() > 1e-2
    assert trainable_parameters(loaded.model) == {} and not loaded.model.training
    again = load_checkpoint(_save(kit, loaded.model, tmp_path / "again"))  # a frozen judge is saved whole, too
    assert torch.equal(_scores(kit, again.model), expected)


def test_a_pruned_judge_with_a_rank_0_module_comes_back(kit: Kit, tmp_path: Path) -> None:
    """huggingface/peft#1539."""
    judge = kit.judge()
    _prune(judge, kit)
    judge.eval()
    ranks = effective_ranks(judge.backbone)
    assert 0 in ranks.values() and sum(ranks.values()) == len(ranks)
    expected = _scores(kit, judge)
    folder = _save(kit, judge, tmp_path / "judge")
    empty = [
        key for key, value in load_file(folder / "adapter" / "adapter_model.safetensors").items() if not value.numel()
    ]
    assert any("visual.blocks.0.attn.qkv" in key for key in empty)
    loaded = load_checkpoint(folder)
    torch.testing.assert_close(_scores(kit, loaded.model), expected, atol=1e-5, rtol=0)
    assert effective_ranks(loaded.model.backbone) == ranks
    shapes = [layer.values.shape[0] for layer in adalora_layers(loaded.model.backbone).values()]
    assert shapes == list(ranks.values())  # what was pruned is gone
    again = load_checkpoint(_save(kit, loaded.model, tmp_path / "again"))
    assert torch.equal(_scores(kit, again.model), _scores(kit, loaded.model))


def test_a_fresh_process_gives_the_same_scores(kit: Kit, saved: Path, tmp_path: Path) -> None:
    expected = _scores(kit, load_checkpoint(saved).model)
    program = (
        "import sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from tests.judge.kit import Kit\n"
        "from lmm4edit.judge.checkpoint import load_checkpoint\n"
        "loaded = load_checkpoint(sys.argv[1])\n"
        "kit = Kit(loaded.model.backbone, loaded.processor, loaded.prompts)\n"
        "with torch.no_grad():\n"
        "    scores = loaded.model(kit.batch([kit.example(0), kit.example(1)])).scores\n"
        "print(scores.tolist())\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(saved)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    got = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_plain_peft_loads_the_adapter(kit: Kit, saved: Path, backbone_folder: Path) -> None:
    import peft

    from lmm4edit.judge.backbones import last_hidden_states

    ours = load_checkpoint(saved).model.backbone
    plain, _ = load_backbone(backbone_folder)
    theirs = peft.PeftModel.from_pretrained(plain, saved / "adapter").eval()
    batch = kit.batch([kit.example(0)])
    with torch.no_grad():
        torch.testing.assert_close(last_hidden_states(theirs, batch), last_hidden_states(ours, batch))


def test_training_goes_on_where_it_stopped(kit: Kit, tmp_path: Path) -> None:
    """Stage 2 from stage 1: equal outputs at step 0, kept ranks, the same parts trained."""
    judge = kit.judge(head=False)
    trained = set(trainable_parameters(judge))
    _prune(judge, kit)
    judge.eval()
    batch = kit.batch([kit.taught(0), kit.taught(1)])
    with torch.no_grad():
        expected = judge(batch, STAGE_1)
    loaded = load_checkpoint(_save(kit, judge, tmp_path / "stage1", stage=1), adapter_trainable=True)
    assert (loaded.meta.stage, loaded.meta.has_head) == (1, False)
    model = loaded.model
    with torch.no_grad():
        at_step_0 = model(batch, STAGE_1)
    torch.testing.assert_close(at_step_0.hidden, expected.hidden, atol=1e-5, rtol=0)
    assert set(trainable_parameters(model)) == trained
    assert all(p.dtype == torch.float32 for p in model.parameters())

    ranks = effective_ranks(model.backbone)
    allocator = RankAllocator(model.backbone, None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        output = model(batch, STAGE_1)
        output.loss.backward()
        optimizer.step()
        allocator.step()
        optimizer.zero_grad()
    assert effective_ranks(model.backbone) == ranks
    model.eval()
    with torch.no_grad():
        trained_on = model(batch).hidden
    again = load_checkpoint(_save(kit, model, tmp_path / "stage1b", stage=1))
    with torch.no_grad():
        torch.testing.assert_close(again.model(batch).hidden, trained_on, atol=1e-5, rtol=0)
    assert (trained_on - expected.hidden).abs().max() > 1e-4


def test_an_unpruned_judge_keeps_all_its_triplets(kit: Kit, tmp_path: Path) -> None:
    """In the middle of a run nothing is final: what is masked now may live again."""
    judge = kit.judge()
    with torch.no_grad():
        for layer in adalora_layers(judge.backbone).values():
            layer.values[0] = 0
    loaded = load_checkpoint(_save(kit, judge, tmp_path / "middle"), adapter_trainable=True)
    assert all(layer.values.shape == (3, 1) for layer in adalora_layers(loaded.model.backbone).values())
    assert torch.equal(_scores(kit, loaded.model), _scores(kit, judge))


def test_the_checkpoint_says_what_it_is(saved: Path, backbone_folder: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert names == {
        *("adapter", "judge.json", "score_head.safetensors", "prompts.yaml"),
        *("processor", "config.yaml", "provenance.json"),
    }
    loaded = load_checkpoint(saved)
    assert loaded.meta.stage == 2 and loaded.meta.has_head and loaded.meta.format_version == 1
    assert [d.name for d in loaded.meta.dimensions] == ["quality", "alignment", "preservation"]
    assert loaded.model.target_scale == SCALE
    assert loaded.prompts.fingerprint() == load_prompts().fingerprint()
    assert loaded.meta.backbone == str(backbone_folder)
    for path in saved.rglob("*"):
        if path.suffix in (".json", ".yaml"):
            assert str(backbone_folder.parent) not in path.read_text(encoding="utf-8"), path


def test_checkpoint_and_backbone_move_together(kit: Kit, tmp_path: Path) -> None:
    home = tmp_path / "here"
    save_kit_backbone(home / "backbone")
    model, _ = load_backbone(home / "backbone")
    moving = Kit(model, kit.processor, kit.prompts)
    judge = moving.judge()
    expected = _scores(kit, judge)
    _save(moving, judge, home / "judge")
    home.rename(tmp_path / "there")
    loaded = load_checkpoint(tmp_path / "there" / "judge")
    assert torch.equal(_scores(kit, loaded.model), expected)
    (tmp_path / "there" / "backbone").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="its backbone was not found at"):
        load_checkpoint(tmp_path / "there" / "judge")
    loaded = load_checkpoint(tmp_path / "there" / "judge", backbone=tmp_path / "elsewhere")
    assert torch.equal(_scores(kit, loaded.model), expected)


def test_another_backbone_is_refused(saved: Path, backbone_folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(backbone_folder, tmp_path / "other"))
    state = load_file(other / "model.safetensors")
    state["lm_head.weight"][0, 0] += 1
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, backbone=other)
    assert str(caught.value).startswith(f"{saved}: this judge was trained on a backbone with sha256 ")
    assert str(caught.value).endswith("Its scores would be meaningless; give the backbone it was trained on.")


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.pop(KEY), f"1 weights do not fit: missing {KEY}."),
        (lambda s: s.update({"x.y": torch.ones(2)}), "1 weights do not fit: unexpected x.y."),
        (
            # illuin-tech/colpali#424: the prefix of another Transformers version
            lambda s: s.update({KEY.replace("language_model.", ""): s.pop(KEY)}),
            f"2 weights do not fit: missing {KEY}; unexpected {KEY.replace('language_model.', '')}.",
        ),
        (
            # huggingface/peft#1443: an adapter saved from shards that were not gathered
            lambda s: s.update({"base_model.model.model.visual.merger.mlp.0.weight": torch.ones(0)}),
            "1 weights do not fit: base_model.model.model.visual.merger.mlp.0.weight is empty: expected [64, 64], got "
            "[0].",
        ),
        (
            lambda s: s["base_model.model.model.visual.merger.mlp.0.bias"].fill_(float("nan")),
            "1 weights do not fit: base_model.model.model.visual.merger.mlp.0.bias has values that are not finite.",
        ),
        (lambda s: s.clear(), " weights do not fit: missing "),
    ],
    ids=["missing", "unexpected", "renamed", "empty", "nan", "all-missing"],
)
def test_adapter_weights_that_do_not_fit_are_refused(broken: Path, change: Any, problem: str) -> None:
    path = broken / "adapter" / "adapter_model.safetensors"
    _edit(path, change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(broken)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and problem in message
    assert message.endswith(
        "Nothing was loaded: take the whole folder from one training run, written with this version."
    )


def test_head_weights_that_do_not_fit_are_refused(broken: Path) -> None:
    """huggingface/peft#577, sentence-transformers#3980: a head that is not restored is random."""
    path = broken / "score_head.safetensors"
    _edit(path, lambda s: s.update({"score.weight": s.pop("second.weight")}))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(broken)
    assert "2 weights do not fit: missing second.weight; unexpected score.weight." in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("judge.json", "prompts.yaml", "processor", "adapter", "score_head.safetensors"),
        *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ],
)
def test_a_missing_file_is_refused(broken: Path, name: str) -> None:
    path = broken / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(broken)
    assert str(caught.value) == (
        f"{path} is missing. Expected the folder of a judge's checkpoint, with judge.json and all that save_checkpoint "
        "wrote."
    )


def test_a_damaged_file_is_refused(broken: Path) -> None:
    path = broken / "score_head.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        load_checkpoint(broken)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 2}, "expected format_version 1, got 2. Use the LMM4Edit version that wrote it."),
        ({"colour": "red"}, "colour: Extra inputs are not permitted."),
        ({"stage": None}, "stage: Field required."),
        ({"has_head": False}, "has_head is False, but head is hidden=32 inner=16."),
        ({"has_head": False, "head": 0}, "head: Input should be a valid dictionary or instance of HeadEntry."),
    ],
)
def test_a_wrong_description_is_refused(broken: Path, change: dict[str, Any], problem: str) -> None:
    path = broken / "judge.json"
    data = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(broken)
    assert str(caught.value) == f"{path}: {problem}"


def test_a_head_that_nobody_mentions_is_refused(kit: Kit, saved: Path, tmp_path: Path) -> None:
    folder = _save(kit, kit.judge(head=False), tmp_path / "stage1", stage=1)
    assert not load_checkpoint(folder).model.has_head
    shutil.copy(saved / "score_head.safetensors", folder)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    assert str(caught.value) == (
        f"{folder}: judge.json says there is no score head, but score_head.safetensors is there."
    )


def test_another_image_processor_is_reported(broken: Path) -> None:
    """huggingface/transformers#39591: its pixels differ."""
    path = broken / "judge.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "image_processor": "Qwen2VLImageProcessorPil"}), encoding="utf-8")
    with pytest.warns(UserWarning, match="was trained with the image processor Qwen2VLImageProcessorPil, but this"):
        load_checkpoint(broken)


def test_a_checkpoint_appears_whole_or_not_at_all(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = kit.judge()
    folder = _save(kit, judge, tmp_path / "judge")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(type(kit.processor), "save_pretrained", fail)
        with pytest.raises(OSError, match="disk full"):
            _save(kit, judge, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]
    _save(kit, judge, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]


def test_a_judge_that_is_not_finite_is_not_saved(kit: Kit, tmp_path: Path) -> None:
    judge = kit.judge()
    with torch.no_grad():
        judge.score_head.second.bias[0] = float("inf")  # type: ignore[union-attr]
    with pytest.raises(CheckpointError) as caught:
        _save(kit, judge, tmp_path / "judge")
    assert str(caught.value) == (
        f"{tmp_path / 'judge'}: second.bias has values that are not finite; the judge is not saved."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_in_memory_is_refused(kit: Kit, tmp_path: Path) -> None:
    kit.backbone.name_or_path = ""
    kit.backbone.config._name_or_path = ""
    with pytest.raises(CheckpointError) as caught:
        _save(kit, kit.judge(), tmp_path / "judge")
    assert str(caught.value) == (
        f"{tmp_path / 'judge'}: the judge's backbone exists in memory only, so the checkpoint could not be loaded "
        "again. Save it with lmm4edit.judge.backbones.save_backbone and load it from there."
    )


def test_half_precision_loading(kit: Kit, saved: Path) -> None:
    loaded = load_checkpoint(saved, dtype="bfloat16")
    scores = _scores(kit, loaded.model)
    assert scores.dtype == torch.float32 and scores.isfinite().all()
    assert loaded.model.score_head is not None
    assert loaded.model.score_head.first.weight.dtype == torch.float32
    assert torch.isfinite(loaded.model(kit.batch([kit.taught(0)]), STAGE_2).loss)


@pytest.mark.parametrize("kind", ["adalora", "lora", "full", "none"])
def test_what_is_trained_further_is_not_rounded_to_the_backbone_s_precision(
    kit: Kit, tmp_path: Path, kind: str
) -> None:
    """On a bfloat16 backbone PEFT makes projector and pruned factors bfloat16, and reading into them rounds."""
    judge = kit.judge(kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in judge.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-4 * torch.randn(parameter.shape, generator=generator))
    if kind == "adalora":
        _prune(judge, kit)
    folder = _save(kit, judge, tmp_path / "judge")
    loaded = load_checkpoint(folder, dtype="bfloat16", adapter_trainable=True)
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.float32 for p in trained)
    again = _save(kit, loaded.model, tmp_path / "again")
    files = [path.relative_to(folder) for path in folder.rglob("*.safetensors")]
    assert len(files) == 2
    for name in files:
        one, two = load_file(folder / name), load_file(again / name)
        assert one.keys() == two.keys()
        assert [key for key in one if not torch.equal(one[key], two[key])] == []


def test_adapters_that_nobody_mentions_are_refused(broken: Path) -> None:
    described = json.loads((broken / "judge.json").read_text())
    (broken / "judge.json").write_text(json.dumps({**described, "adapter": None}))
    with pytest.raises(CheckpointError, match="judge.json says there is no adapter, but it is there"):
        load_checkpoint(broken)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("adapter/adapter_config.json", "{}", "not a PEFT configuration"),
        ("adapter/adapter_config.json", '{"peft_type": "IA3"}', "expected an AdaLoRA or LoRA adapter, got IA3Config"),
        ("processor/tokenizer.json", "{", "tokenizer and image processor cannot be read"),
    ],
)
def test_damaged_settings_are_refused_by_name(broken: Path, name: str, content: str, problem: str) -> None:
    (broken / name).write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        load_checkpoint(broken)
