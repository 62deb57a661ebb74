"""Machines on one machine: network namespaces on a common switch, each with its own address and name.

For root on Linux. Whatever is made goes when the context ends.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

__all__ = ["Host", "hosts"]

CARD = "eth0"
TOOL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    """What a command is started with to run there, its address, and what it calls itself."""

    prefix: tuple[str, ...]
    address: str
    name: str


@contextmanager
def hosts(count: int, *, slow: int | None = None, megabits_per_s: float = 20.0) -> Iterator[list[Host]]:
    """So many hosts; the link of the one of number `slow` carries so little. Skips where they cannot be."""
    skip_unless_possible()
    switch = f"bireme-test-{os.getpid()}-switch"
    names = [f"bireme-test-{os.getpid()}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        for namespace in (switch, *names):
            run("ip", "netns", "add", namespace)
            made.append(namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        found = [plug_in(number, name, switch) for number, name in enumerate(names)]
        if slow is not None:
            limit = ("tbf", "rate", f"{megabits_per_s:g}mbit", "burst", "64kb", "latency", "100ms")
            run("tc", "-n", names[slow], "qdisc", "add", "dev", CARD, "root", *limit)
            run("tc", "-n", switch, "qdisc", "add", "dev", f"port{slow}", "root", *limit)
        yield found
    finally:
        for namespace in made:
            with suppress(OSError, subprocess.SubprocessError):
                run("ip", "netns", "delete", namespace)


def plug_in(number: int, namespace: str, switch: str) -> Host:
    """Give a namespace a card with an address, and put the other end of its cable into the switch."""
    port, address = f"port{number}", f"10.98.0.{number + 1}"
    peer = ("peer", "name", port, "netns", switch)
    run("ip", "link", "add", CARD, "netns", namespace, "type", "veth", *peer)
    run("ip", "-n", switch, "link", "set", port, "master", "switch")
    run("ip", "-n", switch, "link", "set", port, "up")
    run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", CARD)
    run("ip", "-n", namespace, "link", "set", CARD, "up")
    name = f"host-{number}"
    named = ("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh")
    return Host(("ip", "netns", "exec", namespace, *named), address, name)


def skip_unless_possible() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("making hosts of network namespaces needs root on Linux")
    for tool in ("ip", "tc", "unshare", "hostname"):
        if shutil.which(tool) is None:
            pytest.skip(f"the tool {tool} is not here")
    trial = f"bireme-test-{os.getpid()}-trial"
    done = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"there are no network namespaces here: {done.stderr.strip()}")
    run("ip", "netns", "delete", trial)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
