"""The simulator: go through a program on a clock and say when everything would happen.

A rank goes through its track in order. A compute instruction starts when the rank is free and its message
has arrived. A message sets out when it has been sent, its receive posted, and the one before it on its
channel is through; meanwhile both ranks go on. A path may overlap less (`Path.overlap`):

* `receiver`: the instruction that uses a message posts its receive, and waits while the message crosses.
  Messages of one pair of ranks then cross in the order they are used.
* `none`: a message crosses while both ranks wait, as at a rendezvous. The sender goes on when it has crossed.
  The receiver takes it just before it uses it; if all ranks wait, the one that has waited longest crosses.

A gradient sync runs in parallel to the track from REDUCE until UPDATE waits for it. If a stage is on several
ranks, it begins when all of them have come to REDUCE, and goes over the path of the first. Ranks that `agree`
on a batch before they step (its norm, whether it is finite) wait in UPDATE for the syncs of all ranks. A part
of the sync may cross while the last backward makes the gradients of the rest (`Costs.early_share`). Where
replicas average weights, that sync runs from AVERAGE_START until AVERAGE_END waits for it instead.

Where no two channels share a wire, and no two ranks the cores of a machine, each rank runs ahead as far as it
can; else all ranks go forward together in the order of time, so that messages and work meet when they would.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError
from bireme.schedule.program import Program, Rule
from bireme.schedule.residency import resident
from bireme.simulate.copies import RankMover, TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Processors, SimulatedChannel, SimulatedMessage, Traffic
from bireme.simulate.operations import (
    AGREED,
    AVERAGE,
    EARLY,
    FREE,
    LOCAL,
    PASSING,
    POSTING_USE,
    RECEIVE,
    REDUCE,
    SEND,
    SYNC,
    WAITING_SEND,
    Operation,
    Operations,
)
from bireme.timeline.timeline import RankTimeline, Timeline

Until = Callable[[Sequence[float]], object]
"""Whether the clock may stop, given when each batch so far has ended."""


def simulate(
    program: Program,
    costs: Costs,
    network: Network | None = None,
    *,
    overlap_reduce: bool = True,
    agree: bool = False,
    memory_series: bool = False,
    processors: Processors | None = None,
    tier_links: TierLinks | Sequence[TierLinks] | None = None,
    until: Until | None = None,
) -> Timeline:
    """The timeline of a lowered program.

    Without a network messages take no time. `overlap_reduce=False` keeps a rank busy during its gradient
    sync. `agree` lets no rank update before all have a batch's gradients, as it is in the engine.
    `memory_series` keeps the bytes at every instruction, not only the peak. With `processors` ranks of one
    machine share its cores; otherwise each has its own. `tier_links`, of all ranks or of each, say how fast
    the chunks of a program that pages travel, and what work loses to copies and exchanges; without them
    copies take no time. `until` is asked whenever a batch ends, given when each batch so far has ended (see
    `Timeline.batch_end_s`), and stops the clock; then neither bytes nor transfers are kept.
    """
    if costs.num_stages != program.num_stages:
        raise BiremeError(
            f"The costs are for {costs.num_stages} stages, but the program has {program.num_stages}."
        )
    if costs.rank_speed and len(costs.rank_speed) != program.num_ranks:
        raise BiremeError(
            f"rank_speed has {len(costs.rank_speed)} values for {program.num_ranks} ranks; give one each."
        )
    if agree and program.rule is Rule.STASHED:
        raise BiremeError(f"Under {program.name} stages step one by one, so ranks cannot agree before.")
    network = network or Network.dedicated(pairs_that_talk(program))
    run = _Run(
        program,
        costs,
        network,
        processors,
        tier_links if isinstance(tier_links, Sequence) else (tier_links or TierLinks(),) * program.num_ranks,
        overlap_reduce=overlap_reduce,
        agree=agree,
        until=until,
    )
    run.to_end()
    sizes = costs.sizes()
    return Timeline(
        program=program,
        ranks=tuple(
            RankTimeline(rank.number, program.tracks[rank.number], rank.start_s, rank.end_s)
            for rank in run.ranks
        ),
        transfers=tuple(channel.transfers for channel in run.channels if channel.transfers.start_s),
        memory=()
        if until is not None
        else tuple(resident(program, rank, sizes, series=memory_series) for rank in range(program.num_ranks)),
        paging=tuple(rank.mover.result() for rank in run.ranks if rank.mover is not None),
    )


def pairs_that_talk(program: Program) -> set[tuple[int, int]]:
    """The (source, destination) ranks of all messages of a program."""
    return {pair for _, a, b in program.routes.hops() for pair in ((a, b), (b, a))}


_GOES_ON, _WORKED, _SETS_OUT = range(3)
"""What an entry of the agenda says of a rank: that it may go on, that the work it was at is done, or that the
first part of a sum sets out.
"""


class _Rank:
    """A rank, how far it has got, and the times so far."""

    def __init__(self, number: int, ops: Iterator[tuple[Operation, int]], mover: RankMover | None) -> None:
        self.number = number
        self.ops = ops
        self.mover = mover
        """What copies its chunks if it offloads, and fetches whole weights if replicas share them."""
        self.now_s = 0.0
        self.held: tuple[Operation, int] | None = None
        """The operation it waits in, and the shift of its key."""
        self.since_s = 0.0
        self.is_woken = False
        """Whether it has waited since its last work."""
        self.worked_on: tuple[Operation, int] | None = None
        """The operation whose work is under way, and its key."""
        self.posted: int | None = None
        """The key of the message whose receive was posted last by its use."""
        self.crossing: list[int] = []
        """The keys of messages that must cross before it goes on with work; those of its sends inverted."""
        self.parked: dict[int, SimulatedMessage] = {}
        """Messages that only cross while it waits, and whose senders wait for that, by their keys."""
        self.start_s = array("d")
        self.end_s = array("d")


@dataclass(eq=False)
class _Run:
    """One simulation under way."""

    program: Program
    costs: Costs
    network: Network
    processors: Processors | None
    tier_links: Sequence[TierLinks]
    overlap_reduce: bool
    agree: bool
    until: Until | None

    def __post_init__(self) -> None:
        program, costs, network = self.program, self.costs, self.network
        self.is_over = False
        self.begun: dict[int, tuple[int, float]] = {}
        """By batch, how many sums of its gradients have begun, and when the last did, while some have not."""
        self.batch_end_s: list[float] = []
        self.agree_s = costs.engine.agree_s + network.agree_s
        if self.processors is not None and not self.processors.is_shared():
            self.processors = None
        cores = self.processors
        self.work = None if cores is None else cores.traffic()
        self.core_paths = [] if cores is None else [cores.path(rank) for rank in range(program.num_ranks)]
        meets = any(path.overlap is Overlap.NONE for path in network.paths.values())
        self.in_order = meets or network.is_shared() or self.processors is not None
        self.traffic = Traffic(network)
        self.operations = Operations(program, costs, network, self.agree)
        self.channels = self.operations.channels
        self.ranks = [
            _Rank(
                number,
                self.operations.of_rank(number),
                RankMover(program, number, self.tier_links[number], costs, network)
                if program.tiers_of(number) is not None or program.num_sharers > 1
                else None,
            )
            for number in range(program.num_ranks)
        ]
        self.agenda = [(0.0, rank.number, _GOES_ON, 0) for rank in self.ranks]
        """When which rank goes on or has worked, or (rank −1) which flow is through; work and flows with the
        stamp that makes it valid."""
        self.parcels: dict[int, SimulatedMessage] = {}
        """Messages that one end is ready for and the other not yet."""
        self.arrival_s: dict[int, float] = {}
        self.waiting: dict[int, _Rank] = {}
        self.early: set[int] = set()
        """The sums of which a part has crossed before."""
        self.sums: dict[int, tuple[SimulatedMessage, list[int]]] = {}
        """The sums of stages to which some of their ranks have come, and these ranks."""
        self.synced: dict[int, list[tuple[int, float]]] = {}
        """By batch, the syncs that have come and wait for those of the other stages, and when they came."""
        self.flows: dict[int, tuple[SimulatedMessage, float]] = {}
        self.stamps: dict[int, int] = {}
        self.work_stamps = [0] * program.num_ranks
        self.num_stamps = 0
        self.late_s: dict[float, float] = {}
        """What messages of so many bytes are late."""

    def to_end(self) -> None:
        """Run until nothing moves; everything must have been done by then."""
        agenda, ranks, stamps, work_stamps = self.agenda, self.ranks, self.stamps, self.work_stamps
        while (agenda or self._cross_early()) and not self.is_over:
            now, rank, flow, stamp = heappop(agenda)
            if rank < 0:
                if stamps.get(flow) == stamp:
                    self._end_flow(flow, now)
            elif flow == _GOES_ON:
                self._go_on(ranks[rank], now)
            elif flow == _SETS_OUT:
                self._set_out(self.sums.pop(stamp)[0])
            elif work_stamps[rank] == stamp:
                self._end_work(ranks[rank], now)
        waits = [f"rank {r.number} waits at {r.held[0].instruction}" for r in self.ranks if r.held]
        if waits and not self.is_over:
            raise BiremeError(
                f"This program never ends: {'; '.join(waits)}. `bireme schedule --check` says why."
            )

    def _go_on(self, rank: _Rank, now: float) -> None:
        """Let a rank run until it must wait or, where order in time matters, until it has computed."""
        now = max(now, rank.now_s)
        held, rank.held = rank.held, None
        since = rank.since_s if held else None
        crossing, mover, in_order = rank.crossing, rank.mover, self.in_order
        begins_sum = self.operations.begins_sum
        for op, shift in chain((held,), rank.ops) if held else rank.ops:
            code, seconds, key, _, _, _ = op
            key += shift
            begun = now if since is None else since
            if mover is not None:
                chunks_s = mover.start(len(rank.start_s), now)
                if in_order and chunks_s > now:
                    rank.since_s = begun
                    self._hold(rank, op, shift, now, key, chunks_s)
                    return
                now = max(now, chunks_s)
            if code == RECEIVE:
                self._ready(op, key, len(rank.start_s), now)
            elif code not in PASSING and (code != LOCAL or crossing):
                if code == POSTING_USE and rank.posted != key:
                    rank.posted = key
                    self._ready(op, key, len(rank.start_s), now)
                while crossing:
                    arrival = self.arrival_s.get(crossing[-1])
                    if arrival is None or arrival > now:
                        rank.since_s = begun
                        self._hold(rank, op, shift, now, crossing[-1], arrival)
                        return
                    if crossing[-1] < 0:
                        del self.arrival_s[crossing[-1]]
                    crossing.pop()
            if code not in FREE and (code != REDUCE or not self.overlap_reduce):
                if key not in self.arrival_s and code == REDUCE:
                    self._sync(rank, op, key, len(rank.start_s), now + seconds)
                arrival = self.arrival_s.get(key)
                if arrival is None or (in_order and arrival > now):
                    rank.since_s = begun
                    self._hold(rank, op, shift, now, key, arrival)
                    return
                if code != REDUCE or (self.agree and key % 8 != AVERAGE):
                    del self.arrival_s[key]
                if code != REDUCE:
                    now = max(now, arrival)
                else:
                    # A sync that runs alone lasts as long as its instruction.
                    now, seconds = begun, max(arrival, now) - begun
            rank.start_s.append(now)
            since = None
            if begins_sum and (found := begins_sum.get(id(op))) is not None:
                _, reduce = found
                self._sync_early(rank, reduce, reduce.key + shift, now, seconds)
            if seconds and mover is not None:
                seconds += mover.taken_s(now, seconds)
            if seconds and in_order:
                self._begin_work(rank, op, key, now, seconds)
                return
            now += seconds
            self._worked(rank, op, key, now)

    def _begin_work(self, rank: _Rank, op: Operation, key: int, now: float, seconds: float) -> None:
        """A rank is at an operation's work, for so long if it need not share its cores."""
        rank.now_s = now
        rank.worked_on = op, key
        if self.work is None or self.processors is None:
            heappush(self.agenda, (now + seconds, rank.number, _WORKED, 0))
            return
        number = rank.number
        if rank.is_woken and self.processors.is_full(number, self.work.flows):
            seconds += self.costs.engine.waking_s(seconds)
        rank.is_woken = False
        cores_s = self.processors.work(number, seconds)
        self._stamp_work(self.work.begin(number, self.core_paths[number], cores_s, now))

    def _end_work(self, rank: _Rank, now: float) -> None:
        if self.work is not None:
            self._stamp_work(self.work.end(rank.number, now))
        assert rank.worked_on is not None, "work that ends was begun"
        self._worked(rank, *rank.worked_on, now)
        rank.now_s = now
        self._go_on(rank, now)

    def _stamp_work(self, ends: dict[int, float]) -> None:
        for rank, end in ends.items():
            self.num_stamps += 1
            self.work_stamps[rank] = self.num_stamps
            heappush(self.agenda, (end, rank, _WORKED, self.num_stamps))

    def _worked(self, rank: _Rank, op: Operation, key: int, now: float) -> None:
        """An operation is done, and what it lets loose sets out."""
        if op.code == SEND:
            self._sent(op, key, len(rank.end_s), now)
        elif op.code == WAITING_SEND:
            rank.crossing.append(~key)
            self._sent(op, key, len(rank.end_s), now)
        elif op.code == REDUCE:
            if self.overlap_reduce:
                self._sync(rank, op, key, len(rank.end_s), now)
            if self.until is not None and key % 8 != AVERAGE:
                self._summing(
                    key // (self.operations.stride * self.program.num_microbatches), rank.start_s[-1]
                )
        if rank.mover is not None:
            rank.mover.ended(now)
        rank.end_s.append(now)

    def _summing(self, batch: int, now: float) -> None:
        """A rank has begun to sum a stage's gradients of a batch, which ends with the last of these."""
        count, latest = self.begun.pop(batch, (0, 0.0))
        latest = max(latest, now)
        if count + 1 < self.program.routes.num_places:
            self.begun[batch] = count + 1, latest
            return
        self.batch_end_s.append(latest)
        assert self.until is not None, "batches are counted for it alone"
        self.is_over = self.is_over or bool(self.until(self.batch_end_s))

    def _hold(
        self, rank: _Rank, op: Operation, shift: int, now: float, key: int, arrival: float | None
    ) -> None:
        rank.now_s = now
        rank.is_woken = True
        rank.held = op, shift
        if arrival is None and (parcel := rank.parked.get(op.key + shift)) is not None:
            self._cross(rank, parcel, now)
            arrival = self.arrival_s.get(key)
        if arrival is None:
            self.waiting[key] = rank
        else:
            heappush(self.agenda, (arrival, rank.number, _GOES_ON, 0))

    def _sent(self, op: Operation, key: int, index: int, now: float) -> None:
        parcel = self.parcels.pop(key, None) or SimulatedMessage(key, op.channel)
        num_bytes = parcel.num_bytes = op.num_bytes
        late_s = self.late_s.get(num_bytes)
        if late_s is None:
            late_s = self.late_s[num_bytes] = self.costs.engine.lateness_s(num_bytes)
        parcel.late_s = late_s
        parcel.sent_by = index
        self._one_end(parcel, now)

    def _ready(self, op: Operation, key: int, index: int, now: float) -> None:
        parcel = self.parcels.pop(key, None) or SimulatedMessage(key, op.channel)
        parcel.received_by = index
        self._one_end(parcel, now)

    def _one_end(self, parcel: SimulatedMessage, now: float) -> None:
        """One end of a message is ready; when the other is too, it sets out."""
        parcel.ready_s = max(parcel.ready_s, now)
        if parcel.sent_by < 0 or parcel.received_by < 0:
            self.parcels[parcel.key] = parcel
            return
        channel = self.channels[parcel.channel]
        if not channel.meets:
            self._set_out(parcel)
        else:
            receiver = self.ranks[channel.destination]
            receiver.parked[parcel.key] = parcel
            if receiver.held is not None and receiver.held[0].key + receiver.held[1] == parcel.key:
                self._cross(receiver, parcel, now)

    def _cross(self, receiver: _Rank, parcel: SimulatedMessage, now: float) -> None:
        """A message sets out that its receiver waits for from now on."""
        del receiver.parked[parcel.key]
        parcel.ready_s = max(parcel.ready_s, now)
        receiver.crossing.append(parcel.key)
        self._set_out(parcel)

    def _cross_early(self) -> bool:
        """Let the message cross that has waited longest, where nothing else moves; whether there is one."""
        parked = ((one.ready_s, rank.number, one) for rank in self.ranks for one in rank.parked.values())
        first = min(parked, key=lambda one: one[:2], default=None)
        if first is None:
            return False
        _, number, parcel = first
        self._cross(self.ranks[number], parcel, self.ranks[number].now_s)
        return bool(self.agenda)

    def _sync_early(self, rank: _Rank, op: Operation, key: int, now: float, seconds: float) -> None:
        """A rank begins the last backward of a stage, which makes its gradients one after the other."""
        share = self.costs.early_share[op.instruction.stage]
        now += (1.0 - share) * seconds
        parcel = self._all_there(rank, op, key + EARLY, len(rank.start_s) - 1, now)
        if parcel is None:
            return
        parcel.num_bytes *= share
        self.early.add(parcel.key - EARLY)
        if self.in_order:
            self.sums[parcel.key] = parcel, []
            heappush(self.agenda, (parcel.ready_s, rank.number, _SETS_OUT, parcel.key))
        else:
            self._set_out(parcel)

    def _all_there(
        self, rank: _Rank, op: Operation, key: int, index: int, now: float
    ) -> SimulatedMessage | None:
        """What all ranks of a stage sum, when the last of them has come to it."""
        ranks = self.program.routes.ranks_of(op.instruction.stage)
        key -= (rank.number - ranks.start) * self.operations.stride
        parcel, there = self.sums.pop(key, (SimulatedMessage(key, op.channel), []))
        parcel.num_bytes = op.num_bytes
        parcel.ready_s = max(parcel.ready_s, now)
        if rank.number == ranks.start:
            parcel.sent_by = parcel.received_by = index
        there.append(rank.number)
        if len(there) < len(ranks):
            self.sums[key] = parcel, there
            return None
        return parcel

    def _sync(self, rank: _Rank, op: Operation, key: int, index: int, now: float) -> None:
        """A rank has come to the sum of its stage, which sets out when all ranks of the stage have."""
        parcel = self._all_there(rank, op, key, index, now)
        if parcel is None:
            return
        key = parcel.key
        if key in self.early:
            self.early.discard(key)
            parcel.num_bytes *= 1.0 - self.costs.early_share[op.instruction.stage]
        is_average = key % 8 == AVERAGE
        if is_average or self.program.average_lag is None:
            parcel.late_s = self.costs.reduce_s[op.instruction.stage]
        carried_s = self.network.seconds(self.channels[op.channel].path, op.num_bytes)
        parcel.late_s += max(self.costs.engine.reduce_s_per_byte * op.num_bytes - carried_s, 0.0)
        self._set_out(parcel)

    def _set_out(self, parcel: SimulatedMessage) -> None:
        channel = self.channels[parcel.channel]
        if not self.in_order or not channel.path.wires:
            start = max(parcel.ready_s, channel.free_s)
            through = start + self.network.seconds(channel.path, parcel.num_bytes)
            channel.free_s = through + (parcel.late_s if channel.is_sync else 0.0)
            self._arrive(channel, parcel, start, through)
        elif channel.is_busy:
            channel.queue.append(parcel)
        else:
            self._begin_flow(channel, parcel, parcel.ready_s)

    def _begin_flow(self, channel: SimulatedChannel, parcel: SimulatedMessage, now: float) -> None:
        channel.is_busy = True
        self.flows[parcel.channel] = parcel, now
        self._stamp(self.traffic.begin(parcel.channel, channel.path, parcel.num_bytes, now))

    def _end_flow(self, flow: int, now: float) -> None:
        parcel, start = self.flows.pop(flow)
        del self.stamps[flow]
        channel = self.channels[flow]
        self._stamp(self.traffic.end(flow, now))
        self._arrive(channel, parcel, start, now)
        if channel.queue:
            self._begin_flow(channel, channel.queue.popleft(), now)
        else:
            channel.is_busy = False

    def _stamp(self, ends: dict[int, float]) -> None:
        for flow, end in ends.items():
            self.num_stamps += 1
            self.stamps[flow] = self.num_stamps
            heappush(self.agenda, (end, -1, flow, self.num_stamps))

    def _arrive(
        self, channel: SimulatedChannel, parcel: SimulatedMessage, start: float, through: float
    ) -> None:
        arrival = through + channel.path.latency_s + parcel.late_s
        if self.until is None:
            channel.book(parcel, start, arrival)
        if not channel.is_sync:
            self._arrived(parcel.key, arrival)
            if channel.meets:
                self._arrived(~parcel.key, arrival)  # to its sender
        elif parcel.key % 8 == SYNC + EARLY:
            return
        elif self.agree and parcel.key % 8 != AVERAGE:
            if not self.overlap_reduce:
                self._summed(parcel.key, arrival)
            batch = parcel.key // 8 // self.program.num_stages
            synced = self.synced.setdefault(batch, [])
            synced.append((parcel.key, arrival))
            if len(synced) == self.program.num_stages:
                latest = max(one for _, one in self.synced.pop(batch)) + self.agree_s
                for key, _ in synced:
                    self._summed(key + AGREED, latest)
        else:
            self._summed(parcel.key, arrival)

    def _summed(self, key: int, arrival: float) -> None:
        """The sum of a stage has come to all its ranks, for each of which there is a key."""
        stride = self.operations.stride
        for place in range(len(self.program.routes.ranks_of(key % stride // 8))):
            self._arrived(key + place * stride, arrival)

    def _arrived(self, key: int, arrival: float) -> None:
        self.arrival_s[key] = arrival
        rank = self.waiting.pop(key, None)
        if rank is not None:
            heappush(self.agenda, (max(arrival, rank.now_s), rank.number, _GOES_ON, 0))
