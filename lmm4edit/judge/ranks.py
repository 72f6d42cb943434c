"""Which rank every adapted matrix has, read from a checkpoint's adapter files alone: no backbone, no torch.

The rank of an AdaLoRA matrix is the number of its triplets whose value is not 0, as
:func:`lmm4edit.judge.adapters.effective_ranks` counts them in a loaded judge.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lmm4edit.errors import CheckpointError

VISION, LANGUAGE = "vision encoder", "language model"

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<factor>lora_E|lora_A)(\.weight)?")
_LAYER = re.compile(r"(?P<path>.+?)\.(?P<layer>\d+)\.(?P<matrix>.+)")


@dataclass(frozen=True)
class MatrixRank:
    """One adapted matrix.

    Attributes:
        module: its name in the backbone.
        part: ``vision encoder`` or ``language model``.
        layer: number of the block it lies in, from 0; ``None`` outside of all blocks.
        matrix: its name within the block, for example ``attn.qkv``.
        initial_rank: rank it started with.
        rank: rank it has; 0 if everything in it was pruned.
    """

    module: str
    part: str
    layer: int | None
    matrix: str
    initial_rank: int
    rank: int


@dataclass(frozen=True)
class AdapterRanks:
    """The ranks of a judge.

    Attributes:
        kind: ``adalora`` or ``lora``.
        matrices: vision encoder first, then by layer; matrices in the order of their names.
    """

    kind: str
    matrices: tuple[MatrixRank, ...]

    @property
    def total(self) -> int:
        """Sum of all ranks, AdaLoRA's budget."""
        return sum(matrix.rank for matrix in self.matrices)

    def of(self, part: str) -> list[MatrixRank]:
        """The matrices of one part."""
        return [matrix for matrix in self.matrices if matrix.part == part]

    @property
    def parts(self) -> list[str]:
        """The parts that are adapted."""
        return [part for part in (VISION, LANGUAGE) if self.of(part)]


def read_ranks(checkpoint: str | Path) -> AdapterRanks:
    """Read the ranks of a judge with AdaLoRA or LoRA.

    Args:
        checkpoint: its folder.

    Raises:
        CheckpointError: if the judge has no such adapter (full fine-tuning, none), or its files cannot be read.
    """
    folder = Path(checkpoint)
    description = _read_json(folder / "judge.json")
    kind = description.get("adapter")
    if kind is None:
        trained = description.get("trained_weights")
        what = f"{len(trained)} tensors of the backbone trained in full" if trained else "no adapter"
        raise CheckpointError(
            f"{folder}: expected a judge with AdaLoRA or LoRA, got one with {what}. Only low-rank adapters have ranks."
        )
    settings = _read_json(folder / "adapter" / "adapter_config.json")
    try:
        initial = int(settings["init_r" if kind == "adalora" else "r"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{folder / 'adapter' / 'adapter_config.json'}: expected the initial rank, got none. Copy the checkpoint "
            "again."
        ) from None
    ranks = _ranks(folder / "adapter" / "adapter_model.safetensors", kind)
    matrices = [_describe(module, initial, rank) for module, rank in ranks.items()]
    order = {VISION: 0, LANGUAGE: 1}
    matrices.sort(key=lambda m: (order[m.part], -1 if m.layer is None else m.layer, m.matrix))
    return AdapterRanks(kind, tuple(matrices))


def to_csv(ranks: AdapterRanks) -> str:
    """CSV: one line a matrix, the columns of :class:`MatrixRank`; an empty layer lies outside of all blocks."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [field.name for field in fields(MatrixRank)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(matrix) for matrix in ranks.matrices)
    return stream.getvalue()


def layer_table(matrices: Sequence[MatrixRank]) -> tuple[list[int | None], list[str], list[list[int | None]]]:
    """Ranks of one part as a table.

    Returns:
        Its layers, its matrices' names, and for each layer a row with each matrix's rank (``None`` where it has none).
    """
    layers = list(dict.fromkeys(matrix.layer for matrix in matrices))
    names = list(dict.fromkeys(matrix.matrix for matrix in matrices))
    known = {(matrix.layer, matrix.matrix): matrix.rank for matrix in matrices}
    return layers, names, [[known.get((layer, name)) for name in names] for layer in layers]


def _ranks(path: Path, kind: str) -> dict[str, int]:
    import numpy as np
    from safetensors import SafetensorError, safe_open

    found: dict[str, int] = {}
    try:
        with safe_open(str(path), framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                match = _KEY.fullmatch(key)
                if match is None or (match["factor"] == "lora_E") != (kind == "adalora"):
                    continue
                # LoRA's rank is a size; of AdaLoRA's triplets those with the value 0 are pruned.
                size = file.get_slice(key).get_shape()
                found[match["module"]] = (
                    int(np.count_nonzero(file.get_tensor(key))) if kind == "adalora" and size[0] else int(size[0])
                )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}. Copy the checkpoint again.") from None
    if not found:
        raise CheckpointError(f"{path}: expected the factors of a {kind} adapter, got none. Copy the checkpoint again.")
    return found


def _describe(module: str, initial: int, rank: int) -> MatrixRank:
    # Transformers calls the language model of every multimodal model so; what else is adapted sees (tested for each
    # backbone in the table).
    part = LANGUAGE if "language_model." in module else VISION
    match = _LAYER.fullmatch(module)
    layer, matrix = (int(match["layer"]), match["matrix"]) if match else (None, module.rpartition(".")[2])
    return MatrixRank(module, part, layer, matrix, initial, rank)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}. Expected the folder of a judge's checkpoint."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}. Copy the checkpoint again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected keys and values, got {type(content).__name__}.")
    return content
