"""Machines that join a coordinator: who is let in, and one sentence for who is not."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
from pydantic import TypeAdapter, ValidationError

from bireme import __version__
from bireme.cli.coordinate import _counts
from bireme.errors import BiremeError
from bireme.files import SCRATCH, scratch_folder
from bireme.machines import line
from bireme.machines.admission import AdmissionToken, change_admissions, issue_tokens
from bireme.machines.findings import Finding, fails
from bireme.machines.gathering import Gathering, GatheringListener, MachineBeat
from bireme.machines.keys import HOME, MachineKey, known_coordinator, note_coordinator
from bireme.machines.line import DoctorListener, check_between
from bireme.machines.measured_lines import MeasuredLine
from bireme.machines.orders import MachineOffer, MachineOrders, PhaseReport, RunOffer
from bireme.machines.own_machine import MachineFacts
from bireme.machines.phases import PhaseForecast, PhaseProgress
from bireme.train import attendance, joined_processes
from bireme.train.attendance import Attendance, failures
from bireme.train.joined_processes import JoinedProcesses
from bireme.wire.encryption import ALWAYS, VARIABLE
from tests.support.command import bireme
from tests.support.patience import patience_s

if TYPE_CHECKING:
    from bireme.runtime.processes import Process

pytest.importorskip("cryptography", reason="keys of machines need it")

FACTS = MachineFacts.own(__version__)
OWN, BLUE, GREEN, RED = (MachineKey.of(f"{number:064x}") for number in range(1, 5))
RUN = RunOffer("format = 1\n", None, uses_gpus=False, can_return=True, steps=12, patience_s=5.0)

NO_NEWS: dict[str, Any] = {
    "port": 1,
    "phases": [],
    "lines": [],
    "leaves": False,
    "handover": "",
    "model": None,
}


class Meeting:
    """A coordinator without a command, and machines that call it."""

    def __init__(self, folder: Path, run: RunOffer, most: int = 2) -> None:
        self.list = folder / "admitted.json"
        self.told: list[str] = []
        self.gathering = Gathering(run, OWN, "127.0.0.1", (most, most), 0.0, self.list, self.told.append)
        self.listener = GatheringListener(self.gathering, ("127.0.0.1", 0), OWN, FACTS)
        self.address = ("127.0.0.1", self.listener.port)
        self.called: list[Attendance] = []

    def token(self, lifetime_s: float = 60.0) -> str:
        return issue_tokens(self.list, OWN.public, 1, lifetime_s)[0].secret

    def machine(self, key: MachineKey, name: str, *, coordinator: MachineKey = OWN) -> Attendance:
        made = Attendance(self.address, key, coordinator.public, FACTS, name, lambda _: None, lambda *_: None)
        self.called.append(made)
        return made

    def join(self, key: MachineKey, name: str, secret: str = "") -> Attendance:
        """A machine that is admitted and has made its offer."""
        one = self.machine(key, name)
        assert not failures(one.call(secret))
        one._ask("offer", offer=asdict(one.offer))
        return one

    def close(self) -> None:
        self.listener.close()


class Processes:
    """Stand-ins for those of a phase, which end if a test says so."""

    since_s, forecast, is_stopping = 0.0, PhaseForecast(), False
    happened: ClassVar[list[str]] = []

    def __init__(self, orders: MachineOrders, *_: object) -> None:
        self.orders, self.goes = orders, False
        self.ended: list[int] | None = None
        self.happened.append(f"start {orders.phase}")

    def statuses(self) -> list[int] | None:
        return self.ended

    def report(self) -> PhaseReport:
        return PhaseReport(self.orders.phase, None, self.forecast, None)

    def go(self) -> None:
        self.goes = True

    def stop(self, *, switches: bool) -> None:
        self.happened.append("stop")

    def close(self) -> None:
        self.goes = True  # no thread is left waiting
        self.happened.append(f"close {self.orders.phase}")


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)
    monkeypatch.setenv(HOME, str(tmp_path))
    found = Meeting(tmp_path, RUN)
    yield found
    found.close()


@pytest.mark.parametrize("policy", ["", ALWAYS])
def test_two_machines_are_admitted_once_and_given_their_numbers(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv(VARIABLE, policy)
    blue = meeting.join(BLUE, "blue", meeting.token())
    meeting.gathering.turn()
    assert not meeting.gathering.phases.has_begun
    green = meeting.join(GREEN, "green", meeting.token())
    meeting.gathering.turn()
    orders = [one._ask("beat", **NO_NEWS)["phases"][0]["orders"] for one in (blue, green)]
    assert [(one["number"], one["first"], one["num_ranks"], one["size"]) for one in orders] == [
        (0, 0, 1, 2),
        (1, 1, 1, 2),
    ]
    assert len({(one["master"], one["port"], one["key"]) for one in orders}) == 1
    assert orders[0]["port"] == blue.offer.port
    assert "blue (127.0.0.1) is here" in meeting.told[0]
    assert "Mbit/s" in meeting.told[0]
    with pytest.raises(BiremeError, match="The run has its 2 machines, and takes no others"):
        meeting.join(RED, "red", meeting.token())


def test_who_is_not_let_in_reads_one_sentence(meeting: Meeting) -> None:
    used = meeting.token()
    meeting.join(BLUE, "blue", used)
    refused: dict[str, Callable[[], object]] = {
        "The token has admitted another machine": lambda: meeting.join(GREEN, "green", used),
        "has given no such token": lambda: meeting.join(GREEN, "green", "0" * 32),
        "This machine is not admitted": lambda: meeting.join(GREEN, "green"),
        "The token has expired": lambda: meeting.join(GREEN, "green", meeting.token(0.0)),
        "takes part already, by another bireme join": lambda: meeting.join(BLUE, "blue"),
    }
    for sentence, join in refused.items():
        with pytest.raises(BiremeError, match=sentence):
            join()
    other = meeting.machine(GREEN, "green", coordinator=RED)
    (sentence,) = failures(other.call("0" * 32))
    assert "is not the coordinator that gave the token" in sentence


def test_a_revoked_machine_is_let_go_and_may_be_admitted_again(meeting: Meeting) -> None:
    blue = meeting.join(BLUE, "blue", meeting.token())
    change_admissions(meeting.list, lambda found: found.marked("blue", is_revoked=True))
    with pytest.raises(BiremeError, match=f"key of blue has been revoked.*--admit {BLUE.public[:16]}"):
        blue._ask("beat", **NO_NEWS)
    change_admissions(meeting.list, lambda found: found.marked("blue", is_revoked=False))
    assert not blue._ask("beat", **NO_NEWS)["error"]


def test_a_machine_that_went_comes_back_to_its_phase_unless_that_needs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)
    for can_return in (True, False):
        folder = tmp_path / str(can_return)
        folder.mkdir()
        meeting = Meeting(folder, replace(RUN, can_return=can_return))
        blue, _ = (
            meeting.join(key, name, meeting.token()) for key, name in ((BLUE, "blue"), (GREEN, "green"))
        )
        meeting.gathering.turn()
        meeting.gathering.phases.note_ready(1, PhaseForecast())
        before = blue._ask("beat", **NO_NEWS)["phases"]
        assert blue._line is not None
        blue._line.socket.close()
        ends_s = time.monotonic() + patience_s()
        while not any("blue (127.0.0.1) is gone" in one for one in meeting.told):
            assert time.monotonic() < ends_s, meeting.told
            time.sleep(0.01)
        back = meeting.join(BLUE, "blue")
        assert back._ask("beat", **NO_NEWS)["phases"] == (before if can_return else [])
        assert meeting.told[-1] == "blue (127.0.0.1) is back."
        meeting.close()


def test_the_status_is_that_of_who_had_the_result(meeting: Meeting) -> None:
    one, other = (
        meeting.join(key, name, meeting.token()) for key, name in ((BLUE, "blue"), (GREEN, "green"))
    )
    meeting.gathering.turn()

    def ended(status: int, *lines: list[object]) -> dict[str, Any]:
        report = PhaseReport(1, (status,), forecast=None, progress=None)
        return NO_NEWS | {"phases": [asdict(report)], "lines": lines}

    one._ask("beat", **ended(1, [1, "err", "bireme: it failed"]))
    assert meeting.told[-1] == "blue: it failed"
    meeting.gathering.turn()
    assert not meeting.gathering.phases.is_over
    assert other._ask("beat", **ended(0))["is_over"]  # at once
    assert (meeting.gathering.phases.is_over, meeting.gathering.phases.status) == (True, 0)
    with pytest.raises(BiremeError, match="The run has ended"):
        meeting.join(GREEN, "green")
    assert not meeting.gathering.is_known_to_end
    assert one._ask("beat", **NO_NEWS)["is_over"]
    assert meeting.gathering.is_known_to_end


def test_mistakes_of_who_types_end_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    where, token = f"127.0.0.1:{port}", str(AdmissionToken(OWN.public, "0" * 32))
    mistakes = {
        ("join", where): "This machine has not joined a coordinator at",
        (
            "join",
            where,
            "--token",
            token,
        ): f"nothing listens at its port {port}, or a firewall rejects calls. Start",
        ("join", where, "--token", token[:-1]): "That is not a whole token",
        ("join", "here"): "is not of the form HOST:PORT",
        ("coordinate", "--machines", "3..2"): "a range that rises",
        ("coordinate", "--machines", "1"): "Use bireme train",
        ("coordinate", "--wait", "3"): "--wait is for a range",
        ("coordinate", "--set", "sync.mode=qourum"): "qourum",
        ("coordinate", "--revoke", "blue"): "There is no machine or token 'blue'",
        ("coordinate", "--admit", "blue", "--revoke", "blue"): "not both",
    }
    for words, sentence in mistakes.items():
        found = bireme(capsys, *words)
        assert (found.status, sentence in found.err, found.err.count("\n")) == (2, True, 1), found


def test_what_is_no_coordinator_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(line, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError), listening.accept()[0] as made:
                made.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                made.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        address = listening.getsockname()
        one = Attendance(address, BLUE, OWN.public, FACTS, "blue", lambda _: None, lambda *_: None)
        (sentence,) = failures(one.call("0" * 32))
    assert "something else than Bireme listens at" in sentence


def test_a_coordinator_is_known_once_it_has_admitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    note_coordinator(("10.0.0.1", 29600), OWN.public)
    assert known_coordinator(("10.0.0.1", 29600)) == OWN.public
    assert _counts("2..4") == (2, 4)


def test_a_machine_that_was_silent_before_the_run_began_offers_itself_again(meeting: Meeting) -> None:
    """It was dropped, and ended with a mistake of who typed when it was heard again."""
    blue = meeting.join(BLUE, "blue", meeting.token())
    meeting.gathering.leave(BLUE.public, blue.offer.instance, time.monotonic(), for_good=False)
    assert meeting.gathering.machines() == []
    assert blue._beat() is None
    assert [one["name"] for one in meeting.gathering.machines()] == ["blue"]
    answer = blue._beat()
    assert answer is not None
    assert answer["is_known"]


def test_what_processes_of_a_phase_say_that_was_given_up_is_not_shown(meeting: Meeting) -> None:
    """Its processes end in any order, and each said that it had lost another one."""
    blue = meeting.join(BLUE, "blue", meeting.token())
    meeting.gathering.phases.unused.add(2)
    blue._ask("beat", **{**NO_NEWS, "lines": [[1, "err", "it trains"], [2, "err", "it lost another rank"]]})
    assert "blue: it trains" in meeting.told
    assert not any("lost another rank" in one for one in meeting.told)


def test_a_machine_whose_line_breaks_while_it_is_checked_calls_again(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [TimeoutError("nothing has come for 5 s"), ConnectionResetError("the connection was closed")]

    def check(*words: object) -> Iterator[Finding]:
        if broken:
            raise broken.pop()
        yield from check_between(*words)  # type: ignore[arg-type]  # as they were given

    monkeypatch.setattr(attendance, "check_between", check)
    monkeypatch.setattr(attendance, "_AGAIN_S", 0.01)
    said: list[str] = []
    blue = Attendance(meeting.address, BLUE, OWN.public, FACTS, "blue", said.append, lambda *_: None)
    assert not failures(blue.call(meeting.token()))
    assert [text.partition(":")[0] for text in said] == ["The line to the coordinator broke"] * 2
    assert said[1].endswith("nothing has come for 5 s. This machine calls again.")


def test_who_joins_with_another_torch_or_python_reads_that_results_may_differ(meeting: Meeting) -> None:
    """Only `bireme doctor` said it."""
    said: list[str] = []
    facts = replace(FACTS, torch="2.0.1", python="3.10.4")
    blue = Attendance(meeting.address, BLUE, OWN.public, facts, "blue", said.append, lambda *_: None)
    assert not failures(blue.call(meeting.token()))
    assert [text.partition(" here, ")[0] for text in said] == [
        "versions: torch 2.0.1",
        "versions: Python 3.10.4",
    ]
    assert said[0].endswith("Results may differ in the last bits; use one version if in doubt.")


def test_a_machine_that_was_admitted_is_known_though_a_check_of_its_line_fails(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its token it read, the next time, that it had not joined before; revoked or not."""
    monkeypatch.setattr(attendance, "check_between", lambda *_: iter([fails("ports", "one is closed.", "")]))
    blue = meeting.machine(BLUE, "blue")
    assert failures(blue.call(meeting.token()))
    assert known_coordinator(meeting.address) == OWN.public
    change_admissions(meeting.list, lambda found: found.marked("blue", is_revoked=True))
    with pytest.raises(BiremeError, match="The key of blue has been revoked"):
        meeting.machine(BLUE, "blue").call()


def test_the_reason_why_a_port_cannot_be_opened_is_one_sentence(meeting: Meeting) -> None:
    """It ended with Python's words about an address."""
    with pytest.raises(BiremeError, match=r"here: Address already in use\. Name another one"):
        DoctorListener(meeting.address, "token", FACTS, lambda _: None)


def test_a_launcher_that_is_killed_is_started_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of a phase that was only prepared trained at once, beside the phase before."""
    monkeypatch.setattr(attendance, "JoinedProcesses", Processes)
    blue = Attendance(("127.0.0.1", 1), BLUE, OWN.public, FACTS, "blue", lambda _: None, lambda *_: None)
    for phase, goes in ((1, True), (2, False)):
        blue._start(MachineOrders(phase, 0, 0, 1, 1, "127.0.0.1", 4000, "the key", RUN))
        found: Any = blue._phases[phase]
        found.goes, found.ended = goes, [-9]
    assert blue._restart_killed()
    assert [(one.statuses(), one.goes) for one in blue._phases.values()] == [(None, True), (None, False)]


@pytest.mark.parametrize("ended", [None, [1]])
def test_the_training_goes_on_without_its_coordinator_only_if_processes_do(
    monkeypatch: pytest.MonkeyPatch, ended: list[int] | None
) -> None:
    """It was said after the processes had lost those of the coordinator's machine, and had ended."""
    monkeypatch.setattr(attendance, "JoinedProcesses", Processes)
    said = list[str]()
    blue = Attendance(("127.0.0.1", 1), BLUE, OWN.public, FACTS, "blue", said.append, lambda *_: None)
    blue._start(MachineOrders(1, 0, 0, 1, 1, "127.0.0.1", 4000, "the key", RUN))
    found: Any = blue._phases[1]
    found.goes, found.ended = True, ended
    monkeypatch.setattr(blue, "_call_again", lambda: (_ for _ in ()).throw(ConnectionResetError))
    assert blue._beat() is None
    assert ["goes on" in text for text in said] == [ended is None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_other_than_ctrl_c_has_a_machine_leave_and_stops_no_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """SIGTERM to one machine stopped the run on all."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    blue = Attendance(("127.0.0.1", 1), BLUE, OWN.public, FACTS, "blue", lambda _: None, lambda *_: None)
    blue.listen()
    handlers[number](number, None)
    assert (blue._is_leaving, blue._num_interrupts) == (True, 0)
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert blue._num_interrupts == 1


@pytest.mark.parametrize(
    ("interrupts", "trained", "sentence"),
    [
        (1, set(), "This machine leaves. It was interrupted before the run trained here."),
        (1, {1}, "This machine leaves."),
        (0, set(), "The run was stopped before it trained."),
    ],
)
def test_a_machine_says_why_it_ends_if_the_run_is_stopped_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, interrupts: int, trained: set[int], sentence: str
) -> None:
    """It ended with status 130 and no word."""
    monkeypatch.setattr(attendance, "JoinedProcesses", Processes)
    said: list[str] = []
    blue = Attendance(("127.0.0.1", 1), BLUE, OWN.public, FACTS, "blue", said.append, lambda *_: None)
    blue._start(MachineOrders(1, 0, 0, 1, 1, "127.0.0.1", 4000, "the key", RUN))
    blue._trained |= trained
    found: Any = blue._phases[1]
    found.goes, found.ended = True, [-signal.SIGTERM]
    over = {"is_over": True, "stays": False, "newest": 1, "status": 130, "phases": []}
    monkeypatch.setattr(blue, "_beat", lambda: over)
    monkeypatch.setattr(blue, "_restart_killed", lambda: True)
    for _ in range(interrupts):
        blue.interrupt(is_urgent=True)
    assert blue._run() == 130
    assert said == [sentence]


def test_a_machine_that_leaves_while_its_line_is_measured_is_not_taken_for_a_bad_line(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 0.01)
    monkeypatch.setattr(attendance, "check_line", lambda *_: iter([fails("line", "it broke.", "")]))
    said: list[str] = []
    blue = meeting.join(BLUE, "blue", meeting.token())
    blue._tell = said.append
    assert blue._beat() is not None
    for public in (BLUE.public, GREEN.public):  # the one is there, the other is not
        blue._begin_measuring("the other", "127.0.0.1", 1, public)
        assert blue._measuring is not None
        blue._measuring.join(patience_s())
    assert said == [
        "The line to the other fails a check: line: it broke.",
        "the other has left before the line to it was measured.",
    ]


def test_processes_that_still_start_are_stopped_without_waiting_for_them() -> None:
    """After Ctrl-C each `bireme join` waited for its processes, was silent for 5 s, and counted as gone."""
    opened, sent = threading.Event(), list[int]()
    processes = JoinedProcesses.__new__(JoinedProcesses)
    processes._starting, processes._switches = threading.Thread(target=opened.wait), False
    processes._processes = [cast("Process", SimpleNamespace(send_signal=sent.append))]
    processes.is_stopping = False
    processes._starting.start()
    processes.stop(switches=False)
    assert not sent
    opened.set()
    ends_s = time.monotonic() + patience_s()
    while not sent:
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    assert sent == [signal.SIGTERM]


def test_folders_of_processes_that_were_killed_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Ctrl-C while a run was planned left two of them in /tmp."""
    left = list[Path]()

    def killed(_name: str, _function: object, variables: dict[str, str], *_: object, **__: object) -> None:
        monkeypatch.setenv(SCRATCH, variables[SCRATCH])
        folder = scratch_folder()
        left.append(Path(folder.name))
        folder._finalizer.detach()  # type: ignore[attr-defined]  # a process that is killed removes nothing
        raise OSError

    monkeypatch.setattr(joined_processes, "start_process", killed)
    run = replace(RUN, text='format = 1\n[log]\nname = "run"\nfolder = "runs"\n')
    orders = MachineOrders(1, 0, 0, 1, 1, "127.0.0.1", 4000, "the key", run)
    made = JoinedProcesses(orders, lambda *_: None, cast("Any", None), lambda: None, lambda: None)
    made._starting.join()
    assert left[0].is_dir()
    made.close()
    assert not left[0].exists()


def test_machines_measure_the_lines_between_them_before_the_run_begins(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has no part in the training. The first machine, which plans, gets the line."""
    monkeypatch.setattr(attendance, "JoinedProcesses", Processes)
    monkeypatch.setattr(attendance, "_BEAT_S", 0.01)
    there = [meeting.machine(key, name) for key, name in ((BLUE, "blue"), (GREEN, "green"))]
    threads = [threading.Thread(target=one.run) for one in there]
    for one, thread in zip(there, threads, strict=True):
        assert not failures(one.call(meeting.token()))
        thread.start()
    ends_s = time.monotonic() + patience_s()
    while any(one.orders is None for one in there):
        assert time.monotonic() < ends_s, meeting.told
        meeting.gathering.turn()
        time.sleep(0.01)
    for one in (*there, *there):
        one.interrupt(is_urgent=True)
    for thread in threads:
        thread.join(patience_s())
    first, second = sorted(one.orders.lines for one in there if one.orders is not None)
    assert (first, [(one.first, one.second) for one in second]) == ((), [(0, 1)])
    assert second[0].line.out_bytes_per_s > 1e5


def test_the_first_figure_of_a_host_gives_its_speed_for_the_whole_run(meeting: Meeting) -> None:
    """Also if its `bireme join` is started again. The third machine is on the host of the first."""
    run = replace(RUN, by_speed=True)
    gathering = Gathering(run, OWN, "10.0.0.1", (3, 3), 0.0, meeting.list, meeting.told.append)
    keys = [one.public for one in (BLUE, GREEN, RED)]

    def offer(key: str, address: str, instance: str) -> None:
        gathering.take_offer(key, address, asdict(MachineOffer(instance, 1, 1, (), 1, line_port=1)))

    def beat(key: str, control_s: object) -> dict[str, Any]:
        told = TypeAdapter(MachineBeat).validate_python(NO_NEWS | {"control_s": control_s})
        return gathering.beat(key, told)

    for key, address in zip(keys, ("10.0.0.1", "10.0.0.2", "10.0.0.1"), strict=True):
        gathering.admit(key, issue_tokens(meeting.list, OWN.public, 1, 60.0)[0].secret, key[:4])
        offer(key, address, "once")
    for one, two in combinations(keys, 2):
        gathering._lines.note(one, two, None)
    gathering.turn()
    assert gathering.phases.is_timing
    assert [beat(key, None)["times_control"] for key in keys] == [True] * 3
    for key, control_s in zip([*keys, keys[1]], (0.001, 0.003, 0.009, 0.001), strict=True):
        answer = beat(key, control_s)
        assert (answer["phases"], answer["times_control"]) == ([], False)
    gathering.turn()
    gathering.phases.note_ready(1, PhaseForecast(survives=True))
    gathering.leave(keys[1], "once", for_good=False)
    offer(keys[1], "10.0.0.2", "again")
    orders = [beat(key, 0.5)["phases"][0]["orders"] for key in keys]
    assert [one["speed"] for one in orders] == [1.0, 0.32, 1.0]
    assert [one["control_s"] for one in gathering.machines()] == [0.001, 0.003, 0.009]
    names = ", ".join(f"{key[:4]} {one}" for key, one in zip(keys, ("1", "0.32", "1"), strict=True))
    assert f"The plan uses the speeds of the machines as they were measured: {names}." in meeting.told
    for lie in (-1.0, float("inf"), float("nan"), "fast"):
        with pytest.raises(ValidationError):
            beat(keys[1], lie)


def test_after_a_loss_the_lines_are_those_with_which_plans_were_made_ahead(
    meeting: Meeting, tmp_path: Path
) -> None:
    """They were measured again while the first phase trained, so no plan that it had made was found."""
    gathering = Gathering(
        replace(RUN, can_return=False), OWN, "127.0.0.1", (3, 3), 0.0, meeting.list, meeting.told.append
    )
    keys = [one.public for one in (BLUE, GREEN, RED)]
    for key in keys:
        token = issue_tokens(meeting.list, OWN.public, 1, 60.0)[0].secret
        gathering.admit(key, token, key[:4])
        gathering.take_offer(key, "127.0.0.1", asdict(MachineOffer(key[:8], 1, 1, (), 1)))

    def measure(speed: float) -> None:
        for one, two in combinations(keys, 2):
            gathering._lines.note(one, two, MeasuredLine(speed, speed, 0.001))

    measure(1e6)
    gathering.turn()
    measure(2e6)
    gathering.phases.note_progress(PhaseProgress(1, 0, 1, 1.0), 0.0)
    gathering.leave(keys[0], keys[0][:8], for_good=False)
    gathering.turn()
    (orders,) = (one.lines for one in gathering._orders[2].values() if one.lines)
    assert [(one.ends, one.line.out_bytes_per_s) for one in orders] == [((0, 1), 1e6)]


def test_a_list_that_cannot_be_read_any_more_puts_no_machine_out(meeting: Meeting) -> None:
    """A mistake in it ended the run on all machines."""
    blue = meeting.join(BLUE, "blue", meeting.token())
    whole = meeting.list.read_text()
    meeting.list.write_text(whole[:-9])
    for _ in range(2):
        assert blue._ask("beat", **NO_NEWS)["is_known"]
    (sentence,) = (one for one in meeting.told if "the list counts as it was" in one)
    assert str(meeting.list) in sentence
    meeting.list.write_text(whole)
    change_admissions(meeting.list, lambda found: found.marked("blue", is_revoked=True))
    with pytest.raises(BiremeError, match="The key of blue has been revoked"):
        blue._ask("beat", **NO_NEWS)
    assert "blue (127.0.0.1) takes part no more: its key was revoked. 0 of" in meeting.told[-1]


def test_a_line_that_breaks_late_does_not_put_out_a_machine_that_has_called_again(meeting: Meeting) -> None:
    blue = meeting.join(BLUE, "blue", meeting.token())
    before, blue._line = blue._line, None
    assert before is not None
    assert blue._beat() is not None
    before.socket.close()
    time.sleep(0.2)
    assert len(meeting.gathering.machines()) == 1
    assert blue._line is not None
    blue._line.socket.close()
    ends_s = time.monotonic() + patience_s()
    while meeting.gathering.machines():
        assert time.monotonic() < ends_s, meeting.told
        time.sleep(0.01)
