"""What the replicas of a draft plan have to do and to send, and what its forecast assumes.

None of this depends on when work and messages meet: the simulator finds that.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

from bireme.cluster.cluster import link_notes
from bireme.cluster.device import MOST_SENDS, ResourceSeconds, Speeds
from bireme.codec.description import parse_codec, sum_name
from bireme.codec.sum_description import DENSE, SumCost, SumKind
from bireme.plan.codec_costs import coded, sum_coding_s
from bireme.plan.forecast import StageForecast
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.plan import device_ranges
from bireme.plan.plan_request import Goal
from bireme.plan.search.contention import HopBytes, busiest_lane, rings_s
from bireme.plan.search.draft import Draft, LowerBound
from bireme.plan.search.draft_paging import (
    Tied,
    TiedGradients,
    reduce_share,
    shared_costs,
    shared_key,
    sync_bytes,
    tied_rings,
)
from bireme.plan.search.problem import PlanningProblem
from bireme.schedule.program import Rule
from bireme.schedule.routes import microbatch_owner
from bireme.simulate.costs import Costs
from bireme.sync.slices import bucket_bytes
from bireme.timeline.timeline import Timeline

_MOST_KEPT = 4096
"""Costs of partitions that are not worked out again."""


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What the stages of one replica take per micro-batch and per batch, on a device of speed 1."""

    costs: Costs
    again_s: tuple[float, ...]

    def passes_s(self, stage: int, num_microbatches: int) -> float:
        """For how long the passes of a batch keep the stage busy."""
        costs = self.costs
        return num_microbatches * (costs.forward_s[stage] + costs.backward_s[stage] + self.again_s[stage])

    def busy_s(self, stage: int, num_microbatches: int, rule: Rule, speeds: Speeds) -> float:
        """For how long a batch keeps the stage busy on a device, with what its end takes under a rule."""
        costs = self.costs
        end_s = costs.reduce_busy_s[stage] + costs.update_s[stage]
        if rule is Rule.FRESH:
            end_s += costs.trial_s[stage]
        return ResourceSeconds(self.passes_s(stage, num_microbatches), end_s).on(speeds)

    def sent_bytes(self, rank: int, rank_of_stage: Sequence[int]) -> float:
        """What the engine keeps of the messages that a rank sends to others: copies of the last ones, and
        room for the next one where it is made from a message.
        """
        forward, backward = self.costs.forward_bytes, self.costs.backward_bytes
        found = 0.0
        for stage, (here, there) in enumerate(pairwise(rank_of_stage)):
            if here == there:
                continue
            if here == rank:
                is_made_of_one = stage > 0 and rank_of_stage[stage - 1] != rank
                found += (MOST_SENDS + is_made_of_one) * forward[stage]
            if there == rank:
                is_made_of_one = stage + 2 < len(rank_of_stage) and rank_of_stage[stage + 2] != rank
                found += (MOST_SENDS + is_made_of_one) * backward[stage]
        return found

    def kept_bytes(self, stage: int, draft: Draft) -> float:
        """What the stage keeps of a micro-batch that waits for its backward."""
        return (self.costs.input_bytes if stage in draft.recompute else self.costs.stash_bytes)[stage]


class ReplicaWorks:
    """The work of the replicas of draft plans; what is alike is worked out once."""

    def __init__(self, problem: PlanningProblem, tied: TiedGradients) -> None:
        self._problem = problem
        self._tied = tied
        self._known: dict[object, ReplicaWork] = {}

    def kinds(self, draft: Draft, replica: int) -> tuple[int, ...]:
        """The kind of the device of each rank, in one replica; empty if all devices are of one kind."""
        if len(self._problem.profiles) == 1:
            return ()
        return tuple(self._problem.kinds[row[replica]] for row in draft.grid)

    def of_replicas(self, draft: Draft) -> list[ReplicaWork]:
        """The work of each replica on its devices."""
        alike = [(size, self.kinds(draft, replica)) for replica, size in enumerate(draft.outline.sizes)]
        works = {one: self.of(draft, *one) for one in set(alike)}
        return [works[one] for one in alike]

    def of_stages(self, draft: Draft) -> list[list[ReplicaWork]]:
        """The work of each replica of each stage."""
        if draft.outline.stage_widths:
            work = self.of(draft, draft.outline.sizes[0])
            return [[work] * len(row) for row in draft.grid]
        return [self.of_replicas(draft)] * draft.outline.num_stages

    def of(self, draft: Draft, size: int, kinds: tuple[int, ...] = ()) -> ReplicaWork:
        """The work of a replica with micro-batches of a size whose ranks have devices of these kinds: all of
        the first if none are given, as for bytes, which are the same on all.
        """
        problem = self._problem
        kept_share = problem.kept_share(draft.outline.width)
        codecs = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
        shared = shared_key(problem.request, draft)
        passes = draft.recompute, bool(draft.num_sliced), draft.splits_backward
        of_stages = tuple(kinds[rank] for rank in draft.outline.rank_of_stage) if any(kinds) else (0,)
        key = size, of_stages, draft.cuts, passes, codecs, kept_share, shared
        if key not in self._known:
            stages, half = draft.stages(len(problem.profile.units)), None
            if draft.num_sliced and size % 2 == 0 and size // 2 in problem.known_sizes:
                half = problem.on_kinds(size // 2, stages, of_stages).forward_s
            chain = problem.on_kinds(size, stages, of_stages)
            costs = costs_between(chain, draft.cuts, half_forward_s=half)
            costs = replace(costs, master_weights=problem.request.has_masters)
            costs = costs.in_halves() if draft.splits_backward else costs
            costs = coded(costs, codecs, problem.request.value_bytes, problem.profile.codecs)
            if draft.whole_weights:
                costs = replace(costs, tied_gradient_bytes=self._tied.of_stages(stages))
            costs = shared_costs(costs, problem.request, draft)
            if kept_share:
                kept = zip(costs.optimizer_bytes, costs.gradient_bytes, strict=True)
                costs = replace(costs, optimizer_bytes=tuple(own + kept_share * one for own, one in kept))
            again_s = tuple(
                one_s if stage in draft.recompute else 0.0 for stage, one_s in enumerate(costs.recompute_s)
            )
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[key] = ReplicaWork(costs, again_s)
        return self._known[key]

    def forecasts(
        self, draft: Draft, seen: Draft, timelines: Sequence[Timeline], speeds: Sequence[Speeds]
    ) -> tuple[StageForecast, ...]:
        """The stages of a draft, of which `seen` was simulated, with fewer micro-batches."""
        problem, outline = self._problem, draft.outline
        found = []
        of_stages = zip(draft.stages(len(problem.profile.units)), self.of_stages(draft), strict=True)
        for stage, ((begin, end), works) in enumerate(of_stages):
            rank = outline.rank_of_stage[stage]
            row, counts = draft.grid[rank], draft.counts_of(stage)
            more = [0.0] * len(row)
            if outline.schedule == "gpipe":  # the one that keeps all micro-batches of a batch
                each = [work.kept_bytes(stage, draft) for work in works]
                longer = zip(counts, seen.counts_of(stage), each, strict=True)
                more = [(count - fewer) * one for count, fewer, one in longer]
            compiler_bytes = problem.compiler_bytes(draft.rule, outline.width, begin, end)
            beside = [work.sent_bytes(rank, outline.rank_of_stage) + compiler_bytes for work in works]
            memories = (
                [timelines[0].memory[seat.rank] for seat in draft.seats() if seat.stage == stage]
                if outline.stage_widths
                else [timeline.memory[rank] for timeline in timelines]
            )
            held = [memory.peak_bytes + extra for memory, extra in zip(memories, more, strict=True)]
            apart = [float(problem.process_bytes[device]) for device in row]
            if problem.profile.engine and problem.request.memory is None:
                held = [one + room for one, room in zip(held, beside, strict=True)]
            elif problem.profile.engine:  # these lie beside the tier whose limit was asked for
                apart = [one + room for one, room in zip(apart, beside, strict=True)]
            tightest = min(range(len(row)), key=lambda r: problem.limits[row[r]] - held[r])
            peaks = tuple(one + own for one, own in zip(held, apart, strict=True))
            limits = tuple(problem.limits[device] + own for device, own in zip(row, apart, strict=True))
            found.append(
                StageForecast(
                    begin=begin,
                    end=end,
                    devices=tuple(problem.names[device] for device in row),
                    recompute=stage in draft.recompute,
                    busy_s=max(
                        work.busy_s(stage, count, draft.rule, speeds[device])
                        for work, count, device in zip(works, counts, row, strict=True)
                    ),
                    peak_bytes=peaks[tightest],
                    limit_bytes=limits[tightest],
                    device_peak_bytes=peaks,
                    device_limit_bytes=limits,
                    process_bytes=problem.process_bytes[row[tightest]],
                )
            )
        return tuple(found)


# The messages of a batch, and the least time of a batch of stages of unequal width.


@lru_cache(maxsize=1024)
def _pairs(here: tuple[int, ...], there: tuple[int, ...]) -> tuple[tuple[tuple[int, int], int], ...]:
    """Between which replicas of two stages with these shares how many micro-batches of a batch go."""
    times = gcd(*here, *there)  # owners repeat themselves
    owners = (microbatch_owner([one // times for one in share]) for share in (here, there))
    return tuple((ends, times * count) for ends, count in sorted(Counter(zip(*owners, strict=True)).items()))


def flows(draft: Draft, of_size: Mapping[int, Costs]) -> Iterator[tuple[int, int, float, int]]:
    """The bytes of messages from one device to another, and the number of such messages in a batch; with the
    costs by the size of micro-batches.
    """
    outline = draft.outline
    if outline.stage_widths:
        costs = of_size[outline.sizes[0]]
        for boundary, (here, there) in enumerate(pairwise(range(outline.num_stages))):
            for (one, other), count in _pairs(draft.shares[here], draft.shares[there]):
                ends = draft.grid[here][one], draft.grid[there][other]
                yield (*ends, costs.forward_bytes[boundary], count)
                yield (*ends[::-1], costs.backward_bytes[boundary], count)
        return
    for replica, size in enumerate(outline.sizes):
        forth, back = of_size[size].forward_bytes, of_size[size].backward_bytes
        for boundary, (here, there) in enumerate(pairwise(outline.rank_of_stage)):
            ends = draft.grid[here][replica], draft.grid[there][replica]
            yield (*ends, forth[boundary], outline.num_microbatches)
            yield (*ends[::-1], back[boundary], outline.num_microbatches)


def least_path_s(problem: PlanningProblem, draft: Draft, costs: Costs, sums: Sequence[HopBytes]) -> float:
    """The least seconds of a batch that drains, of stages of unequal width: a replica begins when all stages
    before it have run a forward, on the fastest of their replicas. When it is done, they have a backward left
    to run, and its stage a sum.
    """
    forward_s = backward_s = least_s = 0.0
    for stage, (row, share) in enumerate(zip(draft.grid, draft.shares, strict=True)):
        speeds = [problem.usual_speeds[device] for device in row]
        again_s = costs.recompute_s[stage] if stage in draft.recompute else 0.0
        each_s = costs.forward_s[stage] + costs.backward_s[stage] + again_s
        every_s = max(count / speed for count, speed in zip(share, speeds, strict=True)) * each_s
        sum_s = rings_s(problem, [sums[stage]])
        least_s = max(least_s, forward_s + every_s + max(backward_s, sum_s))
        forward_s += costs.forward_s[stage] / max(speeds)
        backward_s += costs.backward_s[stage] / max(speeds)
    return least_s


# What the forecast of a plan assumes, because neither profile nor cluster gives it: a sentence for each. It
# says what is not known, what counts instead, and how to find it out.


def assumptions(problem: PlanningProblem, draft: Draft) -> tuple[str, ...]:
    """The assumptions that the forecast of a draft depends on."""
    return (
        *_about_passes(problem, draft),
        *_about_codecs(problem, draft),
        *_about_devices(problem, draft),
    )


def _about_passes(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    sizes, schedule = sorted(set(draft.outline.sizes)), draft.outline.schedule
    if draft.splits_backward and any(not problem.whole(size).has_halves for size in sizes):
        yield (
            f"The profile does not give the two halves of the backward that {schedule} runs, so each counts "
            "as half of the backward. Measure them with bireme profile --halves."
        )
    halved = [size for size in sizes if size // 2 not in problem.known_sizes]
    if draft.num_sliced and halved:
        names = " and ".join(str(size // 2) for size in halved)
        yield (
            f"The profile does not give the forward of half a micro-batch that {schedule} runs, so it counts "
            f"as half of a forward. Profile micro-batches of {names} too."
        )


def _about_codecs(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    request, known = problem.request, {rate.codec for rate in problem.profile.codecs}
    own = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
    words = {str(parse_codec(word)) for one in own for word in (one.forward, one.backward) if word != "none"}
    if draft.outline.width > 1 and request.sums.codec != DENSE:
        words.add(sum_name(request.sums.codec))
    if words - known:
        yield (
            f"How long the codecs {', '.join(sorted(words - known))} take on these devices is not known, so "
            "the seconds of one core of another machine count. Measure them: plan from the model, on a "
            "machine that has such a device."
        )


def _about_devices(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    used = sorted(device for row in draft.grid for device in row)
    scaled = [problem.names[device] for device in used if device in problem.scaled]
    if scaled:
        yield (
            f"The times on {device_ranges(scaled)} are scaled from those on {problem.profile.device} by the "
            "arithmetic rates and memory bandwidths of both. Profile the model there, and plan with "
            "--profile NAME=FILE."
        )
    unknown = [problem.names[device] for device in used if device in problem.unknown_processes]
    if unknown:
        yield (
            f"What a process holds beside tensors on {device_ranges(unknown)} is not known and counts as "
            "nothing. Set process_bytes of these devices in the cluster file."
        )
    servers = {problem.servers[device] for device in used}
    if len(servers) > 1:
        yield from link_notes(problem.cluster, servers)


# Sums of gradients and rounds of a draft plan: their bytes, their seconds, and what waits for them.


_ROUND_TRIPS = 2.5
"""Of a round on the slowest way, besides its sum: to the coordinator that grants it and back, to the other
members with the numbers that go along, to the coordinator that commits it and back. The ranks of a replica
then agree on the batch as without rounds (`Network.agree_s`).
"""


class DraftSums:
    """What replicas and sites of draft plans send each other for sums, and how long that takes."""

    def __init__(self, problem: PlanningProblem, works: ReplicaWorks, tied: TiedGradients) -> None:
        self._problem, self._works, self._tied = problem, works, tied

    def tied_of(self, draft: Draft) -> list[Tied]:
        """The parameters that several stages of a draft use."""
        return self._tied.between(draft.stages(len(self._problem.profile.units)))

    def of_stages(self, draft: Draft) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The seconds in which each stage's gradients are encoded and decoded, its tied parameters are summed
        and sites sum with each other, and the bytes of its other gradients.
        """
        sync_s = [0.0] * draft.outline.num_stages if self.codes_beside(draft) else self.coding_s(draft)
        request, rank_of_stage = self._problem.request, draft.outline.rank_of_stage
        if request.rounds is not None and not request.rounds.averages:
            round_s = self._round_s(draft)
            for stage, rank in enumerate(rank_of_stage):  # those of a rank follow one another
                sync_s[stage] += round_s / rank_of_stage.count(rank)
        reduced = list(self._reduce_bytes(draft, before_update=True))
        for one in tied_rings(self._problem, draft, self.tied_of(draft)):
            for stage in one.stages:
                own_bytes = reduce_share(request, draft.widths[stage]) * one.num_bytes
                sync_s[stage] += one.seconds
                reduced[stage] = max(reduced[stage] - own_bytes, 0.0)
        share = draft.share_of_sums
        return tuple(share * one for one in sync_s), tuple(share * one for one in reduced)

    def early_share(self, draft: Draft) -> tuple[float, ...]:
        """The share of each stage's sum whose bytes can cross during the last backward of a batch. Seconds of
        codecs are not hidden there: they would be taken from the backward on a device of one core.
        """
        return self._early_share(draft) if draft.rule is Rule.SYNCHRONOUS else ()

    def _early_share(self, draft: Draft) -> tuple[float, ...]:
        """The same in batches of a draft that are not delayed."""
        problem, request, outline = self._problem, self._problem.request, draft.outline
        codec, devices = request.sums_within.codec, problem.cluster.devices()
        sharers = request.num_sharers(outline.width)
        kinds = (SumKind.DENSE,) if sharers > 1 else (SumKind.DENSE, SumKind.BITS)
        if (
            request.rounds is not None
            or draft.whole_weights
            or codec.kind not in kinds
            or any(devices[device].device.kind != "cpu" for row in draft.grid for device in row)
        ):
            return ()
        summed = self._works.of(draft, outline.sizes[0]).costs.gradient_bytes
        of_ranks = self.of_ranks(draft, summed)
        found = []
        for stage, rank in enumerate(outline.rank_of_stage):
            num_coders = 0 if codec.kind is SumKind.DENSE else draft.widths[stage]
            last = bucket_bytes(of_ranks[rank], num_coders)
            # Sums of parts are sent after their parts, the last of them after the backward.
            most = 0.5 if codec.is_cut(draft.widths[stage]) else 1.0
            if sharers > 1:  # besides, weights are sent; a piece of the first part comes last in each bucket
                most = 0.5 / sharers
            found.append(most * max(1.0 - last / summed[stage], 0.0) if summed[stage] else 0.0)
        return tuple(found)

    def warmup(self, draft: Draft, floor: LowerBound, batch_s: float) -> float:
        """How many times its seconds a batch of a single stage takes in the mean of a run: in the delay
        warm-up each waits for the sums of its own gradients, but for the part that crosses during the last
        backward. Deeper pipelines count their bubble there.
        """
        problem, request, is_single = self._problem, self._problem.request, draft.outline.num_stages == 1
        is_hidden = is_single and draft.rule is not Rule.SYNCHRONOUS and request.rounds is None
        if not is_hidden or request.goal is Goal.THROUGHPUT:
            return 1.0
        rings = self.rings(draft)
        sums_s = rings_s(problem, rings) + max(self.coding_s(draft))
        for share in self._early_share(draft):
            _, crossing_s = busiest_lane(problem, (), rings)
            backwards_s = (
                self._works.of(draft, size).costs.backward_s[0] / problem.speeds[device]
                for size, device in zip(draft.outline.sizes, draft.grid[0], strict=True)
            )
            sums_s -= share * min(crossing_s, *backwards_s)
        late_s = max(floor.device_s.values()) + sums_s - batch_s
        return 1.0 + request.delay_warmup_share * max(late_s, 0.0) / batch_s

    def codes_beside(self, draft: Draft) -> bool:
        """Whether sums are coded on cores that compute the next batch: updates are delayed, and processors
        have no core to spare.
        """
        problem = self._problem
        threads: defaultdict[int, int] = defaultdict(int)
        for device in (device for row in draft.grid for device in row):
            threads[problem.servers[device]] += problem.threads[device]
        servers = problem.cluster.servers
        is_full = all(count > 0 and servers[one].num_cores <= count for one, count in threads.items())
        return draft.rule is not Rule.SYNCHRONOUS and is_full

    def coding_s(self, draft: Draft, *, is_slowest: bool = True) -> list[float]:
        """The seconds of the codec of sums within a site, by stage: on the slowest of its devices, or on one
        of speed 1.
        """
        request, width = self._problem.request, self._problem.request.site_width(draft.outline.width)
        if width == 1:
            return [0.0] * draft.outline.num_stages
        # Who gets parts decodes a part of each message, which together are one.
        num_decoded = 1 if request.num_sharers(draft.outline.width) > 1 else width
        sums = request.sums_within
        return self._coded_s(draft, sums, num_decoded=num_decoded, is_slowest=is_slowest)

    def _coded_s(
        self, draft: Draft, sums: SumCost, *, num_decoded: int, share: float = 1.0, is_slowest: bool = True
    ) -> list[float]:
        """The seconds to encode this share of each stage's gradients and to decode `num_decoded` messages."""
        problem, outline = self._problem, draft.outline
        costs = self._works.of(draft, outline.sizes[0]).costs
        found = []
        for stage, units in enumerate(draft.stages(len(problem.profile.units))):
            apart = sum(one.found_bytes for one in sums.gathered[slice(*units)])
            num_bytes = share * (costs.gradient_bytes[stage] - apart)
            coding_s = sum_coding_s(sums, num_bytes, num_decoded, problem.profile.codecs)
            row = draft.grid[outline.rank_of_stage[stage]]
            found.append(coding_s / min(problem.speeds[device] for device in row) if is_slowest else coding_s)
        return found

    def _reduce_bytes(self, draft: Draft, *, before_update: bool = False) -> tuple[float, ...]:
        """What a ring moves over each of its hops, per stage."""
        costs, units = self._works.of(draft, draft.outline.sizes[0]).costs, len(self._problem.profile.units)
        return sync_bytes(costs, self._problem.request, draft, units, before_update=before_update)

    def rings(self, draft: Draft) -> list[HopBytes]:
        """The rings in which sites sum the gradients of a batch."""
        reduced = self.of_ranks(draft, self._reduce_bytes(draft))
        return [
            HopBytes(row[site], draft.share_of_sums * num_bytes)
            for row, num_bytes in zip(draft.grid, reduced, strict=True)
            for site in draft.sites(self._problem.request)
        ]

    # Rounds: what sites send each other in addition, or replicas that average weights.

    def round_bytes(self, draft: Draft) -> list[float]:
        """What each replica sends of every stage in rounds, in the mean over batches."""
        request = self._problem.request
        share = request.round_share(draft.outline.width)
        if request.rounds is None or not share:
            return [0.0] * draft.outline.num_stages
        costs = self._works.of(draft, draft.outline.sizes[0]).costs
        found = [share / request.rounds.every * one for one in costs.gradient_bytes]
        if not request.rounds.averages:  # of tied gradients each replica sends all it has
            more = share * (request.site_width(draft.outline.width) - 1)
            for tied in self.tied_of(draft):
                for stage in tied.stages:
                    found[stage] += more * tied.num_bytes
        return found

    def of_ranks(self, draft: Draft, of_stages: Sequence[float]) -> list[float]:
        """The same by rank: what its stages have together."""
        found = [0.0] * draft.outline.num_ranks
        for rank, num_bytes in zip(draft.outline.rank_of_stage, of_stages, strict=True):
            found[rank] += num_bytes
        return found

    def rounds(self, draft: Draft, of_stages: Sequence[float]) -> list[HopBytes]:
        """The rings of each rank with its counterparts in the other sites, which send these bytes."""
        width = self._problem.request.site_width(draft.outline.width)
        return [
            HopBytes(row[member::width], num_bytes)
            for row, num_bytes in zip(draft.grid, self.of_ranks(draft, of_stages), strict=True)
            for member in range(width)
        ]

    def _round_s(self, draft: Draft) -> float:
        """How long a round takes in which all ranks send what they have of a fragment."""
        problem, width = self._problem, draft.outline.width
        request = problem.request
        if request.rounds is None or width == 1:
            return 0.0
        often = request.rounds.every / request.rounds.fragments
        share, num_sites = request.coded_share(width), request.num_sites(width)
        rounds = self.rounds(draft, [often * one for one in self.round_bytes(draft)])
        trip_s = problem.round_trip_s(frozenset(device for row in draft.grid for device in row))
        coding_s = self.of_ranks(
            draft, self._coded_s(draft, request.sums, num_decoded=num_sites, share=share)
        )
        return rings_s(problem, rounds, in_round=True) + max(coding_s) + _ROUND_TRIPS * trip_s

    def waits_s(self, draft: Draft, batch_s: float) -> float:
        """For how long replicas that average weights wait for rounds, in the mean over batches."""
        rounds = self._problem.request.rounds
        if rounds is None or not rounds.averages:
            return 0.0
        hidden_s = (rounds.lag + (draft.rule is not Rule.SYNCHRONOUS)) * batch_s
        return rounds.fragments / rounds.every * max(self._round_s(draft) - hidden_s, 0.0)
