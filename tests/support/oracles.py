"""What the update rules demand of numbers, by one process and plain loops: the judge of the engine.

Nothing of `bireme.runtime` may be used here, and nothing is clever: every version is a whole copy of the
weights, every trial step is made on a deep copy of the optimizers, every micro-batch runs through the whole
model as one autograd graph. Gradients are summed over micro-batches in their order, then over replicas, then
over stages.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Rule
from tests.support.coded_oracle import CodedOracle

__all__ = ["AfterStep", "Microbatch", "StageLike", "Update", "run_oracle", "seen_by"]

Tensors = Mapping[str, Tensor]
Gradients = dict[str, Tensor | None]
Factory = Callable[[list[tuple[str, Tensor]]], Optimizer | Sequence[Optimizer]]
AfterStep = Callable[[int, Tensors, Mapping[str, Mapping[str, Any]]], None]
"""Is given the batch, the weights, and what the optimizers remember of them; not copies."""


class StageLike(Protocol):
    """A piece of a model, as `StageFunction` is one. `inputs` may hold more than it needs."""

    @property
    def parameters(self) -> Sequence[str]: ...

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensors) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The model's inputs, how much their mean loss weighs in the batch's, and which replica runs them."""

    inputs: Tensors
    weight: float = 1.0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """One copy of one stage."""

    replica: int
    stage: int


@dataclass(frozen=True, slots=True)
class Update:
    """One step of the optimizer and the batch that it is made from; under STASHED, one micro-batch of that.

    `losses` are those of the micro-batches, `gradients` those of the batch's mean loss before any clipping.
    `weights` and `optimizer_state` are as after the step, `computed_on` what each stage ran on.
    """

    batch: int
    losses: tuple[float, ...]
    loss: float
    gradients: Gradients
    norm: float
    is_skipped: bool
    weights: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Any]]
    computed_on: dict[Place, dict[str, Tensor]]


def seen_by(program: Program) -> dict[tuple[int, int], int]:
    """How many micro-batches the trial step of each (stage, batch) has seen, as the program's TRIALs say."""
    trials = (step for track in program.tracks for step in track if step.kind is Kind.TRIAL)
    return {(step.stage, step.batch): step.seen or 0 for step in trials}


def run_oracle(
    rule: Rule,
    stages: Sequence[StageLike],
    weights: Tensors,
    batches: Sequence[Sequence[Microbatch]],
    factory: Factory,
    *,
    trainable: Collection[str] | None = None,
    buffers: Tensors | None = None,
    clip_norm: float | None = None,
    lr_factor: Callable[[int], float] = lambda _batch: 1.0,
    seen: Mapping[tuple[int, int], int] | None = None,
    compute_dtype: torch.dtype | None = None,
    loss_name: str = "loss",
    around: Callable[[int, int], AbstractContextManager[object]] = lambda _batch, _index: nullcontext(),
    coded: CodedOracle | None = None,
    norms: Mapping[int, float] | None = None,
    after_step: AfterStep = lambda _batch, _weights, _state: None,
    clips_apart: bool = False,
) -> list[Update]:
    """Train from `weights` on all batches.

    `seen` says under FRESH from how many of each replica's micro-batches of the batch before the trial step
    of a (stage, batch) is made; what is not in it runs on W itself. `compute_dtype` is that of banks shorter
    than the weights. Each micro-batch, by its batch and its place in it, runs within `around`.
    Sums over the replicas go through `coded`, where stages share no parameter. Updates are clipped by `norms`
    where these have one: squares that are added up in another order may differ from ours in the last bit, and
    every weight with them. `after_step` may change the weights and the optimizers' state after each step.
    With `clips_apart` each stage's gradient is clipped by its own norm, against a share of the limit whose
    square is in proportion to the stage's elements.
    """
    learned = [name for name in weights if trainable is None or name in trainable]
    frozen = _cast({name: weights[name] for name in weights if name not in learned}, compute_dtype)
    model = _Model(stages, frozen, buffers or {}, loss_name, around)
    training = _Training({name: nn.Parameter(weights[name].detach().clone()) for name in learned}, factory)
    history = [training.weights()]
    trials: dict[Place, dict[str, Tensor]] = {}
    factor = 1.0
    updates: list[Update] = []
    for number, unit in enumerate(_units(rule, batches)):
        computed_on: dict[Place, dict[str, Tensor]] = {}
        for place in unit.places(len(stages)):
            version = history[_version(rule, number, place.stage, len(stages))]
            own = [name for name in stages[place.stage].parameters if name in learned]
            base = trials[place] if place in trials else {name: version[name] for name in own}
            computed_on[place] = _cast(base, compute_dtype)
        result = model.run(unit, computed_on)
        of_replicas: dict[int, Gradients] = {}
        for place, sums in result.sums.items():
            replica = 0 if coded is None else place.replica
            known = of_replicas.get(replica, dict.fromkeys(learned))
            of_replicas[replica] = _added(known, sums[-1].gradients)
        gradients = of_replicas.get(0, dict.fromkeys(learned))
        if coded is not None:
            gradients = coded.sum(unit.batch, of_replicas)
        norm = math.sqrt(sum(map(_square, gradients.values())))
        rate = lr_factor(unit.batch)
        trials = {}
        for place, sums in result.sums.items():
            count = (seen or {}).get((place.stage, unit.batch + 1)) if rule is Rule.FRESH else None
            if count is not None:
                tried = _tried(training, sums[:count], rate, factor)
                trials[place] = {name: tried[name] for name in computed_on[place]}
        is_skipped = not math.isfinite(norm) or not unit.microbatches
        if coded is not None:
            coded.settle(counts=not is_skipped)
        if not is_skipped:
            clipped = (norms or {}).get(number, norm)
            factor = _factor(clipped, clip_norm)
            factors = dict.fromkeys(gradients, factor)
            if clips_apart and clip_norm is not None:
                num_learned = sum(weights[name].numel() for name in learned)
                for stage in stages:
                    there = set(stage.parameters) & gradients.keys()
                    share = sum(weights[name].numel() for name in there) / num_learned
                    norm_there = math.sqrt(sum(_square(gradients[name]) for name in there))
                    factors |= dict.fromkeys(there, _factor(norm_there, clip_norm * math.sqrt(share)))
            training.step(gradients, rate, factors)
        with torch.no_grad():
            after_step(unit.batch, training.parameters, training.live_state())
        history.append(training.weights())
        updates.append(
            Update(
                batch=unit.batch,
                losses=tuple(result.losses),
                loss=result.loss,
                gradients=gradients,
                norm=norm,
                is_skipped=is_skipped,
                weights=training.weights(),
                optimizer_state=training.state(),
                computed_on=computed_on,
            )
        )
    return updates


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one update is made from: micro-batches by their place in the batch."""

    batch: int
    microbatches: dict[int, Microbatch]

    def places(self, num_stages: int) -> list[Place]:
        """Every copy of every stage, stage by stage."""
        replicas = sorted({microbatch.replica for microbatch in self.microbatches.values()})
        return [Place(replica, stage) for stage in range(num_stages) for replica in replicas]


def _units(rule: Rule, batches: Sequence[Sequence[Microbatch]]) -> Iterator[_Unit]:
    for batch, microbatches in enumerate(batches):
        if rule is not Rule.STASHED:
            yield _Unit(batch, dict(enumerate(microbatches)))
            continue
        of_replica: dict[int, list[int]] = {}
        for index, microbatch in enumerate(microbatches):
            of_replica.setdefault(microbatch.replica, []).append(index)
        for together in zip(*of_replica.values(), strict=True):
            yield _Unit(batch, {index: microbatches[index] for index in together})


def _version(rule: Rule, number: int, stage: int, num_stages: int) -> int:
    """How many updates are in the weights that update `number` is computed on, trial steps apart."""
    behind = {Rule.DELAYED: 1, Rule.STASHED: num_stages - 1 - stage}
    return max(number - behind.get(rule, 0), 0)


@dataclass(frozen=True, slots=True)
class _Sum:
    """Gradients of some micro-batches, and their share of the batch by weight."""

    share: float
    gradients: Gradients


@dataclass(slots=True)
class _Result:
    """What came of a unit; `sums` holds for each place the sum after each of its micro-batches."""

    sums: dict[Place, list[_Sum]]
    losses: list[float]
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class _Model:
    """All stages, run as one graph on leaves of each stage's own."""

    stages: Sequence[StageLike]
    frozen: Tensors
    buffers: Tensors
    loss_name: str
    around: Callable[[int, int], AbstractContextManager[object]]

    def run(self, unit: _Unit, weights: Mapping[Place, Tensors]) -> _Result:
        result = _Result({place: [] for place in weights}, [], 0.0 if unit.microbatches else math.nan)
        total = sum(microbatch.weight for microbatch in unit.microbatches.values())
        for index, microbatch in unit.microbatches.items():
            share = microbatch.weight / total
            places = [Place(microbatch.replica, stage) for stage in range(len(self.stages))]
            leaves = [{name: _leaf(tensor) for name, tensor in weights[place].items()} for place in places]
            values = dict(microbatch.inputs)
            with self.around(unit.batch, index):
                for stage, own in zip(self.stages, leaves, strict=True):
                    values.update(stage({**self.frozen, **own}, self.buffers, values))
                loss = values[self.loss_name]
                flat = [leaf for own in leaves for leaf in own.values()]
                seed = torch.full_like(loss, share)
                found = iter(torch.autograd.grad(loss, flat, seed, allow_unused=True))
            result.losses.append(float(loss.detach()))
            result.loss += share * result.losses[-1]
            for place, own in zip(places, leaves, strict=True):
                sums = result.sums[place]
                so_far = sums[-1] if sums else _Sum(0.0, dict.fromkeys(own))
                gradients: Gradients = {name: next(found) for name in own}
                sums.append(_Sum(so_far.share + share, _added(so_far.gradients, gradients)))
        return result


class _Training:
    """The weights and their optimizers, which can be deep-copied together."""

    def __init__(self, parameters: dict[str, nn.Parameter], factory: Factory) -> None:
        self.parameters = parameters
        made = factory([*parameters.items()])
        self.optimizers = [made] if isinstance(made, Optimizer) else list(made)
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def step(self, gradients: Gradients, lr_factor: float, factors: Mapping[str, float]) -> None:
        for name, parameter in self.parameters.items():
            gradient = gradients.get(name)
            # Fused steps of torch read a gradient in the order of its memory.
            parameter.grad = (
                None if gradient is None else (gradient.to(parameter.dtype) * factors[name]).contiguous()
            )
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * lr_factor
            optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        return copy.deepcopy(self.live_state())

    def live_state(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for optimizer in self.optimizers:
            for name, parameter in self.parameters.items():
                if optimizer.state.get(parameter):
                    found[name] = dict(optimizer.state[parameter])
        return found


def _tried(training: _Training, seen: Sequence[_Sum], rate: float, factor: float) -> dict[str, Tensor]:
    """What a step with the mean of the gradients seen would make of the weights; nothing changes.

    Gradients that are no numbers are not stepped with.
    """
    trial = copy.deepcopy(training)
    if seen and _is_finite(seen[-1].gradients):
        factors = dict.fromkeys(seen[-1].gradients, 1.0 / seen[-1].share * factor)
        trial.step(seen[-1].gradients, rate, factors)
    return trial.weights()


def _factor(norm: float, limit: float | None) -> float:
    """What brings a gradient of that norm down to the limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient)) ** 2


def _added(sums: Gradients, more: Gradients) -> Gradients:
    """Sums with more on top; None is nothing, not zero."""
    added = dict(sums)
    for name, gradient in more.items():
        known = added[name]
        added[name] = gradient if known is None else known if gradient is None else known + gradient
    return added


def _leaf(weight: Tensor) -> Tensor:
    """A leaf whose gradients have at least 32 bits."""
    leaf = weight.detach().clone().requires_grad_()
    if leaf.itemsize < torch.float32.itemsize:
        leaf.grad_dtype = torch.float32
    return leaf


def _cast(weights: Tensors, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
        for name, tensor in weights.items()
    }


def _is_finite(gradients: Gradients) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients.values())
