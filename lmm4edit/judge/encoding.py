"""From prompts and images to the token ids and patches of one edit with all its questions.

What users write (instructions, questions) is tokenised as plain text: a special token written out in it is ordinary
characters and can neither end a turn nor stand for an image.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lmm4edit.errors import ImageError, PromptError
from lmm4edit.judge.backbone_table import processor_spec
from lmm4edit.judge.image_inputs import ProcessedImage
from lmm4edit.judge.prompts import CHATML, ChatFormat, ImagePart, Part, PromptSet, TextPart
from lmm4edit.records import ANSWER, Dimension


@dataclass(frozen=True)
class Suffix:
    """One question: its key (a dimension's name, or ``answer``), the ids up to the stem's end, and the answer's ids.

    The answer's ids end with the end-of-turn token, so that a model trained on them stops. Empty: nothing to learn.
    """

    key: str
    ids: list[int]
    answer_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PackedExample:
    """One edit with all its questions.

    Attributes:
        prefix_ids: token ids of everything the questions share, image tokens included.
        image_grids: (time or crops, height, width) in patches of each image, in prompt order.
        pixel_values: patches of all images, in prompt order, or ``None``; see :class:`ProcessedImage`.
        suffixes: the questions.
        targets: MOS per dimension on its own scale; ``answer``: 1 for yes, 0 for no. Missing ones are left out.
        sample_id: for error messages.
        image_sizes: height and width in pixels of each image before the processor, in prompt order.
    """

    prefix_ids: list[int]
    image_grids: list[tuple[int, int, int]]
    pixel_values: Tensor | None
    suffixes: list[Suffix]
    targets: Mapping[str, float] | None = None
    sample_id: str = ""
    image_sizes: list[tuple[int, int]] = field(default_factory=list)


def process_images(processor: Any, images: Sequence[Any]) -> list[ProcessedImage]:
    """Resize, normalise and cut images into patches: one call of the processor for all of them.

    Args:
        processor: the backbone's processor.
        images: PIL images, or uint8 arrays or tensors [height, width, 3] (numpy) or [3, height, width] (torch). Sizes
            may differ; images of one size are handled together, which is several times faster than one by one.

    Returns:
        One :class:`ProcessedImage` for each image, in order; their patches are views of one tensor.

    Raises:
        ImageError: if the processor refuses an image (a side of 0, an aspect ratio over 200).
        ConfigError: for a processor of no known backbone.
    """
    if not images:
        return []
    process = processor_spec(processor).images.process
    try:
        return process(processor, images)
    except ValueError as error:
        raise ImageError(
            f"The image processor refused one of {len(images)} images: {error}. Pass every image through "
            "lmm4edit.data.images.fit_for_patches first."
        ) from None


def encode_example(
    processor: Any,
    prompts: PromptSet,
    instruction: str,
    source: Image.Image | ProcessedImage,
    edited: Image.Image | ProcessedImage,
    dimensions: Sequence[Dimension],
    question: str | None = None,
    answers: Mapping[str, float | str] | None = None,
    *,
    targets: Mapping[str, float] | None = None,
    sample_id: str = "",
    max_length: int | None = None,
    chat: ChatFormat | None = None,
) -> PackedExample:
    """Tokenise one edit with all its questions.

    Args:
        processor: the backbone's processor.
        prompts: the wording.
        instruction, question: as users wrote them; special tokens in them are plain characters.
        source, edited: decoded images, or results of :func:`process_images` (one call for a whole batch is faster).
        dimensions: asked in this order, then the question if there is one.
        answers: what to teach in words: a number per dimension, ``"yes"``/``"no"`` for ``answer``. Dimensions left out
            are asked and not taught.
        targets: what to teach the score head, on the MOS scale.
        sample_id: for error messages.
        max_length: longest allowed sequence; default: the tokenizer's. Nothing is ever truncated.
        chat: the backbone's chat markers; default: those of the processor's family.

    Raises:
        PromptError: blank instruction or question, an answer without its question, or a sequence that is too long.
        ImageError: an image that the processor refuses.
    """
    answers, chat = answers or {}, chat or processor_spec(processor).chat
    asked = [d.name for d in dimensions] + ([ANSWER] if question is not None else [])
    if unasked := sorted(set(answers) - set(asked)):
        raise PromptError(f"Sample {sample_id!r}: answers to {unasked} were given, but only {asked} are asked.")
    images = {"source": source, "edited": edited}
    if pending := [role for role, image in images.items() if not isinstance(image, ProcessedImage)]:
        done = process_images(processor, [images[role] for role in pending])
        images.update(zip(pending, done, strict=True))
    processed: dict[str, ProcessedImage] = images  # type: ignore[assignment]

    tokenizer = processor.tokenizer
    parts = prompts.render_prefix(instruction, dimensions, chat)
    in_order = [processed[part.role] for part in parts if isinstance(part, ImagePart)]
    prefix_ids = encode_parts(tokenizer, parts, [image.tokens for image in in_order], chat)

    suffixes = []
    for dimension in dimensions:
        answer = prompts.answer_text(answers[dimension.name], dimension.name) if dimension.name in answers else None
        suffixes.append(encode_suffix(tokenizer, dimension.name, prompts.render_suffix(dimension, chat), answer, chat))
    if question is not None:
        answer = prompts.answer_text(answers[ANSWER], ANSWER) if ANSWER in answers else None
        suffixes.append(encode_suffix(tokenizer, ANSWER, prompts.render_answer_suffix(question, chat), answer, chat))

    example = PackedExample(
        prefix_ids=prefix_ids,
        image_grids=[image.grid for image in in_order],
        pixel_values=torch.cat([image.patches for image in in_order]),
        suffixes=suffixes,
        targets=targets,
        sample_id=sample_id,
        image_sizes=[image.size for image in in_order],
    )
    limit = tokenizer.model_max_length if max_length is None else max_length
    if (length := packed_length(example)) > limit:
        tokens = sum(image.tokens for image in in_order)
        raise PromptError(
            f"Sample {sample_id!r}: the packed sequence has {length} tokens ({tokens} of them for the images), more "
            f"than the limit of {limit}. Nothing is truncated; lower max_pixels, shorten the instruction, or raise the "
            "limit."
        )
    return example


def encode_prefix(
    tokenizer: Any,
    parts: Sequence[Part],
    grids: Sequence[tuple[int, int, int]],
    merge_size: int,
    chat: ChatFormat = CHATML,
) -> list[int]:
    """:func:`encode_parts` for images cut into patches, ``merge_size`` x ``merge_size`` of which make one token."""
    return encode_parts(tokenizer, parts, [t * h * w // merge_size**2 for t, h, w in grids], chat)


def encode_parts(
    tokenizer: Any, parts: Sequence[Part], image_tokens: Sequence[int], chat: ChatFormat = CHATML
) -> list[int]:
    """Token ids of a rendered prefix; each :class:`ImagePart` becomes the next number of image tokens."""
    image_token = _control_ids(tokenizer, chat.image_token)
    remaining = iter(image_tokens)
    ids: list[int] = []
    plain = ""
    for part in parts:
        if isinstance(part, TextPart) and not part.control:
            plain += part.text  # neighbouring plain parts are tokenised together, as running text
            continue
        ids += _plain_ids(tokenizer, plain)
        plain = ""
        if isinstance(part, ImagePart):
            ids += image_token * next(remaining)
        else:
            ids += _control_ids(tokenizer, part.text)
    return ids + _plain_ids(tokenizer, plain)


def encode_suffix(
    tokenizer: Any, key: str, parts: Sequence[TextPart], answer: str | None = None, chat: ChatFormat = CHATML
) -> Suffix:
    """Token ids of one rendered question. Stem and answer are tokenised apart, so the answer cannot change the stem's.

    Args:
        key: a dimension's name, ``answer``, or any other name for a question of one's own.
        parts: from :meth:`PromptSet.render_suffix` or its siblings; the last one is the stem.
        answer: the answer's words with their leading space (``" 54.70"``), or ``None``.
    """
    ids: list[int] = []
    for part in parts:
        ids += _control_ids(tokenizer, part.text) if part.control else _plain_ids(tokenizer, part.text)
    answer_ids = [] if answer is None else _plain_ids(tokenizer, answer) + _control_ids(tokenizer, chat.end_of_answer)
    return Suffix(key, ids, answer_ids)


def answer_token_ids(tokenizer: Any, prompts: PromptSet) -> tuple[int, int]:
    """First tokens of the answers no and yes: the judge's answer is the likelier of the two.

    Raises:
        PromptError: if both answers begin with the same token.
    """
    no, yes = _plain_ids(tokenizer, prompts.no_answer)[0], _plain_ids(tokenizer, prompts.yes_answer)[0]
    if no == yes:
        raise PromptError(
            f"yes_answer {prompts.yes_answer!r} and no_answer {prompts.no_answer!r} begin with the same token {yes} in "
            "this tokenizer, so one look at the next token cannot tell them apart. Choose words with different "
            "beginnings."
        )
    return no, yes


def packed_length(example: PackedExample) -> int:
    """Tokens of the packed sequence. The last answer token is only predicted, never read, so it takes no place."""
    return len(example.prefix_ids) + sum(len(s.ids) + max(0, len(s.answer_ids) - 1) for s in example.suffixes)


_CACHE_LIMIT = 50_000


class _Vocabulary:
    """What is remembered of one tokenizer: its added tokens, and the ids of texts already seen (wording repeats)."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_encoder
        alternatives = "|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)) or "(?!)"
        self.size = len(tokenizer)
        self.pattern = re.compile(alternatives)
        self.special = frozenset(added.values())
        self.plain: dict[str, list[int]] = {}
        self.control: dict[str, list[int]] = {}
        # SentencePiece tokenizers put a space before every text, which would stand in the middle of running text.
        # Behind a line break they do not.
        prepends = tokenizer.tokenize("a")[0].startswith("\u2581")
        self.anchor: list[int] = tokenizer.encode("\n", add_special_tokens=False) if prepends else []

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Ids of text as a continuation of other text."""
        if not self.anchor:
            return tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.encode("\n" + text, add_special_tokens=False)
        if ids[: len(self.anchor)] != self.anchor:
            raise PromptError(
                f"The tokenizer merges a line break with the text {text!r} after it, so prompts cannot be put together "
                "from pieces. Begin the text with a letter or a digit."
            )
        return ids[len(self.anchor) :]


_VOCABULARIES: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    known = _VOCABULARIES.get(tokenizer)
    if known is None or known.size != len(tokenizer):
        known = _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return known


def _remember(cache: dict[str, list[int]], text: str, ids: list[int]) -> list[int]:
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()
    cache[text] = ids
    return ids


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of text in which no special token counts as one: each is cut in two, so that the tokenizer cannot see it."""
    if not text:
        return []
    vocabulary = _vocabulary(tokenizer)
    if (known := vocabulary.plain.get(text)) is not None:
        return known
    pieces, begin = [], 0
    for match in vocabulary.pattern.finditer(text):
        cut = (match.start() + match.end() + 1) // 2
        pieces.append(text[begin:cut])
        begin = cut
    pieces.append(text[begin:])
    ids = [token for piece in pieces for token in vocabulary.encode(tokenizer, piece)]
    if found := vocabulary.special.intersection(ids):
        raise PromptError(
            f"The tokenizer turned the text {text!r} into special tokens {sorted(found)}. Text that users write must "
            "stay plain; remove the marker from the text."
        )
    return _remember(vocabulary.plain, text, ids)


def _control_ids(tokenizer: Any, text: str) -> list[int]:
    vocabulary = _vocabulary(tokenizer)
    known = vocabulary.control.get(text)
    return known if known is not None else _remember(vocabulary.control, text, vocabulary.encode(tokenizer, text))
