"""The simulator: go through a program on a clock and say when everything would happen.

A rank goes through its track in order. A compute instruction starts when the rank is free and its message
has arrived. A message sets out when it has been sent, its receive posted, and the one before it on its
channel is through; meanwhile both ranks go on. With `overlap=False` the receiving rank stands still while a
message crosses, as blocking runtimes do; messages of one pair of ranks then cross in the order they are
used. A gradient sync runs beside the track from REDUCE until UPDATE waits for it. Ranks that `agree` on a
batch before they step (its norm, whether it is finite) wait in UPDATE for the syncs of all of them.

Where no two channels share a wire each rank runs ahead as far as it can; else all ranks go forward together
in the order of time, so that messages meet when they would.
"""

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program
from bireme.schedule.proofs.messages import channel_of
from bireme.schedule.residency import resident
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Traffic
from bireme.simulate.parcels import Channel, Parcel
from bireme.timeline.timeline import RankTimeline, Timeline

__all__ = ["pairs_that_talk", "simulate"]


def simulate(
    program: Program,
    costs: Costs,
    network: Network | None = None,
    *,
    overlap: bool = True,
    overlap_reduce: bool = True,
    agree: bool = False,
    memory_series: bool = False,
) -> Timeline:
    """The timeline of a lowered program.

    Without a network messages take no time. `overlap_reduce=False` keeps a rank busy during its gradient
    sync. `agree` lets no rank update before all have a batch's gradients, as it is in the engine.
    `memory_series` keeps the bytes at every instruction, not only the peak.
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
    run = _Run(program, costs, network, overlap=overlap, overlap_reduce=overlap_reduce, agree=agree)
    run.to_end()
    sizes = costs.sizes()
    return Timeline(
        program=program,
        ranks=tuple(
            RankTimeline(rank.number, program.tracks[rank.number], rank.start_s, rank.end_s)
            for rank in run.ranks
        ),
        transfers=tuple(channel.transfers for channel in run.channels if channel.transfers.start_s),
        memory=tuple(
            resident(program, rank, sizes, series=memory_series) for rank in range(program.num_ranks)
        ),
    )


def pairs_that_talk(program: Program) -> set[tuple[int, int]]:
    """The (source, destination) ranks of all messages of a program."""
    ranks = program.rank_of_stage
    neighbours = {pair for a, b in pairwise(ranks) for pair in ((a, b), (b, a))}
    return {(a, b) for a, b in neighbours if a != b}


LOCAL, USE, SEND, RECEIVE, REDUCE, UPDATE = range(6)

AGREED = 1
"""From the key of a sync to that of what all ranks agree on behind it."""


class _Op(NamedTuple):
    """An instruction as the inner loop wants it: what to do, how long, and with which message."""

    code: int
    seconds: float
    key: int
    """The message or sync it is about; batches later, so many strides more."""
    channel: int
    num_bytes: float
    instruction: Instruction


class _Rank:
    """A rank, how far it has got, and the times so far."""

    def __init__(self, number: int, ops: Iterator[tuple[_Op, int]]) -> None:
        self.number = number
        self.ops = ops
        self.now_s = 0.0
        self.held: tuple[_Op, int] | None = None
        """The operation it waits in, and the shift of its key."""
        self.since_s = 0.0
        self.start_s = array("d")
        self.end_s = array("d")


class _Run:
    """One simulation under way."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        network: Network,
        *,
        overlap: bool,
        overlap_reduce: bool,
        agree: bool,
    ) -> None:
        self.program = program
        self.costs = costs
        self.network = network
        self.overlap = overlap
        self.overlap_reduce = overlap_reduce
        self.agree = agree
        self.in_order = network.is_shared()
        self.traffic = Traffic(network)
        self.channels: list[Channel] = []
        self.number_of_channel: dict[tuple[int, int], int] = {}
        self.ranks = [_Rank(number, self._ops(number)) for number in range(program.num_ranks)]
        self.agenda = [(0.0, rank.number, 0, 0) for rank in self.ranks]
        """When which rank goes on, or (rank −1) which flow is through, with the stamp that makes it valid."""
        self.parcels: dict[int, Parcel] = {}
        """Messages that one end is ready for and the other not yet."""
        self.arrival_s: dict[int, float] = {}
        self.waiting: dict[int, _Rank] = {}
        self.synced: dict[int, list[tuple[int, float]]] = {}
        """By batch, the syncs that have come and wait for those of the other stages, and when they came."""
        self.flows: dict[int, tuple[Parcel, float]] = {}
        self.stamps: dict[int, int] = {}
        self.num_stamps = 0

    def to_end(self) -> None:
        """Run until nothing moves; everything must have been done by then."""
        while self.agenda:
            now, rank, flow, stamp = heappop(self.agenda)
            if rank >= 0:
                self._go_on(self.ranks[rank], now)
            elif self.stamps.get(flow) == stamp:
                self._end_flow(flow, now)
        waits = [f"rank {r.number} waits at {r.held[0].instruction}" for r in self.ranks if r.held]
        if waits:
            raise BiremeError(
                f"This program never ends: {'; '.join(waits)}. `bireme schedule --check` says why."
            )

    def _go_on(self, rank: _Rank, now: float) -> None:
        """Let a rank run until it must wait or, where order in time matters, until it has computed."""
        now = max(now, rank.now_s)
        held, rank.held = rank.held, None
        since = rank.since_s if held else None
        for op, shift in chain((held,), rank.ops) if held else rank.ops:
            code, seconds, key = op.code, op.seconds, op.key + shift
            begun = now if since is None else since
            if code == SEND:
                self._sent(op, key, len(rank.start_s), now)
            elif code == RECEIVE:
                if self.overlap:
                    self._ready(op, key, len(rank.start_s), now)
            elif code != LOCAL:
                if key not in self.arrival_s:
                    if code == REDUCE:
                        self._sync(op, key, len(rank.start_s), now)
                    elif code == USE and not self.overlap:
                        self._ready(op, key, len(rank.start_s), now)
                if code != REDUCE or not self.overlap_reduce:
                    arrival = self.arrival_s.get(key)
                    if arrival is None or (self.in_order and arrival > now):
                        rank.since_s = begun
                        self._hold(rank, op, shift, now, arrival)
                        return
                    if code != REDUCE or self.agree:
                        del self.arrival_s[key]
                    if code != REDUCE:
                        now = max(now, arrival)
                    else:
                        # A sync that nothing runs beside lasts as long as its instruction.
                        now, seconds = begun, max(arrival, now) - begun
            rank.start_s.append(now)
            now += seconds
            rank.end_s.append(now)
            since = None
            if seconds and self.in_order:
                rank.now_s = now
                heappush(self.agenda, (now, rank.number, 0, 0))
                return

    def _hold(self, rank: _Rank, op: _Op, shift: int, now: float, arrival: float | None) -> None:
        rank.now_s = now
        rank.held = op, shift
        if arrival is None:
            self.waiting[op.key + shift] = rank
        else:
            heappush(self.agenda, (arrival, rank.number, 0, 0))

    def _sent(self, op: _Op, key: int, index: int, now: float) -> None:
        parcel = self.parcels.pop(key, None) or Parcel(key, op.channel)
        parcel.num_bytes = op.num_bytes
        parcel.sent_by = index
        self._one_end(parcel, now)

    def _ready(self, op: _Op, key: int, index: int, now: float) -> None:
        parcel = self.parcels.pop(key, None) or Parcel(key, op.channel)
        parcel.received_by = index
        self._one_end(parcel, now)

    def _one_end(self, parcel: Parcel, now: float) -> None:
        """One end of a message is ready; when the other is too, it sets out."""
        parcel.ready_s = max(parcel.ready_s, now)
        if parcel.sent_by < 0 or parcel.received_by < 0:
            self.parcels[parcel.key] = parcel
        else:
            self._set_out(parcel)

    def _sync(self, op: _Op, key: int, index: int, now: float) -> None:
        parcel = Parcel(key, op.channel)
        parcel.num_bytes = op.num_bytes
        parcel.late_s = self.costs.reduce_s[op.instruction.stage]
        parcel.ready_s = now
        parcel.sent_by = parcel.received_by = index
        self._set_out(parcel)

    def _set_out(self, parcel: Parcel) -> None:
        channel = self.channels[parcel.channel]
        if not self.in_order or not channel.path.wires:
            start = max(parcel.ready_s, channel.free_s)
            through = start + self.network.seconds(channel.path, parcel.num_bytes)
            channel.free_s = through + parcel.late_s
            self._arrive(channel, parcel, start, through)
        elif channel.is_busy:
            channel.queue.append(parcel)
        else:
            self._begin_flow(channel, parcel, parcel.ready_s)

    def _begin_flow(self, channel: Channel, parcel: Parcel, now: float) -> None:
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

    def _arrive(self, channel: Channel, parcel: Parcel, start: float, through: float) -> None:
        arrival = through + channel.path.latency_s + parcel.late_s
        channel.book(parcel, start, arrival)
        if self.agree and channel.transfers.is_sync:
            if not self.overlap_reduce:
                self._arrived(parcel.key, arrival)
            batch = parcel.key // 8 // self.program.num_stages
            synced = self.synced.setdefault(batch, [])
            synced.append((parcel.key, arrival))
            if len(synced) == self.program.num_stages:
                latest = max(one for _, one in self.synced.pop(batch))
                for key, _ in synced:
                    self._arrived(key + AGREED, latest)
        else:
            self._arrived(parcel.key, arrival)

    def _arrived(self, key: int, arrival: float) -> None:
        self.arrival_s[key] = arrival
        rank = self.waiting.pop(key, None)
        if rank is not None:
            heappush(self.agenda, (max(arrival, rank.now_s), rank.number, 0, 0))

    def _ops(self, rank: int) -> Iterator[tuple[_Op, int]]:
        """A rank's track as operations, each with the shift of its key."""
        stride = self.program.num_microbatches * self.program.num_stages * 8
        ready: dict[int, list[_Op]] = {}
        for block in self.program.tracks[rank].blocks():
            ops = ready.get(id(block.instructions))
            if ops is None:
                ops = ready[id(block.instructions)] = [self._op(step, rank) for step in block.instructions]
            shift = block.batches * stride
            for op in ops:
                yield op, shift

    def _op(self, step: Instruction, rank: int) -> _Op:
        program = self.program
        seconds = self.costs.seconds(step, rank)
        if step.kind in SENDS or step.kind in RECEIVES:
            ends = channel_of(program, step)
            if ends is None:
                raise BiremeError(f"Rank {rank} holds {step}, but there is no stage on the other side.")
            is_send = step.kind in SENDS
            num_bytes = self.costs.border_bytes(step) if is_send else 0.0
            return _Op(
                SEND if is_send else RECEIVE,
                0.0,
                self._key(step.carries()),
                self._channel(*ends),
                num_bytes,
                step,
            )
        if step.kind in (Kind.REDUCE, Kind.UPDATE):
            key = self._number(step.batch, step.microbatch or 0, step.stage) * 8 + 4
            num_bytes = self.costs.reduce_bytes[step.stage]
            code = REDUCE if step.kind is Kind.REDUCE else UPDATE
            if code == UPDATE and self.agree:
                key += AGREED
            return _Op(code, seconds, key, self._channel(rank, rank), num_bytes, step)
        needed = step.needs(program.num_stages) if step.kind in COMPUTE else None
        if needed is not None:
            source = program.rank_of_stage[needed.from_stage]
            if source != rank:
                return _Op(USE, seconds, self._key(needed), self._channel(source, rank), 0.0, step)
        return _Op(LOCAL, seconds, 0, -1, 0.0, step)

    def _key(self, message: Message) -> int:
        half = 0 if message.half is None else message.half + 1
        kind = half if message.forward else 3
        return self._number(message.batch, message.microbatch or 0, message.to_stage) * 8 + kind

    def _number(self, batch: int, microbatch: int, stage: int) -> int:
        return (batch * self.program.num_microbatches + microbatch) * self.program.num_stages + stage

    def _channel(self, source: int, destination: int) -> int:
        ends = source, destination
        number = self.number_of_channel.get(ends)
        if number is None:
            number = self.number_of_channel[ends] = len(self.channels)
            path = self._sync_path(source) if source == destination else self._path(ends)
            self.channels.append(Channel(source, destination, path))
        return number

    def _path(self, ends: tuple[int, int]) -> Path:
        path = self.network.paths.get(ends)
        if path is None:
            raise BiremeError(f"The network has no path from rank {ends[0]} to rank {ends[1]}, which talk.")
        return path

    def _sync_path(self, rank: int) -> Path:
        path = self.network.sync_paths.get(rank)
        if path is None and any(self.costs.reduce_bytes):
            raise BiremeError(
                f"The costs have reduce_bytes, but the network has no path for rank {rank}'s gradient sync. "
                "Give sync_paths, or the time as reduce_s."
            )
        return Path(()) if path is None else path
