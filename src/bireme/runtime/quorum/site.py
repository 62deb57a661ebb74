"""One host among those of a run whose replicas may die: its replicas, its coordinator, and how it hears of
the others.

Each host has a launcher, which starts the replicas of that host, and a coordinator; one of these coordinates.
A launcher tells all coordinators which lives of its replicas have ended, again and again, because any of them
may take up. The one that coordinates answers with its word.
"""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.runtime.coordinator_client import Address
from bireme.runtime.coordinator_process import CoordinatorProcess
from bireme.sync.coordinator.message_lines import decode, encode
from bireme.sync.coordinator.messages import TERM, Life, Notice, Word

__all__ = ["BEAT_S", "Observer", "Site"]

BEAT_S = 0.5
"""How often a launcher says which lives have ended."""


@dataclass(frozen=True, slots=True)
class Site:
    """The host `number` of a run, and the `replicas` that are started there. `hosts` are where the
    coordinators of all hosts listen; callers know the `token`. Its `coordinator` has been started. The run
    began at `began_s`, by the clock of this machine (`time.monotonic`); the first lives here have the number
    `first_life`.
    """

    number: int
    coordinator: CoordinatorProcess
    hosts: tuple[Address, ...]
    token: str
    replicas: tuple[int, ...]
    began_s: float
    first_life: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the run has no other host."""
        return len(self.hosts) == 1

    def coordinates(self, word: Word) -> bool:
        """Whether a word is of the coordinator on this host."""
        return word.epoch // TERM % len(self.hosts) == self.number


class Observer:
    """What a launcher says to the coordinators of all hosts, and what the one that coordinates answers."""

    def __init__(self, hosts: Sequence[Address], token: str) -> None:
        self._token = token.encode()
        self._ended: frozenset[Life] = frozenset()
        self._word = Word(epoch=0, number=-1)
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(host,), name="bireme observer", daemon=True)
            for host in hosts
        ]

    def start(self) -> None:
        """Begin to talk."""
        for thread in self._threads:
            thread.start()

    @property
    def word(self) -> Word:
        """The latest word of any coordinator; before the first one it says that nobody is a member."""
        return self._word

    def ended(self, life: Life) -> None:
        """Say from now on that a start of a replica is over for certain."""
        self._ended |= {life}

    def close(self) -> None:
        """End the talk."""
        self._is_closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self, host: Address) -> None:
        while not self._is_closing.wait(BEAT_S):
            with suppress(OSError, BiremeError), socket.create_connection(host, timeout=BEAT_S) as made:
                self._talk(made)

    def _talk(self, made: socket.socket) -> None:
        made.sendall(self._token + b"\n")
        come = b""
        while not self._is_closing.is_set():
            made.sendall(encode(Notice(tuple(sorted(self._ended)))) + b"\n")
            ends_s = time.monotonic() + BEAT_S
            while (left_s := ends_s - time.monotonic()) > 0:
                made.settimeout(left_s)
                with suppress(TimeoutError):
                    more = made.recv(1 << 16)
                    if not more:
                        return
                    *lines, come = (come + more).split(b"\n")
                    for line in lines:
                        self._take(decode(Word, line))

    def _take(self, word: Word) -> None:
        with self._lock:
            if word.place > self._word.place:
                self._word = word
