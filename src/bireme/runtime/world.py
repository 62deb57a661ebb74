"""The world: this process as one rank among others for as long as it is open.

It is the same under `bireme.launch`, under torchrun and alone. Nothing here knows the engine.
"""

import functools
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Self, get_args

import torch.distributed as dist

from bireme.devices import (
    ACCELERATOR,
    KINDS,
    Backend,
    device_of_process,
    num_accelerators,
    use,
)
from bireme.errors import BiremeError
from bireme.runtime.board import Board, RankFailed, die_with_parent
from bireme.runtime.line_group import GroupLines
from bireme.runtime.stores import HashStore, PrefixStore, Store, environment_store, part_of, torch_store
from bireme.runtime.watch import Watch, is_of_a_peer
from bireme.wire.listener import own_address

_JOIN_S = 120.0
"""The least time that ranks have to join: starting Python and importing torch takes what it takes."""
FAILED_FIRST_S = 1.0
"""A rank that ends because of another one ends so much later: torchrun blames the first."""

_worlds = itertools.count()
"""Of this process, so that the second one does not read what the first one wrote in the same store."""


class World:
    """This rank among `size`. To be used as a context: it joins the others, and leaves together with them.

    If the work inside fails, the others learn why. If it fails only because another rank did, it ends with a
    `RankFailed` that tells of that one, which says what it has to say itself. `timeout_s` is how long a rank
    waits for another; `store` is for whoever wants to share small things between ranks.

    `device` is the type of this rank's own, which is `world.device`: unless given, cuda with the backend nccl
    and cpu with gloo. NCCL takes a CUDA device for each rank of a machine; with gloo ranks may share them.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        timeout_s: float = 60.0,
        backend: Backend = "gloo",
        device: str | None = None,
        ends_quietly: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.backend = backend
        self._kind = device or (ACCELERATOR if backend == "nccl" else "cpu")
        self._local_rank = local_rank
        own = "LOCAL_WORLD_SIZE"
        self.num_local = number_of(os.environ, own) if own in os.environ else size
        """How many of the ranks are on this machine, as far as who started them says so; else all."""
        self.device = device_of_process(self._kind if self._kind in KINDS else "cpu", local_rank)
        self.store = PrefixStore("shared", store)
        self._group_store: Store = PrefixStore("group", store)
        self._has_torch = False
        self.group_lines: dict[tuple[int, ...], deque[GroupLines]] = {}
        """Lines among some ranks that no group uses at present: for the next pipeline."""
        self.watch = Watch(Board(store, size), rank, size, timeout_s=timeout_s, ends_quietly=ends_quietly)

    @classmethod
    def alone(cls, *, timeout_s: float = 60.0, backend: Backend = "gloo", device: str | None = None) -> Self:
        """A world of this one process."""
        return cls(HashStore(), rank=0, size=1, timeout_s=timeout_s, backend=backend, device=device)

    @classmethod
    def from_environment(
        cls, *, timeout_s: float = 60.0, backend: Backend = "gloo", device: str | None = None
    ) -> Self:
        """The world that torchrun, or who else sets its variables, started this process for."""
        rank, size = number_of(os.environ, "RANK"), number_of(os.environ, "WORLD_SIZE")
        join_s = max(timeout_s, _JOIN_S)
        store = store_of_starter(rank, join_s)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = part_of(store, f"bireme/{attempt}/{next(_worlds)}", rank, timeout_s=join_s)
        _tell_of_others_in_one_line()
        return cls(
            own,
            rank=rank,
            size=size,
            local_rank=number_of(os.environ, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank,
            timeout_s=timeout_s,
            backend=backend,
            device=device,
        )

    def _store_of_groups(self) -> Store:
        """The run's, but with NCCL one of torch's own: NCCL's threads ask it for as long as there is a group,
        and must not wait for this process's Python.
        """
        if self.backend != "nccl" or self.size == 1:
            return self._group_store
        if self.rank == 0:
            self._group_store = served = torch_store(own_address(), 0, serve=True, timeout_s=self.timeout_s)
            self.store.set("nccl", f"{served.host} {served.port}")
        else:
            address, port = self.store.get("nccl").decode().split()
            self._group_store = torch_store(address, int(port), timeout_s=self.timeout_s)
        return self._group_store

    def join_torch(self) -> None:
        """Join torch.distributed until the world is closed, if this world has not. With the backend nccl it
        joins by itself; with gloo a program that calls torch.distributed does it by this.
        """
        if self._has_torch:
            return
        if dist.is_initialized():
            raise BiremeError(
                "torch.distributed is already initialized in this process. Leave that to Bireme: remove the "
                "call of init_process_group, or close the world that is open."
            )
        dist.init_process_group(
            self.backend,
            store=self._store_of_groups(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=self.device if self.backend == "nccl" else None,
        )
        self._has_torch = True

    def __enter__(self) -> Self:
        self.watch.start()
        try:
            _check(self.backend, self._kind, self._local_rank)
            self.watch.wait_for_everyone(max(self.timeout_s, _JOIN_S))
            if self.backend == "nccl":
                self.join_torch()
            use(self.device)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        orderly = error is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if orderly:
                self.watch.leave()
            elif error is not None:
                self._fail(error)
        finally:
            self.watch.stop()
            for kept in self.group_lines.values():
                while kept:
                    kept.popleft().close()
            # NCCL's communicators wait for ranks that are gone; those of a failed process end with it.
            if self._has_torch and dist.is_initialized() and (orderly or self.backend == "gloo"):
                dist.destroy_process_group()

    def _fail(self, error: BaseException) -> None:
        """Tell the others, or be told. Raises where the error is another rank's."""
        if isinstance(error, RankFailed):
            return
        if is_of_a_peer(error):
            raise self.watch.explain(error) from error
        cause = self.watch.failed(error)
        if cause.rank != self.rank:
            raise cause.to_others() from error


def _check(backend: Backend, kind: str, local_rank: int) -> None:
    if backend not in get_args(Backend):
        raise BiremeError(f"There is no backend {backend!r}. Use gloo, or nccl for CUDA devices.")
    if kind not in KINDS or (backend == "nccl" and kind != ACCELERATOR):
        raise BiremeError(
            f"A rank computes on {', '.join(KINDS)}, with the backend nccl only on {ACCELERATOR}, "
            f"not on {kind!r}."
        )
    there = num_accelerators()
    if backend == "nccl" and local_rank >= there:
        raise BiremeError(
            f"With backend nccl each process of a machine needs a CUDA device of its own, but there are "
            f"{there} for process {local_rank} (they count from 0). Start fewer processes on it, or use "
            "backend gloo."
        )
    if kind != "cpu" and not num_accelerators(kind):
        name = "CUDA" if kind == ACCELERATOR else kind
        raise BiremeError(f"There is no {name} device here for process {local_rank}. Use device cpu.")


# What torchrun, or whoever else has started this process, sets in its environment.


def store_of_starter(rank: int, timeout_s: float) -> Store:
    """The store that the environment names. From now on this process ends when its agent does, if any."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    address, port = variable(os.environ, "MASTER_ADDR"), number_of(os.environ, "MASTER_PORT")
    return environment_store(rank, address, port, timeout_s=timeout_s)


def variable(variables: Mapping[str, str], name: str) -> str:
    """The value of a variable that must be there."""
    value = variables.get(name, "")
    if not value:
        raise BiremeError(
            f"The environment variable {name} is not set, so this process does not know its place among "
            "others. Start it with torchrun. To use this machine alone, unset RANK and WORLD_SIZE, or call "
            "bireme.launch in a script."
        )
    return value


def number_of(variables: Mapping[str, str], name: str) -> int:
    """The number that a variable must have."""
    value = variable(variables, name)
    if not value.isdecimal():
        raise BiremeError(f"The environment variable {name} must be a whole number, but it is {value!r}.")
    return int(value)


@functools.cache
def _tell_of_others_in_one_line() -> None:
    """Let this process tell of another rank's failure in one line, as that rank shows the traceback."""
    before = sys.excepthook

    def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Not to sys.stderr: torch's own hook, which calls this one, prints what is written there after this.
        rank, stream = os.environ["RANK"], sys.__stderr__
        if isinstance(error, RankFailed):
            print(f"bireme: rank {rank} ends. {error.line}", file=stream, flush=True)
            # The rank that failed shall be the first to go: torchrun stops the others as soon as one
            # has, in the middle of a traceback if need be, and calls that one the root cause.
            time.sleep(FAILED_FIRST_S)
        elif issubclass(kind, KeyboardInterrupt):
            print(f"bireme: rank {rank} was interrupted.", file=stream, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = _tell
