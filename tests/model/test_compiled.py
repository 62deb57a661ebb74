"""A compiled stage computes what the stage computes, but for rounding, at every batch size.

The C++ compiler takes most of a minute for a transformer. One test has it compile a stage of two lines; the
others stop where torch has traced forward and backward: the code that it generates then is its own affair.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError
from bireme.model import stage
from bireme.model.capture import capture
from bireme.model.chain import chain, chain_resolver
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.graph import Graph
from bireme.model.halves import backward_input
from bireme.model.stage import StageFunction
from bireme.model.torch_private import cpp_compiler
from bireme.model.units import units_of
from tests.model.test_chain import example, picky, squared_error
from tests.support.extent import TRY_ALL
from tests.support.graphs import captured_once

pytestmark = pytest.mark.slow


@pytest.fixture
def _without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "cpp_compiler", lambda: "none is asked for")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


def with_compiler(command: str) -> AbstractContextManager[None]:
    from torch._inductor import config  # here, because it takes seconds

    patched: AbstractContextManager[None] = config.patch(
        {"cpp.cxx": (command,), "force_disable_caches": True}
    )
    return patched


@pytest.fixture(autouse=True)
def _forget_what_was_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for what several tests share."""
    yield
    if "stages" not in request.fixturenames:
        torch.compiler.reset()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=1, width=16, heads=2, vocab=32, context=8)).double()


def ids(batch: int) -> dict[str, Tensor]:
    drawn = torch.randint(32, (batch, 8), generator=torch.Generator().manual_seed(batch))
    return {"input_ids": drawn, "labels": drawn.clone()}


def two_stages(graph: Graph, *, compiled: bool) -> list[StageFunction]:
    units = units_of(graph)
    bounds = [0, len(units) // 2, len(units)]
    return [StageFunction(graph, units[begin:end], compile=compiled) for begin, end in pairwise(bounds)]


def loss_of(stages: list[StageFunction], parameters: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    values = dict(inputs)
    for one in stages:
        values |= one(parameters, {}, values)
    return values["loss"]


@dataclass(frozen=True, slots=True)
class Stages:
    """Those of a GPT, as they are and compiled, and its parameters."""

    parameters: dict[str, Tensor]
    plain: list[StageFunction]
    compiled: list[StageFunction]


@pytest.fixture(scope="module")
def stages() -> Stages:
    """To be called only without code, which a stage is compiled with at its first call."""
    model = gpt()
    graph = captured_once("a compiled gpt", partial(capture, model, ids(2)), is_kept=True)
    plain, compiled = (two_stages(graph, compiled=flag) for flag in (False, True))
    return Stages(dict(model.named_parameters()), plain, compiled)


@pytest.mark.usefixtures("_without_code")
def test_compiled_stages_give_loss_and_gradients_at_several_batch_sizes(stages: Stages) -> None:
    parameters = stages.parameters
    for batch in (3, 5):
        found, expected = (loss_of(own, parameters, ids(batch)) for own in (stages.compiled, stages.plain))
        assert close(found, expected)
        tensors = list(parameters.values())
        pairs = zip(torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors), strict=True)
        assert all(close(one, other) for one, other in pairs)


@pytest.mark.usefixtures("_without_code")
def test_a_compiled_stage_gives_all_its_gradients_in_the_first_half_of_a_backward(stages: Stages) -> None:
    parameters, (first, last) = stages.parameters, stages.compiled
    used = [parameters[name] for name in last.parameters]
    sent = first(parameters, {}, ids(5))

    def ran() -> tuple[dict[str, Tensor], Tensor]:
        """Twice, for a compiled stage may give its gradients only once."""
        received = {name: tensor.detach().requires_grad_() for name, tensor in sent.items()}
        return received, last(parameters, {}, ids(5) | received)["loss"]

    received, loss = ran()
    expected = torch.autograd.grad(loss, [*received.values(), *used])
    received, loss = ran()
    rest = backward_input([loss], [torch.ones_like(loss)], list(received.values()), used)
    found = (*rest.input_gradients, *rest.weight_gradients())
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert torch.equal(one, other)


class Bent(nn.Module):
    """The least that has a forward and a backward to generate code for."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.tanh(self.line(x)).square().mean()}


class Dropping(Bent):
    """One that drops out."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.dropout(self.line(x), 0.5, self.training).square().mean()}


def test_the_code_that_is_generated_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpp_compiler() is None:
        pytest.skip("torch.compile needs a C++ compiler, and there is none")
    if not TRY_ALL:  # torch compiles a program for each set of instructions that there may be, and headers
        from torch._inductor import config, cpu_vec_isa

        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
        monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)
    torch.manual_seed(0)
    model, x = Bent().double(), torch.randn(3, 4, dtype=torch.float64)
    graph = capture(model, {"x": x})
    parameters = dict(model.named_parameters())
    compiled, plain = (StageFunction(graph, units_of(graph), compile=flag) for flag in (True, False))
    with nullcontext() if TRY_ALL else torch.no_grad():  # each direction is a call of the compiler
        found, expected = (run(parameters, {}, {"x": x})["loss"] for run in (compiled, plain))
    assert close(found, expected)
    if TRY_ALL:
        gradients = (torch.autograd.grad(loss, list(parameters.values())) for loss in (found, expected))
        assert all(close(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.usefixtures("_without_code")
def test_a_compiled_stage_still_drops_out() -> None:
    model, x = Dropping().double(), torch.randn(3, 4, dtype=torch.float64)
    graph = capture(model, {"x": x})
    stage = StageFunction(graph, units_of(graph), compile=True)
    losses = {stage(dict(model.named_parameters()), {}, {"x": x})["loss"].item() for _ in range(2)}
    assert len(losses) == 2


@pytest.mark.usefixtures("_without_code")
def test_a_chain_is_compiled_around_what_looks_at_numbers() -> None:
    torch.manual_seed(0)
    model = picky().double()
    x, y = example()
    graph = chain(model, (x, y), loss=squared_error, training=False)
    resolve = chain_resolver(graph, model, loss=squared_error)
    first = StageFunction(graph, units_of(graph)[:2], resolve=resolve, compile=True)
    (sent,) = first.sends
    found = first(dict(model.named_parameters()), {}, {"0": x})[sent]
    assert close(found, model.eval()[:2](x))


def bent_loss() -> Tensor:
    """Of a compiled stage."""
    model, x = Bent().double(), torch.ones(3, 4, dtype=torch.float64)
    graph = capture(model, {"x": x})
    loss: Tensor = StageFunction(graph, units_of(graph), compile=True)(
        dict(model.named_parameters()), {}, {"x": x}
    )["loss"]
    return loss


def test_without_a_compiler_the_first_call_says_what_to_install() -> None:
    with (
        with_compiler("no-such-compiler"),
        pytest.raises(BiremeError, match=r"C\+\+ compiler.*CXX.*leave compile out"),
    ):
        bent_loss()


def test_a_compiler_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || exit 1\n')
    broken.chmod(0o755)
    with (
        with_compiler(str(broken)),
        pytest.raises(BiremeError, match=r"torch\.compile fails on a stage.*Leave compile out"),
    ):
        bent_loss()
