"""The judge's answers in words: completed greedily after their stems, and read strictly."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lmm4edit.judge.backbones import last_hidden_states, token_logits
from lmm4edit.judge.packing import PackedBatch, PackedExample
from lmm4edit.judge.prompts import CHATML, ChatFormat
from lmm4edit.records import ANSWER

MAX_NEW_TOKENS = 10
"""Enough for `` -100.00`` with one token a character, and its end of turn."""

_NUMBER = re.compile(r"\s*(-?\d{1,4}(?:\.\d+)?)\s*", re.ASCII)


def read_score(words: str) -> float | None:
    """The number that an answer consists of, or ``None``: nothing but a number counts."""
    match = _NUMBER.fullmatch(words)
    return float(match[1]) if match else None


def complete(
    backbone: nn.Module,
    examples: Sequence[PackedExample],
    collate: Callable[[Sequence[PackedExample]], PackedBatch],
    tokenizer: Any,
    chat: ChatFormat = CHATML,
) -> list[dict[str, str]]:
    """Complete the stems of all questions on dimensions greedily, all questions of all edits side by side.

    Each pass reads the packed sequences with what has been written so far and appends one token to every answer, so it
    works with every backbone that can be packed, and positions are those of training.

    Args:
        backbone: plain or with adapters, in evaluation mode.
        examples: whose suffixes end with their stems.
        collate: examples to a batch on the backbone's device.
        tokenizer, chat: of the backbone.

    Returns:
        For each example, the words by dimension, without the end of turn.
    """
    end = tokenizer.convert_tokens_to_ids(chat.end_of_answer)
    asked = [[suffix for suffix in example.suffixes if suffix.key != ANSWER] for example in examples]
    written: list[list[list[int]]] = [[[] for _ in suffixes] for suffixes in asked]
    for _ in range(MAX_NEW_TOKENS):
        so_far = [
            replace(
                example,
                suffixes=[
                    replace(suffix, ids=suffix.ids + tokens, answer_ids=[])
                    for suffix, tokens in zip(suffixes, answers, strict=True)
                ],
            )
            for example, suffixes, answers in zip(examples, asked, written, strict=True)
        ]
        batch = collate(so_far)
        hidden = last_hidden_states(backbone, batch)
        rows = torch.arange(len(batch), device=hidden.device)[:, None]
        following = token_logits(backbone, hidden[rows, batch.readout_index.clamp(min=0)]).argmax(-1).tolist()
        columns = {key: index for index, key in enumerate(batch.suffix_keys)}
        open_answers = 0
        for row, (suffixes, answers) in enumerate(zip(asked, written, strict=True)):
            for suffix, tokens in zip(suffixes, answers, strict=True):
                if end not in tokens:
                    tokens.append(following[row][columns[suffix.key]])
                    open_answers += tokens[-1] != end
        if not open_answers:
            break
    return [
        {
            suffix.key: tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)
            for suffix, tokens in zip(suffixes, answers, strict=True)
        }
        for suffixes, answers in zip(asked, written, strict=True)
    ]
