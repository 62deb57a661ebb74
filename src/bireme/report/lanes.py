"""The lanes of a timeline as shapes: one painter for the picture in a file and for the page of a run.

One lane per rank, time to the right. A lane is striped where the rank is idle, so a bubble is seen before
anything is read. Under it runs a strip of the weight versions the rank computes on, and a thin line for
each rank it gets messages from and each way of its chunks between tiers. A long timeline is cut off after the
batches that a reader can distinguish.
"""

import itertools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from bireme.bounds import seconds_text
from bireme.report import palette
from bireme.report.shapes import Anchor, Flag, Rect, Scale, Shape, Text, fitted, text_width
from bireme.schedule.grid import NAMES, number, rank_name
from bireme.schedule.instruction import AVERAGES, COMPUTE, Instruction, Kind, moved_item
from bireme.timeline.timeline import (
    AVERAGE_SYNC,
    BUSY,
    GRADIENT_SYNC,
    Copies,
    Interval,
    RankTimeline,
    Timeline,
    Transfers,
    sync_name,
)

_FLAG = 8
"""Room above a lane for the flags of updates."""
_STRIP = 12
_LINK = 7
SPACE = 4
"""Between a lane, its strip and its links."""
_GAP = 12
"""Between ranks."""
_HEIGHTS = ((8, 40), (16, 30), (32, 22))
"""Up to how many lanes in a picture a lane is how high."""
_LOWEST = 14
_MARK = 2
"""An update no wider than this is its flag alone."""
_SMALL = 10
"""The size of names next to a lane."""
_SIZES = (11, 9)
"""Of numbers in rectangles; where neither fits there is none."""

SHOWN = BUSY | AVERAGES
STEPS = {
    Kind.UPDATE: ("update", palette.UPDATE),
    Kind.TRIAL: ("trial step", palette.TRIAL),
    Kind.AVERAGE_START: ("average starts", palette.AVERAGE),
    Kind.AVERAGE_END: ("average ends", palette.AVERAGE),
}

_MOST_BATCHES = 12
_MOST_RECTANGLES = 20_000
_MOST_IN_A_LANE = 500
"""More than that would each be less than three pixels wide."""


def drawn_batches(timeline: Timeline) -> int:
    """The number of batches that a reader can distinguish."""
    program = timeline.program
    counts = [sum(rank.mask(BUSY)) for rank in timeline.ranks]
    room = min(_MOST_RECTANGLES / max(sum(counts), 1), _MOST_IN_A_LANE / max(*counts, 1))
    return max(min(math.floor(room * program.num_batches), _MOST_BATCHES, program.num_batches), 1)


def end_of(timeline: Timeline, num_batches: int) -> float:
    """When the last batch that is drawn ends."""
    is_cut = num_batches < timeline.program.num_batches
    return timeline.batch_end_s()[num_batches - 1] if is_cut else timeline.makespan_s


def plain_seconds(seconds: float) -> str:
    """The usual text in letters that every font has."""
    return seconds_text(max(seconds, 0.0)).replace("µ", "u")


@dataclass(frozen=True, slots=True)
class _LaneRow:
    """All of one rank: the tops of its computations, of its strip of versions, and of each of its lines."""

    rank: RankTimeline
    y: float
    strip_y: float
    lines: tuple[tuple[Transfers | Copies, float], ...]


@dataclass(frozen=True, slots=True)
class Lanes:
    """What of a timeline is drawn, and how large. Make one with `lanes_of`."""

    timeline: Timeline
    num_batches: int
    scale: Scale
    margin: float
    """Where the names begin."""
    lane: float
    """The height of a rank's computations."""
    has_strips: bool
    lines: tuple[tuple[Transfers | Copies, ...], ...]
    """For each rank what comes to it, then the ways of its chunks between tiers, if that takes time."""
    head: float = 0.0
    """Room above each lane for the rank's name; 0 puts the name to the left of the lane."""

    def height_of(self, rank: int) -> float:
        """Of all that belongs to a rank."""
        strip = SPACE + _STRIP if self.has_strips else 0
        return self.head + _FLAG + self.lane + strip + len(self.lines[rank]) * (SPACE + _LINK)

    def rows(self, top: float) -> Iterator["_LaneRow"]:
        """Where the parts of each rank are."""
        for rank in self.timeline.ranks:
            y = top + self.head + _FLAG
            strip_y = y + self.lane + SPACE
            first_y = strip_y + _STRIP + SPACE if self.has_strips else strip_y
            lines = enumerate(self.lines[rank.rank])
            placed = tuple((line, first_y + place * (_LINK + SPACE)) for place, line in lines)
            yield _LaneRow(rank, y, strip_y, placed)
            top += self.height_of(rank.rank) + _GAP

    @property
    def height(self) -> float:
        """Of all ranks."""
        return sum(self.height_of(rank) + _GAP for rank in range(self.timeline.program.num_ranks))

    def beds(self, top: float) -> Iterator[Shape]:
        """The names, and the lanes as if all were idle."""
        left, width = self.scale.start, self.scale.end - self.scale.start
        for row in self.rows(top):
            name = rank_name(self.timeline.program, row.rank.rank)
            if self.head:
                yield Text(left, row.y - _FLAG - self.head / 2, name, 12, palette.INK)
            else:
                shown = fitted(name, 13, left - self.margin - 10)
                yield Text(self.margin, row.y + self.lane / 2, shown, 13, palette.INK)
            yield Rect(left, row.y, width, self.lane, palette.IDLE, palette.IDLE_STRIPES, role="lane")
            if self.has_strips:
                yield Text(
                    left - 8, row.strip_y + _STRIP / 2, "version", _SMALL, palette.PALE_INK, Anchor.END
                )
            for line, y in row.lines:
                name = _line_name(self.timeline, line)
                yield Text(left - 8, y + _LINK / 2, name, _SMALL, palette.PALE_INK, Anchor.END)
                yield Rect(left, y, width, _LINK, palette.LINK_BED, role="link")

    def work(self, top: float) -> Iterator[Shape]:
        """What each rank does and when, and what is on its way to it."""
        for row in self.rows(top):
            intervals = list(self.intervals(row.rank))
            computed = [interval for interval in intervals if interval.instruction.kind in COMPUTE]
            for interval in computed:
                yield from self._computation(interval, row.y)
            for interval in intervals:
                if interval.instruction.kind not in COMPUTE:
                    yield from self._step(interval, row.y)
            if self.has_strips:
                yield from self._strip(computed, row.strip_y)
            for line, y in row.lines:
                yield from self._bars(row.rank, line, y)

    def intervals(self, rank: RankTimeline) -> Iterator[Interval]:
        """What uses the device and can be seen."""
        is_cut = self.num_batches < self.timeline.program.num_batches
        end_s = self.scale.most
        for interval in rank.intervals():
            if interval.instruction.kind not in SHOWN:
                continue
            if interval.start_s > end_s or (is_cut and interval.start_s >= end_s):
                return
            yield interval

    def _span(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Where something begins, and how wide it is."""
        left = self.scale.at(start_s)
        return left, self.scale.at(end_s) - left

    def _computation(self, interval: Interval, y: float) -> Iterator[Shape]:
        step, program = interval.instruction, self.timeline.program
        stages = program.stages_of(program.rank_of_stage[step.stage])
        colour = palette.fill(step.batch, step.kind)
        left, whole = self._span(interval.start_s, interval.end_s)
        width = _apart(whole)
        yield Rect(left, y, width, self.lane, colour, role="compute", title=self._told(interval))
        # Two stages have the edges for their bars; the steps of more leave the lower half to the number.
        height = self.lane if len(stages) < 3 else self.lane / 2
        if len(stages) > 1:
            bar = max(self.lane / 10, 2)
            top = y + stages.index(step.stage) / (len(stages) - 1) * (height - bar)
            yield Rect(left, top, width, bar, palette.darker(colour), role="stage")
        text = number(program, step)
        size = next((size for size in _SIZES if size <= height and text_width(text, size) <= width), None)
        if size is not None:
            middle = y + self.lane - height / 2
            yield Text(left + width / 2, middle, text, size, palette.on(colour), Anchor.MIDDLE, within=width)

    def _told(self, interval: Interval) -> str:
        """What a reader sees who points at a computation."""
        step = interval.instruction
        what = f"{NAMES[step.kind]} {number(self.timeline.program, step)}"
        when = f"{plain_seconds(interval.start_s)} to {plain_seconds(interval.end_s)}"
        return f"{what} · stage {step.stage} · batch {step.batch} · version {step.version} · {when}"

    def _step(self, interval: Interval, y: float) -> Iterator[Shape]:
        """An update or a trial step: as wide as it is long, with a flag so that it is seen at any length."""
        what, colour = STEPS[interval.instruction.kind]
        # Those of a batch often mark the same moment, so their flags wave to different sides.
        is_left = interval.instruction.kind in (Kind.UPDATE, Kind.AVERAGE_START)
        left, width = self._span(interval.start_s, interval.end_s)
        if width > _MARK:
            yield Rect(left, y, width, self.lane, colour, role="step")
        lasts = plain_seconds(interval.end_s - interval.start_s)
        title = f"{what} · batch {interval.instruction.batch} · {lasts}"
        yield Flag(left, y - _FLAG, self.lane + _FLAG, colour, is_left=is_left, title=title)

    def _strip(self, computed: Sequence[Interval], y: float) -> Iterator[Shape]:
        """Which weight version is computed on, joined over computations that follow each other."""
        for version, run in itertools.groupby(
            computed, key=lambda interval: interval.instruction.version or 0
        ):
            joined = list(run)
            left, width = self._span(joined[0].start_s, joined[-1].end_s)
            colour = palette.version_fill(version)
            yield Rect(left, y, _apart(width), _STRIP, colour, role="version")
            text = f"v{version}"
            if text_width(text, 9) <= width:
                yield Text(
                    left + width / 2, y + _STRIP / 2, text, 9, palette.on(colour), Anchor.MIDDLE, within=width
                )

    def _bars(self, rank: RankTimeline, line: Transfers | Copies, y: float) -> Iterator[Shape]:
        """The messages or copies of a line."""
        causes = line.posted_by if isinstance(line, Copies) else line.received_by
        for start_s, end_s, index, num_bytes in zip(
            line.start_s, line.end_s, causes, line.num_bytes, strict=True
        ):
            if start_s < self.scale.most and end_s > start_s:
                left, width = self._span(start_s, end_s)
                colour, what = _load(rank.track[index], line)
                role = "copy" if isinstance(line, Copies) else "message"
                title = f"{what}, {num_bytes:,.0f} bytes"
                yield Rect(left, y, width, _LINK, colour, role=role, title=title)


def lanes_of(
    timeline: Timeline, num_batches: int, scale: Scale, margin: float, num_lanes: int, *, head: float = 0.0
) -> Lanes:
    """The first batches of a timeline, in a picture that has so many lanes in all.

    Names begin at the margin, or are in the `head` above each lane. The lanes go from the start of the scale
    to its end.
    """
    program = timeline.program
    steps = (step for track in program.tracks for step in track.written() if step.kind in COMPUTE)
    return Lanes(
        timeline=timeline,
        num_batches=num_batches,
        scale=scale,
        margin=margin,
        lane=next((height for most, height in _HEIGHTS if num_lanes <= most), _LOWEST),
        has_strips=len({step.version for step in steps}) > 1,
        lines=tuple(
            (
                *(one for one in timeline.transfers if one.destination == rank and _takes_time(one)),
                *(
                    copies
                    for moved in timeline.paging
                    for copies in moved.copies
                    if moved.rank == rank and _takes_time(copies)
                ),
            )
            for rank in range(program.num_ranks)
        ),
        head=head,
    )


def _takes_time(line: Transfers | Copies) -> bool:
    return any(end > start for start, end in zip(line.start_s, line.end_s, strict=True))


def _line_name(timeline: Timeline, line: Transfers | Copies) -> str:
    if isinstance(line, Copies):
        return f"{line.source} to {line.destination}"
    return sync_name(timeline, line) if line.is_sync else f"from rank {line.source}"


def _apart(width: float) -> float:
    """The width of a rectangle that leaves a gap before the next, unless it is too narrow for that."""
    return width - 1 if width > 4 else width


def _load(step: Instruction, line: Transfers | Copies) -> tuple[palette.Colour, str]:
    """The colour of a message or copy, and what it brings."""
    if isinstance(line, Copies):
        shade = Kind.FORWARD if step.kind is Kind.FETCH else Kind.BACKWARD
        return palette.fill(step.batch, shade), f"{moved_item(step)} of stage {step.stage}"
    if line.is_sync and step.kind is Kind.AVERAGE_START:
        colour, what = palette.AVERAGE, "means of weights"
    elif line.is_sync:
        colour, what = palette.SYNC, "sums of gradients"
    elif step.kind in (Kind.FORWARD, Kind.RECV_FORWARD):
        colour, what = palette.fill(step.batch, Kind.FORWARD), "activations"
    else:
        colour, what = palette.fill(step.batch, Kind.BACKWARD), "gradients"
    return colour, f"{what} from rank {line.source}"


# What the colours and signs mean, in rows under the lanes. What does not occur is not explained.

_ROW = 26
SWATCH = 16
_SIZE = 12
_BETWEEN = 22
"""Between two entries."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample, drawn from its top left corner at 0, and its meaning."""

    width: float
    sample: tuple[Rect, ...]
    text: str


def legend(pictures: Sequence[Lanes], left: float, top: float, width: float) -> list[Shape]:
    """The legend from a corner on, in rows no wider than `width`: the batches, then the rest."""
    shapes: list[Shape] = []
    y = top
    for row in entries(pictures):
        x = left
        for entry in row:
            needed = entry.width + 6 + text_width(entry.text, _SIZE)
            if x > left and x + needed > left + width:
                x, y = left, y + _ROW
            shapes += [replace(rect, x=rect.x + x, y=rect.y + y) for rect in entry.sample]
            shapes.append(Text(x + entry.width + 6, y + SWATCH / 2, entry.text, _SIZE, palette.INK))
            x += needed + _BETWEEN
        y += _ROW
    return shapes


def entries(pictures: Sequence[Lanes]) -> tuple[list[Entry], list[Entry]]:
    """The entries about batches, and the others."""
    ranks = [(lanes, rank) for lanes in pictures for rank in lanes.timeline.ranks]
    steps = {interval.instruction for lanes, rank in ranks for interval in lanes.intervals(rank)}
    batches = sorted({step.batch for step in steps if step.kind in COMPUTE})
    kinds = {step.kind for step in steps}
    return list(_batches(batches, kinds)), list(_signs(pictures, batches, kinds))


def _batches(batches: Sequence[int], kinds: Set[Kind]) -> Iterator[Entry]:
    shown = [kind for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT) if kind in kinds]
    for hue in range(len(palette.HUES)):
        same = [str(batch) for batch in batches if batch % len(palette.HUES) == hue]
        if same:
            yield _beside([palette.fill(hue, kind) for kind in shown], f"batch {', '.join(same)}")
    yield Entry(-6, (), "numbers: micro-batches, counted through all batches")


def _signs(pictures: Sequence[Lanes], batches: Sequence[int], kinds: Set[Kind]) -> Iterator[Entry]:
    first = batches[0] if batches else 0
    for kind in palette.SHADES:
        if kind in kinds:
            yield _beside([palette.fill(first, kind)], NAMES[kind])
    idle = Rect(0, 0, 2 * SWATCH, SWATCH, palette.IDLE, palette.IDLE_STRIPES, role="key")
    yield Entry(2 * SWATCH, (idle,), "idle (bubble)")
    if Kind.UPDATE in kinds:
        yield _flag_key(-6, palette.UPDATE, "update")
    if Kind.TRIAL in kinds:
        yield _flag_key(0, palette.TRIAL, "trial step")
    if kinds & AVERAGES:
        yield _flag_key(0, palette.AVERAGE, "average of weights starts, ends")
    if any(lanes.has_strips for lanes in pictures):
        colours = [palette.version_fill(0), palette.version_fill(1)]
        yield _beside(colours, "weight version computed on, even and odd", 12)
    programs = [lanes.timeline.program for lanes in pictures]
    most_stages = max(len(one.stages_of(rank)) for one in programs for rank in range(one.num_ranks))
    if most_stages > 1:
        yield _stage_bars(first, SWATCH if most_stages == 2 else SWATCH / 2)
    both = [palette.fill(first, Kind.FORWARD), palette.fill(first, Kind.BACKWARD)]
    lines = [(lanes.timeline, line) for lanes in pictures for own in lanes.lines for line in own]
    sent = [(timeline, line) for timeline, line in lines if isinstance(line, Transfers)]
    syncs = {sync_name(timeline, line) for timeline, line in sent if line.is_sync}
    if any(not line.is_sync for _, line in sent):
        yield _beside(both, "activations and gradients sent to the rank", 6)
    if GRADIENT_SYNC in syncs:
        yield _beside([palette.SYNC], "gradient sync with replicas", 6)
    if AVERAGE_SYNC in syncs:
        yield _beside([palette.AVERAGE], "average of weights with replicas", 6)
    if len(lines) > len(sent):
        yield _beside(both, "chunks fetched from the tier below and evicted to it", 6)


def _beside(colours: Sequence[palette.Colour], text: str, height: float = SWATCH) -> Entry:
    top = (SWATCH - height) / 2
    swatches = (Rect(SWATCH * i, top, SWATCH, height, colour, role="key") for i, colour in enumerate(colours))
    return Entry(SWATCH * len(colours), tuple(swatches), text)


def _flag_key(offset: float, colour: palette.Colour, text: str) -> Entry:
    pole = Rect(-offset - 1, 0, 2, SWATCH, colour, role="key")
    return Entry(8, (pole, Rect(0, 0, 6, 5, colour, role="key")), text)


def _stage_bars(batch: int, low: float) -> Entry:
    colour = palette.fill(batch, Kind.FORWARD)
    swatches = [Rect(x, 0, SWATCH - 1, SWATCH, colour, role="key") for x in (0, SWATCH)]
    bars = [
        Rect(x, y, SWATCH - 1, 3, palette.darker(colour), role="key") for x, y in ((0, 0), (SWATCH, low - 3))
    ]
    return Entry(2 * SWATCH, (*swatches, *bars), "bar: stage of the rank; higher is earlier in the model")
