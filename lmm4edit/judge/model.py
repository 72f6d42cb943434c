"""The judge as one module: backbone, score head and the penalty in a single forward pass.

One ``forward`` of one module, because DDP, FSDP and DeepSpeed hook that call: calling an inner model directly would
bypass them. Logits are computed only where they are needed, never for a whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import orthogonality_penalty, refuse_foreign_adapters
from lmm4edit.judge.backbones import PrefixBatch, cast_projector_inputs, last_hidden_states, plain_model, token_logits
from lmm4edit.judge.packing import IGNORE, PackedBatch
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import ANSWER, Dimension


class Objective(Protocol):
    """Weights of the terms of the loss; 0 leaves a term out (and uncomputed)."""

    @property
    def text_ce(self) -> float: ...
    @property
    def qa_ce(self) -> float: ...
    @property
    def score_mse(self) -> float: ...
    @property
    def orthogonality(self) -> float: ...


@dataclass(frozen=True)
class ObjectiveWeights:
    """The plain form of :class:`Objective`.

    Attributes:
        text_ce: cross-entropy of the score sentences' answer tokens (stage 1).
        qa_ce: cross-entropy of the yes/no answers' tokens.
        score_mse: mean squared error of the score head, in target standard deviations (stage 2).
        orthogonality: AdaLoRA's penalty.
    """

    text_ce: float = 0.0
    qa_ce: float = 0.0
    score_mse: float = 0.0
    orthogonality: float = 0.0


@dataclass
class JudgeOutput:
    """What one forward pass gives. B rows, Q questions of the batch, D dimensions of the judge.

    Attributes:
        hidden: [B, Q, hidden size]; the last stem token's state of each question, in ``batch.suffix_keys``' order;
            zeros where a row lacks the question.
        asked: [B, D] boolean; whether the row asks about the dimension.
        standardised: [B, D] float32; in target standard deviations, NaN where not asked; ``None`` without a score head.
        scores: [B, D] float32; on the MOS scale, unclipped, higher is better, NaN where not asked; ``None`` without a
            head.
        answer_logits: [B, 2] float32; logits of (no, yes) after the question's stem, NaN where nothing is asked;
            ``None`` if no row asks a question.
        sums: by term (``text``, ``qa``: nats over answer tokens; ``score``: squared standard deviations) the sum over
            the batch, or ``None`` for a term that the objective leaves out. Divide by the counts of a whole
            accumulation window.
        counts: by the same terms, how many tokens or targets are in the sum.
        orthogonality: AdaLoRA's penalty, unweighted, or ``None``.
        loss: weighted sum of the terms' means over *this batch* and the penalty; ``None`` without an objective.
    """

    hidden: Tensor
    asked: Tensor
    standardised: Tensor | None
    scores: Tensor | None
    answer_logits: Tensor | None
    sums: dict[str, Tensor | None]
    counts: dict[str, int]
    orthogonality: Tensor | None
    loss: Tensor | None


class JudgeModel(nn.Module):
    """Backbone and score head.

    Args:
        backbone: a Transformers model, plain or from :func:`lmm4edit.judge.adapters.attach_adapters`.
        dimensions: what is judged, in the order of the scores.
        answer_tokens: ids of the first tokens of (no, yes), from :func:`lmm4edit.judge.packing.answer_token_ids`.
        score_head, target_scale: both or neither. Without them (stage 1) the judge answers in words alone.

    Raises:
        ConfigError: if head, scale and dimensions do not fit, or adapters came through ``add_adapter``.
    """

    def __init__(
        self,
        backbone: nn.Module,
        dimensions: Sequence[Dimension],
        answer_tokens: tuple[int, int],
        score_head: ScoreHead | None = None,
        target_scale: TargetScale | None = None,
    ) -> None:
        super().__init__()
        refuse_foreign_adapters(backbone)
        cast_projector_inputs(backbone)
        if not dimensions or len({d.name for d in dimensions}) != len(dimensions):
            raise ConfigError(
                f"Expected at least one dimension and no name twice, got {[d.name for d in dimensions]}. Rename one."
            )
        self.backbone = backbone
        self.dimensions = tuple(dimensions)
        self.answer_tokens = answer_tokens
        # Names of backbone weights trained in full: a checkpoint must hold them even while they are frozen.
        self.trained_backbone_weights: tuple[str, ...] = ()
        self.score_head: ScoreHead | None = None
        self.target_scale: TargetScale | None = None
        if (score_head is None) != (target_scale is None):
            raise ConfigError("A score head and a target scale belong together: give both or neither.")
        if score_head is not None and target_scale is not None:
            self.attach_score_head(score_head, target_scale)

    @property
    def has_head(self) -> bool:
        """Whether there is a score head."""
        return self.score_head is not None

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that a score head reads."""
        return plain_model(self.backbone).config.get_text_config().hidden_size

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.backbone.parameters()).device

    def attach_score_head(self, score_head: ScoreHead, target_scale: TargetScale) -> None:
        """Give a judge that answers in words a score head (the start of stage 2), in float32 where the backbone lives.

        Raises:
            ConfigError: if the sizes do not fit.
        """
        expected = (self.hidden_size, len(self.dimensions), len(self.dimensions))
        got = (score_head.hidden, score_head.n_dimensions, len(target_scale.mean))
        if expected != got:
            raise ConfigError(
                f"Expected a score head of (hidden size, outputs, scales) = {expected} for dimensions "
                f"{[d.name for d in self.dimensions]}, got {got}."
            )
        self.score_head = score_head.to(device=self.device, dtype=torch.float32)
        self.target_scale = target_scale

    def require_head(self) -> None:
        """Refuse to read scores that nothing was trained to give.

        Raises:
            CheckpointError: without a score head.
        """
        if not self.has_head:
            raise CheckpointError(
                "This judge has no score head: it is a stage-1 checkpoint, which answers in words. Read it with the "
                "text read-out, or train stage 2 from it."
            )

    def enable_gradient_checkpointing(self) -> None:
        """Trade time for memory. Non-reentrant: the reentrant kind loses the vision encoder's gradients."""
        model, options = plain_model(self.backbone), {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # its name since Transformers 5.24
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def forward(
        self, batch: PackedBatch, objective: Objective | None = None, prefixes: PrefixBatch | None = None
    ) -> JudgeOutput:
        """Judge a batch, and compute the terms of a loss.

        Args:
            batch: packed, or one question a row; on the model's device.
            objective: which terms to compute; ``None``: none, and no loss.
            prefixes: what the rows continue (:mod:`lmm4edit.judge.prefix_cache`); ``None``: they are whole.

        Raises:
            ConfigError: if the objective wants scores and there is no head, or leaves nothing to learn.
        """
        states = last_hidden_states(self.backbone, batch, prefixes)
        present = batch.readout_index >= 0
        rows = torch.arange(len(batch), device=states.device)[:, None]
        hidden = states[rows, batch.readout_index.clamp(min=0)] * present[..., None]

        columns = self._columns(batch)
        asked = torch.stack(
            [present[:, c] if c is not None else torch.zeros_like(present[:, 0]) for c in columns], dim=1
        )
        standardised = scores = None
        if self.score_head is not None and self.target_scale is not None:
            of_dimension = torch.stack(
                [hidden[:, c] if c is not None else torch.zeros_like(hidden[:, 0]) for c in columns], dim=1
            )
            standardised = self.score_head(of_dimension).masked_fill(~asked, torch.nan)
            scores = self.target_scale.restore(standardised)

        answer_logits = None
        column = batch.suffix_keys.index(ANSWER) if ANSWER in batch.suffix_keys else None
        # The head is called even for nothing: where weights are gathered layer by layer, processes must call alike.
        asked_states = hidden[:0, 0] if column is None else hidden[:, column]
        logits = token_logits(self.backbone, asked_states)
        if column is not None:
            answer_logits = logits[:, list(self.answer_tokens)].float()
            answer_logits = answer_logits.masked_fill(~present[:, column, None], torch.nan)

        output = JudgeOutput(hidden, asked, standardised, scores, answer_logits, {}, {}, None, None)
        if objective is not None:
            self._add_loss(output, states, batch, objective, columns)
        return output

    def _columns(self, batch: PackedBatch) -> list[int | None]:
        """Where each of the judge's dimensions stands among the batch's questions."""
        keys = {key: index for index, key in enumerate(batch.suffix_keys)}
        return [keys.get(d.name) for d in self.dimensions]

    def _add_loss(
        self, output: JudgeOutput, states: Tensor, batch: PackedBatch, objective: Objective, columns: list[int | None]
    ) -> None:
        if objective.score_mse and self.score_head is None:
            raise ConfigError("objective.score_mse needs a score head: attach one first (stage 2), or set it to 0.")
        weights = {"text": objective.text_ce, "qa": objective.qa_ce, "score": objective.score_mse}
        output.sums = dict.fromkeys(weights)
        output.counts = dict.fromkeys(weights, 0)

        taught = batch.labels != IGNORE
        is_answer = torch.zeros_like(taught)
        if ANSWER in batch.suffix_keys:
            is_answer = batch.segment_ids == batch.suffix_keys.index(ANSWER) + 1
        for term, where in [("text", taught & ~is_answer), ("qa", taught & is_answer)]:
            output.counts[term] = int(where.sum())
            if weights[term]:
                logits = token_logits(self.backbone, states[where]).float()
                output.sums[term] = nn.functional.cross_entropy(logits, batch.labels[where], reduction="sum")

        missing = torch.full_like(batch.targets[:, 0], torch.nan) if batch.targets.shape[1] else None
        if missing is not None:
            targets = torch.stack([batch.targets[:, c] if c is not None else missing for c in columns], dim=1)
            known = torch.isfinite(targets) & output.asked
            output.counts["score"] = int(known.sum())
            if weights["score"] and output.standardised is not None and self.target_scale is not None:
                wanted = self.target_scale.standardise(targets)
                output.sums["score"] = (output.standardised[known] - wanted[known]).pow(2).sum()

        output.orthogonality = orthogonality_penalty(self.backbone) if objective.orthogonality else None
        parts = [
            weights[term] * total / max(1, output.counts[term])
            for term, total in output.sums.items()
            if total is not None
        ]
        if output.orthogonality is not None:
            parts.append(objective.orthogonality * output.orthogonality)
        if not parts:
            raise ConfigError("Every weight of the objective is 0: there is nothing to learn.")
        output.loss = torch.stack(parts).sum()


def answer_probability(answer_logits: Tensor) -> Tensor:
    """Probability of yes, against no alone: [B] from [B, 2]."""
    return answer_logits.softmax(-1)[..., 1]


def parameter_groups(model: JudgeModel) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by part: ``adapters`` (with any backbone weights trained in full), ``score_head``."""
    head: set[int] = {id(p) for p in model.score_head.parameters()} if model.score_head is not None else set()
    groups: dict[str, list[Any]] = {"adapters": [], "score_head": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups["score_head" if id(parameter) in head else "adapters"].append(parameter)
    return groups
