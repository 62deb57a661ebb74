"""Files are written whole or not at all, and only as ordinary files; readers refuse damaged files."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster_file import cluster_text, load_cluster, read_cluster
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import Graph, ModelState, Operator, Output, Reference, Value
from bireme.model.graph_file import load_graph, save_graph
from bireme.placement.workload_file import read_split, read_workload
from bireme.plan import plan as plans
from bireme.plan.plan_file import load_plan, read_windows, write_windows
from bireme.profile.profile import load_profile, save_profile
from bireme.report.timeline_document import read_recorded
from bireme.schedule import torch_csv
from bireme.train.folder import RunFolder
from bireme.train.outcome import check_restart_limit
from bireme.train.resume_checks import DataIdentity, load_identity, write_identity
from bireme.train.run_data import PrivateHolding, load_census, write_census
from bireme.train.run_file import load_run_file
from tests.plan.test_plan_paging import hand_plan
from tests.support.extent import examples
from tests.support.run_folders import make_run, plan_of


def test_a_link_is_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_what_is_no_ordinary_file_is_left_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BiremeError, match="not an ordinary file"):
        write_text_atomically(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@cache
def _sample_files(folder: Path) -> dict[Path, Callable[[Path], object]]:
    """A good file of each kind, and its reader."""
    folder.mkdir(exist_ok=True)
    plan, profile = folder / "plan.json", folder / "profile.json"
    save_profile(profile_of([1.0] * 4, [2.0] * 4), profile)
    saved = {"cuts": [2], "num_microbatches": 2, "schedule": "2bw", "devices": [["a/cpu0"], ["a/cpu1"]]}
    plan.write_text(json.dumps({"format": 1, "plan": saved}))
    cluster = folder / "cluster.toml"
    cluster.write_text(cluster_text(load_cluster("two-unequal-servers")))
    workload = folder / "workload.json"
    workload.write_text(Path("examples/placement/branches.json").read_text())
    schedule = folder / "schedule.csv"
    schedule.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    split = folder / "split.json"
    placed = read_workload(workload).workload
    split.write_text(json.dumps({"fpgas": [{"nodes": [node.id for node in placed.nodes]}], "cpus": []}))
    graph = folder / "graph.json"
    save_graph(_graph(), graph)
    windows, paged = folder / "windows.json", hand_plan()
    write_windows(windows, [paged])
    run = folder / "run.toml"
    run.write_text('format = 1\n[model]\nsource = "gpt:layers=2"\n[training]\nsteps = 12\nbatch_size = 8\n')
    identity = folder / "data.json"
    write_identity(identity, DataIdentity("texts", 8, 64, "0f" * 32, None))
    census = folder / "private.json"
    write_census(census, {"vm": PrivateHolding(3, "0f", "key")})
    starts = folder / "starts.json"
    starts.write_text('{"step": 4, "starts": 2}\n')
    timeline = make_run(folder / "run", steps=5) / "timeline-measured.json"

    def check_starts(path: Path) -> None:
        (folder / "run" / "starts.json").write_bytes(path.read_bytes())
        check_restart_limit(RunFolder(folder / "run"), 4)

    readers: dict[Path, Callable[[Path], object]] = {
        plan: load_plan,
        profile: load_profile,
        cluster: read_cluster,
        workload: read_workload,
        schedule: torch_csv.load,
        split: lambda path: read_split(path, placed),
        graph: load_graph,
        windows: lambda path: read_windows(path, [paged]),
        run: load_run_file,
        identity: load_identity,
        census: load_census,
        starts: check_starts,
        timeline: lambda path: read_recorded(path, plan_of().plan),
    }
    for path, read in readers.items():
        read(path)
    return readers


NUM_KINDS = 13


def _graph() -> Graph:
    """The graph of x + 1."""
    made = Value("y", ("b", 3), "float32")
    added = Operator("aten.add.Tensor", (Reference("x"), 1), (), (None, made), is_tuple=True)
    inputs, states = (Value("x", ("b", 3), "float32"),), (ModelState("held", (2,), "uint8", data=b"\0\1"),)
    return Graph("g", False, 2, True, inputs, (), (), states, (added,), (Output("output", Reference("y")),))


@pytest.fixture(autouse=True)
def _no_windows() -> Iterator[None]:
    """Leaves no windows of a damaged file in the memory of plans."""
    yield
    plans.KNOWN.clear()
    plans._remembered.cache_clear()


def test_a_census_of_private_samples_that_is_another_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """It was a KeyError."""
    path = tmp_path / "private.json"
    path.write_text('{"step": 4, "starts": 2}')
    with pytest.raises(BiremeError, match=r"private\.json"):
        load_census(path)


def test_a_count_of_starts_that_is_infinite_counts_as_none(tmp_path: Path) -> None:
    """It was an OverflowError."""
    (tmp_path / "starts.json").write_text('{"step": 4, "starts": 1e999}')
    check_restart_limit(RunFolder(tmp_path), 4)


@pytest.mark.slow
@examples(800)
@given(place=st.integers(0, NUM_KINDS - 1), data=st.data())
def test_readers_refuse_damaged_and_foreign_files_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, place: int, data: st.DataObject
) -> None:
    files = _sample_files(tmp_path_factory.getbasetemp() / "samples")
    assert len(files) == NUM_KINDS
    path = list(files)[place]
    text = path.read_bytes()
    match data.draw(st.sampled_from(["cut", "changed", "foreign"])):
        case "cut":
            text = text[: data.draw(st.integers(0, len(text) - 1))]
        case "changed":
            at = data.draw(st.integers(0, len(text) - 1))
            text = text[:at] + data.draw(st.binary(min_size=1, max_size=4)) + text[at + 1 :]
        case "foreign":
            text = data.draw(st.sampled_from(list(files))).read_bytes()
    damaged = path.with_stem("damaged")
    damaged.write_bytes(text)
    with suppress(BiremeError):
        files[path](damaged)
