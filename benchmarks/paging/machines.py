"""Models and machines of which people ask whether they go together, and what the simulator says of them.

Devices, hosts and wires are their makers' numbers; a device attains half of its arithmetic and seven tenths
of its memory's bandwidth, as profiles that are estimated assume. A model is its layers alone: 12 · width²
parameters each, two operations for each parameter and token forward and four backward, and the forward once
more, for every part keeps only its inputs. A parameter takes 2 bytes for weights, 2 for its gradient and 12
for the master copy and moments of AdamW. The optimizer steps on the device or on the host, whichever makes
the batch shorter; on the host at the speed of its memory, of which a step attains seven tenths too. Chunks
are those of a plan: at most 256 of a rank, in pages of 2 MiB.

Ranks are a pipeline, or replicas of a shorter one that share weights, gradients and optimizer. Then chunks
have owners among the replicas, as PatrickStar's have, and parts are gathered before use. If a model trains
adapters only, its other weights take 2 bytes each, and their gradients are not computed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bireme.cluster.catalogue import device_named
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.plan.plan import MOST_CHUNKS
from bireme.profile.estimate import ATTAINED_BYTES, ATTAINED_FLOPS
from bireme.schedule.budgets import Budgets, cut_memory
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.gathering import gathered
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program, Rule
from bireme.schedule.tiers import LARGE_PAGE_BYTES
from bireme.simulate.copies import REPLICAS, TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline

__all__ = ["CASES", "LARGEST", "Case", "Machine", "Model", "largest_row", "row_of"]

GIB, GB = 2**30, 10**9
USABLE = 0.9
"""The share of a device's memory that a program may plan with; the rest is the runtime's and workspace."""
LIVE_BYTES = 34
"""Of activations, for each token and element of the width, while a layer's backward runs."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer by its shape, and the samples that a batch of it has."""

    name: str
    num_layers: int
    width: int
    tokens: int
    num_microbatches: int
    samples_a_microbatch: int = 1
    rank: int = 0
    """Of the adapters that alone learn; 0 if all weights do."""

    @property
    def num_parameters(self) -> float:
        """Of all layers, adapters left out."""
        return 12.0 * self.num_layers * self.width**2

    @property
    def num_trained(self) -> float:
        """Those that learn. An adapter has two factors beside each of a layer's six matrices: four of width ×
        width, and two of width × 4 width.
        """
        return 18.0 * self.num_layers * self.rank * self.width if self.rank else self.num_parameters

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer."""
        frozen = self.num_parameters if self.rank else 0.0
        return 16 * self.num_trained + 2 * frozen


@dataclass(frozen=True, slots=True)
class Machine:
    """So many equal ranks: device, host memory and disk of each, and the wires between them.

    `memory_bytes_per_s` is what the host's processors read and write of its memory for one rank.
    """

    name: str
    num_ranks: int
    device: Device
    host_bytes: int
    disk_bytes: int
    host_bytes_per_s: float
    disk_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a machine: how many parts each rank has, which schedules and sweeps are tried, and how many
    replicas share the state of each stage.
    """

    model: Model
    machine: Machine
    parts: int
    schedules: Sequence[str] = ("1f1b",)
    sweeps: Sequence[int] = (1,)
    width: int = 1
    published: str = ""

    @property
    def num_stages(self) -> int:
        """Of a replica."""
        return self.machine.num_ranks // self.width * self.parts

    def ways(self) -> "Iterator[Way]":
        """All that are tried."""
        orders = [order for order in ORDERS if self.width == 1 or order != APART]
        for schedule, sweep, on_host, order, ahead in product(
            self.schedules, self.sweeps, (False, True), orders, LEADS
        ):
            if order != APART or SCHEDULES[schedule].rule is Rule.SYNCHRONOUS:
                yield Way(schedule, sweep, order, ahead, on_host=on_host)


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule and its sweeps, the order of updates, how far ahead of their use chunks are fetched, and
    where the optimizer steps.
    """

    schedule: str
    sweep: int
    order: str
    ahead: int
    on_host: bool


SERVER_MEMORY = 12 * 21.3e9
"""Two processors with six channels of DDR4-2666 each, as servers of V100s had."""
DESKTOP_MEMORY = 2 * 25.6e9
"""Two channels of DDR4-3200."""

V100 = Machine(
    "8 × V100",
    8,
    replace(device_named("v100"), memory_bytes=32 * GIB),
    30 * GB,
    0,
    16e9,
    1e9,
    25e9,
    SERVER_MEMORY / 8,
)
"""A server: NVLink between devices, PCIe 3.0 × 16 to the host, whose memory the ranks share alike."""
CARD = device_named("rtx4090")
HOST, DISK = 64 * GB, 2000 * GB
PCIE, NVME, ETHERNET = 32e9, 5e9, 1.25e9
"""PCIe 4.0 × 16, an NVMe disk that reads and writes as fast, 10 Gbit/s."""


def cards(number: int, link_bytes_per_s: float = ETHERNET) -> Machine:
    """Machines of one card each."""
    name = f"{number} × RTX 4090" if link_bytes_per_s == ETHERNET else f"{number} × RTX 4090, 1 Gbit/s"
    return Machine(name, number, CARD, HOST, DISK, PCIE, NVME, link_bytes_per_s, DESKTOP_MEMORY)


def published(billions: int) -> str:
    """What runs there by PatrickStar's own figures."""
    return "PatrickStar and DeepSpeed run" if billions <= 4 else "PatrickStar runs, DeepSpeed does not"


PATRICKSTAR = (
    (4, 64, 2304),
    (6, 53, 3072),
    (8, 72, 3072),
    (10, 50, 4096),
    (12, 60, 4096),
    (15, 78, 4096),
    (18, 90, 4096),
)
"""Billions of parameters, layers and width of the models that PatrickStar's benchmark names."""

OWNERS = Case(Model("18B", 90, 4096, 1024, 16, 2), V100, 45, sweeps=(2,), width=8)
"""Eight replicas that share all state: each trains two micro-batches of a batch, in one sweep."""

CASES: tuple[Case, ...] = (
    *(
        Case(Model(f"{size}B", layers, width, 1024, 16, 2), V100, 4, published=published(size))
        for size, layers, width in PATRICKSTAR
    ),
    replace(OWNERS, published=published(18)),
    Case(Model("7B", 32, 4096, 2048, 8), cards(1), 32, sweeps=(1, 8)),
    Case(Model("13B", 40, 5120, 2048, 8), cards(2), 20, schedules=("1f1b", "2bw"), sweeps=(1, 4)),
    Case(Model("70B", 80, 8192, 2048, 16), cards(8), 20, schedules=("1f1b", "2bw"), sweeps=(1, 2)),
    *(
        Case(
            Model("70B, adapters", 80, 8192, 2048, 12, rank=16),
            cards(3, link),
            20,
            schedules=("1f1b", "2bw"),
            sweeps=(1, 4),
        )
        for link in (ETHERNET, ETHERNET / 10)
    ),
)

LARGEST = (Case(Model("", 0, 4096, 1024, 16, 2), V100, 8), replace(OWNERS, parts=64))
"""Of these the layers are searched: the most that fit. More parts than above, for larger working sets."""


APART = "updates apart"
ORDERS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "updates together": {"updates_together": True},
    APART: {"updates_apart": True},
}
"""Of a rank's updates; those apart are for schedules that drain, and clip by another rule."""
LEADS = (1, 16)
"""Instructions ahead of their use that chunks are fetched."""


def row_of(case: Case) -> dict[str, Any]:
    """What the simulator says of the fastest way that was tried, and what is the least with updates apart; of
    none, why.
    """
    best: tuple[Way, Timeline] | None = None
    apart_s: float | None = None
    refused = ""
    for way in case.ways():
        try:
            timeline = simulated(case, way)
        except BiremeError as error:
            refused = str(error)
            continue
        batch_s = timeline.steady_batch_s
        if way.order == APART:
            apart_s = batch_s if apart_s is None else min(apart_s, batch_s)
        elif best is None or batch_s < best[1].steady_batch_s:
            best = way, timeline
    model = case.model
    row: dict[str, Any] = {
        "model": model.name,
        "machine": case.machine.name,
        "state_gb": model.state_bytes / GB,
        "fits": best is not None,
        "how": refused if best is None else described(case, best[0]),
    }
    if best is None:
        return row | dict.fromkeys(FIGURES) | {"published": case.published}
    batch_s = best[1].steady_batch_s
    samples = model.num_microbatches * model.samples_a_microbatch
    return row | {
        "step_s": batch_s,
        "apart_s": apart_s,
        "samples_per_s": samples / batch_s,
        **busy(best[1]),
        "published": case.published,
    }


FIGURES = (
    "step_s",
    "apart_s",
    "samples_per_s",
    "compute_s",
    "host_wire_s",
    "disk_s",
    "replicas_s",
    "network_s",
    "limit",
)


def described(case: Case, way: Way) -> str:
    """A way in words."""
    shared = f"{case.width} replicas share all state" if case.width > 1 else ""
    swept = "" if way.sweep == 1 else f"sweeps of {way.sweep}"
    return ", ".join(filter(None, (shared, way.schedule, swept, way.order, "on the host" * way.on_host)))


def largest_row(case: Case) -> dict[str, Any]:
    """The row of the model with the most layers that fits, at the case's width of a layer."""
    way = next(case.ways())

    def with_layers(number: int) -> Case:
        made = replace(case.model, num_layers=number)
        return replace(case, model=replace(made, name=f"{made.num_parameters / 1e9:.1f}B"))

    fits, too_many = 1, 512
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            paged_program(with_layers(middle), way)
            fits = middle
        except BiremeError:
            too_many = middle
    return row_of(replace(with_layers(fits), published=f"largest that fits: {fits} layers"))


def paged_program(case: Case, way: Way) -> Program:
    """Three batches of a case with their copies; raises if it does not fit."""
    machine, depth = case.machine, case.machine.num_ranks // case.width
    program = generate(
        way.schedule,
        num_stages=case.num_stages,
        num_microbatches=case.model.num_microbatches // case.width,
        num_batches=3,
        stages_per_rank=case.parts,
        sweep=way.sweep,
        recompute=range(case.num_stages),
    )
    program = gathered(program, case.width, WHOLE)
    budgets = Budgets(int(USABLE * machine.device.memory_bytes), machine.host_bytes, machine.disk_bytes)
    cut = cut_memory(
        program,
        costs_of(case).sizes(),
        (budgets,) * depth,
        most_chunks=MOST_CHUNKS,
        page_bytes=LARGE_PAGE_BYTES,
        host_updates=way.on_host,
    )
    return PagedPrograms(program, cut, **ORDERS[way.order]).fetched(way.ahead)


WHOLE = 2
"""Parts whose weights are whole on a rank at a time, if replicas share them."""


def simulated(case: Case, way: Way) -> Timeline:
    """Three batches of a case."""
    machine, paged = case.machine, paged_program(case, way)
    links = TierLinks(machine.host_bytes_per_s, machine.disk_bytes_per_s)
    network = Links(machine.link_bytes_per_s).network(paged)
    if case.width > 1:
        network = sharing_network(network, machine, paged.num_ranks)
    return simulate(paged, costs_of(case), network, tier_links=links)


def sharing_network(network: Network, machine: Machine, num_ranks: int) -> Network:
    """The network with a wire of each rank's own to its replicas."""
    first = len(network.wires)
    wires = tuple(Wire(f"rank {rank} to its replicas", machine.link_bytes_per_s) for rank in range(num_ranks))
    paths = {rank: Path((first + rank,)) for rank in range(num_ranks)}
    return replace(network, wires=(*network.wires, *wires), sync_paths=paths)


def costs_of(case: Case) -> Costs:
    """Seconds and bytes of each part."""
    model, device, num_parts = case.model, case.machine.device, case.num_stages
    parameters, trained = model.num_parameters / num_parts, model.num_trained / num_parts
    tokens = model.tokens * model.samples_a_microbatch
    forward_s = 2 * parameters * tokens / (ATTAINED_FLOPS * device.bfloat16_flops_per_s)
    message_bytes = 2.0 * tokens * model.width
    frozen_bytes = (2 * parameters * bool(model.rank),) * num_parts
    return Costs.per_stage(
        num_parts,
        forward_s=forward_s,
        # Gradients of inputs take as long as the forward, and so do gradients of weights that learn.
        backward_s=forward_s * (1 + trained / parameters),
        # Reads gradient, master copy and moments, writes weights, master copy and moments.
        update_s=28 * trained / case.width / (ATTAINED_BYTES * device.bytes_per_s),
        host_update_s=28 * trained / case.width / (ATTAINED_BYTES * case.machine.memory_bytes_per_s),
        message_bytes=message_bytes,
        weight_bytes=2 * trained,
        gradient_bytes=2 * trained,
        optimizer_bytes=12 * trained / case.width,
        stash_bytes=LIVE_BYTES * tokens * model.width * model.num_layers / num_parts,
        input_bytes=(message_bytes,) * num_parts,
        master_weights=True,
        buffer_bytes=frozen_bytes,
        frozen_bytes=frozen_bytes,
    )


def busy(timeline: Timeline) -> dict[str, Any]:
    """Seconds a batch that the busiest rank computes and its wires carry, and which of them is the most."""
    num_batches = timeline.program.num_batches
    seconds = {"compute_s": max(rank.busy_s for rank in timeline.ranks) / num_batches}
    wires = dict.fromkeys(("host_wire_s", "disk_s", "replicas_s"), 0.0)
    for moved in timeline.paging:
        # There is a wire each way to the host, and one for both ways to the disk and to the replicas.
        own = defaultdict[tuple[str, bool], float](float)
        for copies in moved.copies:
            ends = {copies.source, copies.destination}
            wire = "disk_s" if "disk" in ends else "replicas_s" if REPLICAS in ends else "host_wire_s"
            is_up = wire == "host_wire_s" and copies.destination == "device"
            own[wire, is_up] += sum(copies.end_s) - sum(copies.start_s)
        for (wire, _), spent in own.items():
            wires[wire] = max(wires[wire], spent / num_batches)
    seconds |= wires
    network_s = [sum(one.end_s) - sum(one.start_s) for one in timeline.transfers]
    seconds["network_s"] = max(network_s, default=0.0) / num_batches
    limit = max(seconds, key=seconds.__getitem__)
    names = {
        "compute_s": "compute",
        "host_wire_s": "wire to the host",
        "disk_s": "disk",
        "replicas_s": "wire to the replicas",
        "network_s": "network",
    }
    idle = timeline.steady_bubble_fraction
    return {**seconds, "limit": f"{names[limit]} ({idle:.0%} idle)"}
