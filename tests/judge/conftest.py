"""A saved tiny backbone, loaded once for reading and afresh for changing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmm4edit.judge.backbones import load_backbone
from lmm4edit.judge.prompts import load_prompts
from tests.judge.kit import Kit, save_kit_backbone


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random backbone (two narrow layers each), images of 14 to 56 pixels, rounded to float16."""
    folder = tmp_path_factory.mktemp("backbone") / "tiny"
    save_kit_backbone(folder)
    return folder


@pytest.fixture
def kit(backbone_folder: Path) -> Kit:
    """A freshly loaded backbone, which the test may change."""
    model, processor = load_backbone(backbone_folder)
    return Kit(model, processor, load_prompts())


@pytest.fixture(scope="session")
def shared_kit(backbone_folder: Path) -> Kit:
    """A backbone that nobody may change."""
    model, processor = load_backbone(backbone_folder)
    return Kit(model.requires_grad_(False), processor, load_prompts())


@pytest.fixture
def gradients() -> Callable[[torch.nn.Module], dict[str, torch.Tensor]]:
    """Gradients by name, of every trained parameter."""

    def collect(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    return collect
