"""What a model costs and how it uses memory: a profile unit by unit, and the blocks of an iteration.

Both are tables for the terminal. The memory behavior (who owns the peak, when large blocks live, what could
be swapped) is one JSON document for programs, too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bireme.bounds import bytes_text, seconds_text
from bireme.codec.description import CodecRate
from bireme.grouping import grouped
from bireme.profile.behavior import Behavior, Idle, MemoryBlock, Owner, idle_intervals, percentile
from bireme.profile.profile import Profile, UnitCost, UnitProfile
from bireme.profile.stages import stage_cost
from bireme.profile.swapping import Bandwidth, BlockPaging, SwapPlan
from bireme.report.terminal import GAP, columns

# Figures of Li et al. (ISPASS 2021) on memory behavior, to compare with those of a traced iteration.


@dataclass(frozen=True, slots=True)
class _PublishedFigure:
    """What a figure is of, and its value; `source` is where we have it from."""

    name: str
    value: str
    source: str


TABLE = "the authors' table of a multilayer perceptron"
_QUOTED = "quoted from the paper, not checked against its text"

PUBLISHED: tuple[_PublishedFigure, ...] = (
    _PublishedFigure("intermediates of all memory, 400 samples, width 3", "82.66 %", TABLE),
    _PublishedFigure("intermediates of all memory, 3,200 samples, width 192", "99.33 %", TABLE),
    _PublishedFigure("intermediates of all memory, 3,200 samples, width 12,288", "99.95 %", TABLE),
    _PublishedFigure("90 % of the times between two accesses are at most", "25 µs", _QUOTED),
    _PublishedFigure("which lets out and in, at 6.4 and 6.3 GB/s", "79.37 kB", _QUOTED),
    _PublishedFigure("a block that is worth swapping: 1,200 MB, idle for", "840.2 ms", _QUOTED),
)


NUM_ROWS = 12
"""Blocks that get a row of their own."""
_NARROWEST, _WIDEST = 24, 64
"""Of the chart, in characters."""
_BESIDE_CHART = 53
"""What the columns before it take."""
_LONGEST_NAME = 28
PERCENTS = (50, 90, 99, 100)
_LEVELS = " ▁▂▃▄▅▆▇█"
_ABSENT, IDLE, _ACCESSED = " ", "─", "█"
COLOURS = {
    Owner.PARAMETER: "blue",
    Owner.BUFFER: "cyan",
    Owner.GRADIENT: "yellow",
    Owner.OPTIMIZER: "magenta",
    Owner.ACTIVATION: "green",
    Owner.INPUT: "bright_black",
    Owner.WORKSPACE: "red",
}


def print_memory(
    title: str,
    behavior: Behavior,
    alone: SwapPlan,
    in_turn: SwapPlan,
    paging: BlockPaging | None,
    console: Console,
) -> None:
    """The whole report. `alone` gives each block the link for itself; `in_turn` lets copies wait."""

    def say(text: str) -> None:
        console.print(text)

    say(f"[bold]{escape(title)}[/bold]")
    say(_peak(behavior) + "\n")
    console.print(_owners(behavior))
    console.print("\nThe largest blocks at the peak", style="bold")
    console.print(_chart(behavior, console.width))
    say(f"\n{_repetition(behavior)}")
    intervals = idle_intervals(behavior)
    if intervals:
        console.print("\nHow long blocks are idle between two accesses", style="bold")
        console.print(_idleness(intervals, alone.bandwidth))
    say(f"\n{_swapping(alone, in_turn)}")
    if paging is not None and paging.budgets:
        say(f"\n{_least(paging, behavior)}")
        console.print(_paging(paging, behavior))
    say(f"\n{_published(behavior)}")


def _least(paging: BlockPaging, behavior: Behavior) -> str:
    saved = 1 - paging.least_bytes / behavior.peak.num_bytes
    return (
        f"Offloading in chunks of {bytes_text(paging.chunk_bytes)} could do with "
        f"{bytes_text(paging.least_bytes)} ({saved:.0%} less), of which {bytes_text(paging.unpaged_bytes)} "
        "are never offloaded. Copies that take less than the iteration could run during it."
    )


def _paging(paging: BlockPaging, behavior: Behavior) -> Table:
    rows = (
        (
            bytes_text(budget.device_bytes),
            f"{budget.device_bytes / behavior.peak.num_bytes:.0%}",
            bytes_text(budget.out_bytes),
            bytes_text(budget.in_bytes),
            seconds_text(budget.copies_s),
            f"{budget.copies_s / behavior.duration_s:.2f}",
        )
        for budget in paging.budgets
    )
    headings = ("device memory", "of the peak", "copied out", "copied in", "copies take", "iterations")
    return columns(headings, rows)


def _published(behavior: Behavior) -> str:
    """The figures of the paper, by source, with this iteration's share of activations."""
    by_source = grouped((figure.source, f"{figure.name}: {figure.value}") for figure in PUBLISHED)
    told = "; ".join(f"{'; '.join(figures)} ({source})" for source, figures in by_source.items())
    share = behavior.by_owner()[Owner.ACTIVATION] / behavior.peak.num_bytes
    return f"Activations are {share:.2%} of the peak. Li et al. (ISPASS 2021): {told}."


def _peak(behavior: Behavior) -> str:
    peak = behavior.peak
    where = f" in the {peak.phase} ({escape(peak.operator or 'a release')})" if peak.phase else ""
    text = (
        f"An iteration takes {seconds_text(behavior.duration_s)} on {behavior.device}. Its peak is "
        f"[bold]{bytes_text(peak.num_bytes)}[/bold], {seconds_text(peak.at_s)} after it begins{where}."
    )
    allocator = behavior.allocator
    if allocator is not None:
        text += (
            f" The allocator's peak is {bytes_text(allocator.peak_bytes)} in "
            f"{bytes_text(allocator.reserved_bytes)} that it reserved."
        )
    return text


def _owners(behavior: Behavior) -> Table:
    table = columns(("owner", "at the peak", "share", "blocks"), words=("owner",))
    counts = Counter(block.owner for block in behavior.at_peak())
    for owner, num_bytes in sorted(behavior.by_owner().items(), key=lambda item: -item[1]):
        if counts[owner]:
            share = f"{num_bytes / behavior.peak.num_bytes:.1%}"
            table.add_row(_coloured(owner, owner), bytes_text(num_bytes), share, str(counts[owner]))
    return table


def _coloured(text: str, owner: Owner) -> Text:
    return Text(text, COLOURS[owner])


def _chart(behavior: Behavior, width: int) -> Table:
    """How much lives when, and below it a row for each of the largest blocks at the peak."""
    letters = min(max(width - _BESIDE_CHART, _NARROWEST), _WIDEST)
    table = columns(("owner", "block", "bytes"), words=("owner", "block"))
    table.add_column(Text(_phases(behavior, letters)), no_wrap=True)
    table.add_row("", "all", bytes_text(behavior.peak.num_bytes), _footprint(behavior, letters))
    blocks = behavior.at_peak()
    for block in blocks[:NUM_ROWS]:
        table.add_row(
            _coloured(block.owner, block.owner),
            Text(block.title(_LONGEST_NAME)),
            bytes_text(block.num_bytes),
            _coloured(_life(behavior, block, letters), block.owner),
        )
    rest = blocks[NUM_ROWS:]
    if rest:
        table.add_row("", f"{len(rest)} more", bytes_text(sum(block.num_bytes for block in rest)), "")
    return table


def _phases(behavior: Behavior, letters: int) -> str:
    """The names of the phases where they begin, as far as there is room."""
    line = ""
    for span in behavior.spans:
        begin, end = _columns(behavior, span.start_s, span.end_s, letters)
        line = line[:begin].ljust(begin) + f"|{span.phase}"[: end - begin + 1]
    return line.ljust(letters)


def _columns(behavior: Behavior, start_s: float, end_s: float, letters: int) -> tuple[int, int]:
    """The first and the last column of an interval."""
    first, last = (min(int(s / behavior.duration_s * letters), letters - 1) for s in (start_s, end_s))
    return first, last


def footprint(behavior: Behavior, num_columns: int) -> list[int]:
    """The most live bytes within each of so many equal parts of the iteration."""
    bounds_s = (0.0, *behavior.event_s, behavior.duration_s)
    most = [0] * num_columns
    for start_s, end_s, live in zip(bounds_s, bounds_s[1:], behavior.live_bytes(), strict=False):
        first, last = _columns(behavior, start_s, end_s, num_columns)
        for column in range(first, last + 1):
            most[column] = max(most[column], live)
    return most


def _footprint(behavior: Behavior, letters: int) -> str:
    """The same as bars, relative to the peak."""
    whole = max(behavior.peak.num_bytes, 1)
    return "".join(_LEVELS[round(live / whole * (len(_LEVELS) - 1))] for live in footprint(behavior, letters))


def _life(behavior: Behavior, block: MemoryBlock, letters: int) -> str:
    """Blank where a block is not there, a line where it is, a bar where it is used."""
    end_s = behavior.duration_s if block.death_s is None else block.death_s
    first, last = _columns(behavior, block.birth_s, end_s, letters)
    line = [_ABSENT] * first + [IDLE] * (last + 1 - first) + [_ABSENT] * (letters - last - 1)
    for access in block.accesses:
        first, last = _columns(behavior, access.start_s, access.end_s, letters)
        line[first : last + 1] = [_ACCESSED] * (last + 1 - first)
    return "".join(line)


def _repetition(behavior: Behavior) -> str:
    repetition = behavior.repetition
    if repetition.is_stable:
        return (
            f"Iterations repeat: the {repetition.num_iterations} traced are the same "
            f"{behavior.num_events} events in the same order."
        )
    return (
        f"[yellow]Iterations differ[/yellow]: the {repetition.num_iterations} traced are not the same "
        "events. Give a longer --warmup if something is made late; a model may also do what depends on "
        "numbers."
    )


def _idleness(intervals: Sequence[Idle], bandwidth: Bandwidth) -> Table:
    """The interval that so many do not exceed, and the largest block that it would let out and back in."""
    first = f"of {len(intervals)} intervals"
    longest = [(percent, *_percentiles(intervals, percent)) for percent in PERCENTS]
    rows = (
        (
            "all" if percent == 100 else f"{percent}%",
            seconds_text(seconds),
            str(events),
            bytes_text(bandwidth.fits_bytes(seconds)),
        )
        for percent, seconds, events in longest
    )
    return columns((first, "at most", "events", "lets out and in"), rows, words=(first,))


def _percentiles(intervals: Sequence[Idle], percent: float) -> tuple[float, float]:
    """The seconds and the events that so many intervals do not exceed."""
    seconds, events = [one.seconds for one in intervals], [one.num_events for one in intervals]
    return percentile(seconds, percent), percentile(events, percent)


def _swapping(alone: SwapPlan, in_turn: SwapPlan) -> str:
    link, whole = alone.bandwidth, max(alone.before_bytes, 1)
    ways = f"{link.out_bytes_per_s / 1e9:.4g} GB/s"
    if link.in_bytes_per_s != link.out_bytes_per_s:
        ways = f"{ways} out and {link.in_bytes_per_s / 1e9:.4g} GB/s in"
    text = (
        f"Over a link of {ways}, {alone.num_feasible} of {alone.num_intervals} intervals are long enough to "
        f"swap their block out and back for nothing: {alone.num_swappable_blocks} blocks, "
        f"{bytes_text(alone.swappable_block_bytes)} in all."
    )
    if not alone.saved_bytes:
        return f"{text} None of them lowers the peak."
    return (
        f"{text} Together they lower the peak by [bold]{bytes_text(alone.saved_bytes)}[/bold] "
        f"({alone.saved_bytes / whole:.0%}) to {bytes_text(alone.peak_bytes)} if each has the link for "
        f"itself, and by {bytes_text(in_turn.saved_bytes)} ({in_turn.saved_bytes / whole:.0%}) if copies "
        "wait for each other."
    )


# The same as a JSON document.

_PERCENTS = (10, 25, 50, 75, 90, 99, 100)


def memory_document(
    behavior: Behavior, alone: SwapPlan, in_turn: SwapPlan, paging: BlockPaging | None
) -> dict[str, Any]:
    """Everything about the iteration: its peak, its blocks, how it repeats, what can be swapped.

    `alone` gives each block the link for itself; `in_turn` lets copies wait for each other.
    """
    peak, repetition = behavior.peak, behavior.repetition
    intervals = idle_intervals(behavior)
    return {
        "device": behavior.device,
        "duration_s": behavior.duration_s,
        "traced_s": behavior.traced_s,
        "phases": [asdict(span) for span in behavior.spans],
        "peak_bytes": peak.num_bytes,
        "peak_at_s": peak.at_s,
        "peak_phase": peak.phase,
        "peak_operator": peak.operator,
        "by_owner": {owner.value: num_bytes for owner, num_bytes in behavior.by_owner().items()},
        "num_events": behavior.num_events,
        "num_iterations": repetition.num_iterations,
        "iteration_stable": repetition.is_stable,
        "period_events": repetition.period_events,
        "intervals": _intervals(intervals),
        **_plain_swaps(alone),
        "swappable_bytes_in_turn": in_turn.saved_bytes,
        "paging": None if paging is None else asdict(paging),
        "published": [asdict(figure) for figure in PUBLISHED],
        "allocator": None if behavior.allocator is None else asdict(behavior.allocator),
        "blocks": list(_blocks(behavior, intervals)),
    }


def _intervals(intervals: Sequence[Idle]) -> dict[str, Any]:
    found = {str(percent): _percentiles(intervals, percent) for percent in _PERCENTS if intervals}
    return {
        "count": len(intervals),
        "percentiles_s": {percent: seconds for percent, (seconds, _) in found.items()},
        "percentiles_events": {percent: events for percent, (_, events) in found.items()},
    }


def _plain_swaps(plan: SwapPlan) -> dict[str, Any]:
    return {
        "out_bytes_per_s": plan.bandwidth.out_bytes_per_s,
        "in_bytes_per_s": plan.bandwidth.in_bytes_per_s,
        "num_swappable_intervals": plan.num_feasible,
        "num_swappable_blocks": plan.num_swappable_blocks,
        "swappable_block_bytes": plan.swappable_block_bytes,
        "swappable_bytes": plan.saved_bytes,
        "swapped_peak_bytes": plan.peak_bytes,
        "swaps": [
            {
                "block": swap.idle.block.id,
                "bytes": swap.idle.block.num_bytes,
                "idle_from_s": swap.idle.start_s,
                "idle_until_s": swap.idle.end_s,
                "away_from_s": swap.out_s,
                "away_until_s": swap.in_s,
            }
            for swap in plan.swaps
        ],
    }


def _blocks(behavior: Behavior, intervals: list[Idle]) -> Iterator[dict[str, Any]]:
    longest_s: dict[int, float] = {}
    for idle in intervals:
        longest_s[idle.block.id] = max(idle.seconds, longest_s.get(idle.block.id, 0.0))
    for block in behavior.blocks:
        plain = asdict(block)
        for name in ("name", "module", "birth_operator"):
            plain[name] = plain[name] or None
        for name in ("birth_event", "death_event"):
            del plain[name]
        yield plain | {
            "bytes": plain.pop("num_bytes"),
            "lives_at_peak": block.lives_after(behavior.peak.event),
            "longest_idle_s": longest_s.get(block.id, 0.0),
            "num_accesses": len(block.accesses),
        }


# Profiles as tables in the terminal: a row for each kind of unit, the kinds in the order they come.

_LEAST_NAME = 12
"""Letters of a unit's name, however narrow the terminal is."""


def print_profile(profile: Profile, console: Console) -> None:
    """What the units of a model cost, at every micro-batch size that the profile knows."""
    kinds = sum(unit.same_as is None for unit in profile.units)
    threads = f", {profile.num_threads} threads" if profile.num_threads else ""
    how = "measured on" if profile.is_measured else "seconds estimated for"
    console.print(f"[bold]{escape(profile.model)}[/bold]")
    console.print(
        f"{profile.num_operators} operators in {len(profile.units)} units of {kinds} kinds, "
        f"{bytes_text(profile.parameter_bytes)} of parameters"
    )
    console.print(f"{how} {escape(profile.device)}{threads}", style="dim")
    console.print(f"with {profile.versions}", style="dim")
    for micro_batch in profile.micro_batches:
        console.print(f"\nA micro-batch of {micro_batch}", style="bold")
        console.print(_table(profile, micro_batch, console.width))
    if profile.codecs:
        console.print("\nCodecs, for a million values", style="bold")
        console.print(_codecs(profile.codecs))


def _codecs(rates: Sequence[CodecRate]) -> Table:
    times = ((one.encode_s, one.decode_s, one.back_encode_s, one.back_decode_s) for one in rates)
    rows = (
        (escape(rate.codec), *(seconds_text(1e6 * one) for one in own))
        for rate, own in zip(rates, times, strict=True)
    )
    headings = ("codec", "encode", "decode", "encode gradient", "decode gradient")
    return columns(headings, rows, words=("codec",))


def _table(profile: Profile, micro_batch: int, width: int) -> Table:
    whole = stage_cost(profile, 0, len(profile.units), micro_batch)
    headings = ["forward", "backward", "weights", "saved", "sends"]
    footers = [
        seconds_text(whole.forward_s),
        seconds_text(whole.backward_s),
        bytes_text(whole.parameter_bytes),
        bytes_text(whole.saved_bytes),
        "",
    ]
    if profile.is_measured:
        headings.append("±")
        footers.append("")
    names, rows = [], []
    for index, unit in enumerate(profile.units):
        if unit.same_as is None:
            times = 1 + sum(other.same_as == index for other in profile.units)
            names.append((unit.name, f" ×{times}" if times > 1 else ""))
            rows.append(_row(unit, unit.at(micro_batch))[: len(headings)])
    wide = (max(map(len, cells)) for cells in zip(headings, footers, *rows, strict=True))
    left = width - sum(GAP + letters for letters in wide)
    table = columns(("unit", *headings), words=("unit",))
    table.show_footer, table.footer_style = True, "bold"
    for column, footer in zip(table.columns, (f"all ×{len(profile.units)}", *footers), strict=True):
        column.footer = footer
    for (name, suffix), row in zip(names, rows, strict=True):
        table.add_row(escape(_shortened(name, max(_LEAST_NAME, left - len(suffix)))) + suffix, *row)
    return table


def _row(unit: UnitProfile, cost: UnitCost) -> list[str]:
    return [
        seconds_text(cost.forward_s),
        seconds_text(cost.backward_s),
        bytes_text(unit.parameter_bytes),
        bytes_text(cost.saved_bytes),
        bytes_text(cost.boundary_bytes),
        f"{cost.spread / 2:.0%}",
    ]


def _shortened(name: str, longest: int) -> str:
    """What is too long has its first words as one letter each: numbers and the end say most about a unit."""
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if len(".".join(words)) > longest and not word.isdecimal():
            words[place] = word[:1]
    short = ".".join(words)
    return short if len(short) <= longest else f"{short[: longest - 1]}…"
