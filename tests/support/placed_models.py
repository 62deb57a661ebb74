"""Small models as workloads of the placement of operators, and placements of them made by hand."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.cluster.cluster import Bridge, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.placement.contraction import Weightless, items_of, loads_of
from bireme.placement.model import ModelWorkload, workload_of
from bireme.placement.workload import Granularity, Objective, Placement
from bireme.profile.profile import Profile
from tests.support.estimates import estimated_once
from tests.support.graphs import captured_once
from tests.support.tiny_profiles import LAPTOP, gpt

BOTH = (Granularity.UNITS, Granularity.OPERATORS)
MICRO_BATCH, WIDTH = 2, 8


def equal_devices(
    count: int,
    *,
    kind: str = "emulated",
    memory_bytes: int = 10**9,
    speed: float = 1.0,
    latency_s: float = 1e-6,
) -> Cluster:
    device = Device("any", kind, memory_bytes, speed=speed)
    bridge = Bridge("bus", tuple(range(count)), Link(1e9, latency_s))
    return Cluster((Server("here", (device,) * count, (bridge,)),))


@cache
def profile_of(graph: Graph) -> Profile:
    return estimated_once(graph, LAPTOP, [MICRO_BATCH])


def model_of(
    graph: Graph,
    cluster: Cluster,
    granularity: Granularity = Granularity.OPERATORS,
    *,
    training: bool = True,
    copy_tied: bool = False,
) -> ModelWorkload:
    return workload_of(
        graph,
        profile_of(graph),
        cluster,
        micro_batch=MICRO_BATCH,
        training=training,
        granularity=granularity,
        copy_tied=copy_tied,
    )


def untied(layers: int = 2) -> Graph:
    return gpt(layers, tied="false")


class Skipping(nn.Module):
    """A value that is used twice, a position mask that every layer uses, and a normalization that counts."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)
        self.first.requires_grad_(not frozen)
        self.norm.requires_grad_(not frozen)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        mask = (torch.arange(WIDTH) % 2).to(x.dtype)
        made = self.norm(self.first(x))
        for layer in self.layers:
            made = made + torch.tanh(layer(made)) * mask
        return {"loss": functional.mse_loss(self.last(made), wanted)}


@cache
def skipping(*, frozen: bool = False) -> Graph:
    inputs = {"x": torch.randn(2, WIDTH), "wanted": torch.randn(2, 1)}
    return captured_once(f"skipping, frozen: {frozen}", partial(capture, Skipping(frozen=frozen), inputs))


GRAPHS: dict[str, Callable[[], Graph]] = {"untied": untied, "tied": partial(gpt, 2), "skipping": skipping}
"""Captured when a test asks, and not whenever tests are collected."""


def by_unit(model: ModelWorkload, *, is_backward: bool) -> list[float]:
    found = [0.0] * len(model.unit_names)
    for unit, node in zip(model.units, model.workload.nodes, strict=True):
        found[unit] += node.accelerator_time if node.is_backward is is_backward else 0.0
    return found


def at_cuts(model: ModelWorkload, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """The device of each node, where the units from each cut on are on the next device."""
    return tuple(sum(unit >= cut for cut in cuts) for unit in model.units)


def loads_at(model: ModelWorkload, devices: tuple[int, ...]) -> list[list[float]]:
    items = items_of(model.workload, contiguous=False, weightless=Weightless.STAY)
    assert all(len({devices[place] for place in members}) == 1 for members in items.members)
    found: list[list[float]] = loads_of(items, [devices[members[0]] for members in items.members]).tolist()
    return found


def placed(model: ModelWorkload, devices: tuple[int, ...]) -> Placement:
    loads = [sum(pair) for pair in loads_at(model, devices)]
    return Placement(Objective.TRAINING, "by hand", False, devices, max(loads), 0.0, tuple(loads))
