"""The live view of a run: figures that fit any terminal, and output of any process above them."""

import math
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bireme.report.live_view import EVENTS, LiveRun, RunEvent, RunLines, event_in
from tests.support.patience import patience_s

DEVICES = ["alpha/gpu0", "alpha/gpu1", "beta/gpu0", "beta/gpu1"]
START = {
    "devices": DEVICES,
    "width": 2,
    "device_bytes": [24 << 30, 24 << 30, 12 << 30, 12 << 30],
    "link_bytes_per_s": [12e9, None, 1.25e8, None],
}


def trained(step: int, **more: Any) -> dict[str, Any]:
    return {
        "loss": 2 + math.exp(-step / 300),
        "grad_norm": 0.5,
        "learning_rate": 3e-4,
        "tokens_per_s": 41_200.0,
        "samples_per_s": 20.0,
        "memory_bytes": [6 << 30, 23 << 30, None, None],
        "sent_bytes": [step * 7_000_000, step * 100, None, None],
        **more,
    }


def a_run(*, is_ascii: bool = False, steps: int = 1240) -> LiveRun:
    """A run of 5,000 steps that takes half a second for each."""
    run = LiveRun(is_ascii=is_ascii)
    run.take(RunEvent("start", 0, 5000, START), 0.0)
    for step in range(10, steps + 1, 10):
        run.take(RunEvent("train", step, 5000, trained(step)), 0.5 * step)
    return run


def text_of(run: LiveRun, width: int, now_s: float = 620.0) -> str:
    return "\n".join(line.plain.rstrip() for line in run.lines(width, now_s))


def test_nothing_is_shown_before_a_run_has_begun() -> None:
    assert LiveRun().lines(80, 0.0) == []


@pytest.mark.parametrize("width", [39, 79, 119])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_view_fits_its_terminal(width: int, is_ascii: bool) -> None:
    run = a_run(is_ascii=is_ascii)
    text = text_of(run, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() or not is_ascii
    for part in (
        "1,240/5,000",
        "24%",
        "31:20 left",
        "loss 2.0160",
        "41,200 tokens/s",
        "sends 14 MB/s of 12 GB/s",
    ):
        assert part in text, part
    assert all(name in text for name in DEVICES)


def test_time_left_runs_down_between_two_events() -> None:
    assert "31:10 left" in text_of(a_run(), 79, now_s=630.0)


def test_the_loss_is_drawn_as_a_falling_line() -> None:
    [line] = [line for line in text_of(a_run(), 79).splitlines() if line.startswith("loss")]
    sparks = line.split()[-1]
    assert len(sparks) == 48
    assert list(sparks) == sorted(sparks, reverse=True)
    assert (sparks[0], sparks[-1]) == ("█", "▁")


def test_a_loss_that_is_no_number_is_shown_and_not_drawn() -> None:
    run = a_run()
    run.take(RunEvent("train", 1250, 5000, trained(1250, loss=math.nan)), 625.0)
    assert "loss nan" in text_of(run, 79)


def test_ranks_of_a_lost_replica_are_away_until_it_is_back() -> None:
    run = a_run()
    for event, count in (("gone", 2), ("back", 0)):
        run.take(RunEvent("membership", 1240, 5000, {"event": event, "replica": 1}), 620.0)
        assert text_of(run, 79).count("away") == count


def test_a_replica_that_may_die_lists_its_own_ranks() -> None:
    run = LiveRun()
    run.take(RunEvent("start", 0, 100, START), 0.0)
    own = {"replica": 1, "memory_bytes": [5 << 30, 6 << 30], "sent_bytes": [0, 0]}
    run.take(RunEvent("shares", 0, 100, {"shares": [12, 20]}), 0.5)
    run.take(RunEvent("train", 10, 100, trained(10, **own)), 1.0)
    lines = {line.split()[1]: line for line in text_of(run, 119).splitlines() if "/gpu" in line}
    assert "12 samples a batch" in lines["alpha/gpu0"]
    assert "5.00 GiB of 12.0 GiB" in lines["beta/gpu0"]
    assert "6.00 GiB of 12.0 GiB" in lines["beta/gpu1"]


def test_a_rank_whose_number_comes_late_has_a_steady_rate() -> None:
    run = LiveRun()
    run.take(RunEvent("start", 0, 100, START), 0.0)
    for step in range(1, 8):
        late = step // 2 * 2 * 50_000
        run.take(RunEvent("train", step, 100, trained(step, sent_bytes=[step * 50_000, late])), 0.5 * step)
        assert text_of(run, 119).count("sends 100 kB/s") == (step > 1) + (step > 3)
    others = {"replica": 1, "memory_bytes": [1 << 30, 1 << 30], "sent_bytes": [3, 3]}
    run.take(RunEvent("train", 8, 100, trained(8, **others)), 4.0)
    assert "sends" not in text_of(run, 119)


def test_warnings_and_evaluations_get_a_line_above_the_view() -> None:
    run = a_run()
    assert run.take(RunEvent("warning", 3, 50, {"text": "it is late"}), 1.0) == "step  3/50  it is late"
    found = {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": None}
    assert (
        run.take(RunEvent("evaluation", 50, 50, found), 1.0)
        == "step 50/50  evaluation loss 2.5000  perplexity 12.18"
    )
    assert run.take(RunEvent("checkpoint", 50, 50, {"num_bytes": 1}), 1.0) is None
    assert "evaluation 2.5000 at 50  checkpoint of 50" in text_of(run, 119)


def test_a_process_prints_lines_unless_a_view_reads_its_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RunLines(50).show("start", 0, {})
    assert capsys.readouterr().err == "step  0/50  the pipeline is ready\n"
    monkeypatch.setenv(EVENTS, "1")
    RunLines(50).show("train", 7, {"loss": math.nan})
    event = event_in(capsys.readouterr().err.rstrip("\n"))
    assert event is not None
    assert (event.kind, event.step, event.num_steps) == ("train", 7, 50)
    assert math.isnan(event.values["loss"])
    assert event_in("\x1e{half") is None


# A terminal


SHOWN = r"""
import os, subprocess, sys
from bireme.report.live_view import live_view
from bireme.report.live_view import RunLines
print("before")
try:
    with live_view():
        lines = RunLines(100)
        lines.show("start", 0, {"devices": ["a/cpu0"], "width": 1, "device_bytes": [1 << 30]})
        for step in (10, 20):
            lines.show("train", step, dict(
                loss=5.0 / step, grad_norm=1.0, learning_rate=0.1, tokens_per_s=None, samples_per_s=8.0,
                memory_bytes=[1 << 29], sent_bytes=[0],
            ))
            subprocess.run(["sh", "-c", f"echo a library of step {step} warns >&2; echo printed"], check=True)
        print("by this process, on", sys.stdout.isatty(), sys.stderr.isatty())
        sys.stderr.write("half a line")
        sys.stderr.flush()
        lines.show("warning", 20, {"text": "it is late"})
        if "BIREME_EVENTS" in os.environ:
            os.write(2, b'as on Windows\r\n\x1etorn from its event\n\x1e{}\x1e{"torn\n')
        if "damaged" in sys.argv:
            lines.show("train", 30, {})
            os.write(2, b"a line of much output\n" * 9999)
            lines.show("train", 40, {})
        os.write(2, b"without an end")
        if "interrupt" in sys.argv:
            raise KeyboardInterrupt
except KeyboardInterrupt:
    print("interrupted")
print("after", "BIREME_EVENTS" in os.environ)
"""


def in_a_terminal(*words: str, **variables: str) -> str:
    """The output of the script on a terminal of its own."""
    here, there = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", EVENTS)}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWN, *words],
        stdin=there,
        stdout=there,
        stderr=there,
        env=environment | {"TERM": "xterm-256color"} | variables,
    )
    os.close(there)
    found = b""
    while select.select([here], [], [], patience_s())[0]:
        try:
            found += os.read(here, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(here)
    assert process.wait(patience_s()) == 0, found
    return found.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("words", [(), ("interrupt",)])
def test_output_scrolls_above_the_view_and_the_terminal_is_left_clean(words: tuple[str, ...]) -> None:
    found = in_a_terminal(*words)
    text = plain(found)
    for line in (
        "a library of step 20 warns",
        "printed",
        "on False False",
        "half a line",
        "it is late",
        "torn from its event",
        "as on Windows",
        '{"torn',
    ):
        assert f"{line}\n" in text, line
    view = text.rindex("step 20/100")
    assert "without an end" in text
    assert text.rindex("a library of step 20 warns") < view < text.index("after False")
    assert text[view:].splitlines()[3].startswith("0 a/cpu0")
    assert ("interrupted" in text) == bool(words)
    assert found.rindex("\x1b[?25h") > found.rindex("\x1b[?25l")
    assert "\x1e" not in found
    assert "\x1b[32m" in found


def test_a_view_that_fails_passes_all_output_on() -> None:
    found = in_a_terminal("damaged")
    text = plain(found)
    assert text.count("a line of much output\n") == 9999
    assert text.index("after False") > text.rindex("a line of much output")
    assert "KeyError: 'loss'" in text
    assert found.rfind("\x1b[?25h") >= found.rfind("\x1b[?25l")  # it may fail before it draws
    assert "\x1e" not in found


def test_a_terminal_without_color_or_without_a_cursor_gets_what_it_can_show() -> None:
    assert "\x1b[32m" not in in_a_terminal(NO_COLOR="1")
    found = in_a_terminal(TERM="dumb")
    assert "\x1b" not in found
    assert "step  20/100  loss 0.2500  norm 1.000  8.0 samples/s" in found


def test_output_to_a_file_is_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert "step  20/100  loss 0.2500" in done.stderr
    assert not re.search(r"[\x1b\x1e]", done.stderr + done.stdout)
