"""The plan drawn over the cluster: servers as boxes, the devices in them, and what flows between stages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bireme.report.page.figures import StageFigures
from bireme.report.page.flows import Flow, Post, flows, posts
from bireme.report.page.markup import number, tag, titled, words
from bireme.report.page.run import Run
from bireme.report.shapes import fitted, text_width
from bireme.report.units import bytes_text, rate_text

__all__ = ["cluster_figure"]

WIDTH = 1120
COLUMNS = 4
GAP, NARROW_GAP = 108, 26
"""Between servers, with lines between them and without."""
WIDEST = 290
ONE_LINE = 250
"""A server so wide has room for a label in one line."""
HEAD = 34
"""Room for a server's name."""
EDGE = 12
DEVICE, BETWEEN = 66, 34
BOW = 180
"""Room for a line next to a server, and for its label."""
ROW_GAP = 64
MOST_DEVICES = 32
"""With more replicas than that, one represents all."""
MOST_LABELS = 16
CROWDED = 0.7
"""From so much of a link in use on it is marked."""


def cluster_figure(run: Run, stages: Sequence[StageFigures]) -> str:
    """The drawing; empty if the devices of the run are unknown."""
    used = posts(run)
    if not used:
        return ""
    is_cut = len(used) > MOST_DEVICES
    drawn = [post for post in used if not is_cut or post.replica == 0]
    shown = [flow for flow in flows(run) if not is_cut or flow.source.replica == 0]
    crosses = any(_server_of(flow.source.device) != _server_of(flow.destination.device) for flow in shown)
    layout = _Layout.of(run, drawn, GAP if crosses else NARROW_GAP)
    labels = len(shown) <= MOST_LABELS
    left, right = layout.edges(shown)
    title = "The plan over the cluster"
    picture = tag(
        "svg",
        titled(title),
        *(part for server in layout.servers for part in _server(server)),
        *(_device(run, box, stages) for box in layout.devices),
        *(part for flow in shown for part in _flow(layout, flow, has_label=labels)),
        viewBox=f"{left:.0f} 0 {right - left:.0f} {layout.height:.0f}",
        style=f"--width:{right - left:.0f}px",
        class_="plot map",
        role="img",
        aria_label=title,
    )
    width = max(post.replica for post in used) + 1
    note = tag("p", f"This shows the first of {width} equal replicas.", class_="note") if is_cut else ""
    return tag("figure", tag("div", picture, class_="plots"), note, class_="chart wide")


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle: a server, or a device with what it does."""

    name: str
    x: float
    y: float
    width: float
    height: float
    post: Post | None = None
    num_unused: int = 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything is."""

    servers: tuple[_Box, ...]
    devices: tuple[_Box, ...]
    height: float

    @staticmethod
    def of(run: Run, used: Sequence[Post], gap: float) -> "_Layout":
        """Servers from left to right in the order of the pipeline, their devices from top to bottom."""
        by_server: dict[str, list[Post]] = {}
        for post in used:
            by_server.setdefault(_server_of(post.device), []).append(post)
        columns = min(len(by_server), COLUMNS)
        width = min(WIDEST, (WIDTH - (columns - 1) * gap) / columns)
        left = (WIDTH - columns * width - (columns - 1) * gap) / 2
        servers: list[_Box] = []
        devices: list[_Box] = []
        y = lowest = 2.0
        for place, (name, members) in enumerate(by_server.items()):
            if place and place % columns == 0:
                y = lowest + ROW_GAP
            x = left + place % columns * (width + gap)
            unused = _num_unused(run, name, members)
            height = HEAD + len(members) * (DEVICE + BETWEEN) - BETWEEN + EDGE + (20 if unused else 0)
            servers.append(_Box(name, x, y, width, height, num_unused=unused))
            devices += [
                _Box(
                    post.device,
                    x + EDGE,
                    y + HEAD + index * (DEVICE + BETWEEN),
                    width - 2 * EDGE,
                    DEVICE,
                    post,
                )
                for index, post in enumerate(members)
            ]
            lowest = max(lowest, y + height)
        return _Layout(tuple(servers), tuple(devices), lowest + 4)

    def edges(self, flows: Sequence[Flow]) -> tuple[float, float]:
        """Where the drawing begins and ends from left to right, with the lines next to its servers."""
        left = min(server.x for server in self.servers) - 2
        right = max(server.x + server.width for server in self.servers) + 2
        if any(_is_bow(self.box(flow.source), self.box(flow.destination)) for flow in flows):
            right += BOW
        return left, right

    def box(self, post: Post) -> _Box:
        """Where a device is."""
        return next(box for box in self.devices if box.post == post)


def _server_of(device: str) -> str:
    return device.rpartition("/")[0]


def _num_unused(run: Run, server: str, used: Sequence[Post]) -> int:
    if run.cluster is None:
        return 0
    counts = [len(one.devices) for one in run.cluster.servers if one.name == server]
    return max(sum(counts) - len({post.device for post in used}), 0)


def _server(box: _Box) -> Iterator[str]:
    yield tag("rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=10, class_="server")
    name = fitted(box.name or "devices", 13, box.width - 2 * EDGE)
    yield tag("text", words(name), x=box.x + EDGE, y=box.y + 21, class_="name")
    if box.num_unused:
        ending = "s" if box.num_unused > 1 else ""
        text = f"and {box.num_unused} more device{ending}, not used"
        yield tag("text", text, x=box.x + EDGE, y=box.y + box.height - 11, class_="mark small")


def _device(run: Run, box: _Box, stages: Sequence[StageFigures]) -> str:
    post = box.post
    assert post is not None
    own = [stage for stage in stages if stage.stage in post.stages]
    colour = f"c{post.stages[0] % 6}" if post.stages else "c4"
    kind = _kind(run, box.name)
    short = box.name.rpartition("/")[2]
    has_replicas = run.plan is not None and run.plan.plan.width > 1
    about = f"replica {post.replica}" if has_replicas else kind
    lines = (f"{short} · {about}" if about else short, _work(own, post), _memory(own, box.width - 24))
    title = titled("\n".join((f"{box.name} {kind}", *(_told(stage) for stage in own))))
    x = box.x + 16
    return tag(
        "g",
        title,
        tag("rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=6, class_="device"),
        tag("rect", x=box.x, y=box.y + 6, width=5, height=box.height - 12, rx=2, class_=f"part {colour}"),
        *(
            tag(
                "text",
                words(fitted(line, 12, box.width - 24)),
                x=x,
                y=box.y + 19 + 18 * place,
                class_="strong" if place == 1 else "mark",
            )
            for place, line in enumerate(lines)
        ),
    )


def _kind(run: Run, device: str) -> str:
    if run.cluster is None:
        return ""
    return next((one.device.name for one in run.cluster.devices() if one.name == device), "")


def _work(own: Sequence[StageFigures], post: Post) -> str:
    stages = ", ".join(map(str, post.stages))
    if len(own) == 1:
        first, last = own[0].first_unit, own[0].last_unit
        return f"stage {stages} · unit{'s' if last > first else ''} {first}" + (
            f"–{last}" if last > first else ""
        )
    return f"stages {stages}" if len(post.stages) > 1 else f"stage {stages}"


def _memory(own: Sequence[StageFigures], width: float) -> str:
    """Memory and how busy the device is, as much of it as there is room for."""
    peaks = [stage.measured_bytes or stage.predicted_bytes for stage in own]
    peak = max((one for one in peaks if one), default=None)
    limit = max((stage.limit_bytes for stage in own if stage.limit_bytes), default=None)
    shares = [stage.measured_share or stage.predicted_share for stage in own]
    known = [share for share in shares if share is not None]
    busy = f"busy {min(sum(known), 1):.0%}" if known else ""
    if peak is None:
        return busy
    texts = [bytes_text(peak)]
    if limit is not None:
        texts.insert(0, f"{bytes_text(peak)} of {bytes_text(limit)}")
    if busy:
        texts = [f"{text} · {busy}" for text in texts] + texts
    return next((text for text in texts if text_width(text, 12) <= width), texts[-1])


def _told(stage: StageFigures) -> str:
    names = stage.unit_names
    which = f": {names[0]} … {names[-1]}" if len(names) > 1 else f": {names[0]}" if names else ""
    return f"stage {stage.stage}, units {stage.first_unit} to {stage.last_unit}{which}"


def _flow(layout: _Layout, flow: Flow, *, has_label: bool) -> Iterator[str]:
    a, b = layout.box(flow.source), layout.box(flow.destination)
    share = flow.share
    width = 1.5 + (4 * min(share, 1.0) if math.isfinite(share) else 0.0)
    role = "flow crowded" if math.isfinite(share) and share >= CROWDED else "flow"
    way = _way(a, b)
    yield tag("path", titled(_flow_told(flow)), d=way.path, class_=role, stroke_width=width)
    if not has_label or not math.isfinite(flow.used_bytes_per_s):
        return
    used = rate_text(float(f"{flow.used_bytes_per_s:.3g}"))
    lines = [used]
    if math.isfinite(share):
        lines.append(f"{_percent(share)} of {rate_text(float(f'{flow.most_bytes_per_s:.3g}'))}")
    if way.anchor == "start" and a.width + 2 * EDGE >= ONE_LINE:
        lines = [", ".join(lines)]
    for place, line in enumerate(lines):
        y = way.label_y + 15 * place - (7 if len(lines) > 1 else -4)
        yield tag("text", words(line), x=way.label_x, y=y, class_="halo", text_anchor=way.anchor)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "under 1%"


@dataclass(frozen=True, slots=True)
class _Way:
    """A line between two devices, and where its label is."""

    path: str
    label_x: float
    label_y: float
    anchor: str


def _way(a: _Box, b: _Box) -> _Way:
    """Straight down to the neighbour below, a bow beside what is between, or a curve to another server."""
    upper, lower = (a, b) if a.y <= b.y else (b, a)
    if a.x == b.x and not _is_bow(a, b):
        x = a.x + 34
        path = f"M{number(x)} {number(upper.y + upper.height)}V{number(lower.y)}"
        return _Way(path, x + 8, (upper.y + upper.height + lower.y) / 2, "start")
    if a.x == b.x:
        x, top, bottom = a.x + a.width, upper.y + upper.height / 2, lower.y + lower.height / 2
        path = f"M{number(x)} {number(top)}C{number(x + 60)} {number(top)} {number(x + 60)} {number(bottom)} "
        return _Way(path + f"{number(x)} {number(bottom)}", x + 48, (top + bottom) / 2, "start")
    left, right = (a, b) if a.x < b.x else (b, a)
    x1, y1 = left.x + left.width, left.y + left.height / 2
    x2, y2 = right.x, right.y + right.height / 2
    bend = max((x2 - x1) / 2, 20)
    path = f"M{number(x1)} {number(y1)}C{number(x1 + bend)} {number(y1)} {number(x2 - bend)} {number(y2)} "
    return _Way(path + f"{number(x2)} {number(y2)}", (x1 + x2) / 2, (y1 + y2) / 2 - 12, "middle")


def _is_bow(a: _Box, b: _Box) -> bool:
    """Whether a line goes beside what is between two devices of a column."""
    return a.x == b.x and abs(a.y - b.y) - a.height > BETWEEN + 1


def _flow_told(flow: Flow) -> str:
    parts = [f"{flow.source.device} → {flow.destination.device}"]
    if math.isfinite(flow.forth_bytes):
        parts.append(f"activations {flow.forth_bytes:,.0f} bytes a batch")
        parts.append(f"gradients {flow.back_bytes:,.0f} bytes a batch")
    if math.isinf(flow.most_bytes_per_s):
        parts.append("no link limits it")
    elif math.isfinite(flow.most_bytes_per_s):
        parts.append(f"the path carries {flow.most_bytes_per_s:,.0f} bytes a second")
    return "\n".join(parts)
