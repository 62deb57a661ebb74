"""Models and machines of which people ask whether they go together, and what the simulator says of them.

Devices, hosts and wires are their makers' numbers; a device attains half of its arithmetic and seven tenths
of its memory's bandwidth, as profiles that are estimated assume. A model is its layers alone: 12 · width²
parameters each, two operations for each parameter and token forward and four backward, and the forward once
more, for every part keeps only its inputs. A parameter takes 2 bytes for weights, 2 for its gradient and 12
for the master copy and moments of AdamW. The optimizer steps on the device or on the host, whichever makes
the batch shorter; on the host at the speed of its memory, of which a step attains seven tenths too. Chunks
are those of a plan: at most 256 of a rank, in pages of 2 MiB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bireme.cluster.device import KNOWN, Device
from bireme.errors import BiremeError
from bireme.plan.plan import MOST_CHUNKS
from bireme.profile.estimate import ATTAINED_BYTES, ATTAINED_FLOPS
from bireme.schedule.budgets import Budgets, cut_memory
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.paging import page_cut
from bireme.schedule.program import Program, Rule
from bireme.schedule.tiers import LARGE_PAGE_BYTES
from bireme.simulate.copies import TierLinks
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline

__all__ = ["CASES", "Case", "Machine", "Model", "row_of"]

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

    @property
    def num_parameters(self) -> float:
        """Of all layers."""
        return 12.0 * self.num_layers * self.width**2


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
    """A model on a machine: how many parts each rank has, which schedules and sweeps are tried."""

    model: Model
    machine: Machine
    parts: int
    schedules: Sequence[str] = ("1f1b",)
    sweeps: Sequence[int] = (1,)
    published: str = ""
    must_fit: bool = True


SERVER_MEMORY = 12 * 21.3e9
"""Two processors with six channels of DDR4-2666 each, as servers of V100s had."""
DESKTOP_MEMORY = 2 * 25.6e9
"""Two channels of DDR4-3200."""

V100 = Machine(
    "8 × V100",
    8,
    replace(KNOWN["v100"], memory_bytes=32 * GIB),
    30 * GB,
    0,
    16e9,
    1e9,
    25e9,
    SERVER_MEMORY / 8,
)
"""A server: NVLink between devices, PCIe 3.0 × 16 to the host, whose memory the ranks share alike."""
CARD = KNOWN["rtx4090"]
HOST, DISK = 64 * GB, 2000 * GB
PCIE, NVME, ETHERNET = 32e9, 5e9, 1.25e9
"""PCIe 4.0 × 16, an NVMe disk that reads and writes as fast, 10 Gbit/s."""


def cards(number: int) -> Machine:
    """Machines of one card each."""
    name = f"{number} × RTX 4090"
    return Machine(name, number, CARD, HOST, DISK, PCIE, NVME, ETHERNET, DESKTOP_MEMORY)


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

CASES: tuple[Case, ...] = (
    *(
        Case(Model(f"{size}B", layers, width, 1024, 16, 2), V100, 4, published=published(size))
        for size, layers, width in PATRICKSTAR
    ),
    Case(Model("7B", 32, 4096, 2048, 8), cards(1), 32, sweeps=(1, 8)),
    Case(Model("13B", 40, 5120, 2048, 8), cards(2), 20, schedules=("1f1b", "2bw"), sweeps=(1, 4)),
    Case(Model("70B", 80, 8192, 2048, 16), cards(8), 20, schedules=("1f1b", "2bw"), sweeps=(1, 2)),
)


ORDERS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "updates together": {"updates_together": True},
    "updates apart": {"updates_apart": True},
}
"""Of a rank's updates; those apart are for runs without clipping, and for schedules that drain."""
LEADS = (1, 16)
"""Instructions ahead of their use that chunks are fetched."""


def row_of(case: Case) -> dict[str, Any]:
    """What the simulator says of the fastest way that was tried, and what is the least with updates apart; of
    none, why.
    """
    best: tuple[float, str, Timeline] | None = None
    apart_s: float | None = None
    refused = ""
    ways = product(case.schedules, case.sweeps, (False, True), ORDERS, LEADS)
    for schedule, sweep, on_host, order, ahead in ways:
        is_apart = order == "updates apart"
        if is_apart and SCHEDULES[schedule].rule is not Rule.SYNCHRONOUS:
            continue
        try:
            timeline = simulated(case, schedule, sweep, on_host=on_host, ahead=ahead, **ORDERS[order])
        except BiremeError as error:
            refused = str(error)
            continue
        batch_s = timeline.steady_batch_s
        if is_apart:
            apart_s = batch_s if apart_s is None else min(apart_s, batch_s)
        elif best is None or batch_s < best[0]:
            swept = "" if sweep == 1 else f"sweeps of {sweep}"
            how = ", ".join(filter(None, (schedule, swept, order, "on the host" if on_host else "")))
            best = batch_s, how, timeline
    model, machine = case.model, case.machine
    state = 16 * model.num_parameters
    row: dict[str, Any] = {
        "model": model.name,
        "machine": machine.name,
        "state_gb": state / GB,
        "fits": best is not None,
        "how": refused if best is None else best[1],
    }
    if best is None:
        return row | dict.fromkeys(FIGURES) | {"published": case.published}
    batch_s, _, timeline = best
    samples = model.num_microbatches * model.samples_a_microbatch
    return row | {
        "step_s": batch_s,
        "apart_s": apart_s,
        "samples_per_s": samples / batch_s,
        **busy(timeline),
        "published": case.published,
    }


FIGURES = ("step_s", "apart_s", "samples_per_s", "compute_s", "host_wire_s", "disk_s", "network_s", "limit")


def simulated(case: Case, schedule: str, sweep: int, *, ahead: int, on_host: bool, **order: bool) -> Timeline:
    """Three batches of a case, with this order of updates, and chunks fetched so many steps ahead."""
    machine = case.machine
    program = generate(
        schedule,
        num_stages=machine.num_ranks * case.parts,
        num_microbatches=case.model.num_microbatches,
        num_batches=3,
        stages_per_rank=case.parts,
        sweep=sweep,
        recompute=range(machine.num_ranks * case.parts),
    )
    costs = costs_of(case)
    budgets = Budgets(int(USABLE * machine.device.memory_bytes), machine.host_bytes, machine.disk_bytes)
    cut = cut_memory(
        program,
        costs.sizes(),
        (budgets,) * machine.num_ranks,
        most_chunks=MOST_CHUNKS,
        page_bytes=LARGE_PAGE_BYTES,
        host_updates=on_host,
    )
    paged: Program = page_cut(program, cut, ahead=ahead, **order)
    links = TierLinks(machine.host_bytes_per_s, machine.disk_bytes_per_s)
    network = Links(machine.link_bytes_per_s).network(paged)
    return simulate(paged, costs, network, tier_links=links)


def costs_of(case: Case) -> Costs:
    """Seconds and bytes of each part."""
    model, device = case.model, case.machine.device
    num_parts = case.parts * case.machine.num_ranks
    parameters = model.num_parameters / num_parts
    tokens = model.tokens * model.samples_a_microbatch
    forward_s = 2 * parameters * tokens / (ATTAINED_FLOPS * device.bfloat16_flops_per_s)
    message_bytes = 2.0 * tokens * model.width
    return Costs.per_stage(
        num_parts,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        # Reads gradient, master copy and moments, writes weights, master copy and moments.
        update_s=28 * parameters / (ATTAINED_BYTES * device.bytes_per_s),
        host_update_s=28 * parameters / (ATTAINED_BYTES * case.machine.memory_bytes_per_s),
        message_bytes=message_bytes,
        weight_bytes=2 * parameters,
        gradient_bytes=2 * parameters,
        optimizer_bytes=12 * parameters,
        stash_bytes=LIVE_BYTES * tokens * model.width * model.num_layers / num_parts,
        input_bytes=(message_bytes,) * num_parts,
        master_weights=True,
    )


def busy(timeline: Timeline) -> dict[str, Any]:
    """Seconds a batch that the busiest rank computes and its wires carry, and which of them is the most."""
    num_batches = timeline.program.num_batches
    seconds = {"compute_s": max(rank.busy_s for rank in timeline.ranks) / num_batches}
    host_s, disk_s = [0.0], [0.0]
    for moved in timeline.paging:
        by_way = {
            (copies.source, copies.destination): sum(copies.end_s) - sum(copies.start_s)
            for copies in moved.copies
        }
        host_s += [spent for way, spent in by_way.items() if "disk" not in way]
        disk_s.append(sum(spent for way, spent in by_way.items() if "disk" in way))
    seconds["host_wire_s"] = max(host_s) / num_batches
    seconds["disk_s"] = max(disk_s) / num_batches
    network_s = [sum(one.end_s) - sum(one.start_s) for one in timeline.transfers]
    seconds["network_s"] = max(network_s, default=0.0) / num_batches
    limit = max(seconds, key=seconds.__getitem__)
    names = {
        "compute_s": "compute",
        "host_wire_s": "wire to the host",
        "disk_s": "disk",
        "network_s": "network",
    }
    idle = timeline.steady_bubble_fraction
    return {**seconds, "limit": f"{names[limit]} ({idle:.0%} idle)"}
