"""Options that several verbs share, and helpers to read them.

Verbs get the descriptions from here, by the names of parameters (`described.py`).

Arguments:
    run_file (RUN.toml): Run file (`bireme init` writes one); by default the demonstration.

Options:
    batches (--batches, -n): Number of batches.
    stages_per_rank: Stages per rank: 2 for interleaved and zbv, else 1 or several neighboring stages.
    slices: Number of micro-batches that 1f1b-sliced slices; by default the best.
    lookahead: Extra forwards that 1f1b, 2bw and 2bw-fresh run ahead to hide slow links.
    sweep: Micro-batches that a rank takes through a stage before it turns to the next stage.
    source (--from FILE.csv): Read the schedule from a file in torch's format.
    force: Overwrite output files that exist.
    as_json (--json): Print one JSON document instead.
    restarts (N): Restarts from the newest checkpoint after a failure, in a row without a new checkpoint. By
        default 3 with sync.mode quorum, groups and diloco, and 0 with allreduce.
    machines (N | A..B): Machines to wait for that type `bireme join`, this one included. By default
        `bireme coordinate` waits for 2, and other commands for none.
    listen (HOST:PORT): This machine's address for the others. By default that of its network card, port
        29600.
    set_ (--set TABLE.KEY=VALUE): Change a key of the run file. Repeatable.
    file (FILE.json): Forecast the plan in this file, from `bireme plan --output` or by hand, and
        search for none.

Costs of the model:
    profile ([NAME=]FILE.json): Profile written by `bireme profile`, instead of measuring. The run file need
        not name a model. With a name it is for the devices of this name or kind, as in `plan.profiles`.
        Repeatable.
    like (NAME|FILE.json): Estimate for this device, such as a100, instead of measuring here.
    fresh: Measure again, ignoring the cache.
"""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.errors import BiremeError

if TYPE_CHECKING:
    from rich.console import Console

    from bireme.schedule.program import Program
    from bireme.train.plan_search import ProfiledRun


MOST_FORWARDS = 10_000_000
"""Forwards in all batches of a schedule that is drawn or simulated."""


def begin(*more: str) -> None:
    """Import here what all processes of a run need, and `more` modules, so that none of them imports it."""
    from bireme.runtime.processes import serve_from_here

    serve_from_here("bireme.train.launching", *more)


def profiled_run(
    context: typer.Context,
    run_file: Path | None,
    sets: list[str] | None,
    *,
    profiles: list[str] | None,
    like: str | None,
    is_fresh: bool,
) -> "ProfiledRun":
    """The run that a verb is for, with the profiles that its options ask for."""
    files = [Path(text) for text in profiles or () if "=" not in text]
    if len(files) > 1:
        raise BiremeError(
            f"--profile {files[0]} and --profile {files[1]} are for all devices. Name the devices of one: "
            f"--profile NAME={files[1]}."
        )
    file = files[0] if files else None
    if file is not None:
        refuse(context, "--profile already has the costs", "like", "fresh")
    if like is not None:
        refuse(context, "--like estimates and does not measure", "fresh")
    from bireme.report.terminal import progress_bar
    from bireme.train.folder import load_asked
    from bireme.train.plan_search import ProfiledRun, names_model

    run = load_asked(run_file, sets or ())
    if named := tuple(text for text in profiles or () if "=" in text):
        run = run.with_keys("plan", profiles=(*(run.plan.profiles or ()), *named))
    if file is not None and not names_model(run):
        return ProfiledRun.without_model(run, file)
    measures = file is None and like is None
    if measures:
        begin()
    from bireme.train.captured_run import CapturedRun

    with progress_bar("capturing the model") as progress:
        captured = CapturedRun.of(run, progress, measures=measures)
        if file is not None:
            return captured.with_profile(file)
        return captured.profiled(progress, like=like, is_fresh=is_fresh)


def given_of(context: typer.Context, *options: str) -> list[str]:
    """The options that the command line has of these, which are named one by one or by their panels."""
    return [
        str(one.name)
        for one in context.command.params
        if {one.name, getattr(one, "rich_help_panel", None)} & {*options}
        if getattr(context.get_parameter_source(str(one.name)), "name", "") == "COMMANDLINE"
    ]


def refuse(context: typer.Context, why: str, *options: str) -> None:
    """Refuse options that would have no effect; `why` says the reason."""
    given = given_of(context, *options)
    if given:
        names = {"name": "schedule", "source": "from"}
        shown = ", ".join(f"--{names.get(option, option).replace('_', '-')}" for option in given)
        raise BiremeError(f"{why}: leave out {shown}.")


def check_plan_file(file: Path | None) -> None:
    """Refuse a file that is no plan before long work; None is no file."""
    if file is not None:
        from bireme.plan.plan_file import load_plan

        load_plan(file)


def check_writable(*paths: Path | None, force: bool) -> None:
    """Refuse files that could not be written, or exist if not `force`, before long work; None is no file."""
    files = [path for path in paths if path is not None]
    for path in files:
        if path.is_dir():
            raise BiremeError(f"{path} cannot be written: it is a folder. Name a file in it.")
        if not path.resolve().parent.is_dir():
            raise BiremeError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
        if path.is_file() and not force:
            raise BiremeError(f"{path} already exists. Name another file, or overwrite it with --force.")
    if len({path.resolve() for path in files}) < len(files):
        raise BiremeError("Two output files have the same name. Give each its own.")


def check_extent(stages: int, microbatches: int, batches: int) -> None:
    """Refuse batches whose instructions take minutes to write down; each is like the others."""
    from bireme.schedule.generators.shape import Shape

    Shape(stages, microbatches, batches)
    passes = stages * microbatches * batches
    if passes > MOST_FORWARDS:
        raise BiremeError(
            f"{batches} batches of {stages} stages and {microbatches} micro-batches are {passes:,} forwards; "
            f"the most is {MOST_FORWARDS:,}. Ask for fewer batches."
        )


def build_program(
    name: str | None,
    source: Path | None,
    *,
    stages: int,
    microbatches: int | None,
    batches: int,
    recompute: bool,
    average: int | None = None,
    **shape: Any,
) -> "Program":
    """The program that the options ask for, by its name or from a file. `shape` is for `generate`."""
    from bireme.schedule.catalogue import generate
    from bireme.schedule.torch_csv import load
    from bireme.schedule.weave import UpdateTiming

    if (name is None) == (source is None):
        raise BiremeError(
            "Name a schedule, or give a file with --from FILE.csv. `bireme schedule` lists the names."
        )
    if source is not None:
        return load(source, num_batches=batches)
    assert name is not None
    check_extent(stages, stages if microbatches is None else microbatches, batches)
    return generate(
        name,
        num_stages=stages,
        num_microbatches=stages if microbatches is None else microbatches,
        num_batches=batches,
        recompute=range(stages) if recompute else (),
        timing=UpdateTiming(average_lag=average),
        **shape,
    )


def settings_of(*options: tuple[str, str, object]) -> list[str]:
    """Settings of the run file's keys, as `--set` gives them: from options, their keys and their values.

    Options that are left out set nothing. A value that its key does not take is refused under the option's
    name.
    """
    from bireme.documents import validated
    from bireme.train.run_file.tables import Tables

    found = []
    for option, key, value in options:
        if value is not None:
            table, name = key.split(".")
            validated({table: {name: value}}, Tables, source=f"{option} {shlex.quote(str(value))}")
            found.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return found


def is_one_of_many() -> bool:
    """Whether something like torchrun has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_suffix(path: Path | None, what: str, suffix: str) -> None:
    """Refuse a file of another name than such a file has."""
    if path is not None and path.suffix != suffix:
        raise BiremeError(f"A {what} must end in {suffix}, and {path} does not. Name it {path.stem}{suffix}.")


def say_written(*paths: Path | None) -> None:
    """A line for each file that was written; None is no file."""
    for path in paths:
        if path is not None:
            typer.echo(f"Wrote {path}.")


def address_of(text: str) -> tuple[str, int]:
    """The host and the port of a `HOST:PORT`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise BiremeError(f"{text!r} is not of the form HOST:PORT, such as 192.168.1.5:29600.")
    return host, int(port)


def show(
    document: Callable[[], dict[str, Any]], printed: "Callable[[Console], None]", *, as_json: bool
) -> None:
    """Print the JSON document, or what is `printed` in the terminal."""
    if as_json:
        print_json(document())
        return
    from rich.console import Console

    printed(Console(highlight=False))


def print_json(document: dict[str, Any]) -> None:
    """Print the JSON document on standard output."""
    from bireme.documents import plain

    typer.echo(json.dumps(plain(document), ensure_ascii=False, allow_nan=False))
