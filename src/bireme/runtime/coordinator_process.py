"""The coordinator as a process of its own, and who starts it again if it dies.

It has its port as long as the run, so that ranks find it again. One that is started again reads the ledger:
that says which batches count, and that it was the one who wrote it.
"""

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bireme.documents import read_json_lines
from bireme.errors import BiremeError, system_errors
from bireme.files import cut_half_line
from bireme.runtime.processes import Process, start_process
from bireme.sync.coordinator.coordinator import word_for
from bireme.sync.coordinator.host import CoordinatorCandidate, Host, beginner, host_step, host_wake_s
from bireme.sync.coordinator.ledger_check import lost_rounds
from bireme.sync.coordinator.messages import (
    TERM,
    CoordinatorReply,
    HostStart,
    Incarnation,
    Notice,
    RankId,
    Report,
    decode,
    encode,
    is_notice,
)
from bireme.sync.coordinator.samples import Began, Committed, CoordinatorSettings, in_force, ledger_document
from bireme.sync.coordinator.state import Ended, Event, Tick
from bireme.wire.listener import interface_of, open_port
from bireme.wire.text_server import LONGEST_S, Client, TextServer

# The ledger of a run: `ledger.jsonl` in its folder, a line for each committed round, written before any rank
# hears of it.


class Ledger:
    """Appends to the ledger at a path, which is made if there is none. A last line that was cut goes before
    the first one that is written here: until then another coordinator may be writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_written = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(
        self, lines: Sequence[Began | Committed], *, is_lasting: bool = True, takes_up: bool = False
    ) -> None:
        """Return once the lines are written; on the disk, with all before them, if they are `is_lasting`. A
        coordinator that begins, or `takes_up`, first makes lines good that were lost with another machine.
        """
        begun = [one for one in lines if isinstance(one, Began)]
        lost = [lost_rounds(self._path, one, takes_up=takes_up) for one in begun[:1]]
        lines = [*(one for one in lost if one is not None), *lines]
        text = "".join(json.dumps(ledger_document(line), separators=(",", ":")) + "\n" for line in lines)
        if not text:
            return
        left = text.encode()
        remedy = (
            "A round counts only once it is written there, so the run cannot continue. Make room on the "
            "disk, and resume it."
        )
        with system_errors(f"{self._path} cannot be written", remedy):
            if not self._has_written:
                cut_half_line(self._path)
                self._has_written = True
            while left:
                left = left[os.write(self._file, left) :]
            if is_lasting:
                os.fsync(self._file)

    def close(self) -> None:
        """End the file."""
        os.close(self._file)

    @property
    def last_term(self) -> int:
        """The last term of a coordinator that wrote here; -1 if there was none."""
        epochs = (record.get("epoch") for record in self._records())
        return max((epoch // TERM for epoch in epochs if isinstance(epoch, int)), default=-1)

    @property
    def num_committed(self) -> int:
        """How many batches count, as far as it is written here."""
        found = 0
        for record in self._records():
            batch = record.get("batch")
            if isinstance(batch, int):
                found = batch + (record.get("kind") == "round")
        return found

    def _records(self) -> Iterable[dict[str, object]]:
        return in_force(read_json_lines(self._path, start="start").records).values()


# The server of a coordinator. What a step leads to is in the ledger before a word of it is sent.


class _EncodedOnce:
    """Encodes messages, each of the last few only once: most ranks get the same word."""

    def __init__(self) -> None:
        self._made: deque[tuple[Notice | CoordinatorReply, bytes]] = deque(maxlen=8)

    def __call__(self, message: Notice | CoordinatorReply) -> bytes:
        for known, text in self._made:
            if known is message:
                return text
        text = encode(message)
        self._made.append((message, text))
        return text


_NOBODY = RankId(-1, 0, 0)
_SHORTEST_S = 0.001
_LATE_S = 0.5
"""A process that looks so much later than it wanted to was stopped, as on a laptop that was closed."""


def _heard(text: bytes) -> Report | Notice:
    return decode(Notice, text) if is_notice(text) else decode(Report, text)


class CoordinatorServer(TextServer):
    """Serves one host of a run. It calls `answer` where somebody asks whether it still serves."""

    def __init__(
        self,
        host: Host,
        listening: socket.socket,
        key: str,
        ledger: Ledger | None,
        *,
        answer: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(listening, key, _EncodedOnce(), _heard)
        self._host, self._ledger = host, ledger
        self._ranks: dict[RankId, Client] = {}
        self._told: dict[Client, tuple[int, int]] = {}
        """The place of the last word to each rank."""
        self._ended: deque[Incarnation] = deque()
        self._starts: dict[Client, tuple[float, tuple[HostStart, ...]]] = {}
        """The last notice of each launcher about starts, and when it came."""
        self._answer, self._is_asked = answer, False
        self._stopped_s = 0.0
        """How long this process was stopped. That does not count against ranks, which it did not hear."""
        self._ticked_s = self._now_s()
        """When time was last told to the host. What is due after that is due until it has been told again."""

    def ended(self, life: Incarnation) -> None:
        """Say that a start of a replica is over for certain."""
        self._ended.append(life)
        self._poller.ring()

    def ask(self) -> None:
        """Have it answer, from the thread that serves."""
        self._is_asked = True
        self._poller.ring()

    def _turn(self) -> None:
        """Wait for the next event, and do what follows."""
        now_s = self._now_s()
        wait_s = min(max(host_wake_s(self._host, self._ticked_s) - now_s, _SHORTEST_S), LONGEST_S)
        self._poller.wait(wait_s)
        late_s = self._now_s() - now_s - wait_s
        if late_s > _LATE_S:
            self._stopped_s += late_s
        self._take()
        if self._is_asked:
            self._is_asked = False
            self._answer()
        while self._ended:
            self._step(Ended(self._ended.popleft()))
        now_s = self._now_s()
        if now_s >= host_wake_s(self._host, self._ticked_s):
            self._ticked_s = now_s
            self._step(Tick())
        self._flush()

    def _now_s(self) -> float:
        """Seconds by a clock that stands while this process is stopped."""
        return time.monotonic() - self._stopped_s

    def hear(self, client: Client, message: Report | Notice) -> None:
        """A report of a rank, or a notice of a launcher, which is answered even by a waiting host."""
        if isinstance(message, Report):
            if client in self._clients:
                self._ranks[message.rank] = client
            self._step(message)
            return
        for life in message.ended:
            self._step(Ended(life))
        if message.starts:
            self._starts.pop(client, None)  # the newest are the last
            self._starts[client] = self._now_s(), message.starts
            client.send(self._starts_of_hosts())
        if self._host.state is not None:
            client.send(word_for(self._host.state, _NOBODY))

    def _starts_of_hosts(self) -> Notice:
        """The starts of the launchers that were heard within the lease, of each host the last one."""
        since_s = self._now_s() - self._host.settings.lease_s
        found = {
            (one.host, one.incarnation.replica): one
            for at_s, own in self._starts.values()
            for one in own
            if at_s >= since_s
        }
        return Notice((), tuple(found.values()))

    def _step(self, event: Event) -> None:
        done = host_step(self._host, event, self._now_s())
        if self._ledger is not None:
            takes_up = self._host.state is None
            self._ledger.append(done.lines, is_lasting=done.is_lasting, takes_up=takes_up)
        self._host = done.host
        if done.resigns:
            self._hang_up()
        for rank, word in done.words:
            if rank in self._ranks:
                self._tell(self._ranks[rank], word)

    def _tell(self, client: Client, word: CoordinatorReply) -> None:
        """Send a word to a rank; to one that has it only its place, which says that this host serves."""
        if self._told.get(client) == word.place and not word.is_dropped:
            if CoordinatorReply in client.next:
                return
            word = CoordinatorReply(*word.place)
        self._told[client] = word.place
        client.send(word)

    def _forget(self, client: Client) -> None:
        super()._forget(client)
        self._ranks = {rank: one for rank, one in self._ranks.items() if one is not client}
        self._starts.pop(client, None)
        self._told.pop(client, None)


_START_S = 60.0
"""How long a process may take to say where it listens."""
_LEAST_SILENCE_S = 2.0
"""A process is stuck if it does not answer for a lease, and for so long at least."""
_ASLEEP_S = 1.0
"""Who has not looked for so long may have been stopped itself, and does not know who answered meanwhile."""


@dataclass(frozen=True, slots=True)
class CoordinatorOrder:
    """What a coordinator's process is told. The host with the number 0 begins the run, if it `begins`."""

    settings: CoordinatorSettings
    number: int
    num_hosts: int
    key: str
    ledger: Path
    address: str = ""
    port: int = 0
    begins: bool = False


class CoordinatorProcess:
    """The coordinator of one host. The process ends with the one that started it."""

    def __init__(self, order: CoordinatorOrder) -> None:
        self._order = order
        self.process: Process | None = None
        """The process that serves now."""
        self._talk: Pipe | None = None
        self.starts = 0
        """How often it was started."""
        self._asked_s: float | None = None
        """When it was asked what it has not answered yet."""
        self._looked_s = 0.0

    def start(self) -> None:
        """Start the process, and learn its port."""
        self.process, self._talk = start_process("bireme coordinator", _serve_host, self._order)
        self.starts += 1
        if not self._talk.poll(_START_S):
            raise BiremeError(f"The coordinator's process has not said in {_START_S:g} s where it listens.")
        try:
            port = self._talk.recv()
        except EOFError:
            raise BiremeError("The coordinator's process has ended; what it printed may say why.") from None
        self._order = replace(self._order, port=port)

    @property
    def port(self) -> int:
        """Where it listens, whichever process it is."""
        return self._order.port

    def trouble(self) -> str | None:
        """What is wrong with its process: it was killed, or it answers no more. To be asked often.

        Raises where it has failed by itself.
        """
        if self.process is None:
            return None
        self._hear()
        if self.process.status is not None:
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
        if self._asked_s is None or now_s > self._looked_s + _ASLEEP_S:
            if self._asked_s is None and self._talk is not None:
                with suppress(OSError):
                    self._talk.send(None)
            self._asked_s = now_s
        self._looked_s = now_s
        return now_s > self._asked_s + max(self._order.settings.lease_s, _LEAST_SILENCE_S)

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
        if self.process is not None:
            self.process.close()


def _serve_host(talk: Pipe, order: CoordinatorOrder) -> None:
    """Serve until the starter hangs up: first its port goes to that one, then ends of replicas come, and
    questions whether it still serves, which are None, as is the answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal, on which the ranks agree
    ledger = Ledger(order.ledger)

    def answer() -> None:
        with suppress(OSError):
            talk.send(None)

    host, listening = _host(order, ledger), open_port(interface_of(order.address), order.port)
    server = CoordinatorServer(host, listening, order.key, ledger, answer=answer)
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
    return Host(order.settings, CoordinatorCandidate(order.number, order.num_hosts, recorded, used))
