"""Replicas that average weights: to the last bit what plain loops make of the same averages."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bireme.model.part import LoraPart, TrainedPart
from bireme.plan.plan import Plan
from bireme.runtime.exchange.averages import DilocoSettings
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.sync.coordinator.groups import Arrived, Paces
from bireme.sync.coordinator.messages import RankId
from tests.support.averaging_oracle import expected_of_groups, expected_of_outer_steps
from tests.support.averaging_threads import AveragingReplicas
from tests.support.engine_parity import Setting, oracle
from tests.support.oracles import Update
from tests.support.paged import paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.regression import WIDTH, regression, regression_plan, tied_regression
from tests.support.small_models import Batch, gpt, real_batches, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.tiny_text import tiny_text

BATCH = 16
MARKS = (4, 7)


def data_for(num_batches: int) -> Batch:
    return real_batches(BATCH * num_batches, 1, WIDTH)[0]


def setting_of(schedule: str, *, per_rank: int | None = None, recompute: bool = False) -> Setting:
    """On two ranks, without clipping, because ranks add up a norm in another order than one process."""
    num_stages = 4 if schedule in ("interleaved", "zbv") else 2 * (per_rank or 1)
    recomputed = tuple(range(num_stages)) if recompute else ()
    return Setting(
        regression_plan(
            schedule, num_stages, updates_early=False, stages_per_rank=per_rank, recompute=recomputed
        )
    )


SEVERAL_STAGES = [("interleaved", None), ("zbv", None), ("1f1b", 2), ("2bw", 2), ("2bw-fresh", 2)]
"""Schedules with two stages on each rank."""


def assert_as_expected(
    run: AveragingReplicas, expected: Sequence[Sequence[Update]], *, tolerance: float = 0.0
) -> None:
    """Losses of all batches, and the weights after each window, which are the same in all replicas and on all
    ranks that hold them; so is the optimizers' state, where that is averaged.
    """

    def is_close(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance)

    held: dict[tuple[int, str], Tensor] = {}
    for rank, told in run.told.items():
        updates = expected[rank.replica]
        assert [told.losses[one.batch] for one in updates] == pytest.approx(
            [one.loss for one in updates], rel=1e-12
        )
        first = run.told[RankId(0, 0, rank.stage)]
        for window, (weights, end) in enumerate(zip(told.weights, told.ends, strict=True)):
            for name, tensor in weights.items():
                what = f"{name} of {rank} after batch {end}"
                learned = updates[end - 1].weights
                assert is_close(tensor, learned.get(name, run.model.weights[name])), what
                assert torch.equal(tensor, held.setdefault((window, name), tensor)), what
            for name, state in told.states[window].items() if run.averages_optimizer else ():
                for key, value in state.items():
                    what = f"{key} of {name} of {rank} after batch {end}"
                    assert is_close(value, updates[end - 1].optimizer_state[name][key]), what
                    assert torch.equal(value, first.states[window][name][key]), what
    places = [one for line in run.hub.rounds for own in line.samples for one in own]
    counted = [place for one in places for place in range(one.begin, one.end)]
    assert sorted(counted) == list(range(run.marks[-1] * BATCH))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is of all replicas that do not drain. Nobody's window ends early, because it is not known
    how long anybody takes for a batch.
    """
    monkeypatch.setattr(Paces, "with_arrival", lambda own, *_: own)
    monkeypatch.setattr(
        Paces,
        "arrived",
        lambda _, stage, replica, batch, _wait_s: Arrived(stage, replica, batch, 60.0, 60.0),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("schedule", "averages_optimizer"),
    [("1f1b", False), ("2bw", False), ("2bw-fresh", False), ("2bw-fresh", True)],
)
def test_replicas_in_groups_are_plain_loops_with_the_same_averages_to_the_last_bit(
    schedule: str, averages_optimizer: bool
) -> None:
    run = AveragingReplicas(
        regression(),
        setting_of(schedule),
        2,
        data_for(5),
        (5,),
        BATCH,
        averages_optimizer=averages_optimizer,
        in_step=True,
    )
    run.run()

    assert {len(group) for told in run.told.values() for group in told.groups.values()} == {2}
    assert_as_expected(run, expected_of_groups(run))
    for told in run.told.values():
        # Two members send each other all that they average: with AdamW two moments along with each weight.
        num_bytes = sum(tensor.nbytes for tensor in told.weights[-1].values())
        times = (len(told.groups) + 1) * (3 if averages_optimizer else 1)
        assert told.sent_bytes == times * num_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.few(6)
@pytest.mark.parametrize(("schedule", "per_rank"), SEVERAL_STAGES)
def test_groups_average_all_stages_of_a_rank_to_the_last_bit(schedule: str, per_rank: int | None) -> None:
    setting = setting_of(schedule, per_rank=per_rank, recompute=schedule == "zbv")
    run = AveragingReplicas(
        regression(), setting, 2, data_for(4), (4,), BATCH, averages_optimizer=True, in_step=True
    )
    run.run()

    assert {len(group) for told in run.told.values() for group in told.groups.values()} == {2}
    assert_as_expected(run, expected_of_groups(run))


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(("schedule", "per_rank"), SEVERAL_STAGES)
def test_outer_steps_are_of_all_stages_of_a_rank_to_the_last_bit(schedule: str, per_rank: int | None) -> None:
    settings = DilocoSettings(2)
    setting = setting_of(schedule, per_rank=per_rank, recompute=schedule == "zbv")
    run = AveragingReplicas(
        regression(), setting, 2, data_for(MARKS[-1]), MARKS, BATCH, diloco=settings, lag=1, in_step=True
    )
    run.run()

    assert_as_expected(run, expected_of_outer_steps(run, settings))


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.few(4)
@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", None), ("2bw", None), ("zbv", None), ("2bw", 2)])
def test_groups_keep_tied_weights_the_same_on_all_ranks(schedule: str, per_rank: int | None) -> None:
    run = AveragingReplicas(
        tied_regression(),
        setting_of(schedule, per_rank=per_rank),
        2,
        data_for(5),
        (3, 5),
        BATCH,
        averages_optimizer=True,
        in_step=True,
        of_replicas=True,
    )
    run.run()

    for replica in range(2):
        of_ranks = [run.told[RankId(replica, 0, rank)].groups for rank in range(2)]
        assert of_ranks[0] == of_ranks[1]
    assert_as_expected(run, expected_of_groups(run), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", None), ("2bw", None), ("zbv", None), ("2bw", 2)])
def test_outer_steps_keep_tied_weights_the_same_on_all_ranks(schedule: str, per_rank: int | None) -> None:
    settings = DilocoSettings(2)
    run = AveragingReplicas(
        tied_regression(),
        setting_of(schedule, per_rank=per_rank),
        2,
        data_for(MARKS[-1]),
        MARKS,
        BATCH,
        diloco=settings,
        lag=1,
        averages_optimizer=True,
        in_step=True,
    )
    run.run()

    assert_as_expected(run, expected_of_outer_steps(run, settings), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("diloco", [None, DilocoSettings(2)])
def test_of_a_model_with_an_adapter_only_the_adapter_is_averaged_and_sent(
    diloco: DilocoSettings | None,
) -> None:
    pytest.importorskip("peft")
    part = TrainedPart(lora=LoraPart(2, dropout=0.0, targets=("query_key_value", "up")))
    model = gpt("layers=3", part=part)
    setting = Setting(Plan((4,), 4, "2bw", updates_early=False))
    data = token_batches(BATCH * 4, 1)[0]
    lag = 0 if diloco is None else 1
    run = AveragingReplicas(model, setting, 2, data, (4,), BATCH, diloco=diloco, lag=lag, in_step=True)
    run.run()

    expected = expected_of_groups(run) if diloco is None else expected_of_outer_steps(run, diloco)
    assert_as_expected(run, expected, tolerance=1e-12)
    learning = {state.name for state in model.graph.parameters if state.trainable}
    for told in run.told.values():
        num_bytes = sum(tensor.nbytes for name, tensor in told.weights[-1].items() if name in learning)
        num_rounds = len(told.groups) + 1 if diloco is None else 3
        assert told.sent_bytes == num_rounds * num_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("diloco", [None, DilocoSettings(2)])
def test_replicas_that_step_with_muon_are_plain_loops_with_the_same_averages(
    diloco: DilocoSettings | None,
) -> None:
    setting = replace(setting_of("zbv", recompute=True), optimizer="muon")
    run = AveragingReplicas(
        tied_regression(),
        setting,
        2,
        data_for(4),
        (4,),
        BATCH,
        diloco=diloco,
        lag=0 if diloco is None else 1,
        averages_optimizer=True,
        in_step=True,
    )
    run.run()

    expected = expected_of_groups(run) if diloco is None else expected_of_outer_steps(run, diloco)
    assert_as_expected(run, expected, tolerance=1e-12)


@pytest.mark.slow
def test_outer_steps_of_every_batch_with_rate_1_and_no_momentum_are_means_of_the_weights() -> None:
    """With SGD that is a step with the gradients of all samples."""
    setting = replace(setting_of("1f1b"), optimizer="sgd")
    settings = DilocoSettings(1, rate=1.0, momentum=0.0)
    run = AveragingReplicas(regression(), setting, 2, data_for(4), (4,), BATCH, diloco=settings, in_step=True)
    run.run()

    told = [run.told[RankId(replica, 0, 0)] for replica in range(2)]
    together = [run.rows([one for own in told for one in own.dealt[batch]]) for batch in range(4)]
    assert isinstance(setting.plan, Plan)
    expected = oracle(run.model, replace(setting, plan=replace(setting.plan, width=2)), together)[-1]
    for rank, own in run.told.items():
        for name, tensor in own.weights[-1].items():
            torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-11, atol=1e-12, msg=str(rank))


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("is_tied", [False, True])
def test_with_sgd_the_average_of_all_in_every_batch_is_a_step_with_the_summed_gradients(
    is_tied: bool,
) -> None:
    model = tied_regression() if is_tied else regression()
    setting = replace(setting_of("1f1b"), optimizer="sgd")
    run = AveragingReplicas(model, setting, 2, data_for(4), (4,), BATCH, in_step=True, of_replicas=is_tied)
    run.run()

    told = [run.told[RankId(replica, 0, 0)] for replica in range(2)]
    together = [run.rows([one for own in told for one in own.dealt[batch]]) for batch in range(4)]
    assert isinstance(setting.plan, Plan)
    expected = oracle(run.model, replace(setting, plan=replace(setting.plan, width=2)), together)[-1]
    for rank, own in run.told.items():
        for name, tensor in own.weights[-1].items():
            torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-11, atol=1e-12, msg=str(rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "averages_optimizer"),
    [("1f1b", False), ("2bw", False), ("2bw-fresh", False), ("2bw", True)],
)
def test_outer_steps_are_those_of_plain_loops_to_the_last_bit(
    schedule: str, averages_optimizer: bool
) -> None:
    settings = DilocoSettings(2)
    run = AveragingReplicas(
        regression(),
        setting_of(schedule),
        2,
        data_for(MARKS[-1]),
        MARKS,
        BATCH,
        diloco=settings,
        lag=1,
        averages_optimizer=averages_optimizer,
        in_step=True,
    )
    run.run()

    assert_as_expected(run, expected_of_outer_steps(run, settings))


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("diloco", [None, DilocoSettings(2)])
def test_averages_stay_the_same_to_the_last_bit_whenever_another_coordinator_takes_up(
    diloco: DilocoSettings | None,
) -> None:
    def take_up(rank: RankId, _batch: int) -> None:
        if rank == RankId(0, 0, 0):
            run.hub.succeed()

    run = AveragingReplicas(
        regression(),
        setting_of("1f1b"),
        2,
        data_for(MARKS[-1]),
        MARKS,
        BATCH,
        diloco=diloco,
        lag=0 if diloco is None else 1,
        in_step=True,
        pace=take_up,
    )
    run.run()

    assert run.hub.num_successions
    assert_as_expected(
        run, expected_of_groups(run) if diloco is None else expected_of_outer_steps(run, diloco)
    )


@pytest.mark.slow
@pytest.mark.parametrize("diloco", [None, DilocoSettings(3, fragments=2)])
def test_a_slow_replica_trains_fewer_batches_and_every_sample_counts_once(
    diloco: DilocoSettings | None,
) -> None:
    run = AveragingReplicas(
        regression(),
        setting_of("2bw"),
        3,
        data_for(12),
        (9,),
        BATCH + 2,
        diloco=diloco,
        lag=0 if diloco is None else 1,
        connect_every=8,
        grace_s=0.01,
        pace=lambda rank, _batch: time.sleep(0.2 * (rank.replica == 2)),
    )
    run.run()

    ends = [run.told[RankId(replica, 0, 0)].ends[0] for replica in range(3)]
    assert ends[2] < min(ends[:2])
    places = [one for line in run.hub.rounds for own in line.samples for one in own]
    assert sorted(place for one in places for place in range(one.begin, one.end)) == list(
        range(9 * (BATCH + 2))
    )
    for stage in range(2):
        found = [run.told[RankId(replica, 0, stage)].weights[0] for replica in range(3)]
        assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("schedule", "diloco", "lag", "grace_s"),
    [
        ("2bw", None, 0, 3.0),
        ("1f1b", DilocoSettings(1), 1, 3.0),
        ("2bw", DilocoSettings(2, fragments=2), 2, 3.0),
        ("2bw-fresh", DilocoSettings(1), 0, 3.0),
        ("2bw", DilocoSettings(2, fragments=2), 1, 0.01),
    ],
)
def test_tied_weights_stay_the_same_whoever_is_slow(
    schedule: str, diloco: DilocoSettings | None, lag: int, grace_s: float
) -> None:
    run = AveragingReplicas(
        tied_regression(),
        setting_of(schedule),
        3,
        data_for(14),
        (6, 12),
        BATCH,
        diloco=diloco,
        lag=lag,
        connect_every=3,
        grace_s=grace_s,
        averages_optimizer=True,
        of_replicas=diloco is None,
        pace=lambda rank, _batch: time.sleep(0.1 * (rank.replica == 2)),
    )
    run.run()

    held: dict[tuple[int, str], Tensor] = {}
    for rank, told in run.told.items():
        for window, weights in enumerate(told.weights):
            for name, tensor in weights.items():
                assert torch.equal(tensor, held.setdefault((window, name), tensor)), (rank, window, name)


def test_rounds_of_fragments_follow_each_other() -> None:
    settings = DilocoSettings(4, fragments=2)
    due = {
        f: [p for p in range(1, 13) if settings.num_due(f, p) > settings.num_due(f, p - 1)] for f in (0, 1)
    }
    assert due == {0: [4, 8, 12], 1: [2, 6, 10]}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("diloco", [None, DilocoSettings(2)])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw-fresh"])
def test_what_is_averaged_is_read_from_the_tiers_that_have_it_and_written_there(
    schedule: str, diloco: DilocoSettings | None
) -> None:
    """What optimizers remember too. A rank writes the averages of all its stages when the last is to have
    them, and the others may have left the device by then.
    """
    model, plan = tiny_text(), Plan((2, 4, 6), 2, schedule, stages_per_rank=2, updates_early=False)
    plan = paged(plan, sizes_of(model, plan, stash=40_000), 0.0)
    setting = Setting(plan, paging=PagingSettings(mover=StrictMover, memory=poisoned))
    run = AveragingReplicas(
        model,
        setting,
        2,
        token_batches(BATCH * MARKS[-1], 1)[0],
        MARKS,
        BATCH,
        diloco=diloco,
        lag=0 if diloco is None else 1,
        averages_optimizer=True,
        in_step=True,
    )
    run.run()

    expected = expected_of_groups(run) if diloco is None else expected_of_outer_steps(run, diloco)
    assert_as_expected(run, expected, tolerance=1e-11)
