"""`bireme place`: which device runs which operator of a graph with branches."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from bireme.cli.options import Force, Json, check_writable, refuse
from bireme.errors import BiremeError, closest
from bireme.placement.workload import Granularity, Method, Objective

devices_option = partial(typer.Option, rich_help_panel="Devices, instead of the file's")
search_option = partial(typer.Option, rich_help_panel="What to look for")
output_option = partial(typer.Option, rich_help_panel="Output")
measuring_option = partial(typer.Option, rich_help_panel="Measuring")
model_option = partial(typer.Option, rich_help_panel="A model instead of a file")

_BASELINES = {
    baseline: f"The method {baseline} is a baseline for comparison, and benchmarks/placement.py in Bireme's "
    f"source measures it. Use --method {method}, or leave out the method."
    for baseline, method in {
        "local-search": Method.ANNEAL,
        "pipedream": Method.DPL,
        "single": Method.GREEDY,
    }.items()
}
"""Methods that the command no longer has, and how it refuses them."""

OF_A_SEARCH = (
    "method",
    "expert",
    "time_limit",
    "seed",
    "picture",
    "output",
    "split",
    "to",
    "workload_file",
)
"""Options that have no effect on a check."""

OF_A_MODEL = (
    *("cluster", "micro_batch", "training", "granularity", "copy_tied", "workload_file", "to"),
    *("schedule", "microbatches", "measure_on", "like", "length", "dtype", "optimizer", "fresh"),
)
"""Options that need a model."""


# Options whose value is one of a few words: checked in one sentence, and completed by the shell.


def _word(
    what: str, *known: str, metavar: str, text: str, gone: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """What makes an option of typer take one of these words, such as an enum's members.

    `what` is what to call it in an error. The words replace `{}` in the help text. `gone` has words that are
    no longer taken, each with the sentence that refuses it.
    """
    words = [str(one) for one in known]

    def parsed(value: str) -> str:
        if value in gone:
            raise BiremeError(gone[value])
        if value not in words:
            raise BiremeError(f"There is no {what} {value!r}. {closest(value, words)}")
        return known[words.index(value)]

    def completed(incomplete: str) -> list[str]:
        return [one for one in words if one.startswith(incomplete)]

    listed = f"{', '.join(words[:-1])} or {words[-1]}"
    return {
        "parser": parsed,
        "autocompletion": completed,
        "metavar": metavar,
        "help": text.format(listed),
    }


def place(
    context: typer.Context,
    workload: Annotated[
        Path | None,
        typer.Argument(metavar="WORKLOAD.json", help="Workload file: operators, edges and devices."),
    ] = None,
    objective: Annotated[
        Objective | None,
        search_option(
            **_word(
                "objective",
                *Objective,
                metavar="GOAL",
                text="Time to minimize: {}; by default training if there are backward nodes, else "
                "throughput.",
            ),
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        Method,
        search_option(
            **_word("method", *Method, metavar="METHOD", text="Search method: {}.", gone=_BASELINES),
        ),
    ] = Method.AUTO,
    contiguous: Annotated[
        bool,
        search_option(
            "--contiguous/--any",
            help="Give each device one connected part of the graph, or allow any placement.",
        ),
    ] = True,
    time_limit: Annotated[
        float | None, search_option(metavar="SECONDS", help="Time limit of the search.")
    ] = None,
    pieces: Annotated[int, search_option(help="Parts that an accelerator may run in turn, for latency.")] = 1,
    seed: Annotated[int, search_option(help="Seed of random methods.")] = 0,
    expert: Annotated[
        Path | None, search_option(metavar="FILE.json", help="Use this split unchanged.")
    ] = None,
    check: Annotated[
        Path | None, search_option(metavar="FILE.json", help="Check this split instead of searching.")
    ] = None,
    accelerators: Annotated[int | None, devices_option(help="Number of accelerators.")] = None,
    cpus: Annotated[int | None, devices_option(help="Number of CPUs.")] = None,
    memory: Annotated[float | None, devices_option(metavar="BYTES", help="Memory of an accelerator.")] = None,
    model: Annotated[
        str | None, model_option(metavar="MODEL", help="Model to measure here, as in model.source.")
    ] = None,
    cluster: Annotated[
        str | None,
        model_option(metavar="FILE.toml|NAME", help="Cluster with equal devices; by default this machine."),
    ] = None,
    micro_batch: Annotated[int, model_option(help="Samples per micro-batch.")] = 1,
    training: Annotated[
        bool, model_option("--training/--inference", help="Place forward and backward, or only forward.")
    ] = True,
    granularity: Annotated[
        Granularity,
        model_option(
            **_word("granularity", *Granularity, metavar="PARTS", text="Parts that are placed: {}."),
        ),
    ] = Granularity.OPERATORS,
    copy_tied: Annotated[
        bool,
        model_option(
            "--copy-tied/--bind-tied",
            help="Copy tied weights to every user, as in a pipeline, or keep their users on one device.",
        ),
    ] = True,
    workload_file: Annotated[
        Path | None, model_option(metavar="FILE.json", help="Write the model's workload to a file.")
    ] = None,
    to: Annotated[
        Path | None,
        model_option(
            "--to",
            metavar="FILE.json",
            help="Write the placement as a plan, with cuts moved to the nearest stage boundaries.",
        ),
    ] = None,
    plan: Annotated[Path | None, model_option("--plan", hidden=True)] = None,
    schedule: Annotated[str, model_option("--schedule", "-s", help="Schedule of the plan.")] = "2bw",
    microbatches: Annotated[
        int | None,
        model_option(
            "--microbatches", "-m", help="Micro-batches per batch of the plan; by default twice the stages."
        ),
    ] = None,
    measure_on: Annotated[
        str, measuring_option(help="Device: cpu, cuda, cuda:1; meta estimates without running.")
    ] = "cpu",
    like: Annotated[
        str | None,
        measuring_option(metavar="NAME|FILE.json", help="Device to estimate for on meta, such as a100."),
    ] = None,
    length: Annotated[
        int | None, measuring_option(help="Tokens per sequence, if the model does not fix it.")
    ] = None,
    dtype: Annotated[
        str, measuring_option(help="Number format: float32, bfloat16, float16 or float64.")
    ] = "float32",
    optimizer: Annotated[
        str, measuring_option(help="Optimizer: adamw, adam, muon or sgd (with momentum).")
    ] = "adamw",
    fresh: Annotated[bool, measuring_option("--fresh", help="Measure again, ignoring the cache.")] = False,
    output: Annotated[
        Path | None,
        output_option("--output", "-o", metavar="FILE.json", help="Write the JSON document to a file."),
    ] = None,
    split: Annotated[
        Path | None, output_option(metavar="FILE.json", help="Write the split in the published format.")
    ] = None,
    picture: Annotated[
        Path | None,
        output_option(
            metavar="FILE", help="Draw the placed graph to a file that ends in .svg, .png or .dot."
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Place the operators of a graph on accelerators and CPUs.

    [dim]bireme place examples/placement/branches.json --objective throughput[/dim]

    [dim]bireme place --model gpt:layers=4,width=128,heads=4,vocab=257,context=64 --to plan.json[/dim]
    """
    from bireme.cli.place_run import OutputFiles, PlacedModel, check_split, place_and_show, request_of
    from bireme.placement.workload_file import DeviceCounts, ReadWorkload, read_workload

    if expert is not None and method is Method.AUTO:
        method = Method.EXPERT
    if (expert is not None) != (method is Method.EXPERT):
        raise BiremeError("--method expert and --expert FILE.json belong together: give both or neither.")
    if check is not None:
        refuse(context, "--check does not search", *OF_A_SEARCH)
    if plan is not None:
        raise BiremeError(f"place writes a plan and reads none: for --plan {plan}, say --to {plan}.")
    _check_files(picture, output, split, workload_file, to, force=force)
    placed = None
    if model is None:
        refuse(context, "there is no --model", *OF_A_MODEL)
        if workload is None:
            raise BiremeError(
                "Name a workload file, or a model with --model. docs/placement.md explains workload files."
            )
        found = read_workload(workload, DeviceCounts(accelerators, cpus, memory))
    else:
        if workload is not None:
            raise BiremeError(f"{workload} and --model {model} both name a workload. Leave out one of them.")
        refuse(context, "--cluster already names the devices", "accelerators", "cpus", "memory")
        if measure_on != "meta":
            refuse(context, f"--measure-on {measure_on} measures and does not estimate", "like")
        placed = PlacedModel.of(
            model,
            cluster,
            micro_batch=micro_batch,
            length=length,
            device=measure_on,
            like=like,
            dtype=dtype,
            optimizer=optimizer,
            fresh=fresh,
            training=training,
            granularity=granularity,
            copy_tied=copy_tied,
        )
        found = ReadWorkload(placed.made.workload, ())
    for warning in found.warnings:
        typer.echo(f"bireme: {warning}", err=True)
    if check is not None:
        rules = {"contiguous": contiguous, "num_pieces": pieces}
        if not check_split(found.workload, check, objective, rules, as_json=as_json):
            raise typer.Exit(2)
        return
    request = request_of(
        found.workload,
        objective,
        expert,
        method=method,
        contiguous=contiguous,
        num_pieces=pieces,
        time_limit_s=time_limit,
        seed=seed,
    )
    files = OutputFiles(output, split, picture, workload_file, to, schedule, microbatches)
    place_and_show(found, request, files, placed, as_json=as_json)


def _check_files(picture: Path | None, *documents: Path | None, force: bool) -> None:
    """Refuse files that cannot be written, before a long search."""
    from bireme.placement.pages.picture import FORMATS, check_renderer

    for path in (picture, *documents):
        endings = FORMATS if path is picture else (".json",)
        if path is not None and path.suffix.lower() not in endings:
            raise BiremeError(f"{path} must end in {' or '.join(endings)}. Name such a file.")
    check_writable(picture, *documents, force=force)
    if picture is not None:
        check_renderer(picture)
