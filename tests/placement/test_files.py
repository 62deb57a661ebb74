"""Workloads and splits as files: what is written is read, what is wrong is one sentence that says where."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bireme.errors import BiremeError
from bireme.placement.workload import Edge, Node, Objective, Placement, Workload
from bireme.placement.workload_file import (
    DeviceCounts,
    read_split,
    read_workload,
    write_split,
    write_workload,
)
from tests.support.placement_oracles import random_workload

EXAMPLES = Path(__file__).parents[2] / "examples" / "placement"


def node(number: int, **changes: Any) -> dict[str, Any]:
    usual = {"id": number, "supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 1.5, "isBackwardNode": 0}
    return {key: value for key, value in (usual | changes).items() if value is not ...}


def edge(source: int, target: int, **changes: Any) -> dict[str, Any]:
    usual = {"sourceId": source, "destId": target, "cost": 0.25}
    return {key: value for key, value in (usual | changes).items() if value is not ...}


def document(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "maxSizePerFPGA": 1e30,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node(7), node(3), node(5)],
        "edges": [edge(7, 3), edge(3, 5)],
    }
    return {key: value for key, value in (usual | changes).items() if value is not ...}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def read(path: Path, plain: object) -> Workload:
    path.write_text(json.dumps(plain))
    return read_workload(path).workload


def complaint(path: Path, plain: object) -> str:
    """The one sentence that a wrong workload gets, without the name of its file."""
    with pytest.raises(BiremeError) as caught:
        read(path, plain)
    text = str(caught.value)
    assert text.startswith(str(path))
    return text.removeprefix(f"{path}: ")


# --- workloads ---------------------------------------------------------------------------------------------


def test_a_published_file_is_read_as_it_stands(path: Path) -> None:
    plain = document(
        nodes=[
            node(7, colorClass=4, size=100, layerId=2, name="conv"),
            node(3, supportedOnFpga=False, isBackwardNode=True, colorClass=4.0),
        ],
        edges=[edge(7, 3, size=12)],
    )
    assert read(path, plain) == Workload(
        nodes=(
            Node(7, 1.5, 10.0, 100.0, colour=4, layer=2, name="conv"),
            Node(3, 1.5, 10.0, supported=False, is_backward=True, colour=4),
        ),
        edges=(Edge(7, 3, 0.25, 12.0),),
        num_accelerators=2,
        num_cpus=1,
        accelerator_bytes=1e30,
    )


def test_what_is_read_equals_what_was_written(path: Path) -> None:
    random = Random(4)
    for _ in range(40):
        workload = random_workload(random)
        write_workload(path, workload)
        assert read_workload(path).workload == workload


@pytest.mark.parametrize("name", ["branches", "training"])
def test_the_examples_are_workloads_without_warnings(name: str) -> None:
    found = read_workload(EXAMPLES / f"{name}.json")
    assert found.warnings == ()
    assert found.workload.is_training == (name == "training")


def test_numbers_that_other_programs_write_as_floats_are_read(path: Path) -> None:
    workload = read(path, document(maxFPGAs=2.0, nodes=[node(7.0, supportedOnFpga=1.0)], edges=[]))  # type: ignore[arg-type]  # what is tested
    assert (workload.num_accelerators, workload.nodes[0].id) == (2, 7)


def test_given_devices_replace_those_of_the_file(path: Path) -> None:
    path.write_text(json.dumps(document(maxFPGAs=0, maxCPUs=0)))
    workload = read_workload(path, DeviceCounts(accelerators=4, accelerator_bytes=5.0)).workload
    assert (workload.num_accelerators, workload.num_cpus, workload.accelerator_bytes) == (4, 0, 5.0)


@pytest.mark.parametrize(
    ("plain", "sentence"),
    [
        (document(maxCPUs=...), "the workload lacks maxCPUs (how many CPUs there are)."),
        (document(edges=...), "the workload lacks edges (what flows between operators)."),
        (document(nodes=[node(7, cpuLatency=...)]), "node 7 lacks cpuLatency (its time on a CPU)."),
        (
            document(nodes=[node(7), node(0, id=...)]),
            "node number 2 in the list lacks id (the number that edges know it by).",
        ),
        (
            document(nodes=[node(7, fpgaLatency=..., fpgaLatenzy=3)]),
            "node 7 lacks fpgaLatency (its time on an accelerator). It has 'fpgaLatenzy'; was that meant?",
        ),
        (
            document(edges=[edge(7, 3), edge(3, 5, cost=...)]),
            "the edge 3 -> 5 lacks cost (the time to move the output of its first node).",
        ),
        (
            document(edges=[edge(7, 3), edge(3, 5, destId=...)]),
            "edge number 2 in the list lacks destId (the id of the node it ends at).",
        ),
        (document(nodes=[node(7, size="big")]), 'size of node 7 is "big"; it must be a number.'),
        (
            document(nodes=[node(7, cpuLatency=float("nan"))]),
            "cpuLatency of node 7 is NaN; it must be a finite number.",
        ),
        (document(nodes=[node(7, cpuLatency=True)]), "cpuLatency of node 7 is true; it must be a number."),
        (
            document(nodes=[node(7, supportedOnFpga=2)]),
            "supportedOnFpga of node 7 is 2; it must be 0 or 1, or false or true.",
        ),
        (
            document(nodes=[node(7, colorClass=1.5)]),
            "colorClass of node 7 is 1.5; it must be a whole number.",
        ),
        (document(nodes={}), "nodes of the workload is {}; it must be a list."),
        (document(nodes=[node(7), 3]), "node number 2 in the list is 3; it must be an object."),
        (document(maxFPGAs=-1), "The workload has -1 accelerators; it must be 0 to 4096."),
        (
            document(nodes=[node(7, containedSubnodes=[])]),
            "node 7 has containedSubnodes, so it represents nodes that another program has merged. Give the "
            "graph as it was before.",
        ),
        (
            document(edges=[edge(7, 3), edge(3, 5), edge(5, 7)]),
            "The graph has a cycle, so no order can run it: node 7 waits for itself by way of "
            "7 -> 3 -> 5 -> 7.",
        ),
        (
            document(edges=[edge(7, 4)]),
            "The edge 7 -> 4 ends at node 4, which is not there.",
        ),
        (
            document(edges=[edge(7, 3), edge(7, 5, cost=1)]),
            "Edges of node 7 cost 0.25 and 1; each moves the same output, so their costs must be equal.",
        ),
    ],
)
def test_a_wrong_workload_is_one_sentence_that_says_where(path: Path, plain: object, sentence: str) -> None:
    assert complaint(path, plain) == sentence


def test_a_key_that_stands_there_twice_is_refused(path: Path) -> None:
    path.write_text('{"maxCPUs": 1, "maxCPUs": 2}')
    with pytest.raises(BiremeError, match="The key 'maxCPUs' is there twice"):
        read_workload(path)


def test_unknown_keys_become_one_warning_each_that_names_the_nearest(path: Path) -> None:
    plain = document(
        nodes=[node(7, colourClass=1), node(3, colourClass=1)], edges=[edge(7, 3, kost=1)], more=1
    )
    path.write_text(json.dumps(plain))
    warnings = [text.removeprefix(f"{path}: ") for text in read_workload(path).warnings]
    assert warnings == [
        "the workload has an unknown key 'more', which is not read. Known are: edges, maxCPUs, maxFPGAs, "
        "maxSizePerFPGA, nodes.",
        "node 7 and 1 more has an unknown key 'colourClass', which is not read. Did you mean 'colorClass'?",
        "the edge 7 -> 3 has an unknown key 'kost', which is not read. Did you mean 'cost'?",
    ]


def test_many_unknown_keys_are_only_counted(path: Path) -> None:
    path.write_text(json.dumps(document(**{f"zzz{number}": 0 for number in range(9)})))
    warnings = read_workload(path).warnings
    assert len(warnings) == 6
    assert "4 more unknown keys" in warnings[-1]


# --- splits ------------------------------------------------------------------------------------------------

TRAINING = Workload(
    nodes=(
        Node(0, 1, 10, colour=0),
        Node(1, 1, 10, colour=1),
        Node(2, 1, 10, is_backward=True, colour=1),
        Node(3, 1, 10, is_backward=True, colour=0),
    ),
    edges=(Edge(0, 1, 0.5), Edge(1, 2, 0.5), Edge(2, 3, 0.5)),
    num_accelerators=2,
    num_cpus=1,
    accelerator_bytes=1e9,
)


def assigned(**changes: str) -> dict[str, str]:
    return {"0": "acc0", "1": "cpu0", "2": "cpu0", "3": "acc0"} | {
        number.removeprefix("n"): device for number, device in changes.items()
    }


def devices(*rows: list[int]) -> list[dict[str, Any]]:
    return [{"nodes": row} for row in rows]


def test_a_split_of_either_shape_is_read(path: Path) -> None:
    shapes: list[object] = [
        assigned(),
        {"assignment": assigned()},
        {"fpgas": [{"load": 1, "nodes": [0, 3.0]}], "cpus": [{"nodes": [2, 1]}], "maxLoad": 0},
        {"fpgas": devices([0]), "cpus": devices([1])},
    ]
    for plain in shapes:
        path.write_text(json.dumps(plain))
        assert read_split(path, TRAINING).devices == (0, 2, 2, 0)


def test_a_split_keeps_what_its_file_claims(path: Path) -> None:
    pieces = {"0": 0, "1": 0, "2": 0, "3": 1}
    path.write_text(
        json.dumps({"assignment": assigned(), "pieces": pieces, "value": 4, "objective": "latency"})
    )
    split = read_split(path, TRAINING)
    assert (split.pieces, split.value, split.objective) == ((0, 0, 0, 1), 4.0, Objective.LATENCY)


def test_the_published_shape_says_the_same_when_read_again(path: Path) -> None:
    placement = Placement(Objective.TRAINING, "dp", True, (1, 2, 2, 1), 20.0, 20.0, (0.0, 3.0, 20.0))
    write_split(path, TRAINING, placement)
    assert read_split(path, TRAINING).devices == placement.devices
    plain = json.loads(path.read_text())
    assert plain["fpgas"] == [{"load": 0.0, "nodes": []}, {"load": 3.0, "nodes": [0, 3]}]
    assert plain["maxLoad"] == 20.0


@pytest.mark.parametrize(
    ("plain", "sentence"),
    [
        (assigned(n9="acc0"), "The workload has no node '9', which the split places."),
        (assigned(nx="acc0"), "The workload has no node 'x', which the split places."),
        (
            assigned(n1="gpu1"),
            "Node 1 is placed on 'gpu1', and there is no such device. There are acc0 to acc1 and cpu0.",
        ),
        (assigned(n01="acc0"), "The workload has no node '01', which the split places."),
        ({"0": "acc0", "1": "acc0", "3": "acc0"}, "The split does not place node 2."),
        ({"fpgas": devices([0, 1, 9])}, "The workload has no node 9, which the split places."),
        ({"fpgas": devices([0, 1], [1])}, "Node 1 is placed twice. Leave out one of the two."),
        ({"fpgas": devices([1])}, "The split does not place node 0, nor 1 more."),
        (
            {"fpgas": devices([0], [], [1])},
            "The split uses 3 accelerators, and the workload has 2.",
        ),
        ({"fpgas": devices(), "cpus": devices([0], [1])}, "The split uses 2 CPUs, and the workload has 1."),
        ({"fpgas": [{"load": 3}]}, "the split lacks fpgas[0].nodes."),
        (
            {"assignment": assigned(), "pieces": {"0": -1}},
            "Node 0 is in piece -1; pieces are numbered from 0",
        ),
    ],
)
def test_a_wrong_split_is_one_sentence(path: Path, plain: object, sentence: str) -> None:
    path.write_text(json.dumps(plain))
    with pytest.raises(BiremeError) as caught:
        read_split(path, TRAINING)
    assert str(caught.value).startswith(f"{path}: {sentence}")


def test_a_backward_node_without_a_forward_one_cannot_be_inferred(path: Path) -> None:
    lone = Workload((Node(0, 1, 1), Node(1, 1, 1, is_backward=True)), (Edge(0, 1, 1.0),), 1, 0, 1e9)
    path.write_text(json.dumps({"fpgas": devices([0])}))
    with pytest.raises(
        BiremeError, match="No node of its colour is placed, so its device cannot be inferred"
    ):
        read_split(path, lone)


def test_pieces_are_numbered_on_each_device_without_gaps(path: Path) -> None:
    pieces = {"0": 10**12, "1": 5, "2": 7, "3": 3}
    path.write_text(json.dumps({"assignment": assigned(), "pieces": pieces}))
    split = read_split(path, TRAINING)
    by_device = {(device, piece) for device, piece in zip(split.devices, split.pieces, strict=True)}
    assert max(split.pieces) < len(by_device)


def test_an_id_of_nineteen_digits_is_read_as_it_was_written(path: Path) -> None:
    workload = Workload((Node(1234567890123456789, 1.0, 1.0),), (), 1, 0, 1e9)
    path.write_text('{"1234567890123456789": "acc0"}')
    assert read_split(path, workload).devices == (0,)


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        ({"objective": "trough"}, "The split is for 'trough', and there is no such objective."),
        ({"loads": {"acc0": 1.0}}, "`loads` must have a number for each device."),
    ],
)
def test_a_claim_that_cannot_be_understood_is_refused(
    path: Path, claim: dict[str, object], sentence: str
) -> None:
    path.write_text(json.dumps({"assignment": assigned()} | claim))
    with pytest.raises(BiremeError, match=re.escape(sentence)):
        read_split(path, TRAINING)
