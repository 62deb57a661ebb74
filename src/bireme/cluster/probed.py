"""From measurements to a `Cluster`: which links there must be, that flows between devices went as they did.

Everything is measured as an experiment: some flows at once, and how fast each went. What may join the
devices is a short list of structures. In a structure, a lane carries the most that was ever seen to cross
it: if the structure is the true one, it then explains every experiment, because where a flow is held up,
the lane that holds it up is full. So the simplest structure that explains the experiments is taken. Nothing
here measures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations

from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.grouping import grouped

Flow = tuple[int, int]
"""From a device to another, by their numbers."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Flows at once, and the bytes a second of each."""

    flows: tuple[Flow, ...]
    bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.flows) != len(self.bytes_per_s) or not self.flows:
            raise BiremeError("An experiment needs at least one flow, and the bytes per second of each.")
        for flow, rate in zip(self.flows, self.bytes_per_s, strict=True):
            if not 0 < rate < float("inf"):
                raise BiremeError(
                    f"The flow from device {flow[0]} to {flow[1]} was measured at {rate} bytes/s; it must be "
                    "greater than 0."
                )


@dataclass(frozen=True, slots=True)
class AllReduce:
    """What a sum of so many bytes over the first devices took."""

    num_devices: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that a probe has found.

    `hosts[d]` names the server that device d is in; devices of a server follow each other. `latency_s` is
    that of a message between two devices, half of what it takes there and back. `by_size` has the bytes of
    larger messages, and their seconds measured in the same way.
    """

    hosts: tuple[str, ...]
    devices: tuple[Device, ...]
    latency_s: dict[Flow, float]
    experiments: tuple[Experiment, ...]
    all_reduces: tuple[AllReduce, ...] = ()
    by_size: dict[Flow, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.hosts) != len(self.devices) or not self.hosts:
            raise BiremeError("A probe needs at least one device, each in a server.")
        order = list(dict.fromkeys(self.hosts))
        if [order.index(host) for host in self.hosts] != sorted(order.index(host) for host in self.hosts):
            raise BiremeError(
                f"The ranks are in the servers {', '.join(self.hosts)}, one after the other. Start them so "
                "that the ranks of a server follow each other, as torchrun does."
            )
        alone = {one.flows[0] for one in self.experiments if len(one.flows) == 1}
        for pair in permutations(range(len(self.hosts)), 2):
            if pair not in alone or pair not in self.latency_s:
                raise BiremeError(f"The path from device {pair[0]} to {pair[1]} was not measured alone.")

    def alone(self, source: int, destination: int) -> float:
        """The bytes a second of a flow that met no other."""
        return next(one.bytes_per_s[0] for one in self.experiments if one.flows == ((source, destination),))

    def servers(self) -> dict[str, list[int]]:
        """The devices of each server."""
        return grouped((host, device) for device, host in enumerate(self.hosts))


def experiments_for(hosts: Sequence[str]) -> list[tuple[Flow, ...]]:
    """The flows to measure together; each way alone first.

    There are about twice as many as ways. They tell apart all structures that are looked for: flows both
    ways, from one device to all, from all to one, side by side, round about, and between servers from one
    device, from two, and from all.
    """
    num_devices = len(hosts)
    found: list[tuple[Flow, ...]] = [(pair,) for pair in permutations(range(num_devices), 2)]
    found += [((a, b), (b, a)) for a, b in combinations(range(num_devices), 2)]
    members = {host: [d for d in range(num_devices) if hosts[d] == host] for host in dict.fromkeys(hosts)}
    for own in members.values():
        found += _inside(own)
    if len(members) > 1:
        found += _between(list(members.values()))
    return list(dict.fromkeys(found))


def _inside(own: Sequence[int]) -> Iterator[tuple[Flow, ...]]:
    if len(own) < 3:
        return
    for one in own:
        others = [other for other in own if other != one]
        yield tuple((one, other) for other in others)
        yield tuple((other, one) for other in others)
    yield tuple(zip(own, [*own[1:], own[0]], strict=True))
    for a, b in combinations(own, 2):
        for x, y in _two_targets([one for one in own if one not in (a, b)]):
            yield ((a, x), (b, y))
            yield ((x, a), (y, b))


def _two_targets(rest: Sequence[int]) -> Iterator[Flow]:
    """The first two and the last two, which are most likely to be of different kinds."""
    if len(rest) >= 2:
        yield from dict.fromkeys(((rest[0], rest[1]), (rest[-1], rest[-2]), (rest[0], rest[-1])))


def _between(members: Sequence[Sequence[int]]) -> Iterator[tuple[Flow, ...]]:
    for place, own in enumerate(members):
        rest = [other for number, others in enumerate(members) if number != place for other in others]
        for one in own:
            yield tuple((one, other) for other in rest)
            yield tuple((other, one) for other in rest)
        for a, b in combinations(own, 2):
            for x, y in _two_targets(rest):
                yield ((a, x), (b, y))
                yield ((x, a), (y, b))
        yield tuple((own[k % len(own)], rest[k % len(rest)]) for k in range(max(len(own), len(rest))))
        yield tuple((rest[k % len(rest)], own[k % len(own)]) for k in range(max(len(own), len(rest))))
    turned = [*members[1:], members[0]]
    yield tuple(
        (one, other[k % len(other)])
        for own, other in zip(members, turned, strict=True)
        for k, one in enumerate(own)
    )
    if len(members) > 2:
        yield tuple((own[0], other[-1]) for own, other in zip(members, turned, strict=True))
