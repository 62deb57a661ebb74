"""The stores of torch.distributed: small things by name, for all processes of a run.

The server of a store is in one process, and whoever asks it while that one is stopped waits.
"""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from bireme.wire.listener import interface_of, open_port

if TYPE_CHECKING:
    # The same classes: torch.distributed has them for all to use, but does not tell type checkers so.
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "new_connection",
    "open_store",
    "second_connection",
]

_REACH_S = 3.0
"""How long to try to reach a store that has been reached before."""


def open_store(address: str, port: int, *, serve: bool, timeout_s: float) -> TCPStore:
    """A store over the network: its server too, or a connection to it. Port 0 takes a free one."""
    timeout = timedelta(seconds=timeout_s)
    if serve and port == 0:
        # Torch would listen on all interfaces, and its store asks for no key.
        listening = open_port(interface_of(address))
        port = listening.getsockname()[1]
        file = listening.detach()
        return TCPStore(
            address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=file
        )
    # Many in one process may serve at the same port: a script can open one world after another.
    return TCPStore(
        address, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=port != 0
    )


def second_connection(store: Store) -> Store:
    """The same store, for another thread: an operation that waits holds up all others of its connection."""
    return cast(Store, store.clone())  # type: ignore[attr-defined]  # torch forgets it


def new_connection(store: Store) -> Store:
    """The same store, where the connection to it may be broken. Raises an `OSError` if nobody serves it."""
    served = store
    while isinstance(served, PrefixStore):
        served = served.underlying_store
    if not isinstance(served, TCPStore):
        return store
    # Torch would try for a long time, and print a page for each try.
    socket.create_connection((served.host, served.port), timeout=_REACH_S).close()
    served.set_timeout(timedelta(seconds=_REACH_S))
    return second_connection(store)
