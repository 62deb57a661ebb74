"""`bireme place`: which device runs which operator of a graph with branches."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import check_writable, refuse, say_written, show
from bireme.errors import BiremeError, closest, tell
from bireme.placement.workload import (
    Granularity,
    Method,
    Objective,
    Placement,
    Request,
    Workload,
    device_names,
)

if TYPE_CHECKING:
    from bireme.model.graph import Graph
    from bireme.model.sources import ModelSource
    from bireme.placement.check import PlacementVerdict
    from bireme.placement.model import ModelWorkload
    from bireme.placement.workload_file import ReadWorkload, WrittenSplit
    from bireme.profile.profile import Profile


OF_A_SEARCH = ("method", "expert", "time_limit", "seed", "Output", "to", "workload_file")
"""Options, and a panel of them, that have no effect on a check."""

OF_A_MODEL = ("A model instead of a file", "Measuring")
"""Panels of options that need a model."""


# Options whose value is one of a few words: checked in one sentence, and completed by the shell.


def _word(what: str, *known: str) -> dict[str, Any]:
    """What makes an option of typer take one of these words, such as an enum's members.

    `what` is what to call it in an error. The words replace `{}` in the help text.
    """
    words = [str(one) for one in known]

    def parsed(value: str) -> str:
        if value not in words:
            raise BiremeError(f"There is no {what} {value!r}. {closest(value, words)}")
        return known[words.index(value)]

    def completed(incomplete: str) -> list[str]:
        return [one for one in words if one.startswith(incomplete)]

    return {
        "parser": parsed,
        "autocompletion": completed,
        "words": f"{', '.join(words[:-1])} or {words[-1]}",
    }


def place(
    context: typer.Context,
    workload: Path | None = None,
    objective: Annotated[Objective | None, _word("objective", *Objective)] = None,
    method: Annotated[Method, _word("method", *Method)] = Method.AUTO,
    contiguous: bool = True,
    time_limit: float | None = None,
    pieces: int = 1,
    seed: int = 0,
    expert: Path | None = None,
    check: Path | None = None,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory: float | None = None,
    model: str | None = None,
    cluster: str | None = None,
    micro_batch: int = 1,
    training: bool = True,
    granularity: Annotated[Granularity, _word("granularity", *Granularity)] = Granularity.OPERATORS,
    copy_tied: bool = True,
    workload_file: Path | None = None,
    to: Path | None = None,
    schedule: str = "2bw",
    microbatches: int | None = None,
    measure_on: str = "cpu",
    like: str | None = None,
    length: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    fresh: bool = False,
    output: Path | None = None,
    split: Path | None = None,
    picture: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Place the operators of a graph on accelerators and CPUs.

    [dim]bireme place examples/placement/branches.json --objective throughput[/dim]

    [dim]bireme place --model gpt:layers=4,width=128,heads=4,vocab=257,context=64 --to plan.json[/dim]

    Arguments:
        workload (WORKLOAD.json): Workload file: operators, edges and devices.

    What to look for:
        objective (GOAL): Time to minimize: {}; by default training if there are backward nodes, else
            throughput.
        method (METHOD): Search method: {}.
        contiguous (--contiguous/--any): Give each device one connected part of the graph, or allow any
            placement.
        time_limit (SECONDS): Time limit of the search.
        pieces: Parts that an accelerator may run in turn, for latency.
        seed: Seed of random methods.
        expert (FILE.json): Use this split unchanged.
        check (FILE.json): Check this split instead of searching.

    Devices, instead of the file's:
        accelerators: Number of accelerators.
        cpus: Number of CPUs.
        memory (BYTES): Memory of an accelerator.

    A model instead of a file:
        model (MODEL): Model to measure here, as in model.source.
        cluster (FILE.toml|NAME): Cluster with equal devices; by default this machine.
        micro_batch: Samples per micro-batch.
        training (--training/--inference): Place forward and backward, or only forward.
        granularity (PARTS): Parts that are placed: {}.
        copy_tied (--copy-tied/--bind-tied): Copy tied weights to every user, as in a pipeline, or keep their
            users on one device.
        workload_file (FILE.json): Write the model's workload to a file.
        to (FILE.json): Write the placement as a plan, with cuts moved to the nearest stage boundaries.
        schedule (--schedule, -s): Schedule of the plan.
        microbatches (--microbatches, -m): Micro-batches per batch of the plan; by default twice the stages.

    Measuring:
        measure_on: Device: cpu, cuda, cuda:1; meta estimates without running.
        like (NAME|FILE.json): Device to estimate for on meta, such as a100.
        length: Tokens per sequence, if the model does not fix it.
        dtype: Number format: float32, bfloat16, float16 or float64.
        optimizer: Optimizer: adamw, adam, muon or sgd (with momentum).
        fresh: Measure again, ignoring the cache.

    Output:
        output (--output, -o FILE.json): Write the JSON document to a file.
        split (FILE.json): Write the split in the published format.
        picture (FILE): Draw the placed graph to a file that ends in .svg, .png or .dot.
    """
    from bireme.placement.workload_file import DeviceCounts, ReadWorkload, read_workload

    if expert is not None and method is Method.AUTO:
        method = Method.EXPERT
    if (expert is not None) != (method is Method.EXPERT):
        raise BiremeError("--method expert and --expert FILE.json belong together: give both or neither.")
    if check is not None:
        refuse(context, "--check does not search", *OF_A_SEARCH)
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
        if micro_batch < 1:
            raise BiremeError(f"The batch is {micro_batch}; it must be at least 1.")
        if cluster == "":
            raise BiremeError(
                "--cluster is empty. Give a file or the name of a ready cluster, or leave it out."
            )
        from bireme.cluster.cluster_file import load_cluster
        from bireme.cluster.machine import discover
        from bireme.model.sources import load_source
        from bireme.placement.model import workload_of
        from bireme.profile.optimizers import check_optimizer

        machines = discover().cluster if cluster is None else load_cluster(cluster)
        source = load_source(model, batch=micro_batch, length=length, dtype=dtype)
        check_optimizer(optimizer)
        graph, costs = _measured(
            source, micro_batch, device=measure_on, like=like, optimizer=optimizer, fresh=fresh
        )
        about: dict[str, Any] = {"training": training, "granularity": granularity, "copy_tied": copy_tied}
        placed = PlacedModel(workload_of(graph, costs, machines, micro_batch=micro_batch, **about), costs)
        found = ReadWorkload(placed.made.workload, ())
    for warning in found.warnings:
        tell(warning)
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


def _measured(
    source: "ModelSource", batch: int, *, device: str, like: str | None, optimizer: str, fresh: bool
) -> "tuple[Graph, Profile]":
    """The captured model, and its costs: measured here, or estimated for a device."""
    from bireme.cluster.catalogue import device_named
    from bireme.model.capture import Captures
    from bireme.model.weights import check_weights
    from bireme.profile.control import torch_device
    from bireme.profile.profiler import profile
    from bireme.report.terminal import progress_bar

    captures = Captures(source.model, source.example_inputs, name=source.text)
    with progress_bar("capturing the model") as progress:
        where = device_named(like or "laptop") if device == "meta" else torch_device(device)
        if source.folder is not None and any(source.folder.glob("*.safetensors")):
            check_weights(captures.graph(batch), source.folder, model=source.model)
        asked: dict[str, Any] = {"optimizer": optimizer, "use_cache": not fresh}
        costs = profile(
            captures.graph, where, [batch], examples=source.example_inputs, progress=progress, **asked
        )
    return captures.graph(batch), costs


def _check_files(picture: Path | None, *documents: Path | None, force: bool) -> None:
    """Refuse files that cannot be written, before a long search."""
    from bireme.placement.picture import FORMATS, check_renderer

    for path in (picture, *documents):
        endings = FORMATS if path is picture else (".json",)
        if path is not None and path.suffix.lower() not in endings:
            raise BiremeError(f"{path} must end in {' or '.join(endings)}. Name such a file.")
    check_writable(picture, *documents, force=force)
    if picture is not None:
        check_renderer(picture)


# Run `bireme place`: search, check, write, show.


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model to place: what is measured, on which device, and then its workload and its profile."""

    made: "ModelWorkload"
    profile: "Profile"

    def write_plan(
        self, placement: Placement, path: Path, schedule: str, num_microbatches: int | None
    ) -> str:
        """Write the plan; return a sentence on what moving its cuts to unit boundaries changed."""
        from bireme.placement.model import plan_of
        from bireme.plan.plan_file import planned_units, write_plan

        placed = plan_of(
            self.made,
            placement,
            num_microbatches=num_microbatches or 2 * len(set(placement.devices)),
            schedule=schedule,
        )
        write_plan(path, placed.plan, planned_units(self.profile))
        return placed.note

    def documented(self, document: dict[str, Any]) -> dict[str, Any]:
        """The placement's document, with the cluster's names of its devices and the unit of each node."""
        made = self.made
        names = dict(zip(document["loads"], made.device_names, strict=True))
        units = dict(zip(document["assignment"], (made.unit_names[unit] for unit in made.units), strict=True))
        return document | {"devices": names, "units": units, "micro_batch": made.micro_batch}


NOTHING = 1e-12
"""Rounding error that a sum of zero may have."""

SAME = 1e-6
"""Values closer than this, relative to the larger, count as equal: only the order of sums differs."""


def request_of(workload: Workload, objective: Objective | None, expert: Path | None, **asked: Any) -> Request:
    """What to search for; the expert's split in a file must keep all rules."""
    from bireme.placement.workload_file import read_split

    aim = objective or _usual_objective(workload)
    if expert is None:
        return Request(objective=aim, **asked)
    split = read_split(expert, workload)
    contiguous, num_pieces = asked["contiguous"], asked["num_pieces"]
    verdict = _verdict(workload, split, aim, contiguous=contiguous, num_pieces=num_pieces)
    if not verdict.valid:
        hint = " Pass --any to allow it." if contiguous and not verdict.contiguous else ""
        raise BiremeError(f"{expert} breaks a rule. {verdict.problems[0]}{hint}")
    return Request(objective=aim, expert=split.devices, expert_pieces=split.pieces, **asked)


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Files to write; None writes nothing. A plan has a schedule and a number of micro-batches."""

    output: Path | None
    split: Path | None
    picture: Path | None
    workload: Path | None
    plan: Path | None
    schedule: str
    num_microbatches: int | None


def place_and_show(
    read: "ReadWorkload", request: Request, files: OutputFiles, model: PlacedModel | None, *, as_json: bool
) -> None:
    """Find a placement and check it, write the files, then print. A wrong placement is a bug."""
    from time import perf_counter

    from bireme.placement.solve import solve
    from bireme.placement.table import advice_on, placement_document, print_placement
    from bireme.report.terminal import progress_bar

    workload = read.workload
    with progress_bar("placing") as progress:
        begin_s = perf_counter()
        placement = solve(workload, request, lambda what: progress(0.0, what))
        seconds = perf_counter() - begin_s
    verdict = _confirmed(workload, placement, request.num_pieces)
    moved = ""
    if model is not None and files.plan is not None:
        moved = model.write_plan(placement, files.plan, files.schedule, files.num_microbatches)
    notes = [*read.warnings, *placement.notes, *filter(None, (advice_on(placement), moved))]
    document = placement_document(workload, placement, verdict, seconds, notes)
    if model is not None:
        document = model.documented(document)
    _write(workload, placement, files, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    show(lambda: document, partial(print_placement, workload, placement, seconds), as_json=as_json)
    if as_json:
        return
    if moved:
        typer.echo(moved)
    say_written(files.output, files.split, files.picture, files.workload, files.plan)


def _write(workload: Workload, placement: Placement, files: OutputFiles, document: str) -> None:
    from bireme.files import write_text_atomically
    from bireme.placement.picture import write_placement_picture
    from bireme.placement.workload_file import write_split, write_workload

    if files.picture is not None:
        write_placement_picture(workload, placement, files.picture)
    if files.workload is not None:
        write_workload(files.workload, workload)
    if files.split is not None:
        write_split(files.split, workload, placement)
    if files.output is not None:
        write_text_atomically(files.output, document)


def check_split(
    workload: Workload, path: Path, objective: Objective | None, rules: Mapping[str, Any], *, as_json: bool
) -> bool:
    """Check a split in a file by the `rules` of `check` and print the verdict; whether every rule is kept."""
    from bireme.placement.table import print_verdict, verdict_document
    from bireme.placement.workload_file import read_split

    split = read_split(path, workload)
    aim = objective or split.objective or _usual_objective(workload)
    verdict = _verdict(workload, split, aim, **rules)
    claimed = split.value if split.objective in (None, aim) else None
    if claimed is not None and not math.isclose(claimed, verdict.value, rel_tol=SAME):
        wrong = f"The file claims {claimed:.9g} for {aim}, but the placement has {verdict.value:.9g}."
        verdict = replace(verdict, problems=(*verdict.problems, wrong))
    if split.objective in (None, aim):
        loads = zip(device_names(workload), split.loads, verdict.loads, strict=False)
        wrong_loads = (
            f"The file claims a load of {own:.9g} for {name}, but it is {load:.9g}."
            for name, own, load in loads
            if not math.isclose(own, load, rel_tol=SAME, abs_tol=NOTHING)
        )
        verdict = replace(verdict, problems=(*verdict.problems, *wrong_loads))
    pieces = split.pieces if aim is Objective.LATENCY else ()
    show(
        partial(verdict_document, workload, aim, verdict, claimed),
        partial(print_verdict, workload, split.devices, pieces, aim, verdict),
        as_json=as_json,
    )
    return verdict.valid


def _verdict(
    workload: Workload, split: "Placement | WrittenSplit", objective: Objective, **rules: Any
) -> "PlacementVerdict":
    from bireme.placement.check import check

    return check(workload, split.devices, objective, pieces=split.pieces or None, **rules)


def _confirmed(workload: Workload, placement: Placement, num_pieces: int) -> "PlacementVerdict":
    """The independent verdict on a solver's result, which must agree with the solver."""
    aim, contiguous = placement.objective, placement.contiguous
    verdict = _verdict(workload, placement, aim, contiguous=contiguous, num_pieces=num_pieces)
    if not verdict.valid:
        raise RuntimeError(f"{placement.method} broke a rule: {' '.join(verdict.problems)}")
    if not math.isclose(verdict.value, placement.value, rel_tol=SAME, abs_tol=NOTHING):
        raise RuntimeError(
            f"{placement.method} reports {placement.value}, but the check gives {verdict.value}"
        )
    if placement.lower_bound > placement.value * (1 + SAME) + NOTHING:
        raise RuntimeError(
            f"{placement.method} found {placement.value} below its bound {placement.lower_bound}"
        )
    return verdict


def _usual_objective(workload: Workload) -> Objective:
    return Objective.TRAINING if workload.is_training else Objective.THROUGHPUT
