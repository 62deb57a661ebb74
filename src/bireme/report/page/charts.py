"""The curves of a run, and of several runs over each other; and the lanes of its replicas along the steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from bireme.bounds import bytes_text, counted, seconds_text
from bireme.report.markup import number, tag, titled, words
from bireme.report.page.curves import (
    ACROSS,
    Along,
    Chart,
    ChartEvent,
    ChartSpan,
    Curve,
    Look,
    chart_data,
    drawn,
    framed,
    share,
)
from bireme.report.page.metrics import ReplicaAbsence, Shared
from bireme.report.page.run import Run
from bireme.report.shapes import Quantity, Scale

# Long curves made short enough to draw, without losing a peak; and smoothed ones to draw with them.

_MOST_POINTS = 1000
"""About as many as there are pixels to draw them on."""

_SMOOTHING = 50
"""A smoothed curve looks back and ahead over this part of all points."""

_LEAST_EVENED = 5
"""Rates are evened over at least so many points."""

_LEAST_RATE = 1e-6
"""No rate is taken for less, as one of 0 would be the end of time."""

_LEAST_SMOOTHED = 20
"""With fewer points nothing is to be smoothed."""


_Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Points:
    """A curve: one value for each place, the places rising. `places` are indices into where it is from."""

    xs: _Values
    ys: _Values
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.xs)

    def only(self, kept: Sequence[int] | NDArray[np.int64]) -> "Points":
        """Those at some indices."""
        return Points(self.xs[kept], self.ys[kept], self.places[kept])


def finite(xs: Sequence[float], ys: Sequence[float]) -> Points:
    """The points that can be drawn: those with a value."""
    every = Points(np.asarray(xs, float), np.asarray(ys, float), np.arange(len(ys)))
    return every.only(np.flatnonzero(np.isfinite(every.ys)))


def thinned(points: Points, most: int = _MOST_POINTS) -> Points:
    """At most so many of the points, 4 or more.

    The range of places is cut into equal parts, and of each part stay the least and the greatest value, so
    that on a screen it looks as all points would. The first and the last point stay.
    """
    if len(points) <= most:
        return points
    parts = np.linspace(points.xs[0], points.xs[-1], (most - 2) // 2 + 1)[1:-1]
    kept = {0, len(points) - 1}
    for own in np.split(np.arange(len(points)), np.searchsorted(points.xs, parts)):
        if len(own):
            kept |= {int(own[points.ys[own].argmin()]), int(own[points.ys[own].argmax()])}
    return points.only(sorted(kept))


def smoothed(points: Points) -> Points | None:
    """A mean at each place that weighs values less the farther they are; None where there are too few.

    It looks back and ahead alike, so that it does not lag where a curve is steep.
    """
    if len(points) < _LEAST_SMOOTHED:
        return None
    keep = 1 - 1 / max(len(points) / _SMOOTHING, 4.0)
    ys = (_means(points.ys, keep) + _means(points.ys[::-1], keep)[::-1]) / 2
    return replace(points, ys=ys)


def evened(points: Points) -> Points:
    """Rates, each that of some points around it together, which represent equal work.

    Where a pipeline is drained its last two batches end at nearly the same moment, so the rate of one batch
    by itself may be a hundred times what was reached.
    """
    count = len(points)
    window = min(max(_LEAST_EVENED, count // _SMOOTHING), count)
    times = np.cumsum([0.0, *1 / np.maximum(points.ys, _LEAST_RATE)])
    begins = np.clip(np.arange(count) - window // 2, 0, count - window)
    return replace(points, ys=window / (times[begins + window] - times[begins]))


def _means(values: _Values, keep: float) -> _Values:
    """At each place the mean of the values so far, each step back weighing `keep` times as much."""
    weights = 1 - keep ** np.arange(1, len(values) + 1)
    sums = accumulate((1 - keep) * values, lambda total, value: keep * total + value)
    means: _Values = np.fromiter(sums, float) / weights
    return means


MOST_RUNS = 6
"""The number of colors that a reader can distinguish."""

_MOST_WITH_RAW = 2
"""Of more runs only the smoothed curves are drawn."""

_SMALL_HEIGHT = 220
_MOST_TICKS = 400
_EVALUATION = 1
"""The colour of evaluations where there is one run."""
_LANE, _LANE_HEAD = 22, 24
"""The height of a replica's lane, and the room above it for its name."""
_LEAST_LANE = 0.08
"""So much of a lane is filled by a replica that takes part, however few samples it has."""
_MOST_LANES = 32
_MOST_RECOVERIES = 10


def loss_figure(runs: Sequence[Run]) -> str:
    """The loss: raw and smoothed, with evaluations, along steps or time, linear or logarithmic."""
    curves: list[Curve] = []
    for place, run in enumerate(runs):
        curves += _loss_curves(run, place, is_alone=len(runs) == 1, has_raw=len(runs) <= _MOST_WITH_RAW)
    if not curves:
        return ""
    ticks = tuple(_ticks(runs[0])) if len(runs) == 1 else ()
    spans = tuple(map(_away, runs[0].metrics.absences())) if len(runs) == 1 else ()
    ends = tuple(tick for span in spans for tick in (span.begin, span.end) if tick.text)
    chart = Chart("Training loss", tuple(curves), ticks + ends, spans)
    can_log = all(value > 0 for curve in curves for value in curve.values)
    keys = _keys(chart, runs)
    plots = [drawn(chart, along, is_log=is_log) for is_log in (False, True)[: 1 + can_log] for along in Along]
    switches = [_switch("along", "Horizontal axis", "by step", "by time")]
    if can_log:
        switches.append(_switch("scale", "Vertical axis", "linear", "log"))
    head = tag("div", _legend(keys), tag("div", *switches, class_="switches"), class_="chart-head")
    plots_tag = tag("div", *plots, class_="plots")
    return tag("figure", head, plots_tag, chart_data(chart), class_="chart switched")


def throughput_figure(runs: Sequence[Run]) -> str:
    """Tokens a second, or samples where the runs count no tokens, evened; it has a title of its own."""
    column, unit = "tokens_per_s", "tokens/s"
    if not any(len(_points(run, column)) for run in runs):
        column, unit = "samples_per_s", "samples/s"
    curves = tuple(
        _drawn_through(run, thinned(evened(points)), run.name if len(runs) > 1 else unit, place, Look.LINE)
        for place, run in enumerate(runs)
        if len(points := _points(run, column))
    )
    if not curves:
        return ""
    chart = Chart(f"Throughput in {unit}", curves, height=240, from_zero=True)
    title = tag("h3", words(f"Throughput, {unit}"), class_="part-title")
    return title + _figure(chart, _keys(chart, runs) if len(runs) > 1 else ())


def rate_figure(run: Run) -> str:
    """The learning rate."""
    return _small_figure(run, "learning_rate", "Learning rate", 5)


def gradient_figure(run: Run) -> str:
    """The norm of the gradients, as a logarithm where it ranges far."""
    return _small_figure(run, "grad_norm", "Gradient norm", 3, may_be_log=True)


def replicas_figure(run: Run) -> str:
    """A lane for each replica, as high as its share of a batch; nothing where the shares never changed."""
    known = run.metrics.shares
    if len(known) < 2:
        return ""
    metrics = run.metrics
    width = max(len(one.shares) for one in known)
    last_step = max(metrics.last_step, known[-1].step + 1)
    x = Scale(min(known[0].step, last_step - 1), last_step, 0, ACROSS, Quantity.STEPS)
    most = max((count for one in known for count in one.shares), default=0) or 1
    names = _replica_names(run, width)
    still: list[str] = []
    moving: list[str] = []
    for replica in range(min(width, _MOST_LANES)):
        top = _LANE_HEAD + replica * (_LANE + _LANE_HEAD)
        still.append(tag("text", words(names[replica]), x=0, y=top - 6, class_="mark"))
        still.append(tag("rect", x=0, y=top, width="100%", height=_LANE, class_="bed"))
        for begin, end, count in _pieces(known, replica, last_step):
            left, right = x.at(begin), x.at(end)
            height = _LANE if count is None else _LANE * max(count / most, _LEAST_LANE)
            what = "away" if count is None else f"{counted(count, 'sample')} of a batch"
            title = titled(f"{names[replica]}: {what} from step {begin:,} to {end:,}")
            place = {"x": share(left), "width": share(right - left), "y": number(top + _LANE - height)}
            role = "idle" if count is None else f"part c{replica % MOST_RUNS}"
            moving.append(tag("rect", title, **place, height=height, class_=role))
    bottom = _LANE_HEAD + min(width, _MOST_LANES) * (_LANE + _LANE_HEAD) - 8
    title = "Samples of a batch, replica by replica"
    picture = framed(title, x, bottom, "".join(still), "".join(moving), role="bare", along=Along.STEPS)
    more = f" {counted(width - _MOST_LANES, 'more replica')} not drawn." if width > _MOST_LANES else ""
    lead = tag("p", words(f"Striped: the replica was away. A full lane is {counted(most, 'sample')}.{more}"))
    recovered = (tag("li", words(one.text)) for one in metrics.recoveries[-_MOST_RECOVERIES:])
    return (
        tag("h3", words(title), class_="part-title")
        + tag("div", lead, class_="note")
        + (tag("ul", *recovered, class_="note") if metrics.recoveries else "")
        + tag("figure", tag("div", picture, class_="plots"), class_="chart bare")
    )


def _pieces(known: Sequence[Shared], replica: int, last_step: int) -> Iterator[tuple[int, int, int | None]]:
    """The first and the last step in which a replica had a number of samples, None while it was away."""
    runs = groupby(known, lambda one: one.shares[replica] if replica in one.present() else None)
    begins = [(next(own).step, count) for count, own in runs]
    for (begin, count), (end, _) in pairwise([*begins, (last_step, None)]):
        if end > begin:
            yield begin, end, count


def _replica_names(run: Run, width: int) -> list[str]:
    """Such as `replica 1 (vm/cpu1)`; of a replica of several devices the first one."""
    names = run.metrics.devices_of_replicas()
    known = [f" ({devices[0]}{' …' if len(devices) > 1 else ''})" for devices in names if devices]
    return [f"replica {place}{known[place] if place < len(known) else ''}" for place in range(width)]


def _away(absence: ReplicaAbsence) -> ChartSpan:
    """The steps without some replicas: the end has no text if they never came back."""
    gone = f"{absence.name} lost at step {absence.begin.step:,}"
    back = "" if absence.end is None else f"{absence.name} back at step {absence.end.step:,}"
    end = absence.last if absence.end is None else absence.end
    return ChartSpan(
        ChartEvent(absence.begin.step, absence.begin.time_s, gone, "lost"),
        ChartEvent(end.step, end.time_s, back, "back"),
        f"{gone}, {back or 'not back'}",
        "away",
    )


def _small_figure(run: Run, column: str, title: str, colour: int, *, may_be_log: bool = False) -> str:
    points = thinned(_points(run, column))
    if not len(points):
        return ""
    curve = _drawn_through(run, points, title.lower(), colour, Look.LINE)
    low, high = float(points.ys.min()), float(points.ys.max())
    is_log = may_be_log and low > 0 and high / low > 100
    chart = Chart(title, (curve,), height=_SMALL_HEIGHT, from_zero=not is_log)
    return _figure(chart, is_log=is_log)


def _figure(chart: Chart, keys: Sequence[str] = (), *, is_log: bool = False) -> str:
    plots = tag("div", drawn(chart, is_log=is_log), class_="plots")
    return tag("figure", _legend(keys), plots, chart_data(chart), class_="chart")


def _points(run: Run, column: str) -> Points:
    lines = run.metrics.training
    return finite(lines.step, getattr(lines, column))


def _drawn_through(run: Run, points: Points, label: str, colour: int, look: Look) -> Curve:
    times_s = [run.metrics.training.time_s[i] for i in points.places]
    return Curve(label, points.xs.tolist(), times_s, points.ys.tolist(), colour, look)


def _loss_curves(run: Run, place: int, *, is_alone: bool, has_raw: bool) -> Iterator[Curve]:
    points = _points(run, "loss")
    smooth = smoothed(points)
    name = "" if is_alone else f"{run.name}, "
    if len(points) and (smooth is None or has_raw):
        look = Look.LINE if smooth is None else Look.PALE
        yield _drawn_through(run, thinned(points), f"{name}training loss", place, look)
    if smooth is not None:
        label = "smoothed" if is_alone else run.name
        yield _drawn_through(run, thinned(smooth), label, place, Look.LINE)
    evaluated = [one for one in run.metrics.evaluations if one.loss - one.loss == 0]
    if evaluated:
        yield Curve(
            f"{name}evaluation",
            [one.step for one in evaluated],
            [one.time_s for one in evaluated],
            [one.loss for one in evaluated],
            _EVALUATION if is_alone else place,
            Look.DOTS,
        )


def _ticks(run: Run) -> Iterator[ChartEvent]:
    """Checkpoints, skipped steps and resumptions."""
    metrics, lines = run.metrics, run.metrics.training
    for start in metrics.starts[1:]:
        yield ChartEvent(start.step, start.time_s, f"resumed at step {start.step:,}", "resumed")
    for one in metrics.checkpoints[-_MOST_TICKS:]:
        stall = f", training paused for {seconds_text(one.stall_s)}" if one.stall_s >= 0 else ""
        text = f"checkpoint at step {one.step:,}: {bytes_text(one.num_bytes)}{stall}"
        yield ChartEvent(one.step, one.time_s, text, "checkpoint")
    skipped = [i for i, count in enumerate(lines.num_skipped) if count > 0]
    for i in skipped[-_MOST_TICKS:]:
        text = f"{lines.num_skipped[i]:.0f} skipped up to step {lines.step[i]:,.0f}"
        yield ChartEvent(lines.step[i], lines.time_s[i], text, "skipped")


def _key(role: str, text: str) -> str:
    """An entry of a chart's legend."""
    return tag("span", tag("i", class_=role), words(text), class_="key")


def _keys(chart: Chart, runs: Sequence[Run]) -> tuple[str, ...]:
    """What the colours and ticks mean; of several runs the names alone."""
    if len(runs) > 1:
        names = tuple(_key(f"key-line c{place}", run.name) for place, run in enumerate(runs))
        has_dots = any(curve.look is Look.DOTS for curve in chart.curves)
        return (*names, _key("key-dots neutral", "evaluation")) if has_dots else names
    keys = [_key(f"key-{curve.look} c{curve.colour}", curve.label) for curve in chart.curves]
    roles = {tick.role for tick in chart.ticks}
    meanings = {
        "checkpoint": "checkpoint",
        "skipped": "step skipped",
        "resumed": "resumed",
        "lost": "replica lost",
        "back": "replica back",
    }
    keys += [_key(f"key-tick {role}", meaning) for role, meaning in meanings.items() if role in roles]
    return tuple(keys)


def _legend(keys: Sequence[str]) -> str:
    return tag("div", *keys, class_="legend") if keys else ""


def _switch(name: str, about: str, first: str, second: str) -> str:
    """Two words of which one is chosen; it works without a script."""
    parts: list[str] = []
    for place, text in enumerate((first, second)):
        key = f"{name}-{place}"
        parts.append(tag("input", type="radio", name=name, id=key, checked=place == 0))
        parts.append(tag("label", words(text), for_=key))
    return tag("div", *parts, class_="switch", role="radiogroup", aria_label=about)
