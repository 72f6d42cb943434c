"""FSDP2: the frozen backbone is divided among the processes, layer by layer; what is trained stays whole.

``fully_shard`` on every layer and on the judge, with the trained parameters ignored. Their gradients are averaged here,
once a step. In full fine-tuning everything is divided, trained parameters and their optimizer state as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.backbones import plain_model
from lmm4edit.training.processes import Processes
from lmm4edit.training.state import check_tensors
from lmm4edit.training.strategy import Strategy, StrategyChoice


class FullyShardedStrategy(Strategy):
    """FSDP2 over all processes of the launch."""

    def __init__(self, processes: Processes, choice: StrategyChoice, config: TrainConfig) -> None:
        super().__init__(processes, choice)
        self._reshard = choice.reshard_after_forward
        # AdaLoRA and LoRA train little, and their factors must be whole; full fine-tuning trains most of the model.
        self.divides_trained = self.sharded_optimizer = config.adapter.kind == "full"

    @property
    def load_device(self) -> torch.device:
        """The processor: each layer goes to its device as it is divided, so that no device ever holds them all."""
        return torch.device("cpu")

    def prepare(self, model: nn.Module, make_optimizer: Callable[[], torch.optim.Optimizer]) -> None:
        device = self.processes.device
        mesh = init_device_mesh(device.type, (self.processes.world_size,))
        whole = set() if self.sharded_optimizer else {p for p in model.parameters() if p.requires_grad}
        for parameter in whole:  # fully_shard moves only what it divides
            parameter.data = parameter.data.to(device)
        for layer in layers_to_divide(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._reshard, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.model = self.module = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        if self.sharded_optimizer:
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def clip(self, max_norm: float) -> float:
        if not self.sharded_optimizer:
            self.processes.average_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gathers the whole judge in every process, for as long as this is open."""
        parts = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in parts:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in parts:
                module.set_reshard_after_forward(self._reshard and module is not self.model, recurse=False)
                module.reshard()

    def tensors(self) -> dict[str, Tensor]:
        named = ((name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad)
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).cpu().contiguous() for name, p in named}

    def restore(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        check_tensors(self.model, tensors, origin)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name not in tensors:
                    continue
                value = tensors[name].to(self.processes.device)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        state = super().optimizer_state()
        # What a file holds is this process's part: a distributed tensor cannot be read without its processes.
        parts = {
            index: {key: v.to_local() if isinstance(v, DTensor) else v for key, v in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": parts}

    def restore_optimizer(self, state: Mapping[str, Any]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        parts = {
            index: {key: _like(parameters[index], v, key) for key, v in values.items()}
            for index, values in state["state"].items()
        }
        super().restore_optimizer({**state, "state": parts})


def layers_to_divide(model: nn.Module) -> list[nn.Module]:
    """The layers of vision encoder and language model, which Transformers says must stay together.

    Raises:
        ConfigError: if the backbone does not say which they are.
    """
    backbone = plain_model(model.backbone)  # type: ignore[arg-type]
    names: set[str] = set()
    for module in backbone.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    found = [module for module in backbone.modules() if type(module).__name__ in names and _has_weights(module)]
    if not found:
        raise ConfigError(
            f"distributed: FSDP2 does not know how to divide {type(backbone).__name__}, which names no layers "
            "(_no_split_modules). Use distributed.strategy=ddp or zero3."
        )
    return found


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _like(parameter: nn.Parameter, value: Any, key: str) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or key == "step":
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
