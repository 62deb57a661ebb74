"""What the tests of the engine share: runs on threads and processes, and the judge's numbers for them.

A run gives for each rank what it saw after every batch. The judge is `tests/support/oracles.py`: it gets
the same model in the same stages. What is compared is everything that an update leaves behind.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.balance import Shares
from bireme.codec import LinkCodecs, through
from bireme.codec.above import Thresholds
from bireme.model.graph import learned_values
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.balancer import Sharing
from bireme.runtime.exchange.averages import Averaging
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.fabric import Fabric
from bireme.runtime.microbatches import LazyBatch, micro_batch_seed
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import OnInstruction, PipelineSettings, named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from bireme.runtime.world import World
from bireme.schedule.program import Rule
from tests.support.coded_oracle import CodedOracle
from tests.support.oracles import AfterStep, Microbatch, Update, run_oracle, seen_by
from tests.support.small_models import Batch, Model
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

__all__ = [
    "ALL",
    "DELAYED",
    "FLUSH",
    "Setting",
    "Trained",
    "assert_equal",
    "evaluated",
    "note_training",
    "oracle",
    "pipeline_of",
    "plan_for",
    "tolerance_of",
    "train_on_threads",
    "train_rank",
]

ELEMENTWISE = 1e-4
"""Up to this tolerance each element is compared, above it each tensor as a whole."""
SEED = 11

FLUSH = ("sequential", "gpipe", "1f1b", "1f1b-sliced", "interleaved", "zb-h1", "zbv")
DELAYED = ("2bw", "2bw-fresh")
ALL = (*FLUSH, *DELAYED)


def lr(batch: int) -> float:
    """A schedule: full at the first batch, then less and less."""
    return 1.0 / (1 + 0.25 * batch)


@dataclass(frozen=True, slots=True)
class Setting:
    """How to train. `windows` are the batches of each call of train(), one after the other."""

    plan: Plan | ProgramPlan
    optimizer: str = "adamw"
    clip_norm: float | None = None
    bank_dtype: torch.dtype | None = None
    windows: tuple[int, ...] = ()
    lr_factor: Callable[[int], float] = lr
    reads_apart: bool = False
    codecs: LinkCodecs | None = None
    """The plan's own if they are left out."""
    sum_codec: str = "none"
    gradient: str = "whole"
    gradient_of: tuple[str, ...] | None = None
    paging: PagingSettings | None = None
    shard: str = "none"
    compiles: bool = False

    @property
    def factory(self) -> OptimizerFactory:
        return named_optimizer(self.optimizer, lr=0.02, weight_decay=0.1)

    @property
    def all_codecs(self) -> LinkCodecs:
        plan = self.plan.by_program if isinstance(self.plan, Plan) else self.plan
        return plan.codecs if self.codecs is None else self.codecs

    def split(self, data: Sequence[Batch]) -> list[Sequence[Batch]]:
        bounds = accumulate(self.windows or (len(data),), initial=0)
        return [data[begin:end] for begin, end in pairwise(bounds)]


@dataclass(slots=True)
class Trained:
    """What a rank saw: after every batch its loss, norm, verdict, weights and optimizer state."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def pipeline_of(
    model: Model,
    setting: Setting,
    world: World | Fabric | None,
    on_instruction: OnInstruction | None = None,
    device: torch.device | str = "cpu",
    sharing: Sharing | None = None,
    agreement: QuorumAgreement | None = None,
    averaging: Averaging | None = None,
) -> Pipeline:
    return Pipeline(
        model.graph,
        setting.plan,
        world,
        weights=model.given,
        optimizer=setting.factory,
        settings=PipelineSettings(
            evaluation=model.evaluation,
            resolve=model.resolve(),
            clip_norm=setting.clip_norm,
            lr=setting.lr_factor,
            seed=SEED,
            bank_dtype=setting.bank_dtype,
            on_instruction=on_instruction,
            device=device,
            sharing=sharing,
            reads_apart=setting.reads_apart,
            sum_codec=setting.sum_codec,
            codecs=setting.codecs,
            gradient=setting.gradient,
            gradient_of=setting.gradient_of,
            paging=setting.paging or PagingSettings(),
            shard=setting.shard,
            compile=setting.compiles,
            agreement=agreement,
            averaging=averaging,
        ),
    )


def train_rank(
    pipeline: Pipeline,
    setting: Setting,
    data: Sequence[Batch],
    between: Callable[[Pipeline], object] = lambda _pipeline: None,
) -> Trained:
    """Train, in as many calls as the setting says, with something done between them."""
    trained = Trained()
    for window in setting.split(data):
        between(pipeline)
        note_training(pipeline, window, trained)
    return trained


def note_training(pipeline: Pipeline, batches: Iterable[Batch | LazyBatch], trained: Trained) -> None:
    """Train on batches, and note all that is seen."""
    for result in pipeline.train(batches):
        assert result.batch == len(trained.losses)
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.skipped.append(result.is_skipped)
        trained.shares.append(result.shares)
        trained.weights.append(_newest(pipeline))
        trained.states.append(_optimizer_states(pipeline))
    for stage in pipeline.stages.values():
        assert stage.num_kept == 0
        trained.buffers |= {name: buffer.clone() for name, buffer in stage.buffers.items()}


def _newest(pipeline: Pipeline) -> dict[str, Tensor]:
    """Copies of a rank's weights; stages that share one must agree on it."""
    found: dict[str, Tensor] = {}
    for stage in pipeline.stages.values():
        for name, tensor in stage.banks.newest().items():
            assert name not in found or torch.equal(found[name], tensor), name
            found[name] = tensor.clone()
    return found


def _optimizer_states(pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        for stage in pipeline.stages.values()
        for name, state in stage.banks.optimizer_state().items()
    }


def train_on_threads(
    model: Model,
    setting: Setting,
    data: Sequence[Batch],
    *,
    between: Callable[[Pipeline], object] = lambda _pipeline: None,
    on_instruction: OnInstruction | None = None,
    **fabric: Any,
) -> list[Trained]:
    """What each rank saw, all of them threads of this process."""
    joined = ThreadFabric(setting.plan.num_ranks, **fabric)

    def work(rank: int) -> Trained:
        pipeline = pipeline_of(model, setting, joined.of(rank), on_instruction)
        try:
            return train_rank(pipeline, setting, data, between)
        finally:
            pipeline.close()

    torch.set_num_threads(1)
    return run_threads(setting.plan.num_ranks, work)


@dataclass(frozen=True, slots=True)
class _Now:
    """The micro-batch that the oracle runs."""

    batch: int
    seed: int
    replica: int


class _Staged:
    """A stage as the oracle runs it: what it draws depends on the micro-batch, as in the engine, and what it
    receives from another rank has gone through the codecs of the boundary before it.
    """

    def __init__(self, model: Model, setting: Setting, stage: int, runs: list[_Now]) -> None:
        self._function = model.stage(setting.plan, stage)
        self.parameters = self._function.parameters
        self._runs = runs
        self._boundary = stage - 1
        self._codecs = setting.all_codecs.between(setting.plan.source.rank_of_stage)
        self._thresholds: dict[int, Thresholds] = defaultdict(Thresholds)
        """By replica."""
        self._coded = [name for name in self._function.receives if name in learned_values(model.graph)]

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        now = self._runs[-1]
        codecs = self._codecs.of(self._boundary, now.batch)
        thresholds = self._thresholds[now.replica]
        received = {
            name: through(codecs, inputs[name], thresholds=thresholds, name=name, batch=now.batch)
            for name in self._coded
        }
        return self._function(parameters, buffers, {**inputs, **received}, seed=now.seed)


def oracle(
    model: Model,
    setting: Setting,
    data: Sequence[Batch],
    buffers: dict[str, Tensor] | None = None,
    *,
    sizes: Sequence[Sequence[int]] | None = None,
    norms: Mapping[int, float] | None = None,
    after_step: AfterStep = lambda _batch, _weights, _state: None,
    cuts: Mapping[str, Sequence[slice]] | None = None,
    clips_apart: bool = False,
) -> list[Update]:
    """What one process and plain loops make of it. `buffers` are written, as the model does. `sizes` are the
    samples of all micro-batches, batch by batch, where the plan does not say them. `norms` are those of
    ranks whose clipped updates are to be the same to the last bit. `after_step` may change the weights and
    the optimizers' state after each step. `cuts` are the pieces of gradients that go through the codec of
    sums each by itself. With `clips_apart` stages are clipped by their own norms.
    """
    plan, graph = setting.plan, model.graph
    runs: list[_Now] = []

    @contextmanager
    def around(batch: int, index: int) -> Iterator[None]:
        replica = index // plan.source.num_microbatches
        runs.append(_Now(batch, micro_batch_seed(SEED, batch, index), replica))
        yield

    seen: dict[tuple[int, int], int] = {}
    first = 0
    for window in filter(len, setting.split(data)):
        seen |= seen_by(plan.source.program(len(window), first))
        first += len(window)
    rule = plan.source.rule
    return run_oracle(
        rule,
        [_Staged(model, setting, stage, runs) for stage in range(plan.num_stages)],
        {state.name: model.weights[state.name] for state in graph.parameters},
        [_cut(batch, model, plan, sizes[place] if sizes else ()) for place, batch in enumerate(data)],
        setting.factory,
        trainable={state.name for state in graph.parameters if state.trainable},
        buffers=model.given([state.name for state in graph.buffers]) if buffers is None else buffers,
        clip_norm=setting.clip_norm,
        lr_factor=setting.lr_factor,
        seen=seen if rule is Rule.FRESH else None,
        compute_dtype=setting.bank_dtype,
        around=around,
        coded=None if setting.sum_codec == "none" else CodedOracle(setting.sum_codec, cuts),
        norms=norms,
        after_step=after_step,
        clips_apart=clips_apart,
    )


def _cut(batch: Batch, model: Model, plan: Plan | ProgramPlan, sizes: Sequence[int]) -> list[Microbatch]:
    """The micro-batches in which anything counts."""
    num_microbatches = plan.source.num_microbatches
    pieces = plan.width * num_microbatches
    ends = pieces if not plan.micro_batch_sizes else _ends(batch, plan)
    ends = list(accumulate(sizes))[:-1] if sizes else ends
    parts = zip(*(tensor.tensor_split(ends) for tensor in batch.values()), strict=True)
    rows = [dict(zip(batch, part, strict=True)) for part in parts]
    cut = [Microbatch(part, model.count(part), place // num_microbatches) for place, part in enumerate(rows)]
    return [one for one in cut if one.weight]


def _ends(batch: Batch, plan: Plan | ProgramPlan) -> list[int]:
    """Where every micro-batch but the last ends, in a batch of just the plan's sizes."""
    sizes = [size for size in plan.micro_batch_sizes for _ in range(plan.source.num_microbatches)]
    assert all(len(tensor) == sum(sizes) for tensor in batch.values())
    return list(accumulate(sizes))[:-1]


def evaluated(model: Model, weights: Mapping[str, Tensor], data: Sequence[Batch]) -> float:
    """The mean loss of one process over all batches, batch by batch, in evaluation mode."""
    assert model.evaluation is not None
    whole = StageFunction(model.evaluation, units_of(model.evaluation), outputs=("loss",))
    losses, counts = [], []
    for batch in data:
        with torch.no_grad():
            losses.append(float(whole(weights, model.weights, batch)["loss"]))
        counts.append(model.count(batch))
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def assert_equal(found: Sequence[Trained], expected: Sequence[Update], *, tolerance: float = 0.0) -> None:
    """Losses, norms, weights and optimizer states after every update, on every rank.

    What several ranks hold, as replicas or tied, must be the same to the last bit in any case.
    """
    rough = min(max(tolerance, 1e-12), 1e-2)
    assert all(trained.losses == found[0].losses or _has_nan(trained.losses) for trained in found)
    for trained in found:
        assert trained.losses == pytest.approx([update.loss for update in expected], rel=rough, nan_ok=True)
        assert trained.norms == pytest.approx([update.norm for update in expected], rel=rough, nan_ok=True)
        assert trained.skipped == [update.is_skipped for update in expected]
    for step, update in enumerate(expected):
        held: dict[str, Tensor] = {}
        remembered: dict[str, dict[str, Tensor]] = {}
        for trained in found:
            for name, tensor in trained.weights[step].items():
                _assert_close(tensor, held.setdefault(name, tensor), 0.0, name)
            for name, state in trained.states[step].items():
                for key, value in state.items():
                    first = remembered.setdefault(name, {}).setdefault(key, value)
                    _assert_close(value, first, 0.0, name)
        learned = {name: held[name] for name in update.weights}
        for name, tensor in learned.items():
            _assert_close(tensor, update.weights[name], tolerance, f"{name} after batch {step}")
        assert remembered.keys() == update.optimizer_state.keys()
        for name, state in remembered.items():
            for key, value in state.items():
                wanted = update.optimizer_state[name][key]
                _assert_close(value, wanted, tolerance, f"{key} of {name} after batch {step}")


def _has_nan(numbers: Sequence[float]) -> bool:
    return any(map(math.isnan, numbers))


def _assert_close(one: Tensor, other: Tensor, tolerance: float, what: str) -> None:
    if one.shape == other.shape and torch.equal(one, other.to(one.dtype)):
        return  # what follows takes twenty times as long
    if tolerance > ELEMENTWISE:
        distance = float((one.double() - other.double()).norm())
        assert distance <= tolerance * float(other.double().norm()) + tolerance**2, what
        return
    torch.testing.assert_close(
        one, other.to(one.dtype), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def tolerance_of(schedule: str, precision: str = "float64") -> float:
    """How far an update may be from the judge's: not at all where sums are made in its order.

    Two halves of a micro-batch add up in another one.
    """
    if schedule != "1f1b-sliced":
        return 0.0
    return {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}[precision]


def plan_for(schedule: str, num_stages: int | None = None, *, recompute: str = "off", **more: Any) -> Plan:
    """A plan for a model of eight units. `recompute` is off, all, or some: then of a few units."""
    num = num_stages or (4 if schedule in ("interleaved", "zbv") else 3)
    cuts = {1: (), 2: (4,), 3: (3, 5), 4: (2, 4, 6), 6: (1, 2, 4, 5, 6)}[num]
    return Plan(
        cuts,
        4,
        schedule,
        recompute=tuple(range(num)) if recompute == "all" else (),
        recompute_units=(1, 4, 7) if recompute == "some" else (),
        **more,
    )
