"""Plans for the loss of a machine, made while the run trains, and how many replicas share a batch."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import ASSUMED_LINK, Card, Cluster, Server
from bireme.cluster.cluster_file import save_cluster
from bireme.errors import BiremeError
from bireme.model.units import units_of
from bireme.profile.profile import Profile, save_profile
from bireme.profile.profiler import profile
from bireme.train.captured_run import (
    CapturedRun,
    is_divided,
    micro_batches,
    shares_by_speed,
    sizes_to_measure,
)
from bireme.train.folder import RunFolder
from bireme.train.plan_search import ProfiledRun
from bireme.train.prepare import make_plan, may_plan_ahead, plan_made_ahead, prepare, sizes_before
from bireme.train.rank_zero_setup import most_replicas, with_kept_mode
from bireme.train.run_file import load_run_file
from tests.support.tiny_profiles import gpt

GPU = device_named("rtx3090")


@cache
def _profile() -> Profile:
    return profile(gpt(), GPU, [1, 2])


def wanted(*sets: str, speed: float = 1.0) -> ProfiledRun:
    run = load_run_file(
        None, ["training.batch_size=8", "plan.depth=2", "plan.schedule=1f1b", "cluster.device=cpu", *sets]
    )
    card = Card("card", (0,), ASSUMED_LINK)
    devices = {"one": GPU, "two": replace(GPU, speed=speed)}
    cluster = Cluster(tuple(Server(name, (one,), cards=(card,)) for name, one in devices.items()))
    return ProfiledRun(run, cluster, None, _profile())


def test_a_plan_that_was_made_ahead_is_found_for_the_same_run_devices_and_profile_only(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    make_plan(folder, wanted())
    found = plan_made_ahead(folder, wanted("log.name=other", "log.folder=elsewhere"))
    assert found is not None
    assert found.plan.num_stages == 2
    assert found.forecast is not None
    for other in (wanted("training.batch_size=4"), wanted("plan.schedule=gpipe"), wanted(speed=0.5)):
        assert plan_made_ahead(folder, other) is None


def test_no_plan_is_kept_if_none_fits(tmp_path: Path) -> None:
    make_plan(RunFolder(tmp_path), wanted("plan.depth=5"))
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("setting", ["plan.largest_batch=64", "memory.device=1GiB", "plan.file=plan.json"])
def test_what_depends_on_more_is_not_planned_ahead(setting: str) -> None:
    assert may_plan_ahead(load_run_file())
    assert not may_plan_ahead(load_run_file(None, [setting]))


@given(
    st.integers(1, 32),
    st.integers(1, 9),
    st.sampled_from(["", "micro_batch", "microbatches"]),
    st.integers(1, 4),
)
def test_as_many_replicas_as_the_batch_can_be_divided_among(
    count: int, most: int, key: str, value: int
) -> None:
    sets = [
        f"training.batch_size={count * value}",
        "sync.mode=groups",
        *([f"plan.{key}={value}"] if key else []),
    ]
    run = load_run_file(None, sets)
    sizes = micro_batches(run)

    batch = count * value

    def is_divided(width: int) -> bool:
        """By trying all ways that the planner has."""
        for small, large in product(sizes, repeat=2):
            for num_large in range(width + 1):
                one = num_large * large + (width - num_large) * small
                if batch % one == 0 and run.plan.microbatches in (None, batch // one):
                    return True
        return False

    fitting = [width for width in range(2, most + 1) if is_divided(width)]
    assert most_replicas(run, most) == max(fitting, default=most)


def test_the_planner_s_mode_is_kept_except_by_a_process_that_is_alone(tmp_path: Path) -> None:
    """An average of one is itself: the run waited for another machine instead."""
    folder, asked = RunFolder(tmp_path), load_run_file(None, ["sync.mode=auto", "sync.diloco_every=20"])
    servers = wanted().cluster.servers
    cases = ((2, "diloco", ["allreduce", "diloco"]), (1, "allreduce", ["allreduce", "auto"]))
    for count, begun, modes in cases:
        folder.write_run(load_run_file(None, [f"sync.mode={begun}"]))
        save_cluster(Cluster(servers[:count]), folder.cluster)
        assert [with_kept_mode(asked, folder, now).sync.mode for now in (1, 2)] == modes


def test_devices_of_two_speeds_may_share_a_batch_by_their_speed() -> None:
    assert shares_by_speed(16, [1.0, 1.0, 1.0, 1 / 3]) == {5, 1}
    assert shares_by_speed(16, [1.0, 0.9, 1.0, 1.0]) == set()
    assert shares_by_speed(16, [3.0, 2.0, 1.0]) == set()
    assert shares_by_speed(2, [1.0, 1.0, 0.2]) == set()


def test_a_processor_measures_no_micro_batch_that_computes_for_long() -> None:
    for flops, sizes in ((1e6, [1, 2, 4, 8, 16]), (5e9, [1, 2, 4]), (1e12, [1, 2])):
        graph: Any = SimpleNamespace(
            batch=2, operators=[SimpleNamespace(flops=flops * share) for share in (1, 2)]
        )
        run = load_run_file(None, ["training.batch_size=16"])
        assert sizes_to_measure(run, graph, [1, 2, 4, 8, 16], 1) == sizes


def test_a_processor_measures_what_the_replicas_that_are_asked_for_need() -> None:
    """A batch of 44 is 5 and 4 times 2 and so on of sizes 1 and 4, but no sum of sizes 1 and 2."""
    graph: Any = SimpleNamespace(batch=1, operators=[SimpleNamespace(flops=1e12)])
    run = load_run_file(None, ["training.batch_size=44", "plan.depth=1", "plan.width=5"])
    assert not is_divided(run, 5, [1, 2])
    assert sizes_to_measure(run, graph, [1, 2, 4], 1) == [1, 2, 4]


@pytest.mark.slow
def test_more_machines_than_the_model_has_units_stand_by(tmp_path: Path) -> None:
    """Nobody had asked for the depth that was refused: it was the number of machines."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 50)
    model = "model.source=gpt:layers=1,width=8,heads=2,vocab=257,context=16"
    sets = [model, f"data.source={text}", "cluster.workers=7", "cluster.device=cpu", "plan.depth=7"]
    run = load_run_file(None, [*sets, "training.batch_size=4", "training.steps=1", "plan.micro_batch=1"])
    found = prepare(run, lambda *_: None, is_depth_free=True)
    assert found.run.plan.depth == found.plan.plan.num_stages == len(units_of(found.graph)) < 7
    with pytest.raises(BiremeError, match="is 7, but the model has 4 units"):
        prepare(run, lambda *_: None)


@pytest.mark.slow
def test_after_a_loss_the_profile_is_that_of_the_phase_before(tmp_path: Path) -> None:
    """With other micro-batches it is another one, and no plan that was made ahead is for it."""
    folder, servers = RunFolder(tmp_path), wanted().cluster.servers
    assert sizes_before(folder, Cluster(servers)) == ()
    save_cluster(Cluster(servers), folder.cluster)
    save_profile(_profile(), folder.profile)
    assert [tuple(sizes_before(folder, Cluster(some))) for some in (servers[:1], servers)] == [(1, 2)] * 2
    assert sizes_before(folder, Cluster((*servers, replace(servers[0], name="three")))) == ()

    unlike = tmp_path / "unlike.toml"
    one, other = servers
    save_cluster(Cluster((one, replace(other, devices=(replace(GPU, speed=0.3),)))), unlike)
    model = "model.source=gpt:layers=2,width=8,heads=2,vocab=257,context=16"
    run = load_run_file(None, [f"cluster.source={unlike}", model, "data.length=16", "training.batch_size=16"])
    captured = CapturedRun.of(run, lambda _done, _what: None, measures=False)
    for known, sizes in (((), {1, 4, 12, 16}), ((1, 4, 16), {1, 4, 16})):
        found = captured.profiled(lambda _done, _what: None, like="rtx3090", known=known).profile
        assert set(found.micro_batches) == sizes
