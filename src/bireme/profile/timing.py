"""How long units take: medians of many runs after some that do not count.

Units take turns, as they do in a real run: what one leaves in the processor's caches is not what it finds
when it runs again. Where several benches do not fit into memory together, fewer take turns.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time

import torch
from torch import Tensor

from bireme.devices import synchronize
from bireme.errors import BiremeError
from bireme.model.halves import backward_input
from bireme.profile.optimizers import is_hidden_matrix
from bireme.profile.waits import waited_s
from bireme.profile.workbench import Workbench

__all__ = ["BRIEF", "Effort", "Seconds", "time_benches", "time_update"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to measure: rounds that do not count, then at least and at most so many, and a limit."""

    num_warmup: int = 2
    num_least: int = 7
    num_most: int = 60
    seconds_per_unit: float = 0.7

    def __post_init__(self) -> None:
        if self.num_least < 3 or self.num_most < self.num_least or self.num_warmup < 1:
            raise BiremeError("Measure at least three rounds, after at least one that does not count.")
        if not self.seconds_per_unit > 0:
            raise BiremeError(f"A unit is measured for {self.seconds_per_unit} s; it must be more than 0.")


BRIEF = Effort(num_warmup=1, num_least=3, num_most=9, seconds_per_unit=0.05)
"""For what is over soon: medians of a few rounds, which may be several per cent off."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The medians of one bench, and how far its measurements of forward and backward lie apart."""

    forward_s: float
    backward_s: float
    recompute_backward_s: float
    backward_input_s: float | None
    backward_weight_s: float | None
    spread: float


def time_benches(
    benches: Sequence[Workbench],
    effort: Effort,
    *,
    halves: bool,
    tick: Callable[[float], None] = lambda done: None,
) -> list[Seconds]:
    """Measure some benches in turns; `tick` is told after every round which part is done."""
    stopwatches = [_Stopwatch(bench, halves=halves) for bench in benches]
    for _ in range(effort.num_warmup):
        for stopwatch in stopwatches:
            stopwatch.run()
    for stopwatch in stopwatches:
        stopwatch.laps.clear()
    started = perf_counter()
    for done in range(effort.num_most):
        late = (perf_counter() - started) / (effort.seconds_per_unit * len(benches))
        tick(max(done / effort.num_most, min(done / effort.num_least, late, 1.0)))
        if done >= effort.num_least and late > 1:
            break
        for stopwatch in stopwatches:
            stopwatch.run()
    return [stopwatch.seconds() for stopwatch in stopwatches]


def time_update(bench: Workbench, optimizer: str, num_rounds: int = 5) -> float:
    """The median of an optimiser's steps on a bench's parameters.

    The first, which makes its state, is left out. Weights of sixteen bits are stepped as float32 copies, and
    copied back.
    """
    trainable = {name: weight for name, weight in bench.parameters.items() if weight.requires_grad}
    if not trainable:
        return 0.0
    weights = list(trainable.values())
    stepped = [weight.detach().float() if weight.element_size() == 2 else weight for weight in weights]
    optimizers = _optimizers(optimizer, dict(zip(trainable, stepped, strict=True)))
    laps = []
    for _ in range(1 + num_rounds):
        clock = Clock(bench.device)
        for own, weight in zip(stepped, weights, strict=True):
            if own is not weight and weight.grad is not None:
                own.grad = weight.grad.float()
        for one in optimizers:
            one.step()
        with torch.no_grad():
            for own, weight in zip(stepped, weights, strict=True):
                if own is not weight:
                    weight.copy_(own)
        laps.append(clock.lap())
    return statistics.median(laps[1:])


def _optimizers(name: str, weights: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
    """What steps these weights under that name, as the engine does it, without changing them for good."""
    if name == "sgd":
        return [torch.optim.SGD(weights.values(), lr=0.0, momentum=0.9, fused=True)]
    if name == "adam":
        return [torch.optim.Adam(weights.values(), lr=0.0, fused=True)]
    hidden = {key for key, weight in weights.items() if name == "muon" and is_hidden_matrix(key, weight.ndim)}
    rest = [weight for key, weight in weights.items() if key not in hidden]
    found: list[torch.optim.Optimizer] = []
    if hidden:
        found.append(torch.optim.Muon([weights[key] for key in sorted(hidden)], lr=0.0))
    if rest:
        found.append(torch.optim.AdamW(rest, lr=0.0, fused=True))
    return found


class Clock:
    """Measures stretches of time up to when the device has done what it was given.

    Time in which others had the core is left out: a profile tells what the work takes. Where this thread does
    all of it, that is for how long it has computed. Where others help, its waits are taken away, which may be
    counted a lap late; so a lap takes no less than this thread has computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._waited_s = waited_s()
        self._computed_s, self._before_s = thread_time(), perf_counter()

    def lap(self) -> float:
        synchronize(self.device)
        now_s, computed_s, all_waited_s = perf_counter(), thread_time(), waited_s()
        took_s = computed_s - self._computed_s
        if not self._is_alone:
            took_s = max(took_s, now_s - self._before_s - (all_waited_s - self._waited_s))
        self._waited_s, self._computed_s, self._before_s = all_waited_s, thread_time(), perf_counter()
        return took_s


class _Stopwatch:
    """Runs one bench and keeps how long each part took."""

    def __init__(self, bench: Workbench, *, halves: bool) -> None:
        self.bench = bench
        self.halves = halves
        self.laps: dict[str, list[float]] = {}

    def run(self) -> None:
        bench = self.bench
        clock = Clock(bench.device)
        results = bench.differentiable(bench.forward())
        self._note("forward", clock)
        bench.backward(results)
        del results
        self._note("backward", clock)
        bench.backward(bench.differentiable(bench.forward()))
        self._note("recompute_backward", clock)
        if self.halves:
            self._run_halves(clock)

    def _run_halves(self, clock: Clock) -> None:
        bench = self.bench
        roots = bench.differentiable(bench.forward())
        gradients: list[Tensor | None] = list(bench.output_gradients(roots))
        received = [tensor for tensor in bench.received.values() if tensor.requires_grad]
        clock.lap()
        rest = backward_input(list(roots.values()), gradients, received, bench.trainable)
        self._note("input", clock)
        for parameter, gradient in zip(bench.trainable, rest.weight_gradients(), strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
        self._note("weight", clock)

    def _note(self, what: str, clock: Clock) -> None:
        self.laps.setdefault(what, []).append(clock.lap())

    def seconds(self) -> Seconds:
        middle = {what: statistics.median(laps) for what, laps in self.laps.items()}
        whole = [f + b for f, b in zip(self.laps["forward"], self.laps["backward"], strict=True)]
        quarters = statistics.quantiles(whole, n=4)
        return Seconds(
            forward_s=middle["forward"],
            backward_s=middle["backward"],
            recompute_backward_s=middle["recompute_backward"],
            backward_input_s=middle.get("input"),
            backward_weight_s=middle.get("weight"),
            spread=(quarters[2] - quarters[0]) / statistics.median(whole),
        )
