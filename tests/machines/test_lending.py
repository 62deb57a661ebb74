"""What a machine lends: hours of the day, devices, memory, a rate; and the service that offers it."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from shutil import which

import pytest

from bireme.cluster.machine import MEMORY_VARIABLE, available_bytes, memory_bytes
from bireme.devices import VISIBLE
from bireme.errors import BiremeError
from bireme.machines import line
from bireme.machines.admission import AdmissionToken
from bireme.machines.keys import HOME
from bireme.machines.lending import DailyHours, service_unit, set_limits
from bireme.machines.orders import SPEED
from bireme.train import attendance
from bireme.train.attendance import Attendance
from bireme.train.machines import server_here
from bireme.wire import listener
from bireme.wire.listener import RATE_VARIABLE, authenticated
from tests.support.command import bireme
from tests.support.patience import patience_s
from tests.wire.test_listener import KEY, House


@pytest.mark.parametrize(
    ("text", "now", "wait_s"),
    [
        ("20-8", (20, 0, 0), 0),
        ("20-8", (7, 59, 59), 0),
        ("20-8", (8, 0, 0), 12 * 3600),
        ("20-8", (19, 59, 59), 1),
        ("8-20", (7, 0, 0), 3600),
        ("8-20", (20, 0, 0), 12 * 3600),
        ("20:30-24", (23, 59, 59), 0),
        ("20:30-24", (0, 0, 0), 20.5 * 3600),
        ("0-6:15", (6, 14, 0), 0),
    ],
)
def test_hours_may_pass_midnight(text: str, now: tuple[int, int, int], wait_s: float) -> None:
    assert DailyHours.parse(text).wait_s(datetime(2026, 11, 28, *now)) == wait_s


@pytest.mark.parametrize("text", ["", "20", "20-25", "20:60-8", "24:30-8", "8-8", "0-24", "a-b", "20-8-9"])
def test_what_is_no_hours_is_refused(text: str) -> None:
    with pytest.raises(BiremeError, match="--hours is"):
        DailyHours.parse(text)


def test_limits_hold_for_plans_and_for_lines_that_leave_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MEMORY_VARIABLE, RATE_VARIABLE, VISIBLE):
        monkeypatch.setenv(name, "")
    before = server_here("cpu", 2)
    set_limits("1GiB", "none", "50Mbit/s")
    assert memory_bytes() == 1 << 30
    assert available_bytes() <= 1 << 30
    found = server_here("cpu", 2)
    assert {one.memory_bytes for one in found.devices} == {512 << 20}
    assert [card.link.bytes_per_s for card in found.cards] == [50e6 / 8] * max(len(before.cards), 1)
    assert os.environ[VISIBLE] == ""
    monkeypatch.setenv(SPEED, "0.32")
    assert {one.speed for one in server_here("cpu", 2).devices} == {0.32}
    house = House()
    try:
        for leaves in (False, True):
            monkeypatch.setattr(listener, "leaves_host", lambda _, leaves=leaves: leaves)
            with authenticated(house.stranger(), KEY) as made:
                rate = made.getsockopt(socket.SOL_SOCKET, 47)
                assert (rate == 6_250_000) == (leaves and sys.platform == "linux")
        set_limits("", "", "20Gbit/s")
        with authenticated(house.stranger(), KEY) as made:
            found_rate = int.from_bytes(made.getsockopt(socket.SOL_SOCKET, 47, 4), sys.byteorder)
            assert (found_rate == 2_500_000_000) == (sys.platform == "linux")
    finally:
        house.close()


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (("", "0,0", ""), "--devices is '0,0'; write the numbers"),
        (("", "gpu", ""), "or none to compute on the CPU"),
        (("", "97", ""), "this machine has none of these GPUs"),
        (("8", "", ""), "--memory is '8': lend at least 1GiB"),
        (("much", "", ""), "--memory is 'much'"),
        (("", "", "fast"), "--rate is 'fast'"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str, str], sentence: str
) -> None:
    for name in (MEMORY_VARIABLE, RATE_VARIABLE, VISIBLE):
        monkeypatch.setenv(name, "")
    with pytest.raises(BiremeError, match=sentence):
        set_limits(*limits)


def test_more_memory_than_there_is_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "")
    set_limits("1GiB", "", "")
    assert not capsys.readouterr().err
    set_limits("1000TiB", "", "")
    assert "bireme: --memory is 1000TiB, and " in (said := capsys.readouterr().err)
    assert said.endswith(" are free here: this machine offers these.\n")


def test_devices_are_counted_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b,GPU-c")
    monkeypatch.setattr("bireme.devices.num_accelerators", lambda: 2)
    set_limits("", "2,0", "")
    assert os.environ[VISIBLE] == "GPU-c,GPU-a"


def verified(path: Path) -> subprocess.CompletedProcess[str]:
    words = ["systemd-analyze", "verify", str(path)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=patience_s())


@pytest.mark.skipif(which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_of_the_service_is_one_for_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'a "home" of 100 %s $USER'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv(HOME, str(folder))
    path = tmp_path / "bireme-join.service"
    path.write_text(service_unit("10.0.0.1:29600", ["10.0.0.1:29600", "--name", 'a "name" $HOME %h']))
    checked = verified(path)
    about_it = [text for text in checked.stderr.splitlines() if path.name in text]
    assert (checked.returncode, about_it) == (0, []), checked.stderr
    broken = path.read_text().replace("Restart=always", "Restart=now and then")
    path.write_text(broken)
    assert path.name in verified(path).stderr


def test_the_command_prints_a_unit_with_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="keys of machines need it")
    monkeypatch.setenv(HOME, str(tmp_path))
    for name in (MEMORY_VARIABLE, RATE_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b")
    monkeypatch.setattr("bireme.devices.num_accelerators", lambda: 1)
    token = str(AdmissionToken("0" * 64, "0" * 32))
    limits = "--devices 1 --memory 8GiB --rate 50Mbit/s --hours 20-8"
    options = ["--token", token, *limits.split()]
    found = bireme(capsys, "join", "10.0.0.1:29600", *options, "--service")
    assert found.status == 0
    (command,) = [text for text in found.out.splitlines() if text.startswith("ExecStart=")]
    assert command.endswith(" ".join(["-m bireme join 10.0.0.1:29600", *options]))
    assert f"Environment={HOME}={tmp_path}" in found.out
    assert f"Environment={VISIBLE}=GPU-a,GPU-b" in found.out  # not those of --devices, which count among them
    assert "systemctl --user enable" in found.err


class Hours:
    """Those that a test sets."""

    begin = "20:00"
    is_now = True

    def wait_s(self, now: datetime) -> float:
        return 0.0 if self.is_now else 0.01


def wait(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + patience_s()
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def test_a_machine_leaves_when_its_hours_end_and_returns_when_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="keys of machines need it")
    from tests.machines.test_gathering import BLUE, FACTS, GREEN, OWN, RUN, Meeting, Processes

    happened = list[str]()
    monkeypatch.setattr(Processes, "happened", happened)
    for name, value in (
        ("JoinedProcesses", Processes),
        ("_BEAT_S", 0.01),
        ("_AGAIN_S", 0.0),
        ("_LEAVE_S", 0.05),
    ):
        monkeypatch.setattr(attendance, name, value)
    monkeypatch.setattr(line, "_MEASURE_S", 0.001)
    monkeypatch.setenv(HOME, str(tmp_path))
    meeting, hours = Meeting(tmp_path, RUN), Hours()
    blue = Attendance(
        meeting.address,
        BLUE,
        OWN.public,
        FACTS,
        "blue",
        lambda _: None,
        lambda *_: None,
        hours,  # type: ignore[arg-type]  # it has what is used of them
    )
    blue.call(meeting.token())
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(blue.run()))
    thread.start()

    def is_told(text: str) -> bool:
        return any(text in one for one in meeting.told)

    wait(lambda: is_told("blue (127.0.0.1) is here"))
    hours.is_now = False
    wait(lambda: is_told("blue (127.0.0.1) has left. It returns at 20:00. 0 of 2 machines are here."))
    hours.is_now = True
    wait(lambda: len(meeting.gathering.machines()) == 1)
    meeting.join(GREEN, "green", meeting.token())
    meeting.gathering.turn()
    wait(lambda: "start 1" in happened)
    hours.is_now = False
    wait(lambda: meeting.told[-1] == "blue (127.0.0.1) has left. It returns at 20:00.")
    meeting.gathering.turn()
    assert is_told("blue leaves once the run goes on without it.")
    hours.is_now = True
    wait(lambda: is_told("blue (127.0.0.1) is back.") and len(happened) == 3)
    blue.leave()
    thread.join(patience_s())
    meeting.close()
    assert meeting.told[-1] == "blue (127.0.0.1) has left."
    assert (statuses, happened) == ([0], ["start 1", "close 1", "start 1", "close 1"])
