"""Sums and parcels between ranks of the same stage in different replicas, over an agent's own sockets."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from bireme.runtime.averaging.lines import Line
from bireme.runtime.quorum.job import member_in
from bireme.runtime.quorum.parcels import Parcel
from bireme.runtime.quorum.results import Result
from bireme.runtime.quorum.switchboard import SUM, Switchboard
from bireme.sync.coordinator.messages import TERM, Commit, RankId, Word
from bireme.sync.quorum.line import LineBroken, PeerLine, Stamp
from bireme.sync.quorum.ring import Contribution, Summed, sum_over

__all__ = ["PLACES", "PeerSums", "SupersededError"]

PLACES = 40
"""Bits of a number within a line or a window, in stamps and requests."""


class SupersededError(Exception):
    """The attempt is not wanted any more."""


class PeerSums:
    """The sums of one rank. `word` gives the coordinator's last word, and `check` raises where the rank may
    not go on.
    """

    def __init__(
        self,
        own: RankId,
        board: Switchboard,
        word: Callable[[], Word],
        check: Callable[[Word], None],
        timeout_s: float,
    ) -> None:
        self._own, self._board = own, board
        self._word, self._check, self._timeout_s = word, check, timeout_s

    def add_up(
        self,
        own: Contribution,
        into: Sequence[Tensor],
        members: Sequence[int],
        place: int,
        attempt: int,
        word: Word,
        is_wanted: Callable[[Word], bool],
    ) -> Summed:
        """The sum over some members, as long as it is wanted. A later sum has a greater `place`.

        Raises `SupersededError`, or `LineBroken` where a member is lost.
        """

        def check() -> None:
            now = self._word()
            self._check(now)
            if not is_wanted(now):
                raise SupersededError

        try:
            lines: Mapping[int, PeerLine] = {
                replica: self._board.line(replica, member.life, member.addresses[self._own.stage], check)
                for replica in members
                if replica != self._own.replica
                for member in [member_in(word, replica)]
            }
            return sum_over(
                own,
                into,
                me=self._own.replica,
                members=members,
                line_to=lines.__getitem__,
                stamp=Stamp(word.epoch // TERM, place, attempt),
                timeout_s=self._timeout_s,
                check=check,
            )
        except LineBroken as error:
            self._board.drop(error.member)
            raise

    def pulled(self, line: Line, commit: Commit, source: int, word: Word) -> Result | None:
        """A committed sum that another replica has; None if it cannot be had from there."""
        result = line.room()
        try:
            address = member_in(word, source).addresses[self._own.stage]
            place = line.number << PLACES | commit.round
            with self._board.ask(source, address, SUM, place, self._look) as made:
                parcel = Parcel(made, self._look, timeout_s=self._timeout_s)
                words = parcel.words()
                parcel.fill(result.flats)
        except (LineBroken, OSError):
            line.give_back(result)
            return None
        result.attempt = commit.attempt
        result.summed = Summed(b"", words["weight"], (), tuple(words["numbers"]))
        return result

    def _look(self) -> None:
        self._check(self._word())
