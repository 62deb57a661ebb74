"""The world: this process as one rank among others, and torch.distributed joined for as long as it is open.

It is the same under `bireme.launch`, under torchrun and alone. Nothing here knows the engine.
"""

import functools
import itertools
import os
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Literal, Self, get_args

import torch
import torch.distributed as dist

from bireme.errors import BiremeError
from bireme.runtime.board import Board
from bireme.runtime.failures import RankFailed
from bireme.runtime.lifeline import die_with_parent
from bireme.runtime.stores import HashStore, PrefixStore, Store, open_store, second_connection
from bireme.runtime.watch import Watch, is_of_a_peer

__all__ = ["Backend", "World"]

Backend = Literal["gloo", "nccl"]
"""With "nccl" each rank has a CUDA device, and gloo is there for what lies on the CPU."""

JOIN_S = 120.0
"""The least time that ranks have to join: starting Python and importing torch takes what it takes."""
FAILED_FIRST_S = 1.0

_worlds = itertools.count()
"""Of this process, so that the second one does not read what the first one wrote in the same store."""


class World:
    """This rank among `size`. To be used as a context: it joins the others, and leaves together with them.

    If the work inside fails, the others learn why. If it fails only because another rank did, it ends with a
    `RankFailed` that tells of that one, which says what it has to say itself. `timeout_s` is how long a rank
    waits for another; `store` is for whoever wants to share small things between ranks.
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
        ends_quietly: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.backend = backend
        self.device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
        self.store = PrefixStore("shared", store)
        self._group_store = PrefixStore("group", store)
        board = Board(second_connection(store), size)
        self.watch = Watch(board, rank, size, timeout_s=timeout_s, ends_quietly=ends_quietly)

    @classmethod
    def alone(cls, *, timeout_s: float = 60.0, backend: Backend = "gloo") -> Self:
        """A world of this one process."""
        return cls(HashStore(), rank=0, size=1, timeout_s=timeout_s, backend=backend)

    @classmethod
    def from_environment(cls, *, timeout_s: float = 60.0, backend: Backend = "gloo") -> Self:
        """The world that torchrun, or who else sets its variables, started this process for."""
        rank, size, port = _number("RANK"), _number("WORLD_SIZE"), _number("MASTER_PORT")
        address = _variable("MASTER_ADDR")
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid())
        try:
            serve = rank == 0 and not has_agent
            store = open_store(address, port, serve=serve, timeout_s=max(timeout_s, JOIN_S))
        except dist.DistError as error:
            raise BiremeError(
                f"Rank {rank} cannot reach the store of the run at MASTER_ADDR = {address}, MASTER_PORT = "
                f"{port}: {str(error).splitlines()[0]} All ranks need the same two values, and rank 0 "
                "(or torchrun's first agent) must be reachable there."
            ) from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        own = PrefixStore(f"bireme/{attempt}/{next(_worlds)}", store)
        _tell_of_others_in_one_line()
        return cls(
            own,
            rank=rank,
            size=size,
            local_rank=_number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank,
            timeout_s=timeout_s,
            backend=backend,
        )

    def __enter__(self) -> Self:
        if dist.is_initialized():
            raise BiremeError(
                "torch.distributed is initialised already in this process. Leave that to Bireme: remove the "
                "call of init_process_group, or close the world that is open."
            )
        self.watch.start()
        try:
            _check(self.backend, self.device)
            self.watch.wait_for_everyone(max(self.timeout_s, JOIN_S))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo",
                store=self._group_store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout_s),
                device_id=self.device if self.backend == "nccl" else None,
            )
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
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
            # NCCL's communicators wait for ranks that are gone; those of a failed process end with it.
            if dist.is_initialized() and (orderly or self.backend == "gloo"):
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


def _check(backend: Backend, device: torch.device) -> None:
    if backend not in get_args(Backend):
        raise BiremeError(f"There is no backend {backend!r}. Use gloo, or nccl for CUDA devices.")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= there:
        raise BiremeError(
            f"With backend nccl each process of a machine needs a CUDA device of its own, but there are "
            f"{there} for process {device.index} (they count from 0). Start fewer processes on it, or use "
            "backend gloo."
        )


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise BiremeError(
            f"The environment variable {name} is not set, so this process does not know its place among "
            "others. Start it with torchrun, or call bireme.launch instead."
        )
    return value


def _number(name: str) -> int:
    value = _variable(name)
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
