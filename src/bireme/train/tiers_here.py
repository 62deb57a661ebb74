"""What a run can page to on this machine: the speed of its copies and of its disk, and what is free there."""

from dataclasses import replace
from pathlib import Path

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.profile.here import torch_device
from bireme.runtime.measuring.tier_speeds import (
    check_disk_folder,
    free_disk_bytes,
    measured_disk_bytes_per_s,
    measured_host_speed,
)
from bireme.train.machines import Machines
from bireme.train.run_file import RunFile

__all__ = ["check_paging_disk", "with_tiers_here"]

DIGITS = 3


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
            speed = _rounded(measured_disk_bytes_per_s(folder))
            servers = [replace(one, disk_bytes_per_s=speed) for one in servers]
    if run.cluster.source is None:
        found = measured_host_speed(torch_device(machines.device))
        speed, copy_s, chunk_s = map(_rounded, (found.bytes_per_s, found.copy_s, found.chunk_s))
        servers = [
            replace(
                one,
                devices=tuple(
                    replace(own, host_bytes_per_s=speed, copy_s=copy_s, chunk_s=chunk_s)
                    for own in one.devices
                ),
            )
            for one in servers
        ]
    return replace(machines, cluster=Cluster(tuple(servers), machines.cluster.switch))


def check_paging_disk(run: RunFile, plan: Plan) -> None:
    """Refuse a plan that pages to a disk where the run names no folder, or none that can be used."""
    if plan.paging is None or not any(budgets.disk_bytes for budgets in plan.paging.budgets):
        return
    if run.memory.disk is None:
        raise BiremeError("The plan pages to a disk, but memory.disk names no folder for that. Set it.")
    check_disk_folder(Path(run.memory.disk), "memory.disk")


def _rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")
