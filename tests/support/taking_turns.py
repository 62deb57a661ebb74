"""Threads that take turns on a simulated clock: one runs at a time, and a seed says which is next.

So code that blocks runs as it is, in any order that threads of their own could have run in, and in the same
order again. Time passes when nobody can go on.
"""

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

__all__ = ["Killed", "StandsStillError", "Turns"]


class Killed(BaseException):
    """The thread is of a process that was killed."""


class StandsStillError(AssertionError):
    """Nobody can go on any more."""


class _Turn(threading.Thread):
    """One of the threads; `is_ready` says whether it can go on."""

    def __init__(self, turns: "Turns", name: str, owner: object, act: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.owner, self.is_over, self.is_killed = owner, False, False
        self.is_ready: Callable[[], bool] = lambda: True
        self.error: BaseException | None = None
        self.go = threading.Lock()
        self.go.acquire()
        self._turns, self._act = turns, act

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.is_killed:
                self._act()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._turns.back.release()


class Turns:
    """The clock, what is to happen at which time, and the threads."""

    def __init__(self, seed: int) -> None:
        self.random, self.now_s = Random(seed), 0.0
        self.back = threading.Lock()
        self.back.acquire()
        self._threads: list[_Turn] = []
        self._running: _Turn | None = None
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def spawn(self, name: str, owner: object, act: Callable[[], None]) -> None:
        """Begin a thread; `kill` ends all threads of an owner."""
        made = _Turn(self, name, owner, act)
        self._threads.append(made)
        made.start()

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Have something happen; it must not block."""
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Let others run until that is so; for one of the threads."""
        own = self._running
        assert own is not None, "one of the threads calls"
        own.is_ready = is_ready
        self.back.release()
        own.go.acquire()
        if own.is_killed:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Compute for so long."""
        woken: list[bool] = []
        self.after(seconds, lambda: woken.append(True))
        self.wait(lambda: bool(woken))

    def kill(self, owner: object) -> None:
        """End the threads of an owner the next time that they would run."""
        for one in self._threads:
            one.is_killed = one.is_killed or one.owner == owner

    def run(self, most_s: float) -> None:
        """Until all threads have ended. Raises what one of them raised, and where time is over."""
        try:
            while any(not one.is_over for one in self._threads):
                if self._runs_one():
                    continue
                if not self._queue or self._queue[0][0] > most_s:
                    waiting = ", ".join(one.name for one in self._threads if not one.is_over)
                    raise StandsStillError(f"these wait for ever: {waiting}")
                self.now_s, _, act = heappop(self._queue)
                act()
        finally:
            for one in self._threads:
                one.is_killed = True
            while self._runs_one():
                pass

    def _runs_one(self) -> bool:
        """Let one of those run that can; False if there is none."""
        ready = [one for one in self._threads if not one.is_over and (one.is_killed or one.is_ready())]
        if not ready:
            return False
        self._running = chosen = self.random.choice(ready)
        chosen.go.release()
        self.back.acquire()
        if chosen.is_over:
            self._threads.remove(chosen)
            chosen.join()
            if chosen.error is not None and not chosen.is_killed:
                raise chosen.error
        return True
