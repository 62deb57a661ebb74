"""A `Workload` as a file: the JSON format in which the paper's authors published theirs.

In it "FPGA" means any accelerator. Such files come from elsewhere, so a key that nobody knows is not refused:
it becomes a warning that names the nearest key that is known. What must be there and is not is an error that
names the node or the edge.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from bireme.documents import read_json_object, shown, validated
from bireme.errors import BiremeError, closest, errors_of
from bireme.files import write_text_atomically
from bireme.grouping import grouped
from bireme.placement.workload import Edge, Node, Objective, Placement, Workload, device_names

_MOST_WARNINGS = 5
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


def read_workload(path: Path, counts: DeviceCounts | None = None) -> ReadWorkload:
    """The workload in a file, with the devices of `counts` where those are given, and warnings."""
    plain = read_json_object(path)
    with errors_of(path):
        _refuse_merged(plain)
        try:
            document = _WorkloadDocument.model_validate(plain)
        except ValidationError as error:
            raise BiremeError(_sentence(error, plain)) from None
        workload = document.workload(counts or DeviceCounts())
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
    parts.append(_block("nodes", map(_NodeDocument.plain, workload.nodes)))
    parts.append(_block("edges", map(_EdgeDocument.plain, workload.edges)))
    write_text_atomically(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _block(key: str, rows: Iterator[dict[str, Any]]) -> str:
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    return f"{json.dumps(key)}: [\n" + ",\n".join(lines) + "\n]" if lines else f"{json.dumps(key)}: []"


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: object) -> object:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


_Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which other programs may have written as `3.0`."""

_Flag = Annotated[bool, BeforeValidator(_flag), PlainSerializer(int, when_used="json")]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    @classmethod
    def plain(cls, noun: Node | Edge) -> dict[str, Any]:
        """A node or an edge in the words of JSON."""
        found = cls.model_construct(**asdict(noun))
        return found.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class _NodeDocument(_Document):
    id: Annotated[_Whole, Field(description="the number that edges know it by")]
    supported: Annotated[
        _Flag, Field(alias="supportedOnFpga", description="whether an accelerator can run it, 0 or 1")
    ]
    cpu_time: Annotated[_Number, Field(alias="cpuLatency", description="its time on a CPU")]
    accelerator_time: Annotated[_Number, Field(alias="fpgaLatency", description="its time on an accelerator")]
    is_backward: Annotated[
        _Flag, Field(alias="isBackwardNode", description="whether it belongs to the backward pass, 0 or 1")
    ]
    size_bytes: Annotated[_Number | None, Field(alias="size")] = None
    colour: Annotated[_Whole | None, Field(alias="colorClass")] = None
    layer: Annotated[_Whole | None, Field(alias="layerId")] = None
    name: str | None = ""

    def node(self) -> Node:
        return Node(**self.model_dump(exclude_none=True))


class _EdgeDocument(_Document):
    source: Annotated[_Whole, Field(alias="sourceId", description="the id of the node it starts at")]
    target: Annotated[_Whole, Field(alias="destId", description="the id of the node it ends at")]
    cost: Annotated[_Number, Field(description="the time to move the output of its first node")]
    size_bytes: Annotated[_Number | None, Field(alias="size")] = None

    def edge(self) -> Edge:
        return Edge(**self.model_dump())


class _WorkloadDocument(_Document):
    accelerator_bytes: Annotated[
        _Number, Field(alias="maxSizePerFPGA", description="the bytes of an accelerator's memory")
    ]
    num_accelerators: Annotated[
        _Whole, Field(alias="maxFPGAs", description="how many accelerators there are")
    ]
    num_cpus: Annotated[_Whole, Field(alias="maxCPUs", description="how many CPUs there are")]
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


_TOP, _NODE, _EDGE = _known(_WorkloadDocument), _known(_NodeDocument), _known(_EdgeDocument)
_KEYS = {"nodes": _NODE, "edges": _EDGE}

_EXPECTED = {
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "0 or 1, or false or true",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "an object",
}


def _refuse_merged(plain: Mapping[str, Any]) -> None:
    nodes = plain.get("nodes")
    for place, node in enumerate(nodes if isinstance(nodes, list) else ()):
        if isinstance(node, dict) and "containedSubnodes" in node:
            raise BiremeError(
                f"{_subject(plain, 'nodes', place)} has containedSubnodes, so it represents "
                "nodes that another program has merged. Give the graph as it was before."
            )


def _sentence(error: ValidationError, plain: Mapping[str, Any]) -> str:
    """The first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    match first["loc"]:
        case ("nodes" | "edges" as kind, int(place), *rest):
            subject, known, row = _subject(plain, kind, place), _KEYS[kind], plain[kind][place]
        case rest:
            subject, known, row = "the workload", _TOP, plain
    key = str(rest[0]) if rest else ""
    if first["type"] == "missing":
        hint = _misspelt(key, row, known)
        return f"{subject} lacks {key} ({known[key]}).{hint}"
    expected = _EXPECTED.get(first["type"], first["msg"])
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
    found = [("the workload", key, _TOP, 1) for key in plain.keys() - _TOP.keys()]
    for kind, known in _KEYS.items():
        rows = enumerate(plain[kind])
        places = grouped((key, place) for place, row in rows for key in row.keys() - known.keys())
        found += [(_subject(plain, kind, own[0]), key, known, len(own)) for key, own in places.items()]
    found.sort(key=lambda one: (one[2] is not _TOP, one[2] is _EDGE, one[1]))
    for subject, key, known, times in found[:_MOST_WARNINGS]:
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known are: {', '.join(sorted(known))}."
        others = f" and {times - 1} more" if times > 1 else ""
        yield f"{path}: {subject}{others} has an unknown key {key!r}, which is not read.{hint}"
    if len(found) > _MOST_WARNINGS:
        yield f"{path}: {len(found) - _MOST_WARNINGS} more unknown keys are not read."


# Splits as files: who runs what, as this program or another wrote it down.
#
# Two shapes are read: the document of `bireme place --json`, or only its `assignment`, and the shape of the
# published splits, a list of nodes for each device. A split that is read has a device for every node; whether
# it keeps the rules is for `check.py` to say.

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WrittenSplit:
    """The device of each node, in the workload's order, and what else the file says of it.

    `pieces` are empty where the file names none, else numbered from 0 on each device; `value` and `objective`
    are None and `loads` empty where it claims none.
    """

    devices: tuple[int, ...]
    pieces: tuple[int, ...] = ()
    value: float | None = None
    objective: Objective | None = None
    loads: tuple[float, ...] = ()


def read_split(path: Path, workload: Workload) -> WrittenSplit:
    """A split with what the file claims of it; a file that leaves a node without a device is refused."""
    plain = read_json_object(path)
    with errors_of(path):
        if plain.keys() & {"fpgas", "cpus"}:
            return _published(validated(plain, _PublishedDocument, source="the split"), workload)
        if "assignment" not in plain:
            plain = {"assignment": plain}
        return _assigned(validated(plain, _AssignmentDocument, source="the split"), workload)


def write_split(path: Path, workload: Workload, placement: Placement) -> None:
    """Write a placement in the published shape; a device that runs nothing has an empty list."""
    nodes = grouped(zip(placement.devices, (node.id for node in workload.nodes), strict=True))
    rows = [{"load": load, "nodes": nodes.get(device, [])} for device, load in enumerate(placement.loads)]
    document = {
        "maxLoad": placement.value,
        "fpgas": rows[: workload.num_accelerators],
        "cpus": rows[workload.num_accelerators :],
    }
    write_text_atomically(path, json.dumps(document, allow_nan=False, indent=1) + "\n")


class _AssignmentDocument(_Document):
    assignment: dict[str, str]
    pieces: dict[str, _Whole] | None = None
    value: _Number | None = None
    objective: str | None = None
    loads: dict[str, _Number] | None = None


class _DeviceDocument(_Document):
    nodes: list[_Whole]


class _PublishedDocument(_Document):
    max_load: Annotated[_Number | None, Field(alias="maxLoad")] = None
    fpgas: list[_DeviceDocument] = []
    cpus: list[_DeviceDocument] = []


def _assigned(document: _AssignmentDocument, workload: Workload) -> WrittenSplit:
    numbers = {name: number for number, name in enumerate(device_names(workload))}
    placed = []
    for node, name in _by_node(document.assignment, workload):
        if name not in numbers:
            raise BiremeError(
                f"Node {node} is placed on {name!r}, and there is no such device. {_there(workload)}"
            )
        placed.append((node, numbers[name]))
    device_of = _without_repeats(placed)
    _check_complete(device_of, workload)
    pieces = dict(_by_node(document.pieces or {}, workload))
    wrong = next((node for node, piece in pieces.items() if piece < 0), None)
    if wrong is not None:
        raise BiremeError(f"Node {wrong} is in piece {pieces[wrong]}; pieces are numbered from 0 on.")
    known = [objective.value for objective in Objective]
    if document.objective is not None and document.objective not in known:
        raise BiremeError(
            f"The split is for {document.objective!r}, and there is no such objective. "
            f"{closest(document.objective, known)}"
        )
    loads = document.loads or {}
    if loads and loads.keys() != numbers.keys():
        raise BiremeError(f"`loads` must have a number for each device. {_there(workload)}")
    devices = tuple(device_of[node.id] for node in workload.nodes)
    return WrittenSplit(
        devices,
        _renumbered(devices, [pieces.get(node.id, 0) for node in workload.nodes]) if pieces else (),
        document.value,
        None if document.objective is None else Objective(document.objective),
        tuple(loads[name] for name in numbers) if loads else (),
    )


def _renumbered(devices: Sequence[int], pieces: Sequence[int]) -> tuple[int, ...]:
    """The pieces of each device numbered from 0 without gaps, in the same order."""
    used = grouped(sorted(set(zip(devices, pieces, strict=True))))
    number_of = {(device, piece): number for device in used for number, piece in enumerate(used[device])}
    return tuple(number_of[run] for run in zip(devices, pieces, strict=True))


def _by_node(plain: Mapping[str, Value], workload: Workload) -> Iterator[tuple[int, Value]]:
    """Nodes by their ids, which are strings in a file."""
    known = {str(node.id): node.id for node in workload.nodes}
    for text, value in plain.items():
        if text not in known:
            raise BiremeError(f"The workload has no node {text!r}, which the split places.")
        yield known[text], value


def _published(document: _PublishedDocument, workload: Workload) -> WrittenSplit:
    known = {node.id for node in workload.nodes}
    placed = []
    kinds = (
        (document.fpgas, "accelerators", workload.num_accelerators, 0),
        (document.cpus, "CPUs", workload.num_cpus, workload.num_accelerators),
    )
    for rows, what, count, first in kinds:
        used = max((place + 1 for place, row in enumerate(rows) if row.nodes), default=0)
        if used > count:
            raise BiremeError(f"The split uses {used} {what}, and the workload has {count}.")
        for place, row in enumerate(rows):
            for node in row.nodes:
                if node not in known:
                    raise BiremeError(f"The workload has no node {node}, which the split places.")
                placed.append((node, first + place))
    device_of = _without_repeats(placed)
    _complete_by_colour(device_of, workload)
    _check_complete(device_of, workload)
    # Splits made by hand often say 0, or nothing at all.
    claimed = document.max_load or None
    return WrittenSplit(tuple(device_of[node.id] for node in workload.nodes), value=claimed)


def _complete_by_colour(device_of: dict[int, int], workload: Workload) -> None:
    """Put backward nodes that a split leaves out where the nodes of their colour are."""
    device_of_colour = {
        node.colour: device_of[node.id]
        for node in workload.nodes
        if node.colour is not None and node.id in device_of
    }
    for node in workload.nodes:
        if node.is_backward and node.id not in device_of and node.colour in device_of_colour:
            device_of[node.id] = device_of_colour[node.colour]


def _without_repeats(placed: Iterable[tuple[int, int]]) -> dict[int, int]:
    device_of: dict[int, int] = {}
    for node, device in placed:
        if node in device_of:
            raise BiremeError(f"Node {node} is placed twice. Leave out one of the two.")
        device_of[node] = device
    return device_of


def _check_complete(device_of: Mapping[int, Any], workload: Workload) -> None:
    missing = [node for node in workload.nodes if node.id not in device_of]
    if not missing:
        return
    first = missing[0]
    others = f", nor {len(missing) - 1} more" if len(missing) > 1 else ""
    has_mates = any(node.colour == first.colour for node in workload.nodes if node.id in device_of)
    is_lone = first.is_backward and (first.colour is None or not has_mates)
    why = " No node of its colour is placed, so its device cannot be inferred." if is_lone else ""
    raise BiremeError(f"The split does not place {first}{others}.{why}")


def _there(workload: Workload) -> str:
    """The devices there are."""
    ranges = [
        f"{kind}0 to {kind}{count - 1}" if count > 1 else f"{kind}0"
        for kind, count in (("acc", workload.num_accelerators), ("cpu", workload.num_cpus))
        if count
    ]
    return f"There are {' and '.join(ranges)}."
