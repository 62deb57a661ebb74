"""What the ranks of a plan may use of each tier, and how fast their chunks travel.

All replicas page alike, so a rank has the least budgets of its devices in any replica.
"""

import math
from collections.abc import Sequence

from bireme.cluster.tiers import tier_share
from bireme.errors import BiremeError
from bireme.plan.search.draft import Grid
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.tier_limits import TierLimits
from bireme.schedule.budgets import Budgets
from bireme.schedule.chunks import SMALL_CHUNK_BYTES
from bireme.simulate.copies import TierLinks

__all__ = ["budgets_of", "tier_links_of"]


def budgets_of(problem: PlanningProblem, grid: Grid) -> tuple[Budgets, ...]:
    """The budgets of each rank."""
    asked = problem.request.memory or TierLimits()
    used = [device for row in grid for device in row]
    return tuple(_least([_budgets(problem, device, used, asked) for device in row]) for row in grid)


def tier_links_of(problem: PlanningProblem, grid: Grid, replica: int) -> tuple[TierLinks, ...]:
    """The wires of each rank of a replica. Devices of a server share its disk."""
    used = [device for row in grid for device in row]
    found = []
    for row in grid:
        share = tier_share(problem.cluster, row[replica], used)
        is_processor = problem.cluster.devices()[row[replica]].device.kind == "cpu"
        found.append(
            TierLinks(
                share.host_bytes_per_s,
                share.disk_bytes_per_s,
                share.copy_s,
                _core_share(problem, row[replica], used),
                share.chunk_s,
                share.host_bytes_per_s if is_processor else math.inf,
                SMALL_CHUNK_BYTES if is_processor else 0,
            )
        )
    return tuple(found)


def _core_share(problem: PlanningProblem, device: int, used: Sequence[int]) -> float:
    """What of a copy a processor's work loses: the part of a core that is not spare, of all that it works on.

    Cores that no device computes on are spare for the copies of all. Where nothing says how many cores there
    are, each copy has one.
    """
    server, threads = problem.servers[device], problem.threads[device]
    machine = problem.cluster.servers[server]
    num_cores = machine.num_cores or sum(one.num_cores for one in machine.devices if one.kind == "cpu")
    if not (threads and num_cores):
        return 0.0
    here = [one for one in used if problem.servers[one] == server]
    spare = num_cores - sum(problem.threads[one] for one in here)
    return min(max(1.0 - spare / len(here), 0.0), 1.0) / threads


def _budgets(problem: PlanningProblem, device: int, used: Sequence[int], asked: TierLimits) -> Budgets:
    share = tier_share(problem.cluster, device, used)
    kind = problem.cluster.devices()[device].device.kind
    device_bytes = int(problem.limits[device])
    host_bytes = share.host_bytes if asked.host_bytes is None else asked.host_bytes
    if host_bytes is None and kind == "cpu":
        host_bytes = int(problem.room[device]) - device_bytes  # it is the same memory
    disk_bytes = share.disk_bytes if asked.disk_bytes is None else asked.disk_bytes
    if disk_bytes is None:
        raise BiremeError(
            f"How much of its disk {problem.names[device]} may use is not known. Say it, or give its server "
            "disk_bytes in the cluster file."
        )
    return Budgets(device_bytes, host_bytes, disk_bytes)


def _least(budgets: Sequence[Budgets]) -> Budgets:
    host = min(math.inf if one.host_bytes is None else one.host_bytes for one in budgets)
    return Budgets(
        min(one.device_bytes for one in budgets),
        None if host == math.inf else int(host),
        min(one.disk_bytes for one in budgets),
    )
