"""The machines of a run that a coordinator waits for: `bireme coordinate`, the end that listens.

A machine calls with its key, shows a token if it is not in the list yet, checks the line as `bireme doctor`
does, and offers what it has. From then on it asks every second how things are, and says how its launcher is.
Every answer is the state of things, so a request that is lost is of no matter: the machine asks again.

    admit secret, name ──▶ error            beat statuses, lines ──▶ error, orders, stops, is_over
    offer ──▶ error                         leave ──▶ error

Once enough machines are there, each gets its orders: its number, the address and the key of the run's store,
and the run file. With them it starts `bireme train` as torchrun would.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le, Len
from pydantic import TypeAdapter, ValidationError

from bireme.errors import BiremeError
from bireme.machines.admission import AdmissionList, change_admissions, read_admissions
from bireme.machines.keys import MachineKey
from bireme.machines.line import Address, RequestLine, answer_check, opened
from bireme.machines.own_machine import MachineFacts
from bireme.wire.listener import Caller, ListenerThread, new_key

PURPOSE = b"join"
"""A caller gives its public key and this word."""
_KEY_BYTES = 32
_MOST_UNKNOWN = 8
"""Callers that are not admitted yet, at once."""
_SEEN_S = 5.0
"""How long a machine counts as there after its last request."""

_Text = Annotated[str, Len(0, 400)]


@dataclass(frozen=True, slots=True)
class MachineOffer:
    """What a machine has: `instance` is of one start of `bireme join`, `port` is free there for the store of
    the run, `line` the measured latency and bandwidth to the coordinator.
    """

    instance: Annotated[str, Len(1, 64)]
    num_cores: Annotated[int, Ge(1)]
    memory_bytes: Annotated[int, Ge(0)]
    devices: Annotated[tuple[_Text, ...], Len(0, 64)]
    port: Annotated[int, Ge(1), Le(65535)]
    line: _Text = ""

    @property
    def sentence(self) -> str:
        """The offer in words."""
        gpus = f"GPUs: {', '.join(self.devices)}" if self.devices else "no GPU"
        known = f"{self.num_cores} cores, {self.memory_bytes / 2**30:.1f} GiB of memory, {gpus}"
        return f"{known}; {self.line}" if self.line else known


@dataclass(frozen=True, slots=True)
class RunOffer:
    """The run: its file as a text, and what decides how machines take part. `workers` are the processes of
    each machine if the run file gives them, `can_return` is whether a machine may go and come back.
    """

    text: str
    workers: int | None
    uses_gpus: bool
    can_return: bool
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class MachineOrders:
    """What a machine is to start: `num_ranks` processes from rank `first` on, of `size` in the run."""

    number: int
    first: int
    num_ranks: int
    size: int
    master: str
    port: int
    key: str = field(repr=False)
    run: RunOffer


_OFFER, ORDERS = TypeAdapter(MachineOffer), TypeAdapter(MachineOrders)


@dataclass(slots=True)
class _Member:
    """A machine that has made an offer. `statuses` are how its processes ended; None before."""

    public: str
    name: str
    address: str
    offer: MachineOffer
    seen_s: float
    is_own: bool
    orders: MachineOrders | None = None
    statuses: list[int] | None = None
    is_gone: bool = False


class Gathering:
    """The state: who is there and what each is told. All calls are from any thread."""

    def __init__(
        self,
        run: RunOffer,
        own: MachineKey,
        host: str,
        num_machines: tuple[int, int],
        patience_s: float,
        admissions: Path,
        tell: Callable[[str], None],
    ) -> None:
        """`host` is this machine's address for the others. The run begins with the most machines at once, and
        with the least once no other one has come for `patience_s`.
        """
        self._run, self._own, self._host, self._tell = run, own, host, tell
        self._least, self._most = num_machines
        self._patience_s, self._admissions = patience_s, admissions
        self._members: dict[str, _Member] = {}
        self._changed_s = time.monotonic()
        self._lock = threading.RLock()
        self._ended: list[int] = []
        """Statuses of machines whose processes have ended, in that order."""
        self.has_begun = self.has_ended = False
        self.stops = False
        """Whether machines are to stop the run in order."""
        self.documents: list[str] = []
        """What launchers have printed on standard output, if that is one document."""

    @property
    def status(self) -> int:
        """The exit status of the run. A launcher that failed before others had a result does not count."""
        with self._lock:
            ended = self._ended[self._ended.index(0) :] if 0 in self._ended else self._ended
            return max(ended, default=1)

    def machines(self) -> list[dict[str, Any]]:
        """All that have made an offer, for JSON."""
        with self._lock:
            return [
                {"name": one.name, "address": one.address, "statuses": one.statuses, **asdict(one.offer)}
                for one in self._members.values()
            ]

    def admitted(self, public: str) -> str:
        """The name of a machine. Raises a `BiremeError` if it may not take part."""
        return read_admissions(self._admissions).check(public).name

    def admit(self, public: str, secret: str, name: str) -> None:
        """Put a machine into the list. Raises a `BiremeError` that says why not."""

        def change(found: AdmissionList) -> AdmissionList:
            return found.admit(secret, public, _printable(name)[:100] or "unnamed", time.time())

        change_admissions(self._admissions, change)

    def take_offer(self, public: str, address: str, words: object) -> None:
        """A machine is there. Raises a `BiremeError` if it is not needed."""
        name = self.admitted(public)
        offer = _read(_OFFER, words)
        with self._lock:
            before, now_s = self._members.get(public), time.monotonic()
            if self.has_ended:
                raise BiremeError("The run has ended.")
            is_there = before is not None and not before.is_gone and before.statuses is None
            is_same = before is not None and before.offer.instance == offer.instance
            if is_there and not is_same:
                raise BiremeError(
                    f"{name} takes part already, by another bireme join. End that one first; if it was "
                    f"killed, wait {_SEEN_S:g} s."
                )
            if before is not None and before.orders is not None:
                if not is_same and not self._run.can_return:
                    raise BiremeError(
                        'The run has lost this machine, and with sync.mode = "allreduce" it ends. Start it '
                        "again on all machines."
                    )
                if not is_there:
                    self._tell(f"{name} ({address}) is back.")
                before.offer, before.seen_s, before.is_gone = offer, now_s, False
                before.statuses = before.statuses if is_same else None
                return
            if self.has_begun or (before is None and len(self._members) >= self._most):
                raise BiremeError(
                    f"The run has its {len(self._members)} machines, and takes no others. Start it again "
                    "with a larger --machines."
                )
            if not is_there:
                self._changed_s = now_s
            is_own = public == self._own.public
            self._members[public] = _Member(public, name, address, offer, now_s, is_own)
            if not is_there:
                count = f"{len(self._members)} of {self._wanted}"
                self._tell(f"{name} ({address}) is here: {offer.sentence}. {count} machines are here.")

    @property
    def _wanted(self) -> str:
        return f"{self._least} to {self._most}" if self._least < self._most else str(self._most)

    def beat(
        self, public: str, statuses: list[int] | None, lines: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """A machine says how it is, and learns how things are. If it was silent for too long before the run
        began, it is to offer itself again. Raises a `BiremeError` if it is not admitted any more.
        """
        name = self.admitted(public)
        with self._lock:
            one = self._members.get(public)
            if one is None:
                return {"error": "", "is_known": False}
            if one.is_gone:
                self._tell(f"{name} ({one.address}) is back.")
            one.seen_s, one.is_gone = time.monotonic(), False
            for stream, text in lines:
                if stream == "out" and self._run.as_json:
                    self.documents.append(text)
                elif not one.is_own:
                    self._tell(f"{name}: {_printable(text.removeprefix('bireme: '))}")
            if statuses is not None and one.statuses is None:
                one.statuses = statuses
                self._ended.append(max(statuses, default=0))
            orders = None if one.orders is None or self.has_ended else asdict(one.orders)
            is_over = self.has_ended
            return {"error": "", "is_known": True, "orders": orders, "stops": self.stops, "is_over": is_over}

    def leave(self, public: str, instance: str) -> None:
        """A machine is not there any more: it has left, or its line is cut."""
        with self._lock:
            one = self._members.get(public)
            if one is None or one.offer.instance != instance or one.is_gone or one.statuses is not None:
                return
            self._lose(one)

    def _lose(self, one: _Member) -> None:
        self._changed_s = time.monotonic()
        if one.orders is None:
            del self._members[one.public]
            self._tell(
                f"{one.name} ({one.address}) has left. {len(self._members)} of {self._wanted} are here."
            )
            return
        one.is_gone = True
        goes_on = (
            "It may come back." if self._run.can_return else 'With sync.mode = "allreduce" the run ends.'
        )
        self._tell(f"{one.name} ({one.address}) is gone, or its line to the coordinator is. {goes_on}")

    def turn(self) -> None:
        """Drop machines that are silent, begin the run if enough are there, and notice its end."""
        with self._lock:
            now_s = time.monotonic()
            for one in tuple(self._members.values()):
                if one.seen_s + _SEEN_S < now_s and not one.is_gone and one.statuses is None:
                    self._lose(one)
            num = len(self._members)
            is_quiet = now_s - self._changed_s >= self._patience_s
            if not self.has_begun and (num >= self._most or (num >= self._least and is_quiet)):
                self._begin()
            if self.has_begun and not self.has_ended:
                is_running = any(not one.is_gone and one.statuses is None for one in self._members.values())
                # Who has lost its line for a moment may still have the result.
                is_settled = self._ended or not self._run.can_return
                if not is_running and is_settled and now_s - self._changed_s > _SEEN_S * self._has_gone():
                    self.has_ended = True

    def _has_gone(self) -> bool:
        return any(one.is_gone for one in self._members.values())

    def end(self) -> None:
        """From now on every machine is told that the run has ended."""
        self.has_ended = True

    def _begin(self) -> None:
        self.has_begun = True
        members = sorted(self._members.values(), key=lambda one: not one.is_own)  # the first serves the store
        key, first, counts = new_key(), 0, [self._num_ranks(one.offer) for one in members]
        for number, (one, count) in enumerate(zip(members, counts, strict=True)):
            one.orders = MachineOrders(
                number, first, count, sum(counts), members[0].address, members[0].offer.port, key, self._run
            )
            first += count
        names = ", ".join(one.name for one in members)
        self._tell(f"The run begins on {len(members)} machines: {names}.")
        self._tell(
            "A machine may go and come back."
            if self._run.can_return
            else 'All machines must stay to the end (sync.mode = "allreduce"): if one goes, the run ends.'
        )

    def _num_ranks(self, offer: MachineOffer) -> int:
        """The processes to start there. If replicas may die, one starts the others."""
        if self._run.can_return:
            return 1
        has_gpus = all(one.offer.devices for one in self._members.values())
        if self._run.workers is not None:
            return self._run.workers
        return len(offer.devices) if self._run.uses_gpus and has_gpus else 1

    def address_of(self, seen: str) -> str:
        """How the other machines reach the one that calls from that address."""
        is_here = seen == "::1" or seen.startswith("127.")
        return self._host if is_here else seen


class GatheringListener:
    """Answers machines that call, until it is closed."""

    def __init__(self, gathering: Gathering, address: Address, own: MachineKey, facts: MachineFacts) -> None:
        listening = opened(address, "Name another one with --listen.")
        self.port: int = listening.getsockname()[1]
        self._gathering, self._own, self._facts = gathering, own, facts
        self._unknown = threading.BoundedSemaphore(_MOST_UNKNOWN)
        self._thread = ListenerThread(self._key_of, [listening], self._take, "bireme gathering")

    def close(self) -> None:
        """Listen no more."""
        self._thread.close()

    def _key_of(self, purpose: bytes) -> str:
        if purpose[_KEY_BYTES:].rstrip(b"\0") != PURPOSE:
            raise BiremeError("The caller does not want to join.")
        return self._own.shared_with(purpose[:_KEY_BYTES].hex())

    def _take(self, caller: Caller) -> None:
        public = caller.purpose[:_KEY_BYTES].hex()
        threading.Thread(target=self._serve, args=(caller.socket, public), daemon=True).start()

    def _serve(self, made: socket.socket, public: str) -> None:
        instance = ""
        with made, suppress(OSError, ValueError, KeyError, TypeError):
            seen, line = made.getpeername()[0], RequestLine(made)
            if not self._let_in(line, public):
                return
            try:
                while True:
                    asked = line.hear()
                    answer_check(line, asked, seen, self._facts)
                    if asked["do"] in ("offer", "beat", "leave"):
                        if asked["do"] == "offer":
                            instance = str(dict(asked["offer"])["instance"])
                        line.say(self._answer(public, instance, seen, asked))
            finally:
                self._gathering.leave(public, instance)

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
                    statuses = asked["statuses"]
                    lines = [(str(stream), str(text)) for stream, text in asked["lines"]]
                    return gathering.beat(
                        public, None if statuses is None else list(map(int, statuses)), lines
                    )
                case _:
                    gathering.leave(public, instance)
        except BiremeError as refusal:
            return {"error": str(refusal)}
        return {"error": ""}


def _read(adapter: TypeAdapter[Any], words: object) -> Any:
    try:
        return adapter.validate_python(words)
    except ValidationError:
        raise BiremeError("The offer cannot be read. Use one version of Bireme on all machines.") from None


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))
