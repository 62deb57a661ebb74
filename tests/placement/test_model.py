"""From captured models to workloads for the placement of operators, and from placements back to plans."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import Device
from bireme.cluster.links import Bridge, Card, Link
from bireme.cluster.server import Server
from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.placement.contiguous.chain import cut_chain
from bireme.placement.contraction import Weightless, items_of
from bireme.placement.found import loads_of, value_of
from bireme.placement.of_model.fleet import fleet_of
from bireme.placement.of_model.from_model import ModelWorkload, workload_of
from bireme.placement.of_model.operators import Operators
from bireme.placement.of_model.to_plan import plan_of
from bireme.placement.placement import Placement
from bireme.placement.request import Granularity
from bireme.placement.workload import Objective
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.profile.profiler import profile as profiled
from bireme.profile.stages import stage_cost
from tests.support.clusters import few
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.placement_oracles import best_by_force
from tests.support.small_models import gpt as engine_gpt
from tests.support.small_models import token_batches
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
    return profiled(graph, LAPTOP, [MICRO_BATCH])


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
    """A value that is used twice, a position mask that every layer uses, and a normalisation that counts."""

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
    torch.manual_seed(0)
    return capture(Skipping(frozen=frozen), {"x": torch.randn(2, WIDTH), "wanted": torch.randn(2, 1)})


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


# --- what a workload says


@pytest.mark.slow
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_unit_takes_what_the_profile_says(name: str, granularity: Granularity, training: bool) -> None:
    graph = GRAPHS[name]()
    model = model_of(graph, equal_devices(2, speed=0.5), granularity, training=training)
    costs = [unit.at(MICRO_BATCH) for unit in profile_of(graph).units]
    forward, backward = (by_unit(model, is_backward=column) for column in (False, True))
    assert forward == pytest.approx([2e3 * cost.forward_s for cost in costs])
    assert backward == pytest.approx([2e3 * cost.backward_s if training else 0.0 for cost in costs])
    assert model.workload.is_training is training


@pytest.mark.slow
@pytest.mark.parametrize("granularity", BOTH)
@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_are_those_of_the_whole_model_in_one_place(name: str, granularity: Granularity) -> None:
    graph = GRAPHS[name]()
    profile = profile_of(graph)
    whole = stage_cost(profile, 0, len(profile.units), MICRO_BATCH)
    saved_bytes = sum(unit.at(MICRO_BATCH).saved_bytes for unit in profile.units)
    held_bytes = whole.parameter_bytes + whole.buffer_bytes
    for training in (False, True):
        model = model_of(graph, equal_devices(2), granularity, training=training)
        more_bytes = whole.gradient_bytes + whole.optimizer_bytes + saved_bytes if training else 0
        total = sum(node.size_bytes for node in model.workload.nodes)
        assert total == pytest.approx(held_bytes + more_bytes)


def test_an_operator_has_the_parameters_that_it_uses() -> None:
    graph = untied()
    model = model_of(graph, equal_devices(2), training=False)
    bytes_of = {state.name: state.num_bytes for state in (*graph.parameters, *graph.buffers)}
    for node, places in zip(model.workload.nodes, model.operators, strict=True):
        used = {name for place in places for name in graph.operators[place].reads() if name in bytes_of}
        assert node.size_bytes == pytest.approx(sum(bytes_of[name] for name in used))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["untied", "skipping"])
def test_cuts_at_units_cost_the_same_at_both_granularities(name: str, training: bool) -> None:
    """Above all a value that both the next layer and the way around it use comes back as one gradient.

    Links are not late here: where two values cross at a border, each is by itself among operators.
    """
    graph, cluster = GRAPHS[name](), equal_devices(3, latency_s=0.0)
    units, operators = (model_of(graph, cluster, granularity, training=training) for granularity in BOTH)
    for cuts in combinations(range(1, len(units.unit_names)), 2):
        found = loads_at(operators, at_cuts(operators, cuts))
        for one, other in zip(found, loads_at(units, at_cuts(units, cuts)), strict=True):
            assert one == pytest.approx(other)


def test_both_ends_pay_half_of_what_a_message_takes() -> None:
    cluster = equal_devices(2)
    model = model_of(untied(), cluster, Granularity.UNITS)
    cut = 2
    loads = loads_at(model, at_cuts(model, (cut,)))
    boundary_bytes = profile_of(untied()).units[cut - 1].at(MICRO_BATCH).boundary_bytes
    message_ms = 1e3 * (boundary_bytes / cluster.bandwidth(0, 1) + cluster.latency(0, 1))
    for column in (False, True):
        compute = by_unit(model, is_backward=column)
        for device, units in enumerate((slice(cut), slice(cut, None))):
            assert loads[device][column] == pytest.approx(sum(compute[units]) + message_ms / 2)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", BOTH)
def test_no_gradient_goes_where_nothing_learns(granularity: Granularity) -> None:
    model = model_of(skipping(frozen=True), equal_devices(2), granularity)
    nodes = model.workload.nodes
    frozen = {node.id for node, unit in zip(nodes, model.units, strict=True) if unit == 0}
    assert any(unit == 0 for unit in model.units)
    sent = [edge for edge in model.workload.edges if edge.target in frozen and edge.source not in frozen]
    assert not sent


def test_masks_go_along_with_their_users() -> None:
    graph = skipping()
    units = units_of(graph)
    operators = Operators.of(graph, units)
    made_again = [
        place for place, operator in enumerate(graph.operators) if operator.target.startswith("aten.ara")
    ]
    assert made_again
    assert not operators.unit_of.keys() & set(made_again)
    model = model_of(graph, equal_devices(2))
    for place in made_again:
        users = {unit for unit, own in zip(model.units, model.operators, strict=True) if place in own}
        assert users == {unit.index for unit in units if place in unit.operators}


def test_a_count_of_batches_goes_along_with_its_normalisation() -> None:
    graph = skipping()
    colours = Operators.of(graph, units_of(graph)).colours(copy_tied=False)
    targets = {operator.target.split(".")[1]: place for place, operator in enumerate(graph.operators)}
    assert graph.operators[targets["add_"]].mutates == ("norm.num_batches_tracked",)
    assert colours[targets["add_"]] == colours[targets["batch_norm"]] != colours[targets["mul"]]


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_placed_is_what_units_do_not_make_again(name: str) -> None:
    graph = GRAPHS[name]()
    units = units_of(graph)
    operators = Operators.of(graph, units)
    times = [sum(place in unit.operators for unit in units) for place in range(len(graph.operators))]
    assert all(times[place] == 1 for place in operators.unit_of)
    for unit in units:
        assert {*unit.receives, *unit.sends} <= operators.values.keys()
        own = operators.own_of(unit.index)
        helpers = [helper for place in own for helper in operators.helpers[place]]
        assert sorted((*own, *helpers)) == list(unit.operators)


def test_each_of_several_results_costs_what_it_is() -> None:
    """A third of what the projection makes goes to each of query, key and value."""
    model = model_of(untied(), equal_devices(2), training=False)
    edges = defaultdict(list)
    for edge in model.workload.edges:
        edges[edge.source].append(edge)
    results = [node for node in model.workload.nodes if "chunk, result" in node.name]
    assert len(results) == 6
    fleet = fleet_of(equal_devices(2))
    third = fleet.cost_ms(MICRO_BATCH * 8 * 16 * 4)
    assert [edge.cost for node in results for edge in edges[node.id]] == pytest.approx([third] * 6)


class Viewing(nn.Module):
    """Looks at one value in two other ways before it goes on, and at a value that others use too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        made = self.first(x)
        seen = torch.tanh(made.unflatten(1, (2, 4)).transpose(1, 2)).flatten(1)
        return {"loss": functional.mse_loss(self.last(seen + made.view(-1, WIDTH)), wanted.view(-1, 1))}


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_another_look_at_a_value_stays_with_its_maker_and_loses_nothing(training: bool) -> None:
    graph = capture(Viewing(), {"x": torch.randn(2, WIDTH), "wanted": torch.randn(2, 1)})
    workload = model_of(graph, equal_devices(2), training=training).workload
    apart = model_of(graph, equal_devices(2), training=training)
    names = {node.name: node.colour for node in workload.nodes}
    assert names["transpose"] == names["unflatten"]
    assert names["view"] != names["first linear"] != names["unflatten"]
    first_of = {own: place for place, own in reversed(list(enumerate(apart.operators)))}
    recoloured = tuple(
        replace(node, colour=first_of[own]) for node, own in zip(workload.nodes, apart.operators, strict=True)
    )
    for contiguous in (False, True):
        bound, free = (
            best_by_force(one, Objective.TRAINING, contiguous=contiguous)
            for one in (workload, replace(workload, nodes=recoloured))
        )
        assert bound == pytest.approx(free)


class Folding(nn.Module):
    """Layers that begin with another look at what the last one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x.view(2, -1, WIDTH).transpose(0, 1)).flatten(0, 1)
        return {"loss": functional.mse_loss(self.last(x), wanted)}


def test_units_of_an_untied_model_can_all_be_parted() -> None:
    folding = capture(Folding(), {"x": torch.randn(2, WIDTH), "wanted": torch.randn(2, 1)})
    for graph in (untied(), folding):
        model = model_of(graph, equal_devices(2))
        units: dict[int | None, set[int]] = defaultdict(set)
        for node, unit in zip(model.workload.nodes, model.units, strict=True):
            units[node.colour].add(unit)
        assert all(len(found) == 1 for found in units.values())


@pytest.mark.parametrize("granularity", BOTH)
def test_operators_with_a_common_weight_share_a_colour(granularity: Granularity) -> None:
    graph = gpt(2)
    users = [place for place, one in enumerate(graph.operators) if "tokens.weight" in one.reads()]
    for copy_tied, expected in ((False, 1), (True, 2)):
        model = model_of(graph, equal_devices(2), granularity, copy_tied=copy_tied)
        pairs = zip(model.workload.nodes, model.operators, strict=True)
        colours = {node.colour for node, own in pairs if set(users) & set(own)}
        assert len(colours) == expected


def test_copies_of_a_common_weight_count_in_each_unit() -> None:
    graph = gpt(2)
    weight_bytes = next(state.num_bytes for state in graph.parameters if state.name == "tokens.weight")
    for granularity in BOTH:
        once, twice = (
            sum(
                node.size_bytes
                for node in model_of(
                    graph, equal_devices(2), granularity, training=False, copy_tied=copied
                ).workload.nodes
            )
            for copied in (False, True)
        )
        assert twice - once == pytest.approx(weight_bytes)


def test_a_backward_shares_the_colour_of_its_forward() -> None:
    model = model_of(skipping(), equal_devices(2))
    colours: dict[tuple[int, ...], set[int | None]] = defaultdict(set)
    for node, own in zip(model.workload.nodes, model.operators, strict=True):
        colours[own].add(node.colour)
    assert all(len(found) == 1 for found in colours.values())


# --- devices


def two_servers(one: Device, other: Device, *, rate: float = 1e9) -> Cluster:
    servers = [
        Server(name, (device,), (), (), (Card("net", (0,), Link(rate, 0.0)),))
        for name, device in (("a", one), ("b", other))
    ]
    return Cluster(tuple(servers))


@pytest.mark.parametrize(
    "other",
    [Device("any", "emulated", 100, speed=0.5), Device("any", "emulated", 200)],
    ids=["speed", "memory"],
)
def test_unequal_accelerators_are_refused_by_name(other: Device) -> None:
    with pytest.raises(
        BiremeError, match=r"a/emulated0 \(speed 1, 100 bytes\) and b/emulated0 .*bireme plan"
    ):
        fleet_of(two_servers(Device("any", "emulated", 100), other))


def test_equal_devices_may_be_picked_out_of_unequal_ones() -> None:
    cluster = two_servers(Device("any", "emulated", 100), Device("any", "emulated", 200))
    assert fleet_of(cluster, ["b/emulated0"]).accelerator_bytes == 200


@pytest.mark.slow
def test_processors_alone_are_the_accelerators() -> None:
    workload = model_of(untied(), equal_devices(3, kind="cpu", memory_bytes=10**8)).workload
    assert (workload.num_accelerators, workload.num_cpus, workload.accelerator_bytes) == (3, 0, 1e8)


def test_processors_with_accelerators_are_cpus_and_leave_them_the_whole_message() -> None:
    slow, fast = Device("any", "cpu", 500, speed=0.25), Device("any", "emulated", 10**9)
    cluster = two_servers(slow, fast)
    fleet = fleet_of(cluster)
    assert (fleet.names, fleet.num_accelerators, fleet.num_cpus) == (("b/emulated0", "a/cpu0"), 1, 1)
    assert fleet.cost_ms(10**6) == pytest.approx(1.0)
    assert fleet_of(two_servers(fast, fast)).cost_ms(10**6) == pytest.approx(0.5)
    for node in model_of(untied(), cluster).workload.nodes:
        assert node.cpu_time == pytest.approx(4 * node.accelerator_time)


def test_one_device_pays_for_no_message() -> None:
    assert fleet_of(equal_devices(1)).cost_ms(10**9) == 0


@pytest.mark.slow
@given(few(), st.integers(0, 10**10))
def test_the_price_is_that_of_the_slowest_way_there_is(cluster: Cluster, num_bytes: int) -> None:
    ends = list(permutations(range(cluster.num_devices), 2))
    seconds = [num_bytes / cluster.bandwidth(*pair) + cluster.latency(*pair) for pair in ends]
    assert fleet_of(cluster).cost_ms(num_bytes) == pytest.approx(500 * max(seconds, default=0.0))


# --- what does not go together


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(BiremeError, match="profile was made for another model"):
        workload_of(
            untied(), profile_of(skipping()), equal_devices(2), micro_batch=MICRO_BATCH, training=True
        )


def test_a_size_that_the_profile_does_not_know_is_refused() -> None:
    with pytest.raises(BiremeError, match="micro-batches of 2 samples, not of 3"):
        workload_of(untied(), profile_of(untied()), equal_devices(2), micro_batch=3, training=True)


# --- back to a plan


def test_a_chain_of_stages_comes_back_as_a_plan() -> None:
    for granularity in BOTH:
        model = model_of(untied(), equal_devices(3), granularity)
        devices = tuple((2, 0, 1)[device] for device in at_cuts(model, (1, 4)))
        found = plan_of(model, placed(model, devices), num_microbatches=6)
        names = (("here/emulated2",), ("here/emulated0",), ("here/emulated1",))
        assert found.plan == Plan((1, 4), 6, micro_batch_sizes=(MICRO_BATCH,), devices=names)
        assert (found.devices, found.note) == (devices, "")


def test_a_cut_inside_a_unit_is_refused_by_the_first_operator() -> None:
    model = model_of(untied(), equal_devices(2))
    linear = next(
        place
        for place, node in enumerate(model.workload.nodes)
        if node.name.endswith("query_key_value linear")
    )
    devices = inside(model, linear)
    with pytest.raises(BiremeError, match=r"query_key_value linear\) of unit 1 \(layers\.0.*emulated1"):
        plan_of(model, placed(model, devices), num_microbatches=2)


def inside(model: ModelWorkload, place: int) -> tuple[int, ...]:
    """Device 0 up to the operator of a node, device 1 for what runs from that on."""
    first = model.operators[place][-1]
    return tuple(int(own[-1] >= first) for own in model.operators)


def test_a_device_with_two_stretches_is_refused() -> None:
    model = model_of(untied(), equal_devices(2), Granularity.UNITS)
    devices = tuple(unit % 2 for unit in model.units)
    with pytest.raises(BiremeError, match=r"of unit 2 .*is on here/emulated0, as are earlier units"):
        plan_of(model, placed(model, devices), num_microbatches=2)


def test_cuts_are_moved_to_the_nearest_borders_and_the_value_follows() -> None:
    model = model_of(untied(), equal_devices(2))
    norm = next(
        place for place, node in enumerate(model.workload.nodes) if "layers.1.attention_norm" in node.name
    )
    before = placed(model, inside(model, norm + 1))
    found = plan_of(model, before, num_microbatches=2, snapped=True)
    assert found.plan.cuts == (3,)
    assert found.devices == at_cuts(model, (3,))
    assert found.value == pytest.approx(max(map(sum, loads_at(model, found.devices))))
    assert found.value != before.value
    assert f"{found.value:.6g} ms instead of {before.value:.6g} ms" in found.note


def test_moved_cuts_keep_tied_operators_together() -> None:
    model = model_of(gpt(2), equal_devices(2))
    devices = list(at_cuts(model, (1,)))
    tied = {node.colour for node, unit in zip(model.workload.nodes, model.units, strict=True) if unit == 0}
    for place, node in enumerate(model.workload.nodes):
        devices[place] = 0 if node.colour in tied else devices[place]
    found = plan_of(model, placed(model, tuple(devices)), num_microbatches=2, snapped=True)
    assert found.plan.cuts == ()


def test_moved_cuts_that_do_not_fit_are_refused() -> None:
    graph = untied()
    model = model_of(graph, equal_devices(2))
    norm = next(
        place for place, node in enumerate(model.workload.nodes) if "layers.1.attention_norm" in node.name
    )
    before = placed(model, inside(model, norm + 1))
    sizes = [0.0, 0.0]
    for node, device in zip(model.workload.nodes, at_cuts(model, (3,)), strict=True):
        sizes[device] += node.size_bytes
    tight = replace(model, workload=replace(model.workload, accelerator_bytes=max(sizes) - 1))
    with pytest.raises(BiremeError, match="more than it can hold"):
        plan_of(tight, before, num_microbatches=2, snapped=True)


def test_a_placement_of_another_workload_is_refused() -> None:
    model, other = (model_of(untied(), equal_devices(2), granularity) for granularity in BOTH)
    before = placed(model, at_cuts(model, (2,)))
    with pytest.raises(BiremeError, match="made for another workload"):
        plan_of(other, before, num_microbatches=2)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_of_several_stages_for_a_device_are_refused(schedule: str) -> None:
    model = model_of(untied(), equal_devices(2), Granularity.UNITS)
    with pytest.raises(BiremeError, match=f"{schedule} gives each device several stages"):
        plan_of(model, placed(model, at_cuts(model, (2,))), num_microbatches=4, schedule=schedule)


def test_the_best_cut_of_units_is_the_best_of_all_cuts() -> None:
    model = model_of(untied(), equal_devices(3), Granularity.UNITS)
    items = items_of(model.workload, contiguous=True)
    best = min(
        max(map(sum, loads_at(model, at_cuts(model, cuts))))
        for cuts in combinations(range(1, len(model.unit_names)), 2)
    )
    assert cut_chain(items, Objective.TRAINING).value == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_the_plan_of_a_placement_trains(schedule: str) -> None:
    model = engine_gpt("layers=3,tied=false")
    profile = profiled(model.graph, LAPTOP, [MICRO_BATCH])
    workload = workload_of(
        model.graph,
        profile,
        equal_devices(3),
        micro_batch=MICRO_BATCH,
        training=True,
        granularity=Granularity.UNITS,
    )
    items = items_of(workload.workload, contiguous=True)
    split = cut_chain(items, Objective.TRAINING)
    devices = [0] * len(workload.workload.nodes)
    for members, device in zip(items.members, split.where, strict=True):
        for place in members:
            devices[place] = device
    loads = loads_of(items, split.where)
    assert value_of(loads, Objective.TRAINING) == split.value
    placement = Placement(
        Objective.TRAINING, "chain", True, tuple(devices), split.value, 0.0, tuple(loads.sum(axis=1))
    )
    plan = plan_of(workload, placement, num_microbatches=4, schedule=schedule).plan
    assert plan.num_stages == 3
    setting = Setting(plan)
    data = token_batches(8, 3)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data))
