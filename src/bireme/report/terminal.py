"""What goes to a terminal: tables, a progress bar, the grid of a program, and timelines."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.color import Color
from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from bireme.bounds import bytes_text, counted, seconds_text
from bireme.plan.forecast import TierForecast
from bireme.report.palette import HUES, Colour, fill, on
from bireme.schedule.grid import MARKS, NAMES, Drawing, GridText, drawn, grid, opening
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule
from bireme.timeline.timeline import Timeline, pace

if TYPE_CHECKING:
    from bireme.simulate.comparison import Lookahead, ScheduleOutcome


# Tables in the terminal: no lines, bold headings, numbers to the right and words to the left.

GAP = 2
"""Letters between two columns."""


def columns(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    words: Collection[str] = (),
    wrapped: Collection[str] = (),
) -> Table:
    """A table of these rows; columns of `words` hold no numbers alone, and those `wrapped` may break."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        is_left, may_wrap = heading in words, heading in wrapped
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=not may_wrap)
    for row in rows:
        table.add_row(*row)
    return table


# A progress bar on standard error, so that what a verb prints stays clean.

_REFRESHES_PER_S = 4
"""Few, as what is measured meanwhile has to wait for them."""


@contextmanager
def progress_bar(first: str) -> Iterator[Callable[[float, str], None]]:
    """A bar while the block runs; the block tells it which part is done, and what comes next.

    Until it first does, nobody knows how long `first` will take, and the bar only shows that something
    happens. Where nobody watches, as when standard error is a file, nothing is drawn.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=_REFRESHES_PER_S,
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda done, what: bar.update(task, total=1.0, completed=done, description=what)


# A program's grid in the terminal: batches by hue, passes by shade, idle time as dim dots.
#
# Without colour it is the ascii picture.

_MOST_BANDS = 4
_MOST_LINES = 48
"""Longer programs are cut off at the width of the screen."""

_SIGNS = frozenset(sign for sign, _ in MARKS.values())
_DIM, _BOLD = Style(dim=True), Style(bold=True)


def print_program(program: Program, console: Console) -> None:
    """Draw who does what in which order, each forward as long as every other."""
    max_bands = min(max(_MOST_LINES // program.num_ranks, 1), _MOST_BANDS)
    # A rank needs a column for every forward at least, so what is drawn lies in these batches.
    enough = -(-console.width * max_bands // (2 * program.num_microbatches))
    begin = opening(program, enough)
    cells = grid(begin)
    picture = drawn(cells, console.width, max_bands)
    coloured = console.color_system is not None and not console.no_color
    for number, band in enumerate(picture.bands):
        if number:
            console.print()
        for line in band:
            _print(console, (_styled(piece, begin.rule, coloured=coloured) for piece in line))
    _print(console, [Text(picture.legend)])
    if coloured:
        _print(console, _colours(picture, begin.rule))
    if picture.num_columns < cells.num_columns:
        of = f" of {cells.num_columns}" if begin is program else ""
        console.print(
            f"Showing the first {picture.num_columns}{of} columns; widen the terminal for more.",
            style="yellow",
            soft_wrap=True,
        )


def _print(console: Console, texts: Iterable[Text]) -> None:
    console.print(Text.assemble(*texts), soft_wrap=True)


def _styled(piece: GridText, rule: Rule, *, coloured: bool) -> Text:
    if not coloured:
        return Text(piece.text)
    if piece.cell is None:
        return Text(piece.text, _BOLD if piece.text in _SIGNS else _DIM)
    step = piece.cell.instruction
    return Text(piece.text, _DIM if step is None else _style(step, rule))


def _style(step: Instruction, rule: Rule) -> Style:
    underline = rule is not Rule.SYNCHRONOUS and (step.version or 0) % 2 == 1
    return _on(fill(step.batch, step.kind), underline=underline)


def _on(colour: Colour, *, underline: bool = False) -> Style:
    return Style(
        color=Color.from_rgb(*on(colour)), bgcolor=Color.from_rgb(*colour), underline=underline or None
    )


def _colours(picture: Drawing, rule: Rule) -> list[Text]:
    """A legend of the batches that are seen, and of the underline."""
    steps = [
        piece.cell.instruction
        for band in picture.bands
        for line in band
        for piece in line
        if piece.cell is not None and piece.cell.instruction is not None
    ]
    batches = sorted({step.batch for step in steps})
    legend: list[Text] = []
    for first in batches[: len(HUES)]:
        same = ", ".join(str(batch) for batch in batches if batch % len(HUES) == first % len(HUES))
        legend += [Text(f" batch {same} ", _on(fill(first, Kind.FORWARD))), Text(" ")]
    if rule is not Rule.SYNCHRONOUS and any((step.version or 0) % 2 for step in steps):
        legend += [Text(" "), Text("underlined", Style(underline=True)), Text(": on an odd weight version")]
    return legend


# Timelines as tables.

_PARTS = NAMES | {Kind.UPDATE: "optimizer step", Kind.TRIAL: "trial step"}

_DELAYS = {Rule.SYNCHRONOUS: "none", Rule.DELAYED: "1 batch", Rule.FRESH: "partial", Rule.STASHED: "by stage"}


def print_timeline(timeline: Timeline, console: Console, advice: "Lookahead | None" = None) -> None:
    """What a window takes, rank by rank, what sets its pace, and what would help."""
    program = timeline.program
    console.print(
        f"[bold]{escape(program.name)}[/bold]  {program.num_stages} stages on {program.num_ranks} ranks, "
        f"{program.num_microbatches} micro-batches a batch, {program.num_batches} batches"
        + (f", {counted(program.num_sliced, 'micro-batch')} sliced" if program.num_sliced else "")
    )
    console.print(
        f"{seconds_text(timeline.steady_batch_s)} a batch in the steady state "
        f"({timeline.steady_bubble_fraction:.1%} idle); the window takes {seconds_text(timeline.makespan_s)} "
        f"({timeline.bubble_fraction:.1%} idle)\n"
    )
    console.print(_ranks(timeline))
    memory = _memory(timeline)
    if memory is not None:
        console.print("\nMemory at the peak", style="bold")
        console.print(memory)
    if timeline.program.tiers:
        console.print("\nOffloading", style="bold")
        console.print(_tiers(timeline))
    console.print(f"\n{_pace_sentence(timeline)}")
    if advice is not None and advice.lookahead:
        console.print(
            f"With --lookahead {advice.lookahead} messages overlap with work: "
            f"{seconds_text(advice.steady_batch_s)} a batch, "
            f"{1 - advice.steady_batch_s / advice.without_s:.0%} less."
        )


def _ranks(timeline: Timeline) -> Table:
    whole = timeline.makespan_s
    rows = (
        (
            str(rank.rank),
            ", ".join(map(str, timeline.program.stages_of(rank.rank))),
            seconds_text(rank.busy_s),
            f"{1 - rank.busy_s / whole:.1%}" if whole else "",
            str(kept.weight_versions),
            str(kept.peak_stashed_microbatches),
            str(kept.receive_buffers),
        )
        for rank, kept in zip(timeline.ranks, timeline.memory, strict=True)
    )
    return columns(("rank", "stages", "busy", "idle", "versions", "stashed", "buffers"), rows)


def _memory(timeline: Timeline) -> Table | None:
    """What each rank keeps at its peak; nothing where no bytes are given."""
    memory = timeline.memory
    kinds = [what for what in memory[0].at_peak if any(kept.at_peak[what] for kept in memory)]
    if not kinds:
        return None
    rows = (
        (str(kept.rank), *map(bytes_text, (kept.peak_bytes, *(kept.at_peak[what] for what in kinds))))
        for kept in memory
    )
    return columns(("rank", "peak", *kinds), rows)


def _tiers(timeline: Timeline) -> Table:
    """The tiers of the ranks that page."""
    program = timeline.program
    waited_s = {moved.rank: moved.waited_s / program.num_batches for moved in timeline.paging}
    tiers = (
        TierForecast(
            kept.rank,
            tier.name,
            tier.budget_bytes,
            tier.peak_bytes,
            tier.copied_in_bytes / program.num_batches,
            waited_s[kept.rank],
        )
        for kept in timeline.memory
        for tier in kept.tiers
    )
    budgets = map(program.tiers_of, range(program.num_ranks))
    return tiers_table(tiers, [0 if one is None else one.chunk_bytes for one in budgets])


def tiers_table(tiers: Iterable[TierForecast], chunk_bytes: Sequence[int]) -> Table:
    """What each tier holds and takes in, and how long the rank waits for chunks, or for weights that replicas
    share. `chunk_bytes` are those of each rank, if it has chunks.
    """
    rows = (
        (
            str(tier.rank) if is_first else "",
            tier.tier,
            "" if tier.budget_bytes is None else bytes_text(tier.budget_bytes),
            bytes_text(tier.peak_bytes),
            bytes_text(tier.predicted_bytes_moved),
            bytes_text(chunk_bytes[tier.rank]) if is_first and chunk_bytes else "",
            seconds_text(tier.waited_s) if is_first else "",
        )
        for tier in tiers
        for is_first in (tier.tier == "device",)
    )
    headings = ("rank", "tier", "budget", "peak", "copied in a batch", "chunk", "waits a batch")
    return columns(headings, rows, words=("tier",))


def _pace_sentence(timeline: Timeline) -> str:
    """Whether one stage sets the pace, and if none does, what the critical path consists of."""
    parts = pace(timeline)
    by_stage: defaultdict[int, float] = defaultdict(float)
    by_kind: defaultdict[Kind | None, float] = defaultdict(float)
    for part in parts:
        by_kind[part.kind] += part.share
        if part.kind is not None:
            by_stage[part.stage] += part.share
    slowest, share = max(by_stage.items(), key=lambda item: item[1], default=(0, 0.0))
    busy_s = [rank.busy_s for rank in timeline.ranks]
    stands_out = max(busy_s) > 1.02 * sum(busy_s) / len(busy_s)
    if share >= 0.5 and stands_out:
        return f"Stage {slowest} sets the pace: {share:.0%} of the critical path is its work."
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    named = [("waiting" if kind is None else _PARTS[kind], share) for kind, share in kinds]
    consists = ", ".join(f"{name} {share:.0%}" for name, share in named if share >= 0.005)
    return f"The critical path is {consists}." if consists else "Nothing takes any time."


def print_comparison(contenders: "Sequence[ScheduleOutcome]", console: Console) -> None:
    """All schedules with the same work on the same devices, fastest first."""
    ran = [(c, c.timeline) for c in contenders if c.timeline is not None]
    ran.sort(key=lambda pair: pair[1].steady_batch_s)
    headings = ("schedule", "a batch", "vs best", "idle", "peak memory", "versions", "stashed", "delay")
    rows = (
        (
            contender.schedule.name,
            seconds_text(timeline.steady_batch_s),
            f"{timeline.steady_batch_s / ran[0][1].steady_batch_s:.2f}×" if ran[0][1].steady_batch_s else "",
            f"{timeline.steady_bubble_fraction:.1%}",
            bytes_text(max(kept.peak_bytes for kept in timeline.memory)),
            str(max(kept.weight_versions for kept in timeline.memory)),
            str(max(kept.peak_stashed_microbatches for kept in timeline.memory)),
            _DELAYS[contender.schedule.rule],
        )
        for contender, timeline in ran
    )
    console.print(columns(headings, rows, words=("schedule", "delay")))
    ahead = [(c.schedule.name, c.advice) for c, _ in ran if c.advice is not None and c.advice.lookahead]
    if ahead:
        console.print("\nRunning further ahead would overlap messages with work:")
    for name, advice in ahead:
        console.print(
            f"  {name} --lookahead {advice.lookahead} takes {seconds_text(advice.steady_batch_s)} a batch"
        )
    cut = [c.schedule.name for c, _ in ran if c.schedule.stages_per_rank > 1]
    if cut:
        console.print(f"\n{' and '.join(cut)} cut each device's work in two stages.", style="dim")
    for contender in contenders:
        if contender.refused is not None:
            console.print(f"[yellow]{contender.schedule.name}[/yellow] is left out: {contender.refused}")
