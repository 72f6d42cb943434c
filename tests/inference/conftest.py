"""A random judge of each stage, and edits to judge, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.kit import save_random_backbone, save_random_judge, write_edits


@pytest.fixture(scope="session")
def random_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_backbone(tmp_path_factory.mktemp("inference") / "backbone")


@pytest.fixture(scope="session")
def judge_folder_2(tmp_path_factory: pytest.TempPathFactory, random_backbone: Path) -> Path:
    folder = tmp_path_factory.mktemp("judge") / "stage2"
    return save_random_judge(folder, random_backbone, 2, {"ratings": "simulated"})


@pytest.fixture(scope="session")
def judge_folder_1(tmp_path_factory: pytest.TempPathFactory, random_backbone: Path) -> Path:
    return save_random_judge(tmp_path_factory.mktemp("judge") / "stage1", random_backbone, 1)


@pytest.fixture(scope="session")
def judge(judge_folder_2: Path):
    from lmm4edit.inference.judge import load_judge

    return load_judge(judge_folder_2, device="cpu")


@pytest.fixture(scope="session")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edits(tmp_path_factory.mktemp("edits"))
