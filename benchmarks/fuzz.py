"""What strangers can do to a run: malformed messages to every socket that listens, while it trains.

    python benchmarks/fuzz.py [--quick] [--json]

Two replicas of two stages train once in `allreduce` mode and once in `quorum`. Every listening socket of
each of their processes, over TCP and under the abstract names of Linux, gets 10,000 messages: none at all,
silence, noise, headers that announce exabytes, answers with a wrong key, answers that never end, and the
beginnings of other protocols. The losses must be those of the same run without strangers, to the last bit;
no process may end, and none may hold more memory, files or threads afterwards.
"""

import json
import os
import random
import select
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_most
from benchmarks.killing.mortal_run import Python, Start, Started
from benchmarks.killing.session import living, name_of
from bireme.errors import BiremeError
from bireme.wire.connection import FrameKind, frame_header

ROOT = Path(__file__).resolve().parents[1]
MODES = ("allreduce", "quorum")
NUM_MESSAGES, NUM_QUICK = 10_000, 300
"""To each socket."""
WARM_STEPS = 20
"""Before the strangers come; from there on a process has all the memory it needs."""
MOST_GROWTH_MIB = 16.0
"""Of a process: what an allocator may take for no reason of ours."""
MOST_HELD = 200
"""Connections that strangers keep open at a time."""
CONNECT_S = 0.05
NUM_SILENT = 5
"""Connects in a row that nobody answers: the kernel drops all packets to that socket."""
PATIENCE_S, LONG_PATIENCE_S = 300.0, 3600.0

RUN = """format = 1

[model]
source = "gpt:layers=2,width=16,heads=2,vocab=257,context=32"

[data]
source = "{texts}"
length = 32
evaluation_fraction = 0.0

[training]
steps = {steps}
batch_size = 8
learning_rate = 0.001
schedule = "constant"
warmup_fraction = 0.0
evaluate_every = 0

[plan]
file = "{plan}"

[cluster]
device = "cpu"
workers = 4
threads_per_worker = 1
timeout_s = 120
{sync}
[balance]
mode = "off"

[checkpoint]
every_steps = 0

[log]
folder = "{runs}"
name = "run"
every_steps = 1
sample_tokens = 0
"""
QUORUM = '\n[sync]\nmode = "quorum"\nlease_s = 60.0\ngrace_s = 60.0\n'


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket of a process: its port, or its name without the null byte, and the interface."""

    process: str
    pid: int
    family: str
    interface: str
    port: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.family} {self.port or 'name'} ({self.interface})"

    def connect(self) -> socket.socket:
        """A connection to it. Raises an `OSError` if there is none in time."""
        if self.family == "unix":
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(CONNECT_S)
            made.connect(f"\0{self.name}")
            return made
        return socket.create_connection(("127.0.0.1", self.port), timeout=CONNECT_S)


def doors_of(pids: Sequence[int]) -> list[Door]:
    """The listening sockets of some processes, as Linux lists them."""
    found = []
    for pid in pids:
        inodes = set()
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
        name = name_of(pid).strip()
        for family in ("tcp", "tcp6"):
            for line in _lines(f"/proc/net/{family}"):
                if line[3] == "0A" and line[9] in inodes:
                    address, port = line[1].split(":")
                    interface = "all" if not address.strip("0") else "loopback"
                    found.append(Door(name, pid, family, interface, int(port, 16)))
        for line in _lines("/proc/net/unix"):
            if line[3] == "00010000" and line[6] in inodes and line[7:] and line[7].startswith("@"):
                found.append(Door(name, pid, "unix", "this machine", name=line[7][1:]))
    return found


def _lines(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()[1:]]


def malformed(draw: random.Random) -> bytes:
    """One message that no process of a run sends."""
    announced = draw.choice((0, 63, 1 << 31, 1 << 62))
    kind = draw.choice(list(FrameKind))
    return draw.choice(
        (
            b"",
            draw.randbytes(draw.randrange(1, 300)),
            draw.randbytes(1 << draw.randrange(8, 18)),
            draw.randbytes(16 + 48 + 32),  # as long as an answer
            draw.randbytes(16 + 48 + 31),
            frame_header(kind, announced, draw.randbytes(40)),
            frame_header(kind, announced, b"")[: draw.randrange(1, 64)],
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            b"\x16\x03\x01" + draw.randbytes(200),
            # To the store of torch, if there is one: its greeting, and a query with a long argument.
            pack("<BIBQ", 0, 0x3C85F7CE, draw.randrange(20), announced) + draw.randbytes(9),
            frame_header(FrameKind.TEXT, 21) + b'["set", "name", "x"]\n',
        )
    )


@dataclass(slots=True)
class Strangers:
    """All connections of strangers. Some stay open, and some are filled byte by byte."""

    draw: random.Random
    held: list[socket.socket] = field(default_factory=list)
    sent: int = 0
    refused: int = 0

    def call(self, door: Door, num_messages: int) -> str:
        """Send messages to a socket; gives what became of them."""
        num_silent = sent = 0
        for _ in range(num_messages):
            try:
                made = door.connect()
            except TimeoutError:
                num_silent += 1
                if num_silent == NUM_SILENT and not sent:
                    return "takes no connection"
                continue
            except OSError:
                self.refused += 1
                continue
            sent += 1
            self._say(made)
        self.sent += sent
        return f"{sent} messages"

    def _say(self, made: socket.socket) -> None:
        try:
            if self.draw.random() < 0.5 and select.select([made], [], [], 0.0)[0]:
                made.recv(1 << 16)
            made.sendall(malformed(self.draw))
        except OSError:
            self.refused += 1
        if self.held and self.draw.random() < 0.2:
            with suppress(OSError):
                self.draw.choice(self.held).send(b"x")
        if self.draw.random() < 0.2:
            self.held.append(made)
            if len(self.held) > MOST_HELD:
                self.held.pop(self.draw.randrange(len(self.held))).close()
        else:
            made.close()

    def close(self) -> None:
        """Hang up."""
        for one in self.held:
            one.close()


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    rss_mib: float
    files: int
    threads: int


def held_by(pid: int) -> Held:
    """What a process holds now. Raises an `OSError` if it is gone."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    rss = float(status["VmRSS"].split()[0]) / 1024
    return Held(rss, len(list((folder / "fd").iterdir())), int(status["Threads"]))


@dataclass(frozen=True, slots=True)
class Row:
    """A process of a run, and its sockets."""

    mode: str
    process: str
    sockets: str
    rss_mib: float
    grown_mib: float
    files: int
    more_files: int
    more_threads: int


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """A run that strangers called: its processes, how many of these have ended, how many messages it got, and
    by how much its losses differ from those of the run without strangers at most.
    """

    mode: str
    rows: tuple[Row, ...]
    ended: int
    sent: int
    steps: int
    difference: float
    status: int

    @property
    def grown_mib(self) -> float:
        """Of the process that has grown most."""
        return max(row.grown_mib for row in self.rows)


def fuzzed(
    folder: Path,
    mode: str,
    num_messages: int,
    *,
    seed: int = 1,
    start: Start = Python,
    warm_steps: int = WARM_STEPS,
) -> Fuzzed:
    """Train with strangers, who come after `warm_steps`, and then as many steps without."""
    with_strangers, alone = folder / "strangers", folder / "alone"
    process = _started(with_strangers, mode, 1_000_000, start)
    strangers = Strangers(random.Random(seed))
    try:
        _wait(process, lambda: len(losses(with_strangers)) >= warm_steps)
        pids = living(process.pid)
        before = {pid: held_by(pid) for pid in pids}
        doors = doors_of(pids)
        said = {door: strangers.call(door, num_messages) for door in doors}
        steps = len(losses(with_strangers))
        _wait(process, lambda: len(losses(with_strangers)) >= steps + warm_steps)
        strangers.close()
        _wait(process, lambda: len(losses(with_strangers)) >= steps + 2 * warm_steps)
        rows, num_ended = [], 0
        for pid in pids:
            try:
                now = held_by(pid)
            except OSError:
                num_ended += 1
                continue
            own = [f"{one}: {said[one]}" for one in doors if one.pid == pid]
            then = before[pid]
            rows.append(
                Row(
                    mode,
                    name_of(pid).strip(),
                    "; ".join(own) or "none",
                    now.rss_mib,
                    now.rss_mib - then.rss_mib,
                    now.files,
                    now.files - then.files,
                    now.threads - then.threads,
                )
            )
        os.kill(process.pid, signal.SIGTERM)
        status = process.wait(PATIENCE_S)
    finally:
        strangers.close()
        process.close()
    ours = losses(with_strangers)
    other = _started(alone, mode, len(ours), start)
    try:
        other.wait(LONG_PATIENCE_S)
    finally:
        other.close()
    theirs = losses(alone)
    common = ours.keys() & theirs.keys()
    difference = max((abs(ours[step] - theirs[step]) for step in common), default=float("inf"))
    return Fuzzed(mode, tuple(rows), num_ended, strangers.sent, len(common), difference, status)


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step of a run so far."""
    path = folder / "runs" / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def _started(folder: Path, mode: str, steps: int, start: Start) -> Started:
    texts = folder / "texts"
    texts.mkdir(parents=True)
    words = "".join(f"def add_{n}(value):\n    return value + {n * n % 97}\n\n\n" for n in range(400))
    (texts / "numbers.py").write_text(words)
    plan = {"cuts": (3,), "num_microbatches": 2, "schedule": "1f1b", "width": 2}
    (folder / "plan.json").write_text(json.dumps({"format": 1, "plan": plan}))
    sync = QUORUM if mode == "quorum" else ""
    text = RUN.format(texts=texts, plan=folder / "plan.json", steps=steps, runs=folder / "runs", sync=sync)
    (folder / "run.toml").write_text(text)
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return start(["-m", "bireme", "train", str(folder / "run.toml"), "--json"], folder, variables)


def _wait(process: Started, is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > ends_s:
            raise BiremeError(f"The run does not go on. It said: {process.err.read_text()[-4000:]}")
        time.sleep(0.05)


def verdicts(found: Sequence[Fuzzed]) -> list[Verdict]:
    """What must hold of each run."""
    result = []
    for one in found:
        result += [
            at_most(f"{one.mode}: greatest difference of losses", one.difference, 0.0),
            at_most(f"{one.mode}: processes that ended", one.ended, 0),
            at_most(f"{one.mode}: exit status of the run", one.status, 0),
            at_most(f"{one.mode}: MiB that a process has grown by", one.grown_mib, MOST_GROWTH_MIB),
            at_most(f"{one.mode}: more files of a process", max(row.more_files for row in one.rows), 0),
            at_most(f"{one.mode}: more threads of a process", max(row.more_threads for row in one.rows), 0),
        ]
    return result


def measure(asked: Namespace) -> Findings:
    found = []
    for mode in MODES:
        with TemporaryDirectory() as folder:
            log(f"{mode}: training, with strangers and without")
            found.append(fuzzed(Path(folder), mode, NUM_QUICK if asked.quick else NUM_MESSAGES))
            log(f"{mode}: {found[-1].sent} messages during {found[-1].steps} steps")
    rows: list[dict[str, Any]] = [asdict(row) for one in found for row in one.rows]
    return Findings([Section("Processes and their listening sockets", rows)], verdicts(found))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick=f"{NUM_QUICK} messages to each socket")
