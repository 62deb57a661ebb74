"""The tables and tiles of a page, and the bars of memory."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bireme.bounds import against_predicted, bytes_text, counted, seconds_text
from bireme.plan.plan import device_ranges
from bireme.report.markup import tag, words
from bireme.report.page.figures import Headline, StageFigures, headline, state
from bireme.report.page.metrics import LearnsEvent
from bireme.report.page.run import Run
from bireme.report.shapes import clock_text, number_text

_UNKNOWN = "–"
_GROUPS = ("computing, per batch", "busy", "memory")


def tiles(run: Run, figures: Headline) -> str:
    """The numbers on top."""
    return tag("div", *_headlines(run, figures), class_="tiles")


def stage_table(stages: Sequence[StageFigures]) -> str:
    """A row for each stage, with prediction and measurement."""
    head = tag(
        "tr",
        *(tag("th", words(text), scope="col", rowspan=2) for text in ("stage", "units", "device")),
        *(tag("th", words(text), scope="colgroup", colspan=2) for text in _GROUPS),
    )
    sub = tag(
        "tr", *(tag("th", words(text), scope="col") for text in ("predicted", "measured") * len(_GROUPS))
    )
    body = (tag("tr", *_stage_cells(stage), role="row") for stage in stages)
    return _table(tag("thead", head, sub), body, "stages")


def _table(head: str, rows: Iterable[str], role: str) -> str:
    """A table whose rows the style sheet turns into blocks where it is too narrow, with a name in each cell.

    The roles are what such tables are for readers of screens: a display of blocks takes them away.
    """
    return tag("table", head, tag("tbody", *rows, role="rowgroup"), class_=f"figures {role}", role="table")


def comparison_table(runs: Sequence[Run], now_s: float) -> str:
    """A row for each figure, a column for each run; the best of a row stands out.

    Losses have no best where they are of different things, such as tokens of different tokenizers.
    """
    figures = [headline(run) for run in runs]
    names = [run.name for run in runs]
    heads = (
        tag("th", tag("i", class_=f"key-line c{place}"), words(name), scope="col")
        for place, name in enumerate(names)
    )
    why = incomparable(runs)
    rows = [
        _words_row("state", [state(run, now_s).word for run in runs], names),
        _words_row("model", [run.model or _UNKNOWN for run in runs], names),
        _words_row("tokenizer", [run.learns.tokenizer or _UNKNOWN for run in runs], names),
        _words_row("schedule", [_schedule_text(run) for run in runs], names),
        _words_row("devices", [_devices_text(run) or _UNKNOWN for run in runs], names),
        *(_numbers_row(row, figures, names, has_best=not (why and row.is_loss)) for row in _ROWS),
    ]
    head = tag("thead", tag("tr", tag("td"), *heads))
    return _table(head, rows, "comparison") + (tag("p", words(why), class_="note") if why else "")


def incomparable(runs: Sequence[Run]) -> str:
    """Why the losses of the runs cannot be compared; "" if they can be, as far as the runs say."""
    tokenizers = list(dict.fromkeys(run.learns.tokenizer for run in runs if run.learns.tokenizer))
    if len(tokenizers) > 1:
        has_bits = sum(headline(run).eval_bits_per_byte is not None for run in runs) > 1
        return (
            f"Losses are per token, and the runs have different tokenizers ({', '.join(tokenizers)}): such "
            f"losses cannot be compared.{' Compare bits per byte.' if has_bits else ''}"
        )
    targets = list(dict.fromkeys(run.learns.loss_on for run in runs if run.learns.loss_on))
    if len(targets) > 1:
        return f"The losses are of different things ({', '.join(targets)}), so they cannot be compared."
    return ""


def facts(run: Run) -> str:
    """What the run trains and what it learns from, as far as is known."""
    known = [(name, text) for name, text in _facts(run) if text]
    pairs = (tag("div", tag("dt", words(name)), tag("dd", _breakable(text))) for name, text in known)
    return tag("dl", *pairs, class_="facts") if known else ""


def _breakable(text: str) -> str:
    """Text that may be broken after a comma within a word, such as a model's name."""
    return re.sub(r",(?=[^\W\d])", ",<wbr>", words(text))


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    learns = run.learns
    yield "Model", run.model
    yield "Parameters", _parameters(learns)
    files = "" if learns.num_files is None else f" ({counted(learns.num_files, 'file')})"
    yield "Data", ", ".join(learns.sources) + files if learns.sources else ""
    sizes = [
        f"{number_text(learns.num_tokens)} tokens" if learns.num_tokens is not None else "",
        counted(learns.num_samples, "sample") if learns.num_samples is not None else "",
    ]
    length = f" of {counted(learns.length, 'token')}" if learns.length is not None else ""
    yield "Size", f"{', '.join(size for size in sizes if size)}{length if sizes[1] else ''}"
    planned = counted(run.planned_steps, "step") if run.planned_steps else "the whole run"
    yield "Epochs", "" if learns.epochs is None else f"{learns.epochs:.3g} in {planned}"
    yield "Tokenizer", learns.tokenizer
    yield "Loss on", learns.loss_on
    evaluated = learns.num_evaluation_samples
    yield "Evaluated on", "" if evaluated is None else counted(evaluated, "sample")
    yield "Schedule", _schedule_text(run) if run.plan is not None or run.metrics.starts else ""
    yield "Devices", _devices_text(run)


def _parameters(learns: LearnsEvent) -> str:
    whole, learning = learns.num_parameters, learns.num_learning_parameters
    if whole is None:
        return ""
    if learning is None or learning == whole:
        return number_text(whole)
    return f"{number_text(whole)}, of which {number_text(learning)} learn"


def _devices_text(run: Run) -> str:
    """How many devices of which kind the last start had."""
    names = run.metrics.starts[-1].devices if run.metrics.starts else ()
    if not names and run.plan is not None:
        names = tuple(name for group in run.plan.plan.devices for name in group)
    if not names:
        return ""
    known = {} if run.cluster is None else {one.name: one.device.name for one in run.cluster.devices()}
    kinds = Counter(known.get(name, "") for name in names)
    parts = [f"{count} × {kind}" if kind else counted(count, "device") for kind, count in kinds.items()]
    return " + ".join(parts)


def _schedule_text(run: Run) -> str:
    """Such as `2bw, 4 stages × 2 replicas, 8 micro-batches`."""
    started = run.metrics.starts[-1] if run.metrics.starts else None
    if run.plan is None:
        if started is None or not started.schedule:
            return _UNKNOWN
        return f"{started.schedule}, {counted(started.num_stages, 'stage')}"
    plan = run.plan.plan
    replicas = f" × {plan.width} replicas" if plan.width > 1 else plan.replicas_text
    batches = counted(plan.num_microbatches, "micro-batch")
    return f"{plan.schedule}, {counted(plan.num_stages, 'stage')}{replicas}, {batches}"


def _tile(name: str, value: str, more: str, exact: str) -> str:
    """A number with what it is, more about it, and the exact value for a reader who points at it."""
    return tag(
        "div",
        tag("div", words(name), class_="tile-name"),
        tag("div", words(value), class_="tile-value"),
        tag("div", words(more), class_="tile-more"),
        class_="tile",
        title=exact or None,
    )


def _headlines(run: Run, figures: Headline) -> Iterator[str]:
    planned = f"of {run.planned_steps:,}, " if run.planned_steps else ""
    yield _tile(
        "Steps", f"{figures.steps:,}", f"{planned}in {clock_text(figures.running_s)}", f"{figures.steps}"
    )
    yield _tile(
        "Training loss",
        _plain(figures.train_loss),
        f"lowest {_plain(figures.least_loss)}" if figures.least_loss is not None else "no line yet",
        _exact(figures.train_loss),
    )
    at = f" at {figures.least_eval_step:,}" if figures.least_eval_step is not None else ""
    yield _tile(
        "Evaluation loss",
        _plain(figures.eval_loss),
        f"lowest {_plain(figures.least_eval_loss)}{at}" if at else "not evaluated",
        _exact(figures.eval_loss),
    )
    rate, unit = figures.tokens_per_s, "tokens/s"
    if rate is None:
        rate, unit = figures.samples_per_s, "samples/s"
    samples = f"{number_text(figures.samples_per_s)} samples/s" if figures.samples_per_s else ""
    yield _tile(
        unit.capitalize(),
        _plain(rate),
        samples if unit == "tokens/s" else "",
        f"{_exact(rate)} {unit}" if rate else "",
    )
    predicted = _time(figures.predicted_batch_s)
    pace = against_predicted(figures.measured_batch_s, figures.predicted_batch_s, is_time=True)
    yield _tile(
        "Batch time",
        _time(figures.measured_batch_s),
        f"{pace} than predicted ({predicted})" if pace else f"predicted {predicted}",
        f"measured {_exact(figures.measured_batch_s)} s, predicted {_exact(figures.predicted_batch_s)} s",
    )
    if figures.joules_per_sample is not None:
        joules = figures.joules_per_sample
        yield _tile(
            "Energy", f"{_plain(joules)} J", "per sample, by the devices' watts", f"{_exact(joules)} J"
        )
    yield _tile(
        "Peak memory",
        _UNKNOWN if figures.peak_bytes is None else bytes_text(figures.peak_bytes),
        "of the fullest device" if figures.peak_bytes is not None else "not measured",
        "" if figures.peak_bytes is None else f"{figures.peak_bytes:,.0f} bytes",
    )
    shared = None if run.summary is None or run.metrics.stop is None else run.summary.sync.shared
    if shared is not None:
        yield _exchanged("Weights gathered", shared.gathered_bytes, shared.predicted_gathered_bytes)
        yield _exchanged("Gradients summed", shared.summed_bytes, shared.predicted_summed_bytes)


def _exchanged(name: str, num_bytes: float, predicted: float | None) -> str:
    """What replicas that share an optimizer or weights have sent each other."""
    more = "between replicas" if predicted is None else f"predicted {bytes_text(predicted)}"
    return _tile(name, bytes_text(num_bytes), more, f"{num_bytes:,.0f} bytes")


def _stage_cells(stage: StageFigures) -> Iterator[str]:
    yield _cell(str(stage.stage), "stage")
    names = stage.unit_names
    which = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0] if names else ""
    span = "–".join(map(str, dict.fromkeys(stage.units)))
    more = tag("span", words(which), class_="dim") if which else ""
    yield _cell(tag("span", tag("span", words(span), class_="whole-word"), more), "units", class_="text")
    yield _cell(words(device_ranges(stage.devices) if stage.devices else _UNKNOWN), "device", class_="text")
    for which, seconds in (("predicted", stage.predicted_s), ("measured", stage.measured_s)):
        yield _cell(words(_time(seconds)), f"{_GROUPS[0]}, {which}", title=f"{_exact(seconds)} s")
    for which, share in (("predicted", stage.predicted_busy_share), ("measured", stage.busy_share)):
        yield _share_cell(share, f"{_GROUPS[1]}, {which}")
    limit = f", limit {stage.limit_bytes:,.0f} bytes" if stage.limit_bytes else ""
    for which, num_bytes in (
        ("predicted", stage.predicted_peak_bytes),
        ("measured", stage.measured_peak_bytes),
    ):
        text = _UNKNOWN if num_bytes is None else bytes_text(num_bytes)
        yield _cell(words(text), f"{_GROUPS[2]}, {which}", title=f"{_exact(num_bytes)} bytes{limit}")


def _cell(content: str, name: str, **attributes: str | None) -> str:
    """A cell with the name that it has where there is no head above it."""
    return tag("td", content, data_name=name, role="cell", **attributes)


def _share_cell(share: float | None, name: str) -> str:
    if share is None:
        return _cell(_UNKNOWN, name)
    bar = tag("span", tag("i", style=f"width:{min(share, 1):.1%}"), class_="share")
    return _cell(tag("span", bar, words(f"{share:.0%}")), name, title=f"{share:.2%}", class_="with-bar")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the comparison: where its number is, how it is written, and which is the best."""

    name: str
    value: Callable[[Headline], float | None]
    text: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None
    is_loss: bool = False


_ROWS = (
    _Row("steps", lambda one: one.steps, lambda value: f"{value:,.0f}"),
    _Row("training loss", lambda one: one.train_loss, number_text, min, is_loss=True),
    _Row("evaluation loss", lambda one: one.eval_loss, number_text, min, is_loss=True),
    _Row("lowest evaluation loss", lambda one: one.least_eval_loss, number_text, min, is_loss=True),
    _Row("evaluation, bits per byte", lambda one: one.eval_bits_per_byte, number_text, min),
    _Row("tokens/s", lambda one: one.tokens_per_s, number_text, max),
    _Row("batch, measured", lambda one: one.measured_batch_s, seconds_text, min),
    _Row("batch, predicted", lambda one: one.predicted_batch_s, seconds_text),
    _Row(
        "batch, than predicted",
        lambda one: 1 / (1 + one.prediction_error) if one.prediction_error is not None else None,
        lambda ratio: against_predicted(ratio, 1.0, is_time=True),
    ),
    _Row("peak memory", lambda one: one.peak_bytes, bytes_text, min),
    _Row("joules per sample", lambda one: one.joules_per_sample, number_text, min),
    _Row("running for", lambda one: one.running_s, clock_text),
)


def _words_row(name: str, texts: Sequence[str], names: Sequence[str]) -> str:
    cells = (_cell(words(text), run, class_="words") for text, run in zip(texts, names, strict=True))
    return tag("tr", _row_head(name), *cells, role="row")


def _row_head(name: str) -> str:
    return tag("th", words(name), scope="row", role="rowheader")


def _numbers_row(row: _Row, figures: Sequence[Headline], names: Sequence[str], *, has_best: bool) -> str:
    values = [row.value(one) for one in figures]
    known = [value for value in values if value is not None]
    best = row.best(known) if row.best is not None and has_best and len(set(known)) > 1 else None
    if not known:
        return ""
    cells = (
        _cell(
            words(_UNKNOWN if value is None else row.text(value)),
            run,
            title=_exact(value),
            class_="best" if value is not None and value == best else None,
        )
        for value, run in zip(values, names, strict=True)
    )
    return tag("tr", _row_head(row.name), *cells, role="row")


def _plain(value: float | None) -> str:
    return _UNKNOWN if value is None else number_text(value)


def _time(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else seconds_text(float(f"{seconds:.3g}"))


def _exact(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.10g}"


# The memory of each stage: what the prediction consists of, above what was measured, and the limit.

_LIMIT_SHOWN = 3.0
"""A limit so many times above the largest bar would leave no room for the bars, and is only said."""

_COLOURS = {
    "weights": 0,
    "gradients": 1,
    "optimizer": 3,
    "activations": 2,
    "inputs": 5,
    "workspace": 4,
    "buffers": 6,
    "receive buffers": 6,
    "predicted peak": 0,
}
_ORDER = [*_COLOURS]
_WHOLE = "predicted peak"
"""What a prediction is called of which nobody knows what it consists."""
_REST = "other"
_LEAST_REST = 0.005
_OTHER = 7
"""The colour of what has no name here."""


def memory_figure(stages: Sequence[StageFigures]) -> str:
    """A row for each stage; nothing where no bytes are known."""
    known = [stage for stage in stages if stage.predicted_peak_bytes or stage.measured_peak_bytes]
    if not known:
        return ""
    largest = max(max(stage.predicted_peak_bytes or 0, stage.measured_peak_bytes or 0) for stage in known)
    limits = [stage.limit_bytes for stage in known if stage.limit_bytes]
    near = [limit for limit in limits if limit <= _LIMIT_SHOWN * largest]
    whole = max(largest, *near, 1.0) * 1.02
    rows = (tag("div", *_row(stage, whole), class_="bars-row") for stage in known)
    return tag("figure", _legend(known, has_limits=bool(near)), *rows, class_="bars")


def _row(stage: StageFigures, whole: float) -> Iterator[str]:
    """A stage: its name, its two bars with the limit through both, and the numbers."""
    devices = device_ranges(stage.devices) if stage.devices else ""
    units = " to ".join(map(str, dict.fromkeys(stage.units)))
    yield tag(
        "div",
        tag("strong", words(f"stage {stage.stage}")),
        tag("span", words(f"unit{'s' if ' to ' in units else ''} {units}")),
        tag("span", words(devices), title=", ".join(stage.devices)) if devices else "",
        class_="bars-name",
    )
    against = against_predicted(stage.measured_peak_bytes, stage.predicted_peak_bytes, is_time=False)
    measured = f"{_bytes(stage.measured_peak_bytes)} measured" + (
        f": {against} than predicted" if against else ""
    )
    texts = [f"{_bytes(stage.predicted_peak_bytes)} predicted", measured]
    limit = f"limit {bytes_text(stage.limit_bytes)}" if stage.limit_bytes else ""
    bars = tag("div", *_segments(stage, whole), class_="bar") + tag(
        "div", *_measured(stage, whole), class_="bar"
    )
    if stage.limit_bytes and stage.limit_bytes <= whole:
        about = f"{limit}: {stage.limit_bytes:,.0f} bytes"
        bars += tag("i", style=f"left:{stage.limit_bytes / whole:.2%}", class_="bar-limit", title=about)
    told = ", ".join((f"stage {stage.stage}", *texts, *([limit] if limit else [])))
    yield tag("div", bars, class_="bars-plot", role="img", aria_label=told)
    numbers = (tag("div", words(text)) for text in texts)
    yield tag("div", *numbers, tag("div", words(limit), class_="dim") if limit else "", class_="bars-numbers")


def _segments(stage: StageFigures, whole: float) -> Iterator[str]:
    for name, num_bytes in _parts(stage):
        title = f"{name}: {bytes_text(num_bytes)} ({num_bytes:,.0f} bytes)"
        colour = _COLOURS.get(name, _OTHER)
        yield tag("i", style=f"width:{num_bytes / whole:.2%}", class_=f"part c{colour}", title=title)


def _measured(stage: StageFigures, whole: float) -> Iterator[str]:
    if stage.measured_peak_bytes is not None:
        title = f"measured: {stage.measured_peak_bytes:,.0f} bytes"
        yield tag("i", style=f"width:{stage.measured_peak_bytes / whole:.2%}", class_="measured", title=title)


def _bytes(num_bytes: float | None) -> str:
    return "unknown" if num_bytes is None else bytes_text(num_bytes)


def _legend(stages: Sequence[StageFigures], *, has_limits: bool) -> str:
    names = {name for stage in stages for name, _ in _parts(stage)}
    entries = [
        tag("span", tag("i", class_=f"key-box c{_COLOURS.get(name, _OTHER)}"), words(name), class_="key")
        for name in sorted(names, key=_place)
    ]
    entries.append(tag("span", tag("i", class_="key-box measured"), "measured peak", class_="key"))
    if has_limits:
        entries.append(tag("span", tag("i", class_="key-tick limit"), "limit of the device", class_="key"))
    return tag("div", *entries, class_="legend")


def _parts(stage: StageFigures) -> list[tuple[str, float]]:
    """What the prediction consists of, in the order of the legend, and what that leaves of the whole."""
    whole = stage.predicted_peak_bytes or 0.0
    parts = sorted(stage.bytes.items(), key=lambda part: _place(part[0]))
    rest = whole - sum(stage.bytes.values())
    if rest > _LEAST_REST * whole:
        parts.append((_REST if parts else _WHOLE, rest))
    return parts


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
