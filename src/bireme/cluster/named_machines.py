"""Machines as people write them: "rtx3090, 2x rtx4090+64GB, m3-max:64GB @ 1Gbit/s".

They become a cluster whose devices have the catalogue's figures. Links have the rates of their makers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bireme.bounds import bytes_of, bytes_per_s_of
from bireme.cluster.catalogue import PCIE_BYTES_PER_S, CatalogueDevice, catalogue, catalogued
from bireme.cluster.cluster import ASSUMED_CARD, ASSUMED_LINK, Bridge, Card, Cluster, Link, Mesh, Server
from bireme.errors import BiremeError

_MACHINE = re.compile(r"(?:(\d{1,9})\s*[x×*]\s*)?([^:+\s][^:+]*?)\s*(?::\s*([^+]+?)\s*)?(?:\+\s*(.+?)\s*)?")
_LATENCY = re.compile(r"\s(\d+(?:\.\d+)?)\s*ms$", re.IGNORECASE)

_MOST_BYTES = 2**60

MOST_MACHINES = 64
"""In a text that people write."""

UNIFIED_SHARE = 0.75
"""The share of an Apple machine's memory that macOS lets its GPU use (Metal's recommended working set)."""


@dataclass(frozen=True, slots=True)
class NamedMachine:
    """`count` equal devices of the catalogue in one machine, as the text's `words` name it. `memory_bytes` is
    the memory of each for a process, `host_bytes` the memory of the machine itself, 0 if it is not given.
    """

    words: str
    device: CatalogueDevice
    count: int
    memory_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NamedMachines:
    """Machines and the link of each to all others; `link` is None if none is given."""

    machines: tuple[NamedMachine, ...]
    link: Link | None

    def cluster(
        self,
        speeds: Mapping[str, tuple[float, float | None]] | None = None,
        link_share: float = 1.0,
        shared_share: float = 1.0,
    ) -> Cluster:
        """The machines as a cluster. `speeds` gives for the words of their devices the speed of arithmetic
        and of memory, relative to where the model was profiled. Links carry `link_share` of their bytes, and
        `shared_share` if several devices of a machine share its link to other machines.
        """
        link = self.link or ASSUMED_LINK
        name = ASSUMED_CARD if self.link is None else "network"
        words = [machine.device.word for machine in self.machines]
        servers = []
        for number, machine in enumerate(self.machines):
            speed, update_speed = (1.0, None) if speeds is None else speeds[machine.device.word]
            device = replace(
                machine.device.device,
                memory_bytes=machine.memory_bytes,
                speed=speed,
                update_speed=update_speed,
            )
            places = tuple(range(machine.count))
            carried = link.bytes_per_s * (shared_share if machine.count > 1 else link_share)
            twin = words[:number].count(machine.device.word)
            servers.append(
                Server(
                    machine.device.word if not twin else f"{machine.device.word}-{twin + 1}",
                    (device,) * machine.count,
                    _bridges(machine, link_share),
                    _meshes(machine, link_share),
                    (Card(name, places, replace(link, bytes_per_s=carried)),)
                    if len(self.machines) > 1
                    else (),
                    host_memory_bytes=machine.host_bytes,
                )
            )
        return Cluster(tuple(servers))


def _meshes(machine: NamedMachine, link_share: float) -> tuple[Mesh, ...]:
    rate = machine.device.peer_bytes_per_s
    if machine.count == 1 or not rate:
        return ()
    places = tuple(range(machine.count))
    return (Mesh("nvlink", places, Link(rate * link_share), switched=True),)


def _bridges(machine: NamedMachine, link_share: float) -> tuple[Bridge, ...]:
    if machine.device.kind == "cpu" or machine.count == 1:
        return ()
    return tuple(
        Bridge(f"pcie{place}", (place,), Link(PCIE_BYTES_PER_S * link_share))
        for place in range(machine.count)
    )


def machines_of(text: str) -> NamedMachines:
    """Machines from a text. Each is a word of the catalogue, with a count of equal devices before it, the
    memory of each after a colon and the machine's own after a plus sign. The link between machines follows
    an `@`: bits or bytes a second, and milliseconds between two machines.
    """
    words, at, link = text.partition("@")
    machines = tuple(map(_machine, words.split(",")))
    if len(machines) > MOST_MACHINES:
        raise BiremeError(f"There are {len(machines)} machines; the most is {MOST_MACHINES}.")
    return NamedMachines(machines, _link(link.strip()) if at else None)


def _machine(text: str) -> NamedMachine:
    found = _MACHINE.fullmatch(text.strip())
    if found is None:
        raise BiremeError(f"{text.strip()!r} is no machine. Write it as rtx3090, 2x rtx3090 or m3-max:64GB.")
    count, word, memory, host = found.groups()
    if len(names := word.split()) > 1 and catalogue().keys() >= {*names}:
        raise BiremeError(f"{text.strip()!r} are {len(names)} machines. Write a comma between two machines.")
    device = catalogued(word)
    if not 1 <= int(count or 1) <= MOST_MACHINES:
        raise BiremeError(f"{text.strip()} has {count} devices; it must have 1 to {MOST_MACHINES}.")
    if memory is None and not device.memory_bytes:
        raise BiremeError(
            f"{device.name} is sold with several sizes of memory. Give the size, such as {device.word}:32GB."
        )
    num_bytes = device.memory_bytes if memory is None else _bytes(memory, f"The memory of {device.word}")
    share = UNIFIED_SHARE if device.kind == "mps" else 1.0
    host_bytes = 0 if host is None else _bytes(host, f"The host memory of {device.word}")
    size = ("" if memory is None else f":{memory}") + ("" if host is None else f"+{host}")
    words = f"{count}× {device.word}{size}" if count and int(count) > 1 else f"{device.word}{size}"
    return NamedMachine(words, device, int(count or 1), round(share * num_bytes), host_bytes)


def _bytes(text: str, what: str) -> int:
    num_bytes = bytes_of(text, what)
    if not 2**20 <= num_bytes <= _MOST_BYTES:
        raise BiremeError(f"{what} is {text}; it must be 1 MiB to 1 EiB.")
    return num_bytes


def _link(text: str) -> Link:
    late = _LATENCY.search(text)
    try:
        rate = bytes_per_s_of(text[: late.start()] if late else text, "The link")
    except BiremeError:
        raise BiremeError(f"{text!r} is no link. Write it as 1Gbit/s, 100Mbit/s 20ms or 1.25GB/s.") from None
    return Link(rate, latency_s=float(late[1]) / 2e3 if late else ASSUMED_LINK.latency_s)
