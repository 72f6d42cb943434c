"""``lmm4edit backbones``: which backbones a judge can stand on, and what is proven of each."""

from __future__ import annotations

from typing import Annotated

import typer


def backbones(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry a family.")] = False,
) -> None:
    """List the backbone families, the published checkpoints they fit, and what is proven of each here.

    Loads nothing, neither weights nor torch. Every proof is a test with a tiny random model of the family's real class;
    published weights were never loaded here.

    Example:

        lmm4edit backbones --json
    """
    if as_json:
        _print_json()
    else:
        _print_table()


def _print_json() -> None:
    import json
    from dataclasses import asdict

    from lmm4edit.judge.families import FAMILIES, NOT_PROVEN, PROOFS

    content = {
        "families": [asdict(family) for family in FAMILIES],
        "proofs": {claim: asdict(proof) for claim, proof in PROOFS.items()},
        "not_proven": NOT_PROVEN,
    }
    typer.echo(json.dumps(content, indent=1))


def _print_table() -> None:
    from rich.console import Console
    from rich.table import Table

    from lmm4edit.judge.families import FAMILIES, NOT_PROVEN, PROOFS

    console = Console(highlight=False)
    for family in FAMILIES:
        table = Table(title=f"{family.model_type}: {family.name}", title_justify="left", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        missing = [claim for claim in PROOFS if claim not in family.proven]
        packing = "all questions on an edit in one sequence" if family.packed else "fallback: one question a row"
        rows = [
            ("checkpoints", "\n".join(family.checkpoints)),
            ("licence", family.licence),
            ("packing", packing),
            ("adapters", family.adapters),
            ("images", family.images),
            ("proven here", f"{', '.join(family.proven)}; random model of {family.tested_parameters:,} parameters"),
            ("not proven", ", ".join([*missing, "published weights"])),
            ("note", family.caveats),
        ]
        for name, value in rows:
            if value:
                table.add_row(name, value)
        console.print(table)
    legend = Table(title="What is proven, and by which test", title_justify="left")
    for heading in ("proof", "shows", "test"):
        legend.add_column(heading, overflow="fold")
    for claim, proof in PROOFS.items():
        legend.add_row(claim, proof.shows, f"{proof.file}\n{proof.test}")
    console.print(legend)
    console.print(NOT_PROVEN)
