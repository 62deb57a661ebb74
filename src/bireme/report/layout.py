"""Where everything goes in the picture of a timeline.

One lane per rank, time to the right. A lane is striped where the rank is idle, so a bubble is seen before
anything is read. Under it runs a strip of the weight versions the rank computes on, and a thin line for
each rank it gets messages from. A long timeline is cut off after the batches that can be told apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from bireme.report import palette
from bireme.report.axis import round_step
from bireme.report.legend import Contents, legend
from bireme.report.names import rank_name
from bireme.report.shapes import Anchor, Line, Picture, Rect, Shape, Text, fitted, text_width
from bireme.report.units import seconds_text
from bireme.schedule.grid import NAMES, number
from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.timeline.timeline import BUSY, Interval, RankTimeline, Timeline, Transfers

__all__ = ["laid_out"]

WIDTH = 1400
MARGIN = 24
TOP = 80
RIGHT = WIDTH - MARGIN - 24
FLAG = 8
"""Room above a lane for the flags of updates."""
STRIP = 12
LINK = 7
SPACE = 4
"""Between a lane, its strip and its links."""
GAP = 12
"""Between ranks."""
LANES = ((8, 40), (16, 30), (32, 22))
"""Up to how many ranks a lane is how high."""
MARK, FLAG_WIDTH = 2, 6
SIZES = (11, 9)
"""Of numbers in rectangles; where neither fits there is none."""
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))

MOST_BATCHES = 12
MOST_RECTANGLES = 20_000
MOST_IN_A_LANE = 500
"""More than that would each be less than three pixels wide."""


def laid_out(timeline: Timeline) -> Picture:
    """The picture of a timeline, 1400 pixels wide and as high as its ranks need."""
    view = _view(timeline)
    lanes: list[Shape] = []
    y = float(TOP)
    for rank in timeline.ranks:
        lanes += _lane(view, rank, y)
        y += view.height(rank.rank) + GAP
    axis = list(_axis(view, y))
    key = legend(_contents(view), MARGIN, y + 50, WIDTH - 2 * MARGIN)
    title = _title(timeline)
    head = (
        Text(MARGIN, 28, fitted(title, 20, WIDTH - 2 * MARGIN), 20, palette.INK, bold=True),
        Text(MARGIN, 54, _figures(view), 13, palette.PALE_INK),
    )
    bottom = max(shape.y for shape in key if isinstance(shape, Text))
    return Picture(WIDTH, math.ceil(bottom) + MARGIN, title, (*head, *axis, *lanes, *key))


@dataclass(frozen=True, slots=True)
class _View:
    """What of a timeline is drawn, and how large."""

    timeline: Timeline
    num_batches: int
    end_s: float
    left: float
    lane: float
    """The height of a rank's computations."""
    has_strips: bool
    links: tuple[tuple[Transfers, ...], ...]
    """For each rank what comes to it and takes time."""

    def x(self, time_s: float) -> float:
        """Where a moment is."""
        share = time_s / self.end_s if self.end_s else 0.0
        return self.left + min(share, 1.0) * (RIGHT - self.left)

    def height(self, rank: int) -> float:
        """Of all that belongs to a rank."""
        strip = SPACE + STRIP if self.has_strips else 0
        return FLAG + self.lane + strip + len(self.links[rank]) * (SPACE + LINK)

    def intervals(self, rank: RankTimeline) -> Iterator[Interval]:
        """What uses the device and can be seen."""
        is_cut = self.num_batches < self.timeline.program.num_batches
        for interval in rank.intervals():
            if interval.instruction.kind not in BUSY:
                continue
            if interval.start_s > self.end_s or (is_cut and interval.start_s >= self.end_s):
                return
            yield interval


def _view(timeline: Timeline) -> _View:
    program = timeline.program
    num_batches = _num_batches(timeline)
    is_cut = num_batches < program.num_batches
    steps = [step for track in program.tracks for step in track.written() if step.kind in COMPUTE]
    names = [text_width(rank_name(program, rank), 13) for rank in range(program.num_ranks)]
    return _View(
        timeline=timeline,
        num_batches=num_batches,
        end_s=timeline.batch_end_s()[num_batches - 1] if is_cut else timeline.makespan_s,
        left=MARGIN + max(names) + 14,
        lane=next((height for most, height in LANES if program.num_ranks <= most), 14),
        has_strips=len({step.version for step in steps}) > 1,
        links=tuple(
            tuple(t for t in timeline.transfers if t.destination == rank and _takes_time(t))
            for rank in range(program.num_ranks)
        ),
    )


def _num_batches(timeline: Timeline) -> int:
    """How many batches are drawn."""
    program = timeline.program
    counts = [sum(rank.mask(BUSY)) for rank in timeline.ranks]
    room = min(MOST_RECTANGLES / max(sum(counts), 1), MOST_IN_A_LANE / max(*counts, 1))
    return max(min(math.floor(room * program.num_batches), MOST_BATCHES, program.num_batches), 1)


def _takes_time(transfers: Transfers) -> bool:
    return any(end > start for start, end in zip(transfers.start_s, transfers.end_s, strict=True))


def _title(timeline: Timeline) -> str:
    program = timeline.program
    ranks = "" if program.num_ranks == program.num_stages else f" on {program.num_ranks} ranks"
    counts = (
        _counted(program.num_stages, "stage") + ranks,
        _counted(program.num_microbatches, "micro-batch"),
        _counted(program.num_batches, "batch"),
    )
    title = f"{program.name} · {' · '.join(counts)} · {timeline.source}"
    return "".join(c if c.isprintable() else "?" for c in title)  # a name from a file may hold anything


def _counted(count: int, what: str) -> str:
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{ending}"


def _figures(view: _View) -> str:
    timeline, num_batches = view.timeline, view.timeline.program.num_batches
    text = f"window {_seconds(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%} of it"
    if num_batches > 1:
        steady = f"{_seconds(timeline.steady_batch_s)} a batch, bubble {timeline.steady_bubble_fraction:.1%}"
        text += f" · steady state {steady}"
    if view.num_batches < num_batches:
        text += f" · drawn: the first {_counted(view.num_batches, 'batch')} of {num_batches}"
    return text


def _seconds(seconds: float) -> str:
    """The usual text in letters that every font has."""
    return seconds_text(seconds).replace("µ", "u")


def _axis(view: _View, bottom: float) -> Iterator[Shape]:
    """Round times, and lines from them through all lanes."""
    unit, size = next(((u, s) for u, s in UNITS if view.end_s >= s), UNITS[0])
    most = view.end_s / size
    step = round_step(most / 10)
    digits = max(0, -math.floor(math.log10(step)))
    for i in range(math.floor(most / step + 1e-9) + 1):
        x = view.x(i * step * size)
        yield Line(x, TOP, x, bottom + 4, palette.AXIS)
        yield Text(x, bottom + 14, f"{i * step:.{digits}f} {unit}", 12, palette.PALE_INK, Anchor.MIDDLE)


def _lane(view: _View, rank: RankTimeline, top: float) -> Iterator[Shape]:
    """Everything about one rank."""
    program = view.timeline.program
    y = top + FLAG
    width = RIGHT - view.left
    yield Text(MARGIN, y + view.lane / 2, rank_name(program, rank.rank), 13, palette.INK)
    yield Rect(view.left, y, width, view.lane, palette.IDLE, palette.IDLE_STRIPES, role="lane")
    intervals = list(view.intervals(rank))
    stages = program.stages_of(rank.rank)
    for interval in intervals:
        if interval.instruction.kind in COMPUTE:
            yield from _computation(view, interval, y, stages)
    for interval in intervals:
        if interval.instruction.kind not in COMPUTE:
            yield from _step(view, interval, y)
    y += view.lane
    if view.has_strips:
        y += SPACE
        yield Text(view.left - 8, y + STRIP / 2, "version", 9, palette.PALE_INK, Anchor.END)
        yield from _strip(view, intervals, y)
        y += STRIP
    for transfers in view.links[rank.rank]:
        y += SPACE
        what = "gradient sync" if transfers.is_sync else f"from rank {transfers.source}"
        yield Text(view.left - 8, y + LINK / 2, what, 9, palette.PALE_INK, Anchor.END)
        yield Rect(view.left, y, width, LINK, palette.LINK_BED, role="link")
        yield from _messages(view, transfers, y)
        y += LINK


def _computation(view: _View, interval: Interval, y: float, stages: tuple[int, ...]) -> Iterator[Shape]:
    step = interval.instruction
    colour = palette.fill(step.batch, step.kind)
    left, right = view.x(interval.start_s), view.x(interval.end_s)
    width = _apart(right - left)
    yield Rect(left, y, width, view.lane, colour, role="compute", title=_told(view, interval))
    # Two stages have the edges for their bars; the steps of more leave the lower half to the number.
    height = view.lane if len(stages) < 3 else view.lane / 2
    middle = y + view.lane - height / 2
    if len(stages) > 1:
        bar = max(view.lane / 10, 2)
        top = y + stages.index(step.stage) / (len(stages) - 1) * (height - bar)
        yield Rect(left, top, width, bar, palette.darker(colour), role="stage")
    text = number(view.timeline.program, step)
    size = next((size for size in SIZES if size <= height and text_width(text, size) <= width), None)
    if size is not None:
        yield Text(left + width / 2, middle, text, size, palette.on(colour), Anchor.MIDDLE)


def _apart(width: float) -> float:
    """The width of a rectangle that leaves a gap before the next, unless it is too narrow for that."""
    return width - 1 if width > 4 else width


def _told(view: _View, interval: Interval) -> str:
    """What a reader sees who points at a computation."""
    step = interval.instruction
    what = f"{NAMES[step.kind]} {number(view.timeline.program, step)}"
    when = f"{_seconds(interval.start_s)} to {_seconds(interval.end_s)}"
    return f"{what} · stage {step.stage} · batch {step.batch} · version {step.version} · {when}"


def _step(view: _View, interval: Interval, y: float) -> Iterator[Shape]:
    """An update or a trial step: as wide as it is long, with a flag so that it is seen at any length."""
    is_update = interval.instruction.kind is Kind.UPDATE
    colour = palette.UPDATE if is_update else palette.TRIAL
    left, right = view.x(interval.start_s), view.x(interval.end_s)
    if right - left > MARK:
        yield Rect(left, y, right - left, view.lane, colour, role="step")
    yield Rect(left - MARK / 2, y - FLAG, MARK, view.lane + FLAG, colour, role="mark")
    # Both often stand at the same moment, so their flags wave to different sides.
    yield Rect(left - FLAG_WIDTH if is_update else left, y - FLAG, FLAG_WIDTH, FLAG - 3, colour, role="flag")


def _strip(view: _View, intervals: list[Interval], y: float) -> Iterator[Shape]:
    """Which weight version is computed on, joined over computations that follow each other."""
    computed = (interval for interval in intervals if interval.instruction.kind in COMPUTE)
    for version, run in groupby(computed, key=lambda interval: interval.instruction.version or 0):
        joined = list(run)
        left, right = view.x(joined[0].start_s), view.x(joined[-1].end_s)
        colour = palette.version_fill(version)
        yield Rect(left, y, _apart(right - left), STRIP, colour, role="version")
        text = f"v{version}"
        if text_width(text, 9) <= right - left:
            yield Text((left + right) / 2, y + STRIP / 2, text, 9, palette.on(colour), Anchor.MIDDLE)


def _messages(view: _View, transfers: Transfers, y: float) -> Iterator[Shape]:
    track = view.timeline.ranks[transfers.destination].track
    for place, received_by in enumerate(transfers.received_by):
        start, end = transfers.start_s[place], transfers.end_s[place]
        if start < view.end_s and end > start:
            left = view.x(start)
            colour = _message_colour(track[received_by], is_sync=transfers.is_sync)
            yield Rect(left, y, view.x(end) - left, LINK, colour, role="message")


def _message_colour(step: Instruction, *, is_sync: bool) -> palette.Colour:
    if is_sync:
        return palette.SYNC
    is_forward = step.kind in (Kind.FORWARD, Kind.RECV_FORWARD)
    return palette.fill(step.batch, Kind.FORWARD if is_forward else Kind.BACKWARD)


def _contents(view: _View) -> Contents:
    """What of all that the legend must explain."""
    program = view.timeline.program
    steps = [interval.instruction for rank in view.timeline.ranks for interval in view.intervals(rank)]
    return Contents(
        batches=tuple(sorted({step.batch for step in steps if step.kind in COMPUTE})),
        kinds=frozenset(step.kind for step in steps),
        has_versions=view.has_strips,
        has_links=any(not transfers.is_sync for into in view.links for transfers in into),
        has_syncs=any(transfers.is_sync for into in view.links for transfers in into),
        most_stages=max(len(program.stages_of(rank)) for rank in range(program.num_ranks)),
    )
