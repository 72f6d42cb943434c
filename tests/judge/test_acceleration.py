"""Levers that need a GPU are refused by key, with what to install; never left out in silence."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lmm4edit.errors import ConfigError
from lmm4edit.judge.acceleration import check_acceleration
from lmm4edit.judge.backbones import load_backbone


def test_nothing_asked_for_is_nothing_checked() -> None:
    check_acceleration()


@pytest.mark.parametrize(
    ("asked", "package", "key"),
    [
        ({"liger": True}, "liger-kernel", "backbone.liger=true"),
        ({"quantization": "4bit"}, "bitsandbytes", "backbone.quantization=4bit"),
    ],
)
def test_a_missing_package_and_a_missing_gpu_are_named(
    asked: dict[str, object], package: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{key} needs the package {package}, which is not installed. pip install"):
        check_acceleration(**asked)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{key} needs a GPU with CUDA"):
        check_acceleration(**asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=key):
        load_backbone("checkpoints/tiny/backbone", **asked)  # type: ignore[arg-type]


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 4bit or null, got '8bit'"):
        check_acceleration(quantization="8bit")
