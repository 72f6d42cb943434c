"""How torch's threads wait for each other. To be called before torch is loaded: its OpenMP library reads this once."""

from __future__ import annotations

import os


def wait_politely() -> None:
    """Let waiting threads sleep instead of spinning, unless the user has said otherwise (``OMP_WAIT_POLICY``).

    Spinning threads hold a core that the thread they wait for needs as soon as anything else runs on the machine:
    measured ten times slower then (docs/LOG.md, 2026-12-01).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
