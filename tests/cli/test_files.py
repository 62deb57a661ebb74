"""Files are written whole or not at all, and only as ordinary files; readers refuse damaged files."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster_file import load_cluster, read_cluster
from bireme.cluster.cluster_text import cluster_text
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.placement.workload_file import read_workload
from bireme.plan.plan_file import load_plan
from bireme.profile.profile_file import load_profile, save_profile
from bireme.schedule import torch_csv
from tests.support.extent import examples


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
    return {
        plan: load_plan,
        profile: load_profile,
        cluster: read_cluster,
        workload: read_workload,
        schedule: torch_csv.load,
    }


@examples(200)
@given(place=st.integers(0, 4), data=st.data())
def test_readers_refuse_damaged_and_foreign_files_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, place: int, data: st.DataObject
) -> None:
    files = _sample_files(tmp_path_factory.getbasetemp() / "samples")
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
