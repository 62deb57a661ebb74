"""The memory of each stage: what the prediction consists of, above what was measured, and the limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bireme.plan.device_ranges import device_ranges
from bireme.report.axes import Scale, signed_percent
from bireme.report.page.figures import Part, StageFigures
from bireme.report.page.markup import number, tag, titled, words
from bireme.report.shapes import fitted, text_width
from bireme.report.units import bytes_text

__all__ = ["memory_figure"]

WIDTH = 1120
LEFT, RIGHT = 230, WIDTH - 190
ROW = 74
BAR = 16
LIMIT_SHOWN = 3.0
"""A limit so many times above the largest bar would leave no room for the bars, and is only said."""

ORDER = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "workspace",
    "buffers",
    "receive buffers",
)
COLOURS = {
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
WHOLE = "predicted peak"
"""What a prediction is called of which nobody knows what it consists."""
REST = "other"
LEAST_REST = 0.005
OTHER = 7
"""The colour of what has no name here."""
NAMES = {"optimizer": "optimiser"}


def memory_figure(stages: Sequence[StageFigures]) -> str:
    """A row for each stage; nothing where no bytes are known."""
    known = [stage for stage in stages if stage.predicted_bytes or stage.measured_bytes]
    if not known:
        return ""
    largest = max(max(stage.predicted_bytes or 0, stage.measured_bytes or 0) for stage in known)
    limits = [stage.limit_bytes for stage in known if stage.limit_bytes]
    near = [limit for limit in limits if limit <= LIMIT_SHOWN * largest]
    scale = Scale(0.0, max(largest, *near, 1.0) * 1.02, LEFT, RIGHT)
    rows = [_Row(stage, scale, ROW * place + 6.0) for place, stage in enumerate(known)]
    title = "The memory of each stage, predicted and measured"
    picture = tag(
        "svg",
        titled(title),
        *(part for row in rows for part in row.drawn()),
        viewBox=f"0 0 {WIDTH} {ROW * len(rows)}",
        class_="plot bars",
        role="img",
        aria_label=title,
    )
    plots = tag("div", picture, class_="plots")
    return tag("figure", _legend(known, has_limits=bool(near)), plots, class_="chart wide")


@dataclass(frozen=True, slots=True)
class _Row:
    """A stage's two bars."""

    stage: StageFigures
    scale: Scale
    y: float

    def drawn(self) -> Iterator[str]:
        """Names, bars, the limit and the numbers."""
        stage, y = self.stage, self.y
        yield tag("text", words(f"stage {stage.stage}"), x=0, y=y + 14, class_="name")
        units = f"units {stage.first_unit} to {stage.last_unit}"
        yield tag("text", words(units), x=72, y=y + 14, class_="mark")
        devices = device_ranges(stage.devices) if stage.devices else ""
        shown = words(fitted(devices, 12, LEFT - 10))
        yield tag("text", titled(", ".join(stage.devices)), shown, x=0, y=y + 32, class_="mark")
        yield from self._bar("predicted", stage.predicted_bytes, y + 1, _parts(stage))
        yield from self._bar("measured", stage.measured_bytes, y + BAR + 8, None)
        yield from self._limit()

    def _bar(
        self, what: str, num_bytes: float | None, y: float, parts: Sequence[Part] | None
    ) -> Iterator[str]:
        text = f"{what} unknown" if num_bytes is None else f"{bytes_text(num_bytes)} {what}"
        yield tag("text", words(text + self._told(what)), x=RIGHT + 12, y=y + 12.5, class_="value")
        if num_bytes is None:
            return
        if parts is None:
            width = self.scale.at(num_bytes) - LEFT
            title = titled(f"{what}: {num_bytes:,.0f} bytes")
            yield tag("rect", title, x=LEFT, y=y, width=width, height=BAR, class_="measured")
            return
        at = 0.0
        for part in parts:
            left, right = self.scale.at(at), self.scale.at(at + part.num_bytes)
            at += part.num_bytes
            colour = COLOURS.get(part.name, OTHER)
            title = titled(f"{part.name}: {bytes_text(part.num_bytes)} ({part.num_bytes:,.0f} bytes)")
            width = max(right - left - 0.8, 0.4)
            yield tag("rect", title, x=left, y=y, width=width, height=BAR, class_=f"part c{colour}")

    def _told(self, what: str) -> str:
        stage = self.stage
        if what == "predicted" or not stage.predicted_bytes or stage.measured_bytes is None:
            return ""
        return f" ({signed_percent(stage.measured_bytes / stage.predicted_bytes - 1, 0)})"

    def _limit(self) -> Iterator[str]:
        limit = self.stage.limit_bytes
        if not limit:
            return
        text = f"limit {bytes_text(limit)}"
        if limit > self.scale.most:
            yield tag("text", words(text), x=RIGHT + 12, y=self.y + 2 * BAR + 22, class_="mark")
            return
        x = self.scale.at(limit)
        path = f"M{number(x)} {number(self.y - 3)}V{number(self.y + 2 * BAR + 12)}"
        yield tag("path", titled(f"{text}: {limit:,.0f} bytes"), d=path, class_="limit")
        is_left = x + text_width(text, 11) > RIGHT
        yield tag(
            "text",
            words(text),
            x=x - 4 if is_left else x + 4,
            y=self.y + 2 * BAR + 20,
            class_="mark small",
            text_anchor="end" if is_left else "start",
        )


def _legend(stages: Sequence[StageFigures], *, has_limits: bool) -> str:
    names = {part.name for stage in stages for part in _parts(stage)}
    entries = [
        tag(
            "span",
            tag("i", class_=f"key-box c{COLOURS.get(name, OTHER)}"),
            words(NAMES.get(name, name)),
            class_="key",
        )
        for name in sorted(names, key=_place)
    ]
    entries.append(tag("span", tag("i", class_="key-box measured"), "measured peak", class_="key"))
    if has_limits:
        entries.append(tag("span", tag("i", class_="key-tick limit"), "limit of the device", class_="key"))
    return tag("div", *entries, class_="legend")


def _parts(stage: StageFigures) -> tuple[Part, ...]:
    """What the prediction consists of, in the order of the legend, and what that leaves of the whole."""
    whole = stage.predicted_bytes or 0.0
    parts = sorted(stage.parts, key=lambda part: _place(part.name))
    rest = whole - sum(part.num_bytes for part in parts)
    if rest > LEAST_REST * whole:
        parts.append(Part(REST if parts else WHOLE, rest))
    return tuple(parts)


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
