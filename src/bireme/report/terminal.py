"""Timelines as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bireme.report.units import bytes_text, seconds_text
from bireme.schedule.instruction import Kind
from bireme.schedule.rule import Rule
from bireme.simulate.comparison import Contender
from bireme.timeline.pace import Pace, pace
from bireme.timeline.timeline import Timeline

__all__ = ["print_comparison", "print_timeline"]

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward (input part)",
    Kind.BACKWARD_WEIGHT: "backward (weight part)",
    Kind.RECOMPUTE: "recomputation",
    Kind.UPDATE: "optimiser step",
    Kind.TRIAL: "trial step",
    None: "waiting for messages",
}

DELAYS = {
    Rule.SYNCHRONOUS: "none",
    Rule.DELAYED: "one batch",
    Rule.FRESH: "part of a batch",
    Rule.STASHED: "differs by stage",
}


def print_timeline(timeline: Timeline, console: Console) -> None:
    """What a window takes, rank by rank, and what sets its pace."""
    program = timeline.program
    console.print(
        f"[bold]{program.name}[/bold]  {program.num_stages} stages on {program.num_ranks} ranks, "
        f"{program.num_microbatches} micro-batches a batch, {program.num_batches} batches",
        highlight=False,
    )
    console.print(
        f"{seconds_text(timeline.steady_batch_s)} a batch in the steady state "
        f"({timeline.steady_bubble_fraction:.1%} idle); the window takes {seconds_text(timeline.makespan_s)} "
        f"({timeline.bubble_fraction:.1%} idle)\n",
        highlight=False,
    )
    console.print(_ranks(timeline))
    parts = pace(timeline)
    if parts:
        console.print(
            f"\nThe pace is set by {', '.join(_part(part) for part in parts[:3])}.", highlight=False
        )


def _ranks(timeline: Timeline) -> Table:
    kept_anything = [
        what for what in timeline.memory[0].at_peak if any(kept.at_peak[what] for kept in timeline.memory)
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "rank",
        "stages",
        "busy",
        "idle",
        "peak memory",
        *kept_anything,
        "versions",
        "stashed",
        "buffers",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    whole = timeline.makespan_s
    for rank, kept in zip(timeline.ranks, timeline.memory, strict=True):
        table.add_row(
            str(rank.rank),
            ", ".join(map(str, timeline.program.stages_of(rank.rank))),
            seconds_text(rank.busy_s),
            f"{1 - rank.busy_s / whole:.1%}" if whole else "",
            bytes_text(kept.peak_bytes),
            *(bytes_text(kept.at_peak[what]) for what in kept_anything),
            str(kept.weight_versions),
            str(kept.peak_stashed_microbatches),
            str(kept.receive_buffers),
        )
    return table


def _part(part: Pace) -> str:
    where = f"on the way to stage {part.stage}" if part.kind is None else f"of stage {part.stage}"
    return f"{NAMES[part.kind]} {where} ({part.share:.0%})"


def print_comparison(contenders: Sequence[Contender], console: Console) -> None:
    """All schedules with the same work on the same devices, fastest first."""
    ran = [(c, c.timeline) for c in contenders if c.timeline is not None]
    ran.sort(key=lambda pair: pair[1].steady_batch_s)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "schedule",
        "a batch",
        "against best",
        "idle",
        "peak memory",
        "versions",
        "stashed",
        "update delay",
    ):
        table.add_column(heading, justify="left" if heading in ("schedule", "update delay") else "right")
    for contender, timeline in ran:
        memory = timeline.memory
        table.add_row(
            contender.schedule.name,
            seconds_text(timeline.steady_batch_s),
            f"{timeline.steady_batch_s / ran[0][1].steady_batch_s:.2f}×" if ran[0][1].steady_batch_s else "",
            f"{timeline.steady_bubble_fraction:.1%}",
            bytes_text(max(kept.peak_bytes for kept in memory)),
            str(max(kept.weight_versions for kept in memory)),
            str(max(kept.peak_stashed_microbatches for kept in memory)),
            DELAYS[contender.schedule.rule],
        )
    console.print(table)
    cut = [c.schedule.name for c, _ in ran if c.schedule.stages_per_rank > 1]
    if cut:
        console.print(f"\n{' and '.join(cut)} cut each stage in two, both on one device.", style="dim")
    for contender in contenders:
        if contender.refused is not None:
            console.print(
                f"[yellow]{contender.schedule.name}[/yellow] is left out: {contender.refused}",
                highlight=False,
            )
