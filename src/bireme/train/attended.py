"""What a process of a run asks the `bireme join` that has started it, over a socket that it inherits.

ready batch_s ──▶ {}, once it may load state and train         switches ──▶ is_switch
keeper bytes_per_s, timeout_s ──▶ address, key                 kept ──▶ address, key, or nulls
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, Self

from bireme.errors import BiremeError
from bireme.runtime.copies.keeper import KeeperAddress

PHASE, SOCKET = "BIREME_PHASE", "BIREME_ATTENDANCE"
_MOST_LETTERS = 10_000


class Attended:
    """The end of the process. A run has one for each machine: its launcher, or its first rank."""

    def __init__(self, made: socket.socket) -> None:
        made.set_inheritable(False)
        self._file = made.makefile("rw", encoding="utf-8")

    @classmethod
    def of(cls, variables: MutableMapping[str, str]) -> Self | None:
        """The end that this process has inherited, if `bireme join` has started it. Processes that this one
        starts find none.
        """
        file = variables.pop(SOCKET, None)
        return None if file is None else cls(socket.socket(fileno=int(file)))

    def wait_to_train(self, batch_s: float | None) -> None:
        """Report that the run is prepared, and what is predicted of it. Returns once the phase before has
        ended.
        """
        self._ask("ready", batch_s=batch_s)

    def is_switch(self) -> bool:
        """Whether the run stops here because another phase follows."""
        return bool(self._ask("switches")["is_switch"])

    def keeper(self, bytes_per_s: float | None, timeout_s: float) -> KeeperAddress:
        """The keeper of second copies of this machine, which outlives this process; it is started."""
        found = self._ask("keeper", bytes_per_s=bytes_per_s, timeout_s=timeout_s)
        return KeeperAddress(found["address"], found["key"])

    def kept(self) -> KeeperAddress | None:
        """The keeper of this machine, if it was started by any phase."""
        found = self._ask("kept")
        return KeeperAddress(found["address"], found["key"]) if found["address"] else None

    def _ask(self, what: str, **words: object) -> dict[str, Any]:
        try:
            self._file.write(json.dumps({"do": what, **words}) + "\n")
            self._file.flush()
            found: dict[str, Any] = json.loads(self._file.readline(_MOST_LETTERS))
        except (OSError, ValueError):
            raise BiremeError("`bireme join` on this machine has ended.") from None
        if "error" in found:
            raise BiremeError(found["error"])
        return found


def serve_attended(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[socket.socket, socket.socket]:
    """The ends of a new socket: that of `bireme join`, whose requests a thread answers until it is closed,
    and the end that a process is to inherit.
    """
    here, there = socket.socketpair()
    there.set_inheritable(True)

    def serve() -> None:
        with suppress(OSError, ValueError, KeyError), here.makefile("rw", encoding="utf-8") as file:
            while line := file.readline(_MOST_LETTERS):
                try:
                    found = answer(json.loads(line))
                except BiremeError as error:
                    found = {"error": str(error)}
                file.write(json.dumps(found) + "\n")
                file.flush()

    threading.Thread(target=serve, name="bireme attended", daemon=True).start()
    return here, there


def phase_of(variables: Mapping[str, str]) -> int:
    """The number of the phase that this process is of; 0 outside of `bireme join`."""
    return int(variables.get(PHASE, "0"))
