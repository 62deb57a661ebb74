"""Small models for the tests of the engine, as graphs with weights, and batches for them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bireme.model.capture import capture
from bireme.model.chain import chain, chain_resolver
from bireme.model.graph import Graph
from bireme.model.part import WHOLE, TrainedPart
from bireme.model.sources import load_source
from bireme.model.stage import Resolve, StageFunction, torch_operator
from bireme.model.units import Unit, units_of
from bireme.model.weights import materialize
from bireme.plan.plan import Plan
from bireme.plan.program_plan import ProgramPlan
from tests.support.graphs import captured_once

__all__ = [
    "CONTEXT",
    "Batch",
    "Model",
    "captured",
    "chained",
    "gpt",
    "made_of",
    "real_batches",
    "token_batches",
]

VOCAB, CONTEXT = 32, 8
Batch = dict[str, Tensor]


def plainly() -> Resolve:
    return torch_operator


def num_samples(rows: Mapping[str, Tensor]) -> float:
    return len(next(iter(rows.values())))


def num_tokens(rows: Mapping[str, Tensor]) -> float:
    """The labels that count, but for those that no place comes before."""
    return float((rows["labels"][:, 1:] != -100).sum())


@dataclass(frozen=True, slots=True)
class Model:
    """A small model as a graph, with its weights. `resolve` makes for each rank what runs its operators."""

    graph: Graph
    weights: dict[str, Tensor]
    evaluation: Graph | None = None
    resolve: Callable[[], Resolve] = plainly
    count: Callable[[Mapping[str, Tensor]], float] = num_samples

    @property
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.graph)

    def given(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.weights[name].clone() for name in names}

    def stage(self, plan: Plan | ProgramPlan, stage: int) -> StageFunction:
        units = [self.units[index] for index in plan.units_of(stage, len(self.units))]
        return StageFunction(self.graph, units, resolve=self.resolve())


def captured(
    module: nn.Module,
    example: Mapping[str, Tensor],
    *,
    name: str = "",
    evaluates: bool = False,
    is_kept: bool = False,
    **more: Any,
) -> Model:
    """A module as it is, weights and all. One that has a name is always the same, and captured once; what
    `is_kept` is of this folder, and there for later runs too.
    """
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def graph(training: bool) -> Graph:
        make = partial(capture, module, example, training=training)
        return captured_once(f"{name} {training}", make, is_kept=is_kept) if name else make()

    return Model(
        graph(training=True),
        {name: tensor.detach().clone() for name, tensor in weights.items()},
        graph(training=False) if evaluates else None,
        **more,
    )


def chained(modules: nn.Sequential, example: Mapping[str, Tensor], loss: Any) -> Model:
    """A chain of modules; every rank has copies of its own, for calling one puts weights into it."""
    weights = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    graph = chain(modules, example, loss=loss)
    return Model(
        graph,
        {name: tensor.detach().clone() for name, tensor in weights.items()},
        resolve=lambda: chain_resolver(graph, copy.deepcopy(modules), loss=loss),
    )


@cache
def gpt(text: str, dtype: str = "float64", part: TrainedPart = WHOLE, *, evaluates: bool = False) -> Model:
    """A GPT of width 16, made once in a process, of which a part learns.

    Models of the same adapter differ in what learns and in nothing else that is captured.
    """
    sizes = f"gpt:{text},width=16,heads=2,vocab={VOCAB},context={CONTEXT}"
    source = load_source(sizes, batch=2, dtype=dtype, part=part)
    learning = {name for name, parameter in source.model.named_parameters() if parameter.requires_grad}

    def graph_for(training: bool) -> Graph:
        whole = load_source(sizes, batch=2, dtype=dtype, part=TrainedPart(lora=part.lora))
        make = partial(capture, whole.model, whole.example_inputs, training=training)
        found = captured_once(f"{sizes} {dtype} {part.lora} {training}", make, is_kept=True)
        states = tuple(replace(state, trainable=state.name in learning) for state in found.parameters)
        return replace(found, parameters=states)

    graph = graph_for(training=True)
    names = [state.name for state in (*graph.parameters, *graph.buffers)]

    def of_base(names: Sequence[str]) -> dict[str, Tensor]:
        return materialize(source.base, names, seed=3)

    given = of_base if source.adapter is None else source.adapter.weights(graph, of_base, seed=3)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in given(names).items()}
    return Model(graph, weights, graph_for(training=False) if evaluates else None, count=num_tokens)


def token_batches(num_samples: int, count: int, first: int = 0) -> list[Batch]:
    """Batches in which some labels do not count, so that micro-batches weigh differently."""
    made = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB, (num_samples, CONTEXT), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def real_batches(num_samples: int, count: int, width: int, wanted: int = 1, first: int = 0) -> list[Batch]:
    """Batches of float64 numbers: `x` of that width, and as many that are `wanted`."""
    made = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        made.append(
            {
                "x": torch.randn(num_samples, width, generator=generator, dtype=torch.float64),
                "wanted": torch.randn(num_samples, wanted, generator=generator, dtype=torch.float64),
            }
        )
    return made


def made_of(kinds: Sequence[nn.Module], seed: int = 5) -> nn.Sequential:
    """Modules in a row, in float64, with the same weights each time."""
    made = nn.Sequential(*kinds).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made
