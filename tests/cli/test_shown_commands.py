"""Every command that a page shows is run, or has a reason why not, and prints what the page shows."""

import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path

import pytest

from bireme.cluster.machine import host_name, processor_name
from bireme.machines.keys import HOME as HOME_OF_KEYS
from bireme.plan.explain import changes
from bireme.plan.fit import Fit, FitQuestion, fit
from bireme.profile import profiler
from tests.plan.conftest import brief_searches, remember_estimates  # noqa: F401 (fixtures)
from tests.support.alone import alone
from tests.support.command import bireme_once, run_words
from tests.support.copies import TORCHRUN, Copy
from tests.support.extent import TRY_ALL
from tests.support.graphs import remember_captures
from tests.support.once import made_once
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.shown_commands import (
    PAGES,
    ROOT,
    WRITE,
    Block,
    ShownCommand,
    ShownFile,
    agrees,
    parts_of,
    shape_of,
    unmarked_commands,
    with_outputs,
)
from tests.support.tiny_profiles import LITTLE
from tests.support.tiny_project import make_project, make_shop, teach_shop

remember_captures()

HOME = "~/demo"
"""Where the reader of the pages works."""

RUN = """format = 1

[model]
source = "gpt:layers=2,width=16,heads=2,vocab=257,context=32"

[data]
source = "data/texts"

[training]
steps = 12
batch_size = 8

[cluster]
device = "cpu"
threads_per_worker = 1

[checkpoint]
every_steps = 4

[log]
every_steps = 4
sample_tokens = 16
"""
"""What `run.toml` is on pages that do not show it: a run of two seconds."""

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def _make_first_run(folder: Path) -> None:
    """A reader's folder: a model, data, a run file and a run that has ended."""
    make_project(folder)
    make_shop(folder)
    if TRY_ALL:  # which runs the commands that train it
        teach_shop(folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "run.toml").write_text(RUN)
    (folder / "book.txt").write_text((folder / "data" / "texts" / "code.txt").read_text())
    with pytest.MonkeyPatch.context() as patch, alone():
        patch.chdir(folder)
        patch.setattr(profiler, "Effort", lambda: LITTLE)
        words = "train run.toml --set cluster.workers=1 --set plan.schedule=1f1b --name first-run"
        done = bireme_once(*words.split())
    assert done.status == 0, done.err
    shutil.copytree(folder / "runs" / "first-run", folder / "runs" / "other-run")


class Reader:
    """Types commands in a folder, one after the other, on one machine or several of the loopback."""

    def __init__(self, folder: Path, commands: Iterable[ShownCommand]) -> None:
        pytest.importorskip("transformers")
        made = made_once("reader", _make_first_run)
        shutil.copytree(made, folder, symlinks=True)
        self._folder = folder
        self._names = {str(folder): HOME, str(made): HOME, processor_name(): "AMD EPYC"}
        self._names |= {f"{host_name()}/": "red/"}
        self._beside = list[tuple[ShownCommand, Copy]]()
        self._port = free_port()
        for command in commands:  # which make what a reader has elsewhere
            match command.words:
                case ["bireme", "init", name, *_]:
                    (folder / name).unlink(missing_ok=True)
                case ["bireme", "train", *_, "--name", name]:
                    shutil.rmtree(folder / "runs" / name, ignore_errors=True)

    def write(self, file: ShownFile) -> None:
        """Save a file that the page shows."""
        path = self._folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)

    def type(self, command: ShownCommand) -> tuple[int | None, str] | None:
        """The exit status of a command and its output; None if it goes on."""
        if command.block.is_in_a_process:
            return self._in_a_process(command)
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            status = run_words(command.words[1:])
        return status, self._as_shown(out.getvalue())

    def ended(self) -> Iterator[tuple[ShownCommand, int | None, str]]:
        """The commands that went on, with their exit status and their output."""
        for command, process in self._beside:
            if command.block.is_interrupted:
                process.send_signal(signal.SIGINT)
            text, _ = process.communicate(patience_s())
            yield command, process.returncode, self._as_shown(text)

    def close(self) -> None:
        """End what still runs."""
        for _, process in self._beside:
            process.close()

    def _in_a_process(self, command: ShownCommand) -> tuple[int | None, str] | None:
        block, machine = command.block, command.block.machine
        variables = {HOME_OF_KEYS: str(self._folder.parent / machine)} if machine else {}
        first = partial(_be, machine)
        process = Copy(self._words(command), self._folder, variables=variables, first=first)
        self._beside.append((command, process))
        if block.is_interrupted or block.is_beside:
            self._wait_for_lines(process, command.shown.partition("…")[0].count("\n"))
        if block.is_beside:
            return None
        if block.is_interrupted:
            process.send_signal(signal.SIGINT)
        text, _ = process.communicate(patience_s())
        self._beside.pop()
        process.close()
        return process.returncode, self._as_shown(text)

    def _words(self, command: ShownCommand) -> list[str]:
        """The words for Python: addresses are of the loopback, tokens those that were printed."""
        match [re.sub(r"\d+(\.\d+){3}(?=:|$)", "127.0.0.1", word) for word in command.words]:
            case ["torchrun", *words]:
                own = ["-m" if word == "--no-python" else word for word in words]
                return ["-m", TORCHRUN, "--master-port", str(self._port), *own]
            case ["bireme", "join" | "doctor" as verb, str(), "--token", _, *more]:
                printed = "".join(process.out.read_text() for _, process in self._beside)
                line = re.findall(rf"bireme {verb} (\S+) --token (\S+)", printed)[-1]
                return ["-m", "bireme", verb, line[0], "--token", line[1], *more]
            case ["bireme", "doctor", "--listen", _]:
                return ["-m", "bireme", "doctor", "--listen", "127.0.0.1:0"]
            case ["bireme", "coordinate" | "generate" as verb, *words] if "--machines" in words:
                return ["-m", "bireme", verb, "--listen", "127.0.0.1:0", *words]
            case [_, *words]:
                return ["-m", "bireme", *words]
        raise AssertionError(command.typed)

    def _wait_for_lines(self, process: Copy, count: int) -> None:
        end_s = time.monotonic() + patience_s()
        while process.out.read_text().count("\n") < count:
            assert process.poll() is None, process.out.read_text()
            assert time.monotonic() < end_s, process.out.read_text()
            time.sleep(0.02)

    def _as_shown(self, text: str) -> str:
        for own, shown in self._names.items():
            text = text.replace(own, shown)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _be(machine: str) -> None:
    """Write both streams into one file, on the machine of that name."""
    os.dup2(1, 2)
    if machine:
        platform.node = lambda: machine


def commands_of(page: Path) -> list[ShownCommand]:
    return [one for one in parts_of(page.read_text(encoding="utf-8")) if isinstance(one, ShownCommand)]


def _fit_briefly(question: FitQuestion, *, within_s: float) -> Fit:
    """Without the searches that the pages had time for, and without saying so."""
    found = fit(question, within_s=min(0.0, within_s))
    return replace(found, rows=tuple(replace(row, is_stopped=False) for row in found.rows))


@pytest.mark.slow
@pytest.mark.usefixtures("remember_estimates")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_shows_what_its_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text(encoding="utf-8")
    parts = [one for one in parts_of(text) if isinstance(one, ShownFile) or _is_run(one)]
    commands = [one for one in parts if isinstance(one, ShownCommand)]
    if not commands:
        pytest.skip("no command of this page is run")
    if any(command.words[:2] == ["bireme", "plan"] for command in commands):
        request.getfixturevalue("brief_searches")
    reader = Reader(tmp_path / "reader", commands)
    monkeypatch.chdir(tmp_path / "reader")
    for name, value in {"COLUMNS": "100", "NO_COLOR": "1", "BIREME_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    if not TRY_ALL:
        monkeypatch.setattr(profiler, "Effort", lambda: LITTLE)
        monkeypatch.setattr("bireme.plan.explain.changes", lambda *asked: [*changes(*asked)][:2])
        monkeypatch.setattr("bireme.plan.fit.fit", _fit_briefly)
    outputs = dict[int, str]()

    def compare(command: ShownCommand, status: int | None, printed: str) -> None:
        assert status == command.block.status, f"{command.typed}\n{printed}"
        if agrees(command, printed):
            return
        if WRITE not in os.environ:
            assert shape_of(command.shown) == shape_of(printed), (
                f"{page.name} shows something else: {command.typed}"
            )
        outputs[command.begin] = printed

    with closing(reader):
        for part in parts:
            if isinstance(part, ShownFile):
                reader.write(part)
            elif found := reader.type(part):
                compare(part, *found)
        for command, status, printed in reader.ended():
            compare(command, status, printed)
    if outputs:
        page.write_text(with_outputs(text, outputs), encoding="utf-8")


def _is_run(command: ShownCommand) -> bool:
    return not command.block.reason and (TRY_ALL or not command.block.is_long)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_a_page_is_run_or_has_a_reason(page: Path) -> None:
    assert unmarked_commands(page.read_text(encoding="utf-8")) == []
    for command in commands_of(page):
        if not command.block.reason:
            assert command.words[0] in ("bireme", "torchrun"), command.typed


def test_most_commands_are_run() -> None:
    found = [*chain.from_iterable(map(commands_of, PAGES))]
    assert sum(not one.block.reason for one in found) >= 60
    assert all(len(one.block.reason) > 10 for one in found if one.block.reason)


@pytest.mark.parametrize(
    ("shown", "printed", "is_equal"),
    [
        ("step 12/12  loss 4.01\n41,200 tokens/s", "step 12/12 loss 5.6 9 tokens/s", 1),
        ("memory 310 MiB, 4 µs", "memory 1.2 GiB, 1 s", 1),
        ("Wrote 3 files.\n…\nIt … ended.", "Wrote 3 files.\n\nmore\nIt has ended.", 1),
        ("Wrote 3 files.\n…", "Wrote 3 files.", 1),
        ("Wrote 3 files.", "Wrote 4 files.", 0),
        ("Wrote 3 files.", "Wrote 3 files. And more.", 0),
        ("memory 3 GiB", "room 3 GiB", 0),
        ("r is at http://127.0.0.1:41025/abc/", "r is at http://127.0.0.1:1/x-y/", 1),
        ("gpu0  ━━━━────  8 cores", "gpu0 ━━━ 96 cores", 1),
        ("at 10.0.0.1:29600 (10.0.0.1).", "at 127.0.0.1:4 (1.1.1.9).", 1),
        ("gpu0 int8", "gpu1 int8", 0),
        ("gpu0 int8", "gpu0 int4", 0),
    ],
)
def test_numbers_of_a_machine_may_differ_and_words_and_counts_may_not(
    shown: str, printed: str, is_equal: bool
) -> None:
    assert agrees(ShownCommand("", shown, 0, 0, Block()), printed) == is_equal
