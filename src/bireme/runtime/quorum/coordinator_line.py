"""The coordinator's state machine behind a socket, in the process that starts the ranks, and a rank's way there.

Both ends send lines of JSON that say all that holds, so each keeps the last one only: who is slow skips some.
A caller begins with a token that only ranks of this run know.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from bireme.runtime.peer_sockets import own_address
from bireme.sync.coordinator.coordinator import begun, step
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.messages import Life, Member, RankId, Report, RoundAt, Word, decode, encode
from bireme.sync.coordinator.samples import Pool
from bireme.sync.coordinator.settings import Settings
from bireme.sync.coordinator.state import Ended, Event, Tick

__all__ = ["CoordinatorClient", "CoordinatorServer", "Record"]

Record = Callable[[Began | Committed], None]
"""Writes down a line of the ledger, for good, before anybody hears of it."""

BEATS_IN_A_LEASE = 5
TOKEN_BYTES = 16


class CoordinatorServer:
    """A coordinator that ranks reach at `address`. `record` is called with every line of the ledger."""

    def __init__(self, settings: Settings, record: Record) -> None:
        self.settings = settings
        self._state = begun(settings)
        self._record = record
        self._lock = threading.RLock()
        self._writers: dict[RankId, _Writer] = {}
        self._is_closed = threading.Event()
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._listener = socket.create_server(("", 0), backlog=256)
        self._error: BaseException | None = None
        self.num_epochs = self.num_redone = 0
        self.address = f"{own_address()} {self._listener.getsockname()[1]} {self._token}"
        """Where ranks reach it, for them to know."""
        for work in (self._accept, self._tick):
            threading.Thread(target=work, name="bireme coordinator", daemon=True).start()

    @property
    def members(self) -> tuple[Member, ...]:
        """The replicas that train now. Raises what went wrong in the coordinator."""
        if self._error is not None:
            raise self._error
        return self._state.membership.members

    def end_life(self, life: Life) -> None:
        """A start of a replica is over."""
        self._take(Ended(life))

    def close(self) -> None:
        """End. Whoever still calls gets no answer."""
        self._is_closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for writer in list(self._writers.values()):
            writer.close()

    def _take(self, event: Event) -> None:
        with self._lock:
            before = self._state.membership.epoch
            taken = step(self._state, event, time.monotonic())
            for line in taken.lines:
                self._record(line)
            self.num_redone += _dealt_again(self._state.pool, taken.state.pool)
            self._state = taken.state
            self.num_epochs += taken.state.membership.epoch != before
            for rank, word in taken.words:
                if rank in self._writers:
                    self._writers[rank].put(encode(word))

    def _tick(self) -> None:
        while not self._is_closed.wait(min(self.settings.lease_s, self.settings.grace_s or 1.0) / 4):
            try:
                self._take(Tick())
            except BaseException as error:
                self._error = error
                return

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                made = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._hear, args=(made,), name="bireme reports", daemon=True).start()

    def _hear(self, made: socket.socket) -> None:
        """Take the reports of one rank, for as long as its connection lives."""
        writer = _Writer(made)
        try:
            with made, made.makefile("rb") as lines:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                made.settimeout(self.settings.lease_s)
                if not secrets.compare_digest(lines.readline(1024).strip(), self._token.encode()):
                    return
                made.settimeout(None)
                for line in lines:
                    report = decode(Report, line)
                    self._writers[report.rank] = writer
                    self._take(report)
        except OSError:
            return
        except BaseException as error:
            self._error = error
        finally:
            writer.close()


def _dealt_again(before: Pool, after: Pool) -> int:
    """How many samples of new deals had been dealt before."""
    new = [one for key, own in after.deals.items() if before.deals.get(key) != own for one in own]
    return sum(max(min(one.end, before.fresh) - one.begin, 0) for one in new)


class _Writer:
    """Sends the last of the lines that it is given, from a thread of its own: a reader may be stopped."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._changed = threading.Condition()
        self._line: bytes | None = None
        self._is_closed = False
        threading.Thread(target=self._work, name="bireme words", daemon=True).start()

    def put(self, line: bytes) -> None:
        """Send that, and nothing that waits."""
        with self._changed:
            self._line = line
            self._changed.notify_all()

    def close(self) -> None:
        """Send no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def drain(self, limit_s: float) -> None:
        """Wait until nothing waits, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._line is None or self._is_closed, limit_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line is not None or self._is_closed)
                line = self._line
                if line is None:
                    return
            try:
                self._socket.sendall(line + b"\n")
            except OSError:
                self.close()
                return
            with self._changed:
                if self._line is line:
                    self._line = None
                self._changed.notify_all()


class CoordinatorClient:
    """A rank's way to the coordinator at an address. It reports again several times within each lease."""

    def __init__(self, rank: RankId, address: str, *, lease_s: float, timeout_s: float) -> None:
        host, port, token = address.split()
        self._word = Word(epoch=0, number=-1)
        self._beat_s = lease_s / BEATS_IN_A_LEASE
        self._lock = threading.Lock()
        self._report: Report | None = None
        self._rank = rank
        self._act: Callable[[], None] = lambda: None
        self._is_closed = threading.Event()
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)
        self._socket.sendall(token.encode() + b"\n")
        self._writer = _Writer(self._socket)
        for work in (self._hear, self._beat):
            threading.Thread(target=work, name="bireme membership", daemon=True).start()

    @property
    def word(self) -> Word:
        """The last word."""
        return self._word

    def say(self, *, address: str, wants: int, rounds: tuple[RoundAt, ...], healed: int | None) -> None:
        """Report this from now on. Does not wait."""
        with self._lock:
            number = 0 if self._report is None else self._report.number
            self._report = Report(self._rank, number, self._word.epoch, address, wants, rounds, healed=healed)
            self._send()

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word."""
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""
        with self._lock:
            if is_leaving and self._report is not None:
                self._report = replace(self._report, is_leaving=True)
                self._send()
        self._is_closed.set()
        self._writer.drain(self._beat_s)
        self._writer.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self) -> None:
        """Say again what holds. The lock is held."""
        if self._report is None or self._is_closed.is_set():
            return
        self._report = replace(self._report, number=self._report.number + 1, epoch=self._word.epoch)
        self._writer.put(encode(self._report))

    def _beat(self) -> None:
        while not self._is_closed.wait(self._beat_s):
            with self._lock:
                self._send()

    def _hear(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                word = decode(Word, line)
                if (word.epoch, word.number) <= (self._word.epoch, self._word.number) and not word.is_dropped:
                    continue
                is_new_epoch = word.epoch != self._word.epoch
                self._word = word
                if is_new_epoch:
                    with self._lock:
                        self._send()
                self._act()
