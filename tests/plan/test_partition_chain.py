"""A chain's bytes are those of its profile for every range, and a stage's those that the simulator counts."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.chains import chain_of_numbers, equal_devices
from bireme.cluster.catalogue import device_named
from bireme.errors import BiremeError
from bireme.plan.partition.chain import Chain, chain_of, layer_bounds
from bireme.plan.partition.loads import (
    Recompute,
    RowLink,
    StageSetting,
    holdings,
    loads_of,
)
from bireme.plan.partition.partition import assess
from bireme.profile.profile import KeptMemory, Profile, SharedState, UnitCost, UnitProfile
from bireme.profile.stages import stage_cost
from bireme.schedule.accesses import Sizes
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.residency import resident
from tests.profile.test_profile_bytes import GRAPHS, SIZES, graph_of
from tests.support.estimates import estimated_once
from tests.support.extent import examples
from tests.support.partitions import predict

ONE_EACH = sorted(name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank == 1)


def profile_of(name: str) -> Profile:
    return estimated_once(graph_of(name), device_named("laptop"), SIZES)


def check_every_range(found: Profile, micro_batch: int) -> None:
    made = chain_of(found, micro_batch)
    tables = made.bytes
    for begin, end in combinations(range(len(found.units) + 1), 2):
        cost = stage_cost(found, begin, end, micro_batch)
        counted = {
            "parameter_bytes": tables.parameter,
            "gradient_bytes": tables.gradient,
            "optimizer_bytes": tables.optimizer,
            "buffer_bytes": tables.buffer,
            "saved_bytes": tables.saved,
            "kept_bytes": tables.kept,
            "workspace_bytes": tables.workspace,
            "waiting_bytes": tables.waiting,
            "halves_bytes": tables.halves,
        }
        frozen = {h.name: h.frozen_bytes for unit in found.units[begin:end] for h in unit.tied}
        apart = [u.frozen_bytes - sum(h.frozen_bytes for h in u.tied) for u in found.units[begin:end]]
        assert tables.frozen[begin, end] == sum(frozen.values()) + sum(apart)
        for name, table in counted.items():
            assert table[begin, end] == getattr(cost, name), (begin, end, name)
        assert 0 <= tables.inputs[begin, end] <= cost.kept_bytes
        assert made.forward_s[begin:end].sum() == pytest.approx(cost.forward_s)
        assert made.recompute_backward_s[begin:end].sum() == pytest.approx(cost.recompute_backward_s)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_every_range_of_a_real_profile_has_its_bytes_exactly(name: str, size: int) -> None:
    check_every_range(profile_of(name), size)


NAMES = st.sampled_from("abcdefg")


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Units that share what they like, larger here than there, joined by names that a third one knows."""
    units = []
    in_halves = draw(st.booleans())
    for place in range(draw(st.integers(1, 6))):
        shared = [
            KeptMemory(tuple(names), draw(st.integers(0, 50)), draw(st.booleans()))
            for names in draw(st.lists(st.lists(NAMES, min_size=1, max_size=3, unique=True), max_size=3))
        ]
        known = [kept.names[0] for kept in shared]
        any_of = st.lists(
            st.one_of(NAMES, st.sampled_from(known)) if known else NAMES, max_size=2, unique=True
        )
        own = draw(st.integers(0, 99)) + sum(kept.num_bytes for kept in shared if kept.is_saved)
        workspace = draw(st.integers(0, 99))
        halves: tuple[int | None, int | None, int | None] = (None, None, None)
        if in_halves:
            halves = draw(st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(0, 900)))
        cost = UnitCost(1, 1.0, 2.0, 3.0, None, None, 0.0, own, 7, workspace, tuple(shared), *halves)
        tied = [
            SharedState(name, 10 + size, size, 2 * size, 3, 2)
            for name, size in draw(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 40))).items()
        ]
        units.append(
            UnitProfile(
                name=f"layers.{place}",
                structure=str(place),
                same_as=None,
                receives=tuple(draw(any_of)) if place else (),
                sends=tuple(draw(any_of)),
                inputs=tuple(draw(any_of)),
                parameter_bytes=1000,
                gradient_bytes=900,
                optimizer_bytes=2000,
                buffer_bytes=100,
                frozen_bytes=50,
                update_s=0.0,
                trial_s=0.0,
                reduce_s=0.0,
                tied=tuple(tied),
                costs=(cost,),
            )
        )
    return Profile("m", "g", "d", "cpu", 1, "", False, "adamw", 1, 1, tuple(units))


@examples(60)
@given(profiles())
def test_every_range_of_any_profile_has_its_bytes_exactly(found: Profile) -> None:
    check_every_range(found, 1)


@pytest.mark.slow
def test_merged_layers_have_the_bytes_and_seconds_of_their_halves() -> None:
    halves = chain_of(profile_of("gpt"), 2)
    bounds = layer_bounds(halves.names)
    assert bounds == (0, 1, 3, 5, 6)
    layers = halves.merged(bounds)
    assert layers.num_units == 4
    for a, b in combinations(range(5), 2):
        assert layers.bytes.kept[a, b] == halves.bytes.kept[bounds[a], bounds[b]]
        assert layers.bytes.parameter[a, b] == halves.bytes.parameter[bounds[a], bounds[b]]
    assert layers.forward_s.sum() == pytest.approx(halves.forward_s.sum())
    assert layers.boundary_bytes[1] == halves.boundary_bytes[2]


def test_layers_are_told_by_the_first_number_in_a_name() -> None:
    names = ["wte", "h.0.attn", "h.0.mlp", "h.10.attn", "h.1.experts.3", "h.1.mlp", "norm", "head"]
    assert layer_bounds(names) == (0, 1, 3, 4, 6, 7, 8)


def test_cuts_that_leave_a_stage_empty_are_refused() -> None:
    made = chain_of_numbers([1, 1, 1], [2, 2, 2])
    for cuts in ((0,), (3,), (2, 2), (2, 1)):
        with pytest.raises(BiremeError, match="empty"):
            made.bounds(cuts)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_stage_holds_at_once_is_what_the_simulator_counts(name: str, recompute: bool) -> None:
    """For sizes in any proportion, windows longer than those counted, and very many micro-batches."""
    random = np.random.default_rng(5)
    for num_stages, num_microbatches in ((1, 3), (2, 2), (3, 5), (4, 4), (4, 19), (5, 12)):
        found = holdings(name, num_stages, num_microbatches, recompute=recompute)
        program = generate(
            name,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_batches=7,
            recompute=range(num_stages) if recompute else (),
        )
        drawn = [tuple(map(float, row)) for row in random.integers(1, 100, (8, num_stages))]
        version, gradient, optimizer, stash, inputs, activation, message, waiting = drawn
        sizes = Sizes(version, gradient, optimizer, stash, inputs, activation, message, waiting=waiting)
        for stage, moments in enumerate(found):
            counts = [
                optimizer[stage]
                + moment.version * version[stage]
                + moment.gradient * gradient[stage]
                + moment.stash * stash[stage]
                + moment.inputs * inputs[stage]
                + moment.activation * activation[stage]
                + moment.gradient_message * message[stage]
                + moment.waiting * waiting[stage]
                for moment in moments
            ]
            assert max(counts) == resident(program, stage, sizes).peak_bytes


def test_1f1b_keeps_a_micro_batch_for_each_stage_from_its_own_on_and_gpipe_all() -> None:
    for stage in range(4):
        assert max(moment.stash for moment in holdings("1f1b", 4, 100)[stage]) == 4 - stage
        assert max(moment.stash for moment in holdings("2bw", 4, 100)[stage]) == 4 - stage
        assert max(moment.stash for moment in holdings("gpipe", 4, 100)[stage]) == 100
        again = holdings("1f1b", 4, 100, recompute=True)[stage]
        assert max(moment.stash for moment in again) == 1
        assert max(moment.inputs for moment in again) == 4 - stage


def test_schedules_with_several_stages_on_a_device_are_refused() -> None:
    with pytest.raises(BiremeError, match="several stages on a device"):
        holdings("interleaved", 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "2bw", "2bw-fresh", "gpipe", "zb-h1"])
@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
def test_the_bytes_of_a_partition_are_those_of_its_simulation(name: str, recompute: Recompute) -> None:
    made = chain_of(profile_of("gpt"), 2)
    for num_stages in (1, 2, 3):
        line = equal_devices(num_stages, link=RowLink(1e9))
        loads = loads_of(made, line, StageSetting(name, 6, recompute))
        for cuts in combinations(range(1, made.num_units), num_stages - 1):
            partition = assess(loads, cuts)
            timeline = predict(loads, partition, num_batches=5)
            counted = [kept.peak_bytes for kept in timeline.memory]
            assert [stage.peak_bytes for stage in partition.stages] == counted


def test_a_chain_must_have_units_for_all_stages() -> None:
    with pytest.raises(BiremeError, match="one unit or more"):
        chain_of_numbers([], [])
    made: Chain = chain_of_numbers([1.0], [2.0])
    with pytest.raises(BiremeError, match="each needs one unit"):
        loads_of(made, equal_devices(2, memory_bytes=math.inf), StageSetting("1f1b", 2))
