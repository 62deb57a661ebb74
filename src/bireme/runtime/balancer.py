"""Shares in the engine: every rank learns with a batch's result how busy each one was, and all decide alike.

A decision holds from the first batch on that no rank can have read, and data loaders may look `lead` batches
further than ranks do. So nothing is drained, and nobody is told anything.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from bireme.balance import Balance, Policy, ShareLimits, Shares, begun, rebalance
from bireme.devices import is_accelerator, mark
from bireme.documents import as_dataclass
from bireme.errors import BiremeError
from bireme.runtime.gathering import Moment
from bireme.runtime.layout import Layout

# How long a rank's device works on each batch: its passes, without waits for messages and sums.
#
# On a CPU that is the time of calls, on an accelerator the time between two marks in the device's stream, as
# the recorder has it. Other programs on the device count too: that is what makes it slow.


class Stopwatch:
    """Adds up the work of one rank's device, batch by batch."""

    def __init__(self, device: torch.device) -> None:
        self._is_marked = is_accelerator(device)
        self.now: Callable[[], Moment] = partial(mark, device) if self._is_marked else perf_counter
        """This moment of the device."""
        self._spans: defaultdict[int, list[tuple[Any, Any]]] = defaultdict(list)

    def note(self, batch: int, begin: Moment, end: Moment) -> None:
        """The device worked on a batch from then to then."""
        self._spans[batch].append((begin, end))

    def take(self, batch: int) -> float:
        """The seconds of a batch whose passes are all noted; they are forgotten. From any thread."""
        spans = self._spans.pop(batch, [])
        if not self._is_marked:
            return float(sum(end - begin for begin, end in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3

    def alone(self, batch: int) -> tuple[float]:
        """The same as the only number that a rank gives along."""
        return (self.take(batch),)


_FORMAT = 1


class _NotWantedError(Exception):
    """The shares of a batch that will never be read were asked for."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the batches of a pipeline are shared out among its replicas: `first`, and then as speeds say.

    `policy` is None where shares stay as they are. `lead` is by how many batches data loaders run ahead of
    what the pipeline reads. `busy_s` gives a rank's busy seconds in a batch, by its number, the rank and the
    samples of the rank's replica; left out, they are measured.
    """

    first: Shares
    limits: ShareLimits
    policy: Policy | None = field(default_factory=Policy)
    lead: int = 0
    busy_s: Callable[[int, int, int], float] | None = None


class Balancer:
    """The shares of one rank's pipeline, which are those of all ranks."""

    def __init__(self, sharing: Sharing, layout: Layout, stopwatch: Stopwatch, *, read_ahead: int) -> None:
        if len(sharing.first) != layout.width or not sharing.limits.hold(sharing.first):
            raise BiremeError(
                f"The shares {', '.join(map(str, sharing.first))} do not fit {layout.width} replicas that "
                f"take at least {', '.join(map(str, sharing.limits.least))} and at most "
                f"{', '.join(map(str, sharing.limits.most))} samples of a batch."
            )
        self.balance: Balance = begun(sharing.first)
        """What is decided so far. Only `note` and `load` change it."""
        self.limits = sharing.limits
        """What each replica can take."""
        self._sharing = sharing
        self._layout = layout
        self._stopwatch = stopwatch
        self._ahead = read_ahead + 1 + sharing.lead
        self._known = self._ahead - 1
        """The last batch whose shares nothing can change any more."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.get_ident()

    def shares(self, batch: int) -> Shares:
        """The samples of each replica in a batch. A thread that runs ahead waits here until they are decided.

        The thread of the rank itself never reads so far.
        """
        with self._changed:
            assert batch <= self._known or threading.get_ident() != self._thread, "read_ahead bounds it"
            self._changed.wait_for(lambda: batch <= self._known or self._is_closed)
            if batch > self._known:
                raise _NotWantedError
            return self.balance.at(batch)

    def own_seconds(self, batch: int) -> Sequence[float]:
        """What this rank gives along with a batch: its busy seconds, in its place among all ranks."""
        layout, busy_s = self._layout, self._sharing.busy_s
        row = [0.0] * (layout.width * layout.num_pipeline_ranks)
        took_s = self._stopwatch.take(batch)
        own = self.balance.at(batch)[layout.replica]
        row[layout.rank] = took_s if busy_s is None else busy_s(batch, layout.rank, own)
        return row

    def note(self, batch: int, shares: Shares, rank_seconds: Sequence[float]) -> None:
        """A batch of these shares is done, in which the ranks were so busy.

        A replica's pace is that of its busiest rank. A batch of another size than usual says nothing.
        """
        per_replica = self._layout.num_pipeline_ranks
        seconds = [
            max(rank_seconds[first : first + per_replica])
            for first in range(0, len(rank_seconds), per_replica)
        ]
        with self._changed:
            takes_effect = batch + self._ahead
            if self._sharing.policy is not None and shares == self.balance.at(batch):
                self.balance = rebalance(
                    self.balance,
                    batch,
                    seconds,
                    limits=self.limits,
                    policy=self._sharing.policy,
                    takes_effect=takes_effect,
                )
            # What the next result decides holds after this batch.
            self._known = takes_effect
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """All that decides about the shares to come, as JSON has it."""
        return {"format": _FORMAT, **asdict(self.balance)}

    def load(self, state: Mapping[str, Any] | None, num_trained: int) -> bool:
        """Go on after so many batches from a state; whether it is one for these replicas and this batch.

        Without one the first shares hold, and nothing is known of any speed.
        """
        first = self._sharing.first
        found = None if state is None else as_dataclass(state, Balance, number=_FORMAT, source="The shares")
        fits = found is not None and all(
            len(shares) == len(first) and sum(shares) == sum(first) and self.limits.hold(shares)
            for shares in (found.before, found.shares)
        )
        with self._changed:
            self.balance = found if found is not None and fits else begun(first, num_trained)
            self._known = num_trained - 1 + self._ahead
            self._changed.notify_all()
        return fits

    def begin(self, shares: Shares) -> None:
        """Begin with other shares than those it was made with, before the first batch."""
        self.balance = begun(shares, self.balance.first)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
