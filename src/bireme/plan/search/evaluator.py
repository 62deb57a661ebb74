"""The plan evaluator: predicts seconds and bytes of a plan on its devices with the simulator.

Each replica is simulated on its own devices, on the cluster's links, with the gradient rings it takes part
in. Replicas meet on links: each message counts with those of the other replicas, which are taken to be under
way at the same time. For equal replicas that is exact; for others it is our approximation. A batch is that
of the slowest replica, and never shorter than what the busiest device or lane needs for its bytes alone.

Parameters that stages on several ranks share are summed over all of these, in a ring of their own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from operator import itemgetter

from bireme.cluster.device import Speeds
from bireme.compiled import without_collector
from bireme.plan.forecast import Forecast, TierForecast, total_watts
from bireme.plan.plan import Paging
from bireme.plan.search.contention import ReplicaNetworks, busiest_lane, cores_needed, processors_of, rings_s
from bireme.plan.search.draft import Draft, LowerBound
from bireme.plan.search.draft_paging import (
    TiedGradients,
    busiest_wire,
    exchanged_bytes,
    paging_of,
    tied_rings,
    tier_forecasts,
    tier_links_of,
    tiers_waited_for,
)
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import PATH_BOUND
from bireme.plan.search.works import DraftSums, ReplicaWorks, assumptions, flows, least_path_s
from bireme.schedule.accesses import Sizes
from bireme.schedule.program import Program, Rule
from bireme.schedule.residency import Residency, resident
from bireme.simulate.copies import REPLICAS, TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.links import cluster_network
from bireme.simulate.network import Network, Processors
from bireme.simulate.simulator import Until, simulate
from bireme.timeline.timeline import Timeline, settled_batch_s

MOST_INSTRUCTIONS = 20_000
"""Of the replicas of a plan; when so many are simulated, the faster ones are left out."""

_SLOWED = 2
"""Times as long as alone a sum may take beside messages."""

_ALL_THE_TIME = 1e-6
"""Of a batch: so short is the wait of a device that is busy all the time."""

SETTLING = 24
"""Batches within which batches that overlap come to take equally long, if the usual window is too short."""


class PlanEvaluator:
    """Evaluates draft plans."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._tied = TiedGradients(problem.profile)
        self._works = ReplicaWorks(problem, self._tied)
        self._sums = DraftSums(problem, self._works, self._tied)
        self._last_floor: tuple[Draft, LowerBound] | None = None
        self.num_instructions = 0

    def floor(self, draft: Draft) -> LowerBound:
        """What the busiest device and the busiest lane need, all else being free."""
        if self._last_floor is None or self._last_floor[0] is not draft:
            self._last_floor = draft, self._floor(draft)
        return self._last_floor[1]

    def _floor(self, draft: Draft) -> LowerBound:
        problem = self._problem
        rank_of_stage = draft.outline.rank_of_stage
        device_s: defaultdict[int, float] = defaultdict(float)
        works, speeds = self._works.of_stages(draft), self._speeds(draft)
        for stage, rank in enumerate(rank_of_stage):
            seats = zip(draft.grid[rank], works[stage], draft.counts_of(stage), strict=True)
            for device, work, count in seats:
                device_s[device] += work.busy_s(stage, count, draft.rule, speeds[device])
        busiest = max(device_s, key=lambda device: (device_s[device], -device))
        slowest_lane, lane_s = self.busiest_lane(draft)
        cores = cores_needed(problem, device_s)
        floors = [(device_s[busiest], problem.names[busiest]), (lane_s, slowest_lane), *cores]
        most_s, bottleneck = max(floors, key=lambda one: one[0])
        return LowerBound(most_s, bottleneck, device_s)

    def least_s(self, draft: Draft) -> float:
        """What a batch takes at the least: its floor and, where it drains, the way there and back.

        Stage s begins a batch when all before it have run their first forward, and when it is done they all
        have a backward left to run.
        """
        outline = draft.outline
        least_s = self.floor(draft).seconds
        if outline.schedule not in PATH_BOUND and outline.schedule != "sequential":
            return least_s
        if outline.stage_widths:
            costs = self._works.of(draft, outline.sizes[0]).costs
            return max(least_s, least_path_s(self._problem, draft, costs, self._sums.rings(draft)))
        m = outline.num_microbatches
        for replica, work in enumerate(self._works.of_replicas(draft)):
            before_s = all_s = 0.0
            for stage, row in enumerate(draft.grid):
                speed = self._problem.speeds[row[replica]]
                once_s = (work.costs.forward_s[stage] + work.costs.backward_s[stage]) / speed
                every_s = work.passes_s(stage, m) / speed
                least_s = max(least_s, before_s + every_s)
                before_s += once_s
                all_s += m * once_s
            if outline.schedule == "sequential":
                least_s = max(least_s, all_s)
        return least_s

    @without_collector()  # programs have no cycles, and it would take a third of a forecast
    def forecast(self, draft: Draft, *, is_brief: bool = False) -> Forecast:
        """What a draft takes, whether it fits or not. With `is_brief` one that pages is looked at for a few
        batches only, and of its memory there is only how long ranks wait for chunks: its copies are planned
        within the tiers.
        """
        problem, outline = self._problem, draft.outline
        floor = self.floor(draft)
        busy = self._busy_throughout(draft, floor)
        shortened = None if busy else draft.shortened(self._fewest(draft, floor))
        seen = busy[0] if busy else draft if shortened is None else shortened[1]
        memory = problem.request.memory
        estimates = memory is not None and memory.within_s is not None
        program = seen.program(is_brief=is_brief, estimates=estimates)
        of_replica = busy[1] if busy else self._simulated(seen, program, floor, is_brief=is_brief)
        timelines = [timeline for _, timeline in of_replica]
        has_memory = not (is_brief and seen.paging)
        if has_memory:
            timelines = self._with_memory(seen, timelines)
        batch_s, place = max((seconds, -place) for place, (seconds, _) in enumerate(of_replica))
        slowest = timelines[-place]
        if shortened is not None:
            batch_s += self._more_s(draft, *shortened, batch_s)
        batch_s = floor.seconds if busy else batch_s
        batch_s = max(batch_s + self._sums.waits_s(draft, batch_s), floor.seconds)
        codecs = problem.codecs(outline.rank_of_stage, draft.codecs)
        codec_penalty = problem.request.codec_penalty(
            codecs, problem.profile.optimizer, outline.most_replicas
        )
        return Forecast(
            batch_s=batch_s,
            samples_per_s=outline.batch_size / batch_s,
            penalty=outline.penalty(problem, draft.lookahead)
            * codec_penalty
            * self._sums.warmup(draft, floor, batch_s),
            busy_share=min(sum(floor.device_s.values()) / (len(floor.device_s) * batch_s), 1.0),
            bottleneck=self._bottleneck(draft, floor, slowest),
            stages=self._works.forecasts(draft, seen, timelines, self._speeds(draft)) if has_memory else (),
            delay_warmup=0.0 if draft.rule is Rule.SYNCHRONOUS else problem.request.delay_warmup_share,
            codec_penalty=codec_penalty,
            sum_penalty=problem.request.sum_penalty(outline.most_replicas, problem.profile.optimizer),
            agreement_penalty=problem.request.agreement_penalty(
                outline.most_replicas, problem.profile.optimizer, draft.rule
            ),
            watts=total_watts(problem.watts[device] for row in draft.grid for device in row),
            tiers=self._tiers(draft, slowest) if has_memory else tuple(tiers_waited_for(slowest)),
            assumptions=assumptions(problem, draft),
        )

    def _simulated(
        self, draft: Draft, program: Program, floor: LowerBound, *, is_brief: bool = False
    ) -> list[tuple[float, Timeline]]:
        """What each replica does and the seconds of a batch; of those that run alike one is simulated.

        If the plan is large, of all replicas with micro-batches of a size the one with the busiest device
        stands for all. A pipeline of stages of unequal width is simulated as it is.
        """
        if draft.outline.stage_widths:
            run = partial(self._simulate_unequal, draft)
            return [self._settled(run, draft, program, is_brief=is_brief)]
        of_size: dict[int, tuple[float, Timeline]] = {}
        for replica, network in self._unlike(draft, program, floor):
            run = partial(self._simulate, draft, replica, network)
            found, size = self._settled(run, draft, program, is_brief=is_brief), draft.outline.sizes[replica]
            of_size[size] = max(of_size.get(size, found), found, key=itemgetter(0))
        return [of_size[size] for size in draft.outline.sizes]

    def _unlike(self, draft: Draft, program: Program, floor: LowerBound) -> Iterator[tuple[int, Network]]:
        """The replicas to simulate and their networks, those with the busiest device first."""
        networks, known, sizes = self._networks(draft), set[object](), set[int]()
        for replica in self._slowest_first(draft, floor):
            size = draft.outline.sizes[replica]
            if size in sizes and len(known) * program.num_instructions > MOST_INSTRUCTIONS:
                continue
            network = networks.of(replica)
            likeness = self._likeness(draft, program, replica, network)
            if likeness not in known:
                known.add(likeness)
                sizes.add(size)
                yield replica, network

    def _settled(
        self, run: Callable[..., Timeline], draft: Draft, program: Program, *, is_brief: bool
    ) -> tuple[float, Timeline]:
        """The seconds of a batch once the pipeline has come to its pace, and the timeline of a few batches.

        If batches overlap, the clock stops as soon as they take equally long; if they do not within the
        window, a longer one follows.
        """
        if draft.rule is Rule.SYNCHRONOUS or program.moves_memory:
            timeline = run(program, _never) if is_brief and draft.paging else run(program)
            return timeline.steady_batch_s, timeline
        most = program.num_batches - 1
        ended: list[float] = []

        def is_over(ends: Sequence[float]) -> bool:
            ended[:] = ends
            return len(ends) == most

        def is_settled(ends: Sequence[float]) -> bool:
            ended[:] = ends
            return settled_batch_s(ends, SETTLING - 1) is not None

        timeline = run(program, is_over)
        batch_s = settled_batch_s(ended)
        if batch_s is None:
            run(draft.ungathered_program(SETTLING), is_settled)
            batch_s = settled_batch_s(ended, SETTLING - 1)
        assert batch_s is not None, "it is the mean after so many batches"
        return batch_s, timeline

    def _busy_throughout(
        self, draft: Draft, floor: LowerBound
    ) -> tuple[Draft, list[tuple[float, Timeline]]] | None:
        """A much shorter batch of a large draft with delayed updates, simulated, if it keeps the busiest
        device busy all the time. The batch of the draft then does so too: its sums are in proportion, and it
        has more time for all that takes as long in any batch.
        """
        short = draft.much_shorter()
        if short is None or self._problem.request.rounds or floor.bottleneck not in self._problem.names:
            return None
        least = self._floor(short)
        if least.bottleneck != floor.bottleneck:
            return None
        found = self._simulated(short, short.program(), least)
        is_busy = max(seconds for seconds, _ in found) <= least.seconds * (1 + _ALL_THE_TIME)
        return (short, found) if is_busy else None

    def _fewest(self, draft: Draft, floor: LowerBound) -> int:
        """The micro-batches with which sums that run beside the next batch do not set its pace alone."""
        outline = draft.outline
        is_single = 1 in (outline.most_replicas, outline.num_microbatches)
        if not draft.may_be_shortened or draft.rule is Rule.SYNCHRONOUS or is_single:
            return 0
        if outline.stage_widths:
            pace_s = floor.seconds / outline.num_microbatches
            end_s = _SLOWED * rings_s(self._problem, self._sums.rings(draft))
        else:
            one = self._floor(replace(draft, outline=replace(outline, num_microbatches=1)))
            pace_s = (floor.seconds - one.seconds) / (outline.num_microbatches - 1)
            end_s = _SLOWED * one.seconds + sum(self._sums.of_stages(draft)[0])
        return ceil(min(end_s / pace_s, outline.num_microbatches)) if pace_s else outline.num_microbatches

    def _more_s(self, draft: Draft, short: Draft, longer: Draft, longer_s: float) -> float:
        """What the micro-batches take that a draft has in addition to a shorter one: each as much as those
        between two shorter ones, and no less than the busiest device or lane needs.
        """
        short_s = max(seconds for seconds, _ in self._simulated(short, short.program(), self.floor(draft)))
        count = draft.outline.num_microbatches - longer.outline.num_microbatches
        period = longer.outline.num_microbatches - short.outline.num_microbatches
        least_s = self._floor(draft).seconds - self._floor(longer).seconds
        return max(count / period * (longer_s - short_s), least_s)

    def _tiers(self, draft: Draft, slowest: Timeline) -> tuple[TierForecast, ...]:
        """What ranks move between tiers, or between replicas that share."""
        request = self._problem.request
        if request.num_sharers(draft.outline.width) == 1:
            return tuple(tier_forecasts(slowest, ()))
        costs = self._works.of(draft, draft.outline.sizes[0]).costs
        between = self._sums.of_ranks(draft, self._sums.round_bytes(draft))
        rings = tied_rings(self._problem, draft, self._sums.tied_of(draft)) if draft.whole_weights else ()
        return tuple(tier_forecasts(slowest, exchanged_bytes(costs, request, draft), rings, between))

    def paging(self, draft: Draft, *, host_updates: bool) -> Paging | None:
        """What a draft would page; None where all of it fits. Updates are made on the host where they can."""
        outline = draft.outline
        costs = self._works.of(draft, max(outline.sizes)).costs
        # Replicas that share weights have summed their parts before a batch ends, but sites may sum these.
        sums_at_the_end = outline.width > 1 and (not draft.whole_weights or outline.sites > 1)
        is_summed = bool(self._sums.tied_of(draft)) or sums_at_the_end
        return paging_of(self._problem, draft, costs, host_updates=host_updates, is_summed=is_summed)

    def least_kept_bytes(self, draft: Draft) -> list[float]:
        """The bytes that each rank keeps over all its tiers at the least: a version of its weights, the state
        of its optimizer and, if its stages step together, all its gradients.
        """
        costs = self._works.of(draft, max(draft.outline.sizes)).costs
        asked, width = self._problem.request.memory, draft.outline.width
        steps_apart = asked is not None and asked.updates_apart
        share = 1 / self._problem.request.num_sharers(width) if draft.whole_weights else 1.0
        kept = [0.0] * draft.outline.num_ranks
        for stage, rank in enumerate(draft.outline.rank_of_stage):
            kept[rank] += share * costs.weight_bytes[stage] + costs.optimizer_bytes[stage]
            kept[rank] += 0.0 if steps_apart else share * costs.gradient_bytes[stage]
        return kept

    def sizes(self, draft: Draft) -> Sizes:
        """The bytes of what each stage keeps, of the largest micro-batches."""
        sizes = self._works.of(draft, max(draft.outline.sizes)).costs.sizes()
        return sizes if draft.splits_backward else replace(sizes, waiting=(), halves=())

    def _bottleneck(self, draft: Draft, floor: LowerBound, slowest: Timeline) -> str:
        seconds, rank, lower = busiest_wire(slowest)
        if seconds <= floor.seconds:
            return floor.bottleneck
        name = self._problem.names[draft.grid[rank][0]]
        if lower == REPLICAS:
            return f"{name}'s links to its replicas"
        return f"{name}'s disk" if lower == "disk" else f"{name}'s wire to its host"

    def timeline(self, draft: Draft, program: Program) -> Timeline:
        """What the slowest replica of a draft does in the window of a program of its plan."""
        if draft.outline.stage_widths:
            return self._simulate_unequal(draft, program)
        unlike = self._unlike(draft, program, self.floor(draft))
        found = (self._simulate(draft, replica, network, program) for replica, network in unlike)
        return max(found, key=lambda timeline: timeline.steady_batch_s)

    def _slowest_first(self, draft: Draft, floor: LowerBound) -> list[int]:
        """The replicas, those with the busiest device first."""
        busiest_s = [
            max(floor.device_s[row[replica]] for row in draft.grid) for replica in range(draft.outline.width)
        ]
        return sorted(range(len(busiest_s)), key=lambda replica: (-busiest_s[replica], replica))

    def _with_memory(self, seen: Draft, timelines: Sequence[Timeline]) -> list[Timeline]:
        """The timelines with what ranks keep, which is the same for replicas with equal micro-batches."""
        counted: dict[int, tuple[Residency, ...]] = {}
        found = []
        for timeline, size in zip(timelines, seen.outline.sizes, strict=False):
            if timeline.memory:
                found.append(timeline)
                continue
            if size not in counted:
                program, sizes = timeline.program, self._works.of(seen, size).costs.sizes()
                counted[size] = tuple(resident(program, rank, sizes) for rank in range(program.num_ranks))
            found.append(replace(timeline, memory=counted[size]))
        return found

    def _simulate(
        self, draft: Draft, replica: int, network: Network, program: Program, until: Until | None = None
    ) -> Timeline:
        problem, grid = self._problem, draft.grid
        costs = self._works.of(draft, draft.outline.sizes[replica], self._works.kinds(draft, replica)).costs
        return self._run(
            draft,
            [row[replica] for row in grid],
            costs,
            network,
            program,
            until,
            processors=processors_of(problem, grid, replica),
            tier_links=tier_links_of(problem, grid, replica) if program.moves_memory else None,
        )

    def _simulate_unequal(self, draft: Draft, program: Program, until: Until | None = None) -> Timeline:
        """All ranks of stages of unequal width: each message goes from the rank that has a micro-batch to the
        rank that takes it on, and each stage sums its gradients over its own replicas.
        """
        problem, seats = self._problem, list(draft.seats())
        devices = [seat.device for seat in seats]
        network = cluster_network(
            problem.cluster,
            program,
            devices,
            replicas={seat.rank: draft.grid[seat.stage] for seat in seats},
            most_overlap=problem.most_overlap(draft.outline.schedule),
        )
        costs = self._works.of(draft, draft.outline.sizes[0]).costs
        processors = processors_of(problem, [(device,) for device in devices], 0)
        return self._run(draft, devices, costs, network, program, until, processors=processors)

    def _run(
        self,
        draft: Draft,
        devices: Sequence[int],
        costs: Costs,
        network: Network,
        program: Program,
        until: Until | None,
        *,
        processors: Processors | None,
        tier_links: Sequence[TierLinks] | None = None,
    ) -> Timeline:
        speeds = [self._speeds(draft)[device] for device in devices]
        sync_s, reduce_bytes = self._sums.of_stages(draft)
        busy_s = costs.reduce_busy_s or (0.0,) * costs.num_stages
        if self._sums.codes_beside(draft):
            coding_s = self._sums.coding_s(draft, is_slowest=False)
            share = draft.share_of_sums
            busy_s = tuple(one + share * more for one, more in zip(busy_s, coding_s, strict=True))
        costs = replace(
            costs,
            reduce_busy_s=busy_s,
            reduce_s=sync_s,
            reduce_bytes=reduce_bytes,
            early_share=self._sums.early_share(draft),
            rank_speed=tuple(one.compute for one in speeds),
            update_speed=tuple(one.memory for one in speeds),
            host_speed=tuple(one.host for one in speeds),
            engine=self._problem.engine,
        )
        timeline = simulate(
            program, costs, network, agree=True, processors=processors, tier_links=tier_links, until=until
        )
        self.num_instructions += sum(len(rank.start_s) for rank in timeline.ranks)
        return timeline

    def _likeness(self, draft: Draft, program: Program, replica: int, network: Network) -> object:
        """What is equal for replicas that run alike."""
        problem = self._problem
        speeds = tuple(problem.resource_speeds[row[replica]] for row in draft.grid)
        rates = tuple(wire.bytes_per_s for wire in network.wires)
        paths = tuple(network.paths.values()), tuple(network.sync_paths.values())
        wires = tier_links_of(problem, draft.grid, replica) if program.moves_memory else ()
        cores = processors_of(problem, draft.grid, replica)
        kinds = self._works.kinds(draft, replica)
        return draft.outline.sizes[replica], kinds, speeds, rates, paths, network.agree_s, cores, wires

    def _speeds(self, draft: Draft) -> Sequence[Speeds]:
        """The speeds of all devices, relative to the profile that a draft's work is counted with there."""
        problem = self._problem
        return problem.usual_resource_speeds if draft.outline.stage_widths else problem.resource_speeds

    def busiest_lane(self, draft: Draft) -> tuple[str, float]:
        """The lane that needs longest for the bytes of a batch, and how long that is."""
        of_size = {size: self._works.of(draft, size).costs for size in set(draft.outline.sizes)}
        sums = self._sums.rings(draft)
        if self._problem.request.rounds is not None:
            sums += self._sums.rounds(draft, self._sums.round_bytes(draft))
        return busiest_lane(self._problem, flows(draft, of_size), sums)

    def _networks(self, draft: Draft) -> ReplicaNetworks:
        """The networks of a draft's replicas."""
        outline = draft.outline
        message_bytes: dict[int, Mapping[tuple[int, int], float]] = {}
        for size in set(outline.sizes):
            costs, found = self._works.of(draft, size).costs, defaultdict[tuple[int, int], float](float)
            for boundary, (here, there) in enumerate(pairwise(outline.rank_of_stage)):
                if here != there:
                    found[here, there] += costs.forward_bytes[boundary]
                    found[there, here] += costs.backward_bytes[boundary]
            message_bytes[size] = found
        problem, sites = self._problem, draft.sites(self._problem.request)
        most_overlap = problem.most_overlap(outline.schedule)
        return ReplicaNetworks(problem, draft.grid, outline.sizes, message_bytes, sites, most_overlap)


def _never(_ends: Sequence[float]) -> bool:
    """The clock goes on to the end; neither bytes nor transfers are kept."""
    return False
