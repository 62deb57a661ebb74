"""The bytes of a profile are those of a real run: what autograd keeps, and the most there is at once.

Profiles count on tensors without memory. Here stages run on real ones, and what is saved is counted by other
means: by the address of its memory.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.cluster.catalogue import device_named
from bireme.model.capture import capture
from bireme.model.chain import chain, chain_resolver
from bireme.model.graph import Graph, learned_values
from bireme.model.halves import backward_input
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.profile.profile import Profile
from bireme.profile.profiler import profile
from bireme.profile.stages import stage_cost
from bireme.profile.timing import Workbench
from bireme.profile.trace import StorageTrace
from tests.model.test_families import FAMILIES
from tests.model.test_families import graph_of as family_graph_of
from tests.support.graphs import captured_once

pytestmark = pytest.mark.slow

SIZES = (2, 5)


class Convolutions(nn.Module):
    """Blocks with a batch norm, the second around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.first_norm(self.first(pixels)))
        x = torch.relu(x + self.second_norm(self.second(x)))
        x = functional.max_pool2d(x, 2).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(x), labels)


class FrozenBegin(nn.Module):
    """No gradient goes back beyond the first layer with weights that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.fixed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for parameter in (*self.table.parameters(), *self.fixed.parameters()):
            parameter.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.fixed(self.table(ids)))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def gpt_graph(text: str = "gpt:layers=2,width=16,heads=2,vocab=23,context=8,dropout=0.1") -> Graph:
    source = load_source(text, batch=3)
    make = partial(capture, source.model, source.example_inputs)
    return captured_once(f"three of {text}", make, is_kept=True)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "gpt": gpt_graph,
    "untied": lambda: gpt_graph("gpt:layers=1,width=16,heads=2,vocab=23,context=8,tied=false"),
    "convolutions": lambda: capture(
        Convolutions(), {"pixels": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 4, 2])}
    ),
    "frozen": lambda: capture(FrozenBegin(), {"ids": torch.arange(12).reshape(3, 4) % 11}),
}


@cache
def graph_of(name: str) -> Graph:
    return GRAPHS[name]()


@cache
def profile_of(name: str) -> Profile:
    return profile(graph_of(name), device_named("laptop"), SIZES, halves=True)


def ranges(graph: Graph) -> Iterable[tuple[int, int]]:
    """From which unit up to which: every stage that there could be."""
    return combinations(range(len(units_of(graph)) + 1), 2)


@cache
def function_of(name: str, begin: int, end: int) -> StageFunction:
    return StageFunction(graph_of(name), units_of(graph_of(name))[begin:end])


def bench_of(graph: Graph, function: StageFunction, size: int) -> Workbench:
    return Workbench(graph, function, learned=learned_values(graph), batch=size, device=torch.device("cpu"))


def counted_bytes(forward: Callable[[], object], but: Iterable[Tensor]) -> int:
    """What autograd keeps of a forward, all memory once, but for that of some tensors."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = forward()
    known = {tensor.untyped_storage().data_ptr() for tensor in but}
    found = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in known)
    del results
    return found


def saved_bytes(graph: Graph, function: StageFunction, size: int) -> int:
    bench = bench_of(graph, function, size)
    return counted_bytes(bench.forward, [*bench.parameters.values(), *bench.buffers.values()])


@pytest.mark.few(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_any_stage_keeps_what_autograd_keeps_of_it_to_the_byte(name: str, size: int) -> None:
    graph, found = graph_of(name), profile_of(name)
    for begin, end in ranges(graph):
        expected = saved_bytes(graph, function_of(name, begin, end), size)
        assert stage_cost(found, begin, end, size).saved_bytes == expected, (begin, end)


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_the_gradients_that_wait_in_any_stage_are_those_of_its_units_to_the_byte(name: str) -> None:
    """Between the halves of its backward; they were counted as nothing, a tenth of a process under zbv."""
    graph, found = graph_of(name), profile_of(name)
    for begin, end in ranges(graph):
        bench = bench_of(graph, function_of(name, begin, end), 5)
        saved: dict[int, Tensor] = {}

        def note(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            roots = bench.differentiable(bench.forward())
        inputs = [tensor for tensor in bench.received.values() if tensor.requires_grad]
        gradients = bench.output_gradients(roots)
        rest = backward_input(list(roots.values()), gradients, inputs, bench.trainable)
        waiting = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in rest.waiting
            if one.ndim
        }
        counted = sum(size for place, size in waiting.items() if place not in saved)
        assert stage_cost(found, begin, end, 5).waiting_bytes == counted, (begin, end)


@pytest.mark.parametrize("name", ["gpt", "convolutions"])
def test_all_stages_together_keep_what_the_unmodified_module_keeps(name: str) -> None:
    if name == "gpt":
        text = "gpt:layers=2,width=16,heads=2,vocab=23,context=8,dropout=0.1"
        source = load_source(text, batch=2, device="cpu")
        model, inputs = source.model, source.example_inputs
    else:
        model, inputs = Convolutions(), {"pixels": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 4])}
    expected = counted_bytes(lambda: model(**inputs), [*model.parameters(), *model.buffers()])
    found = profile_of(name)
    assert stage_cost(found, 0, len(found.units), 2).saved_bytes == expected


def test_a_stage_of_a_chain_keeps_what_autograd_keeps_of_it() -> None:
    modules = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs = {"input": torch.randn(3, 6)}

    def loss(output: Tensor, inputs: object) -> Tensor:
        return output.square().mean()

    graph = chain(modules, inputs, loss=loss)
    resolve = chain_resolver(graph, modules, loss=loss)
    found = profile(graph, device_named("laptop"), SIZES, resolve=resolve)
    for begin, end in ranges(graph):
        function = StageFunction(graph, units_of(graph)[begin:end], resolve=resolve)
        expected = saved_bytes(graph, function, 5)
        assert stage_cost(found, begin, end, 5).saved_bytes == expected, (begin, end)


def peak_bytes(bench: Workbench) -> int:
    """The most there is at once in one forward and backward of a stage, with its weights and gradients."""
    gradients = [weight.grad for weight in bench.trainable if weight.grad is not None]
    with StorageTrace() as trace:
        trace.adopt([*bench.parameters.values(), *bench.buffers.values(), *gradients], owner="parameter")
        trace.adopt(list(bench.given.values()), owner="input")
        bench.backward(bench.differentiable(bench.forward()))
        found: int = trace.peak_bytes
        return found


def check_peak(
    graph: Graph, function: StageFunction, found: Profile, ends: tuple[int, int], size: int
) -> None:
    """Foretold is what there is at once or a little more.

    It is at most a hundredth less. It is more by at most a tenth of what one micro-batch takes, a tensor that
    crosses a boundary inside the stage, and a second gradient of weights that are used twice in it.
    """
    begin, end = ends
    cost = stage_cost(found, begin, end, size)
    foretold = cost.peak_bytes() - cost.optimizer_bytes
    counted = peak_bytes(bench_of(graph, function, size))
    tied = {held.name: held.gradient_bytes for unit in found.units[begin:end] for held in unit.tied}
    boundary = max((unit.at(size).boundary_bytes for unit in found.units[begin : end - 1]), default=0)
    margin = (cost.kept_bytes + cost.workspace_bytes) / 10 + boundary + sum(tied.values())
    assert 0.99 * counted <= foretold <= counted + margin, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_the_peak_of_a_stage_is_predicted_within_a_tenth(name: str) -> None:
    graph = graph_of(name)
    for ends in ranges(graph):
        check_peak(graph, function_of(name, *ends), profile_of(name), ends, 5)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mixtral", "qwen3", "resnet", "t5", "vit"])
def test_the_stages_of_transformers_models_keep_and_take_what_is_predicted(name: str) -> None:
    """Of every fourth length the stages at the begin, in the middle and at the end."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    graph = family_graph_of(family)
    num_units = len(units_of(graph))
    stages = {
        (begin, begin + length)
        for length in range(1, num_units + 1, 4)
        for begin in (0, (num_units - length) // 2, num_units - length)
    }
    found = profile(graph, device_named("laptop"), SIZES)
    for begin, end in stages:
        function = StageFunction(graph, units_of(graph)[begin:end])
        for size in SIZES:
            expected = saved_bytes(graph, function, size)
            assert stage_cost(found, begin, end, size).saved_bytes == expected, (begin, end)
        check_peak(graph, function, found, (begin, end), 2)


def test_micro_batches_under_way_and_weight_versions_add_up() -> None:
    found = profile_of("gpt")
    cost = stage_cost(found, 1, 5, 2)
    once = cost.peak_bytes()
    assert cost.peak_bytes(num_stashed=3) - once == 2 * cost.kept_bytes
    assert cost.peak_bytes(num_versions=2) - once == cost.parameter_bytes
    assert cost.kept_bytes >= cost.saved_bytes


def test_weights_tied_within_a_stage_are_there_once() -> None:
    graph, found = graph_of("gpt"), profile_of("gpt")
    whole = stage_cost(found, 0, len(found.units), 2)
    assert whole.parameter_bytes == graph.parameter_bytes == whole.gradient_bytes
    assert sum(unit.parameter_bytes for unit in found.units) == graph.parameter_bytes + 23 * 16 * 4
    apart = [stage_cost(found, *ends, 2) for ends in ((0, 4), (4, len(found.units)))]
    assert sum(cost.parameter_bytes for cost in apart) == graph.parameter_bytes + 23 * 16 * 4


def test_buffers_are_counted_and_do_not_learn() -> None:
    graph, found = graph_of("convolutions"), profile_of("convolutions")
    whole = stage_cost(found, 0, len(found.units), 2)
    assert whole.buffer_bytes == sum(buffer.num_bytes for buffer in graph.buffers) > 0
    assert whole.parameter_bytes == graph.parameter_bytes


def test_what_is_frozen_has_no_gradient_and_sends_none_back() -> None:
    graph, found = graph_of("frozen"), profile_of("frozen")
    learned = learned_values(graph)
    first = units_of(graph)[0]
    assert not learned.intersection(first.sends)
    assert found.units[0].gradient_bytes == found.units[0].optimizer_bytes == 0
    assert found.units[0].parameter_bytes == 0 < found.units[0].buffer_bytes
    assert found.units[0].at(2).saved_bytes == 0
    assert all(learned.issuperset(unit.sends) for unit in units_of(graph)[2:])


def test_a_gradient_comes_back_to_what_is_written_into() -> None:
    """A tensor that is made of zeros learns once something that learns is added to it in place."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x)
            total.add_(self.norm(self.line(x)))
            return total.square().mean()

    graph = capture(Adding(), {"x": torch.randn(3, 4)})
    buffers = {buffer.name for buffer in graph.buffers}
    written = {name for operator in graph.operators for name in operator.mutates}
    assert written > buffers
    assert written & learned_values(graph) == written - buffers
