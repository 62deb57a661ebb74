"""Runs under torchrun for tests: watched by their log, and none left behind."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.copies import TORCHRUN, Copy
from tests.support.paced_samples import PACE
from tests.support.patience import patience_s
from tests.support.ranks import wait_until_gone
from tests.support.training import GPT, Ended, Running, write_run

__all__ = ["Torchrun", "paced_run", "torchrun_train"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Torchrun:
    """A torchrun that was started here."""

    running: Running

    @property
    def ranks(self) -> list[int]:
        """Its processes, in the order of their start."""
        pid = self.running.process.pid
        found = []
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(word) for word in tasks.read_text().split()]
        return sorted(found)

    def ended(self) -> Ended:
        """Wait for its end."""
        process, ranks = self.running.process, self.ranks
        out, _ = process.communicate(timeout=patience_s())
        wait_until_gone(ranks)
        return Ended(process.returncode, out, self.running.said)


@contextmanager
def torchrun_train(
    run: Path,
    *words: str,
    verb: str = "train",
    ranks: int = 2,
    options: Sequence[str] = ("--standalone",),
    pace_s: float = 0.0,
    first: Callable[[], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Torchrun]:
    """`torchrun OPTIONS --nproc-per-node RANKS -m bireme VERB WORDS`; `run` is the folder of the run.

    `first` is called in torchrun's process before all else.
    """
    launcher = ("-m", TORCHRUN, *options, "--nproc-per-node", str(ranks), "-m", "bireme", verb)
    scratch = os.environ["BIREME_TESTS_FOLDER"]  # where torchrun keeps what it would leave if it is killed
    environment = {PACE: str(pace_s), "TMPDIR": scratch, **(variables or {})}
    process = Copy([*launcher, *words], ROOT, variables=environment, first=first)
    started = Torchrun(Running(process, run, process.err))
    try:
        yield started
    finally:
        left = started.ranks
        process.close()
        wait_until_gone(left)  # they end with their agent


def paced_run(folder: Path, schedule: str = "1f1b", depth: int = 2) -> Path:
    """A run file of a tiny model whose data come as slowly as a test asks."""
    return write_run(folder, schedule, depth, model=GPT, data="tests.support.paced_samples:paced")
