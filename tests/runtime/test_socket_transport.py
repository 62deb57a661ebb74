"""Messages over sockets: all arrives, of any size and in any order, and what goes wrong is named at once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.codec.description import parse_codec
from bireme.errors import BiremeError
from bireme.runtime import socket_transport
from bireme.runtime.board import PeerLost
from bireme.runtime.fabric import neighbors_of
from bireme.runtime.message_format import Coding, TensorSpec, WireFormat, header_of
from bireme.runtime.socket_transport import (
    LARGE_BYTES,
    NUM_UNDER_WAY,
    Lines,
    SocketTransport,
    meet,
    ordinary_bytes,
)
from bireme.runtime.stores import HashStore, RunStore, serve_store
from bireme.schedule.instruction import Message
from bireme.schedule.routes import Routes
from bireme.sync.group import AbortedError
from bireme.wire import connection, listener
from tests.runtime.test_transport import SCENARIOS
from tests.support.patience import patience_s
from tests.support.sockets import HOST, Receive, format_of, key, mesh, pair, send
from tests.support.together import run_threads

SIZES = (0, 1, 4096, LARGE_BYTES - 64, LARGE_BYTES, 6 * 2**20)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def both(request: pytest.FixtureRequest) -> Iterator[list[SocketTransport]]:
    made = pair(is_encrypted=request.param)
    yield made
    for transport in made:
        transport.close()


def bytes_of(number: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_arrives_in_order(both: list[SocketTransport], name: str) -> None:
    assert run_threads(2, lambda rank: SCENARIOS[name](rank, both[rank])) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_size_cross_in_both_directions_at_once(
    both: list[SocketTransport], size: int
) -> None:
    """More bytes than the kernel buffers, so that each side must read while it writes."""

    def work(rank: int) -> bool:
        forward = rank == 0
        waiting = [Receive(both[rank], key(n, forward=not forward), 1 - rank, size) for n in range(5)]
        sent = [
            send(both[rank], key(n, forward=forward), 1 - rank, bytes_of(10 * rank + n, size))
            for n in range(5)
        ]
        for pending in sent:
            pending.wait()
        received = [one.wait() for one in waiting]
        return all(torch.equal(one, bytes_of(10 * (1 - rank) + n, size)) for n, one in enumerate(received))

    assert run_threads(2, work) == [True, True]


@pytest.mark.parametrize("size", [640, LARGE_BYTES + 640])
def test_another_size_than_expected_is_told_at_once_and_what_follows_still_comes(
    both: list[SocketTransport], size: int
) -> None:
    send(both[0], key(0), 1, bytes_of(0, size))
    send(both[0], key(1), 1, bytes_of(1, size))
    with pytest.raises(
        BiremeError,
        match=rf"expected .* {size + 128} bytes in all.*other shapes or dtypes \({size + 64} bytes",
    ):
        Receive(both[1], key(0), 0, size + 64).wait()
    assert torch.equal(Receive(both[1], key(1), 0, size).wait(), bytes_of(1, size))


@pytest.mark.parametrize(("size", "is_early"), [(640, False), (640, True), (LARGE_BYTES + 640, False)])
def test_another_message_of_the_channel_is_told_at_once(
    both: list[SocketTransport], size: int, is_early: bool
) -> None:
    """It was waited for until the timeout, though the ranks cannot agree any more."""
    if is_early:
        send(both[0], key(7), 1, bytes_of(7, size))
        send(both[0], key(1, forward=False), 1, bytes_of(1, size)).wait()
        Receive(both[1], key(1, forward=False), 0, size).wait()
    waiting = Receive(both[1], key(0), 0, size)
    if not is_early:
        send(both[0], key(7), 1, bytes_of(7, size))
    with pytest.raises(BiremeError, match=r"expected .* micro-batch 0 .*micro-batch 7 of batch 3"):
        waiting.wait()


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_what_never_comes_is_named(size: int) -> None:
    transports = pair(timeout_s=0.3)
    with pytest.raises(BiremeError, match=r"activation of micro-batch 2 .* did not arrive from rank 0"):
        Receive(transports[1], key(2), 0, size).wait()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize("size", [100_000, 4 * 2**20])
@pytest.mark.parametrize("is_send", [False, True])
def test_a_message_that_flows_may_take_longer_than_the_timeout(
    size: int, is_send: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link, a large message failed although its bytes kept coming."""
    timeout_s, num_parts, clock = 20.0, 12, Clock()
    for module in (connection, socket_transport):
        monkeypatch.setattr(module, "time", clock)
    (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
    small.setblocking(False)
    for one in (small, large, its_small, its_large):
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            one.setsockopt(socket.SOL_SOCKET, buffer, 4096)
    transport = SocketTransport({1: Lines(small, large)}, timeout_s=timeout_s)
    link = its_small if size < LARGE_BYTES else its_large
    written = format_of(size).parcel(HOST)
    written.address(key(0))
    written.pack({"bytes": bytes_of(0, size)})
    data = written.message.numpy().tobytes()
    line = transport._lines[1] if size < LARGE_BYTES else transport._large_messages[1]
    is_over = threading.Event()

    def drip() -> None:
        """Let a part of the message through at a time."""
        part = -(-len(data) // num_parts)
        for begin in range(0, len(data), part):
            clock.now_s += 2 * timeout_s / num_parts
            if is_send:
                read_exactly(link, min(part, len(data) - begin))
            else:
                link.sendall(data[begin : begin + part])
                while line.connection.came_s < clock.now_s and not is_over.wait(0.001):
                    pass

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    try:
        if is_send:
            transport.send(key(0), 1, written.message).wait()
        else:
            assert torch.equal(Receive(transport, key(0), 1, size).wait(), bytes_of(0, size))
    finally:
        is_over.set()
    thread.join()
    transport.close()
    its_small.close()
    its_large.close()


def read_exactly(link: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(link.recv(num_bytes))


@pytest.mark.parametrize("size", [100_000, 4 * 2**20])
def test_a_message_that_stops_flowing_is_named(size: int) -> None:
    (small, its_small), (large, its_large) = (socket.socketpair() for _ in range(2))
    small.setblocking(False)
    transport = SocketTransport({0: Lines(small, large)}, timeout_s=0.3)
    wire = format_of(size)
    link = its_small if size < LARGE_BYTES else its_large
    link.sendall(header_of(key(2), wire.num_bytes, wire.signature) + bytes(1000))
    with pytest.raises(BiremeError, match=r"activation of micro-batch 2 .* did not arrive from rank 0"):
        Receive(transport, key(2), 0, size).wait()
    transport.close()
    its_small.close()
    its_large.close()


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_a_rank_that_is_gone_is_named(both: list[SocketTransport], size: int) -> None:
    pending = Receive(both[1], key(0), 0, size)
    both[0].close()
    with pytest.raises(PeerLost, match="Rank 0 is gone"):
        pending.wait()


@pytest.mark.parametrize("size", [64, LARGE_BYTES + 1])
def test_giving_up_wakes_who_waits_here_and_there(both: list[SocketTransport], size: int) -> None:
    def work(rank: int) -> Any:
        pending = Receive(both[rank], key(0, forward=rank == 1), 1 - rank, size)
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
    pending = Receive(transport, key(0), 0, size)
    wire = format_of(size)
    its_large.sendall(header_of(key(0), wire.num_bytes, wire.signature) + bytes(1000))
    its_large.close()
    with pytest.raises(PeerLost, match="Rank 0 is gone"):
        pending.wait()
    transport.close()
    its_small.close()


def test_what_the_kernel_did_not_take_goes_on_while_a_large_message_is_waited_for() -> None:
    """The other rank sends that only when it has the small ones, so neither would go on."""
    transports = pair(buffer_bytes=16384)
    size, small_size, num_small = LARGE_BYTES + 1, LARGE_BYTES - 64, 6

    def work(rank: int) -> bool:
        transport = transports[rank]
        if rank == 0:
            sent = [send(transport, key(n), 1, bytes_of(n, small_size)) for n in range(num_small)]
            large = Receive(transport, key(0, forward=False), 1, size).wait()
            for pending in sent:
                pending.wait()
            return torch.equal(large, bytes_of(9, size))
        came = [Receive(transport, key(n), 0, small_size).wait() for n in range(num_small)]
        send(transport, key(0, forward=False), 0, bytes_of(9, size)).wait()
        return all(torch.equal(one, bytes_of(n, small_size)) for n, one in enumerate(came))

    assert run_threads(2, work) == [True, True]
    for transport in transports:
        transport.close()


def test_what_was_read_before_it_was_expected_is_found(both: list[SocketTransport]) -> None:
    """The second message comes along with the first, when nobody has asked for it yet."""
    for n in range(2):
        send(both[0], key(n), 1, bytes_of(n, 64)).wait()
    for n in range(2):
        assert torch.equal(Receive(both[1], key(n), 0, 64).wait(), bytes_of(n, 64))
    assert Receive(both[1], key(2), 0, 64).pending.is_done() is False


def test_what_is_no_message_of_ours_is_told(both: list[SocketTransport]) -> None:
    for alien in (header_of(key(0), 1 << 30, 0), bytes(64)):
        both[0]._lines[1].connection.socket.sendall(alien)
        with pytest.raises(BiremeError, match="is not a message of this version"):
            Receive(both[1], key(0), 0, 64).wait()
        staged = both[1]._lines[0].connection
        staged._begin = staged._end = 0
    both[0]._large_messages[1].connection.socket.sendall(bytes(64))
    with pytest.raises(BiremeError, match="is not a message of this version"):
        Receive(both[1], key(0), 0, LARGE_BYTES).wait()


@pytest.mark.parametrize("is_local", [True, False])
def test_ranks_meet_through_the_store_and_strangers_stay_outside(
    monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    monkeypatch.setenv("BIREME_ADDRESS", "127.0.0.1")
    monkeypatch.setattr(listener, "HAS_ABSTRACT_NAMES", is_local and listener.HAS_ABSTRACT_NAMES)
    store = serve_store("127.0.0.1", key="key", timeout_s=20)
    routes = Routes((0, 1, 2, 0))

    def work(rank: int) -> list[float]:
        own = RunStore("127.0.0.1", store.port, "key", 20)
        if rank == 1:
            own.wait(["here/7"])
            port = int(own.get("here/7").decode().split()[3])
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(bytes(200))
                with suppress(ConnectionResetError):
                    while stranger.recv(100):
                        pass
            # Who only connected and said nothing held up the rank that it called until the timeout.
            for _ in range(3):
                silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        neighbors = neighbors_of(rank, routes)
        lines = meet(own, "here", rank=rank, ranks=[7, 8, 9], neighbors=neighbors, timeout_s=20)
        families = {one.family for pair in lines.values() for one in (pair.small, pair.large)}
        assert families == {socket.AF_UNIX if listener.HAS_ABSTRACT_NAMES else socket.AF_INET}
        transport = SocketTransport(lines, timeout_s=20)
        waiting = [Receive(transport, Message(True, rank, 0, peer, None), peer, 8) for peer in neighbors]
        for peer in neighbors:
            body = torch.full((8,), rank, dtype=torch.uint8)
            send(transport, Message(True, peer, 0, rank, None), peer, body).wait()
        came = sorted(float(one.wait()[0]) for one in waiting)
        transport.close()
        return came

    with ExitStack() as silent:
        assert run_threads(3, work) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


def test_who_is_lost_has_its_number_in_the_world_while_ranks_meet_and_afterwards() -> None:
    """The second replica of a pipeline of two: its ranks 0 and 1 were named, which are those of the first."""
    ranks = [2, 3]

    def work(rank: int) -> str:
        lines = meet(store, "here", rank=rank, ranks=ranks, neighbors={1 - rank}, timeout_s=20)
        transport = SocketTransport(lines, timeout_s=patience_s() if rank else 0.3, ranks=ranks)
        pending = Receive(transport, key(0, forward=rank == 1), 1 - rank, 8)
        try:
            with pytest.raises(PeerLost if rank else BiremeError) as caught:
                pending.wait()
        finally:
            transport.close()
        return str(caught.value)

    store = HashStore()
    silent, lost = run_threads(2, work)
    assert "did not arrive from rank 3" in silent
    assert "Rank 2 is gone" in lost

    with pytest.raises(PeerLost, match="Rank 3 is gone: it did not connect"):
        meet(HashStore(), "here", rank=0, ranks=ranks, neighbors={1}, timeout_s=0.2)
    store, gone = HashStore(), socket.create_server(("127.0.0.1", 0))
    store.set("here/2", f"1000 key 127.0.0.1 {gone.getsockname()[1]} none")
    gone.close()
    with pytest.raises(PeerLost, match=r"Rank 2 is gone: .*refused"):
        meet(store, "here", rank=1, ranks=ranks, neighbors={0}, timeout_s=20)


def joined(segment_bytes: int) -> tuple[Lines, Lines]:
    """Two ends of a connection over TCP, whose packets are no longer than that."""
    ends: list[list[socket.socket]] = [[], []]
    for _ in range(2):
        with socket.socket() as listener, ExitStack() as undo:
            one = undo.enter_context(socket.socket())
            for made in (listener, one):
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            one.connect(listener.getsockname())
            other = listener.accept()[0]
            undo.pop_all()
        ends[0].append(one)
        ends[1].append(other)
    near, far = (Lines(small, large, ordinary_bytes()) for small, large in ends)
    for lines in (near, far):
        lines.prepare()
    return near, far


def test_the_kernel_takes_ordinary_messages_while_the_sender_computes() -> None:
    """On a new connection with Ethernet's segments it took 180 of 960 KB. The rest waited for the sender."""
    near, far = joined(1448)
    transport = SocketTransport({1: near}, timeout_s=20.0)
    size = near.ordinary_bytes - 64
    for n in range(NUM_UNDER_WAY):
        send(transport, key(n), 1, bytes_of(n, size))
    assert sum(len(one.rest[0]) for one in transport._lines[1].connection.outgoing) == 0
    transport.close()
    far.small.close()
    far.large.close()


def test_messages_are_ordinary_only_as_far_as_the_kernels_buffers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ordinary_bytes() <= LARGE_BYTES
    monkeypatch.setattr("bireme.runtime.socket_transport.BUFFER_BYTES", 50_000)
    assert ordinary_bytes() <= 2 * 50_000 // NUM_UNDER_WAY  # Linux grants twice what is asked for


def test_neighbors_are_the_ranks_of_stages_next_door() -> None:
    assert neighbors_of(0, Routes((0, 1, 2, 3))) == {1}
    assert neighbors_of(2, Routes((0, 1, 2, 3))) == {1, 3}
    assert neighbors_of(0, Routes((0, 1, 1, 0))) == {1}
    assert neighbors_of(0, Routes((0,))) == set()
    assert neighbors_of(1, Routes.wide(((2, 2), (1, 3)))) == {2, 3}


def test_a_rank_sleeps_while_bytes_that_nobody_expects_yet_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would run in circles until they are expected."""
    transports = mesh(3)
    send(transports[1], key(5), 0, torch.zeros(64, dtype=torch.uint8))
    turns: list[float] = []
    poll = transports[0].poll

    def counted(seconds: float) -> None:
        turns.append(seconds)
        poll(seconds)

    monkeypatch.setattr(transports[0], "poll", counted)
    late = torch.zeros(64, dtype=torch.uint8)
    threading.Timer(0.5, lambda: send(transports[2], key(6), 0, late)).start()
    Receive(transports[0], key(6), 2, 64).wait()
    assert len(turns) < 50
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("entries", [2048, 2**21])
def test_a_message_that_is_shorter_than_its_bound_arrives_whole_and_the_next_one_after_it(
    both: list[SocketTransport], entries: int
) -> None:
    """Over the small socket, whether it was expected before it came or not, and over the large one."""
    spec = TensorSpec("x", (entries,), torch.float32, parse_codec("topk:0.25:8:4"))
    wire = WireFormat([spec])
    rooms = [wire.arrival(key(number), HOST) for number in range(3)]
    first = both[1].receive(key(0), 0, rooms[0].message)
    sender, receiver = Coding(), Coding()
    under_way = []
    for number in range(3):
        parcel = wire.parcel(HOST)
        parcel.address(key(number))
        parcel.pack({"x": torch.randn(entries, generator=torch.Generator().manual_seed(number))}, sender)
        assert parcel.num_bytes < len(parcel.message)
        under_way.append(both[0].send(key(number), 1, parcel.message, parcel.num_bytes))
        if number == 0:
            first.wait()
    for number in (1, 2):
        both[1].receive(key(number), 0, rooms[number].message).wait()
    for one in under_way:
        one.wait()
    for number, room in enumerate(rooms):
        x = torch.randn(entries, generator=torch.Generator().manual_seed(number))
        found = room.unpack(HOST, receiver)["x"]
        assert (found - x).abs()[found != 0].max() < 0.1
        assert (found != 0).sum() >= entries // 8
