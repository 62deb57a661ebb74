"""How much is measured: which shapes, how many batches and rounds, and what besides the shapes."""

import ctypes
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.chain import chain, chain_resolver
from bireme.model.graph import Graph
from bireme.model.stage import Resolve

if TYPE_CHECKING:
    from rich.console import Console


# What is quoted of a figure that was measured several times: its median, and how far it went.


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(figures: Iterable[float]) -> "Spread":
        """Of at least one figure."""
        found = list(figures)
        return Spread(statistics.median(found), min(found), max(found))

    def show(self, form: str) -> str:
        """Such as `1.97 (1.91 to 2.02)`."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.greatest:{form}})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Theirs over ours, round by round: more than one says that ours took less."""
    return Spread.of(their / our for our, their in zip(ours, theirs, strict=True))


# What measurements promise: figures with their limits, whether these are kept, and how they are shown.
#
# A shared machine breaks promises too. A broken one is the machine's if the best round keeps it, or if other
# programs had more than 5 % of the cores meanwhile; else it is Bireme's. A count is Bireme's in any case.


class _Bound(StrEnum):
    """How a value must lie to its limit."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EXACTLY = "exactly"


class Cause(StrEnum):
    """Why a value misses its limit."""

    MACHINE = "machine"
    BIREME = "bireme"


_MOST_OTHERS = 0.05
"""Share of the cores that other programs may have while something is timed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure that was promised: its limit, what was found, and whether that is enough.

    `best` is the figure of the best round; `others_share` the share of the cores that other programs had
    while it was measured. Both are None if they are not known.
    """

    name: str
    value: float
    bound: _Bound
    limit: float
    best: float | None = None
    others_share: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the promise is kept; a value that is no number keeps none."""
        return self._is_kept_by(self.value)

    @property
    def cause(self) -> Cause | None:
        """Why the promise is broken; None if it is kept, or if nothing is known of the machine."""
        is_count = self.bound is _Bound.EXACTLY
        if self.ok or (self.best is None and self.others_share is None and not is_count):
            return None
        is_machine = self._is_kept_by_best or self._is_busy
        return Cause.MACHINE if is_machine and not is_count else Cause.BIREME

    @property
    def reason(self) -> str:
        """The cause in words, with the figures that it follows from."""
        best = None if self.best is None else f"the best round has {shown(self.best)}"
        others = None
        if self.others_share is not None:
            others = f"other programs had {self.others_share:.0%} of the cores"
        if self.cause is Cause.MACHINE:
            return f"The machine: {best if self._is_kept_by_best else others}."
        figures = ", ".join(filter(None, (best, others)))
        return f"Bireme: {figures}." if figures else "Bireme: a count does not depend on the machine."

    @property
    def _is_kept_by_best(self) -> bool:
        return self.best is not None and self._is_kept_by(self.best)

    @property
    def _is_busy(self) -> bool:
        return self.others_share is not None and self.others_share > _MOST_OTHERS

    def _is_kept_by(self, value: float) -> bool:
        if self.bound is _Bound.AT_MOST:
            return value <= self.limit
        return value >= self.limit if self.bound is _Bound.AT_LEAST else value == self.limit


def at_most(
    name: str, value: float, limit: float, best: float | None = None, others_share: float | None = None
) -> Verdict:
    """A value that must not be above its limit."""
    return Verdict(name, value, _Bound.AT_MOST, limit, best, others_share)


def at_least(
    name: str, value: float, limit: float, best: float | None = None, others_share: float | None = None
) -> Verdict:
    """A value that must not be below its limit."""
    return Verdict(name, value, _Bound.AT_LEAST, limit, best, others_share)


def exactly(name: str, value: float, limit: float) -> Verdict:
    """A value that must be what was said."""
    return Verdict(name, value, _Bound.EXACTLY, limit)


def resident_bytes(field: str) -> int:
    """Of this process, as Linux tells it: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def verdict_documents(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as plain data; broken ones have a `cause` if it is known."""
    return [
        {"name": one.name, "limit": one.limit, "value": one.value, "ok": one.ok}
        | ({} if one.cause is None else {"cause": one.cause})
        for one in verdicts
    ]


def print_verdicts(verdicts: Sequence[Verdict], console: "Console") -> None:
    """Each with the cause if it is broken, and how many the machine broke."""
    from rich.markup import escape

    for one in verdicts:
        sign = "[green]✓[/green]" if one.ok else "[red]✗[/red]"
        text = f"{one.name}: {shown(one.value)} ({one.bound} {shown(one.limit)})"
        console.print(f"{sign} {escape(text)}", highlight=False)
        if one.cause is not None:
            console.print(f"  {one.reason}", highlight=False)
    num_broken = sum(not one.ok for one in verdicts)
    if num_machine := sum(one.cause is Cause.MACHINE for one in verdicts):
        console.print(
            f"{num_machine} of {num_broken} ✗ are the machine's: repeat them when no other program runs.",
            highlight=False,
        )


def shown(value: object) -> str:
    """A figure in few letters."""
    if isinstance(value, Spread):
        return f"{shown(value.median)} ({shown(value.least)} to {shown(value.greatest)})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)


# Emulated devices: stages that sleep where they would compute, with real tensors, gradients and weights.
#
# Many ranks of them run on few cores, so what is measured is what a pipeline runtime answers for: order,
# overlap and waiting. The same modules run here and in torch's runtime.

FEATURES = 4096
"""Of a sample: 16 KiB in float32."""

_WAKING_S = 1.5e-4
"""How long before the end of its time an emulated device wakes up."""

_HANDOVER_S = 1e-3
"""How soon work must follow on the last to be one piece with it for the device."""

INPUT = "given"


@dataclass(frozen=True, slots=True)
class StagePace:
    """How long a stage takes for a micro-batch. Half of the backward is for the gradient of its input."""

    forward_s: float
    backward_s: float

    @property
    def whole_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s

    def cut(self, pieces: int) -> "StagePace":
        """Of one of several stages that share the work of this one."""
        return StagePace(self.forward_s / pieces, self.backward_s / pieces)


@dataclass(slots=True)
class _Backward:
    """The backward of one micro-batch: until when its device has had work."""

    end_s: float = 0.0

    def begin_s(self) -> float:
        """When the next part of it begins: now, or where the last one ended if that was just now.

        What torch does between two parts of one backward is its own; the device would have had both.
        """
        now = time.perf_counter()
        return self.end_s if now - self.end_s < _HANDOVER_S else now


class _Work(torch.autograd.Function):
    """The forward of a stage, and the half of its backward that the stage before waits for."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, pace: StagePace, begin_s: float, backward: _Backward) -> Tensor:
        ctx.pace, ctx.backward = pace, backward
        made = given.clone()
        _wait_until(begin_s + pace.forward_s)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.backward.end_s = time.perf_counter() + ctx.pace.backward_s / 2
        made = gradients[0].clone()
        _wait_until(ctx.backward.end_s)
        return made, None, None, None


class _Weight(torch.autograd.Function):
    """The other half of the backward. `ballast` has a gradient too, so that there is much to sum up."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ballast: Tensor, pace: StagePace, backward: _Backward) -> Tensor:
        ctx.pace, ctx.backward = pace, backward
        ctx.ballast_shape = ballast.shape
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end_s = ctx.backward.begin_s() + ctx.pace.backward_s / 2
        ballast = torch.full(ctx.ballast_shape, 1e-6)
        _wait_until(end_s)
        return gradients[0], ballast, None, None


def sharpen_sleeps() -> None:
    """Let this thread's sleeps end when they should; Linux lets them be 50 µs late to wake up less often."""
    if sys.platform == "linux":
        set_timer_slack, one_nanosecond = 29, 1
        ctypes.CDLL(None).prctl(set_timer_slack, one_nanosecond, 0, 0, 0)


def _wait_until(end_s: float) -> None:
    """Sleep, and be awake for the very end.

    A process that has slept runs its next lines many times slower, and sleeps end late. A rank whose device
    computes has neither: it is awake before the device is done.
    """
    rest_s = end_s - time.perf_counter() - _WAKING_S
    if rest_s > 0:
        time.sleep(rest_s)
    awake = torch.zeros(8)
    while time.perf_counter() < end_s:
        awake.add_(1.0)


class EmulatedStage(nn.Module):
    """A stage that takes its time. The first one has an anchor, as nothing that comes into it learns."""

    def __init__(self, pace: StagePace, *, is_first: bool, num_ballast: int = 1) -> None:
        super().__init__()
        self.pace = pace
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.ballast = nn.Parameter(torch.zeros(num_ballast))
        self.anchor = nn.Parameter(torch.zeros(1)) if is_first else None

    def forward(self, given: Tensor) -> Tensor:
        """The same numbers, later."""
        begin_s = time.perf_counter()
        backward = _Backward()
        weight: Tensor = _Weight.apply(self.weight, self.ballast, self.pace, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begun = given + weight if self.anchor is None else given + weight + self.anchor
        worked: Tensor = _Work.apply(begun, self.pace, begin_s, backward)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return worked


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """A chain of emulated stages, and what the engine needs to run it."""

    modules: tuple[EmulatedStage, ...]
    graph: Graph
    resolve: Resolve

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where a new stage begins: at every module."""
        return tuple(range(1, len(self.modules)))

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of the weights, by name."""
        held = dict(nn.Sequential(*self.modules).named_parameters())
        return {name: held[name].detach().clone() for name in names}

    def batch(self, num_microbatches: int) -> dict[str, Tensor]:
        """A batch of one sample for each micro-batch."""
        return {INPUT: torch.ones(num_microbatches, FEATURES)}


def square_loss(result: Tensor, _inputs: object) -> Tensor:
    """A loss whose gradient is an ordinary tensor, which torch's runtime needs to send it."""
    return result.square().mean()


def emulated_model(num_stages: int, pace: StagePace, *, num_ballast: int = 1) -> EmulatedModel:
    """So many equal stages."""
    sharpen_sleeps()
    modules = tuple(
        EmulatedStage(pace, is_first=stage == 0, num_ballast=num_ballast) for stage in range(num_stages)
    )
    graph = chain(modules, {INPUT: torch.ones(1, FEATURES)}, loss=square_loss, name="emulated")
    return EmulatedModel(modules, graph, chain_resolver(graph, modules, loss=square_loss))


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Devices in a pipeline, and micro-batches in a batch."""

    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= self.num_microbatches:
            raise BiremeError(
                f"{self.num_microbatches} micro-batches on {self.num_ranks} devices cannot be measured: all "
                "schedules need two devices at least, and as many micro-batches as devices."
            )


@dataclass(frozen=True, slots=True)
class BenchEffort:
    """What to measure. `counted` batches in the steady state make one figure, of which there are `rounds`.

    `small_gpt` are the numbers of micro-batches that the small GPT is trained with; `footprint` asks for the
    peak resident sets; `hosts` for the two replicas over a slow link.
    """

    shapes: tuple[BenchShape, ...]
    pace: StagePace = field(default=StagePace(0.010, 0.020))
    counted: int = 3
    rounds: int = 3
    overhead_microbatches: int = 64
    overhead_batches: int = 12
    overhead_rounds: int = 7
    buffers: tuple[int, ...] = (4, 16, 64)
    small_gpt: tuple[int, ...] = ()
    footprint: bool = False
    hosts: bool = False

    def __post_init__(self) -> None:
        least = min(self.counted, self.rounds, self.overhead_batches, self.overhead_rounds)
        if least < 1 or min(self.pace.forward_s, self.pace.backward_s) < 0:
            raise BiremeError("A benchmark needs at least one batch and one round, and seconds of 0 or more.")


QUICK = BenchEffort(shapes=(BenchShape(4, 4),), counted=2, rounds=2, overhead_batches=8, overhead_rounds=3)
FULL = BenchEffort(
    shapes=(BenchShape(4, 4), BenchShape(4, 8), BenchShape(8, 8), BenchShape(8, 16)),
    small_gpt=(4, 8),
    footprint=True,
)
