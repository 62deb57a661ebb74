"""The stores of torch.distributed: small things by name, for all processes of a run.

The server of a store is in one process, and whoever asks it while that one is stopped waits.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    # The same classes: torch.distributed has them for all to use, but does not tell type checkers so.
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "open_store", "second_connection"]


def open_store(address: str, port: int, *, serve: bool, timeout_s: float) -> TCPStore:
    """A store over the network: its server too, or a connection to it. Port 0 takes a free one."""
    # Many in one process may serve at the same port: a script can open one world after another.
    return TCPStore(
        address,
        port,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=port != 0,
    )


def second_connection(store: Store) -> Store:
    """The same store, for another thread: an operation that waits holds up all others of its connection."""
    return cast(Store, store.clone())  # type: ignore[attr-defined]  # torch forgets it
