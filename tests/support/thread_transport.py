"""Ranks as threads of one process, for tests: the same contracts as between processes, and stricter ones.

With rendezvous a send holds its rank up until the receive is posted, which is the most a transport may do, so
that a program that can deadlock anywhere does so here. Nothing is shared between ranks: what is sent is
copied. All waits end.
"""

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from bireme.runtime.board import PeerLost
from bireme.runtime.socket_transport import silence
from bireme.runtime.stage_messages import Transport
from bireme.schedule.instruction import Message
from bireme.schedule.routes import Routes
from bireme.sync.group import AbortedError, CollectiveError, MessageGroup, OwnedGroup, Pending, Sums, Waiting
from bireme.wire.connection import Bell
from tests.support.patience import patience_s

__all__ = ["ThreadFabric", "ThreadRank"]

Delay = Callable[[Message], float]


class ThreadFabric:
    """What joins the ranks. `delay` says how many seconds a message takes; none if it is left out. A wait
    ends after `timeout_s`, or when a test has no more patience.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        rendezvous: bool = False,
        delay: Delay | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self._hub = _Hub(
            patience_s() if timeout_s is None else timeout_s, rendezvous, delay or (lambda _key: 0.0)
        )

    def of(self, rank: int) -> "ThreadRank":
        """One rank's view, for its thread. It makes it once."""
        return ThreadRank(self._hub, rank, self.num_ranks)

    def lose(self, rank: int) -> None:
        """Let the others see what they would if the rank's process had died."""
        self._hub.lose(rank)


class ThreadRank:
    """The fabric as one rank sees it. All ranks make the same transports and groups in the same order."""

    def __init__(self, hub: "_Hub", rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._hub = hub
        self._num_made: dict[tuple[int, ...], int] = defaultdict(int)

    def transport(self, ranks: Sequence[int] | None = None, _routes: Routes | None = None) -> Transport:
        """Messages between some ranks, or all, which are called 0, 1, 2, … in this order there."""
        members = tuple(range(self.size) if ranks is None else ranks)
        lines = self._hub.lines_of(self._key(members))
        return _ThreadTransport(self._hub, lines, members, members.index(self.rank))

    def everyone(self) -> MessageGroup:
        """Sums and broadcasts over all ranks."""
        members = tuple(range(self.size))
        return _ThreadGroup(self._hub, self._hub.rounds_of(self._key(members)), members, self.rank)

    def sums(self, _transport: Transport) -> Sums | None:
        """Sums over all ranks, which no thread but theirs makes."""
        return self.group(range(self.size))

    def group(self, ranks: Sequence[int], *, on_host: bool = False) -> OwnedGroup | None:
        """Sums over some ranks; None if this one is not of them."""
        del on_host
        members = tuple(ranks)
        if self.rank not in members:
            return None
        rounds = self._hub.rounds_of(self._key(members))
        return _ThreadGroup(self._hub, rounds, members, members.index(self.rank))

    def _key(self, members: tuple[int, ...]) -> "_Key":
        """The same on every member for what they make together."""
        self._num_made[members] += 1
        return members, self._num_made[members]


_Key = tuple[tuple[int, ...], int]
_Channel = tuple[int, int, bool, int, int]
"""From rank, to rank, direction, stage, bytes."""


@dataclass(slots=True, eq=False)
class _Parcel:
    """A copy of what was sent. Here, as below, `changed` tells who waits for it, and nobody else."""

    payload: Tensor
    arrives_s: float
    changed: threading.Condition
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    """A posted receive, and what it got."""

    changed: threading.Condition
    parcel: _Parcel | None = None


@dataclass(slots=True, eq=False)
class _Line:
    """What a channel holds that was sent and not received, or posted and not sent: one or the other."""

    parcels: deque[_Parcel] = field(default_factory=deque)
    slots: deque[_Slot] = field(default_factory=deque)

    def match(self) -> None:
        while self.parcels and self.slots:
            slot, parcel = self.slots.popleft(), self.parcels.popleft()
            slot.parcel, parcel.is_taken = parcel, True
            slot.changed.notify_all()
            parcel.changed.notify_all()


@dataclass(slots=True, eq=False)
class _Round:
    """One collective: what it is, what each member brought, and who has its result."""

    what: str
    changed: threading.Condition
    brought: dict[int, Tensor] = field(default_factory=dict)
    num_left: int = 0


@dataclass(slots=True, eq=False)
class _Mail:
    """What a member sent to another one and that one has not received."""

    changed: threading.Condition
    tensors: deque[Tensor] = field(default_factory=deque)


class _Hub:
    """The one lock of a fabric and all that lies under it."""

    def __init__(self, timeout_s: float, rendezvous: bool, delay: Delay) -> None:
        self.timeout_s = timeout_s
        self.rendezvous = rendezvous
        self.delay = delay
        self.lock = threading.RLock()
        self.lost: set[int] = set()
        self._lines: dict[_Key, dict[_Channel, _Line]] = defaultdict(lambda: defaultdict(_Line))
        self.mail: dict[tuple[int, int], _Mail] = defaultdict(lambda: _Mail(self.changing()))
        self._rounds: dict[_Key, dict[int, _Round]] = defaultdict(dict)
        self._awaited: Counter[threading.Condition] = Counter()

    def lines_of(self, key: _Key) -> dict[_Channel, _Line]:
        """The same for all members, who may ask at once."""
        with self.lock:
            return self._lines[key]

    def rounds_of(self, key: _Key) -> dict[int, _Round]:
        """The same for all members, who may ask at once."""
        with self.lock:
            return self._rounds[key]

    def changing(self) -> threading.Condition:
        """Something that is waited for."""
        return threading.Condition(self.lock)

    def lose(self, rank: int) -> None:
        with self.lock:
            self.lost.add(rank)
            for changed in self._awaited:
                changed.notify_all()

    def wait(
        self, changed: threading.Condition, is_done: Callable[[], bool], needed: Collection[int]
    ) -> bool:
        """Wait until it is done, a rank that it needs is lost, or the time is over; whether it is done."""
        with self.lock:
            self._awaited[changed] += 1
            changed.wait_for(lambda: is_done() or not self.lost.isdisjoint(needed), self.timeout_s)
            self._awaited[changed] -= 1
            if not self._awaited[changed]:
                del self._awaited[changed]
            return is_done()


class _ThreadTransport:
    """The transport of one rank. Messages of other sizes never meet."""

    is_host = True

    def __init__(self, hub: _Hub, lines: dict[_Channel, _Line], members: tuple[int, ...], rank: int) -> None:
        self._hub = hub
        self._lines = lines
        self._members = members
        self._rank = rank

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Send what the message says it has, and zeros after it; with rendezvous, hold the rank up until it
        is received.
        """
        sent = payload.clone()
        sent[payload.numel() if num_bytes is None else num_bytes :] = 0
        parcel = _Parcel(sent, time.monotonic() + self._hub.delay(key), self._hub.changing())
        with self._hub.lock:
            line = self._lines[self._rank, to, key.forward, key.to_stage, payload.numel()]
            line.parcels.append(parcel)
            line.match()

        def wait() -> None:
            if self._hub.rendezvous and not self._wait(parcel.changed, lambda: parcel.is_taken, to):
                raise self._reason(to, silence(key, to, payload, self._hub.timeout_s, is_send=True))

        wait()
        return Waiting(wait)

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Post a receive."""
        slot = _Slot(self._hub.changing())
        with self._hub.lock:
            line = self._lines[source, self._rank, key.forward, key.to_stage, payload.numel()]
            line.slots.append(slot)
            line.match()

        def wait() -> None:
            if not self._wait(slot.changed, lambda: slot.parcel is not None, source):
                raise self._reason(source, silence(key, source, payload, self._hub.timeout_s, is_send=False))
            assert slot.parcel is not None
            time.sleep(max(slot.parcel.arrives_s - time.monotonic(), 0.0))
            payload.copy_(slot.parcel.payload)

        return Waiting(wait)

    def close(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Give up, as if this rank's process had died."""
        self._hub.lose(self._members[self._rank])

    def _wait(self, changed: threading.Condition, is_done: Callable[[], bool], peer: int) -> bool:
        return self._hub.wait(changed, is_done, (self._members[self._rank], self._members[peer]))

    def _reason(self, peer: int, late: Exception) -> Exception:
        """Why a wait was in vain."""
        if self._members[self._rank] in self._hub.lost:
            return AbortedError("This rank has given its transport up.")
        return PeerLost(peer, "its thread has ended") if self._members[peer] in self._hub.lost else late


class _ThreadGroup:
    """One member of a group. Sums are made in the order of the members, on each of them."""

    def __init__(self, hub: _Hub, rounds: dict[int, _Round], members: tuple[int, ...], rank: int) -> None:
        self.rank = rank
        self.size = len(members)
        self._hub = hub
        self._rounds = rounds
        self._members = members
        self._num_called = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the group."""
        place = self._bring(f"sum of {tensor.dtype} {list(tensor.shape)}", tensor.clone())

        def wait() -> None:
            brought = self._all_brought(place)
            tensor.copy_(sum(brought[1:], start=brought[0]))

        return Waiting(wait)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to fill `into` with the members' tensors."""
        place = self._bring(f"gathering of {tensor.dtype} {list(tensor.shape)}", tensor.clone())

        def wait() -> None:
            for target, source in zip(into, self._all_brought(place), strict=True):
                target.copy_(source)

        return Waiting(wait)

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part of `given`, and to fill `taken` with theirs."""
        assert len(given) == sum(lengths)
        begins = [0, *accumulate(lengths)]
        # All bring the same: what is for whom comes first, and then the elements.
        header = torch.tensor(begins, dtype=torch.float64)
        place = self._bring(f"exchange of {given.dtype}", torch.cat([header, given.double()]))

        def wait() -> None:
            end = 0
            for one, length in zip(self._all_brought(place), taken_lengths, strict=True):
                first, last = (int(one[self.rank + more]) + self.size + 1 for more in (0, 1))
                assert last - first == length, "the members do not agree on what goes where"
                taken[end : end + length] = one[first:last]
                end += length
            assert end == len(taken)

        return Waiting(wait)

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor with that of the member `source`; until then it is of no use."""
        place = self._bring(f"copy of {tensor.dtype} {list(tensor.shape)} from {source}", tensor.clone())
        if source != self.rank:
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)

        def wait() -> None:
            tensor.copy_(self._all_brought(place)[source])

        return Waiting(wait)

    def go_on(self, bell: Bell) -> None:
        """Nothing is left to move: members have brought what they bring."""
        bell.listen()

    def abort(self) -> None:
        """Give up, as if this rank's process had died."""
        self._hub.lose(self._members[self.rank])

    def close(self) -> None:
        """Nothing is held."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a copy to the member `to`."""
        with self._hub.lock:
            mail = self._hub.mail[self._members[self.rank], self._members[to]]
            mail.tensors.append(tensor.clone())
            mail.changed.notify_all()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor with what the member `source` sends."""
        way = self._members[source], self._members[self.rank]
        with self._hub.lock:
            mail = self._hub.mail[way]
        if not self._hub.wait(mail.changed, lambda: bool(mail.tensors), way):
            raise CollectiveError(f"Member {self.rank} waits for member {source} in vain.")
        sent = mail.tensors.popleft()
        if (sent.shape, sent.dtype) != (tensor.shape, tensor.dtype):
            raise CollectiveError(
                f"Member {source} sent {sent.dtype} {list(sent.shape)} to member {self.rank}."
            )
        tensor.copy_(sent)

    def _bring(self, what: str, tensor: Tensor) -> int:
        """Take part in the next collective; gives its number."""
        place, self._num_called = self._num_called, self._num_called + 1
        with self._hub.lock:
            round_ = self._rounds.setdefault(place, _Round(what, self._hub.changing()))
            if round_.what != what:
                raise CollectiveError(
                    f"The ranks {self._members} disagree: {round_.what} on one, {what} on member {self.rank}."
                )
            round_.brought[self.rank] = tensor
            if len(round_.brought) == self.size:
                round_.changed.notify_all()
        return place

    def _all_brought(self, place: int) -> list[Tensor]:
        """What the members brought, in their order, once all are there."""
        round_ = self._rounds[place]
        if not self._hub.wait(round_.changed, lambda: len(round_.brought) == self.size, self._members):
            missing = sorted(set(range(self.size)) - round_.brought.keys())
            raise CollectiveError(
                f"A {round_.what} over the ranks {self._members} waits for the members {missing} in vain."
            )
        with self._hub.lock:
            round_.num_left += 1
            if round_.num_left == self.size:
                del self._rounds[place]
        return [round_.brought[member] for member in range(self.size)]
