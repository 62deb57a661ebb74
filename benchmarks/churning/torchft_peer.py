"""torchft with its lighthouse on machines that come and go by a trace: what Bireme is compared with.

Machines, model, samples of a machine and times are those of `real_run`. A replica is one process, which is
started again if it fails by itself, as torchelastic does. Replicas sum gradients by gloo; one that comes back
gets the weights of another one. A step counts for a replica that takes part in it and commits it.
It needs an interpreter with torchft (`pip install torchft`, Linux on x86-64) and Bireme's own packages.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.churning.real_run import LEASE_S, SAMPLES
from benchmarks.churning.trace import Kind, Trace
from benchmarks.common.command import log
from benchmarks.home.lab_run import Lab, made_lab
from benchmarks.killing.mortal_run import Program
from bireme.errors import BiremeError

_JOIN_S = 5.0
"""For which the lighthouse waits for replicas that live and have not asked for the next step."""
_PATIENCE_S = 120.0
_MOST_FAILED = 50
"""Replicas that fail by themselves before it is given up."""
_SETTLED = 4
"""Steps of all replicas before the calm time begins."""


def why_not(python: str) -> str | None:
    """Why torchft cannot run with that interpreter, or None."""
    words = [python, "-c", "import torch, torchft"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def torchft_row(trace: Trace, calm_s: float, python: str) -> dict[str, Any]:
    """One run over the trace: the same figures as of Bireme, where torchft has them."""
    count = len(trace.machines)
    more = {"steps": 1, "batch": SAMPLES * count, "held_out": 0.0}
    with (
        TemporaryDirectory() as scratch,
        made_lab(Path(scratch) / "lab", "", [(1, 1.0)] * count, is_paced=True, **more) as lab,
        ExitStack() as stack,
    ):
        return _Run(lab, trace, python, stack).row(calm_s)


class _Run:
    """The lighthouse, which no event ends, and the replicas."""

    def __init__(self, lab: Lab, trace: Trace, python: str, stack: ExitStack) -> None:
        self._lab, self._trace, self._python, self._stack = lab, trace, python, stack
        self._names, self._replicas = trace.machines, dict[str, Program]()
        self._arrivals, self._num_failed = list[tuple[Path, float]](), 0
        self._lighthouse = f"{self._address(0)}:{lab.port}"
        tool = shutil.which("torchft_lighthouse", path=str(Path(python).parent)) or "torchft_lighthouse"
        times = [f"--heartbeat_timeout_ms={LEASE_S * 1000:.0f}", f"--join_timeout_ms={_JOIN_S * 1000:.0f}"]
        self._start(0, [tool, "--min_replicas=1", f"--bind={self._lighthouse}", *times], "lighthouse")

    def _address(self, number: int) -> str:
        return self._lab.hosts[number].address if self._lab.hosts else "127.0.0.1"

    def _start(self, number: int, words: Sequence[str], name: str) -> Program:
        prefix: tuple[str, ...] = ()
        if self._lab.hosts:  # torchft's servers of checkpoints call each other by the names of hosts
            prefix = self._lab.hosts[number].prefix_as(self._address(number))
        variables = self._lab.variables(number) | {"GLOO_SOCKET_IFNAME": "eth0" if prefix else "lo"}
        out, err = (self._lab.folder / f"{name}.{kind}" for kind in ("out", "err"))
        return self._stack.enter_context(
            closing(Program([*prefix, *words], self._lab.folder, out, err, variables))
        )

    def _begin(self, machine: str) -> None:
        """Start the replica of a machine."""
        number = self._names.index(machine)
        path = self._lab.folder / f"{machine}-{len(self._arrivals)}.steps"
        words = [self._python, "-m", "benchmarks.churning.torchft_replica", self._lighthouse]
        self._replicas[machine] = self._start(
            number, [*words, self._address(number), str(SAMPLES), str(path)], path.name
        )
        self._arrivals.append((path, time.time()))

    def row(self, calm_s: float) -> dict[str, Any]:
        """Train in peace, and then over the trace."""
        for machine in self._names:
            self._begin(machine)
        count = len(self._names)
        self._wait(lambda: sum(len(_steps(path)) >= _SETTLED for path, _ in self._arrivals) >= count)
        calm_from_s = time.time()
        self._wait_until(calm_from_s + calm_s)
        begin_s = time.time()
        for event in self._trace.from_all_there():
            self._wait_until(begin_s + event.time_s)
            log(f"torchft, {event.time_s:.1f} s: {event.machine} {event.kind}")
            if event.kind is Kind.ARRIVES:
                self._begin(event.machine)
            else:
                self._replicas.pop(event.machine).close()
        end_s = begin_s + self._trace.end_s
        self._wait_until(end_s)
        steps = sorted(at_s for path, _ in self._arrivals for at_s in _steps(path))
        calm = [at_s for at_s in steps if calm_from_s <= at_s < begin_s] or [begin_s]
        since_s = max((at_s for at_s in steps if at_s < calm_from_s), default=calm_from_s)
        calm_per_s = SAMPLES * len(calm) / (calm[-1] - since_s)
        counted = [at_s for at_s in steps if begin_s <= at_s < end_s]
        firsts = [
            found[0] - at_s for path, at_s in self._arrivals if at_s > begin_s and (found := _steps(path))
        ]
        ends = [begin_s, *counted, end_s]
        ideal = calm_per_s / len(self._names) * self._trace.machine_s
        return {
            "calm_per_s": calm_per_s,
            "goodput": SAMPLES * len(counted) / ideal if ideal else 0.0,
            "longest_gap_s": max(late - early for early, late in pairwise(ends)),
            "returned": len(firsts),
            "median_back_s": median(firsts) if firsts else None,
            "failed_by_themselves": self._num_failed,
            "links": self._lab.about,
        }

    def _wait_until(self, at_s: float) -> None:
        self._wait(lambda: time.time() >= at_s)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + _PATIENCE_S + self._trace.end_s
        while not is_over():
            for machine in [name for name, one in self._replicas.items() if one.poll() is not None]:
                self._num_failed += 1
                log(f"torchft: {machine} failed: {self._replicas[machine].err.read_text()[-300:]}")
                self._begin(machine)
            if self._num_failed > _MOST_FAILED or time.monotonic() > ends_s:
                said = [one.err.read_text()[-2000:] for one in self._replicas.values()]
                raise BiremeError(f"torchft does not go on. Its replicas said: {said}")
            time.sleep(0.05)


def _steps(path: Path) -> list[float]:
    """The times at which a replica committed a step that it took part in."""
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []
