"""The paper's Table 6 beside ours: means over seeds with 95 % intervals, and a reason wherever there is no number."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmm4edit
from lmm4edit.config import TrainConfig
from lmm4edit.evaluation.tables import LABELS, MAIN_STATISTICS, Cell, Column, Table
from lmm4edit.records import ANSWER, BUILT_IN_DIMENSIONS
from lmm4edit.training.ablation.grid import Row
from lmm4edit.training.ablation.outcome import Outcome

PAPER_TABLE = "lmm4edit_table6_ablation"
"""The paper's figures, in ``lmm4edit/published``: section 5.4, Table 6."""

OURS, PAPER = "ours", "paper"

_KINDS = {"adalora": "AdaLoRA", "lora": "LoRA", "full": "full", "none": "–"}


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's Table 6.

    Attributes:
        number: from 1, in the paper's order.
        backbone, adapter: as printed.
        projector, vision, llm: whether it is trained or adapted.
        values: (target, statistic) -> value; accuracy as a part of 1.
    """

    number: int
    backbone: str
    adapter: str
    projector: bool
    vision: bool
    llm: bool
    values: Mapping[tuple[str, str], float]


def paper_rows() -> list[PaperRow]:
    """The paper's Table 6."""
    path = Path(lmm4edit.__file__).parent / "published" / f"{PAPER_TABLE}.csv"
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, record in enumerate(csv.DictReader(file), start=1):
            values = {(d.name, s): float(record[f"{d.name}_{s}"]) for d in BUILT_IN_DIMENSIONS for s in MAIN_STATISTICS}
            values[ANSWER, "accuracy"] = float(record["qa_accuracy"]) / 100
            projector, vision, llm = (record[key] == "1" for key in ("train_projector", "lora_vision", "lora_llm"))
            rows.append(PaperRow(number, record["backbone"], record["lora_type"], projector, vision, llm, values))
    return rows


def seed_interval(values: Sequence[float]) -> Cell:
    """Mean over seeds with its 95 % interval by Student's t.

    Args:
        values: one a seed, at least one.

    Returns:
        The cell; of a single value there is no interval.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Cell(mean, reason="one seed has no interval")
    from scipy.stats import t

    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = float(t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Cell(mean, mean - half, mean + half)


def ablation_table(rows: Sequence[Row], outcomes: Sequence[Outcome], seeds: Sequence[int]) -> Table:
    """Every row of the grid, below it the paper's row that it repeats, at the end the paper's rows that it lacks.

    Args:
        rows: of the grid, those shown.
        outcomes: what came of its runs; several seeds a row.
        seeds: that were asked for; one without an outcome is named as missing.

    Returns:
        Columns as in the paper, with n (seeds) and the reasons of what is missing.
    """
    targets = _targets(outcomes)
    columns = (*_DESCRIPTION, *(_column(target, statistic) for target, statistic in targets), _NOTE)
    paper = {row.number: row for row in paper_rows()}
    lines = []
    for row in rows:
        lines.append(_our_line(row, [o for o in outcomes if o.row == row.name], seeds, targets))
        if row.paper_row is not None:
            lines.append(_paper_line(paper[row.paper_row], targets, ""))
    covered = {row.paper_row for row in rows}
    lines += [_paper_line(p, targets, "not among these rows") for p in paper.values() if p.number not in covered]
    return Table("ablation", "Ablation (layout of the paper's Table 6)", columns, tuple(lines), _note(outcomes))


_DESCRIPTION = (
    Column("row", "row", "text"),
    Column("source", "source", "text"),
    Column("backbone", "backbone", "text"),
    Column("projector", "projector", "text"),
    Column("vision", "vision", "text"),
    Column("llm", "LLM", "text"),
    Column("adapter", "adapter", "text"),
    Column("n_seeds", "n", "count"),
)
_NOTE = Column("missing", "missing", "text")


def _targets(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    names = [d.name for d in BUILT_IN_DIMENSIONS]
    # Dimensions of the user's own stand beside the paper's, which then has no figure for them.
    measured = dict.fromkeys(t for o in outcomes for t in o.measured if "srcc" in o.measured[t])
    names += [t for t in measured if t not in (*names, "overall")]
    return [*((name, statistic) for name in names for statistic in MAIN_STATISTICS), (ANSWER, "accuracy")]


def _column(target: str, statistic: str) -> Column:
    if target == ANSWER:
        return Column("qa_accuracy", "Acc", "percent", "QA")
    return Column(f"{target}_{statistic}", LABELS[statistic], group=target.capitalize(), digits=4)


def _our_line(
    row: Row, outcomes: Sequence[Outcome], seeds: Sequence[int], targets: Sequence[tuple[str, str]]
) -> tuple[Cell, ...]:
    done = [o for o in outcomes if o.status == "done"]
    missing = [f"seed {o.seed}: {o.reason}" for o in outcomes if o.status == "failed"]
    missing += [f"seed {seed}: not run yet" for seed in seeds if seed not in {o.seed for o in outcomes}]
    cells = []
    for target, statistic in targets:
        found = [(o.seed, o.find(target, statistic)) for o in done]
        values = [m.value for _, m in found if m is not None and m.value is not None]
        gaps = [
            f"seed {seed}: {target} {statistic}: {'not computed' if m is None else m.reason}"
            for seed, m in found
            if m is None or m.value is None
        ]
        gaps += [
            f"seed {seed}: {target}: {m.n_scored} of {m.n_expected} edits scored"
            for seed, m in found
            if m is not None and m.value is not None and m.n_scored < m.n_expected and statistic in ("srcc", "accuracy")
        ]
        missing += gaps
        cells.append(seed_interval(values) if values else Cell(None, reason="; ".join(gaps or missing)))
    return (*_describe(row), Cell(len(done)), *cells, Cell("; ".join(missing)))


def _describe(row: Row) -> tuple[Cell, ...]:
    config: TrainConfig = row.stage2
    adapter = config.adapter
    towers = adapter.kind != "none"
    kind = _KINDS[adapter.kind]
    if adapter.ranks == "reallocate":
        kind += ", reallocated"
    return (
        Cell(row.label),
        Cell(OURS),
        Cell(Path(config.backbone.name_or_path).name),
        Cell(_mark(adapter.projector)),
        Cell(_mark(towers and adapter.vision)),
        Cell(_mark(towers and adapter.llm)),
        Cell(kind),
    )


def _paper_line(row: PaperRow, targets: Sequence[tuple[str, str]], ours: str) -> tuple[Cell, ...]:
    values = [row.values.get(target) for target in targets]
    return (
        Cell(f"Table 6, row {row.number}"),
        Cell(PAPER),
        Cell(row.backbone),
        Cell(_mark(row.projector)),
        Cell(_mark(row.vision)),
        Cell(_mark(row.llm)),
        Cell(row.adapter),
        Cell(None, reason="the paper does not say how many runs"),
        *(Cell(value, reason=None if value is not None else "not in the paper") for value in values),
        Cell(f"ours: {ours}" if ours else ""),
    )


def _mark(value: bool) -> str:
    return "✓" if value else ""


def _note(outcomes: Sequence[Outcome]) -> str:
    done = [o for o in outcomes if o.status == "done"]
    parts = [
        "Ours: mean over n seeds with its 95 % interval by Student's t (none of one seed). Paper: EBench-18K, section "
        "5.4, Table 6, which gives no intervals."
    ]
    if reasons := sorted({o.simulated for o in done if o.simulated}):
        parts.append(
            f"Our ratings are simulated ({reasons[0]}): the order of our rows can be compared with the paper's, the "
            "values cannot."
        )
    return " ".join(parts)
