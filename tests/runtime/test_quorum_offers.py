"""What a rank has for others, and the connections over which it gives that."""

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.for_others import MOST_FOR_MEMBERS, ForOthers
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.exchange.peer_connections import SUM, PeerConnections
from bireme.runtime.exchange.round_reducer import RoundReducer
from bireme.runtime.exchange.rounds import MOST_FREE, RoundLine
from bireme.runtime.snapshot import Snapshot
from bireme.sync.coordinator.messages import CoordinatorReply, Heal, RankId
from bireme.sync.rounds.contribution import NO_DIGEST
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.patience import patience_s
from tests.support.regression import regression, regression_plan


def test_a_snapshot_for_another_replica_has_only_what_learns() -> None:
    """What is frozen, each life of a replica reads from the base by itself."""
    model = regression()
    frozen = frozenset(state.name for state in model.graph.parameters[:3])
    given: list[Snapshot] = []
    agent = cast(
        ExchangeAgent,
        SimpleNamespace(
            due=lambda batch: batch,
            provide=lambda _name, snapshot: given.append(snapshot),
            word=CoordinatorReply(0, 0),
        ),
    )
    reducer: Any = SimpleNamespace(agent=agent, first=0, digest=NO_DIGEST, feedback=None)
    pipeline = pipeline_of(model, Setting(regression_plan("1f1b", 1)), None)
    agreement = QuorumAgreement(agent, 2, 8, rebuilt=frozen)
    before = agreement.before_updates(
        cast(RoundReducer, reducer), pipeline.stages, pipeline.layout, torch.device("cpu"), lambda: 0.5
    )
    for stage in pipeline.stages.values():
        before(stage, 0)
    pipeline.close()

    (snapshot,) = given
    weights = {name.removeprefix("weights/") for name in snapshot.tensors if name.startswith("weights/")}
    assert weights == {state.name for state in model.graph.parameters} - frozen
    assert reducer.digest.version == 0


def test_a_peer_connections_lets_go_of_connections_that_are_over() -> None:
    """Also where the answer has failed."""

    def answer(made: socket.socket, _what: int, batch: int) -> None:
        made.sendall(b"here")
        if batch:
            raise ConnectionResetError("it has hung up")

    boards = [
        PeerConnections(RankId(one, 0, 0), answer, key="secret", timeout_s=patience_s()) for one in range(2)
    ]
    try:
        for batch in range(2):
            with boards[0].ask(1, boards[1].address, SUM, batch, lambda: None) as made:
                while made.recv(16):
                    pass
        for _ in range(2):
            lines = [boards[one].line(1 - one, 0, boards[1 - one].address, lambda: None) for one in (1, 0)]
            for one, line in zip((1, 0), lines, strict=True):
                boards[one].drop(1 - one)
                assert line.socket.fileno() == -1
        end_s = time.monotonic() + patience_s()
        while any(one._open for one in boards):
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        for board in boards:
            board.close()


FLATS = [torch.zeros(256)]


def kept(word: CoordinatorReply, num_rounds: int, **more: int) -> tuple[ForOthers, RoundLine]:
    """What a rank has of these rounds after the last one."""
    line = RoundLine(0, FLATS)
    own = ForOthers(0, lambda: [line], threading.Condition(), of_batches=True, **more)
    for batch in range(num_rounds):
        own.note(word)
        keep(own, line, batch)
    own.note(word)
    return own, line


def keep(own: ForOthers, line: RoundLine, batch: int) -> None:
    line.kept[batch], line.next = line.buffers.take(FLATS), batch + 1
    own.note_bytes()


def test_a_member_that_is_silent_costs_the_others_no_more_sums_than_it_could_still_ask_for() -> None:
    """A host that died took seconds of sums: 665 MiB, where 361 were predicted."""
    own, line = kept(CoordinatorReply(1, 1, kept=(3,)), 100)
    assert len(line.kept) == MOST_FOR_MEMBERS
    assert own.peak_bytes == (MOST_FOR_MEMBERS + 1) * FLATS[0].nbytes
    own.note(CoordinatorReply(1, 2, kept=(100,)))
    assert len(line.buffers.free) == MOST_FREE


def test_a_replica_that_heals_gets_all_sums_since_its_snapshot_as_far_as_there_is_room_for_them() -> None:
    word = CoordinatorReply(1, 1, kept=(5,), heals=(Heal(2, 0, 5),))
    own, line = kept(word, 44, kept_bytes=40 * FLATS[0].nbytes)
    assert len(line.kept) == 39
    assert not own.is_full(line)
    keep(own, line, 44)
    assert own.is_full(line)
