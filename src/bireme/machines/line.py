"""A line between two machines, checked from one end: `bireme doctor HOST:PORT`.

The other end is `bireme doctor --listen`, which answers everything, or a process of a run, of which can only
be said that it is there and takes the key. Requests are texts in JSON, data are frames of bytes:

    hello facts ──▶ facts, seen address          take N, N bytes ──▶ taken
    ping ──▶ time                                give N ──▶ N bytes
    call port, key ──▶ error                     open key ──▶ port, tried ──▶ closed
    findings lines ──▶ noted
"""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from statistics import median
from typing import Any

from bireme.errors import BiremeError, printable, system_errors, system_reason
from bireme.machines.findings import Finding, fails, note, well
from bireme.machines.keys import place_of
from bireme.machines.own_machine import MachineFacts
from bireme.wire.connection import VERSION
from bireme.wire.encryption import EncryptedSocket
from bireme.wire.listener import (
    Caller,
    KeyOf,
    ListenerThread,
    call_by,
    call_port,
    interface_of,
    new_key,
    open_port,
)
from bireme.wire.messages import MessageConnection

Address = tuple[str, int]
TIMEOUT_S = 5.0
"""How long anything may take in which nothing moves."""
_MEASURE_S = 1.0
_NUM_PINGS = 20
_LARGE_BYTES, _MOST_BYTES = 1 << 20, 1 << 26
_MOST_WORDS_BYTES = 1 << 20
_MOST_OFFSET_S, _FAILING_OFFSET_S = 2.0, 300.0
_MTU = (
    "the MTU of a link between is smaller than both ends believe, or the line was cut",
    "Lower it on both machines, such as: ip link set dev eth0 mtu 1280",
)
_GREETING = b"BIREME?"
_CUT = ("line", "large messages")
"""Checks after which, if they fail, nothing more can be asked."""


class RequestLine(MessageConnection):
    """Requests and data over a connection, at either end."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__(made, TIMEOUT_S, most_bytes=_MOST_WORDS_BYTES)

    def hear(self, *, limit_s: float | None = None) -> dict[str, Any]:
        """The next text; empty if it is no JSON object. Raises an `OSError` if it does not come."""
        found = super().hear(limit_s=limit_s)
        return found if isinstance(found, dict) else {}

    def ask(self, what: str, **words: Any) -> dict[str, Any]:
        """The answer to a request. Raises an `OSError` or a `ValueError` if none comes."""
        self.say({"do": what, **words})
        return self.hear()


class LineListener(ABC):
    """Has each caller with the key served in a thread, until it is closed. Raises a `BiremeError` with the
    remedy if it cannot listen.
    """

    def __init__(self, address: Address, remedy: str, key: str | KeyOf, name: str) -> None:
        host, port = address
        with system_errors(f"Port {port} cannot be opened here", remedy):
            listening = open_port(interface_of(host), port)
        self.port: int = listening.getsockname()[1]
        self._thread = ListenerThread(key, [listening], self._take, name)

    def close(self) -> None:
        """Listen no more."""
        self._thread.close()

    @abstractmethod
    def serve(self, caller: Caller) -> None:
        """Answer a caller, and close its connection."""

    def _take(self, caller: Caller) -> None:
        threading.Thread(target=self.serve, args=(caller,), daemon=True).start()


class DoctorListener(LineListener):
    """Answers `bireme doctor` of other machines that know the token, until it is closed. `tell` prints what
    they have found.
    """

    def __init__(
        self, address: Address, token: str | KeyOf, own: MachineFacts, tell: Callable[[str], None]
    ) -> None:
        self._own, self._tell = own, tell
        super().__init__(address, "Name another one, or 0 for any.", token, "bireme doctor")

    def serve(self, caller: Caller) -> None:
        """Answer everything by which a line is checked."""
        made = caller.socket
        with made, suppress(OSError, ValueError, KeyError, TypeError, BiremeError):
            peer = made.getpeername()[0] if made.family != socket.AF_UNIX else ""
            line, name = RequestLine(made), peer
            while True:
                asked = line.hear()
                answer_check(line, asked, peer, self._own)
                match asked["do"]:
                    case "hello":
                        name = MachineFacts.read(asked["facts"]).name
                        self._tell(f"{name} at {peer} checks the line.")
                    case "findings":
                        for text in asked["lines"][:100]:
                            self._tell(f"{name}: {printable(text)[:400]}")
                        line.say({})


def answer_check(
    line: RequestLine, asked: Mapping[str, Any], peer: str, own: MachineFacts, *, trains: bool = True
) -> None:
    """Answer a request of the other end, at the address `peer`, if it is one by which it checks the line.
    Unless this machine `trains`, it needs no ports besides that of the line.
    """
    match asked["do"]:
        case "hello":
            line.say({"facts": asdict(own), "seen": peer})
        case "ping":
            line.say({"now_s": time.time()})
        case "take":
            line.take_at_most(_MOST_BYTES)
            line.say({})
        case "give":
            line.send(bytes(min(int(asked["bytes"]), _MOST_BYTES)))
        case "call":
            line.say({"error": _call_back(peer, int(asked["port"]), str(asked["key"]))})
        case "open":
            with _open(str(asked["key"])) if trains else nullcontext(0) as port:
                line.ask("port", port=port)  # answered once the other end has tried it
            line.say({})


@contextmanager
def _open(key: str) -> Iterator[int]:
    """A port that the system chooses, open for callers with the key."""
    came, listening = list[Caller](), open_port("")
    thread = ListenerThread(key, [listening], came.append, "bireme doctor")
    try:
        yield listening.getsockname()[1]
    finally:
        thread.close()
        for one in came:
            one.socket.close()


def _call_back(host: str, port: int, key: str) -> str:
    """Why the other end cannot be called; empty if it can."""
    try:
        call_port((host, port), key, TIMEOUT_S / 2).close()  # the other end waits for the answer meanwhile
    except (OSError, BiremeError) as error:
        return system_reason(error)
    return ""


def check_line(address: Address, token: str, own: MachineFacts) -> Iterator[Finding]:
    """All findings about the line to another machine, as they come. It ends with the first that makes the
    others impossible.
    """
    host, port = address
    refusal = fails(
        "token",
        f"{host}:{port} does not take {'the token' if token else 'a caller without a token'}.",
        "Copy the line that `bireme doctor --listen` prints there. For the port of a run, --token is the "
        "run's BIREME_KEY.",
    )
    line = yield from _called(address, token, b"", f"bireme doctor --listen {host}:{port}", refusal)
    if line is None:
        return
    with line.socket:
        found = list[Finding]()
        try:
            for one in check_between(line, own):
                found.append(one)
                yield one
        except _NoAnswerError:
            yield note(
                "peer",
                f"a run of Bireme listens at {host}:{port}, and takes the key.",
                "Run `bireme doctor --listen` there to check versions, clocks, ports and speeds.",
            )
            return
        if not any(one.check in _CUT and one.remedy for one in found):
            with suppress(OSError, ValueError):
                line.ask("findings", lines=[one.line for one in found])


def call_coordinator(
    address: Address, key: str, purpose: bytes
) -> Generator[Finding, None, RequestLine | None]:
    """A line to `bireme coordinate`, with the findings on the way; None if the last one says why not."""
    where = place_of(address)
    remedy = "Copy the line that `bireme coordinate` prints there, with a token of its own for this machine."
    refusal = fails("token", f"{where} is not the coordinator that gave the token.", remedy)
    return (yield from _called(address, key, purpose, "bireme coordinate", refusal))


def _called(
    address: Address, key: str, purpose: bytes, command: str, refusal: Finding
) -> Generator[Finding, None, RequestLine | None]:
    """A line to what the command starts there. `refusal` is the finding if that takes no caller."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        remedy = "Type its address instead, or add the name to /etc/hosts."
        yield fails("name", f"this machine does not find the name {host}.", remedy)
        return None
    where = found[0][4][0]
    if where != host:
        yield well("name", f"{host} is {where}")
    made, stop = None, refusal
    try:
        made = call_by(lambda: _greeted(address, command), key, purpose)
    except _StopError as error:
        yield error.finding
        return None
    except BiremeError as error:
        stop = fails("encryption", str(error), "")
    except TimeoutError:
        stop = fails("line", f"{host}:{port} greets and then falls silent: {_MTU[0]}.", _MTU[1])
    except OSError:
        pass
    yield well("port", f"{host}:{port} answers, with this version of the protocol ({VERSION})")
    if made is None:
        yield stop
        return None
    is_encrypted = isinstance(made, EncryptedSocket)
    text = "the line is encrypted (TLS 1.3)" if is_encrypted else "the line is not encrypted"
    yield well("encryption", text)
    return RequestLine(made)


class _StopError(Exception):
    """No Bireme of this version can be called there."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


def _greeted(address: Address, command: str) -> socket.socket:
    """A connection to a Bireme of this version. Raises a `_StopError` if there is none."""
    host, port = address
    try:
        made = socket.create_connection(address, timeout=TIMEOUT_S)
    except ConnectionRefusedError:
        text = f"{host} is there, and nothing listens at its port {port}, or a firewall rejects calls."
        remedy = f"Start `{command}` there, compare the port with the run's, or let TCP port {port} in."
    except TimeoutError:
        text = f"{host}:{port} does not answer: it is off, or a firewall drops packets."
        remedy = f"Let TCP port {port} in there (such as `ufw allow {port}/tcp`), and in its router."
    except OSError as error:
        text = f"no way leads to {host}:{port}, or a firewall rejects calls: {system_reason(error)}."
        remedy = (
            f"Check the cable, that both machines are in one network or VPN, and that TCP port {port} is let "
            "in there."
        )
    else:
        stop = _stranger(made, address)
        if stop is None:
            return made
        made.close()
        raise _StopError(stop)
    raise _StopError(fails("port", text, remedy)) from None


def _stranger(made: socket.socket, address: Address) -> Finding | None:
    """The finding if no Bireme of this version listens at the other end."""
    where = place_of(address)
    port = "Compare the port with the line that was printed there."
    begin, ends_s = b"", time.monotonic() + TIMEOUT_S
    try:
        while len(begin) <= len(_GREETING) and time.monotonic() < ends_s:
            begin = made.recv(len(_GREETING) + 1, socket.MSG_PEEK)
            if not begin or not _GREETING.startswith(begin[: len(_GREETING)]):
                break
    except OSError:
        begin = b""
    if not begin:
        return fails("port", f"something listens at {where} and does not greet: it is not Bireme.", port)
    if not begin.startswith(_GREETING):
        words = begin.decode(errors="replace")
        return fails("port", f"something else than Bireme listens at {where}: it says {words!r}.", port)
    if begin[-1] != VERSION:
        return fails(
            "version",
            f"the Bireme at {where} has version {begin[-1]} of the protocol, and this one {VERSION}.",
            "Install the same version of Bireme on both machines.",
        )
    return None


class _NoAnswerError(ConnectionError):
    """The other end does not answer requests."""


def check_between(line: RequestLine, own: MachineFacts) -> Iterator[Finding]:
    """What both ends of a line find out together. It ends with the first finding that the line is cut."""
    try:
        hello = line.ask("hello", facts=asdict(own))
        other, seen = MachineFacts.read(hello["facts"]), str(hello["seen"])
    except (OSError, ValueError, KeyError):
        raise _NoAnswerError from None
    checks: Sequence[Callable[[], Iterator[Finding]]] = (
        lambda: _versions(own, other),
        lambda: _clocks_and_latency(line, other.name),
        lambda: _addresses(line, seen, other.name),
        lambda: _speeds(line, other.name),
    )
    for check in checks:
        for one in check():
            yield one
            if one.check in _CUT and one.remedy:
                return


def _versions(own: MachineFacts, other: MachineFacts) -> Iterator[Finding]:
    if own.bireme != other.bireme:
        yield fails(
            "versions",
            f"Bireme {own.bireme} here, {other.bireme} on {other.name}.",
            f"Install the same version on both, such as: pip install bireme=={max(own.bireme, other.bireme)}",
        )
    for what, here, there in (("torch", own.torch, other.torch), ("Python", own.python, other.python)):
        if here.split(".")[:2] != there.split(".")[:2]:
            text = f"{what} {here} here, {there} on {other.name}."
            yield note("versions", text, "Results may differ in the last bits; use one version if in doubt.")
    if own == MachineFacts(own.name, other.python, other.torch, other.bireme):
        yield well("versions", f"the same on {other.name}")


def _clocks_and_latency(line: RequestLine, name: str) -> Iterator[Finding]:
    taken: list[tuple[float, float]] = []
    try:
        for _ in range(_NUM_PINGS):
            began_s, began = time.perf_counter(), time.time()
            there_s = float(line.ask("ping")["now_s"])
            took_s = time.perf_counter() - began_s
            taken.append((took_s, there_s - began - took_s / 2))
    except (OSError, ValueError, KeyError) as error:
        text = f"the line broke while small messages crossed: {system_reason(error)}."
        yield fails("line", text, "Check the network.")
        return
    round_s = median(took for took, _ in taken)
    yield well("latency", f"{1e3 * round_s:.2f} ms there and back", round_s)
    offset_s = min(taken)[1]
    text = f"that of {name} is {abs(offset_s):,.1f} s {'ahead' if offset_s > 0 else 'behind'}"
    remedy = "Switch on time synchronization on both machines: timedatectl set-ntp true"
    if abs(offset_s) > _FAILING_OFFSET_S:
        yield fails("clock", f"{text}: tokens and dates of files are wrong.", remedy)
    elif abs(offset_s) > _MOST_OFFSET_S:
        yield note("clock", f"{text}.", remedy)
    else:
        yield well("clock", "both clocks agree to 2 s")


def _addresses(line: RequestLine, seen: str, name: str) -> Iterator[Finding]:
    """Whether both machines can call each other, as ranks do, at a port that the system chooses."""
    own, peer = line.socket.getsockname()[0], line.socket.getpeername()[0]
    if own != seen:
        yield note(
            "address",
            f"this machine is {own}, and {name} sees it as {seen}: a router is in between.",
            "Other machines can call this one only if the router forwards all ports; use a VPN, and set "
            "BIREME_ADDRESS to its address there.",
        )
    key, there, towards = new_key(), 0, ""
    with _open(key) as port:
        try:
            back = str(line.ask("call", port=port, key=key)["error"])[:200]
            if there := int(line.ask("open", key=key)["port"]):
                towards = _call_back(peer, there, key)
            line.ask("tried")
        except (OSError, ValueError, KeyError) as broken:
            back = system_reason(broken)
    allow = "`ufw allow from"
    for error, text, source in (
        (
            back,
            f"{name} cannot call this machine back at {seen}:{port}",
            f"from there (such as {allow} {peer}`)",
        ),
        (
            towards,
            f"this machine cannot call {name} at {peer}:{there}",
            f"there from here (such as {allow} {seen}`)",
        ),
    ):
        if error:
            yield fails(
                "ports",
                f"{text} ({error}): only one direction is open.",
                f"Ranks listen on ports of their own choice: let all TCP ports in {source}, or join both "
                "machines by a VPN.",
            )
    if not back and not towards:
        yield well("ports", f"{name} calls this machine back at {seen}")


def _speeds(line: RequestLine, name: str) -> Iterator[Finding]:
    """Whether large messages cross, and how fast."""

    def give(num_bytes: int) -> None:
        line.say({"do": "give", "bytes": num_bytes})
        line.take_at_most(_MOST_BYTES)

    def take(num_bytes: int) -> None:
        line.say({"do": "take"})
        line.send(bytes(num_bytes))
        line.hear()

    speeds: dict[str, float] = {}
    for cross, way in ((take, f"to {name}"), (give, f"from {name}")):
        num_bytes = _LARGE_BYTES
        try:
            while True:
                began_s = time.perf_counter()
                cross(num_bytes)
                took_s = time.perf_counter() - began_s
                if took_s > _MEASURE_S or num_bytes >= _MOST_BYTES:
                    break
                num_bytes = min(max(2 * num_bytes, int(num_bytes * _MEASURE_S / took_s)), _MOST_BYTES)
        except (OSError, ValueError) as error:
            yield fails(
                "large messages",
                f"small messages cross, and large ones {way} do not ({system_reason(error)}): {_MTU[0]}.",
                _MTU[1],
            )
            return
        speeds[way] = num_bytes / took_s
    text = ", ".join(f"{8e-6 * speed:,.0f} Mbit/s {way}" for way, speed in speeds.items())
    yield well("bandwidth", text, *speeds.values())
