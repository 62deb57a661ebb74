"""The server of a coordinator: one thread, one connection for each rank, a line of JSON for each message.

A caller's first line is the token of the run; whoever has another one is refused. What a step leads to is in
the ledger before a word of it is sent. A rank that reads slowly gets only the last word: it says all.
"""

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from bireme.errors import BiremeError
from bireme.runtime.ledger import Ledger
from bireme.sync.coordinator.coordinator import word_for
from bireme.sync.coordinator.host import Host, host_step, host_wake_s
from bireme.sync.coordinator.message_lines import decode, encode
from bireme.sync.coordinator.messages import CoordinatorReply, Incarnation, Notice, RankId, Report
from bireme.sync.coordinator.state import Ended, Event, Tick

__all__ = ["CoordinatorServer", "listener"]

MOST_BYTES = 1 << 24
"""Of a line; a longer one is not from a rank."""
NOTICE = b'{"ended"'
"""How what a launcher says begins."""
NOBODY = RankId(-1, 0, 0)
SHORTEST_S = 0.001
LONGEST_S = 1.0
LATE_S = 0.5
"""A process that looks so much later than it wanted to was stopped, as on a laptop that was closed."""


def listener(address: str = "", port: int = 0) -> socket.socket:
    """A socket that takes connections; port 0 is a free one."""
    return socket.create_server((address, port), backlog=256)


class _Caller:
    """A connection, and what has come and what has yet to go over it."""

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = made
        self.is_known = False
        self.come = b""
        self.going = b""
        self.next: CoordinatorReply | None = None

    def lines(self) -> list[bytes]:
        """The whole lines that have come. Raises an `OSError` if the caller has hung up."""
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionResetError("the caller has hung up")
        *lines, self.come = (self.come + more).split(b"\n")
        if len(self.come) > MOST_BYTES:
            raise ConnectionError("no rank sends such a line")
        return lines

    def flush(self) -> bool:
        """Send what can be sent; whether more is to go."""
        while True:
            if not self.going and self.next is not None:
                self.going, self.next = encode(self.next) + b"\n", None
            if not self.going:
                return False
            try:
                self.going = self.going[self.socket.send(self.going) :]
            except BlockingIOError:
                return True


class CoordinatorServer:
    """Serves one host of a run, from `start` to `close`. `failure` is why it ended by itself. It calls
    `answer` where somebody asks whether it still serves.
    """

    def __init__(
        self,
        host: Host,
        listening: socket.socket,
        token: str,
        ledger: Ledger | None,
        *,
        answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: Exception | None = None
        self._host, self._token, self._ledger = host, token.encode(), ledger
        self._listening = listening
        listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._callers: dict[socket.socket, _Caller] = {}
        self._ranks: dict[RankId, _Caller] = {}
        self._ended: deque[Incarnation] = deque()
        self._answer = answer
        self._is_asked = self._is_closing = False
        self._stopped_s = 0.0
        """How long this process was stopped. That does not count against ranks, which it did not hear."""
        self._ticked_s = self._now_s()
        """When time was last told to the host. What is due after that is due until it has been told again."""
        self._thread = threading.Thread(target=self._run, name="bireme coordinator", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listening.getsockname()[1]
        return port

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def ended(self, life: Incarnation) -> None:
        """Say that a start of a replica is over for certain."""
        self._ended.append(life)
        self._wake()

    def ask(self) -> None:
        """Have it answer, from the thread that serves."""
        self._is_asked = True
        self._wake()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def close(self) -> None:
        """End it."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"x")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._serve()
        except Exception as error:  # it is told where somebody asks
            self.failure = error
        finally:
            self._hang_up()
            self._selector.close()
            self._listening.close()

    def _serve(self) -> None:
        """Wait for the next event, and do what follows."""
        now_s = self._now_s()
        wait_s = min(max(host_wake_s(self._host, self._ticked_s) - now_s, SHORTEST_S), LONGEST_S)
        ready = self._selector.select(wait_s)
        late_s = self._now_s() - now_s - wait_s
        if late_s > LATE_S:
            self._stopped_s += late_s
        for key, _ in ready:
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj == self._wake_read:
                os.read(self._wake_read, 4096)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._callers:
                self._hear(self._callers[key.fileobj])
        if self._is_asked:
            self._is_asked = False
            self._answer()
        while self._ended:
            self._step(Ended(self._ended.popleft()))
        now_s = self._now_s()
        if now_s >= host_wake_s(self._host, self._ticked_s):
            self._ticked_s = now_s
            self._step(Tick())
        for caller in list(self._callers.values()):
            self._flush(caller)

    def _now_s(self) -> float:
        """Seconds by a clock that stands while this process is stopped."""
        return time.monotonic() - self._stopped_s

    def _accept(self) -> None:
        with suppress(OSError):
            caller = _Caller(self._listening.accept()[0])
            self._callers[caller.socket] = caller
            self._selector.register(caller.socket, selectors.EVENT_READ)

    def _hear(self, caller: _Caller) -> None:
        try:
            reports = self._reports(caller)
        except BlockingIOError:
            return
        except (OSError, BiremeError):
            self._forget(caller)
            return
        for report in reports:  # what fails from here on is not the caller's fault
            if isinstance(report, Report):
                self._ranks[report.rank] = caller
                self._step(report)
                continue
            for life in report.ended:
                self._step(Ended(life))
            if self._host.state is not None:
                caller.next = word_for(self._host.state, NOBODY)

    def _reports(self, caller: _Caller) -> list[Report | Notice]:
        """What a caller has said. Raises an error if it has hung up, or is no rank of this run."""
        found = list[Report | Notice]()
        for line in caller.lines():
            if caller.is_known:
                is_notice = line.startswith(NOTICE)
                found.append(decode(Notice, line) if is_notice else decode(Report, line))
            elif line == self._token:
                caller.is_known = True
            else:
                raise ConnectionError("the caller does not know the token of this run")
        return found

    def _step(self, event: Event) -> None:
        done = host_step(self._host, event, self._now_s())
        if self._ledger is not None:
            self._ledger.append(done.lines, is_lasting=done.is_lasting)
        self._host = done.host
        if done.resigns:
            self._hang_up()
        for rank, word in done.words:
            if rank in self._ranks:
                self._ranks[rank].next = word

    def _flush(self, caller: _Caller) -> None:
        try:
            has_more = caller.flush()
        except OSError:
            self._forget(caller)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_more else 0)
        if self._selector.get_key(caller.socket).events != events:
            self._selector.modify(caller.socket, events)

    def _hang_up(self) -> None:
        for caller in list(self._callers.values()):
            self._forget(caller)

    def _forget(self, caller: _Caller) -> None:
        if self._callers.pop(caller.socket, None) is not None:
            self._selector.unregister(caller.socket)
            caller.socket.close()
            self._ranks = {rank: one for rank, one in self._ranks.items() if one is not caller}
