"""`bireme train` on the hosts of a home, one of which is killed and one cut off, and what watches it.

Each host has its own launcher. The hosts are network namespaces if they can be made here; else they are
groups of processes that share the loopback, whose links are not slow, and which are stopped instead of cut
off.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bireme
from benchmarks.common.command import log
from benchmarks.common.hosts import Host, NoHosts, slow_hosts
from benchmarks.common.paced import SPEED
from benchmarks.killing.mortal_run import MortalRun, Program, Round
from benchmarks.killing.session import living
from bireme.errors import BiremeError
from bireme.plan.plan_file import load_plan

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.home.model"
SPEEDS = (1.0, 0.5, 0.25)
"""Of the devices of each host: 4 : 2 : 1, and the model is profiled on the first host."""
DEVICES = (2, 1, 1)
MEGABITS_PER_S = 100.0
REPLICAS, STAGES = 2, 2
BATCH, MICRO_BATCHES = 24, 4
PATIENCE_S = 600.0
"""For whatever must happen on a busy machine; nothing is measured by it."""
END_S = 120.0
"""For all launchers to end once the first one has."""
_POLL_S = 0.02

_CLUSTER = """format = 1

[switch]
latency_s = 1e-4
"""
_SERVER = """
[[server]]
name = "host-{number}"

[[server.device]]
kind = "cpu"
count = {devices}
speed = {speed}
memory_bytes = 4_000_000_000

[[server.card]]
bytes_per_s = {bytes_per_s}
latency_s = 1e-4
"""
_RUN = """format = 1

[model]
source = "python:{module}:model"

[data]
source = "{module}:samples"
evaluation_fraction = {held_out}

[training]
steps = {steps}
batch_size = {batch}
optimizer = "adamw"
learning_rate = 0.0005
schedule = "constant"
warmup_fraction = 0.0
evaluate_every = 0

[cluster]
source = "{cluster}"
device = "cpu"
threads_per_worker = 1
timeout_s = 30

[export]
at_end = false

[log]
folder = "{runs}"
name = "run"
every_steps = 1
sample_tokens = 0

{rest}
"""
_REST = """
[plan]
{plan}

[balance]
mode = "measured"

[links]
codec = "int8"

[sync]
mode = "quorum"
codec = "int4"
lease_s = 4.0
grace_s = 2.0

[checkpoint]
every_steps = 100
"""


class Launcher(Program):
    """`bireme train` on one host."""

    def __init__(self, lab: "Lab", number: int, turn: int) -> None:
        self.number, self._host = number, lab.hosts[number] if lab.hosts else None
        out, err = (lab.folder / f"{name}-{number}-{turn}" for name in ("out", "err"))
        words = [sys.executable, "-m", "bireme", "train", str(lab.folder / "run.toml"), "--json"]
        if self._host is not None:
            words = [*self._host.prefix_as(f"host-{number}"), *words]
        super().__init__(words, lab.folder, out, err, lab.variables(number))

    @property
    def processes(self) -> list[int]:
        """The launcher, the ranks, and all else that was started on the host."""
        return living(self.pid) if self._host is None else self._host.processes()

    def kill(self) -> None:
        """Kill all processes of the host, as if its power failed."""
        while (self.poll() is None) | bool(pids := self.processes):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave no process of the host behind."""
        self.kill()
        super().close()

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing comes from the host or to it while the block runs."""
        if self._host is not None:
            self._host.set_cable(is_plugged=False)
            try:
                yield
            finally:
                self._host.set_cable(is_plugged=True)
            return
        pids = self.processes
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                yield


def said(launchers: Sequence[Launcher]) -> str:
    """The last words of each launcher."""
    return "\n".join(f"[host {one.number}] {one.err.read_text()[-3000:]}" for one in launchers)


def ends_of(launchers: Sequence[Launcher]) -> tuple[list[int], dict[str, Any]]:
    """The statuses of launchers that are about to end, and the document of the one with the results."""
    end_s = time.monotonic() + END_S
    try:
        statuses = [one.wait(max(end_s - time.monotonic(), 0.0)) for one in launchers]
    except TimeoutError:
        raise BiremeError(f"The run does not end on all hosts. They said: {said(launchers)}") from None
    if any(statuses):
        log(said(launchers))
    texts = [one.out.read_text() for one in launchers]
    return statuses, next((json.loads(text) for text in texts if text), {})


@dataclass(frozen=True, slots=True)
class Lab:
    """Where a run takes place. There are no `hosts` if all of them are on the loopback. `speeds` are those of
    the devices of each host; `is_paced` if devices take their time.
    """

    folder: Path
    hosts: tuple[Host, ...]
    port: int
    speeds: tuple[float, ...]
    is_paced: bool

    @property
    def about(self) -> str:
        """How the hosts and their devices are made, for rows."""
        links = f"network namespaces, {MEGABITS_PER_S:g} Mbit/s" if self.hosts else "loopback, not slow"
        return f"{links}; devices sleep" if self.is_paced else f"{links}; devices do not sleep"

    def variables(self, number: int) -> dict[str, str]:
        """Those of the launcher of a host."""
        master = self.hosts[0].address if self.hosts else "127.0.0.1"
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(len(self.speeds)),
            "GROUP_RANK": str(number),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(self.port),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses have no names
            "BIREME_CACHE": str(
                self.folder.parent / "cache"
            ),  # profiles of devices that sleep are not for others
            SPEED: str(self.speeds[number] * self.is_paced),
        } | _variables()


def _variables() -> dict[str, str]:
    """Those of every process: where it finds this program and Bireme."""
    paths = [str(ROOT), str(Path(bireme.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class LabRun:
    """A run under way, and all that has happened to it."""

    def __init__(self, lab: Lab, launchers: list[Launcher]) -> None:
        self.lab, self._launchers, self._turn = lab, launchers, 0
        self.watched = MortalRun(lab.folder, launchers[0], lab.folder, PATIENCE_S)

    @property
    def folder(self) -> Path:
        """That of the run."""
        return self.watched.folder

    def replica_on(self, number: int) -> int:
        """The replica that has a stage on a host."""
        plan = load_plan(self.folder / "plan.json").plan
        found = {
            replica
            for row in plan.devices
            for replica, name in enumerate(row)
            if name.startswith(f"host-{number}/")
        }
        if len(found) != 1:
            raise BiremeError(f"The plan has stages on {plan.devices}. Host {number} must have one replica.")
        return found.pop()

    @property
    def rounds(self) -> list[Round]:
        """The batches that count so far."""
        return self.watched.rounds

    def wait_for_batch(self, batch: int) -> None:
        """Until so many batches count."""
        self.watched.wait_until(lambda: len(self.rounds) >= batch, f"batch {batch} does not count")

    def kill_and_start(self, number: int, away_s: float) -> dict[str, Any]:
        """Kill a host, and start it again after so many seconds; return once all replicas train again."""
        began, at_s = len(self.rounds), time.time()
        self._launchers[number].kill()
        log(f"host {number} was killed after {began} batches")
        others = self.watched.wait_for_others(self.replica_on(number), began)
        time.sleep(max(at_s + away_s - time.time(), 0.0))
        self._turn += 1
        self._launchers[number] = Launcher(self.lab, number, self._turn)
        return self._fault(f"host {number} killed, started again", at_s, time.time(), others)

    def cut_off(self, number: int, seconds: float) -> dict[str, Any]:
        """Cut a host off for so many seconds; return once all replicas train again."""
        began, at_s = len(self.rounds), time.time()
        with self._launchers[number].cut_off():
            log(f"host {number} was cut off after {began} batches")
            while time.time() < at_s + seconds:
                self.watched.read()
                time.sleep(_POLL_S)
        others = self.watched.wait_for_others(self.replica_on(number), began)
        return self._fault(f"link of host {number} cut", at_s, at_s + seconds, others)

    def _fault(self, what: str, at_s: float, over_s: float, others: Round) -> dict[str, Any]:
        whole = self.watched.wait_until_whole(REPLICAS, after=self.rounds.index(others))
        row = {
            "fault": what,
            "after_batch": others.batch,
            "lasted_s": over_s - at_s,
            "next_batch_s": others.at_s - at_s,
            "whole_again_s": whole.at_s - at_s,
            "whole_after_its_end_s": whole.at_s - over_s,
        }
        log(str(row))
        return row

    def wait_for_more(self, batches: int) -> None:
        """Until so many more batches count."""
        self.wait_for_batch(len(self.rounds) + batches)

    def stop(self) -> None:
        """Ask the run to end with a checkpoint."""
        self.watched.stop()

    def ended(self) -> tuple[list[int], dict[str, Any]]:
        """The statuses of all hosts, and the document of the host that showed the results."""
        while any(launcher.poll() is None for launcher in self._launchers):
            if any(launcher.poll() is not None for launcher in self._launchers):
                break
            self.watched.read()
            time.sleep(_POLL_S)
        found = ends_of(self._launchers)
        self.watched.read()
        return found


@contextmanager
def made_lab(
    folder: Path, rest: str, servers: Sequence[tuple[int, float]], *, is_paced: bool, **more: float
) -> Iterator[Lab]:
    """The hosts, by the number of devices of each and their speed, and the file of a run on them. `rest` are
    tables of that file, `more` are its `steps`, `batch` and the fraction `held_out` for evaluation.
    """
    folder.mkdir(parents=True)
    tables = (
        _SERVER.format(number=number, devices=count, speed=speed, bytes_per_s=MEGABITS_PER_S * 1e6 / 8)
        for number, (count, speed) in enumerate(servers)
    )
    where = {"cluster": folder / "cluster.toml", "runs": folder / "runs"}
    where["cluster"].write_text(_CLUSTER + "".join(tables))
    (folder / "run.toml").write_text(_RUN.format(module=MODULE, rest=rest, **where, **more))
    with ExitStack() as stack:
        try:
            hosts = tuple(stack.enter_context(slow_hosts(len(servers), MEGABITS_PER_S)))
        except NoHosts as reason:
            log(f"The hosts share the loopback: {reason}.")
            hosts = ()
        yield Lab(folder, hosts, _free_port(), tuple(speed for _, speed in servers), is_paced)


@contextmanager
def lab_run(folder: Path, steps: int, plan: str, *, is_paced: bool) -> Iterator[LabRun]:
    """A run on all hosts, whose `[plan]` is the text `plan`. No process of it is left."""
    servers, rest = [*zip(DEVICES, SPEEDS, strict=True)], _REST.format(plan=plan)
    with made_lab(folder, rest, servers, is_paced=is_paced, steps=steps, batch=BATCH, held_out=0.02) as lab:
        launchers: list[Launcher] = []
        try:
            launchers += (Launcher(lab, number, 0) for number in range(len(SPEEDS)))
            yield LabRun(lab, launchers)
        finally:
            for launcher in launchers:
                launcher.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
    return port


def evaluated_loss(folder: Path) -> float:
    """The loss of a run's last checkpoint on samples that it has not trained on."""
    words = [sys.executable, "-m", "bireme", "evaluate", str(folder), "--json"]
    variables = os.environ | _variables() | {SPEED: "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise BiremeError(f"The run in {folder} cannot be evaluated: {done.stderr}")
    return float(json.loads(done.stdout)["loss"])


def plan_text(schedule: str) -> str:
    """Two replicas of two stages, for the planner to cut and to place."""
    return (
        f'schedule = "{schedule}"\ndepth = {STAGES}\nwidth = {REPLICAS}\nmicrobatches = {MICRO_BATCHES}\n'
        'recompute = "never"'
    )
