"""Our judge as one more scorer: on the same protocol as PSNR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lmm4edit.records import ANSWER, EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo


class EditJudgeScorer:
    """A judge's checkpoint as a scorer: one prediction a dimension, and one for the yes/no question where there is one.

    Args:
        path: folder of a checkpoint, or ``tiny``.
        read_out: ``head`` or ``text``.
        device, dtype: see :func:`lmm4edit.inference.judge.load_judge`.
    """

    def __init__(
        self, path: str, read_out: Literal["head", "text"], device: str | None = None, dtype: str = "float32"
    ) -> None:
        from lmm4edit.inference.judge import load_judge

        self.judge = load_judge(path, device=device, dtype=dtype)
        self.read_out: Literal["head", "text"] = read_out
        if read_out == "head":
            self.judge.model.require_head()
        names = tuple(dimension.name for dimension in self.judge.dimensions)
        prefix = "judge" if read_out == "head" else "judge-text"
        self.info = ScorerInfo(
            name=f"{prefix}:{path}",
            family="lmm",
            needs=frozenset({"source", "edited", "instruction", "question"}),
            targets=(*names, ANSWER),
            low=None,
            high=None,
            on_opinion_scale=True,
            paper="LMM4Edit",
            implementation="LMM4Edit",
            code_license="Apache-2.0",
            notes=self.judge.notice or "",
            fingerprint=f"{self.judge.fingerprint()}:{read_out}:{dtype}",
        )

    def score(self, samples: Sequence[EditSample]) -> list[list[Prediction]]:
        """Predictions per sample: every dimension, and the answer where a question is asked."""
        samples = list(samples)
        results = self.judge.score_many(samples, batch_size=max(1, len(samples)), read_out=self.read_out)
        rows = []
        for sample, result in zip(samples, results, strict=True):
            row = []
            for name, value in result.scores.items():
                failure = None if value is not None else result.failure or result.failures.get(name, "no value")
                row.append(self._prediction(sample, name, value, result.words.get(name), failure))
            if sample.question is not None:
                failure = (
                    None if result.answer is not None else result.failure or result.failures.get(ANSWER, "no answer")
                )
                row.append(self._prediction(sample, ANSWER, result.answer, None, failure))
            rows.append(row)
        return rows

    def _prediction(
        self, sample: EditSample, target: str, value: float | str | None, raw: str | None, failure: str | None
    ) -> Prediction:
        return Prediction(sample.sample_id, self.info.name, target, value, raw_answer=raw, failure=failure)


def build_edit_judge(
    path: str, read_out: Literal["head", "text"] = "head", device: str | None = None, dtype: str = "float32"
) -> EditJudgeScorer:
    """The scorer ``judge:PATH`` (score head) or ``judge-text:PATH`` (numbers in words)."""
    return EditJudgeScorer(path, read_out, device=device, dtype=dtype)
