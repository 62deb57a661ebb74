"""Splits as files: who runs what, as this program or another wrote it down.

Two shapes are read: the document of `bireme place --json`, or only its `assignment`, and the shape of the
published splits, a list of nodes for each device. A split that is read has a device for every node; whether
it keeps the rules is for `check.py` to say.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from bireme.documents import read_json_object, validated
from bireme.errors import BiremeError, closest
from bireme.files import write_text_atomically
from bireme.placement.placement import Placement
from bireme.placement.workload import Objective, Workload, device_names
from bireme.placement.workload_file import Whole

__all__ = ["WrittenSplit", "load_split", "read_split", "write_split"]

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


def load_split(path: Path, workload: Workload) -> tuple[int, ...]:
    """The device of each node, as a file has it; one that leaves a node without a device is refused."""
    return read_split(path, workload).devices


def read_split(path: Path, workload: Workload) -> WrittenSplit:
    """A split with what the file claims of it."""
    plain = read_json_object(path)
    try:
        if plain.keys() & {"fpgas", "cpus"}:
            return _published(validated(plain, _PublishedDocument, source="the split"), workload)
        if "assignment" not in plain:
            plain = {"assignment": plain}
        return _assigned(validated(plain, _AssignmentDocument, source="the split"), workload)
    except BiremeError as error:
        raise BiremeError(f"{path}: {error}") from None


def write_split(path: Path, workload: Workload, placement: Placement) -> None:
    """Write a placement in the published shape; a device that runs nothing has an empty list."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for node, device in zip(workload.nodes, placement.devices, strict=True):
        nodes[device].append(node.id)
    rows = [{"load": load, "nodes": nodes[device]} for device, load in enumerate(placement.loads)]
    document = {
        "maxLoad": placement.value,
        "fpgas": rows[: workload.num_accelerators],
        "cpus": rows[workload.num_accelerators :],
    }
    write_text_atomically(path, json.dumps(document, allow_nan=False, indent=1) + "\n")


_SplitNumber = Annotated[float, Field(allow_inf_nan=False)]


class _SplitDocument(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _AssignmentDocument(_SplitDocument):
    assignment: dict[str, str]
    pieces: dict[str, Whole] | None = None
    value: _SplitNumber | None = None
    objective: str | None = None
    loads: dict[str, _SplitNumber] | None = None


class _DeviceDocument(_SplitDocument):
    nodes: list[Whole]


class _PublishedDocument(_SplitDocument):
    max_load: Annotated[_SplitNumber | None, Field(alias="maxLoad")] = None
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
    used: dict[int, set[int]] = defaultdict(set)
    for device, piece in zip(devices, pieces, strict=True):
        used[device].add(piece)
    number_of = {
        (device, piece): number for device in used for number, piece in enumerate(sorted(used[device]))
    }
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
