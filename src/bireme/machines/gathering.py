"""The machines of a run that a coordinator waits for: `bireme coordinate`, the end that listens.

A machine calls with its key, shows a token if it is not in the list yet, checks the line as `bireme doctor`
does, and offers what it has. From then on it asks every second how things are, and says how its launcher is.
Every answer is the state of things, so a request that is lost is of no matter: the machine asks again.

    admit secret, name ──▶ error     beat port, phases, lines, leaves, handover, model, measured, control_s
    offer ──▶ error                      ──▶ error, phases, newest, is_over, status, addresses, handover,
    leave ──▶ error                          stays, lines, times_control

Once enough machines are there, the first phase of the run begins. Each machine gets its orders: its number,
the address and the key of the store of the phase, and the run file. With them it starts `bireme train` as
torchrun would. `phases.py` decides when another phase follows.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bireme.errors import BiremeError, printable
from bireme.machines.admission import AdmissionList, change_admissions, read_admissions
from bireme.machines.handover import digest_of_packed
from bireme.machines.keys import MachineKey
from bireme.machines.line import Address, LineListener, RequestLine, answer_check
from bireme.machines.measured_lines import LineBetween, LineTable, MeasuredLine
from bireme.machines.orders import (
    ControlTime,
    MachineOffer,
    MachineOrders,
    PhaseReport,
    RecordedMachine,
    RunOffer,
    relative_speed,
)
from bireme.machines.own_machine import MachineFacts
from bireme.machines.phases import PhaseRules, RunPhase, RunPhases
from bireme.wire.listener import Caller, new_key

PURPOSE = b"join"
"""A caller gives its public key and this word."""
_KEY_BYTES = 32
_MOST_UNKNOWN = 8
"""Callers that are not admitted yet, at once."""
_SEEN_S = 5.0
"""How long a machine counts as there after its last request."""


@dataclass(frozen=True, slots=True)
class MachineBeat:
    """What a machine says every second: a `port` that is free there, how its `phases` are, the `lines` that
    these have printed, whether it is to leave, the digest of what was handed over to it, and where it serves
    the model of the run that has ended there. It has `measured` lines to others, None for one that failed,
    and `control_s` as in its offer.
    """

    port: int
    phases: tuple[PhaseReport, ...]
    lines: tuple[tuple[int, str, str], ...]
    leaves: bool
    handover: str
    model: dict[str, str] | None
    measured: tuple[tuple[str, MeasuredLine | None], ...] = ()
    control_s: ControlTime = None


_OFFER, _BEAT = TypeAdapter(MachineOffer), TypeAdapter(MachineBeat)


@dataclass(slots=True)
class _Member:
    """A machine that has made an offer. `phase` is the newest one that it has taken part in, and `statuses`
    are how its processes have ended; None before.
    """

    public: str
    name: str
    address: str
    offer: MachineOffer
    seen_s: float
    is_own: bool
    phase: int = 0
    statuses: list[int] | None = None
    is_gone: bool = False
    has_key: bool = False
    """Whether it has the key with which others check their lines to it."""
    knows_end: bool = False
    """Whether it was told that the run has ended, and that it need not stay."""

    def note_control(self, seconds: float | None) -> None:
        """Keep the time of the control, if none is known: a later figure is no reason to plan again."""
        if self.offer.control_s is None:
            self.offer = replace(self.offer, control_s=seconds)


class Gathering:
    """The state: who is there and what each is told. All calls are from any thread."""

    def __init__(
        self,
        run: RunOffer,
        own: MachineKey,
        host: str,
        num_machines: tuple[int, int],
        wait_s: float,
        admissions: Path,
        tell: Callable[[str], None],
    ) -> None:
        """`host` is this machine's address for the others. The run begins with the most machines at once, and
        with the least once no other one has come for `wait_s`.
        """
        self._run, self._own, self._host, self._tell = run, own, host, tell
        self._least, self._most = num_machines
        self._admissions = admissions
        self._list: AdmissionList | None = None
        self._complaint = ""
        needs_all = not run.can_return
        rules = PhaseRules(*num_machines, wait_s, run.patience_s, needs_all, run.steps, run.replans)
        self.phases = RunPhases(rules)
        """Which machines train when. Only this object changes it."""
        self._orders: dict[int, dict[str, MachineOrders]] = {}
        """The orders of each machine in a phase."""
        self._members: dict[str, _Member] = {}
        self._lines, self._line_key = LineTable(), new_key()
        self._lock = threading.RLock()
        self._documents: dict[int, list[str]] = {}
        self._kept = (0, 0, False)
        """The phase that trains, or did last, the newest one then, and whether it was to stop for another."""
        self.keep: Callable[[int, tuple[RecordedMachine, ...], bool], None] = lambda *_: None
        """Called with the number of the newest phase, the machines of the one that trains, and whether it
        is to stop for another, before machines hear of that.
        """
        self._has_closed = False
        self._is_cut_short = False
        """Whether work that ends at once was stopped: its processes lose each other."""
        self.models: dict[str, dict[str, str]] = {}
        """By name, the machines that serve the model of the run that has ended there, with its address."""
        self.deputies: Sequence[str] = ()
        """Names of machines, or beginnings of their keys."""
        self.handover: Callable[[AdmissionList], str] = lambda _: ""
        """Gives what such a machine needs to coordinate the run, with the present list of machines."""
        self._able = set[str]()
        """Keys of the deputies that have it."""

    def take_up(self, newest: int, machines: Sequence[RecordedMachine], *, switches: bool = False) -> None:
        """Go on with a run that a coordinator has left, with these machines in the phase that trains, or that
        is to stop for another one if it `switches`.
        """
        number = machines[0].orders.phase
        self._orders[number] = {one.public: one.orders for one in machines}
        self._kept = number, 0, switches
        for one in machines:
            is_own = one.public == self._own.public
            made = _Member(one.public, one.name, one.address, one.offer, 0.0, is_own, number, is_gone=True)
            self._members[one.public] = made
        gone = {one.public: one.offer.instance for one in machines}
        self.phases.take_up(number, newest, gone, time.monotonic(), switches=switches)
        names = ", ".join(one.name for one in machines)
        self._tell(
            f"The run that this coordinator has left is taken up. Phase {number} trains on {names}: they "
            "call by themselves."
        )

    @property
    def document(self) -> str:
        """What the last phase has printed on standard output, if that is one document."""
        with self._lock:
            return "\n".join(self._documents[max(self._documents)]) if self._documents else ""

    def stop(self) -> None:
        """Stop the run in order on all machines."""
        with self._lock:
            self._is_cut_short = self._run.verb != "train"
            self.phases.ask_stop()

    def machines(self) -> list[dict[str, Any]]:
        """All that have made an offer, for JSON."""
        with self._lock:
            return [
                {
                    "name": one.name,
                    "address": one.address,
                    "phase": one.phase,
                    "statuses": one.statuses,
                    **asdict(one.offer),
                    "speed": self._speed_of(one),
                }
                for one in self._members.values()
            ]

    def admitted(self, public: str) -> str:
        """The name of a machine. Raises a `BiremeError` if it may not take part."""
        found = self._newest_list()
        try:
            return found.check(public).name
        except BiremeError:
            with self._lock:
                if (one := self._members.get(public)) is not None and not one.is_gone:
                    self._lose(one, for_good=True, left="takes part no more: its key was revoked")
            raise

    def _newest_list(self) -> AdmissionList:
        """The list of machines. If it cannot be read any more, nothing follows for those that were on it."""
        complaint, before = "", self._list
        try:
            self._list = read_admissions(self._admissions)
        except BiremeError as error:
            if before is None:
                raise
            complaint = str(error)
        if complaint and complaint != self._complaint:
            self._tell(f"{complaint} Until then the list counts as it was.")
        self._complaint = complaint
        return self._list or AdmissionList()

    def admit(self, public: str, secret: str, name: str) -> None:
        """Put a machine into the list. Raises a `BiremeError` that says why not."""

        called = printable(name)[:100] or "unnamed"
        change_admissions(self._admissions, lambda found: found.admit(secret, public, called, time.time()))

    def take_offer(self, public: str, address: str, words: object) -> None:
        """A machine is there. Raises a `BiremeError` if it is not needed."""
        name = self.admitted(public)
        offer = _read(_OFFER, words)
        with self._lock:
            before, now_s = self._members.get(public), time.monotonic()
            if self.phases.is_over:
                raise BiremeError("The run has ended.")
            is_there = before is not None and not before.is_gone
            if is_there and before is not None and before.offer.instance != offer.instance:
                raise BiremeError(
                    f"{name} takes part already, by another bireme join. End that one first; if it was "
                    f"killed, wait {_SEEN_S:g} s."
                )
            if not is_there and self._num_here >= self._most:
                raise BiremeError(
                    f"The run has its {self._num_here} machines, and takes no others. Start it again "
                    "with a larger --machines."
                )
            made = _Member(public, name, address, offer, now_s, public == self._own.public)
            if before is not None:
                made.phase, made.statuses = before.phase, before.statuses
                made.note_control(before.offer.control_s)
            self._members[public] = made
            if not is_there:
                self._lines.note_arrival()
            if offer.measured is not None and (before is None or before.offer.measured != offer.measured):
                self._lines.note(public, self._own.public, offer.measured)
            self.phases.come(public, name, offer.instance, now_s)
            if before is not None and before.is_gone:
                self._tell(f"{name} ({address}) is back.")
            elif not is_there:
                self._tell(f"{name} ({address}) is here: {offer.sentence}. {self._count}")

    @property
    def _num_here(self) -> int:
        return sum(not one.is_gone for one in self._members.values())

    @property
    def _count(self) -> str:
        wanted = f"{self._least} to {self._most}" if self._least < self._most else str(self._most)
        return f"{self._num_here} of {wanted} machines are here."

    def beat(self, public: str, told: MachineBeat) -> dict[str, Any]:
        """A machine reports how it is, and gets the phases that it takes part in: none once the run goes on
        without it, if it `leaves`. If it was silent for too long, it is to offer itself again. Raises a
        `BiremeError` if it is not admitted any more.
        """
        name = self.admitted(public)
        with self._lock:
            one = self._members.get(public)
            if one is None or one.is_gone:
                return {"error": "", "is_known": False}
            now_s = one.seen_s = time.monotonic()
            one.offer = replace(one.offer, port=told.port)
            one.note_control(told.control_s)
            for other, line in told.measured:
                if other in self._members:
                    self._lines.note(public, other, line)
            for phase, stream, text in told.lines:
                if stream == "out" and self._run.as_json:
                    self._documents.setdefault(phase, []).append(text)
                elif not one.is_own and phase not in self.phases.unused and not self._is_cut_short:
                    self._tell(f"{name}: {printable(text.removeprefix('bireme: '))}")
            self.phases.note_leaves(public, leaves=told.leaves)
            before = self.phases.num_news
            for report in told.phases:
                self._note(one, report, now_s)
            if self.phases.num_news > before:
                self.turn()  # what follows is in this answer
            if told.model is not None:
                self.models[name] = told.model
            one.has_key = True
            with_key = [key for key, each in self._measurable.items() if each.has_key]
            called = None if self.phases.is_over else self._lines.next_of(public, with_key, now_s)
            to = None if called is None else self._members[called]
            addresses = dict.fromkeys([self._host, *(each.address for each in self._members.values())])
            stays = told.model is not None and not self._has_closed
            one.knows_end = self.phases.is_over and not stays
            return {
                "error": "",
                "is_known": True,
                "phases": [
                    {
                        "orders": asdict(self._orders[phase.number][public]),
                        "goes": phase.goes,
                        "end": phase.end,
                        "switches": self.phases.is_switching,
                    }
                    for phase in self.phases.phases_of(public)
                    if phase.number in self._orders
                ],
                "newest": self.phases.newest,
                "is_over": self.phases.is_over,
                "status": self.phases.status,
                "addresses": [*addresses],
                "handover": self._handover_to(public, told.handover),
                "stays": stays,
                "times_control": self._run.by_speed and one.offer.control_s is None,
                "lines": {
                    "key": self._line_key,
                    "call": to and [to.name, to.address, to.offer.line_port, to.public],
                    "there": [key for key, each in self._members.items() if not each.is_gone],
                },
            }

    @property
    def _measurable(self) -> dict[str, _Member]:
        """The machines that answer checks of their lines."""
        return {key: one for key, one in self._members.items() if one.offer.line_port and not one.is_gone}

    def _handover_to(self, public: str, digest: str) -> str:
        """What a deputy lacks that has the handover of that digest; empty for other machines. A name that two
        machines have names none.
        """
        admitted = self._newest_list()
        if not any([one.public for one in admitted.named(word)] == [public] for word in self.deputies):
            return ""
        found = self.handover(admitted)
        if not found or digest_of_packed(found) != digest:
            return found
        if public not in self._able:
            self._able.add(public)
            self._tell(f"{admitted.check(public).name} can coordinate the run if this machine is lost.")
        return ""

    def _note(self, one: _Member, report: PhaseReport, now_s: float) -> None:
        if report.number >= one.phase:
            one.phase = report.number
            one.statuses = None if report.statuses is None else list(report.statuses)
        if report.forecast is not None:
            numbers = {orders.number: key for key, orders in self._orders.get(report.number, {}).items()}
            idle = [numbers[number] for number in report.forecast.idle if number in numbers]
            self.phases.note_ready(report.number, report.forecast, idle)
        if report.progress is not None:
            self.phases.note_progress(report.progress, now_s)
        if report.statuses is not None:
            self.phases.note_ended(report.number, one.public, report.statuses)

    def leave(
        self,
        public: str,
        instance: str,
        until_s: float = math.inf,
        *,
        for_good: bool = True,
        returns: str = "",
    ) -> None:
        """A machine has left for good, or for some hours: `returns` is when it means to return. Or its line
        is cut, on which it had its last answer at `until_s` (`time.monotonic`): then it is gone unless it
        has called again since, and not `for_good`.
        """
        with self._lock:
            one = self._members.get(public)
            if one is None or one.is_gone or one.offer.instance != instance:
                return
            if one.seen_s <= until_s:
                self._lose(one, for_good=for_good, returns=returns)

    def _lose(
        self, one: _Member, *, for_good: bool = False, returns: str = "", left: str = "has left"
    ) -> None:
        one.is_gone = True
        self.phases.lose(one.public, time.monotonic(), for_good=for_good)
        if self.phases.is_over:
            return
        back = f" It returns at {printable(returns)[:20]}." if returns else ""
        if not self.phases.has_begun:
            del self._members[one.public]
            self._tell(f"{one.name} ({one.address}) {left}.{back} {self._count}")
        elif for_good:
            self._tell(f"{one.name} ({one.address}) {left}.{back}")
        else:
            self._tell(
                f"{one.name} ({one.address}) is gone, or its line to the coordinator is. It may come back."
            )

    def turn(self) -> None:
        """Drop machines that are silent, and decide which machines train."""
        with self._lock:
            now_s = time.monotonic()
            for one in tuple(self._members.values()):
                if one.seen_s + _SEEN_S < now_s and not one.is_gone:
                    self._lose(one)
            measurable = self._measurable
            self.phases.is_measuring = self._lines.is_new([*measurable])
            untimed = any(one.offer.control_s is None for one in measurable.values())
            num_hosts = len({one.address for one in measurable.values()})
            self.phases.is_timing = self._run.by_speed and untimed and num_hosts > 1
            self.phases.turn(now_s)
            for phase in self.phases.phases():
                if phase.number not in self._orders:
                    self._orders[phase.number] = self._orders_of(phase)
            self._keep_phase()
            for sentence in self.phases.said():
                self._tell(sentence)

    def _keep_phase(self) -> None:
        current = self.phases.current
        if current is None:
            return
        state = current.number, self.phases.newest, self.phases.is_switching
        if self._kept == state:
            return
        self._kept = state
        machines = [
            RecordedMachine(public, one.name, one.address, one.offer, orders)
            for public, orders in self._orders[current.number].items()
            if (one := self._members.get(public)) is not None
        ]
        self.keep(self.phases.newest, tuple(machines), self.phases.is_switching)

    def end(self) -> None:
        """From now on every machine is told that the run has ended, and none waits for this one."""
        self.phases.is_over = self._has_closed = True

    @property
    def is_known_to_end(self) -> bool:
        """Whether all machines that are there have been told so."""
        with self._lock:
            return all(one.is_gone or one.knows_end for one in self._members.values())

    def _orders_of(self, phase: RunPhase) -> dict[str, MachineOrders]:
        """The orders of each machine in a new phase. The first one serves its store."""
        members = [self._members[public] for public in phase.machines]
        members.sort(key=lambda one: not one.is_own)
        key, first, found = new_key(), 0, dict[str, MachineOrders]()
        counts, speeds = [self._num_ranks(one, members) for one in members], self._speeds_of(members)
        port, master = members[0].offer.port, members[0].address
        lines = self._lines_between([one.public for one in members])
        for number, (one, count, speed) in enumerate(zip(members, counts, speeds, strict=True)):
            found[one.public] = MachineOrders(
                phase.number, number, first, count, sum(counts), master, port, key, self._run, lines, speed
            )
            lines = ()
            first += count
        return found

    def _lines_between(self, keys: Sequence[str]) -> tuple[LineBetween, ...]:
        """The lines between the machines of a new phase. After a loss they stay as they were for the phase
        that trains, which has made plans with them ahead.
        """
        before = self._orders.get(self._kept[0], {})
        if not set(keys) < before.keys():
            return self._lines.among(keys)
        places = {before[key].number: place for place, key in enumerate(keys)}
        kept = [one for orders in before.values() for one in orders.lines if {*one.ends} <= places.keys()]
        found = (replace(one, first=places[one.first], second=places[one.second]) for one in kept)
        return tuple(found) or self._lines.among(keys)

    def _num_ranks(self, one: _Member, members: Sequence[_Member]) -> int:
        """The processes to start there. If replicas may die, one starts the others."""
        if self._run.can_return:
            return 1
        if self._run.workers is not None:
            return self._run.workers
        return len(one.offer.devices) if self._are_gpus(members) else 1

    def _are_gpus(self, members: Sequence[_Member]) -> bool:
        """Whether the processes of these machines compute on GPUs, if the run file names no workers."""
        return self._run.uses_gpus and all(one.offer.devices for one in members)

    def _speeds_of(self, members: Sequence[_Member]) -> list[float]:
        """The speeds of processors relative to the first one, for plans. Machines at one address are one."""
        of_hosts = {one.address: one.offer.control_s for one in reversed(members)}
        first_s = of_hosts[members[0].address] if self._run.by_speed else None
        found = [relative_speed(of_hosts[one.address], first_s) for one in members]
        if {*found} != {1.0} and not self._are_gpus(members):
            speeds = ", ".join(f"{one.name} {speed:g}" for one, speed in zip(members, found, strict=True))
            self._tell(f"The plan uses the speeds of the machines as they were measured: {speeds}.")
        return found

    def _speed_of(self, one: _Member) -> float | None:
        orders = self._orders.get(one.phase, {}).get(one.public)
        return None if orders is None else orders.speed

    def address_of(self, seen: str) -> str:
        """How the other machines reach the one that calls from that address."""
        is_here = seen == "::1" or seen.startswith("127.")
        return self._host if is_here else seen


class GatheringListener(LineListener):
    """Answers machines that call, until it is closed."""

    def __init__(
        self,
        gathering: Gathering,
        address: Address,
        own: MachineKey,
        facts: MachineFacts,
        *,
        trains: bool = True,
    ) -> None:
        """`trains` is whether this machine has a part in the training, and needs other ports too."""
        self._gathering, self._own, self._facts, self._trains = gathering, own, facts, trains
        self._unknown = threading.BoundedSemaphore(_MOST_UNKNOWN)
        super().__init__(address, "Name another one with --listen.", self._key_of, "bireme gathering")

    def _key_of(self, purpose: bytes) -> str:
        if purpose[_KEY_BYTES:].rstrip(b"\0") != PURPOSE:
            raise BiremeError("The caller does not want to join.")
        return self._own.shared_with(purpose[:_KEY_BYTES].hex())

    def serve(self, caller: Caller) -> None:
        """Answer a machine until its line is cut."""
        made, public, instance, answered_s = caller.socket, caller.purpose[:_KEY_BYTES].hex(), "", 0.0
        with made, suppress(OSError, ValueError, KeyError, TypeError):
            seen, line = made.getpeername()[0], RequestLine(made)
            if not self._let_in(line, public):
                return
            try:
                while True:
                    asked = line.hear()
                    answer_check(line, asked, seen, self._facts, trains=self._trains)
                    if asked["do"] in ("offer", "beat", "leave"):
                        if asked["do"] == "offer":
                            instance = str(dict(asked["offer"])["instance"])
                        line.say(self._answer(public, instance, seen, asked))
                        answered_s = time.monotonic()
            finally:
                self._gathering.leave(public, instance, answered_s, for_good=False)

    def _let_in(self, line: RequestLine, public: str) -> bool:
        """Whether a caller may go on. The first request says with which token; without one it is known."""
        is_known = False
        with suppress(BiremeError):
            is_known = bool(self._gathering.admitted(public))
        if not is_known and not self._unknown.acquire(blocking=False):
            return False
        try:
            asked, error = line.hear(), ""
            try:
                if asked.get("secret"):
                    self._gathering.admit(public, str(asked["secret"]), str(asked["name"]))
                self._gathering.admitted(public)
            except BiremeError as refusal:
                error = str(refusal)
            line.say({"error": error})
            return not error
        finally:
            if not is_known:
                self._unknown.release()

    def _answer(self, public: str, instance: str, seen: str, asked: dict[str, Any]) -> dict[str, Any]:
        gathering = self._gathering
        try:
            match asked["do"]:
                case "offer":
                    gathering.take_offer(public, gathering.address_of(seen), asked["offer"])
                case "beat":
                    return gathering.beat(public, _read(_BEAT, asked))
                case _:
                    gathering.leave(public, instance, returns=str(asked["returns"]))
        except BiremeError as refusal:
            return {"error": str(refusal)}
        return {"error": ""}


def _read(adapter: TypeAdapter[Any], words: object) -> Any:
    try:
        return adapter.validate_python(words)
    except ValidationError:
        raise BiremeError("The request cannot be read. Use one version of Bireme on all machines.") from None
