"""LMM4Edit: judges of image edits. Quality, alignment, preservation and a yes/no answer in one pass.

>>> import lmm4edit
>>> judge = lmm4edit.load_judge("tiny")
>>> judge.score("a.png", "b.png", "remove the red heart").overall

Importing the package is cheap: torch is loaded when a judge is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmm4edit.errors import LMM4EditError
from lmm4edit.records import BUILT_IN_DIMENSIONS, Dimension, EditSample, Prediction, Question

if TYPE_CHECKING:
    from lmm4edit.inference.judge import EditScore, Judge, load_judge

__version__ = "0.1.0"

__all__ = [
    "BUILT_IN_DIMENSIONS",
    "Dimension",
    "EditSample",
    "EditScore",
    "Judge",
    "LMM4EditError",
    "Prediction",
    "Question",
    "__version__",
    "load_judge",
]

_LAZY = ("EditScore", "Judge", "load_judge")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from lmm4edit.inference import judge

        return getattr(judge, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
