"""Ranks read from files: the same as in a loaded judge, for every kind of adapter, without torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmm4edit.errors import CheckpointError
from lmm4edit.evaluation.rank_figure import write_rank_files
from lmm4edit.judge.adapters import adalora_layers, effective_ranks
from lmm4edit.judge.backbones import BACKBONES
from lmm4edit.judge.checkpoint import load_checkpoint, save_checkpoint
from lmm4edit.judge.rank_allocator import RankAllocator, RankSchedule
from lmm4edit.judge.ranks import LANGUAGE, VISION, MatrixRank, layer_table, read_ranks, to_csv
from tests.judge.kit import Kit


def saved(kit: Kit, folder: Path, kind: str = "adalora", prune: bool = False) -> Path:
    judge = kit.judge(kind)
    if prune:
        allocator = RankAllocator(judge.backbone, RankSchedule(2, 0, 0, 1, 1))
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            for layer in adalora_layers(judge.backbone).values():
                for parameter in (layer.values, layer.right, layer.left):
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            allocator.step()
    save_checkpoint(folder, judge, kit.processor, kit.prompts, {}, {}, 2)
    return folder


def test_the_ranks_are_those_of_the_loaded_judge(kit: Kit, tmp_path: Path) -> None:
    folder = saved(kit, tmp_path / "judge", prune=True)
    ranks = read_ranks(folder)
    expected = effective_ranks(load_checkpoint(folder).model.backbone)
    assert {m.module: m.rank for m in ranks.matrices} == {
        name.removeprefix("base_model.model."): rank for name, rank in expected.items()
    }
    assert 0 in {m.rank for m in ranks.matrices} and ranks.total == 24 == len(ranks.matrices)
    assert {m.initial_rank for m in ranks.matrices} == {3} and ranks.kind == "adalora"
    assert ranks.parts == [VISION, LANGUAGE] and len(ranks.of(VISION)) == 10
    assert ranks.matrices[0].module == "model.visual.blocks.0.attn.proj"
    assert (ranks.matrices[0].layer, ranks.matrices[0].matrix) == (0, "attn.proj")


def test_triplets_that_are_masked_but_still_there_do_not_count(kit: Kit, tmp_path: Path) -> None:
    """huggingface/peft#1801: in the middle of a run the tensors keep their shape."""
    judge = kit.judge()
    with torch.no_grad():
        for layer in adalora_layers(judge.backbone).values():
            layer.values[0] = 0
    save_checkpoint(tmp_path / "judge", judge, kit.processor, kit.prompts, {}, {}, 2)
    assert {m.rank for m in read_ranks(tmp_path / "judge").matrices} == {2}


def test_lora_has_one_rank(kit: Kit, tmp_path: Path) -> None:
    ranks = read_ranks(saved(kit, tmp_path / "judge", "lora"))
    assert ranks.kind == "lora" and len(ranks.matrices) == 24
    assert {(m.initial_rank, m.rank) for m in ranks.matrices} == {(3, 3)}


@pytest.mark.parametrize(
    ("kind", "what"), [("full", "5. tensors of the backbone trained in full"), ("none", "5 tensors of the")]
)
def test_other_judges_have_no_ranks(kit: Kit, tmp_path: Path, kind: str, what: str) -> None:
    folder = saved(kit, tmp_path / "judge", kind)
    with pytest.raises(CheckpointError, match=f"expected a judge with AdaLoRA or LoRA, got one with {what}"):
        read_ranks(folder)


def test_what_is_no_checkpoint_is_named(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_ranks(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'judge.json'}: cannot be read: No such file or directory. Expected the folder of a judge's "
        "checkpoint."
    )
    path = saved(kit, tmp_path / "judge") / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        read_ranks(tmp_path / "judge")
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="expected the factors of a adalora adapter, got none"):
        read_ranks(tmp_path / "judge")


def test_table_and_picture(kit: Kit, tmp_path: Path) -> None:
    ranks = read_ranks(saved(kit, tmp_path / "judge", prune=True))
    table, picture = write_rank_files(ranks, tmp_path / "new")
    assert (table.name, picture.name) == ("ranks.csv", "ranks.png")
    rows = list(csv.DictReader(table.open()))
    assert list(rows[0]) == ["module", "part", "layer", "matrix", "initial_rank", "rank"]
    assert [int(row["rank"]) for row in rows] == [m.rank for m in ranks.matrices]
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 5000
    first = picture.read_bytes()
    write_rank_files(ranks, tmp_path / "new")
    assert picture.read_bytes() == first


def test_layers_and_matrices_make_a_table() -> None:
    matrices = [
        MatrixRank("a.0.q", VISION, 0, "q", 4, 1),
        MatrixRank("a.1.q", VISION, 1, "q", 4, 0),
        MatrixRank("a.1.k", VISION, 1, "k", 4, 2),
    ]
    assert layer_table(matrices) == ([0, 1], ["q", "k"], [[1, None], [0, 2]])


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_every_backbone_s_language_model_is_told_from_what_sees(name: str) -> None:
    spec = BACKBONES[name]
    assert "language_model." in f"{spec.llm_module}." and "language_model" not in spec.vision_module


def test_reading_ranks_loads_no_torch() -> None:
    code = "import sys, lmm4edit.judge.ranks, lmm4edit.evaluation.rank_figure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_csv_of_the_judge_that_comes_along() -> None:
    from lmm4edit.shipped import shipped_path

    folder = shipped_path("checkpoints/tiny/judge")
    ranks = read_ranks(folder)
    stored = json.loads((folder / "adapter" / "adapter_config.json").read_text())["rank_pattern"]
    assert ranks.total == sum(map(sum, stored.values())) == 8 * len(ranks.matrices)
    assert len(to_csv(ranks).splitlines()) == 1 + len(ranks.matrices)
    keys = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(ranks.matrices) == sum("lora_E" in key for key in keys)
