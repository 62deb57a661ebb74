"""`bireme schedule`: draw a schedule, check it, convert it to and from torch's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.cli.options import (
    build_program,
    print_json,
    refuse,
)
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from rich.console import Console

    from bireme.schedule.checker import CheckReport
    from bireme.schedule.program import Program


SHAPE = ("stages", "microbatches", "stages_per_rank", "slices", "lookahead", "sweep", "recompute")
"""Options that have no effect with a schedule file."""


def schedule(
    context: typer.Context,
    name: str | None = None,
    stages: int = 4,
    microbatches: int | None = None,
    batches: int | None = None,
    stages_per_rank: int | None = None,
    slices: int | None = None,
    lookahead: int = 0,
    sweep: int = 1,
    recompute: bool = False,
    average: int | None = None,
    source: Path | None = None,
    check: bool = False,
    csv: Path | None = None,
    comms: bool = False,
    as_json: bool = False,
) -> None:
    """Draw a schedule as a grid: one row per rank, time to the right.

    [dim]bireme schedule 2bw --stages 4 --microbatches 4 --batches 3 --check[/dim]

    Arguments:
        name: Schedule; without it, all are listed.

    Options:
        stages (--stages, -d): Number of pipeline stages.
        microbatches (--microbatches, -m): Micro-batches per batch; by default as many as stages.
        recompute: Keep only inputs and run forwards again before backwards.
        average (LAG): Let replicas average weights after each update. The mean may come LAG updates late: 0
            for groups, 1 or more for outer steps.
        check: Prove the schedule right, or say what is wrong.
        csv (FILE): Write one batch to a file in torch's format.
        comms: Include sends and receives in that file.
    """
    if name is None and source is None:
        names_only = "Without a schedule the names are only listed"
        refuse(context, names_only, *SHAPE, "average", "check", "csv", "comms")
        _list(as_json=as_json)
        return
    if source is not None:
        refuse(context, "The file defines the schedule", *SHAPE, "average")
    if csv is None:
        refuse(context, "--comms needs --csv", "comms")
    try:
        program = build_program(
            name,
            source,
            stages=stages,
            microbatches=microbatches,
            batches=_window(name) if batches is None else batches,
            stages_per_rank=stages_per_rank,
            num_sliced=slices,
            lookahead=lookahead,
            sweep=sweep,
            recompute=recompute,
            average=average,
        )
    except BiremeError as error:
        if check and as_json and source is not None:
            print_json(
                {"ok": False, "problems": [str(error)], "deadlock": getattr(error, "cycle", None) or None}
            )
        raise
    report = None
    if check:
        from bireme.schedule.checker import check as check_program

        report = check_program(program)
    if csv is not None:
        from bireme.schedule.torch_csv import save

        save(program, csv, comms=comms)
    if as_json:
        print_json(_document(program, report))
    else:
        _print(program, report, csv)
    if report is not None and not report.ok:
        raise BiremeError(report.verdict(program.name))


def _window(name: str | None) -> int:
    """How many batches show the character of a schedule."""
    from bireme.schedule.catalogue import SCHEDULES
    from bireme.schedule.program import Rule

    known = SCHEDULES.get(name or "")
    return 1 if known is None or known.rule is Rule.SYNCHRONOUS else 3


def _list(*, as_json: bool) -> None:
    from bireme.schedule.catalogue import SCHEDULES

    if as_json:
        print_json(
            {
                "schedules": [
                    {"name": s.name, "summary": s.summary, "rule": s.rule} for s in SCHEDULES.values()
                ]
            }
        )
        return
    from rich.console import Console

    from bireme.report.terminal import columns

    table = columns(
        ("schedule", "what it does"), words=("schedule", "what it does"), wrapped=("what it does",)
    )
    table.columns[0].style = "bold"
    for known in SCHEDULES.values():
        table.add_row(known.name, known.summary)
    console = Console(highlight=False)
    console.print(table)
    console.print("\nDraw one: bireme schedule NAME --stages D --microbatches M --batches N", style="dim")


def _document(program: "Program", report: "CheckReport | None") -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": program.name,
        "rule": program.rule,
        "num_stages": program.num_stages,
        "num_ranks": program.num_ranks,
        "num_microbatches": program.num_microbatches,
        "num_batches": program.num_batches,
        "rank_of_stage": program.rank_of_stage,
        "num_instructions": program.num_instructions,
        "ranks": [
            {
                "rank": rank,
                "stages": program.stages_of(rank),
                "head": [str(instruction) for instruction in track.head],
                "body": [str(instruction) for instruction in track.body],
                "repeats": track.repeats,
                "tail": [str(instruction) for instruction in track.tail],
            }
            for rank, track in enumerate(program.tracks)
        ],
    }
    if report is not None:
        document |= {
            "ok": report.ok,
            "problems": report.problems,
            "deadlock": report.deadlock,
            "deadlock_if_buffered": report.deadlock_if_buffered,
        }
        for rank, kept in zip(document["ranks"], report.ranks, strict=False):
            rank["weight_versions"] = kept.weight_versions
            rank["peak_stashed_microbatches"] = kept.peak_stashed_microbatches
            rank["receive_buffers"] = kept.receive_buffers
    return document


def _print(program: "Program", report: "CheckReport | None", csv: Path | None) -> None:
    from rich.console import Console

    from bireme.report.terminal import print_program

    console = Console(highlight=False)
    if report is None or report.ok:
        print_program(program, console)
    if report is not None:
        _print_report(program, report, console)
    if csv is not None:
        console.print(f"Wrote one batch in torch's format to {csv}.", markup=False, soft_wrap=True)


def _print_report(program: "Program", report: "CheckReport", console: "Console") -> None:
    from rich.markup import escape

    from bireme.report.terminal import columns

    for problem in report.problems:
        console.print(f"[red]✗[/red] {escape(problem)}")
    if report.deadlock is not None:
        console.print("[red]✗[/red] Deadlock; each rank waits for the next:")
        for wait in report.deadlock:
            console.print(f"    {wait}")
        if not report.deadlock_if_buffered:
            console.print("    It would run if sends completed before they are received.", style="dim")
    if not report.ok:
        return
    console.print(
        f"[green]✓[/green] {program.num_instructions:,} instructions: every pass once, on the right "
        "version; every message matched; no deadlock."
    )
    table = columns(("rank", "stages", "weight versions", "stashed micro-batches", "receive buffers"))
    for kept in report.ranks:
        table.add_row(
            str(kept.rank),
            ", ".join(map(str, program.stages_of(kept.rank))),
            str(kept.weight_versions),
            str(kept.peak_stashed_microbatches),
            str(kept.receive_buffers),
        )
    console.print(table)
