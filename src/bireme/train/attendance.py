"""A machine that takes part in a run of `bireme coordinate`: `bireme join`, the end that calls.

It starts the processes of this machine as torchrun would, by its orders, and starts them again if they are
killed while the run goes on. If the coordinator is away they go on, and this end calls until it is there.
"""

import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import accumulate, takewhile
from types import FrameType
from typing import Any

from bireme.cluster.machine import available_bytes, num_cores
from bireme.errors import BiremeError, Tell, system_reason
from bireme.machines.findings import Finding, Verdict
from bireme.machines.gathering import PURPOSE
from bireme.machines.handover import digest_of_packed, forget_handover, keep_handover
from bireme.machines.keys import MachineKey, note_coordinator, place_of
from bireme.machines.lending import DailyHours
from bireme.machines.line import (
    Address,
    DoctorListener,
    RequestLine,
    call_coordinator,
    check_between,
    check_line,
)
from bireme.machines.measured_lines import MeasuredLine, variable_of
from bireme.machines.orders import ORDERS, MachineOffer, MachineOrders, run_name
from bireme.machines.own_machine import MachineFacts, gpu_names
from bireme.runtime.copies.folder_server import FolderServer
from bireme.runtime.copies.keeper import KeeperAddress, KeeperProcess
from bireme.train.folder import exported_step
from bireme.train.joined_processes import JoinedProcesses, timed_control

_BEAT_S, _SOON_S, _AGAIN_S, _PARTING_S, _LOOK_S = 1.0, 0.1, 2.0, 5.0, 30.0
_LEAVE_S = 120.0
"""How long a machine that leaves waits at most for the run to go on without it."""
_NUM_CALLS = 3
"""How often a machine calls whose line breaks, or is too slow, before it has offered itself."""
_UNSURE = ("line", "ports", "large messages")
"""Checks of a line that may fail because one end is busy, and come out well the next time."""
_ALONE_S = 60.0
"""How long a machine without running processes calls a coordinator that does not answer."""
_KEEPER_S = 60.0
_MOST_KILLS, _SHORT_S = 3, 60.0
"""A machine gives up at this number of killed launchers in a row that have lived for less than `_SHORT_S`."""
_MOST_KEPT, _MOST_LETTERS = 10_000, 100_000
"""Lines to keep for a coordinator that is away, and letters to send it at once."""
INTERRUPTED = 130
Out = Callable[[str, str], None]
"""Prints a line of a stream, "out" or "err"."""


class Interruptible:
    """What stops in order if a signal asks for it, and at once if a second urgent one does."""

    def __init__(self) -> None:
        self._num_interrupts, self._wake = 0, threading.Event()

    def interrupt(self, *, is_urgent: bool) -> None:
        """Stop in order, or at once if it is the second urgent call."""
        self._num_interrupts += 1 if is_urgent or not self._num_interrupts else 0
        self._wake.set()

    def listen(self) -> None:
        """Take Ctrl-C as an urgent call, and SIGTERM as another one."""

        def interrupt(number: int, _frame: FrameType | None) -> None:
            self.interrupt(is_urgent=number == signal.SIGINT)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)


class Attendance(Interruptible):
    """This machine in a run, from its call to the run's end."""

    def __init__(
        self,
        address: Address,
        key: MachineKey,
        coordinator: str,
        facts: MachineFacts,
        name: str,
        tell: Tell,
        out: Out,
        hours: DailyHours | None = None,
    ) -> None:
        """`coordinator` is the public key of the coordinator. `out` prints what the processes here print.
        With `hours` the machine takes part then only.
        """
        super().__init__()
        self._address, self._key, self._coordinator = address, key, coordinator
        self._facts, self._name, self._tell, self._out = facts, name, tell, out
        self._hours = hours
        self._line: RequestLine | None = None
        self._next_call_s, self._num_calls, self._is_silent = 0.0, 0, False
        self._elsewhere: tuple[str, ...] = ()
        """Addresses of the run's machines, at one of which the coordinator may be started again."""
        self.offer = MachineOffer(secrets.token_hex(8), num_cores(), available_bytes(), gpu_names(), 1)
        self._reserve()
        self._lines = list[tuple[int, str, str]]()
        """That the coordinator has not got yet."""
        self._is_leaving = False
        self._leaves_s: float | None = None
        """Since when this machine waits for the run to go on without it."""
        self.listens_at = address[0]
        """An address at which others call this machine, or which shows that all are on one host."""
        self._answering: DoctorListener | None = None
        """Answers other machines of the run that check their lines to this one."""
        self._line_key = ""
        """With which they do; of this run."""
        self._there = frozenset[str]()
        """The public keys of the machines that are there, as the coordinator told last."""
        self._measuring: threading.Thread | None = None
        self._measured = list[tuple[str, MeasuredLine | None]]()
        """Lines to other machines that the coordinator has not got yet, by their keys."""
        self._control_s: float | None = None
        self._timing: threading.Thread | None = None
        self.orders: MachineOrders | None = None
        """Those of the newest phase here."""
        self.answer: Callable[..., object] | None = None
        """Answers questions of the work, if this machine coordinates it."""
        self._phases: dict[int, JoinedProcesses] = {}
        self._closing = list[threading.Thread]()
        """End the processes of phases that are over here."""
        self._trained = set[int]()
        """Phases that the coordinator knows to train."""
        self._num_kills = 0
        self._server: FolderServer | None = None
        self._handover = ""
        """The digest of what the coordinator has handed over to this machine."""
        self._keeper: KeeperProcess | None = None
        self._keeper_address: KeeperAddress | None = None
        self._keeper_is_there = threading.Event()

    def listen(self) -> None:
        """Take Ctrl-C as an urgent call to stop the run, and SIGTERM and SIGHUP as calls to leave it."""
        super().listen()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.leave())

    def leave(self) -> None:
        """Leave once the run goes on without this machine."""
        self._is_leaving = True
        self._wake.set()

    def wait_for_hours(self) -> None:
        """Return within the hours of this machine, or after an interrupt."""
        if self._hours is not None and self._hours.wait_s(datetime.now()):
            self._tell(f"This machine offers itself again at {self._hours.begin}.")
        while not self._is_ended and self._hours is not None and (s := self._hours.wait_s(datetime.now())):
            self._wake.wait(min(s, _LOOK_S))

    def call(self, secret: str = "") -> list[Finding]:
        """Call the coordinator for the first time, be admitted, and check the line; returns the findings, of
        which it prints the notes. The last one is the failure, if it fails. Raises a `BiremeError` if the
        coordinator refuses this machine.
        """
        found = list[Finding]()
        for calls_left in reversed(range(0 if self._is_ended else _NUM_CALLS)):
            try:
                found = self._call_and_check(secret)
            except (OSError, ValueError, KeyError) as error:
                if not calls_left:
                    raise self._broken(error) from None
                found, sentence = [], f"broke: {system_reason(error)}"
            else:
                failing = [one for one in found if one.verdict == Verdict.FAILS]
                if not calls_left or not failing or any(one.check not in _UNSURE for one in failing):
                    break
                sentence = f"fails a check: {failing[0].text}"
            self._hang_up()
            self._tell(f"The line to the coordinator {sentence.rstrip('.')}. This machine calls again.")
            self._wake.wait(_AGAIN_S)
            if self._is_ended:
                return []
        for one in found:
            if one.verdict == Verdict.NOTE:
                self._tell(one.sentence)
        told = {one.check: one.text for one in found}
        measured = [told[check] for check in ("latency", "bandwidth") if check in told]
        self.offer = replace(self.offer, line=", ".join(measured)[:400], measured=MeasuredLine.of(found))
        return found

    def _call_and_check(self, secret: str) -> list[Finding]:
        found, self._line = self._called(self._address)
        if self._line is not None:
            self._ask("admit", secret=secret, name=self._name)
            note_coordinator(self._address, self._coordinator)  # whatever the checks find
            found += check_between(self._line, self._facts)
        return found

    def run(self) -> int:
        """Offer, wait, run the processes of this machine to the run's end; returns the exit status. Raises a
        `BiremeError` if the coordinator refuses this machine.
        """
        with suppress(BiremeError):  # lines to this machine are not measured
            self._answering = DoctorListener(
                (self.listens_at, 0), self._key_of_lines, self._facts, lambda _: None
            )
            self.offer = replace(self.offer, line_port=self._answering.port)
        try:
            if self._line is not None:
                try:
                    self._ask("offer", offer=asdict(self.offer))
                except (OSError, ValueError, KeyError):
                    self._hang_up()  # it is called again
            return self._run()
        finally:
            self._reserved.close()
            for one in self._phases.values():
                one.close()
            for closing in self._closing:
                closing.join()
            if self._keeper is not None:
                self._keeper.close()
            for server in (self._server, self._answering):
                if server is not None:
                    server.close()
            if self._line is not None:
                self._say_leave()

    def _served_model(self) -> dict[str, Any] | None:
        """Where this machine serves the model, once the run has ended here and has left one."""
        newest = self._phases[max(self._phases)] if self._phases else None
        if newest is None or not newest.goes or newest.statuses() is None or self._own_status:
            return None
        if exported_step(newest.model) != newest.orders.run.steps:
            return None
        if self._server is None:
            self._server = FolderServer(_KEEPER_S)
            self._server.folder = newest.model
        return asdict(self._server.address)

    def _say_leave(self, returns: str = "") -> None:
        if self._line is not None:
            with suppress(OSError, ValueError):
                self._line.ask("leave", returns=returns)
        self._hang_up()

    @property
    def _is_ended(self) -> bool:
        return self._num_interrupts > 0 or self._is_leaving

    @property
    def _is_coordinators(self) -> bool:
        """Whether this is the coordinator's own machine, where the coordinator says how the run ends."""
        return self._key.public == self._coordinator

    def _broken(self, error: Exception) -> BiremeError:
        where, why = place_of(self._address), system_reason(error)
        return BiremeError(f"The line to the coordinator at {where} broke: {why}. Check it: bireme doctor")

    def _run(self) -> int:
        heard_s = time.monotonic()
        while True:
            if (status := self._interrupted()) is not None:
                return status
            if self._keeper is not None and self._keeper_address is None:
                self._keeper_address = self._keeper.started()
                self._keeper_is_there.set()
            if not self._restart_killed():
                return 1
            answer = self._beat()
            if answer is not None:
                heard_s = time.monotonic()
                self._follow(answer)
            is_idle = all(one.statuses() is not None for one in self._phases.values())
            if answer is not None and answer["is_over"] and is_idle and not answer["stays"]:
                if self._handover and self.orders is not None:
                    forget_handover(run_name(self.orders.run))
                if not answer["newest"]:
                    self._tell("The coordinator has ended before the run began.")
                    return 1
                if self.orders is None:
                    self._tell("The run has ended. This machine took no part in it.")
                elif answer["status"] == INTERRUPTED and not self._is_coordinators:
                    self._tell("The run was stopped before it trained.")
                return int(answer["status"])
            if self._may_leave(answer):
                if self._is_leaving:
                    return 0
                self._rest()
                heard_s = time.monotonic()
                continue
            silent_s = time.monotonic() - heard_s
            if is_idle and self._phases and silent_s > _PARTING_S and not self._own_status:
                return 0
            if is_idle and silent_s > _ALONE_S:
                self._tell(
                    f"The coordinator at {place_of(self._address)} has not answered for {_ALONE_S:g} s."
                )
                return self._own_status
            # Another phase may begin at any time if one is ready, or stops.
            is_changing = any(
                (one.forecast and not one.goes) or one.is_stopping for one in self._phases.values()
            )
            self._wake.wait(_SOON_S if is_changing else _BEAT_S)
            self._wake.clear()

    @property
    def _own_status(self) -> int:
        """The status of the newest phase here."""
        found = self._phases[max(self._phases)].statuses() if self._phases else None
        return max(map(abs, found), default=1) if found is not None else 1

    def _follow(self, answer: dict[str, Any]) -> None:
        """Start, stop and end processes as the coordinator says."""
        found = {ORDERS.validate_python(one["orders"]): one for one in answer["phases"]}
        listed = {orders.phase for orders in found}
        for number in [one for one in self._phases if one not in listed and one <= answer["newest"]]:
            if answer["is_over"] and self._phases[number].goes and self._phases[number].statuses() is None:
                continue  # the run ends, and so will they
            processes = self._phases.pop(number)
            if not processes.goes and not answer["is_over"]:
                self._tell(f"Phase {number} was prepared and is not used.")
            # They may still import: the coordinator is to hear of this machine meanwhile.
            closing = threading.Thread(target=processes.close, name="bireme closing")
            closing.start()
            self._closing = [closing, *(one for one in self._closing if one.is_alive())]
        for orders, one in found.items():
            if orders.phase not in self._phases:
                self._start(orders)
            processes = self._phases[orders.phase]
            if one["goes"]:
                processes.go()
            if one["end"] == "stop":
                processes.stop(switches=one["switches"])
            elif one["end"] == "kill":
                processes.kill()

    def _restart_killed(self) -> bool:
        """Start a launcher again that was killed, if its machine may return. False if it was killed too
        often.
        """
        may_return = not self._num_interrupts and self.orders is not None and self.orders.run.can_return
        for one in tuple(self._phases.values()) if may_return else ():
            statuses = one.statuses()
            if statuses is None or min(statuses) >= 0 or one.is_stopping:
                continue
            is_short = time.monotonic() - one.since_s < _SHORT_S
            self._num_kills = self._num_kills + 1 if is_short else 1
            if self._num_kills >= _MOST_KILLS:
                self._tell(
                    f"The launcher was killed {self._num_kills} times in a row: it is not started again."
                )
                self._beat()
                return False
            self._tell(f"The launcher was killed by signal {-min(statuses)}. It is started again.")
            goes = one.goes
            one.close()
            self._start(one.orders, one)
            if goes:
                self._phases[one.orders.phase].go()
        return True

    def _may_leave(self, answer: dict[str, Any] | None) -> bool:
        """Whether this machine means to leave, and the run goes on without it, or takes too long to."""
        is_outside = self._hours is not None and bool(self._hours.wait_s(datetime.now()))
        if self._num_interrupts or not (is_outside or self._is_leaving):
            self._leaves_s = None
            return False
        if self._leaves_s is None:
            self._leaves_s = time.monotonic()
            if self._phases:
                self._tell(f"This machine leaves in {_LEAVE_S:g} s, or when the run goes on without it.")
        return not self._phases or time.monotonic() - self._leaves_s > _LEAVE_S

    def _rest(self) -> None:
        """Leave, and return when the hours of this machine begin."""
        assert self._hours is not None, "it is outside of them"
        self._say_leave(self._hours.begin)
        for one in self._phases.values():
            one.close()
        self._phases.clear()
        self.wait_for_hours()
        self.offer = replace(self.offer, instance=secrets.token_hex(8))
        self._leaves_s = None

    def _interrupted(self) -> int | None:
        """Act on interrupts; the exit status if nothing is left to do."""
        if not self._num_interrupts:
            return 0 if self._is_leaving and not self._phases else None
        # Processes that were still preparing end by the signal that stops them.
        training = [one for one in self._phases.values() if one.goes and min(one.statuses() or [0]) >= 0]
        if not training or self._num_interrupts > 1:
            if self._num_interrupts == 1 and not self._is_coordinators:
                why = "" if self._trained else " It was interrupted before the run trained here."
                self._tell(f"This machine leaves.{why}")
            return INTERRUPTED
        if not any(one.is_stopping for one in training):
            self._tell("The run stops in order on all machines. Ctrl-C again ends this machine at once.")
        for one in training:
            one.stop(switches=False)
        return None

    def _start(self, orders: MachineOrders, before: JoinedProcesses | None = None) -> None:
        self.orders = orders
        if orders.port == self.offer.port:
            self._reserved.close()
            self._reserve()
        self._phases[orders.phase] = JoinedProcesses(
            orders,
            partial(self._show, orders.phase),
            self._ask_keeper,
            lambda: self._keeper_address,
            self._wake.set,
            before,
            variable_of(orders.lines),
            self.answer,
        )

    def _reserve(self) -> None:
        """Keep a port free for the store of a phase, until that is started."""
        self._reserved = socket.socket()
        self._reserved.bind(("", 0))
        self.offer = replace(self.offer, port=self._reserved.getsockname()[1])

    # The keeper of second copies ends with the thread that has started it, so that is the one of `run`.

    def _ask_keeper(self, bytes_per_s: float | None, timeout_s: float) -> KeeperAddress:
        if self._keeper is None:
            self._keeper = KeeperProcess(bytes_per_s, timeout_s)
        self._wake.set()
        if not self._keeper_is_there.wait(_KEEPER_S) or self._keeper_address is None:
            raise BiremeError("The keeper of second copies does not start; the output above may say why.")
        return self._keeper_address

    def _show(self, phase: int, stream: str, text: str) -> None:
        self._out(stream, text)
        if len(self._lines) < _MOST_KEPT:
            self._lines.append((phase, stream, text[:_MOST_LETTERS]))
        if phase not in self._trained:
            self._wake.set()  # it may be the line of its first batch

    def _beat(self) -> dict[str, Any] | None:
        """Tell the coordinator how things are; what it says, or None if it does not answer."""
        num_letters = accumulate(len(text) for *_, text in self._lines)
        num_lines = sum(1 for _ in takewhile(_MOST_LETTERS.__ge__, num_letters))
        lines, measured = self._lines[:num_lines], self._measured[:]
        try:
            if self._line is None:
                self._call_again()
            if self._line is None:
                return None
            reports = [asdict(one.report()) for one in self._phases.values()]
            answer = self._ask(
                "beat",
                port=self.offer.port,
                phases=reports,
                lines=lines,
                leaves=self._leaves_s is not None,
                handover=self._handover,
                model=self._served_model(),
                measured=[(public, line and asdict(line)) for public, line in measured],
                control_s=self._control_s,
            )
            if not answer["is_known"]:
                self._tell("This machine was silent for too long. It offers itself again.")
                self._ask("offer", offer=asdict(self.offer))
                return None
        except (OSError, ValueError, KeyError):
            self._hang_up()
            if not self._is_silent:
                self._is_silent = True
                trains = any(one.goes and one.statuses() is None for one in self._phases.values())
                goes_on = " The training goes on." if trains else ""
                self._tell(f"The coordinator does not answer.{goes_on} This machine calls until it does.")
            return None
        except BiremeError:
            if self._phases:
                self._tell("The coordinator does not let this machine take part any more.")
            raise
        del self._lines[: len(lines)], self._measured[: len(measured)]
        self._trained |= {one["number"] for one in reports if one["progress"]}
        self._line_key, self._there = str(answer["lines"]["key"]), frozenset(answer["lines"]["there"])
        if answer["times_control"] and self._timing is None:
            self._timing = threading.Thread(target=self._time_control, name="bireme control", daemon=True)
            self._timing.start()
        if answer["lines"]["call"] is not None:
            self._begin_measuring(*answer["lines"]["call"])
        self._keep_handover(str(answer["handover"]))
        self._elsewhere = tuple(map(str, answer["addresses"]))
        return answer

    def _key_of_lines(self, _purpose: bytes) -> str:
        if not self._line_key:
            raise BiremeError("No coordinator has named a key yet.")
        return self._line_key

    def _begin_measuring(self, name: str, host: str, port: int, public: str) -> None:
        """Measure the line to another machine of the run, beside all else."""

        def measure() -> None:
            found = list[Finding]()
            with suppress(OSError, ValueError, KeyError):  # the machine has gone
                found.extend(check_line((host, port), self._line_key, self._facts))
            sentences = [f"The line to {name} fails a check: {text}" for text in failures(found)]
            if sentences:
                time.sleep(2 * _BEAT_S)  # until the coordinator has told if the machine has left
                if public not in self._there:
                    sentences = [f"{name} has left before the line to it was measured."]
            for sentence in sentences:
                self._tell(sentence)
                self._lines.append((0, "err", sentence))
            self._measured.append((public, MeasuredLine.of(found)))  # last: the next may then be measured
            self._wake.set()

        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(target=measure, name="bireme measuring", daemon=True)
            self._measuring.start()

    def _keep_handover(self, text: str) -> None:
        """Keep what this machine needs to coordinate the run, if it is the coordinator's deputy."""
        if not text or self.orders is None:
            return
        run, is_first = run_name(self.orders.run), not self._handover
        self._handover = digest_of_packed(text)
        try:
            keep_handover(run, text)
        except BiremeError as error:
            self._tell(str(error))
        else:
            if is_first:
                self._tell(
                    "This machine is a deputy. If the coordinator is lost for good, type here: "
                    f"bireme coordinate --take-over {run}"
                )

    def _time_control(self) -> None:
        """Time the control, as soon as torch is imported: for a run whose plans use it, as it takes cores."""
        self._control_s = timed_control()
        self._wake.set()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.socket.close()
        self._line = None

    def _call_again(self) -> None:
        if time.monotonic() < self._next_call_s:
            return
        self._next_call_s = time.monotonic() + _AGAIN_S
        hosts = list(dict.fromkeys([self._address[0], *self._elsewhere]))
        address = (hosts[self._num_calls % len(hosts)], self._address[1])
        self._num_calls += 1
        self._line = self._called(address)[1]
        if self._line is None:
            return
        self._ask("admit", secret="", name=self._name)
        note_coordinator(address, self._coordinator)
        self._ask("offer", offer=asdict(self.offer))
        where = f" at {place_of(address)}" if address != self._address else ""
        self._tell(f"The coordinator answers{where} again.")
        self._address, self._num_calls, self._is_silent = address, 0, False

    def _called(self, address: Address) -> tuple[list[Finding], RequestLine | None]:
        purpose = bytes.fromhex(self._key.public) + PURPOSE
        calling = call_coordinator(address, self._key.shared_with(self._coordinator), purpose)
        found = list[Finding]()
        while True:
            try:
                found.append(next(calling))
            except StopIteration as end:
                return found, end.value

    def _ask(self, what: str, **words: Any) -> dict[str, Any]:
        """Ask the coordinator. Raises a `BiremeError` with its sentence if it refuses."""
        assert self._line is not None, "there is a line"
        answer = self._line.ask(what, **words)
        if answer["error"]:
            raise BiremeError(str(answer["error"]))
        return answer


def failures(findings: Sequence[Finding]) -> list[str]:
    """The sentences of what will fail."""
    return [one.sentence for one in findings if one.verdict == Verdict.FAILS]
