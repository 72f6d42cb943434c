"""The records that every part of LMM4Edit passes on.

No torch, no I/O: importing this module is cheap, so the command line can use it to describe itself.

Dimensions are *data, not an enum*: the three built-in ones are the paper's (section 3.3), and users add theirs by
constructing a :class:`Dimension`. A missing value is always ``None`` with a reason, never a default number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = float | str | tuple[str, ...] | None
"""A number (a score), a word (an answer, a choice), several words (a set of choices, a ranking), or missing."""

PromptType = Literal["instruction", "description"]


@dataclass(frozen=True)
class Dimension:
    """One thing a judge rates.

    Attributes:
        name: key used in manifests (``mos_<name>``), predictions and tables; lower-case identifier.
        question: what the judge is asked, one short sentence.
        low, high: range of the human scale (MOS: 0-100). Scores are not clipped to it.
        higher_is_better: direction of the scale.
        definition: one or two sentences that stand in the part of the prompt common to all questions.
    """

    name: str
    question: str
    low: float = 0.0
    high: float = 100.0
    higher_is_better: bool = True
    definition: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(
                f"Dimension name must be a lower-case identifier such as 'quality', got {self.name!r}: "
                "it becomes the column mos_<name> of manifests. Rename the dimension."
            )
        if not self.low < self.high:
            raise ValueError(
                f"Dimension {self.name!r}: expected low < high, got low={self.low} and high={self.high}. "
                "For a scale where a smaller number is better, keep low < high and set higher_is_better: false."
            )


QUALITY = Dimension(
    "quality",
    "Rate the perceptual quality.",
    definition="Perceptual quality: how natural and free of distortion the edited image looks.",
)
ALIGNMENT = Dimension(
    "alignment",
    "Rate the editing alignment.",
    definition="Editing alignment: how accurately the edit follows the instruction.",
)
PRESERVATION = Dimension(
    "preservation",
    "Rate the attribute preservation.",
    definition="Attribute preservation: how well everything that should not change has been kept.",
)
BUILT_IN_DIMENSIONS: tuple[Dimension, ...] = (QUALITY, ALIGNMENT, PRESERVATION)
"""The paper's three dimensions (section 3.3), in the order of its tables."""

ANSWER = "answer"
"""Prediction target of the yes/no question."""

SCORE = "score"
"""Prediction target of a scorer that gives one number for every dimension (PSNR, SSIM, ...)."""


@dataclass(frozen=True)
class EditSample:
    """One judged edit: a source image, an edited image, the instruction, and what people said of it.

    Attributes:
        sample_id: unique in its manifest.
        source_id: the source image's identity: the cluster for splits and for bootstrap intervals.
        source_image, edited_image: paths, already resolved against the manifest or the image root.
        instruction: what the editor was told to do.
        source_description, target_description: texts given to description-based editors, if any.
        prompt_type: whether the editing model was given the instruction or the descriptions.
        edit_task: for example ``"remove"`` or ``"deblur"``.
        editing_model: which model made the edit.
        mos: mean opinion score per dimension name, on the dimension's scale (0-100), higher is better.
        question, answer: a yes/no question and the people's answer, ``"yes"`` or ``"no"``.
        groups: further labels to break results down by (``{"content": "photo", "level": "high"}``).
        location: where the row stands (``"test.jsonl:17"``), for error messages.
    """

    sample_id: str
    source_id: str
    source_image: str
    edited_image: str
    instruction: str
    source_description: str | None = None
    target_description: str | None = None
    prompt_type: PromptType | None = None
    edit_task: str | None = None
    editing_model: str | None = None
    mos: Mapping[str, float] = field(default_factory=dict)
    question: str | None = None
    answer: str | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    location: str | None = None


@dataclass(frozen=True)
class Question:
    """One benchmark item that a model answers in words.

    Attributes:
        question_id: unique in its benchmark.
        images: paths, in the order in which the prompt mentions them.
        prompt: the published wording.
        answer_format: which parser of ``evaluation.answers`` reads the answer (``"yes_no"``, ``"number"``,
        ``"choice"``...). gold: the right answer, or ``None`` where the benchmark has none.
        groups: labels to break results down by.
    """

    question_id: str
    images: tuple[str, ...]
    prompt: str
    answer_format: str
    gold: Value = None
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """One output of one predictor for one target.

    Attributes:
        item_id: the sample's or the question's id.
        predictor: name of the scorer or respondent (``"ssim"``, ``"judge:checkpoints/tiny/judge"``).
        target: a dimension's name, :data:`SCORE`, or :data:`ANSWER`.
        value: number, word, words; or ``None``, and then ``failure`` says why.
        raw_answer: the model's own words, where it used any.
        failure: why there is no value.
        setting: prompt variant, option order, swap, read-out.
        repeat: number of the repetition, from 0.

    Raises:
        ValueError: if ``value`` is ``None`` without a reason, or a reason stands beside a value.
    """

    item_id: str
    predictor: str
    target: str
    value: Value
    raw_answer: str | None = None
    failure: str | None = None
    setting: Mapping[str, str] = field(default_factory=dict)
    repeat: int = 0

    def __post_init__(self) -> None:
        if (self.value is None) == (self.failure is None):
            raise ValueError(
                f"Prediction {self.item_id!r} of {self.predictor!r} for {self.target!r}: exactly one of value and "
                f"failure must be given, got value={self.value!r} and failure={self.failure!r}."
            )
