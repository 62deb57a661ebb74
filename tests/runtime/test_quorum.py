"""Replicas that agree by quorum: the same as one process on the committed samples, whoever dies when."""

import pytest
import torch

from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.messages import Life, RankId
from tests.support.engine_parity import Setting, oracle
from tests.support.mortal_replicas import Killed, Replicas
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import Batch, real_batches

BATCH, MICRO = 16, 4


def data_for(num_batches: int) -> Batch:
    return real_batches(BATCH * num_batches, 1, WIDTH)[0]


def setting_of(schedule: str, num_stages: int = 2) -> Setting:
    plan = regression_plan(schedule, num_stages, updates_early=False)
    return Setting(plan, clip_norm=0.5)


def assert_as_one_process(replicas: Replicas, *, tolerance: float = 0.0) -> None:
    """Every rank that lived to the end has what one process makes of the ledger's samples."""
    updates = oracle(
        replicas.model, replicas.setting, replicas.committed(), sizes=replicas.sizes()
    )
    assert len(updates) == replicas.num_batches
    done = {rank: seen for rank, seen in replicas.seen.items() if seen.is_done}
    assert done
    for rank, seen in done.items():
        for batch, weights in seen.weights.items():
            update = updates[batch]
            assert seen.losses[batch] == pytest.approx(update.loss, rel=max(tolerance, 1e-12)), (rank, batch)
            assert seen.norms[batch] == pytest.approx(update.norm, rel=max(tolerance, 1e-12)), (rank, batch)
            for name, tensor in weights.items():
                torch.testing.assert_close(
                    tensor, update.weights[name], rtol=tolerance, atol=tolerance, msg=f"{rank} {batch} {name}"
                )
            for name, state in seen.states[batch].items():
                for key, value in state.items():
                    wanted = update.optimizer_state[name][key].to(value.dtype)
                    torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_two_replicas_are_one_process_to_the_last_bit(schedule: str) -> None:
    replicas = Replicas(regression(), setting_of(schedule), 2, data_for(5), 5, BATCH)
    replicas.run()

    assert_as_one_process(replicas)
    assert replicas.hub.epochs == [(0, 1)]
    assert [line.members for line in replicas.hub.rounds] == [(0, 1)] * 5


def test_a_replica_that_dies_leaves_the_other_with_the_right_result() -> None:
    def kill(rank: RankId, step: Instruction) -> None:
        if rank == RankId(1, 0, 0) and step.batch == 2:
            raise Killed

    replicas = Replicas(regression(), setting_of("2bw"), 2, data_for(6), 6, BATCH, on_instruction=kill)
    replicas.run()

    assert_as_one_process(replicas)
    assert replicas.hub.epochs == [(0, 1), (0,)]


def test_a_replica_that_comes_back_is_bit_equal_to_its_peers() -> None:
    num = 24

    def kill(rank: RankId, step: Instruction) -> None:
        if rank == RankId(1, 0, 1) and step.batch == 3:
            raise Killed

    replicas = Replicas(
        regression(), setting_of("2bw"), 2, data_for(num), num, BATCH, on_instruction=kill, revives=True
    )
    replicas.run()

    assert_as_one_process(replicas)
    back = replicas.seen[RankId(1, 1, 0)]
    assert 0 < back.first < num
    assert replicas.hub.epochs == [(0, 1), (0,), (0, 1)]
    assert Life(1, 1) is not None
