"""From captured models to workloads for the placement of operators: what a node is, takes and sends."""

from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.units import units_of
from bireme.placement.model import fleet_of, workload_of
from bireme.placement.pieces import Operators
from bireme.placement.workload import Granularity, Objective
from bireme.profile.stages import stage_cost
from tests.support.placed_models import (
    BOTH,
    GRAPHS,
    MICRO_BATCH,
    WIDTH,
    at_cuts,
    by_unit,
    equal_devices,
    loads_at,
    model_of,
    profile_of,
    skipping,
    untied,
)
from tests.support.placement_oracles import best_by_force
from tests.support.tiny_profiles import gpt


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

    Links are not late here: where two values cross at a boundary, each is by itself among operators.
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


def test_a_count_of_batches_goes_along_with_its_normalization() -> None:
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


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(BiremeError, match="profile was made for another model"):
        workload_of(
            untied(), profile_of(skipping()), equal_devices(2), micro_batch=MICRO_BATCH, training=True
        )


def test_a_size_that_the_profile_does_not_know_is_refused() -> None:
    with pytest.raises(BiremeError, match="micro-batches of 2 samples, not of 3"):
        workload_of(untied(), profile_of(untied()), equal_devices(2), micro_batch=3, training=True)
