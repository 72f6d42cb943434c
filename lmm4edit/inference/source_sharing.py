"""Source sharing: what all edits of a source have in common runs through the backbone once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from lmm4edit.judge.bounded_cache import BoundedCache
from lmm4edit.judge.image_features import encode_images, image_digest, takes_features
from lmm4edit.judge.image_inputs import ProcessedImage
from lmm4edit.judge.model import JudgeModel, JudgeOutput
from lmm4edit.judge.packing import PackedBatch, PackedExample
from lmm4edit.judge.prefix_cache import Key, SourcePrefix, compute_prefixes, split_example, stack_prefixes

Sharing = Literal["prefix", "features", "none"]
"""``prefix``: image features, and keys and values of instruction and source. ``features``: image features alone."""


class SourceSharing:
    """Runs batches through a judge; what several edits have in common is computed once.

    Instruction and source image are the beginning of a prompt, so their keys and values serve all edits of a source
    with one instruction. Where only the picture recurs, with another instruction or in the paper's own prompt order
    (edited image first), its features serve again, if the backbone takes features from outside. A batch in which
    nothing recurs runs as it is.

    Args:
        model: in evaluation mode, its weights unchanged while this lives (else call :meth:`clear`).
        collate: examples to a batch on the model's device.
        image_token_id: of the backbone.
        how: ``prefix`` (prompts must begin with instruction and source) or ``features``.
        limit: bytes that are kept from one batch to the next, half for prefixes and half for features; 0 shares within
            a batch alone.
    """

    def __init__(
        self,
        model: JudgeModel,
        collate: Callable[[Sequence[PackedExample]], PackedBatch],
        image_token_id: int,
        how: Sharing,
        limit: int,
    ) -> None:
        self._model, self._collate, self._token, self.how = model, collate, image_token_id, how
        self._takes_features = how != "none" and takes_features(model.backbone)
        self.prefixes: BoundedCache[Key, SourcePrefix] = BoundedCache(limit // 2, lambda prefix: prefix.bytes)
        self.features: BoundedCache[str, Tensor] = BoundedCache(limit // 2, lambda features: features.nbytes)
        self.prefixes_computed = 0
        self.images_encoded = 0

    def clear(self) -> None:
        """Forget what is kept: to be called when the judge's weights have changed."""
        self.prefixes.clear()
        self.features.clear()

    def forward(
        self, examples: Sequence[PackedExample], pairs: Sequence[tuple[ProcessedImage, ProcessedImage]]
    ) -> JudgeOutput:
        """Judge a batch.

        Args:
            examples: edits with their questions.
            pairs: the two images of each, in the order in which they stand in its prompt.
        """
        if self.how == "none":
            return self._model(self._collate(examples))
        digests = {id(image): image_digest(image) for image in {id(i): i for pair in pairs for i in pair}.values()}
        if self.how == "prefix":
            output = self._continue_prefixes(examples, pairs, digests)
            if output is not None:
                return output
        images = [image for pair in pairs for image in pair]
        batch = self._collate(examples)
        return self._model(replace(batch, image_features=self._encode(images, digests)))

    def _continue_prefixes(
        self,
        examples: Sequence[PackedExample],
        pairs: Sequence[tuple[ProcessedImage, ProcessedImage]],
        digests: dict[int, str],
    ) -> JudgeOutput | None:
        """The batch with its beginnings taken from what is kept; ``None`` if that would save nothing."""
        split = [split_example(e, first, self._token) for e, (first, _) in zip(examples, pairs, strict=True)]
        keys: list[Key] = [
            (tuple(prefix.prefix_ids), digests[id(first)]) for (prefix, _), (first, _) in zip(split, pairs, strict=True)
        ]
        rows = {key: row for row, key in reversed(list(enumerate(keys)))}
        known = {key: prefix for key in rows if (prefix := self.prefixes.get(key)) is not None}
        missing = [key for key in rows if key not in known]
        if len(missing) == len(examples):
            return None
        firsts = [pairs[rows[key]][0] for key in missing]
        seconds = [second for _, second in pairs]
        features = self._encode([*firsts, *seconds], digests)
        if missing:
            batch = self._collate([split[rows[key]][0] for key in missing])
            if features is not None:
                batch = replace(batch, image_features=features[: len(firsts)])
            self.prefixes_computed += len(missing)
            for key, prefix in zip(missing, compute_prefixes(self._model.backbone, batch), strict=True):
                known[key] = prefix
                self.prefixes.put(key, prefix)
        rest = self._collate([rest for _, rest in split])
        if features is not None:
            rest = replace(rest, image_features=features[len(firsts) :])
        order = {key: index for index, key in enumerate(rows)}
        stacked = stack_prefixes([known[key] for key in rows], [order[key] for key in keys])
        return self._model(rest, prefixes=stacked)

    def _encode(self, images: Sequence[ProcessedImage], digests: dict[int, str]) -> list[Tensor] | None:
        """Features of each image, those of equal pixels computed once; ``None``: the backbone wants the pixels."""
        if not self._takes_features:
            return None
        named = {digests[id(image)]: image for image in images}
        known = {name: features for name in named if (features := self.features.get(name)) is not None}
        missing = [name for name in named if name not in known]
        if missing:
            self.images_encoded += len(missing)
            for name, features in zip(
                missing, encode_images(self._model.backbone, [named[name] for name in missing]), strict=True
            ):
                known[name] = features
                # A copy: a view would keep the features of the whole batch alive.
                self.features.put(name, features.clone())
        return [known[digests[id(image)]] for image in images]
