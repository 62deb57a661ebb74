"""`bireme coordinate` over machines that come and go: the run is planned again over those that are there."""

import re
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from bireme.cluster.cluster_file import read_cluster
from bireme.model.graph_file import load_graph
from bireme.model.units import units_of
from bireme.plan.plan_file import load_plan
from bireme.profile import control
from bireme.sync.coordinator.ledger_check import check_ledger
from tests.support.extent import TRY_ALL
from tests.support.hosts import Host, hosts
from tests.support.paced_samples import GATE
from tests.support.patience import patience_s
from tests.support.training import GPT, Running, losses, metrics, settings, write_run
from tests.train.test_train_joined import closing, command, coordinating, ended, lines_of

pytestmark = pytest.mark.slow
_ALL_ONLY = pytest.mark.skipif(not TRY_ALL, reason="three machines for half a minute: make test-all")
PACED = "tests.support.paced_samples:paced"
FAILING = "tests.support.paced_samples:failing_once"
PACE_S = 0.02
LARGER = "gpt:layers=4,width=64,heads=2,vocab=257,context=32"
"""Large enough that a third stage is predicted to save time, also if a busy machine measures slow lines."""


def planned(folder: Path, mode: str, *more: str, model: str = GPT, data: str = PACED) -> Path:
    """A run that is planned for the machines that are there, one process each."""
    path = write_run(folder, "1f1b", 1, model=model, data=data)
    text = re.sub(r'file = ".*"\n', "micro_batch = 2\n", path.read_text())
    lines = ("[elastic]", "patience_s = 2.0", f'[sync]\nmode = "{mode}"', *more)
    path.write_text(text + "\n" + "\n".join(lines) + "\n")
    return path


def joining(folder: Path, stack: ExitStack, red: Running, *names: str) -> dict[str, Running]:
    lines = lines_of(red, len(names))
    found = {
        name: command(folder, name, *words, "--name", name, pace_s=PACE_S)
        for name, words in zip(names, lines, strict=True)
    }
    closing(stack, *found.values())
    return found


def test_a_run_of_two_machines_that_loses_one_goes_on_and_ends(tmp_path: Path) -> None:
    """One machine is left, which goes on from the newest checkpoint."""
    run, more = planned(tmp_path, "allreduce"), settings(training__steps=40)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more, pace_s=PACE_S))
        blue = joining(tmp_path, stack, red, "blue")["blue"]
        red.wait_for_step(5)
        blue.kill_all()
        status, _, said = ended(red)
    assert status == 0, said
    assert "blue (127.0.0.1) is gone" in said
    starts = metrics(tmp_path / "runs" / "run", "start")
    assert [len(one["devices"]) for one in starts] == [2, 1]
    assert starts[1]["step"] in range(4, 40, 4)
    assert metrics(tmp_path / "runs" / "run", "stop")[-1]["reason"] == "finished"


def be_machine(host: Host, control_s: float) -> None:
    """Be on that host, where the control takes so long."""
    vars(control).update(control_now_s=lambda _: control_s)
    host.begin()


def test_a_machine_that_is_a_third_as_fast_gets_fewer_layers(tmp_path: Path) -> None:
    run, more = planned(tmp_path, "allreduce", model=LARGER), settings(training__steps=4)
    with ExitStack() as stack:
        first, second = stack.enter_context(hosts(2))
        words = ("coordinate", str(run), "--listen", f"{first.address}:0", *more)
        red = command(tmp_path, "red", *words, first=partial(be_machine, first, 1e-3))
        closing(stack, red)
        (line,) = lines_of(red, 1)
        blue = command(tmp_path, "blue", *line, first=partial(be_machine, second, 3e-3))
        found = [ended(one) for one in (red, *closing(stack, blue))]
    assert [status for status, *_ in found] == [0, 0], found
    assert "as they were measured: host-0 1, host-1 0.32." in found[0][2]
    plan = load_plan(red.run / "plan.json").plan
    cuts = (0, *plan.cuts, len(units_of(load_graph(red.run / "graph.json"))))
    speeds = {one.name: one.device.speed for one in read_cluster(red.run / "cluster.toml").devices()}
    sizes = {speeds[own]: cuts[stage + 1] - cuts[stage] for stage, (own,) in enumerate(plan.devices)}
    assert sizes[0.32] < sizes[1.0] / 2


@_ALL_ONLY
def test_a_pipeline_of_three_machines_goes_on_over_two(tmp_path: Path) -> None:
    run = planned(tmp_path, "allreduce", model=LARGER)
    more = settings(training__steps=40, checkpoint__every_steps=5, training__batch_size=12)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, "--machines", "3", *more, pace_s=PACE_S))
        others = joining(tmp_path, stack, red, "blue", "green")
        red.wait_for_step(12)
        others["blue"].kill_all()
        found = [ended(one) for one in (red, others["green"])]
    assert [status for status, *_ in found] == [0, 0], found
    said = found[0][2]
    assert "Phase 2 is prepared on 2 machines" in said
    assert "Phase 2 trains" in said
    starts = metrics(tmp_path / "runs" / "run", "start")
    assert [len(one["devices"]) for one in starts] == [3, 2]
    assert starts[1]["step"] >= 10


@_ALL_ONLY
@pytest.mark.parametrize("mode", ["allreduce", "quorum", "groups", "diloco"])
def test_a_machine_that_comes_later_is_used_and_no_batch_is_lost(tmp_path: Path, mode: str) -> None:
    """Its phase is prepared beside the one that trains. Except in allreduce it is one replica more."""
    run = planned(tmp_path, mode, model=LARGER, data="")
    more = settings(training__steps=1_000_000, training__batch_size=24)
    with ExitStack() as stack:
        words = ("--machines", "2..3", "--wait", "1")
        (red,) = closing(stack, coordinating(tmp_path, run, *words, *more))
        blue_line, green_line = lines_of(red, 2)
        (blue,) = closing(stack, command(tmp_path, "blue", *blue_line, "--name", "blue"))
        red.wait_for_step(3)
        (green,) = closing(stack, command(tmp_path, "green", *green_line, "--name", "green"))
        red.wait_for_words("Phase 2 trains")
        red.process.send_signal(signal.SIGINT)
        found = [ended(one) for one in (red, blue, green)]
    assert [status for status, *_ in found] == [0, 0, 0], found
    assert "Phase 2 is prepared on 3 machines beside phase 1, which goes on" in found[0][2]
    log = metrics(tmp_path / "runs" / "run")
    first, second = (number for number, one in enumerate(log) if one["kind"] == "start")
    assert [len(log[one]["devices"]) for one in (first, second)] == [2, 3]
    trained = [one["step"] for one in log[:second] if one["kind"] == "train"]
    # In groups a line of the log is of a batch of one replica, and the last few may come from the other one.
    assert log[second]["step"] in range(trained[-1], trained[-1] + 1 + 3 * (mode == "groups"))
    if mode != "allreduce":
        assert check_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").is_whole


@_ALL_ONLY
def test_a_machine_that_leaves_goes_in_order_and_no_batch_is_lost(tmp_path: Path) -> None:
    """It lends little memory and a low rate until it leaves."""
    run = planned(tmp_path, "allreduce")
    with ExitStack() as stack:
        more = settings(training__steps=5000, checkpoint__every_steps=0)
        (red,) = closing(stack, coordinating(tmp_path, run, "--machines", "3", *more, pace_s=PACE_S))
        blue_line, green_line = lines_of(red, 2)
        limits = ("--memory", "2GiB", "--rate", "50Mbit/s", "--devices", "none")
        blue, green = closing(
            stack,
            command(tmp_path, "blue", *blue_line, "--name", "blue", pace_s=PACE_S),
            command(tmp_path, "green", *green_line, "--name", "green", *limits, pace_s=PACE_S),
        )
        red.wait_for_step(5)
        green.process.send_signal(signal.SIGHUP)
        status, *_ = ended(green)
        red.wait_for_words("Phase 2 trains")
        red.process.send_signal(signal.SIGINT)
        found = [ended(one) for one in (red, blue)]
    assert (status, [one[0] for one in found]) == (0, [0, 0]), found
    assert "2.0 GiB of memory, no GPU" in found[0][2]
    assert "follows on " in found[0][2]
    assert ": green leaves." in found[0][2]
    assert "green (127.0.0.1) has left." in found[0][2]
    log = metrics(tmp_path / "runs" / "run")
    second = [number for number, one in enumerate(log) if one["kind"] == "start"][1]
    assert len(log[second]["devices"]) == 2
    assert log[second]["step"] == [one["step"] for one in log[:second] if one["kind"] == "train"][-1]


@_ALL_ONLY
def test_a_pipeline_whose_coordinator_is_killed_goes_on_once_it_is_started_again(tmp_path: Path) -> None:
    """Its own machine had a stage, so that the phase has failed meanwhile."""
    run = planned(tmp_path, "allreduce", model=LARGER)
    more = settings(training__steps=60, checkpoint__every_steps=5, training__batch_size=12)
    more += settings(elastic__patience_s=60.0)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more, pace_s=PACE_S))
        blue = joining(tmp_path, stack, red, "blue")["blue"]
        red.wait_for_step(12)
        red.process.kill()
        red.process.wait(patience_s())
        (red,) = closing(stack, coordinating(tmp_path, run, *more, pace_s=PACE_S))
        found = [ended(one) for one in (red, blue)]
    assert [status for status, *_ in found] == [0, 0], found
    assert "The run that this coordinator has left is taken up. Phase 1 trains on " in found[0][2]
    starts = metrics(tmp_path / "runs" / "run", "start")
    assert [len(one["devices"]) for one in starts] == [2, 2]
    assert starts[1]["step"] >= 10


@_ALL_ONLY
def test_a_run_whose_coordinator_is_killed_while_it_switches_phases_goes_on(tmp_path: Path) -> None:
    """The phase before has ended in order on all machines, and is not the end of the run."""
    run = planned(tmp_path, "allreduce", model=LARGER)
    more = ("--machines", "3", "--no-devices", *settings(training__steps=40, training__batch_size=12))
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more))
        others = joining(tmp_path, stack, red, "blue", "green", "gold")
        others["blue"].wait_for_step(5)
        others["gold"].process.send_signal(signal.SIGTERM)
        red.wait_for_words("Phase 2 follows on ")
        red.process.kill()
        red.process.wait(patience_s())
        (red,) = closing(stack, coordinating(tmp_path, run, *more))
        found = [ended(one) for one in (red, *others.values())]
    assert [status for status, *_ in found] == [0, 0, 0, 0], found
    assert {*losses(tmp_path / "runs" / "run")} == {*range(1, 41)}


@_ALL_ONLY
def test_a_machine_that_cannot_read_the_data_is_left_out_of_the_next_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    monkeypatch.setenv("BIREME_TEST_MARK", str(mark))
    monkeypatch.setenv(GATE, str(gate))
    gate.write_text("1000000")
    run, more = planned(tmp_path, "allreduce", data=FAILING), settings(training__steps=40)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more, pace_s=PACE_S))
        blue = joining(tmp_path, stack, red, "blue")["blue"]
        red.wait_for_step(5)
        mark.touch()
        found = [ended(one) for one in (red, blue)]
    assert [status for status, *_ in found] == [0, 0], found
    assert "whose processes have failed" in found[0][2]
    assert [len(one["devices"]) for one in metrics(tmp_path / "runs" / "run", "start")] == [2, 1]


@_ALL_ONLY
def test_a_replica_over_three_machines_goes_on_over_two_from_second_copies(tmp_path: Path) -> None:
    run = planned(tmp_path, "quorum", model=LARGER)
    free = settings(plan__width=1, memory__copies=1, checkpoint__every_steps=0, sync__lease_s=4.0)
    with ExitStack() as stack:
        more = (*settings(training__steps=100, training__batch_size=12), *free)
        (red,) = closing(stack, coordinating(tmp_path, run, "--machines", "3", *more, pace_s=PACE_S))
        others = joining(tmp_path, stack, red, "blue", "green")
        red.wait_for_step(20)
        others["blue"].kill_all()
        found = [ended(one) for one in (red, others["green"])]
    assert [status for status, *_ in found] == [0, 0], found
    assert "from second copies" in found[0][2]
    folder = tmp_path / "runs" / "run"
    starts = metrics(folder, "start")
    assert [len(one["devices"]) for one in starts] == [3, 2]
    assert starts[1]["step"] > 0
    assert check_ledger(folder / "ledger.jsonl").is_whole


@_ALL_ONLY
def test_a_machine_for_which_the_batch_has_no_samples_stands_by_and_may_go(tmp_path: Path) -> None:
    """Micro-batches of two samples make a batch of eight for two replicas, and not for three."""
    run, more = planned(tmp_path, "quorum"), settings(training__steps=400)
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, "--machines", "3", *more, pace_s=PACE_S))
        others = joining(tmp_path, stack, red, "blue", "green")
        red.wait_for_step(5)
        red.wait_for_words("which stand by: ")
        for spare in [name for name in others if f"which stand by: {name}." in red.said]:
            others.pop(spare).kill_all()  # unless it is the coordinator's
            red.wait_for_words(f"{spare} (127.0.0.1) is gone")
        found = [ended(one) for one in (red, *others.values())]
    assert {status for status, *_ in found} == {0}, found
    assert "Phase 2 trains" not in found[0][2]
    folder = tmp_path / "runs" / "run"
    assert [len(one["devices"]) for one in metrics(folder, "start")] == [2]
    assert check_ledger(folder / "ledger.jsonl").is_whole


@_ALL_ONLY
def test_a_slow_stage_is_planned_around_or_weighed_and_left(tmp_path: Path) -> None:
    run = planned(tmp_path, "allreduce", model=LARGER, data="tests.support.paced_samples:impatient")
    more = settings(training__steps=1_000_000, balance__mode="measured", balance__replan="true")
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more))
        blue = joining(tmp_path, stack, red, "blue")["blue"]
        red.wait_for_words("because a stage has become slow.")
        red.wait_for_words(" batches left, and the switch costs about ")
        red.wait_for_step(metrics(red.run, "train")[-1]["step"] + 5)
        red.process.send_signal(signal.SIGINT)
        found = [ended(one) for one in (red, blue)]
    assert [status for status, *_ in found] == [0, 0], found
    slow = metrics(red.run, "slow")[0]["stages"][0]
    assert slow["times"] >= 1.0


@_ALL_ONLY
def test_a_plan_that_fits_no_smaller_number_waits_for_another_machine(tmp_path: Path) -> None:
    """The machine that was lost comes back as another start of `bireme join`."""
    run, more = planned(tmp_path, "allreduce"), settings(plan__depth=2, training__steps=40)
    run.write_text(run.read_text().replace("workers = 1\n", ""))
    with ExitStack() as stack:
        (red,) = closing(stack, coordinating(tmp_path, run, *more, pace_s=PACE_S))
        (words,) = lines_of(red, 1)
        (blue,) = closing(stack, command(tmp_path, "blue", *words, "--name", "blue", pace_s=PACE_S))
        red.wait_for_step(5)
        blue.kill_all()
        red.wait_for_words("The run waits for other machines.")
        (blue,) = closing(stack, command(tmp_path, "blue", *words[:2], pace_s=PACE_S))
        found = [ended(one) for one in (red, blue)]
    assert [status for status, *_ in found] == [0, 0], found
    starts = metrics(tmp_path / "runs" / "run", "start")
    assert [len(one["devices"]) for one in starts] == [2, 2]
    assert starts[1]["step"] in range(4, 40, 4)
