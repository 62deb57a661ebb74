"""Groups of ranks on hosts over sockets of their own, which the thread reads and writes that waits.

They ask for the key of the meeting, and are encrypted and paced as all of Bireme's own connections are. A
member sends without asking the other one first, so a message takes the latency of the link once.

    a few numbers, or two members     each sends all it has to all others, and adds up what comes
    more, each on a host of its own   each part to the member that owns it, which sends the sum to all
    more, some of them on one host    a ring, which sends the fewest bytes from host to host
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from bireme.devices import on_host, room_on_host
from bireme.runtime.board import PeerLost
from bireme.sync.group import AbortedError, CollectiveError
from bireme.sync.rounds.round_group import LineBroken, PeerLine, RoundGroup, Stamp
from bireme.wire.connection import Bell


class GroupLines:
    """The lines to the other members of a group, by their places, and the host that each member is on."""

    def __init__(self, sockets: Mapping[int, socket.socket], hosts: Sequence[str]) -> None:
        self.of_places = {place: PeerLine(place, made, reads_early=True) for place, made in sockets.items()}
        self.hosts = tuple(hosts)
        self.num_groups = 0
        """How many groups have used them, one after the other."""

    def close(self) -> None:
        """Close the sockets."""
        for line in self.of_places.values():
            line.socket.close()


class LineGroup(RoundGroup):
    """This process's place among `ranks`, which are processes of the world, on these lines. Whoever closes it
    gives the lines to `keep`, for the next group of the same ranks, unless it was aborted.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        lines: GroupLines,
        *,
        timeout_s: float,
        keep: Callable[[GroupLines], object] | None = None,
    ) -> None:
        self._ranks, self._lines, self._keep = tuple(ranks), lines, keep
        self._is_aborted = False
        lines.num_groups += 1
        super().__init__(
            rank,
            range(len(ranks)),
            lines.of_places.__getitem__,
            Stamp(0, lines.num_groups, 0),
            timeout_s=timeout_s,
            check=self._check,
            in_parts=not 1 < len(set(lines.hosts)) < len(lines.hosts),
        )

    def has_all(self) -> bool:
        """Whether all members begin a group on these lines. If not, they are closed here and at the others: a
        member that has given up the group before meets its peers anew.
        """
        try:
            self.all_reduce(torch.zeros(1)).wait()
        except CollectiveError:
            self._lines.close()
            return False
        return True

    def go_on(self, bell: Bell) -> None:
        """Move what has begun until the bell rings, or for a while."""
        with self._named():
            super().go_on(bell)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the member `to`."""
        self.message(on_host(tensor), self.rank, to).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor with what the member `source` sends."""
        here = room_on_host(tensor)
        self.message(here, source, self.rank).wait()
        if here is not tensor:
            tensor.copy_(here)

    def finish(self, missing: set[int]) -> None:
        """Return when nothing is missing, and all that others need is sent."""
        with self._named():
            super().finish(missing)

    def abort(self) -> None:
        """Give up, from any thread."""
        self._is_aborted = True
        for one in self._lines.of_places.values():
            with suppress(OSError):
                one.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the lines back, or close them."""
        keep, self._keep = self._keep, None
        if keep is None or self._is_aborted:
            self._lines.close()
        else:
            keep(self._lines)

    def _move(self, *what: Any) -> None:
        with self._named():
            super()._move(*what)

    def _check(self) -> None:
        if self._is_aborted:
            raise self._given_up

    @property
    def _given_up(self) -> AbortedError:
        return AbortedError(f"This rank has given up the group of the processes {self._processes}.")

    @property
    def _processes(self) -> str:
        return ", ".join(map(str, self._ranks))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of lines as those of a collective."""
        try:
            yield
        except LineBroken as error:
            if self._is_aborted:
                raise self._given_up from None
            lost = PeerLost(self._ranks[error.member], error.reason)
            message = f"An exchange over the processes {self._processes} failed: {lost}"
            raise CollectiveError(message) from lost
