"""A `Workload` as a file: the JSON format in which the paper's authors published theirs.

In it "FPGA" means any accelerator. Such files come from elsewhere, so a key that nobody knows is not refused:
it becomes a warning that names the nearest key that is known. What must be there and is not is an error that
names the node or the edge.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bireme.documents import read_json_object, shown
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.placement.workload import Edge, Node, Workload

__all__ = ["DeviceCounts", "ReadWorkload", "Whole", "load_workload", "read_workload", "write_workload"]

MOST_WARNINGS = 5
"""More different unknown keys than these are only counted."""


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """Devices to place on instead of those that a file names; None keeps what the file says."""

    accelerators: int | None = None
    cpus: int | None = None
    accelerator_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class ReadWorkload:
    """What a file holds, and sentences about what in it was not understood."""

    workload: Workload
    warnings: tuple[str, ...]


def load_workload(path: Path) -> Workload:
    """The workload in a file; a file that holds none is refused with one sentence."""
    return read_workload(path).workload


def read_workload(path: Path, counts: DeviceCounts | None = None) -> ReadWorkload:
    """The workload in a file, with the devices of `counts` where those are given, and warnings."""
    plain = read_json_object(path)
    _refuse_merged(plain, path)
    try:
        document = _WorkloadDocument.model_validate(plain)
    except ValidationError as error:
        raise BiremeError(f"{path}: {_sentence(error, plain)}") from None
    try:
        workload = document.workload(counts or DeviceCounts())
    except BiremeError as error:
        raise BiremeError(f"{path}: {error}") from None
    return ReadWorkload(workload, tuple(_warnings(plain, path)))


def write_workload(path: Path, workload: Workload) -> None:
    """Write a workload to a file, a node or an edge to a line; what is read equals what was written."""
    head = {
        # JSON has no word for boundless; the largest number means the same.
        "maxSizePerFPGA": min(workload.accelerator_bytes, sys.float_info.max),
        "maxFPGAs": workload.num_accelerators,
        "maxCPUs": workload.num_cpus,
    }
    parts = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
    parts.append(_block("nodes", map(_plain_node, workload.nodes)))
    parts.append(_block("edges", map(_plain_edge, workload.edges)))
    write_text_atomically(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _block(key: str, rows: Iterator[dict[str, Any]]) -> str:
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    return f"{json.dumps(key)}: [\n" + ",\n".join(lines) + "\n]" if lines else f"{json.dumps(key)}: []"


def _plain_node(node: Node) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "id": node.id,
        "supportedOnFpga": int(node.supported),
        "cpuLatency": node.cpu_time,
        "fpgaLatency": node.accelerator_time,
        "isBackwardNode": int(node.is_backward),
        "size": node.size_bytes,
    }
    optional = {"colorClass": node.colour, "layerId": node.layer, "name": node.name or None}
    return plain | {key: value for key, value in optional.items() if value is not None}


def _plain_edge(edge: Edge) -> dict[str, Any]:
    plain: dict[str, Any] = {"sourceId": edge.source, "destId": edge.target, "cost": edge.cost}
    return plain if edge.size_bytes is None else plain | {"size": edge.size_bytes}


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: object) -> object:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which other programs may have written as `3.0`."""

_Flag = Annotated[bool, BeforeValidator(_flag)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _NodeDocument(_Document):
    id: Annotated[Whole, Field(description="the number that edges know it by")]
    supported: Annotated[
        _Flag, Field(alias="supportedOnFpga", description="whether an accelerator can run it, 0 or 1")
    ]
    cpu_time: Annotated[_Number, Field(alias="cpuLatency", description="its time on a CPU")]
    accelerator_time: Annotated[_Number, Field(alias="fpgaLatency", description="its time on an accelerator")]
    is_backward: Annotated[
        _Flag, Field(alias="isBackwardNode", description="whether it belongs to the backward pass, 0 or 1")
    ]
    colour: Annotated[Whole | None, Field(alias="colorClass")] = None
    size_bytes: Annotated[_Number | None, Field(alias="size")] = None
    layer: Annotated[Whole | None, Field(alias="layerId")] = None
    name: str | None = None

    def node(self) -> Node:
        return Node(**self.model_dump(exclude_none=True))


class _EdgeDocument(_Document):
    source: Annotated[Whole, Field(alias="sourceId", description="the id of the node it starts at")]
    target: Annotated[Whole, Field(alias="destId", description="the id of the node it ends at")]
    cost: Annotated[_Number, Field(description="the time to move the output of its first node")]
    size_bytes: Annotated[_Number | None, Field(alias="size")] = None

    def edge(self) -> Edge:
        return Edge(**self.model_dump())


class _WorkloadDocument(_Document):
    accelerator_bytes: Annotated[
        _Number, Field(alias="maxSizePerFPGA", description="the bytes of an accelerator's memory")
    ]
    num_accelerators: Annotated[Whole, Field(alias="maxFPGAs", description="how many accelerators there are")]
    num_cpus: Annotated[Whole, Field(alias="maxCPUs", description="how many CPUs there are")]
    nodes: Annotated[list[_NodeDocument], Field(description="the operators")]
    edges: Annotated[list[_EdgeDocument], Field(description="what flows between operators")]

    def workload(self, counts: DeviceCounts) -> Workload:
        size = counts.accelerator_bytes
        return Workload(
            nodes=tuple(node.node() for node in self.nodes),
            edges=tuple(edge.edge() for edge in self.edges),
            num_accelerators=self.num_accelerators if counts.accelerators is None else counts.accelerators,
            num_cpus=self.num_cpus if counts.cpus is None else counts.cpus,
            accelerator_bytes=self.accelerator_bytes if size is None else size,
        )


def _known(model: type[BaseModel]) -> dict[str, str]:
    """The keys of a model in a file, and what each that must be there means."""
    return {field.alias or name: field.description or "" for name, field in model.model_fields.items()}


TOP, NODE, EDGE = _known(_WorkloadDocument), _known(_NodeDocument), _known(_EdgeDocument)
KEYS = {"nodes": NODE, "edges": EDGE}

EXPECTED = {
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "0 or 1, or false or true",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "an object",
}


def _refuse_merged(plain: Mapping[str, Any], path: Path) -> None:
    nodes = plain.get("nodes")
    for place, node in enumerate(nodes if isinstance(nodes, list) else ()):
        if isinstance(node, dict) and "containedSubnodes" in node:
            raise BiremeError(
                f"{path}: {_subject(plain, 'nodes', place)} has containedSubnodes, so it represents "
                "nodes that another program has merged. Give the graph as it was before."
            )


def _sentence(error: ValidationError, plain: Mapping[str, Any]) -> str:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    match first["loc"]:
        case ("nodes" | "edges" as kind, int(place), *rest):
            subject, known, row = _subject(plain, kind, place), KEYS[kind], plain[kind][place]
        case rest:
            subject, known, row = "the workload", TOP, plain
    key = str(rest[0]) if rest else ""
    if first["type"] == "missing":
        hint = _misspelt(key, row, known)
        return f"{subject} lacks {key} ({known[key]}).{hint}"
    expected = EXPECTED.get(first["type"], first["msg"])
    what = f"{key} of {subject}" if key else subject
    return f"{what} is {shown(first['input'])}; it must be {expected}."


def _misspelt(key: str, row: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """A hint at the unknown key that may be meant for a missing one."""
    near = get_close_matches(key, [other for other in row if other not in known], n=1, cutoff=0.6)
    return f" It has {near[0]!r}; was that meant?" if near else ""


def _subject(plain: Mapping[str, Any], kind: str, place: int) -> str:
    """What to call a node or an edge that may lack what it is known by."""
    row = plain[kind][place]
    row = row if isinstance(row, dict) else {}
    if kind == "nodes":
        number = _whole(row.get("id"))
        return f"node {number}" if type(number) is int else f"node number {place + 1} in the list"
    ends = [_whole(row.get("sourceId")), _whole(row.get("destId"))]
    if all(type(end) is int for end in ends):
        return f"the edge {ends[0]} -> {ends[1]}"
    return f"edge number {place + 1} in the list"


def _warnings(plain: Mapping[str, Any], path: Path) -> Iterator[str]:
    """A sentence for each key that nobody knows."""
    found = [("the workload", key, TOP, 1) for key in plain.keys() - TOP.keys()]
    for kind, known in KEYS.items():
        first: dict[str, int] = {}
        count: dict[str, int] = {}
        for place, row in enumerate(plain[kind]):
            for key in row.keys() - known.keys():
                first.setdefault(key, place)
                count[key] = count.get(key, 0) + 1
        found += [(_subject(plain, kind, first[key]), key, known, count[key]) for key in first]
    found.sort(key=lambda one: (one[2] is not TOP, one[2] is EDGE, one[1]))
    for subject, key, known, times in found[:MOST_WARNINGS]:
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known are: {', '.join(sorted(known))}."
        others = f" and {times - 1} more" if times > 1 else ""
        yield f"{path}: {subject}{others} has an unknown key {key!r}, which is not read.{hint}"
    if len(found) > MOST_WARNINGS:
        yield f"{path}: {len(found) - MOST_WARNINGS} more unknown keys are not read."
