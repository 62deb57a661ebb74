"""Hosts on one machine: network namespaces, each with its own address and a card of limited speed.

The cards are plugged into a bridge of the kernel, whose token buckets limit them. If messages are to be late
too, a relay process carries every packet instead (`relay.py`): kernels without netem cannot delay. For root
on Linux. Everything that is made here is removed when the context ends.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CARD = "eth0"
"""The network card of every host."""
RELAY_MTU = 9000
"""Of the cards of late hosts: so few packets that a core carries 100 Mbit/s of each of four hosts."""
_TOOL_TIMEOUT_S = 20.0


class NoHosts(Exception):  # noqa: N818 (no error: a benchmark leaves the row out, or goes without hosts)
    """There can be no such hosts here; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its network namespace, its address, and its port of the switch."""

    namespace: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that runs it in the network of this host."""
        return "ip", "netns", "exec", self.namespace

    def prefix_as(self, name: str) -> tuple[str, ...]:
        """The words before a command that runs it on this host, which has that name there."""
        return *self.prefix, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name

    def set_cable(self, *, is_plugged: bool) -> None:
        """Pull the cable of this host out of the switch, or plug it in again."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if is_plugged else "down")

    def processes(self) -> list[int]:
        """The processes that run on this host."""
        done = subprocess.run(
            ("ip", "netns", "pids", self.namespace),
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
        return [int(word) for word in done.stdout.split()]


@contextmanager
def slow_hosts(count: int, megabits_per_s: float | None = None, delay_s: float = 0.0) -> Iterator[list[Host]]:
    """`count` hosts whose cards carry `megabits_per_s` each way, without limit if None, and whose messages
    are `delay_s` late each way. Raises `NoHosts` if there can be none here.
    """
    _check_here()
    switch = f"bireme-bench-{os.getpid()}-switch"
    hosts = [
        Host(f"bireme-bench-{os.getpid()}-{number}", f"10.99.0.{number + 1}", switch, f"port{number}")
        for number in range(count)
    ]
    made: list[str] = []
    with ExitStack() as stack:
        try:
            for namespace in (switch, *(host.namespace for host in hosts)):
                _run("ip", "netns", "add", namespace)
                made.append(namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            if delay_s:
                stack.enter_context(_relay(hosts, megabits_per_s, delay_s))
            else:
                _bridge(hosts, switch, megabits_per_s)
            yield hosts
        finally:
            for namespace in made:
                with suppress(NoHosts):
                    _run("ip", "netns", "delete", namespace)


def _bridge(hosts: Sequence[Host], switch: str, megabits_per_s: float | None) -> None:
    """Plug all cards into a bridge."""
    _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch", "up")
    for host in hosts:
        peer = ("peer", "name", host.port, "netns", switch)
        _run("ip", "link", "add", CARD, "netns", host.namespace, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", host.port, "master", "switch")
        _run("ip", "-n", switch, "link", "set", host.port, "up")
        _begin(host)
        if megabits_per_s is not None:
            # It takes packets of any size that TCP makes.
            limit = ("tbf", "rate", f"{megabits_per_s:g}mbit", "burst", "128kb", "latency", "100ms")
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", CARD, "root", *limit)
            _run("tc", "-n", switch, "qdisc", "add", "dev", host.port, "root", *limit)


@contextmanager
def _relay(hosts: Sequence[Host], megabits_per_s: float | None, delay_s: float) -> Iterator[None]:
    """A process that carries all packets, slowly and late."""
    bytes_per_s = math.inf if megabits_per_s is None else megabits_per_s * 1e6 / 8
    path = Path(__file__).with_name("relay.py")
    names = [f"bb{os.getpid()}-{number}" for number in range(len(hosts))]
    process = subprocess.Popen(
        (sys.executable, "-S", str(path), str(bytes_per_s), str(delay_s), *names),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if not process.stdout.readline():
            raise NoHosts(f"the relay of packets fails: {process.stderr.read().strip()[-200:]}")
        for host, name in zip(hosts, names, strict=True):
            _run("ip", "link", "set", name, "netns", host.namespace, "name", CARD)
            _run("ip", "-n", host.namespace, "link", "set", CARD, "mtu", str(RELAY_MTU))
            _begin(host)
        yield
    finally:
        process.kill()
        process.communicate()


def _begin(host: Host) -> None:
    """Give a card its address."""
    _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CARD)
    _run("ip", "-n", host.namespace, "link", "set", CARD, "up")


def _check_here() -> None:
    if sys.platform != "linux":
        raise NoHosts("network namespaces are Linux's, and this is another system")
    if os.geteuid() != 0:
        raise NoHosts("making network namespaces needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoHosts(f"the tool {tool} (of iproute2) is not here")


def _run(*words: str) -> None:
    """Run a tool; `NoHosts` gives its complaint."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoHosts(f"`{_shown(words)}` fails: {error}") from error
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        raise NoHosts(f"`{_shown(words)}` fails: {complaint[-1] if complaint else done.returncode}")


def _shown(words: Sequence[str]) -> str:
    return " ".join(words)
