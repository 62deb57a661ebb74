"""Profiles: equal units are measured once, estimates follow from figures, what cannot be is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.cluster.catalogue import device_named
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.model.capture import Captures, capture
from bireme.model.convert import dtype_name
from bireme.model.graph import Graph, ModelState
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.profile import measuring, profiler, timing
from bireme.profile.optimizers import OPTIMIZERS, optimizer_bytes
from bireme.profile.profile import Profile, UnitCost, UnitProfile
from bireme.profile.profiler import profile
from bireme.profile.stages import stage_cost
from bireme.profile.timing import Effort, time_benches
from bireme.runtime import settings as engine
from tests.support.graphs import captured_once
from tests.support.tiny_profiles import CPU, LAPTOP, LITTLE, Bench, gpt, mean_square


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench()
    monkeypatch.setattr(measuring, "time_benches", found)
    monkeypatch.setattr(measuring, "time_update", lambda *_: 0.5)
    return found


@pytest.mark.slow
def test_layers_that_do_the_same_work_are_measured_once(bench: Bench) -> None:
    found = profile(gpt(3), CPU, [2])
    assert len(found.units) == 8
    assert bench.num_units == 4
    assert {unit.same_as for unit in found.units} == {None, 1, 2}
    for unit in found.units:
        if unit.same_as is not None:
            first = found.units[unit.same_as]
            assert unit.structure == first.structure
            assert replace(unit.at(2), shared=()) == replace(first.at(2), shared=())
            assert unit.update_s == first.update_s


@pytest.mark.slow
def test_units_of_the_same_work_have_names_of_their_own_for_what_they_share() -> None:
    found = profile(gpt(3), LAPTOP, [2])
    shared = [{name for kept in unit.at(2).shared for name in kept.names} for unit in found.units]
    for index in (1, 3, 5):
        assert shared[index] & shared[index + 1]
        assert not shared[index] & shared[index + 2]


def test_every_size_is_measured(bench: Bench) -> None:
    found = profile(gpt(), CPU, [2, 5, 2])
    assert found.micro_batches == (2, 5)
    assert bench.num_units == 8
    saved = [found.units[1].at(size).saved_bytes for size in (2, 5)]
    assert 2 * saved[1] == 5 * saved[0]
    with pytest.raises(BiremeError, match="has micro-batches of 2, 5 samples, not of 3"):
        found.units[0].at(3)


@pytest.mark.slow
def test_an_estimate_and_a_measurement_have_the_same_bytes() -> None:
    measured = profile(gpt(), CPU, [1, 3], effort=LITTLE)
    estimated = profile(gpt(), LAPTOP, [1, 3])
    assert measured.is_measured
    assert not estimated.is_measured
    assert (measured.num_threads, estimated.num_threads) == (torch.get_num_threads(), 0)
    for one, other in zip(measured.units, estimated.units, strict=True):
        assert without_seconds(one) == without_seconds(other)


def without_seconds(unit: UnitProfile) -> UnitProfile:
    costs = (
        replace(cost, forward_s=0.0, backward_s=0.0, recompute_backward_s=0.0, spread=0.0)
        for cost in unit.costs
    )
    return replace(unit, update_s=0.0, trial_s=0.0, reduce_s=0.0, costs=tuple(costs))


def huge() -> Graph:
    """Seventeen billion parameters."""
    text = "gpt:layers=1,width=36864,heads=2,vocab=64,context=64"
    source = load_source(text, batch=64)
    return captured_once(f"{text} 64", partial(capture, source.model, source.example_inputs), is_kept=True)


@pytest.mark.slow
def test_an_estimate_needs_no_memory() -> None:
    """On a machine that has no place for what it is of."""
    found = profile(huge(), device_named("a100"), [64])
    assert found.parameter_bytes > 60e9
    assert found.units[1].at(64).forward_s > 0.1


def test_measured_seconds_are_positive_and_halves_are_there_when_asked_for() -> None:
    whole = profile(gpt(), CPU, [2], effort=LITTLE)
    apart = profile(gpt(), CPU, [2], effort=LITTLE, halves=True)
    for unit in (*whole.units, *apart.units):
        cost = unit.at(2)
        assert min(cost.forward_s, cost.backward_s, cost.recompute_backward_s, unit.update_s) > 0
        assert cost.spread >= 0
    assert all(cost.backward_input_s is cost.backward_weight_s is None for cost in costs_of(whole))
    assert all((cost.backward_input_s or 0) > 0 for cost in costs_of(apart))
    assert all((cost.backward_weight_s or 0) > 0 for cost in costs_of(apart))
    assert stage_cost(whole, 0, 3, 2).backward_input_s is None
    assert (stage_cost(apart, 0, 3, 2).backward_input_s or 0) > 0


def costs_of(found: Profile) -> list[UnitCost]:
    return [cost for unit in found.units for cost in unit.costs]


def forward_s(found: Profile) -> float:
    return stage_cost(found, 0, len(found.units), found.micro_batches[0]).forward_s


def test_estimated_seconds_follow_from_the_figures_of_the_device() -> None:
    graph = capture(nn.Sequential(nn.Linear(512, 512)), (torch.randn(512, 512),), loss=mean_square)
    slow = Device("slow", "cpu", 2**40, bytes_per_s=1e9, float32_flops_per_s=1e9, bfloat16_flops_per_s=1e9)
    faster = {
        "arithmetic": replace(slow, float32_flops_per_s=2e9),
        "memory": replace(slow, bytes_per_s=2e9),
        "both": replace(slow, float32_flops_per_s=2e9, bytes_per_s=2e9),
    }
    before = forward_s(profile(graph, slow, [512]))
    after = {name: forward_s(profile(graph, device, [512])) for name, device in faster.items()}
    assert after["both"] < after["arithmetic"] < after["memory"] < before
    assert after["both"] == pytest.approx(before / 2, rel=0.01)
    assert before >= 2 * 512**3 / 1e9
    assert forward_s(profile(graph, slow, [1024])) > 1.9 * before


@pytest.mark.slow
def test_estimated_seconds_grow_with_the_work() -> None:
    small, large = (profile(gpt(layers), device_named("l4"), [2]) for layers in (2, 3))
    assert forward_s(small) < forward_s(large)
    assert stage_cost(small, 1, 3, 2).backward_s > stage_cost(small, 1, 3, 2).forward_s


def test_what_does_not_learn_takes_no_time_backward() -> None:
    class FrozenFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return mean_square(self.third(torch.relu(self.second(torch.relu(self.first(x))))))

    graph = capture(FrozenFirst(), {"x": torch.randn(2, 8)})
    first, second, third = (unit.at(2) for unit in profile(graph, LAPTOP, [2], halves=True).units)
    assert (first.backward_s, first.recompute_backward_s) == (0.0, first.forward_s)
    assert (second.backward_input_s, third.backward_input_s) > (0.0, 0.0)
    assert second.backward_input_s == 0.0
    assert third.backward_s > second.backward_s > 0
    assert profile(graph, CPU, [2], effort=LITTLE).units[0].at(2).saved_bytes == 0


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_the_predicted_bytes(name: str, dtype: torch.dtype) -> None:
    """The engine's own optimizers after a step; short weights are stepped as copies that are kept too."""
    shapes = {
        "tokens.weight": (32, 8),
        "layers.0.attention.query.weight": (8, 8),
        "layers.0.attention.query.bias": (8,),
        "layers.0.filter.weight": (4, 2, 3),
        "2.weight": (8, 3),
    }
    stepped = torch.float32 if dtype is torch.bfloat16 else dtype
    weights = [(key, torch.ones(shape, dtype=stepped, requires_grad=True)) for key, shape in shapes.items()]
    for _, weight in weights:
        weight.grad = torch.ones_like(weight)
    made = engine.named_optimizer(name, lr=0.1)(weights)
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    for optimizer in optimizers:
        optimizer.step()
    kept = [value for o in optimizers for state in o.state.values() for value in state.values()]
    expected = sum(value.nbytes for value in kept if isinstance(value, Tensor))
    if stepped is not dtype:
        expected += sum(weight.nbytes for _, weight in weights)
    states = [ModelState(key, shape, dtype_name(dtype), True, True) for key, shape in shapes.items()]
    assert sum(optimizer_bytes(state, name) for state in states) == expected
    assert all(optimizer_bytes(replace(state, trainable=False), name) == 0 for state in states)


@pytest.mark.slow
def test_a_profile_says_what_an_optimizer_keeps(bench: Bench) -> None:
    sgd, adamw = (profile(gpt(), CPU, [1], optimizer=name) for name in ("sgd", "adamw"))
    assert [unit.optimizer_bytes for unit in sgd.units] == [unit.parameter_bytes for unit in sgd.units]
    whole = stage_cost(adamw, 0, len(adamw.units), 1)
    assert whole.optimizer_bytes == 2 * adamw.parameter_bytes + 4 * len(gpt().parameters)
    short = profile(gpt(dtype="bfloat16"), CPU, [1], optimizer="sgd")
    assert short.units[1].optimizer_bytes == 4 * short.units[1].parameter_bytes


def test_a_graph_for_one_size_is_refused_at_another() -> None:
    class Special(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            weights = torch.tensor([1.0 / (row + 1) for row in range(int(x.shape[0]))])
            found: Tensor = (self.line(x).mean(dim=1) * weights).sum()
            return found

    captures = Captures(Special(), {"x": torch.randn(3, 4)})
    with pytest.raises(BiremeError, match="holds for micro-batches of 3 samples only, not of 2"):
        profile(captures.graph(3), LAPTOP, [2])
    assert profile(captures.graph, LAPTOP, [2, 3]).micro_batches == (2, 3)


@pytest.mark.slow
def test_a_unit_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "device_here", lambda _: Device("tiny", "cpu", memory_bytes=2**10))
    with pytest.raises(BiremeError, match=r"needs \d+\.\d GiB with 64 samples, and the device has 0\.0 GiB"):
        profile(huge(), CPU, [64])


def test_units_that_do_not_fit_together_are_measured_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = profile(gpt(), CPU, [2], use_cache=False)
    needed = 4 * max(stage_cost(together, i, i + 1, 2).peak_bytes() for i in range(len(together.units)))
    monkeypatch.setattr(profiler, "device_here", lambda _: Device("small", "cpu", memory_bytes=needed))
    apart = profile(gpt(), CPU, [2], use_cache=False)
    assert 2 < bench.num_calls <= 5
    assert bench.num_units == 8
    assert [unit.same_as for unit in apart.units] == [unit.same_as for unit in together.units]


def test_progress_goes_forward_from_nothing_to_all(bench: Bench) -> None:
    told: list[tuple[float, str]] = []
    profile(gpt(), CPU, [2, 3], progress=lambda done, what: told.append((done, what)))
    parts = [done for done, _ in told]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert {what for _, what in told} == {
        "counting bytes",
        "measuring 4 units, 2 samples",
        "measuring 4 units, 3 samples",
        "done",
    }


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: profile(gpt(), CPU, []), "Name the micro-batch sizes"),
        (lambda: profile(gpt(), CPU, [0]), "each must be at least 1"),
        (lambda: profile(gpt(), CPU, [1], optimizer="adamm"), "no optimizer 'adamm'. Did you mean 'adam"),
        (lambda: profile(gpt(), torch.device("meta"), [1]), "Seconds are measured on cpu and cuda"),
        (lambda: profile(gpt(), Device("unknown", "cpu"), [1]), "The speed of unknown is not known"),
        (lambda: Device("far", "tpu"), "The kind of far is 'tpu'"),
        (lambda: device_named("a1000"), "There is no device 'a1000'. Did you mean 'a100'"),
        (lambda: Effort(num_least=2), "Measure at least three rounds"),
        (lambda: Effort(seconds_per_unit=0.0), "measured for 0.0 s"),
        (lambda: stage_cost(profile(gpt(), LAPTOP, [1]), 2, 2, 1), "none from 2 up to 2"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_sentence(run: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(BiremeError, match=sentence):
        run()


@pytest.mark.parametrize(
    ("round_s", "num_rounds"), [(0.01, 2 + 60), (0.1, 2 + 8), (0.5, 2 + 3), (5.0, 1 + 3)]
)
def test_units_that_take_long_are_run_a_few_times(
    monkeypatch: pytest.MonkeyPatch, round_s: float, num_rounds: int
) -> None:
    """Nine rounds of each size took minutes for a model of 100 million parameters."""
    clock, rounds = [0.0], list[int]()

    class Stopwatch:
        def __init__(self, *_: object) -> None:
            self.laps = dict[str, Any]()

        def run(self) -> None:
            clock[0] += round_s
            rounds.append(1)

        def seconds(self) -> None:
            pass

    monkeypatch.setattr(timing, "_Stopwatch", Stopwatch)
    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    time_benches([object()], Effort(), halves=False)  # type: ignore[list-item]  # which nothing reads
    assert len(rounds) == num_rounds


def test_the_units_of_a_profile_are_those_of_the_graph() -> None:
    graph = gpt()
    found = profile(graph, LAPTOP, [2])
    assert [unit.name for unit in found.units] == [unit.name for unit in units_of(graph)]
    assert [unit.sends for unit in found.units] == [unit.sends for unit in units_of(graph)]
    assert (found.num_operators, found.parameter_bytes) == (len(graph.operators), graph.parameter_bytes)
