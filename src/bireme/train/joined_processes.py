"""The processes of one phase on a machine that takes part in a run of `bireme coordinate`, and what they ask
the `bireme join` that has started them, over the connection by which they were started:

    ready, forecast ──▶ None, once they may load state and train      switches ──▶ whether a phase follows
    keeper, bytes_per_s, timeout_s ──▶ its address                    kept ──▶ the address, or None
    work, question ──▶ the answer of the command that coordinates, on its machine
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from bireme.cluster.machine import num_cores
from bireme.errors import BiremeError
from bireme.files import SCRATCH
from bireme.machines.keys import key_path
from bireme.machines.orders import PHASE, SPEED, MachineOrders, PhaseReport, run_name
from bireme.machines.phases import PhaseForecast, PhaseProgress
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.fork_server import take_environment
from bireme.runtime.processes import Process, preload, start_process
from bireme.train.folder import RunFolder
from bireme.train.run_file import RunFile, load_run_file, to_toml
from bireme.wire.listener import KEY

SOCKET = "BIREME_ATTENDANCE"
_IMPORTED = ("bireme.train.launched_process", "bireme.cli.train")
"""All that `bireme train` imports, so that a new phase begins at once."""
_IMPORTED_FOR_FOLDERS = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
"""What a model from a folder needs in addition."""
RUNS = "BIREME_RUNS"
"""The variable with the folder for runs on a machine that joins."""
_FOREIGN = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "LOCAL_WORLD_SIZE",
)
"""Variables of another launcher, which do not hold for this run."""

Show = Callable[[str, str], None]
"""Gets a line of a stream, "out" or "err"."""
Keepers = Callable[[float | None, float], KeeperAddress]
"""Starts the keeper of second copies of this machine, if it was not started yet."""


class JoinedProcesses:
    """The processes of `bireme train` on this machine; `show` gets each line that they print. `keeper` and
    `kept` give the keeper of this machine, `notice` is called when there is news. `before` are those of the
    same phase that were killed, `more` are variables of their environment. `answer` is what the command of a
    coordinator answers to questions of its work.
    """

    def __init__(
        self,
        orders: MachineOrders,
        show: Show,
        keeper: Keepers,
        kept: Callable[[], KeeperAddress | None],
        notice: Callable[[], None],
        before: "JoinedProcesses | None" = None,
        more: dict[str, str] | None = None,
        answer: Callable[..., object] | None = None,
    ) -> None:
        self.orders = orders
        self.is_stopping = False
        self.forecast: PhaseForecast | None = None
        """What this phase predicts, once it is ready; only where its rank 0 is."""
        self._keeper, self._kept, self._notice = keeper, kept, notice
        self._goes, self._switches = threading.Event(), False
        # Processes that were killed may still end while it is removed.
        self._scratch = tempfile.TemporaryDirectory(prefix="bireme-join-", ignore_cleanup_errors=True)
        path = Path(self._scratch.name, "run.toml")
        path.write_text(orders.run.text)
        run = load_run_file(path)
        runs = runs_folder(run.log.folder)
        run = run.with_keys("log", folder=str(runs))
        self.model = runs / run_name(orders.run) / "model"
        """The folder of the model, once the run has ended on this machine."""
        path.write_text(to_toml(run))
        self._log: _LogTail = _LogTail(run) if before is None else before._log
        words = [orders.run.verb, *orders.run.words]
        if orders.run.verb == "train":
            words += [str(path), *(["--json"] if orders.run.as_json else [])]
        self.since_s = time.monotonic()
        self._readers = list[threading.Thread]()
        self._processes = list[Process]()
        self._more, self._show, self._answer_work = {SCRATCH: self._scratch.name} | (more or {}), show, answer
        imported = _IMPORTED_FOR_FOLDERS if run.model.source.startswith("hf:") else ()
        # In a thread, because the server may still import, and the coordinator is to hear of this machine.
        self._starting = threading.Thread(target=self._start, args=(words, imported), daemon=True)
        self._starting.start()

    def _start(self, words: list[str], imported: Sequence[str]) -> None:
        try:
            preload(*imported)
            for place in range(self.orders.num_ranks):
                self._start_one(place, words)
        except (OSError, RuntimeError) as error:
            self._show("err", f"bireme: The processes of this machine cannot be started: {error}")
        self._notice()

    def _start_one(self, place: int, words: list[str]) -> None:
        (out, out_writer), (err, err_writer) = Pipe(duplex=False), Pipe(duplex=False)
        called = f"phase {self.orders.phase} rank {self.orders.first + place}"
        variables = _variables(self.orders, place) | self._more
        with out_writer, err_writer:
            output = (out_writer, err_writer)
            process, talk = start_process(called, _train, variables, words, not place, output=output)
        self._processes.append(process)
        for stream, name in ((out, "out"), (err, "err")):
            reader = threading.Thread(target=_read_lines, args=(stream, name, self._show, self._notice))
            reader.daemon = True
            reader.start()
            self._readers.append(reader)
        if place:
            talk.close()
        else:
            threading.Thread(target=self._serve, args=(talk,), name="bireme attended", daemon=True).start()

    def statuses(self) -> list[int] | None:
        """How they ended, negative for a signal; None while one of them lives."""
        if self._starting.is_alive():
            return None
        found = [one.status for one in self._processes]
        if len(found) < self.orders.num_ranks:
            self.kill()
            return [1]
        if None in found:
            return None
        readers, self._readers = self._readers, []  # which are waited for once
        for reader in readers:
            reader.join(1.0)
        return [status for status in found if status is not None]

    def go(self) -> None:
        """Let them load state and train."""
        if not self._goes.is_set():
            self._log.begin()
            self._goes.set()

    @property
    def goes(self) -> bool:
        """Whether they may train."""
        return self._goes.is_set()

    def report(self) -> PhaseReport:
        """How they are, and what the log of the run has of this phase."""
        number, statuses = self.orders.phase, self.statuses()
        progress = self._log.progress(number) if self.goes else None
        ended = None if statuses is None else tuple(statuses)
        return PhaseReport(number, ended, self.forecast, progress)

    def stop(self, *, switches: bool) -> None:
        """Stop them in order; `switches` is whether another phase follows."""
        self._switches = self._switches or switches
        if not self.is_stopping:
            self.is_stopping = True
            self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill those that are left."""
        self.is_stopping = True
        self._send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill those that are left, and wait for their ends."""
        self.is_stopping = True
        self._starting.join()
        for one in self._processes:
            one.close()
        self._goes.set()  # a thread may wait to answer one of them
        self._scratch.cleanup()

    def _send_signal(self, number: signal.Signals) -> None:
        def send() -> None:
            self._starting.join()
            for one in self._processes:
                one.send_signal(number)

        if self._starting.is_alive():  # the coordinator is to hear of this machine meanwhile
            threading.Thread(target=send, daemon=True).start()
        else:
            send()

    def _serve(self, talk: Connection) -> None:
        """Answer a process until it ends."""
        with talk, suppress(EOFError, OSError):
            while True:
                what, *words = talk.recv()
                try:
                    found = self._answer(what, *words)
                except (BiremeError, BrokenPipeError) as error:  # the reader of the output has enough
                    found = error
                talk.send(found)

    def _answer(self, what: str, *words: Any) -> object:
        """The answer to a question."""
        match what:
            case "ready":
                (self.forecast,) = words
                self._notice()
                self._goes.wait()
                return None
            case "switches":
                return self._switches
            case "keeper":
                return self._keeper(*words)
            case "work" if self._answer_work is not None:
                return self._answer_work(*words)
        return self._kept()


def runs_folder(asked: str) -> Path:
    """The folder for runs on this machine: the one that is asked for if it is here, else one of its own. The
    variable of the environment decides if it is set.
    """
    return Path(asked) if RUNS not in os.environ and Path(asked).is_dir() else own_runs()


def own_runs() -> Path:
    """The folder of this machine for runs of which it is not the only one."""
    named = os.environ.get(RUNS)
    return key_path().with_name("runs") if named is None else Path(named).expanduser().absolute()


class _LogTail:
    """What the log of a run says of the phase that trains, read as it grows."""

    def __init__(self, run: RunFile) -> None:
        assert run.log.name is not None, "the coordinator gives the run a name"
        self._path = RunFolder(Path(run.log.folder) / run.log.name).metrics
        self._offset: int | None = None
        self._rest = b""
        self._begun: tuple[int, float] | None = None
        """The step after which the phase begins, and the time of the run then."""
        self._last: tuple[int, float] | None = None
        self._first: tuple[int, float] | None = None
        self._is_slow = False

    def begin(self) -> None:
        """From here on the log is of this phase."""
        if self._offset is None:
            self._offset = self._path.stat().st_size if self._path.is_file() else 0

    def progress(self, phase: int) -> PhaseProgress | None:
        """How far the phase has come."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset or 0)
            found = self._rest + file.read()
            self._offset = file.tell()
            *lines, self._rest = found.split(b"\n")
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    self._take(json.loads(line), phase)
        if self._begun is None or self._last is None or self._first is None:
            return None
        num = self._last[0] - self._first[0]
        batch_s = (self._last[1] - self._first[1]) / num if num > 0 else None
        return PhaseProgress(phase, self._begun[0], self._last[0], batch_s, self._is_slow)

    def _take(self, record: dict[str, Any], phase: int) -> None:
        """A line of the log. Those of phases before come late to a machine with a folder of its own."""
        found = int(record["step"]), float(record["time_s"])
        if record["kind"] == "start":
            is_of_phase = record.get("phase") == phase
            self._begun = found if is_of_phase else None
            self._first, self._last, self._is_slow = None, None, False
        elif record["kind"] == "slow":
            self._is_slow = bool(record["stages"])
        elif record["kind"] == "train" and self._begun is not None:
            self._first, self._last = self._first or found, found


def _variables(orders: MachineOrders, place: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if orders.run.verb != "train":  # training counts on cores of its own only if Bireme has started all
        kept["LOCAL_WORLD_SIZE"] = str(orders.num_ranks)
    return kept | {
        "RANK": str(orders.first + place),
        "WORLD_SIZE": str(orders.size),
        "LOCAL_RANK": str(place),
        "GROUP_RANK": str(orders.number),
        "MASTER_ADDR": orders.master,
        "MASTER_PORT": str(orders.port),
        KEY: orders.key,
        PHASE: str(orders.phase),
        SPEED: str(orders.speed),
        "PYTHONUNBUFFERED": "1",
    }


def get_ready() -> None:
    """Have the server that processes of phases are copies of import all that they need, without waiting for
    it.
    """
    preload(*_IMPORTED)


def _train(talk: Connection, variables: dict[str, str], words: list[str], is_attended: bool) -> None:
    """Be a process of a phase: `bireme WORDS…` with these variables. If it `is_attended`, it may ask the
    `bireme join` that has started it.
    """
    import torch  # which the server has imported, and the command has not

    os.setsid()  # a signal of the terminal comes once, passed on
    take_environment(variables)
    if is_attended:
        os.environ[SOCKET] = str(os.dup(talk.fileno()))
    talk.close()
    # Those of the server may be for a file, which a pipe is not.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # What torch read when it was imported is for the server, which has one thread.
    torch.set_num_threads(_num_threads())
    sys.argv = ["bireme", *words]
    runpy.run_module("bireme", run_name="__main__", alter_sys=True)


def _num_threads() -> int:
    """The threads of a process of this machine that is the only one."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdecimal() and int(asked) else num_cores()


def timed_control() -> float:
    """What the control takes on this machine, by a process of its own; 0 if that fails."""
    try:
        process, talk = start_process("bireme control", _time_control)
        with closing(process), talk:
            return float(talk.recv())
    except (EOFError, OSError, RuntimeError):
        return 0.0


def _time_control(talk: Connection) -> None:
    from bireme.profile.control import control_now_s

    os.setsid()  # a signal of the terminal is not for this process
    talk.send(control_now_s(_num_threads()))


def _read_lines(stream: Connection, name: str, show: Show, notice: Callable[[], None]) -> None:
    with stream, open(stream.fileno(), errors="replace", closefd=False) as text:
        for line in text:
            show(name, line.rstrip("\n"))
    notice()  # the process ends


# The other end of the connection, in a process of the run.


class Attended:
    """The connection at the process: on each machine, its launcher or its first rank has one."""

    def __init__(self, talk: Connection) -> None:
        self._talk = talk

    @classmethod
    def of(cls, variables: MutableMapping[str, str]) -> Self | None:
        """The end that this process has inherited, if `bireme join` has started it. Processes that this one
        starts find none.
        """
        file = variables.pop(SOCKET, None)
        return None if file is None else cls(Connection(int(file)))

    def wait_to_train(self, forecast: PhaseForecast) -> None:
        """Report that the run is prepared, and what is predicted of it. Returns once the phase before has
        ended.
        """
        self._ask("ready", forecast)

    def is_switch(self) -> bool:
        """Whether the run stops here because another phase follows."""
        return bool(self._ask("switches"))

    def keeper(self, bytes_per_s: float | None, timeout_s: float) -> KeeperAddress:
        """The keeper of second copies of this machine, which outlives this process; it is started."""
        found: KeeperAddress = self._ask("keeper", bytes_per_s, timeout_s)
        return found

    def kept(self) -> KeeperAddress | None:
        """The keeper of this machine, if it was started by any phase."""
        found: KeeperAddress | None = self._ask("kept")
        return found

    def ask(self, *question: object) -> Any:
        """The answer of the command that coordinates this work."""
        return self._ask("work", *question)

    def _ask(self, *words: object) -> Any:
        try:
            self._talk.send(words)
            found = self._talk.recv()
        except (EOFError, OSError):
            raise BiremeError("`bireme join` on this machine has ended.") from None
        if isinstance(found, Exception):
            raise found
        return found
