"""What leaves the host is encrypted, and only who knows the key of the run takes part."""

import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from bireme.errors import BiremeError
from bireme.sync.rounds.round_group import PeerLine, Stamp, Tag
from bireme.wire import encryption
from bireme.wire.connection import HEADER_BYTES, Connection, FrameKind, frame_header, wait_for
from bireme.wire.encryption import ALWAYS, NEVER, VARIABLE, EncryptedSocket, leaves_host
from bireme.wire.listener import authenticated, call
from tests.support.patience import patience_s
from tests.support.sockets import encrypted_sockets
from tests.wire.test_listener import KEY, House

pytest.importorskip("cryptography", reason="encryption needs it")

SECRET = b"0123456789abcdef" * 64


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ALWAYS)


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.close()


@pytest.fixture
def ends() -> Iterator[tuple[EncryptedSocket, EncryptedSocket]]:
    here, there = encrypted_sockets()
    assert isinstance(here, EncryptedSocket)
    assert isinstance(there, EncryptedSocket)
    with here, there:
        yield here, there


class Between:
    """A person between two ends, who passes on what `change` makes of it. Number 0 is from the caller."""

    def __init__(self, port: int, change: Callable[[int, bytes], bytes] = lambda _, data: data) -> None:
        self.seen = [b"", b""]
        self._change = change
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._undo = ExitStack()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            caller = self._undo.enter_context(self._listening.accept()[0])
            other = self._undo.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            ways = ((0, caller, other), (1, other, caller))
            for way in ways:
                threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, number: int, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[number] += data
                target.sendall(self._change(number, data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Between":
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self._undo.close()

    def called(self, key: str = KEY) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=patience_s())
        return authenticated(made, key, b"purpose")


def text_of(connection: Connection) -> bytes:
    while (text := connection.next_text(1 << 20)) is None:
        assert wait_for(connection, select.POLLIN, patience_s())
    return text


def test_a_line_within_a_host_is_not_encrypted_unless_asked(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = call(house.doorway.address, KEY, b"", patience_s())
    monkeypatch.setenv(VARIABLE, ALWAYS)
    encrypted = call(house.doorway.address, KEY, b"", patience_s())
    with plain, encrypted:
        assert not isinstance(plain, EncryptedSocket)
        assert isinstance(encrypted, EncryptedSocket)
        house.wait(lambda: len(house.callers) == 2)
        assert [isinstance(one.socket, EncryptedSocket) for one in house.callers] == [False, True]


def test_a_line_leaves_the_host_if_its_two_addresses_differ_and_are_not_the_loopback() -> None:
    class Made:
        family = socket.AF_INET

        def __init__(self, own: str, peer: str) -> None:
            self.getsockname, self.getpeername = lambda: (own, 1), lambda: (peer, 2)

    for own, peer, leaves in (
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "127.0.0.5", False),
        ("::1", "::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ):
        assert leaves_host(Made(own, peer)) is leaves  # type: ignore[arg-type]
    here, there = socket.socketpair()
    with here, there:
        assert not leaves_host(here)


@pytest.mark.usefixtures("always")
def test_an_eavesdropper_reads_the_greeting_and_nothing_of_what_follows(house: House) -> None:
    with Between(house.port) as between, between.called() as made:
        house.wait(lambda: bool(house.callers))
        assert house.callers[0].purpose.rstrip(b"\0") == b"purpose"
        connection, other = Connection(made), Connection(house.callers[0].socket)
        connection.say(SECRET)
        other.say(SECRET)
        for one, end in ((connection, other), (other, connection)):
            one.flush(patience_s())
            assert text_of(end) == SECRET
        for seen in between.seen:
            assert len(seen) > len(SECRET)
            assert SECRET[:16] not in seen


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("place", [8, 300, -40])
def test_a_person_between_who_changes_a_byte_ends_the_line(house: House, place: int) -> None:
    """Of the challenge (its policy), of the handshake, of what comes after it."""

    def change(number: int, data: bytes) -> bytes:
        sent = between.seen[number]
        at = place if place > 0 else len(sent) + place if number == 0 and SECRET_SENT.is_set() else -1
        begin = len(sent) - len(data)
        if number == (1 if place == 8 else 0) and begin <= at < len(sent):
            changed = bytearray(data)
            changed[at - begin] ^= 1 if place == 8 else 255
            return bytes(changed)
        return data

    SECRET_SENT = threading.Event()  # noqa: N806
    with Between(house.port, change) as between:
        if place > 0:
            with pytest.raises(OSError, match=r".+"):
                between.called()
            assert house.callers == []
            return
        with between.called() as made:
            house.wait(lambda: bool(house.callers))
            SECRET_SENT.set()
            made.sendall(SECRET)
            other = Connection(house.callers[0].socket)
            with pytest.raises(OSError, match=r".+"):
                text_of(other)


@pytest.mark.usefixtures("always")
def test_a_listener_does_not_take_a_caller_that_would_not_encrypt(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.wire.listener.encrypts", lambda *_: False)
    with pytest.raises(ConnectionResetError):
        call(house.doorway.address, KEY, b"", patience_s())
    assert house.callers == []


@pytest.mark.usefixtures("always")
def test_a_listener_that_cannot_encrypt_goes_on_after_a_caller_that_would(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, NEVER)
        patch.setattr("bireme.wire.listener.encrypts", lambda *_: True)
        with pytest.raises(OSError, match=r".+"):
            call(house.doorway.address, KEY, b"", patience_s())
    with call(house.doorway.address, KEY, b"", patience_s()):
        house.wait(lambda: len(house.callers) == 1)


def test_the_listener_decides_that_nothing_is_encrypted(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, NEVER)
    monkeypatch.setattr(encryption, "leaves_host", lambda _: True)
    with call(house.doorway.address, KEY, b"", patience_s()) as made:
        assert not isinstance(made, EncryptedSocket)


def test_ends_with_other_keys_do_not_come_to_the_end_of_the_handshake() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0)
        there.settimeout(0)
        calls = EncryptedSocket(here, "a", is_listener=False)
        with calls, EncryptedSocket(there, "b", is_listener=True) as listens:
            assert not calls.shake_hands()
            assert not listens.shake_hands()
            with pytest.raises(OSError, match="certificate verify failed"):
                calls.shake_hands()


@pytest.mark.usefixtures("always")
def test_without_the_package_one_sentence_says_where_and_how_to_install_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "_has_package", lambda: False)
    with pytest.raises(BiremeError, match=r"pip install 'bireme\[encryption\]'"):
        call(f"127.0.0.1 {house.port} -", KEY, b"", patience_s())
    monkeypatch.setenv(VARIABLE, NEVER)
    call(house.doorway.address, KEY, b"", patience_s()).close()


@pytest.mark.parametrize("ahead_bytes", [HEADER_BYTES, 1000])
@pytest.mark.parametrize("seed", range(2))
def test_frames_arrive_whole_while_the_kernel_takes_little(
    ends: tuple[EncryptedSocket, EncryptedSocket], ahead_bytes: int, seed: int
) -> None:
    here, there = ends
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = Connection(here), Connection(there, ahead_bytes=ahead_bytes)
    draw = random.Random(seed)
    texts = [draw.randbytes(draw.choice((0, 1, 900, 20_000, 700_000))) for _ in range(12)]
    for text in texts:
        sender.send(memoryview(frame_header(FrameKind.TEXT, len(text))), memoryview(text))
    came: list[bytes] = []
    while len(came) < len(texts):
        sender.write()
        while (text := receiver.next_text(1 << 20)) is not None:  # type: ignore[assignment]
            came.append(text)
    assert came == texts
    assert not sender.outgoing


def test_one_thread_sends_while_another_receives(ends: tuple[EncryptedSocket, EncryptedSocket]) -> None:
    data = random.Random(1).randbytes(3_000_000)
    found = {}

    def read(one: EncryptedSocket) -> None:
        into = bytearray(len(data))
        rest = memoryview(into)
        while rest:
            rest = rest[one.recv_into(rest) :]
        found[one] = bytes(into)

    for one in ends:
        one.settimeout(patience_s())
    threads = [threading.Thread(target=read, args=(one,)) for one in ends]
    threads += [threading.Thread(target=one.sendall, args=(data,)) for one in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[one] == data for one in ends] == [True, True]


def test_a_frame_that_waits_for_its_place_is_found_although_it_has_left_the_kernel(
    ends: tuple[EncryptedSocket, EncryptedSocket],
) -> None:
    connection, sender = Connection(ends[0], ahead_bytes=HEADER_BYTES), Connection(ends[1])
    sender.say(SECRET)
    sender.flush(patience_s())
    assert connection.next_frame(lambda _: None) is None
    assert not select.select([ends[0]], [], [], 0)[0]
    assert connection.has_staged
    assert wait_for(connection, select.POLLIN, 0.0)
    assert connection.next_text(1 << 20) == SECRET
    assert connection.next_text(1 << 20) is None
    assert not wait_for(connection, select.POLLIN, 0.0)


def test_a_frame_of_a_given_up_attempt_that_is_half_encrypted_is_sent_to_its_end(
    ends: tuple[EncryptedSocket, EncryptedSocket],
) -> None:
    """The kernel has taken a part of its bytes, and none of them counts as sent yet."""
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near, far = PeerLine(1, ends[0]), PeerLine(0, ends[1])
    old, new = (Tag(Stamp(0, 0, attempt), 1, 0) for attempt in (0, 1))
    near.begin(old.stamp)
    near.send(old, memoryview(bytearray(200_000)))
    near.move_out()
    assert ends[0].is_half_sent
    for line in (near, far):
        line.begin(new.stamp)
    into = memoryview(bytearray(len(SECRET)))
    near.send(new, memoryview(bytearray(SECRET)))
    far.expect(new, into)
    while new not in far.move():
        near.move_out()
    assert bytes(into) == SECRET
