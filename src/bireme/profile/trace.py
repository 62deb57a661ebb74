"""Every tensor storage that lives while code runs: how many bytes there are, and what happens to them.

It is called between torch and its operators, so it sees what they are given and what they return, on any
device and for tensors without numbers too. Memory that an operator takes and gives back before it returns is
not seen, and neither are sparse tensors, whose storages torch does not show.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from bireme.profile.events import Event, EventKind, Owner, Phase, Storage

__all__ = ["StorageTrace"]


class StorageTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
                return before.block
            self._died(key)  # it was resized, which is another allocation
        if num_bytes == 0:
            return None
        block = self._num_blocks
        self._num_blocks += 1
        self._live[key] = _Live(block, weakref.ref(storage, partial(self._freed, key)))
        self._alive.add(block)
        address = None if storage.device.type == "meta" else storage.data_ptr()
        if before is not None:
            self.storages[block] = replace(before, block=block, num_bytes=num_bytes, address=address)
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
