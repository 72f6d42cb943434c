"""Ties the claims of the table of families to the tests that show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmm4edit.judge.families import FAMILIES, PROOFS

SHOWN: dict[str, tuple[str, str]] = {}
"""File and name of the test by the claim that it shows."""


def shows(claim: str) -> Callable[[Any], Any]:
    """Run a test (with an argument ``family``) for every family that makes the claim."""
    assert claim in PROOFS

    def mark(test: Any) -> Any:
        SHOWN[claim] = (f"tests/judge/{Path(inspect.unwrap(test).__code__.co_filename).name}", test.__name__)
        return pytest.mark.parametrize("family", [f.model_type for f in FAMILIES if claim in f.proven])(test)

    return mark
