"""Only who knows the key of the run gets in, and strangers cost nothing."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from bireme.wire import listener as listening
from bireme.wire.connection import Poller
from bireme.wire.listener import (
    MOST_STRANGERS,
    Caller,
    Doorway,
    Listener,
    authenticated,
    call,
    interface_of,
    is_own_address,
)
from tests.support.patience import patience_s

KEY = "the key"


class House:
    """A listener with its thread."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.doorway = Doorway()
        self.poller = Poller()
        self.listener = Listener(KEY, self.doorway.sockets, self.poller, self.callers.append)
        self.port = int(self.doorway.address.split()[1])
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            self.poller.wait(0.1)
            self.listener.sweep()
        self.listener.close()
        self.poller.close()

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=patience_s())

    def wait(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + patience_s()
        while not is_so():
            assert time.monotonic() < end_s
            time.sleep(0.001)

    def close(self) -> None:
        self._is_over = True
        self.poller.ring()
        self._thread.join()
        for caller in self.callers:
            caller.socket.close()


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.close()


def is_refused(made: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while made.recv(1000):
            pass
    return True


def test_who_knows_the_key_gets_in_with_its_purpose(house: House) -> None:
    with call(house.doorway.address, KEY, b"purpose", patience_s()) as made:
        house.wait(lambda: bool(house.callers))
        caller = house.callers[0]
        assert caller.purpose.rstrip(b"\0") == b"purpose"
        made.sendall(b"after")
        assert caller.socket.recv(5) == b"after"
    assert len(house.listener._strangers) == 0


@pytest.mark.parametrize("key", ["", "the kez", KEY + "x"])
def test_a_caller_with_another_key_is_refused(house: House, key: str) -> None:
    with pytest.raises(OSError, match=r"hung up|reset"):
        call(house.doorway.address, key, b"", patience_s())
    assert house.callers == []


def test_an_answer_is_of_no_use_a_second_time(house: House) -> None:
    """An eavesdropper replays what a rank said."""
    there, here = socket.socketpair()
    with house.stranger() as rank, there, here:
        challenge = rank.recv(1000)
        here.sendall(challenge)
        answer = b""

        def answering() -> None:
            with suppress(OSError):
                authenticated(there, KEY, b"purpose")

        thread = threading.Thread(target=answering)
        thread.start()
        answer = here.recv(1000)
        here.close()
        thread.join()
        with house.stranger() as eavesdropper:
            eavesdropper.recv(1000)
            eavesdropper.sendall(answer)
            assert is_refused(eavesdropper)
        rank.sendall(answer)
        house.wait(lambda: len(house.callers) == 1)


def test_a_listener_that_does_not_know_the_key_is_left() -> None:
    """Another program may have taken the port of a rank that died."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(listening._CHALLENGE_START + bytes(17) + bytes(32))
        with pytest.raises(ConnectionError, match="does not know the key"):
            authenticated(here, KEY)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"SSH-2.0-OpenSSH_9.6 some long text\r\n")
        with pytest.raises(ConnectionError, match="not of this version"):
            authenticated(here, KEY)


@pytest.mark.parametrize("words", [b"", b"x", bytes(96), bytes(1 << 20)])
def test_strangers_that_say_too_little_or_too_much_are_refused(
    house: House, words: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "GREETING_S", 0.05)
    with house.stranger() as made:
        with suppress(OSError):
            made.sendall(words)
        assert is_refused(made)
    house.wait(lambda: len(house.listener._strangers) == 0)
    assert house.callers == []


def test_many_silent_strangers_hold_up_nobody_and_cost_a_bounded_number_of_sockets(house: House) -> None:
    num_threads = threading.active_count()
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names are enough)
    with ExitStack() as undo:
        for _ in range(3 * MOST_STRANGERS):
            undo.enter_context(house.stranger())
        with call(house.doorway.address.rpartition(" ")[0] + " -", KEY, b"", patience_s()):
            house.wait(lambda: len(house.callers) == 1)
        assert len(house.listener._strangers) <= MOST_STRANGERS
        own_files = len(os.listdir("/proc/self/fd")) - num_files - 3 * MOST_STRANGERS  # noqa: PTH208
        assert own_files <= MOST_STRANGERS + 1
        assert threading.active_count() == num_threads
    house.wait(lambda: len(house.listener._strangers) == 0)


@pytest.mark.parametrize("seed", range(3))
def test_noise_at_the_door_changes_nothing(house: House, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        with house.stranger() as made, suppress(OSError):
            if draw.random() < 0.5:
                made.recv(1000)
            made.sendall(draw.randbytes(draw.choice((1, 50, 95, 96, 97, 5000))))
    with call(house.doorway.address, KEY, b"", patience_s()):
        house.wait(lambda: len(house.callers) == 1)
    house.wait(lambda: len(house.listener._strangers) == 0)


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        for name in ("BIREME_ADDRESS", "MASTER_ADDR"):
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def test_a_run_on_one_machine_listens_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, interface in (({}, "127.0.0.1"), ({"BIREME_ADDRESS": "203.0.113.9"}, "0.0.0.0")):
        with environment(monkeypatch, **values):
            doorway = Doorway()
        assert doorway.sockets[0].getsockname()[0] == interface
        for one in doorway.sockets:
            one.close()
    assert interface_of("10.0.0.1") == ""


def test_an_address_of_another_machine_is_none_of_this_one() -> None:
    found = {
        host: is_own_address(host) for host in ("127.0.0.1", "localhost", "192.0.2.1", "nowhere.invalid")
    }
    assert found == {"127.0.0.1": True, "localhost": True, "192.0.2.1": False, "nowhere.invalid": False}
