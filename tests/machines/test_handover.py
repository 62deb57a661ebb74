"""What a deputy gets, by which it coordinates a run in the place of a coordinator that is lost."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.machines import line
from bireme.machines.admission import AdmissionList, admissions_path, read_admissions
from bireme.machines.handover import (
    Handover,
    digest_of_packed,
    forget_handover,
    handed_record,
    keep_handover,
    taken_over,
)
from bireme.machines.keys import FILE, HOME, known_coordinator, note_coordinator, own_key
from bireme.machines.orders import read_record_at

pytest.importorskip("cryptography", reason="keys of machines need it")

from tests.machines.test_gathering import BLUE, GREEN, NO_NEWS, OWN, RED, RUN, Meeting
from tests.machines.test_orders import RECORD
from tests.support.command import bireme

LIST = AdmissionList().with_token(0.0, 60.0)[0]
HANDED = Handover("run", OWN.private, (2, 3), LIST, RECORD)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    found = Meeting(tmp_path, RUN)
    yield found
    found.close()


def test_a_deputy_has_the_key_the_list_and_the_record_for_its_user_alone(tmp_path: Path) -> None:
    keep_handover("run", HANDED.packed())
    found, home = taken_over("run")
    assert found == HANDED
    assert own_key(home / FILE) == OWN
    assert read_admissions(admissions_path(home)) == LIST
    assert read_record_at(handed_record(home)) == RECORD
    assert not [
        one
        for one in (tmp_path / "deputy").rglob("*")
        if one.is_file() and "admitted" not in one.name and one.stat().st_mode & 0o077
    ]
    assert (tmp_path / "deputy").stat().st_mode & 0o777 == 0o700


def test_a_take_over_goes_on_from_what_the_one_before_has_kept() -> None:
    """Until the coordinator hands over anew."""
    keep_handover("run", HANDED.packed())
    _, home = taken_over("run")
    handed_record(home).write_text("newer")
    assert handed_record(taken_over("run")[1]).read_text() == "newer"
    keep_handover("run", HANDED.packed())
    assert read_record_at(handed_record(taken_over("run")[1])) == RECORD
    forget_handover("run")
    assert not home.exists()


def test_the_folder_of_a_take_over_stays_while_its_process_lives() -> None:
    """`bireme join` there removed the list, and at the end of a run the other machines were refused."""
    keep_handover("run", HANDED.packed())
    code = "from bireme.machines.handover import taken_over; print(taken_over('run')[1]); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as successor:
        assert successor.stdout is not None
        home = Path(successor.stdout.readline().strip())
        with pytest.raises(BiremeError, match="Another bireme coordinate"):
            taken_over("run")
        keep_handover("run", replace(HANDED, admitted=AdmissionList()).packed())
        assert read_admissions(admissions_path(home)) == LIST
        forget_handover("run")
        assert read_admissions(admissions_path(home)) == LIST
        successor.communicate("\n")
    forget_handover("run")
    assert not home.exists()


@pytest.mark.parametrize("name", ["other", "../run", ""])
def test_who_is_no_deputy_of_a_run_reads_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    keep_handover("run", HANDED.packed())
    with pytest.raises(
        BiremeError, match=r"no deputy for a run 'other', only for run|is not the name of a run"
    ):
        taken_over(name)
    if name:
        result = bireme(capsys, "coordinate", "--take-over", name)
        assert (result.status, result.err.count("\n")) == (2, 1)
    assert bireme(capsys, "coordinate", "--take-over", "run", "--set", "log.name=run").status == 2


def test_a_damaged_handover_is_refused() -> None:
    with pytest.raises(BiremeError, match="cannot be kept"):
        keep_handover("run", "no text")


def test_the_deputy_alone_is_handed_what_it_lacks(meeting: Meeting) -> None:
    """A name that two machines have names none, and what a deputy has is not sent again."""
    meeting.gathering.deputies = ("blue",)
    meeting.gathering.handover = lambda admitted: replace(HANDED, admitted=admitted).packed()
    blue, green = (
        meeting.join(key, name, meeting.token()) for key, name in ((BLUE, "blue"), (GREEN, "green"))
    )
    assert blue._ask("beat", **NO_NEWS)["handover"]
    assert not green._ask("beat", **NO_NEWS)["handover"]
    text = blue._ask("beat", **NO_NEWS)["handover"]
    has_it = NO_NEWS | {"handover": digest_of_packed(text)}
    assert not any(blue._ask("beat", **has_it)["handover"] for _ in range(2))
    assert meeting.told.count("blue can coordinate the run if this machine is lost.") == 1
    meeting.machine(RED, "blue").call(meeting.token())
    assert not blue._ask("beat", **NO_NEWS)["handover"]
    meeting.gathering.deputies = (BLUE.public[:8],)
    text = blue._ask("beat", **NO_NEWS)["handover"]
    keep_handover("run", text)
    assert [one.name for one in taken_over("run")[0].admitted.machines] == ["blue", "green", "blue"]


def test_a_machine_that_knows_one_coordinator_tries_its_key_at_a_new_address() -> None:
    note_coordinator(("10.0.0.1", 29600), OWN.public)
    assert known_coordinator(("10.0.0.2", 29600)) == OWN.public
    note_coordinator(("10.0.0.3", 29600), RED.public)
    with pytest.raises(BiremeError, match=r"has not joined a coordinator at 10\.0\.0\.2:29600"):
        known_coordinator(("10.0.0.2", 29600))


def test_a_machine_that_serves_the_model_waits_until_the_coordinator_has_it(meeting: Meeting) -> None:
    blue, green = (
        meeting.join(key, name, meeting.token()) for key, name in ((BLUE, "blue"), (GREEN, "green"))
    )
    served = {"address": "127.0.0.1 1 none", "key": "a key"}
    assert blue._ask("beat", **NO_NEWS | {"model": served})["stays"]
    assert not green._ask("beat", **NO_NEWS)["stays"]
    assert meeting.gathering.models == {"blue": served}
    meeting.gathering.end()
    assert not blue._ask("beat", **NO_NEWS | {"model": served})["stays"]
