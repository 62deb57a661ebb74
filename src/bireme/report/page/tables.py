"""The tables and tiles of a page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bireme.plan.device_ranges import device_ranges
from bireme.report.axes import clock_text, number_text, signed_percent
from bireme.report.page.figures import Headline, StageFigures, headline, state
from bireme.report.page.markup import tag, words
from bireme.report.page.run import Run
from bireme.report.units import bytes_text, counted, seconds_text

__all__ = ["comparison_table", "devices_text", "schedule_text", "stage_table", "tiles"]

UNKNOWN = "–"


def tiles(run: Run, figures: Headline) -> str:
    """The numbers on top."""
    return tag("div", *(_tile(one) for one in _headlines(run, figures)), class_="tiles")


def stage_table(stages: Sequence[StageFigures]) -> str:
    """A row for each stage, with prediction and measurement."""
    groups = ("", "", "", "computing, per batch", "busy", "memory")
    head = tag(
        "tr", *(tag("th", words(text), colspan=2 if place > 2 else None) for place, text in enumerate(groups))
    )
    names = ("stage", "units", "device") + ("predicted", "measured") * 3
    sub = tag("tr", *(tag("th", words(text)) for text in names))
    body = (tag("tr", *_stage_cells(stage)) for stage in stages)
    table = tag("table", tag("thead", head, sub), tag("tbody", *body), class_="figures stages")
    return tag("div", table, class_="scrolls")


def comparison_table(runs: Sequence[Run], now_s: float) -> str:
    """A row for each figure, a column for each run; the best of a row stands out."""
    figures = [headline(run) for run in runs]
    names = [
        tag("th", tag("i", class_=f"key-line c{place}"), words(run.name)) for place, run in enumerate(runs)
    ]
    rows = [
        _words_row("state", [state(run, now_s).word for run in runs]),
        _words_row("model", [run.model or UNKNOWN for run in runs]),
        _words_row("schedule", [schedule_text(run) for run in runs]),
        _words_row("devices", [devices_text(run) or UNKNOWN for run in runs]),
        *(_numbers_row(row, figures) for row in ROWS),
    ]
    head = tag("thead", tag("tr", tag("th"), *names))
    return tag("div", tag("table", head, tag("tbody", *rows), class_="figures"), class_="scrolls")


def devices_text(run: Run) -> str:
    """How many devices of which kind the last start had."""
    names = run.metrics.starts[-1].devices if run.metrics.starts else ()
    if not names and run.plan is not None:
        names = tuple(name for group in run.plan.plan.devices for name in group)
    if not names:
        return ""
    known = {} if run.cluster is None else {one.name: one.device.name for one in run.cluster.devices()}
    kinds: dict[str, int] = {}
    for name in names:
        kind = known.get(name, "")
        kinds[kind] = kinds.get(kind, 0) + 1
    parts = [f"{count} × {kind}" if kind else counted(count, "device") for kind, count in kinds.items()]
    return " + ".join(parts)


def schedule_text(run: Run) -> str:
    """Such as `2bw, 4 stages × 2 replicas, 8 micro-batches`."""
    started = run.metrics.starts[-1] if run.metrics.starts else None
    if run.plan is None:
        if started is None or not started.schedule:
            return UNKNOWN
        return f"{started.schedule}, {counted(started.num_stages, 'stage')}"
    plan = run.plan.plan
    replicas = f" × {plan.width} replicas" if plan.width > 1 else ""
    batches = counted(plan.num_microbatches, "micro-batch")
    return f"{plan.schedule}, {counted(plan.num_stages, 'stage')}{replicas}, {batches}"


@dataclass(frozen=True, slots=True)
class _Tile:
    """A number with what it is, more about it, and the exact value for who points at it."""

    name: str
    value: str
    more: str
    exact: str


def _tile(tile: _Tile) -> str:
    return tag(
        "div",
        tag("div", words(tile.name), class_="tile-name"),
        tag("div", words(tile.value), class_="tile-value"),
        tag("div", words(tile.more), class_="tile-more"),
        class_="tile",
        title=tile.exact or None,
    )


def _headlines(run: Run, figures: Headline) -> Iterator[_Tile]:
    planned = f"of {run.planned_steps:,}, " if run.planned_steps else ""
    yield _Tile(
        "Steps", f"{figures.steps:,}", f"{planned}in {clock_text(figures.running_s)}", f"{figures.steps}"
    )
    yield _Tile(
        "Training loss",
        _plain(figures.train_loss),
        f"lowest {_plain(figures.least_loss)}" if figures.least_loss is not None else "no line yet",
        _exact(figures.train_loss),
    )
    at = f" at {figures.least_eval_step:,}" if figures.least_eval_step is not None else ""
    yield _Tile(
        "Evaluation loss",
        _plain(figures.eval_loss),
        f"lowest {_plain(figures.least_eval_loss)}{at}" if at else "not evaluated",
        _exact(figures.eval_loss),
    )
    rate, unit = figures.tokens_per_s, "tokens/s"
    if rate is None:
        rate, unit = figures.samples_per_s, "samples/s"
    samples = f"{number_text(figures.samples_per_s)} samples/s" if figures.samples_per_s else ""
    yield _Tile(
        unit.capitalize(),
        _plain(rate),
        samples if unit == "tokens/s" else "",
        f"{_exact(rate)} {unit}" if rate else "",
    )
    yield _Tile(
        "Batch time",
        _time(figures.measured_batch_s),
        f"predicted {_time(figures.predicted_batch_s)}{_error(figures)}",
        f"measured {_exact(figures.measured_batch_s)} s, predicted {_exact(figures.predicted_batch_s)} s",
    )
    if figures.joules_per_sample is not None:
        joules = figures.joules_per_sample
        yield _Tile(
            "Energy", f"{_plain(joules)} J", "per sample, by the devices' watts", f"{_exact(joules)} J"
        )
    yield _Tile(
        "Peak memory",
        UNKNOWN if figures.peak_bytes is None else bytes_text(figures.peak_bytes),
        "of the fullest device" if figures.peak_bytes is not None else "not measured",
        "" if figures.peak_bytes is None else f"{figures.peak_bytes:,.0f} bytes",
    )
    shared = None if run.summary is None or run.metrics.stop is None else run.summary.sync.shared
    if shared is not None:
        yield _exchanged("Weights gathered", shared.gathered_bytes, shared.predicted_gathered_bytes)
        yield _exchanged("Gradients summed", shared.summed_bytes, shared.predicted_summed_bytes)


def _exchanged(name: str, num_bytes: float, predicted: float | None) -> _Tile:
    """What replicas that share an optimiser or weights have sent each other."""
    more = "between replicas" if predicted is None else f"predicted {bytes_text(predicted)}"
    return _Tile(name, bytes_text(num_bytes), more, f"{num_bytes:,.0f} bytes")


def _error(figures: Headline) -> str:
    error = figures.prediction_error
    return "" if error is None else f" ({signed_percent(error, 1)})"


def _stage_cells(stage: StageFigures) -> Iterator[str]:
    yield tag("td", str(stage.stage))
    names = stage.unit_names
    which = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0] if names else ""
    span = (
        f"{stage.first_unit}–{stage.last_unit}"
        if stage.last_unit > stage.first_unit
        else f"{stage.first_unit}"
    )
    yield tag("td", words(span), tag("span", words(which), class_="dim") if which else "", class_="text")
    yield tag("td", words(device_ranges(stage.devices) if stage.devices else UNKNOWN), class_="text")
    for seconds in (stage.predicted_s, stage.measured_s):
        yield tag("td", words(_time(seconds)), title=f"{_exact(seconds)} s")
    for share in (stage.predicted_share, stage.measured_share):
        yield _share_cell(share)
    limit = f", limit {stage.limit_bytes:,.0f} bytes" if stage.limit_bytes else ""
    for num_bytes in (stage.predicted_bytes, stage.measured_bytes):
        text = UNKNOWN if num_bytes is None else bytes_text(num_bytes)
        yield tag("td", words(text), title=f"{_exact(num_bytes)} bytes{limit}")


def _share_cell(share: float | None) -> str:
    if share is None:
        return tag("td", UNKNOWN)
    bar = tag("span", tag("i", style=f"width:{min(share, 1):.1%}"), class_="share")
    return tag("td", bar, words(f"{share:.0%}"), title=f"{share:.2%}", class_="with-bar")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the comparison: where its number is, how it is written, and which is the best."""

    name: str
    value: Callable[[Headline], float | None]
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


ROWS = (
    _Row("steps", lambda one: one.steps, lambda value: f"{value:,.0f}"),
    _Row("training loss", lambda one: one.train_loss, number_text, min),
    _Row("evaluation loss", lambda one: one.eval_loss, number_text, min),
    _Row("lowest evaluation loss", lambda one: one.least_eval_loss, number_text, min),
    _Row("tokens/s", lambda one: one.tokens_per_s, number_text, max),
    _Row("batch, measured", lambda one: one.measured_batch_s, seconds_text, min),
    _Row("batch, predicted", lambda one: one.predicted_batch_s, seconds_text),
    _Row("error of the prediction", lambda one: one.prediction_error, lambda value: signed_percent(value, 1)),
    _Row("peak memory", lambda one: one.peak_bytes, bytes_text, min),
    _Row("joules per sample", lambda one: one.joules_per_sample, number_text, min),
    _Row("running for", lambda one: one.running_s, clock_text),
)


def _words_row(name: str, texts: Sequence[str]) -> str:
    return tag("tr", tag("th", words(name)), *(tag("td", words(text), class_="words") for text in texts))


def _numbers_row(row: _Row, figures: Sequence[Headline]) -> str:
    values = [row.value(one) for one in figures]
    known = [value for value in values if value is not None]
    best = row.best(known) if row.best is not None and len(set(known)) > 1 else None
    cells = [
        tag(
            "td",
            words(UNKNOWN if value is None else row.text(value)),
            title=_exact(value),
            class_="best" if value is not None and value == best else None,
        )
        for value in values
    ]
    return tag("tr", tag("th", words(row.name)), *cells)


def _plain(value: float | None) -> str:
    return UNKNOWN if value is None else number_text(value)


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else seconds_text(float(f"{seconds:.3g}"))


def _exact(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.10g}"
