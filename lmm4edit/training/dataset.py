"""From samples to micro-batches: decode, cut into patches, tokenise, collate; in worker processes or in this one."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lmm4edit.data.images import decode_image, fit_for_patches
from lmm4edit.errors import ImageError, LMM4EditError
from lmm4edit.judge.backbones import shortest_side
from lmm4edit.judge.packing import (
    PackedBatch,
    PackedExample,
    ProcessedImage,
    collate,
    encode_example,
    process_images,
    unpack,
)
from lmm4edit.judge.prompts import CHATML, ChatFormat, PromptSet
from lmm4edit.records import ANSWER, Dimension, EditSample
from lmm4edit.training.order import FILLER, DataOrder


@dataclass(frozen=True)
class Encoding:
    """How samples become examples.

    Attributes:
        processor: the backbone's.
        prompts: the wording.
        dimensions: asked of every sample, taught where the sample has a score.
        words: teach scores in words (stage 1); otherwise the questions on dimensions end with their stems.
        answer_words: teach the yes/no answer in words.
        packed: all questions in one sequence; ``False``: one sequence a question.
        image_token_id, pad_token_id: of the backbone.
        chat: the backbone's chat markers.
    """

    processor: Any
    prompts: PromptSet
    dimensions: tuple[Dimension, ...]
    words: bool
    answer_words: bool
    image_token_id: int
    pad_token_id: int
    packed: bool = True
    chat: ChatFormat = CHATML

    def encode(self, sample: EditSample, source: ProcessedImage, edited: ProcessedImage) -> PackedExample:
        """One sample with all its questions, its answers in words, and its targets.

        Raises:
            PromptError: if the sample does not fit in the prompt; it is named.
        """
        scores = {d.name: sample.mos[d.name] for d in self.dimensions if d.name in sample.mos}
        answers: dict[str, float | str] = dict(scores) if self.words else {}
        targets = dict(scores)
        if sample.question is not None and sample.answer is not None:
            targets[ANSWER] = float(sample.answer == "yes")
            if self.answer_words:
                answers[ANSWER] = sample.answer
        return encode_example(
            self.processor,
            self.prompts,
            sample.instruction,
            source,
            edited,
            self.dimensions,
            sample.question,
            answers,
            targets=targets,
            sample_id=sample.sample_id,
            chat=self.chat,
        )

    def collate(self, examples: Sequence[PackedExample]) -> PackedBatch:
        """A batch, packed or one question a row."""
        rows = list(examples) if self.packed else [row for example in examples for row in unpack(example)]
        return collate(rows, image_token_id=self.image_token_id, pad_token_id=self.pad_token_id)


@dataclass(frozen=True)
class Failure:
    """A sample that could not be read although the check at the start found it in order."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees.

    Attributes:
        batch: at least one example; a filler without any target where there is nothing else.
        n_edits: real samples in it.
        failures: samples that had to be left out.
    """

    batch: PackedBatch
    n_edits: int
    failures: tuple[Failure, ...] = ()


class EditDataset(Dataset[PackedExample | Failure]):
    """Samples as packed examples. Processed images are kept in memory up to a limit, the oldest dropped first.

    Args:
        samples: usable samples.
        encoding: see :class:`Encoding`.
        cache_megabytes: memory for processed images; 0 keeps none.
    """

    def __init__(self, samples: Sequence[EditSample], encoding: Encoding, cache_megabytes: int = 0) -> None:
        self.samples = list(samples)
        self.encoding = encoding
        self._cache = _ImageCache(cache_megabytes * 2**20)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> PackedExample | Failure:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[PackedExample | Failure]:
        """Several samples, whose images go through the processor in one call (several times faster than one by one)."""
        samples = [self.samples[index] if index != FILLER else None for index in indices]
        ready: dict[str, ProcessedImage | str] = {}
        pending: dict[str, Image.Image] = {}
        for path in dict.fromkeys(path for s in samples if s for path in (s.source_image, s.edited_image)):
            cached = self._cache.get(path)
            if cached is not None:
                ready[path] = cached
                continue
            try:
                pending[path] = self._open(path)
            except ImageError as error:
                ready[path] = str(error)
        for path, image in zip(pending, process_images(self.encoding.processor, list(pending.values())), strict=True):
            ready[path] = image
            self._cache.put(path, image)
        return [self._encode(sample, ready) if sample else self._filler() for sample in samples]

    def collate(self, items: Sequence[PackedExample | Failure]) -> MicroBatch:
        """A micro-batch of what could be read."""
        examples = [item for item in items if isinstance(item, PackedExample)]
        failures = tuple(item for item in items if isinstance(item, Failure))
        n_edits = sum(bool(example.sample_id) for example in examples)
        return MicroBatch(self.encoding.collate(examples or [self._filler()]), n_edits, failures)

    def _open(self, path: str) -> Image.Image:
        return fit_for_patches(decode_image(path), shortest_side(self.encoding.processor), name=path)

    def _encode(self, sample: EditSample, ready: dict[str, ProcessedImage | str]) -> PackedExample | Failure:
        source, edited = ready[sample.source_image], ready[sample.edited_image]
        for image in (source, edited):
            if isinstance(image, str):
                return Failure(sample.sample_id, image)
        try:
            return self.encoding.encode(sample, source, edited)  # type: ignore[arg-type]
        except LMM4EditError as error:
            return Failure(sample.sample_id, str(error))

    def _filler(self) -> PackedExample:
        """A blank pair with every question and no target: it keeps a process in step and teaches nothing."""
        side = shortest_side(self.encoding.processor)
        blank = Image.new("RGB", (side, side), "white")
        source, edited = process_images(self.encoding.processor, [blank, blank])
        return self.encoding.encode(EditSample("", "", "", "", "nothing", question="nothing"), source, edited)


class _MicroBatches:
    """Index lists of the steps still to take, for a data loader."""

    def __init__(self, order: DataOrder, first_step: int, total_steps: int) -> None:
        self._arguments = (order, first_step, total_steps)

    def __iter__(self) -> Iterator[list[int]]:
        order, first_step, total_steps = self._arguments
        return order.micro_batches(first_step, total_steps)


def iterate_micro_batches(
    dataset: EditDataset, order: DataOrder, first_step: int, total_steps: int, num_workers: int = 0
) -> Iterator[MicroBatch]:
    """This process's micro-batches of the steps from ``first_step`` on, through all epochs.

    The data loader draws from a generator of its own: the global one, which dropout uses, is left alone, so that a
    resumed run draws the same numbers as an uninterrupted one.
    """
    if num_workers:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=_MicroBatches(order, first_step, total_steps),  # type: ignore[arg-type]
        collate_fn=dataset.collate,
        num_workers=num_workers,
        generator=torch.Generator(),
    )
    return iter(loader)


class _ImageCache:
    """Processed images by path, modification time and size; the least recently used are dropped beyond the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._images: OrderedDict[tuple[str, int, int], ProcessedImage] = OrderedDict()

    def get(self, path: str) -> ProcessedImage | None:
        if not self._limit:
            return None
        key = _identity(path)
        if key not in self._images:
            return None
        self._images.move_to_end(key)
        return self._images[key]

    def put(self, path: str, image: ProcessedImage) -> None:
        size = image.patches.nbytes
        if size > self._limit:
            return
        # A copy: the patches are a view of the whole batch's tensor, which would stay in memory with it.
        self._images[_identity(path)] = image._replace(patches=image.patches.clone())
        self._bytes += size
        while self._bytes > self._limit:
            _, dropped = self._images.popitem(last=False)
            self._bytes -= dropped.patches.nbytes


def _identity(path: str) -> tuple[str, int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # an image embedded in the manifest, or one that is gone: the decoder says so
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size
