"""Weights in four bits: what they keep of a matrix, layers that multiply by them, and graphs with them."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError
from bireme.model import nf4_operator
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash, load_graph, save_graph
from bireme.model.nf4 import BITS, BLOCK, GROUP, NF4_LINEAR, NF4_WEIGHT, nf4_bytes, with_nf4
from bireme.model.nf4_operator import LEVELS, STEPS, nf4_linear, packed, unpacked
from bireme.model.part import LoraPart, TrainedPart
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.model.weights import load_weights, materialize, packing
from tests.support.extent import examples
from tests.support.graphs import captured_once

GPT = "gpt:layers=2,width=64,heads=2,vocab=64,context=32"


def drawn(rows: int, columns: int, seed: int, spread: float) -> Tensor:
    """A matrix whose rows have sizes that lie far apart."""
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(rows, 1, generator=draws))
    return torch.randn(rows, columns, generator=draws, dtype=torch.float64) * sizes


def plainly(weight: Tensor) -> list[float]:
    """What four bits keep of a matrix, value by value."""
    values = weight.flatten().tolist()
    blocks = [values[place : place + BLOCK] for place in range(0, len(values), BLOCK)]
    found: list[float] = []
    for first in range(0, len(blocks), GROUP):
        group = blocks[first : first + GROUP]
        largest = [max(map(abs, block)) for block in group]
        factor = max(largest) / 255**2
        for block, one in zip(group, largest, strict=True):
            scale = factor * round(math.sqrt(one / factor)) ** 2 if factor else 0.0
            for value in block:
                near = max(-1.0, min(1.0, value / scale)) if scale else 0.0
                found.append(min(LEVELS, key=lambda level: abs(level - near)) * scale)
    return found


@examples(200)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 3.0]))
def test_bytes_keep_of_a_matrix_what_the_plain_formula_keeps(
    rows: int, columns: int, seed: int, spread: float
) -> None:
    weight = drawn(rows, columns, seed, spread)
    found = packed(weight)
    assert found.dtype is torch.uint8
    assert len(found) == nf4_bytes(weight.numel())
    kept, expected = unpacked(found, rows, columns, torch.float64), torch.tensor(plainly(weight))
    # Two levels are taken for equally near if they differ by less than a step, and so are two roots.
    scales = expected.new_tensor([max(map(abs, LEVELS))]) * weight.abs().max()
    better = (kept.flatten() - weight.flatten()).abs() - (expected - weight.flatten()).abs()
    assert bool((better <= scales * (2 / STEPS + 1e-6)).all())


def test_a_weight_takes_the_bits_of_the_paper_and_loses_as_little() -> None:
    assert pytest.approx(4.127, abs=1e-3) == BITS
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    found = packed(weight)
    assert 8 * len(found) / weight.numel() == pytest.approx(BITS, abs=1e-3)
    for dtype in (torch.float32, torch.bfloat16):
        error = unpacked(found, 512, 1024, dtype).float() - weight
        assert float(error.square().mean().sqrt()) < 0.094  # of a normal distribution


def test_zeros_stay_zeros_and_numbers_that_are_none_stay_none() -> None:
    assert not unpacked(packed(torch.zeros(3, 100)), 3, 100, torch.float32).any()
    weight = torch.ones(2, 64)
    for value in (math.inf, math.nan):
        weight[1, 3] = value
        assert bool(unpacked(packed(weight), 2, 64, torch.float32)[1].isnan().all())


@pytest.mark.parametrize("at_once", [2**22, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_has_the_gradients_of_a_dense_one(
    at_once: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4_operator, "_LAYER_VALUES", at_once)
    for rows, columns in ((96, 64), (33, 70), (7, 5)):
        draws = torch.Generator().manual_seed(rows)
        make = partial(torch.randn, generator=draws, dtype=torch.float64)
        found = packed(make(rows, columns))
        hidden = make(2, 3, columns).requires_grad_()
        bias = make(rows).requires_grad_() if has_bias else None
        leaves = [one for one in (hidden, bias) if one is not None]
        made = nf4_linear(hidden, found, bias, rows, columns)
        dense = functional.linear(hidden, unpacked(found, rows, columns, torch.float64), bias)
        back = make(2, 3, rows)
        torch.testing.assert_close(made, dense)
        torch.testing.assert_close(
            torch.autograd.grad(made, leaves, back), torch.autograd.grad(dense, leaves, back)
        )


def test_a_layer_keeps_its_input_s_type_and_its_bytes_for_the_backward() -> None:
    found = packed(torch.randn(64, 128))
    hidden = torch.randn(4, 128, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = nf4_linear(hidden, found, None, 64, 128)
    assert [one.dtype for one in kept] == [torch.uint8]
    torch.autograd.backward(made.sum())
    assert made.dtype is torch.bfloat16
    assert hidden.grad is not None
    expected = unpacked(found, 64, 128, torch.float32).sum(0).expand(4, 128)
    torch.testing.assert_close(hidden.grad.float(), expected, rtol=0.02, atol=0.2)


@pytest.mark.slow
def test_a_layer_is_compiled_with_its_backward() -> None:
    found = packed(torch.randn(96, 64))

    def run(hidden: Tensor) -> Tensor:
        return torch.tanh(nf4_linear(hidden, found, None, 96, 64)).sum()

    hidden = torch.randn(3, 64).requires_grad_()
    (expected,) = torch.autograd.grad(run(hidden), hidden)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden), hidden)[0], expected)


# Graphs.


class Named(nn.Module):
    """A table, two layers that may share a weight, and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        if tied:
            self.second.weight, self.head.weight = self.first.weight, self.table.weight
        self.requires_grad_(False)
        self.norm.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.second(self.first(self.table(ids))))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def graph_of(module: nn.Module) -> Graph:
    return capture(module, {"ids": torch.zeros(2, 4, dtype=torch.int64)})


def test_layers_are_packed_and_tables_norms_and_the_head_are_not(tmp_path: Path) -> None:
    for tied, expected in ((False, {"first.weight", "second.weight"}), (True, {"first.weight"})):
        plain = graph_of(Named(tied=tied))
        graph = with_nf4(plain)
        found = {state.name: state for state in graph.parameters if state.packed is not None}
        assert found.keys() == expected
        assert [one.target for one in graph.operators].count(NF4_LINEAR) == 2
        assert {state.num_bytes for state in found.values()} == {nf4_bytes(256)}
        assert tuple(state.unpacked for state in graph.parameters) == plain.parameters
        assert len(units_of(graph)) == len(units_of(plain))
        save_graph(graph, tmp_path / "graph.json")
        assert load_graph(tmp_path / "graph.json") == graph
        assert graph_hash(graph) != graph_hash(plain)
        save_graph(plain, tmp_path / "graph.json")
        assert "packed" not in (tmp_path / "graph.json").read_text()


def test_a_model_without_a_frozen_layer_is_refused() -> None:
    for module in (Named().requires_grad_(True), Named()):
        if not module.first.weight.requires_grad:
            module.first.requires_grad_(True)
            module.second.requires_grad_(True)
        with pytest.raises(
            BiremeError, match="Named has no linear layer with a frozen weight before its last"
        ):
            with_nf4(graph_of(module))


def test_packed_weights_are_read_from_a_folder_one_by_one(tmp_path: Path) -> None:
    safetensors: Any = pytest.importorskip("safetensors.torch")
    torch.manual_seed(1)
    module = Named()
    safetensors.save_file(module.state_dict(), tmp_path / "model.safetensors")
    graph = with_nf4(graph_of(module))
    names = [state.name for state in graph.parameters]
    own = dict(module.named_parameters())
    given = packing(graph, lambda wanted: {name: own[name].detach() for name in wanted})(names)
    found = load_weights(graph, names, tmp_path, dtype=torch.float32)
    assert all(torch.equal(found[name], given[name]) for name in names)
    assert torch.equal(found["first.weight"], packed(module.first.weight))


# Adapters on them.


def adapted(lora: LoraPart) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a GPT with an adapter, and its weights, all dense."""
    pytest.importorskip("peft")
    source = load_source(GPT, batch=2, dtype="bfloat16", part=TrainedPart(lora=lora))
    make = partial(capture, source.model, source.example_inputs)
    graph = captured_once(f"{GPT} {lora}", make, is_kept=True)
    assert source.adapter is not None
    given = source.adapter.weights(graph, lambda names: materialize(source.base, names, seed=3), 0)
    return graph, dict(given([state.name for state in (*graph.parameters, *graph.buffers)]))


def losses_of(
    graph: Graph, weights: dict[str, Tensor], num_steps: int, rate: float, *, noise: float = 0.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with float32 masters, and give the losses and all weights. A token follows from the one before;
    a part of them is `noise`.
    """
    function = StageFunction(graph, units_of(graph), outputs=("loss",))
    masters = {
        state.name: weights[state.name].float().clone() for state in graph.parameters if state.trainable
    }
    steps = torch.optim.AdamW(masters.values(), lr=rate)
    draws = torch.Generator().manual_seed(2)
    found = []
    for _ in range(num_steps):
        ids = (torch.randint(64, (8, 1), generator=draws) + 3 * torch.arange(32)) % 64
        is_noise = torch.rand(ids.shape, generator=draws) < noise
        ids = torch.where(is_noise, torch.randint(64, ids.shape, generator=draws), ids)
        dtypes = {state.name: getattr(torch, state.dtype) for state in graph.parameters}
        leaves = {name: weights[name].to(dtype) for name, dtype in dtypes.items()}
        leaves |= {name: one.to(dtypes[name], copy=True).requires_grad_() for name, one in masters.items()}
        loss = function(leaves, weights, {"input_ids": ids, "labels": ids})["loss"]
        torch.autograd.backward(loss)
        found.append(loss.item())
        for name, master in masters.items():
            grad = leaves[name].grad
            assert grad is not None
            master.grad = grad.float()
        steps.step()
    return found, {**weights, **{name: one.detach() for name, one in masters.items()}}


@pytest.mark.slow
def test_an_adapter_on_four_bits_learns_as_one_on_bfloat16() -> None:
    targets = ("query_key_value", "up", "down")
    graph, weights = adapted(LoraPart(8, targets=targets))
    whole = replace(
        graph,
        parameters=tuple(replace(one, trainable=".lora_" not in one.name) for one in graph.parameters),
    )
    curve, base = losses_of(whole, weights, 40, 3e-3)
    assert curve[-1] < 0.2 * curve[0], "the base has learned something"
    dense, _ = losses_of(graph, base, 20, 3e-3, noise=0.3)
    small = with_nf4(graph)
    bytes_of = dict(packing(small, lambda names: {name: base[name] for name in names})([*base]))
    assert sum(one.num_bytes for one in small.parameters) < 0.5 * sum(
        one.num_bytes for one in graph.parameters
    )
    found, _ = losses_of(small, bytes_of, 20, 3e-3, noise=0.3)
    assert sum(dense[-5:]) < 0.95 * sum(dense[:5])
    assert sum(found[-5:]) == pytest.approx(sum(dense[-5:]), rel=0.01)


@pytest.mark.slow
def test_dora_begins_as_the_model_and_has_its_weights_unpacked_for_their_lengths() -> None:
    graph, weights = adapted(LoraPart(2, targets=("query_key_value",), use_dora=True))
    small = with_nf4(graph)
    assert [one.target for one in small.operators].count(NF4_WEIGHT) == 2
    plain, _ = adapted(LoraPart(2, targets=("query_key_value",)))
    inputs = {"input_ids": torch.arange(64).view(2, 32), "labels": torch.arange(64).view(2, 32)}
    source = load_source(
        GPT,
        batch=2,
        dtype="bfloat16",
        part=TrainedPart(lora=LoraPart(2, targets=("query_key_value",), use_dora=True)),
    )
    adapter = source.adapter
    assert adapter is not None

    def base(names: Any) -> dict[str, Tensor]:
        found = materialize(source.base, names, seed=3)
        return dict(packing(adapter.base_graph(small), lambda wanted: {n: found[n] for n in wanted})(names))

    given = dict(adapter.weights(small, base, 0)([*weights]))
    losses = []
    for one in (small, with_nf4(plain)):
        function = StageFunction(one, units_of(one), outputs=("loss",))
        states = {state.name: getattr(torch, state.dtype) for state in (*one.parameters, *one.buffers)}
        own = {name: given[name].to(dtype) for name, dtype in states.items()}
        losses.append(function(own, own, inputs)["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
