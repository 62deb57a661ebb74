"""Sites of replicas that share an optimizer or weights, and sum gradients with each other by quorum: the same
as one process, and a site that dies comes back as a whole.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.codec.sum_description import SiteRounds
from bireme.plan.plan import Plan
from bireme.plan.plan_request import PlanRequest
from bireme.runtime.exchange.rounds import Buffers, RoundSum
from bireme.schedule.instruction import Instruction
from bireme.sync.coordinator.messages import RankId
from tests.runtime.test_coded_sums import WIDTH as LAYERS_WIDTH
from tests.runtime.test_coded_sums import layers
from tests.runtime.test_quorum import BATCH, Walk, assert_close, data_for
from tests.support.composition import words
from tests.support.engine_parity import Setting, oracle
from tests.support.mortal_replicas import Replicas
from tests.support.patience import patience_s
from tests.support.regression import WIDTH, regression, regression_plan, tied_regression
from tests.support.small_models import Batch, Model, real_batches, token_batches

pytestmark = pytest.mark.slow


def setting_of(
    schedule: str, shard: str, num_stages: int = 2, *, width: int = 2, optimizer: str = "adamw", **more: Any
) -> Setting:
    """Sites of two replicas, or of so many."""
    plan = regression_plan(schedule, num_stages, width=width, updates_early=False, **more)
    return Setting(plan, optimizer, clip_norm=0.5, shard=shard)


def run_of(setting: Setting, model: Model | None = None, num_batches: int = 4) -> Replicas:
    found = Replicas(model or regression(), setting, 2, data_for(num_batches), num_batches, BATCH)
    found.run()
    return found


def assert_same_bits(run: Replicas) -> None:
    """All sites have the same bits, and each rank those of its twins of what its optimizer remembers."""
    first: dict[tuple[int, str], Tensor] = {}
    done = {rank: seen for rank, seen in run.seen.items() if seen.is_done}
    assert {rank.replica for rank in done} == {*range(run.num_replicas)}
    for rank, seen in done.items():
        for batch, weights in seen.weights.items():
            what = f"{rank} after batch {batch}"
            for name, tensor in weights.items():
                assert bool(tensor.isfinite().all()), f"{name} of {what}"
                assert torch.equal(tensor, first.setdefault((batch, name), tensor)), f"{name} of {what}"
            for name, state in seen.states[batch].items():
                for key, value in state.items():
                    twin = first.setdefault((batch, f"{rank.stage} {name} {key}"), value)
                    assert torch.equal(value, twin), f"{key} of {name} of {what}"


def assert_as_one_process(run: Replicas) -> None:
    """Every rank has what one process makes of the samples in the ledger, and the bits of its twins."""
    assert_same_bits(run)
    assert isinstance(run.setting.plan, Plan)
    width = run.num_replicas * run.setting.plan.width
    setting = replace(run.setting, plan=replace(run.setting.plan, width=width), shard="none")
    norms = dict(norm for seen in run.seen.values() for norm in seen.norms.items())
    updates = oracle(run.model, setting, run.committed(), sizes=run.sizes(), norms=norms)
    assert len(updates) == run.num_batches
    for rank, seen in run.seen.items():
        for batch, weights in seen.weights.items():
            update, what = updates[batch], f"{rank} after batch {batch}"
            assert seen.losses[batch] == pytest.approx(update.loss, rel=1e-11), what
            assert seen.norms[batch] == pytest.approx(update.norm, rel=1e-11), what
            for name, tensor in weights.items():
                assert_close(tensor, update.weights[name], 1e-11, f"{name} of {what}")


@pytest.mark.few(8)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_sites_of_two_replicas_are_one_process(schedule: str, shard: str, num_stages: int) -> None:
    run = run_of(setting_of(schedule, shard, num_stages))

    assert_as_one_process(run)
    assert [line.members for line in run.hub.rounds] == [(0, 1)] * 4


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_sites_of_one_replica_share_nothing_and_are_one_process(shard: str) -> None:
    assert_as_one_process(run_of(setting_of("2bw", shard, width=1)))


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_ranks_of_a_site_keep_sums_of_the_bytes_that_plans_count(
    shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans counted the sums of all gradients of a stage for each rank."""
    sizes, take = dict[Buffers, int](), Buffers.take

    def noted(buffers: Buffers, like: Sequence[Tensor]) -> RoundSum:
        result = take(buffers, like)
        sizes[buffers] = result.num_bytes
        return result

    monkeypatch.setattr(Buffers, "take", noted)
    run = run_of(setting_of("1f1b", shard))
    whole = {name: one.nbytes for seen in run.seen.values() for name, one in seen.weights[3].items()}
    request = PlanRequest(BATCH, sites=2, shard=shard, rounds=SiteRounds(in_parts=True, kept_share=1.0))
    assert len(sizes) == len(run.seen)
    # Two stages have all of the gradients.
    planned = request.kept_host_share(4) * sum(whole.values()) / 2
    assert sum(sizes.values()) / len(sizes) == pytest.approx(planned, rel=0.01)


@pytest.mark.few(4)
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
@pytest.mark.parametrize("per_rank", [None, 2])
def test_tied_weights_are_summed_within_sites_and_between_them(shard: str, per_rank: int | None) -> None:
    more: dict[str, Any] = {} if per_rank is None else {"stages_per_rank": per_rank}
    num_stages = 2 if per_rank is None else 4
    assert_as_one_process(run_of(setting_of("2bw", shard, num_stages, **more), tied_regression()))


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_muon_steps_whole_matrices_within_sites(shard: str) -> None:
    assert_as_one_process(run_of(setting_of("1f1b", shard, optimizer="muon")))


PER_KILL = 20
POINTS = ((1, 3, 2), (0, 0, 5), (1, 1, 9))
"""A site, a rank of it, and how many instructions of a batch it does before it dies."""


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_site_of_which_a_rank_dies_comes_back_with_the_bits_of_the_other(schedule: str, shard: str) -> None:
    """Killed at a forward, in the middle of a batch and at its end, once on each of its ranks."""
    assert_as_one_process(walked(setting_of(schedule, shard), POINTS))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "shard"), [("2bw", "optimizer"), ("2bw-fresh", "optimizer"), ("1f1b", "weights")]
)
def test_so_does_one_with_master_weights_that_no_rank_has_whole(schedule: str, shard: str) -> None:
    model = words(tied=False, adapted=False, dtype="bfloat16")
    plan = Plan((len(model.units) // 2,), 4, schedule, width=2, updates_early=False)
    setting = Setting(plan, bank_dtype=torch.bfloat16, shard=shard)
    assert_same_bits(walked(setting, POINTS[:2], model, token_batches))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("codec", "shard", "optimizer"),
    [
        ("int2", "optimizer", "adamw"),
        ("threshold:0.05:3", "weights", "adamw"),
        ("lowrank:2:1", "optimizer", "muon"),
    ],
)
def test_so_does_one_whose_sums_go_through_a_codec(codec: str, shard: str, optimizer: str) -> None:
    """Residuals of the pieces that a rank owns come from its twin."""
    plan = Plan((1,), 4, "2bw", width=2, updates_early=False)
    setting = Setting(plan, optimizer, sum_codec=codec, shard=shard)
    run = walked(setting, POINTS[:2], layers(), partial(real_batches, width=LAYERS_WIDTH))
    assert_same_bits(run)


def walked(
    setting: Setting,
    points: Sequence[tuple[int, int, int]],
    model: Model | None = None,
    batches: Callable[[int, int], list[Batch]] | None = None,
) -> Replicas:
    """A run in which a rank dies at each of these points, once all sites are there again."""
    walk, num_batches = Walk(points), PER_KILL * (len(points) + 1)
    run = Replicas(
        model or regression(),
        setting,
        2,
        data_for(num_batches) if batches is None else batches(BATCH * num_batches, 1)[0],
        num_batches,
        BATCH,
        on_instruction=walk.on_instruction,
        revives=True,
        pace=walk.pace,
    )
    walk.run(run)

    assert walk.num_killed == len(points)
    assert any(rank.life for rank, seen in run.seen.items() if seen.is_done)
    return run


def test_sums_within_a_slow_site_stay_apart_where_rounds_go_on_without_it() -> None:
    """One rank of it is late, so that some of its ranks know before others that a batch counts already. Only
    then does the clock go past the time that the others wait, so no other site is ever left out.
    """
    late: set[int] = set()

    def on_instruction(rank: RankId, step: Instruction) -> None:
        if rank == RankId(2, 0, 3) and step.batch in (2, 5) and step.batch not in late:
            late.add(step.batch)
            end_s = time.monotonic() + patience_s()
            while len(run.hub.rounds) <= step.batch and time.monotonic() < end_s:
                run.hub.ahead_s += 5.0
                time.sleep(0.01)

    num_batches, batch_size = 9, 3 * 8
    run = Replicas(
        regression(),
        setting_of("1f1b", "optimizer"),
        3,
        real_batches(batch_size * num_batches * 2, 1, WIDTH)[0],
        num_batches,
        batch_size,
        on_instruction=on_instruction,
        lease_s=1e6,
    )
    run.run()

    members = [line.members for line in run.hub.rounds]
    assert {(0, 1), (0, 1, 2)} == {*members}, members
    assert_as_one_process(run)
