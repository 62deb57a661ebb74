"""Trains a module for a few iterations and watches the memory of one of them.

The module runs as it is, eagerly. An iteration is a forward, a backward, the optimiser's step and the release
of the gradients; of what the forward returns only the loss is kept, as a training loop would.
"""

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bireme.devices import allocations, is_accelerator, synchronize
from bireme.errors import BiremeError, closest
from bireme.profile.behaviour import Allocator, Behaviour, Span, behaviour_of
from bireme.profile.events import Event, Owner, Phase
from bireme.profile.repetition import repetition_of
from bireme.profile.trace import StorageTrace

__all__ = ["OPTIMIZERS", "check_training", "observe"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
LEARNING_RATE = 1e-4

NUM_UNTRACED = 3
"""Iterations without the trace, of which the fastest says what the trace costs."""

YOUNG, ALL = 1, 2
"""Generations of objects that Python's collector of cycles looks through, up to which."""


def observe(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    optimizer: str = "adamw",
    warmup: int = 1,
    num_iterations: int = 3,
) -> Behaviour:
    """The memory behaviour of a training iteration, one of several that are traced and compared.

    It is the last of them, or the fastest if they are all the same. The first `warmup` iterations are not
    looked at: they make what is made once, such as the optimiser's state. The weights change as in training.
    """
    check_training(optimizer, warmup)
    if num_iterations < 2:
        raise BiremeError(
            f"{num_iterations} iterations are traced; to see whether they repeat, at least 2 are needed."
        )
    training = _Training(model, inputs, optimizer)
    events: list[Event] = []
    device = training.device
    wait = partial(synchronize, device) if is_accelerator(device) else None
    trace = StorageTrace(events, device=device.type, wait=wait)
    for _ in range(warmup - 1):
        training.iterate()
    traced: list[_Traced] = []
    with _without_collector(), allocations(device) as counted:
        for index in range(-1 if warmup else 0, num_iterations):
            # Only the first look goes through all that there is: cycles of an iteration are young.
            gc.collect(YOUNG if events else ALL)
            first = len(events)
            spans = training.iterate_traced(trace)
            if index >= 0:
                traced.append(_Traced(first, len(events), spans))
    repetition = repetition_of([events[one.first : one.end] for one in traced], trace.storages)
    chosen = min(traced, key=lambda one: one.seconds) if repetition.is_stable else traced[-1]
    return behaviour_of(
        events[chosen.first : chosen.end],
        events[: chosen.first],
        trace.storages,
        chosen.spans,
        device=str(device),
        untraced_s=training.untraced_s(),
        repetition=repetition,
        allocator=None if counted is None else Allocator(**asdict(counted)),
    )


def check_training(optimizer: str, warmup: int) -> None:
    """Refuse what no training can be made of, before a model is."""
    if optimizer not in OPTIMIZERS:
        raise BiremeError(f"There is no optimiser {optimizer!r}. {closest(optimizer, OPTIMIZERS)}")
    if warmup < 0:
        raise BiremeError(f"The warm-up is {warmup} iterations; it must be at least 0.")


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector of cycles runs when it likes, and what it frees would differ between iterations."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Traced:
    """An iteration's first event, the one after its last, and when its phases ran."""

    first: int
    end: int
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """From its beginning to its end."""
        return self.spans[-1].end_s - self.spans[0].start_s


class _Training:
    """A module, its inputs and its optimiser."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], optimizer: str) -> None:
        self.model = model
        self.inputs = inputs
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.trainable = [parameter for parameter in self.names if parameter.requires_grad]
        if not self.trainable:
            raise BiremeError("The model has no parameter that requires a gradient, so it cannot be trained.")
        self.device = self.trainable[0].device
        self.optimizer = OPTIMIZERS[optimizer](self.trainable, lr=LEARNING_RATE)
        accepted = inspect.signature(model.forward).parameters
        self.switches = {"use_cache": False} if "use_cache" in accepted else {}

    def iterate(self) -> None:
        """One iteration."""
        with _told("forward"):
            loss = self._loss()
        with _told("backward"):
            torch.autograd.backward(loss)
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate_traced(self, trace: StorageTrace) -> list[Span]:
        """The same under the trace, which learns whose the blocks are."""
        trace.adopt(dict(self.model.named_parameters()), Owner.PARAMETER)
        trace.adopt(dict(self.model.named_buffers()), Owner.BUFFER)
        trace.adopt(self.inputs, Owner.INPUT)
        spans = []
        with trace:
            begun_s, trace.phase = trace.now_s, Phase.FORWARD
            with _told("forward"), self._watched(trace):
                loss = self._loss()
            spans.append(Span(Phase.FORWARD, begun_s, trace.now_s))
            begun_s, trace.phase = trace.now_s, Phase.BACKWARD
            with _told("backward"):
                torch.autograd.backward(loss)
            del loss
            spans.append(Span(Phase.BACKWARD, begun_s, trace.now_s))
            trace.adopt({self.names[p]: p.grad for p in self.trainable if p.grad is not None}, Owner.GRADIENT)
            begun_s, trace.phase = trace.now_s, Phase.OPTIMIZER
            self.optimizer.step()
            self.optimizer.zero_grad()
            spans.append(Span(Phase.OPTIMIZER, begun_s, trace.now_s))
            trace.phase = None
            trace.adopt(self._state(), Owner.OPTIMIZER)
        return spans

    def untraced_s(self) -> float:
        """How long an iteration takes when nobody looks."""
        return min(self._timed() for _ in range(NUM_UNTRACED))

    def _timed(self) -> float:
        begun_s = perf_counter()
        self.iterate()
        synchronize(self.device)
        return perf_counter() - begun_s

    def _state(self) -> dict[str, Tensor]:
        """What the optimiser keeps, named after the parameter it is for."""
        return {
            f"{self.names[parameter]} {key}": value
            for parameter, kept in self.optimizer.state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        }

    @contextmanager
    def _watched(self, trace: StorageTrace) -> Iterator[None]:
        """Tell the trace which module runs, and what autograd saves for the backward."""
        path = [""]

        def enters(name: str, *_: object) -> None:
            path.append(name)
            trace.module = name

        def leaves(*_: object) -> None:
            path.pop()
            trace.module = path[-1]

        def keeps(tensor: Tensor) -> Tensor:
            trace.adopt([tensor], Owner.ACTIVATION)
            return tensor

        hooks = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(enters, name), prepend=True))
            hooks.append(module.register_forward_hook(leaves, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(keeps, lambda tensor: tensor):
                yield
        finally:
            trace.module = ""
            for hook in hooks:
                hook.remove()

    def _loss(self) -> Tensor:
        returned = self.model(**self.inputs, **self.switches)
        loss = _loss_in(returned)
        if loss is None or not loss.requires_grad:
            raise BiremeError(
                f"{type(self.model).__name__} returns no loss to train on. Let it return a scalar, or a "
                "`loss` that is one, for the inputs it is given."
            )
        return loss


def _loss_in(returned: Any) -> Tensor | None:
    """The scalar that a module returns, alone or as the `loss` in something."""
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    elif not isinstance(returned, Tensor):
        returned = getattr(returned, "loss", None)
    return returned if isinstance(returned, Tensor) and returned.ndim == 0 else None


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Anything can come out of a model's code: say where, in one sentence."""
    try:
        yield
    except BiremeError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise BiremeError(f"The model's {what} fails on its inputs: {reason.rstrip('.')}.") from error
