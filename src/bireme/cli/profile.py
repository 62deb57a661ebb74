"""`bireme profile`: time and memory of every unit of a model, measured here or estimated for elsewhere."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import (
    Force,
    Fresh,
    Json,
    Like,
    RunToml,
    Sets,
    begin,
    check_writable,
    refuse,
    show,
)

if TYPE_CHECKING:
    from bireme.profile.profile import Profile, UnitProfile


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
