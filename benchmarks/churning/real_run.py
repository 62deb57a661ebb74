"""`bireme train` on machines that come and go by a trace, and what comes of it.

A machine is a host of the home lab with one device: a network namespace with a slow card if one can be made
here, else a group of processes on the loopback. All machines of the trace train for a calm time first, which
says what a machine trains a second. Then the trace begins. A machine that is lost has all its processes
killed at once. One that leaves has its rank killed first, so that its launcher reports it; the rest follows.
One that arrives has its launcher started, in the same way as before.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.churning.trace import Kind, Trace, TraceEvent
from benchmarks.common.command import log
from benchmarks.home.lab_run import Lab, Launcher, ends_of, made_lab, said
from benchmarks.killing.mortal_run import MortalRun, Round
from benchmarks.killing.session import living, name_of
from bireme.errors import BiremeError
from bireme.plan.plan_file import load_plan
from bireme.sync.coordinator.ledger_check import check_ledger

SAMPLES = 16
"""Of a batch for each machine, where all are there."""
LEASE_S = 4.0
_PATIENCE_S = 300.0
"""For all machines to train; nothing is measured by it."""
_SETTLED = 4
"""Batches of all machines before the calm time begins."""
_NOTICE_S = 0.5
"""Between the end of the rank of a machine that leaves and that of its other processes."""
_POLL_S = 0.02
_REST = """
[plan]
schedule = "1f1b"
depth = 1
width = {machines}
microbatches = 2

[balance]
mode = "off"

[sync]
mode = "quorum"
codec = "int4"
lease_s = {lease_s}
grace_s = 2.0

[checkpoint]
every_steps = 0
"""


@dataclass(frozen=True, slots=True)
class Churned:
    """What came of a run over a trace."""

    about: str
    calm_per_s: float
    """Samples a second that all machines trained before the trace began."""
    goodput: float
    """Samples that count in the time of the trace, of those that the machines that were there could train."""
    samples: int
    samples_redone: int
    """Assigned again in the time of the trace."""
    rounds: int
    returns_s: tuple[float, ...]
    """From each arrival to the first batch that the machine has a part in, if it came to that."""
    recoveries: tuple[dict[str, Any], ...]
    """Those of the run's document: `detect_s`, `transfer_s` and `catch_up_s`."""
    longest_gap_s: float
    """Between two batches that count."""
    moved_bytes: int | None
    """By the cards of all machines; None where they share the loopback."""
    statuses: tuple[int, ...]
    is_whole: bool
    left_over: tuple[str, ...]
    """Processes that ran and files that were there after the end."""


def churned(trace: Trace, calm_s: float) -> Churned:
    """Run over the trace, in as many seconds as it has."""
    if not trace.fewest:
        raise BiremeError("The trace has a time in which no machine is there. No run outlives that.")
    count = len(trace.machines)
    rest = _REST.format(machines=count, lease_s=LEASE_S)
    more = {"steps": 1_000_000, "batch": SAMPLES * count, "held_out": 0.0}
    with (
        TemporaryDirectory() as scratch,
        made_lab(Path(scratch) / "lab", rest, [(1, 1.0)] * count, is_paced=True, **more) as lab,
    ):
        temporary = lab.folder.parent / "temporary"
        temporary.mkdir()
        with _run(lab, trace.machines, temporary) as run:
            found = run.live_through(trace, calm_s)
        # torch's compiler has a cache there.
        files = (one.name for one in temporary.iterdir() if not one.name.startswith("torch"))
        left = *run.processes(), *sorted(files)
    return replace(found, left_over=left)


@contextmanager
def _run(lab: Lab, names: Sequence[str], temporary: Path) -> Iterator["_Run"]:
    """The launchers of all machines, none of which is left afterwards."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(temporary)  # what the run's processes leave there is theirs
    run = _Run(lab, names)
    try:
        run.start_all()
        yield run
    finally:
        run.close()
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


class _Run:
    """A run under way."""

    def __init__(self, lab: Lab, names: Sequence[str]) -> None:
        self._lab, self._names = lab, list(names)
        self._launchers: list[Launcher | None] = [None] * len(names)
        self._started: list[Launcher] = []
        self._arrivals: list[tuple[int, float]] = []
        self._watched: MortalRun | None = None

    def start_all(self) -> None:
        """Start the launchers of all machines."""
        for number in range(len(self._names)):
            self._start(number)
        first = self._launchers[0]
        assert first is not None, "it was started"
        self._watched = MortalRun(self._lab.folder, first, self._lab.folder, _PATIENCE_S)

    def live_through(self, trace: Trace, calm_s: float) -> Churned:
        """Train in peace, then over the trace, and stop."""
        watched, count = self._watch, len(self._names)
        watched.wait_until(lambda: self._num_whole >= _SETTLED, "not all machines train")
        before = watched.rounds[-1]
        calm = self._for_seconds(calm_s, ())
        if not calm:
            raise BiremeError(f"No batch counts in {calm_s:g} s of calm. The machine is too busy to measure.")
        calm_per_s = _samples(calm) / (calm[-1].at_s - before.at_s)
        moved = self._moved_bytes()
        begin_s, begun, last = time.time(), len(watched.rounds), watched.rounds[-1]
        counted = self._for_seconds(trace.end_s, trace.from_all_there())
        moved_bytes = None if moved is None else (self._moved_bytes() or 0) - moved
        log(f"the trace ended after {len(counted)} batches")
        statuses, document = self._stop()
        sync = document.get("sync", {})
        ends = [begin_s, *(one.at_s for one in counted)]
        return Churned(
            self._lab.about,
            calm_per_s,
            _samples(counted) / (calm_per_s / count * trace.machine_s),
            _samples(counted),
            redone([last, *counted]),
            len(counted),
            tuple(self._returns(watched.rounds[begun:])),
            tuple(sync.get("recoveries", ())),
            max((late - early for early, late in pairwise(ends)), default=trace.end_s),
            moved_bytes,
            tuple(statuses),
            check_ledger(watched.folder / "ledger.jsonl").is_whole,
            (),
        )

    @property
    def _watch(self) -> MortalRun:
        assert self._watched is not None, "start_all comes first"
        return self._watched

    @property
    def _num_whole(self) -> int:
        return sum(len(one.members) == len(self._names) for one in self._watch.rounds)

    def _for_seconds(self, seconds: float, events: Sequence[TraceEvent]) -> list[Round]:
        """Watch for so long while the events happen; the batches that counted meanwhile."""
        begun, begin_s, left = len(self._watch.rounds), time.time(), list(events)
        while (now_s := time.time() - begin_s) < seconds:
            while left and left[0].time_s <= now_s:
                self._happens(left.pop(0))
            self._watch.read()
            time.sleep(_POLL_S)
            ended = [one for one in self._launchers if one is not None and one.poll() is not None]
            if ended:
                raise BiremeError(f"A launcher has ended with status {ended[0].poll()}: {said(ended)}")
        return [one for one in self._watch.rounds[begun:] if one.at_s <= begin_s + seconds]

    def _happens(self, event: TraceEvent) -> None:
        number = self._names.index(event.machine)
        launcher = self._launchers[number]
        log(f"{event.time_s:.1f} s: {event.machine} {event.kind}, after {len(self._watch.rounds)} batches")
        if event.kind is Kind.ARRIVES:
            self._arrivals.append((number, time.time()))
            self._start(number)
        elif launcher is not None:
            if event.kind is Kind.LEAVES:
                for pid in launcher.processes:
                    if name_of(pid).startswith("bireme rank"):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                time.sleep(_NOTICE_S)
            launcher.kill()
            self._launchers[number] = None

    def _start(self, number: int) -> None:
        launcher = Launcher(self._lab, number, len(self._started))
        self._launchers[number] = launcher
        self._started.append(launcher)

    def _returns(self, rounds: Sequence[Round]) -> Iterator[float]:
        """Seconds from each arrival to the first batch with the machine's replica."""
        devices = load_plan(self._watch.folder / "plan.json").plan.devices
        names = [name.partition("/")[0] for name in devices[0]]
        for number, at_s in self._arrivals:
            replica = names.index(f"host-{number}")
            first = (one.at_s for one in rounds if one.at_s > at_s and replica in one.members)
            if (found := next(first, None)) is not None:
                yield found - at_s

    def _stop(self) -> tuple[list[int], dict[str, Any]]:
        """Ask the run to end in order; the statuses of the machines that are there, and its document."""
        there = [one for one in self._launchers if one is not None]
        os.kill(there[0].pid, signal.SIGTERM)
        found = ends_of(there)
        self._watch.read()
        return found

    def _moved_bytes(self) -> int | None:
        """What the cards of all machines have sent so far."""
        hosts = self._lab.hosts
        if not hosts:
            return None
        words = ("ip", "-json", "-stats", "-netns", hosts[0].switch, "link", "show")
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        ports = {host.port for host in hosts}
        return sum(int(one["stats64"]["rx"]["bytes"]) for one in json.loads(shown) if one["ifname"] in ports)

    def processes(self) -> list[str]:
        """Those of the run that are there."""
        pids = {pid for one in self._started for pid in living(one.pid)}
        return [f"process {name_of(pid).strip()}" for pid in sorted(pids)]

    def close(self) -> None:
        """Kill what is left of the machines."""
        for one in self._launchers:
            if one is not None:
                one.close()


def _samples(rounds: Sequence[Round]) -> int:
    return sum(one.num_samples for one in rounds)


def redone(rounds: Sequence[Round]) -> int:
    """Samples that had to be assigned again after the first of these. Each coordinator counts from 0 on."""
    counts = [one.returned for one in rounds]
    return sum(late - early if late >= early else late for early, late in pairwise(counts))


def row_of(found: Churned, trace: Trace) -> dict[str, Any]:
    """The figures of a run over a trace."""
    parts = ("detect_s", "transfer_s", "catch_up_s")
    known = {part: [one[part] for one in found.recoveries if one[part] is not None] for part in parts}
    medians = {f"median_{part}": median(own) if own else None for part, own in known.items()}
    own = sum(medians[f"median_{part}"] or 0.0 for part in parts[1:])
    back_s = median(found.returns_s) if found.returns_s else None
    return {
        "machines": len(trace.machines),
        "seconds": trace.end_s,
        "lost": trace.count(Kind.LOST),
        "left": trace.count(Kind.LEAVES),
        "arrived": trace.arrivals_after_start,
        "calm_per_s": found.calm_per_s,
        "goodput": found.goodput,
        "rounds": found.rounds,
        "batches_lost": found.samples_redone / (SAMPLES * len(trace.machines)),
        "moved_bytes_a_batch": found.moved_bytes and found.moved_bytes / max(found.rounds, 1),
        "longest_gap_s": found.longest_gap_s,
        "returned": len(found.returns_s),
        "median_back_s": back_s,
        "median_start_s": None if back_s is None else max(back_s - own, 0.0),
        **medians,
        "links": found.about,
    }
