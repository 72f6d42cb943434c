"""How figures of a report look and how they are written: one style, colour-blind safe, PNG and SVG, the same bytes
again.

In SVG for the HTML page, ink and lines become CSS colours, so that a figure follows the page's light or dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, LINE = "#1b2430", "#667080", "#d5dbe3"

# Okabe and Ito's palette (2008): told apart with every common form of colour blindness. Markers tell predictors apart
# too.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8f98")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ACCENT = COLOURS[0]
PEOPLE = "#d55e00"
PNG_DPI = 150
PAGE_SCALE = 1.42  # CSS pixels on the page per point of a figure

_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.facecolor": "none",
    "axes.unicode_minus": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class SavedFigure:
    """A figure on disk and its SVG for the page.

    Attributes:
        name: file name without suffix.
        title: what it shows, also its text for screen readers.
        note: how to read it.
        png, svg: files.
        inline: SVG element to put in a page; ink and lines are CSS colours.
    """

    name: str
    title: str
    note: str
    png: Path
    svg: Path
    inline: str


@contextmanager
def style() -> Iterator[None]:
    """Within it, new figures have the report's look; nothing outside is changed."""
    with matplotlib.rc_context(_RC):
        yield


def new_figure(
    width: float, height: float, columns: int = 1, rows: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of that many inches with a row-major list of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [axis for row in axes for axis in row]


def plain(text: str) -> str:
    """Text to be shown as it is: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def colour_of(names: Sequence[str]) -> dict[str, str]:
    """Name -> colour, in order; beyond seven they repeat."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def marker_of(names: Sequence[str]) -> dict[str, str]:
    """Name -> marker, in order; beyond seven they repeat."""
    return {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(names)}


def save(figure: Figure, folder: Path, name: str, title: str, note: str = "") -> SavedFigure:
    """Write ``name.png`` (white background) and ``name.svg``, and make the SVG for the page."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    # The salt keeps marks of several figures apart on one page, and makes the file the same every time.
    with matplotlib.rc_context({**_RC, "svg.hashsalt": name}):
        # Arranged once: each saving would measure every text again.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        figure.savefig(png, dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    text = stream.getvalue().decode("utf-8")
    svg.write_text(text, encoding="utf-8")
    return SavedFigure(name, title, note, png, svg, _inline(text, title))


def _inline(svg: str, title: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Groups carry ids that repeat from figure to figure; only definitions are referred to.
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    size = re.search(r'width="([0-9.]+)pt"', body)
    widest = f"{float(size.group(1)) * PAGE_SCALE:.0f}px" if size else "100%"
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    label = f'role="img" aria-label="{_attribute(title)}" style="max-width:{widest}"'
    body = body.replace("<svg ", f"<svg {label} ", 1)
    for colour, variable in ((INK, "var(--ink)"), (FAINT, "var(--faint)"), (LINE, "var(--line)")):
        body = body.replace(colour, variable)
    return body


def _attribute(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(character, entity)
    return text
