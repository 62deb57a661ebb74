"""Every tensor storage that lives while code runs: how many bytes there are, and what happens to them.

It is called between torch and its operators, so it sees what they are given and what they return, on any
device and for tensors without numbers too. Memory that an operator takes and gives back before it returns is
not seen, and neither are sparse tensors, whose storages torch does not show.
"""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from bireme.compiled import without_collector
from bireme.devices import allocations, is_accelerator, synchronize
from bireme.errors import BiremeError, closest
from bireme.model.torch_private import DispatchMode
from bireme.profile.behavior import (
    Allocator,
    Behavior,
    Event,
    EventKind,
    Owner,
    Phase,
    Span,
    Storage,
    behavior_of,
    repetition_of,
)
from bireme.user_code import reason_of


class StorageTrace(DispatchMode):
    """Follows the storages of all tensors that operators touch inside its `with` block.

    It counts a storage from the operator that returns it, or from `adopt`, or from its first use where it
    was there before; the count goes down when the storage is freed, after the block too. To trace tensors
    without numbers, enter it inside the `FakeTensorMode`.

    Given a list, it appends every `Event` to it, and remembers dead blocks in `storages`. Its clock stands
    still while it writes things down. `device` is the type of the devices that count, such as `cuda`; all do
    without it. `wait` runs after each operator, for devices that run asynchronously.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        events: list[Event] | None = None,
        *,
        device: str | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.live_bytes = 0
        """Of all storages that are there now."""
        self.peak_bytes = 0
        """The most there have been."""
        self.storages: dict[int, Storage] = {}
        """What is known of each block: of those alive, and of all if events are kept."""
        self.phase: Phase | None = None
        self.module = ""
        """What the next events belong to."""
        self._events = events
        self._device = device
        self._wait = wait
        self._live: dict[int, _Live] = {}
        """By where torch keeps the storage, which is used again once it is freed."""
        self._alive: set[int] = set()
        """Their blocks."""
        self._num_blocks = 0
        self._lost_ns = perf_counter_ns()
        """What the clock is set back by: when it began, and what writing down took."""

    @property
    def now_s(self) -> float:
        """The time since the trace was made, without what writing down took."""
        return (perf_counter_ns() - self._lost_ns) / 1e9

    def adopt(self, tensors: Iterable[Tensor] | Mapping[str, Tensor], owner: Owner | str) -> None:
        """Count tensors that are there already, and say whose they are; a mapping brings their names.

        Whose a block is, is decided once: only what was workspace so far gets another owner.
        """
        began_ns = perf_counter_ns()
        now_s = (began_ns - self._lost_ns) / 1e9
        named = tensors.items() if isinstance(tensors, Mapping) else (("", tensor) for tensor in tensors)
        for name, tensor in named:
            for block in self._blocks(tensor, "", now_s, now_s):
                known = self.storages[block]
                if known.owner is Owner.WORKSPACE:
                    self.storages[block] = replace(known, owner=Owner(owner), name=name)
        self._lost_ns += perf_counter_ns() - began_ns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        entered_ns = perf_counter_ns()
        start_s = (entered_ns - self._lost_ns) / 1e9
        touched = self._touched(func, args, kwargs, start_s)
        num_before = self._num_blocks
        began_ns = perf_counter_ns()
        self._lost_ns += began_ns - entered_ns

        result = func(*args, **kwargs)
        if self._wait is not None:
            self._wait()

        ended_ns = perf_counter_ns()
        end_s = (ended_ns - self._lost_ns) / 1e9
        operator = str(func).removesuffix(".default")
        made = dict.fromkeys(self._blocks(result, operator, start_s, end_s))
        # An operator that returns what it was given and writes to nothing makes views: it touches no bytes.
        is_view = bool(made) and made.keys() <= touched.keys() and EventKind.WRITE not in touched.values()
        if not is_view:
            for block, kind in touched.items():
                if block in self._alive:  # `set_` and `resize_` free what they write to
                    self._record(kind, block, operator, start_s, end_s)
        for block in made:
            if block >= num_before:
                self._record(EventKind.WRITE, block, operator, start_s, end_s)
        self._lost_ns += perf_counter_ns() - ended_ns
        return result

    def _touched(self, func: Any, args: Any, kwargs: Any, now_s: float) -> dict[int, EventKind]:
        """What an operator is given, and whether it will write to it.

        No storage may be held here when the operator runs: it could be about to free it.
        """
        writes = _writes(func)
        touched: dict[int, EventKind] = {}
        for place, argument in chain(enumerate(args), kwargs.items()):
            for block in self._blocks(argument, "", now_s, now_s):
                if place in writes:
                    touched[block] = EventKind.WRITE
                else:
                    touched.setdefault(block, EventKind.READ)
        return touched

    def _blocks(self, value: Any, operator: str, start_s: float, end_s: float) -> Iterator[int]:
        """Those of all tensors in an argument or result; what is not known yet is born here."""
        if isinstance(value, Tensor):
            if value.layout is torch.strided and self._device in (None, value.device.type):
                block = self._met(value.untyped_storage(), operator, start_s, end_s)
                if block is not None:
                    yield block
        elif isinstance(value, list | tuple):
            for part in value:
                yield from self._blocks(part, operator, start_s, end_s)

    def _met(self, storage: UntypedStorage, operator: str, start_s: float, end_s: float) -> int | None:
        """The block that a storage is now, if it holds anything."""
        key, num_bytes = int(storage._cdata), storage.nbytes()
        live = self._live.get(key)
        before = self.storages[live.block] if live is not None else None
        if before is not None:
            if before.num_bytes == num_bytes:
                return before.id
            self._died(key)  # it was resized, which is another allocation
        if num_bytes == 0:
            return None
        block = self._num_blocks
        self._num_blocks += 1
        self._live[key] = _Live(block, weakref.ref(storage, partial(self._freed, key)))
        self._alive.add(block)
        address = None if storage.device.type == "meta" else storage.data_ptr()
        if before is not None:
            self.storages[block] = replace(before, id=block, num_bytes=num_bytes, address=address)
        else:
            owner = Owner.WORKSPACE
            self.storages[block] = Storage(block, num_bytes, owner, module=self.module, address=address)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._record(EventKind.BIRTH, block, operator, start_s, end_s)
        return block

    def _freed(self, key: int, _: object) -> None:
        began_ns = perf_counter_ns()
        self._died(key)
        self._lost_ns += perf_counter_ns() - began_ns

    def _died(self, key: int) -> None:
        block = self._live.pop(key).block
        self._alive.remove(block)
        self.live_bytes -= self.storages[block].num_bytes
        now_s = self.now_s
        self._record(EventKind.DEATH, block, "", now_s, now_s)
        if self._events is None:
            del self.storages[block]

    def _record(self, kind: EventKind, block: int, operator: str, start_s: float, end_s: float) -> None:
        if self._events is not None:
            num_bytes = self.storages[block].num_bytes
            self._events.append(Event(kind, block, num_bytes, operator, self.phase, start_s, end_s))


@dataclass(frozen=True, slots=True)
class _Live:
    """A storage that is there; the reference tells when it no longer is."""

    block: int
    reference: weakref.ref[UntypedStorage]


@cache
def _writes(func: Any) -> frozenset[int | str]:
    """The arguments that an operator writes to, by place and by name.

    The operators that take functions have no schema; they write to nothing.
    """
    schema = getattr(func, "_schema", None)
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
    return frozenset(written)


# Trains a module for a few iterations and watches the memory of one of them.
#
# The module runs as it is, eagerly. An iteration is a forward, a backward, the optimizer's step and the
# release of the gradients; of what the forward returns only the loss is kept, as a training loop would.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
_LEARNING_RATE = 1e-4

_NUM_UNTRACED = 3
"""Iterations without the trace, of which the fastest says what the trace costs."""

_YOUNG, _ALL = 1, 2
"""Generations of objects that Python's collector of cycles looks through, up to which."""


def observe(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    optimizer: str = "adamw",
    warmup: int = 1,
    num_iterations: int = 3,
) -> Behavior:
    """The memory behavior of a training iteration, one of several that are traced and compared.

    It is the last of them, or the fastest if they are all the same. The first `warmup` iterations are not
    looked at: they make what is made once, such as the optimizer's state. The weights change as in training.
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
    with without_collector(), allocations(device) as counted:  # what it frees would differ between iterations
        for index in range(-1 if warmup else 0, num_iterations):
            # Only the first look goes through all that there is: cycles of an iteration are young.
            gc.collect(_YOUNG if events else _ALL)
            first = len(events)
            spans = training.iterate_traced(trace)
            if index >= 0:
                traced.append(_Traced(first, len(events), spans))
    repetition = repetition_of([events[one.first : one.end] for one in traced], trace.storages)
    chosen = min(traced, key=lambda one: one.seconds) if repetition.is_stable else traced[-1]
    return behavior_of(
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
        raise BiremeError(f"There is no optimizer {optimizer!r}. {closest(optimizer, OPTIMIZERS)}")
    if warmup < 0:
        raise BiremeError(f"The warm-up is {warmup} iterations; it must be at least 0.")


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
    """A module, its inputs and its optimizer."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], optimizer: str) -> None:
        self.model = model
        self.inputs = inputs
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.trainable = [parameter for parameter in self.names if parameter.requires_grad]
        if not self.trainable:
            raise BiremeError("The model has no parameter that requires a gradient, so it cannot be trained.")
        self.device = self.trainable[0].device
        self.optimizer = OPTIMIZERS[optimizer](self.trainable, lr=_LEARNING_RATE)
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
        return min(self._timed() for _ in range(_NUM_UNTRACED))

    def _timed(self) -> float:
        begun_s = perf_counter()
        self.iterate()
        synchronize(self.device)
        return perf_counter() - begun_s

    def _state(self) -> dict[str, Tensor]:
        """What the optimizer keeps, named after the parameter it is for."""
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
        raise BiremeError(f"The model's {what} fails on its inputs: {reason_of(error)}.") from error
