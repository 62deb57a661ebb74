"""Frames arrive whole, in their order and in their places, however the bytes come."""

import random
import socket
from collections.abc import Iterator

import pytest

from bireme.errors import BiremeError
from bireme.wire.connection import (
    HEADER_BYTES,
    SKIP,
    STAGING_BYTES,
    Connection,
    FrameKind,
    Poller,
    Skip,
    frame_header,
    read_frame_header,
)

LENGTHS = (0, 1, 100, STAGING_BYTES - HEADER_BYTES, STAGING_BYTES, 3 * STAGING_BYTES + 7, 5)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    here, there = socket.socketpair()
    there.setblocking(False)
    with here, there:
        yield Connection(here), there


def body_of(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def frame(number: int, length: int) -> bytes:
    tag = number.to_bytes(4, "little")
    return frame_header(FrameKind.EXCHANGE, length, tag) + body_of(number, length)


@pytest.mark.parametrize("ahead_bytes", [HEADER_BYTES, 1000, STAGING_BYTES])
@pytest.mark.parametrize("seed", range(3))
def test_frames_arrive_whole_however_they_are_cut(ahead_bytes: int, seed: int) -> None:
    draw = random.Random(seed)
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here, ahead_bytes=ahead_bytes)
        stream = b"".join(frame(number, length) for number, length in enumerate(LENGTHS))
        bodies: dict[int, bytearray] = {}
        come: list[int] = []

        def number_in(header: bytes) -> int:
            return int.from_bytes(read_frame_header(header).tag[:4], "little")

        def place(header: bytes) -> memoryview:
            body = bodies[number_in(header)] = bytearray(read_frame_header(header).num_bytes - HEADER_BYTES)
            return memoryview(body)

        while stream:
            cut = draw.choice((1, 40, 64, 65, 5000))
            there.sendall(stream[:cut])
            stream = stream[cut:]
            while (header := connection.next_frame(place)) is not None:
                come.append(number_in(header))
    assert come == list(range(len(LENGTHS)))
    assert all(bodies[number] == body_of(number, length) for number, length in enumerate(LENGTHS))
    assert connection.came_bytes == sum(HEADER_BYTES + length for length in LENGTHS)


def test_a_frame_without_a_place_waits_with_all_after_it(ends: tuple[Connection, socket.socket]) -> None:
    connection, there = ends
    there.send(frame(0, 10) + frame(1, 10))
    place: memoryview | Skip | None = None
    assert connection.next_frame(lambda _: place) is None
    place = SKIP
    assert connection.next_frame(lambda _: place) is not None
    place = memoryview(bytearray(10))
    assert connection.next_frame(lambda _: place) is not None
    assert bytes(place) == body_of(1, 10)


def test_the_memory_of_a_frame_that_is_not_wanted_any_more_is_left_alone(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, there = ends
    room, whole = bytearray(1000), frame(0, 1000)
    there.send(whole[:500])
    assert connection.next_frame(lambda _: memoryview(room)) is None
    kept = bytes(room)
    connection.skip_body()
    there.send(whole[500:] + frame(1, 4))
    assert connection.next_frame(lambda _: memoryview(room)) is not None
    assert room == kept
    assert connection.next_frame(lambda _: memoryview(room)[:4]) is not None
    assert room[:4] == body_of(1, 4)


def test_a_text_of_any_length_that_is_announced_takes_no_memory_beyond_its_limit(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, there = ends
    there.send(frame_header(FrameKind.TEXT, 5) + b"short")
    assert connection.next_text(10) == b"short"
    there.send(frame_header(FrameKind.TEXT, 1 << 60))
    with pytest.raises(ConnectionError, match="1152921504606846976 bytes was announced"):
        connection.next_text(10)


@pytest.mark.parametrize(
    "alien", [bytes(HEADER_BYTES), b"GET / HTTP/1.1".ljust(HEADER_BYTES), frame_header(FrameKind.TENSOR, 3)]
)
def test_what_is_no_frame_of_the_kind_expected_is_an_error(
    ends: tuple[Connection, socket.socket], alien: bytes
) -> None:
    connection, there = ends
    there.send(alien)
    with pytest.raises(BiremeError, match="is not a message of this version of Bireme"):
        connection.next_text(10)


def test_what_the_kernel_does_not_take_goes_later_and_in_order() -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here)
        parts = [body_of(number, 300_000) for number in range(4)]
        frames = [connection.send(memoryview(part[:5]), memoryview(part[5:])) for part in parts]
        connection.write()
        assert frames[-1].rest
        came = b""
        while len(came) < 4 * 300_000:
            came += there.recv(1 << 20)
            connection.write()
        assert came == b"".join(parts)
        assert not any(one.rest for one in frames)


def test_a_receiver_that_takes_nothing_ends_a_flush(ends: tuple[Connection, socket.socket]) -> None:
    connection, _ = ends
    connection.send(memoryview(bytes(10_000_000)))
    with pytest.raises(TimeoutError, match="taken nothing"):
        connection.flush(0.05)


def test_an_act_may_let_go_of_a_file_that_is_ready_too() -> None:
    poller, acts = Poller(), list[int]()
    pairs = [socket.socketpair() for _ in range(2)]
    for number, (here, there) in enumerate(pairs):
        there.send(b"x")

        def act(number: int = number) -> None:
            acts.append(number)
            poller.forget(pairs[1 - number][0].fileno())

        poller.want(here.fileno(), 1, act)
    poller.wait(1.0)
    assert len(acts) == 1
    poller.close()
    for pair in pairs:
        for one in pair:
            one.close()
