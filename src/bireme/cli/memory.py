"""`bireme memory`: the memory of a training iteration, block by block."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, RunToml, Sets, show
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.profile.behavior import Behavior
    from bireme.profile.swapping import Bandwidth
    from bireme.train.run_file import RunFile


def memory(
    run_file: RunToml = None,
    set_: Sets = None,
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
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the lifetimes of all blocks to a .svg or .html file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Trace a training iteration: what the peak consists of, which blocks are idle, what could be swapped.

    One process trains the whole model on training.batch_size samples.

    [dim]bireme memory run.toml --set training.batch_size=8[/dim]
    """
    from bireme.profile.swapping import page_blocks, plan_swaps
    from bireme.report.gantt import check_suffix
    from bireme.train.folder import load_asked

    link = _bandwidth(bandwidth)
    if picture is not None:
        check_suffix(picture)
    run = load_asked(run_file, set_ or ())
    behavior = _behavior(run, warmup)
    alone, in_turn = plan_swaps(behavior, link), plan_swaps(behavior, link, in_turn=True)
    paging = page_blocks(behavior, link)
    model, batch, optimizer = run.model.source, run.training.batch_size, run.training.optimizer
    title = f"{model}, batch {batch}, {optimizer}"
    if picture is not None:
        from bireme.report.gantt import write_gantt

        write_gantt(title, behavior, alone, picture)
    from bireme.report.profile_table import memory_document, print_memory

    asked = {"model": model, "batch": batch, "length": run.data.length, "optimizer": optimizer}
    found = behavior, alone, in_turn, paging
    show(lambda: asked | memory_document(*found), partial(print_memory, title, *found), as_json=as_json)
    if picture is not None and not as_json:
        typer.echo(f"\nWrote {picture}.")


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


def _behavior(run: "RunFile", warmup: int) -> "Behavior":
    from bireme.devices import ACCELERATOR, num_accelerators
    from bireme.model.sources import load_source
    from bireme.profile.trace import check_training, observe

    optimizer, asked = run.training.optimizer, run.cluster.device
    check_training(optimizer, warmup)
    if run.model.frozen_dtype is not None:
        raise BiremeError(
            f'model.frozen_dtype is "{run.model.frozen_dtype}", and this command runs the model with all its '
            "weights in model.dtype. Leave model.frozen_dtype out here; `bireme plan` counts it."
        )
    here = ACCELERATOR if num_accelerators() else "cpu"
    source = load_source(
        run.model.source,
        batch=run.training.batch_size,
        length=run.data.length,
        device=asked if asked in ("cpu", ACCELERATOR) else here,
        dtype=run.model.dtype,
        part=run.model.part,
        seed=run.model.seed,
    )
    return observe(source.model, source.example_inputs, optimizer=optimizer, warmup=warmup)
