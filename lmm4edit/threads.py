"""How torch's threads wait for each other. To be called before torch is loaded: its OpenMP library reads this once."""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def wait_politely(environment: MutableMapping[str, str] | None = None) -> None:
    """Let waiting threads spin for a moment only and then sleep, unless the user has said otherwise.

    Spinning threads hold a core that the thread they wait for needs as soon as anything else runs on the machine; a
    thousand turns keep nearly all of the speed where nothing does (measured: docs/LOG.md, 2026-12-01). The OpenMP that
    comes with torch for Linux reads ``GOMP_SPINCOUNT``; others ignore it.
    """
    environment = os.environ if environment is None else environment
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")
