"""Training by an update rule in one process, exactly as a pipeline would, but for the order of sums.

The micro-batches of a batch run together as far as nobody can tell. What stages have summed when they begin
the next batch is kept apart on the way (`divided`). All weights are parts of one long tensor, in the order of
the stages, so that a version is one copy and a stage a slice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.delay_study.divided import Divided
from benchmarks.delay_study.rules import ClipsBy, Rest, RunsOn, UpdateRule
from bireme.errors import BiremeError
from bireme.model.gpt import GPT
from bireme.runtime.stepper import OptimizerFactory, Stepper
from bireme.runtime.trial import Trials
from bireme.sync.exchange import squared_norm

__all__ = ["Pipelining", "Simulation", "stage_of_half", "stage_of_parameter"]


@dataclass(frozen=True, slots=True)
class Pipelining:
    """How deep the pipeline is, in how many micro-batches a batch comes, and in what its banks are.

    With a lookahead the first stage runs so many forwards further ahead, and the others in proportion.
    """

    num_stages: int
    num_microbatches: int
    bank_dtype: torch.dtype | None = None
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.num_microbatches < self.num_stages:
            raise BiremeError(
                f"{self.num_microbatches} micro-batches cannot keep {self.num_stages} stages busy without a "
                "flush: two versions of the weights do not suffice. Take as many as stages, or more."
            )

    def unseen(self, stage: int) -> int:
        """How many micro-batches of a batch a stage still waits for when it begins the next one."""
        behind = self.num_stages - 1 - stage
        further = -(-self.lookahead * behind // max(self.num_stages - 1, 1))
        return min(behind + further, self.num_microbatches)

    @property
    def num_early(self) -> int:
        """After how many micro-batches of a batch all stages have the whole gradient of the one before.

        The first stage is the last to have it. One more is the time to agree on its norm.
        """
        return min(self.unseen(0) + 1, self.num_microbatches)


def stage_of_parameter(name: str, num_layers: int, num_stages: int) -> int:
    """The stage of a GPT's parameter where every stage has as many half-layers, as far as that goes."""
    parts = name.split(".")
    halves = 2 * num_layers
    if parts[0] == "layers":
        half = 2 * int(parts[1]) + parts[2].startswith("feed_forward")
    else:
        half = 0 if parts[0] in ("tokens", "positions") else halves - 1
    return stage_of_half(half, num_layers, num_stages)


def stage_of_half(half: int, num_layers: int, num_stages: int) -> int:
    """The stage of a half-layer, counted from the first."""
    return half * num_stages // (2 * num_layers)


class Simulation:
    """A model in training by a rule. The model is taken over: its weights are those of the last batch run.

    Parameters must be in the order of their stages. `num_batches` is how long the run will be, of which a
    rule may take a share to warm up.
    """

    def __init__(
        self,
        model: GPT,
        rule: UpdateRule,
        pipelining: Pipelining,
        factory: OptimizerFactory,
        *,
        num_batches: int,
        clip_norm: float | None = None,
        lr_factor: Callable[[int], float] = lambda _batch: 1.0,
    ) -> None:
        self.model = model
        self.rule = rule
        self.pipelining = pipelining
        self.clip_norm = clip_norm
        self.lr_factor = lr_factor
        self.num_synchronous = round(rule.warm_up * num_batches)
        self.batch = 0
        self.scale = 1.0
        self.squares: list[float] = []
        """Of the norms of the stages' gradients in the last batch, if the rule uses them."""
        first = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        bank_dtype = pipelining.bank_dtype or first.dtype
        model.to(bank_dtype)
        self.layout = _Layout(model, pipelining.num_stages)
        self.newest = self.layout.vector(first.float() if bank_dtype.itemsize < 4 else first)
        self.older = self.newest.copied()
        self.oldest = self.newest.copied()
        self.used = self.layout.vector(first.to(bank_dtype, copy=True))
        self.gradient = self.layout.vector(torch.zeros_like(self.newest.whole))
        self.last_gradient = self.gradient.copied()
        self.seen = self.layout.vector(torch.zeros_like(self.newest.whole))
        self.last_step: Tensor | None = None
        self.stepper = Stepper(self.newest.parts, factory)
        self.trials = Trials(self.stepper)
        for name, parameter in model.named_parameters():
            parameter.data = self.used.parts[name]
            parameter.grad_dtype = self.newest.whole.dtype
        self.divided: Divided | None = None
        # In short banks each micro-batch's gradient is rounded by itself.
        if rule.depends_on_stages and not rule.switches and bank_dtype.itemsize >= 4:
            self.divided = Divided(model, self.seen.parts, self._num_seen)

    def train(self, input_ids: Tensor) -> float:
        """Run a batch and make the update that it gives; its loss, which is not finite if it diverged."""
        self._choose_weights()
        loss = self._run(input_ids)
        norm = math.sqrt(squared_norm([*self.gradient.parts.values()]))
        if norm == norm and norm != float("inf"):
            self._try()
            before, self.scale = self.scale, self._scale_to(norm)
            self._step(self._scales(before))
            self.batch += 1
            return loss
        return float("nan")

    @torch.no_grad()
    def loss_on_newest(self, input_ids: Tensor) -> float:
        """The loss of the newest weights, as in the banks."""
        kept = self.used.whole.clone()
        self.used.whole.copy_(self.newest.whole)
        losses = [float(self.model(part, part)["loss"]) * len(part) for part in torch.split(input_ids, 64)]
        self.used.whole.copy_(kept)
        return sum(losses) / len(input_ids)

    def weights(self) -> Mapping[str, Tensor]:
        """W, by the parameters' names. Not copies."""
        return self.newest.parts

    def _is_current(self, batch: int) -> bool:
        """Whether a batch runs on W of its own: the first ones do, and the first of a pipeline that fills."""
        return self.rule.runs_on is RunsOn.NEWEST or batch <= self.num_synchronous

    @torch.no_grad()
    def _choose_weights(self) -> None:
        if self._is_current(self.batch):
            self.used.whole.copy_(self.newest.whole)
        elif self.rule.runs_on is RunsOn.OLDER:
            self.used.whole.copy_(self.older.whole)
        elif self.rule.runs_on is RunsOn.REPEATED:
            self.used.whole.copy_(2 * self.older.whole - self.oldest.whole)
        # What is tried was written by the batch before, when its gradients came in.

    def _run(self, input_ids: Tensor) -> float:
        """Leave the batch's gradient, and in `seen` the mean of what each stage has at its next batch."""
        self.gradient.whole.zero_()
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.gradient.parts[name]
        microbatches = input_ids.chunk(self.pipelining.num_microbatches)
        loss = 0.0
        if self.divided is not None:
            is_tried = not self._is_current(self.batch + 1)
            self.divided.begin(len(input_ids) if is_tried else None)
        for begin, end in pairwise(self._groups()):
            if self.rule.switches and begin == self.pipelining.num_early:
                with torch.no_grad():
                    self.used.whole.copy_(self.newest.whole)
            together = torch.cat(microbatches[begin:end])
            share = len(together) / len(input_ids)
            found = self.model(together, together)["loss"]
            found.backward(torch.full_like(found, share))
            loss += share * float(found.detach())
            for stage in range(self.pipelining.num_stages):
                if end == self.pipelining.num_microbatches - self.pipelining.unseen(stage):
                    part = self.layout.stages[stage]
                    self.seen.whole[part] = self.gradient.whole[part]
        if self.divided is not None:
            self.divided.end()
        return loss

    def _num_seen(self, name: str, num_samples: int) -> int:
        """Of how many of the first samples of a batch a parameter's stage has gradients at the next one."""
        layers, stages = self.model.config.layers, self.pipelining.num_stages
        unseen = self.pipelining.unseen(stage_of_parameter(name, layers, stages))
        return num_samples * (self.pipelining.num_microbatches - unseen) // self.pipelining.num_microbatches

    def _groups(self) -> Sequence[int]:
        """Where groups of micro-batches begin and end that may run together."""
        count, num_stages = self.pipelining.num_microbatches, self.pipelining.num_stages
        if self.used.whole.itemsize < 4:
            return range(count + 1)
        bounds = {0, count}
        if self.rule.depends_on_stages and self.divided is None:
            bounds |= {count - self.pipelining.unseen(stage) for stage in range(num_stages)}
        if self.rule.switches:
            bounds.add(self.pipelining.num_early)
        return sorted(bounds)

    @torch.no_grad()
    def _try(self) -> None:
        """Write what the next batch runs on, where that is a trial step from W."""
        if self.rule.runs_on is not RunsOn.TRIED or self._is_current(self.batch + 1):
            return
        for stage, part in enumerate(self.layout.stages):
            unseen = self.pipelining.unseen(stage) / self.pipelining.num_microbatches
            known = self.seen.whole[part]
            if not self.rule.sees:
                unseen = 1.0
                known.zero_()
            weight = 1.0
            if self.rule.rest is Rest.MEAN and unseen < 1.0:
                weight = 1.0 / (1.0 - unseen)
            elif self.rule.rest is Rest.LAST:
                known.add_(self.last_gradient.whole[part], alpha=unseen)
            known.mul_(weight * self.scale)
        self.trials.make(
            self.newest.parts,
            self.used.parts,
            self.seen.parts,
            lr_factor=self.lr_factor(self.batch),
            factor=1.0,
        )

    def _scale_to(self, norm: float) -> float:
        """The factor that brings a gradient of that norm down to the limit."""
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))

    def _scales(self, before: float) -> list[float]:
        """The factor of each stage's gradient, after `before` in the batch before."""
        num_stages = self.pipelining.num_stages
        if self.rule.clips_by is ClipsBy.WHOLE:
            return [self.scale] * num_stages
        squares = [squared_norm([self.gradient.whole[part]]) for part in self.layout.stages]
        last, self.squares = self.squares, squares
        found = []
        for stage, (part, square) in enumerate(zip(self.layout.stages, squares, strict=True)):
            if self.rule.clips_by is ClipsBy.OWN:
                share = (part.stop - part.start) / len(self.gradient.whole)
                found.append(self._scale_to(math.sqrt(square / share)))
            elif not stage:
                found.append(self.scale)
            elif self.rule.clips_by is ClipsBy.BEFORE:
                found.append(before)
            else:
                beyond = sum(last) / sum(last[stage:]) if last else 1.0
                found.append(self._scale_to(math.sqrt(beyond * sum(squares[stage:]))))
        return found

    @torch.no_grad()
    def _step(self, scales: Sequence[float]) -> None:
        self.oldest.whole.copy_(self.older.whole)
        self.older.whole.copy_(self.newest.whole)
        if self.rule.rest is Rest.LAST:
            self.last_gradient.whole.copy_(self.gradient.whole)
        for part, scale in zip(self.layout.stages, scales, strict=True):
            self.gradient.whole[part].mul_(scale)
        self.stepper.step(self.newest.parts, self.gradient.parts, lr_factor=self.lr_factor(self.batch))
        if self.rule.feedback:
            self._feed_back()

    def _feed_back(self) -> None:
        """Add to the step made just now its difference to the one before, by how late it came."""
        step = self.newest.whole - self.older.whole
        if self.last_step is not None and not self._is_current(self.batch):
            difference = step - self.last_step
            for stage, part in enumerate(self.layout.stages):
                late = 1.0
                if self.rule.depends_on_stages:
                    late = self.pipelining.unseen(stage) / self.pipelining.num_microbatches
                self.newest.whole[part] += self.rule.feedback * late * difference[part]
        self.last_step = step


@dataclass(frozen=True, slots=True)
class _Vector:
    """A long tensor and the parameters that are parts of it."""

    whole: Tensor
    parts: dict[str, Tensor]
    shapes: Mapping[str, torch.Size]

    def copied(self) -> "_Vector":
        return _vector(self.whole.clone(), self.shapes)


def _vector(whole: Tensor, shapes: Mapping[str, torch.Size]) -> _Vector:
    pieces = torch.split(whole, [shape.numel() for shape in shapes.values()])
    named = zip(shapes.items(), pieces, strict=True)
    return _Vector(whole, {name: piece.view(shape) for (name, shape), piece in named}, shapes)


class _Layout:
    """Where in a long tensor each parameter lies, and each stage."""

    def __init__(self, model: GPT, num_stages: int) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.stages = tuple(self._stages(model.config.layers, num_stages))

    def vector(self, whole: Tensor) -> _Vector:
        return _vector(whole, self.shapes)

    def _stages(self, num_layers: int, num_stages: int) -> Iterator[slice]:
        ends = [0] * num_stages
        place, last = 0, 0
        for name, shape in self.shapes.items():
            stage = stage_of_parameter(name, num_layers, num_stages)
            if stage < last:
                raise BiremeError(
                    f"The parameter {name} is of stage {stage}, but comes after one of stage {last}. "
                    "A GPT with a head of its own has them in order: set tied to False."
                )
            place, last = place + shape.numel(), stage
            ends[stage] = place
        for begin, end in pairwise([0, *ends]):
            yield slice(begin, max(begin, end))
