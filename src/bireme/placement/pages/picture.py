"""A placement as a picture: the graph from top to bottom, each operator in the colour of its device.

An operator is the taller the longer it takes; its backward pass hangs below it in a darker shade. Lines are
dark where an output moves to another device. A long graph goes on at the top of the next column.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bireme.errors import BiremeError
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.placement.pages.cells import Cell, Cells, Part, cells_of
from bireme.placement.pages.layers import Layout, laid_out_in_layers
from bireme.placement.pages.table import number_text
from bireme.placement.placement import Placement
from bireme.placement.workload import Workload, device_names
from bireme.report import palette
from bireme.report.png import png
from bireme.report.shapes import Anchor, Line, Picture, Rect, Shape, Text, fitted, text_width
from bireme.report.svg import svg
from bireme.schedule.instruction import Kind

__all__ = ["placement_picture", "write_placement_picture"]

MARGIN = 24
GUTTER = 44
"""Between two columns."""
SHAPE = 1.5
"""How much wider than high a picture should be."""
MOST_COLUMNS = 16
LEAST_WIDTH = 680
ENTRY = 226
ENTRY_ROW = 22
LOAD_BAR = 90
ACCELERATOR_HUES = (0, 1, 2, 3, 5)
CPU_HUE = 4
MOVED = palette.INK
STAYS: palette.Colour = (186, 191, 200)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Pixels, for pictures of up to so many cells."""

    most_cells: float
    cell_width: float
    gap: float
    row_gap: float
    least_height: float
    most_height: float
    text: float


SCALES = (
    _Scale(80, 92, 16, 24, 14, 60, 9.5),
    _Scale(200, 58, 12, 18, 12, 48, 8.5),
    _Scale(math.inf, 34, 9, 14, 11, 40, 7.5),
)
NO_TIME_HEIGHT = 5
LEAST_NAME = 50
"""Pixels that a name needs; in less room stands the node's number."""


def write_placement_picture(workload: Workload, placement: Placement, path: Path) -> None:
    """Draw a placement; the suffix of `path`, .svg or .png, says in which format."""
    picture = placement_picture(workload, placement)
    match path.suffix.lower():
        case ".svg":
            write_text_atomically(path, svg(picture))
        case ".png":
            write_bytes_atomically(path, png(picture))
        case suffix:
            kind = f"ends in {suffix}" if suffix else "has no ending"
            raise BiremeError(f"{path} {kind}, but a picture can only be .svg or .png. Name such a file.")


def placement_picture(workload: Workload, placement: Placement) -> Picture:
    """The picture of a placement."""
    view = _View(workload, placement)
    shapes = [*_head(view), *_lines(view), *_boxes(view)]
    return Picture(math.ceil(view.width), math.ceil(view.bottom) + MARGIN, _title(view), tuple(shapes))


class _View:
    """What is drawn, and where."""

    def __init__(self, workload: Workload, placement: Placement) -> None:
        self.workload = workload
        self.placement = placement
        self.names = device_names(workload)
        self.graph: Cells = cells_of(workload, placement.devices)
        self.scale = next(one for one in SCALES if len(self.graph.cells) <= one.most_cells)
        self.layout: Layout = laid_out_in_layers(
            self.graph.followers,
            cell_width=self.scale.cell_width,
            trunk_width=6,
            gap=self.scale.gap,
        )
        times = sorted(part.time for cell in self.graph.cells for part in cell.parts if part.time > 0)
        self.full_time = times[int(0.95 * (len(times) - 1))] if times else 1.0
        """The time that gets the full height: few take longer, and shall not make all others tiny."""
        self.heights = [0.0] * (max(self.layout.layers) + 1)
        for cell, layer in zip(self.graph.cells, self.layout.layers, strict=True):
            self.heights[layer] = max(self.heights[layer], self.height(cell))
        self.column_of: list[int] = []
        self.tops: list[float] = []
        self.lefts: list[float] = []
        self.rights: list[float] = []
        self._place(min(range(1, MOST_COLUMNS + 1), key=self._misshape))
        self.width = max(self.rights[-1] + MARGIN, LEAST_WIDTH)
        self.entries_per_row = max(1, int((self.width - 2 * MARGIN) // ENTRY))
        self.num_entry_rows = math.ceil(len(self.names) / self.entries_per_row)
        head = MARGIN + 60 + ENTRY_ROW * self.num_entry_rows
        self.tops = [top + head for top in self.tops]
        self.bottom = max(top + height for top, height in zip(self.tops, self.heights, strict=True))

    def _misshape(self, num_columns: int) -> float:
        """How far the picture would be from the shape that it should have."""
        self._place(num_columns)
        height = max(top + height for top, height in zip(self.tops, self.heights, strict=True))
        return abs(math.log((self.rights[-1] - self.lefts[0] + 1) / (height + 1) / SHAPE))

    def _place(self, num_columns: int) -> None:
        """Give every row its column and its height in it, and every column its place."""
        self._place_rows(num_columns)
        self._place_columns()

    def _place_rows(self, num_columns: int) -> None:
        total = sum(self.heights) + self.scale.row_gap * len(self.heights)
        self.column_of, self.tops = [], []
        y, column = 0.0, 0
        for height in self.heights:
            if y > 0 and y + height / 2 > total / num_columns and column + 1 < num_columns:
                y, column = 0.0, column + 1
            self.column_of.append(column)
            self.tops.append(y)
            y += height + self.scale.row_gap

    def _place_columns(self) -> None:
        """The empty space beside the rows of a column is left out."""
        self.lefts, self.rights = [], []
        extents: list[list[float]] = [[] for _ in range(self.column_of[-1] + 1)]
        half = self.scale.cell_width / 2
        for x, layer, trunk in zip(self.layout.x, self.layout.layers, self.layout.trunks, strict=True):
            extents[self.column_of[layer]] += (x - half, x + half)
            for row, point in enumerate(trunk, layer + 1):
                extents[self.column_of[row]].append(point)
                # Its line comes from the row above, which may be in another column.
                extents[self.column_of[row - 1]].append(point)
        right: float = MARGIN - GUTTER
        for extent in extents:
            self.lefts.append(right + GUTTER - min(extent))
            right = self.lefts[-1] + max(extent)
            self.rights.append(right)

    def part_height(self, part: Part) -> float:
        """How tall a part is for its time."""
        if part.time <= 0:
            return NO_TIME_HEIGHT
        height = self.scale.most_height * part.time / self.full_time
        return min(max(height, self.scale.least_height), self.scale.most_height)

    def height(self, cell: Cell) -> float:
        """Of all parts of a cell."""
        return sum(map(self.part_height, cell.parts))

    def left(self, layer: int) -> float:
        """What the places of a row begin from."""
        return self.lefts[self.column_of[layer]]

    def fill(self, device: int, *, is_backward: bool) -> tuple[palette.Colour, palette.Colour | None]:
        """The colour of a device and of its stripes, if it has some."""
        number = device - self.workload.num_accelerators
        hue, variant = CPU_HUE, number
        if number < 0:
            hue, variant = ACCELERATOR_HUES[device % len(ACCELERATOR_HUES)], device // len(ACCELERATOR_HUES)
        ground = palette.fill(hue, Kind.BACKWARD if is_backward else Kind.FORWARD)
        stripes = (None, palette.fill(hue, Kind.RECOMPUTE), palette.fill(hue, Kind.BACKWARD_WEIGHT))
        return ground, stripes[variant % len(stripes)]


def _title(view: _View) -> str:
    placement, workload = view.placement, view.workload
    what = f"{placement.objective} {number_text(placement.value)}"
    counts = (
        _counted(len(workload.nodes), "node"),
        _counted(workload.num_accelerators, "accelerator"),
        _counted(workload.num_cpus, "CPU"),
    )
    return f"{what} · {placement.method} · {', '.join(counts)}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _head(view: _View) -> Iterator[Shape]:
    """The title, each device with its load, and what the picture leaves out."""
    yield Text(MARGIN, MARGIN, fitted(_title(view), 15, view.width - 2 * MARGIN), 15, palette.INK, bold=True)
    loads = view.placement.loads
    most = max(loads)
    counts = [view.placement.devices.count(device) for device in range(len(view.names))]
    per_row = view.entries_per_row
    for device, name in enumerate(view.names):
        x = MARGIN + device % per_row * ENTRY
        y = MARGIN + 22 + device // per_row * ENTRY_ROW
        ground, stripes = view.fill(device, is_backward=False)
        yield Rect(x, y, 14, 14, ground, stripes, role="key")
        if view.workload.is_training:
            dark, dark_stripes = view.fill(device, is_backward=True)
            yield Rect(x, y + 7, 14, 7, dark, dark_stripes, role="key")
        yield Text(x + 20, y + 7, name, 12, palette.INK, bold=loads[device] == most)
        bar = LOAD_BAR * loads[device] / most if most else 0.0
        yield Rect(x + 64, y + 3, LOAD_BAR, 8, palette.LINK_BED, role="bed")
        if bar > 0:
            yield Rect(x + 64, y + 3, bar, 8, view.fill(device, is_backward=True)[0], role="load")
        title = number_text(loads[device]) if counts[device] else "unused"
        yield Text(x + 70 + LOAD_BAR, y + 7, title, 12, palette.PALE_INK)
    y = MARGIN + 22 + view.num_entry_rows * ENTRY_ROW + 10
    yield Text(MARGIN, y, fitted(_caption(view), 11, view.width - 2 * MARGIN), 11, palette.PALE_INK)


def _caption(view: _View) -> str:
    sentences = ["taller: takes longer", "dark line: moved between devices"]
    if view.workload.is_training:
        sentences.append("darker: the backward of what is above it, without its lines")
    if view.graph.is_coarser:
        drawn = f"{len(view.graph.cells)} boxes for {len(view.workload.nodes):,} nodes"
        sentences.append(f"{drawn}, neighbours on one device as one")
    return " · ".join(sentences)


def _boxes(view: _View) -> Iterator[Shape]:
    width, size = view.scale.cell_width, view.scale.text
    for number, cell in enumerate(view.graph.cells):
        x, y = _corner(view, number)
        for part in cell.parts:
            height = view.part_height(part)
            ground, stripes = view.fill(part.device, is_backward=part.is_backward)
            yield Rect(x, y, width, height, ground, stripes, role="node", title=_told(view, part))
            if height >= size + 2 and (not part.is_backward or part is cell.parts[0]):
                text = _label(view, part)
                if stripes is not None:
                    wide = min(text_width(text, size) + 4, width)
                    yield Rect(x + (width - wide) / 2, y + (height - size - 2) / 2, wide, size + 2, ground)
                yield Text(x + width / 2, y + height / 2, text, size, palette.on(ground), Anchor.MIDDLE)
            y += height


def _corner(view: _View, cell: int) -> tuple[float, float]:
    """Left and top of a cell."""
    layer = view.layout.layers[cell]
    x = view.left(layer) + view.layout.x[cell] - view.scale.cell_width / 2
    return x, view.tops[layer] + (view.heights[layer] - view.height(view.graph.cells[cell])) / 2


def _label(view: _View, part: Part) -> str:
    room, size = view.scale.cell_width - 4, view.scale.text
    if len(part.places) > 1:
        words = f"{len(part.places)} nodes"
        return words if text_width(words, size) <= room else f"{len(part.places)}"
    node = view.workload.nodes[part.places[0]]
    parts = _printable(node.name.strip()).split("/")
    # What tells neighbours apart stands at the end; the first letters alone say less than the number.
    tails = ("/".join(parts[first:]) for first in range(len(parts)))
    tail = next((tail for tail in tails if text_width(tail, size) <= room), parts[-1])
    return fitted(tail, size, room) if tail and room >= LEAST_NAME else fitted(str(node.id), size, room)


def _told(view: _View, part: Part) -> str:
    """What a reader sees who points at a part."""
    nodes = [view.workload.nodes[place] for place in part.places]
    shown = ", ".join(map(str, nodes[:4])) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    kind = "backward" if part.is_backward else "forward"
    return _printable(f"{shown} · {kind} on {view.names[part.device]} · {number_text(part.time)}")


def _printable(text: str) -> str:
    """A name from a file may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _lines(view: _View) -> Iterator[Shape]:
    """Pale lines below dark ones, and the ways from the foot of a column to the next one's top."""
    pale: list[Shape] = []
    dark: list[Shape] = []
    for cell in range(len(view.graph.cells)):
        for line in _lines_from(view, cell):
            (dark if line.colour == MOVED else pale).append(line)
    yield from _bridges(view)
    yield from pale
    yield from dark


def _lines_from(view: _View, cell: int) -> Iterator[Line]:
    """The trunk of a cell and the branches to its followers."""
    layout, devices = view.layout, [part.device for part in view.graph.cells[cell].parts]
    first = layout.layers[cell]
    trunk = (layout.x[cell], *layout.trunks[cell])
    last_moved = first
    start = _corner(view, cell)[1] + view.height(view.graph.cells[cell])
    for target in view.graph.followers[cell]:
        layer = layout.layers[target]
        if layer <= first:
            continue
        is_moved = view.graph.cells[target].parts[0].device != devices[0]
        last_moved = max(last_moved, layer - 1) if is_moved else last_moved
        y = _corner(view, target)[1]
        yield from _step(
            view,
            layer - 1,
            trunk[layer - 1 - first],
            layout.x[target],
            begin=start if layer - 1 == first else None,
            end=y,
            colour=MOVED if is_moved else STAYS,
        )
    for row in range(first, first + len(trunk) - 1):
        yield from _step(
            view,
            row,
            trunk[row - first],
            trunk[row + 1 - first],
            begin=start if row == first else None,
            end=view.tops[row + 1] + view.heights[row + 1],
            colour=MOVED if row < last_moved else STAYS,
        )


def _step(
    view: _View,
    row: int,
    upper_x: float,
    lower_x: float,
    *,
    begin: float | None,
    end: float,
    colour: palette.Colour,
) -> Iterator[Line]:
    """From a vertex of a row to one of the next: down, across the gap between them, and down to its end."""
    width = 1.2 if colour == MOVED else 1.0
    foot = view.tops[row] + view.heights[row]
    x, y = view.left(row) + upper_x, foot if begin is None else begin
    if y < foot:
        yield Line(x, y, x, foot, colour, width)
    lower = view.left(row + 1) + lower_x
    head = view.tops[row + 1]
    if view.column_of[row] == view.column_of[row + 1]:
        yield Line(x, foot, lower, head, colour, width)
    else:
        stub = view.scale.row_gap * 0.7
        yield Line(x, foot, view.left(row) + lower_x, foot + stub, colour, width)
        yield Line(lower, head - stub, lower, head, colour, width)
    if head < end:
        yield Line(lower, head, lower, end, colour, width)


def _bridges(view: _View) -> Iterator[Shape]:
    """Pale ways from each column's foot to the next one's top."""
    stub = view.scale.row_gap * 0.7
    for row in range(len(view.tops) - 1):
        if view.column_of[row] == view.column_of[row + 1]:
            continue
        foot, head = view.tops[row] + view.heights[row] + stub, view.tops[row + 1] - stub
        column = view.column_of[row]
        left = view.rights[column - 1] + GUTTER if column else MARGIN
        gutter = view.rights[column] + GUTTER / 2
        bed = palette.AXIS
        yield Line(left, foot, gutter, foot, bed, 2)
        yield Line(gutter, foot, gutter, head, bed, 2)
        yield Line(gutter, head, view.rights[column + 1], head, bed, 2)
