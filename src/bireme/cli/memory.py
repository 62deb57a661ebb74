"""`bireme memory`: the memory of a training iteration, block by block."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.profile.behavior import Behavior
    from bireme.profile.swapping import Bandwidth


def memory(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="gpt:layers=8,width=256,…, hf:FOLDER, or file.py:function."),
    ],
    batch: Annotated[int, typer.Option("--batch", "-b", help="Samples per iteration.")] = 1,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence, if the model does not fix it.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer: adamw, adam or sgd (with momentum).")] = "adamw",
    warmup: Annotated[
        int,
        typer.Option(
            max=10_000,
            metavar="N",
            help="Iterations to run before tracing, such as the first, which creates the optimizer's state.",
        ),
    ] = 1,
    bandwidth: Annotated[
        str,
        typer.Option(
            metavar="OUT[,IN]",
            help="Bytes per second of the link for swapping: a number for both directions, or out,in.",
        ),
    ] = "12e9",
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:1.")] = "cpu",
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the lifetimes of all blocks to a .svg or .html file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Trace a training iteration: what the peak consists of, which blocks are idle, what could be swapped.

    [dim]bireme memory gpt:layers=4,width=128,heads=4,vocab=256,context=64 --batch 8[/dim]
    """
    from bireme.profile.swapping import page_blocks, plan_swaps
    from bireme.report.gantt import check_suffix

    link = _bandwidth(bandwidth)
    if picture is not None:
        check_suffix(picture)
    behavior = _behavior(model, batch=batch, length=length, optimizer=optimizer, warmup=warmup, device=device)
    alone, in_turn = plan_swaps(behavior, link), plan_swaps(behavior, link, in_turn=True)
    paging = page_blocks(behavior, link)
    title = f"{model}, batch {batch}, {optimizer}"
    if picture is not None:
        from bireme.report.gantt import write_gantt

        write_gantt(title, behavior, alone, picture)
    if as_json:
        from bireme.report.memory_document import memory_document

        asked = {"model": model, "batch": batch, "length": length, "optimizer": optimizer}
        print_json(asked | memory_document(behavior, alone, in_turn, paging))
        return
    from rich.console import Console

    from bireme.report.memory_table import print_memory

    console = Console()
    print_memory(title, behavior, alone, in_turn, paging, console)
    if picture is not None:
        console.print(f"\nWrote {picture}.", markup=False, highlight=False, soft_wrap=True)


def _bandwidth(text: str) -> "Bandwidth":
    from bireme.profile.swapping import Bandwidth

    try:
        ways = [float(part) for part in text.split(",")]
    except ValueError:
        ways = []
    if len(ways) not in (1, 2):
        raise BiremeError(
            f"--bandwidth is {text!r}; it must be one number of bytes per second, such as 12e9, or two "
            "separated by a comma, out and in."
        )
    return Bandwidth(ways[0], ways[-1])


def _behavior(
    model: str, *, batch: int, length: int | None, optimizer: str, warmup: int, device: str
) -> "Behavior":
    from bireme.devices import KINDS

    if device.partition(":")[0] not in KINDS:
        raise BiremeError(f"Memory can only be traced on {' or '.join(KINDS)}, but --device is {device!r}.")
    from bireme.model.sources import load_source
    from bireme.profile.trace import check_training, observe

    check_training(optimizer, warmup)
    source = load_source(model, batch=batch, length=length, device=device)
    return observe(source.model, source.example_inputs, optimizer=optimizer, warmup=warmup)
