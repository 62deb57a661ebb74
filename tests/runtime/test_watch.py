"""The watch by itself: ranks are threads here, and the store is memory."""

import math
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from bireme.errors import BiremeError
from bireme.runtime import watch as watch_module
from bireme.runtime.board import Board, Failure, FailureKind, Heartbeat, PeerLost, RankFailed, RunFailed
from bireme.runtime.stores import HashStore, PrefixStore, RunStore, Store, serve_store
from bireme.runtime.watch import Watch, is_of_a_peer
from tests.support.patience import patience_s

pytestmark = pytest.mark.slow

TIMEOUT_S = 5.0
ALONE_S = 0.5
"""Of a watch whose rank is alone: no other one could seem dead on a busy machine."""
LOST = PeerLost(1, "connection closed")


class Waiting:
    """Who waits for another rank, until the watch frees it."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def abort(self) -> None:
        self.freed.set()


@contextmanager
def watching(
    store: Store, num_ranks: int, *, size: int | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[list[Watch]]:
    """The watches of the first so many of all ranks."""
    size = num_ranks if size is None else size
    watches = [Watch(Board(store, size), rank, size, timeout_s=timeout_s) for rank in range(num_ranks)]
    for watch in watches:
        watch.start()
    try:
        yield watches
    finally:
        for watch in watches:
            watch.stop()


@pytest.fixture(autouse=True)
def _nobody_has_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests let ranks fail one after the other."""
    monkeypatch.setattr(watch_module, "KNOWN_S", 0.0)


def test_who_fails_goes_on_once_the_others_know_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "KNOWN_S", patience_s())
    with watching(HashStore(), 3) as (first, second, third):
        first.wait_for_everyone(TIMEOUT_S)
        told = threading.Thread(target=first.failed, args=[ArithmeticError("the sum is wrong")])
        told.start()
        assert "the sum is wrong" in str(second.explain(LOST))
        second.stop()
        assert told.is_alive()
        assert "the sum is wrong" in str(third.explain(LOST))
        third.stop()
        told.join()


def test_the_first_failure_is_the_root_cause_and_stays() -> None:
    with watching(HashStore(), 3) as (first, second, third):
        first.doing = "1F0"
        assert first.failed(ArithmeticError("the sum is wrong")).rank == 0
        assert second.failed(ArithmeticError("so is this")).rank == 0
        error = third.explain(LOST)

    assert isinstance(error, RankFailed)
    assert (error.rank, error.instruction, error.summary) == (0, "1F0", "ArithmeticError: the sum is wrong")


def test_a_rank_that_no_longer_beats_is_named() -> None:
    with watching(HashStore(), 3) as (first, second, third):
        second.doing = "2B1"
        first.wait_for_everyone(TIMEOUT_S)
        second.stop()
        error = first.explain(LOST)
        assert isinstance(third.explain(LOST), RankFailed)

    assert isinstance(error, RankFailed)
    assert error.rank == 1
    assert "no heartbeat" in error.text


@contextmanager
def watching_over_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Watch], list[RunStore]]]:
    """Three watches, each with a connection of its own to the store. Silence alone explains nothing."""
    monkeypatch.setattr(watch_module, "_MISSED_BEATS", 10**6)
    served = serve_store("127.0.0.1", key="key", timeout_s=patience_s())
    stores = [RunStore("127.0.0.1", served.port, "key", patience_s()) for _ in range(3)]
    watches = [
        Watch(Board(PrefixStore("run", store), 3), rank, 3, timeout_s=patience_s())
        for rank, store in enumerate(stores)
    ]
    for watch in watches:
        watch.start()
    for watch in watches:
        watch.wait_for_everyone(patience_s())
    try:
        yield watches, stores
    finally:
        for watch in watches:
            watch.stop()


def ended(watch: Watch, store: RunStore) -> None:
    """End a watch and its connection, as the end of its process does."""

    def refused(*_request: object) -> None:
        raise dist.DistNetworkError("the process has ended")

    watch.stop()
    store._ask = refused  # type: ignore[method-assign]
    with store._asking:
        assert store._connection is not None
        store._connection.socket.close()


def test_a_rank_whose_process_ends_without_a_reason_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watching_over_sockets(monkeypatch) as ((first, second, third), stores):
        second.doing = "2B1"
        ended(second, stores[1])
        error = first.explain(LOST)
        assert isinstance(third.explain(LOST), RankFailed)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.text.partition(":")[0]) == (1, "it has ended and left no reason")


def test_a_rank_that_leaves_its_reason_and_ends_is_named_with_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watching_over_sockets(monkeypatch) as ((first, second, third), stores):
        second.failed(ArithmeticError("the sum is wrong"))
        ended(second, stores[1])
        third.explain(LOST)
        ended(third, stores[2])
        error = first.explain(PeerLost(2, "connection closed"))
    assert isinstance(error, RankFailed)
    assert (error.rank, error.summary) == (1, "ArithmeticError: the sum is wrong")


def test_a_rank_that_no_longer_beats_is_named_by_itself_if_nobody_waits_for_it() -> None:
    freed = Waiting()
    with watching(HashStore(), 2) as (first, second):
        first.abort_on_failure(freed)
        first.wait_for_everyone(TIMEOUT_S)
        second.stop()
        assert freed.freed.wait(10 * TIMEOUT_S)
        assert "no heartbeat" in str(first.explain(LOST))


def test_who_begins_to_wait_after_the_failure_was_heard_is_freed_at_once() -> None:
    early, late = Waiting(), Waiting()
    with watching(HashStore(), 2) as (first, second):
        first.abort_on_failure(early)
        second.failed(ArithmeticError("the sum is wrong"))
        assert early.freed.wait(10 * TIMEOUT_S)
        first.abort_on_failure(late)
        assert late.freed.is_set()


def test_where_all_live_it_says_what_they_do() -> None:
    with watching(HashStore(), 3) as (first, second, third):
        second.doing, third.doing = "1B0", ["any", "object"]
        first.wait_for_everyone(TIMEOUT_S)
        text = str(first.explain(RuntimeError("[gloo/unbound.cc] Timed out waiting 2000ms")))

    assert (
        "All ranks are alive: rank 0 at no instruction, rank 1 at 1B0, rank 2 at ['any', 'object']." in text
    )
    assert f"longer than {TIMEOUT_S:g} s, raise the timeout" in text


def test_a_rank_that_never_joins_is_named() -> None:
    with (
        watching(HashStore(), 2, size=3) as (first, _),
        pytest.raises(RankFailed, match="did not join") as caught,
    ):
        first.wait_for_everyone(0.3)
    assert caught.value.rank == 2


def test_who_waits_to_join_hears_of_a_failure() -> None:
    with watching(HashStore(), 2, size=3) as (first, second):
        second.failed(BiremeError("there is no such model"))
        with pytest.raises(RankFailed, match="no such model"):
            first.wait_for_everyone(60.0)


def test_ranks_leave_together() -> None:
    left: list[int] = []

    def leave(watch: Watch, rank: int) -> None:
        watch.leave()
        left.append(rank)

    with watching(HashStore(), 2) as (first, second):
        first.wait_for_everyone(TIMEOUT_S)
        thread = threading.Thread(target=leave, args=(first, 0))
        thread.start()
        thread.join(0.3)
        assert left == []
        leave(second, 1)
        thread.join()
    assert sorted(left) == [0, 1]


class NoStore(Store):
    """A store whose server is stopped, then gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.gone.wait()
        raise dist.DistNetworkError("connection reset")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        raise dist.DistNetworkError("connection reset")


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "STORE_S", ALONE_S)
    store = NoStore()
    with watching(store, 1, size=2, timeout_s=ALONE_S) as (watch,):
        assert "the store, which knows why, does not answer" in str(watch.explain(LOST))
        store.gone.set()
        with pytest.raises(RankFailed, match=r"has not reached the store for .* \(connection reset\)"):
            watch.wait_for_everyone(60.0)


def failing(watch: Watch, num_failures: float) -> threading.Event:
    """Have so many of the next requests to the store fail, and tell when three have passed after that."""
    board, passed = watch._board, threading.Event()
    beat, counts = board.beat, iter(range(10**9))

    def lossy(rank: int, pulse: Heartbeat) -> None:
        count = next(counts)
        if count < num_failures:
            raise dist.DistNetworkError("one request to the store was lost")
        if count > num_failures + 1:
            passed.set()
        beat(rank, pulse)

    board.beat = lossy  # type: ignore[method-assign]
    return passed


def test_a_request_to_the_store_that_is_lost_is_made_again() -> None:
    """The first failed request ended the watch's thread, and the others took its rank for dead."""
    told = Waiting()
    with watching(HashStore(), 2) as (first, second):
        first.wait_for_everyone(TIMEOUT_S)
        passed = failing(second, 3)
        second.abort_on_failure(told)
        assert passed.wait(10 * TIMEOUT_S)
        assert not told.freed.is_set()
        first.failed(ArithmeticError("the sum is wrong"))
        assert told.freed.wait(10 * TIMEOUT_S)
        assert "the sum is wrong" in str(second.explain(LOST))


def test_a_store_out_of_reach_for_the_timeout_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "grace_s", lambda _timeout_s: patience_s())  # or it would end the test
    told = Waiting()
    with watching(HashStore(), 1, timeout_s=ALONE_S) as (watch,):
        watch.abort_on_failure(told)
        failing(watch, math.inf)
        assert told.freed.wait(10 * TIMEOUT_S)
        assert "it has not reached the store for" in str(watch.explain(LOST))


def test_errors_of_peers_are_told_from_own_ones() -> None:
    wrapped = ValueError("in the second step")
    wrapped.__cause__ = RuntimeError(
        "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"
    )

    assert is_of_a_peer(LOST)
    assert is_of_a_peer(dist.DistBackendError("NCCL"))
    assert is_of_a_peer(wrapped)
    assert not is_of_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_a_peer(None)


def test_failures_survive_the_way_between_processes() -> None:
    for error, blame in (
        (ArithmeticError("two\nlines"), FailureKind.PROGRAM),
        (BiremeError("a mistake"), FailureKind.USER),
        (RunFailed("all wait"), FailureKind.RUN),
        (KeyboardInterrupt(), FailureKind.INTERRUPT),
        (ArithmeticError(), FailureKind.PROGRAM),
    ):
        failure = Failure.of(error, 1, None)
        assert failure.blame is blame
        assert Failure.decode(failure.encode()) == failure

    assert Failure.of(ArithmeticError("two\nlines"), 1, None).summary == "ArithmeticError: two"
    assert Failure.of(ArithmeticError(), 1, None).summary == "ArithmeticError"
    assert type(Failure.of(BiremeError("a mistake"), 1, None).to_starter()) is BiremeError
    assert isinstance(Failure.of(KeyboardInterrupt(), 1, None).to_starter(), KeyboardInterrupt)
    of_the_run = Failure.of(RunFailed("all wait"), 1, None).to_starter()
    assert (type(of_the_run), str(of_the_run)) == (RunFailed, "all wait")
    error_again = pickle.loads(pickle.dumps(RankFailed(1, "1F0", "a\nb")))
    assert (str(error_again), error_again.line) == ("Rank 1 failed at 1F0:\na\nb", "Rank 1 failed at 1F0: b")


def test_the_board_shows_who_is_not_there_yet() -> None:
    board = Board(HashStore(), 3)
    pulse = Heartbeat(count=1, finished=False, doing="1F0")
    board.beat(1, pulse)

    assert board.pulses([0, 1, 2]) == [None, pulse, None]
    assert board.cause() is None
