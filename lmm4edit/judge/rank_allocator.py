"""AdaLoRA's rank allocation: which triplets of which matrices survive.

After Zhang et al. 2023 (arXiv:2303.10512), section 3.2: every triplet has an importance, the smoothed product of
sensitivity and uncertainty; the least important ones are masked while the budget shrinks along a cubic curve from the
initial to the target rank. Ours and not PEFT's, which must be called by hand with the right step at the right moment,
misses its target on ties, fails on a matrix without gradient, and keeps its averages where no checkpoint finds them.
Where both work they agree (tested).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import ADAPTER, Factors, adalora_layers, adapter_kind


@dataclass(frozen=True)
class RankSchedule:
    """When ranks are pruned, in optimizer steps, the first of which is step 1.

    Attributes:
        total_steps: of the whole run; must be known before it starts.
        tinit: steps before the first pruning.
        tfinal: steps after the last pruning.
        delta_t: steps between two prunings.
        target_r: mean rank at the end.
        beta1, beta2: smoothing of the sensitivity and of its uncertainty.
    """

    total_steps: int
    tinit: int
    tfinal: int
    delta_t: int
    target_r: int
    beta1: float = 0.85
    beta2: float = 0.85

    def __post_init__(self) -> None:
        if not (0 <= self.tinit < self.last_pruning <= self.total_steps) or self.tfinal < 0 or self.delta_t < 1:
            raise ConfigError(
                "The ranks need tinit >= 0, tfinal >= 0, delta_t >= 1 and tinit + tfinal < "
                f"total_steps={self.total_steps}, got tinit={self.tinit}, tfinal={self.tfinal} and "
                f"delta_t={self.delta_t}. Train longer, or lower tinit and tfinal."
            )
        if not (0 < self.beta1 < 1 and 0 < self.beta2 < 1):
            raise ConfigError(f"Expected 0 < beta1, beta2 < 1, got {self.beta1} and {self.beta2}.")

    @property
    def last_pruning(self) -> int:
        """The step in which the ranks become final."""
        return self.total_steps - self.tfinal

    def budget(self, step: int, initial: int, final: int) -> int:
        """How many triplets may live in a step: the paper's cubic curve from ``initial`` to ``final``."""
        if step <= self.tinit:
            return initial
        if step >= self.last_pruning:
            return final
        left = 1 - (step - self.tinit) / (self.last_pruning - self.tinit)
        return int((initial - final) * left**3 + final)


class RankAllocator:
    """Prunes AdaLoRA's ranks. Call :meth:`step` once per optimizer step, after ``optimizer.step()`` and before
    ``zero_grad()``: before the step, the optimizer would revive what has just been pruned.

    It counts steps itself, so none can be skipped or counted twice, and it makes the ranks final at the first step at
    or after ``total_steps - tfinal``.

    Args:
        backbone: with adapters. Without AdaLoRA there is nothing to do, and the allocator does nothing.
        schedule: ``None`` keeps the ranks as they are: a judge that is trained further (stage 2 from stage 1) goes on
            with the ranks it has, and triplets that were pruned stay pruned. To allocate them again, grow them first
            (:func:`lmm4edit.judge.adapters.regrow_ranks`) and give a schedule.

    Raises:
        ConfigError: if the target is above what there is.
    """

    def __init__(self, backbone: nn.Module, schedule: RankSchedule | None) -> None:
        self._backbone = backbone
        self.schedule = schedule
        self.steps = 0
        self.is_final = schedule is None
        layers = adalora_layers(backbone)
        self.initial_budget = sum(layer.values.numel() for layer in layers.values())
        self.target_budget = self.initial_budget if schedule is None else schedule.target_r * len(layers)
        if self.target_budget > self.initial_budget:
            raise ConfigError(
                f"AdaLoRA only lowers ranks: expected a target of at most {self.initial_budget} triplets in "
                f"{len(layers)} matrices, got target_r={schedule.target_r if schedule else None}, which makes "
                f"{self.target_budget}."
            )
        self._averages: dict[str, Tensor] = {}
        self._masks = {} if schedule is not None else _present_masks(layers)

    @property
    def budget(self) -> int:
        """How many triplets may live now."""
        if self.schedule is None:
            return sum(int(mask.sum()) for mask in self._masks.values()) if self._masks else self.initial_budget
        return self.schedule.budget(self.steps, self.initial_budget, self.target_budget)

    @torch.no_grad()
    def step(self) -> None:
        """Take in the gradients of the step just made, and prune if it is time to."""
        self.steps += 1
        step = self.steps
        layers = adalora_layers(self._backbone)
        if not layers:
            return
        schedule = self.schedule
        if schedule is None or self.is_final:
            _apply(layers, self._masks)
            return
        if step < schedule.last_pruning:
            self._update_averages(layers, schedule)
        final = step >= schedule.last_pruning
        if final or (step > schedule.tinit and step % schedule.delta_t == 0):
            budget = schedule.budget(step, self.initial_budget, self.target_budget)
            self._masks = self._most_important(layers, budget)
            _apply(layers, self._masks)
        if final:
            self._finish(layers)

    def finish(self) -> None:
        """Make the ranks final now, for a run that ends before its schedule does. Does nothing if they already are."""
        layers = adalora_layers(self._backbone)
        if self.is_final or not layers:
            return
        with torch.no_grad():
            self._masks = self._most_important(layers, self.target_budget)
            _apply(layers, self._masks)
        self._finish(layers)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as tensors: the step, the averages, the masks."""
        state = {"steps": torch.tensor(self.steps), "is_final": torch.tensor(self.is_final)}
        state |= {f"average.{name}": tensor.detach().cpu().clone() for name, tensor in self._averages.items()}
        state |= {f"mask.{name}": mask.cpu().clone() for name, mask in self._masks.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            CheckpointError: if the state is of other matrices than the model's.
        """
        layers = adalora_layers(self._backbone)
        known = {f"average.{name}.{kind}.{part}" for name in layers for kind in _KINDS for part in _PARTS}
        known |= {f"mask.{name}" for name in layers} | {"steps", "is_final"}
        if unknown := sorted(set(state) - known):
            raise CheckpointError(f"The rank allocator's state has keys of another model: {unknown[:4]}.")
        if missing := sorted({"steps", "is_final"} - set(state)):
            raise CheckpointError(f"The rank allocator's state lacks {missing}. Start the run again with --restart.")
        device = next(iter(layers.values())).values.device if layers else torch.device("cpu")
        self.steps, self.is_final = int(state["steps"]), bool(state["is_final"])
        self._averages = {
            key.removeprefix("average."): value.to(device).clone()
            for key, value in state.items()
            if key[:8] == "average."
        }
        self._masks = {
            key.removeprefix("mask."): value.to(device).clone() for key, value in state.items() if key[:5] == "mask."
        }
        if self.schedule is not None and self.is_final:
            self._publish(layers)

    def _update_averages(self, layers: Mapping[str, Factors], schedule: RankSchedule) -> None:
        for name, layer in layers.items():
            for part, parameter in _parts(layer).items():
                # A matrix that took no part in this step has had no influence on it.
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                sensitivity = (parameter * gradient).abs()
                key_s, key_u = f"{name}.{part}.sensitivity", f"{name}.{part}.uncertainty"
                mean = self._averages.get(key_s, torch.zeros_like(parameter))
                mean = schedule.beta1 * mean + (1 - schedule.beta1) * sensitivity
                spread = self._averages.get(key_u, torch.zeros_like(parameter))
                spread = schedule.beta2 * spread + (1 - schedule.beta2) * (sensitivity - mean).abs()
                self._averages[key_s], self._averages[key_u] = mean, spread

    def _most_important(self, layers: Mapping[str, Factors], budget: int) -> dict[str, Tensor]:
        scores = []
        for name, layer in layers.items():
            value, right, left = (self._element_scores(name, part, p) for part, p in _parts(layer).items())
            scores.append(value[:, 0] + right.mean(1) + left.mean(0))
        flat = torch.cat(scores)
        keep = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
        # Sorting is stable, so that ties (matrices without gradient score 0) neither miss the budget nor depend on
        # chance.
        keep[torch.sort(flat, descending=True, stable=True).indices[:budget]] = True
        sizes = [layer.values.shape[0] for layer in layers.values()]
        return dict(zip(layers, torch.split(keep, sizes), strict=True))

    def _element_scores(self, name: str, part: str, parameter: Tensor) -> Tensor:
        mean = self._averages.get(f"{name}.{part}.sensitivity")
        spread = self._averages.get(f"{name}.{part}.uncertainty")
        return torch.zeros_like(parameter) if mean is None or spread is None else mean * spread

    def _finish(self, layers: Mapping[str, Factors]) -> None:
        self.is_final = True
        self._averages = {}
        self._publish(layers)

    def _publish(self, layers: Mapping[str, Factors]) -> None:
        """Tell PEFT which triplets live: it saves and loads those alone."""
        if adapter_kind(self._backbone) == "adalora":
            pattern = {f"{name}.lora_E.{ADAPTER}": self._masks[name].tolist() for name in layers}
            self._backbone.peft_config[ADAPTER].rank_pattern = pattern  # type: ignore[index, union-attr]


_PARTS = ("sensitivity", "uncertainty")
_KINDS = ("values", "right", "left")


def _parts(layer: Factors) -> dict[str, nn.Parameter]:
    return {"values": layer.values, "right": layer.right, "left": layer.left}


def _present_masks(layers: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Which triplets live in a judge that is trained further; none fixed if it was never trained (all values are 0)."""
    masks = {name: (layer.values != 0).view(-1) for name, layer in layers.items()}
    return masks if any(bool(mask.any()) for mask in masks.values()) else {}


def _apply(layers: Mapping[str, Factors], masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        layers[name].values.masked_fill_(~mask.view(-1, 1), 0.0)
