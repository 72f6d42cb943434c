"""Agreement with people while training: the same statistics as evaluation, without intervals.

Stage 1 is read in words: every score sentence is completed greedily and parsed strictly. Stage 2 is read through the
score head. Questions are answered by the likelier of the two answers in either stage. No penalty enters any value here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from lmm4edit.evaluation.correlation import krcc, plcc, rmse, srcc
from lmm4edit.judge.backbones import last_hidden_states, token_logits
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.packing import PackedExample
from lmm4edit.records import ANSWER
from lmm4edit.training.dataset import EditDataset, Encoding
from lmm4edit.training.processes import Processes

ReadOut = Literal["text", "head"]

MAX_NEW_TOKENS = 10
"""Enough for `` -100.00`` with one token a character, and its end of turn."""

_NUMBER = re.compile(r"\s*(-?\d{1,4}(?:\.\d+)?)\s*", re.ASCII)


@dataclass(frozen=True)
class Judged:
    """What the judge made of one sample; ``None`` where an answer in words could not be read."""

    sample_id: str
    targets: dict[str, float]
    scores: dict[str, float | None]
    answer: str | None


def validate(
    model: JudgeModel,
    dataset: EditDataset,
    processes: Processes,
    *,
    read_out: ReadOut,
    batch_size: int,
    mixed_precision: bool = False,
) -> dict[str, Any]:
    """Judge a validation set, shared out over the processes, and compare with people.

    Args:
        model: the judge, not wrapped for data parallelism.
        dataset: its encoding must teach nothing (sequences end with the stems).
        processes: all of them must call this.
        read_out: ``text`` (stage 1) or ``head`` (stage 2).
        batch_size: edits in one forward pass.
        mixed_precision: compute in bfloat16, as in training.

    Returns:
        Values of a ``metrics.jsonl`` row: for each dimension ``srcc_``, ``krcc_``, ``plcc_``, ``rmse_``, ``distinct_``,
        ``n_`` and, read in words, ``parsed_`` (part of the answers that hold a number); ``srcc_mean``; ``accuracy`` (of
        the answers to the questions), ``n_answers``; ``failed``. Undefined values are ``None``.
    """
    was_training = model.training
    model.eval()
    indices = list(range(len(dataset)))[processes.rank :: processes.world_size]
    judged, failed = [], 0
    precision = torch.autocast(processes.device.type, torch.bfloat16, enabled=mixed_precision)
    with torch.inference_mode(), precision:
        for first in range(0, len(indices), batch_size):
            items = dataset.__getitems__(indices[first : first + batch_size])
            examples = [item for item in items if isinstance(item, PackedExample)]
            failed += len(items) - len(examples)
            if examples:
                judged += _judge(model, examples, dataset.encoding, processes.device, read_out)
    model.train(was_training)
    everything = processes.gather(judged)
    failures = sum(processes.gather([failed]))
    return _compare(everything, [d.name for d in dataset.encoding.dimensions], failures, read_out)


def read_score(words: str) -> float | None:
    """The number that an answer consists of, or ``None``: nothing but a number counts."""
    match = _NUMBER.fullmatch(words)
    return float(match[1]) if match else None


def _judge(
    model: JudgeModel, examples: list[PackedExample], encoding: Encoding, device: torch.device, read_out: ReadOut
) -> list[Judged]:
    # On rows of one question each, a sample's values are spread over several rows.
    batch = encoding.collate(examples).to(device)
    output = model(batch)
    scores: dict[str, dict[str, float | None]] = {example.sample_id: {} for example in examples}
    answers: dict[str, str] = {}
    for row, sample_id in enumerate(batch.sample_ids):
        for column, dimension in enumerate(encoding.dimensions):
            if output.scores is not None and output.asked[row, column]:
                scores[sample_id][dimension.name] = float(output.scores[row, column])
        if output.answer_logits is not None and not output.answer_logits[row].isnan().any():
            no, yes = output.answer_logits[row].tolist()
            answers[sample_id] = "yes" if yes > no else "no"
    if read_out == "text":
        for example, words in zip(examples, complete(model.backbone, examples, encoding, device), strict=True):
            scores[example.sample_id] = {key: read_score(text) for key, text in words.items()}
    return [Judged(e.sample_id, dict(e.targets or {}), scores[e.sample_id], answers.get(e.sample_id)) for e in examples]


def complete(
    backbone: nn.Module, examples: Sequence[PackedExample], encoding: Encoding, device: torch.device
) -> list[dict[str, str]]:
    """Complete the stems of all questions on dimensions greedily, all questions of all edits side by side.

    Each pass reads the packed sequences with what has been written so far and appends one token to every answer, so it
    works with every backbone that can be packed, and positions are those of training. (A key/value cache would be
    faster; this runs on a part of the data, now and then.)

    Returns:
        For each example, the words by dimension, without the end of turn.
    """
    tokenizer = encoding.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids(encoding.chat.end_of_answer)
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
        batch = encoding.collate(so_far).to(device)
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


def _compare(judged: Sequence[Judged], dimensions: Sequence[str], failed: int, read_out: ReadOut) -> dict[str, Any]:
    row: dict[str, Any] = {"read_out": read_out, "failed": failed}
    for name in dimensions:
        rated = [item for item in judged if name in item.targets]
        pairs = [(score, item.targets[name]) for item in rated if (score := item.scores[name]) is not None]
        predicted, human = [p for p, _ in pairs], [h for _, h in pairs]
        row[f"srcc_{name}"], row[f"krcc_{name}"] = srcc(predicted, human), krcc(predicted, human)
        row[f"plcc_{name}"], row[f"rmse_{name}"] = plcc(predicted, human), rmse(predicted, human)
        row[f"distinct_{name}"], row[f"n_{name}"] = len(set(predicted)), len(pairs)
        if read_out == "text":
            row[f"parsed_{name}"] = len(pairs) / len(rated) if rated else None
    values = [row[f"srcc_{name}"] for name in dimensions]
    row["srcc_mean"] = sum(values) / len(values) if None not in values else None
    answered = [item for item in judged if ANSWER in item.targets]
    right = [(item.answer == "yes") == (item.targets[ANSWER] == 1.0) for item in answered]
    row["accuracy"] = sum(right) / len(right) if right else None
    row["n_answers"] = len(right)
    return row
