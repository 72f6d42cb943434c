"""Which strategy a launch means, and what is refused; the launches themselves are in test_distributed.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.training.strategy import StrategyChoice, check_strategy, choose_strategy

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
Make = Callable[..., TrainConfig]


def launch_environment(file: Path) -> dict[str, str]:
    """What ``accelerate launch --config_file FILE`` puts into the environment of its processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train/stage1.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return launch.prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.multi_gpu or arguments.use_fsdp:
        return launch.prepare_multi_gpu_env(arguments)
    return launch.prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.mark.parametrize(
    ("name", "kind", "machines"),
    [
        ("single_gpu", "replicated", 1),
        ("ddp", "replicated", 1),
        ("ddp_two_nodes", "replicated", 2),
        ("fsdp2", "fsdp2", 1),
        ("fsdp2_two_nodes", "fsdp2", 2),
        ("zero2", "zero2", 1),
        ("zero3", "zero3", 1),
        ("zero3_two_nodes", "zero3", 2),
    ],
)
def test_every_launch_configuration_means_its_strategy(
    name: str, kind: str, machines: int, make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    file = CONFIGS / f"{name}.yaml"
    assert yaml.safe_load(file.read_text())["num_machines"] == machines
    environment = launch_environment(file)
    assert choose_strategy(make_config(), environment).kind == kind
    # Accelerate is left with the processes: it must not shard a second time.
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & set(environment)


def test_every_launch_configuration_is_tested() -> None:
    marks = test_every_launch_configuration_means_its_strategy.pytestmark  # type: ignore[attr-defined]
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {case[0] for mark in marks for case in mark.args[1]}


def test_the_configuration_may_say_it_instead_of_the_launcher(make_config: Make) -> None:
    for name, kind in [("ddp", "replicated"), ("fsdp2", "fsdp2"), ("zero2", "zero2"), ("zero3", "zero3")]:
        assert choose_strategy(make_config(distributed__strategy=name), {}).kind == kind
    assert choose_strategy(make_config(), {}) == StrategyChoice("replicated")
    chosen = choose_strategy(make_config(distributed__strategy="fsdp2", distributed__reshard_after_forward=False), {})
    assert not chosen.reshard_after_forward


def test_two_different_wishes_are_refused(make_config: Make) -> None:
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with pytest.raises(ConfigError, match="the configuration says zero3, the launcher's configuration fsdp2"):
        choose_strategy(make_config(distributed__strategy="zero3"), dict(environment))
    assert choose_strategy(make_config(distributed__strategy="fsdp2"), dict(environment)).kind == "fsdp2"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: expected 2, got 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "backbone.gradient_checkpointing=true",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage: expected 2 or 3"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
            "deepspeed_config_file: not read",
        ),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
            "offload_param_device: expected none, got cpu",
        ),
    ],
)
def test_what_is_not_done_here_is_refused_by_its_key(
    environment: dict[str, str], message: str, make_config: Make
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_strategy(make_config(), environment)


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_one_process_has_nothing_to_divide(kind: str, make_config: Make) -> None:
    with pytest.raises(ConfigError, match="this launch has one"):
        check_strategy(StrategyChoice(kind), make_config(), 1)  # type: ignore[arg-type]
    check_strategy(StrategyChoice(kind), make_config(), 2)  # type: ignore[arg-type]


def test_zero_refuses_a_bfloat16_backbone_and_fsdp2_does_not(make_config: Make) -> None:
    config = make_config(backbone__dtype="bfloat16")
    for kind in ("zero2", "zero3"):
        with pytest.raises(ConfigError, match="Use FSDP2"):
            check_strategy(StrategyChoice(kind), config, 2)  # type: ignore[arg-type]
    check_strategy(StrategyChoice("fsdp2"), config, 2)


def test_gradients_are_exchanged_in_buckets_of_one_precision() -> None:
    from lmm4edit.training.processes import _buckets

    sizes = [nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 9, 1)]
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    found = [[p.numel() for p in bucket] for bucket in _buckets([*sizes, half], limit=8)]
    assert found == [[4, 4], [4], [9], [1], [1]]
