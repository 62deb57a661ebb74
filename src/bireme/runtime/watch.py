"""The watch of a rank: it shows the others that this one lives, and finds out why others do not.

A daemon thread does all the talking to the store, because a store can block; the rank's own thread asks this
object only, and never waits longer than it says. The thread cannot free the main thread from a wait,
except by aborting what it waits in; so it ends the process if that does not end by itself.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from bireme.runtime.board import Board, Failure, Heartbeat, PeerLost, RankFailed, grace_s
from bireme.sync.group import AbortedError

_MISSED_BEATS = 3
"""After so many a rank is suspect, if there is a failure that wants an explanation."""
_SILENCE = 0.5
"""After this part of the timeout a silent rank is a failure itself: the rest is for ending all."""
STORE_S = 3.0
"""How long to wait for a store that does not answer."""
KNOWN_S = 1.0
"""How long a rank that failed waits for the others to learn of it. Who started the ranks may end them all as
soon as one has ended, before they have said why.
"""


def is_of_a_peer(error: BaseException | None) -> bool:
    """Whether the error says no more than that another rank, or the way to it, is gone."""
    while error is not None:
        if isinstance(error, PeerLost | AbortedError | dist.DistError):
            return True
        # Gloo, which a program may use, has no type of its own: its errors name the line that they come from.
        if isinstance(error, RuntimeError) and "gloo/" in str(error):
            return True
        error = error.__cause__
    return False


class _Abortable(Protocol):
    """What joins this rank with others, so that it may wait for them."""

    def abort(self) -> None:
        """Free whoever waits."""


class Watch:
    """The watch of rank `rank` among `size`. `doing` is what the engine sets, as often as it likes.

    It is any object, turned into text only when that is needed: once a beat, or when something failed.
    `ends_quietly` is for ranks whose starter tells of the failure.
    """

    def __init__(
        self, board: Board, rank: int, size: int, *, timeout_s: float, ends_quietly: bool = False
    ) -> None:
        self.doing: object = None
        self._board = board
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._timeout_s = timeout_s
        self._beat_s = min(1.0, timeout_s / 10)
        # While somebody waits here; the store has to bear it from every rank, with a pulse of every rank.
        self._hurried_s = min(self._beat_s, 0.02 * size)
        self._ends_quietly = ends_quietly
        self._abortables: WeakSet[_Abortable] = WeakSet()
        self._poke = threading.Event()
        self._changed = threading.Condition()
        self._stopping = False
        self._finished = False
        self._waiting = False
        self._knows = False
        self._count = 0
        self._looked_at = time.monotonic()
        self._to_record: Failure | None = None
        self.cause: Failure | None = None
        """The root cause, once this rank knows of one."""
        self._cause_since: float | None = None
        self._store_error: Exception | None = None
        """Of the last request to the store, if that failed."""
        self._num_failed = 0
        """Looks that failed, one after the other."""
        self._pulses: dict[int, Heartbeat] = {}
        self._changed_at: dict[int, float] = {}

    def start(self) -> None:
        """Begin to give signs of life."""
        threading.Thread(target=self._run, name="bireme watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch. The others will take this rank for dead if it has not failed nor left."""
        self._stopping = True
        self._poke.set()

    def abort_on_failure(self, abortable: _Abortable) -> None:
        """Have this aborted, from the watch's thread, when another rank has failed while it is in use.

        That frees the main thread from a wait. If a rank has failed before, it is aborted now.
        """
        with self._changed:
            self._abortables.add(abortable)
            is_late = self._cause_since is not None
        if is_late:
            abortable.abort()

    def wait_for_everyone(self, limit_s: float) -> None:
        """Wait until every rank has given a sign of life. Raises `RankFailed` if that does not happen."""
        self._wait(limit_s, lambda: len(self._pulses) == len(self._others))
        missing = [other for other in self._others if other not in self._pulses]
        cause = self.cause
        if cause is None and missing:
            absent = Failure.told(f"it did not join within {limit_s:g} s.", missing[0], None)
            cause = self._record(self._out_of_touch() or absent)
        if cause is not None:
            self._knows = True
            raise cause.to_others()

    def leave(self) -> None:
        """Say that this rank's work is done, and wait for the others as long as they live.

        A connection closed early could cost the others what is still on its way. Raises `RankFailed` if
        another rank fails while this one waits.
        """
        self._finished = True
        while not self._wait(STORE_S, lambda: all(pulse.finished for pulse in self._pulses.values())):
            if self.cause is not None:
                self._knows = True
                raise self.cause.to_others()
            if self._is_out_of_touch:
                return  # Who holds the store left, and that one leaves last.

    def failed(self, error: BaseException) -> Failure:
        """Write down that this rank failed by its own error. What comes back is the one that counts.

        If that is this one, it returns once all others know of it, or after `KNOWN_S`.
        """
        cause = self._record(Failure.of(error, self._rank, self._doing_now()))
        if cause.rank == self._rank:
            self._wait_until_known()
        return cause

    def explain(self, error: BaseException) -> Exception:
        """The exception to end with, for a rank whose wait for another one failed with `error`.

        That is a `RankFailed` with the root cause if there is one, else with the rank that is gone or gives
        no sign of life, else with what all are doing. It takes no longer than a few beats.
        """
        missed_s = _MISSED_BEATS * self._beat_s
        self._wait(
            missed_s + self._beat_s + 0.5,
            lambda: self._gone() is not None or self._silent(missed_s) is not None,
        )
        found = self.cause or self._gone() or self._silence(missed_s) or self._out_of_touch()
        if found is None:
            own = Failure.of(error, self._rank, self._doing_now())
            more = f"All ranks are alive: {self._all_doing(own.instruction)}."
            if "Timed out" in str(error):
                more += f" If a step can take longer than {self._timeout_s:g} s, raise the timeout."
            found = replace(own, summary=f"{own.summary} {more}", text=f"{own.text.rstrip()}\n{more}")
        cause = self._record(found)
        if not self._rank and not self._ends_quietly:  # the store, in which others read why, ends with this
            self._wait_until_known()
        return cause.to_others()

    def _wait(self, limit_s: float, predicate: Callable[[], bool]) -> bool:
        """Wait until that is so, or there is a root cause, or no more store, at most so long."""
        with self._changed:
            looked_at = self._looked_at
            self._waiting = True
            self._poke.set()

            def so() -> bool:
                return self._looked_at > looked_at and predicate()

            self._changed.wait_for(lambda: self.cause or self._is_out_of_touch or so(), limit_s)
            self._waiting = False
            return so()

    def _record(self, failure: Failure) -> Failure:
        """Have a root cause written down, unless there is one already or the store does not answer."""
        self._knows = True
        with self._changed:
            if self.cause is None:
                self._to_record = failure
                self._poke.set()
                self._changed.wait_for(lambda: self.cause or self._is_out_of_touch, STORE_S)
            return self.cause or failure

    def _wait_until_known(self) -> None:
        with self._changed:
            self._waiting = True
            self._poke.set()
            self._changed.wait_for(lambda: self._is_out_of_touch or self._all_know, KNOWN_S)
            self._waiting = False

    def _gone(self) -> Failure | None:
        """The failure of a rank that has ended and left no reason in the store, where it leaves it first. If
        all ranks are processes of a launcher, that finds out more.
        """
        if self._ends_quietly:
            return None
        sentence = (
            "it has ended and left no reason: its process or its machine was killed, or the network to it is "
            "cut."
        )
        gone = (rank for rank, one in self._pulses.items() if one.gone and not (one.finished or one.knows))
        return next((Failure.told(sentence, rank, self._pulses[rank].doing) for rank in gone), None)

    def _silent(self, limit_s: float) -> int | None:
        """The rank that has been silent for longest, if that is longer than the limit."""
        now = self._looked_at
        silent = {r: now - at for r, at in self._changed_at.items() if not self._pulses[r].finished}
        longest = max(silent, key=lambda rank: silent[rank], default=None)
        return longest if longest is not None and silent[longest] > limit_s else None

    def _silence(self, limit_s: float) -> Failure | None:
        rank = self._silent(limit_s)
        if rank is None:
            return None
        silence_s = self._looked_at - self._changed_at[rank]
        sentence = (
            f"it has sent no heartbeat for {silence_s:.1f} s: its process, its machine or the network to "
            "it is stopped or dead."
        )
        return Failure.told(sentence, rank, self._pulses[rank].doing)

    @property
    def _all_know(self) -> bool:
        return all(pulse.knows or pulse.finished or pulse.gone for pulse in self._pulses.values())

    @property
    def _is_out_of_touch(self) -> bool:
        """Whether the store failed to answer, and again when it was asked over a new connection."""
        return self._num_failed > 1

    def _out_of_touch(self) -> Failure | None:
        """The failure of having no store to ask, where another rank is lost as well."""
        is_silent = time.monotonic() - self._looked_at >= _MISSED_BEATS * self._beat_s
        if not self._is_out_of_touch and not is_silent:
            return None
        why = f"is gone ({self._store_error})" if self._is_out_of_touch else "does not answer"
        sentence = (
            f"it lost another rank, and the store, which knows why, {why}. "
            "The store is in the launcher, or in rank 0 without one."
        )
        return Failure.told(sentence, self._rank, self._doing_now())

    def _all_doing(self, own: str | None) -> str:
        doing = {self._rank: own or "no instruction"}
        for rank, pulse in self._pulses.items():
            doing[rank] = "finished" if pulse.finished else pulse.doing or "no instruction"
        return ", ".join(f"rank {rank} at {doing[rank]}" for rank in sorted(doing))

    def _doing_now(self) -> str | None:
        return None if self.doing is None else str(self.doing)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._look()
            except Exception as error:
                self._look_failed(error)
            if self._num_failed != 1:  # a request that failed once is made again at once
                self._poke.wait(self._hurried_s if self._waiting else self._beat_s)
            self._poke.clear()
        if self._knows:
            with suppress(Exception):  # the store may be gone with whoever held it
                self._beat()

    def _beat(self) -> None:
        self._count += 1
        self._board.beat(self._rank, Heartbeat(self._count, self._finished, self._doing_now(), self._knows))

    def _look_failed(self, error: Exception) -> None:
        """Note that a request to the store failed. The next one goes over a new connection.

        A store that stays out of reach for the timeout is a failure of this rank, which then ends.
        """
        unreachable_s = time.monotonic() - self._looked_at
        with self._changed:
            self._store_error = error
            self._num_failed += 1
            if self.cause is None and self._num_failed > 1 and unreachable_s > self._timeout_s:
                sentence = (
                    f"it has not reached the store for {unreachable_s:.1f} s ({error}). What holds the store "
                    "is the launcher, or rank 0 where there is none: its process, its machine or the network "
                    "to it is stopped or gone."
                )
                self.cause = Failure.told(sentence, self._rank, self._doing_now())
            self._changed.notify_all()
        if self.cause is not None:
            self._heed(self.cause)

    def _look(self) -> None:
        """One look at the board: say what there is to say, read what there is to read."""
        board = self._board
        failure = self._to_record
        if failure is not None:
            board.record(failure)  # again where that fails: of two the first stays
            self._to_record = None
        self._beat()
        cause = board.cause()
        pulses = board.pulses(self._others)
        with self._changed:
            now = time.monotonic()
            # Who slept itself, or got no processor, cannot say how long the others were silent.
            slept = now - self._looked_at > _MISSED_BEATS * self._beat_s
            for rank, pulse in zip(self._others, pulses, strict=True):
                if pulse is not None and (slept or pulse != self._pulses.get(rank)):
                    self._pulses[rank], self._changed_at[rank] = pulse, now
            self._looked_at = now
            self._store_error, self._num_failed = None, 0
            if self.cause is None:
                self.cause = cause
            self._changed.notify_all()
        if self.cause is not None:
            self._heed(self.cause)
        elif (silence := self._silence(_SILENCE * self._timeout_s)) is not None:
            board.record(silence)
            self._poke.set()

    def _heed(self, cause: Failure) -> None:
        """There is a root cause: free the main thread from its wait, and end the process if it stays."""
        if self._knows or self._stopping:
            return
        now = time.monotonic()
        if self._cause_since is None:
            with self._changed:
                self._cause_since = now
                abortables = list(self._abortables)
            for abortable in abortables:
                # The failure is there already; another one here would only hide it.
                with suppress(Exception):
                    abortable.abort()
        if now - self._cause_since > grace_s(self._timeout_s):
            self._end(cause.to_others())

    def _end(self, why: RankFailed) -> None:
        if not self._ends_quietly:
            print(f"bireme: rank {self._rank} ends. {why.line}", file=sys.stderr, flush=True)  # noqa: T201 (the last word)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(1)
