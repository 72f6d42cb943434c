"""Adapters trained elsewhere with PEFT, made into a judge to start from: converted whole, or refused by key.

Layouts that are read, all PEFT's at heart:

- PEFT, TRL, LLaMA-Factory: ``adapter_config.json`` beside ``adapter_model.safetensors`` (or ``.bin``), whatever else
  lies there;
- ms-swift: the same in ``checkpoint-N`` folders;
- the later release of the paper's authors: an adapter of the inner model (no ``lm_head``), with ``score_head.pth`` and
  ``regression_config.json``, one folder a dimension.

Names of modules differ by the version of Transformers and by what was wrapped; they are matched to the backbone's own,
and one that has no place there ends the conversion. Half an adapter would score like a whole one.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmm4edit.errors import CheckpointError, ConfigError
from lmm4edit.judge.adapters import ADAPTER, forbid_add_adapter
from lmm4edit.judge.backbones import backbone_spec, load_backbone, module_names
from lmm4edit.judge.checkpoint import check_replaceable, save_checkpoint
from lmm4edit.judge.encoding import answer_token_ids
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.prompts import load_prompts
from lmm4edit.provenance import collect_provenance
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
HEAD_FILES = ("score_head.pth", "score_head.safetensors")

_KEPT_SETTINGS = frozenset(
    (
        *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out", "use_dora", "ensure_weight_tying"),
        *("target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
    )
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_WRAPPER = "base_model.model."
_LORA_PART = re.compile(r"\.(lora_[ABE]|ranknum|lora_embedding_[AB]|lora_magnitude_vector)(\.|$)")


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_adapter` did.

    Attributes:
        source: folder with the adapter.
        kind: ``lora`` or ``adalora``.
        matrices: adapted matrices.
        renamed: how many of them the source calls by another name.
        projector: whether a trained projector came along.
        left_out: files of the source that were not taken, each with the reason.
    """

    source: Path
    kind: str
    matrices: int
    renamed: int
    projector: bool
    left_out: tuple[str, ...]


def find_adapter(folder: str | Path) -> Path:
    """The folder with ``adapter_config.json``: the given one, or its only ``checkpoint-N``.

    Raises:
        CheckpointError: if there is none, or a choice to make.
    """
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file():
        return folder
    found = sorted(path.parent for path in folder.glob("*/adapter_config.json")) if folder.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: expected one adapter, found {len(found)}: {names}. Name one of them.")
    raise CheckpointError(
        f"{folder}: expected a folder with adapter_config.json and adapter_model.safetensors (PEFT's layout), got "
        f"{'nothing of the kind' if folder.is_dir() else 'no folder'}."
    )


def convert_adapter(
    source: str | Path,
    backbone: str,
    out: str | Path,
    *,
    prompts: str = "default",
    dimensions: Sequence[Dimension] = BUILT_IN_DIMENSIONS,
    drop_head: bool = False,
) -> Conversion:
    """Make a judge to start from (stage 1: it has no score head yet) out of an adapter trained elsewhere.

    Args:
        source: the adapter's folder.
        backbone: folder or hub name of the model it was trained on.
        out: folder of the new checkpoint.
        prompts: wording the judge will use (packaged name or YAML file). The adapter was trained with another.
        dimensions: what the judge will be asked.
        drop_head: go on without a score head that cannot be taken over.

    Raises:
        CheckpointError: naming every key that has no place, or every weight that is missing; or if ``out`` is there and
            no judge.
        ConfigError: for a kind of adapter that a judge cannot have, naming the setting.
    """
    folder = find_adapter(source)
    _check_out(Path(out), {"the adapter": folder, "the backbone": Path(backbone)})
    left_out = _check_head(folder, drop_head)
    config = _read_config(folder)
    plain, processor = load_backbone(backbone)
    state = _read_weights(folder)
    names, renamed = _match_names(folder, plain, state)
    state = _check_saved_modules(folder, plain, names, state)
    _check_ranks(folder, config, state)
    wrapped = _wrap(folder, plain, config, names)
    _fill(folder, wrapped, state)
    loaded = load_prompts(prompts)
    model = JudgeModel(wrapped, dimensions, answer_token_ids(processor.tokenizer, loaded))
    provenance = collect_provenance(converted_from=folder.name, left_out=list(left_out), trained=False)
    save_checkpoint(out, model.eval(), processor, loaded, {"converted_from": folder.name}, provenance, stage=1)
    projector = any(".modules_to_save." in name for name, _ in wrapped.named_parameters())
    return Conversion(folder, config.peft_type.value.lower(), len(set(names.values())), renamed, projector, left_out)


def _check_out(out: Path, inputs: Mapping[str, Path]) -> None:
    check_replaceable(out)
    target = out.resolve()
    for what, path in inputs.items():
        place = path.resolve()
        if path.exists() and (target in (place, *place.parents) or place in target.parents):
            raise ConfigError(f"{out}: expected a place apart from {what} in {path}. Choose another --out.")


def _check_head(folder: Path, drop_head: bool) -> tuple[str, ...]:
    """A foreign head never fits: it answers one question, read at another place of another prompt."""
    found = [name for name in HEAD_FILES if (folder / name).exists()]
    if not found:
        return ()
    about = ""
    described = folder / "regression_config.json"
    if described.exists():
        try:
            values = json.loads(described.read_text(encoding="utf-8"))
            sizes = [values.get(key) for key in ("hidden_size", "head_hidden_size", "head_hidden_size2")]
            layers = " -> ".join(str(size) for size in sizes if size is not None)
            about = f" (regression_config.json: dimension {values.get('dimension')!r}, layers {layers} -> 1)"
        except (json.JSONDecodeError, AttributeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{described}: not readable as a JSON object: {error}.") from None
    reason = (
        f"{found[0]}{about}: a head for one dimension, trained on another read-out and prompt; a judge's head has two "
        "layers and one output for each dimension"
    )
    if not drop_head:
        raise CheckpointError(
            f"{folder}: the score head cannot be taken over. {reason}. Add --drop-head to take the adapter alone; "
            "stage 2 then trains a new head."
        )
    return (reason,)


def _read_config(folder: Path) -> Any:
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{folder / 'adapter_config.json'}: not a PEFT configuration: {error}.") from None
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind not in ("LORA", "ADALORA"):
        raise ConfigError(f"{folder}: peft_type: expected LORA or ADALORA, got {kind}.")
    for key, allowed in (
        ("bias", ("none",)),
        ("use_dora", (False,)),
        ("fan_in_fan_out", (False,)),
        # Others (PiSSA, OLoRA, CorDA...) also change the frozen weights.
        ("init_lora_weights", (True, False, "gaussian", "eva", "orthogonal")),
    ):
        if (value := getattr(config, key, allowed[0])) not in allowed:
            raise ConfigError(
                f"{folder}: {key}: expected {allowed[0]!r}, got {value!r}: a judge cannot keep such an adapter."
            )
    usual = {field.name: field.default for field in fields(config)}
    for key, value in vars(config).items():
        # Every other setting changes the function or the frozen weights in a way that a judge cannot keep.
        if key not in _KEPT_SETTINGS and value and value != usual.get(key):
            raise ConfigError(f"{folder}: {key}: expected nothing, got {value!r}: not supported.")
    alphas = {"lora_alpha": config.lora_alpha}
    for key in ("alpha_pattern", "rank_pattern"):
        patterns = getattr(config, key, None) or {}
        if not isinstance(patterns, dict):
            raise ConfigError(f"{folder}: {key}: expected names with numbers, got {patterns!r}.")
        if key == "alpha_pattern":
            alphas |= {f"{key} {pattern!r}": value for pattern, value in patterns.items()}
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f"{folder}: {key}: expected a regular expression, got {pattern!r}: {error}."
                ) from None
    for name, alpha in alphas.items():
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise ConfigError(f"{folder}: {name}: expected a finite number, got {alpha!r}.")
    return config


def _check_ranks(folder: Path, config: Any, state: Mapping[str, Tensor]) -> None:
    """Refuse ranks that no tensor of the file can have, before memory is taken for them."""
    largest = max(max(value.shape, default=1) for value in state.values())
    if config.peft_type.value == "LORA":
        named = {"r": config.r, **{f"rank_pattern {k!r}": v for k, v in (config.rank_pattern or {}).items()}}
    else:
        named = {"init_r": config.init_r}
    for key, value in named.items():
        if not isinstance(value, int) or not 0 < value <= largest:
            raise ConfigError(
                f"{folder}: {key}: expected a whole number from 1 to {largest}, the largest side of the adapter's "
                f"tensors, got {value!r}."
            )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(f"{folder}: expected {' or '.join(WEIGHT_FILES)}, found neither.")
    try:
        # Others' pickles may hold anything: tensors alone are read from them.
        read = (
            load_file(str(path))
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:  # damaged and malicious files fail in many ways
        raise CheckpointError(f"{path}: cannot be read as tensors: {type(error).__name__}: {error}") from None
    if not isinstance(read, dict) or not read or not all(isinstance(value, Tensor) for value in read.values()):
        raise CheckpointError(f"{path}: expected named tensors, got {type(read).__name__}.")
    odd = [
        f"{name!r} ({value.dtype}, {value.layout}, {value.device})".replace("torch.", "")
        for name, value in read.items()
        if not isinstance(name, str) or value.dtype not in _DTYPES or value.layout is not torch.strided
        or value.device.type != "cpu"
    ]  # fmt: skip
    if odd:
        raise CheckpointError(
            f"{path}: expected named dense tensors of float16, 32 or 64 or bfloat16, got {_some(odd)}."
        )
    broken = [name for name, value in read.items() if not value.numel() or not torch.isfinite(value).all()]
    # AdaLoRA prunes matrices to rank 0: those alone may be empty.
    broken = [name for name in broken if read[name].numel() or "lora_" not in name]
    if broken:
        raise CheckpointError(f"{path}: empty or not finite: {_some(broken)}.")
    return {key.removeprefix(_WRAPPER): value for key, value in read.items()}


def _match_names(folder: Path, plain: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, str], int]:
    """Names of the source's modules to the backbone's; and how many differ."""
    modules = dict(plain.named_modules())
    names: dict[str, str] = {}
    unknown = []
    for key in state:
        part = _LORA_PART.search(key)
        name = key[: part.start()] if part else key.rpartition(".")[0].removesuffix(".modules_to_save")
        name = name.removesuffix(f".{ADAPTER}").removesuffix(".modules_to_save")
        if name in names:
            continue
        found = next((candidate for candidate in _candidates(name) if name and candidate in modules), None)
        if found is None:
            unknown.append(key)
        else:
            names[name] = found
    if unknown:
        raise CheckpointError(
            f"{folder}: {len(unknown)} weights have no place in this backbone ({type(plain).__name__}): "
            f"{_some(unknown)}. Nothing was converted; give the model that the adapter was trained on."
        )
    twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if twice:
        raise CheckpointError(f"{folder}: two entries each for {_some(twice)}.")
    return names, sum(old != new for old, new in names.items())


def _candidates(name: str) -> list[str]:
    """A module's possible names here: as it is, as older versions of Transformers have it, as inner models have it."""
    bare = name.removeprefix("model.")
    moved = re.sub(r"^(layers|embed_tokens|norm)\b", r"language_model.\1", bare)
    old_llava = re.sub(r"^language_model\.model\.", "language_model.", bare)
    return [name, f"model.{bare}", f"model.{moved}", f"model.{old_llava}", bare]


def _check_saved_modules(
    folder: Path, plain: nn.Module, names: Mapping[str, str], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state by the backbone's names; of whole modules, the projector's alone may be there."""
    projector = backbone_spec(plain).projector
    renamed, foreign = {}, []
    for key, value in state.items():
        old = max((name for name in names if key.startswith(f"{name}.")), key=len)
        rest = key[len(old) + 1 :]
        new = names[old]
        if _LORA_PART.search(f".{rest}") is None and not f"{new}.".startswith(f"{projector}."):
            foreign.append(key)
        renamed[f"{new}.{rest}"] = value
    if foreign:
        raise CheckpointError(
            f"{folder}: weights trained in full outside the projector: {_some(foreign)}. A judge's adapter can hold "
            f"the projector ({projector}) alone; train the others with adapters."
        )
    return renamed


def _wrap(folder: Path, plain: nn.Module, config: Any, names: Mapping[str, str]) -> nn.Module:
    import peft

    spec = backbone_spec(plain)
    adapted = sorted(name for name in names.values() if not f"{name}.".startswith(f"{spec.projector}."))
    if not adapted:
        raise CheckpointError(f"{folder}: no adapted matrix in it.")
    patterns = [p for p in (spec.vision_regex, spec.llm_regex) if set(module_names(plain, p)) & set(adapted)]
    wholly = set().union(*(module_names(plain, p) for p in patterns)) == set(adapted)
    # The judge's own pattern where it says the same, else the matrices one by one.
    config.target_modules = "|".join(f"({p})" for p in patterns) if wholly else adapted
    for key in ("layers_to_transform", "layers_pattern", "exclude_modules"):
        if hasattr(config, key):
            setattr(config, key, None)  # already in the list of matrices
    whole = any(f"{name}.".startswith(f"{spec.projector}.") for name in names.values())
    config.modules_to_save = [spec.projector_name] if whole else None
    if config.peft_type.value == "ADALORA" and config.rank_pattern:
        config.rank_pattern = {
            f"{_own_name(folder, pattern, adapted)}.lora_E.{ADAPTER}": live
            for pattern, live in config.rank_pattern.items()
        }
    for key in ("alpha_pattern", "rank_pattern") if config.peft_type.value == "LORA" else ():
        for pattern in getattr(config, key, None) or {}:
            if not any(re.search(rf"(^|.*\.){pattern}$", name) for name in adapted):
                raise ConfigError(f"{folder}: {key}: {pattern!r} names no matrix of this backbone.")
    config.task_type, config.inference_mode, config.base_model_name_or_path = None, False, None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wrapped = cast(nn.Module, peft.get_peft_model(cast(Any, plain), config))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder}: PEFT cannot build this adapter here: {error}") from None
    forbid_add_adapter(wrapped)
    return wrapped


def _own_name(folder: Path, pattern: str, adapted: Sequence[str]) -> str:
    """The backbone's name of a matrix that AdaLoRA's record of surviving ranks speaks of."""
    name = pattern.removeprefix(_WRAPPER).partition(".lora_E")[0]
    found = next((candidate for candidate in _candidates(name) if candidate in adapted), None)
    if found is None:
        raise CheckpointError(f"{folder}: rank_pattern: {pattern!r} names no matrix of this adapter.")
    return found


def _fill(folder: Path, wrapped: nn.Module, state: Mapping[str, Tensor]) -> None:
    import peft

    expected = peft.get_peft_model_state_dict(wrapped, adapter_name=ADAPTER, save_embedding_layers=False)
    given = {f"{_WRAPPER}{_plain_key(key)}": value for key, value in state.items()}
    problems = [f"missing {key.removeprefix(_WRAPPER)}" for key in sorted(set(expected) - set(given))]
    problems += [f"unexpected {key.removeprefix(_WRAPPER)}" for key in sorted(set(given) - set(expected))]
    problems += [
        f"{key.removeprefix(_WRAPPER)}: expected {list(expected[key].shape)}, got {list(given[key].shape)}"
        for key in sorted(set(given) & set(expected))
        if given[key].shape != expected[key].shape
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: {len(problems)} weights do not fit: {_some(problems)}. Nothing was converted."
        )
    floats = {key: value.float() for key, value in given.items()}
    result: Any = peft.set_peft_model_state_dict(wrapped, floats, adapter_name=ADAPTER)
    if result.unexpected_keys:
        raise CheckpointError(f"{folder}: PEFT did not take {_some(sorted(result.unexpected_keys))}.")


def _plain_key(key: str) -> str:
    """PEFT's files leave out the adapter's name, and where a module is saved whole, the wrapper's."""
    return key.replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


def _some(items: Sequence[str]) -> str:
    more = f", and {len(items) - 6} more" if len(items) > 6 else ""
    return ", ".join(items[:6]) + more
