"""How several processes train one judge: replicated (one process, DDP), FSDP2, or DeepSpeed's ZeRO.

What is frozen may be sharded; what AdaLoRA prunes may not, because an importance is a property of a whole triplet:
adapters, projector and score head stay whole in every process (measured: stock AdaLoRA fails on FSDP2, ZeRO-2 and
ZeRO-3 alike, see docs/distributed.md). The loop knows this module's :class:`Strategy` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.rank_allocator import RankAllocator
from lmm4edit.training.processes import Processes
from lmm4edit.training.state import restore_tensors, trained_tensors

Kind = Literal["replicated", "fsdp2", "zero2", "zero3"]

_FSDP, _DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


@dataclass(frozen=True)
class StrategyChoice:
    """Which strategy a run uses.

    Attributes:
        kind: ``replicated`` is one process or plain data parallelism (DDP).
        reshard_after_forward: FSDP2 and ZeRO-3 free a layer's weights after its forward pass (less memory, and the
            backward pass gathers them again).
    """

    kind: Kind
    reshard_after_forward: bool = True

    def describe(self, world_size: int) -> str:
        """A few words for plan and records."""
        among = f"divided among {world_size} processes"
        return {
            "replicated": "one process" if world_size == 1 else f"DDP, {world_size} processes",
            "fsdp2": f"FSDP2, the frozen weights {among} (in full fine-tuning everything)",
            "zero2": f"ZeRO-2, gradients and optimizer state {among}",
            "zero3": f"ZeRO-3, weights, gradients and optimizer state {among}",
        }[self.kind]


def choose_strategy(config: TrainConfig, environment: MutableMapping[str, str]) -> StrategyChoice:
    """The strategy that the configuration names, or else the one the launcher asks for (``accelerate launch``).

    The launcher's wish is taken out of ``environment``: sharding is done here, by PyTorch's and DeepSpeed's own calls,
    and Accelerate is left with what it is used for, the processes and their devices. (Its DeepSpeed ``backward`` also
    takes the optimizer step and clears gradients, which leaves no moment for AdaLoRA's pruning.)

    Raises:
        ConfigError: if the launcher asks for something that is not done here; the key to change is named.
    """
    launched = _launched(environment)
    for key in (_FSDP, _DEEPSPEED):
        environment.pop(key, None)
    wanted = config.distributed.strategy
    if wanted == "launcher":
        return launched or StrategyChoice("replicated", config.distributed.reshard_after_forward)
    kind: Kind = "replicated" if wanted == "ddp" else wanted
    if launched is not None and launched.kind != kind:
        raise ConfigError(
            f"distributed.strategy: the configuration says {wanted}, the launcher's configuration {launched.kind}. "
            "Leave one of the two out."
        )
    return StrategyChoice(kind, config.distributed.reshard_after_forward)


def _launched(environment: Mapping[str, str]) -> StrategyChoice | None:
    if _true(environment.get(_DEEPSPEED)):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() not in ("none", ""):
            raise ConfigError(
                "deepspeed_config_file: not read, because half of its keys (optimizer, schedule, batch, precision) are "
                "this run's own. Give zero_stage instead, as the files in configs/accelerate/ do."
            )
        for key, name in (("OPTIMIZER", "offload_optimizer_device"), ("PARAM", "offload_param_device")):
            if (device := environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{key}_DEVICE", "none").lower()) != "none":
                raise ConfigError(f"{name}: expected none, got {device}: offloading is not supported.")
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "?")
        if stage not in ("2", "3"):
            raise ConfigError(f"zero_stage: expected 2 or 3, got {stage}. For stage 0 or 1 use DDP.")
        return StrategyChoice("zero2" if stage == "2" else "zero3")
    if _true(environment.get(_FSDP)):
        if (version := environment.get("FSDP_VERSION", "1")) != "2":
            raise ConfigError(
                f"fsdp_version: expected 2, got {version}: FSDP1 flattens what is frozen and what is trained into one "
                "tensor."
            )
        if _true(environment.get("FSDP_OFFLOAD_PARAMS")):
            raise ConfigError("fsdp_offload_params: expected false, got true: offloading is not supported.")
        if _true(environment.get("FSDP_ACTIVATION_CHECKPOINTING")):
            raise ConfigError(
                "fsdp_activation_checkpointing: set it to false, and backbone.gradient_checkpointing=true in the "
                "training configuration, which works with every strategy."
            )
        return StrategyChoice("fsdp2", _true(environment.get("FSDP_RESHARD_AFTER_FORWARD", "true")))
    return None


def check_strategy(choice: StrategyChoice, config: TrainConfig, world_size: int) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        ConfigError: the message says what can.
    """
    if choice.kind == "replicated":
        return
    if world_size == 1:
        raise ConfigError(
            f"distributed: {choice.kind} divides the model among processes, and this launch has one. Launch several "
            "(torchrun --nproc-per-node N, accelerate launch --num_processes N; a dry run: --processes N), or set "
            "distributed.strategy=ddp."
        )
    if config.backbone.quantization:
        raise ConfigError(
            f"backbone.quantization: {config.backbone.quantization} weights are not divided among processes, and "
            f"{choice.kind} would have to. Use distributed.strategy=ddp, or quantization: null."
        )
    if choice.kind != "fsdp2" and config.backbone.dtype != "float32":
        raise ConfigError(
            f"backbone.dtype: expected float32 with ZeRO, got {config.backbone.dtype}: DeepSpeed wants one precision "
            "for all weights, and what is trained is float32 here. Use FSDP2 (configs/accelerate/fsdp2.yaml), which "
            "divides a bfloat16 backbone, or set backbone.dtype=float32."
        )


def build_strategy(choice: StrategyChoice, config: TrainConfig, processes: Processes) -> Strategy:
    """The strategy itself, before the judge is built.

    Raises:
        ConfigError: if it cannot be used for this run; the message says what can.
    """
    check_strategy(choice, config, processes.world_size)
    if choice.kind == "replicated":
        return Strategy(processes, choice)
    if choice.kind == "fsdp2":
        from lmm4edit.training.strategy_fsdp import FullyShardedStrategy

        return FullyShardedStrategy(processes, choice, config)
    from lmm4edit.training.strategy_zero import ZeroStrategy

    return ZeroStrategy(processes, choice, config)


class Strategy:
    """Everything whole in every process: one process, or plain data parallelism.

    Attributes:
        module: what the loop calls: the judge, wrapped.
        optimizer: whose ``param_groups`` carry the learning rates.
        sharded_optimizer: whether every process holds another part of the optimizer's state.
        divides_trained: whether every process holds another part of what is trained.
    """

    sharded_optimizer = False
    divides_trained = False

    def __init__(self, processes: Processes, choice: StrategyChoice) -> None:
        self.processes, self.choice = processes, choice
        self.model: nn.Module
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.parameters: list[nn.Parameter] = []

    @property
    def load_device(self) -> torch.device:
        """Where the judge is built."""
        return self.processes.device

    def describe(self) -> str:
        """A few words for the plan and the records."""
        return self.choice.describe(self.processes.world_size)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[], torch.optim.Optimizer]) -> None:
        """Wrap the judge and build its optimizer, in this order: sharding replaces parameters."""
        self.model = model
        self.module = self.processes.wrap(model)
        self.optimizer = make_optimizer()
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last one of a step only."""
        return self.processes.accumulating(self.module, last=last)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, averaged over processes."""
        loss.backward()

    def clip(self, max_norm: float) -> float:
        """Scale the step's gradients down to ``max_norm``, and give the norm they had. May be infinite or NaN."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))

    def step(self, allocator: RankAllocator) -> None:
        """Change the weights, prune ranks, clear gradients."""
        self.optimizer.step()
        # The allocator reads this step's gradients and prunes what the step has just moved: between the two lines.
        allocator.step()
        self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the judge itself (not :attr:`module`) can be called, by each process as often as it likes."""
        return nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """What training changes, whole, on the processor. All processes must call this."""
        return trained_tensors(self.model)

    def whole_tensors(self) -> dict[str, Tensor] | None:
        """:meth:`tensors` where processes hold but a part of what is trained; else ``None``."""
        return self.tensors() if self.divides_trained else None

    def restore(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Put back what :meth:`tensors` gave.

        Raises:
            CheckpointError: if names or shapes differ.
        """
        restore_tensors(self.model, tensors, origin)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state: this process's part where :attr:`sharded_optimizer`, else the whole."""
        return self.optimizer.state_dict()

    def restore_optimizer(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`optimizer_state` gave this process."""
        self.optimizer.load_state_dict(dict(state))


def _true(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on")
