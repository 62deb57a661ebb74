"""The curves of a run, and of several runs over each other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bireme.report.page.curves import Along, Chart, Curve, Look, Tick, chart_data, drawn
from bireme.report.page.markup import tag, words
from bireme.report.page.metrics import TrainingLines
from bireme.report.page.run import Run
from bireme.report.page.thinning import Points, evened, finite, smoothed, thinned
from bireme.report.units import bytes_text, seconds_text

__all__ = [
    "MOST_RUNS",
    "gradient_figure",
    "loss_figure",
    "rate_figure",
    "shares_figure",
    "throughput_figure",
]

MOST_RUNS = 6
"""As many as there are colours that can be told apart."""

MOST_WITH_RAW = 2
"""Of more runs only the smoothed curves are drawn."""

SMALL_WIDTH, SMALL_HEIGHT = 550, 220
MOST_TICKS = 400
EVALUATION = 1
"""The colour of evaluations where there is one run."""


@dataclass(frozen=True, slots=True)
class _Key:
    """An entry of a chart's legend."""

    role: str
    text: str


def loss_figure(runs: Sequence[Run]) -> str:
    """The loss: raw and smoothed, with evaluations, along steps or time, linear or logarithmic."""
    curves: list[Curve] = []
    for place, run in enumerate(runs):
        curves += _loss_curves(run, place, is_alone=len(runs) == 1, has_raw=len(runs) <= MOST_WITH_RAW)
    if not curves:
        return ""
    ticks = tuple(_ticks(runs[0])) if len(runs) == 1 else ()
    chart = Chart("Training loss", tuple(curves), ticks)
    can_log = all(value > 0 for curve in curves for value in curve.values)
    keys = _keys(chart, runs)
    plots = [drawn(chart, along, is_log=is_log) for is_log in (False, True)[: 1 + can_log] for along in Along]
    switches = _switch("along", "by step", "by time") + (_switch("scale", "linear", "log") if can_log else "")
    plots_tag = tag("div", *plots, class_="plots")
    return tag("figure", switches, _legend(keys), plots_tag, chart_data(chart), class_="chart switched")


def throughput_figure(runs: Sequence[Run]) -> str:
    """Tokens a second, or samples where the runs count no tokens, evened; it has a title of its own."""
    is_tokens = any(len(_points(run, lambda lines: lines.tokens_per_s)) for run in runs)
    unit = "tokens/s" if is_tokens else "samples/s"

    def column(lines: TrainingLines) -> Sequence[float]:
        return lines.tokens_per_s if is_tokens else lines.samples_per_s

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
    curves = tuple(_curve(run, lambda lines: lines.learning_rate, "learning rate", 5))
    if not curves:
        return ""
    return _figure(_small(Chart("Learning rate", curves, from_zero=True)))


def gradient_figure(run: Run) -> str:
    """The norm of the gradients, as a logarithm where it ranges far."""
    curves = tuple(_curve(run, lambda lines: lines.grad_norm, "gradient norm", 3))
    if not curves:
        return ""
    values = [value for curve in curves for value in curve.values]
    ranges_far = min(values) > 0 and max(values) / min(values) > 100
    chart = _small(Chart("Gradient norm", curves, from_zero=not ranges_far))
    return _figure(chart, is_log=ranges_far)


def shares_figure(run: Run) -> str:
    """The samples of each replica, where their number ever changed; a curve goes up or down in a step."""
    known = run.metrics.shares
    if len(known) < 2:
        return ""
    metrics = run.metrics
    points = [(known[0].step, known[0].time_s, known[0].shares)]
    for before, one in pairwise(known):
        points += [(one.step, one.time_s, before.shares), (one.step, one.time_s, one.shares)]
    points.append((metrics.last_step, max(metrics.last_time_s, known[-1].time_s), known[-1].shares))
    steps, times_s, shares = zip(*points, strict=True)
    width = len(known[0].shares)
    curves = tuple(
        Curve(f"replica {place}", steps, times_s, [own[place] for own in shares], place % MOST_RUNS)
        for place in range(width)
        if all(len(own) == width for own in shares)
    )
    chart = Chart("Samples of each replica", curves, height=240, from_zero=True)
    title = tag("h3", words("Samples of a batch, replica by replica"), class_="part-title")
    keys = [_Key(f"key-line c{one.colour}", one.label) for one in curves] if width <= MOST_RUNS else []
    return title + _figure(chart, keys)


def _small(chart: Chart) -> Chart:
    return replace(chart, width=SMALL_WIDTH, height=SMALL_HEIGHT)


def _figure(chart: Chart, keys: Sequence[_Key] = (), *, is_log: bool = False) -> str:
    plots = tag("div", drawn(chart, is_log=is_log), class_="plots")
    return tag("figure", _legend(keys), plots, chart_data(chart), class_="chart")


def _points(run: Run, column: Callable[[TrainingLines], Sequence[float]]) -> Points:
    lines = run.metrics.training
    return finite(lines.step, column(lines))


def _curve(
    run: Run, column: Callable[[TrainingLines], Sequence[float]], label: str, colour: int
) -> Iterator[Curve]:
    points = thinned(_points(run, column))
    if len(points):
        yield _drawn_through(run, points, label, colour, Look.LINE)


def _drawn_through(run: Run, points: Points, label: str, colour: int, look: Look) -> Curve:
    times_s = run.metrics.training.time_s
    return Curve(label, points.xs, [times_s[i] for i in points.places], points.ys, colour, look)


def _loss_curves(run: Run, place: int, *, is_alone: bool, has_raw: bool) -> Iterator[Curve]:
    points = _points(run, lambda lines: lines.loss)
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
            EVALUATION if is_alone else place,
            Look.DOTS,
        )


def _ticks(run: Run) -> Iterator[Tick]:
    """Checkpoints, skipped steps and resumptions."""
    metrics, lines = run.metrics, run.metrics.training
    for start in metrics.starts[1:]:
        yield Tick(start.step, start.time_s, f"resumed at step {start.step:,}", "resumed")
    for one in metrics.checkpoints[-MOST_TICKS:]:
        stall = f", training paused for {seconds_text(one.stall_s)}" if one.stall_s >= 0 else ""
        text = f"checkpoint at step {one.step:,}: {bytes_text(one.num_bytes)}{stall}"
        yield Tick(one.step, one.time_s, text, "checkpoint")
    skipped = [i for i, count in enumerate(lines.num_skipped) if count > 0]
    for i in skipped[-MOST_TICKS:]:
        text = f"{lines.num_skipped[i]:.0f} skipped up to step {lines.step[i]:,.0f}"
        yield Tick(lines.step[i], lines.time_s[i], text, "skipped")


def _keys(chart: Chart, runs: Sequence[Run]) -> tuple[_Key, ...]:
    """What the colours and ticks mean; of several runs the names alone."""
    if len(runs) > 1:
        names = tuple(_Key(f"key-line c{place}", run.name) for place, run in enumerate(runs))
        has_dots = any(curve.look is Look.DOTS for curve in chart.curves)
        return (*names, _Key("key-dots neutral", "evaluation")) if has_dots else names
    keys = [_Key(f"key-{curve.look} c{curve.colour}", curve.label) for curve in chart.curves]
    roles = {tick.role for tick in chart.ticks}
    meanings = {"checkpoint": "checkpoint", "skipped": "step skipped", "resumed": "resumed"}
    keys += [_Key(f"key-tick {role}", meaning) for role, meaning in meanings.items() if role in roles]
    return tuple(keys)


def _legend(keys: Sequence[_Key]) -> str:
    if not keys:
        return ""
    entries = [tag("span", tag("i", class_=key.role), words(key.text), class_="key") for key in keys]
    return tag("div", *entries, class_="legend")


def _switch(name: str, first: str, second: str) -> str:
    """Two words of which one is chosen; it works without a script."""
    parts: list[str] = []
    for place, text in enumerate((first, second)):
        key = f"{name}-{place}"
        parts.append(tag("input", type="radio", name=name, id=key, checked=place == 0))
        parts.append(tag("label", words(text), for_=key))
    return tag("div", *parts, class_="switch")
