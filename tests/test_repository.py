"""The repository itself: its README tree, its configurations, what must not be in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lmm4edit.config import load_config
from lmm4edit.training.ablation.grid import load_grid

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout: tracked files were NOT looked at")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def test_the_readmes_tree_is_on_disk() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    named = []
    parent = ""
    for line in block[1].splitlines():
        name = line.strip().split()[0]
        if not line.startswith(" "):
            parent = name if name.endswith("/") else ""
            named.append(name)
        else:
            named.append(parent + name)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing and len(named) >= 18
    inside = {
        f"lmm4edit/{p.name}/" for p in (ROOT / "lmm4edit").iterdir() if p.is_dir() and (p / "__init__.py").exists()
    }
    assert inside - {"lmm4edit/commands/"} <= set(named)


def test_every_training_configuration_loads() -> None:
    others = ("accelerate", "ablations")
    found = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in others)
    assert len(found) == 4
    for path in found:
        config = load_config(path)
        assert config.stage == int(path.stem.removeprefix("stage"))


def test_every_ablation_loads() -> None:
    found = sorted((ROOT / "configs" / "ablations").rglob("*.yaml"))
    assert [path.stem for path in found] == ["ebench18k", "tiny"]
    for path in found:
        grid = load_grid(path)
        # The paper's Table 6, rows 1 to 5, wherever the grid runs; rows 6 to 8 are other backbones.
        assert {1, 2, 3, 4, 5} <= {row.paper_row for row in grid.rows}
        assert len(grid.runs()) == len(grid.rows) * len(grid.seeds)


def test_no_file_names_this_machine() -> None:
    # Spelt in parts, so that this file does not find itself.
    forbidden = ["/wo" + "rk/main", "/wo" + "rk/shared", "/home" + "/", "/ro" + "ot/", "/tm" + "p/w/"]
    hits = []
    for path in tracked():
        if path.suffix in (".png", ".safetensors", ".svg") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        hits += [f"{path.relative_to(ROOT)}: {word}" for word in forbidden if word in text]
    assert not hits


def test_no_module_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked()
        if path.suffix == ".py"
        and path.is_file()
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long


def test_no_weights_but_the_tiny_ones() -> None:
    weights = [path for path in tracked() if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".onnx")]
    assert all((ROOT / "checkpoints/tiny") in path.parents for path in weights)
