"""`bireme plan` and `bireme profile`: find the fastest plan for a run; measure or estimate its model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import (
    Force,
    Fresh,
    Json,
    Like,
    PlanFile,
    ProfileFiles,
    RunToml,
    Sets,
    begin,
    check_plan_file,
    check_writable,
    print_json,
    profiled_run,
    refuse,
    say_written,
    show,
)
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.profile.profile import Profile, UnitProfile
    from bireme.report.plan_document import Explanation
    from bireme.train.plan_search import PlannedRun


output_option = partial(typer.Option, rich_help_panel="Output")


def plan(
    context: typer.Context,
    run_file: RunToml = None,
    set_: Sets = None,
    profile: ProfileFiles = None,
    like: Like = None,
    fresh: Fresh = False,
    file: PlanFile = None,
    explain: Annotated[
        bool,
        output_option(
            "--explain",
            help="Show what limits the best plans and what would help. Plans again for each change.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        output_option("--output", "--to", "-o", metavar="FILE.json", help="Write the plan to a file."),
    ] = None,
    force: Force = False,
    export: Annotated[
        list[str] | None,
        output_option(
            metavar="NAME[:FILE]",
            help="Export for torch-csv, torchtitan, nemo or megatron; prints it without a file. The plan "
            "counts messages as that framework sends them. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan that fits: where to cut a model, on which devices, with which schedule.

    It is the plan that `bireme train` makes from the same run file. With `--file` it is a plan of yours.

    [dim]bireme plan run.toml --set cluster.source=two-unequal-servers --explain[/dim]

    [dim]bireme plan run.toml --file plan.json[/dim]
    """
    if file is not None:
        refuse(context, "--file asks for the forecast of one plan, and nothing is searched", "explain")
    exports = _exports_of(export or ())
    if output is not None and output.suffix != ".json":
        raise BiremeError(
            f"A plan file must end in .json, and {output} does not. Name it {output.stem}.json."
        )
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
    run_file: RunToml = None,
    set_: Sets = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            "-b",
            min=1,
            help="Samples per micro-batch. Repeatable.",
            show_default="the sizes that the run may use",
        ),
    ] = None,
    like: Like = None,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves", help="Also measure the two halves of the backward, for zero-bubble schedules."
        ),
    ] = False,
    fresh: Fresh = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--to", "-o", metavar="FILE.json", help="Write the profile to a file."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure each unit of a model: seconds forward and backward, bytes kept and sent.

    [dim]bireme profile run.toml --batch 8[/dim]
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
