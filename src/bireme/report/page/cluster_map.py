"""The plan drawn over the cluster: servers as boxes, the devices in them, and what flows between stages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bireme.bounds import bytes_text, rate_text
from bireme.grouping import grouped
from bireme.report.markup import number, tag, titled, words
from bireme.report.page.figures import Flow, Post, StageFigures, flows, posts
from bireme.report.page.run import Run
from bireme.report.shapes import fitted, text_width

_SIZES = {"large": 1120, "medium": 700, "small": 330}
"""Most pixels of a drawing, by the class with which the style sheet shows the one that fits the page."""
_MOST_COLUMNS = 4
_GAP, _NARROW_GAP = 108, 26
"""Between servers, with lines between them and without."""
_NARROWEST, _WIDEST = 170, 290
"""Of a server."""
_ONE_LINE = 250
"""A server so wide has room for a label in one line."""
_HEAD = 34
"""Room for a server's name."""
_EDGE = 12
DEVICE, _BETWEEN = 66, 34
_BOW, _NARROW_BOW = 180, 124
"""Room for a line next to a server, and for its label of one line or of two."""
_ROW_GAP = 64
_MOST_DEVICES = 32
"""With more replicas than that, one represents all."""
_MOST_LABELS = 16
_CROWDED = 0.7
"""From so much of a link in use on it is marked."""


def cluster_figure(run: Run, stages: Sequence[StageFigures]) -> str:
    """The drawing, in as many sizes as it needs; empty if the devices of the run are unknown."""
    used = posts(run)
    if not used:
        return ""
    is_cut = len(used) > _MOST_DEVICES
    drawn = [post for post in used if not is_cut or post.replica == 0]
    shown = [flow for flow in flows(run) if not is_cut or flow.source.replica == 0]
    pictures = {name: _picture(run, drawn, shown, stages, width) for name, width in _SIZES.items()}
    names = grouped((picture, name) for name, picture in pictures.items())
    maps = (tag("div", picture, class_=f"map {' '.join(sizes)}") for picture, sizes in names.items())
    width = max(post.replica for post in used) + 1
    note = tag("p", f"This shows the first of {width} equal replicas.", class_="note") if is_cut else ""
    return tag("figure", *maps, note, class_="chart")


def _picture(
    run: Run, drawn: Sequence[Post], shown: Sequence[Flow], stages: Sequence[StageFigures], width: float
) -> str:
    """The drawing, at most so wide."""
    crosses = any(_server_of(flow.source.device) != _server_of(flow.destination.device) for flow in shown)
    layout = _Layout.of(run, drawn, shown, _GAP if crosses else _NARROW_GAP, width)
    labels = len(shown) <= _MOST_LABELS
    title = "The plan over the cluster"
    return tag(
        "svg",
        titled(title),
        *(part for server in layout.servers for part in _server(server)),
        *(_device(run, box, stages) for box in layout.devices),
        *(part for flow in shown for part in _flow(layout, flow, has_label=labels)),
        viewBox=f"0 0 {layout.width:.0f} {layout.height:.0f}",
        style=f"--width:{layout.width:.0f}px",
        role="img",
        aria_label=title,
    )


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
    width: float
    height: float

    @staticmethod
    def of(run: Run, used: Sequence[Post], shown: Sequence[Flow], gap: float, most: float) -> "_Layout":
        """Servers from left to right in the order of the pipeline, their devices from top to bottom.

        There are as many columns as fit; lines next to a server have room on the right if there are any.
        """
        by_server = grouped((_server_of(post.device), post) for post in used)
        most_columns = min(len(by_server), _MOST_COLUMNS)
        for columns in range(most_columns, 0, -1):
            bow = _BOW if most >= 2 * _WIDEST else _NARROW_BOW
            room = most - (columns - 1) * gap - 4
            layout = _Layout._placed(run, by_server, columns, min(_WIDEST, room / columns), gap)
            if not any(layout.is_bow(flow) for flow in shown):
                bow = 0
            width = min(_WIDEST, (room - bow) / columns)
            if width >= _NARROWEST or columns == 1:
                layout = _Layout._placed(run, by_server, columns, width, gap)
                return replace(layout, width=layout.width + bow)
        raise AssertionError("a drawing has a column")

    @staticmethod
    def _placed(
        run: Run, by_server: Mapping[str, Sequence[Post]], columns: int, width: float, gap: float
    ) -> "_Layout":
        """The servers in so many columns of that width."""
        servers: list[_Box] = []
        devices: list[_Box] = []
        y = lowest = 2.0
        for place, (name, members) in enumerate(by_server.items()):
            if place and place % columns == 0:
                y = lowest + _ROW_GAP
            x = 2 + place % columns * (width + gap)
            unused = _num_unused(run, name, members)
            height = _HEAD + len(members) * (DEVICE + _BETWEEN) - _BETWEEN + _EDGE + (20 if unused else 0)
            servers.append(_Box(name, x, y, width, height, num_unused=unused))
            devices += [
                _Box(
                    post.device,
                    x + _EDGE,
                    y + _HEAD + index * (DEVICE + _BETWEEN),
                    width - 2 * _EDGE,
                    DEVICE,
                    post,
                )
                for index, post in enumerate(members)
            ]
            lowest = max(lowest, y + height)
        right = max(server.x + server.width for server in servers) + 2
        return _Layout(tuple(servers), tuple(devices), right, lowest + 4)

    def is_bow(self, flow: Flow) -> bool:
        """Whether a line goes next to a column, around the devices between its ends."""
        a, b = self.box(flow.source), self.box(flow.destination)
        low, high = min(a.y, b.y), max(a.y, b.y)
        return a.x == b.x and any(box.x == a.x and low < box.y < high for box in self.devices)

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
    name = fitted(box.name or "devices", 13, box.width - 2 * _EDGE - 30)
    yield tag("text", words(name), x=box.x + _EDGE, y=box.y + 21, class_="name")
    if box.num_unused:
        ending = "s" if box.num_unused > 1 else ""
        text = f"and {box.num_unused} more device{ending}, not used"
        yield tag("text", text, x=box.x + _EDGE, y=box.y + box.height - 11, class_="mark small")


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
        first, last = own[0].units
        return f"stage {stages} · unit{'s' if last > first else ''} {first}" + (
            f"–{last}" if last > first else ""
        )
    return f"stages {stages}" if len(post.stages) > 1 else f"stage {stages}"


def _memory(own: Sequence[StageFigures], width: float) -> str:
    """Memory and how busy the device is, as much of it as there is room for."""
    peaks = [stage.measured_peak_bytes or stage.predicted_peak_bytes for stage in own]
    peak = max((one for one in peaks if one), default=None)
    limit = max((stage.limit_bytes for stage in own if stage.limit_bytes), default=None)
    shares = [stage.busy_share or stage.predicted_busy_share for stage in own]
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
    first, last = stage.units
    return f"stage {stage.stage}, units {first} to {last}{which}"


def _flow(layout: _Layout, flow: Flow, *, has_label: bool) -> Iterator[str]:
    a, b = layout.box(flow.source), layout.box(flow.destination)
    share = flow.share
    width = 1.5 + (4 * min(share, 1.0) if math.isfinite(share) else 0.0)
    role = "flow crowded" if math.isfinite(share) and share >= _CROWDED else "flow"
    way = _way(a, b, is_bow=layout.is_bow(flow))
    yield tag("path", titled(_flow_told(flow)), d=way.path, class_=role, stroke_width=width)
    if not has_label or not math.isfinite(flow.used_bytes_per_s):
        return
    used = rate_text(float(f"{flow.used_bytes_per_s:.3g}"))
    lines = [used]
    if math.isfinite(share):
        lines.append(f"{_percent(share)} of {rate_text(float(f'{flow.most_bytes_per_s:.3g}'))}")
    has_room = a.width + 2 * _EDGE >= _ONE_LINE and (layout.width >= 2 * _WIDEST or not layout.is_bow(flow))
    if way.anchor == "start" and has_room:
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


def _way(a: _Box, b: _Box, *, is_bow: bool) -> _Way:
    """Straight down to the neighbor below, a bow beside what is between, or a curve to another server."""
    upper, lower = (a, b) if a.y <= b.y else (b, a)
    if a.x == b.x and not is_bow:
        begin, end = upper.y + upper.height, lower.y
        is_inside = end - begin <= _BETWEEN + 1
        if is_inside:
            x = a.x + 34
            path = f"M{number(x)} {number(begin)}V{number(end)}"
            return _Way(path, x + 8, (begin + end) / 2, "start")
        # Between servers, to the right of the name of the lower one.
        x = a.x + a.width - 14
        path = f"M{number(x)} {number(begin)}V{number(end)}"
        return _Way(path, x - 8, (begin + _EDGE + end - _HEAD) / 2, "end")
    if a.x == b.x:
        x, top, bottom = a.x + a.width, upper.y + upper.height / 2, lower.y + lower.height / 2
        path = f"M{number(x)} {number(top)}C{number(x + 40)} {number(top)} {number(x + 40)} {number(bottom)} "
        return _Way(path + f"{number(x)} {number(bottom)}", x + 34, (top + bottom) / 2, "start")
    left, right = (a, b) if a.x < b.x else (b, a)
    x1, y1 = left.x + left.width, left.y + left.height / 2
    x2, y2 = right.x, right.y + right.height / 2
    bend = max((x2 - x1) / 2, 20)
    path = f"M{number(x1)} {number(y1)}C{number(x1 + bend)} {number(y1)} {number(x2 - bend)} {number(y2)} "
    return _Way(path + f"{number(x2)} {number(y2)}", (x1 + x2) / 2, (y1 + y2) / 2 - 12, "middle")


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
