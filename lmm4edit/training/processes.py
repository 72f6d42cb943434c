"""The processes of a run: who is first, what all must agree on. One process is the case of one.

Accelerate finds the processes and their devices; how they divide the model is :mod:`lmm4edit.training.strategy`'s
affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn

from lmm4edit.errors import ConfigError, LMM4EditError

T = TypeVar("T")


class Processes:
    """This process among its fellows.

    Raises:
        ConfigError: if the launch asks for something else than processes with one device each.
    """

    def __init__(self) -> None:
        # Precision is the loop's own affair (autocast), whatever the launcher's defaults say.
        self._accelerator = Accelerator(
            mixed_precision="no", kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)]
        )
        kind = self._accelerator.distributed_type.value
        if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise ConfigError(
                f"This launch asks for {kind}, expected one process, DDP, FSDP2, ZeRO-2 or ZeRO-3 (configs/accelerate/ "
                "has a file for each). Choose one of them, or launch with torchrun."
            )

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._accelerator.device

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._accelerator.process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._accelerator.num_processes

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self._accelerator.is_main_process

    def barrier(self) -> None:
        """Wait for all."""
        self._accelerator.wait_for_everyone()

    def first(self, action: Callable[[], T]) -> T:
        """Let the first process act and give its result to all. If it fails, all of them fail."""
        if self.world_size == 1:
            return action()
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = action()
            except Exception as error:  # told to all before it is raised: the others would wait for ever
                failure, outcome[1] = error, str(error)
        broadcast_object_list(outcome)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise LMM4EditError(outcome[1])
        return outcome[0]

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all processes."""
        return self._accelerator.reduce(values, reduction="sum") if self.world_size > 1 else values

    def gather(self, items: list[T]) -> list[T]:
        """The lists of all processes, one after the other."""
        return list(gather_object(items)) if self.world_size > 1 else items

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Mean of the gradients over all processes. What one process lacks counts as 0."""
        if self.world_size == 1 or not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=self.device)
        dist.all_reduce(present)
        chosen = [p for p, n in zip(parameters, present.tolist(), strict=True) if n]
        for bucket in _buckets(chosen):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            flat /= self.world_size
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p).clone()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this process's device, its gradients averaged over processes."""
        return self._accelerator.prepare_model(model)

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients are exchanged in the last one of a step only."""
        return nullcontext() if last else self._accelerator.no_sync(model)


@contextmanager
def leaving_the_group() -> Iterator[None]:
    """Take leave of the other processes at the end, in whatever way the block ends, before this one exits.

    The group's own threads take part in Python while they live. A process that exits beside them is aborted now and
    then, after all its work is done (two of gloo in about every second launch: docs/LOG.md, 2026-12-04), and the
    launcher calls the run failed. A group that was there before the block (Ray makes one) is left to who made it.
    """
    if dist.is_available() and dist.is_initialized():
        yield
        return
    complete = False
    try:
        yield
        complete = True
    finally:
        if dist.is_available() and dist.is_initialized():
            # Nobody shall still be talking to this process. After a failure here the others may not know of it.
            if complete:
                dist.barrier()
            dist.destroy_process_group()


def _buckets(parameters: Sequence[nn.Parameter], limit: int = 2**25) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype with about ``limit`` values, so that a copy of them fits beside the model."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size + parameter.numel() > limit or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket
