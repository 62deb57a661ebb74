"""How long units take: medians of many runs after some that do not count.

Units take turns, as they do in a real run: what one leaves in the processor's caches is not what it finds
when it runs again. Where several benches do not fit into memory together, fewer take turns.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time

import torch
from torch import Tensor

from bireme.devices import is_accelerator, mark, synchronize
from bireme.errors import BiremeError
from bireme.model.fused_operator import without_gradients
from bireme.model.graph import Graph, ModelState, Value, evaluate
from bireme.model.halves import backward_input
from bireme.model.stage import StageFunction
from bireme.profile.estimate import Seconds
from bireme.profile.optimizers import is_hidden_matrix

# For how long this thread has waited for a core while others had it: what is no part of its own work.
#
# Others are threads of this machine, or other machines whose host lends them its cores. It is asked around
# everything that is timed, so the files are read in the quickest way there is.

_SCHEDULER = "/proc/thread-self/schedstat"
"""Where Linux says for how long this thread has run and has waited, in nanoseconds."""

_PROCESSORS = "/proc/stat"
"""Where it says what all cores did, in hundredths of a second."""

_IDLE, _STOLEN, _NUM_STATES = (3, 4), 7, 8
"""Of the numbers there, which are of cores with nothing to do, and which of cores that the host took away."""

MOST_BYTES = 1024


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds so far: of this thread on a core and waiting for one; of all cores at work and taken away."""

    computed_s: float
    waited_s: float
    busy_s: float
    stolen_s: float

    def slowdown_since(self, before: "CoreTime", *, counts_waits: bool) -> float:
        """How much longer this thread's work took than it needed a core, 1 if it always had one; without
        `counts_waits` only because cores were taken away.
        """
        computed_s, busy_s = self.computed_s - before.computed_s, self.busy_s - before.busy_s
        waited_s = self.waited_s - before.waited_s if counts_waits else 0.0
        longer = waited_s / computed_s if computed_s > 0 else 0.0
        return 1.0 + longer + ((self.stolen_s - before.stolen_s) / busy_s if busy_s > 0 else 0.0)


def waited_s() -> float:
    """All waits of this thread so far; 0 where nobody says it."""
    try:
        return int(_read(_SCHEDULER).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def core_time() -> CoreTime | None:
    """What there is by now; None where nobody says it."""
    try:
        waits, cores = _read(_SCHEDULER).split(), _read(_PROCESSORS).split(b"\n", 1)[0].split()
        states = [int(one) / 100 for one in cores[1 : 1 + _NUM_STATES]]
        busy_s = sum(s for place, s in enumerate(states) if place not in (*_IDLE, _STOLEN))
        return CoreTime(thread_time(), int(waits[1]) / 1e9, busy_s, states[_STOLEN])
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """The begin of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, MOST_BYTES)
    finally:
        os.close(file)


# The workbench: some consecutive units with all they need to run, on numbers that mean nothing.
#
# It runs them as the engine does: parameters are arguments, gradients are accumulated into memory that is
# there already. Inside `fake_tensors` it holds no memory and shows what would be kept.

_DEVIATION = 0.02
"""Of weights: what a layer gives then is neither huge nor so small that arithmetic slows down."""

_PACKED_BYTE = 0x38
"""Each byte of a packed weight, whose values are then of about this deviation."""

LOSS = "loss"


@dataclass(eq=False)
class Workbench:
    """Runs units forward and backward, as often as one likes.

    `function` is theirs; `learned` are the values of the graph that a gradient comes back to. `examples` are
    inputs of the model, where there are some: their samples are used as often as the micro-batch needs. What
    else comes in is random; whole numbers are zero, which is a valid place in any table.
    """

    graph: Graph
    function: StageFunction
    learned: frozenset[str] = field(kw_only=True)
    batch: int = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    examples: Mapping[str, Tensor] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        graph, function, learned = self.graph, self.function, self.learned
        states, values = {one.name: one for one in (*graph.parameters, *graph.buffers)}, graph.values
        is_meta = self.device.type == "meta"
        self._generator = None if is_meta else torch.Generator(self.device).manual_seed(0)
        self.parameters = {name: self._parameter(states[name]) for name in function.parameters}
        self.buffers = {name: self._buffer(states[name]) for name in function.buffers}
        self.received = {
            name: self._value(values[name]).requires_grad_(name in learned) for name in function.receives
        }
        own = {name: self._input(values[name], self.examples) for name in function.inputs}
        self.given = {**own, **self.received}
        names = [output.name for output in graph.outputs]
        learns_from = [LOSS] if LOSS in names else names
        self.roots = tuple(
            dict.fromkeys((*function.sends, *(n for n in learns_from if n in function.outputs)))
        )
        self._output_gradients: dict[str, Tensor] = {}

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that get a gradient."""
        return [tensor for tensor in self.parameters.values() if tensor.requires_grad]

    def forward(self) -> dict[str, Tensor]:
        """Run the units."""
        return self.function(self.parameters, self.buffers, self.given, device=self.device)

    def backward(self, roots: Mapping[str, Tensor]) -> None:
        """Bring gradients from the differentiable results back to parameters and to what was received."""
        if roots:
            torch.autograd.backward(list(roots.values()), self.output_gradients(roots))
        for tensor in self.received.values():
            tensor.grad = None

    def differentiable(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results that get a gradient from outside: what is sent, and the loss."""
        return {name: results[name] for name in self.roots if results[name].requires_grad}

    def output_gradients(self, roots: Mapping[str, Tensor]) -> list[Tensor]:
        """A gradient for each of them; always the same ones, so that making them costs no time later."""
        for name, root in roots.items():
            if name not in self._output_gradients:
                self._output_gradients[name] = torch.ones_like(root, requires_grad=False)
        return [self._output_gradients[name] for name in roots]

    def _parameter(self, state: ModelState) -> Tensor:
        dtype = getattr(torch, state.dtype)
        if len(state.shape) > 1 and dtype.is_floating_point:
            tensor = self._random(state.shape, dtype).mul_(_DEVIATION)
        else:
            fill = 1 if state.packed is None else _PACKED_BYTE
            tensor = torch.full(state.shape, fill, dtype=dtype, device=self.device)
        if state.trainable:
            tensor.requires_grad_()
            if dtype.itemsize < torch.float32.itemsize:
                tensor.grad_dtype = torch.float32
            tensor.grad = torch.zeros_like(tensor, dtype=tensor.grad_dtype, requires_grad=False)
        return tensor

    def _buffer(self, state: ModelState) -> Tensor:
        dtype = getattr(torch, state.dtype)
        fill = torch.ones if dtype.is_floating_point or dtype is torch.bool else torch.zeros
        return fill(state.shape, dtype=dtype, device=self.device)

    def _value(self, value: Value) -> Tensor:
        shape = tuple(evaluate(length, self.batch) for length in value.shape)
        dtype = getattr(torch, value.dtype)
        if dtype.is_floating_point:
            return self._random(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _input(self, value: Value, examples: Mapping[str, Tensor] | None) -> Tensor:
        example = examples.get(value.name) if examples is not None else None
        if example is None or example.is_meta or not value.shape:
            return self._value(value)
        given = example.to(self.device)
        return given[torch.arange(self.batch, device=self.device) % len(given)]

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device, generator=self._generator)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: `num_warmup` rounds that do not count, then between `num_least` and `num_most`
    rounds, which end after `seconds_per_unit` for each unit. If rounds take much longer, fewer are enough.
    """

    num_warmup: int = 2
    num_least: int = 7
    num_most: int = 60
    seconds_per_unit: float = 0.7

    def __post_init__(self) -> None:
        if self.num_least < 3 or self.num_most < self.num_least or self.num_warmup < 1:
            raise BiremeError("Measure at least three rounds, after at least one that does not count.")
        if not self.seconds_per_unit > 0:
            raise BiremeError(f"A unit is measured for {self.seconds_per_unit} s; it must be more than 0.")


_FEWEST, _LONG = 3, 2.0
"""If rounds have taken twice the limit, three are enough: long ones vary little."""

BRIEF = Effort(num_warmup=1, num_least=3, num_most=9, seconds_per_unit=0.05)
"""For what is over soon: medians of a few rounds, which may be several per cent off."""


def time_benches(
    benches: Sequence[Workbench],
    effort: Effort,
    *,
    halves: bool,
    tick: Callable[[float], None] = lambda done: None,
) -> list[Seconds]:
    """Measure some benches in turns; `tick` is told after every round which part is done."""
    stopwatches = [_Stopwatch(bench, halves) for bench in benches]
    limit_s, started = effort.seconds_per_unit * len(benches), perf_counter()
    for _ in range(effort.num_warmup):
        for stopwatch in stopwatches:
            stopwatch.run()
        if perf_counter() - started > limit_s:
            break
    for stopwatch in stopwatches:
        stopwatch.laps.clear()
    started = perf_counter()
    for done in range(effort.num_most):
        late = (perf_counter() - started) / limit_s
        tick(max(done / effort.num_most, min(done / effort.num_least, late, 1.0)))
        if late > 1 and done >= (_FEWEST if late > _LONG else effort.num_least):
            break
        for stopwatch in stopwatches:
            stopwatch.run()
    return [stopwatch.seconds() for stopwatch in stopwatches]


def time_update(bench: Workbench, optimizer: str, num_rounds: int = 5) -> float:
    """The median of an optimizer's steps on a bench's parameters.

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
        clock = _clock_of(bench.device)
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
    return statistics.median(_seconds_of(laps[1:], bench.device))


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
        """The seconds since the last lap, without those in which others had the core."""
        synchronize(self.device)
        now_s, computed_s, all_waited_s = perf_counter(), thread_time(), waited_s()
        took_s = computed_s - self._computed_s
        if not self._is_alone:
            took_s = max(took_s, now_s - self._before_s - (all_waited_s - self._waited_s))
        self._waited_s, self._computed_s, self._before_s = all_waited_s, thread_time(), perf_counter()
        return took_s


class _DeviceClock:
    """Measures stretches of time on an accelerator by marks in its stream.

    The host goes on meanwhile and is ahead of the device, as in a run: what work takes there is what the
    device takes, and only if that is less than the host takes to ask for it, what the host takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last = mark(device)

    def lap(self) -> "_Stretch":
        """The stretch since the last lap; how long it was is known once the device is there."""
        before, self._last = self._last, mark(self.device)
        return _Stretch(before, self._last)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From one mark in an accelerator's stream to another."""

    begin: torch.Event
    end: torch.Event


def _clock_of(device: torch.device) -> Clock | _DeviceClock:
    """What measures work on a device."""
    return _DeviceClock(device) if is_accelerator(device) else Clock(device)


def _seconds_of(laps: Sequence[float | _Stretch], device: torch.device) -> list[float]:
    """How long laps took, once the device has done what it was given."""
    synchronize(device)
    return [lap if isinstance(lap, float) else lap.begin.elapsed_time(lap.end) / 1e3 for lap in laps]


@dataclass(slots=True, eq=False)
class _Stopwatch:
    """Runs one bench and keeps how long each part took."""

    bench: Workbench
    halves: bool
    laps: dict[str, list[float | _Stretch]] = field(default_factory=dict)

    def run(self) -> None:
        bench = self.bench
        clock = _clock_of(bench.device)
        results = bench.differentiable(bench.forward())
        self._note("forward", clock)
        bench.backward(results)
        del results
        self._note("backward", clock)
        with without_gradients():  # as a stage that recomputes runs the first of its two forwards
            first = bench.forward()
        self._note("again", clock)
        del first
        if self.halves:
            self._run_halves(clock)

    def _run_halves(self, clock: Clock | _DeviceClock) -> None:
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

    def _note(self, what: str, clock: Clock | _DeviceClock) -> None:
        self.laps.setdefault(what, []).append(clock.lap())

    def seconds(self) -> Seconds:
        took = {what: _seconds_of(laps, self.bench.device) for what, laps in self.laps.items()}
        middle = {what: statistics.median(seconds) for what, seconds in took.items()}
        whole = [f + b for f, b in zip(took["forward"], took["backward"], strict=True)]
        recomputed = [again + b for again, b in zip(took["again"], took["backward"], strict=True)]
        quarters = statistics.quantiles(whole, n=4)
        return Seconds(
            forward_s=middle["forward"],
            backward_s=middle["backward"],
            recompute_backward_s=statistics.median(recomputed),
            backward_input_s=middle.get("input"),
            backward_weight_s=middle.get("weight"),
            spread=(quarters[2] - quarters[0]) / statistics.median(whole),
        )
