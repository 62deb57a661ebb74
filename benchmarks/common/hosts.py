"""Hosts on one machine: network namespaces on a common switch, each with its own address and a slow card.

For root on Linux. Everything that is made here is removed when the context ends.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CARD = "eth0"
"""The network card of every host."""
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
def slow_hosts(count: int, megabits_per_s: float) -> Iterator[list[Host]]:
    """So many hosts, whose cards each carry so much each way. Raises `NoHosts` if that cannot be."""
    _check_here()
    switch = f"bireme-bench-{os.getpid()}-switch"
    names = [f"bireme-bench-{os.getpid()}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        for namespace in (switch, *names):
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        yield [_plug_in(number, name, switch, megabits_per_s) for number, name in enumerate(names)]
    finally:
        for namespace in made:
            with suppress(NoHosts):
                _run("ip", "netns", "delete", namespace)


def _plug_in(number: int, namespace: str, switch: str, megabits_per_s: float) -> Host:
    """Give a namespace a card with an address, and put the other end of its cable into the switch."""
    host = Host(namespace, f"10.99.0.{number + 1}", switch, f"port{number}")
    peer = ("peer", "name", host.port, "netns", switch)
    _run("ip", "link", "add", CARD, "netns", namespace, "type", "veth", *peer)
    _run("ip", "-n", switch, "link", "set", host.port, "master", "switch")
    _run("ip", "-n", switch, "link", "set", host.port, "up")
    _run("ip", "-n", namespace, "address", "add", f"{host.address}/24", "dev", CARD)
    _run("ip", "-n", namespace, "link", "set", CARD, "up")
    # Kernels have this token bucket more often than netem; it takes packets of any size that TCP makes.
    limit = ("tbf", "rate", f"{megabits_per_s:g}mbit", "burst", "128kb", "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", CARD, "root", *limit)
    _run("tc", "-n", switch, "qdisc", "add", "dev", host.port, "root", *limit)
    return host


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
