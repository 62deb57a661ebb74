"""`bireme train` under torchrun: one run of many processes, which restarts and signals do not harm."""

import os
import shutil
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bireme.cluster.cluster import ASSUMED_LINK, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.runtime.stores import HashStore, Store
from bireme.train.machines import LaunchedProcess, cluster_of, nodes_of, places_in, ranks_on
from bireme.train.rendezvous import Environment, _answer, _call_all
from tests.support.once import made_once
from tests.support.patience import patience_s
from tests.support.torchrun_runs import paced_run, torchrun_train
from tests.support.training import losses, metrics, settings, steps_of_checkpoints

RANKS = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "0"}
CPU = Device("a processor", "cpu", 2**30)


def _train_undisturbed(folder: Path) -> None:
    run = folder / "runs" / "run"
    with torchrun_train(run, str(paced_run(folder)), "--json", ranks=3) as started:
        told = started.ended()
    document = told.document
    assert document["steps"] == 12
    assert document["run_dir"] == str(run)
    assert len(document["stages"]) == 2
    assert told.err.count("step 12/12  loss") == 1
    assert told.err.count("The plan uses 2 of 3 processes; rank 2 has no work.") == 1


@pytest.fixture(scope="module")
def whole() -> Path:
    """The folder of an undisturbed run of twelve steps, with one process more than its plan needs."""
    return made_once("under-torchrun", _train_undisturbed) / "runs" / "run"


@pytest.mark.slow
def test_a_run_under_torchrun_is_one_run_and_who_has_no_work_waits_for_its_end(whole: Path) -> None:
    assert sorted(losses(whole)) == list(range(1, 13))
    assert len(metrics(whole, "start")) == 1
    assert steps_of_checkpoints(whole)[-1] == 12
    assert (whole / "model" / "model.safetensors").is_file()
    assert (whole / "summary.json").is_file()


@pytest.mark.slow
def test_a_run_that_has_done_its_steps_says_so_and_ends_well(whole: Path) -> None:
    words = (str(paced_run(whole.parents[1])), "--json")
    before = (whole / "metrics.jsonl").read_bytes()
    with torchrun_train(whole, *words) as started:
        told = started.ended()

    assert told.status == 0, told.err
    assert told.err.count("has finished its 12 steps") == 1
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_killed_is_restarted_and_nothing_is_lost(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    options = ("--standalone", "--max-restarts", "1")
    words = (str(paced_run(tmp_path)), "--json")
    with torchrun_train(run, *words, options=options, pace_s=0.04) as started:
        started.running.wait_for_step(6)
        started.running.wait_for_checkpoint(4)
        os.kill(started.ranks[-1], signal.SIGKILL)
        told = started.ended()

    assert told.document["steps"] == 12
    assert losses(run) == losses(whole)
    first, second = (line["step"] for line in metrics(run, "start"))
    assert first == 0
    assert second in (4, 8)
    assert told.err.count(f"{run} resumes after step {second} of 12") == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_to_torchrun_saves_and_a_new_start_goes_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    words = (str(paced_run(tmp_path)), *settings(checkpoint__every_steps=0))
    with torchrun_train(run, *words, pace_s=0.02) as started:
        started.running.wait_for_step(3)
        started.running.process.send_signal(signal.SIGTERM)
        told = started.ended()

    assert "Signals.SIGKILL" not in told.err
    (stop,) = metrics(run, "stop")
    assert stop["reason"] == "signal"
    assert steps_of_checkpoints(run)[-1] == stop["step"] < 12
    with torchrun_train(run, *words, "--json") as started:
        assert started.ended().document["steps"] == 12
    assert losses(run) == losses(whole)
    assert [line["step"] for line in metrics(run, "start")] == [0, stop["step"]]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(whole: Path, tmp_path: Path) -> None:
    """The plan is made for those that there are, and learns what the first one would have."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    shutil.rmtree(run / "model")
    (run / "metrics.jsonl").unlink()
    planned = settings(plan__file="", plan__schedule="1f1b", plan__microbatches=2, cluster__workers="")
    with torchrun_train(run, str(paced_run(tmp_path)), "--json", *planned, ranks=1) as started:
        document = started.ended().document

    assert len(document["stages"]) == 1
    assert document["steps"] == 12
    assert [line["step"] for line in metrics(run, "start")] == [8]
    expected = {step: loss for step, loss in losses(whole).items() if step > 8}
    assert losses(run) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_mistake_is_said_once_and_ends_all_with_status_2(tmp_path: Path) -> None:
    words = (str(paced_run(tmp_path)), *settings(cluster__source="two-unequal-servers"))
    with torchrun_train(tmp_path, *words) as started:
        told = started.ended()

    assert told.status == 1  # torchrun's own
    assert told.err.count("but 2 processes were started. Start one per device.") == 1
    assert told.err.count("exitcode  : 2") == 2
    assert "Traceback" not in told.err.partition("ChildFailedError")[2]
    assert not (tmp_path / "runs").exists()


# --- what the environment says


def test_the_id_that_torchrun_gives_a_run_becomes_its_name() -> None:
    assert Environment.of({**RANKS, "TORCHELASTIC_RUN_ID": "my job/7"}).job == "my-job-7"
    assert Environment.of({**RANKS, "TORCHELASTIC_RUN_ID": "none"}).job is None
    assert Environment.of(RANKS).job is None


def test_restarts_are_known_by_torchruns_counts() -> None:
    fresh = Environment.of({**RANKS, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"})
    again = Environment.of({**RANKS, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"})

    assert (fresh.may_restart, fresh.is_restart) == (True, False)
    assert (again.may_restart, again.is_restart) == (True, True)
    assert not Environment.of(RANKS).may_restart


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, but it is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 and WORLD_SIZE = 2: ranks count from 0"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        Environment.of(variables)


def test_those_who_are_alive_find_together_past_what_the_dead_have_left() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    first = found_together(store, 3)
    second = found_together(store, 3)
    smaller = found_together(store, 2)

    assert len({first, second, smaller}) == 3


def found_together(store: Store, size: int) -> str:
    words: list[str] = []
    others = [
        threading.Thread(target=lambda rank=rank: words.append(_answer(store, rank, patience_s())))
        for rank in range(1, size)
    ]
    for other in others:
        other.start()
    words.append(_call_all(store, size, patience_s()))
    for other in others:
        other.join()
    assert len(words) == size
    (word,) = set(words)
    return word


# --- the devices


def members(*hosts: str, nodes: str = "") -> list[LaunchedProcess]:
    return [
        LaunchedProcess(rank, node, host, has_cuda=False)
        for rank, (host, node) in enumerate(zip(hosts, nodes or hosts, strict=True))
    ]


def servers(*sizes: int, names: str = "abc") -> list[Server]:
    return [Server(name, (CPU,) * size) for name, size in zip(names, sizes, strict=False)]


def test_machines_of_one_name_are_told_apart_and_unknown_links_are_assumed() -> None:
    known = replace(servers(1)[0], cards=(Card("eth0", (0,), Link(1e9)),))
    cluster, note = cluster_of([known, *servers(2, names="a"), *servers(1, names="a")])

    assert [server.name for server in cluster.servers] == ["a", "a-2", "a-3"]
    assert cluster.bandwidth(0, 1) == ASSUMED_LINK.bytes_per_s < 1e9
    assert cluster.bandwidth(1, 3) == ASSUMED_LINK.bytes_per_s
    assert note.startswith("The links of 2 of 3 machines are unknown")


def test_ranks_are_on_the_servers_of_their_machines_names() -> None:
    nodes = nodes_of(members("a", "a", "b", "b", "b"))
    turned = Cluster(tuple(cluster_of(servers(3, 2, names="ba"))[0].servers))

    assert ranks_on(turned, nodes) == [2, 3, 4, 0, 1]


def test_ranks_follow_the_devices_where_names_do_not_say_it() -> None:
    nodes = nodes_of(members("a", "a", "b", "b"))
    twins = nodes_of(members("a", "a", nodes="01"))

    assert ranks_on(cluster_of(servers(2, 2, names="xy"))[0], nodes) == [0, 1, 2, 3]
    assert ranks_on(cluster_of(servers(3, 1, names="ab"))[0], nodes) == [0, 1, 2, 3]
    assert ranks_on(cluster_of(servers(1, 1, names="aa"))[0], twins) == [0, 1]


def test_ranks_that_are_dealt_out_in_turn_are_gathered_by_machine() -> None:
    nodes = nodes_of(members("a", "b", "a", "b"))

    assert ranks_on(cluster_of(servers(2, 2, names="ab"))[0], nodes) == [0, 2, 1, 3]


def test_each_place_of_a_plan_goes_to_the_rank_on_its_device() -> None:
    cluster = cluster_of(servers(2, 2, names="ab"))[0]
    named = (("b/cpu0", "a/cpu0"), ("b/cpu1", "a/cpu1"))
    plan = Plan((1,), 2, "1f1b", width=2, devices=named)

    assert places_in(plan, cluster, [0, 1, 2, 3]) == [2, 3, 0, 1]
    assert places_in(replace(plan, devices=()), cluster, [3, 1, 2, 0]) == [3, 1, 2, 0]
    elsewhere = tuple((f"x/cpu{place}", f"y/cpu{place}") for place in range(2))
    assert places_in(replace(plan, devices=elsewhere), cluster, [0, 1, 2, 3]) == [0, 1, 2, 3]


def test_a_plan_for_more_processes_than_were_started_is_refused() -> None:
    plan = Plan((1,), 2, "1f1b", width=2)

    with pytest.raises(BiremeError, match="The plan is for 4 processes, but 3 were started"):
        places_in(plan, cluster_of(servers(1, 2))[0], [0, 1, 2])
