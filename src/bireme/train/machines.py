"""The devices of a run: those of a cluster file, or this machine's, and the processes that stand for them."""

from dataclasses import dataclass

from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.cluster_file import load_cluster
from bireme.cluster.discover import discover
from bireme.errors import BiremeError
from bireme.train.run_file import RunFile

__all__ = ["Machines", "machines_of"]

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
    if asked.device == "cuda" and num_cuda < wants:
        raise BiremeError(
            f"cluster.device is cuda, and there are {num_cuda} CUDA devices for {wants} processes. Set "
            "cluster.workers to fewer, or cluster.device to cpu."
        )
    device = "cuda" if asked.device != "cpu" and 0 < wants <= num_cuda else "cpu"
    cluster = load_cluster(asked.source) if asked.source is not None else _here(device, wants)
    if asked.workers is not None and cluster.num_devices != asked.workers:
        raise BiremeError(
            f"cluster.source is {asked.source}, which has {cluster.num_devices} devices, but cluster.workers "
            f"is {asked.workers}: every device is a process. Leave cluster.workers out."
        )
    backend = asked.backend if asked.backend != "auto" else ("nccl" if device == "cuda" else "gloo")
    if backend == "nccl" and device == "cpu":
        raise BiremeError(
            "cluster.backend is nccl, which joins CUDA devices alone, and the run is on CPUs. Set it to gloo."
        )
    threads = asked.threads_per_worker
    if threads is None and device == "cpu":
        threads = max(1, num_cores // cluster.num_devices)
    return Machines(cluster, device, backend, threads)


def _here(device: str, workers: int) -> Cluster:
    """This machine, with as many devices as processes."""
    found = discover(0 if device == "cuda" else workers).cluster
    if device == "cuda" and found.num_devices != workers:
        raise BiremeError(
            f"This machine has {found.num_devices} GPUs, and cluster.workers is {workers}. Leave it out to "
            "use all of them, or hide the others with CUDA_VISIBLE_DEVICES."
        )
    if device == "cpu" and found.num_devices != workers:  # GPUs that are not to be used
        (server,) = found.servers
        kept = tuple(one for one in server.devices if one.kind == "cpu")
        return Cluster((Server(server.name, kept, num_cores=server.num_cores),))
    return found
