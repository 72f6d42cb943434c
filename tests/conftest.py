"""Shared by all tests: a loaded machine must not fail a property test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lmm4edit", deadline=None)
settings.load_profile("lmm4edit")
