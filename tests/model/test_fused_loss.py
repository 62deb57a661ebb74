"""The last linear layer and its cross-entropy as one operator: the same numbers but for rounding, in less
memory, and a reason wherever a model's own operators stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from bireme.cluster.catalogue import device_named
from bireme.errors import BiremeError
from bireme.model.capture import Captures, capture
from bireme.model.counting import count_of
from bireme.model.fused_loss import FUSED, MEAN, Fusion, fused, keeps_all_logits, keeps_logits, rows_at_once
from bireme.model.fused_operator import linear_cross_entropy
from bireme.model.graph import Graph, learned_values
from bireme.model.graph_file import graph_hash, load_graph, save_graph
from bireme.model.halves import backward_input
from bireme.model.stage import SegmentedFunction, StageFunction
from bireme.model.units import units_of
from bireme.profile.estimate import estimate_unit
from bireme.profile.profiler import profile
from bireme.profile.trace import StorageTrace
from bireme.train.model import as_trained
from bireme.train.plan_search import fused_loss_note
from bireme.train.run_file import RunFile
from tests.support.extent import TRY_ALL

WIDTH, CLASSES, LENGTH = 24, 160, 6

FEW, MANY = 4, 120
"""Samples whose rows keep the gradient of the logits, and whose rows keep that of the weight."""

Between = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Tail:
    """How a model goes on from its hidden states."""

    bias: bool = False
    between: Between = lambda logits: logits
    shifts: bool = True
    reduction: str = "mean"
    smoothing: float = 0.0
    is_product: bool = False
    frozen: bool = False
    z_loss: bool = False


class Model(nn.Module):
    """Rows of tokens through a layer, and the loss of the next ones."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tail = tail
        self.tokens = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, bias=tail.bias, dtype=torch.float64)
        self.head.weight.requires_grad_(not tail.frozen)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.inner(self.tokens(ids)))
        logits = hidden @ self.head.weight.T if self.tail.is_product else self.head(hidden)
        logits = self.tail.between(logits)
        scores, wanted = (logits[..., :-1, :], labels[..., 1:]) if self.tail.shifts else (logits, labels)
        loss = functional.cross_entropy(
            scores.reshape(-1, CLASSES),
            wanted.reshape(-1),
            reduction=self.tail.reduction,
            label_smoothing=self.tail.smoothing,
            ignore_index=7,
        )
        if self.tail.z_loss:
            loss = loss + logits.logsumexp(-1).square().mean()
        return {"loss": loss, "logits": logits}


FUSABLE = {
    "shifted": Tail(),
    "of all places": Tail(shifts=False),
    "with a bias": Tail(bias=True),
    "a sum": Tail(reduction="sum"),
    "by a transpose": Tail(is_product=True),
    "scaled": Tail(between=lambda logits: logits * 0.25 / 2),
    "contiguous float32": Tail(between=lambda logits: logits.contiguous().float()),
    "frozen": Tail(frozen=True),
}


def samples(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(CLASSES, (batch, LENGTH), generator=generator)
    return {"ids": ids, "labels": ids.clone()}


@cache
def both(tail: Tail) -> tuple[Model, Graph, Graph]:
    model = Model(tail)
    graph = capture(model, samples(FEW))
    found = fused(graph, asked=True)
    assert found.reason is None
    return model, graph, found.graph


def trained(
    model: nn.Module, function: StageFunction | SegmentedFunction, batch: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the parameters."""
    own = {
        name: one.detach().clone().requires_grad_(one.requires_grad) for name, one in model.named_parameters()
    }
    loss = function(own, {}, samples(batch))["loss"]
    (0.3 * loss).backward()
    return loss.detach(), {name: one.grad for name, one in own.items() if one.grad is not None}


def whole(graph: Graph) -> StageFunction:
    return StageFunction(graph, units_of(graph), outputs=("loss",))


@pytest.mark.parametrize("batch", [1, FEW, MANY])
@pytest.mark.parametrize("tail", FUSABLE.values(), ids=FUSABLE.keys())
def test_losses_and_gradients_are_those_of_the_models_own_operators(tail: Tail, batch: int) -> None:
    model, graph, one = both(tail)
    wanted, gradients = trained(model, whole(graph), batch)
    loss, found = trained(model, whole(one), batch)
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
    close(loss, wanted)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(found[name], gradient)
    with torch.no_grad():
        close(whole(one)(dict(model.named_parameters()), {}, samples(batch))["loss"], wanted)


def test_both_ways_to_keep_a_gradient_are_tried() -> None:
    _, _, graph = both(Tail())
    (operator,) = (one for one in graph.operators if one.target == FUSED)
    assert keeps_all_logits(graph, operator, FEW)
    assert not keeps_all_logits(graph, operator, MANY)
    assert rows_at_once(MANY * (LENGTH - 1), WIDTH) < MANY * (LENGTH - 1)


def test_a_weight_that_does_not_learn_leaves_the_gradient_of_the_hidden_states_alone() -> None:
    """A buffer is counted like a frozen parameter, though it is in another table of the graph."""
    model = Model(Tail())
    weight = model.head.weight.detach()
    del model.head.weight
    model.head.register_buffer("weight", weight)
    of_buffer = fused(capture(model, samples(FEW)), asked=True).graph
    for graph in (of_buffer, both(Tail(frozen=True))[2]):
        operator = next(one for one in graph.operators if one.target == FUSED)
        assert not keeps_all_logits(graph, operator, FEW)
        cost = profile(graph, device_named("laptop"), [FEW], use_cache=False).units[-1].costs[0]
        assert cost.saved_bytes < FEW * (LENGTH - 1) * CLASSES * 8


def test_units_stay_the_same_and_the_logits_are_no_output() -> None:
    _, graph, one = both(Tail())
    parts = [
        [(unit.name, unit.parameters, unit.receives) for unit in units_of(each)] for each in (graph, one)
    ]
    assert parts[0] == parts[1]
    assert [output.name for output in one.outputs] == ["loss"]
    assert len(one.operators) < len(graph.operators)


def test_a_file_holds_the_operator(tmp_path: Path) -> None:
    _, _, graph = both(Tail(between=lambda logits: logits / 3.0))
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
    assert graph_hash(load_graph(tmp_path / "graph.json")) == graph_hash(graph)


def test_micro_batches_weigh_by_the_targets_that_count() -> None:
    _, graph, one = both(Tail())
    given = samples(9)
    given["labels"][0, 1:4] = 7
    assert count_of(one)(given) == count_of(graph)(given) > 0
    assert count_of(both(Tail(reduction="sum"))[2])(given) == len(given["ids"])


def test_where_no_target_counts_the_loss_is_nan_and_gradients_are_zero() -> None:
    model, _, one = both(Tail())
    own = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    given = samples(FEW)
    given["labels"].fill_(7)
    loss = whole(one)(own, {}, given)["loss"]
    loss.backward()
    assert loss.isnan()
    head = own["head.weight"].grad
    assert head is not None
    assert not head.any()


@pytest.mark.parametrize("learns", [True, False])
def test_the_loss_of_no_rows_is_nan(learns: bool) -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(CLASSES, WIDTH)
    targets = torch.zeros(0, dtype=torch.int64)
    loss = linear_cross_entropy(
        hidden, weight.requires_grad_(learns), None, targets, (), torch.float32, MEAN, -100
    )
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape


UNFIT = {
    "label smoothing": (Tail(smoothing=0.1), "smooths its labels"),
    "a cap on logits": (Tail(between=torch.tanh), "aten.tanh.default lies between"),
    "another use": (Tail(z_loss=True), "its loss also uses the logits"),
    "a scale and a bias": (
        Tail(bias=True, between=lambda logits: logits * 2),
        "aten.mul.Tensor lies between",
    ),
    "other rows": (Tail(between=lambda logits: logits.flip(-1)), "aten.flip.default lies between"),
}


@pytest.mark.parametrize(("tail", "reason"), UNFIT.values(), ids=UNFIT.keys())
def test_a_model_that_cannot_be_fused_stays_and_has_a_reason(tail: Tail, reason: str) -> None:
    graph = capture(Model(tail), samples(FEW))
    found = fused(graph, asked=True)
    assert found.graph == graph
    assert found.reason is not None
    assert reason in found.reason


def test_few_logits_stay_unless_it_is_asked_for() -> None:
    graph = capture(Model(Tail()), samples(FEW))
    assert fused(graph) == Fusion(graph)
    assert fused(graph, asked=False) == Fusion(graph)


def test_the_largest_block_is_a_piece_of_the_logits_or_the_gradient_of_the_weight() -> None:
    model, graph, one = both(Tail())
    batch = 400
    num_rows = batch * (LENGTH - 1)

    def largest(each: Graph) -> int:
        with StorageTrace([]) as trace:
            trained(model, whole(each), batch)
        return max(int(block.num_bytes) for block in trace.storages.values())

    assert largest(graph) == batch * LENGTH * CLASSES * 8
    assert largest(one) <= max(rows_at_once(num_rows, WIDTH) * CLASSES, batch * LENGTH * WIDTH) * 8


def test_a_profile_counts_what_is_kept() -> None:
    _, graph, one = both(Tail())
    device = device_named("laptop")
    plain, own = (profile(each, device, [400], use_cache=False).units[-1].costs[0] for each in (graph, one))
    assert own.saved_bytes + own.workspace_bytes < (plain.saved_bytes + plain.workspace_bytes) / 2
    assert own.saved_bytes < plain.saved_bytes


def test_a_forward_that_makes_the_gradients_is_estimated_to_take_its_three_products() -> None:
    model = Model(Tail())
    model.to(torch.float32)
    graph = fused(capture(model, samples(FEW)), asked=True).graph
    last, device = units_of(graph)[-1], device_named("laptop")
    slow = replace(device, float32_flops_per_s=1e6)
    learned = learned_values(graph)
    few, many = (estimate_unit(graph, last, learned, batch, slow) for batch in (FEW, MANY))
    few_plain_s, many_plain_s = (one.recompute_backward_s - one.backward_s for one in (few, many))
    assert few.forward_s == pytest.approx(few_plain_s)
    assert few.forward_s == pytest.approx(few.backward_weight_s, rel=0.01)
    assert many.forward_s == pytest.approx(3 * many_plain_s, rel=0.01)
    assert many.backward_s < many_plain_s


@pytest.mark.parametrize("batch", [FEW, MANY])
def test_a_recomputed_head_makes_its_gradients_once(batch: int) -> None:
    model, graph, one = both(Tail())
    units = units_of(one)
    again = SegmentedFunction(one, units, {units[-1].index}, outputs=("loss",))
    with FlopCounterMode(display=False) as plain:
        wanted = trained(model, whole(one), batch)
    with FlopCounterMode(display=False) as recomputed:
        found = trained(model, again, batch)
    torch.testing.assert_close(found, wanted)
    product = 2 * batch * (LENGTH - 1) * WIDTH * CLASSES
    assert recomputed.get_total_flops() - plain.get_total_flops() == product
    assert whole(graph).parameters == whole(one).parameters


def test_the_gradient_of_the_weight_waits_for_the_second_half_of_a_backward() -> None:
    model, _, one = both(Tail())
    last = units_of(one)[-1]
    function = StageFunction(one, [last], outputs=("loss",))
    own = {name: parameter for name, parameter in model.named_parameters() if name in function.parameters}
    for batch in (FEW, MANY):
        generator = torch.Generator().manual_seed(batch)
        hidden = torch.randn(batch, LENGTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        given = {"labels": samples(batch)["labels"], function.receives[0]: hidden}
        start = torch.tensor(0.5, dtype=torch.float64)
        wanted = torch.autograd.grad(function(own, {}, given)["loss"], [hidden, *own.values()], start)
        loss = function(own, {}, given)["loss"]
        rest = backward_input([loss], [start], [hidden], list(own.values()))
        found = (*rest.input_gradients, *rest.weight_gradients())
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.skipif(not TRY_ALL, reason="takes seconds: BIREME_TESTS=all")
def test_a_compiled_stage_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, _, one = both(Tail())
    function = StageFunction(one, units_of(one), outputs=("loss",), compile=True)
    for batch in (FEW, MANY):
        torch.testing.assert_close(trained(model, function, batch), trained(model, whole(one), batch))
    torch.compiler.reset()


def test_products_of_sixteen_bits_add_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(900, 16, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(70, 16, generator=generator)).bfloat16()
    targets = torch.randint(70, (900,), generator=generator)
    assert not keeps_logits(900, 16, 2, learns=True)

    def gradients(kind: torch.dtype, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        given = [one.to(kind).requires_grad_() for one in (hidden.clone(), weight.clone())]
        if kind is torch.bfloat16:
            given[1].grad_dtype = torch.float32
        loss_of(*given).backward()
        return [one.grad.double() for one in given if one.grad is not None]

    exact = gradients(torch.float64, lambda x, w: functional.cross_entropy(x @ w.T, targets))
    found = gradients(
        torch.bfloat16,
        lambda x, w: linear_cross_entropy(x, w, None, targets, (), torch.float32, MEAN, -100),
    )
    for own, wanted in zip(found, exact, strict=True):
        assert (own - wanted).norm() < 0.005 * wanted.norm()


def test_captures_are_finished_for_each_mode() -> None:
    finish = partial(as_trained, RunFile.model_validate({"model": {"fused_loss": True}}))
    for training in (True, False):
        graph = Captures(Model(Tail()), samples(FEW), training=training, finish=finish).graph(FEW)
        assert [one.target for one in graph.operators].count(FUSED) == 1


def test_a_fused_loss_that_cannot_be_is_refused() -> None:
    run = RunFile.model_validate({"model": {"fused_loss": True}})
    with pytest.raises(BiremeError, match=r"model\.fused_loss is true, but aten\.tanh\.default lies between"):
        as_trained(run, capture(Model(Tail(between=torch.tanh)), samples(FEW)))


def test_gradients_kept_as_components_leave_their_layer_as_it_is() -> None:
    run = RunFile.model_validate({"model": {"fused_loss": True}, "training": {"gradient": "principal:1"}})
    graph = capture(Model(Tail()), samples(FEW))
    with pytest.raises(BiremeError, match=r"training\.gradient keeps the gradient"):
        as_trained(run, graph)
    of_others = {"gradient": "principal:1", "gradient_of": ["inner.weight"]}
    other = RunFile.model_validate({"model": {"fused_loss": True}, "training": of_others})
    assert as_trained(other, graph) != graph


def test_a_plan_notes_why_many_logits_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.model.fused_loss.LEAST_LOGITS", 1)
    capped = capture(Model(Tail(between=torch.tanh)), samples(FEW))
    (note,) = fused_loss_note(RunFile(), capped)
    assert note.startswith("All logits of a micro-batch are in memory at once, because aten.tanh.default")
    assert fused_loss_note(RunFile(), capture(Model(Tail()), samples(FEW))) == []
    off = RunFile.model_validate({"model": {"fused_loss": False}})
    assert fused_loss_note(off, capped) == []
