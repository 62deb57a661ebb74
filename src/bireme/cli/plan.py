"""`bireme plan`, `profile`, `fit` and `memory`: the fastest plan for a run, and what its model costs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import (
    begin,
    check_plan_file,
    check_suffix,
    check_writable,
    print_json,
    profiled_run,
    refuse,
    say_written,
    show,
)
from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.profile.behavior import Behavior
    from bireme.profile.profile import Profile, UnitProfile
    from bireme.profile.swapping import Bandwidth
    from bireme.report.plan_document import Explanation
    from bireme.train.plan_search import PlannedRun
    from bireme.train.run_file import RunFile


def plan(
    context: typer.Context,
    run_file: Path | None = None,
    set_: list[str] | None = None,
    profile: list[str] | None = None,
    like: str | None = None,
    fresh: bool = False,
    file: Path | None = None,
    explain: bool = False,
    output: Path | None = None,
    force: bool = False,
    export: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Find the fastest plan that fits: where to cut a model, on which devices, with which schedule.

    It is the plan that `bireme train` makes from the same run file. With `--file` it is a plan of yours.

    [dim]bireme plan run.toml --set cluster.source=two-unequal-servers --explain[/dim]

    [dim]bireme plan run.toml --file plan.json[/dim]

    Output:
        explain: Show what limits the best plans and what would help. Plans again for each change.
        output (--output, --to, -o FILE.json): Write the plan to a file.
        export (NAME[:FILE]): Export for torch-csv, torchtitan, nemo or megatron; prints it without a file.
            The plan counts messages as that framework sends them. Repeatable.
    """
    if file is not None:
        refuse(context, "--file asks for the forecast of one plan, and nothing is searched", "explain")
    exports = _exports_of(export or ())
    check_suffix(output, "plan file", ".json")
    check_writable(output, *(one.path for one in exports), force=force)
    check_plan_file(file)
    profiled = profiled_run(context, run_file, set_, profiles=profile, like=like, is_fresh=fresh)
    _check_exports(exports, has_model=profiled.graph is not None)
    from bireme.plan.export import overlaps_of
    from bireme.report.terminal import progress_bar

    with progress_bar("planning") as progress:
        with_csv = any(one.name == "torch-csv" and one.path for one in exports)
        overlaps = overlaps_of([one.name for one in exports], with_csv=with_csv)
        planned = profiled.planned(progress, overlaps) if file is None else profiled.given(file, overlaps)
    texts = _export_texts(planned, exports)
    explanation = None
    if explain:
        planned, explanation = _explained(planned)
    _write(planned, output, exports, texts)
    if as_json:
        from bireme.report.plan_document import explanation_document

        more = {} if explanation is None else explanation_document(planned.answer, explanation)
        print_json(planned.document() | {"exports": texts} | more)
        return
    _show(planned, explanation, is_given=file is not None)
    for one in exports:
        if one.path is None:
            typer.echo(f"\n{texts[one.name]}", nl=False)
    say_written(output, *(one.path for one in exports))


def _explained(planned: "PlannedRun") -> "tuple[PlannedRun, Explanation]":
    """Plan again for each change; the answer then has also the plans that save memory in one way alone."""
    from bireme.plan.agreements import agreements
    from bireme.plan.explain import explain, with_single_ways
    from bireme.plan.search.draft_paging import stage_memory
    from bireme.plan.search.search import find_plan, find_resident
    from bireme.report.plan_document import Explanation
    from bireme.report.terminal import progress_bar

    asked = planned.profile, planned.cluster, planned.request
    answer, best = planned.answer, planned.answer.best
    with progress_bar("planning again") as progress:
        helps = explain(*asked, answer, partial(find_plan, advises=False), tell=progress)
    explanation = Explanation(helps, agreements(best, *asked), stage_memory(best.plan, *asked))
    return replace(planned, answer=with_single_ways(*asked, answer, find_resident)), explanation


def _show(planned: "PlannedRun", explanation: "Explanation | None", *, is_given: bool) -> None:
    from rich.console import Console

    from bireme.report.plan_table import print_explanation, print_plan

    console, answer = Console(highlight=False), planned.answer
    sums = planned.request.sums.codec
    print_plan(answer, planned.profile, planned.planning_s, console, sums=sums, is_given=is_given)
    if explanation is not None:
        print_explanation(answer, explanation, console)
    shown = answer.best.forecast.assumptions
    for note in planned.notes:
        if note in shown:
            continue
        console.print(f"\n{note}", style="yellow", markup=False)


# Files: the plan, and what it is exported to.


@dataclass(frozen=True, slots=True)
class _Export:
    """A requested export and its file; None to print it."""

    name: str
    path: Path | None


def _exports_of(texts: Iterable[str]) -> list[_Export]:
    """Reads `torch-csv:schedule.csv`, or `megatron` to print it."""
    from bireme.plan.export import export_named

    found = []
    for text in texts:
        name, colon, file = text.partition(":")
        export_named(name)
        if colon and not file:
            raise BiremeError(
                f"--export {text} names no file after the colon. Leave out the colon to print it."
            )
        found.append(_Export(name, Path(file) if file else None))
    return found


def _check_exports(exports: list[_Export], *, has_model: bool) -> None:
    """Refuse exports that need the model if there is a profile alone."""
    from bireme.plan.export import NEEDS_MODEL, export_named

    for export in exports:
        if export_named(export.name).needs_graph and not has_model:
            raise BiremeError(NEEDS_MODEL.format(export.name))


def _export_texts(planned: "PlannedRun", exports: list[_Export]) -> dict[str, str]:
    """Make all texts before writing any file, so that a refused export leaves no files."""
    from bireme.plan.export import Material, export_named
    from bireme.plan.plan_file import check_plan_fits, planned_units

    if planned.graph is not None and exports:
        check_plan_fits(planned.answer.origin, planned.graph, planned_units(planned.profile))
    csv = next((str(one.path) for one in exports if one.name == "torch-csv" and one.path), "")
    names = tuple(unit.name for unit in planned.profile.units)
    material = Material(planned.answer.best, names, planned.graph, csv)
    return {export.name: export_named(export.name).text(material) for export in exports}


def _write(planned: "PlannedRun", output: Path | None, exports: list[_Export], texts: dict[str, str]) -> None:
    from bireme.files import write_text_atomically
    from bireme.plan.plan_file import planned_units, write_plan

    if output is not None:
        write_plan(output, planned.answer, planned_units(planned.profile))
    for export in exports:
        if export.path is not None:
            write_text_atomically(export.path, texts[export.name])


# `bireme profile`: time and memory of every unit of a model, measured here or estimated for elsewhere.


def profile(
    context: typer.Context,
    run_file: Path | None = None,
    set_: list[str] | None = None,
    batch: Annotated[list[int] | None, {"min": 1, "show_default": "the sizes that the run may use"}] = None,
    like: str | None = None,
    halves: bool = False,
    fresh: bool = False,
    output: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure each unit of a model: seconds forward and backward, bytes kept and sent.

    [dim]bireme profile run.toml --batch 8[/dim]

    Options:
        batch (--batch, -b): Samples per micro-batch. Repeatable.
        halves: Also measure the two halves of the backward, for zero-bubble schedules.
        output (--output, --to, -o FILE.json): Write the profile to a file.
    """
    if like is not None:
        refuse(context, "--like estimates and does not measure", "fresh")
    check_writable(output, force=force)
    from bireme.report.terminal import progress_bar
    from bireme.train.captured_run import CapturedRun, micro_batches
    from bireme.train.folder import load_asked

    run = load_asked(run_file, set_ or ())
    sizes = batch or micro_batches(run)
    if like is None:
        begin()
    with progress_bar("capturing the model") as progress:
        captured = CapturedRun.of(run, progress, measures=like is None)
        if like is not None:
            found = captured.estimated(like, sizes, halves=halves)
        else:
            found = captured.measured(sizes, progress, halves=halves, is_fresh=fresh)
    if output is not None:
        from bireme.profile.profile import save_profile

        save_profile(found, output)
    from bireme.report.profile_table import print_profile

    show(partial(_document, found), partial(print_profile, found), as_json=as_json)
    if output is not None and not as_json:
        typer.echo(f"\nWrote {output}.")


def _document(found: "Profile") -> dict[str, Any]:
    from bireme.profile.profile import plain_profile

    plain = plain_profile(found)
    units = [_plain_unit(unit, own) for unit, own in zip(found.units, plain["units"], strict=True)]
    return plain | {"num_units": len(found.units), "units": units}


def _plain_unit(unit: "UnitProfile", plain: dict[str, Any]) -> dict[str, Any]:
    """A unit with its costs at all sizes and, separately, at the first."""
    first = unit.costs[0]
    return {
        "name": unit.name,
        "forward_s": first.forward_s,
        "backward_s": first.backward_s,
        "parameter_bytes": unit.parameter_bytes,
        "saved_bytes": first.saved_bytes,
        "boundary_bytes": first.boundary_bytes,
        "workspace_bytes": first.workspace_bytes,
        "same_as": unit.same_as,
        **{key: value for key, value in plain.items() if key not in ("name", "parameter_bytes", "same_as")},
    }


# `bireme fit`: whether a model fits machines, how fast it trains there, and what would help.


_DEFAULT_TOKENS = "100M"


def fit(
    model: str,
    machines: str = "",
    train: str = "full",
    length: Annotated[int | None, {"show_default": "4096, or the model's most"}] = None,
    batch: int = 16,
    tokens: str = _DEFAULT_TOKENS,
    within: Annotated[float, {"min": 0}] = 8.0,
    as_json: bool = False,
) -> None:
    """Answer whether a model fits machines, how fast it trains there, and what would help.

    Nothing is measured, and no weights and no GPU are needed.

    [dim]bireme fit llama-3-8b --train lora --machines "rtx3090, rtx4060-laptop, m3-max:64GB @ 1Gbit/s"[/dim]

    Arguments:
        model (MODEL): Built-in shape such as llama-3-8b, or a folder with a config.json.

    Options:
        machines ("NAME[:MEMORY][+HOST], … [@ LINK]"): Machines by the words of `bireme cluster devices`, such
            as "2x rtx3090+64GB, m3-max:64GB @ 1Gbit/s". MEMORY is that of each device itself, HOST that of
            the machine, for offloading.
        train (full|lora|qlora): Train all weights, or adapters of rank 16.
        length: Tokens of a sequence.
        batch (--batch, -b): Sequences of a batch.
        tokens (NUMBER): Tokens to count the hours for, such as 100M or 2e9.
        within: Seconds for the answer. Nothing new is tried after them.
    """
    from bireme.cluster.named_machines import machines_of
    from bireme.model.shapes import shape_of
    from bireme.plan.fit import FitQuestion
    from bireme.plan.fit import fit as answer
    from bireme.profile.shape_profile import TrainedShare
    from bireme.report.fit_table import fit_document, print_fit

    if train not in tuple(TrainedShare):
        raise BiremeError(f"There is no --train {train!r}. {closest(train, tuple(TrainedShare))}")
    num_tokens, shape = _number(tokens), shape_of(model)
    asked = min(4096, shape.context) if length is None else length
    question = FitQuestion(shape, machines_of(machines or _here()), TrainedShare(train), asked, batch)
    found = answer(question, within_s=within)
    show(partial(fit_document, found, num_tokens), partial(print_fit, found, num_tokens), as_json=as_json)


def _number(text: str) -> float:
    from bireme.bounds import bytes_of

    try:
        found = float(bytes_of(text.replace("B", "G").replace("b", "g"), "--tokens"))
    except BiremeError:
        found = 0.0
    if not 1 <= found <= 1e18:
        raise BiremeError(f"--tokens is {text!r}; write a number of tokens as 100M, 2B or 2e9.")
    return found


def _here() -> str:
    """This machine in words, if its GPUs are in the catalogue."""
    from bireme.cluster.catalogue import catalogued_as
    from bireme.cluster.machine import find_cuda_devices

    devices = find_cuda_devices().devices
    known = [catalogued_as(device.name) for device in devices]
    if not devices or any(one is None or one is not known[0] for one in known) or known[0] is None:
        raise BiremeError(
            "This machine has no GPUs of one kind that the catalogue knows. Name machines, such as "
            "--machines rtx3090; `bireme cluster devices` lists the names."
        )
    return f"{len(devices)}x {known[0].word}:{min(device.memory_bytes for device in devices)}"


# `bireme memory`: the memory of a training iteration, block by block.


def memory(
    run_file: Path | None = None,
    set_: list[str] | None = None,
    warmup: Annotated[int, {"max": 10_000}] = 1,
    bandwidth: str = "12e9",
    picture: Path | None = None,
    as_json: bool = False,
) -> None:
    """Trace a training iteration: what the peak consists of, which blocks are idle, what could be swapped.

    One process trains the whole model on training.batch_size samples.

    [dim]bireme memory run.toml --set training.batch_size=8[/dim]

    Options:
        warmup (N): Iterations to run before tracing, such as the first, which creates the optimizer's state.
        bandwidth (OUT[,IN]): Bytes per second of the link for swapping: a number for both directions, or
            out,in.
        picture (FILE): Draw the lifetimes of all blocks to a .svg or .html file.
    """
    from bireme.profile.swapping import page_blocks, plan_swaps
    from bireme.report.picture import GANTT, check_suffix
    from bireme.train.folder import load_asked

    link = _bandwidth(bandwidth)
    if picture is not None:
        check_suffix(picture, GANTT)
    run = load_asked(run_file, set_ or ())
    behavior = _behavior(run, warmup)
    alone, in_turn = plan_swaps(behavior, link), plan_swaps(behavior, link, in_turn=True)
    paging = page_blocks(behavior, link)
    model, batch, optimizer = run.model.source, run.training.batch_size, run.training.optimizer
    title = f"{model}, batch {batch}, {optimizer}"
    if picture is not None:
        from bireme.report.picture import write_gantt

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
