"""Links: who shares what on the way from one rank to another, and how fast that makes each message.

A `Network` is a set of wires, each with so many bytes a second, and a path over them for every pair of
ranks that talks. A cable that works both ways at once is two wires, one that does not is one; a network
card that serves all ranks of a server is a wire on all their paths.

Messages of one pair of ranks go one after the other. Messages of different pairs that meet on a wire share
it fairly: rates are max-min fair, worked out again whenever a message begins or ends.

A message can stand for several that are under way at the same time: it then has a load of more than one on a
wire, and may load wires that it does not pass itself. So the messages of one pipeline show what those of its
replicas take from each other, as long as the replicas are in step.
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bireme.cluster.cluster import Link, Overlap
from bireme.errors import BiremeError
from bireme.timeline.timeline import Transfers


@dataclass(frozen=True, slots=True)
class Wire:
    """Something that carries so many bytes a second, shared by all that pass."""

    name: str
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise BiremeError(f"Wire {self.name} carries {self.bytes_per_s} bytes/s; it must be more than 0.")


def busy_bytes(curved: Sequence[Link], num_bytes: float, parts: int = 1) -> float:
    """The bytes that a way carries at its rate in the time that some bytes keep it busy, which cross it in
    `parts` messages; the link that is slowest for a message of that size decides.
    """
    if not num_bytes or not curved:
        return num_bytes
    return max(parts * link.busy_bytes(num_bytes / parts) for link in curved)


@dataclass(frozen=True, slots=True)
class Path:
    """The wires a message passes, by their number, the seconds it is late on top, and which end computes
    meanwhile.

    `loads` are how many messages at its rate each of these wires carries, one unless given; `elsewhere` are
    the wires that only messages like it pass, and how many. `curved` are the links of the way on which small
    messages are slower; bytes cross them in `parts` messages.
    """

    wires: tuple[int, ...]
    latency_s: float = 0.0
    overlap: Overlap = Overlap.FULL
    loads: tuple[float, ...] = ()
    elsewhere: tuple[tuple[int, float], ...] = ()
    curved: tuple[Link, ...] = ()
    parts: int = 1

    def busy_bytes(self, num_bytes: float) -> float:
        """The bytes that the wires carry at their rate in the time that these bytes keep them busy."""
        return busy_bytes(self.curved, num_bytes, self.parts)

    def loaded(self) -> list[tuple[int, float]]:
        """The wires that it passes, with its load on each."""
        return list(zip(self.wires, self.loads or (1.0,) * len(self.wires), strict=True))


@dataclass(frozen=True, slots=True)
class Network:
    """Wires, and the paths over them: between ranks, and of each rank's gradient sync. `agree_s` is the
    latency of the messages in which ranks agree on a batch.
    """

    wires: tuple[Wire, ...]
    paths: Mapping[tuple[int, int], Path]
    sync_paths: Mapping[int, Path] = field(default_factory=dict)
    agree_s: float = 0.0

    @staticmethod
    def dedicated(
        pairs: Iterable[tuple[int, int]],
        *,
        bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
        full_duplex: bool = True,
        overlap: Overlap = Overlap.FULL,
        servers: Sequence[int] = (),
    ) -> "Network":
        """A cable of its own for each two ranks that talk. With `servers`, that of each rank, all ranks of a
        server share its network card to talk to other servers, and inside a server messages take no time.
        """
        wires: list[Wire] = []
        number: dict[str, int] = {}
        paths = {}

        def path(names: Iterable[str], rate: float, *late: Any) -> Path:
            for name in names:
                if name not in number:
                    number[name] = len(wires)
                    wires.append(Wire(name, rate))
            return Path(tuple(dict.fromkeys(number[name] for name in names)), *late)

        far = [(a, b) for a, b in sorted(set(pairs)) if servers and servers[a] != servers[b]]
        for a, b in sorted(set(pairs).difference(far)):
            cable = f"{a} → {b}" if full_duplex else f"{min(a, b)} ↔ {max(a, b)}"
            late = () if servers else (latency_s, overlap)
            paths[a, b] = path([cable], math.inf if servers else bytes_per_s, *late)
        out, into = (" out", " in") if full_duplex else ("", "")
        for server in sorted(set(servers)):
            path([f"card of server {server}{end}" for end in (out, into)], bytes_per_s)
        for a, b in far:
            cards = [f"card of server {servers[a]}{out}", f"card of server {servers[b]}{into}"]
            paths[a, b] = path(cards, bytes_per_s, latency_s, overlap)
        return Network(tuple(wires), paths)

    def seconds(self, path: Path, num_bytes: float) -> float:
        """How long so many bytes keep the path's slowest wire busy when nobody shares it."""
        slowest = min((self.wires[wire].bytes_per_s / load for wire, load in path.loaded()), default=math.inf)
        return path.busy_bytes(num_bytes) / slowest

    def is_shared(self) -> bool:
        """Whether any wire lies on more than one path."""
        seen: set[int] = set()
        for path in (*self.paths.values(), *self.sync_paths.values()):
            wires = {*path.wires, *(wire for wire, _ in path.elsewhere)}
            if wires & seen:
                return True
            seen |= wires
        return False


@dataclass(slots=True)
class _Flow:
    path: Path
    loads: list[tuple[int, float]]
    left_bytes: float
    since_s: float
    rate: float = 0.0


class _Way(NamedTuple):
    """What a flow goes over, and its rate where it is alone."""

    path: Path
    loads: list[tuple[int, float]]
    """On all wires, those elsewhere among them."""
    alone_rate: float


_MOST_KEPT = 4096
"""Sets of flows whose rates are remembered."""


class Traffic:
    """The messages on a shared network at a moment, and when each will be through if nothing changes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.flows: dict[int, _Flow] = {}
        self.on_wire: list[set[int]] = [set() for _ in network.wires]
        self._rates: dict[frozenset[int], dict[int, float]] = {}
        """What flows that meet get, which is the same whenever these meet."""
        self._ways: dict[int, _Way] = {}
        """The way of each flow that has been under way."""

    def begin(self, flow: int, path: Path, num_bytes: float, now_s: float) -> dict[int, float]:
        """A message sets out; returns the new ends of all messages whose end changes, its own included."""
        way = self._ways.get(flow)
        if way is None or way.path is not path:
            self._rates.clear()
            way = self._ways[flow] = self._way(path)
        found = self.flows[flow] = _Flow(path, way.loads, path.busy_bytes(num_bytes), now_s)
        is_alone = not path.elsewhere
        for wire, _ in way.loads:
            here = self.on_wire[wire]
            if here:
                is_alone = False
            here.add(flow)
        if not is_alone:
            return self._share(self._neighbors({flow}), now_s)
        found.rate = way.alone_rate
        return {flow: self._end_s(found, now_s)}

    def _way(self, path: Path) -> "_Way":
        own = path.loaded()
        rates = (self.network.wires[wire].bytes_per_s / load for wire, load in own)
        return _Way(path, [*own, *path.elsewhere], min(rates, default=math.inf))

    def end(self, flow: int, now_s: float) -> dict[int, float]:
        """A message is through; returns the new ends of those it made way for."""
        touched: set[int] = set()
        for wire, _ in self.flows.pop(flow).loads:
            here = self.on_wire[wire]
            here.discard(flow)
            if here:
                touched |= here
        return self._share(self._neighbors(touched), now_s) if touched else {}

    def _neighbors(self, flows: set[int]) -> set[int]:
        """All messages that share wires with these, directly or through others."""
        found, todo = set(flows), list(flows)
        while todo:
            for wire, _ in self.flows[todo.pop()].loads:
                new = self.on_wire[wire] - found
                found |= new
                todo.extend(new)
        return found

    def _share(self, flows: set[int], now_s: float) -> dict[int, float]:
        """Give flows that meet their fair rates from now on; returns when each will be through."""
        among = frozenset(flows)
        rates = self._rates.get(among)
        if rates is None:
            if len(self._rates) >= _MOST_KEPT:
                self._rates.clear()
            rates = self._rates[among] = self._fair_rates(flows)
        ends = {}
        for number in sorted(flows):
            flow = self.flows[number]
            flow.left_bytes = max(flow.left_bytes - flow.rate * (now_s - flow.since_s), 0.0)
            flow.since_s = now_s
            flow.rate = rates[number]
            ends[number] = self._end_s(flow, now_s)
        return ends

    def _fair_rates(self, flows: set[int]) -> dict[int, float]:
        """Fill the wires fairly: the scarcest wire settles the rate of those that pass it, then the next."""
        rates = dict.fromkeys(flows, math.inf)
        room: dict[int, float] = {}
        load: defaultdict[int, float] = defaultdict(float)
        num_passing: Counter[int] = Counter()
        for number in flows:
            flow = self.flows[number]
            num_passing.update(flow.path.wires)
            for wire, own in flow.loads:
                room[wire] = self.network.wires[wire].bytes_per_s
                load[wire] += own
        unsettled = set(flows)
        while num_passing:
            rate, scarcest = min((room[wire] / load[wire], wire) for wire in num_passing)
            for number in self.on_wire[scarcest] & unsettled:
                flow = self.flows[number]
                if scarcest not in flow.path.wires:
                    continue
                rates[number] = rate
                unsettled.discard(number)
                for wire, own in flow.loads:
                    load[wire] -= own
                    room[wire] = max(room[wire] - rate * own, 0.0) if rate < math.inf else math.inf
                for wire in flow.path.wires:
                    num_passing[wire] -= 1
                    if not num_passing[wire]:
                        del num_passing[wire]
        return rates

    @staticmethod
    def _end_s(flow: _Flow, now_s: float) -> float:
        if flow.left_bytes == 0.0 or flow.rate == math.inf:
            return now_s
        return now_s + flow.left_bytes / flow.rate


# What the simulator moves: parcels, and the channels that they go through one after the other.


class SimulatedChannel:
    """The messages from one rank to another, or the gradient syncs of one rank: one after the other."""

    def __init__(self, source: int, destination: int, path: Path) -> None:
        self.destination = destination
        self.path = path
        self.is_sync = source == destination
        self.meets = path.overlap is Overlap.NONE
        """Whether messages only cross while both ranks wait."""
        self.free_s = 0.0
        self.is_busy = False
        self.queue: deque[SimulatedMessage] = deque()
        self.transfers = Transfers(
            source, destination, array("d"), array("d"), array("d"), array("q"), array("q")
        )

    def book(self, parcel: "SimulatedMessage", start_s: float, end_s: float) -> None:
        """A parcel was on its way from then to then."""
        transfers = self.transfers
        transfers.start_s.append(start_s)
        transfers.end_s.append(end_s)
        transfers.num_bytes.append(parcel.num_bytes)
        transfers.sent_by.append(parcel.sent_by)
        transfers.received_by.append(parcel.received_by)


@dataclass(slots=True, eq=False)
class SimulatedMessage:
    """A message between the moment one end is ready for it and its arrival."""

    key: int
    channel: int
    num_bytes: float = 0.0
    late_s: float = 0.0
    """Seconds on top of the transfer itself."""
    ready_s: float = 0.0
    sent_by: int = -1
    received_by: int = -1


# Processors: the cores that ranks of one machine share, and what each gets while several compute.
#
# A rank computes on as many cores as it has threads, as long as they are free. Where the ranks that are busy
# at a moment want more cores than their machine has, they share them max-min fairly, as the operating system
# does: a rank never gets more than it can use, and what one leaves is for the others. That is how messages
# share wires, and the same code works it out: a rank's threads are a wire of its own, the cores of its
# machine one that it shares, and seconds of work on one core are the bytes.


@dataclass(frozen=True, slots=True)
class Processors:
    """The cores of each machine, and for each rank its machine and its threads.

    Where others compute on a machine too, its cores may be a share and no whole number.
    """

    cores: tuple[float, ...]
    machine_of_rank: tuple[int, ...]
    threads_of_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.cores) <= 0 or min(self.threads_of_rank) < 1:
            raise BiremeError(
                f"Machines of {', '.join(map(str, self.cores))} cores cannot run ranks of "
                f"{', '.join(map(str, self.threads_of_rank))} threads."
            )
        if len(self.machine_of_rank) != len(self.threads_of_rank) or not all(
            0 <= machine < len(self.cores) for machine in self.machine_of_rank
        ):
            raise BiremeError("Give each rank its threads, and a machine that there is.")

    def is_shared(self) -> bool:
        """Whether the ranks of a machine can want more cores than it has."""
        wanted: Counter[int] = Counter()
        for machine, threads in zip(self.machine_of_rank, self.threads_of_rank, strict=True):
            wanted[machine] += threads
        return any(wanted[machine] > cores for machine, cores in enumerate(self.cores))

    def traffic(self) -> Traffic:
        """The work under way, rank by rank, with nothing begun."""
        threads = (Wire(f"threads of rank {r}", float(n)) for r, n in enumerate(self.threads_of_rank))
        cores = (Wire(f"cores of machine {m}", float(n)) for m, n in enumerate(self.cores))
        return Traffic(Network((*threads, *cores), {}))

    def is_full(self, rank: int, busy: Iterable[int]) -> bool:
        """Whether a rank and the ranks that are busy want all cores of its machine."""
        machine = self.machine_of_rank[rank]
        others = (self.threads_of_rank[one] for one in busy if self.machine_of_rank[one] == machine)
        return self.threads_of_rank[rank] + sum(others) >= self.cores[machine]

    def path(self, rank: int) -> Path:
        """What the work of a rank goes over in it."""
        return Path((rank, len(self.threads_of_rank) + self.machine_of_rank[rank]))

    def work(self, rank: int, seconds: float) -> float:
        """The seconds on one core in what takes a rank so long on cores of its own."""
        return seconds * self.threads_of_rank[rank]
