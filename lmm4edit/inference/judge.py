"""The judge as a Python object: ``load_judge(path).score(source, edited, instruction)``.

Four outputs in one packed pass. Scores do not depend on what else is in the batch (tested to float tolerance).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from lmm4edit.data.images import decode_image, fit_for_patches
from lmm4edit.errors import ConfigError, LMM4EditError
from lmm4edit.evaluation.ranking import overall_score
from lmm4edit.inference.folder import TINY, judge_folder
from lmm4edit.inference.order import by_source
from lmm4edit.inference.result import EditScore, ReadOut
from lmm4edit.inference.source_sharing import Sharing, SourceSharing
from lmm4edit.judge.backbones import backbone_spec, plain_model, shortest_side, special_ids
from lmm4edit.judge.checkpoint import LoadedJudge, load_checkpoint
from lmm4edit.judge.encoding import ProcessedImage, encode_example, process_images
from lmm4edit.judge.model import answer_probability
from lmm4edit.judge.packing import PackedBatch, PackedExample, collate
from lmm4edit.judge.words import complete, read_score
from lmm4edit.provenance import file_sha256
from lmm4edit.records import ANSWER, Dimension, EditSample

KEPT_BYTES = 2**30
"""At 7B in bfloat16 a source of 512 x 512 pixels takes about 25 MB."""


class Judge:
    """A loaded judge.

    Args:
        loaded: from :func:`lmm4edit.judge.checkpoint.load_checkpoint`.
        share_sources: run what all edits of a source share (instruction, source image) through the backbone once.
            Changes no score beyond float rounding.
        kept_bytes: memory on the device for what is kept of sources from one batch to the next.
    """

    def __init__(self, loaded: LoadedJudge, *, share_sources: bool = True, kept_bytes: int = KEPT_BYTES) -> None:
        self.model = loaded.model
        self.processor = loaded.processor
        self.prompts = loaded.prompts
        self.meta = loaded.meta
        self._ids = special_ids(loaded.model.backbone, loaded.processor)
        self._chat = backbone_spec(plain_model(loaded.model.backbone)).chat
        # The paper's own order puts the edited image first: then no beginning is common to a source's edits.
        source_first = loaded.prompts.order == "instruction_source_edited"
        how: Sharing = "none" if not share_sources else "prefix" if source_first else "features"
        self._first = 0 if source_first else 1
        self.sharing = SourceSharing(self.model, self._collate, self._ids["image_token_id"], how, kept_bytes)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What is judged."""
        return self.meta.dimensions

    @property
    def dtype(self) -> str:
        """Precision of the backbone, for example ``"float32"``."""
        return str(cast(Any, self.model.backbone).get_input_embeddings().weight.dtype).removeprefix("torch.")

    @property
    def notice(self) -> str | None:
        """What must stand beside every number of this judge, or ``None``."""
        path = self.meta.folder / "provenance.json"
        ratings = json.loads(path.read_text(encoding="utf-8")).get("ratings") if path.is_file() else None
        if ratings == "simulated":
            return "a demonstration: this judge was trained on simulated ratings and says nothing about real edits"
        return None

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the scores: weights, wording, processor, backbone."""
        digest = hashlib.sha256(self.meta.backbone_sha256.encode())
        names = ("judge.json", "prompts.yaml", "score_head.safetensors", "trained_weights.safetensors")
        files = [self.meta.folder / name for name in names]
        files += sorted((self.meta.folder / "adapter").glob("*")) + sorted((self.meta.folder / "processor").glob("*"))
        for path in files:
            if path.is_file():
                digest.update(f"{path.name} {file_sha256(path)}\n".encode())
        return digest.hexdigest()

    def score(
        self, source: Any, edited: Any, instruction: str, question: str | None = None, read_out: ReadOut = "head"
    ) -> EditScore:
        """Judge one edit.

        Args:
            source, edited: paths, bytes, PIL images or uint8 arrays [height, width, 3].
            instruction: what the editor was told.
            question: a yes/no question about the edit.
            read_out: ``head`` or ``text``.

        Raises:
            ImageError, PromptError: for this one edit a problem is raised, not recorded.
            CheckpointError: ``read_out="head"`` on a stage-1 judge.
        """
        self._require(read_out)
        images = self._images([source, edited])
        for image in images:
            if isinstance(image, LMM4EditError):
                raise image
        example = self._encode("", instruction, images[0], images[1], question)
        return self._judge([example], [self._in_prompt_order(images)], read_out)[0]

    def score_many(
        self,
        samples: Iterable[EditSample],
        batch_size: int = 8,
        read_out: ReadOut = "head",
        *,
        window: int | None = None,
    ) -> Iterator[EditScore]:
        """Judge many edits, streaming; one result a sample, in order. A bad sample gives a result with ``failure``.

        Args:
            samples: any iterable; at most a window of it is held.
            batch_size: edits in one forward pass.
            read_out: ``head`` or ``text``.
            window: rows among which edits of one source are brought together before they are cut into batches
                (results still come in the order of the samples); ``None``: a batch, which changes no order.

        Raises:
            ConfigError: for sizes below 1, or a window below the batch size.
            CheckpointError: ``read_out="head"`` on a stage-1 judge.
        """
        if batch_size < 1:
            raise ConfigError(f"Expected a batch size of at least 1, got {batch_size}.")
        width = batch_size if window is None else window
        if width < batch_size:
            raise ConfigError(f"Expected a window of at least the batch size, {batch_size}, got {window}.")
        self._require(read_out)
        stream = by_source(samples, width)
        waiting: dict[int, EditScore] = {}
        following = 0
        while batch := list(islice(stream, batch_size)):
            results = self._score_batch([sample for _, sample in batch], read_out)
            waiting.update((place, result) for (place, _), result in zip(batch, results, strict=True))
            while following in waiting:
                yield waiting.pop(following)
                following += 1

    def _require(self, read_out: ReadOut) -> None:
        if read_out not in ("head", "text"):
            raise ConfigError(f"Expected the read-out to be 'head' or 'text', got {read_out!r}.")
        if read_out == "head":
            self.model.require_head()

    def _score_batch(self, samples: Sequence[EditSample], read_out: ReadOut) -> list[EditScore]:
        results: dict[int, EditScore] = {}
        paths = list(dict.fromkeys(path for s in samples for path in (s.source_image, s.edited_image)))
        images = dict(zip(paths, self._images(paths), strict=True))
        examples: list[PackedExample] = []
        pairs: list[tuple[ProcessedImage, ProcessedImage]] = []
        places: list[int] = []
        for index, sample in enumerate(samples):
            try:
                pair = [images[sample.source_image], images[sample.edited_image]]
                for image in pair:
                    if isinstance(image, LMM4EditError):
                        raise image
                example = self._encode(sample.sample_id, sample.instruction, pair[0], pair[1], sample.question)
            except LMM4EditError as error:
                empty = {dimension.name: None for dimension in self.dimensions}
                results[index] = EditScore(sample.sample_id, empty, read_out=read_out, failure=str(error))
                continue
            examples.append(example)
            pairs.append(self._in_prompt_order(pair))
            places.append(index)
        if examples:
            results.update(zip(places, self._judge(examples, pairs, read_out), strict=True))
        return [results[index] for index in range(len(samples))]

    def _images(self, sources: Sequence[Any]) -> list[ProcessedImage | LMM4EditError]:
        """Decoded and cut into patches, or the error, for each."""
        side = shortest_side(self.processor)
        decoded: list[Any] = []
        for source in sources:
            name = source if isinstance(source, str) and not source.startswith("data:") else None
            try:
                decoded.append(fit_for_patches(decode_image(source), side, name=name))
            except LMM4EditError as error:
                decoded.append(error)
        good = [image for image in decoded if not isinstance(image, LMM4EditError)]
        try:
            processed = iter(process_images(self.processor, good))
        except LMM4EditError:  # one of them is refused: find out which
            single: list[ProcessedImage | LMM4EditError] = []
            for image in good:
                try:
                    single += process_images(self.processor, [image])
                except LMM4EditError as error:
                    single.append(error)
            return [image if isinstance(image, LMM4EditError) else single.pop(0) for image in decoded]
        return [image if isinstance(image, LMM4EditError) else next(processed) for image in decoded]

    def _encode(
        self, sample_id: str, instruction: str, source: Any, edited: Any, question: str | None
    ) -> PackedExample:
        return encode_example(
            self.processor,
            self.prompts,
            instruction,
            source,
            edited,
            self.dimensions,
            question,
            sample_id=sample_id,
            chat=self._chat,
        )

    def _in_prompt_order(self, pair: Sequence[Any]) -> tuple[ProcessedImage, ProcessedImage]:
        """Source and edited image, or the other way round, as the prompt has them."""
        return pair[self._first], pair[1 - self._first]

    def _collate(self, examples: Sequence[PackedExample]) -> PackedBatch:
        return collate(examples, **self._ids).to(self.model.device)

    @torch.inference_mode()
    def _judge(
        self,
        examples: Sequence[PackedExample],
        pairs: Sequence[tuple[ProcessedImage, ProcessedImage]],
        read_out: ReadOut,
    ) -> list[EditScore]:
        output = self.sharing.forward(examples, pairs)
        if output.answer_logits is not None:
            yes = answer_probability(output.answer_logits).float().tolist()
        else:
            yes = [float("nan")] * len(examples)
        if read_out == "text":
            words = complete(self.model.backbone, examples, self._collate, self.processor.tokenizer, self._chat)
        else:
            words = [{} for _ in examples]
            assert output.scores is not None
            numbers = output.scores.float().tolist()
        results = []
        for row, example in enumerate(examples):
            failures: dict[str, str] = {}
            scores: dict[str, float | None] = {}
            for column, dimension in enumerate(self.dimensions):
                name = dimension.name
                if read_out == "text":
                    scores[name] = read_score(words[row][name])
                    reason = f"expected a number after the stem, the judge wrote {words[row][name]!r}"
                else:
                    value = numbers[row][column]
                    scores[name] = value if abs(value) < float("inf") else None
                    reason = f"the score head gave {value}"
                if scores[name] is None:
                    failures[name] = reason
            asked = any(suffix.key == ANSWER for suffix in example.suffixes)
            probability = yes[row] if asked and yes[row] == yes[row] else None
            if asked and probability is None:
                failures[ANSWER] = "the logits of yes and no are not finite"
            results.append(
                EditScore(
                    example.sample_id,
                    scores,
                    answer=None if probability is None else ("yes" if probability > 0.5 else "no"),
                    answer_probability=probability,
                    overall=overall_score(scores),
                    read_out=read_out,
                    words=words[row],
                    failures=failures,
                )
            )
        return results


def default_device() -> str:
    """The accelerator of this machine, or the processor where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _usable(device: str | torch.device) -> str | torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"Expected a device of this machine, got {str(device)!r}: {reason} Use 'cpu', or leave the device out."
        ) from error
    return device


def load_judge(
    path_or_name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    backbone: str | Path | None = None,
    *,
    share_sources: bool = True,
    kept_bytes: int = KEPT_BYTES,
) -> Judge:
    """Load a trained judge.

    Args:
        path_or_name: folder of a checkpoint, or ``"tiny"``.
        device: for example ``"cuda:0"``; ``None``: :func:`default_device`. The processor never stands in for another.
        dtype: of the backbone, ``"float32"`` or ``"bfloat16"``.
        backbone: where the backbone lies, if not where the checkpoint remembers it.
        share_sources, kept_bytes: see :class:`Judge`.

    Raises:
        CheckpointError: if the folder is no complete judge; the missing or unexpected part is named.
        ConfigError: if this machine has no such device.
    """
    folder = judge_folder(path_or_name)
    place = default_device() if device is None else _usable(device)
    loaded = load_checkpoint(folder, device=place, dtype=dtype, backbone=backbone)
    return Judge(loaded, share_sources=share_sources, kept_bytes=kept_bytes)


__all__ = ["TINY", "EditScore", "Judge", "default_device", "judge_folder", "load_judge"]
