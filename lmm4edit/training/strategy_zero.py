"""DeepSpeed's ZeRO: stage 2 divides gradients and optimizer state among the processes, stage 3 the weights as well.

``backward`` and ``step`` of the engine are driven apart, so that there is a moment between them to read gradients and
one after them to prune. In stage 3 adapters, projector and score head are marked persistent: each process keeps them
whole beside its part, and the frozen layers alone come and go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lmm4edit.config import TrainConfig
from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import Factors, adalora_layers
from lmm4edit.judge.rank_allocator import RankAllocator
from lmm4edit.training.processes import Processes
from lmm4edit.training.state import check_tensors
from lmm4edit.training.strategy import Strategy, StrategyChoice

_HELD = -1
"""Stands for a module that uses a weight; DeepSpeed numbers modules from 0."""


class ZeroStrategy(Strategy):
    """ZeRO over all processes of the launch.

    Raises:
        ConfigError: without DeepSpeed.
    """

    sharded_optimizer = True

    def __init__(self, processes: Processes, choice: StrategyChoice, config: TrainConfig) -> None:
        super().__init__(processes, choice)
        self._stage = 2 if choice.kind == "zero2" else 3
        self._max_norm = config.optimizer.max_grad_norm
        self.divides_trained = self._stage == 3 and config.adapter.kind == "full"
        self._micro_batch_size = config.batch.micro_batch_size
        if processes.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                "distributed: ZeRO needs DeepSpeed, which is not installed. pip install 'lmm4edit[train]'."
            ) from error
        self._deepspeed: Any = deepspeed
        self._engine: Any = None
        self._factor_gradients: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def load_device(self) -> torch.device:
        """The processor: DeepSpeed moves what it keeps."""
        return torch.device("cpu")

    def prepare(self, model: nn.Module, make_optimizer: Callable[[], torch.optim.Optimizer]) -> None:
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer()
        self._engine, *_ = self._deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": self._micro_batch_size,
                "gradient_accumulation_steps": 1,  # windows differ in length: the boundary is set by hand
                "gradient_clipping": self._max_norm,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {
                    "stage": self._stage,
                    "overlap_comm": False,
                    "reduce_scatter": True,
                    "stage3_param_persistence_threshold": 0,
                },
                "steps_per_print": 2**31,
            },
        )
        self.module = self._engine
        if self._stage == 3 and not self.divides_trained:
            persistent = self._engine.optimizer.persistent_parameters
            for parameter in self.parameters:
                parameter.ds_persist = True  # type: ignore[attr-defined]
                persistent.append(parameter)
            persistent[0].all_gather(persistent)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def clip(self, max_norm: float) -> float:
        """Measures only, for the engine clips as it steps; and keeps the gradients that the allocator will read."""
        from deepspeed.utils import safe_get_full_grad

        factors = {id(p) for layer in self._factors() for p in (layer.values, layer.right, layer.left)}
        total = torch.zeros((), device=self.processes.device)
        kept: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in self.parameters:
            gradient = safe_get_full_grad(parameter)
            if gradient is None:
                continue
            total += gradient.float().pow(2).sum()
            if id(parameter) in factors:
                kept.append((parameter, gradient.clone().view_as(parameter)))
        norm = float(total.sqrt())
        scale = min(1.0, max_norm / (norm + 1e-6))
        self._factor_gradients = [(parameter, gradient * scale) for parameter, gradient in kept]
        return norm

    def step(self, allocator: RankAllocator) -> None:
        self._engine.step()
        for parameter, gradient in self._factor_gradients:
            parameter.grad = gradient
        allocator.step()
        for layer in self._factors():
            self._write(layer.values, layer.values.data)
        for parameter, _ in self._factor_gradients:
            parameter.grad = None
        self._factor_gradients = []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Stage 3 gathers the whole judge in every process, for as long as this is open."""
        if self._stage == 2:
            yield
            return
        parameters: list[Any] = list(self.model.parameters())
        with self._deepspeed.zero.GatheredParameters([p for p in parameters if not p.ds_persist]):
            # In use by nobody's module: the hooks would else free each layer after use, and gather it again together
            # with processes that are elsewhere.
            for parameter in parameters:
                parameter.ds_active_sub_modules.add(_HELD)
            try:
                yield
            finally:
                for parameter in parameters:
                    parameter.ds_active_sub_modules.discard(_HELD)

    def tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {
            name: safe_get_full_fp32_param(p).detach().cpu().clone().view(_shape(p)).contiguous() for name, p in named
        }

    def restore(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        check_tensors(self.model, tensors, origin, shape=_shape)
        for name, parameter in self.model.named_parameters():
            if name in tensors:
                self._write(parameter, tensors[name].to(self.processes.device))

    def optimizer_state(self) -> dict[str, Any]:
        """Of the flat parts this process owns, in DeepSpeed's order: stage 3 hides them from the optimizer itself."""
        parts = {index: dict(self.optimizer.state.get(flat, {})) for index, flat in enumerate(self._flat_parts())}
        return {"state": parts, "sizes": [flat.numel() for flat in self._flat_parts()]}

    def restore_optimizer(self, state: Mapping[str, Any]) -> None:
        sizes = [flat.numel() for flat in self._flat_parts()]
        if state.get("sizes") != sizes:
            raise CheckpointError(
                f"The optimizer's state is divided into parts of {state.get('sizes')} values, expected {sizes}. Use "
                "the version of DeepSpeed it was written with, or add --restart to begin anew."
            )
        for index, flat in enumerate(self._flat_parts()):
            values = state["state"][index]
            self.optimizer.state[flat] = {
                key: v.to(flat.device) if isinstance(v, Tensor) and key != "step" else v for key, v in values.items()
            }

    def _flat_parts(self) -> list[Tensor]:
        optimizer = self._engine.optimizer
        return list(
            optimizer.single_partition_of_fp32_groups if self._stage == 2 else optimizer.fp32_partitioned_groups_flat
        )

    def _factors(self) -> list[Factors]:
        return list(adalora_layers(self.model.backbone).values())  # type: ignore[arg-type]

    @torch.no_grad()
    def _write(self, parameter: Any, value: Tensor) -> None:
        """Set a trained parameter in all its forms: as the model sees it, in float32, and divided."""
        if self._stage == 2:
            from deepspeed.utils import safe_set_full_fp32_param

            if parameter.data is not value:
                parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            return
        from deepspeed.utils import safe_set_local_fp32_param

        size = parameter.ds_tensor.numel()
        padded = value.new_zeros(size * self.processes.world_size)
        padded[: value.numel()] = value.flatten()
        mine = padded.narrow(0, size * self.processes.rank, size)
        # Not DeepSpeed's own call for whole values, which fails where they do not divide evenly.
        safe_set_local_fp32_param(parameter, mine)
        parameter.ds_tensor.data.copy_(mine)
        if parameter.data.numel() == value.numel() and parameter.data is not value:
            parameter.data.copy_(value.view_as(parameter.data))


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)
