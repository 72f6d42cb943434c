"""The wording the judge is asked with: versioned, in YAML, carried by every checkpoint.

A prompt is a prefix that all questions on one edit share (system turn, instruction, both images, definitions), and
short suffixes, one for each question, which end with the beginning of the answer (the *stem*). The score follows the
stem, and the stem's last hidden state is what the score head reads. Paper, section 4.1, whose own order (edited image,
source image, prompt) is ``order: paper``.

No torch here: rendering gives parts, :mod:`lmm4edit.judge.packing` turns them into token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from lmm4edit.errors import PromptError
from lmm4edit.records import ANSWER, Dimension

Order = Literal["instruction_source_edited", "source_instruction_edited", "paper"]
ImageRole = Literal["source", "edited"]

_ORDERS: dict[str, tuple[str, ...]] = {
    "instruction_source_edited": ("instruction", "source", "edited"),
    "source_instruction_edited": ("source", "instruction", "edited"),
    "paper": ("edited", "source", "instruction"),
}

_PLACEHOLDERS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # field: (must contain, may contain)
    "system": (frozenset(), frozenset()),
    "instruction": (frozenset({"instruction"}), frozenset({"instruction"})),
    "source_label": (frozenset(), frozenset()),
    "edited_label": (frozenset(), frozenset()),
    "common": (frozenset(), frozenset({"definitions"})),
    "definition": (frozenset({"definition"}), frozenset({"definition", "dimension"})),
    "question": (frozenset({"question"}), frozenset({"question", "dimension"})),
    "stem": (frozenset(), frozenset({"dimension"})),
    "answer_question": (frozenset({"question"}), frozenset({"question"})),
    "answer_stem": (frozenset(), frozenset()),
    "yes_answer": (frozenset(), frozenset()),
    "no_answer": (frozenset(), frozenset()),
    "score_answer": (frozenset({"score"}), frozenset({"score"})),
}


@dataclass(frozen=True)
class TextPart:
    """Text of a prompt.

    Attributes:
        text: the characters.
        control: ``True`` for chat markers, whose special tokens count as such; ``False`` for wording and for what users
            wrote, in which ``<|im_end|>`` is eight ordinary characters and no end of a turn.
    """

    text: str
    control: bool = False


@dataclass(frozen=True)
class ImagePart:
    """The place of one image in a prompt."""

    role: ImageRole


Part = TextPart | ImagePart


@dataclass(frozen=True)
class ChatFormat:
    """A backbone's chat markers. Texts holding special tokens; none of them comes from a user.

    Attributes:
        system_start, user_start, assistant_start: what opens a turn.
        turn_end: what closes one (with the line break that follows it).
        end_of_answer: the single special token that ends an answer.
        image_start, image_token, image_end: an image is ``image_start``, ``image_token`` once for each of its tokens,
            ``image_end``.
        beginning: what a sequence begins with, if the model was trained with such a token.
        gap: plain text between what opens a turn and the turn's words (``USER: words``); a space, or nothing.
    """

    system_start: str
    user_start: str
    assistant_start: str
    turn_end: str
    end_of_answer: str
    image_start: str
    image_token: str
    image_end: str
    beginning: str = ""
    gap: str = ""


CHATML = ChatFormat(
    system_start="<|im_start|>system\n",
    user_start="<|im_start|>user\n",
    assistant_start="<|im_start|>assistant\n",
    turn_end="<|im_end|>\n",
    end_of_answer="<|im_end|>",
    image_start="<|vision_start|>",
    image_token="<|image_pad|>",
    image_end="<|vision_end|>",
)
"""Qwen's chat format (ChatML with Qwen-VL's image markers)."""


class PromptSet(BaseModel):
    """All wording of the judge, checked when loaded. See ``prompt_sets/default.yaml`` for what each field is.

    Raises:
        PromptError: from :func:`load_prompts`; building one directly raises pydantic's ``ValidationError``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    version: int
    order: Order = "instruction_source_edited"
    system: str
    instruction: str
    source_label: str
    edited_label: str
    common: str
    definition: str = "{definition}\n"
    question: str = "{question}"
    stem: str
    questions: dict[str, str] = {}
    stems: dict[str, str] = {}
    answer_question: str = "{question}"
    answer_stem: str
    yes_answer: str = " Yes"
    no_answer: str = " No"
    score_answer: str = " {score}"

    @field_validator(*_PLACEHOLDERS)
    @classmethod
    def _check_placeholders(cls, text: str, info: Any) -> str:
        required, allowed = _PLACEHOLDERS[info.field_name]
        found = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        if missing := required - found:
            raise ValueError(f"must contain {_braced(missing)}, got {text!r}")
        if unknown := found - allowed:
            may = f"only {_braced(allowed)} may stand here" if allowed else "nothing is filled in here"
            raise ValueError(f"unknown placeholder {_braced(unknown)} ({may}), got {text!r}")
        return text

    @model_validator(mode="after")
    def _check_stems(self) -> PromptSet:
        for field, text in [("stem", self.stem), ("answer_stem", self.answer_stem), *self.stems.items()]:
            if not text.strip() or text != text.rstrip():
                raise ValueError(
                    f"{field}: a stem must end with a visible character, because its last token is where the score is "
                    f"read and the answer brings its own leading space; got {text!r}"
                )
        for field, text in [("yes_answer", self.yes_answer), ("no_answer", self.no_answer)]:
            if not text.strip():
                raise ValueError(f"{field}: expected a word, got {text!r}")
        if self.yes_answer == self.no_answer:
            raise ValueError(f"yes_answer and no_answer must differ, got {self.yes_answer!r} twice")
        return self

    def fingerprint(self) -> str:
        """SHA-256 of everything that reaches the model; two sets with equal fingerprints ask in equal words."""
        wording = self.model_dump(exclude={"name", "version"})
        return hashlib.sha256(json.dumps(wording, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

    def render_prefix(self, instruction: str, dimensions: Sequence[Dimension], chat: ChatFormat = CHATML) -> list[Part]:
        """Everything before the questions: the same for all questions on one edit.

        Args:
            instruction: what the editor was told, as the user wrote it. Reaches the model as plain text.
            dimensions: whose definitions stand in the common part, in this order.
            chat: the backbone's chat markers.

        Raises:
            PromptError: if the instruction is blank, no text, or holds half of a character.
        """
        _check_text(instruction, "instruction")
        if not instruction.strip():
            raise PromptError(
                f"The instruction is blank (got {instruction!r}): the judge rates how well an edit follows it. "
                "Give the instruction the editor was given."
            )
        pieces: dict[str, list[Part]] = {
            "instruction": [TextPart(self.instruction.format(instruction=instruction))],
            "source": _image(self.source_label, "source", chat),
            "edited": _image(self.edited_label, "edited", chat),
        }
        parts: list[Part] = [TextPart(chat.beginning, control=True)] if chat.beginning else []
        if self.system:
            parts += [
                TextPart(chat.system_start, control=True),
                TextPart(self.system),
                TextPart(chat.turn_end, control=True),
            ]
        parts.append(TextPart(chat.user_start, control=True))
        parts += [TextPart(chat.gap)] if chat.gap else []
        for name in _ORDERS[self.order]:
            parts += pieces[name]
        definitions = "".join(
            self.definition.format(definition=d.definition, dimension=d.name) for d in dimensions if d.definition
        )
        parts.append(TextPart(self.common.format(definitions=definitions)))
        return parts

    def render_suffix(self, dimension: Dimension, chat: ChatFormat = CHATML) -> list[TextPart]:
        """The question about one dimension and the stem of its answer."""
        question = self.questions.get(dimension.name, self.question)
        stem = self.stems.get(dimension.name, self.stem)
        return self.render_question(
            question.format(question=dimension.question, dimension=dimension.name),
            stem.format(dimension=dimension.name),
            chat,
        )

    def render_answer_suffix(self, question: str, chat: ChatFormat = CHATML) -> list[TextPart]:
        """A yes/no question, as the user wrote it, and the stem of its answer.

        Raises:
            PromptError: if the question is blank, no text, or holds half of a character.
        """
        _check_text(question, "question")
        if not question.strip():
            raise PromptError(f"The question is blank (got {question!r}). Leave it out, or ask a yes/no question.")
        return self.render_question(self.answer_question.format(question=question), self.answer_stem, chat)

    @staticmethod
    def render_question(question: str, stem: str, chat: ChatFormat = CHATML) -> list[TextPart]:
        """Any question and stem: what :meth:`render_suffix` and :meth:`render_answer_suffix` are made of."""
        return [
            TextPart(question),
            TextPart(chat.turn_end + chat.assistant_start, control=True),
            TextPart(chat.gap + stem),
        ]

    def answer_text(self, value: float | str, key: str) -> str:
        """The answer's words: ``" 54.70"`` (always two decimals) for a score, ``" Yes"``/``" No"`` for :data:`ANSWER`.

        Args:
            value: a score on the dimension's scale, or ``"yes"``/``"no"`` in any case.
            key: a dimension's name or :data:`ANSWER`.

        Raises:
            PromptError: if the value does not fit the key.
        """
        if key == ANSWER:
            word = value.strip().lower() if isinstance(value, str) else None
            if word not in ("yes", "no"):
                raise PromptError(f"Expected the answer to a question to be 'yes' or 'no', got {value!r}.")
            return self.yes_answer if word == "yes" else self.no_answer
        if isinstance(value, str) or not abs(value) < float("inf"):
            raise PromptError(f"Expected the score of {key!r} to be a finite number, got {value!r}.")
        return self.score_answer.format(score=f"{value:.2f}")


def load_prompts(name_or_path: str | Path = "default") -> PromptSet:
    """Load a prompt set by the name of a packaged one (``default``) or by the path of a YAML file.

    Raises:
        PromptError: if there is no such set, the YAML is broken, or the wording does not hold together; every
            problem is listed with its key.
    """
    text, origin = _read(name_or_path)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PromptError(f"{origin}: not readable as YAML: {error}. Compare with the packaged default.yaml.") from None
    if not isinstance(data, dict):
        raise PromptError(f"{origin}: expected keys and values, got {type(data).__name__}. Compare with default.yaml.")
    try:
        return PromptSet.model_validate(data)
    except ValidationError as error:
        lines = "\n".join(
            f"  {'.'.join(map(str, e['loc'])) or '(whole file)'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        )
        raise PromptError(f"{origin}: the prompt set does not hold together:\n{lines}") from None


def dump_prompts(prompts: PromptSet) -> str:
    """YAML text from which :func:`load_prompts` builds an equal set."""
    return yaml.safe_dump(prompts.model_dump(), sort_keys=False, allow_unicode=True, width=10_000)


def packaged_prompts() -> list[str]:
    """Names of the packaged prompt sets."""
    folder = resources.files("lmm4edit.judge") / "prompt_sets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read(name_or_path: str | Path) -> tuple[str, str]:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except OSError as error:
            raise PromptError(f"{path}: the prompt file cannot be read: {error.strerror or error}.") from None
    if str(name_or_path) in packaged_prompts():
        entry = resources.files("lmm4edit.judge") / "prompt_sets" / f"{name_or_path}.yaml"
        return entry.read_text(encoding="utf-8"), f"prompt set {str(name_or_path)!r}"
    raise PromptError(
        f"There is no prompt set {str(name_or_path)!r}: expected one of {packaged_prompts()} or the path of a .yaml "
        "file."
    )


def _image(label: str, role: ImageRole, chat: ChatFormat) -> list[Part]:
    return [
        TextPart(label),
        TextPart(chat.image_start, control=True),
        ImagePart(role),
        TextPart(chat.image_end, control=True),
    ]


def _braced(names: Iterable[str]) -> str:
    return ", ".join("{" + name + "}" for name in sorted(names))


def _check_text(text: object, what: str) -> None:
    """Refuse what no tokenizer takes: other types, and texts cut off in the middle of a character."""
    if not isinstance(text, str):
        raise PromptError(f"The {what} must be text, got {type(text).__name__} {text!r}. Give it as a string.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise PromptError(f"The {what} holds half of a character, {half}: it was cut off. Write it again.") from None
