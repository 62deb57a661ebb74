"""Messages over sockets: all arrives, of any size and in any order, and what goes wrong is named at once."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.fabric import neighbours_of
from bireme.runtime.frame import framed
from bireme.runtime.meeting import meet
from bireme.runtime.peers import PeerLost
from bireme.runtime.socket_line import LARGE_BYTES
from bireme.runtime.socket_sums import SocketSums
from bireme.runtime.socket_transport import Lines, SocketTransport
from bireme.runtime.stores import open_store
from bireme.runtime.transport import AbortedError
from bireme.schedule.instruction import Message
from tests.test_transport import SCENARIOS
from tests.together import run_threads

SIZES = (0, 1, 4096, LARGE_BYTES, LARGE_BYTES + 1, 6 * 2**20)


def pair(timeout_s: float = 20.0, buffer_bytes: int | None = None) -> list[SocketTransport]:
    """Two transports, joined; the kernel takes `buffer_bytes` of what one has written, or what it likes."""
    (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
    for one in (small, its_small):
        one.setblocking(False)
        if buffer_bytes is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return [
        SocketTransport({1: Lines(small, large)}, timeout_s=timeout_s),
        SocketTransport({0: Lines(its_small, its_large)}, timeout_s=timeout_s),
    ]


@pytest.fixture
def both() -> Iterator[list[SocketTransport]]:
    made = pair()
    yield made
    for transport in made:
        transport.close()


def key(microbatch: int, *, forward: bool = True) -> Message:
    return Message(forward, 1 if forward else 0, 3, microbatch, None)


def bytes_of(number: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_arrives_in_order(both: list[SocketTransport], name: str) -> None:
    assert run_threads(2, lambda rank: SCENARIOS[name](rank, both[rank])) == [True, True]


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_size_cross_in_both_directions_at_once(
    both: list[SocketTransport], size: int
) -> None:
    """More bytes than the kernel buffers, so that each side must read while it writes."""

    def work(rank: int) -> bool:
        forward = rank == 0
        received = [torch.empty(size, dtype=torch.uint8) for _ in range(5)]
        waiting = [
            both[rank].receive(key(n, forward=not forward), 1 - rank, one) for n, one in enumerate(received)
        ]
        sent = [
            both[rank].send(key(n, forward=forward), 1 - rank, bytes_of(10 * rank + n, size))
            for n in range(5)
        ]
        for pending in (*sent, *waiting):
            pending.wait()
        return all(torch.equal(one, bytes_of(10 * (1 - rank) + n, size)) for n, one in enumerate(received))

    assert run_threads(2, work) == [True, True]


@pytest.mark.parametrize("size", [640, LARGE_BYTES + 640])
def test_another_size_than_expected_is_told_at_once_and_what_follows_still_comes(
    both: list[SocketTransport], size: int
) -> None:
    both[0].send(key(0), 1, bytes_of(0, size))
    both[0].send(key(1), 1, bytes_of(1, size))
    wrong, right = torch.full((size + 64,), 7, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    with pytest.raises(BiremeError, match=rf"with {size} bytes, and {size + 64} were expected"):
        both[1].receive(key(0), 0, wrong).wait()
    assert bool(wrong.eq(7).all())
    both[1].receive(key(1), 0, right).wait()
    assert torch.equal(right, bytes_of(1, size))


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_what_never_comes_is_named(size: int) -> None:
    transports = pair(timeout_s=0.3)
    with pytest.raises(BiremeError, match=r"activation of micro-batch 2 .* did not come from rank 0"):
        transports[1].receive(key(2), 0, torch.empty(size, dtype=torch.uint8)).wait()


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_a_rank_that_is_gone_is_named(both: list[SocketTransport], size: int) -> None:
    pending = both[1].receive(key(0), 0, torch.empty(size, dtype=torch.uint8))
    both[0].close()
    with pytest.raises(PeerLost, match="Rank 0 is gone"):
        pending.wait()


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_giving_up_wakes_who_waits_here_and_there(both: list[SocketTransport], size: int) -> None:
    def work(rank: int) -> Any:
        pending = both[rank].receive(
            key(0, forward=rank == 1), 1 - rank, torch.empty(size, dtype=torch.uint8)
        )
        if rank == 0:
            threading.Timer(0.05, both[0].abort).start()
        try:
            pending.wait()
        except (AbortedError, PeerLost) as error:
            return type(error)
        return None

    assert run_threads(2, work) == [AbortedError, PeerLost]


def test_a_rank_that_dies_in_the_middle_of_a_large_message_is_named() -> None:
    (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
    for one in (small, its_small):
        one.setblocking(False)
    transport = SocketTransport({0: Lines(small, large)}, timeout_s=20.0)
    size = LARGE_BYTES + 1
    pending = transport.receive(key(0), 0, torch.empty(size, dtype=torch.uint8))
    its_large.sendall(framed(key(0), size) + bytes(1000))
    its_large.close()
    with pytest.raises(PeerLost, match="Rank 0 is gone"):
        pending.wait()
    transport.close()
    its_small.close()


def test_what_the_kernel_did_not_take_goes_on_while_a_large_message_is_waited_for() -> None:
    """The other rank sends that only when it has the small ones, so neither would go on."""
    transports = pair(buffer_bytes=16384)
    size, num_small = LARGE_BYTES + 1, 6

    def work(rank: int) -> bool:
        transport = transports[rank]
        large = torch.zeros(size, dtype=torch.uint8)
        if rank == 0:
            sent = [transport.send(key(n), 1, bytes_of(n, LARGE_BYTES)) for n in range(num_small)]
            transport.receive(key(0, forward=False), 1, large).wait()
            for pending in sent:
                pending.wait()
            return torch.equal(large, bytes_of(9, size))
        came = [torch.empty(LARGE_BYTES, dtype=torch.uint8) for _ in range(num_small)]
        for n, one in enumerate(came):
            transport.receive(key(n), 0, one).wait()
        transport.send(key(0, forward=False), 0, bytes_of(9, size)).wait()
        return all(torch.equal(one, bytes_of(n, LARGE_BYTES)) for n, one in enumerate(came))

    assert run_threads(2, work) == [True, True]
    for transport in transports:
        transport.close()


def test_what_was_read_before_it_was_expected_is_found(both: list[SocketTransport]) -> None:
    """The second message comes along with the first, when nobody has asked for it yet."""
    for n in range(2):
        both[0].send(key(n), 1, bytes_of(n, 64)).wait()
    for n in range(2):
        came = torch.empty(64, dtype=torch.uint8)
        both[1].receive(key(n), 0, came).wait()
        assert torch.equal(came, bytes_of(n, 64))
    assert both[1].receive(key(2), 0, torch.empty(64, dtype=torch.uint8)).is_done() is False


def test_what_is_no_message_of_ours_is_told(both: list[SocketTransport]) -> None:
    both[0]._lines[1].socket.sendall(framed(key(0), 1 << 30))
    with pytest.raises(BiremeError, match="no message of this version"):
        both[1].receive(key(0), 0, torch.empty(64, dtype=torch.uint8)).wait()


def test_ranks_meet_through_the_store_and_strangers_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_ADDRESS", "127.0.0.1")
    store = open_store("127.0.0.1", 0, serve=True, timeout_s=20)
    rank_of_stage = (0, 1, 2, 0)

    def work(rank: int) -> list[float]:
        own = open_store("127.0.0.1", store.port, serve=False, timeout_s=20)
        if rank == 1:
            own.wait(["here/7"])
            _, port, _ = own.get("here/7").decode().split()
            with socket.create_connection(("127.0.0.1", int(port))) as stranger:
                stranger.sendall(bytes(21))
        neighbours = neighbours_of(rank, rank_of_stage)
        lines = meet(own, "here", rank=rank, ranks=[7, 8, 9], neighbours=neighbours, timeout_s=20)
        transport = SocketTransport(lines, timeout_s=20)
        came = {peer: torch.empty(8, dtype=torch.uint8) for peer in neighbours}
        waiting = [
            transport.receive(Message(True, rank, 0, peer, None), peer, one) for peer, one in came.items()
        ]
        for peer in neighbours:
            transport.send(
                Message(True, peer, 0, rank, None), peer, torch.full((8,), rank, dtype=torch.uint8)
            ).wait()
        for pending in waiting:
            pending.wait()
        transport.close()
        return sorted(float(one[0]) for one in came.values())

    assert run_threads(3, work) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


def test_neighbours_are_the_ranks_of_stages_next_door() -> None:
    assert neighbours_of(0, (0, 1, 2, 3)) == {1}
    assert neighbours_of(2, (0, 1, 2, 3)) == {1, 3}
    assert neighbours_of(0, (0, 1, 1, 0)) == {1}
    assert neighbours_of(0, (0,)) == set()


# --- sums --------------------------------------------------------------------------------------------------


def star(num_ranks: int, timeout_s: float = 20.0) -> list[SocketTransport]:
    """Rank 0 joined with every other, and neighbours with each other."""
    lines: list[dict[int, Lines]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank + 1, num_ranks):
            if rank == 0 or other == rank + 1:
                (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
                for one in (small, its_small):
                    one.setblocking(False)
                lines[rank][other], lines[other][rank] = Lines(small, large), Lines(its_small, its_large)
    return [SocketTransport(own, timeout_s=timeout_s) for own in lines]


def part(rank: int, number: int) -> Tensor:
    return torch.tensor([rank + 0.1, 1e-9 * rank, float(number)], dtype=torch.float64)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_sums_are_added_in_the_order_of_the_ranks_however_many_are_under_way(num_ranks: int) -> None:
    transports = star(num_ranks)
    num_sums = 6

    def work(rank: int) -> list[list[float]]:
        sums = SocketSums(transports[rank], rank, num_ranks)
        given = [part(rank, number) for number in range(num_sums)]
        pending = [sums.all_reduce(one) for one in given[:4]]
        for one in pending[:2]:
            one.wait()
        pending += [sums.all_reduce(one) for one in given[4:]]
        for one in pending[2:]:
            one.wait()
        return [one.tolist() for one in given]

    found = run_threads(num_ranks, work)
    for transport in transports:
        transport.close()
    wanted = []
    for number in range(num_sums):
        total = part(0, number)
        for rank in range(1, num_ranks):
            total += part(rank, number)
        wanted.append(total.tolist())
    assert all(own == wanted for own in found)


def test_rank_0_adds_up_while_it_waits_for_something_else() -> None:
    """Rank 1 sends that only when it knows the sum, so neither would go on."""
    transports = star(2, timeout_s=5.0)

    def work(rank: int) -> float:
        sums, own = SocketSums(transports[rank], rank, 2), part(rank, 0)
        pending = sums.all_reduce(own)
        message = torch.full((8,), rank, dtype=torch.uint8)
        if rank == 0:
            transports[0].receive(key(0, forward=False), 1, message).wait()
            assert message.tolist() == [1] * 8
            pending.wait()
        else:
            pending.wait()
            transports[1].send(key(0, forward=False), 0, message).wait()
        return float(own[0])

    assert run_threads(2, work) == [0.1 + 1.1] * 2
    for transport in transports:
        transport.close()


def test_a_sum_whose_rank_is_gone_says_so() -> None:
    transports = star(3)
    transports[2].close()

    def work(rank: int) -> None:
        if rank == 0:
            SocketSums(transports[0], 0, 3).all_reduce(part(0, 0)).wait()

    with pytest.raises(PeerLost):
        run_threads(1, work)
    for transport in transports[:2]:
        transport.close()


def test_rank_0_adds_up_while_it_waits_for_a_large_message() -> None:
    transports = star(2, timeout_s=5.0)
    size = LARGE_BYTES + 1

    def work(rank: int) -> float:
        sums, own = SocketSums(transports[rank], rank, 2), part(rank, 0)
        pending = sums.all_reduce(own)
        message = torch.full((size,), rank, dtype=torch.uint8)
        if rank == 0:
            transports[0].receive(key(0, forward=False), 1, message).wait()
            pending.wait()
        else:
            pending.wait()
            transports[1].send(key(0, forward=False), 0, message).wait()
        return float(own[0])

    assert run_threads(2, work) == [0.1 + 1.1] * 2
    for transport in transports:
        transport.close()


def test_a_part_of_a_sum_that_never_comes_is_named() -> None:
    transports = star(2, timeout_s=0.3)
    with pytest.raises(BiremeError, match=r"part of sum 0 \(24 bytes\) did not come from rank 1"):
        SocketSums(transports[0], 0, 2).all_reduce(part(0, 0)).wait()
    for transport in transports:
        transport.close()


def test_a_rank_sleeps_while_bytes_that_nobody_expects_yet_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would run in circles until they are expected."""
    transports = star(3)
    transports[1].send(key(5), 0, torch.zeros(64, dtype=torch.uint8))
    turns: list[float] = []
    poll = transports[0].poll

    def counted(seconds: float) -> None:
        turns.append(seconds)
        poll(seconds)

    monkeypatch.setattr(transports[0], "poll", counted)
    send = transports[2].send
    threading.Timer(0.5, lambda: send(key(6), 0, torch.zeros(64, dtype=torch.uint8))).start()
    transports[0].receive(key(6), 2, torch.empty(64, dtype=torch.uint8)).wait()
    assert len(turns) < 50
    for transport in transports:
        transport.close()
