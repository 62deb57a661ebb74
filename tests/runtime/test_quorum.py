"""Replicas that agree by quorum: the same as one process on the committed samples, whoever dies when."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.messages import RankId
from tests.support.engine_parity import Setting, oracle, plan_for
from tests.support.extent import several
from tests.support.mortal_replicas import Killed, Replicas
from tests.support.paged import paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.regression import WIDTH, regression, regression_plan, tied_regression
from tests.support.small_models import Batch, Model, real_batches, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

BATCH, MICRO = 16, 4


def data_for(num_batches: int) -> Batch:
    return real_batches(BATCH * num_batches, 1, WIDTH)[0]


def setting_of(schedule: str, num_stages: int = 2) -> Setting:
    plan = regression_plan(schedule, num_stages, updates_early=False)
    return Setting(plan, clip_norm=0.5)


def assert_as_one_process(replicas: Replicas, *, tolerance: float = 0.0) -> None:
    """Every rank that lived to the end has what one process makes of the ledger's samples, and the same bits
    as its peers.
    """
    assert isinstance(replicas.setting.plan, Plan)
    plan = replace(replicas.setting.plan, width=replicas.num_replicas, paging=None)
    setting = replace(replicas.setting, plan=plan)
    norms = dict(norm for seen in replicas.seen.values() for norm in seen.norms.items())
    updates = oracle(replicas.model, setting, replicas.committed(), sizes=replicas.sizes(), norms=norms)
    assert len(updates) == replicas.num_batches
    places = [one for line in replicas.hub.rounds for own in line.samples for one in own]
    assert len({place for one in places for place in range(one.begin, one.end)}) == sum(
        one.count for one in places
    ), "no sample counts twice"
    done = {rank: seen for rank, seen in replicas.seen.items() if seen.is_done}
    assert done
    rough = max(tolerance, 1e-12)
    first: dict[tuple[int, str], Tensor] = {}
    for rank, seen in done.items():
        for batch, weights in seen.weights.items():
            update, what = updates[batch], f"{rank} after batch {batch}"
            assert seen.losses[batch] == pytest.approx(update.loss, rel=rough), what
            assert seen.norms[batch] == pytest.approx(update.norm, rel=rough), what
            for name, tensor in weights.items():
                assert torch.equal(tensor, first.setdefault((batch, name), tensor)), f"{name} of {what}"
                assert_close(tensor, update.weights[name], tolerance, f"{name} of {what}")
            for name, state in seen.states[batch].items():
                for key, value in state.items():
                    assert torch.equal(value, first.setdefault((batch, f"{name} {key}"), value)), what
                    assert_close(value, update.optimizer_state[name][key], tolerance, f"{key} of {what}")


def assert_close(one: Tensor, other: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        one, other.to(one.dtype), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_two_replicas_are_one_process_to_the_last_bit(schedule: str) -> None:
    replicas = Replicas(regression(), setting_of(schedule), 2, data_for(5), 5, BATCH)
    replicas.run()

    assert_as_one_process(replicas)
    assert [line.members for line in replicas.hub.rounds] == [(0, 1)] * 5


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "per_rank"), [("interleaved", None), ("zbv", None), ("2bw", 2)])
def test_replicas_with_several_stages_on_a_rank_are_one_process_to_the_last_bit(
    schedule: str, per_rank: int | None
) -> None:
    plan = regression_plan(schedule, 4, updates_early=False, stages_per_rank=per_rank, recompute=(0, 3))
    replicas = Replicas(regression(), Setting(plan, clip_norm=0.5), 2, data_for(4), 4, BATCH)
    replicas.run()

    assert_as_one_process(replicas)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "per_rank"), [("zbv", None), ("2bw", 2)])
def test_tied_weights_of_several_stages_on_a_rank_are_summed_over_replicas_and_stages(
    schedule: str, per_rank: int | None
) -> None:
    plan = regression_plan(schedule, 4, updates_early=False, stages_per_rank=per_rank)
    replicas = Replicas(tied_regression(), Setting(plan, clip_norm=0.5), 2, data_for(4), 4, BATCH)
    replicas.run()

    assert_as_one_process(replicas, tolerance=1e-11)


@pytest.mark.slow
def test_tied_weights_are_summed_over_replicas_and_stages() -> None:
    """With labels that do not count, so that replicas weigh differently."""
    setting = Setting(plan_for("2bw", 2, updates_early=False), clip_norm=0.5)
    data = token_batches(BATCH * 4, 1)[0]
    replicas = Replicas(tiny_text(tied=True), setting, 2, data, 4, BATCH)
    replicas.run()

    assert_as_one_process(replicas, tolerance=1e-11)


PER_KILL, IN_A_RUN = 20, 12
"""Batches at the most, of which few are needed on a machine that does nothing else; and kills."""


class Walk:
    """Kills ranks at one place of a batch after the other, each time once all replicas are members again.

    The run ends some batches after the last of them.
    """

    def __init__(self, points: Sequence[tuple[int, int, int]]) -> None:
        self._points = list(points)
        self._replicas: Replicas | None = None
        self._counted: Counter[tuple[RankId, int]] = Counter()
        self._lock = threading.Lock()
        self.num_killed = 0

    def run(self, replicas: Replicas) -> None:
        self._replicas = replicas
        replicas.run()

    def on_instruction(self, rank: RankId, step: Instruction) -> None:
        """A point is a replica, a stage, and how many instructions of a batch go before."""
        self._counted[rank, step.batch] += 1
        replicas = self._replicas
        if replicas is None:
            return
        with self._lock:  # two replicas that died at once would leave nobody who has the weights
            if self.num_killed >= len(self._points):
                return
            replica, stage, place = self._points[self.num_killed]
            life = RankId(replica, replicas.lives[replica], stage)
            if not replicas.are_whole or rank != life or self._counted[rank, step.batch] <= place:
                return
            replicas.condemn(rank.own_life)
            self.num_killed += 1
            if self.num_killed == len(self._points):
                replicas.num_batches = step.batch + PER_KILL
        raise Killed

    def pace(self, _rank: RankId, _batch: int) -> None:
        assert self._replicas is not None
        self._replicas.wait_until_present()


def walked(
    num_replicas: int,
    setting: Setting,
    points: Sequence[tuple[int, int, int]],
    model: Model | None = None,
    data_of: Callable[[int], Batch] = data_for,
) -> None:
    walk, num_batches = Walk(points), PER_KILL * (len(points) + 1)
    replicas = Replicas(
        model or regression(),
        setting,
        num_replicas,
        data_of(num_batches),
        num_batches,
        BATCH,
        on_instruction=walk.on_instruction,
        revives=True,
        pace=walk.pace,
    )
    walk.run(replicas)

    assert walk.num_killed == len(points)
    assert_as_one_process(replicas, tolerance=1e-11)


def points_of(num_replicas: int, schedule: str) -> list[tuple[int, int, int]]:
    """Every instruction of a batch on every rank."""
    tracks = setting_of(schedule).plan.source.program(6).tracks
    sizes = [sum(step.batch == 3 for step in track) for track in tracks]
    return [
        (replica, stage, place)
        for stage, size in enumerate(sizes)
        for place in range(size)
        for replica in range(num_replicas)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "schedule", "quick"), [(2, "2bw", 12), (3, "1f1b", 6)])
def test_a_replica_killed_at_any_instruction_leaves_the_others_with_the_right_result(
    num_replicas: int, schedule: str, quick: int
) -> None:
    """And comes back with the bits of its peers. By default at some of all instructions of all ranks. Sums of
    three are in a ring, so they equal one process to rounding.
    """
    points = several(points_of(num_replicas, schedule), quick)
    for begin in range(0, len(points), IN_A_RUN):
        walked(num_replicas, setting_of(schedule), points[begin : begin + IN_A_RUN])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_replicas_that_offload_and_are_killed_come_back_with_the_bits_of_their_peers(schedule: str) -> None:
    """Sums that a replica applies between windows are written to chunks that lie on the host."""
    model, plan = tiny_text(), plan_for(schedule, 2, updates_early=False)
    plan = paged(plan, sizes_of(model, plan, stash=40_000), 0.0, is_summed=True)
    settings = PagingSettings(mover=StrictMover, memory=poisoned)
    setting = Setting(plan, clip_norm=0.5, paging=settings)
    walked(2, setting, [(1, 0, 5), (0, 1, 7)], model, lambda count: token_batches(BATCH * count, 1)[0])


def test_a_replica_that_dies_leaves_the_other_with_the_right_result() -> None:
    def kill(rank: RankId, step: Instruction) -> None:
        if rank == RankId(1, 0, 0) and step.batch == 2:
            raise Killed

    # Not clipped: ranks add up the norm in another order than one process, and its last bit would be seen.
    setting = replace(setting_of("2bw"), clip_norm=None)
    replicas = Replicas(regression(), setting, 2, data_for(6), 6, BATCH, on_instruction=kill)
    replicas.run()

    assert_as_one_process(replicas)
    assert replicas.hub.epochs == [(0, 1), (0,)]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_the_others_learn_once_how_long_a_replica_took_that_came_back(schedule: str) -> None:
    """All replicas with its first contribution, and each noticed its loss by itself."""

    def kill(rank: RankId, step: Instruction) -> None:
        if rank == RankId(1, 0, 0) and step.batch == 2:
            raise Killed

    replicas = Replicas(
        regression(),
        setting_of(schedule),
        2,
        data_for(16),
        16,
        BATCH,
        on_instruction=kill,
        revives=True,
        pace=lambda _rank, _batch: replicas.wait_until_present(),
    )
    replicas.run()

    for replica, life in ((0, 0), (1, 1)):
        ((batch, back, times),) = replicas.seen[RankId(replica, life, 0)].healed
        assert (batch, back) == (replicas.seen[RankId(1, 1, 0)].first, 1)
        assert min(times.transfer_s, times.catch_up_s) >= 0
    assert [*replicas.seen[RankId(0, 0, 0)].detect_s] == [1]
    assert [*replicas.seen[RankId(1, 1, 0)].detect_s] == [], "a replica that is done is not lost"


@pytest.mark.slow
def test_a_replica_that_is_too_slow_gets_the_committed_sum_and_goes_on_with_the_others() -> None:
    """Its contribution counts in no round, and its samples are dealt again."""
    slept: list[int] = []

    def sleep(rank: RankId, step: Instruction) -> None:
        if rank.replica == 2 and step.batch == 3 and not slept:
            slept.append(step.batch)
            time.sleep(1.0)

    replicas = Replicas(
        regression(),
        setting_of("1f1b", 1),
        3,
        data_for(12),
        12,
        BATCH,
        on_instruction=sleep,
        grace_s=0.3,
    )
    replicas.run()

    assert_as_one_process(replicas, tolerance=1e-11)
    assert replicas.hub.rounds[3].members == (0, 1)
    assert replicas.hub.epochs[0] == (0, 1, 2)
    assert all(replicas.seen[RankId(one, 0, 0)].is_done for one in range(3))


def test_a_replica_whose_weights_differ_in_one_bit_takes_those_of_the_others() -> None:
    """Of three the two that are alike are right, though the other one leads."""
    flipped: list[str] = []

    def flip(rank: RankId, step: Instruction) -> None:
        if rank == RankId(0, 0, 0) and step.batch == 3 and not flipped:
            name, weights = next(iter(replicas.pipelines[rank].parameters().items()))
            weights.detach().reshape(-1).view(torch.int64)[0].bitwise_xor_(1 << 40)
            flipped.append(name)

    replicas = Replicas(
        regression(),
        setting_of("1f1b", 1),
        3,
        data_for(24),
        24,
        BATCH,
        on_instruction=flip,
        revives=True,
        pace=lambda _rank, _batch: replicas.wait_until_present(),
        compare_every=4,
    )
    replicas.run()

    assert replicas.differed == [
        "replica 0 has other weights than replicas 1 and 2 after 4 batches, and takes theirs."
    ]
    assert replicas.hub.epochs[:3] == [(0, 1, 2), (1, 2), (0, 1, 2)]
    last = [seen.weights[23] for seen in replicas.seen.values() if seen.is_done]
    assert len(last) == 3
    for name, tensor in last[0].items():
        assert all(torch.equal(tensor, other[name]) for other in last), name
