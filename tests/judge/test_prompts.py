"""The wording: loaded whole or refused whole, rendered in its order, fingerprinted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lmm4edit.errors import PromptError
from lmm4edit.judge.prompts import (
    CHATML,
    ImagePart,
    PromptSet,
    TextPart,
    dump_prompts,
    load_prompts,
    packaged_prompts,
)
from lmm4edit.records import BUILT_IN_DIMENSIONS, QUALITY, Dimension


def _text(parts: list) -> str:
    return "".join(f"[{p.role}]" if isinstance(p, ImagePart) else p.text for p in parts)


def test_every_packaged_set_loads() -> None:
    assert packaged_prompts() == ["default", "tiny"]
    for name in packaged_prompts():
        prompts = load_prompts(name)
        assert prompts.name == name
        assert prompts.order == "instruction_source_edited"


def test_the_prefix_reads_instruction_source_edited_definitions() -> None:
    prompts = load_prompts()
    text = _text(prompts.render_prefix("remove the cat", BUILT_IN_DIMENSIONS))
    assert text == (
        "<|im_start|>system\nYou judge image edits.<|im_end|>\n<|im_start|>user\n"
        "Instruction: remove the cat\n"
        "Source image: <|vision_start|>[source]<|vision_end|>"
        "Edited image: <|vision_start|>[edited]<|vision_end|>"
        f"{BUILT_IN_DIMENSIONS[0].definition}\n{BUILT_IN_DIMENSIONS[1].definition}\n"
        f"{BUILT_IN_DIMENSIONS[2].definition}\n\n"
    )


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("instruction_source_edited", ["instruction", "source", "edited"]),
        ("source_instruction_edited", ["source", "instruction", "edited"]),
        ("paper", ["edited", "source", "instruction"]),
    ],
)
def test_orders(order: str, expected: list[str]) -> None:
    prompts = load_prompts().model_copy(update={"order": order})
    parts = prompts.render_prefix("do it", ())
    found = [
        part.role if isinstance(part, ImagePart) else "instruction"
        for part in parts
        if isinstance(part, ImagePart) or "Instruction" in part.text
    ]
    assert found == expected


def test_without_a_system_text_there_is_no_system_turn() -> None:
    prompts = load_prompts().model_copy(update={"system": ""})
    assert _text(prompts.render_prefix("go", ())).startswith("<|im_start|>user\nInstruction: go\n")


def test_suffixes_end_with_their_stems() -> None:
    prompts = load_prompts()
    assert _text(prompts.render_suffix(QUALITY)) == (
        "Rate the perceptual quality.<|im_end|>\n<|im_start|>assistant\nThe quality score is"
    )
    assert _text(prompts.render_answer_suffix("Is it red?")) == (
        "Is it red?<|im_end|>\n<|im_start|>assistant\nThe answer is"
    )
    own = prompts.model_copy(update={"questions": {"style": "How {dimension}?"}, "stems": {"style": "It is"}})
    assert _text(own.render_suffix(Dimension("style", "?"))) == "How style?<|im_end|>\n<|im_start|>assistant\nIt is"


def test_user_text_is_never_control_text() -> None:
    prompts = load_prompts()
    parts = [*prompts.render_prefix("a <|im_end|> b", ()), *prompts.render_answer_suffix("c <|im_end|>?")]
    for part in parts:
        if isinstance(part, TextPart) and part.control:
            assert " b" not in part.text and "c " not in part.text
    assert sum("<|im_end|> b" in p.text for p in parts if isinstance(p, TextPart) and not p.control) == 1


def test_braces_in_user_text_are_ordinary() -> None:
    text = _text(load_prompts().render_prefix("write {instruction} {0}", ()))
    assert "Instruction: write {instruction} {0}\n" in text


@pytest.mark.parametrize(
    ("value", "key", "expected"),
    [
        (54.7, "quality", " 54.70"),
        (45.5, "quality", " 45.50"),
        (9.31, "alignment", " 9.31"),
        (100, "quality", " 100.00"),
        (0, "quality", " 0.00"),
        (-3.004, "quality", " -3.00"),
        ("YES", "answer", " Yes"),
        ("no", "answer", " No"),
    ],
)
def test_answers_in_words(value: float | str, key: str, expected: str) -> None:
    assert load_prompts().answer_text(value, key) == expected


@pytest.mark.parametrize(
    ("value", "key", "message"),
    [
        ("maybe", "answer", "Expected the answer to a question to be 'yes' or 'no', got 'maybe'."),
        (1.0, "answer", "Expected the answer to a question to be 'yes' or 'no', got 1.0."),
        (float("nan"), "quality", "Expected the score of 'quality' to be a finite number, got nan."),
        ("54.70", "quality", "Expected the score of 'quality' to be a finite number, got '54.70'."),
    ],
)
def test_answers_that_do_not_fit(value: float | str, key: str, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        load_prompts().answer_text(value, key)
    assert str(caught.value) == message


def test_blank_instruction_and_question_are_refused() -> None:
    with pytest.raises(PromptError) as caught:
        load_prompts().render_prefix(" \n", BUILT_IN_DIMENSIONS)
    assert str(caught.value) == (
        "The instruction is blank (got ' \\n'): the judge rates how well an edit follows it. "
        "Give the instruction the editor was given."
    )
    with pytest.raises(PromptError) as caught:
        load_prompts().render_answer_suffix("")
    assert str(caught.value) == "The question is blank (got ''). Leave it out, or ask a yes/no question."


def test_a_dumped_set_is_the_same_set(tmp_path: Path) -> None:
    prompts = load_prompts()
    (tmp_path / "p.yaml").write_text(dump_prompts(prompts), encoding="utf-8")
    again = load_prompts(tmp_path / "p.yaml")
    assert again == prompts
    assert again.fingerprint() == prompts.fingerprint()


def test_the_fingerprint_follows_the_wording_alone() -> None:
    prompts = load_prompts()
    renamed = prompts.model_copy(update={"name": "other", "version": 9})
    reworded = prompts.model_copy(update={"stem": "Score:"})
    assert renamed.fingerprint() == prompts.fingerprint()
    assert reworded.fingerprint() != prompts.fingerprint()


def _write(path: Path, **changes: object) -> Path:
    values = {**load_prompts().model_dump(), **changes}
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"instruction": "Do it"}, "instruction: must contain {instruction}, got 'Do it'"),
        (
            {"stem": "The {name} is"},
            "stem: unknown placeholder {name} (only {dimension} may stand here), got 'The {name} is'",
        ),
        ({"system": "{x}"}, "system: unknown placeholder {x} (nothing is filled in here), got '{x}'"),
        (
            {"answer_stem": "Answer: "},
            "(whole file): answer_stem: a stem must end with a visible character, because its last token is where the "
            "score is read and the answer brings its own leading space; got 'Answer: '",
        ),
        ({"no_answer": " Yes"}, "(whole file): yes_answer and no_answer must differ, got ' Yes' twice"),
        ({"yes_answer": " "}, "(whole file): yes_answer: expected a word, got ' '"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"common": None}, "common: Field required"),
    ],
)
def test_broken_sets_are_refused_by_key(tmp_path: Path, changes: dict, line: str) -> None:
    path = _write(tmp_path / "broken.yaml", **changes)
    with pytest.raises(PromptError) as caught:
        load_prompts(path)
    assert str(caught.value) == f"{path}: the prompt set does not hold together:\n  {line}"


def test_sets_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError) as caught:
        load_prompts("defualt")
    assert str(caught.value) == (
        "There is no prompt set 'defualt': expected one of ['default', 'tiny'] or the path of a .yaml file."
    )
    missing = tmp_path / "none.yaml"
    with pytest.raises(PromptError) as caught:
        load_prompts(missing)
    assert str(caught.value) == f"{missing}: the prompt file cannot be read: No such file or directory."
    listed = tmp_path / "list.yaml"
    listed.write_text("- a\n", encoding="utf-8")
    with pytest.raises(PromptError) as caught:
        load_prompts(listed)
    assert str(caught.value) == f"{listed}: expected keys and values, got list. Compare with default.yaml."
    torn = tmp_path / "torn.yaml"
    torn.write_text("a: [", encoding="utf-8")
    with pytest.raises(PromptError, match="not readable as YAML"):
        load_prompts(torn)


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    path = _write(tmp_path / "bom.yaml")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_prompts(path) == load_prompts()


def test_prompt_sets_are_immutable() -> None:
    prompts = load_prompts()
    with pytest.raises(ValueError, match="frozen"):
        prompts.stem = "x"  # type: ignore[misc]
    assert isinstance(prompts, PromptSet) and CHATML.end_of_answer == "<|im_end|>"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "must be text, got int 7. Give it as a string."),
        (None, "must be text, got NoneType None. Give it as a string."),
        ("cut \ud83d", "holds half of a character, \\ud83d: it was cut off. Write it again."),
    ],
)
def test_what_no_tokenizer_takes_is_refused(given: object, message: str) -> None:
    prompts = load_prompts("default")
    with pytest.raises(PromptError) as error:
        prompts.render_prefix(given, BUILT_IN_DIMENSIONS)  # type: ignore[arg-type]
    assert str(error.value) == f"The instruction {message}"
    with pytest.raises(PromptError) as error:
        prompts.render_answer_suffix(given)  # type: ignore[arg-type]
    assert str(error.value) == f"The question {message}"
