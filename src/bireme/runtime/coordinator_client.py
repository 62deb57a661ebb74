"""A rank's way to the coordinator: it says all that holds of this rank, and knows the last word.

A thread of its own talks: at once when something has changed, and often enough for the lease. If the
connection breaks, it calls the hosts in their order, and tells the one that answers what it knew. A host that
does not coordinate keeps the connection and is silent, for it may have to take up. Meanwhile an `Observer`
asks all hosts: as soon as another host coordinates, the rank calls that host.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from bireme.errors import BiremeError
from bireme.sync.coordinator.messages import (
    TERM,
    CoordinatorReply,
    HostStart,
    Incarnation,
    Known,
    Notice,
    RankId,
    Report,
    decode,
    encode,
    is_notice,
)
from bireme.wire.connection import Connection, Poller, wait_for
from bireme.wire.listener import call_port
from bireme.wire.text_server import MOST_BYTES

Address = tuple[str, int]

_BEATS = 5
"""Reports in a lease, where nothing changes."""
_PATIENCE, _LONG_PATIENCE = 0.5, 2.0
"""Leases without a word after which to call the next host; the long one where none has come from this one."""
_FAREWELL = 3.0
"""Leases that one that is leaving waits at most to be let go."""

BEAT_S = 0.5
"""How often an observer asks a host."""

_NOTHING = CoordinatorReply(epoch=0, number=-1)


def coordinating(word: CoordinatorReply, hosts: Sequence[Address]) -> int:
    """The number of the host whose coordinator gave a word."""
    return word.epoch // TERM % len(hosts)


class Observer:
    """Asks the coordinators of all hosts, again and again, for the word of the one that coordinates.

    A launcher also reports with it which incarnations of its replicas have ended: to all hosts, as any of
    them may have to take up. Launchers agree through it on starts of replicas over several hosts.
    """

    def __init__(self, hosts: Sequence[Address], key: str) -> None:
        self._hosts, self._key = tuple(hosts), key
        self._ended: frozenset[Incarnation] = frozenset()
        self._own_starts: dict[int, HostStart] = {}
        """By the replica."""
        self._starts: dict[int, tuple[float, tuple[HostStart, ...]]] = {}
        """The last answer of each host about starts, and when it came."""
        self.word = _NOTHING
        """The latest word of any coordinator; before the first one it says that there is no member."""
        self._heard_s = time.monotonic()
        self._refused_s: dict[int, float] = {}
        """Since when each host refuses connections, if it does."""
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name="bireme observer", daemon=True)
            for number in range(len(self._hosts))
        ]

    def start(self) -> None:
        """Begin to talk."""
        for thread in self._threads:
            thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since a coordinator answered, or since this observer was made."""
        return time.monotonic() - self._heard_s

    def refused_s(self, number: int) -> float:
        """Seconds for which a host has refused all connections: it is there, and its coordinator is not."""
        since_s = self._refused_s.get(number)
        return 0.0 if since_s is None else time.monotonic() - since_s

    def ended(self, life: Incarnation) -> None:
        """Say from now on that a start of a replica is over for certain."""
        self._ended |= {life}

    def say_start(self, start: HostStart) -> None:
        """Say from now on that this host starts its ranks of an incarnation."""
        self._own_starts = self._own_starts | {start.incarnation.replica: start}

    def starts(self, limit_s: float) -> list[HostStart]:
        """The starts of all hosts, as the answers of the last seconds have them, and of this host."""
        now_s = time.monotonic()
        heard = [own for at_s, own in list(self._starts.values()) if now_s - at_s <= limit_s]
        return [*self._own_starts.values(), *(one for own in heard for one in own)]

    def unheard_s(self, number: int) -> float:
        """Seconds since that host itself answered about starts; infinite if it never did, or hung up."""
        heard = self._starts.get(number)
        return inf if heard is None else time.monotonic() - heard[0]

    def close(self, *, waits: bool = True) -> None:
        """End the talk; its threads end within two beats, which this waits for unless told otherwise."""
        self._is_closing.set()
        for thread in self._threads if waits else ():
            thread.join()

    def _run(self, number: int) -> None:
        while True:
            try:
                with call_port(self._hosts[number], self._key, BEAT_S) as made:
                    self._refused_s.pop(number, None)
                    self._talk(Connection(made), number)
            except ConnectionRefusedError:
                self._refused_s.setdefault(number, time.monotonic())
            except (OSError, BiremeError):
                self._refused_s.pop(number, None)
            self._starts.pop(number, None)
            if self._is_closing.wait(BEAT_S):
                return

    def _talk(self, connection: Connection, number: int) -> None:
        while not self._is_closing.is_set():
            notice = Notice(tuple(sorted(self._ended)), tuple(self._own_starts.values()))
            connection.say(encode(notice))
            connection.flush(BEAT_S)
            ends_s = time.monotonic() + BEAT_S
            while (left_s := ends_s - time.monotonic()) > 0:
                wait_for(connection, select.POLLIN, left_s)
                while (text := connection.next_text(MOST_BYTES)) is not None:
                    if is_notice(text):
                        self._starts[number] = time.monotonic(), decode(Notice, text).starts
                    else:
                        self._take(decode(CoordinatorReply, text))

    def _take(self, word: CoordinatorReply) -> None:
        with self._lock:
            if word.place >= self.word.place:
                self.word, self._heard_s = word, time.monotonic()


class DroppedError(Exception):
    """This replica is no member any more: its incarnation is over, and the launcher begins its next one."""


class CoordinatorClient:
    """One rank's way to the coordinator, for any thread. It begins to talk once there is something to say,
    and then reports as often as its lease needs. Processes of the run have its `key`. A rank that
    `is_empty` has no weights that the run could go on from.
    """

    def __init__(
        self, hosts: Sequence[Address], key: str, rank: RankId, *, lease_s: float, is_empty: bool = False
    ) -> None:
        self.key = key
        self._hosts, self._lease_s = tuple(hosts), lease_s
        self._report = Report(rank, 0, 0, "", is_empty=is_empty)
        self._known = Known()
        self._has_word = False
        self._farewell: CoordinatorReply | None = None
        """The word that has dropped this replica."""
        self._is_closing = self._is_due = self._was_silent = False
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._seeker: Observer | None = None
        """Looks for the host that coordinates while the host that was called gives no word."""
        self._connection: Connection | None = None
        """The connection, as long as there is one over which reports may go."""
        self._said_s = 0.0
        self._act: Callable[[], None] = lambda: None
        self._poller = Poller()
        self._thread = threading.Thread(target=self._run, name="bireme client", daemon=True)

    @property
    def word(self) -> CoordinatorReply:
        """The last word; before the first one it says that there is no member."""
        return self._farewell or self._known.last or _NOTHING

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called after each word, from the client's thread."""
        self._act = act

    def say(self, *, address: str, **fields: Any) -> None:
        """Report these fields from now on. Does not wait."""
        with self._changed:
            if self._is_closing:
                return
            self._report = replace(self._report, address=address, **fields)
            if self._thread.ident is None:
                self._thread.start()
                return
        self._tell()

    def close(self, *, is_leaving: bool) -> None:
        """End the talk. One that is leaving says that it will not be back, and goes once it is let go, as all
        ranks of its replica are then: a coordinator that takes up before has to hear of all of them.
        """
        if self._is_closing:
            return
        has_talked = self._thread.ident is not None
        if is_leaving and has_talked:
            self.say(address=self._report.address, is_leaving=True)
            with self._changed:
                self._changed.wait_for(lambda: self._farewell is not None, _FAREWELL * self._lease_s)
        self._is_closing = True
        self._wake()
        if has_talked:
            self._thread.join()
        self._poller.close()

    def _tell(self) -> None:
        """Send the report from this thread, which is sooner than to wake the client's; that one does it where
        there is no connection.
        """
        with self._sending:
            if self._connection is not None:
                with suppress(OSError):
                    self._send(self._connection)
                    return
        self._wake()

    def _wake(self) -> None:
        self._is_due = True
        self._poller.ring()

    def _run(self) -> None:
        first = 0
        while not self._is_closing:
            talk = self._connected(first)
            if talk is None:
                time.sleep(self._lease_s / _BEATS)
                first = 0
                continue
            number, made = talk
            self._has_word = False
            with made:
                with suppress(OSError, BiremeError):
                    self._talk(Connection(made), number)
                self._poller.forget(made.fileno())
                with self._sending:
                    self._connection = None
            # One that has hung up may be there again; one that says nothing is passed over.
            found = self._found_elsewhere(number)
            first = found if found is not None else number + 1 if self._was_silent else 0
        self._seek(is_needed=False)

    def _connected(self, first: int) -> tuple[int, socket.socket] | None:
        """The first host from that one on that takes a connection."""
        for place in range(len(self._hosts)):
            number = (first + place) % len(self._hosts)
            with suppress(OSError):
                return number, call_port(self._hosts[number], self.key, _PATIENCE * self._lease_s)
        return None

    def _seek(self, *, is_needed: bool) -> None:
        """Look for the host that coordinates, or stop looking."""
        if is_needed and self._seeker is None and len(self._hosts) > 1:
            self._seeker = Observer(self._hosts, self.key)
            self._seeker.start()
        elif not is_needed and self._seeker is not None:
            self._seeker.close(waits=False)
            self._seeker = None

    def _found_elsewhere(self, number: int) -> int | None:
        """The host that coordinates, if it answers and is another one than the host of this number."""
        if self._seeker is None or self._seeker.word is _NOTHING or self._seeker.silent_s > 2 * BEAT_S:
            return None
        found = coordinating(self._seeker.word, self._hosts)
        return None if found == number else found

    def _talk(self, connection: Connection, number: int) -> None:
        """Talk over a connection until it breaks, nothing comes over it for long, or the host of this number
        gives no word and another one coordinates.
        """
        self._was_silent = False
        heard_s = time.monotonic()
        beat_s, self._said_s = self._lease_s / _BEATS, 0.0
        self._poller.want(connection.socket.fileno(), select.POLLIN, lambda: None)
        while True:
            now_s = time.monotonic()
            if self._is_due or now_s >= self._said_s + beat_s:
                with self._sending:
                    self._send(connection)
                    self._connection = connection
                if self._is_closing:
                    return
            wait_s = max(self._said_s + beat_s - now_s, 0.0)
            self._poller.wait(wait_s if self._has_word else min(wait_s, BEAT_S))
            while (text := connection.next_text(MOST_BYTES)) is not None:
                self._take(decode(CoordinatorReply, text))
                heard_s = time.monotonic()
            if self._has_word or time.monotonic() > heard_s + BEAT_S:
                self._seek(is_needed=not self._has_word)
            if self._found_elsewhere(number) is not None:
                return
            patience = _PATIENCE if self._has_word else _LONG_PATIENCE
            if time.monotonic() > heard_s + patience * self._lease_s:
                self._was_silent = True
                return

    def _send(self, connection: Connection) -> None:
        """Send the report. Whoever does so holds `_sending`, so that what is said last is the last."""
        with self._changed:
            self._is_due, self._said_s = False, time.monotonic()
            self._report = replace(
                self._report,
                number=self._report.number + 1,
                epoch=self.word.epoch,
                known=None if self._has_word else self._known,
            )
            connection.say(encode(_brief(self._report) if self._has_word else self._report))
        connection.flush(_PATIENCE * self._lease_s)

    def _take(self, word: CoordinatorReply) -> None:
        with self._changed:
            last = self.word
            if word.is_dropped and word.place >= last.place:
                self._farewell = word
            known = self._known.with_word(word)
            if known is not None:
                self._known, self._has_word = known, True
                is_new = self._report.epoch != word.epoch
                self._is_due |= is_new and word.is_confirmed_at_once(self._report.rounds)
            elif word.place == last.place:
                self._has_word = True  # the connection is a new one, the coordinator is not
            if known is None and self._farewell is None:
                return  # so that nobody is woken for what is known
            self._changed.notify_all()
        self._act()


def _brief(report: Report) -> Report:
    """The report without its last rounds, which only a coordinator needs that takes up after another."""
    rounds = tuple(one if one.last is None else replace(one, last=None) for one in report.rounds)
    return replace(report, rounds=rounds)
