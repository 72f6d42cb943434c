"""``lmm4edit judge ...``: what can be done with a judge's checkpoint besides scoring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def judge() -> None:
    """Make judges out of what was trained elsewhere."""


@app.command("import")
def import_adapter(
    source: Annotated[Path, typer.Argument(help="Folder with adapter_config.json, or with one checkpoint-N.")],
    backbone: Annotated[str, typer.Option(help="The model it was trained on: a folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint.")],
    prompts: Annotated[str, typer.Option(help="Wording: a packaged prompt set or a YAML file.")] = "default",
    drop_head: Annotated[
        bool, typer.Option("--drop-head", help="Take the adapter although its score head cannot be taken over.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an older checkpoint at --out.")] = False,
) -> None:
    """Make an adapter trained elsewhere with PEFT into a judge that stage 2 can start from.

    Reads what PEFT, TRL, LLaMA-Factory and ms-swift write, and the paper's authors' later release. Every weight finds
    its place in the backbone or is named in an error; nothing is guessed.

    Example:

        lmm4edit judge import output/checkpoint-900 --backbone Qwen/Qwen2.5-VL-7B-Instruct --out runs/start
        accelerate launch train/stage2.py --config configs/ebench18k/stage2.yaml --init-from runs/start
    """
    from lmm4edit.errors import ConfigError
    from lmm4edit.judge.foreign_adapters import convert_adapter

    if out.exists() and not force:
        raise ConfigError(f"{out} is there already. Choose another --out, or add --force to replace it.")
    done = convert_adapter(source, backbone, out, prompts=prompts, drop_head=drop_head)
    parts = f"{done.matrices} matrices ({done.kind})" + (", the projector" if done.projector else "")
    typer.echo(f"{done.source}: {parts} taken; {done.renamed} found under another name. The judge is {out}.")
    for reason in done.left_out:
        typer.echo(f"left out: {reason}.")
    typer.echo("It answers in words at best. Train its score head: train/stage2.py --init-from " + str(out))
