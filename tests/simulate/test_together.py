"""Several replicas on one clock, with the coordinator's rules as event handlers: nobody waits for ever."""

from collections.abc import Callable
from random import Random

import pytest

from benchmarks.replica_speeds.agreements import AsynchronousPairs, BoundedStaleness, QuorumRounds
from benchmarks.replica_speeds.mortal import Kill, MortalReplicas, SurvivingGroups, UnevenSpeed
from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.schedule.program import Program
from bireme.schedule.proofs.deadlock import run_to_end
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.agreements import DilocoRounds, Everyone
from bireme.simulate.costs import Costs
from bireme.simulate.simulator import simulate
from bireme.simulate.together import Agreement, Exchange, Ran, SampleWork, Speed, Together
from bireme.sync.coordinator.samples import GroupSettings
from tests.support.extent import draws
from tests.support.granted_meetings import granted

BATCH_S, SHARE, STAGES = 0.1, 8, 2
MODES: dict[str, Callable[[], Agreement]] = {
    "allreduce": Everyone,
    "quorum": lambda: QuorumRounds(grace_s=1.0, noticed_s=1.0, heal_s=0.5),
    "groups": lambda: SurvivingGroups(GroupSettings(connect_every=4), STAGES, noticed_s=1.0, heal_s=0.5),
    "diloco": lambda: DilocoRounds(every=5, grace_s=0.02),
    "AD-PSGD": AsynchronousPairs,
    "HetPipe-like": lambda: BoundedStaleness(most=4),
}
SURVIVING = ("quorum", "groups")
EXCHANGE = Exchange(num_bytes=1e6, bytes_per_s=1e9, latency_s=1e-4, control_s=1e-3)


def program_of(schedule: str, lag: int | None, num_batches: int, first_batch: int = 0) -> Program:
    return generate(
        schedule,
        num_stages=STAGES,
        num_microbatches=4,
        num_batches=num_batches,
        first_batch=first_batch,
        timing=UpdateTiming(early=True, average_lag=lag),
    )


def together(
    agreement: Agreement,
    speeds: list[Speed],
    *,
    schedule: str = "1f1b",
    exchange: Exchange = EXCHANGE,
    kills: tuple[Kill, ...] = (),
    seed: int = 0,
) -> Together:
    part_s = BATCH_S / SHARE / 3
    return MortalReplicas(
        lambda num_batches, first: program_of(schedule, agreement.average_lag, num_batches, first),
        SampleWork((part_s,) * STAGES, (2 * part_s,) * STAGES),
        speeds,
        agreement,
        exchange,
        batch_size=SHARE * len(speeds),
        kills=kills,
        seed=seed,
    )


def ran(agreement: Agreement, speeds: list[Speed], until_s: float = 20.0, schedule: str = "1f1b") -> Ran:
    return together(agreement, speeds, schedule=schedule).until(until_s, 1000)


def slower(times: float, num: int = 4) -> list[Speed]:
    return [UnevenSpeed(slowness=((0.0, times),)), *[Speed()] * (num - 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_a_replica_by_itself_takes_as_long_as_the_simulator_says(schedule: str) -> None:
    costs = Costs.per_stage(STAGES, forward_s=BATCH_S / 12, backward_s=BATCH_S / 6)
    wanted_s = simulate(program_of(schedule, None, 8), costs, agree=True).steady_batch_s
    assert SHARE / ran(Agreement(), [Speed()], schedule=schedule).samples_per_s(2.0) == pytest.approx(
        wanted_s, rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_equal_replicas_lose_nothing_but_their_messages(mode: str) -> None:
    ideal = ran(Agreement(), [Speed()] * 4).samples_per_s(2.0)
    assert ran(MODES[mode](), [Speed()] * 4).samples_per_s(2.0) >= 0.96 * ideal


@pytest.mark.slow
def test_one_slow_replica_holds_up_all_others_only_where_all_agree() -> None:
    """In `quorum` the shares follow, after the 20 batches that the policy looks at."""
    ideal = ran(Agreement(), slower(4.0)).samples_per_s(12.0)
    reached = {mode: ran(make(), slower(4.0)).samples_per_s(12.0) / ideal for mode, make in MODES.items()}
    assert reached["allreduce"] == pytest.approx(4 * 0.25 / 3.25, rel=0.05)
    assert reached["HetPipe-like"] == pytest.approx(reached["allreduce"], rel=0.1)
    assert min(reached[mode] for mode in ("quorum", "groups", "diloco", "AD-PSGD")) >= 0.9


def test_who_is_too_slow_for_every_round_gets_a_share_that_it_can_train() -> None:
    """It would be left out for ever: its speed is only known from rounds."""
    found = ran(MODES["quorum"](), slower(30.0), 60.0)
    assert len([one for one in found.trained if 0 in one.replicas]) > 10


@pytest.mark.parametrize("schedule", ["1f1b", "2bw-fresh"])
def test_whatever_groups_were_granted_no_program_waits_in_a_circle(schedule: str) -> None:
    """And each rank is in just one group after each of its batches."""
    speeds: list[Speed] = [UnevenSpeed(held_s=0.3, held_chance=0.1), *slower(3.0, 3)]
    found = ran(MODES["groups"](), speeds, 8.0, schedule)
    meetings = granted(4, [(one.stage, one.members) for one in found.averages])
    places = [(one.stage, *place) for one in found.averages for place in one.members.items()]
    assert len(set(places)) == len(places) > 200
    assert {len(one.members) for one in found.averages} >= {1, 4}
    num_batches = max(batch for _, _, batch in places) + 1
    program = program_of(schedule, 0, num_batches)
    assert run_to_end(program, synchronous_sends=True, meetings=meetings) is None


def test_the_same_seed_gives_every_mode_the_same_chance() -> None:
    speeds: list[Speed] = [UnevenSpeed(held_s=0.2, held_chance=0.2)] * 4
    one, again = (ran(MODES["groups"](), speeds, 5.0) for _ in range(2))
    assert one.trained == again.trained
    assert one.averages == again.averages


@pytest.mark.parametrize("mode", SURVIVING)
def test_the_others_go_on_when_replicas_die_at_any_moment(mode: str) -> None:
    for seed in range(draws(60, 6)):
        random = Random(seed)
        kills = tuple(Kill(random.randrange(3), random.uniform(0.05, 6.0), 1.5) for _ in range(3))
        agreement = MODES[mode]()
        speeds: list[Speed] = [UnevenSpeed(held_s=0.2, held_chance=0.1)] * 3
        run = together(agreement, speeds, schedule="1f1b", kills=kills, seed=seed)
        found = run.until(14.0, 1000)
        last = max(one.at_s for one in found.trained)
        assert last > 12.0, (seed, kills)
        late = [set(one.replicas) for one in found.trained if one.at_s > 10.5]
        assert set.union(*late) == {0, 1, 2}, "all of them are back"


def test_every_sample_is_committed_once_or_still_to_be_dealt_or_trained() -> None:
    agreement = QuorumRounds(grace_s=1.0, noticed_s=1.0, heal_s=0.5)
    kills = (Kill(1, 2.03, 1.5), Kill(2, 5.55, 1.5))
    found = together(agreement, slower(6.0), kills=kills).until(12.0, 1000)
    waiting = sum(one.count for one in agreement.pool.open)
    assert agreement.redone > 0
    assert sum(one.samples for one in found.trained) + waiting == agreement.pool.fresh
    batches = [one.batch for one in found.trained]
    assert batches == sorted(set(batches))


def test_replicas_that_cannot_share_a_batch_equally_are_refused() -> None:
    with pytest.raises(BiremeError, match="10 samples has no equal shares for 4 replicas"):
        Together(
            lambda num, first: program_of("1f1b", None, num, first),
            SampleWork((1.0,) * STAGES, (1.0,) * STAGES),
            [Speed()] * 4,
            Agreement(),
            EXCHANGE,
            batch_size=10,
        )
    with pytest.raises(BiremeError, match="greater than 0"):
        UnevenSpeed(slowness=((0.0, 0.0),))
    with pytest.raises(BiremeError, match="between 0 and 1"):
        UnevenSpeed(held_chance=2.0)
