"""The devices of a run, from a cluster file or this machine, and their processes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from bireme.cluster.cluster import (
    ASSUMED_CARD,
    ASSUMED_LINK,
    MOST_BYTES_PER_S,
    Card,
    Cluster,
    Link,
    Route,
    Server,
)
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.machine import discover, num_cores
from bireme.devices import ACCELERATOR, UNTESTED, Backend, num_accelerators
from bireme.errors import BiremeError, tell
from bireme.machines.measured_lines import LineBetween, MeasuredLine
from bireme.machines.orders import SPEED
from bireme.plan.plan import Plan
from bireme.profile.control import device_here, torch_device
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.measuring.probe import (
    check_disk_folder,
    free_disk_bytes,
    measured_disk_bytes_per_s,
    measured_host_speed,
)
from bireme.train.run_file import RunFile
from bireme.wire.listener import RATE_VARIABLE

# The devices of a run on several machines: each machine says what it has, and all of it is the cluster.
#
# What joins the machines is not known here unless a cluster file says it, or the machines of `bireme join`
# have measured their lines. A machine that does not report the speed of its network card either is assumed to
# have 1 Gbit/s.


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One process: its machine's name, which of the launcher's nodes it is of, whether a GPU is its own, how
    many the machine has, and the keeper there of second copies of an earlier start.
    """

    rank: int
    node: str
    host: str
    has_cuda: bool
    num_cuda: int = 0
    keeper: KeeperAddress | None = None


def nodes_of(members: Sequence[LaunchedProcess]) -> dict[str, list[LaunchedProcess]]:
    """The processes of each node, nodes in the order of their first rank."""
    found: dict[str, list[LaunchedProcess]] = {}
    for member in sorted(members, key=lambda one: one.rank):
        found.setdefault(member.node, []).append(member)
    return found


def server_here(device: str, count: int) -> Server:
    """This machine with as many devices of the kind as it has processes."""
    try:
        (server,) = discover(count if device == "cpu" else 0).cluster.servers
    except BiremeError:  # GPUs that cannot be asked for their links
        if device == "cpu":
            raise
        (server,) = discover(count).cluster.servers
    kept = tuple(one for one in server.devices if one.kind == device)
    if not len(kept) == len(server.devices) == count:
        if device != "cpu":
            kept = tuple(device_here(torch.device(device, place)) for place in range(count))
        cards = tuple(replace(card, devices=tuple(range(count))) for card in server.cards[:1])
        server = replace(server, devices=kept, bridges=(), meshes=(), cards=cards)
    if device == "cpu":
        speed = float(os.environ.get(SPEED, "1"))
        server = replace(server, devices=tuple(replace(one, speed=speed) for one in server.devices))
    rate = os.environ.get(RATE_VARIABLE, "")
    return _slowed(server, float(rate)) if rate.isdecimal() else server


_MEASURED_CARD = "measured"
_FAST_BYTES_PER_S = 2.5e8
"""What a line is measured to carry is taken for the rate of a card only below that: a faster card is limited
by the processor while it is measured.
"""


def _on_lines(server: Server, lines: Sequence[MeasuredLine]) -> Server:
    """The machine with the card that its lines were measured to be, as it sees them. A rated card stays if
    nothing slower is on the way to the best of the other machines.
    """
    out, into = max(one.out_bytes_per_s for one in lines), max(one.in_bytes_per_s for one in lines)
    if server.cards and min(out, into) > min(_FAST_BYTES_PER_S, server.cards[0].link.bytes_per_s):
        return server
    # A line has the latencies of both cards, so a card has at most half of the shortest.
    link = Link(out, min(one.round_s for one in lines) / 4, back_bytes_per_s=into)
    return replace(server, cards=(Card(_MEASURED_CARD, tuple(range(len(server.devices))), link),))


def _route(one: Server, other: Server, line: MeasuredLine) -> Route:
    """The line between two machines. If it is as fast as a processor carries, only its latency counts."""
    cards_s = sum(server.cards[0].link.latency_s for server in (one, other))
    out, into = line.out_bytes_per_s, line.in_bytes_per_s
    if min(out, into) > _FAST_BYTES_PER_S:
        out = into = MOST_BYTES_PER_S
    link = Link(out, max(line.round_s / 2 - cards_s, 0.0), back_bytes_per_s=into)
    return Route((one.name, other.name), link)


def _slowed(server: Server, most_bytes_per_s: float) -> Server:
    """The machine with cards that carry no more than that; an unknown card carries just that."""
    everyone = tuple(range(len(server.devices)))
    cards = server.cards or (Card("limited", everyone, replace(ASSUMED_LINK, bytes_per_s=most_bytes_per_s)),)
    return replace(
        server,
        cards=tuple(
            replace(card, link=replace(card.link, bytes_per_s=min(card.link.bytes_per_s, most_bytes_per_s)))
            for card in cards
        ),
    )


def cluster_of(servers: Sequence[Server], lines: Sequence[LineBetween] = ()) -> tuple[Cluster, str]:
    """The cluster of these machines with the lines that were measured between them, and a sentence on what is
    not known about it.

    Machines of one name get numbers. A machine whose network card is unknown gets `ASSUMED_LINK`.
    """
    named, unknown = list[Server](), 0
    for number, server in enumerate(servers):
        name, count = server.name, 2
        while name in {one.name for one in named}:
            name, count = f"{server.name}-{count}", count + 1
        own = [one.line if one.first == number else one.line.turned for one in lines if number in one.ends]
        found = _on_lines(server, own) if own else server
        if not found.cards:
            card = Card(ASSUMED_CARD, tuple(range(len(found.devices))), ASSUMED_LINK)
            found, unknown = replace(found, cards=(card,)), unknown + 1
        named.append(replace(found, name=name))
    routes = tuple(_route(named[one.first], named[one.second], one.line) for one in lines)
    if unknown:
        known = f"The links of {unknown} of {len(named)} machines are unknown; the plan assumes 1 Gbit/s and "
        known += "0.5 ms between hosts"
    elif lines:
        return Cluster(tuple(named), routes=routes), (
            "The plan uses the lines between the machines as they were measured."
        )
    else:
        known = "The plan uses the rated speed of the network cards for the links between machines"
    how = "To measure them: bireme cluster probe, and cluster.source."
    return Cluster(tuple(named), routes=routes), f"{known}. {how}"


def ranks_on(cluster: Cluster, nodes: Mapping[str, Sequence[LaunchedProcess]]) -> list[int]:
    """Which rank each device of the cluster is computed by.

    Servers and machines of the same names belong together. Where the names do not say it, devices and
    ranks follow each other in their own order.
    """
    own = list(nodes.values())
    by_name = {members[0].host: members for members in own}
    servers = [(server.name, len(server.devices)) for server in cluster.servers]
    if len(by_name) == len(own) and all(len(by_name.get(name, ())) == count for name, count in servers):
        own = [by_name[name] for name, _ in servers]
    return [member.rank for members in own for member in members]


def places_in(plan: Plan, cluster: Cluster, ranks: Sequence[int]) -> list[int]:
    """Which rank of the launcher takes each place of the plan: the one on the device that it names.

    Places are counted as the engine does, replica by replica. A plan that names no devices, or those of
    another cluster, is assigned in order.
    """
    if plan.num_ranks > len(ranks):
        raise BiremeError(
            f"The plan is for {plan.num_ranks} processes, but {len(ranks)} were started. Start as many, or "
            "plan for fewer."
        )
    number = {placed.name: place for place, placed in enumerate(cluster.devices())}
    names = plan.process_devices
    if not names or not set(names) <= set(number):
        return list(ranks[: plan.num_ranks])
    return [ranks[number[name]] for name in names]


CPU_WORKERS = 2
"""Processes on a machine without a GPU, unless the run file says otherwise: as few as a pipeline has."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The cluster, where its processes compute and what carries their messages.

    `threads` are those of each process, None where they share the cores.
    """

    cluster: Cluster
    device: str
    backend: Backend
    threads: int | None


def machines_of(run: RunFile, *, num_cuda: int, num_cores: int, computes: bool = True) -> Machines:
    """What a run has to run on, where there are that many GPUs and cores.

    Without `computes` the run is only planned, and the devices of a cluster file need not be here.
    """
    asked = run.cluster
    kind = asked.device if asked.device in UNTESTED else ACCELERATOR
    num = num_cuda if kind == ACCELERATOR else num_accelerators(kind)
    wants = asked.workers or (num if num and asked.device != "cpu" else CPU_WORKERS)
    # NCCL wants a device for each process; gloo does not care.
    may_share = asked.device == kind and num > 0 and (kind in UNTESTED or asked.backend == "gloo")
    if asked.device == kind and num < wants and not may_share:
        name = "CUDA" if kind == ACCELERATOR else kind
        raise BiremeError(
            f"cluster.device is {kind}, but there are {num} {name} devices for {wants} processes. Set "
            "cluster.workers to fewer, cluster.backend to gloo to share devices, or cluster.device to cpu."
        )
    device = kind if asked.device != "cpu" and (may_share or 0 < wants <= num) else "cpu"
    if device in UNTESTED:
        _tell_untested(device)
    cluster = load_cluster(asked.source) if asked.source is not None else _here(device, wants, num)
    if asked.workers is not None and cluster.num_devices != asked.workers:
        raise BiremeError(
            f"cluster.source is {asked.source}, which has {cluster.num_devices} devices, but cluster.workers "
            f"is {asked.workers}: every device is a process. Leave cluster.workers out."
        )
    if computes:
        check_kinds(run, cluster, device)
    backend = asked.backend if asked.backend != "auto" else ("nccl" if device == ACCELERATOR else "gloo")
    if backend == "nccl" and device != ACCELERATOR:
        where = "CPUs" if device == "cpu" else device
        raise BiremeError(
            f"cluster.backend is nccl, which joins only CUDA devices, but the run is on {where}. Set it to "
            "gloo."
        )
    threads = asked.threads_per_worker
    if threads is None and device == "cpu":
        threads = max(1, num_cores // cluster.num_devices)
    return Machines(cluster, device, backend, threads)


@cache
def _tell_untested(kind: str) -> None:
    tell(f"Training on {kind} has not been tested. Compare the first losses with those of a CPU.")


def check_kinds(run: RunFile, cluster: Cluster, device: str) -> None:
    """Refuse a cluster file of GPUs whose processes would compute on CPUs, unless the run asks for CPUs, and
    devices that stand for several.
    """
    for placed in cluster.devices():
        if placed.device.members > 1:
            raise BiremeError(
                f"{placed.name} stands for {placed.device.members} devices that run each operator together. "
                "Plan for it with bireme plan and train with another framework, or list its devices apart."
            )
    gpus = [placed for placed in cluster.devices() if placed.device.kind == ACCELERATOR]
    if run.cluster.source is None or run.cluster.device == "cpu" or device == ACCELERATOR or not gpus:
        return
    raise BiremeError(
        f"cluster.source is {run.cluster.source}, which names {len(gpus)} CUDA devices "
        f"({gpus[0].name} is a {gpus[0].device.name}), but this run has no GPU for each of its "
        f"{cluster.num_devices} processes: they would compute on CPUs. Set cluster.device to cpu to have "
        "processes on CPUs stand for these GPUs, name another cluster, or plan for it with bireme plan."
    )


def visible_gpus(names: Sequence[str], cluster: Cluster, visible: str | None, *, num_cuda: int) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES with which processes of a host compute on the GPUs of these names,
    one each, in this order.

    `visible` is its value now, and stays if the names are those of the first GPUs in their order, if they are
    not all of one server, or if it has fewer GPUs.
    """
    devices = {placed.name: placed for placed in cluster.devices()}
    if not set(names) <= devices.keys() or len({devices[name].server for name in names}) != 1:
        return visible
    places = [devices[name].place for name in names]
    known = visible.split(",") if visible else [str(place) for place in range(num_cuda)]
    if max(places) >= len(known) or places == [*range(len(places))]:
        return visible
    return ",".join(known[place] for place in places)


def _here(device: str, workers: int, num_cuda: int) -> Cluster:
    """This machine, with as many devices as processes."""
    if device == "cpu":
        return Cluster((server_here(device, workers),))
    server = server_here(device, min(workers, num_cuda))
    return Cluster((server if workers <= num_cuda else shared(server, workers),))


def shared(server: Server, workers: int) -> Server:
    """A server whose devices are shared by more processes, as the devices that these find.

    Processes take turns on a device, so each has its part of the memory and, while all work, of the speed and
    of the power.
    """
    num = len(server.devices)
    sharers = [len(range(place, workers, num)) for place in range(num)]
    parts = [
        replace(
            device,
            memory_bytes=device.memory_bytes // each,
            speed=device.speed / each,
            watts=device.watts / each,
        )
        for device, each in zip(server.devices, sharers, strict=True)
    ]
    devices = tuple(parts[place % num] for place in range(workers))
    return Server(server.name, devices, host_memory_bytes=server.host_memory_bytes)


# What a run can page to on this machine: the speed of its copies and of its disk, and what is free there.


def with_tiers_here(run: RunFile, machines: Machines) -> Machines:
    """The machines with what paging needs to know. A cluster file's figures are taken as they are.

    Where a file does not say how large disks are, they have what is free in the folder here.
    """
    memory = run.memory
    if not memory.is_on:
        return machines
    servers = list(machines.cluster.servers)
    if memory.disk is not None:
        folder = Path(memory.disk)
        check_disk_folder(folder, "memory.disk")
        free = free_disk_bytes(folder)
        servers = [replace(one, disk_bytes=one.disk_bytes or free) for one in servers]
        if run.cluster.source is None:
            speed = measured_disk_bytes_per_s(folder)
            servers = [replace(one, disk_bytes_per_s=speed) for one in servers]
    if run.cluster.source is None:
        found = measured_host_speed(torch_device(machines.device))
        servers = [replace(one, devices=tuple(map(found.of, one.devices))) for one in servers]
    return replace(machines, cluster=replace(machines.cluster, servers=tuple(servers)))


def machines_here(run: RunFile, *, computes: bool = True) -> Machines:
    """What a run has to run on here. `computes` is as for `machines_of`."""
    return machines_of(run, num_cuda=num_accelerators(), num_cores=num_cores(), computes=computes)


def planning_machines(run: RunFile, *, computes: bool = True) -> Machines:
    """The machines of a run with what offloading needs to know. `computes` is as for `machines_of`."""
    return with_tiers_here(run, machines_here(run, computes=computes))


def check_paging_disk(run: RunFile, plan: Plan) -> None:
    """Refuse a plan that pages to a disk where the run names no folder, or none that can be used."""
    if plan.paging is None or not any(budgets.disk_bytes for budgets in plan.paging.budgets):
        return
    if run.memory.disk is None:
        raise BiremeError("The plan offloads to a disk, but memory.disk names no folder for that. Set it.")
    check_disk_folder(Path(run.memory.disk), "memory.disk")
