"""Coming to the state of the others, where donors fail: nothing waits for what will not come."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

import bireme.runtime.exchange.agent
from bireme.runtime.coordinator_client import DroppedError
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.joining import join
from bireme.runtime.exchange.peer_connections import TensorConnection, send_tensors
from bireme.runtime.exchange.rounds import BatchOffer
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Heal,
    Member,
    RankId,
    RoundPart,
    SumSource,
)
from bireme.sync.rounds.contribution import Contribution
from bireme.sync.rounds.round_group import LineBroken
from tests.support.patience import patience_s

OWN = RankId(1, 1, 0)


class Scripted:
    """An agent that hears these words, the next one once nothing follows from the last. Of a donor that
    is `deaf` no snapshot can be had.
    """

    own = OWN

    def __init__(self, words: Sequence[CoordinatorReply], deaf: Heal | None = None) -> None:
        self._words, self._deaf = list(words), deaf
        self.begun: list[tuple[int, int | None]] = []
        self.lost: list[int] = []

    @property
    def word(self) -> CoordinatorReply:
        return self._words[0]

    def begin(self, _window: object = None, *, used: Sequence[int], healed: int | None = None) -> None:
        self.begun.append((used[0], healed))

    def tell_lost(self, donor: int) -> None:
        self.lost.append(donor)

    def wait_for(self, is_so: Callable[[CoordinatorReply], bool]) -> CoordinatorReply:
        while not is_so(self.word):
            assert self._words[1:], "it waits for ever"
            self._words.pop(0)
        return self.word

    @contextmanager
    def fetch(self, heal: Heal) -> Iterator[TensorConnection]:
        if heal == self._deaf:
            raise LineBroken(heal.donor, "it says nothing")
        here, there = socket.socketpair()
        with here, there:
            there.settimeout(5.0)
            words = {"num_trained": heal.batch, "clip_scale": 1.0, "used": [heal.batch], "tensors": []}
            send_tensors(there, words, [])
            yield TensorConnection(here, 5.0, lambda: None)


def joined(agent: Scripted) -> tuple[int, list[int], list[int]]:
    """The first batch, the snapshots that were restored, and the batches whose sums were applied."""
    restored, followed = list[Snapshot](), list[int]()
    first = join(cast(ExchangeAgent, agent), 0, restored.append, follow=followed.append)
    return first, [one.num_trained for one in restored], followed


def test_a_donor_that_could_not_be_reached_once_is_asked_again_if_there_is_no_other() -> None:
    failed, again = Heal(1, donor=0, batch=5), Heal(1, donor=0, batch=6)
    words = [
        CoordinatorReply(1, 1, committed=(4,), heals=(failed,)),
        CoordinatorReply(1, 2, committed=(5,), heals=(again,)),
        CoordinatorReply(1, 3, committed=(8,), heals=(Heal(1, donor=0, batch=6, first=8),)),
    ]
    agent = Scripted(words, deaf=failed)

    assert joined(agent) == (8, [6], [6, 7])
    assert agent.lost == [0]
    assert agent.begun == [(0, None), (0, None), (6, 6)]  # the second takes back that it is lost


def test_a_replica_that_loses_its_donor_while_it_catches_up_starts_again() -> None:
    """Some of its ranks may have applied a sum that the others cannot get any more."""
    words = [
        CoordinatorReply(1, 1, committed=(4,), heals=(Heal(1, donor=0, batch=5),)),
        CoordinatorReply(2, 2, committed=(8,), heals=(Heal(1, donor=2, batch=9),)),
    ]
    with pytest.raises(DroppedError, match="lost its donor"):
        joined(Scripted(words))


def test_a_replica_knows_its_first_batch_while_the_sums_before_it_still_come() -> None:
    """So it reads its samples meanwhile, and is not late with them."""
    words = [
        CoordinatorReply(1, 1, committed=(5,), heals=(Heal(1, donor=0, batch=5),)),
        CoordinatorReply(1, 2, committed=(6,), heals=(Heal(1, donor=0, batch=5, first=7),)),
        CoordinatorReply(1, 3, committed=(7,), heals=(Heal(1, donor=0, batch=5, first=7),)),
    ]
    seen = list[str]()
    first = join(
        cast(ExchangeAgent, Scripted(words)),
        0,
        lambda snapshot: seen.append(f"weights of {snapshot.num_trained}"),
        follow=lambda batch: seen.append(f"sum of {batch}"),
        on_first=lambda batch: seen.append(f"first is {batch}"),
    )
    assert (first, seen) == (7, ["weights of 5", "first is 7", "sum of 5", "sum of 6"])


class Told:
    """A coordinator that says what it is told to."""

    key = "secret"

    def __init__(self, word: CoordinatorReply) -> None:
        self.word = word
        self.act: Callable[[], None] = lambda: None

    def say(self, *, address: str, **fields: Any) -> None:
        pass

    def on_word(self, act: Callable[[], None]) -> None:
        self.act = act

    def close(self, *, is_leaving: bool) -> None:
        pass


def test_a_rank_that_waits_for_a_sum_of_its_donor_learns_that_it_will_not_come() -> None:
    coordinator = Told(CoordinatorReply(1, 1, committed=(7,), heals=(Heal(1, donor=0, batch=5),)))
    agent = ExchangeAgent(OWN, cast(Any, coordinator), timeout_s=5.0, of_batches=True)
    agent.begin(used=[6], healed=6)
    offer = BatchOffer(None)
    agent.offer_batch(6, offer, [torch.zeros(1)])

    coordinator.word = CoordinatorReply(2, 2, committed=(8,), heals=(Heal(1, donor=2, batch=9),))
    coordinator.act()

    with pytest.raises(DroppedError):
        agent.wait_for_batch(offer)
    agent.close(is_leaving=False)


def test_a_rank_asks_another_source_as_soon_as_one_that_says_nothing_is_replaced() -> None:
    """However long the timeout is: whoever sends nothing may be dead, or have a slow line."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        members = (Member(0, 0, (f"{host} {port} -",)),)
        commit = Commit(0, 6, 0, (RoundPart(0, 4),), (SumSource(1, 0),))
        heal = Heal(1, donor=0, batch=5)
        coordinator = Told(
            CoordinatorReply(1, 1, committed=(7,), members=members, commits=(commit,), heals=(heal,))
        )
        agent = ExchangeAgent(OWN, cast(Any, coordinator), timeout_s=1e6, of_batches=True)
        agent.begin(used=[6], healed=6)
        offer = BatchOffer(None)
        agent.offer_batch(6, offer, [torch.zeros(1)])
        asked, _ = silent.accept()

        coordinator.word = CoordinatorReply(2, 2, committed=(8,), heals=(Heal(1, donor=2, batch=9),))
        coordinator.act()

        with pytest.raises(DroppedError):
            agent.wait_for_batch(offer)
        agent.close(is_leaving=False)
        asked.close()


class Verdict(threading.Event):
    """Whether a batch is known to count, and whether somebody has looked for that."""

    def __init__(self) -> None:
        super().__init__()
        self.was_looked_at = threading.Event()

    def is_set(self) -> bool:
        found = super().is_set()
        self.was_looked_at.set()
        return found


def test_a_rank_prepares_a_batch_as_soon_as_it_may_and_not_when_it_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a codec each batch waits for the verdict about the one before: that took half a second."""
    monkeypatch.setattr(bireme.runtime.exchange.agent, "LOOK_S", 1e6)
    agent = ExchangeAgent(OWN, cast(Any, Told(CoordinatorReply(1, 1))), timeout_s=5.0, of_batches=True)
    agent.begin(used=[6])
    is_made, verdict, flats = threading.Event(), Verdict(), [torch.zeros(1)]

    def make() -> Contribution:
        is_made.set()
        return Contribution(flats, b"", 1.0, 1.0)

    agent.offer_batch(6, BatchOffer(make, may_make=verdict), flats)
    assert verdict.was_looked_at.wait(patience_s())
    verdict.set()
    agent.poke()
    assert is_made.wait(patience_s())
    agent.close(is_leaving=False)
