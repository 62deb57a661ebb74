"""What a rank's agent does with the words of a coordinator where replicas average weights."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from bireme.runtime.board import RunFailed
from bireme.runtime.exchange import joining
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.joining import join
from bireme.runtime.exchange.peer_connections import SNAPSHOT, PeerConnections, TensorConnection, send_tensors
from bireme.runtime.exchange.rounds import Offer, RoundLine
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import (
    Commit,
    CoordinatorReply,
    Grant,
    Heal,
    Member,
    RankId,
    RoundAt,
    RoundPart,
    SumSource,
    Window,
)
from bireme.sync.rounds.contribution import Contribution
from tests.support.patience import patience_s

OWN = RankId(0, 0, 0)
MEMBER = Member(0, 0, ("nowhere",))
ALONE = (RoundPart(0, 1),)
TIMEOUT_S = 0.2
LONG = 6
"""Looks of a tenth of a second that take longer than the timeout."""


class Coordinator:
    """Says what a test has it say, and remembers what it was told."""

    key = "secret"

    def __init__(self, word: CoordinatorReply) -> None:
        self.told: list[dict[str, Any]] = []
        self.address = ""
        self._word = word
        self._act: Callable[[], None] = lambda: None
        self._looks = 0

    @property
    def word(self) -> CoordinatorReply:
        self._looks += threading.current_thread().name == "bireme agent"
        return self._word

    def have_say(self, **changes: Any) -> None:
        self._word = replace(self._word, number=self._word.number + 1, **changes)
        self._act()

    def say(self, *, address: str, **fields: Any) -> None:
        self.address = address
        self.told.append(fields)

    def on_word(self, act: Callable[[], None]) -> None:
        self._act = act

    def close(self, *, is_leaving: bool) -> None:
        del is_leaving

    def wait_for(self, is_so: Callable[[RoundAt], bool]) -> None:
        """Until that is so of what was told last of the first line."""
        end_s = time.monotonic() + patience_s()
        while not (self.told and self.told[-1]["rounds"] and is_so(self.told[-1]["rounds"][0])):
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def wait_until_told(self, **wanted: object) -> None:
        """Until that is what was told last."""
        end_s = time.monotonic() + patience_s()
        while not self.told or not wanted.items() <= self.told[-1].items():
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def wait_for_looks(self, num: int) -> None:
        """Until the agent's thread has looked so often."""
        end_s = time.monotonic() + patience_s()
        while self._looks < num:
            assert time.monotonic() < end_s
            time.sleep(0.005)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator(
        CoordinatorReply(1, 1, committed=(0,), kept=(0,), members=(MEMBER,), is_installed=True)
    )


@pytest.fixture
def agent(coordinator: Coordinator) -> Iterator[ExchangeAgent]:
    made = ExchangeAgent(OWN, cast(Any, coordinator), timeout_s=TIMEOUT_S)
    made.bind([RoundLine(0, [torch.zeros(2)])])
    yield made
    made.close(is_leaving=False)


def test_who_ends_does_not_wait_for_a_replica_that_has_only_begun_to_heal(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    agent.begin(Window(1, 8), used=[1])
    coordinator.have_say(heals=(Heal(1, 0, 5),))
    waits = threading.Thread(target=agent.wait_until_used_by_all, daemon=True)
    waits.start()
    waits.join(patience_s())
    assert not waits.is_alive()


def test_a_snapshot_says_the_window_that_it_was_taken_in_and_comes_however_long_that_takes(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    agent.begin(Window(3, 40), used=[3])
    coordinator.have_say(heals=(Heal(1, 0, 7),))
    board = PeerConnections(RankId(1, 0, 0), lambda *_: None, key="secret", timeout_s=patience_s())
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == LONG:
            assert agent.due(7) == 7
            agent.provide(7, Snapshot(7, 1.0, {"weights/a": torch.ones(2)}))

    try:
        for _ in range(2):
            with board.ask(0, coordinator.address, SNAPSHOT, 7, look) as made:
                parcel = TensorConnection(made, patience_s(), look)
                words = parcel.hear()
                assert torch.equal(parcel.named(words)["weights/a"], torch.ones(2))
            assert (words["used"], words["window"], words["until"]) == ([3], 3, 40)
            agent.enter(80)
    finally:
        board.close()


def test_who_heals_takes_no_sum_before_a_snapshot_has_said_which_are_in_it(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    commit = Commit(0, 0, 0, (RoundPart(1, 1),), (SumSource(0, 1),))
    coordinator.have_say(committed=(1,), members=(Member(1, 0, ("nowhere",)),), commits=(commit,))
    agent.begin(Window(0, 8))
    coordinator.wait_for_looks(2)
    coordinator.have_say(members=(MEMBER,), commits=(), grants=(Grant(0, 0, 0, ALONE),))
    coordinator.wait_for(lambda at: at.summed == 0)
    assert all(at.lost == () for told in coordinator.told for at in told["rounds"])


def test_a_donor_that_could_not_be_reached_is_asked_again(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    donor = Member(1, 0, ("nowhere",))
    coordinator.have_say(members=(donor,), heals=(Heal(0, 1, 4),))

    def restore(_snapshot: Snapshot) -> None:
        raise AssertionError("nobody sends one")

    joins = threading.Thread(
        target=join, args=(agent, 0, restore), kwargs={"window": Window(0, 8)}, daemon=True
    )
    joins.start()
    coordinator.wait_for(lambda at: at.lost == (1,))
    told = len(coordinator.told)
    coordinator.have_say(heals=(Heal(0, 1, 6),))
    coordinator.wait_for(lambda _at: len(coordinator.told) >= told + 2)
    assert [one["rounds"][0].lost for one in coordinator.told[told:]][:2] == [(), (1,)]
    coordinator.have_say(members=(MEMBER, donor), heals=())
    joins.join(patience_s())
    assert not joins.is_alive()


def test_a_rank_that_heals_measures_how_long_that_took_and_one_that_begins_does_not(
    agent: ExchangeAgent, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Snapshot] = []
    assert join(agent, 0, restored.append, window=Window(0, 8)) == 0
    assert agent.heal_times is None

    def fetched(_agent: ExchangeAgent, heal: Heal) -> tuple[Snapshot, dict[str, Any]]:
        coordinator.have_say(members=(MEMBER, donor), heals=())
        return Snapshot(heal.batch, 1.0, {}), {"window": 0, "until": 8, "used": [0]}

    donor = Member(1, 0, ("nowhere",))
    monkeypatch.setattr(joining, "fetched", fetched)
    coordinator.have_say(members=(donor,), heals=(Heal(0, 1, 4),))
    assert join(agent, 0, restored.append, window=Window(0, 8)) == 4
    assert [one.num_trained for one in restored] == [4]
    assert agent.heal_times is not None
    assert min(agent.heal_times.transfer_s, agent.heal_times.catch_up_s) >= 0


def test_what_a_rank_offers_while_a_round_without_it_is_made_is_for_the_next_one(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    (line,) = agent.lines
    agent.begin(Window(0, 8), used=[0])
    agent.offer(line, Offer(lambda: line.nothing(0)))
    coordinator.have_say(grants=(Grant(0, 0, 0, ALONE),))
    coordinator.wait_for(lambda at: at.summed == 0)
    agent.offer(line, Offer(lambda: Contribution([torch.ones(2)], b"", 4.0, 4.0), 4, 1))
    coordinator.have_say(committed=(1,), grants=(), commits=(Commit(0, 0, 0, ALONE),))
    agent.wait_settled([line])
    settled = agent.take(line)
    assert settled is not None
    assert not settled.has_own
    settled.give_back()


def test_who_waits_in_vain_says_for_what_and_ends_when_all_do(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    agent.begin(Window(0, 8))
    errors: list[RunFailed] = []

    def wait() -> None:
        try:
            agent.wait_settled(agent.lines)
        except RunFailed as error:
            errors.append(error)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    coordinator.wait_until_told(waits="a mean of the replicas")
    coordinator.have_say(standstill="All replicas wait for each other.")
    waits.join(patience_s())
    assert [str(one) for one in errors] == ["All replicas wait for each other."]


def test_who_gets_a_sum_from_another_rank_does_not_wait_in_vain_however_long_that_takes(
    agent: ExchangeAgent, coordinator: Coordinator
) -> None:
    may_come = threading.Event()

    def answer(made: socket.socket, _what: int, _name: int) -> None:
        may_come.wait(patience_s())
        words = {"holds": "", "weight": 1.0, "means": (), "numbers": (), "parts": (1,), "tensors": ()}
        send_tensors(made, words, [torch.ones(2)])

    board = PeerConnections(RankId(1, 0, 0), answer, key="secret", timeout_s=patience_s())
    try:
        agent.begin(Window(0, 8), used=[0])
        waits = threading.Thread(target=agent.wait_settled, args=(agent.lines,), daemon=True)
        waits.start()
        coordinator.wait_until_told(waits="a mean of the replicas")
        commit = Commit(0, 0, 0, (RoundPart(1, 1),), (SumSource(0, 1),))
        members = (MEMBER, Member(1, 0, (board.address,)))
        coordinator.have_say(committed=(1,), members=members, commits=(commit,))
        coordinator.wait_until_told(waits="")
        may_come.set()
        waits.join(patience_s())
        assert not waits.is_alive()
    finally:
        board.close()
