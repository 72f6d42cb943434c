"""Training states come back whole or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lmm4edit.errors import CheckpointError
from lmm4edit.training.state import (
    TrainingState,
    latest_state,
    load_state,
    restore_random_state,
    restore_tensors,
    save_state,
    trained_tensors,
)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def state_of(model: nn.Module, step: int) -> TrainingState:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ranks = {"average": {"a": torch.arange(3.0)}, "step": step}
    return TrainingState(step, trained_tensors(model), optimizer.state_dict(), ranks, {"world_size": 1})


def test_a_state_comes_back_to_the_bit(tmp_path: Path, model: nn.Module) -> None:
    saved = state_of(model, 7)
    path = save_state(tmp_path, saved, keep_last=1)
    loaded = load_state(path)
    assert loaded.step == 7 and loaded.facts == {"world_size": 1}
    assert list(loaded.tensors) == ["1.bias", "1.weight"]
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())
    assert torch.equal(loaded.ranks["average"]["a"], torch.arange(3.0))
    for index, values in saved.optimizer["state"].items():
        for key, value in values.items():
            assert torch.equal(loaded.optimizer["state"][index][key], value)
    assert loaded.optimizer["param_groups"] == saved.optimizer["param_groups"]


def test_tensors_are_restored_in_place(model: nn.Module) -> None:
    tensors = {name: tensor.clone() for name, tensor in trained_tensors(model).items()}
    with torch.no_grad():
        model[1].weight.zero_()
    restore_tensors(model, tensors, "here")
    assert torch.equal(model[1].weight, tensors["1.weight"])


def test_tensors_that_do_not_fit_are_named(model: nn.Module) -> None:
    tensors = {"1.weight": torch.zeros(2, 5), "2.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        restore_tensors(model, tensors, "here")
    assert str(error.value) == (
        "here: the training state does not fit the model:\n"
        "  1.bias: missing in the state\n"
        "  2.weight: not in the model\n"
        "  1.weight: (2, 4) in the model, (2, 5) in the state\n"
        "Add --restart to begin anew."
    )


def test_random_generators_go_on_where_they_were(tmp_path: Path, model: nn.Module) -> None:
    path = save_state(tmp_path, state_of(model, 1), keep_last=1)
    expected = (torch.rand(3), random.random(), np.random.rand(), np.random.randn())
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    restore_random_state(path)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand(), np.random.randn()) == expected[1:]


def test_only_the_last_states_are_kept_and_the_newest_is_found(tmp_path: Path, model: nn.Module) -> None:
    assert latest_state(tmp_path) is None
    for step in (5, 10, 100):
        save_state(tmp_path, state_of(model, step), keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    assert latest_state(tmp_path) == tmp_path / "step-00000100"


def test_a_half_written_state_does_not_count(tmp_path: Path, model: nn.Module) -> None:
    complete = save_state(tmp_path, state_of(model, 1), keep_last=2)
    (tmp_path / ".tmp-00000002").mkdir()
    (tmp_path / ".tmp-00000002" / "trained.safetensors").write_bytes(b"half")
    assert latest_state(tmp_path) == complete
    save_state(tmp_path, state_of(model, 2), keep_last=2)
    assert load_state(tmp_path / "step-00000002").step == 2


def test_a_damaged_state_is_refused_by_name(tmp_path: Path, model: nn.Module) -> None:
    path = save_state(tmp_path, state_of(model, 1), keep_last=2)
    (path / "trained.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as error:
        load_state(path)
    assert str(error.value).startswith(f"{path}: the training state cannot be read (")
    assert str(error.value).endswith("Remove this folder to continue from the state before it.")
