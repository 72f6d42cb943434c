"""Ranks of a judge's adapters as a picture: one map of layers and matrices for each part of the backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lmm4edit.evaluation.plotting import INK, PNG_DPI, style
from lmm4edit.judge.ranks import AdapterRanks, MatrixRank, layer_table, to_csv

# So many layers still leave room for a number in each cell.
_NUMBERED_LAYERS = 40


def write_rank_files(ranks: AdapterRanks, folder: str | Path) -> tuple[Path, Path]:
    """Write ``ranks.csv`` and ``ranks.png``.

    Args:
        ranks: of a judge.
        folder: where to; made if it is not there.

    Returns:
        Paths of the table and the picture.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    table, picture = target / "ranks.csv", target / "ranks.png"
    table.write_text(to_csv(ranks), encoding="utf-8")
    with style():
        draw_ranks(ranks).savefig(picture, dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return table, picture


def draw_ranks(ranks: AdapterRanks) -> Figure:
    """The map: darker is a higher rank; a matrix that lost everything is white with a 0."""
    parts = ranks.parts
    sizes = [layer_table(ranks.of(part)) for part in parts]
    columns, rows = [len(names) for _, names, _ in sizes], max(len(layers) for layers, _, _ in sizes)
    figure = Figure(figsize=(2.0 + 0.62 * sum(columns), 2.2 + 0.24 * max(rows, 5)), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False, width_ratios=columns)[0]
    highest = max(max(m.initial_rank, m.rank) for m in ranks.matrices)
    image: Any = None
    for part, axis in zip(parts, axes, strict=True):
        image = _draw_part(axis, part, ranks.of(part), highest)
    figure.colorbar(image, ax=list(axes), label="rank", shrink=0.9, pad=0.02)
    mean = ranks.total / len(ranks.matrices)
    initial = max(m.initial_rank for m in ranks.matrices)
    started = f", started with {initial}" if ranks.kind == "adalora" else ""
    figure.suptitle(
        f"Ranks of {len(ranks.matrices)} matrices: mean {mean:.2f}{started}",
        x=0.01,
        ha="left",
        fontsize=10.5,
        color=INK,
    )
    return figure


def _draw_part(axis: Any, part: str, matrices: list[MatrixRank], highest: int) -> Any:
    layers, names, table = layer_table(matrices)
    values = np.array([[np.nan if rank is None else rank for rank in row] for row in table], dtype=float)
    image = axis.imshow(values, cmap="Blues", vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
    axis.grid(False)
    axis.set_title(part)
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    shown = range(0, len(layers), max(1, len(layers) // 16))
    axis.set_yticks(list(shown), ["–" if layers[i] is None else str(layers[i]) for i in shown])
    axis.set_ylabel("layer")
    if len(layers) <= _NUMBERED_LAYERS:
        for y, row in enumerate(table):
            for x, rank in enumerate(row):
                if rank is not None:
                    colour = "white" if rank > 0.6 * highest else INK
                    axis.text(x, y, str(rank), ha="center", va="center", fontsize=7, color=colour)
    return image
