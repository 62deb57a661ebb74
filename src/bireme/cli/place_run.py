"""Run `bireme place`: search, check, write, show."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.cli.options import print_json, say_written
from bireme.errors import BiremeError
from bireme.placement.check import PlacementVerdict, check
from bireme.placement.workload import Objective, Request, Workload, device_names

if TYPE_CHECKING:
    from bireme.placement.of_model.from_model import ModelWorkload
    from bireme.placement.workload import Granularity, Placement
    from bireme.placement.workload_file import ReadWorkload, WrittenSplit
    from bireme.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model to place: what is measured, on which device, and then its workload and its profile."""

    made: "ModelWorkload"
    profile: "Profile"

    @classmethod
    def of(
        cls,
        model: str,
        cluster: str | None,
        *,
        micro_batch: int,
        length: int | None,
        device: str,
        like: str | None,
        dtype: str,
        optimizer: str,
        fresh: bool,
        training: bool,
        granularity: "Granularity",
        copy_tied: bool,
    ) -> "PlacedModel":
        """Capture a model, find the devices, and measure the model here or estimate it for a device."""
        from bireme.cluster.catalogue import device_named
        from bireme.cluster.cluster_file import load_cluster
        from bireme.cluster.machine import discover
        from bireme.model.capture import Captures
        from bireme.model.sources import load_source
        from bireme.model.weights import check_weights
        from bireme.placement.of_model.from_model import workload_of
        from bireme.profile.control import torch_device
        from bireme.profile.optimizers import check_optimizer
        from bireme.profile.profiler import profile
        from bireme.report.terminal import progress_bar

        if micro_batch < 1:
            raise BiremeError(f"The batch is {micro_batch}; it must be at least 1.")
        if cluster == "":
            raise BiremeError(
                "--cluster is empty. Give a file or the name of a ready cluster, or leave it out."
            )
        found = discover().cluster if cluster is None else load_cluster(cluster)
        source = load_source(model, batch=micro_batch, length=length, dtype=dtype)
        captures = Captures(source.model, source.example_inputs, name=model)
        with progress_bar("capturing the model") as progress:
            check_optimizer(optimizer)
            where = device_named(like or "laptop") if device == "meta" else torch_device(device)
            if source.folder is not None and any(source.folder.glob("*.safetensors")):
                check_weights(captures.graph(micro_batch), source.folder, model=source.model)
            costs = profile(
                captures.graph,
                where,
                [micro_batch],
                examples=source.example_inputs,
                optimizer=optimizer,
                use_cache=not fresh,
                progress=progress,
            )
        made = workload_of(
            captures.graph(micro_batch),
            costs,
            found,
            micro_batch=micro_batch,
            training=training,
            granularity=granularity,
            copy_tied=copy_tied,
        )
        return cls(made, costs)

    def write_plan(
        self, placement: "Placement", path: Path, schedule: str, num_microbatches: int | None
    ) -> str:
        """Write the plan; return a sentence on what moving its cuts to unit boundaries changed."""
        from bireme.placement.of_model.to_plan import plan_of
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

    from bireme.placement.pages.table import advice_on, placement_document, print_placement
    from bireme.placement.solve import solve
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
    if as_json:
        print_json(document)
        return
    from rich.console import Console

    print_placement(workload, placement, seconds, Console())
    if moved:
        typer.echo(moved)
    say_written(files.output, files.split, files.picture, files.workload, files.plan)


def _write(workload: Workload, placement: "Placement", files: OutputFiles, document: str) -> None:
    from bireme.files import write_text_atomically
    from bireme.placement.pages.picture import write_placement_picture
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
    workload: Workload,
    path: Path,
    objective: Objective | None,
    rules: Mapping[str, Any],
    *,
    as_json: bool,
) -> bool:
    """Check a split in a file by the `rules` of `check` and print the verdict; whether every rule is kept."""
    from bireme.placement.pages.table import print_verdict, verdict_document
    from bireme.placement.workload_file import read_split

    split = read_split(path, workload)
    aim = objective or split.objective or _usual_objective(workload)
    verdict = _verdict(workload, split, aim, **rules)
    claimed = split.value if split.objective in (None, aim) else None
    if claimed is not None and not math.isclose(claimed, verdict.value, rel_tol=SAME):
        wrong = f"The file claims {claimed:.9g} for {aim}, but the placement has {verdict.value:.9g}."
        verdict = replace(verdict, problems=(*verdict.problems, wrong))
    if split.objective in (None, aim):
        wrong_loads = _wrong_loads(workload, split, verdict)
        verdict = replace(verdict, problems=(*verdict.problems, *wrong_loads))
    if as_json:
        print_json(verdict_document(workload, aim, verdict, claimed))
    else:
        from rich.console import Console

        pieces = split.pieces if aim is Objective.LATENCY else ()
        print_verdict(workload, split.devices, pieces, aim, verdict, Console())
    return verdict.valid


def _verdict(
    workload: Workload,
    split: "Placement | WrittenSplit",
    objective: Objective,
    **rules: Any,
) -> PlacementVerdict:
    return check(workload, split.devices, objective, pieces=split.pieces or None, **rules)


def _wrong_loads(workload: Workload, split: "WrittenSplit", verdict: PlacementVerdict) -> Iterator[str]:
    """A sentence for each device whose load is not what the file claims."""
    for name, claimed, load in zip(device_names(workload), split.loads, verdict.loads, strict=False):
        if not math.isclose(claimed, load, rel_tol=SAME, abs_tol=NOTHING):
            yield f"The file claims a load of {claimed:.9g} for {name}, but it is {load:.9g}."


def _confirmed(workload: Workload, placement: "Placement", num_pieces: int) -> PlacementVerdict:
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
