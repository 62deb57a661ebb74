"""Which processes the launcher of each host starts, and which replicas are on one host."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from bireme.balance import ShareLimits
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.machines.phases import PhaseForecast
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.runtime.board import RankFailed
from bireme.runtime.replicas.hosts import ReplicaPart
from bireme.sync.coordinator.samples import CoordinatorSettings, SyncMode
from bireme.train import host_launcher, launched_process, rank_zero_setup
from bireme.train.folder import RunFolder
from bireme.train.machines import LaunchedProcess
from bireme.train.rank_part import RunStart
from bireme.train.rank_zero_setup import check_launchers, parts_of_hosts, processes_of, within_servers
from bireme.train.rendezvous import Environment, HostOrders, Orders
from bireme.train.run_file import RunFile

CPU = Device("cpu", "cpu", 10**9)
CARDS = (Card("eth0", (0, 1), Link(1e9)),)
TWO = Cluster(tuple(Server(name, (CPU, CPU), cards=CARDS) for name in "ab"))
PLAN = Plan((1,), 2, "1f1b", width=2)


@dataclass(frozen=True)
class PreparedPlan:
    """What `set_up_run` looks at of a prepared run."""

    run: RunFile
    plan: SavedPlan
    machines: SimpleNamespace


def launchers(*num_cuda: int) -> dict[str, list[LaunchedProcess]]:
    return {
        name: [LaunchedProcess(rank, name, name, False, num)]
        for rank, (name, num) in enumerate(zip("abc", num_cuda, strict=False))
    }


@pytest.mark.parametrize(
    ("cluster", "num_cuda", "expected"),
    [
        ({}, (0, 4), [[0, 1], [2, 3]]),
        ({"workers": 3}, (0, 0), [[0, 1, 2], [3, 4, 5]]),
        ({}, (1, 2), [[0], [1, 2]]),
    ],
)
def test_a_launcher_starts_a_process_for_each_device_of_its_host(
    cluster: dict[str, int], num_cuda: tuple[int, ...], expected: list[list[int]]
) -> None:
    run = RunFile.model_validate({"format": 1, "cluster": cluster})
    found = processes_of(run, launchers(*num_cuda))
    assert [[one.rank for one in members] for members in found.values()] == expected


def test_each_host_starts_the_ranks_of_its_own_devices() -> None:
    nodes = processes_of(RunFile.model_validate({"format": 1}), launchers(0, 0))
    whole = [[ReplicaPart(1, (0, 1), (0,))], [ReplicaPart(0, (0, 1), (1,))]]
    assert parts_of_hosts([2, 3, 0, 1], nodes, 2) == whole


def test_a_replica_over_two_hosts_has_a_part_on_each_and_its_first_host_has_rank_0() -> None:
    nodes = processes_of(RunFile.model_validate({"format": 1, "cluster": {"workers": 1}}), launchers(0, 0))
    first, second = ReplicaPart(0, (0,), (1, 0)), ReplicaPart(0, (1,), (1, 0))
    assert parts_of_hosts([1, 0], nodes, 2) == [[second], [first]]


def test_stages_of_a_replica_change_places_with_equal_devices_to_be_on_one_host() -> None:
    by_stage = replace(PLAN, devices=(("a/cpu0", "a/cpu1"), ("b/cpu0", "b/cpu1")))
    assert within_servers(by_stage, TWO).devices == (("a/cpu0", "b/cpu0"), ("a/cpu1", "b/cpu1"))
    assert within_servers(PLAN, TWO) == PLAN


def test_a_replica_stays_on_two_hosts_where_their_devices_are_not_equal() -> None:
    fast = replace(CPU, speed=2.0)
    unequal = Cluster((TWO.servers[0], replace(TWO.servers[1], devices=(fast, fast))))
    by_stage = replace(PLAN, devices=(("a/cpu0", "a/cpu1"), ("b/cpu0", "b/cpu1")))
    assert within_servers(by_stage, unequal) == by_stage


def test_hosts_with_too_few_devices_for_a_replica_share_replicas_and_the_others_keep_theirs_whole() -> None:
    servers = []
    for name, count in (("a", 2), ("b", 1), ("c", 1)):
        card = Card("eth0", tuple(range(count)), Link(1e9))
        servers.append(Server(name, (CPU,) * count, cards=(card,)))
    split = replace(PLAN, devices=(("a/cpu0", "a/cpu1"), ("b/cpu0", "c/cpu0")))
    found = within_servers(split, Cluster(tuple(servers)))
    assert found.devices == (("a/cpu0", "b/cpu0"), ("a/cpu1", "c/cpu0"))


def test_a_host_with_several_processes_of_torchrun_has_as_many_ranks() -> None:
    """The first of them starts the ranks, the others wait."""
    (member,) = launchers(0)["a"]
    nodes = {"0": [replace(member, rank=rank, node="0") for rank in range(3)]}
    check_launchers(nodes, "groups")
    (found,) = processes_of(RunFile.model_validate({"format": 1}), nodes).values()
    assert [one.rank for one in found] == [0, 1, 2]


def test_hosts_that_all_have_one_name_are_told_to_take_names_of_their_own() -> None:
    """Hosts that no torchrun has numbered are told apart by their names."""
    (member,) = launchers(0)["a"]
    with pytest.raises(BiremeError, match=r"hosts that call themselves a\. If these are 3 hosts, give each"):
        check_launchers({"a": [replace(member, rank=rank) for rank in range(3)]}, "quorum")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "2"}, True),
        ({"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, True),
        ({"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, False),
    ],
)
def test_a_mistake_is_printed_once_on_each_host(variables: dict[str, str], expected: bool) -> None:
    assert Environment.of({"WORLD_SIZE": "4", **variables}).has_own_output == expected


def test_a_rank_that_loses_rank_0_says_so_in_one_line_without_frames_of_cpp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> None:
        raise dist.DistNetworkError("recvValue failed.\nException raised from x.cpp:\nframe #0: y")

    monkeypatch.setattr(launched_process, "rendezvous", lambda _environment: SimpleNamespace())
    monkeypatch.setattr(launched_process, "Announcements", lambda _store: None)
    monkeypatch.setattr(launched_process._Joined, "go", lost)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        launched_process.join(None, ["log.folder=/nowhere"], lambda *_: None)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "bireme: Rank 1 has lost rank 0, whose output may say why: recvValue failed.\n"
    )


def test_a_host_that_is_started_after_the_run_has_done_all_its_steps_says_so(tmp_path: Path) -> None:
    """It knows the end of the run from the folder alone: the other hosts may be gone."""
    path, folder = tmp_path / "run.toml", RunFolder(tmp_path / "run")
    lines = ("format = 1", "training.steps = 60", 'sync.mode = "quorum"', "export.at_end = false")
    path.write_text("\n".join((*lines, f'log = {{ folder = "{tmp_path}", name = "run" }}')))
    folder.path.mkdir()
    folder.summary.touch()
    limits = ShareLimits((1, 1), (8, 8))
    hosts = HostOrders(CoordinatorSettings(SyncMode.QUORUM, 2, 1, 8, limits), "key", ((), ()), (0, 1))
    start = RunStart(folder.path, None, None, is_shown=False, words={})
    orders = Orders(start, "", [0, 1], "gloo", "cpu", 60.0, hosts)
    environment = Environment.of({"RANK": "1", "WORLD_SIZE": "2"})
    for reason, steps, expected in (("", 0, ""), ("signal", 41, ""), ("finished", 60, "60 steps")):
        found = host_launcher._UnderWay(orders, (("127.0.0.1", 1),) * 2, 0.0, reason, steps)
        host_launcher._write_under_way(folder, found)
        sentence = host_launcher.how_it_ended_before(environment, path, [])
        assert (f"has finished its {expected}" in sentence) if expected else sentence == ""


@pytest.mark.parametrize(
    ("mode", "places", "ranks"),
    [("allreduce", [0, 2, 1, 3], [[0, 2], [1, 3]]), ("diloco", [0, 1, 2, 3], [[0, 1], [2, 3]])],
)
def test_hosts_follow_the_mode_that_the_planner_chooses(
    mode: str, places: list[int], ranks: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With allreduce the ranks are the processes that were started; otherwise launchers start as many."""
    asked = RunFile.model_validate({"format": 1, "sync": {"mode": "auto"}, "log": {"name": "run"}})
    chosen = asked.with_keys("sync", mode=mode)
    by_replica = replace(PLAN, devices=(("a/cpu0", "b/cpu0"), ("a/cpu1", "b/cpu1")))
    prepared = PreparedPlan(chosen, SavedPlan(by_replica), SimpleNamespace(cluster=TWO))
    found = {
        "_begun": None,
        "_cluster": TWO,
        "_planned_anew": prepared,
        "_written": (prepared, RunFolder(tmp_path)),
        "write_predicted": None,
    }
    for name, value in found.items():
        monkeypatch.setattr(rank_zero_setup, name, lambda *_, value=value, **__: value)
    members = [LaunchedProcess(rank, "01"[rank % 2], "ab"[rank % 2], False, 0) for rank in range(4)]
    nodes = {"0": members[::2], "1": members[1::2]}
    environment = Environment.of({"RANK": "0", "WORLD_SIZE": "4"})
    told: list[PhaseForecast] = []
    setup = rank_zero_setup.set_up_run(
        environment, asked, nodes, lambda *_: ["", ""], lambda _text: None, wait=told.append
    )
    assert setup is not None
    assert [one.survives for one in told] == [mode == "diloco"]
    assert setup.places == places
    assert [[one.rank for one in own] for own in setup.nodes.values()] == ranks


def test_a_run_that_is_begun_again_has_each_replica_on_one_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan may be a new one, or of a run whose replicas could not die."""
    by_stage = replace(PLAN, devices=(("a/cpu0", "a/cpu1"), ("b/cpu0", "b/cpu1")))
    run = RunFile.model_validate({"format": 1, "sync": {"mode": "quorum"}, "log": {"name": "run"}})
    again = PreparedPlan(run, SavedPlan(by_stage), SimpleNamespace(cluster=TWO))
    found = {
        "_begun": RunFolder(tmp_path),
        "_cluster": TWO,
        "_is_for": True,
        "prepared_again": again,
        **dict.fromkeys(("check_finds_checkpoints", "check_rate", "_check_progress")),
        "newest_state": (None, 0),
        "has_ended": None,
    }
    for name, value in found.items():
        monkeypatch.setattr(rank_zero_setup, name, lambda *_, value=value, **__: value)
    written: list[SavedPlan] = []
    monkeypatch.setattr(rank_zero_setup, "write_plan", lambda _path, plan: written.append(plan))
    monkeypatch.setattr(RunFolder, "record", lambda _folder: None)
    monkeypatch.setattr(rank_zero_setup, "count_start", Mock(side_effect=InterruptedError))
    environment = Environment.of({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(InterruptedError):
        rank_zero_setup.set_up_run(environment, run, launchers(0, 0), lambda *_: [], lambda _text: None)
    assert [one.plan.devices for one in written] == [(("a/cpu0", "b/cpu0"), ("a/cpu1", "b/cpu1"))]


@pytest.mark.parametrize(("is_told", "order"), [(False, ["wait", "rank 1 ends."]), (True, ["rank 1 ends."])])
def test_a_rank_of_a_phase_that_is_prepared_may_be_killed_before_it_reports_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch, is_told: bool, order: list[str]
) -> None:
    """A phase that was not used printed on each machine that its store was gone."""
    happened: list[str] = []
    monkeypatch.setattr(launched_process, "tell", lambda text: happened.append(text[:12]))
    monkeypatch.setattr(time, "sleep", lambda _s: happened.append("wait"))
    monkeypatch.setattr(launched_process, "Announcements", Mock())
    joined = launched_process._Joined(Mock(rank=1, phase=2), Mock(), Mock(), Mock(), None, (), _anyway=False)
    joined._taken = Mock() if is_told else None
    monkeypatch.setattr(joined, "_go", Mock(side_effect=RankFailed(0, None, "its store is gone")))
    with pytest.raises(SystemExit):
        joined.go(Mock())
    assert happened == order
