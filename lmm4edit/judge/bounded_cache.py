"""A cache that stays within its memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key; the least recently used go first when the memory is full.

    Args:
        limit: bytes that all values together may take. One that is larger than that is not kept.
        size: bytes of a value.
    """

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self.limit, self._size = limit, size
        self.bytes = 0
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; ``None`` if it is not here."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value, and let others go if there is no room."""
        if key in self._kept:
            self.bytes -= self._size(self._kept.pop(key))
        if self._size(value) > self.limit:
            return
        self._kept[key] = value
        self.bytes += self._size(value)
        while self.bytes > self.limit:
            self.bytes -= self._size(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.bytes = 0
