"""`bireme place` as a stranger meets it: a document, a table, a picture, a verdict, or one sentence."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.made_up.graphs import Setting, inception_like, transformer_like
from bireme.placement import picture
from bireme.placement.check import check
from bireme.placement.picture import cells_of, placement_dot
from bireme.placement.workload import Edge, Node, Objective, Placement, Workload
from bireme.placement.workload_file import read_workload, write_workload
from tests.support.command import Result, bireme
from tests.support.placement_oracles import random_workload

EXAMPLES = Path(__file__).parents[2] / "examples" / "placement"
Capture = pytest.CaptureFixture[str]

FIELDS = {
    "objective": str,
    "method": str,
    "contiguous": bool,
    "ordered": bool,
    "value": float,
    "lower_bound": float,
    "gap": float,
    "assignment": dict,
    "loads": dict,
    "ideals": int,
    "seconds": float,
    "notes": list,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("branches.json", "training.json"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    return tmp_path


def place(capsys: Capture, words: str) -> Result:
    return bireme(capsys, "place", *shlex.split(words))


# --- the document ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["branches.json", "training.json"])
def test_the_document_says_who_runs_what(capsys: Capture, name: str) -> None:
    found = place(capsys, f"{name} --method dp --json").document
    for field, kind in FIELDS.items():
        assert isinstance(found[field], kind), field
    workload = read_workload(Path(name)).workload
    assert set(found["assignment"]) == {str(node.id) for node in workload.nodes}
    assert set(found["assignment"].values()) <= set(found["loads"])
    assert found["value"] == pytest.approx(max(found["loads"].values()))
    assert found["gap"] == 0
    assert found["contiguous"]
    assert found["ordered"]


def test_the_usual_objective_goes_by_the_workload(capsys: Capture) -> None:
    for name in ("throughput", "training"):
        file = "branches.json" if name == "throughput" else "training.json"
        assert place(capsys, f"{file} --method greedy --json").document["objective"] == name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "dp", "dpl", "anneal", "greedy"])
def test_every_method_places(capsys: Capture, method: str) -> None:
    for name in ("branches.json", "training.json"):
        result = place(capsys, f"{name} --method {method} --time-limit 0.2 --json")
        assert result.status == 0, result.err
        assert result.document["value"] >= result.document["lower_bound"]


@pytest.mark.slow
def test_any_placement_is_no_worse_than_a_contiguous_one(capsys: Capture) -> None:
    contiguous = place(capsys, "branches.json --method dp --json").document
    free = place(capsys, "branches.json --any --time-limit 0.2 --json").document
    assert not free["contiguous"]
    assert free["value"] <= contiguous["value"] * (1 + 1e-9)


@pytest.mark.slow
def test_a_latency_has_pieces(capsys: Capture) -> None:
    found = place(
        capsys, "branches.json --objective latency --method anneal --time-limit 0.2 --json"
    ).document
    assert set(found["pieces"]) == set(found["assignment"])
    assert found["value"] == max(found["loads"].values())


def test_devices_given_replace_those_of_the_file(capsys: Capture) -> None:
    found = place(capsys, "branches.json --method greedy --accelerators 5 --cpus 2 --memory 9e9 --json")
    assert set(found.document["loads"]) == {f"acc{n}" for n in range(5)} | {"cpu0", "cpu1"}


# --- the table ---------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_device_and_says_what_is_proven(capsys: Capture) -> None:
    out = place(capsys, "branches.json --method dp").out
    assert re.findall(r"^(\w+\d) ", out, flags=re.MULTILINE) == ["acc0", "acc1", "acc2", "cpu0"]
    assert "Proven optimal. Found by dp" in out
    assert "To try" not in out


def test_a_gap_comes_with_what_to_try(capsys: Capture) -> None:
    out = " ".join(place(capsys, "branches.json --method greedy").out.split())
    assert "a gap of" in out
    assert "A better placement may exist. Try: --method milp" in out


# --- files and verdicts ------------------------------------------------------------------------------------


def test_what_was_found_passes_the_check(capsys: Capture) -> None:
    words = "training.json --method dp -o found.json --split split.json"
    value = place(capsys, f"{words} --json").document["value"]
    for file in ("found.json", "split.json"):
        verdict = place(capsys, f"--check {file} training.json --json")
        assert verdict.status == 0
        assert verdict.document["valid"]
        assert verdict.document["problems"] == []
        assert verdict.document["value"] == pytest.approx(value)
        assert verdict.document["claimed"] == pytest.approx(value)
    assert "Every rule is kept." in place(capsys, "--check found.json training.json").out


@pytest.mark.slow
def test_a_check_of_a_latency_goes_by_its_pieces(capsys: Capture) -> None:
    words = "branches.json --objective latency --pieces 2 --method anneal --time-limit 0.2 -o found.json"
    assert place(capsys, words).status == 0
    verdict = place(capsys, "--check found.json branches.json --pieces 2 --json")
    assert verdict.document["valid"]
    assert verdict.document["objective"] == "latency"


@pytest.mark.slow
def test_a_broken_rule_is_status_2_and_a_sentence(capsys: Capture) -> None:
    place(capsys, "branches.json --method dp -o found.json")
    plain = json.loads(Path("found.json").read_text())
    plain["assignment"]["0"] = "acc0"
    Path("found.json").write_text(json.dumps(plain))
    result = place(capsys, "--check found.json branches.json --json")
    assert result.status == 2
    assert not result.document["valid"]
    assert result.document["problems"][0] == ("Node 0 (tokenize) on acc0: accelerators do not support it.")


@pytest.mark.slow
def test_a_false_claim_is_a_problem(capsys: Capture) -> None:
    place(capsys, "branches.json --method dp -o found.json")
    plain = json.loads(Path("found.json").read_text())
    Path("found.json").write_text(json.dumps(plain | {"value": plain["value"] / 2}))
    result = place(capsys, "--check found.json branches.json --json")
    assert result.status == 2
    (problem,) = result.document["problems"]
    assert problem.startswith("The file claims ")


def test_a_false_load_is_a_problem(capsys: Capture) -> None:
    place(capsys, "branches.json --method greedy -o found.json")
    plain = json.loads(Path("found.json").read_text())
    plain["loads"]["acc0"] += 1
    Path("found.json").write_text(json.dumps(plain))
    result = place(capsys, "--check found.json branches.json --json")
    assert result.status == 2
    (problem,) = result.document["problems"]
    assert problem.startswith("The file claims a load of ")


def test_what_is_not_contiguous_is_valid_only_where_any_placement_is(capsys: Capture, folder: Path) -> None:
    chain = Workload(tuple(Node(n, 1, 2) for n in range(3)), (), 2, 0, 1.0)
    edges = ({"sourceId": 0, "destId": 1, "cost": 1}, {"sourceId": 1, "destId": 2, "cost": 1})
    write_workload(folder / "chain.json", chain)
    plain = json.loads((folder / "chain.json").read_text())
    (folder / "chain.json").write_text(json.dumps(plain | {"edges": edges}))
    (folder / "torn.json").write_text('{"0": "acc0", "1": "acc1", "2": "acc0"}')
    assert place(capsys, "--check torn.json chain.json --json").status == 2
    result = place(capsys, "--check torn.json chain.json --any --json")
    assert result.status == 0
    assert not result.document["contiguous"]


def test_an_expert_s_split_is_counted_as_it_is(capsys: Capture) -> None:
    place(capsys, "training.json --method greedy --split split.json")
    plain = json.loads(Path("split.json").read_text())
    nodes = read_workload(Path("training.json")).workload.nodes
    for row in (*plain["fpgas"], *plain["cpus"]):
        row["nodes"] = [number for number in row["nodes"] if not nodes[number].is_backward]
    Path("split.json").write_text(json.dumps(plain))
    found = place(capsys, "training.json --expert split.json --json").document
    assert found["method"] == "expert"
    assert found["value"] == pytest.approx(plain["maxLoad"])


def test_a_result_that_does_not_hold_is_a_bug(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(workload: Workload, *_: object) -> Placement:
        devices = (3,) * len(workload.nodes)
        return Placement(Objective.THROUGHPUT, "dp", True, devices, 1.0, 1.0, (0.0, 0.0, 0.0, 1.0))

    monkeypatch.setattr("bireme.placement.solve.solve", lie)
    result = place(capsys, "branches.json")
    assert result.status == 1
    assert "bug in Bireme" in result.err


# --- mistakes ----------------------------------------------------------------------------------------------


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plain: plain.update({key: value})


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "cycle": (lambda plain: plain["edges"].append({"sourceId": 26, "destId": 1, "cost": 0.1}), "node 1"),
    "missing field": (lambda plain: plain["nodes"][4].pop("cpuLatency"), "node 4 lacks cpuLatency"),
    "unknown node": (
        lambda plain: plain["edges"].append({"sourceId": 26, "destId": 99, "cost": 0.1}),
        "ends at node 99, which is not there",
    ),
    "costs": (lambda plain: plain["edges"][1].update(cost=7), "Edges of node 1 (embed) cost"),
    "no room": (
        lambda plain: plain.update(
            maxCPUs=0, nodes=plain["nodes"][1:], edges=plain["edges"][1:], maxSizePerFPGA=1
        ),
        "There is no device for node 1 (embed)",
    ),
    "unsupported": (_set("maxCPUs", 0), "There is no device for node 0 (tokenize)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_workload_is_status_2_and_one_sentence_that_names_the_node(
    capsys: Capture, name: str
) -> None:
    spoil, words = MISTAKES[name]
    plain = json.loads(Path("branches.json").read_text())
    spoil(plain)
    Path("wrong.json").write_text(json.dumps(plain))
    result = place(capsys, "wrong.json")
    assert result.status == 2
    assert words in result.err
    assert result.err.startswith("bireme: wrong.json: ")
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "Name a workload file, or a model with --model."),
        ("none.json", "There is no file none.json."),
        ("branches.json --objective trainin", "There is no objective 'trainin'. Did you mean 'training'?"),
        ("branches.json --method dq", "There is no method 'dq'. Did you mean 'dp'?"),
        ("branches.json --method expert", "--method expert and --expert FILE.json belong together"),
        (
            "branches.json --method dp --expert x.json",
            "--method expert and --expert FILE.json belong together",
        ),
        ("branches.json --time-limit 0", "The time limit is 0"),
        ("branches.json --pieces 0 --objective latency", "An accelerator runs 1 to 64 pieces"),
        ("branches.json --accelerators 0 --cpus 0", "The workload has no device"),
        ("branches.json --picture x.gif", "x.gif must end in .svg or .png or .dot."),
        ("branches.json -o x.txt", "x.txt must end in .json."),
        ("branches.json -o nowhere/x.json", "nowhere/x.json cannot be written: there is no folder"),
        ("branches.json -o x.json --split x.json", "Two output files have the same name."),
        ("branches.json --check x.json --seed 3", "--check does not search: leave out --seed."),
    ],
)
def test_wrong_words_are_status_2_and_one_sentence(capsys: Capture, words: str, sentence: str) -> None:
    result = place(capsys, words)
    assert result.status == 2
    assert sentence in result.err
    assert len(result.err.splitlines()) == 1


def test_an_unknown_key_is_a_warning(capsys: Capture) -> None:
    plain = json.loads(Path("branches.json").read_text())
    Path("more.json").write_text(json.dumps(plain | {"maxCPU": 1}))
    result = place(capsys, "more.json --method greedy --json")
    assert result.status == 0
    assert "unknown key 'maxCPU'" in result.err
    assert "Did you mean 'maxCPUs'?" in result.document["notes"][0]


# --- the picture -------------------------------------------------------------------------------------------


def chunked(workload: Workload) -> Placement:
    """A placement of nodes in their order, as many forward ones on each device."""
    num_devices = workload.num_accelerators + workload.num_cpus
    num_forward = sum(not node.is_backward for node in workload.nodes)
    device_of_class: dict[int, int] = {}
    devices = []
    for place, node in enumerate(workload.nodes):
        device = min(place * num_devices // num_forward, num_devices - 1)
        devices.append(device if node.colour is None else device_of_class.setdefault(node.colour, device))
    verdict = check(workload, devices, Objective.TRAINING, contiguous=False)
    return Placement(Objective.TRAINING, "dpl", False, tuple(devices), verdict.value, 0.0, verdict.loads)


def boxes_of(dot: str) -> list[tuple[str, str]]:
    """The height and the colour of every part that is drawn."""
    return re.findall(r'<TD WIDTH="92" HEIGHT="(\d+)" BGCOLOR="([^"]+)">', dot)


def test_a_picture_has_every_node_once_in_the_colour_of_its_device() -> None:
    for is_training in (False, True):
        workload = inception_like(2, Setting(is_training=is_training, num_cpus=2))
        boxes = boxes_of(placement_dot(workload, chunked(workload)))
        assert len(boxes) == len(workload.nodes)
        assert len({colour for _, colour in boxes}) == (2 if is_training else 1) * 8
        assert len({height for height, _ in boxes}) > 1


def test_a_large_graph_is_drawn_coarser_and_loses_no_node() -> None:
    workload = transformer_like(16, Setting(is_training=True))
    placement = chunked(workload)
    cells = cells_of(workload, placement.devices)
    assert cells.is_coarser
    assert len(cells.cells) <= 400
    places = [place for cell in cells.cells for part in cell for place in part.places]
    assert sorted(places) == list(range(len(workload.nodes)))
    for cell in cells.cells:
        for part in cell:
            assert {placement.devices[place] for place in part.places} == {part.device}


def test_lines_are_dark_where_an_output_moves() -> None:
    nodes = tuple(Node(place, 1, 1) for place in range(4))
    workload = Workload(nodes, tuple(Edge(one, one + 1, 1) for one in range(3)), 2, 0, 1.0)
    dot = placement_dot(workload, chunked(workload))
    colours = re.findall(r'n\d -> n\d \[color="([^"]+)"\]', dot)
    assert len(colours) == 3
    assert colours[0] == colours[2] != colours[1]


def test_any_workload_can_be_drawn() -> None:
    random = Random(8)
    for _ in range(60):
        workload = random_workload(random, most_nodes=12)
        assert boxes_of(placement_dot(workload, chunked(workload)))


@pytest.mark.parametrize("is_chain", [True, False])
def test_long_and_wide_graphs_become_legible_cells_even_where_these_form_circles(is_chain: bool) -> None:
    count = 900
    nodes = tuple(Node(place, 1, 1) for place in range(count))
    edges = tuple(Edge(place - 1 if is_chain else 0, place, 1) for place in range(1, count))
    devices = [place % 3 for place in range(count)]
    cells = cells_of(Workload(nodes, edges, 3, 0, 1.0), devices).cells
    assert 3 <= len(cells) <= 400
    assert sorted(place for cell in cells for part in cell for place in part.places) == [*range(count)]


def test_pictures_are_written_in_all_formats(capsys: Capture, folder: Path) -> None:
    pytest.importorskip("pygraphviz")
    for name in ("picture.svg", "picture.png", "picture.dot"):
        result = place(capsys, f"training.json --method greedy --picture {name}")
        assert result.status == 0, result.err
        assert f"Wrote {name}." in result.out
    assert "node 0 (embed) · forward on acc0" in (folder / "picture.svg").read_text()
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "picture.dot").read_text().startswith("digraph")


def test_without_graphviz_a_picture_is_refused_before_the_search_and_a_dot_file_is_written(
    capsys: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda _: None)
    result = place(capsys, "training.json --method greedy --picture x.svg")
    assert result.status == 2
    assert "bireme[viz]" in result.err
    assert place(capsys, "training.json --method greedy --picture x.dot").status == 0
    assert "node 0 (embed) · forward on acc0" in (folder / "x.dot").read_text()


def test_a_name_with_strange_letters_does_not_break_a_picture() -> None:
    workload = Workload((replace(Node(0, 1, 1), name='<&"\\\x01>'),), (), 1, 0, 1.0)
    dot = placement_dot(workload, chunked(workload))
    assert "\x01" not in dot
    assert "&lt;&amp;" in dot
    assert 'node 0 (<&\\"\\\\?>) · forward' in dot
