"""What is trained: a judge from a bare backbone, or one that starts from a checkpoint; and what of it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lmm4edit.config import TrainConfig
from lmm4edit.errors import ConfigError
from lmm4edit.judge.adapters import AdapterConfig, attach_adapters, effective_ranks, regrow_ranks, train_further
from lmm4edit.judge.backbones import (
    BackboneSpec,
    backbone_spec,
    load_backbone,
    plain_model,
    set_pixel_limits,
    special_ids,
)
from lmm4edit.judge.checkpoint import load_checkpoint
from lmm4edit.judge.checkpoint_files import read_judge_file
from lmm4edit.judge.encoding import answer_token_ids
from lmm4edit.judge.model import JudgeModel, parameter_groups
from lmm4edit.judge.prompts import PromptSet, load_prompts
from lmm4edit.judge.rank_allocator import RankAllocator, RankSchedule
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import Dimension, EditSample
from lmm4edit.training.dataset import Encoding
from lmm4edit.training.plan import TrainingPlan


@dataclass(frozen=True)
class Trainee:
    """A judge in training with what belongs to it.

    Attributes:
        model: the judge.
        processor: the backbone's, with the run's pixel limits.
        prompts: the wording.
        allocator: of AdaLoRA's ranks.
        notes: what a user should know before step 1.
        starts_with_head: whether the run starts from a judge that gives scores already.
    """

    model: JudgeModel
    processor: Any
    prompts: PromptSet
    allocator: RankAllocator
    notes: tuple[str, ...] = ()
    starts_with_head: bool = False

    def encoding(self, config: TrainConfig, *, teach: bool = True) -> Encoding:
        """How samples are presented: with the words this run teaches, or (``teach=False``) to be judged."""
        return Encoding(
            processor=self.processor,
            prompts=self.prompts,
            dimensions=self.model.dimensions,
            words=teach and config.objective.text_ce > 0,
            answer_words=teach and config.objective.qa_ce > 0,
            packed=config.batch.packed,
            chat=backbone_spec(plain_model(self.model.backbone)).chat,
            **special_ids(self.model.backbone, self.processor),
        )


def run_dimensions(config: TrainConfig) -> tuple[Dimension, ...]:
    """The dimensions of the run: the configuration's, or the starting judge's. Loads no weights.

    A judge may be trained further on other dimensions than its own; those of the same name must be the same, though.

    Raises:
        ConfigError: if a dimension is defined otherwise than in the starting judge, or none of its own is left.
        CheckpointError: if the starting judge cannot be read.
    """
    configured, checkpoint = config.build_dimensions(), config.starting_checkpoint()
    if checkpoint is None:
        assert configured is not None
        return configured
    fields = ("name", "question", "low", "high", "higher_is_better", "definition")
    stored = tuple(
        Dimension(**{field: getattr(entry, field) for field in fields})
        for entry in read_judge_file(checkpoint).dimensions
    )
    if configured is None:
        return stored
    by_name = {dimension.name: dimension for dimension in stored}
    if other := [d.name for d in configured if by_name.get(d.name, d) != d]:
        raise ConfigError(
            f"dimensions: {', '.join(other)}: defined otherwise than in the starting judge {checkpoint} (question, "
            "definition and range must agree, for its head has learnt to answer that question). Use its definition, or "
            "another name."
        )
    return configured


def build_trainee(
    config: TrainConfig,
    plan: TrainingPlan,
    dimensions: Sequence[Dimension],
    samples: Sequence[EditSample],
    device: torch.device,
) -> Trainee:
    """Build the judge on ``device``, ready for step 1. The same configuration gives the same weights.

    Args:
        config: of the run.
        plan: for the rank schedule.
        dimensions: from :func:`run_dimensions`.
        samples: training samples, whose mean and spread become the score head's scale.
        device: where it is trained.

    Raises:
        ConfigError, CheckpointError: if configuration, backbone and starting judge do not fit each other.
    """
    torch.manual_seed(config.seed)
    if config.starting_checkpoint() is None:
        model, processor, prompts, notes = _from_backbone(config, dimensions)
    else:
        model, processor, prompts, notes = _from_checkpoint(config)
    starts_with_head = config.stage == 2 and model.has_head
    if tuple(dimensions) != model.dimensions:
        model, changes = _with_dimensions(model, dimensions, samples)
        notes = (*notes, *changes)
    set_pixel_limits(processor, config.backbone.min_pixels, config.backbone.max_pixels)
    unrated = [name for name, values in _scores(samples, model.dimensions).items() if not values]
    if unrated and config.needs_scores():
        notes = (*notes, f"not rated in the training data, so its output is not trained: {', '.join(unrated)}")
    if config.stage == 2 and not model.has_head:
        head = ScoreHead(model.hidden_size, len(model.dimensions), config.score_head.inner)
        model.attach_score_head(head, TargetScale.from_scores(_scores(samples, model.dimensions)))
    if config.stage == 1 and model.score_head is not None:
        model.score_head.requires_grad_(False)
        notes = (
            *notes,
            "the starting judge's score head is kept as it is; stage 1 trains words and moves what it reads",
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Small steps on a bfloat16 weight are rounded away; the frozen weights keep their type.
            parameter.data = parameter.data.float()
    # Before the allocator is made, which keeps masks where the weights lie.
    model.to(device)
    if config.backbone.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    allocator = RankAllocator(model.backbone, _rank_schedule(config, plan))
    return Trainee(model, processor, prompts, allocator, notes, starts_with_head)


def parameters_by_part(model: nn.Module, spec: BackboneSpec) -> dict[str, tuple[int, int]]:
    """For each part of a judge (or a backbone) how many parameters are trained, and how many there are."""
    parts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        # PEFT keeps an untouched copy of what is trained in full.
        if ".original_module." in name:
            continue
        counts = parts.setdefault(_part_of(name, spec), [0, 0])
        counts[0] += parameter.numel() * parameter.requires_grad
        counts[1] += parameter.numel()
    return {part: (parts[part][0], parts[part][1]) for part in PARTS if part in parts}


PARTS = ("vision encoder", "projector", "language model", "score head")


def count_without_weights(described: Any, config: TrainConfig, n_dimensions: int) -> dict[str, tuple[int, int]]:
    """Trained parameters by part, from the backbone's configuration alone.

    A run that starts from a judge trains the same parts; AdaLoRA's pruned ranks are counted as if they were all there.
    """
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        backbone = AutoModelForImageTextToText.from_config(described)
        hidden = described.get_text_config().hidden_size
        counts = parameters_by_part(attach_adapters(backbone, _adapter_config(config)), backbone_spec(described))
        if config.stage == 2:
            head = sum(p.numel() for p in ScoreHead(hidden, n_dimensions, config.score_head.inner).parameters())
            counts["score head"] = (head, head)
    return counts


def optimizer_groups(model: JudgeModel, config: TrainConfig) -> list[dict[str, Any]]:
    """AdamW's parameter groups: the head has its own rate; biases, norms and single values do not decay."""
    settings = config.optimizer
    rates = {"adapters": settings.learning_rate, "score_head": settings.head_learning_rate or settings.learning_rate}
    groups = []
    for part, parameters in parameter_groups(model).items():
        for decays in (True, False):
            chosen = [p for p in parameters if (p.ndim >= 2) == decays]
            if chosen:
                decay = settings.weight_decay if decays else 0.0
                groups.append({"params": chosen, "lr": rates[part], "peak": rates[part], "weight_decay": decay})
    if not groups:
        raise ConfigError("adapter: as configured, nothing is trained. Choose parts to train, or an adapter kind.")
    return groups


def _from_backbone(
    config: TrainConfig, dimensions: Sequence[Dimension]
) -> tuple[JudgeModel, Any, PromptSet, tuple[str, ...]]:
    section = config.backbone
    backbone, processor = load_backbone(
        section.name_or_path,
        dtype=section.dtype,
        attn_implementation=section.attn_implementation,
        trust_remote_code=section.trust_remote_code,
        liger=section.liger,
        quantization=section.quantization,
    )
    prompts = load_prompts(config.prompts or "default")
    adapted = attach_adapters(backbone, _adapter_config(config), seed=config.seed)
    return JudgeModel(adapted, dimensions, answer_token_ids(processor.tokenizer, prompts)), processor, prompts, ()


def _from_checkpoint(config: TrainConfig) -> tuple[JudgeModel, Any, PromptSet, tuple[str, ...]]:
    checkpoint = config.starting_checkpoint()
    assert checkpoint is not None
    loaded = load_checkpoint(
        checkpoint,
        dtype=config.backbone.dtype,
        adapter_trainable=True,
        backbone=config.backbone.name_or_path,
        attn_implementation=config.backbone.attn_implementation,
        trust_remote_code=config.backbone.trust_remote_code,
        liger=config.backbone.liger,
        quantization=config.backbone.quantization,
    )
    _check_same_parts(config, loaded.model, read_judge_file(checkpoint).adapter)
    if config.adapter.ranks == "reallocate":
        regrow_ranks(loaded.model.backbone, _adapter_config(config), seed=config.seed)
    notes = train_further(loaded.model.backbone, _adapter_config(config))
    prompts = loaded.prompts
    if config.prompts is not None:
        prompts = load_prompts(config.prompts)
        if prompts.fingerprint() != loaded.prompts.fingerprint():
            notes = (
                *notes,
                f"wording: {config.prompts}, but the starting judge was trained with another one",
            )
    return loaded.model, loaded.processor, prompts, notes


def _scores(samples: Sequence[EditSample], dimensions: Sequence[Dimension]) -> dict[str, list[float]]:
    return {d.name: [s.mos[d.name] for s in samples if d.name in s.mos] for d in dimensions}


def _with_dimensions(
    model: JudgeModel, dimensions: Sequence[Dimension], samples: Sequence[EditSample]
) -> tuple[JudgeModel, tuple[str, ...]]:
    """A starting judge asked for other dimensions: what it can do it keeps, a new one's output starts from chance."""
    old = [d.name for d in model.dimensions]
    new = [d for d in dimensions if d.name not in old]
    dropped = [name for name in old if name not in {d.name for d in dimensions}]
    changed = JudgeModel(model.backbone, dimensions, model.answer_tokens)
    changed.trained_backbone_weights = model.trained_backbone_weights
    if model.score_head is not None and model.target_scale is not None:
        fresh = TargetScale.from_scores(_scores(samples, new))
        scales = dict(zip([d.name for d in new], zip(fresh.mean, fresh.sd, strict=True), strict=True))
        scales |= dict(zip(old, zip(model.target_scale.mean, model.target_scale.sd, strict=True), strict=True))
        head = ScoreHead(model.hidden_size, len(dimensions), model.score_head.inner)
        with torch.no_grad():
            head.first.load_state_dict(model.score_head.first.state_dict())
            for index, name in enumerate(d.name for d in dimensions):
                if name in old:
                    head.second.weight[index] = model.score_head.second.weight[old.index(name)]
                    head.second.bias[index] = model.score_head.second.bias[old.index(name)]
        means, deviations = zip(*(scales[d.name] for d in dimensions), strict=True)
        changed.attach_score_head(head, TargetScale(means, deviations))
    notes = []
    if new:
        notes.append(f"new to the starting judge, so their outputs start from chance: {', '.join(d.name for d in new)}")
    if dropped:
        notes.append(f"of the starting judge's dimensions left out: {', '.join(dropped)}")
    return changed, tuple(notes)


def _check_same_parts(config: TrainConfig, model: JudgeModel, kind: str | None) -> None:
    """A starting judge brings its adapters along; the configuration must not put others into the records."""
    configured = config.adapter
    expected = configured.kind if configured.kind in ("adalora", "lora") else None
    problems = []
    if kind != expected:
        problems.append(f"adapter.kind: expected {kind or 'full or none'}, got {configured.kind}")
    spec = backbone_spec(plain_model(model.backbone))
    parts = {part for part, (trained, _) in parameters_by_part(model, spec).items() if trained}
    # A matrix pruned to rank 0 has nothing left to train, but it was adapted.
    parts |= {_part_of(f"{name}.", spec) for name in effective_ranks(model.backbone)}
    for key, part, wanted in [
        ("vision", "vision encoder", configured.vision and configured.kind != "none"),
        ("llm", "language model", configured.llm and configured.kind != "none"),
        ("projector", "projector", configured.projector),
    ]:
        if kind == expected and (part in parts) != wanted:
            problems.append(f"adapter.{key}: expected {str(part in parts).lower()}, got {str(wanted).lower()}")
    if problems:
        raise ConfigError(
            f"{config.init_from}: the starting judge has other adapters than this configuration describes:\n"
            + "\n".join(f"  {problem}." for problem in problems)
            + "\nPut in the expected values, or start from the backbone."
        )


def _adapter_config(config: TrainConfig) -> AdapterConfig:
    section = config.adapter
    return AdapterConfig(
        kind=section.kind,
        vision=section.vision,
        llm=section.llm,
        projector=section.projector,
        init_r=section.init_r,
        target_r=section.target_r,
        lora_alpha=section.lora_alpha,
        dropout=section.dropout,
    )


def _rank_schedule(config: TrainConfig, plan: TrainingPlan) -> RankSchedule | None:
    if plan.tinit is None or plan.tfinal is None or plan.delta_t is None:
        return None
    return RankSchedule(
        total_steps=plan.total_steps,
        tinit=plan.tinit,
        tfinal=plan.tfinal,
        delta_t=plan.delta_t,
        target_r=config.adapter.target_r,
        beta1=config.adapter.beta1,
        beta2=config.adapter.beta2,
    )


def _part_of(name: str, spec: BackboneSpec) -> str:
    if spec.in_projector(name):
        return "projector"
    modules: Mapping[str, str] = {
        "score_head.": "score head",
        f"{spec.vision_module.removeprefix('model.')}.": "vision encoder",
    }
    return next((part for path, part in modules.items() if path in name), "language model")
