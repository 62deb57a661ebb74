"""What other ways for the replicas to agree would give a plan: simulated, from links and the spread of times.

Each replica is one here, not its stages. Its batch takes as long as the forecast says, without the sum over
replicas where that is not hidden; it is randomly longer or shorter, as far as measurements of the profile
lie apart. The exchange takes as long as the links between replicas do with all stages on them. Steps for
one are those of the study (`agreement_penalties`).
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil, inf

from bireme.cluster.cluster import Cluster, Lane
from bireme.plan.forecast import Candidate
from bireme.plan.penalties import agreement_steps
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import forecast_of
from bireme.profile.profile import Profile
from bireme.schedule.program import Rule
from bireme.simulate.agreements import DilocoRounds, Everyone, GroupsAgreement
from bireme.simulate.links import hops
from bireme.simulate.together import Agreement, Exchange, SampleWork, Speed, Together, one_stage
from bireme.sync.coordinator.samples import GroupSettings

_LEAST_BATCHES, _ALL_BATCHES, BEGIN = 40, 1600, 0.25
"""Of a simulated run: the fewest, and those of all replicas together; and the share that does not count."""
_EXCHANGES = 8
"""Of a simulated run, or a multiple of it: then what does not count is whole rounds too."""
SHARE = 12
"""Samples of a replica's batch in the simulation; only ratios are taken from it."""
_QUARTERS = 1.349
"""Standard deviations that the middle half of a normal distribution is wide."""


@dataclass(frozen=True, slots=True)
class AgreementForecast:
    """A mode compared with `allreduce`: samples per second, steps for one, and the gain in samples' worth per
    second.
    """

    mode: str
    every: int
    samples_per_s: float
    steps: float
    is_at_least: bool
    gain: float


def agreements(
    best: Candidate, profile: Profile, cluster: Cluster, request: PlanRequest
) -> tuple[AgreementForecast, ...]:
    """Of a plan whose replicas may average weights, on devices that are known, `allreduce` first; of any
    other nothing.
    """
    plan = best.plan
    # Replicas that average share nothing; sums and weights are sent as they are from where they are.
    may_average = request.shard == "none" and request.sums.is_dense and plan.paging is None
    if plan.width < 2 or not plan.devices or not may_average:
        return ()
    gradients = _exchange(best, profile, cluster)
    known, state_share = best.forecast, 0.0
    if request.rounds is not None:
        summed = replace(request, rounds=None, sites=1)
        known, state_share = forecast_of(plan, profile, cluster, summed), request.rounds.state_share
    averages = replace(gradients, num_bytes=gradients.num_bytes * (1 + state_share))
    own_s = known.batch_s
    if plan.source.rule is Rule.SYNCHRONOUS:
        busy_s = max(stage.busy_s for stage in known.stages)
        own_s = max(own_s - gradients.seconds(plan.width), busy_s)
    deviation, has_warmup = profile.spread / _QUARTERS, known.delay_warmup > 0
    all_rate = _rate(Everyone(), plan.width, own_s, deviation, gradients)
    found = [AgreementForecast("allreduce", 1, known.samples_per_s, 1.0, is_at_least=False, gain=1.0)]
    for mode, every in _SHOWN:
        steps = agreement_steps(
            mode, every, profile.optimizer, plan.width, plan.source.rule, has_warmup=has_warmup
        )
        gain = _rate(_agreement(mode, every, own_s), plan.width, own_s, deviation, averages) / all_rate
        rate, cost = gain * known.samples_per_s, gain / steps.steps
        found.append(AgreementForecast(mode, every, rate, steps.steps, steps.is_at_least, cost))
    return tuple(found)


_SHOWN = (("groups", 1), ("groups", 10), ("diloco", 50))
"""The modes and numbers of batches that are compared."""


def _agreement(mode: str, every: int, own_s: float) -> Agreement:
    if mode == "groups":
        return GroupsAgreement(GroupSettings(every), 1)
    return DilocoRounds(every, own_s / 2)


def _exchange(best: Candidate, profile: Profile, cluster: Cluster) -> Exchange:
    """Of the rank with the most weights. All ranks exchange theirs at the same time, each in a ring, and a
    link that several of them cross is slower by as much.
    """
    source = best.plan.source
    of_stages = [
        sum(unit.parameter_bytes for unit in profile.units[stage.begin : stage.end])
        for stage in best.forecast.stages
    ]
    weights = [sum(of_stages[one] for one in source.stages_of(rank)) for rank in range(source.num_ranks)]
    rings = [sorted(cluster.number_of(name) for name in names) for names in best.plan.devices]
    crossing: Counter[Lane] = Counter()
    for num_bytes, ring in zip(weights, rings, strict=True):
        for hop in hops(ring):
            for lane in cluster.path(*hop):
                crossing[lane] += num_bytes
    slowest_s = max((num_bytes / lane.bytes_per_s for lane, num_bytes in crossing.items()), default=0.0)
    return Exchange(
        num_bytes=max(weights),
        bytes_per_s=max(weights) / slowest_s if slowest_s else inf,
        latency_s=max(cluster.latency(*hop) for ring in rings for hop in hops(ring)),
    )


def _rate(agreement: Agreement, width: int, own_s: float, deviation: float, exchange: Exchange) -> float:
    every = agreement.every if isinstance(agreement, DilocoRounds) else 1
    make = one_stage(agreement.average_lag)
    work = SampleWork((own_s / SHARE / 3,), (2 * own_s / SHARE / 3,))
    speeds = [Speed(deviation=deviation)] * width
    run = Together(make, work, speeds, agreement, exchange, batch_size=SHARE * width)
    num_rounds = _EXCHANGES * ceil(max(_ALL_BATCHES // width, _LEAST_BATCHES) / (_EXCHANGES * every))
    until_s = num_rounds * (every * own_s + exchange.seconds(width))
    return run.until(until_s, 4 * num_rounds * every + round(until_s / own_s)).samples_per_s(BEGIN * until_s)
