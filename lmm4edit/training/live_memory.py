"""Bytes of the tensors that are alive, followed operation by operation: what a step of training really holds.

It sees every tensor that an operation hands out, on any device and also on none (meta and fake tensors), and not what a
kernel borrows inside. A view costs nothing: memory belongs to storages, and each is counted once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts while it is open (``with LiveMemory() as memory``).

    Attributes:
        live: bytes alive now, of tensors made while this was open or given to :meth:`add`.
        peak: the most they have been, since the start or :meth:`restart_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that were there before (weights, a batch). Returns the bytes that this added."""
        before = self.live
        for tensor in tensors:
            self._track(tensor, counted=True)
        return self.live - before

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Never count these, nor views of them."""
        for tensor in tensors:
            self._track(tensor, counted=False)

    def restart_peak(self) -> int:
        """The peak so far; from now on a new one is taken."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._track(leaf, counted=True)
        return out

    def _track(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0

        def freed(_: Any) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
