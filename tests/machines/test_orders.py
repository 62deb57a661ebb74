"""A coordinator that is started again: its record is checked before it is believed, and machines find it."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.machines import line
from bireme.machines.gathering import Gathering, GatheringListener
from bireme.machines.keys import HOME, known_coordinator
from bireme.machines.orders import (
    MachineOffer,
    MachineOrders,
    RecordedMachine,
    RunOffer,
    RunRecord,
    read_record,
    record_path,
    relative_speed,
    write_record,
)
from bireme.train import attendance

pytest.importorskip("cryptography", reason="keys of machines need it")

from tests.machines.test_gathering import BLUE, FACTS, GREEN, NO_NEWS, OWN, RUN, Meeting
from tests.support.patience import patience_s

ORDERS = MachineOrders(2, 0, 0, 1, 2, "10.0.0.1", 4000, "the key", RUN)
OFFER = MachineOffer("once", 4, 1 << 30, ("a GPU",), 4000, control_s=0.001)
MACHINES = (
    RecordedMachine(OWN.public, "red", "10.0.0.1", OFFER, ORDERS),
    RecordedMachine(BLUE.public, "blue", "10.0.0.2", OFFER, replace(ORDERS, number=1, first=1)),
)
RECORD = RunRecord(3, 29600, MACHINES)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    return record_path(tmp_path / "runs" / "run")


def test_a_record_is_read_back_and_is_for_its_user_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_record(path, RUN) is None
    modes = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(os.fstat(file).st_mode & 0o777))
    write_record(path, RECORD)
    assert (modes[0], path.stat().st_mode & 0o777) == (0o600, 0o600)  # of the draft too
    assert read_record(path, RUN) == RECORD
    with pytest.raises(BiremeError, match="goes on with other settings"):
        read_record(path, replace(RUN, text="format = 1\n\n"))
    path.chmod(0o644)
    with pytest.raises(BiremeError, match="chmod 600"):
        read_record(path, RUN)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("machines", 1, "public"), OWN.public, "listed twice"),
        (("machines", 1, "orders", "number"), 2, "do not count from 0"),
        (("machines", 1, "orders", "num_ranks"), 2, "do not follow each other"),
        (("machines", 1, "orders", "key"), "another", "more than one run"),
        (("machines", 0, "offer", "num_cores"), 0, "num_cores"),
        (("machines", 0, "offer", "control_s"), -0.5, "control_s"),
        (("machines", 0, "orders", "speed"), 0.001, "speed"),
        (("machines", 0, "public"), "no key", "public"),
        (("port",), 70000, "port"),
        (("newest",), 1, "train in phase 2, and the newest one is 1"),
        (("format",), 2, "format"),
    ],
)
def test_a_record_that_contradicts_itself_is_not_believed(
    path: Path, place: tuple[str | int, ...], value: object, sentence: str
) -> None:
    write_record(path, RECORD)
    found = within = json.loads(path.read_text())
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    path.write_text(json.dumps(found))
    with pytest.raises(BiremeError, match=rf"(?s){sentence}.*remove .*{path.name}"):
        read_record(path, RUN)


@pytest.mark.parametrize(
    ("control_s", "speed"),
    [
        (None, 1.0),
        (0.0, 1.0),
        (0.8, 1.0),
        (1.25, 1.0),
        (1.3, 0.75),
        (3.0, 0.32),
        (3.1, 0.32),
        (0.5, 1.9),
        (1e3, 0.01),
        (1e-9, 97.0),
    ],
)
def test_speeds_have_steps_and_bounds_and_a_small_difference_is_none(
    control_s: float | None, speed: float
) -> None:
    assert relative_speed(control_s, 1.0) == speed
    assert relative_speed(1.0, None) == 1.0


def begun(folder: Path) -> tuple[Meeting, list[RecordedMachine]]:
    meeting, kept = Meeting(folder, RUN), list[RecordedMachine]()
    meeting.gathering.keep = lambda _, machines, __: kept.extend(machines)
    for key, name in ((BLUE, "blue"), (GREEN, "green")):
        meeting.join(key, name, meeting.token())
    meeting.gathering.turn()
    return meeting, kept


def taken_up(meeting: Meeting, kept: list[RecordedMachine], run: RunOffer = RUN) -> Gathering:
    made = Gathering(run, OWN, "127.0.0.1", (2, 2), 0.0, meeting.list, meeting.told.append)
    made.take_up(2, kept)
    return made


def test_machines_find_their_coordinator_at_its_address_and_at_the_others_that_they_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)
    monkeypatch.setattr(attendance, "_AGAIN_S", 0.0)
    meeting, kept = begun(tmp_path)
    blue = meeting.called[0]
    answer = blue._beat()
    assert answer is not None
    blue._elsewhere = ("127.0.0.3", "127.0.0.2")
    phases, port = answer["phases"], meeting.address[1]
    for count, place in enumerate(("127.0.0.1", "127.0.0.2"), 1):
        meeting.listener.close()
        assert blue._line is not None
        blue._line.socket.close()
        assert blue._beat() is None
        made = taken_up(meeting, kept)
        made.turn()
        assert not made.phases.is_over
        meeting.listener = GatheringListener(made, (place, port), OWN, FACTS)
        ends_s = time.monotonic() + patience_s()
        while (answer := blue._beat()) is None:
            assert time.monotonic() < ends_s
        assert answer["phases"] == phases
        # The coordinator that was closed may still be telling that its line has ended.
        assert meeting.told.count("blue (127.0.0.1) is back.") == count
        blue._elsewhere = ("127.0.0.3", "127.0.0.2")
    assert known_coordinator(("127.0.0.2", port)) == OWN.public
    assert blue._address == ("127.0.0.2", port)
    meeting.close()


def test_a_phase_ends_if_none_of_its_machines_calls_the_coordinator_that_takes_it_up(tmp_path: Path) -> None:
    """A machine that comes later trains in the next phase, from the newest state."""
    meeting, kept = begun(tmp_path)
    meeting.close()
    made = taken_up(meeting, kept, replace(RUN, patience_s=60.0))
    made.turn()
    assert made.phases.current is not None
    made = taken_up(meeting, kept, replace(RUN, patience_s=0.0))
    made.turn()
    assert (made.phases.is_over, made.phases.current) == (False, None)
    assert meeting.told[-1] == "Phase 1 has ended, and the run goes on from its newest state."
    meeting.listener = GatheringListener(made, ("127.0.0.1", 0), OWN, FACTS)
    meeting.address = ("127.0.0.1", meeting.listener.port)
    blue = meeting.join(BLUE, "blue")
    made.turn()
    assert blue._ask("beat", **NO_NEWS)["phases"][0]["orders"]["phase"] == 3
    meeting.close()


def test_a_switch_is_recorded_before_a_machine_hears_of_it_and_is_taken_up(tmp_path: Path) -> None:
    """The coordinator that takes the run up stops the machines that have not heard, with the same words."""
    meeting, kept = begun(tmp_path)
    recorded = list[bool]()
    meeting.gathering.keep = lambda _, __, switches: recorded.append(switches)
    phase = meeting.gathering.phases.current
    assert phase is not None
    phase.end = "stop"
    meeting.gathering.turn()
    assert recorded == [True]
    told = meeting.called[0]._ask("beat", **NO_NEWS)["phases"][0]
    meeting.close()
    made = Gathering(RUN, OWN, "127.0.0.1", (2, 2), 0.0, meeting.list, meeting.told.append)
    made.take_up(2, kept, switches=True)
    meeting.listener = GatheringListener(made, ("127.0.0.1", 0), OWN, FACTS)
    meeting.address = ("127.0.0.1", meeting.listener.port)
    blue = meeting.join(BLUE, "blue")
    meeting.join(GREEN, "green")
    assert [(one["end"], one["switches"]) for one in (told, *blue._ask("beat", **NO_NEWS)["phases"])] == [
        ("stop", True)
    ] * 2
    meeting.close()
