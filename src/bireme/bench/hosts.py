"""Hosts on one machine: two network namespaces, joined by a link of limited bandwidth. For root on Linux.

Each host has its own addresses and its own ports. Whatever is made here goes when the context ends.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

__all__ = ["CARD", "Hosts", "NoHosts", "slow_hosts"]

CARD = "eth0"
"""The network card of every host."""
TOOL_TIMEOUT_S = 20.0


class NoHosts(Exception):  # noqa: N818 (no error: the benchmark leaves the row out)
    """There can be no such hosts here; the text says why."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts: what a command is started with to run on each, and their addresses."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: tuple[str, str]


@contextmanager
def slow_hosts(megabits_per_s: float) -> Iterator[Hosts]:
    """Two hosts with a link that carries so much each way. Raises `NoHosts` where that cannot be."""
    _check_here()
    names = tuple(f"bireme-bench-{os.getpid()}-{letter}" for letter in "ab")
    addresses = ("10.99.0.1", "10.99.0.2")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run(
            "ip",
            "link",
            "add",
            CARD,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            CARD,
            "netns",
            names[1],
        )
        for name, address in zip(names, addresses, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "address", "add", f"{address}/24", "dev", CARD)
            for card in ("lo", CARD):
                _run(*inside, "link", "set", card, "up")
            rate = f"{megabits_per_s:g}mbit"
            # Kernels have this token bucket more often than netem; it takes packets of any size TCP makes.
            limit = ("tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", CARD, "root", *limit)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Hosts((prefixes[0], prefixes[1]), addresses)
    finally:
        for name in made:
            with suppress(NoHosts):
                _run("ip", "netns", "delete", name)


def _check_here() -> None:
    if sys.platform != "linux":
        raise NoHosts("network namespaces are Linux's, and this is another system")
    if os.geteuid() != 0:
        raise NoHosts("making network namespaces needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoHosts(f"the tool {tool} (of iproute2) is not here")


def _run(*words: str) -> None:
    """Run a tool, or say what it complained of."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoHosts(f"`{_shown(words)}` fails: {error}") from error
    if done.returncode:
        complaint = done.stderr.strip().splitlines()
        raise NoHosts(f"`{_shown(words)}` fails: {complaint[-1] if complaint else done.returncode}")


def _shown(words: Sequence[str]) -> str:
    return " ".join(words)
