"""Homes of replicas: the server that reads a replica's samples and labels, so that private ones stay on it.

The inputs of a model enter its first stage and the labels its last; some models read inputs between them too.
A replica is at home on a server if all stages that read are on the server's devices: the whole replica, both
ends of a schedule that comes back to its first device, or first and last stage on two devices of the server.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError, closest
from bireme.plan.plan import Plan

__all__ = ["check_homes", "check_servers", "homes_of", "ranks_that_read", "servers_of_places"]


def servers_of_places(plan: Plan, cluster: Cluster) -> list[str]:
    """The server of each process of a plan, counted as the engine does, replica by replica.

    A plan that names no devices, or those of another cluster, takes them in their order.
    """
    servers = {placed.name: cluster.servers[placed.server].name for placed in cluster.devices()}
    named = [row[replica] for replica in range(plan.width) for row in plan.devices]
    if named and set(named) <= servers.keys():
        return [servers[name] for name in named]
    return list(servers.values())[: plan.num_ranks]


def ranks_that_read(
    cuts: Sequence[int], rank_of_stage: Sequence[int], readers: Iterable[int]
) -> frozenset[int]:
    """The ranks of a pipeline that hold the units of these numbers, which read inputs of the model."""
    return frozenset(rank_of_stage[bisect_right(cuts, unit)] for unit in readers)


def homes_of(plan: Plan, cluster: Cluster, readers: Iterable[int]) -> tuple[str | None, ...]:
    """The home of each replica, None where its samples are read on several servers."""
    servers, per_replica = servers_of_places(plan, cluster), plan.source.num_ranks
    ranks = ranks_that_read(plan.cuts, plan.source.rank_of_stage, readers)
    found = []
    for replica in range(plan.width):
        reading = {servers[replica * per_replica + rank] for rank in ranks}
        found.append(reading.pop() if len(reading) == 1 else None)
    return tuple(found)


def check_servers(names: Iterable[str], cluster: Cluster) -> None:
    """Refuse private data of a server that is not in the cluster."""
    known = [server.name for server in cluster.servers]
    for name in names:
        if name not in known:
            raise BiremeError(
                f"data.private names the server {name!r}, which the cluster lacks. {closest(name, known)}"
            )


def check_homes(plan: Plan, cluster: Cluster, readers: Iterable[int], owners: Collection[str]) -> None:
    """Refuse a plan in which an owner of private samples is no replica's home."""
    homes = homes_of(plan, cluster, readers)
    homeless = sorted(set(owners) - set(homes))
    if homeless:
        raise BiremeError(
            f"The plan does not keep the private samples of {', '.join(homeless)} there: in no replica are "
            "all stages that read samples or labels on its devices. Put a whole replica on it, take a "
            "schedule that comes back to its first device (zbv), or put the first and the last stage on "
            "devices of that server."
        )
