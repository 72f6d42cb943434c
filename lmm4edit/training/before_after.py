"""What fine-tuning gained on new ratings and lost on the old: the starting judge and the trained one, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

KINDS = {"validation": "new data", "retention": "old data"}
"""Kinds of rows in ``metrics.jsonl`` that are compared, and what people call their manifests."""


def compare(rows: Iterable[Mapping[str, Any]], last_step: int) -> list[dict[str, Any]]:
    """Statistics before the first step and after the last.

    Args:
        rows: of ``metrics.jsonl``.
        last_step: of the run.

    Returns:
        Rows ``{data, statistic, before, after, n}``; ``None`` where a statistic is undefined. Empty if nothing was
        judged before the first step.
    """
    found = {(row["kind"], row["step"]): row for row in rows if row["kind"] in KINDS}
    result = []
    for kind in KINDS:
        before, after = found.get((kind, 0)), found.get((kind, last_step))
        if before is None or after is None:
            continue
        names = [key.removeprefix("srcc_") for key in after if key.startswith("srcc_") and key != "srcc_mean"]
        statistics = [(f"srcc_{name}", f"n_{name}") for name in names]
        statistics += [(f"rmse_{name}", f"n_{name}") for name in names] + [("accuracy", "n_answers")]
        result += [
            {"data": kind, "statistic": key, "before": before.get(key), "after": after.get(key), "n": after.get(n)}
            for key, n in statistics
        ]
    return result


def render(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The comparison as a table for people. SRCC and accuracy: higher is better; RMSE: lower."""
    table = Table(title="Before and after (srcc, accuracy: higher is better; rmse: lower)", title_justify="left")
    for name in ("data", "statistic", "starting judge", "trained judge", "change", "n"):
        table.add_column(name, justify="left" if name in ("data", "statistic") else "right")
    for row in rows:
        if not row["n"]:
            continue
        before, after = row["before"], row["after"]
        change = "" if before is None or after is None else f"{after - before:+.3f}"
        shown = ["undefined" if value is None else f"{value:.3f}" for value in (before, after)]
        table.add_row(KINDS[row["data"]], row["statistic"].replace("_", " "), *shown, change, str(row["n"]))
    return table
