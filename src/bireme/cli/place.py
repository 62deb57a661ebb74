"""`bireme place`: which device runs which operator of a graph that need not be a chain."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.measuring import DataType, Fresh, Length, Like, MeasureOn, Measuring, Optimizer
from bireme.cli.options import Json, refuse
from bireme.cli.place_model import MODEL, Model
from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.placement.request import Method
    from bireme.placement.workload import Objective
    from bireme.placement.workload_file import Counts, ReadWorkload

__all__ = ["place"]

DEVICES = "Devices, in the place of the file's"
SEARCH = "What to look for"
OUTPUT = "Output"

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
        str | None,
        typer.Option(
            metavar="throughput|training|training-flush|latency",
            help="What to make small; training if there are backward nodes, else throughput.",
            show_default=False,
            rich_help_panel=SEARCH,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="auto|dp|dpl|milp|anneal|local-search|pipedream|greedy|single|expert",
            help="How to look for it.",
            rich_help_panel=SEARCH,
        ),
    ] = "auto",
    contiguous: Annotated[
        bool,
        typer.Option(
            "--contiguous/--any",
            help="Each device runs one connected stretch of the graph, or whatever is best.",
            rich_help_panel=SEARCH,
        ),
    ] = True,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Stop looking after so long.", rich_help_panel=SEARCH),
    ] = None,
    pieces: Annotated[
        int,
        typer.Option(help="Stretches an accelerator may run in turn, for latency.", rich_help_panel=SEARCH),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the methods that draw.", rich_help_panel=SEARCH)] = 0,
    expert: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Take this split as it is.", rich_help_panel=SEARCH),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Look for nothing; check this split.", rich_help_panel=SEARCH),
    ] = None,
    accelerators: Annotated[
        int | None, typer.Option(help="How many there are.", rich_help_panel=DEVICES)
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="How many there are.", rich_help_panel=DEVICES)] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="BYTES", help="Of an accelerator.", rich_help_panel=DEVICES)
    ] = None,
    model: Model = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.toml|NAME",
            help="The devices, which must be alike; this machine if left out.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="Samples of a micro-batch.", rich_help_panel=MODEL)] = 1,
    training: Annotated[
        bool, typer.Option("--training/--inference", help="With backward, or without.", rich_help_panel=MODEL)
    ] = True,
    granularity: Annotated[
        str,
        typer.Option(metavar="operators|units", help="What is placed by itself.", rich_help_panel=MODEL),
    ] = "operators",
    copy_tied: Annotated[
        bool,
        typer.Option(
            "--copy-tied/--bind-tied",
            help="Tied weights are copied to who uses them, as in a pipeline, or bind their users.",
            rich_help_panel=MODEL,
        ),
    ] = True,
    workload_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the workload of the model.", rich_help_panel=MODEL),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the plan that the placement comes to, cuts moved to the nearest borders of units.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", "-s", help="Of the plan.", rich_help_panel=MODEL)
    ] = "2bw",
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches", "-m", help="Of the plan; twice the stages if left out.", rich_help_panel=MODEL
        ),
    ] = None,
    measure_on: MeasureOn = "cpu",
    like: Like = None,
    length: Length = None,
    dtype: DataType = "float32",
    optimizer: Optimizer = "adamw",
    fresh: Fresh = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.json", help="Write the document.", rich_help_panel=OUTPUT
        ),
    ] = None,
    split: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write the split in the published shape.", rich_help_panel=OUTPUT
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|FILE.png|FILE.dot", help="Draw the graph.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place the operators of a graph on accelerators and CPUs.

    [dim]bireme place examples/placement/branches.json --objective throughput[/dim]

    [dim]bireme place --model gpt:layers=4,width=128,heads=4,vocab=257,context=64 --plan plan.json[/dim]
    """
    from bireme.cli.place_model import ModelPlacing, OfModel, granularity_of
    from bireme.placement.workload_file import Counts, ReadWorkload

    chosen = _method(method, expert)
    if check is not None:
        refuse(context, "--check looks for nothing", *OF_A_SEARCH)
    _check_files(picture, output, split, workload_file, plan)
    aim = _objective(objective)
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
            granularity=granularity_of(granularity),
            copies_tied=copy_tied,
        )
        found = ReadWorkload(placing.made.workload, ())
    if check is not None:
        from bireme.cli.place_run import check_split

        is_kept = check_split(found, check, aim, contiguous=contiguous, num_pieces=pieces, as_json=as_json)
        if not is_kept:
            raise typer.Exit(2)
        return
    from bireme.cli.place_run import Files, PlaceRun

    run = PlaceRun(found, aim, chosen, contiguous=contiguous, num_pieces=pieces, expert=expert)
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


def _objective(text: str | None) -> "Objective | None":
    from bireme.placement.workload import Objective

    if text is None:
        return None
    known = [objective.value for objective in Objective]
    if text not in known:
        raise BiremeError(f"There is no objective {text!r}. {closest(text, known)}")
    return Objective(text)


def _method(text: str, expert: Path | None) -> "Method":
    """The method asked for; who brings an expert's split and names none means that one."""
    from bireme.placement.request import Method

    known = [method.value for method in Method]
    if text not in known:
        raise BiremeError(f"There is no method {text!r}. {closest(text, known)}")
    found = Method(text)
    if expert is not None and found is Method.AUTO:
        return Method.EXPERT
    if (expert is not None) != (found is Method.EXPERT):
        raise BiremeError("--method expert and --expert FILE.json go together: give both, or leave out both.")
    return found


def _check_files(picture: Path | None, *documents: Path | None) -> None:
    """Refuse files that could not be written, before a long search."""
    from bireme.placement.pages.picture import FORMATS, check_renderer

    given = [path for path in (picture, *documents) if path is not None]
    for path in given:
        endings = FORMATS if path is picture else (".json",)
        if path.suffix.lower() not in endings:
            raise BiremeError(f"{path} must end in {' or '.join(endings)}. Name such a file.")
        if path.is_dir():
            raise BiremeError(f"{path} cannot be written: it is a folder. Name a file in it.")
        if not path.resolve().parent.is_dir():
            raise BiremeError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    if picture is not None:
        check_renderer(picture)
    if len({path.resolve() for path in given}) < len(given):
        raise BiremeError("Two of the files to write are the same one. Give each a name of its own.")
