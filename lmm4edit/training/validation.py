"""Agreement with people while training: the same statistics as evaluation, without intervals.

Stage 1 is read in words: every score sentence is completed greedily and parsed strictly. Stage 2 is read through the
score head. Questions are answered by the likelier of the two answers in either stage. No penalty enters any value here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lmm4edit.evaluation.correlation import krcc, plcc, rmse, srcc
from lmm4edit.judge.model import JudgeModel
from lmm4edit.judge.packing import PackedExample, unpack
from lmm4edit.judge.words import complete, read_score
from lmm4edit.records import ANSWER
from lmm4edit.training.dataset import EditDataset, Encoding
from lmm4edit.training.processes import Processes

ReadOut = Literal["text", "head"]

SHOWN = 6
"""Samples of a validation that are written down with their predictions, spread evenly."""


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
        the answers to the questions), ``n_answers``; ``failed``; ``samples``: a few of them with ratings and
        predictions. Undefined values are ``None``.
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


def _judge(
    model: JudgeModel, examples: list[PackedExample], encoding: Encoding, device: torch.device, read_out: ReadOut
) -> list[Judged]:
    # On rows of one question each, a sample's values are spread over several rows.
    rows = examples if encoding.packed else [row for example in examples for row in unpack(example)]
    encoding = replace(encoding, packed=True)
    batch = encoding.collate(rows)
    output = model(batch.to(device))
    scores: dict[str, dict[str, float | None]] = {example.sample_id: {} for example in examples}
    answers: dict[str, str] = {}
    if output.scores is not None:
        judged = zip(batch.sample_ids, output.scores.tolist(), output.asked.tolist(), strict=True)
        for sample_id, values, asked in judged:
            for dimension, value, is_asked in zip(encoding.dimensions, values, asked, strict=True):
                if is_asked:
                    scores[sample_id][dimension.name] = value if abs(value) < float("inf") else None
    if output.answer_logits is not None:
        for sample_id, (no, yes) in zip(batch.sample_ids, output.answer_logits.tolist(), strict=True):
            if no == no and yes == yes:  # neither is NaN: the row asks the question
                answers[sample_id] = "yes" if yes > no else "no"
    if read_out == "text":
        tokenizer = encoding.processor.tokenizer
        done = complete(model.backbone, rows, lambda some: encoding.collate(some).to(device), tokenizer, encoding.chat)
        scores = {example.sample_id: {} for example in examples}
        for row, words in zip(rows, done, strict=True):
            scores[row.sample_id] |= {key: read_score(text) for key, text in words.items()}
    return [Judged(e.sample_id, dict(e.targets or {}), scores[e.sample_id], answers.get(e.sample_id)) for e in examples]


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
    shown = [judged[index * len(judged) // SHOWN] for index in range(SHOWN)] if len(judged) > SHOWN else judged
    row["samples"] = [
        {"sample_id": item.sample_id, "rated": item.targets, "predicted": item.scores, "answer": item.answer}
        for item in shown
    ]
    return row
