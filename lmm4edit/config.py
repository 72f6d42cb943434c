"""The configuration of a training run: one YAML file, validated whole before anything is loaded.

Unknown keys are refused, all problems are reported together, each by its path, with the near name where there is one.
Relative paths in a configuration are relative to the directory the command runs in. No torch here: the command line
describes and checks configurations with it. ``None`` (``null`` in YAML) means "derived, or left to what is configured";
the plan printed before step 1 shows every derived number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension
from lmm4edit.validated_yaml import apply_override, config_error, describe_errors, flatten, near_name, read_yaml

FROM_BACKBONE = "backbone"
"""Value of ``init_from`` that says in words: start from the bare backbone with fresh adapters."""


def _not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}.")
    return value


# PyYAML reads 1e-4 as a string (YAML 1.1 wants 1.0e-4), so numbers are coerced by type; true is no number, though.
Number = Annotated[float, BeforeValidator(_not_a_switch)]
Whole = Annotated[int, BeforeValidator(_not_a_switch)]


class Section(BaseModel):
    """A part of the configuration: unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BackboneSection(Section):
    """Which pretrained model is adapted, and how it is run.

    Attributes:
        name_or_path: a folder, or a name on the hub.
        dtype: of the frozen weights; what is trained is kept in float32 in either case.
        attn_implementation: one that takes the packing mask, which FlashAttention does not.
        trust_remote_code: run code that comes with the weights. Only for sources you trust.
        min_pixels, max_pixels: bounds of an image's size after resizing, in pixels; ``None`` keeps the processor's.
        gradient_checkpointing: recompute activations in the backward pass (non-reentrant): less memory, more time.
        liger: Liger's fused kernels for norms, rotary positions and the MLPs. Needs ``liger-kernel`` and a GPU.
        quantization: ``4bit`` keeps the frozen layers in 4 bits (QLoRA). Needs ``bitsandbytes`` and a GPU.
    """

    name_or_path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    trust_remote_code: bool = False
    min_pixels: Annotated[Whole, Field(gt=0)] | None = None
    max_pixels: Annotated[Whole, Field(gt=0)] | None = None
    gradient_checkpointing: bool = False
    liger: bool = False
    quantization: Literal["4bit"] | None = None


def _built_in_by_name(value: Any) -> Any:
    known = {d.name: asdict(d) for d in BUILT_IN_DIMENSIONS}
    if not isinstance(value, str) or value in known:
        return known[value] if isinstance(value, str) else value
    raise ValueError(
        f"expected a built-in dimension or a definition with name and question, got {value!r}.{near_name(value, known)}"
    )


class DimensionSection(Section):
    """A dimension of the user's own; see :class:`lmm4edit.records.Dimension`."""

    name: str
    question: str
    low: Number = 0.0
    high: Number = 100.0
    higher_is_better: bool = True
    definition: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.build()
        return self

    def build(self) -> Dimension:
        """The record."""
        return Dimension(**self.model_dump())


class DataSection(Section):
    """Where the samples come from.

    Attributes:
        train, validation: manifests; without ``validation`` no statistics are taken while training.
        retention: manifest of what a fine-tuned judge could do before: judged before and after training, never learnt.
        image_root: what relative image paths are relative to; ``None`` means the manifest's folder.
        num_workers: processes that decode images beside the training process (0: none).
        max_samples: use only the first so many usable samples of the training manifest.
        check_images: ``decode`` all before step 1, so that broken ones are left out at the start; ``header``: less.
        cache_megabytes: memory (of each process that decodes) for prepared images, so that later epochs decode nothing.
    """

    train: str
    validation: str | None = None
    retention: str | None = None
    image_root: str | None = None
    num_workers: Annotated[Whole, Field(ge=0)] = 0
    max_samples: Annotated[Whole, Field(gt=0)] | None = None
    check_images: Literal["decode", "header"] = "decode"
    cache_megabytes: Annotated[Whole, Field(ge=0)] = 0


class AdapterSection(Section):
    """What is adapted and how (paper, sections 4.2 and 5.4).

    Attributes:
        kind: ``adalora`` (paper), ``lora``, ``full`` fine-tuning of the chosen parts, or ``none``.
        vision, llm, projector: which parts are trained. The projector is trained in full.
        init_r, target_r: rank a matrix starts with, and mean rank at the end (AdaLoRA); LoRA uses ``init_r`` alone.
        lora_alpha: scale of the update.
        dropout: on the adapters' input.
        tinit: optimizer steps before the first pruning; ``None``: a tenth of the run.
        tfinal: optimizer steps after the last pruning; ``None``: three tenths of the run.
        delta_t: optimizer steps between two prunings; ``None``: about 50 prunings in the run.
        beta1, beta2: smoothing of the importance and of its uncertainty.
        ranks: of a run that starts from a judge with AdaLoRA (stage 2): ``continue`` with the ranks it has, pruned ones
            stay pruned; or ``reallocate``: grow every matrix to ``init_r`` again and prune anew. See docs/adalora.md.
    """

    kind: Literal["adalora", "lora", "full", "none"] = "adalora"
    vision: bool = True
    llm: bool = True
    projector: bool = True
    init_r: Annotated[Whole, Field(gt=0)] = 12
    target_r: Annotated[Whole, Field(gt=0)] = 8
    lora_alpha: Annotated[Number, Field(gt=0)] = 32.0
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    tinit: Annotated[Whole, Field(ge=0)] | None = None
    tfinal: Annotated[Whole, Field(gt=0)] | None = None
    delta_t: Annotated[Whole, Field(gt=0)] | None = None
    beta1: Annotated[Number, Field(gt=0, lt=1)] = 0.85
    beta2: Annotated[Number, Field(gt=0, lt=1)] = 0.85
    ranks: Literal["continue", "reallocate"] = "continue"


class ScoreHeadSection(Section):
    """The score head: a two-layer perceptron (paper, section 4.1). ``inner`` is its width, ``None``: the backbone's."""

    inner: Annotated[Whole, Field(gt=0)] | None = None


class ObjectiveSection(Section):
    """Weights of the terms of the loss; 0 leaves a term out.

    Attributes:
        text_ce: cross-entropy of the score sentences' answer tokens (stage 1).
        qa_ce: cross-entropy of the yes/no answers' tokens (stage 1, and optionally stage 2).
        score_mse: mean squared error of the score head on standardised targets (stage 2).
        orthogonality: AdaLoRA's penalty, which keeps its factors near orthogonal. Never part of a validation value.
    """

    text_ce: Annotated[Number, Field(ge=0)] = 0.0
    qa_ce: Annotated[Number, Field(ge=0)] = 0.0
    score_mse: Annotated[Number, Field(ge=0)] = 0.0
    orthogonality: Annotated[Number, Field(ge=0)] = 0.5


class OptimizerSection(Section):
    """AdamW and its schedule.

    Attributes:
        learning_rate: peak, for adapters and projector.
        head_learning_rate: peak for the score head; ``None``: the same.
        weight_decay: not applied to biases and norms.
        betas: of Adam.
        max_grad_norm: gradients are scaled down to this norm.
        warmup_ratio: part of the run in which the rate rises from 0 to the peak.
        schedule: what follows the warm-up.
        final_ratio: the rate at the end, as a part of the peak.
    """

    learning_rate: Annotated[Number, Field(gt=0)]
    head_learning_rate: Annotated[Number, Field(gt=0)] | None = None
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.999)
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    warmup_ratio: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.0


class BatchSection(Section):
    """How many edits go together. An optimizer step sees processes x micro_batch_size x gradient_accumulation edits.

    Attributes:
        micro_batch_size: edits in one forward pass of one process.
        gradient_accumulation: forward passes in one optimizer step.
        packed: all questions on an edit in one sequence (DESIGN section 5); ``false``: one sequence a question.
    """

    micro_batch_size: Annotated[Whole, Field(gt=0)]
    gradient_accumulation: Annotated[Whole, Field(gt=0)] = 1
    packed: bool = True


class ValidationSection(Section):
    """When agreement with people is measured while training: after epochs, after steps, or (both ``None``) never.

    Attributes:
        every_epochs, every_steps: at most one of the two.
        max_samples: so many, spread evenly over the validation manifest; ``None``: all.
        batch_size: edits in one forward pass; ``None``: the training's.
    """

    every_epochs: Annotated[Whole, Field(gt=0)] | None = None
    every_steps: Annotated[Whole, Field(gt=0)] | None = None
    max_samples: Annotated[Whole, Field(gt=0)] | None = None
    batch_size: Annotated[Whole, Field(gt=0)] | None = None


class CheckpointSection(Section):
    """What is kept on disk.

    Attributes:
        save_every_steps: distance of training states, from which a run continues; ``None``: about ten in the run.
        keep_last: how many such states are kept.
        keep_best: also keep the judge with the best mean validation SRCC, as ``checkpoint-best``.
    """

    save_every_steps: Annotated[Whole, Field(gt=0)] | None = None
    keep_last: Annotated[Whole, Field(gt=0)] = 2
    keep_best: bool = False


class DistributedSection(Section):
    """How several processes divide the work; see ``docs/distributed.md``.

    Attributes:
        strategy: ``launcher``: what ``accelerate launch`` was configured for, else DDP. ``ddp``, ``fsdp2``, ``zero2``
            and ``zero3`` say it here instead, for launches by torchrun or Slurm.
        reshard_after_forward: with FSDP2, free a layer's weights after its forward pass and gather them again for the
            backward pass: less memory, more traffic.
    """

    strategy: Literal["launcher", "ddp", "fsdp2", "zero2", "zero3"] = "launcher"
    reshard_after_forward: bool = True


class WandbSection(Section):
    """Weights & Biases, off unless ``enabled``; ``metrics.jsonl`` is written in either case."""

    enabled: bool = False
    project: str = "lmm4edit"
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class TrainConfig(Section):
    """Everything that decides a training run.

    Attributes:
        stage: 1 trains words (cross-entropy on text), 2 trains the score head (paper, section 4.2).
        run_dir: folder of the run.
        seed: of initial weights, data order and dropout.
        init_from: a judge's checkpoint to start from, or ``backbone``. Stage 2 must say which.
        prompts: a packaged prompt set's name, or a YAML file's path; ``None``: the starting judge's, or ``default``.
        dimensions: built-in names or definitions of your own; ``None``: the starting judge's, or the paper's three.
        epochs: passes over the training samples.
        max_steps: stop (and end the schedule) after so many optimizer steps, if that comes first.
        num_threads: threads of the processor; ``None`` leaves the machine's setting. Results are reproducible to the
            last bit only for the same number.
        log_every_steps: optimizer steps between two rows of ``metrics.jsonl``.
    """

    stage: Literal[1, 2]
    run_dir: str
    seed: Annotated[Whole, Field(ge=0)] = 0
    init_from: str | None = None
    prompts: str | None = None
    dimensions: (
        Annotated[list[Annotated[DimensionSection, BeforeValidator(_built_in_by_name)]], Field(min_length=1)] | None
    ) = None
    epochs: Annotated[Whole, Field(gt=0)]
    max_steps: Annotated[Whole, Field(gt=0)] | None = None
    num_threads: Annotated[Whole, Field(gt=0)] | None = None
    log_every_steps: Annotated[Whole, Field(gt=0)] = 1
    backbone: BackboneSection
    data: DataSection
    adapter: AdapterSection = AdapterSection()
    score_head: ScoreHeadSection = ScoreHeadSection()
    objective: ObjectiveSection
    optimizer: OptimizerSection
    batch: BatchSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    distributed: DistributedSection = DistributedSection()
    wandb: WandbSection = WandbSection()

    def build_dimensions(self) -> tuple[Dimension, ...] | None:
        """The dimensions as records, in the order of their questions; ``None`` if left to the starting judge."""
        if self.dimensions is not None:
            return tuple(dimension.build() for dimension in self.dimensions)
        return BUILT_IN_DIMENSIONS if self.starting_checkpoint() is None else None

    def needs_scores(self) -> bool:
        """Whether the objective reads human scores (it may ask for answers alone)."""
        return self.objective.text_ce > 0 or self.objective.score_mse > 0

    def starting_checkpoint(self) -> Path | None:
        """The folder of the judge to start from, or ``None`` to start from the backbone."""
        return None if self.init_from in (None, FROM_BACKBONE) else Path(str(self.init_from))

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Paths of the keys whose values differ, with (this one's value, the other's)."""
        mine, theirs = flatten(self.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        return {key: (mine.get(key), theirs.get(key)) for key in keys}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and validate a training configuration.

    Args:
        path: a YAML file.
        overrides: ``key.sub=value`` each; the value is read as YAML (``null``, ``true``, ``1e-4``, ``[0.9, 0.95]``).

    Raises:
        ConfigError: naming every problem by its key path.
    """
    values = read_yaml(path)
    problems = [problem for text in overrides if (problem := apply_override(values, text))]
    return build_config(values, origin=str(path), problems=problems)


def build_config(values: Mapping[str, Any], origin: str = "configuration", problems: Sequence[str] = ()) -> TrainConfig:
    """Validate nested values. ``origin`` names them in the error message, ``problems`` are ones already found.

    Raises:
        ConfigError: naming every problem by its key path.
    """
    try:
        config = TrainConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(origin, [*problems, *describe_errors(error, TrainConfig)]) from None
    if found := [*problems, *_check_across(config)]:
        raise config_error(origin, found)
    return config


def dump_config(config: TrainConfig) -> str:
    """YAML text of all values, defaults included, that loads to an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _check_across(config: TrainConfig) -> list[str]:
    """Problems that lie between keys, each naming the remedy."""
    return [*_check_stage(config), *_check_model(config), *_check_validation(config)]


def _check_stage(config: TrainConfig) -> list[str]:
    found = []
    objective = config.objective
    if config.stage == 1:
        if objective.text_ce + objective.qa_ce == 0:
            found.append("objective: stage 1 trains words, but text_ce and qa_ce are both 0. Set text_ce: 1.0.")
        if objective.score_mse:
            found.append(
                f"objective.score_mse: stage 1 trains words and no score head, got {objective.score_mse:g}. "
                "Set it to 0, or set stage: 2."
            )
    else:
        if not objective.score_mse:
            found.append("objective.score_mse: stage 2 trains the score head, got 0. Set it to 1.0.")
        if config.init_from is None:
            found.append(
                "init_from: stage 2 starts from a stage 1 checkpoint, got none. Give its folder (--init-from DIR), or "
                f"init_from: {FROM_BACKBONE} to leave stage 1 out on purpose."
            )
    return found


def _check_model(config: TrainConfig) -> list[str]:
    found = []
    adapter, backbone = config.adapter, config.backbone
    names = [dimension.name for dimension in config.dimensions or []]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        found.append(f"dimensions: each may stand once, repeated: {', '.join(repeated)}.")
    if adapter.kind == "adalora" and adapter.target_r > adapter.init_r:
        found.append(
            f"adapter.target_r: AdaLoRA only lowers ranks, so expected at most init_r={adapter.init_r}, "
            f"got {adapter.target_r}."
        )
    if adapter.kind in ("adalora", "lora") and not (adapter.vision or adapter.llm):
        found.append(f"adapter: kind {adapter.kind} with vision and llm both false adapts nothing. Set kind: none.")
    if adapter.ranks == "reallocate" and adapter.kind != "adalora":
        found.append(f"adapter.ranks: reallocate is for AdaLoRA, got kind {adapter.kind}. Set ranks: continue.")
    elif adapter.ranks == "reallocate" and config.starting_checkpoint() is None:
        found.append(
            "adapter.ranks: reallocate grows the ranks of a starting judge, and this run starts from the backbone, "
            "whose fresh adapters are pruned anyway. Set ranks: continue, or name a judge (init_from)."
        )
    towers = adapter.kind == "full" and (adapter.vision or adapter.llm)
    if adapter.kind in ("full", "none") and config.stage == 1 and not (adapter.projector or towers):
        found.append(f"adapter: kind {adapter.kind} as configured leaves nothing to train in stage 1.")
    if backbone.quantization and adapter.kind == "full":
        found.append(
            f"backbone.quantization: {backbone.quantization} weights cannot be trained, and adapter.kind is full. Set "
            "kind: adalora or lora, or quantization: null."
        )
    low, high = backbone.min_pixels, backbone.max_pixels
    if low and high and low > high:
        found.append(f"backbone.min_pixels: expected at most max_pixels={high}, got {low}.")
    return found


def _check_validation(config: TrainConfig) -> list[str]:
    found = []
    validation, manifest = config.validation, config.data.validation
    switched_on = validation.every_epochs is not None or validation.every_steps is not None
    if validation.every_epochs and validation.every_steps:
        found.append("validation: give every_epochs or every_steps, not both. Set one of them to null.")
    if switched_on and manifest is None:
        found.append("data.validation: validation is switched on without a manifest. Name one, or switch it off.")
    if manifest is not None and not switched_on:
        found.append("validation: data.validation would never be used. Set validation.every_epochs: 1.")
    if config.checkpoint.keep_best and not switched_on:
        found.append("checkpoint.keep_best: validation chooses the best judge, and it is off. Set keep_best: false.")
    return found
