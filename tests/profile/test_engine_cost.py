"""What the engine takes beside a model: read off measured timelines, timed by a control, counted by plans."""

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.made_up.models import profile_of
from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device, EngineCost, Speeds
from bireme.devices import process_bytes
from bireme.model.units import units_of
from bireme.plan.forecast import Answer
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.partition.chain import chain_of
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.plan.search.works import ReplicaWork
from bireme.profile import control
from bireme.profile.control import STRETCH_S, Control, control_now_s
from bireme.profile.estimate import Seconds
from bireme.profile.measuring import BatchEndTimes, Measured
from bireme.profile.timing import CoreTime
from bireme.runtime.measuring import batch_end
from bireme.runtime.measuring.batch_end import exchange_costs, lopsided_graph, read_off
from bireme.schedule.accesses import Sizes
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.residency import resident
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline
from bireme.train.captured_run import mean_of
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

ENGINE = EngineCost(
    instruction_s=1e-5, send_s=3e-4, receive_s=1e-4, take_s=2e-4, late_s=5e-5, batch_s=0.0, agree_s=6e-4
)


def as_measured(timeline: Timeline, engine: EngineCost) -> Timeline:
    """A simulated timeline as the engine's recorder writes it: what an instruction takes before its work, and
    taking its message, pass between two instructions.
    """
    ranks = []
    for rank in timeline.ranks:
        starts = array("d")
        for interval in rank.intervals():
            needed = interval.instruction.needs(timeline.program.num_stages)
            own = timeline.program.rank_of_stage[interval.instruction.stage]
            takes = needed is not None and timeline.program.rank_of_stage[needed.from_stage] != own
            before_s = engine.instruction_s + (engine.take_s if takes else 0.0)
            starts.append(interval.start_s + before_s)
        ranks.append(replace(rank, start_s=starts))
    return replace(timeline, ranks=tuple(ranks), source="measured")


def test_costs_are_read_off_a_run_that_had_them() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=6, num_batches=9)
    costs = Costs.per_stage(2, forward_s=(1e-4, 4e-3), backward_s=(2e-4, 8e-3), engine=ENGINE)
    found = read_off(as_measured(simulate(program, costs, agree=True), ENGINE))
    for name in ("instruction_s", "send_s", "receive_s", "take_s", "late_s"):
        assert getattr(found, name) == pytest.approx(getattr(ENGINE, name), rel=1e-6), name
    assert found.batch_s == pytest.approx(0.0, abs=1e-9)


def test_what_a_batch_takes_beside_its_instructions_is_read_off_too() -> None:
    """It was 0 in every profile: it was looked for in the loop of a program that is too short for one."""
    program = generate("2bw", num_stages=2, num_microbatches=6, num_batches=9)
    costs = Costs.per_stage(2, forward_s=(1e-4, 4e-3), backward_s=(2e-4, 8e-3), engine=ENGINE)
    timeline = as_measured(simulate(program, costs, agree=True), ENGINE)
    ranks, batch_s = [], 3e-5
    for rank in timeline.ranks:
        starts = array("d", rank.start_s)
        for place, interval in enumerate(rank.intervals()):
            if (interval.instruction.kind, interval.instruction.microbatch) == (Kind.RECV_FORWARD, 0):
                starts[place] += batch_s
        ranks.append(replace(rank, start_s=starts))
    found = read_off(replace(timeline, ranks=tuple(ranks)))
    assert found.batch_s == pytest.approx(batch_s / 2)  # the first rank receives nothing forward


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_model_of_messages_sends_nothing_but_messages_of_the_size_that_is_asked_for(
    num_ranks: int,
) -> None:
    """Its heavy part was cut in two, so that every message had 400 KiB, and the first rank had much to do."""
    for is_tied in (False, True):
        units = units_of(lopsided_graph(num_ranks, is_tied=is_tied))
        assert [len(unit.sends) for unit in units[: num_ranks - 1]] == [1] * (num_ranks - 1)
        places = [place for place, unit in enumerate(units) if "heavy" in unit.parameters]
        assert places == [len(units) - 1]
        users = [place for place, unit in enumerate(units) if "layers.0.bias" in unit.parameters]
        assert min(users) == 0
        assert (max(users) >= num_ranks - 1) is is_tied


@pytest.mark.parametrize("counts_threads", [False, True])
def test_threads_beside_a_rank_count_where_they_take_its_core(
    monkeypatch: pytest.MonkeyPatch, counts_threads: bool
) -> None:
    """Both runs cost the same, but threads take 3 ms more for the 6 large messages."""
    costs, beside_s = EngineCost(send_s=1e-3, batch_s=2e-3), iter([5e-3, 2e-3])
    monkeypatch.setattr(batch_end, "_run_messages", lambda *_: (costs, next(beside_s)))
    monkeypatch.setattr(batch_end, "exchange_costs", lambda _fabric, _device, found: found)
    world: Any = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"))
    graph: Any = None
    monkeypatch.setattr(batch_end, "DistFabric", lambda _: None)
    found = batch_end.message_costs(world, graph, 1 << 20, iter(()), counts_threads=counts_threads)
    more_bytes = (1 << 20) - batch_end._SMALL_BYTES
    assert found.batch_s == pytest.approx(4e-3 if counts_threads else 2e-3)
    assert found.send_s_per_byte * more_bytes == pytest.approx(0.5e-3 if counts_threads else 0.0)


def test_the_end_of_a_batch_counts_seconds_of_a_core_after_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An update that followed another instruction at once found its weights in the caches."""
    now_s, other = iter((1.0, 1.25, 2.0, 2.5, 3.0, 4.0)), torch.zeros(4)
    monkeypatch.setattr(batch_end, "process_time", lambda: next(now_s))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    laps = batch_end._Laps(other)
    found = []
    for kind in (Kind.REDUCE, Kind.UPDATE, Kind.TRIAL):
        laps(Instruction(kind, 0, 0))
        found.append(other[0].item())
    laps.pause()
    assert found == [0.0, 1.0, 2.0]
    assert laps.seconds == {Kind.REDUCE: [0.25], Kind.UPDATE: [0.5], Kind.TRIAL: [1.0]}


def test_a_control_takes_a_small_share_of_the_time() -> None:
    """Its clock moves half a second at every look, and a step of a second passes between two looks at it."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.5
        return now_s

    control = Control(clock=clock, lap=lambda: lambda: 0.5)
    for _ in range(1000):
        control.time_if_due()
    assert control.median_s == 0.5
    assert sum(control.seconds) <= 0.01 * now_s
    assert len(control.seconds) >= 2


def test_a_machine_is_as_fast_as_all_its_cores_between_disturbances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other made a machine with one busy core 30 times as slow."""
    rates, pauses = iter([30.0, 70.0, 40.0, 60.0, 20.0, 20.0, 45.0, 45.0]), list[float]()
    monkeypatch.setattr(control, "sleep", pauses.append)
    assert control_now_s(1) > 0
    monkeypatch.setattr(control, "_laps_per_s", lambda _: next(rates))
    assert control_now_s(2) == 0.01
    assert sum(pauses[4:]) > 0.5


def test_a_thread_is_slower_by_its_waits_and_by_what_the_host_takes_away() -> None:
    before = CoreTime(computed_s=1.0, waited_s=5.0, busy_s=100.0, stolen_s=10.0)
    now = CoreTime(computed_s=3.0, waited_s=8.0, busy_s=104.0, stolen_s=11.0)
    assert now.slowdown_since(before, counts_waits=True) == 1 + 3 / 2 + 1 / 4
    assert now.slowdown_since(before, counts_waits=False) == 1 + 1 / 4
    assert now.slowdown_since(now, counts_waits=True) == 1.0


@pytest.mark.parametrize(("counts_waits", "expected_s"), [(True, 4.0), (False, 2.0)])
def test_a_machine_whose_speed_swings_is_as_fast_as_at_its_middle_batch(
    counts_waits: bool, expected_s: float
) -> None:
    """One long wait made a control that was timed now and then slower than any step."""
    now_s = lap_s = 0.0
    cores = CoreTime(0.0, 0.0, 0.0, 0.0)
    control = Control(
        counts_waits=counts_waits, clock=lambda: now_s, lap=lambda: lambda: lap_s, cores=lambda: cores
    )
    assert control.typical_s() is None
    for took_s, waited_s, num_batches in ((1.0, 0.0, 2), (2.0, 1.0, 3), (9.0, 90.0, 2)):
        lap_s = took_s
        for _ in range(num_batches - 1):
            control.time()
            control.note_batch()
        cores = CoreTime(cores.computed_s + 1.0, cores.waited_s + waited_s, 0.0, 0.0)
        now_s += STRETCH_S
        control.time()
        control.note_batch()
    assert control.typical_s() == expected_s


def cluster(num_devices: int, num_cores: int) -> Cluster:
    device = Device("a core", "cpu", 2**30, num_cores=1)
    return Cluster((Server("here", (device,) * num_devices, num_cores=num_cores),))


def test_workers_on_fewer_cores_are_planned_as_sharing_them() -> None:
    """Three workers on two cores were planned as if each had its own."""
    profile = profile_of([1.0] * 3, [2.0] * 3)
    request = PlanRequest(batch_size=6, schedule="2bw", depth=3, micro_batch=1)
    own, shared = (find_plan(profile, cluster(3, cores), request) for cores in (0, 2))
    assert isinstance(own, Answer)
    assert isinstance(shared, Answer)
    assert own.best.forecast.batch_s == pytest.approx(6 * 3)
    assert shared.best.forecast.batch_s == pytest.approx(6 * 3 * 3 / 2)
    assert shared.best.forecast.bottleneck == "the cores of here"


def test_a_process_counts_before_it_has_a_tensor() -> None:
    profile = profile_of([1.0] * 2, [2.0] * 2, parameter_bytes=[1000] * 2)
    profile = replace(profile, device_kind="cpu")
    request = PlanRequest(batch_size=4, schedule="2bw", depth=2, micro_batch=1)
    answer = find_plan(profile, cluster(2, 0), request)
    assert isinstance(answer, Answer)
    measured = replace(profile, engine=EngineCost(process_bytes=2**28))
    found = forecast_of(answer.best.plan, measured, cluster(2, 0), request)
    for one, other in zip(found.stages, answer.best.forecast.stages, strict=True):
        assert one.peak_bytes == other.peak_bytes + 2**28
        assert one.limit_bytes == other.limit_bytes
    too_large = replace(profile, engine=EngineCost(process_bytes=2**30))
    assert not isinstance(find_plan(too_large, cluster(2, 0), request), Answer)


MEASURED = EngineCost(process_bytes=2**28)


@pytest.mark.parametrize(
    ("device", "engine", "expected"),
    [
        (replace(device_named("a100"), process_bytes=2**29), MEASURED, 2**29),
        (Device("a card without a name", "cuda", 2**34), MEASURED, 2**28),
        (Device("NVIDIA A100-SXM4-80GB", "cuda", 2**34), MEASURED, 2**28),
        (Device("NVIDIA A100-SXM4-80GB", "cuda", 2**34), None, device_named("a100").process_bytes),
        (Device("a card without a name", "cuda", 2**34), None, 0),
        (Device("an emulated one", "emulated", 2**34), MEASURED, 0),
    ],
)
def test_what_a_process_holds_on_a_gpu_comes_from_the_file_a_measurement_or_a_ready_device(
    device: Device, engine: EngineCost | None, expected: int
) -> None:
    """It counted on processors alone, so plans filled GPUs to the last byte."""
    profile = replace(profile_of([1.0], [2.0], parameter_bytes=[1000]), device_kind="cuda", engine=engine)
    answer = find_plan(profile, Cluster((Server("here", (device,)),)), PlanRequest(batch_size=1))
    assert isinstance(answer, Answer)
    (stage,) = answer.best.forecast.stages
    assert stage.process_bytes == expected
    assert stage.peak_bytes == 4000 + expected
    full = replace(device, memory_bytes=4000 + expected - 1)
    assert not isinstance(
        find_plan(profile, Cluster((Server("here", (full,)),)), PlanRequest(batch_size=1)), Answer
    )


def test_a_process_holds_what_is_in_use_beside_the_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what libraries hold of that memory, which is all if the driver does not report what is free."""
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 40)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 250)
    for module, expected in ((SimpleNamespace(mem_get_info=lambda _: (600, 1000)), 190), (object(), 40)):
        monkeypatch.setattr(torch, "get_device_module", lambda _, module=module: module)
        assert process_bytes(torch.device("cuda", 0)) == expected


def test_costs_of_links_and_hosts_do_not_grow_on_a_slower_device() -> None:
    """All seconds of the engine were divided by the speed of the device."""
    engine = EngineCost(
        instruction_s=1.0, send_s=2.0, send_s_per_byte=0.5, take_s=3.0, take_s_per_byte=0.25, update_s=4.0
    )
    costs = Costs.per_stage(
        2, forward_s=8.0, backward_s=16.0, update_s=6.0, message_bytes=8, rank_speed=(0.5, 1.0), engine=engine
    )
    send, update = Instruction(Kind.SEND_FORWARD, 0, 0, 0), Instruction(Kind.UPDATE, 0, 0)
    use = Instruction(Kind.BACKWARD, 0, 0, 0)

    def taken_s(costs: Costs) -> list[float]:
        return [costs.seconds(send, 0), costs.seconds(update, 0), costs.seconds(use, 0, takes_bytes=8)]

    assert taken_s(costs) == [1 + 2 + 8 / 2, 1 + 4 + 6 / 0.5, 1 + 3 + 8 / 4 + 16 / 0.5]
    slow_host = replace(costs, host_speed=(0.25, 1.0), update_speed=(2.0, 1.0))
    assert taken_s(slow_host) == [4 * 3 + 8 / 2, 4 * 5 + 6 / 2, 4 * 4 + 8 / 4 + 16 / 0.5]


def test_a_processor_is_its_own_host_and_a_gpu_is_not() -> None:
    speeds = {kind: Device("any", kind, 2**30, speed=0.5).speeds for kind in ("cpu", "cuda", "emulated")}
    assert speeds == {
        "cpu": Speeds(0.5, 0.5, 0.5),
        "cuda": Speeds(0.5, 0.5, 1.0),
        "emulated": Speeds(0.5, 0.5, 1.0),
    }
    given = Device("any", "cuda", 2**30, speed=0.5, update_speed=0.7, host_speed=2.0)
    assert given.speeds == Speeds(0.5, 0.7, 2.0)


def test_a_device_that_steps_slower_than_it_computes_gets_its_own_seconds() -> None:
    device = Device("any", "emulated", 2**30, update_speed=0.25)
    profile = profile_of([1.0], [2.0], update_s=[3.0])
    answer = find_plan(profile, Cluster((Server("here", (device,)),)), PlanRequest(batch_size=1))
    assert isinstance(answer, Answer)
    assert answer.best.forecast.batch_s == 1 + 2 + 3 / 0.25


@pytest.mark.parametrize("master_weights", [True, False])
def test_the_profile_tells_whether_an_optimizer_has_weights_of_its_own(master_weights: bool) -> None:
    """A profile from a file was planned for as one of float32 weights, unless the run file named bfloat16."""
    profile = replace(profile_of([1.0], [2.0], parameter_bytes=[1000]), master_weights=master_weights)
    device = Device("any", "emulated", 2**30)
    request = PlanRequest(batch_size=4, schedule="2bw-fresh", depth=1, width=1, micro_batch=1)
    answer = find_plan(profile, Cluster((Server("here", (device,)),)), request)
    assert isinstance(answer, Answer)
    versions = 2 if master_weights else 3
    assert answer.best.forecast.stages[0].peak_bytes == (versions + 1 + 2) * 1000


def test_copies_of_the_messages_that_a_rank_sends_are_counted() -> None:
    """Four that may be under way, and room for the next where it is made from a message of another rank."""
    costs = Costs.per_stage(4, forward_s=1.0, backward_s=1.0, message_bytes=100, gradient_message_bytes=10)
    work = ReplicaWork(costs, ())
    assert [work.sent_bytes(rank, (0, 1, 2, 3)) for rank in range(4)] == [400, 550, 550, 40]
    assert [work.sent_bytes(rank, (0, 1, 1, 0)) for rank in range(2)] == [440, 440]
    profile = profile_of([1.0] * 2, [2.0] * 2, boundary_bytes=[100, 0])
    request = PlanRequest(batch_size=4, schedule="2bw", depth=2, micro_batch=1)
    answer = find_plan(profile, cluster(2, 0), request)
    assert isinstance(answer, Answer)
    found = forecast_of(answer.best.plan, replace(profile, engine=EngineCost()), cluster(2, 0), request)
    for one, other in zip(found.stages, answer.best.forecast.stages, strict=True):
        assert one.peak_bytes == other.peak_bytes + 400


def test_gradients_wait_between_the_halves_of_a_backward() -> None:
    nothing, one = (0.0,), (100.0,)
    sizes = Sizes(nothing, nothing, nothing, one, nothing, nothing, nothing, waiting=(7.0,), halves=(3.0,))
    sizes = replace(sizes, workspace=(20.0,))
    peaks = {
        name: resident(generate(name, num_stages=1, num_microbatches=2), 0, sizes).peak_bytes
        for name in ("1f1b", "zb-h1")
    }
    assert peaks == {"1f1b": 100 + 20, "zb-h1": 100 + 7 + 20 + 3}


def test_two_halves_take_their_own_seconds_and_the_first_stage_one_whole_backward() -> None:
    """They were counted as one whole backward, so that plans chose zbv where it was slower."""
    plain = profile_of([1.0] * 4, [2.0] * 4, boundary_bytes=[100] * 3 + [0])
    units = tuple(
        replace(unit, costs=(replace(unit.costs[0], backward_input_s=1.5, backward_weight_s=1.25),))
        for unit in plain.units
    )
    costs = costs_between(chain_of(replace(plain, units=units), 1), (2,))
    assert (costs.backward_input_s, costs.backward_weight_s) == ((1.5, 3.0), (4.0, 2.5))
    assert costs.in_halves().backward_s == (5.5, 5.5)


def test_what_was_measured_at_once_counts_in_the_mean() -> None:
    def one(seconds: float, process_bytes: int) -> Measured:
        unit = Seconds(seconds, 2 * seconds, 3 * seconds, None, None, 0.0)
        engine = EngineCost(send_s=seconds, process_bytes=process_bytes, num_processes=2)
        return Measured({4: {0: unit}}, {0: BatchEndTimes(seconds, seconds, seconds)}, engine)

    found = mean_of([one(1.0, 100), one(2.0, 300)])
    assert found.seconds[4][0] == Seconds(1.5, 3.0, 4.5, None, None, 0.0)
    assert found.ends[0] == BatchEndTimes(1.5, 1.5, 1.5)
    assert found.engine == EngineCost(send_s=1.5, process_bytes=300, num_processes=2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_ranks_exchange_has_a_price_and_the_rest_stays_as_it_was(num_ranks: int) -> None:
    fabric, known = ThreadFabric(num_ranks), EngineCost(send_s=2.0, process_bytes=3)

    def work(rank: int) -> EngineCost:
        return exchange_costs(fabric.of(rank), torch.device("cpu"), known)

    for found in run_threads(num_ranks, work):
        assert min(found.reduce_s_per_byte, found.gather_s_per_byte, found.scatter_s_per_byte) > 0
        assert replace(found, reduce_s_per_byte=0, gather_s_per_byte=0, scatter_s_per_byte=0) == known
