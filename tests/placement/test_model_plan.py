"""From placements of captured models back to plans."""

from dataclasses import replace
from itertools import combinations

import pytest

from bireme.errors import BiremeError
from bireme.placement.contiguous import cut_chain
from bireme.placement.contraction import items_of, loads_of, value_of
from bireme.placement.model import ModelWorkload, plan_of, workload_of
from bireme.placement.workload import Granularity, Objective, Placement
from bireme.plan.plan import Plan
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.estimates import estimated_once
from tests.support.placed_models import (
    BOTH,
    MICRO_BATCH,
    at_cuts,
    equal_devices,
    loads_at,
    model_of,
    placed,
    untied,
)
from tests.support.small_models import gpt as engine_gpt
from tests.support.small_models import token_batches
from tests.support.tiny_profiles import LAPTOP, gpt


def test_a_chain_of_stages_comes_back_as_a_plan() -> None:
    for granularity in BOTH:
        model = model_of(untied(), equal_devices(3), granularity)
        devices = tuple((2, 0, 1)[device] for device in at_cuts(model, (1, 4)))
        found = plan_of(model, placed(model, devices), num_microbatches=6)
        names = (("here/emulated2",), ("here/emulated0",), ("here/emulated1",))
        assert found.plan == Plan((1, 4), 6, micro_batch_sizes=(MICRO_BATCH,), devices=names)
        assert (found.devices, found.note) == (devices, "")


def inside(model: ModelWorkload, place: int) -> tuple[int, ...]:
    """Device 0 up to the operator of a node, device 1 for what runs from that on."""
    first = model.operators[place][-1]
    return tuple(int(own[-1] >= first) for own in model.operators)


def test_a_device_with_two_stretches_runs_one_of_them() -> None:
    model = model_of(untied(), equal_devices(2), Granularity.UNITS)
    found = plan_of(model, placed(model, tuple(unit % 2 for unit in model.units)), num_microbatches=2)
    assert found.devices == at_cuts(model, found.plan.cuts)


def test_cuts_are_moved_to_the_nearest_boundaries_and_the_value_follows() -> None:
    model = model_of(untied(), equal_devices(2))
    norm = next(
        place for place, node in enumerate(model.workload.nodes) if "layers.1.attention_norm" in node.name
    )
    before = placed(model, inside(model, norm + 1))
    found = plan_of(model, before, num_microbatches=2)
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
    found = plan_of(model, placed(model, tuple(devices)), num_microbatches=2)
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
    with pytest.raises(BiremeError, match=r"bytes, and it has .* with the cuts moved"):
        plan_of(tight, before, num_microbatches=2)


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
    profile = estimated_once(model.graph, LAPTOP, [MICRO_BATCH])
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
