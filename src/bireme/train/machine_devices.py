"""The devices of a run on several machines: each machine says what it has, and all of it is the cluster.

What joins the machines is not known here unless a cluster file says it: nothing is measured. A machine that
does not report the speed of its network card is assumed to have 1 Gbit/s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bireme.cluster.cluster import Cluster
from bireme.cluster.discover import discover
from bireme.cluster.links import ASSUMED_CARD, ASSUMED_LINK, Card
from bireme.cluster.server import Server
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.profile.here import device_here

__all__ = ["LaunchedProcess", "cluster_of", "nodes_of", "places_in", "ranks_on", "server_here"]


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """One process: its machine's name, which of the launcher's nodes it is of, whether a GPU is its own, and
    how many the machine has.
    """

    rank: int
    node: str
    host: str
    has_cuda: bool
    num_cuda: int = 0


def nodes_of(members: Sequence[LaunchedProcess]) -> dict[str, list[LaunchedProcess]]:
    """The processes of each node, nodes in the order of their first rank."""
    found: dict[str, list[LaunchedProcess]] = {}
    for member in sorted(members, key=lambda one: one.rank):
        found.setdefault(member.node, []).append(member)
    return found


def server_here(device: str, count: int) -> Server:
    """This machine with as many devices of the kind as it has processes."""
    (server,) = discover(0 if _has_nvml(device) else count).cluster.servers
    kept = tuple(one for one in server.devices if one.kind == device)
    if len(kept) == len(server.devices) == count:
        found = server
    elif device == "cpu":
        found = replace(server, devices=kept, bridges=(), meshes=(), cards=_card(server, count))
    else:
        devices = tuple(device_here(torch.device(device, place)) for place in range(count))
        found = replace(server, devices=devices, bridges=(), meshes=(), cards=_card(server, count))
    return found


def cluster_of(servers: Sequence[Server]) -> tuple[Cluster, str]:
    """The cluster of these machines, and a sentence on what is not known about it.

    Machines of one name get numbers. A machine whose network card is unknown gets `ASSUMED_LINK`.
    """
    named, unknown = list[Server](), 0
    for server in servers:
        name, number = server.name, 2
        while name in {one.name for one in named}:
            name, number = f"{server.name}-{number}", number + 1
        cards = server.cards
        if not cards:
            everyone = tuple(range(len(server.devices)))
            cards, unknown = (Card(ASSUMED_CARD, everyone, ASSUMED_LINK),), unknown + 1
        named.append(replace(server, name=name, cards=cards))
    known = (
        f"The links of {unknown} of {len(named)} machines are unknown; the plan assumes 1 Gbit/s and 0.5 ms "
        "between hosts"
        if unknown
        else "The plan uses the rated speed of the network cards for the links between machines"
    )
    return Cluster(tuple(named)), f"{known}. To measure them: bireme cluster probe, and cluster.source."


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
    another cluster, is dealt out in order.
    """
    if plan.num_ranks > len(ranks):
        raise BiremeError(
            f"The plan is for {plan.num_ranks} processes, but {len(ranks)} were started. Start as many, or "
            "plan for fewer."
        )
    number = {placed.name: place for place, placed in enumerate(cluster.devices())}
    names = [row[replica] for replica in range(plan.width) for row in plan.devices]
    if not names or not set(names) <= set(number):
        return list(ranks[: plan.num_ranks])
    return [ranks[number[name]] for name in names]


def _has_nvml(device: str) -> bool:
    """Whether this machine's GPUs can be asked for their links."""
    if device == "cpu":
        return False
    try:
        discover(0)
    except BiremeError:
        return False
    return True


def _card(server: Server, count: int) -> tuple[Card, ...]:
    return tuple(replace(card, devices=tuple(range(count))) for card in server.cards[:1])
