"""Memory of an accelerator by hand, on a driver that only keeps an account: all is given back in the end."""

import ctypes
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError
from bireme.memory.accelerator_memory import AcceleratorMemory

PAGE = 2**21


class Driver:
    """Memory is there until its handle is released and nothing maps it, as CUDA has it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sizes: dict[int, int] = {}
        self.held: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(self.sizes[one] for one in self.held | set(self.mapped.values()))

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            words = [getattr(one, "value", one) for one in given]
            status = getattr(self, f"_{name.removeprefix('cuMem')}")(*words)
            return 0 if status is None else int(status)

        return call

    def _GetAllocationGranularity(self, found: Any, _about: Any, _what: int) -> None:  # noqa: N802
        ctypes.cast(found, ctypes.POINTER(ctypes.c_size_t))[0] = PAGE

    def _Create(self, found: Any, num_bytes: int, _about: Any, _flags: int) -> int:  # noqa: N802
        if self.used + num_bytes > self.room:
            return 2
        handle = len(self.sizes) + 1
        self.sizes[handle] = num_bytes
        self.held.add(handle)
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = handle
        return 0

    def _Release(self, handle: int) -> None:  # noqa: N802
        self.held.remove(handle)

    def _AddressReserve(self, found: Any, num_bytes: int, *_more: int) -> None:  # noqa: N802
        address = PAGE * (1 + sum(self.reserved.values()) // PAGE)
        self.reserved[address] = num_bytes
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = address

    def _AddressFree(self, address: int, num_bytes: int) -> None:  # noqa: N802
        assert self.reserved.pop(address) == num_bytes
        assert not any(address <= one < address + num_bytes for one in self.mapped)

    def _Map(self, address: int, num_bytes: int, _offset: int, handle: int, _flags: int) -> None:  # noqa: N802
        assert address not in self.mapped
        assert self.sizes[handle] == num_bytes
        self.mapped[address] = handle

    def _SetAccess(self, *_given: Any) -> None:  # noqa: N802
        return

    def _Unmap(self, address: int, num_bytes: int) -> None:  # noqa: N802
        assert self.sizes[self.mapped.pop(address)] == num_bytes


def test_a_pipeline_after_another_finds_the_memory_of_the_first_given_back() -> None:
    driver = Driver(room=3 * PAGE)
    for _ in range(2):
        memory = AcceleratorMemory(torch.device("cuda", 0), driver)
        slots = [memory.create(memory.page_bytes) for _ in range(2)]
        address = memory.reserve(3 * PAGE)
        beyond = memory.create(PAGE)
        memory.map(address + 2 * PAGE, PAGE, beyond)
        memory.release((beyond,))
        memory.map(address, PAGE, slots[0])
        memory.map(address + PAGE, PAGE, slots[1])
        memory.unmap(address)
        memory.map(address, PAGE, slots[0])
        with pytest.raises(BiremeError, match="gives the error 2"):
            memory.create(PAGE)
        # In either order: slots may go while a range still has them, and the other way around.
        memory.release(slots)
        memory.free(address, 3 * PAGE)
        assert driver.used == 0
        assert not driver.reserved
