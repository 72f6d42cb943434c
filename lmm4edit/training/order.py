"""Which edits make up which optimizer step: a function of the seed alone, so that any step can be found again.

An epoch is a permutation of the edits, cut into *windows* of ``processes x micro_batch_size x gradient_accumulation``
edits, one window an optimizer step. The same window holds the same edits however it is cut into micro-batches and
spread over processes. The last window of an epoch may be smaller; nothing is dropped and nothing is drawn twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FILLER = -1
"""Index of no edit: stands in for a process that has nothing left while another one has. It carries no loss."""


@dataclass(frozen=True)
class DataOrder:
    """The order of edits for one process.

    Attributes:
        n_edits: edits in an epoch.
        micro_batch_size: edits in one forward pass of one process.
        gradient_accumulation: forward passes of one process in an optimizer step.
        seed: of the permutations.
        rank, world_size: this process, and how many there are.
    """

    n_edits: int
    micro_batch_size: int
    gradient_accumulation: int = 1
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def edits_per_step(self) -> int:
        """Edits in a full window."""
        return self.world_size * self.micro_batch_size * self.gradient_accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Windows in an epoch, the last, smaller one included."""
        return math.ceil(self.n_edits / self.edits_per_step)

    def window(self, step: int) -> list[list[int]]:
        """This process's micro-batches of the optimizer step ``step`` (counted from 0, through all epochs).

        Every process gets the same number of micro-batches; one without edits is ``[FILLER]``.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.n_edits)
        edits = order[position * self.edits_per_step : (position + 1) * self.edits_per_step].tolist()
        per_round = self.world_size * self.micro_batch_size
        start = self.rank * self.micro_batch_size
        rounds = (edits[first : first + per_round] for first in range(0, len(edits), per_round))
        return [part[start : start + self.micro_batch_size] or [FILLER] for part in rounds]

    def micro_batches(self, first_step: int, total_steps: int) -> Iterator[list[int]]:
        """The micro-batches of the steps from ``first_step`` to ``total_steps - 1``, one after the other."""
        for step in range(first_step, total_steps):
            yield from self.window(step)
