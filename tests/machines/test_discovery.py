"""A coordinator is found in the local network, here on the loopback; answers are hints from anybody."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bireme import __version__
from bireme.cli import coordinate
from bireme.errors import BiremeError
from bireme.machines import discovery
from bireme.machines.discovery import DiscoveryAnswers, FoundCoordinator, find_coordinators
from tests.support.patience import patience_s

RED = FoundCoordinator("127.0.0.1:29600", "first", __version__)
BLUE = FoundCoordinator("127.0.0.1:29601", "second", __version__)


@contextmanager
def answering(*coordinators: FoundCoordinator, port: int = 0) -> Iterator[int]:
    """Coordinators on this machine alone, at one port."""
    with ExitStack() as stack:
        made = list[DiscoveryAnswers]()
        for one in coordinators:
            try:
                made.append(DiscoveryAnswers("127.0.0.1", one, made[0].port if made else port))
            except OSError as error:
                pytest.skip(f"there is no multicast on the loopback: {error}")
            stack.callback(made[-1].close)
        has_ended = threading.Event()

        def turn() -> None:
            while not has_ended.wait(0.01):
                for one in made:
                    one.answer()

        thread = threading.Thread(target=turn)
        thread.start()
        stack.callback(thread.join)
        stack.callback(has_ended.set)
        yield made[0].port


def found_at_last(port: int, count: int) -> list[FoundCoordinator]:
    ends_s = time.monotonic() + patience_s()
    while len(found := find_coordinators(0.3, port)) < count and time.monotonic() < ends_s:
        pass
    return found


def test_every_coordinator_of_a_machine_is_found_with_its_address_and_run() -> None:
    with answering(BLUE, RED) as port:
        assert found_at_last(port, 2) == [RED, BLUE]


def test_an_answer_that_is_none_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other texts than JSON, other fields, an address that is none, and an answer to another query."""
    bodies = (b"no", b'{"address": "a:1"}', b'{"address": "; rm:1x", "run": "r", "version": "1"}')
    whole = b'{"address": "10.0.0.1:1", "run": "r", "version": "1"}'

    def answer(self: DiscoveryAnswers) -> None:
        try:
            query, caller = self._socket.recvfrom(4096)
        except OSError:
            return
        nonce = query[len(discovery._QUERY) :][: discovery._NONCE_BYTES]
        for body in bodies:
            self._socket.sendto(nonce + body, caller)
        self._socket.sendto(bytes(len(nonce)) + whole, caller)
        self._socket.sendto(nonce + whole, caller)

    monkeypatch.setattr(DiscoveryAnswers, "answer", answer)
    with answering(RED) as port:
        assert [one.address for one in found_at_last(port, 1)] == ["10.0.0.1:1"]


def test_a_query_that_is_shorter_than_an_answer_gets_none() -> None:
    with answering(RED) as port, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        asking.settimeout(0.1)
        asking.sendto(discovery._QUERY + bytes(16), (discovery._GROUP, port))
        with pytest.raises(TimeoutError):
            asking.recv(1024)
        asking.settimeout(patience_s())
        asking.sendto(discovery._QUERY.ljust(1024, b"\0"), (discovery._GROUP, port))
        assert asking.recv(1024).startswith(bytes(16) + b'{"address": "127.0.0.1:29600"')


def test_a_letter_that_a_terminal_acts_on_is_not_printed() -> None:
    found = FoundCoordinator("10.0.0.1:1", "run\x1b[2J", "1")
    assert found.sentence == "10.0.0.1:1 coordinates the run run?[2J with Bireme 1."


def test_who_joins_is_to_type_the_address_unless_one_coordinator_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list[FoundCoordinator]()
    monkeypatch.setattr(discovery, "find_coordinators", lambda: found)
    with pytest.raises(BiremeError, match=r"No coordinator answers in the local network\. Type the address"):
        coordinate._found_address()
    found.append(RED)
    assert coordinate._found_address() == RED.address
    found.append(BLUE)
    capsys.readouterr()
    with pytest.raises(BiremeError, match=f"Type the address of one: bireme join {RED.address}"):
        coordinate._found_address()
    told = capsys.readouterr().err
    assert RED.sentence in told
    assert BLUE.sentence in told
