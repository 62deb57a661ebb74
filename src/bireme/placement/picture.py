"""A placement as a picture: the graph from top to bottom, each operator in the colour of its device.

An operator is the taller the longer it takes; its backward pass hangs below it in a darker shade. Lines are
dark where an output moves to another device. Graphviz lays the picture out and draws it: a `.dot` file is its
own language, and `.svg` and `.png` are what it makes of that.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bireme.bounds import counted
from bireme.errors import BiremeError, printable
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.grouping import grouped
from bireme.placement.table import number_text
from bireme.placement.workload import Placement, Workload, device_names
from bireme.report import palette
from bireme.report.shapes import fitted
from bireme.schedule.instruction import Kind

# A placed graph as the cells of a picture: a forward node and, in the same cell, its backward nodes.
#
# A graph of more cells than anyone could read is drawn coarser: what a device runs in neighboring rows of the
# picture becomes one cell.

_MOST_CELLS = 400
_MOST_IN_A_ROW = 48
"""Cells side by side; a picture with more is too wide to read."""

_NO_TIME = 1e-6
"""Below this a node takes none."""


@dataclass(frozen=True, slots=True)
class _CellPart:
    """Nodes of a cell, by their places in the workload, that run on one device in one pass."""

    device: int
    is_backward: bool
    time: float
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells, each of its forward parts and then its backward parts, and whom each sends something to;
    backward edges count only for lone backward nodes.
    """

    cells: tuple[tuple[_CellPart, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    is_coarser: bool


def cells_of(workload: Workload, devices: Sequence[int]) -> Cells:
    """The cells of a placed graph, few enough to be drawn."""
    graph = _Graph(workload, devices)
    is_coarser = not graph.is_legible()
    if is_coarser:
        graph.merge_weights()
    rows = 1
    while not graph.is_legible():
        graph.merge_rows(rows)
        rows *= 2
    return graph.cells(is_coarser=is_coarser)


class _Graph:
    """The cells while they are merged: `cell_of` has the cell of each node, by its place."""

    def __init__(self, workload: Workload, devices: Sequence[int]) -> None:
        self.workload = workload
        self.devices = devices
        place_of = {node.id: place for place, node in enumerate(workload.nodes)}
        self.cell_of = _with_forward(workload, place_of)
        has_forward = {
            self.cell_of[place] for place, node in enumerate(workload.nodes) if not node.is_backward
        }
        self.pairs: list[tuple[int, int]] = []
        for edge in workload.edges:
            source, target = place_of[edge.source], place_of[edge.target]
            if not workload.nodes[target].is_backward:
                self.pairs.append((source, target))
            elif self.cell_of[source] not in has_forward or self.cell_of[target] not in has_forward:
                # A backward edge runs against the picture's order.
                backward = workload.nodes[source].is_backward
                self.pairs.append((target, source) if backward else (source, target))
        self._number()

    def _number(self) -> None:
        """Number the cells from 0 on, and find their followers."""
        numbers: dict[int, int] = {}
        self.cell_of = [numbers.setdefault(cell, len(numbers)) for cell in self.cell_of]
        self.followers: list[dict[int, None]] = [{} for _ in numbers]
        self.num_before = [0] * len(numbers)
        for source, target in self.pairs:
            one, other = self.cell_of[source], self.cell_of[target]
            if one != other and other not in self.followers[one]:
                self.followers[one][other] = None
                self.num_before[other] += 1
        self.device_of: list[int] = [0] * len(numbers)
        self.time_of = [0.0] * len(numbers)
        for place, cell in enumerate(self.cell_of):
            self.device_of[cell] = self.devices[place]
            self.time_of[cell] += self.time(place)

    def time(self, place: int) -> float:
        node = self.workload.nodes[place]
        on_accelerator = self.devices[place] < self.workload.num_accelerators
        return node.accelerator_time if on_accelerator else node.cpu_time

    def is_legible(self) -> bool:
        """Whether there are few enough cells, in all and side by side."""
        if len(self.followers) == len(set(self.device_of)):
            return True
        in_row = Counter(self._rows())
        return len(self.followers) <= _MOST_CELLS and max(in_row.values()) <= _MOST_IN_A_ROW

    def merge_weights(self) -> None:
        """Cells that take no time and only feed one other on their device go into that."""
        into = list(range(len(self.followers)))
        for cell, targets in enumerate(self.followers):
            if len(targets) == 1 and not self.num_before[cell] and self.time_of[cell] < _NO_TIME:
                (target,) = targets
                if self.device_of[target] == self.device_of[cell]:
                    into[cell] = target
        self._merge([into[cell] for cell in self.cell_of])

    def merge_rows(self, num_rows: int) -> None:
        """Cells of one device in `num_rows` neighboring rows of the picture become one."""
        rows = self._rows()
        keys = [(rows[cell] // num_rows, self.device_of[cell]) for cell in range(len(rows))]
        first: dict[tuple[int, int], int] = {}
        into = [first.setdefault(key, cell) for cell, key in enumerate(keys)]
        self._merge([into[cell] for cell in self.cell_of])

    def _rows(self) -> list[int]:
        """The row of each cell: below all before it, except where a circle makes that impossible."""
        rows = [0] * len(self.followers)
        waiting = list(self.num_before)
        left = dict.fromkeys(range(len(rows)))
        ready = [cell for cell in left if not waiting[cell]]
        while left:
            cell = ready.pop() if ready else next(iter(left))
            if cell not in left:
                continue
            del left[cell]
            for target in self.followers[cell]:
                waiting[target] -= 1
                if target in left:
                    rows[target] = max(rows[target], rows[cell] + 1)
                    if not waiting[target]:
                        ready.append(target)
        return rows

    def _merge(self, cell_of: list[int]) -> None:
        self.cell_of = cell_of
        self._number()

    def cells(self, *, is_coarser: bool) -> Cells:
        places = grouped((cell, place) for place, cell in enumerate(self.cell_of))
        return Cells(
            tuple(tuple(self._parts(places[cell])) for cell in range(len(self.followers))),
            tuple(tuple(targets) for targets in self.followers),
            is_coarser,
        )

    def _parts(self, places: Iterable[int]) -> list[_CellPart]:
        nodes = self.workload.nodes
        groups = grouped(((nodes[place].is_backward, self.devices[place]), place) for place in places)
        return [
            _CellPart(device, is_backward, sum(map(self.time, group)), tuple(group))
            for (is_backward, device), group in sorted(groups.items())
        ]


def _with_forward(workload: Workload, place_of: dict[int, int]) -> list[int]:
    """For each node the place of the forward node it is drawn with; one without is drawn alone."""
    cell_of = list(range(len(workload.nodes)))
    forward: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(workload.nodes):
        if node.colour is not None and not node.is_backward:
            forward[node.colour].append(place)
    sources = grouped((edge.target, place_of[edge.source]) for edge in workload.edges)
    for place, node in enumerate(workload.nodes):
        if node.is_backward and node.colour is not None and forward[node.colour]:
            mates = forward[node.colour]
            # Of several forward nodes of its colour, the one whose output it reads is its own.
            own = (mate for mate in mates if mate in sources.get(node.id, ()))
            cell_of[place] = next(own, mates[0])
    return cell_of


FORMATS = (".svg", ".png", ".dot")

_ACCELERATOR_HUES = (0, 1, 2, 3, 5)
_CPU_HUE = 4
WIDTH = 92
_LEAST_HEIGHT, _MOST_HEIGHT = 14, 60
_LOAD_BAR = 90
"""Points."""
_DEVICES_IN_A_ROW = 4

_HEAD = """digraph placement {
graph [fontname="Helvetica", fontsize=12, labelloc=t, labeljust=l, nodesep=0.18, ranksep=0.3]
node [fontname="Helvetica", fontsize=9, shape=plain]
edge [arrowsize=0.4]
"""


def check_renderer(path: Path) -> None:
    """Refuse a picture that nothing installed could draw."""
    if path.suffix.lower() != ".dot" and find_spec("pygraphviz") is None:
        raise BiremeError(
            f"{path} needs Graphviz, which is not installed. Run pip install 'bireme[viz]', or name a .dot "
            "file, which any Graphviz draws."
        )


def write_placement_picture(workload: Workload, placement: Placement, path: Path) -> None:
    """Draw a placement; the suffix of `path`, one of `FORMATS`, says in which format."""
    check_renderer(path)
    text = placement_dot(workload, placement)
    if path.suffix.lower() == ".dot":
        write_text_atomically(path, text)
        return
    graph = import_module("pygraphviz").AGraph(string=text)
    write_bytes_atomically(path, graph.draw(format=path.suffix.lower()[1:], prog="dot"))


def placement_dot(workload: Workload, placement: Placement) -> str:
    """The picture of a placement in Graphviz's language."""
    view = _View(workload, placement, cells_of(workload, placement.devices), device_names(workload))
    return "".join((_HEAD, *_legend(view), *_boxes(view), *_lines(view), "}\n"))


@dataclass(frozen=True, slots=True)
class _View:
    """What is drawn."""

    workload: Workload
    placement: Placement
    graph: Cells
    names: Sequence[str]

    @property
    def full_time(self) -> float:
        """The time that gets the full height: few take longer, and shall not make all others tiny."""
        times = sorted(part.time for cell in self.graph.cells for part in cell if part.time > 0)
        return times[int(0.95 * (len(times) - 1))] if times else 1.0

    def _hue(self, device: int) -> tuple[int, int]:
        """The hue of a device, and which of its shades."""
        number = device - self.workload.num_accelerators
        if number >= 0:
            return _CPU_HUE, number
        turn, place = divmod(device, len(_ACCELERATOR_HUES))
        return _ACCELERATOR_HUES[place], turn

    def fill(self, device: int, *, is_backward: bool) -> str:
        """The colour of a device; past the first few, it fades into a second one."""
        hue, variant = self._hue(device)
        fill = palette.hex_of(palette.fill(hue, Kind.BACKWARD if is_backward else Kind.FORWARD))
        second = (None, Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT)[variant % 3]
        return fill if second is None else f"{fill}:{palette.hex_of(palette.fill(hue, second))}"

    def ink(self, device: int, *, is_backward: bool) -> str:
        """The colour of text on it."""
        hue, _ = self._hue(device)
        return palette.hex_of(palette.on(palette.fill(hue, Kind.BACKWARD if is_backward else Kind.FORWARD)))


def _legend(view: _View) -> Iterator[str]:
    """The title, each device with its load, and what the picture leaves out."""
    yield 'label=<<TABLE BORDER="0" CELLSPACING="3" CELLPADDING="1">\n'
    wide = f'COLSPAN="{4 * _DEVICES_IN_A_ROW}" ALIGN="LEFT"'
    yield f"<TR><TD {wide}><B>{_html(_title(view))}</B></TD></TR>\n"
    devices = [_device(view, device, name) for device, name in enumerate(view.names)]
    for first in range(0, len(devices), _DEVICES_IN_A_ROW):
        yield f"<TR>{''.join(devices[first : first + _DEVICES_IN_A_ROW])}</TR>\n"
    yield f'<TR><TD {wide}><FONT POINT-SIZE="10">{_html(_caption(view))}</FONT></TD></TR>\n</TABLE>>\n'


def _device(view: _View, device: int, name: str) -> str:
    loads = view.placement.loads
    most = max(loads)
    text = number_text(loads[device]) if device in view.placement.devices else "unused"
    shown = f"<B>{_html(name)}</B>" if loads[device] == most else _html(name)
    bar = max(round(_LOAD_BAR * loads[device] / most), 1) if most else 1
    fill = view.fill(device, is_backward=True)
    widths = ((bar, f' BGCOLOR="{fill}"'), (_LOAD_BAR + 1 - bar, ""))
    cells = (f'<TD FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="8"{colour}></TD>' for width, colour in widths)
    load = f'<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>{"".join(cells)}</TR></TABLE>'
    return (
        f'<TD WIDTH="14" HEIGHT="14" BGCOLOR="{view.fill(device, is_backward=False)}"></TD>'
        f'<TD ALIGN="LEFT">{shown}</TD><TD ALIGN="LEFT">{load}</TD><TD ALIGN="LEFT">{_html(text)}</TD>'
    )


def _title(view: _View) -> str:
    placement, workload = view.placement, view.workload
    what = f"{placement.objective} {number_text(placement.value)}"
    counts = (
        counted(len(workload.nodes), "node"),
        counted(workload.num_accelerators, "accelerator"),
        counted(workload.num_cpus, "CPU"),
    )
    return f"{what} · {placement.method} · {', '.join(counts)}"


def _caption(view: _View) -> str:
    sentences = ["taller: takes longer", "dark line: moved between devices"]
    if view.workload.is_training:
        sentences.append("darker: backward of the node above, drawn without lines")
    if view.graph.is_coarser:
        drawn = f"{len(view.graph.cells)} boxes for {len(view.workload.nodes):,} nodes"
        sentences.append(f"{drawn}, neighbors on one device as one")
    return " · ".join(sentences)


def _boxes(view: _View) -> Iterator[str]:
    full_time = view.full_time
    for number, cell in enumerate(view.graph.cells):
        rows = []
        for part in cell:
            height = min(max(_MOST_HEIGHT * part.time / full_time, _LEAST_HEIGHT), _MOST_HEIGHT)
            has_name = not part.is_backward or part is cell[0]
            ink = view.ink(part.device, is_backward=part.is_backward)
            label = f'<FONT COLOR="{ink}">{_html(_label(view, part))}</FONT>' if has_name else ""
            fill = view.fill(part.device, is_backward=part.is_backward)
            rows.append(f'<TR><TD WIDTH="{WIDTH}" HEIGHT="{height:.0f}" BGCOLOR="{fill}">{label}</TD></TR>')
        table = f'<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{"".join(rows)}</TABLE>'
        told = "\n".join(_told(view, part) for part in cell)
        yield f"n{number} [label=<{table}>, tooltip={_quoted(told)}]\n"


def _lines(view: _View) -> Iterator[str]:
    moved, stays = palette.hex_of(palette.INK), palette.hex_of(palette.AXIS)
    cells = view.graph.cells
    for number, targets in enumerate(view.graph.followers):
        for target in targets:
            is_moved = cells[target][0].device != cells[number][0].device
            yield f'n{number} -> n{target} [color="{moved if is_moved else stays}"]\n'


def _label(view: _View, part: _CellPart) -> str:
    if len(part.places) > 1:
        return f"{len(part.places)} nodes"
    node = view.workload.nodes[part.places[0]]
    parts = printable(node.name.strip() or str(node.id)).split("/")
    # What tells neighbors apart is at the end.
    tails = ["/".join(parts[first:]) for first in range(len(parts))]
    tail = next((tail for tail in tails if fitted(tail, 9, WIDTH - 4) == tail), parts[-1])
    return fitted(tail, 9, WIDTH - 4)


def _told(view: _View, part: _CellPart) -> str:
    """What a reader sees who points at a part."""
    nodes = [view.workload.nodes[place] for place in part.places]
    shown = ", ".join(map(str, nodes[:4])) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    kind = "backward" if part.is_backward else "forward"
    return printable(f"{shown} · {kind} on {view.names[part.device]} · {number_text(part.time)}")


def _html(text: str) -> str:
    return escape(text, quote=False)


def _quoted(text: str) -> str:
    words = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{words}"'
