"""`bireme doctor`: everything that makes joining fail is one sentence with its remedy, for who typed."""

import ctypes
import errno
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from bireme import __version__
from bireme.errors import BiremeError
from bireme.machines import line, own_machine
from bireme.machines.findings import Finding, Verdict
from bireme.machines.keys import HOME
from bireme.machines.line import DoctorListener, check_line
from bireme.machines.measured_lines import MeasuredLine
from bireme.machines.own_machine import MachineFacts, check_machine
from bireme.runtime.stores import serve_store
from bireme.wire.connection import VERSION
from bireme.wire.encryption import ALWAYS, VARIABLE
from bireme.wire.listener import open_port
from tests.support.command import bireme
from tests.support.copies import Copy
from tests.support.hosts import CARD, Host, hosts, run, set_cable
from tests.support.patience import patience_s
from tests.support.ranks import until

TOKEN = "the token"
OWN = MachineFacts.own(__version__)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)
    found = DoctorListener(("127.0.0.1", 0), TOKEN, OWN, lambda _: None)
    yield "127.0.0.1", found.port
    found.close()


def dropping_port(interface: str = "", port: int = 0) -> socket.socket:
    """A port that the firewall of the system closes: the kernel drops what comes for it."""
    made, drop_all = open_port(interface, port), ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    made.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER of Linux
    return made


def failing(findings: Iterator[Finding]) -> list[str]:
    return [f"{one.check}: {one.text} {one.remedy}" for one in findings if one.verdict == Verdict.FAILS]


@contextmanager
def answering(words: bytes) -> Iterator[tuple[str, int]]:
    """A program that is not ours."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError), listening.accept()[0] as made:
                made.sendall(words)
                made.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()


@pytest.mark.parametrize("policy", ["", ALWAYS])
def test_a_line_on_which_all_is_well(
    listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    if policy:
        pytest.importorskip("cryptography", reason="encryption needs it")
    monkeypatch.setenv(VARIABLE, policy)
    found = {one.check: one for one in check_line(listener, TOKEN, OWN)}
    assert {one.verdict for one in found.values()} == {Verdict.WELL}
    assert {*found} == {"port", "encryption", "versions", "latency", "clock", "ports", "bandwidth"}
    line = MeasuredLine.of([*found.values()])
    assert line is not None
    assert min(line.out_bytes_per_s, line.in_bytes_per_s) > 1e5
    assert f"{8e-6 * line.in_bytes_per_s:,.0f} Mbit/s from" in found["bandwidth"].text
    assert ("is encrypted" in found["encryption"].text) == bool(policy)


def test_a_wrong_token_and_a_closed_port_are_named(listener: tuple[str, int]) -> None:
    assert "does not take the token. Copy" in failing(check_line(listener, "another", OWN))[0]
    assert "does not take a caller without a token" in failing(check_line(listener, "", OWN))[0]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    assert "nothing listens at its port" in failing(check_line(address, TOKEN, OWN))[0]
    assert "does not find the name" in failing(check_line(("no-such-host.invalid", 1), TOKEN, OWN))[0]


def test_a_firewall_is_named_whatever_end_it_is_at(
    listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "TIMEOUT_S", 0.6)
    with dropping_port("127.0.0.1") as closed:
        (found,) = failing(check_line(closed.getsockname(), TOKEN, OWN))
    assert "does not answer: it is off, or a firewall" in found
    monkeypatch.setattr(line, "open_port", dropping_port)
    back, towards = failing(check_line(listener, TOKEN, OWN))
    assert "cannot call this machine back at 127.0.0.1" in back
    assert "only one direction is open. Ranks listen on ports of their own choice" in back
    assert f"this machine cannot call {OWN.name} at 127.0.0.1" in towards
    monkeypatch.setattr(line, "answer_check", partial(line.answer_check, trains=False))
    (found,) = failing(check_line(listener, TOKEN, OWN))  # as a machine that only coordinates
    assert "this machine cannot call" not in found


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(errno.ECONNREFUSED, "or a firewall rejects calls"), (errno.EHOSTUNREACH, "is let in there")],
)
def test_a_firewall_that_rejects_is_one_of_the_causes(
    monkeypatch: pytest.MonkeyPatch, error: int, sentence: str
) -> None:
    """firewalld answers that the host cannot be reached, others that the port is closed."""

    def rejected(*_: object, **__: object) -> socket.socket:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(socket, "create_connection", rejected)
    (found,) = failing(check_line(("192.0.2.1", 29600), TOKEN, OWN))
    assert sentence in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "something else than Bireme listens"),
        (b"BIREME?" + bytes([VERSION - 1]) + bytes(16), f"has version {VERSION - 1} of the protocol"),
        (b"", "does not greet"),
    ],
)
def test_another_program_or_another_version_is_named(
    words: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "TIMEOUT_S", 0.3)
    with answering(words) as address:
        (found,) = failing(check_line(address, TOKEN, OWN))
    assert sentence in found
    assert found.count(". ") == 1  # a sentence and a remedy


def test_the_port_of_a_run_is_known_as_one() -> None:
    store = serve_store("127.0.0.1", key=TOKEN, timeout_s=patience_s())
    found = [*check_line(("127.0.0.1", store.port), TOKEN, OWN)]
    assert [one.verdict for one in found] == [Verdict.WELL, Verdict.WELL, Verdict.NOTE]
    assert "a run of Bireme" in found[-1].text
    assert store.num_keys() == 0  # and it goes on


@pytest.mark.parametrize(
    ("change", "verdict", "sentence"),
    [
        ({"bireme": "0.0.1"}, Verdict.FAILS, "Install the same version on both"),
        ({"torch": "2.0.0"}, Verdict.NOTE, "torch"),
        ({"python": "3.1.0"}, Verdict.NOTE, "Python"),
    ],
)
def test_versions_that_differ_are_named(change: dict[str, str], verdict: Verdict, sentence: str) -> None:
    own = OWN
    words = {name: getattr(own, name) for name in MachineFacts.__slots__} | {"name": "there\x1b[2J"} | change
    (found,) = line._versions(own, MachineFacts.read(words))
    assert found.verdict == verdict
    assert sentence in found.line
    assert "\x1b" not in found.line


@pytest.mark.parametrize(("offset_s", "verdict"), [(0, "ok"), (30, "note"), (-4000, "fails")])
def test_clocks_are_compared(
    listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch, offset_s: float, verdict: str
) -> None:
    ask = line.RequestLine.ask

    def shifted(self: line.RequestLine, what: str, **words: object) -> dict[str, object]:
        found = ask(self, what, **words)
        return {"now_s": found["now_s"] + offset_s} if what == "ping" else found

    monkeypatch.setattr(line.RequestLine, "ask", shifted)
    found = next(one for one in check_line(listener, TOKEN, OWN) if one.check == "clock")
    assert found.verdict == verdict
    assert offset_s >= 0 or "behind" in found.text


def test_a_router_between_is_seen_by_its_address(
    listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = line.RequestLine.ask

    def behind(self: line.RequestLine, what: str, **words: object) -> dict[str, object]:
        found = ask(self, what, **words)
        return {**found, "seen": "203.0.113.9"} if what == "hello" else found

    monkeypatch.setattr(line.RequestLine, "ask", behind)
    found = next(one for one in check_line(listener, TOKEN, OWN) if one.check == "address")
    assert "sees it as 203.0.113.9: a router is in between" in found.text
    assert "VPN" in found.remedy


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        ("find_spec", lambda _: None, "pip install 'bireme[encryption]'"),
        ("available_bytes", lambda: 1 << 20, "End other programs"),
        ("_DRIVER", Path("/proc/self/stat"), "there is a driver"),
    ],
)
def test_what_is_wrong_with_this_machine_is_named(
    attribute: str,
    value: Callable[..., object],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(own_machine, attribute, value)
    monkeypatch.setattr("bireme.devices.num_accelerators", lambda: 0)
    assert any(sentence in one.line for one in check_machine(OWN))


@pytest.mark.parametrize("is_there", [True, False])
def test_gpus_are_asked_for_where_linux_shows_one(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kfd"
    if is_there:
        file.touch()
    monkeypatch.setattr(own_machine, "_OF_GPUS", (file,))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("bireme.devices.num_accelerators", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", "GPU {}".format)
    assert own_machine.gpu_names() == (("GPU 0", "GPU 1") if is_there else ())


def test_the_command_has_a_document_and_three_exit_statuses(
    listener: tuple[str, int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("cryptography", reason="without it bireme doctor finds a failure")
    monkeypatch.setenv(HOME, str(tmp_path))
    where = f"127.0.0.1:{listener[1]}"
    good = bireme(capsys, "doctor", where, "--token", TOKEN, "--json")
    assert good.status == 0
    assert json.loads(good.out)["is_well"]
    bad = bireme(capsys, "doctor", where, "--token", "another")
    assert bad.status == 1
    assert "1 of" in bad.out.splitlines()[-1]
    for words in (["nowhere"], ["host:port"], ["--token", "x"], ["a:1", "--listen", "b:2"]):
        assert bireme(capsys, "doctor", *words).status == 2


def test_a_port_that_is_taken_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(BiremeError, match="cannot be opened"),
    ):
        DoctorListener(("127.0.0.1", taken.getsockname()[1]), TOKEN, OWN, lambda _: None)


# Real processes on hosts with networks of their own.


def started(host: Host, folder: Path, *words: str) -> Copy:
    """A machine with a home of its own."""
    variables = {HOME: str(folder / host.name)}
    return Copy(["-m", "bireme", "doctor", *words], folder, variables=variables, first=host.begin)


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_check_their_line_before_any_run(tmp_path: Path) -> None:
    """All is well; then large packets get lost; then a cable is pulled out."""
    with hosts(2) as machines:
        first, second = machines
        listening = started(first, tmp_path, "--listen", f"{first.address}:0")
        with closing(listening):
            until(lambda: "bireme doctor " in listening.out.read_text())
            (words,) = re.findall(r"bireme doctor (.+)", listening.out.read_text())

            def checked() -> tuple[int, list[dict[str, str]]]:
                with closing(started(second, tmp_path, *words.split(), "--json")) as process:
                    out, _ = process.communicate(patience_s())
                    assert process.returncode is not None
                    return process.returncode, json.loads(out)["findings"]

            status, found = checked()
            assert status == 0, found
            assert any(one["text"] == "the line is encrypted (TLS 1.3)" for one in found)

            for host in machines:
                run("ip", "-n", host.namespace, "link", "set", CARD, "gso_max_segs", "1")
            run("ip", "-n", f"bireme-test-{os.getpid()}-switch", "link", "set", "port1", "mtu", "1200")
            status, found = checked()
            wrong = [one for one in found if one["verdict"] == "fails"]
            assert status == 1
            assert wrong[-1]["check"] in ("line", "large messages"), found
            assert "mtu 1280" in wrong[-1]["remedy"]

            set_cable(0, is_plugged=False)
            status, found = checked()
            assert (status, found[-1]["check"]) == (1, "port")
            assert "does not answer" in found[-1]["text"] or "no way leads" in found[-1]["text"]
            assert ": ok    latency" in listening.out.read_text()
