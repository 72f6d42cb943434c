"""Every error that LMM4Edit raises on purpose.

    LMM4EditError
    ├── ConfigError        a configuration file or an override on the command line
    ├── ManifestError      a manifest: a row, a column, the file itself
    ├── ImageError         an image that cannot or must not be decoded
    ├── PromptError        a prompt set, or a sample that does not fit in a prompt
    ├── CheckpointError    a checkpoint, or the weights of a backbone
    ├── ScorerError        a scorer that is unknown, or cannot run here
    └── StoreError         a predictions file

Each message says what was expected, what came, where it stands, and what to do. The command line prints it alone and
exits with status 2 (1 is for data with problems); anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmm4edit.data.problems import Problem


class LMM4EditError(Exception):
    """Base of every error that the user can repair by following its message."""


class ConfigError(LMM4EditError):
    """A configuration is wrong: unknown key, wrong type, values that contradict each other."""


class ManifestError(LMM4EditError):
    """A manifest cannot be read, or some of its rows are wrong.

    Attributes:
        problems: every problem found (:class:`lmm4edit.data.problems.Problem`), also those that the message leaves out.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ImageError(LMM4EditError):
    """An image is missing, damaged, too large, or of a shape that no backbone takes.

    Attributes:
        expected, got, remedy: the parts of the message, for tables; empty if it was not made of them.
    """

    def __init__(self, message: str, *, expected: str = "", got: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.expected, self.got, self.remedy = expected, got, remedy

    @classmethod
    def from_parts(cls, name: str, expected: str, got: str, remedy: str) -> ImageError:
        """``NAME: expected ..., got .... REMEDY``"""
        return cls(f"{name}: expected {expected}, got {got}. {remedy}", expected=expected, got=got, remedy=remedy)


class PromptError(LMM4EditError):
    """A prompt set is wrong, or a sample does not fit in the prompt."""


class CheckpointError(LMM4EditError):
    """A checkpoint or a backbone is incomplete, damaged, or does not belong with the rest."""


class ScorerError(LMM4EditError):
    """A scorer is unknown, lacks what it needs, or cannot run on this machine."""


class StoreError(LMM4EditError):
    """A predictions file belongs to another run, is in use by another process, or is damaged."""
