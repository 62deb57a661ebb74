"""An agent's way to the coordinator: a client, and a thread that wakes the agent when there is a word."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from bireme.runtime.coordinator_client import Address, CoordinatorClient, Dropped, NoWord
from bireme.sync.coordinator.messages import RankId, RoundAt, Word

__all__ = ["Talk"]

LOOK_S = 0.5
"""How often the thread looks whether it is still wanted."""


class Talk:
    """The client of one rank, which calls these hosts; it begins with the first thing that is said."""

    def __init__(self, hosts: Sequence[Address], token: str, rank: RankId, *, lease_s: float) -> None:
        self._hosts, self._token, self._rank, self._lease_s = tuple(hosts), token, rank, lease_s
        self._client: CoordinatorClient | None = None
        self._word = Word(epoch=0, number=-1)
        self._act: Callable[[], None] = lambda: None
        self._is_closed = False

    @property
    def word(self) -> Word:
        """The last word."""
        return self._word

    def say(self, *, address: str, wants: int, rounds: tuple[RoundAt, ...], healed: int | None) -> None:
        """Report this from now on. Does not wait."""
        if self._client is None:
            self._client = CoordinatorClient(
                self._hosts, self._token, self._rank, address, lease_s=self._lease_s
            )
            self._client.say(wants=wants, rounds=rounds, healed=healed)
            self._client.start()
            threading.Thread(target=self._listen, name="bireme words", daemon=True).start()
        elif not self._is_closed:
            self._client.say(wants=wants, rounds=rounds, healed=healed)

    def on_word(self, act: Callable[[], None]) -> None:
        """Have something called whenever there is a new word, from a thread that holds no lock."""
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        """Say no more; where it is leaving, say so."""
        if self._client is not None and not self._is_closed:
            self._is_closed = True
            self._client.close(leaves=is_leaving)

    def _listen(self) -> None:
        client = self._client
        assert client is not None, "it is there before this begins"
        while not self._is_closed:
            try:
                self._word = client.wait(lambda word: None if word is self._word else word, LOOK_S)
            except NoWord:
                continue
            except Dropped:
                self._word = replace(self._word, is_dropped=True)
                self._act()
                return
            self._act()
