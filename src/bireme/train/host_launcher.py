"""The launcher of one host in a run whose replicas may die: from what rank 0 has told all to the run's end.

After the hosts have told each other where their coordinators listen, none of them needs what it met the
others by. So any host may die, also the first.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import read_cluster
from bireme.devices import ACCELERATOR, Backend, num_accelerators
from bireme.plan.plan import Plan
from bireme.plan.plan_file import load_plan
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.peer_sockets import own_address
from bireme.runtime.quorum.site import Site
from bireme.sync.coordinator.settings import Settings
from bireme.train.folder import RunFolder
from bireme.train.hosts import replicas_of_hosts
from bireme.train.launching import VISIBLE, signals_passed_on
from bireme.train.outcome import Outcome
from bireme.train.rank_zero_setup import RunSetup
from bireme.train.rendezvous import Talk
from bireme.train.replicas import launch_here, replica_settings, with_delay
from bireme.train.worker import Start

__all__ = ["HostOrders", "host_orders", "meet_hosts", "train_on_host"]

TOKEN_BYTES = 16

OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
"""What the processes of a replica, which are all on this host, must not take for theirs."""


@dataclass(frozen=True, slots=True)
class HostOrders:
    """What rank 0 tells the launchers of all hosts: what coordinators are told, the replicas of each host,
    and the step after which updates are delayed.
    """

    settings: Settings
    token: str
    replicas: tuple[tuple[int, ...], ...]
    first_delayed_step: int


_ADAPTER = TypeAdapter(HostOrders)


def host_orders(led: RunSetup) -> dict[str, Any]:
    """These orders, as they go through the store."""
    plan = led.prepared.plan.plan
    start = with_delay(led.prepared, led.checkpoint, Start(led.folder.path, None, None, False, {}))
    assert start.first_delayed_step is not None, "it was just found"
    orders = HostOrders(
        replica_settings(led.prepared, led.folder, led.checkpoint),
        secrets.token_hex(TOKEN_BYTES),
        tuple(map(tuple, replicas_of_hosts(led.places, led.nodes, plan.source.num_ranks))),
        start.first_delayed_step,
    )
    found: dict[str, Any] = _ADAPTER.dump_python(orders, mode="json")
    return found


def meet_hosts(told: dict[str, Any], number: int, folder: RunFolder, talk: Talk) -> tuple[HostOrders, Site]:
    """Start the coordinator of this host, and learn where those of the others listen."""
    orders = _ADAPTER.validate_python(told)
    num_hosts = len(orders.replicas)
    order = CoordinatorOrder(
        orders.settings, number, num_hosts, orders.token, folder.ledger, begins=number == 0
    )
    coordinator = CoordinatorProcess(order)
    coordinator.start()
    talk.say(f"coordinator/{number}", [own_address(), coordinator.port])
    heard = [talk.hear(f"coordinator/{one}") for one in range(num_hosts)]
    hosts = tuple((str(address), int(port)) for address, port in heard)
    return orders, Site(number, coordinator, hosts, orders.token, orders.replicas[number], time.monotonic())


def train_on_host(
    folder: RunFolder, orders: HostOrders, site: Site, start: Start, *, backend: Backend, device: str
) -> list[Outcome]:
    """What `launch_here` gives for the replicas of this host. `start.threads` are those of each process."""
    run, plan = folder.load_run(), load_plan(folder.plan).plan
    with signals_passed_on(), _own_environment(plan, read_cluster(folder.cluster), site, device):
        return launch_here(
            run,
            folder,
            orders.settings,
            start,
            threads=start.threads,
            backend=backend,
            device=device,
            site=site,
        )


@contextmanager
def _own_environment(plan: Plan, cluster: Cluster, site: Site, device: str) -> Iterator[None]:
    """Processes that are started inside are of this host alone, and count its GPUs as the plan names them."""
    before = dict(os.environ)
    os.environ["BIREME_ADDRESS"] = own_address()  # also while this host is cut off
    for name in OF_THE_LAUNCHER:
        os.environ.pop(name, None)
    if device == ACCELERATOR and (visible := _visible(plan, cluster, site, before.get(VISIBLE))) is not None:
        os.environ[VISIBLE] = visible
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _visible(plan: Plan, cluster: Cluster, site: Site, visible: str | None) -> str | None:
    """What CUDA_VISIBLE_DEVICES must be for the processes of this host, replica by replica."""
    places = {placed.name: placed.place for placed in cluster.devices()}
    names = [row[replica] for replica in site.replicas for row in plan.devices]
    if not set(names) <= places.keys():
        return visible
    known = visible.split(",") if visible else [str(place) for place in range(num_accelerators())]
    return ",".join(known[places[name]] for name in names) or visible
