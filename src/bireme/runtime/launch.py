"""`launch`: run a function in new processes of this machine, and end them properly, whatever happens.

This process holds the store, so that it survives any rank, and is the one that tells what went wrong: the
root cause, once. The processes end with it, however it ends.
"""

import os
import pickle
import signal
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, current_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError
from bireme.runtime.board import Board, Failure, FailureKind, RankFailed, grace_s
from bireme.runtime.processes import UNREPORTED, Process, preload, start_process
from bireme.wire.listener import new_key

if TYPE_CHECKING:
    from bireme.devices import Backend
    from bireme.runtime.stores import Store
    from bireme.runtime.world import World


# What a process that `launch` started does: become a rank, run the function, hand its result back.
#
# It imports torch only once its environment is set. It prints nothing of its own failure: that is in the
# store, where `launch` reads it.

_UNGUARDED_STATUS = 64
"""The exit status of a process that came to launch processes while it was itself being started."""
_RESULT, _FAILURE = b"+", b"-"
"""How the last message of a rank to its starter begins."""
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankSetup:
    """How to be a rank: the same for all ranks. What they tell each other has names that begin with `prefix`
    in the store, at `host` and `port`. The first of them is the process `first_local` of the machine, and the
    rank `first_rank` of all that a run has, by which processes are called. If other hosts start ranks too,
    `ranks` are those that are started here. The store asks for the `key`.
    """

    port: int
    num_processes: int
    timeout_s: float
    num_threads: int
    backend: "Backend"
    device: str | None = None
    prefix: str = ""
    first_local: int = 0
    first_rank: int = 0
    host: str = LOCALHOST
    ranks: tuple[int, ...] = ()
    key: str = ""

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """The ranks that are started on this host."""
        return self.ranks or tuple(range(self.num_processes))


def run_rank(starter: Connection, order: RankSetup, rank: int) -> None:
    """Be that rank until its function has returned or anything has failed.

    From its starter comes the pickled function with its arguments, to it goes the pickled result, or why
    there is none.
    """
    world = _world(order, rank)
    try:
        signal.signal(signal.SIGINT, _interrupt_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with world:
            result = _call(starter.recv_bytes(), world)
            if order.ranks:  # the host that shows the results may be another one
                world.store.set(_result_key(rank), b64encode(result).decode())
        starter.send_bytes(_RESULT + result)
    except BaseException as error:
        # The traceback, or who else is to blame, is in the store by now, which may be out of reach.
        with suppress(OSError):
            starter.send_bytes(_FAILURE + _failure_of(error, world).encode().encode())
        sys.stdout.flush()
        sys.exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result_key(rank: int) -> str:
    return f"result/{rank}"


def _failure_of(error: BaseException, world: "World") -> Failure:
    """A failure as the starter of the rank shows it; that of another rank stays that rank's."""
    if isinstance(error, RankFailed):
        return world.watch.cause or Failure(error.rank, error.instruction, error.summary, error.text)
    return Failure.of(error, world.rank, None)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Both the terminal and the parent may send the signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _world(order: RankSetup, rank: int) -> "World":
    # For libraries that start their threads when they are imported, and for processes that this one starts.
    os.environ["OMP_NUM_THREADS"] = str(order.num_threads)
    if order.ranks:
        os.environ["LOCAL_WORLD_SIZE"] = str(len(order.ranks))
    import torch

    from bireme.runtime.stores import PrefixStore, RunStore
    from bireme.runtime.world import World

    torch.set_num_threads(order.num_threads)
    store = RunStore(order.host, order.port, order.key, order.timeout_s)
    return World(
        PrefixStore(order.prefix, store) if order.prefix else store,
        rank=rank,
        size=order.num_processes,
        local_rank=order.first_local + order.ranks_here.index(rank),
        timeout_s=order.timeout_s,
        backend=order.backend,
        device=order.device,
        ends_quietly=True,
    )


def _call(call: bytes, world: "World") -> bytes:
    try:
        function, arguments = pickle.loads(call)
    except Exception as error:
        raise BiremeError(
            f"The process of rank {world.rank} cannot import the function to launch or its arguments: "
            f"{error}. They must be found by a new Python process: in a module, or in the script itself "
            'outside of functions and of `if __name__ == "__main__":`.'
        ) from error
    try:
        result = function(world, *arguments)
    except SystemExit as error:
        raise BiremeError(
            f"The launched function called sys.exit({error.code!r}) on rank {world.rank}. "
            "It must return, or raise."
        ) from error
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise BiremeError(
            f"The result of rank {world.rank} cannot be handed to the process that launched it: {error}. "
            "Return tensors, numbers, texts, and lists, dicts and data classes of them."
        ) from error


Result = TypeVar("Result")

OWN = "bireme."
"""How the names of modules begin that may be imported before processes are started."""

_POLL_S = 0.1
"""How often to look for a root cause that is no process's end."""
_TERMINATION_S = 1.0
"""From SIGTERM to SIGKILL."""
_DELIVERY_S = 5.0
"""How long an ended process's last bytes may be on their way."""


def launch(
    function: Callable[..., Result],
    num_processes: int,
    *args: object,
    timeout_s: float = 60.0,
    threads_per_process: int | None = None,
    backend: "Backend" = "gloo",
    device: str | None = None,
) -> list[Result]:
    """Run `function(world, *args)` in that many new processes, and return what each returned, by rank.

    The function must be importable, arguments and results go through pickle. If a process fails, all others
    are ended: a `BiremeError` there is one here, an interrupt and a `RunFailed` too, anything else is a
    `RankFailed` with the traceback or what became of the process. `timeout_s` is how long a rank waits for
    another, and so the most that a rank which dies or stops goes unnoticed. Without `threads_per_process` the
    processes share the processor's cores. `device` is what each computes on, as for `World`.
    """
    if getattr(current_process(), "_inheriting", False):
        # This process is one that is just being started, and runs a script that launches when it is imported.
        os._exit(_UNGUARDED_STATUS)
    if num_processes < 1 or timeout_s <= 0:
        raise BiremeError(
            f"Cannot launch {num_processes} processes with a timeout of {timeout_s:g} s: both "
            "must be positive."
        )
    call = pickled(function, args)
    preload_own(function)
    # It imports torch, which the processes must not do before their environment is set.
    from bireme.runtime.stores import serve_store

    store = serve_store(LOCALHOST, key=new_key(), timeout_s=timeout_s)
    order = RankSetup(
        port=store.port,
        num_processes=num_processes,
        timeout_s=timeout_s,
        num_threads=threads_per_process or max(1, num_cores() // num_processes),
        backend=backend,
        device=device,
        key=store.key,
    )
    with Launcher() as launcher:
        crew = launcher.start(Crew(order, call, Board(store, num_processes)))
        while not crew.is_over:
            launcher.look()
    if crew.cause is not None:
        raise crew.cause.to_starter() from None
    return [pickle.loads(rank.result) for rank in crew.ranks if rank.result is not None]


def preload_own(function: Callable[..., object]) -> None:
    """Have the fork server import a function's module, if that is one of this package. Other modules may do
    anything when they are imported, so each process imports them by itself.
    """
    module = getattr(function, "__module__", None) or ""
    if module.startswith(OWN):
        preload(module)


def signal_ranks(number: signal.Signals) -> bool:
    """Send a signal to all processes of the launches under way; False if there are none."""
    crews = [crew for launcher in list(_under_way) for crew in launcher.crews]
    is_heard = any(rank.lives for crew in crews for rank in crew.ranks)
    for crew in crews:
        crew.ask(number)
    return is_heard


class _Rank:
    """One process, and the thread that hands it its work and takes its result."""

    def __init__(self, order: RankSetup, rank: int, call: bytes) -> None:
        self.number = rank
        self.result: bytes | None = None
        self.failure: Failure | None = None
        """The failure that the process reported, if it did."""
        self.process: Process | None = None
        self._order, self._call = order, call

    def start(self) -> None:
        called = f"bireme rank {self._order.first_rank + self.number}"
        self.process, talk = start_process(called, run_rank, self._order, self.number)
        # A thread, because a process that is stopped halfway through a message would block its reader.
        name = f"bireme talk {self.number}"
        self._talker = threading.Thread(target=self._talk, args=(talk,), name=name, daemon=True)
        self._talker.start()

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.status is None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def end(self) -> None:
        """Kill the process, if it lives, and free its id."""
        if self.process is not None:
            self.process.close()

    def last_words(self) -> bytes | None:
        """The result of a process that has ended, if it gave one."""
        self._talker.join(_DELIVERY_S)
        return self.result

    def _talk(self, talk: Connection) -> None:
        with talk, suppress(EOFError, OSError):
            talk.send_bytes(self._call)
            said = talk.recv_bytes()
            if said.startswith(_RESULT):
                self.result = said.removeprefix(_RESULT)
            else:
                self.failure = Failure.decode(said.removeprefix(_FAILURE))


class Crew:
    """The ranks of one world on this host, which a `Launcher` watches. They end with all results or with the
    first failure. `board` and `store` are those of the world, if this host has them.
    """

    def __init__(
        self, order: RankSetup, call: bytes, board: Board | None = None, store: "Store | None" = None
    ) -> None:
        self.cause: Failure | None = None
        self.request: signal.Signals | None = None
        """The last signal that was sent to its processes. If they have not started, they get it then."""
        self.ranks = [_Rank(order, rank, call) for rank in order.ranks_here]
        self.is_over = False
        """Whether all its processes have ended."""
        self._board, self._order, self._store = board, order, store
        self._measures: list[tuple[float, signal.Signals]] | None = None
        """The signals that end its processes, and when each is due; None while they may run."""

    def results(self) -> list[bytes] | None:
        """The results of all ranks in their order, None if a rank here has returned nothing. It is empty if
        the ranks are on several hosts, and another host has their store.
        """
        found = {rank.number: rank.result for rank in self.ranks}
        if None in found.values():
            return None
        if self._order.ranks and self._store is None:
            return []
        if self._store is not None:
            for rank in {*range(self._order.num_processes)} - found.keys():
                key = f"shared/{_result_key(rank)}"  # as the world of the rank, on another host, names it
                found[rank] = b64decode(self._store.get(key)) if self._store.check([key]) else None
        return [own for _, own in sorted(found.items()) if own is not None]

    def start(self) -> None:
        """Start them all."""
        for rank in self.ranks:
            with _interrupts_held():
                rank.start()
        if self.request is not None:
            self.ask(self.request)

    def ask(self, number: signal.Signals) -> None:
        """Send a signal to its processes, now or when they start."""
        self.request = number
        self._signal(number)

    def look(self) -> None:
        """Note results and failures, and send the signals that are due."""
        living = [rank for rank in self.ranks if rank.lives]
        if self._measures is None:
            self._note(living)
        while self._measures and self._measures[0][0] <= time.monotonic():
            _, number = self._measures.pop(0)
            self._signal(number)
        self.is_over = self._measures is not None and not living

    def end(self, why: Failure | None = None, *, patience_s: float | None = None) -> None:
        """End its processes: they have `patience_s` to end by themselves, by default the grace of their
        world; then signals end them. The ranks learn `why` if this host has their board.
        """
        if self._measures is not None:
            return
        if why is not None and self._board is not None:
            self._board.record(why)
        if self.cause is not None and self.cause.blame is FailureKind.INTERRUPT:
            self._signal(signal.SIGINT)
        own_s = grace_s(self._order.timeout_s) if patience_s is None else patience_s
        ends_s = time.monotonic() + own_s
        self._measures = [(ends_s, signal.SIGTERM), (ends_s + _TERMINATION_S, signal.SIGKILL)]

    def close(self) -> None:
        """Kill the processes that are left, and free their ids."""
        with _interrupts_held():
            for rank in self.ranks:
                rank.end()

    def _note(self, living: Sequence["_Rank"]) -> None:
        """Begin the end if all results have come, or a failure."""
        # The board first: a process that ended because of a failure has written the failure down before.
        self.cause = None if self._board is None else self._board.cause()
        patience_s = None
        for rank in self.ranks:
            if self.cause is not None or rank in living or rank.last_words() is not None:
                continue
            self.cause = rank.failure or self._obituary(rank)
            if self._board is not None:
                self.cause = self._board.record(self.cause)
            elif rank.failure is None:
                patience_s = 0.0  # the other ranks would not learn of it
        if self.cause is not None or all(rank.result is not None for rank in self.ranks):
            self.end(patience_s=patience_s)

    def _obituary(self, rank: "_Rank") -> Failure:
        """Why a process ended that reported nothing."""
        (pulse,) = (None,) if self._board is None else self._board.pulses([rank.number])
        status = (rank.process.status if rank.process else 0) or 0
        doing = None if pulse is None else pulse.doing
        if status == _UNGUARDED_STATUS and pulse is None:
            return Failure.of(BiremeError(_UNGUARDED), rank.number, None)
        if status < 0:
            return Failure.told(f"its process was killed by {_signal_name(-status)}.", rank.number, doing)
        if status == UNREPORTED:
            sentence = "its process ended after the fork server, so its exit status is not known."
            return Failure.told(sentence, rank.number, doing)
        when = " before it could start its work" if pulse is None and self._board is not None else ""
        return Failure.told(
            f"its process ended with status {status}{when}; its output may say why.", rank.number, doing
        )

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)


class Launcher:
    """Starts and watches all processes of a launch on this host. None of them is left when this context ends,
    whatever ended it.
    """

    def __init__(self) -> None:
        self.crews: list[Crew] = []

    def start(self, crew: Crew) -> Crew:
        """Start the processes of a crew, and watch them from now on."""
        self.crews.append(crew)
        crew.start()
        return crew

    def look(self) -> None:
        """Wait until a process ends, at most 0.1 s, and let every crew do what is due."""
        ranks = [rank for crew in self.crews for rank in crew.ranks]
        connection.wait([rank.process.sentinel for rank in ranks if rank.process and rank.lives], _POLL_S)
        for crew in tuple(self.crews):
            crew.look()
            if crew.is_over:
                crew.close()
                self.crews.remove(crew)

    def __enter__(self) -> Self:
        _under_way.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_interrupted = isinstance(error, KeyboardInterrupt)
        try:
            for crew in self.crews:
                if is_interrupted:
                    crew.ask(signal.SIGINT)
                crew.end()
            while self.crews:
                self.look()
        finally:
            # Also after a second interrupt.
            for crew in self.crews:
                crew.close()
            _under_way.discard(self)


_under_way: set[Launcher] = set()

_UNGUARDED = (
    "Each launched process imports the script that launches it and would launch again. Put "
    'the part that must run once under `if __name__ == "__main__":`.'
)


def pickled(function: Callable[..., object], args: Iterable[object]) -> bytes:
    """A call as processes are handed it. Raises a `BiremeError` where that cannot be."""
    name = getattr(function, "__qualname__", repr(function))
    script = getattr(sys.modules["__main__"], "__file__", None)
    if getattr(function, "__module__", None) == "__main__" and not (script and Path(script).exists()):
        raise BiremeError(
            f"{name} cannot be launched: it was typed interactively. A new process imports it from a file. "
            "Put it in a file."
        )
    try:
        pickle.dumps(function)
    except Exception as error:
        raise BiremeError(
            f"{name} cannot be launched, because a new process cannot import it: {error}. Launch a function "
            "that is defined with `def` at the top of a file."
        ) from error
    try:
        return pickle.dumps((function, tuple(args)))
    except Exception as error:
        raise BiremeError(
            f"The arguments of {name} cannot be handed to new processes: {error}. Pass tensors, numbers, "
            "texts, and lists, dicts and data classes of them; make the rest inside of the function."
        ) from error


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "no name"
    hint = ". If nobody sent it, the machine probably ran out of memory" if number == signal.SIGKILL else ""
    return f"signal {number} ({name}){hint}"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let an interrupt come after this, and not at all to a process that is started inside.

    That one would end with a traceback if it were interrupted while it imports; it takes interrupts again
    once it can. And one that is half started would not be known here, so that nobody could end it.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, note) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
