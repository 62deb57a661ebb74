"""The devices of a run, from a cluster file or this machine, and their processes."""

from dataclasses import dataclass, replace

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.server import Server
from bireme.devices import ACCELERATOR
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.train.machine_devices import server_here
from bireme.train.run_file import RunFile

__all__ = ["Machines", "check_kinds", "machines_of", "shared", "visible_gpus"]

CPU_WORKERS = 2
"""Processes on a machine without a GPU, unless somebody says: as few as a pipeline has."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The cluster, where its processes compute and what carries their messages.

    `threads` are those of each process, None where they share the cores.
    """

    cluster: Cluster
    device: str
    backend: str
    threads: int | None

    @property
    def workers_here(self) -> int:
        """The processes of the largest machine: those that share what this one has, for all we know."""
        return max(len(server.devices) for server in self.cluster.servers)


def machines_of(run: RunFile, *, num_cuda: int, num_cores: int) -> Machines:
    """What a run has to run on, where there are so many GPUs and cores."""
    asked = run.cluster
    wants = asked.workers or (num_cuda if num_cuda and asked.device != "cpu" else CPU_WORKERS)
    # NCCL wants a device for each process; gloo does not care.
    may_share = asked.device == ACCELERATOR and asked.backend == "gloo" and num_cuda > 0
    if asked.device == ACCELERATOR and num_cuda < wants and not may_share:
        raise BiremeError(
            f"cluster.device is cuda, but there are {num_cuda} CUDA devices for {wants} processes. Set "
            "cluster.workers to fewer, cluster.backend to gloo to share devices, or "
            "cluster.device to cpu."
        )
    device = ACCELERATOR if asked.device != "cpu" and (may_share or 0 < wants <= num_cuda) else "cpu"
    cluster = load_cluster(asked.source) if asked.source is not None else _here(device, wants, num_cuda)
    if asked.workers is not None and cluster.num_devices != asked.workers:
        raise BiremeError(
            f"cluster.source is {asked.source}, which has {cluster.num_devices} devices, but cluster.workers "
            f"is {asked.workers}: every device is a process. Leave cluster.workers out."
        )
    check_kinds(run, cluster, device)
    backend = asked.backend if asked.backend != "auto" else ("gloo" if device == "cpu" else "nccl")
    if backend == "nccl" and device == "cpu":
        raise BiremeError(
            "cluster.backend is nccl, which joins only CUDA devices, but the run is on CPUs. Set it to gloo."
        )
    threads = asked.threads_per_worker
    if threads is None and device == "cpu":
        threads = max(1, num_cores // cluster.num_devices)
    return Machines(cluster, device, backend, threads)


def check_kinds(run: RunFile, cluster: Cluster, device: str) -> None:
    """Refuse a cluster file of GPUs whose processes would compute on CPUs, unless the run asks for CPUs."""
    gpus = [placed for placed in cluster.devices() if placed.device.kind == ACCELERATOR]
    if run.cluster.source is None or run.cluster.device == "cpu" or device == ACCELERATOR or not gpus:
        return
    raise BiremeError(
        f"cluster.source is {run.cluster.source}, which names {len(gpus)} CUDA devices "
        f"({gpus[0].name} is a {gpus[0].device.name}), but this run has no GPU for each of its "
        f"{cluster.num_devices} processes: they would compute on CPUs. Set cluster.device to cpu to have "
        "processes on CPUs stand for these GPUs, name another cluster, or plan for it with bireme plan."
    )


def visible_gpus(plan: Plan, machines: Machines, visible: str | None, *, num_cuda: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES must be for process p to compute on the GPU that the plan names for it.

    `visible` is what it is now, and stays where the plan names all GPUs in their order, or others than those
    of this machine, or where processes share them.
    """
    places = {placed.name: place for place, placed in enumerate(machines.cluster.devices())}
    names = [row[replica] for replica in range(plan.width) for row in plan.devices]
    is_here = len(machines.cluster.servers) == 1 and len(places) <= num_cuda and set(names) <= set(places)
    if machines.device != ACCELERATOR or not is_here or names == list(places)[: len(names)]:
        return visible
    known = visible.split(",") if visible else [str(place) for place in range(num_cuda)]
    return ",".join(known[places[name]] for name in names)


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
