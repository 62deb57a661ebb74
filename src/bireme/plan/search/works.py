"""What the replicas of a draft plan have to do and to send, and what its forecast assumes.

None of this depends on when work and messages meet: the simulator finds that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

from bireme.cluster.cluster import link_notes
from bireme.cluster.device import MOST_SENDS, ResourceSeconds, Speeds
from bireme.codec.description import parse_codec, sum_name
from bireme.codec.sum_description import DENSE
from bireme.plan.codec_costs import coded
from bireme.plan.forecast import StageForecast
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.plan import device_ranges
from bireme.plan.search.contention import HopBytes, rings_s
from bireme.plan.search.draft import Draft
from bireme.plan.search.draft_paging import TiedGradients, shared_costs, shared_key
from bireme.plan.search.problem import PlanningProblem
from bireme.schedule.program import Rule
from bireme.schedule.routes import microbatch_owner
from bireme.simulate.costs import Costs
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
