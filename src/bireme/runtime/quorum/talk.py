"""An agent's way to the coordinator: a client that begins to talk once there is something to say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bireme.runtime.coordinator_client import Address, CoordinatorClient
from bireme.sync.coordinator.messages import CoordinatorReply, RankId

__all__ = ["LazyCoordinatorClient"]


class LazyCoordinatorClient:
    """The client of one rank, which calls these hosts. Its agent must have said first where it is reached.
    A rank that `is_empty` has no weights that the run could go on from.
    """

    def __init__(
        self, hosts: Sequence[Address], token: str, rank: RankId, *, lease_s: float, is_empty: bool = False
    ) -> None:
        self._hosts, self._token, self._rank, self._lease_s = tuple(hosts), token, rank, lease_s
        self._is_empty = is_empty
        self._client: CoordinatorClient | None = None
        self._act: Callable[[], None] = lambda: None
        self._is_closed = False

    @property
    def word(self) -> CoordinatorReply:
        """The last word."""
        if self._client is None:
            return CoordinatorReply(epoch=0, number=-1)
        word = self._client.word
        return replace(word, is_dropped=True) if self._client.is_dropped else word

    def say(self, *, address: str, **fields: Any) -> None:
        """Report these fields from now on. Does not wait."""
        if self._client is None:
            made = CoordinatorClient(self._hosts, self._token, self._rank, address, lease_s=self._lease_s)
            made.on_word(self._act)
            made.say(is_empty=self._is_empty, **fields)
            made.start()
            self._client = made
        elif not self._is_closed:
            self._client.say(**fields)

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word, from a thread that holds no lock."""
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""
        if self._client is not None and not self._is_closed:
            self._is_closed = True
            self._client.close(is_leaving=is_leaving)
