"""A trained judge on disk: one folder, safetensors only, loaded strictly.

    adapter/                    PEFT's layout, projector included; plain PEFT can load it
    trained_weights.safetensors backbone weights that were trained in full (instead of adapter/)
    score_head.safetensors      stage 2 only
    judge.json                  stage, dimensions with their target scale, which backbone
    prompts.yaml                the wording the judge was trained with
    processor/                  tokenizer and image processor, as they were
    config.yaml                 the run's configuration
    provenance.json             versions, commit, seeds

A missing, left-over, renamed, empty or wrongly shaped weight is an error that names it: half a checkpoint that loads
gives scores that look like any others.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError
from lmm4edit.judge.adapters import ADAPTER, adapter_kind, forbid_add_adapter, freeze_scales
from lmm4edit.judge.backbone_files import backbone_fingerprint, describe_place, find_backbone
from lmm4edit.judge.backbones import load_backbone, plain_model
from lmm4edit.judge.checkpoint_files import (
    FORMAT_VERSION,
    BackboneEntry,
    DimensionEntry,
    HeadEntry,
    JudgeFile,
    read_judge_file,
    read_tensors,
    replace_folder,
    require,
    save_tensors,
    write_json,
)
from lmm4edit.judge.encoding import answer_token_ids
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.prompts import PromptSet, dump_prompts, load_prompts
from lmm4edit.judge.score_head import ScoreHead, TargetScale
from lmm4edit.records import Dimension


@dataclass(frozen=True)
class CheckpointMeta:
    """What a checkpoint says of itself.

    Attributes:
        folder: where it lies.
        stage: 1 (answers in words) or 2 (score head).
        has_head: whether there is a score head to read.
        dimensions: what is judged, in the order of the scores.
        backbone: where the backbone was loaded from.
        backbone_sha256: which weights it has.
        format_version: of the folder.
    """

    folder: Path
    stage: int
    has_head: bool
    dimensions: tuple[Dimension, ...]
    backbone: str
    backbone_sha256: str
    format_version: int


@dataclass(frozen=True)
class LoadedJudge:
    """A judge in evaluation mode with what belongs to it."""

    model: JudgeModel
    processor: Any
    prompts: PromptSet
    meta: CheckpointMeta


def save_checkpoint(
    folder: str | Path,
    model: JudgeModel,
    processor: Any,
    prompts: PromptSet,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    stage: int,
    whole: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a judge. The folder appears whole or not at all; an older one of the same name is replaced.

    Args:
        folder: where to.
        model: the judge, not wrapped for data parallelism.
        processor, prompts: what it was trained with.
        config: the run's configuration, as plain values.
        provenance: from :func:`lmm4edit.provenance.collect_provenance`.
        stage: 1 or 2.
        whole: values of the trained parameters by their names in ``model``, where it holds but a part of each (full
            fine-tuning divided among processes).

    Raises:
        CheckpointError: if the backbone was never saved (nobody could load the judge again), a weight is not finite, or
            something else than a judge stands in the folder's place.
    """
    target = Path(folder)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    backbone = plain_model(model.backbone)
    if not backbone.name_or_path:
        raise CheckpointError(
            f"{target}: the judge's backbone exists in memory only, so the checkpoint could not be loaded again. Save "
            "it with lmm4edit.judge.backbones.save_backbone and load it from there."
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        trained = _trained_weights(model, whole or {})
        kind = adapter_kind(model.backbone)
        if kind is not None:
            _save_adapter(temporary / "adapter", model.backbone, target)
        elif trained:
            save_tensors(temporary / "trained_weights.safetensors", trained, target)
        if model.score_head is not None:
            head = {name: (whole or {}).get(f"score_head.{name}", p) for name, p in model.score_head.named_parameters()}
            save_tensors(temporary / "score_head.safetensors", head, target)
        entry = _describe(model, processor, target, stage, kind, sorted(trained))
        write_json(temporary / "judge.json", entry.model_dump())
        (temporary / "prompts.yaml").write_text(dump_prompts(prompts), encoding="utf-8")
        processor.save_pretrained(str(temporary / "processor"))
        (temporary / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        write_json(temporary / "provenance.json", dict(provenance))
        replace_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Refuse to write a judge where anything but an older judge would be lost.

    Raises:
        CheckpointError: for a file, or a folder that holds something and no ``judge.json``.
    """
    if not os.path.lexists(folder) or (folder / "judge.json").is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        kind = "a folder with other things in it" if folder.is_dir() else "a file"
        raise CheckpointError(
            f"{folder}: expected nothing, or an older judge (a folder with judge.json), got {kind}. It would be lost; "
            "choose another place."
        )


def load_checkpoint(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    adapter_trainable: bool = False,
    backbone: str | Path | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    liger: bool = False,
    quantization: str | None = None,
) -> LoadedJudge:
    """Read a judge back, in evaluation mode.

    Args:
        folder: a checkpoint's.
        device, dtype: of the backbone; the score head is float32 always, and so is what is trained further.
        adapter_trainable: go on training what was trained (stage 2 from stage 1, resumed runs); else everything is
            frozen.
        backbone: where the backbone lies now, if not where the checkpoint remembers it.
        attn_implementation, trust_remote_code, liger, quantization: see :func:`lmm4edit.judge.backbones.load_backbone`.

    Raises:
        CheckpointError: if anything is missing, left over, renamed, empty, of another shape, or of another backbone.
    """
    folder = Path(folder)
    entry = read_judge_file(folder)
    prompts = load_prompts(require(folder, "prompts.yaml"))
    place = find_backbone(
        {"name": entry.backbone.name, "relative_path": entry.backbone.relative_path}, folder.resolve(), backbone
    )
    plain, _ = load_backbone(
        place,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        liger=liger,
        quantization=quantization,
    )
    fingerprint = backbone_fingerprint(place)
    if fingerprint != entry.backbone.sha256:
        raise CheckpointError(
            f"{folder}: this judge was trained on a backbone with sha256 {entry.backbone.sha256[:16]}..., but {place} "
            f"has {fingerprint[:16]}.... Its scores would be meaningless; give the backbone it was trained on."
        )
    processor = _load_processor(require(folder, "processor"), entry.image_processor, trust_remote_code)
    loaded: nn.Module = plain.requires_grad_(False)
    for declared, name in ((entry.adapter, "adapter"), (entry.trained_weights, "trained_weights.safetensors")):
        if not declared and (folder / name).exists():
            # Without them the bare backbone would answer, and nobody would notice.
            raise CheckpointError(
                f"{folder}: judge.json says there is no {name}, but it is there. Copy the folder again."
            )
    if entry.adapter is not None:
        loaded = _load_adapter(require(folder, "adapter"), plain, adapter_trainable)
    if entry.trained_weights:
        _load_trained_weights(folder, plain, entry.trained_weights, adapter_trainable)
    dimensions = tuple(Dimension(**d.model_dump(exclude={"target_mean", "target_sd"})) for d in entry.dimensions)
    placed = loaded if quantization else loaded.to(device)
    model = JudgeModel(placed, dimensions, answer_token_ids(processor.tokenizer, prompts))
    model.trained_backbone_weights = tuple(entry.trained_weights)
    if entry.head is not None:
        head, scale = _load_head(folder, entry, adapter_trainable)
        model.attach_score_head(head, scale)
    elif (folder / "score_head.safetensors").exists():
        raise CheckpointError(f"{folder}: judge.json says there is no score head, but score_head.safetensors is there.")
    meta = CheckpointMeta(
        folder, entry.stage, entry.has_head, dimensions, place, entry.backbone.sha256, entry.format_version
    )
    return LoadedJudge(model.eval(), processor, prompts, meta)


def _trained_weights(model: JudgeModel, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Backbone weights that were trained in full, without PEFT, which keeps its own."""
    if adapter_kind(model.backbone) is not None:
        return {}
    known = set(model.trained_backbone_weights)
    parameters = model.backbone.named_parameters()
    return {
        name: whole.get(f"backbone.{name}", p.detach()) for name, p in parameters if p.requires_grad or name in known
    }


def _describe(model: JudgeModel, processor: Any, target: Path, stage: int, kind: Any, trained: list[str]) -> JudgeFile:
    backbone = plain_model(model.backbone)
    head, scale = model.score_head, model.target_scale
    return JudgeFile(
        format_version=cast(Any, FORMAT_VERSION),
        stage=stage,
        has_head=head is not None,
        head=HeadEntry(hidden=head.hidden, inner=head.inner) if head is not None else None,
        adapter=kind,
        trained_weights=trained,
        dimensions=[
            DimensionEntry(
                name=d.name,
                question=d.question,
                low=d.low,
                high=d.high,
                higher_is_better=d.higher_is_better,
                definition=d.definition,
                target_mean=scale.mean[index] if scale is not None else None,
                target_sd=scale.sd[index] if scale is not None else None,
            )
            for index, d in enumerate(model.dimensions)
        ],
        backbone=BackboneEntry(
            model_type=backbone.config.model_type,
            sha256=backbone_fingerprint(backbone.name_or_path),
            **describe_place(backbone.name_or_path, target),
        ),
        image_processor=type(processor.image_processor).__name__,
    )


def _save_adapter(folder: Path, backbone: Any, target: Path) -> None:
    from peft import get_peft_model_state_dict

    folder.mkdir()
    with warnings.catch_warnings():
        # A matrix that AdaLoRA pruned to rank 0 is rightly empty; PEFT takes it for a saving error of ZeRO.
        warnings.filterwarnings("ignore", message=".*LoRA tensor.*invalid shape.*")
        state = get_peft_model_state_dict(backbone, adapter_name=ADAPTER, save_embedding_layers=False)
    save_tensors(folder / "adapter_model.safetensors", state, target)
    config = copy.deepcopy(backbone.peft_config[ADAPTER])
    config.inference_mode = True
    place = describe_place(plain_model(backbone).name_or_path, target)
    # PEFT would write the absolute path of this machine; judge.json knows better where the backbone lies.
    config.base_model_name_or_path = place["name"] or place["relative_path"]
    config.save_pretrained(str(folder))


def _load_adapter(folder: Path, plain: nn.Module, trainable: bool) -> nn.Module:
    import peft

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require(folder, name)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, peft.LoraConfig):
            raise ValueError(f"expected an AdaLoRA or LoRA adapter, got {type(config).__name__}")
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / 'adapter_config.json'}: not a PEFT configuration: {error}.") from error
    config.inference_mode = not trainable
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Three things PEFT wonders about are meant: empty matrices, a moved backbone, AdaLoRA's own rank pattern.
        for message in (".*LoRA tensor.*invalid shape.*", ".*base_model_name_or_path.*", ".*rank_pattern keys.*"):
            warnings.filterwarnings("ignore", message=message)
        wrapped: nn.Module = peft.get_peft_model(cast(Any, plain), config)
        expected = peft.get_peft_model_state_dict(wrapped, adapter_name=ADAPTER, save_embedding_layers=False)
    state = read_tensors(folder / "adapter_model.safetensors", {key: value.shape for key, value in expected.items()})
    result: Any = peft.set_peft_model_state_dict(wrapped, state, adapter_name=ADAPTER)
    if result.unexpected_keys:
        raise CheckpointError(f"{folder}: PEFT did not take {sorted(result.unexpected_keys)[:4]}.")
    for name, parameter in wrapped.named_parameters():
        is_factor = ".lora_" in name
        if is_factor or f".modules_to_save.{ADAPTER}." in name:
            # PEFT makes the projector and every pruned factor in the backbone's dtype: what it has read into them is
            # rounded where that is bfloat16. Factors are float32 always, the projector where it is trained.
            if is_factor or trainable:
                parameter.data = state[_saved_name(name)].float()
            parameter.requires_grad_(trainable)
    freeze_scales(wrapped)
    forbid_add_adapter(wrapped)
    return wrapped


def _saved_name(parameter: str) -> str:
    """PEFT's name in the file for a parameter of a wrapped model."""
    return parameter.replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}", "")


def _load_trained_weights(folder: Path, plain: nn.Module, names: list[str], trainable: bool) -> None:
    parameters = dict(plain.named_parameters())
    if unknown := sorted(set(names) - set(parameters)):
        raise CheckpointError(f"{folder}/judge.json: the backbone has no weight named {unknown[0]!r}.")
    shapes = {name: parameters[name].shape for name in names}
    state = read_tensors(require(folder, "trained_weights.safetensors"), shapes)
    with torch.no_grad():
        for name, value in state.items():
            if trainable:
                parameters[name].data = value.float()  # never rounded to the frozen weights' dtype
            else:
                parameters[name].copy_(value)
            parameters[name].requires_grad_(trainable)


def _load_head(folder: Path, entry: JudgeFile, trainable: bool) -> tuple[ScoreHead, TargetScale]:
    assert entry.head is not None
    means = [d.target_mean for d in entry.dimensions]
    deviations = [d.target_sd for d in entry.dimensions]
    if None in means or None in deviations:
        raise CheckpointError(
            f"{folder}/judge.json: a judge with a score head needs a target scale for every dimension."
        )
    with torch.random.fork_rng(devices=[]):
        head = ScoreHead(entry.head.hidden, len(entry.dimensions), entry.head.inner)
    shapes = {key: value.shape for key, value in head.state_dict().items()}
    head.load_state_dict(read_tensors(require(folder, "score_head.safetensors"), shapes))
    head.requires_grad_(trainable)
    return head, TargetScale(tuple(cast(list[float], means)), tuple(cast(list[float], deviations)))


def _load_processor(folder: Path, image_processor: str, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files fail in many ways, all with one remedy
        raise CheckpointError(
            f"{folder}: tokenizer and image processor cannot be read ({type(error).__name__}: {error}). Copy the "
            "checkpoint again."
        ) from error
    loaded = type(processor.image_processor).__name__
    if loaded != image_processor:
        warnings.warn(
            f"{folder}: the judge was trained with the image processor {image_processor}, but this installation gives "
            f"{loaded}. Pixels, and so scores, differ slightly; install torchvision, or the Transformers version it "
            "was trained with.",
            stacklevel=3,
        )
    return processor
