"""The hosts of a run whose replicas may die: what each of them starts, and that each replica is on one host.

Something like torchrun starts one process on each host, which is the launcher of that host: it starts the
processes of its replicas, as many as there are devices, and starts them again if they die. So whoever started
the launchers never sees a rank die.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import load_cluster
from bireme.errors import BiremeError
from bireme.plan.homes import servers_of_places
from bireme.plan.plan import Plan
from bireme.train.machine_devices import LaunchedProcess
from bireme.train.machines import CPU_WORKERS
from bireme.train.run_file import RunFile

__all__ = ["check_launchers", "processes_of", "replicas_of_hosts", "within_servers"]

Nodes = Mapping[str, Sequence[LaunchedProcess]]

ALIKE = 1.1
"""Devices of one speed are equal if none has so many times the memory of another."""


def check_launchers(nodes: Nodes, mode: str) -> None:
    """Refuse more than one process on a host."""
    for members in nodes.values():
        if len(members) > 1:
            name = members[0].host
            raise BiremeError(
                f'sync.mode is "{mode}", in which bireme train starts the processes of a host itself, and '
                f"again if they die, but {len(members)} were started on {name}. Start one on each host, as "
                "with --nproc-per-node 1, and set cluster.workers or cluster.source; or use sync.mode = "
                f'"all". If these are {len(members)} hosts that all call themselves {name}, give each of '
                "them a name of its own."
            )


def processes_of(run: RunFile, nodes: Nodes) -> dict[str, list[LaunchedProcess]]:
    """The processes that the launchers of all hosts will start, numbered host by host."""
    counts = _counts(run, [members[0] for members in nodes.values()])
    found, first = dict[str, list[LaunchedProcess]](), 0
    for (node, (launcher, *_)), count in zip(nodes.items(), counts, strict=True):
        found[node] = [
            replace(launcher, rank=first + place, has_cuda=place < launcher.num_cuda)
            for place in range(count)
        ]
        first += count
    return found


def _counts(run: RunFile, launchers: Sequence[LaunchedProcess]) -> list[int]:
    asked = run.cluster
    if asked.source is not None:
        servers = {server.name: len(server.devices) for server in load_cluster(asked.source).servers}
        if len(servers) != len(launchers):
            raise BiremeError(
                f"cluster.source is {asked.source}, which has {len(servers)} servers, but bireme train was "
                f"started on {len(launchers)} hosts. Start it on each of them."
            )
        by_name = [servers.get(one.host) for one in launchers]
        known = [count for count in by_name if count is not None]
        return known if len(known) == len(launchers) else list(servers.values())
    if asked.workers is not None:
        return [asked.workers] * len(launchers)
    uses_gpus = asked.device != "cpu" and asked.backend != "gloo" and all(one.num_cuda for one in launchers)
    return [one.num_cuda if uses_gpus else CPU_WORKERS for one in launchers]


def within_servers(plan: Plan, cluster: Cluster, mode: str) -> Plan:
    """A plan with each replica on one server: this one, or with other devices in the place of equal ones.

    Replicas that share a server stay in their order.
    """
    depth = plan.source.num_ranks
    if _split(plan, cluster) is None:
        return plan
    devices = {placed.name: placed for placed in cluster.devices()}
    used = {name for row in plan.devices for name in row} & devices.keys()
    found = [devices[name].device for name in used]
    sizes = [one.memory_bytes for one in found]
    are_equal = len({(one.kind, one.speed) for one in found}) == 1 and max(sizes) <= ALIKE * min(sizes)
    by_server: dict[int, list[str]] = {}
    for name, placed in devices.items():
        if name in used:
            by_server.setdefault(placed.server, []).append(name)
    fits = all(len(names) % depth == 0 for names in by_server.values())
    if found and are_equal and fits:
        ordered = [name for names in by_server.values() for name in names]
        replicas = [ordered[first : first + depth] for first in range(0, len(ordered), depth)]
        return replace(plan, devices=tuple(zip(*replicas, strict=True)))
    replica, servers = _split(plan, cluster) or (0, [])
    raise BiremeError(
        f'sync.mode is "{mode}", but the plan has the stages of replica {replica} on several hosts: '
        f"{', '.join(servers)}. A replica lives and dies with one host. Set plan.depth to at most the "
        'devices of a host, name the devices in plan.file, or use sync.mode = "all".'
    )


def _split(plan: Plan, cluster: Cluster) -> tuple[int, list[str]] | None:
    """The first replica that is on more than one server, and these."""
    servers, depth = servers_of_places(plan, cluster), plan.source.num_ranks
    for replica in range(plan.width):
        own = sorted(set(servers[replica * depth : (replica + 1) * depth]))
        if len(own) > 1:
            return replica, own
    return None


def replicas_of_hosts(places: Sequence[int], nodes: Nodes, depth: int) -> list[list[int]]:
    """The replicas of each host, where the process `places[p]` takes the place p of the plan."""
    firsts = places[::depth]
    own = [{one.rank for one in members} for members in nodes.values()]
    return [[replica for replica, first in enumerate(firsts) if first in ranks] for ranks in own]
