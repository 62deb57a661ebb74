"""Sums of gradients and rounds of a draft plan: their bytes, their seconds, and what waits for them."""

from collections import defaultdict
from collections.abc import Sequence

from bireme.codec.sum_description import SumCost, SumKind
from bireme.plan.codec_costs import sum_coding_s
from bireme.plan.plan_request import Goal
from bireme.plan.search.contention import HopBytes, busiest_lane, rings_s
from bireme.plan.search.draft import Draft, LowerBound
from bireme.plan.search.draft_paging import Tied, TiedGradients, reduce_share, sync_bytes, tied_rings
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.works import ReplicaWorks
from bireme.schedule.program import Rule
from bireme.sync.slices import bucket_bytes

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
        if (
            draft.paging is not None
            or request.rounds is not None
            or request.num_sharers(outline.width) > 1
            or codec.kind not in (SumKind.DENSE, SumKind.BITS)
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
