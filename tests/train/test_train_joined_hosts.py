"""`bireme coordinate` and `bireme join` on machines with addresses of their own, whose cables are pulled."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from bireme.machines.keys import HOME
from bireme.sync.coordinator.ledger_check import check_ledger
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.hosts import Host, hosts, set_cable
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.training import Running, settings
from tests.train.test_train_joined import lines_of, written

pytest.importorskip("cryptography", reason="keys of machines need it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRY_ALL, reason="three machines for a minute: make test-all"),
]
NAMES = ("red", "blue", "green")
CUT_S = 12.0
"""Longer than a lease: the machine is given up, and returns."""


class Machine:
    """A machine with a home of its own, and with the network of a host."""

    def __init__(self, folder: Path, host: Host, name: str, stack: ExitStack) -> None:
        self.host, self.name = host, name
        self._folder, self._stack = folder, stack
        self._home = folder / name

    def type(self, *words: str, pace_s: float) -> Running:
        """Type `bireme WORDS…` there."""
        variables = {HOME: str(self._home), PACE: str(pace_s)}
        process = Copy(["-m", "bireme", *words], self._folder, variables=variables, first=self.host.begin)
        self._stack.callback(process.close)
        return Running(process, self._folder / "runs" / "run", process.err)


def test_machines_with_their_own_addresses_are_cut_off_and_lost(tmp_path: Path) -> None:
    """The link of the third one is slow; the second is cut off and comes back; then the third is lost."""
    run = written(tmp_path, "quorum", 3)
    more = settings(training__steps=150, sync__lease_s=5.0)
    with ExitStack() as stack:
        found = stack.enter_context(hosts(3, slow=2))
        red, blue, green = (
            Machine(tmp_path, host, name, stack) for host, name in zip(found, NAMES, strict=True)
        )
        where = ("--listen", f"{red.host.address}:0")
        first = red.type("coordinate", str(run), *where, "--machines", "3", "--json", *more, pace_s=0.1)
        second, third = (
            machine.type(*words, "--name", machine.name, pace_s=pace_s)
            for machine, words, pace_s in zip((blue, green), lines_of(first, 2), (0.1, 0.2), strict=True)
        )
        first.wait_for_step(2)
        set_cable(1, is_plugged=False)
        time.sleep(CUT_S)
        set_cable(1, is_plugged=True)
        first.wait_for_words("is back at step")
        first.wait_for_words("blue (10.98.0.2) is back")
        third.kill_all()
        first.wait_for_words("green (10.98.0.3) is gone")
        first.wait_for_words("The run continues with")
        out, said = first.process.communicate(timeout=patience_s())
        assert first.process.returncode == 0, said
        assert second.process.wait(patience_s()) == 0, second.said
    document = json.loads(out)
    assert document["run"]["steps"] == 150
    check = check_ledger(tmp_path / "runs" / "run" / "ledger.jsonl")
    assert check.is_whole
    assert (tmp_path / "runs" / "run" / "model").is_dir()
