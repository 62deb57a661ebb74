"""`bireme place`: which device runs which operator of a graph that need not be a chain."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.measuring import DataType, Fresh, Length, Like, MeasureOn, Measuring, Optimizer
from bireme.cli.options import Json, check_writable, refuse
from bireme.cli.words import word
from bireme.errors import BiremeError
from bireme.placement.request import Granularity, Method
from bireme.placement.workload import Objective

if TYPE_CHECKING:
    from bireme.placement.workload_file import Counts, ReadWorkload

__all__ = ["place"]

devices_option = partial(typer.Option, rich_help_panel="Devices, in the place of the file's")
search_option = partial(typer.Option, rich_help_panel="What to look for")
output_option = partial(typer.Option, rich_help_panel="Output")
model_option = partial(typer.Option, rich_help_panel="A model in the place of a file")

OF_A_SEARCH = (
    "method",
    "expert",
    "time_limit",
    "seed",
    "picture",
    "output",
    "split",
    "plan",
    "workload_file",
)
"""The options that a check makes idle."""

OF_A_MODEL = (
    *("cluster", "micro_batch", "training", "granularity", "copy_tied", "workload_file", "plan"),
    *("schedule", "microbatches", "measure_on", "like", "length", "dtype", "optimizer", "fresh"),
)
"""The options that only a model has a use for."""


def place(
    context: typer.Context,
    workload: Annotated[
        Path | None,
        typer.Argument(metavar="WORKLOAD.json", help="The operators, their edges, and the devices."),
    ] = None,
    objective: Annotated[
        Objective | None,
        search_option(
            **word("objective", *Objective),
            help="What to make small; training if there are backward nodes, else throughput.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        Method,
        search_option(
            **word("method", *Method),
            help="How to look for it.",
        ),
    ] = Method.AUTO,
    contiguous: Annotated[
        bool,
        search_option(
            "--contiguous/--any",
            help="Each device runs one connected stretch of the graph, or whatever is best.",
        ),
    ] = True,
    time_limit: Annotated[
        float | None, search_option(metavar="SECONDS", help="Stop looking after so long.")
    ] = None,
    pieces: Annotated[int, search_option(help="Stretches an accelerator may run in turn, for latency.")] = 1,
    seed: Annotated[int, search_option(help="Of the methods that draw.")] = 0,
    expert: Annotated[
        Path | None, search_option(metavar="FILE.json", help="Take this split as it is.")
    ] = None,
    check: Annotated[
        Path | None, search_option(metavar="FILE.json", help="Look for nothing; check this split.")
    ] = None,
    accelerators: Annotated[int | None, devices_option(help="How many there are.")] = None,
    cpus: Annotated[int | None, devices_option(help="How many there are.")] = None,
    memory: Annotated[float | None, devices_option(metavar="BYTES", help="Of an accelerator.")] = None,
    model: Annotated[
        str | None, model_option(metavar="MODEL", help="As for `bireme profile`; measured here.")
    ] = None,
    cluster: Annotated[
        str | None,
        model_option(
            metavar="FILE.toml|NAME", help="The devices, which must be alike; this machine if left out."
        ),
    ] = None,
    micro_batch: Annotated[int, model_option(help="Samples of a micro-batch.")] = 1,
    training: Annotated[
        bool, model_option("--training/--inference", help="With backward, or without.")
    ] = True,
    granularity: Annotated[
        Granularity,
        model_option(
            **word("granularity", *Granularity),
            help="What is placed by itself.",
        ),
    ] = Granularity.OPERATORS,
    copy_tied: Annotated[
        bool,
        model_option(
            "--copy-tied/--bind-tied",
            help="Tied weights are copied to who uses them, as in a pipeline, or bind their users.",
        ),
    ] = True,
    workload_file: Annotated[
        Path | None, model_option(metavar="FILE.json", help="Write the workload of the model.")
    ] = None,
    plan: Annotated[
        Path | None,
        model_option(
            metavar="FILE.json",
            help="Write the plan that the placement comes to, cuts moved to the nearest borders of units.",
        ),
    ] = None,
    schedule: Annotated[str, model_option("--schedule", "-s", help="Of the plan.")] = "2bw",
    microbatches: Annotated[
        int | None, model_option("--microbatches", "-m", help="Of the plan; twice the stages if left out.")
    ] = None,
    measure_on: MeasureOn = "cpu",
    like: Like = None,
    length: Length = None,
    dtype: DataType = "float32",
    optimizer: Optimizer = "adamw",
    fresh: Fresh = False,
    output: Annotated[
        Path | None, output_option("--output", "-o", metavar="FILE.json", help="Write the document.")
    ] = None,
    split: Annotated[
        Path | None, output_option(metavar="FILE.json", help="Write the split in the published shape.")
    ] = None,
    picture: Annotated[
        Path | None, output_option(metavar="FILE.svg|FILE.png|FILE.dot", help="Draw the graph.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Place the operators of a graph on accelerators and CPUs.

    [dim]bireme place examples/placement/branches.json --objective throughput[/dim]

    [dim]bireme place --model gpt:layers=4,width=128,heads=4,vocab=257,context=64 --plan plan.json[/dim]
    """
    from bireme.cli.place_model import ModelPlacing, OfModel
    from bireme.placement.workload_file import Counts, ReadWorkload

    if expert is not None and method is Method.AUTO:
        method = Method.EXPERT
    if (expert is not None) != (method is Method.EXPERT):
        raise BiremeError("--method expert and --expert FILE.json go together: give both, or leave out both.")
    if check is not None:
        refuse(context, "--check looks for nothing", *OF_A_SEARCH)
    _check_files(picture, output, split, workload_file, plan)
    placing = None
    if model is None:
        refuse(context, "there is no --model", *OF_A_MODEL)
        found = _read(workload, Counts(accelerators, cpus, memory))
    else:
        if workload is not None:
            raise BiremeError(f"{workload} and --model {model} are two workloads. Leave out one of them.")
        refuse(context, "--cluster says what devices there are", "accelerators", "cpus", "memory")
        if measure_on != "meta":
            refuse(context, f"--measure-on {measure_on} is measured, not estimated", "like")
        placing = ModelPlacing.of(
            Measuring(
                model,
                [micro_batch],
                length=length,
                device=measure_on,
                like=like,
                dtype=dtype,
                optimizer=optimizer,
                fresh=fresh,
            ),
            cluster,
            training=training,
            granularity=granularity,
            copies_tied=copy_tied,
        )
        found = ReadWorkload(placing.made.workload, ())
    if check is not None:
        from bireme.cli.place_run import check_split

        is_kept = check_split(
            found, check, objective, contiguous=contiguous, num_pieces=pieces, as_json=as_json
        )
        if not is_kept:
            raise typer.Exit(2)
        return
    from bireme.cli.place_run import Files, PlaceRun

    run = PlaceRun(found, objective, method, contiguous=contiguous, num_pieces=pieces, expert=expert)
    run.search(time_limit, seed)
    files = Files(output, split, picture, workload_file)
    if placing is None:
        run.show(files, as_json=as_json)
    else:
        run.show(files, as_json=as_json, of_model=OfModel(placing, plan, schedule, microbatches))


def _read(path: Path | None, counts: "Counts") -> "ReadWorkload":
    from bireme.placement.workload_file import read_workload

    if path is None:
        raise BiremeError(
            "Name the file of a workload, or a model with --model. docs/placement.md says what a workload is."
        )
    return read_workload(path, counts)


def _check_files(picture: Path | None, *documents: Path | None) -> None:
    """Refuse files that could not be written, before a long search."""
    from bireme.placement.pages.picture import FORMATS, check_renderer

    for path in (picture, *documents):
        endings = FORMATS if path is picture else (".json",)
        if path is not None and path.suffix.lower() not in endings:
            raise BiremeError(f"{path} must end in {' or '.join(endings)}. Name such a file.")
    check_writable(picture, *documents)
    if picture is not None:
        check_renderer(picture)
