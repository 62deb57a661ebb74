"""The timelines of a run's first recorded batches: the predicted one above the measured one, on one axis.

Colours, numbers and legend are those of the picture that `bireme simulate` draws. A group that a script can
stretch holds what moves with time; text in it is placed by a transform, so that it can be kept in shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bireme.report import palette
from bireme.report.legend import Contents, legend
from bireme.report.names import rank_name
from bireme.report.page.axes import Quantity, Scale, value_text
from bireme.report.page.figures import idle_share
from bireme.report.page.markup import tag, titled, words
from bireme.report.page.themed import themed
from bireme.report.shapes import Anchor, Rect, Shape, Text, fitted, text_width
from bireme.report.units import seconds_text
from bireme.schedule.grid import NAMES, number
from bireme.schedule.instruction import COMPUTE, Kind
from bireme.timeline.timeline import BUSY, Interval, RankTimeline, Timeline, Transfers

__all__ = ["timeline_figure"]

WIDTH = 1120
LEFT, RIGHT = 150, WIDTH - 14
HEAD = 30
FLAG = 7
LINK = 5
GAP = 7
BETWEEN = 14
"""Between the predicted and the measured lanes."""
LANES = ((4, 30), (8, 24), (16, 18))
"""Up to how many ranks a lane is how high."""
LOWEST_LANE = 12
MARK, FLAG_WIDTH = 2, 5
SIZES = (11, 9)
MOST_BATCHES = 8
MOST_IN_A_LANE = 400
X_MARKS = 9


def timeline_figure(predicted: Timeline | None, measured: Timeline | None) -> str:
    """Both timelines, or the one there is; nothing where there is none."""
    found = [one for one in (predicted, measured) if one is not None]
    if not found:
        return ""
    num_batches = min(map(_num_batches, found))
    end_s = max(_end_s(one, num_batches) for one in found)
    scale = Scale(0.0, end_s or 1.0, LEFT, RIGHT, Quantity.SECONDS)
    still: list[str] = []
    moving: list[str] = []
    y = 4.0
    for timeline, name in ((predicted, "predicted"), (measured, "measured")):
        if timeline is None:
            continue
        view = _View(timeline, scale, num_batches, name)
        still.append(themed(view.beds(y)))
        moving.extend(view.lanes(y))
        y += view.height + BETWEEN
    contents = _contents(found, scale, num_batches)
    key = legend(contents, LEFT, y + 34, WIDTH - LEFT)
    bottom = max(shape.y for shape in key if isinstance(shape, Text)) + 14
    frame = tag("rect", x=LEFT - 1, y=0, width=RIGHT - LEFT + 2, height=y)
    title = "The timeline of some batches"
    picture = tag(
        "svg",
        titled(title),
        tag("defs", tag("clipPath", frame, id="clip-lanes"), _stripes()),
        tag("g", *_axis(scale, y), class_="x-axis"),
        *still,
        tag("g", tag("g", *moving, class_="zoomed"), clip_path="url(#clip-lanes)"),
        themed(key),
        viewBox=f"0 0 {WIDTH} {bottom:.0f}",
        class_="plot lanes",
        role="img",
        aria_label=title,
        data_along="seconds",
        data_range=f"[0, {scale.most:.9g}, {LEFT}, {RIGHT}]",
        data_bottom=y,
    )
    return tag("figure", tag("div", picture, class_="plots"), class_="chart wide")


@dataclass(frozen=True, slots=True)
class _View:
    """One of the timelines and where it goes."""

    timeline: Timeline
    scale: Scale
    num_batches: int
    name: str

    @property
    def lane(self) -> float:
        """The height of a rank's computations."""
        count = self.timeline.program.num_ranks
        return next((height for most, height in LANES if count <= most), LOWEST_LANE)

    @property
    def height(self) -> float:
        """Of all lanes and the heading."""
        return HEAD + sum(self.row(rank.rank) for rank in self.timeline.ranks)

    def row(self, rank: int) -> float:
        """The height of all that belongs to a rank."""
        return FLAG + self.lane + (LINK + 2 if self.incoming(rank) else 0) + GAP

    def incoming(self, rank: int) -> list[Transfers]:
        """What comes to a rank from others and takes time."""
        return [
            one
            for one in self.timeline.transfers
            if one.destination == rank and not one.is_sync and any(map(float.__lt__, one.start_s, one.end_s))
        ]

    def beds(self, top: float) -> Iterator[Shape]:
        """The heading, the names of the ranks, and the lanes as if all were idle."""
        yield Text(0, top + 10, self.name, 13, palette.INK, bold=True)
        yield Text(LEFT, top + 10, self._figures(), 12, palette.PALE_INK)
        y = top + HEAD
        width = RIGHT - LEFT
        for rank in self.timeline.ranks:
            middle = y + FLAG + self.lane / 2
            name = fitted(rank_name(self.timeline.program, rank.rank), 12, LEFT - 10)
            yield Text(0, middle, name, 12, palette.INK)
            yield Rect(LEFT, y + FLAG, width, self.lane, palette.IDLE, palette.IDLE_STRIPES, role="lane")
            if self.incoming(rank.rank):
                yield Rect(LEFT, y + FLAG + self.lane + 2, width, LINK, palette.LINK_BED, role="link")
            y += self.row(rank.rank)

    def lanes(self, top: float) -> Iterator[str]:
        """What each rank does and when, and what is on its way to it."""
        y = top + HEAD
        for rank in self.timeline.ranks:
            yield self._beyond(rank.rank, y + FLAG)
            intervals = list(self.intervals(rank))
            for interval in intervals:
                if interval.instruction.kind in COMPUTE:
                    yield themed(self._computation(interval, y + FLAG))
            for interval in intervals:
                if interval.instruction.kind not in COMPUTE:
                    yield self._step(interval, y + FLAG)
            for transfers in self.incoming(rank.rank):
                yield themed(self._messages(transfers, y + FLAG + self.lane + 2))
            y += self.row(rank.rank)

    def _beyond(self, rank: int, y: float) -> str:
        """Nothing where the other timeline goes on behind this one's end: that is no idleness."""
        left = self.scale.at(min(self.timeline.makespan_s, self.scale.most))
        height = self.row(rank) - FLAG - GAP
        return tag("rect", x=left, y=y, width=RIGHT - left, height=height, class_="beyond")

    def _figures(self) -> str:
        batch_s = float(f"{self.timeline.steady_batch_s:.3g}")
        more = self.timeline.program.num_batches - self.num_batches
        cut = f" · {more} more recorded" if more else ""
        return f"{_seconds(batch_s)} a batch, devices idle {idle_share(self.timeline):.0%} of it{cut}"

    def intervals(self, rank: RankTimeline) -> Iterator[Interval]:
        """What uses the device and begins before the picture ends."""
        for interval in rank.intervals():
            if interval.instruction.kind in BUSY and interval.start_s < self.scale.most:
                yield interval

    def _computation(self, interval: Interval, y: float) -> Iterator[Shape]:
        step = interval.instruction
        program = self.timeline.program
        colour = palette.fill(step.batch, step.kind)
        left, right = self.scale.at(interval.start_s), self.scale.at(interval.end_s)
        width = right - left - (0.6 if right - left > 3 else 0)
        yield Rect(left, y, width, self.lane, colour, role="compute", title=_told(self.timeline, interval))
        stages = program.stages_of(program.rank_of_stage[step.stage])
        if len(stages) > 1:
            bar = max(self.lane / 10, 2)
            height = self.lane if len(stages) == 2 else self.lane / 2
            at = y + stages.index(step.stage) / (len(stages) - 1) * (height - bar)
            yield Rect(left, at, width, bar, palette.darker(colour), role="stage")
        text = number(program, step)
        size = next((one for one in SIZES if one <= self.lane and text_width(text, one) <= width), None)
        if size is not None:
            yield Text(left + width / 2, y + self.lane / 2, text, size, palette.on(colour), Anchor.MIDDLE)

    def _step(self, interval: Interval, y: float) -> str:
        """An update or a trial step, with a flag so that it is seen at any length."""
        is_update = interval.instruction.kind is Kind.UPDATE
        colour = palette.UPDATE if is_update else palette.TRIAL
        left, right = self.scale.at(interval.start_s), self.scale.at(interval.end_s)
        width = right - left
        long = themed([Rect(left, y, width, self.lane, colour, role="step")]) if width > MARK else ""
        lasts = _seconds(interval.end_s - interval.start_s)
        title = f"{'update' if is_update else 'trial step'} · batch {interval.instruction.batch} · {lasts}"
        # Both often stand at the same moment, so their flags wave to different sides.
        side = -1 if is_update else 1
        cloth = side * (FLAG_WIDTH + 1)
        flag = tag(
            "path",
            titled(title),
            d=f"M{-side} {self.lane}V{-FLAG}H{cloth}V-3H{side}V{self.lane}z",
            transform=f"translate({left:.2f} {y:.2f})",
            class_="flag" if is_update else "flag trial",
        )
        return long + flag

    def _messages(self, transfers: Transfers, y: float) -> Iterator[Shape]:
        track = self.timeline.ranks[transfers.destination].track
        for start_s, end_s, index, num_bytes in zip(
            transfers.start_s, transfers.end_s, transfers.received_by, transfers.num_bytes, strict=True
        ):
            if start_s < self.scale.most and end_s > start_s:
                left = self.scale.at(start_s)
                step = track[index]
                is_forward = step.kind in (Kind.FORWARD, Kind.RECV_FORWARD)
                colour = palette.fill(step.batch, Kind.FORWARD if is_forward else Kind.BACKWARD)
                what = "activations" if is_forward else "gradients"
                title = f"{what} from rank {transfers.source}, {num_bytes:,.0f} bytes"
                yield Rect(left, y, self.scale.at(end_s) - left, LINK, colour, role="message", title=title)


def _num_batches(timeline: Timeline) -> int:
    """How many batches can be told apart."""
    program = timeline.program
    most = max(sum(rank.mask(BUSY)) for rank in timeline.ranks) / program.num_batches
    return max(min(program.num_batches, MOST_BATCHES, int(MOST_IN_A_LANE / max(most, 1))), 1)


def _end_s(timeline: Timeline, num_batches: int) -> float:
    is_cut = num_batches < timeline.program.num_batches
    return timeline.batch_end_s()[num_batches - 1] if is_cut else timeline.makespan_s


def _axis(scale: Scale, bottom: float) -> Iterator[str]:
    for mark in scale.marks(X_MARKS):
        x = scale.at(mark)
        yield tag("line", x1=x, x2=x, y1=HEAD, y2=bottom, class_="grid")
        text = words(value_text(mark, scale.quantity))
        yield tag("text", text, x=x, y=bottom + 15, class_="mark", text_anchor="middle")


def _stripes() -> str:
    line = tag("line", x1=0, y1=0, x2=0, y2=6, stroke="var(--idle-stripes)", stroke_width=2)
    return tag(
        "pattern",
        line,
        id="idle",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


def _told(timeline: Timeline, interval: Interval) -> str:
    """What a reader sees who points at a computation."""
    step = interval.instruction
    what = f"{NAMES[step.kind]} {number(timeline.program, step)}"
    when = f"{_seconds(interval.start_s)} to {_seconds(interval.end_s)}"
    lasts = _seconds(interval.end_s - interval.start_s)
    return f"{what} · stage {step.stage} · batch {step.batch} · version {step.version} · {when} ({lasts})"


def _seconds(seconds: float) -> str:
    return seconds_text(max(seconds, 0.0))


def _contents(timelines: Sequence[Timeline], scale: Scale, num_batches: int) -> Contents:
    """What of all that the legend must explain."""
    views = [_View(one, scale, num_batches, "") for one in timelines]
    steps = {
        interval.instruction
        for view in views
        for rank in view.timeline.ranks
        for interval in view.intervals(rank)
    }
    programs = [one.program for one in timelines]
    return Contents(
        batches=tuple(sorted({step.batch for step in steps if step.kind in COMPUTE})),
        kinds=frozenset(step.kind for step in steps),
        has_versions=False,
        has_links=any(view.incoming(rank.rank) for view in views for rank in view.timeline.ranks),
        has_syncs=False,
        most_stages=max(len(one.stages_of(rank)) for one in programs for rank in range(one.num_ranks)),
    )
