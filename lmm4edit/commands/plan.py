"""``lmm4edit plan``: what a training run will take, before a GPU is spent on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from lmm4edit.config import TrainConfig
    from lmm4edit.training.forecast import Forecast


def plan(
    config: Annotated[Path, typer.Option(help="Configuration of the run (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key.sub=value", help="Values that replace the configuration's.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.1, metavar="GIB", help="Memory of one GPU; warns if the run will not fit.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the launch, one a GPU.")] = 1,
    image_size: Annotated[
        str | None,
        typer.Option(metavar="WxH", help="Pixels of the images. Default: as many as the configuration allows."),
    ] = None,
    edits: Annotated[
        int | None, typer.Option(min=1, help="Number of training edits, where the manifest is not here.")
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(min=0.001, help="What a process achieves, in 10^12 operations a second. Default: assumed."),
    ] = None,
    levers: Annotated[
        bool, typer.Option("--levers", help="Show what would save memory, also if the run fits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict steps, trained parameters, memory and hours of a run. Loads no weights, needs no GPU and no network.

    Example:

        lmm4edit plan --config configs/ebench18k/stage1.yaml --gpu-memory 40 --edits 14688
        lmm4edit plan --config configs/ebench18k/stage1.yaml --gpu-memory 24 --processes 4 distributed.strategy=fsdp2
    """
    import math

    from lmm4edit.config import load_config

    for name, number in (("--gpu-memory", gpu_memory), ("--tflops", tflops)):
        if number is not None and not math.isfinite(number):
            raise typer.BadParameter(f"expected a finite number, got {number}.", param_hint=name)
    size = _size(image_size)
    loaded = load_config(config, overrides or [])
    # Only now: a mistake in the configuration is answered without loading torch.
    import warnings

    from lmm4edit.training.forecast import forecast

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        result = forecast(
            loaded,
            processes=processes,
            gpu_memory=gpu_memory,
            image_size=size,
            edits=edits,
            tflops=tflops,
            show_levers=levers,
        )
    if as_json:
        import json

        typer.echo(json.dumps(_as_json(result), indent=1))
        return
    from rich.console import Console

    _print(Console(highlight=False), loaded, result)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise typer.BadParameter(f"expected WIDTHxHEIGHT in pixels, such as 512x512, got {text!r}.")
    return int(width), int(height)


def _as_json(result: Forecast) -> dict[str, Any]:
    from dataclasses import asdict

    content = asdict(result)
    if result.plan is not None:
        content["plan"]["validation_steps"] = sorted(result.plan.validation_steps)
    for key, estimate in (("memory", result.memory), ("other_memory", result.other_memory)):
        content[key] |= {"peak": estimate.peak, "on_device": estimate.on_device}
    for entry, found in zip(content["levers"], result.levers, strict=True):
        entry["memory"] |= {"peak": found.memory.peak, "on_device": found.memory.on_device}
    return content | {"fits": result.fits}


def _print(console: Console, config: TrainConfig, result: Forecast) -> None:
    from rich.table import Table

    from lmm4edit.training.plan import render_plan

    if result.plan is not None:
        console.print(render_plan(config, result.plan, result.parameters, result.ranks))
    else:
        table = Table(title=f"Stage {config.stage}: {config.run_dir}", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for part, (trained, everything) in result.parameters.items():
            share = f" of {everything:,}" if everything != trained else ""
            table.add_row(f"trained: {part}", f"{trained:,}{share}" if trained else f"frozen ({everything:,})")
        table.add_row("trained: total", f"{sum(trained for trained, _ in result.parameters.values()):,}")
        console.print(table)
    console.print(_memory_table(config, result))
    _print_verdict(console, result)
    if result.levers:
        table = Table(title="Each of these alone", title_justify="left")
        for heading in ("change", "GiB in each process", "costs"):
            table.add_column(heading, justify="right" if "GiB" in heading else "left", overflow="fold")
        for found in result.levers:
            change = " ".join(found.lever.overrides)
            if found.processes != result.processes:
                change += f" (in {found.processes} processes)"
            fits = result.gpu_memory is not None and found.memory.on_device <= result.gpu_memory
            amount = _gib(found.memory.on_device) + (" fits" if fits else "")
            table.add_row(change, amount, found.lever.costs)
        console.print(table)
    flops = result.flops
    console.print(
        f"One edit: {result.tokens:,} tokens, {result.patches:,} patches, {flops.model / 1e12:.3g} TFLOP"
        + (f" and {flops.recomputed / 1e12:.3g} recomputed." if flops.recomputed else ".")
    )
    if result.hours is not None:
        console.print(
            f"Hours: {result.hours:.2g} in {result.processes} processes of {result.tflops:g} TFLOP/s each, without "
            "validation and saving."
        )
    for assumption in result.assumptions:
        console.print(f"Assumed: {assumption}.")


def _memory_table(config: TrainConfig, result: Forecast) -> Any:
    from rich.table import Table

    checkpointing = config.backbone.gradient_checkpointing
    table = Table(title=f"Memory of one process in GiB: {result.strategy}", title_justify="left")
    table.add_column("")
    table.add_column(f"as configured ({'with' if checkpointing else 'no'} gradient checkpointing)", justify="right")
    table.add_column(f"{'without' if checkpointing else 'with'} gradient checkpointing", justify="right")
    mine, other = result.memory.by_category(), result.other_memory.by_category()
    for name in mine:
        table.add_row(name.replace("_", " "), _gib(mine[name]), _gib(other[name]))
    table.add_section()
    for name in ("peak", "on_device"):
        title = {"peak": "peak of live tensors", "on_device": "with context and fragmentation"}[name]
        table.add_row(title, _gib(getattr(result.memory, name)), _gib(getattr(result.other_memory, name)))
    table.add_row("fullest in", result.memory.moment, result.other_memory.moment)
    return table


def _print_verdict(console: Console, result: Forecast) -> None:
    if result.gpu_memory is None:
        return
    needed, limit = _gib(result.memory.on_device), _gib(result.gpu_memory)
    if result.fits:
        console.print(f"Fits: {needed} of {limit} GiB.")
    else:
        console.print(f"[bold red]Warning:[/] this will not fit: {needed} GiB needed, {limit} GiB given.")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size >= 2**27 else f"{size / 2**30:.4f}"
