"""Run `bireme place`: search, check, write, show."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.cli.options import print_json
from bireme.errors import BiremeError
from bireme.placement.check import PlacementVerdict, check
from bireme.placement.workload import Method, Objective, Request, Workload, device_names

if TYPE_CHECKING:
    from bireme.model.capture import Captures
    from bireme.model.sources import ModelSource
    from bireme.placement.of_model.from_model import ModelWorkload
    from bireme.placement.workload import Granularity, Placement
    from bireme.placement.workload_file import ReadWorkload, WrittenSplit
    from bireme.profile.profile import Profile


# `bireme place --model`: make a workload from a model, and a plan from its placement.


@dataclass(frozen=True, slots=True)
class Measuring:
    """What to measure: the model, the micro-batch size and the device."""

    model: str
    micro_batch: int
    length: int | None
    device: str
    like: str | None
    dtype: str
    optimizer: str
    fresh: bool

    def __post_init__(self) -> None:
        if self.micro_batch < 1:
            raise BiremeError(f"The batch is {self.micro_batch}; it must be at least 1.")

    def source(self) -> "ModelSource":
        """The model and its example inputs."""
        from bireme.model.sources import load_source

        return load_source(self.model, batch=self.micro_batch, length=self.length, dtype=self.dtype)


def _measured(asked: Measuring, source: "ModelSource", captures: "Captures", progress: Any) -> "Profile":
    """The profile of a model: measured here, or estimated for a device elsewhere."""
    from bireme.cluster.catalogue import device_named
    from bireme.model.weights import check_weights
    from bireme.profile.control import torch_device
    from bireme.profile.optimizers import check_optimizer
    from bireme.profile.profiler import profile

    check_optimizer(asked.optimizer)
    where = device_named(asked.like or "laptop") if asked.device == "meta" else torch_device(asked.device)
    if source.folder is not None and any(source.folder.glob("*.safetensors")):
        check_weights(captures.graph(asked.micro_batch), source.folder, model=source.model)
    return profile(
        captures.graph,
        where,
        [asked.micro_batch],
        examples=source.example_inputs,
        optimizer=asked.optimizer,
        use_cache=not asked.fresh,
        progress=progress,
    )


@dataclass(frozen=True, slots=True)
class ModelPlacing:
    """A model to place: its workload and its profile."""

    made: "ModelWorkload"
    profile: "Profile"

    @classmethod
    def of(
        cls,
        asked: Measuring,
        cluster: str | None,
        *,
        training: bool,
        granularity: "Granularity",
        devices: Sequence[str] = (),
        copies_tied: bool,
    ) -> "ModelPlacing":
        """Capture and measure the model, and find the devices."""
        from bireme.cluster.cluster_file import load_cluster
        from bireme.cluster.machine import discover
        from bireme.model.capture import Captures
        from bireme.placement.of_model.from_model import workload_of
        from bireme.report.terminal import progress_bar

        if cluster == "":
            raise BiremeError(
                "--cluster is empty. Give a file or the name of a ready cluster, or leave it out."
            )
        found = discover().cluster if cluster is None else load_cluster(cluster)
        source = asked.source()
        captures = Captures(source.model, source.example_inputs, name=asked.model)
        with progress_bar("capturing the model") as progress:
            profile = _measured(asked, source, captures, progress)
        micro_batch = asked.micro_batch
        made = workload_of(
            captures.graph(micro_batch),
            profile,
            found,
            micro_batch=micro_batch,
            training=training,
            granularity=granularity,
            devices=devices,
            copy_tied=copies_tied,
        )
        return cls(made, profile)


@dataclass(frozen=True, slots=True)
class OfModel:
    """What a model's placement yields besides its document: a plan file, on request."""

    placing: ModelPlacing
    plan: Path | None
    schedule: str
    num_microbatches: int | None

    def write(self, placement: "Placement") -> str:
        """Write the plan; return a sentence on what moving its cuts to unit boundaries changed."""
        if self.plan is None:
            return ""
        from bireme.placement.of_model.to_plan import plan_of
        from bireme.plan.plan_file import planned_units, write_plan

        placed = plan_of(
            self.placing.made,
            placement,
            num_microbatches=self.num_microbatches or 2 * len(set(placement.devices)),
            schedule=self.schedule,
            snapped=True,
        )
        write_plan(self.plan, placed.plan, planned_units(self.placing.profile))
        return placed.note

    def documented(self, document: dict[str, Any]) -> dict[str, Any]:
        """The placement's document, with the cluster's names of its devices and the unit of each node."""
        made = self.placing.made
        names = dict(zip(document["loads"], made.device_names, strict=True))
        units = dict(zip(document["assignment"], (made.unit_names[unit] for unit in made.units), strict=True))
        return document | {"devices": names, "units": units, "micro_batch": made.micro_batch}


NOTHING = 1e-12
"""Rounding error that a sum of zero may have."""

SAME = 1e-6
"""Values closer than this, relative to the larger, count as equal: only the order of sums differs."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files to write; None writes nothing."""

    output: Path | None
    split: Path | None
    picture: Path | None
    workload: Path | None = None


class PlaceRun:
    """A search for a placement, and its output."""

    def __init__(
        self,
        read: "ReadWorkload",
        objective: Objective | None,
        method: Method,
        *,
        contiguous: bool,
        num_pieces: int,
        expert: Path | None,
    ) -> None:
        self.workload = read.workload
        self.warnings = read.warnings
        _warn(self.warnings)
        split = None if expert is None else self._expert(expert, objective, contiguous, num_pieces)
        self.request = Request(
            objective=objective or _usual_objective(self.workload),
            method=method,
            contiguous=contiguous,
            num_pieces=num_pieces,
            expert=None if split is None else split.devices,
            expert_pieces=() if split is None else split.pieces,
        )

    def _expert(
        self, path: Path, objective: Objective | None, contiguous: bool, num_pieces: int
    ) -> "WrittenSplit":
        """An expert's split; it must keep all rules."""
        from bireme.placement.workload_file import read_split

        split = read_split(path, self.workload)
        verdict = check(
            self.workload,
            split.devices,
            objective or _usual_objective(self.workload),
            contiguous=contiguous,
            num_pieces=num_pieces,
            pieces=split.pieces or None,
        )
        if not verdict.valid:
            hint = " Pass --any to allow it." if contiguous and not verdict.contiguous else ""
            raise BiremeError(f"{path} breaks a rule. {verdict.problems[0]}{hint}")
        return split

    def search(self, time_limit_s: float | None, seed: int) -> None:
        """Find a placement and check it; a wrong one is a bug."""
        from time import perf_counter

        from bireme.placement.solve import solve
        from bireme.report.terminal import progress_bar

        self.request = replace(self.request, time_limit_s=time_limit_s, seed=seed)
        with progress_bar("placing") as progress:
            begin_s = perf_counter()
            self.placement = solve(self.workload, self.request, lambda what: progress(0.0, what))
            self.seconds = perf_counter() - begin_s
        self.verdict = _confirmed(self.workload, self.placement, self.request.num_pieces)

    def show(self, files: Files, *, as_json: bool, of_model: "OfModel | None" = None) -> None:
        """Write the files, then print."""
        from bireme.placement.pages.table import advice_on, placement_document, print_placement

        advice = advice_on(self.placement)
        moved = "" if of_model is None else of_model.write(self.placement)
        notes = [*self.warnings, *self.placement.notes, *filter(None, (advice, moved))]
        document = placement_document(self.workload, self.placement, self.verdict, self.seconds, notes)
        if of_model is not None:
            document = of_model.documented(document)
        self._write(files, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        if as_json:
            print_json(document)
            return
        from rich.console import Console

        print_placement(self.workload, self.placement, self.seconds, Console())
        if moved:
            typer.echo(moved)
        for path in (
            *(files.output, files.split, files.picture, files.workload),
            None if of_model is None else of_model.plan,
        ):
            if path is not None:
                typer.echo(f"Wrote {path}.")

    def _write(self, files: Files, document: str) -> None:
        if files.picture is not None:
            from bireme.placement.pages.picture import write_placement_picture

            write_placement_picture(self.workload, self.placement, files.picture)
        if files.workload is not None:
            from bireme.placement.workload_file import write_workload

            write_workload(files.workload, self.workload)
        if files.split is not None:
            from bireme.placement.workload_file import write_split

            write_split(files.split, self.workload, self.placement)
        if files.output is not None:
            from bireme.files import write_text_atomically

            write_text_atomically(files.output, document)


def check_split(
    read: "ReadWorkload",
    path: Path,
    objective: Objective | None,
    *,
    contiguous: bool,
    num_pieces: int,
    as_json: bool,
) -> bool:
    """Check a split in a file and print the verdict; whether every rule is kept."""
    from bireme.placement.workload_file import read_split

    workload = read.workload
    _warn(read.warnings)
    split = read_split(path, workload)
    aim = objective or split.objective or _usual_objective(workload)
    verdict = check(
        workload,
        split.devices,
        aim,
        contiguous=contiguous,
        num_pieces=num_pieces,
        pieces=split.pieces or None,
    )
    claimed = split.value if split.objective in (None, aim) else None
    if claimed is not None and not math.isclose(claimed, verdict.value, rel_tol=SAME):
        wrong = f"The file claims {claimed:.9g} for {aim}, but the placement has {verdict.value:.9g}."
        verdict = replace(verdict, problems=(*verdict.problems, wrong))
    if split.objective in (None, aim):
        wrong_loads = _wrong_loads(workload, split, verdict)
        verdict = replace(verdict, problems=(*verdict.problems, *wrong_loads))
    if as_json:
        from bireme.placement.pages.table import verdict_document

        print_json(verdict_document(workload, aim, verdict, claimed))
    else:
        from rich.console import Console

        from bireme.placement.pages.table import print_verdict

        pieces = split.pieces if aim is Objective.LATENCY else ()
        print_verdict(workload, split.devices, pieces, aim, verdict, Console())
    return verdict.valid


def _wrong_loads(workload: Workload, split: "WrittenSplit", verdict: PlacementVerdict) -> Iterator[str]:
    """A sentence for each device whose load is not what the file claims."""
    for name, claimed, load in zip(device_names(workload), split.loads, verdict.loads, strict=False):
        if not math.isclose(claimed, load, rel_tol=SAME, abs_tol=NOTHING):
            yield f"The file claims a load of {claimed:.9g} for {name}, but it is {load:.9g}."


def _confirmed(workload: Workload, placement: "Placement", num_pieces: int) -> PlacementVerdict:
    """The independent verdict on a solver's result, which must agree with the solver."""
    verdict = check(
        workload,
        placement.devices,
        placement.objective,
        contiguous=placement.contiguous,
        num_pieces=num_pieces,
        pieces=placement.pieces or None,
    )
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


def _warn(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        typer.echo(f"bireme: {warning}", err=True)
