"""Prefix caching: what all edits of a source share is run through the language model once.

A prompt begins with the system's words, the instruction and the source image; only then comes the edited image. The
keys and values of that beginning (the *source prefix*) are the same for every edit of the source with the instruction,
so they are computed once and kept, in bounded memory. The rest of each edit (edited image, definitions, packed
questions) attends to them; its positions go on where the prefix ends.

Prefixes are found by content (token ids and pixels), never by path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lmm4edit.judge.backbones import PrefixBatch, prefill
from lmm4edit.judge.image_inputs import ProcessedImage
from lmm4edit.judge.packing import PREFIX, PackedBatch, PackedExample

Key = tuple[tuple[int, ...], str]
"""Token ids of a prefix, digest of its image."""


@dataclass(frozen=True)
class SourcePrefix:
    """A prefix after the language model.

    Attributes:
        keys, values: one [heads, tokens, head size] a layer; never written to.
        next_position: position of the first token after it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    next_position: int

    def __len__(self) -> int:
        return self.keys[0].shape[1]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def split_example(
    example: PackedExample, first: ProcessedImage, image_token_id: int
) -> tuple[PackedExample, PackedExample]:
    """An edit's beginning, up to its second image, and the rest of it with the questions.

    Args:
        example: with two images.
        first: the one that stands first in the prompt.
        image_token_id: of the backbone.

    Returns:
        The prefix, without questions, and the rest, with the second image alone.
    """
    places = [place for place, token in enumerate(example.prefix_ids) if token == image_token_id]
    cut, rows = places[first.tokens], first.patches.shape[0]
    assert example.pixel_values is not None
    prefix = replace(
        example,
        prefix_ids=example.prefix_ids[:cut],
        image_grids=example.image_grids[:1],
        pixel_values=example.pixel_values[:rows],
        image_sizes=example.image_sizes[:1],
        suffixes=[],
        targets=None,
    )
    rest = replace(
        example,
        prefix_ids=example.prefix_ids[cut:],
        image_grids=example.image_grids[1:],
        pixel_values=example.pixel_values[rows:],
        image_sizes=example.image_sizes[1:],
    )
    return prefix, rest


def compute_prefixes(backbone: nn.Module, batch: PackedBatch) -> list[SourcePrefix]:
    """Run prefixes through a backbone.

    Args:
        backbone: plain or with adapters, in evaluation mode.
        batch: prefixes without questions, each ending with text.
    """
    cache, following = prefill(backbone, batch)
    lengths = (batch.segment_ids == PREFIX).sum(1).tolist()
    # Copies: a view would keep the whole batch alive, padding and all.
    return [
        SourcePrefix(
            tuple(layer.keys[row, :, :length].clone() for layer in cache.layers),
            tuple(layer.values[row, :, :length].clone() for layer in cache.layers),
            position,
        )
        for row, (length, position) in enumerate(zip(lengths, following, strict=True))
    ]


def stack_prefixes(prefixes: Sequence[SourcePrefix], rows: Sequence[int]) -> PrefixBatch:
    """Prefixes for a batch: row b of it continues ``prefixes[rows[b]]``. Padded on the right."""
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    longest = int(lengths.max())
    device = prefixes[0].keys[0].device
    index = torch.tensor(rows, device=device)

    def stack(layers: Sequence[Tensor]) -> Tensor:
        padded = [
            nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) if part.shape[1] < longest else part
            for part in layers
        ]
        # One prefix for all rows is expanded, not copied.
        return padded[0][None].expand(len(rows), -1, -1, -1) if len(padded) == 1 else torch.stack(padded)[index]

    n_layers = len(prefixes[0].keys)
    return PrefixBatch(
        keys=tuple(stack([prefix.keys[layer] for prefix in prefixes]) for layer in range(n_layers)),
        values=tuple(stack([prefix.values[layer] for prefix in prefixes]) for layer in range(n_layers)),
        lengths=lengths.to(device)[index],
        next_positions=torch.tensor([prefix.next_position for prefix in prefixes], device=device)[index],
    )
