"""Machines on one machine: network namespaces on a common switch, each with its own address and name.

For root on Linux. Whatever is made goes when the context ends.
"""

import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bireme.runtime.processes import serve_from_here

__all__ = ["CLONE_NEWNS", "CLONE_NEWUSER", "Host", "check", "enter_without", "hide", "hosts", "set_cable"]

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
"""Of Linux: mounts, the machine's name, users, its network."""

CARD = "eth0"
TOOL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its network namespace, its address, and what it calls itself."""

    namespace: str
    address: str
    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command is started with to be in its network, under this machine's name."""
        return "ip", "netns", "exec", self.namespace

    def enter(self) -> None:
        """Have this process, which must have one thread, be on that machine from now on."""
        system = ctypes.CDLL(None, use_errno=True)
        with Path("/var/run/netns", self.namespace).open() as there:
            check(system.setns(there.fileno(), CLONE_NEWNET))
        check(system.unshare(CLONE_NEWUTS | CLONE_NEWNS))
        socket.sethostname(self.name)
        platform._uname_cache = None  # type: ignore[attr-defined]  # of the name before
        run("mount", "--make-rslave", "/")
        run("mount", "-t", "sysfs", "none", "/sys")  # which says what cards there are

    def begin(self) -> None:
        """Be on that machine with all processes that this one starts."""
        self.enter()
        serve_from_here()


def enter_without(host: Host, *folders: Path) -> None:
    """Be on that machine, where nothing that others write in these folders is seen."""
    host.enter()
    for folder in folders:
        hide(folder)


def hide(folder: Path) -> None:
    """Have this process, which has entered a host, find nothing in a folder."""
    run("mount", "-t", "tmpfs", "none", str(folder))


def check(status: int) -> None:
    """Raise what a function of the system has failed with."""
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def hosts(count: int, *, slow: int | None = None, megabits_per_s: float = 20.0) -> Iterator[list[Host]]:
    """So many hosts; the link of the one of number `slow` carries so little. Skips where they cannot be."""
    skip_unless_possible()
    switch = _switch()
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
    return Host(namespace, address, f"host-{number}")


def set_cable(number: int, *, is_plugged: bool) -> None:
    """Pull the cable of a host out of the switch, or plug it in again."""
    run("ip", "-n", _switch(), "link", "set", f"port{number}", "up" if is_plugged else "down")


def _switch() -> str:
    return f"bireme-test-{os.getpid()}-switch"


def skip_unless_possible() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("making hosts of network namespaces needs root on Linux")
    for tool in ("ip", "tc", "mount"):
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
