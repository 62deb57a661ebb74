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

import torch
from torch import Tensor

from bireme.devices import on_host
from bireme.runtime.board import PeerLost
from bireme.sync.group import AbortedError, CollectiveError, Pending, Waiting
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


class LineGroup:
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
        self.rank, self.size = rank, len(ranks)
        self._is_ring = 1 < len(set(lines.hosts)) < len(lines.hosts)
        self._ranks, self._lines, self._keep = tuple(ranks), lines, keep
        self._is_aborted = False
        lines.num_groups += 1
        self._group = RoundGroup(
            rank,
            range(len(ranks)),
            lines.of_places.__getitem__,
            Stamp(0, lines.num_groups, 0),
            timeout_s=timeout_s,
            check=self._check,
        )

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the group, added in the members' order."""
        here = on_host(tensor)
        flat, group = here.view(-1), self._group
        if self._is_ring or group.sends_whole(flat.nbytes):
            return self._begun("sum", lambda: group.all_reduce(flat), [(here, tensor)])
        parts = torch.tensor_split(flat, self.size)
        return self._begun("sum", lambda: group.add_up_parts(parts), [(here, tensor)])

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

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to fill `into` with the members' tensors."""
        own, here = on_host(tensor), [on_host(one) for one in into]
        return self._begun(
            "gathering", lambda: self._group.gather(own, here), [*zip(here, into, strict=True)]
        )

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part of `given`, and to fill `taken` with theirs."""
        own, here = on_host(given), on_host(taken)
        return self._begun(
            "exchange", lambda: self._group.exchange(own, lengths, here, taken_lengths), [(here, taken)]
        )

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor with that of the member `source`."""
        here = on_host(tensor)
        return self._begun("copy", lambda: self._group.copy_from(here, source), [(here, tensor)])

    def go_on(self, bell: Bell) -> None:
        """Move what has begun until the bell rings, or for a while."""
        with self._named("sum"):
            self._group.go_on(bell)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the member `to`."""
        here = on_host(tensor)
        self._begun("send", lambda: self._group.message(here, self.rank, to), []).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor with what the member `source` sends."""
        here = on_host(tensor)
        self._begun("receive", lambda: self._group.message(here, source, self.rank), [(here, tensor)]).wait()

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

    def _begun(self, what: str, begin: Callable[[], Waiting], places: list[tuple[Tensor, Tensor]]) -> Waiting:
        """What has begun, and ends once what came to the host is where it belongs."""
        with self._named(what):
            begun = begin()
        under_way = [begun]

        def wait() -> None:
            while under_way:  # only once
                with self._named(what):
                    under_way.pop().wait()
                for here, there in places:
                    if here is not there:
                        there.copy_(here)

        return Waiting(wait, begun.is_done)

    def _check(self) -> None:
        if self._is_aborted:
            raise self._given_up

    @property
    def _given_up(self) -> AbortedError:
        return AbortedError(f"This rank has given up the group of the processes {self._members}.")

    @property
    def _members(self) -> str:
        return ", ".join(map(str, self._ranks))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Errors of lines as those of a collective."""
        try:
            yield
        except LineBroken as error:
            if self._is_aborted:
                raise self._given_up from None
            lost = PeerLost(self._ranks[error.member], error.reason)
            message = f"A {what} over the processes {self._members} failed: {lost}"
            raise CollectiveError(message) from lost
