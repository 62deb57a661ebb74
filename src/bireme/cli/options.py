"""Options that several verbs share, and helpers to read them."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.schedule.program import Program


# Options whose value is one of a few words: checked in one sentence, and completed by the shell.


def word(
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


Stages = Annotated[int, typer.Option("--stages", "-d", help="Number of pipeline stages.")]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Micro-batches per batch; by default as many as stages."),
]
MOST_FORWARDS = 10_000_000
"""Forwards in all batches of a schedule that is drawn or simulated."""

Batches = Annotated[int | None, typer.Option("--batches", "-n", help="Number of batches.")]
StagesPerRank = Annotated[
    int | None,
    typer.Option(
        help="Stages per rank: 2 for interleaved and zbv, else 1 or several neighboring stages.",
        show_default=False,
    ),
]
Slices = Annotated[
    int | None,
    typer.Option(
        help="Number of micro-batches that 1f1b-sliced slices; by default the best.", show_default=False
    ),
]
AheadBy = Annotated[
    int,
    typer.Option(
        "--lookahead", help="Extra forwards that 1f1b, 2bw and 2bw-fresh run ahead to hide slow links."
    ),
]
Sweep = Annotated[
    int,
    typer.Option(help="Micro-batches that a rank takes through a stage before it turns to the next stage."),
]
Average = Annotated[
    int | None,
    typer.Option(
        metavar="LAG",
        help="Let replicas average weights after each update. The mean may come LAG updates late: 0 for "
        "groups, 1 or more for outer steps.",
    ),
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Keep only inputs and run forwards again before backwards.")
]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE.csv", help="Read the schedule from a file in torch's format."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite output files that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Restarts from the newest checkpoint after a failure, in a row without a new checkpoint. By "
        "default 3 with sync.mode quorum, groups and diloco, and 0 with allreduce.",
        show_default=False,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key of the run file. Repeatable."),
]


SHAPE = ("stages", "microbatches", "stages_per_rank", "slices", "lookahead", "sweep", "recompute")
"""Options that have no effect with a schedule file."""


def refuse(context: typer.Context, why: str, *options: str) -> None:
    """Refuse options that would have no effect; `why` says the reason."""
    given = [
        option
        for option in options
        if (source := context.get_parameter_source(option)) is not None and source.name == "COMMANDLINE"
    ]
    if given:
        names = {"name": "schedule", "source": "from"}
        shown = ", ".join(f"--{names.get(option, option).replace('_', '-')}" for option in given)
        raise BiremeError(f"{why}: leave out {shown}.")


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
    stages_per_rank: int | None,
    slices: int | None,
    lookahead: int,
    sweep: int,
    recompute: bool,
    average: int | None = None,
) -> "Program":
    """The program that the options ask for, by schedule name or from a file."""
    from bireme.schedule.catalogue import generate
    from bireme.schedule.torch_csv import load

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
        stages_per_rank=stages_per_rank,
        num_sliced=slices,
        lookahead=lookahead,
        sweep=sweep,
        recompute=range(stages) if recompute else (),
        average_lag=average,
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


def print_json(document: dict[str, Any]) -> None:
    """Print the JSON document on standard output."""
    typer.echo(json.dumps(document, ensure_ascii=False, allow_nan=False))
