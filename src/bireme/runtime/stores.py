"""The store of a run: small values by name, for all its processes.

One process serves it. The others ask over connections that have proved to know the key of the run, so a
stranger's bytes cost nothing. Torch forms its groups through the same store. Whoever asks while the process
that serves it is stopped waits.
"""

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from bireme.errors import BiremeError, first_line
from bireme.wire.listener import KEY, call_port, interface_of, new_key, open_port, own_address
from bireme.wire.messages import MessageConnection
from bireme.wire.text_server import MOST_BYTES, Client, TextServer

if TYPE_CHECKING:
    # The same classes: torch.distributed has them for all to use, but does not tell type checkers so.
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as _TorchPrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
else:
    from torch.distributed import HashStore as HashStore
    from torch.distributed import PrefixStore as _TorchPrefixStore
    from torch.distributed import Store as Store
    from torch.distributed import TCPStore as TCPStore

_CONNECT_S = 3.0
"""How long one try to reach the server may take."""
_AGAIN_S = 0.1
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.02
"""Between two looks whether a value has come."""


class PrefixStore(_TorchPrefixStore):
    """A part of a store. Torch itself would not keep a store in Python alive."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self._prefix, self._store = prefix, store

    def set_while_here(self, key: str, value: str, after: str) -> None:
        """As `RunStore.set_while_here`; a store of another kind keeps the value."""
        name = f"{self._prefix}/{key}"
        if isinstance(self._store, PrefixStore | RunStore):
            self._store.set_while_here(name, value, after)
        else:
            self._store.set(name, value)


class StoreServer(TextServer):
    """Holds the values, and answers one request of a client after the other. Bytes go as Latin-1."""

    def __init__(self, listening: socket.socket, key: str) -> None:
        super().__init__(listening, key, lambda answer: json.dumps(answer).encode(), _request)
        self._values: dict[str, str] = {}
        self._after: dict[Client, dict[str, tuple[str, str]]] = {}
        """By client and name: the value until its connection is closed, and the one after that."""

    def hear(self, client: Client, message: list[Any]) -> None:
        """Answer a request."""
        values = self._values
        answer: Any = None
        match message:
            case ["set", str(name), str(value)]:
                values[name] = value
            case ["set_while_here", str(name), str(value), str(after)]:
                is_here = client in self._clients
                values[name] = value if is_here else after
                if is_here:
                    self._after.setdefault(client, {})[name] = value, after
            case ["get", [*names]]:
                answer = [values.get(name) for name in names]
            case ["add", str(name), int(number)]:
                values[name] = str(answer := int(values.get(name, "0")) + number)
            case ["compare_set", str(name), str(expected), str(desired)]:
                if values.get(name, "") == expected:
                    values[name] = desired
                answer = values.get(name, expected)
            case ["delete", str(name)]:
                answer = values.pop(name, None) is not None
            case ["count"]:
                answer = len(values)
        client.send([answer])

    def _forget(self, client: Client) -> None:
        for name, (value, after) in self._after.pop(client, {}).items():
            if self._values.get(name) == value:  # else another connection has set it
                self._values[name] = after
        super()._forget(client)


def _request(text: bytes) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise BiremeError("A request to the store of the run cannot be read. Use one version of Bireme.")
    return found


class RunStore(Store):
    """A connection to the server of a store, for all threads of a process. It is made with the first request,
    and again after one that failed. A request that fails raises a `DistNetworkError`, a wait for a value that
    does not come a `DistStoreError`.
    """

    def __init__(self, host: str, port: int, key: str, timeout_s: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self.host, self.port, self.key = host, port, key
        self._connection: MessageConnection | None = None
        self._asking = threading.Lock()

    def reached(self) -> Self:
        """The store itself, once it answers."""
        ends_s = time.monotonic() + self._limit_s
        while True:
            try:
                self.num_keys()
            except dist.DistNetworkError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(_AGAIN_S)
            else:
                return self

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value at a name, over what was there."""
        self._ask("set", key, _text(value))

    def set_while_here(self, key: str, value: str, after: str) -> None:
        """Put a value at a name, which `after` replaces once the connection of this process is closed."""
        self._ask("set_while_here", key, value, after)

    def get(self, key: str) -> bytes:
        """The value at a name, once there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values at names, once there are all."""
        return [value.encode("latin-1") for value in self._all_of(keys, None)]

    def check(self, keys: list[str]) -> bool:
        """Whether there is a value at each of these names."""
        return None not in self._ask("get", keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once there is a value at each of these names."""
        self._all_of(keys, timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a number; a name without a value counts as 0."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Put a value if the present one, or that of a name without a value, which is empty, is as expected.
        Returns the value that counts.
        """
        found: str = self._ask("compare_set", key, _text(expected_value), _text(desired_value))
        return found.encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Forget a name; whether it was there."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """How many names have values."""
        return int(self._ask("count"))

    # Torch's C++ calls these by other names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _limit_s(self) -> float:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]  # torch forgets it
        return limit.total_seconds()

    def _all_of(self, names: Sequence[str], timeout: timedelta | None) -> list[str]:
        """The values at names, once there are all."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        ends_s, pause_s = time.monotonic() + limit_s, _LEAST_PAUSE_S
        while True:
            found: list[str | None] = self._ask("get", list(names))
            if None not in found:
                return [value for value in found if value is not None]
            if time.monotonic() > ends_s:
                missing = ", ".join(name for name, value in zip(names, found, strict=True) if value is None)
                raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {missing}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _ask(self, *request: Any) -> Any:
        limit_s = self._limit_s
        with self._asking:
            connection, self._connection = self._connection, None
            try:
                if connection is None:
                    made = call_port((self.host, self.port), self.key, _CONNECT_S)
                    connection = MessageConnection(made, limit_s, most_bytes=MOST_BYTES)
                connection.say(request)
                answer = connection.hear(limit_s=limit_s)
            except OSError as error:
                if connection is not None:
                    connection.socket.close()
                raise dist.DistNetworkError(
                    f"The store of the run at {self.host}:{self.port} cannot be reached: {error}"
                ) from error
            self._connection = connection
        return answer[0]


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def serve_store(address: str, *, key: str, timeout_s: float) -> RunStore:
    """A store that this process serves at a free port, for as long as there is the object."""
    server = StoreServer(open_port(interface_of(address)), key)
    server.start()
    store = RunStore(address, server.port, key, timeout_s)
    weakref.finalize(store, server.close)
    return store


# The store where something else started the processes. That of torchrun's agent asks for no key.


def environment_store(rank: int, address: str, port: int, *, timeout_s: float) -> Store:
    """The store at `MASTER_ADDR` and `MASTER_PORT`: torchrun's, or one that rank 0 serves with the key in
    `BIREME_KEY`. Raises a `BiremeError` if it cannot be reached in time.
    """
    key = os.environ.get(KEY, "")
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return torch_store(address, port, timeout_s=timeout_s)
        if rank == 0:
            _serve_at(address, port, key)
        return RunStore(address, port, key, timeout_s).reached()
    except (dist.DistError, OSError) as error:
        why = first_line(error).rstrip(".")
        raise BiremeError(
            f"Rank {rank} cannot reach the store of the run at MASTER_ADDR = {address}, MASTER_PORT = "
            f"{port}: {why}. All ranks need the same two values, and the same {KEY} if it is set. Rank 0 (or "
            "torchrun's first agent) must be reachable there."
        ) from error


@cache
def _serve_at(address: str, port: int, key: str) -> StoreServer:
    """Served until the process ends: a script can open one world after another."""
    server = StoreServer(open_port(interface_of(address), port), key)
    server.start()
    return server


def part_of(store: Store, prefix: str, rank: int, *, timeout_s: float) -> Store:
    """A part of an `environment_store`. Of torchrun's it is a store that rank 0 serves. Its address is in
    torchrun's, and so is its key, unless that is in `BIREME_KEY`.
    """
    part = PrefixStore(prefix, store)
    if isinstance(store, RunStore):
        return part
    shared_key = os.environ.get(KEY, "")
    if rank == 0:
        own = serve_store(own_address(), key=shared_key or new_key(), timeout_s=timeout_s)
        part.set("store", json.dumps([own.host, own.port, "" if shared_key else own.key]))
        return own
    host, port, key = json.loads(part.get("store"))
    return RunStore(host, port, key or shared_key, timeout_s)


def torch_store(address: str, port: int, *, serve: bool = False, timeout_s: float) -> TCPStore:
    """A store of torch's own: its server too, at a free port, or a connection to it."""
    timeout = timedelta(seconds=timeout_s)
    if not serve:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    listening = open_port(interface_of(address))  # torch would listen on all interfaces
    port, file = listening.getsockname()[1], listening.detach()
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=file
    )
