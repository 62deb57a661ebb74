"""The coordinator as a process of its own, and who starts it again if it dies.

It has its port as long as the run, so that ranks find it again. One that is started again reads the ledger:
that says which batches count, and that it was the one who wrote it.
"""

import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bireme.errors import BiremeError
from bireme.runtime.coordinator_server import CoordinatorServer, listener
from bireme.runtime.ledger import Ledger
from bireme.runtime.processes import Process, start_process
from bireme.sync.coordinator.host import Host, beginner, waiting
from bireme.sync.coordinator.messages import Incarnation
from bireme.sync.coordinator.settings import CoordinatorSettings
from bireme.sync.coordinator.succession import CoordinatorCandidate

__all__ = ["CoordinatorOrder", "CoordinatorProcess", "serve_host"]

START_S = 60.0
"""How long a process may take to say where it listens."""
LEAST_SILENCE_S = 2.0
"""A process is stuck if it does not answer for a lease, and for so long at least."""
ASLEEP_S = 1.0
"""Who has not looked for so long may have been stopped itself, and does not know who answered meanwhile."""


@dataclass(frozen=True, slots=True)
class CoordinatorOrder:
    """What a coordinator's process is told. The host with the number 0 begins the run, if it `begins`."""

    settings: CoordinatorSettings
    number: int
    num_hosts: int
    token: str
    ledger: Path
    address: str = ""
    port: int = 0
    begins: bool = False


class CoordinatorProcess:
    """The coordinator of one host. The process ends with the one that started it."""

    def __init__(self, order: CoordinatorOrder) -> None:
        self._order = order
        self._process: Process | None = None
        self._talk: Connection | None = None
        self.starts = 0
        """How often it was started."""
        self._asked_s: float | None = None
        """When it was asked what it has not answered yet."""
        self._looked_s = 0.0

    def start(self) -> None:
        """Start the process, and learn its port."""
        self._process, self._talk = start_process("bireme coordinator", serve_host, self._order)
        self.starts += 1
        if not self._talk.poll(START_S):
            raise BiremeError(f"The coordinator's process has not said in {START_S:g} s where it listens.")
        try:
            port = self._talk.recv()
        except EOFError:
            raise BiremeError("The coordinator's process has ended; what it printed may say why.") from None
        order = self._order
        self._order = CoordinatorOrder(
            order.settings, order.number, order.num_hosts, order.token, order.ledger, order.address, port
        )

    @property
    def port(self) -> int:
        """Where it listens, whichever process it is."""
        return self._order.port

    @property
    def process(self) -> Process | None:
        """The process that serves now."""
        return self._process

    def trouble(self) -> str | None:
        """What is wrong with its process: it was killed, or it answers no more. To be asked often.

        Raises where it has failed by itself.
        """
        if self._process is None:
            return None
        self._hear()
        if self._process.status is not None:
            self._hear()  # its last words
            return "has ended"
        return "has not answered for a lease" if self._is_stuck() else None

    def start_again(self) -> None:
        """Start another process in the place of this one, which serves no more."""
        self.close()
        self.start()

    def _hear(self) -> None:
        """Take its answers."""
        with suppress(EOFError, OSError):
            while self._talk is not None and self._talk.poll():
                word = self._talk.recv()
                if word is not None:
                    raise BiremeError(word)
                self._asked_s = None

    def _is_stuck(self) -> bool:
        """Whether it serves no more, though its process is there: it is asked, and does not answer."""
        now_s = time.monotonic()
        if self._asked_s is None or now_s > self._looked_s + ASLEEP_S:
            if self._asked_s is None and self._talk is not None:
                with suppress(OSError):
                    self._talk.send(None)
            self._asked_s = now_s
        self._looked_s = now_s
        return now_s > self._asked_s + max(self._order.settings.lease_s, LEAST_SILENCE_S)

    def ended(self, life: Incarnation) -> None:
        """Say that a start of a replica is over for certain."""
        if self._talk is not None:
            with suppress(OSError):
                self._talk.send(life)

    def close(self) -> None:
        """End it."""
        self._asked_s = None
        if self._talk is not None:
            self._talk.close()
        if self._process is not None:
            self._process.close()


def serve_host(talk: Connection, order: CoordinatorOrder) -> None:
    """Serve until the starter hangs up: first its port goes to that one, then ends of replicas come, and
    questions whether it still serves, which are None, as is the answer.
    """
    ledger = Ledger(order.ledger)

    def answer() -> None:
        with suppress(OSError):
            talk.send(None)

    host, listening = _host(order, ledger), listener(order.address, order.port)
    server = CoordinatorServer(host, listening, order.token, ledger, answer=answer)
    server.start()
    talk.send(server.port)

    def hear() -> None:
        with suppress(EOFError, OSError):
            while True:
                life = talk.recv()
                if life is None:
                    server.ask()
                else:
                    server.ended(life)
        server.close()

    threading.Thread(target=hear, name="bireme coordinator talk", daemon=True).start()
    server.join()
    ledger.close()
    if isinstance(server.failure, BiremeError):
        talk.send(str(server.failure))
    elif server.failure is not None:
        talk.send("".join(traceback.format_exception(server.failure)))


def _host(order: CoordinatorOrder, ledger: Ledger) -> Host:
    used = ledger.last_term
    if order.begins:
        return beginner(order.settings, order.num_hosts, used=used)
    # Where each line is of a replica's own batch, the ledger does not say which rounds count.
    is_own = used >= 0 and used % order.num_hosts == order.number and not order.settings.averages
    recorded = ledger.num_committed if is_own else None
    return waiting(order.settings, CoordinatorCandidate(order.number, order.num_hosts, recorded, used))
