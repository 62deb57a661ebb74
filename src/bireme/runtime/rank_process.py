"""What a process that `launch` started does: become a rank, run the function, hand its result back.

It imports torch only once its environment is set. It prints nothing of its own failure: that is in the store,
where `launch` reads it.
"""

import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING

from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.devices import Backend
    from bireme.runtime.world import World

__all__ = ["UNGUARDED_STATUS", "RankSetup", "run_rank"]

UNGUARDED_STATUS = 64
"""The exit status of a process that came to launch processes while it was itself being started."""
LOCALHOST = "127.0.0.1"
LOOPBACK = ("lo", "lo0")


@dataclass(frozen=True, slots=True)
class RankSetup:
    """How to be a rank: the same for all ranks. What they tell each other has names that begin with `prefix`
    in the store. The first of them is the process `first_local` of the machine, and the rank `first_rank` of
    all that a run has, by which processes are called.
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


def run_rank(starter: Connection, order: RankSetup, rank: int) -> None:
    """Be that rank until its function has returned or anything has failed.

    From its starter comes the pickled function with its arguments, to it goes the pickled result.
    """
    world = _world(order, rank)
    try:
        signal.signal(signal.SIGINT, _interrupt_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with world:
            result = _call(starter.recv_bytes(), world)
        starter.send_bytes(result)
    except BaseException:
        # The traceback, or who else is to blame, is in the store by now.
        sys.stdout.flush()
        sys.exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Both the terminal and the parent may send the signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _world(order: RankSetup, rank: int) -> "World":
    # For libraries that start their threads when they are imported, and for processes that this one starts.
    os.environ["OMP_NUM_THREADS"] = str(order.num_threads)
    _stay_on_this_machine()
    import torch

    from bireme.runtime.stores import PrefixStore, Store, open_store
    from bireme.runtime.world import World

    torch.set_num_threads(order.num_threads)
    store: Store = open_store(LOCALHOST, order.port, serve=False, timeout_s=order.timeout_s)
    return World(
        PrefixStore(order.prefix, store) if order.prefix else store,
        rank=rank,
        size=order.num_processes,
        local_rank=order.first_local + rank,
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


def _stay_on_this_machine() -> None:
    """Let gloo connect over the loopback interface, so that a wrong host name or a VPN changes nothing."""
    there = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
    if there:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", there[0])
