"""What a judge says of one edit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ReadOut = Literal["head", "text"]
"""``head``: the score head's numbers (stage 2). ``text``: the numbers the judge writes in words (stage 1)."""


@dataclass(frozen=True)
class EditScore:
    """The judge's outputs for one edit.

    Attributes:
        sample_id: which edit.
        scores: by dimension, on the MOS scale (0-100, can leave it a little), higher is better; ``None`` where there is
            no number, and then ``failures`` says why.
        answer: ``"yes"`` or ``"no"`` to the question; ``None`` if none was asked or it could not be answered.
        answer_probability: probability of yes against no, 0-1.
        overall: Eq. 3 of the paper, q^0.3 a^0.4 p^0.3, 0-100; ``None`` if one of the three is missing or negative, or
            the judge has other dimensions.
        read_out: where the scores were read.
        words: by dimension, what the judge wrote (text read-out).
        failures: reasons by dimension (or ``answer``).
        failure: why there is no output at all.
    """

    sample_id: str
    scores: Mapping[str, float | None]
    answer: str | None = None
    answer_probability: float | None = None
    overall: float | None = None
    read_out: ReadOut = "head"
    words: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    failure: str | None = None

    @property
    def quality(self) -> float | None:
        """Perceptual quality, 0-100, higher is better."""
        return self.scores.get("quality")

    @property
    def alignment(self) -> float | None:
        """Editing alignment, 0-100, higher is better."""
        return self.scores.get("alignment")

    @property
    def preservation(self) -> float | None:
        """Attribute preservation, 0-100, higher is better."""
        return self.scores.get("preservation")

    def as_record(self) -> dict[str, Any]:
        """Flat plain values: the columns of a score file."""
        reasons = [self.failure] if self.failure else [f"{key}: {reason}" for key, reason in self.failures.items()]
        return {
            "sample_id": self.sample_id,
            **self.scores,
            "overall": self.overall,
            "answer": self.answer,
            "answer_probability": self.answer_probability,
            "failure": "; ".join(reasons) or None,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value of each output, as shown to people."""
        for name, value in self.scores.items():
            yield name, "none" if value is None else f"{value:.2f}"
        yield "overall", "none" if self.overall is None else f"{self.overall:.2f}"
        if self.answer is not None and self.answer_probability is not None:
            yield "answer", f"{self.answer} (probability of yes {self.answer_probability:.2f})"

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=self.sample_id or None)
        table.add_column("output")
        table.add_column("value", justify="right")
        for name, value in self.lines():
            table.add_row(name, value)
        return table
