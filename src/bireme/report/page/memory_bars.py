"""The memory of each stage: what the prediction consists of, above what was measured, and the limit."""

from collections.abc import Iterator, Sequence

from bireme.bounds import against_predicted, bytes_text
from bireme.plan.plan import device_ranges
from bireme.report.markup import tag, words
from bireme.report.page.figures import MemoryPart, StageFigures

_LIMIT_SHOWN = 3.0
"""A limit so many times above the largest bar would leave no room for the bars, and is only said."""

_ORDER = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "workspace",
    "buffers",
    "receive buffers",
)
_COLOURS = {
    "weights": 0,
    "predicted peak": 0,
    "gradients": 1,
    "optimizer": 3,
    "activations": 2,
    "inputs": 5,
    "workspace": 4,
    "buffers": 6,
    "receive buffers": 6,
}
_WHOLE = "predicted peak"
"""What a prediction is called of which nobody knows what it consists."""
_REST = "other"
_LEAST_REST = 0.005
_OTHER = 7
"""The colour of what has no name here."""


def memory_figure(stages: Sequence[StageFigures]) -> str:
    """A row for each stage; nothing where no bytes are known."""
    known = [stage for stage in stages if stage.predicted_bytes or stage.measured_bytes]
    if not known:
        return ""
    largest = max(max(stage.predicted_bytes or 0, stage.measured_bytes or 0) for stage in known)
    limits = [stage.limit_bytes for stage in known if stage.limit_bytes]
    near = [limit for limit in limits if limit <= _LIMIT_SHOWN * largest]
    whole = max(largest, *near, 1.0) * 1.02
    rows = (tag("div", *_row(stage, whole), class_="bars-row") for stage in known)
    return tag("figure", _legend(known, has_limits=bool(near)), *rows, class_="bars")


def _row(stage: StageFigures, whole: float) -> Iterator[str]:
    """A stage: its name, its two bars with the limit through both, and the numbers."""
    devices = device_ranges(stage.devices) if stage.devices else ""
    last = f" to {stage.last_unit}" if stage.last_unit > stage.first_unit else ""
    units = f"unit{'s' if last else ''} {stage.first_unit}{last}"
    yield tag(
        "div",
        tag("strong", words(f"stage {stage.stage}")),
        tag("span", words(units)),
        tag("span", words(devices), title=", ".join(stage.devices)) if devices else "",
        class_="bars-name",
    )
    against = against_predicted(stage.measured_bytes, stage.predicted_bytes, is_time=False)
    measured = f"{_bytes(stage.measured_bytes)} measured" + (f": {against} than predicted" if against else "")
    texts = [f"{_bytes(stage.predicted_bytes)} predicted", measured]
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
    for part in _parts(stage):
        title = f"{part.name}: {bytes_text(part.num_bytes)} ({part.num_bytes:,.0f} bytes)"
        colour = _COLOURS.get(part.name, _OTHER)
        yield tag("i", style=f"width:{part.num_bytes / whole:.2%}", class_=f"part c{colour}", title=title)


def _measured(stage: StageFigures, whole: float) -> Iterator[str]:
    if stage.measured_bytes is not None:
        title = f"measured: {stage.measured_bytes:,.0f} bytes"
        yield tag("i", style=f"width:{stage.measured_bytes / whole:.2%}", class_="measured", title=title)


def _bytes(num_bytes: float | None) -> str:
    return "unknown" if num_bytes is None else bytes_text(num_bytes)


def _legend(stages: Sequence[StageFigures], *, has_limits: bool) -> str:
    names = {part.name for stage in stages for part in _parts(stage)}
    entries = [
        tag(
            "span",
            tag("i", class_=f"key-box c{_COLOURS.get(name, _OTHER)}"),
            words(name),
            class_="key",
        )
        for name in sorted(names, key=_place)
    ]
    entries.append(tag("span", tag("i", class_="key-box measured"), "measured peak", class_="key"))
    if has_limits:
        entries.append(tag("span", tag("i", class_="key-tick limit"), "limit of the device", class_="key"))
    return tag("div", *entries, class_="legend")


def _parts(stage: StageFigures) -> tuple[MemoryPart, ...]:
    """What the prediction consists of, in the order of the legend, and what that leaves of the whole."""
    whole = stage.predicted_bytes or 0.0
    parts = sorted(stage.parts, key=lambda part: _place(part.name))
    rest = whole - sum(part.num_bytes for part in parts)
    if rest > _LEAST_REST * whole:
        parts.append(MemoryPart(_REST if parts else _WHOLE, rest))
    return tuple(parts)


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
