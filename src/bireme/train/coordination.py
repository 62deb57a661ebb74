"""A run over machines that join, at the machine that coordinates: `bireme coordinate` after its options.

It answers the machines that call, and has this machine take part as any other, over the loopback. If it is
killed, the same command takes the run up by its record.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bireme.errors import BiremeError, system_reason, tell
from bireme.machines.admission import admissions_path, issue_tokens, withdraw_tokens
from bireme.machines.discovery import DiscoveryAnswers, FoundCoordinator
from bireme.machines.gathering import Gathering, GatheringListener
from bireme.machines.handover import forget_handover, handed_record, packed_handover
from bireme.machines.keys import FILE, note_coordinator, own_key
from bireme.machines.line import Address
from bireme.machines.orders import (
    RecordedMachine,
    RunOffer,
    RunRecord,
    folder_for_runs,
    read_record,
    record_path,
    write_record,
)
from bireme.machines.own_machine import MachineFacts
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.train.attendance import INTERRUPTED, Attendance, Interruptible, Out
from bireme.train.folder import exported_step
from bireme.train.joined_processes import get_ready, runs_folder
from bireme.train.run_machines import fetch_folder

_TOKEN_S = 24 * 3600.0
_LOOK_S, _PARTING_S = 0.1, 3.0
_LAST_ANSWERS_S = 5.0
"""Machines ask once a second, and are answered for at most this long that the run has ended."""


class Coordination(Interruptible):
    """A coordinator and its own machine, from the first call of a machine to the end of the run."""

    def __init__(
        self,
        run: RunOffer,
        folder: Path,
        address: Address,
        num_machines: tuple[int, int],
        wait_s: float,
        facts: MachineFacts,
        out: Out,
        *,
        takes_part: bool,
        deputies: Sequence[str] = (),
        home: Path | None = None,
        answers: bool = True,
        answer: Callable[..., object] | None = None,
    ) -> None:
        """`folder` is that of the run, `address` is this machine's for the others; port 0 is a free one. The
        run begins with the most machines at once, and with the least once no other has come for `wait_s`. If
        this machine `takes_part` in the training, `out` prints the lines of its processes. It hands over what
        they need to `deputies`. In `home` is what another coordinator has handed over to this machine.
        If it `answers`, machines of the local network find it. `answer` answers questions of work that is no
        training: if this command is killed, that is not taken up.
        """
        super().__init__()
        (host, port), own = address, own_key(None if home is None else home / FILE)
        self._run_name, self._is_taken_over = folder.name, home is not None
        runs = runs_folder(folder_for_runs(run))
        self._model = runs / folder.name / "model"
        """Where this machine has the model at the end, also if it has no part in the training."""
        self._path = record_path(folder) if home is None else handed_record(home)
        self._admissions = admissions_path(home)
        self._gathering = Gathering(run, own, host, num_machines, wait_s, self._admissions, tell)
        self._gathering.deputies = deputies
        self._gathering.handover = lambda admitted: packed_handover(
            folder.name, own.private, num_machines, admitted, self._path
        )
        record = read_record(self._path, run)
        if record is not None:
            self._gathering.take_up(record.newest, record.machines, switches=record.switches)
            known = next((one.address for one in record.machines if one.public == own.public), host)
            if takes_part and known != host:
                tell(f"{host} takes no part in the training: the run knows this machine as {known}.")
                takes_part = False
            port = port or record.port
        self._listener = GatheringListener(self._gathering, (host, port), own, facts, trains=takes_part)
        if run.verb == "train":
            self._gathering.keep = self._keep
        port = self._listener.port
        note_coordinator((host, port), own.public)  # so that this machine can join if a deputy takes over
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where machines call."""
        self._answers: DiscoveryAnswers | None = None
        if answers:
            with suppress(OSError):  # there is no multicast here: people type the address
                known_as = FoundCoordinator(self.where, folder.name, facts.bireme)
                self._answers = DiscoveryAnswers(host, known_as)
        count = num_machines[1]
        self.tokens = (
            [] if record is not None else issue_tokens(self._admissions, own.public, count, _TOKEN_S)
        )
        """Of the machines that are to join; none if the run is taken up."""
        self._attendance: Attendance | None = None
        self._own_secret = ""
        if takes_part:
            here = host if host.startswith("127.") else "127.0.0.1"
            self._attendance = Attendance((here, port), own, own.public, facts, facts.name, tell, out)
            self._attendance.listens_at = host
            self._attendance.answer = answer
            self._own_secret = self.tokens.pop().secret if self.tokens else ""

    def run(self) -> int:
        """Coordinate the run to its end; returns the exit status."""
        gathering, attendance = self._gathering, self._attendance
        taking_part = threading.Thread(target=self._take_part, name="bireme own machine", daemon=True)
        with closing(self._listener):
            try:
                if attendance is not None:
                    taking_part.start()
                self._turn_to_the_end()
                if gathering.phases.is_over and not gathering.phases.status:
                    self._fetch_model()
            finally:
                if gathering.phases.is_over:
                    self._path.unlink(missing_ok=True)
                gathering.end()
                if self._answers is not None:
                    self._answers.close()
                withdraw_tokens(self._admissions, self.tokens)
            is_urgent = self._num_interrupts > 1
            if attendance is not None:
                for _ in range(2 if is_urgent else 0):
                    attendance.interrupt(is_urgent=True)
                taking_part.join(_PARTING_S)
            ends_s = time.monotonic() + (0.0 if is_urgent else _LAST_ANSWERS_S)
            while time.monotonic() < ends_s and not gathering.is_known_to_end:
                time.sleep(_LOOK_S)
            time.sleep(0.0 if is_urgent else _LOOK_S)  # the last answer is on its way
        if gathering.phases.is_over and self._is_taken_over:
            forget_handover(self._run_name)
        return INTERRUPTED if is_urgent or not gathering.phases.has_begun else gathering.phases.status

    def document(self) -> dict[str, Any]:
        """The machines, and the document of the run if it has printed one, for JSON."""
        run = None
        with suppress(ValueError):
            run = json.loads(self._gathering.document)
        return {"machines": self._gathering.machines(), "run": run}

    def _turn_to_the_end(self) -> None:
        gathering = self._gathering
        while not gathering.phases.is_over and self._num_interrupts < 2:
            gathering.turn()
            if self._answers is not None:
                self._answers.answer()
            if self._num_interrupts:
                if not gathering.phases.has_begun:
                    return
                gathering.stop()
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _take_part(self) -> None:
        attendance = self._attendance
        assert attendance is not None, "this machine takes part"
        get_ready()
        try:
            attendance.call(self._own_secret)
            attendance.offer = replace(attendance.offer, line="", measured=None)  # it leads to itself
            attendance.run()
        except BiremeError as error:
            if not self._num_interrupts:
                tell(f"This machine takes no part: {error}")

    def _fetch_model(self) -> None:
        """Have the model here that a machine of the run has exported, if this machine has not."""
        for name, served in dict(self._gathering.models).items():
            if exported_step(self._model) is not None or self._num_interrupts > 1:
                return
            try:
                fetch_folder(KeeperAddress(**served), self._model)
            except (OSError, TypeError, BiremeError) as error:
                tell(f"The model of the run is on {name}, and could not be fetched: {system_reason(error)}")
            else:
                tell(f"The model was fetched from {name}: {self._model}")

    def _keep(self, newest: int, machines: tuple[RecordedMachine, ...], switches: bool) -> None:
        """Keep the record of the run on the disk."""
        is_first = not self._path.exists()
        try:
            write_record(self._path, RunRecord(newest, self._listener.port, machines, switches))
        except (BiremeError, OSError) as error:
            tell(f"If this command is killed, it cannot take the run up: {system_reason(error)}")
        else:
            if is_first and not self._is_taken_over:
                tell(f"If this command is killed, type it again with --set log.name={self._run_name}.")
