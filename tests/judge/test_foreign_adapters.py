"""Adapters trained elsewhere: every layout converts to the same function, everything that has no place is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lmm4edit.cli import app
from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.judge.foreign_adapters import convert_adapter, find_adapter
from lmm4edit.judge.tiny import build_tiny_backbone, build_tiny_processor, build_tiny_tokenizer, save_tiny

TARGETS = ["q_proj", "v_proj", "qkv", "down_proj"]
Rewrite = Callable[[str], str]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone") / "tiny"
    tokenizer = build_tiny_tokenizer(["The quality score is 54.70", "Is the heart gone? Yes No"] * 4, vocab_size=300)
    model = build_tiny_backbone(
        tokenizer, hidden=32, layers=2, vision_hidden=16, vision_layers=2, patch_size=7, image_size=28
    )
    save_tiny(folder, model, build_tiny_processor(tokenizer, patch_size=7, min_pixels=28**2, max_pixels=28**2))
    return folder


@pytest.fixture(scope="module")
def trained(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A LoRA adapter as plain PEFT writes it, projector included, and the logits it gives."""
    plain, _ = load_backbone(backbone)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=TARGETS, modules_to_save=["merger"])
    model = peft.get_peft_model(plain, config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    model.save_pretrained(str(folder))
    return folder, logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


def image_features(model: Any) -> torch.Tensor:
    visual = next(module for name, module in model.named_modules() if name.endswith("visual"))
    patches = torch.linspace(-1, 1, 16 * 3 * 2 * 7 * 7).view(16, -1)
    with torch.no_grad():
        return visual(patches, grid_thw=torch.tensor([[1, 4, 4]]))[0]


def rewritten(source: Path, target: Path, rename: Rewrite, **changes: Any) -> Path:
    """The adapter with other names for its weights and other settings."""
    shutil.copytree(source, target)
    state = {rename(name): value for name, value in load_file(target / "adapter_model.safetensors").items()}
    save_file(state, target / "adapter_model.safetensors")
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return target


def as_old_transformers(name: str) -> str:
    """Before Transformers 4.52 the language model was ``model`` and the vision encoder ``visual``."""
    name = name.replace("base_model.model.model.language_model.", "base_model.model.model.")
    return name.replace("base_model.model.model.visual.", "base_model.model.visual.")


def as_inner_model(name: str) -> str:
    """The authors' later release wraps the model without its output layer."""
    return name.replace("base_model.model.model.", "base_model.model.")


@pytest.mark.parametrize(
    ("rename", "renamed"),
    [(lambda name: name, False), (as_old_transformers, True), (as_inner_model, True)],
    ids=["peft, trl, llama-factory", "older transformers", "inner model"],
)
def test_a_converted_adapter_is_the_same_function(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path, rename: Rewrite, renamed: bool
) -> None:
    source = rewritten(trained[0], tmp_path / "source", rename)
    done = convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")
    assert done.kind == "lora" and done.projector and bool(done.renamed) is renamed
    judge = load_checkpoint(tmp_path / "judge", adapter_trainable=True)
    torch.testing.assert_close(logits(judge.model.backbone), trained[1], rtol=0, atol=1e-6)
    reference, _ = load_backbone(backbone)
    reference = peft.PeftModel.from_pretrained(reference, str(trained[0]))  # type: ignore[arg-type]
    torch.testing.assert_close(image_features(judge.model.backbone), image_features(reference), rtol=0, atol=1e-6)
    assert judge.meta.stage == 1 and not judge.meta.has_head
    # Stage 2 goes on training it: adapters and projector alike.
    names = [name for name, p in judge.model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in names) and any("merger" in name for name in names)


def test_ms_swift_checkpoints_are_found_in_the_output_folder(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained[0], tmp_path / "output" / "checkpoint-900")
    (tmp_path / "output" / "checkpoint-900" / "additional_config.json").write_text("{}")
    (tmp_path / "output" / "args.json").write_text("{}")
    assert find_adapter(tmp_path / "output").name == "checkpoint-900"
    convert_adapter(tmp_path / "output", str(backbone), tmp_path / "judge", prompts="tiny")
    shutil.copytree(trained[0], tmp_path / "output" / "checkpoint-1000")
    with pytest.raises(CheckpointError, match=r"expected one adapter, found 2: checkpoint-1000, checkpoint-900\. Name"):
        find_adapter(tmp_path / "output")


def test_torch_files_are_read_as_tensors_and_nothing_else(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path
) -> None:
    source = tmp_path / "bin"
    shutil.copytree(trained[0], source)
    torch.save(load_file(source / "adapter_model.safetensors"), source / "adapter_model.bin")
    (source / "adapter_model.safetensors").unlink()
    convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")
    torch.testing.assert_close(
        logits(load_checkpoint(tmp_path / "judge").model.backbone), trained[1], rtol=0, atol=1e-6
    )

    class Malicious:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"a": Malicious()}, source / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        convert_adapter(source, str(backbone), tmp_path / "other", prompts="tiny")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "other").exists()


def authors_release(source: Path, target: Path) -> Path:
    """One dimension's folder of the paper's authors' later release: a head of three layers beside the adapter."""
    rewritten(source, target, as_inner_model)
    head = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    torch.save({f"mlp.{name}": value for name, value in head.state_dict().items()}, target / "score_head.pth")
    values = {
        "hidden_size": 32,
        "head_hidden_size": 8,
        "head_hidden_size2": 8,
        "dropout": 0.1,
        "dimension": "alignment",
    }
    (target / "regression_config.json").write_text(json.dumps(values))
    return target


def test_the_authors_head_is_refused_by_name_and_their_adapter_taken(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path
) -> None:
    source = authors_release(trained[0], tmp_path / "alignment")
    with pytest.raises(
        CheckpointError, match=r"score_head.pth .*dimension 'alignment', layers 32 -> 8 -> 8 -> 1.*--drop-head"
    ):
        convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")
    assert not (tmp_path / "judge").exists()
    done = convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny", drop_head=True)
    assert len(done.left_out) == 1 and done.left_out[0].startswith("score_head.pth")
    provenance = json.loads((tmp_path / "judge" / "provenance.json").read_text())
    assert provenance["left_out"] == list(done.left_out)


def test_adalora_with_pruned_ranks_is_taken_as_it_is(backbone: Path, tmp_path: Path) -> None:
    from lmm4edit.judge.adapters import effective_ranks

    plain, _ = load_backbone(backbone)
    model = peft.get_peft_model(
        plain,  # type: ignore[arg-type]
        peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    )
    pattern = {}
    with torch.no_grad():
        for index, (name, module) in enumerate(
            n for n in model.named_modules() if "default" in getattr(n[1], "lora_E", {})
        ):
            live = [True] * (index % 4) + [False] * (4 - index % 4)
            module.lora_E["default"].copy_(torch.tensor(live, dtype=torch.float32)[:, None] / 4)
            pattern[f"{name.removeprefix('base_model.model.')}.lora_E.default"] = live
    model.peft_config["default"].rank_pattern = pattern
    model.save_pretrained(str(tmp_path / "source"))
    done = convert_adapter(tmp_path / "source", str(backbone), tmp_path / "judge", prompts="tiny")
    assert done.kind == "adalora" and not done.projector
    judge = load_checkpoint(tmp_path / "judge")
    assert list(effective_ranks(judge.model.backbone).values()) == [sum(live) for live in pattern.values()]
    torch.testing.assert_close(logits(judge.model.backbone), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rename", "changes", "message"),
    [
        (lambda n: n.replace("q_proj", "query"), {}, r"4 weights have no place in this backbone.*query\.lora_A"),
        (lambda n: n.replace("layers.1.", "layers.7."), {}, "weights have no place.*layers.7"),
        (
            lambda n: n.replace("layers.0.mlp.down_proj.lora_A", "layers.0.mlp.down_proj.lora_C"),
            {},
            "no place|do not fit",
        ),
        (lambda n: n, {"r": 5}, r"do not fit: .*expected \[5, .*got \[3, "),
        (lambda n: n, {"peft_type": "IA3", "feedforward_modules": []}, "peft_type: expected LORA or ADALORA, got IA3"),
        (lambda n: n, {"bias": "all"}, "bias: expected 'none', got 'all'"),
        (lambda n: n, {"use_dora": True}, "use_dora: expected False, got True"),
        (lambda n: n, {"r": 10**12}, "r: expected a whole number from 1 to"),
        (lambda n: n, {"r": "3"}, "r: expected a whole number from 1 to .*, got '3'"),
        (lambda n: n, {"r": None}, "r: expected a whole number|not a PEFT configuration"),
        (lambda n: n, {"rank_pattern": {"(": 3}}, r"rank_pattern: expected a regular expression, got '\('"),
        (lambda n: n, {"alpha_pattern": {"[": 3}}, r"alpha_pattern: expected a regular expression, got '\['"),
        (lambda n: n, {"alpha_pattern": [1]}, r"alpha_pattern: expected names with numbers, got \[1\]"),
        (lambda n: n, {"lora_alpha": float("nan")}, "lora_alpha: expected a finite number, got nan"),
        (lambda n: n, {"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern 'q_proj': expected a finite number, got 'x'"),
        (lambda n: n, {"arrow_config": {"a": 1}}, "arrow_config: expected nothing, got"),
        (lambda n: n, {"lora_bias": True}, "lora_bias: expected nothing, got True"),
        (lambda n: n, {"init_lora_weights": "pissa"}, "init_lora_weights: expected True, got 'pissa'"),
        (
            lambda n: "weight" if "layers.0.self_attn.q_proj.lora_A" in n else n,
            {},
            "no place in this backbone.*: weight",
        ),
        (lambda n: n, {"alpha_pattern": {"k_proj": 3}}, "alpha_pattern: 'k_proj' names no matrix"),
    ],
)
def test_what_has_no_place_is_named(
    trained: tuple[Path, torch.Tensor],
    backbone: Path,
    tmp_path: Path,
    rename: Rewrite,
    changes: dict[str, Any],
    message: str,
) -> None:
    source = rewritten(trained[0], tmp_path / "source", rename, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")
    assert not (tmp_path / "judge").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda state: {1: torch.ones(2)}, r"expected named dense tensors .*, got 1 \(float32"),
        (lambda state: {k: v.to_sparse() for k, v in state.items()}, "sparse_coo"),
        (lambda state: {k: v.to("meta") for k, v in state.items()}, "meta"),
    ],
)
def test_tensors_that_hold_no_plain_numbers_are_named(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path, make: Callable[[Any], Any], message: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(trained[0], source)
    state = load_file(source / "adapter_model.safetensors")
    (source / "adapter_model.safetensors").unlink()
    torch.save(make(state), source / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=message):
        convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")


def test_only_an_older_judge_is_replaced(trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    source, base = tmp_path / "source", tmp_path / "base"
    shutil.copytree(trained[0], source)
    shutil.copytree(backbone, base)
    before = sorted(tmp_path.rglob("*"))
    for out, error, message in [
        (mine, CheckpointError, "got a folder with other things in it"),
        (mine / "thesis.txt", CheckpointError, "got a file"),
        (source, CheckpointError, "got a folder with other things in it"),
        (base / "judge", ConfigError, "expected a place apart from the backbone"),
        (source / "judge", ConfigError, "expected a place apart from the adapter"),
    ]:
        words = ["judge", "import", str(source), "--backbone", str(base), "--out", str(out), "--prompts", "tiny"]
        result = CliRunner().invoke(app, [*words, "--force"])
        assert isinstance(result.exception, error) and message in str(result.exception)
        assert sorted(tmp_path.rglob("*")) == before
    words[words.index("--out") + 1] = str(tmp_path / "judge")
    for _ in range(2):
        assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0


def test_missing_damaged_and_foreign_weights_are_named(
    trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path
) -> None:
    state = load_file(trained[0] / "adapter_model.safetensors")
    first = next(name for name in state if "lora_A" in name)

    def refused(changed: dict[str, torch.Tensor]) -> str:
        source = tmp_path / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(trained[0], source)
        save_file(changed, source / "adapter_model.safetensors")
        with pytest.raises(CheckpointError) as error:
            convert_adapter(source, str(backbone), tmp_path / "judge", prompts="tiny")
        return str(error.value)

    for odd in (torch.float8_e4m3fn, torch.int32, torch.complex64):
        assert f"({str(odd)[6:]}, strided, cpu)" in refused({**state, first: state[first].to(odd)})
    assert "not finite" in refused({**state, first: torch.full_like(state[first], 1e200, dtype=torch.float64)})
    assert "missing" in refused({name: value for name, value in state.items() if name != first})
    assert "not finite" in refused({**state, first: torch.full_like(state[first], torch.nan)})
    head = {"base_model.model.lm_head.weight": torch.zeros(4, 4)}
    assert "trained in full outside the projector: lm_head.weight" in refused({**state, **head})


def test_the_command_says_what_it_took(trained: tuple[Path, torch.Tensor], backbone: Path, tmp_path: Path) -> None:
    out = tmp_path / "judge"
    words = ["judge", "import", str(trained[0]), "--backbone", str(backbone), "--out", str(out), "--prompts", "tiny"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "matrices (lora), the projector taken; 0 found under another name" in done.output
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, ConfigError) and "--force" in str(again.exception)
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    missing = CliRunner().invoke(
        app, ["judge", "import", str(tmp_path), "--backbone", "b", "--out", str(tmp_path / "x")]
    )
    assert isinstance(missing.exception, CheckpointError) or "expected one adapter" in str(missing.exception)
