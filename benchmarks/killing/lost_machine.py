"""A pipeline of machines of `bireme coordinate` loses one of them for good, and goes on over the others.

All machines are this one, over the loopback. All processes of the machine are killed at once, as a power cut
does. The coordinator prints how long the parts of the recovery take; processor seconds and memory are those
that Linux counts for the processes of the two phases.

In `quorum`, such a machine comes back by `bireme join`: how long until a batch counts that it has a part in?
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.command import log
from benchmarks.common.verdicts import Verdict, at_most, exactly
from bireme.documents import read_json_lines
from bireme.errors import BiremeError

MOST_S = 10.0
"""Until training goes on. What a machine loads here takes no time on a link."""
MOST_JOIN_S, JOIN_BATCHES = 5.0, 2
"""From `bireme join` to the first batch, beside the transfer of the state and the time of these batches."""
MOST_BATCHES = 3.0
"""Without training, where a batch takes some seconds."""
PATIENCE_S = 300.0
POLL_S = 0.02
SETTLED_S = 120.0
"""At most, for plans that are made ahead."""
OTHERS = ("blue", "green", "gray", "pink", "teal")
_RUN = """format = 1

[model]
source = "gpt:layers={layers},width=64,heads=2,vocab=257,context=32"

[data]
source = "{texts}"
length = 32

[training]
steps = 1000000
batch_size = {batch}
evaluate_every = 0

[cluster]
device = "cpu"
workers = 1
threads_per_worker = 1

[checkpoint]
every_steps = {saves}

[elastic]
patience_s = 2.0

[log]
folder = "{runs}"
name = "run"
every_steps = 1
sample_tokens = 0
"""
_QUORUM = """
[plan]
schedule = "1f1b"
depth = 1
width = 3

[sync]
mode = "quorum"
lease_s = 4.0
"""
_ANEW = "best of a kind"
"""Of the table of plans, which is printed after a search."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Machines:
    """The commands of all machines, each in a session of its own, and what they have printed."""

    def __init__(self, folder: Path, layers: int, batch: int, num: int, more: str = "") -> None:
        self._folder, self._num = folder, num
        texts = folder / "texts"
        texts.mkdir()
        (texts / "numbers.py").write_text(
            "".join(f"def add_{n}(value):\n    return {n}\n" for n in range(900 + 6 * batch))
        )
        numbers = {"layers": layers, "batch": batch, "saves": 20 if num == 3 else 5}
        self._run = folder / "run.toml"
        self._run.write_text(_RUN.format(**numbers, texts=texts, runs=folder / "runs") + more)
        self._commands: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the coordinator with its machine, and the others."""
        many = ("--machines", str(self._num))
        self._start("red", "coordinate", str(self._run), "--listen", "127.0.0.1:0", *many)
        self.wait_for("A machine that has joined before")
        lines = [
            line.split()[1:] for line in self.said("red").splitlines() if line.startswith("  bireme join")
        ]
        for name, words in zip(OTHERS[: self._num - 1], lines, strict=True):
            self._start(name, *words, "--name", name)
        self._join = lines[0][:2]

    def join_again(self, name: str) -> None:
        """Start a machine again that was killed."""
        self._start(name, *self._join, "--name", name)

    def _start(self, name: str, *words: str) -> None:
        # The first command compiles what was changed, as it does for a user, so that no other one has to.
        variables = {
            "BIREME_HOME": str(self._folder / name),
            "BIREME_CACHE": str(self._folder / "cache"),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        with (self._folder / f"{name}.txt").open("w") as out:
            self._commands[name] = subprocess.Popen(
                [sys.executable, "-m", "bireme", *words],
                env=os.environ | variables,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def said(self, name: str) -> str:
        """What a machine has printed."""
        return (self._folder / f"{name}.txt").read_text()

    def wait_for(self, words: str) -> None:
        """Until the coordinator has printed these words."""
        ends_s = time.monotonic() + PATIENCE_S
        while words not in self.said("red"):
            self._check(ends_s)
            time.sleep(POLL_S)

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind in a file of the run."""
        found = read_json_lines(self._folder / "runs" / "run" / name, start="start").records.values()
        return [one for one in found if one["kind"] == kind]

    def round_of_all(self, after: int) -> int:
        """The first batch from that one on in which all machines have a part, once it counts."""
        while True:
            for one in self.records("ledger.jsonl", "round"):
                if one["batch"] >= after and len(one["members"]) == self._num:
                    return int(one["batch"])
            self.wait_for("")
            time.sleep(POLL_S)

    def batch_s(self, step: int) -> float:
        """The median seconds of a batch up to that step, once the log has it."""
        ends_s, path = time.monotonic() + PATIENCE_S, self._folder / "runs" / "run" / "metrics.jsonl"
        while f'"kind": "train", "step": {step},' not in (path.read_text() if path.exists() else ""):
            self._check(ends_s)
            time.sleep(POLL_S)
        times = [float(one["time_s"]) for one in self.records("metrics.jsonl", "train")]
        return median(later - before for before, later in pairwise(times))

    def _check(self, ends_s: float) -> None:
        if time.monotonic() > ends_s or self._commands["red"].poll() is not None:
            raise BiremeError(f"The run does not go on. The coordinator said:\n{self.said('red')}")

    def processes(self) -> Iterator[tuple[str, str, int, float]]:
        """Each process of a machine: its machine, its name, its number, and its processor seconds."""
        found: dict[int, tuple[int, str, float]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                begin, _, rest = stat.read_text().rpartition(") ")
                words = rest.split()
                cpu_s = (int(words[11]) + int(words[12])) * _TICK_S
                found[int(stat.parent.name)] = int(words[1]), begin.partition("(")[2], cpu_s
        for machine, command in self._commands.items():
            ours = {command.pid}
            while more := {pid for pid, (parent, *_) in found.items() if parent in ours} - ours:
                ours |= more
            yield from ((machine, found[pid][1], pid, found[pid][2]) for pid in ours if pid in found)

    def kill(self, *machines: str) -> None:
        """Kill all processes of these machines."""
        for machine, _, pid, _ in [*self.processes()]:
            if machine in machines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for machine in machines:
            self._commands[machine].wait()

    def close(self) -> None:
        """Kill all that is left."""
        self.kill(*self._commands)


def _memory_bytes(pid: int) -> int:
    """The memory of a process, with its part of what it shares."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return 1024 * int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0])
    return 0


def lost_machine_rows(is_quick: bool) -> list[dict[str, Any]]:
    """A model whose plan is found at once, a larger one, and six machines with batches of some seconds."""
    return [_row(4, 8, 3)] if is_quick else [_row(4, 8, 3), _row(12, 8, 3), _row(12, 768, 6)]


def _row(layers: int, batch: int, num: int) -> dict[str, Any]:
    with TemporaryDirectory() as scratch:
        machines = _Machines(Path(scratch), layers, batch, num)
        try:
            machines.start()
            batch_s = machines.batch_s(40 if num == 3 else 8)
            plans, ends_s = Path(scratch) / "runs" / "run" / "plans", time.monotonic() + SETTLED_S
            while len([*plans.glob("*.json")]) < num - 1 and time.monotonic() < ends_s:
                time.sleep(1.0)
            memory = {
                name: _memory_bytes(pid) for one, name, pid, _ in machines.processes() if one == "green"
            }
            num_plans = len([*plans.glob("*.json")])
            machines.kill("blue")
            killed_s, cpu_s = time.monotonic(), dict[str, float]()
            while "Phase 2 trains" not in machines.said("red"):
                cpu_s |= {name: own_s for _, name, _, own_s in machines.processes()}
                machines.wait_for("")
                time.sleep(POLL_S)
            again_s = time.monotonic() - killed_s
            made_anew = _ANEW in machines.said("red").partition("Phase 2 is prepared")[2]
            (sentence,) = (line for line in machines.said("red").splitlines() if "Phase 2 trains" in line)
        finally:
            machines.close()
        row = {
            "layers": layers,
            "machines": num,
            "batch_s": batch_s,
            "again_s": again_s,
            "again_batches": again_s / batch_s,
            "parts": sentence.partition("began to end: ")[2],
            **{f"cpu_s of {name}": own_s for name, own_s in cpu_s.items() if name.startswith("phase 2")},
            **{
                f"bytes of {name}": own
                for name, own in memory.items()
                if name.startswith(("bireme s", "phase"))
            },
            "plans_ahead": num_plans,
            "plan_was_ahead": not made_anew,
        }
        log(json.dumps(row))
        return row


def lost_machine_verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Whether training went on soon, by a plan that was made ahead."""
    for row in rows:
        name = f"one of {row['machines']} machines is lost, {row['layers']} layers"
        if row["machines"] == 3:
            yield at_most(f"{name}: s until it trains again", row["again_s"], MOST_S)
        else:
            yield at_most(f"{name}: batches' time until it trains again", row["again_batches"], MOST_BATCHES)
        yield exactly(f"{name}: plans made ahead", row["plans_ahead"], row["machines"] - 1)
        yield exactly(f"{name}: the phase had one of them", row["plan_was_ahead"], True)


def joined_rows() -> list[dict[str, Any]]:
    """A machine that was lost joins again while the others train."""
    with TemporaryDirectory() as scratch:
        machines = _Machines(Path(scratch), 12, 48, 3, _QUORUM)
        try:
            machines.start()
            batch_s = machines.batch_s(20)
            machines.kill("blue")
            machines.wait_for("blue (127.0.0.1) is gone")
            before = machines.records("ledger.jsonl", "round")[-1]["batch"]
            begin_s = time.monotonic()
            machines.join_again("blue")
            batch = machines.round_of_all(before + 2)
            first_s = time.monotonic() - begin_s
            cpu_s = {name: own_s for machine, name, _, own_s in machines.processes() if machine == "blue"}
            while not (found := machines.records("metrics.jsonl", "recovery")):
                machines.wait_for("")
                time.sleep(POLL_S)
        finally:
            machines.close()
    row = {
        "batch_s": batch_s,
        "first_s": first_s,
        "beside_s": first_s - found[-1]["transfer_s"] - JOIN_BATCHES * batch_s,
        "batches_meanwhile": batch - before,
        **{name: found[-1][name] for name in ("transfer_s", "catch_up_s")},
        **{f"cpu_s of {name}": own_s for name, own_s in cpu_s.items()},
    }
    log(json.dumps(row))
    return [row]


def joined_verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Whether a machine that joins trains soon."""
    name = f"s from bireme join to its first batch, beside the transfer and {JOIN_BATCHES} batches"
    yield from (at_most(name, row["beside_s"], MOST_JOIN_S) for row in rows)
