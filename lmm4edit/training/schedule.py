"""The learning rate as a function of the step alone: nothing to save, nothing to lose on resume."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate_factor(
    step: int, *, total_steps: int, warmup_steps: int, schedule: Schedule, final_ratio: float = 0.0
) -> float:
    """Part of the peak rate with which the optimizer step ``step`` (counted from 0) is taken.

    Rises linearly to 1 in ``warmup_steps``, then falls to ``final_ratio`` at the end of the run (``cosine`` annealing:
    paper section 5.1), or stays. Neither the first nor the last step is wasted on a rate of exactly 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    shapes = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
    return final_ratio + (1 - final_ratio) * shapes[schedule]
