"""The engine computes what one process would: every schedule, against plain loops over the same model.

Ranks are threads here, with the engine's own interpreter and messages copied between them; `test_processes`
runs real ones.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction, stage_function
from bireme.model.units import Unit, units_of
from bireme.model.weights import materialise
from bireme.plan.plan import Plan
from bireme.runtime.microbatches import micro_batch_seed
from bireme.runtime.optimizers import OptimizerFactory, named_optimizer
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.thread_transport import ThreadFabric
from bireme.schedule.rule import Rule
from tests.oracles import Microbatch, Update, run_oracle, seen_by
from tests.together import run_threads

VOCAB, CONTEXT = 32, 8
NUM_BATCHES = 5
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """A small model, captured, with its weights."""

    graph: Graph
    evaluation: Graph
    weights: dict[str, Tensor]

    @property
    def units(self) -> tuple[Unit, ...]:
        return units_of(self.graph)

    def given(self, names: Any) -> dict[str, Tensor]:
        return {name: self.weights[name].clone() for name in names}


def model(text: str, dtype: str = "float64") -> Model:
    source = load_source(f"gpt:{text},width=16,heads=2,vocab={VOCAB},context={CONTEXT}", batch=2, dtype=dtype)
    graph = capture(source.model, source.example_inputs)
    names = [state.name for state in (*graph.parameters, *graph.buffers)]
    return Model(
        graph,
        capture(source.model, source.example_inputs, training=False),
        materialise(source.model, names, seed=3),
    )


@pytest.fixture(scope="module")
def untied() -> Model:
    return model("layers=3,tied=false")


@pytest.fixture(scope="module")
def tied() -> Model:
    return model("layers=3,tied=true")


@pytest.fixture(scope="module")
def dropping() -> Model:
    return model("layers=3,tied=false,dropout=0.3")


def batches(num_samples: int, count: int = NUM_BATCHES, first: int = 0) -> list[Batch]:
    """Batches in which some labels do not count, so that micro-batches weigh differently."""
    made = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB, (num_samples, CONTEXT), generator=generator)
        labels = ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < 0.4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


@dataclass(slots=True)
class Trained:
    """What a rank saw: after every batch its loss, norm, weights and optimiser state; and the evaluation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Setting:
    """How to train."""

    plan: Plan
    num_samples: int = 8
    optimizer: str = "adamw"
    clip_norm: float | None = 0.5
    bank_dtype: torch.dtype | None = None

    @property
    def factory(self) -> OptimizerFactory:
        return named_optimizer(self.optimizer, lr=0.02, weight_decay=0.1)


def lr(batch: int) -> float:
    return 1.0 / (1 + batch)


def train_rank(pipeline: Pipeline, data: list[Batch]) -> Trained:
    trained = Trained()
    for result in pipeline.train(data):
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.skipped.append(result.is_skipped)
        trained.weights.append({name: t.clone() for name, t in pipeline.parameters().items()})
        trained.states.append(
            {
                name: {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
                for stage in pipeline.stages.values()
                for name, state in stage.banks.optimizer_state().items()
            }
        )
    return trained


def pipeline_of(model: Model, setting: Setting, rank: Any) -> Pipeline:
    return Pipeline(
        model.graph,
        setting.plan,
        rank,
        weights=model.given,
        optimizer=setting.factory,
        evaluation=model.evaluation,
        clip_norm=setting.clip_norm,
        lr=lr,
        seed=11,
        bank_dtype=setting.bank_dtype,
    )


def train_on_threads(model: Model, setting: Setting, data: list[Batch], **fabric: Any) -> list[Trained]:
    joined = ThreadFabric(setting.plan.num_ranks, **fabric)

    def work(rank: int) -> Trained:
        pipeline = pipeline_of(model, setting, joined.of(rank))
        try:
            return train_rank(pipeline, data)
        finally:
            pipeline.close()

    torch.set_num_threads(1)
    return run_threads(setting.plan.num_ranks, work)


class _Seeded:
    """A stage as the oracle runs it: what it draws depends on the micro-batch, as in the engine."""

    def __init__(self, function: StageFunction, seeds: list[int]) -> None:
        self.parameters = function.parameters
        self._function = function
        self._seeds = seeds

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return self._function(parameters, buffers, inputs, seed=self._seeds[-1])


def oracle(model: Model, setting: Setting, data: list[Batch]) -> list[Update]:
    plan, graph = setting.plan, model.graph
    program = plan.program(len(data))
    pieces = plan.width * plan.num_microbatches
    seeds: list[int] = []

    @contextmanager
    def around(batch: int, index: int) -> Iterator[None]:
        seeds.append(micro_batch_seed(11, batch, index))
        yield

    def cut(batch: Batch) -> list[Microbatch]:
        sizes = [len(part) for part in batch["labels"].tensor_split(pieces)]
        parts = [dict(zip(batch, rows, strict=True)) for rows in zip(*(v.split(sizes) for v in batch.values()))]  # noqa: B905
        return [
            Microbatch(part, float((part["labels"][:, 1:] != -100).sum()), place // plan.num_microbatches)
            for place, part in enumerate(parts)
        ]

    stages = [
        _Seeded(stage_function(graph, [model.units[i] for i in plan.units_of(stage, len(model.units))]), seeds)
        for stage in range(plan.num_stages)
    ]
    return run_oracle(
        program.rule,
        stages,
        {state.name: model.weights[state.name] for state in graph.parameters},
        [cut(batch) for batch in data],
        setting.factory,
        buffers={state.name: model.weights[state.name] for state in graph.buffers},
        clip_norm=setting.clip_norm,
        lr_factor=lr,
        seen=seen_by(program) if program.rule is Rule.FRESH else None,
        compute_dtype=setting.bank_dtype,
        around=around,
    )


def assert_equal(found: list[Trained], expected: list[Update], *, tolerance: float = 0.0) -> None:
    """Losses, norms, weights and optimiser states after every update, on every rank."""

    def same(one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one, other.to(one.dtype), rtol=tolerance, atol=tolerance)

    held = set()
    for trained in found:
        assert trained.losses == pytest.approx([update.loss for update in expected], rel=1e-12)
        assert trained.norms == pytest.approx([update.norm for update in expected], rel=1e-12)
        for weights, states, update in zip(trained.weights, trained.states, expected, strict=True):
            held |= weights.keys()
            for name, tensor in weights.items():
                same(tensor, update.weights[name])
            for name, state in states.items():
                for key, value in state.items():
                    same(value, update.optimizer_state[name][key])
    assert held == expected[0].weights.keys()


FLUSH = ("sequential", "gpipe", "1f1b", "1f1b-sliced", "interleaved", "zb-h1", "zbv")
ALL = (*FLUSH, "2bw", "2bw-fresh")


def plan_for(schedule: str, **more: Any) -> Plan:
    cuts = (2, 4, 6) if schedule in ("interleaved", "zbv") else (3, 5)
    recompute = tuple(range(len(cuts) + 1)) if more.pop("recompute", False) else ()
    return Plan(cuts, 4, schedule, recompute=recompute, **more)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_computes_what_one_process_does_to_the_last_bit(
    untied: Model, schedule: str, recompute: bool
) -> None:
    setting = Setting(plan_for(schedule, recompute=recompute), clip_norm=None)
    data = batches(setting.num_samples)
    # Two halves of a micro-batch, and the two halves of a backward, add up in another order.
    tolerance = 1e-12 if schedule in ("1f1b-sliced", "zb-h1", "zbv") else 0.0
    assert_equal(train_on_threads(untied, setting, data), oracle(untied, setting, data), tolerance=tolerance)
