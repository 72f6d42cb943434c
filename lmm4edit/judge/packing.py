"""From prompts and images to one packed sequence per edit, and batches of them.

*Shared-prefix packing*: one sequence holds the prefix (instruction, both images, definitions) once and every question
as a short suffix. A suffix attends to the prefix and to itself, and its m-RoPE positions restart where the prefix
ends, so each question is answered as if it stood alone, at about the price of one question.
:func:`unpack` gives the one-question-per-row form that packing is tested against.

Padding stands on the right; padding rows attend to themselves, so that no softmax runs over nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmm4edit.errors import PromptError
from lmm4edit.judge.encoding import (
    PackedExample,
    ProcessedImage,
    Suffix,
    answer_token_ids,
    encode_example,
    encode_parts,
    encode_prefix,
    encode_suffix,
    packed_length,
    process_images,
)

__all__ = [
    "IGNORE",
    "PADDING",
    "PREFIX",
    "PackedBatch",
    "PackedExample",
    "ProcessedImage",
    "Suffix",
    "answer_token_ids",
    "collate",
    "encode_example",
    "encode_parts",
    "encode_prefix",
    "encode_suffix",
    "packed_length",
    "position_ids",
    "process_images",
    "sequence_positions",
    "unpack",
]

IGNORE = -100
"""Label of positions that carry no loss (PyTorch's cross-entropy convention)."""

PREFIX, PADDING = 0, -1
"""Segment ids of the shared prefix and of padding; the question with index q in ``suffix_keys`` has segment q + 1."""


@dataclass
class PackedBatch:
    """A batch of packed edits. B edits, L tokens (padded), Q different questions.

    Attributes:
        input_ids: [B, L].
        segment_ids: [B, L]; :data:`PREFIX`, q + 1 for a token of question ``suffix_keys[q]``, :data:`PADDING`.
        suffix_offsets: [B, L]; a suffix token's place in its suffix, from 0; 0 elsewhere.
        labels: [B, L], already shifted: ``labels[b, t]`` is the token to predict *at* t; answer tokens only, else -100.
        readout_index: [B, Q]; where the last token of each stem stands, -1 where the edit lacks that question. Fixed by
            the prompt, never by the answer.
        targets: [B, Q] float32; on the scale of the question, NaN where unknown.
        suffix_keys: Q names.
        pixel_values: patches of all images, or ``None``; see :class:`~lmm4edit.judge.image_inputs.ProcessedImage`.
        image_grid_thw: [images, 3], or ``None``.
        mm_token_type_ids: [B, L]; 1 at image tokens, else 0.
        sample_ids: B names.
        image_sizes: [images, 2]; height and width in pixels before the processor, or ``None``.
        image_features: features of all images, which then take the place of their patches, or ``None``.
    """

    input_ids: Tensor
    segment_ids: Tensor
    suffix_offsets: Tensor
    labels: Tensor
    readout_index: Tensor
    targets: Tensor
    suffix_keys: list[str]
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    mm_token_type_ids: Tensor
    sample_ids: list[str]
    image_sizes: Tensor | None = None
    image_features: Sequence[Tensor] | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def attention_mask(self) -> Tensor:
        """[B, 1, L, L] boolean, ``True`` where the row's token may attend to the column's; on the batch's device."""
        segments = self.segment_ids
        length = segments.shape[1]
        rows, columns = segments[:, :, None], segments[:, None, :]
        index = torch.arange(length, device=segments.device)
        mask = (rows == columns) | (columns == PREFIX)
        mask &= (index[:, None] >= index[None, :]) & (rows != PADDING)
        mask |= index[:, None] == index[None, :]
        return mask[:, None]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """A copy of the batch on ``device``."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def pin_memory(self) -> PackedBatch:
        """A copy of the batch in page-locked memory (called by data loaders)."""
        pinned: dict[str, Any] = {
            f.name: value.pin_memory() for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **pinned)


def unpack(example: PackedExample) -> list[PackedExample]:
    """The same questions, one a row: what packing must equal, and the fall-back for backbones that cannot pack."""
    return [replace(example, suffixes=[suffix]) for suffix in example.suffixes]


def collate(examples: Sequence[PackedExample], *, image_token_id: int, pad_token_id: int) -> PackedBatch:
    """Put packed edits into one batch, padded on the right.

    Args:
        examples: at least one; they may ask different questions, in any order.
        image_token_id, pad_token_id: of the backbone.

    Raises:
        PromptError: if an edit asks the same question twice, or a question has no tokens.
        ValueError: for an empty list.
    """
    if not examples:
        raise ValueError("Expected at least one example to collate, got none.")
    keys = list(dict.fromkeys(suffix.key for example in examples for suffix in example.suffixes))
    column = {key: index for index, key in enumerate(keys)}
    shape = (len(examples), max(packed_length(example) for example in examples))
    readout = np.full((shape[0], len(keys)), -1, dtype=np.int64)
    targets = np.full((shape[0], len(keys)), np.nan, dtype=np.float32)

    # Runs of tokens (a prefix or a question each), gathered row by row and written with a handful of array operations.
    tokens: list[int] = []
    starts, lengths, run_segments = [], [], []
    label_starts, label_lengths, label_tokens = [], [], []
    for row, example in enumerate(examples):
        first = row * shape[1]
        tokens += example.prefix_ids
        starts.append(first)
        lengths.append(len(example.prefix_ids))
        run_segments.append(PREFIX)
        end = first + len(example.prefix_ids)
        for suffix in example.suffixes:
            question, start = column[suffix.key], end
            if not suffix.ids or readout[row, question] >= 0:
                problem = "asked twice" if suffix.ids else "without a stem"
                raise PromptError(f"Sample {example.sample_id!r}: question {suffix.key!r} is {problem}.")
            tokens += suffix.ids
            stem_end = start + len(suffix.ids)
            if suffix.answer_ids:
                tokens += suffix.answer_ids[:-1]
                label_starts.append(stem_end - 1)
                label_lengths.append(len(suffix.answer_ids))
                label_tokens += suffix.answer_ids
            end = stem_end + max(0, len(suffix.answer_ids) - 1)
            starts.append(start)
            lengths.append(end - start)
            run_segments.append(question + 1)
            readout[row, question] = stem_end - 1 - first
            if example.targets is not None and suffix.key in example.targets:
                targets[row, question] = example.targets[suffix.key]

    place, offset = _runs(starts, lengths)
    segment = np.repeat(run_segments, lengths)
    ids = np.full(shape, pad_token_id, dtype=np.int64)
    segments = np.full(shape, PADDING, dtype=np.int64)
    offsets = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    ids.flat[place] = tokens
    segments.flat[place] = segment
    offsets.flat[place] = np.where(segment == PREFIX, 0, offset)
    labels.flat[_runs(label_starts, label_lengths)[0]] = label_tokens

    grids = [grid for example in examples for grid in example.image_grids]
    sizes = [size for example in examples for size in example.image_sizes]
    pixels = [example.pixel_values for example in examples if example.pixel_values is not None]
    return PackedBatch(
        input_ids=torch.from_numpy(ids),
        segment_ids=torch.from_numpy(segments),
        suffix_offsets=torch.from_numpy(offsets),
        labels=torch.from_numpy(labels),
        readout_index=torch.from_numpy(readout),
        targets=torch.from_numpy(targets),
        suffix_keys=keys,
        pixel_values=torch.cat(pixels) if pixels else None,
        image_grid_thw=torch.tensor(grids, dtype=torch.long) if grids else None,
        mm_token_type_ids=torch.from_numpy((ids == image_token_id).astype(np.int64)),
        sample_ids=[example.sample_id for example in examples],
        image_sizes=torch.tensor(sizes, dtype=torch.long) if sizes else None,
    )


def _runs(starts: Sequence[int], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Flat places of runs of tokens, and each token's offset in its run."""
    sizes = np.asarray(lengths, dtype=np.int64)
    offset = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    return np.repeat(np.asarray(starts, dtype=np.int64), sizes) + offset, offset


def position_ids(backbone: Any, batch: PackedBatch) -> Tensor:
    """m-RoPE positions [3, B, L] (time, height, width) of a packed batch; padding has position 0.

    The prefix is numbered as the backbone's own ``get_rope_index`` numbers it (tested), without its loop over tokens;
    every suffix restarts where the prefix ends.

    Args:
        backbone: a model whose ``config.vision_config.spatial_merge_size`` says how patches merge into tokens.

    Raises:
        PromptError: if the number of image tokens does not match the images' grids.
    """
    merge = backbone.config.vision_config.spatial_merge_size
    segments = batch.segment_ids
    is_image = batch.mm_token_type_ids.bool()
    in_prefix = segments == PREFIX
    step = (in_prefix & ~is_image).long()
    row_of = torch.zeros_like(step)
    column_of = torch.zeros_like(step)
    n_image_tokens = int(is_image.sum())
    expected = 0
    if batch.image_grid_thw is not None:
        height, width = batch.image_grid_thw[:, 1] // merge, batch.image_grid_thw[:, 2] // merge
        sizes = height * width
        expected = int(sizes.sum())
    if expected != n_image_tokens:
        raise PromptError(
            f"The batch has {n_image_tokens} image tokens, but its images need {expected}. Was a sequence truncated?"
        )
    if batch.image_grid_thw is not None and expected:
        ends = sizes.cumsum(0)
        image = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        place = torch.arange(expected, device=sizes.device) - (ends - sizes)[image]
        row_of[is_image] = place // width[image]
        column_of[is_image] = place % width[image]
        # An image moves the text after it by its longer side; its last token carries that step.
        advance = torch.zeros_like(place)
        advance[ends - 1] = torch.maximum(height, width)
        step[is_image] = advance
    total = step.cumsum(1)
    start = total - step
    prefix_end = total[:, -1:]
    text = torch.where(in_prefix, start, torch.where(segments == PADDING, 0, prefix_end + batch.suffix_offsets))
    return torch.stack([text, text + row_of, text + column_of])


def sequence_positions(batch: PackedBatch) -> Tensor:
    """Positions [B, L] of a packed batch, one number a token, images' included; padding has position 0.

    Every suffix restarts where the prefix ends.
    """
    segments = batch.segment_ids
    in_prefix = segments == PREFIX
    places = in_prefix.long().cumsum(1)
    behind = torch.where(segments == PADDING, 0, places[:, -1:] + batch.suffix_offsets)
    return torch.where(in_prefix, places - 1, behind)
