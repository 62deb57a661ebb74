"""`bireme train` in which ranks are killed one after the other, and what watches it.

The run trains until it is told to stop. What counts is in its ledger: this reads it while it grows, and notes
when each line came.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.killing.injector import MISTAKE, ORDERS, PACE
from benchmarks.killing.session import living, name_of
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph_file import load_graph
from bireme.plan.plan_file import load_plan
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.run_data import data_of
from bireme.train.run_file.tables import rate_factor
from bireme.train.worker import optimizer_of

__all__ = ["Ended", "Hit", "MortalRun", "Round", "losses_of_one_process", "mortal_run"]

ROOT = Path(__file__).resolve().parents[2]
INJECTOR = "benchmarks.killing.injector"
PATIENCE_S = 180.0
"""For whatever must happen; nothing is measured by it."""
PARTING_S = 5.0
"""For processes of the run to be gone once its first one is."""
POLL_S = 0.01
STEPS = 1_000_000
"""More than a run ever does before it is told to stop."""

RUN = """format = 1

[model]
source = "python:{injector}:model"

[data]
source = "{injector}:samples"
evaluation_fraction = 0.0

[training]
steps = {steps}
batch_size = {batch}
optimizer = "sgd"
momentum = 0.9
learning_rate = 0.003
schedule = "constant"
warmup_fraction = 0.0
clip_norm = 0.5
evaluate_every = 0

[plan]
file = "{plan}"

[cluster]
device = "cpu"
workers = {ranks}
threads_per_worker = 1
timeout_s = 30

[sync]
mode = "quorum"
lease_s = {lease_s}
grace_s = {grace_s}
compare_every = 50

[balance]
mode = "off"

[checkpoint]
every_steps = {save_every}

[log]
folder = "{runs}"
name = "run"
every_steps = 1
sample_tokens = 0
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """A process was sent a signal: it was there in its program, at that time (`time.time`)."""

    pid: int
    where: str
    life: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """A batch that counts, and when its line in the ledger was seen."""

    batch: int
    members: tuple[int, ...]
    num_samples: int
    at_s: float
    returned: int = 0
    """Samples that had to be assigned again so far, as its coordinator counts them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a run: its one JSON document, what it said, and the processes it has left."""

    status: int
    document: dict[str, Any]
    said: str
    orphans: int


class Started(Protocol):
    """A process, first of its group, and the files that its output goes into."""

    pid: int
    out: Path
    err: Path

    def poll(self) -> int | None:
        """How it ended, or None."""

    def wait(self, timeout: float | None = None) -> int:
        """Its status, once it has ended. Raises a `TimeoutError`."""

    def close(self) -> None:
        """Kill it and all of its group."""


class Program:
    """A program in a session of its own, and the files that its output goes into."""

    def __init__(
        self, words: Sequence[str], folder: Path, out: Path, err: Path, variables: Mapping[str, str]
    ) -> None:
        self.out, self.err = out, err
        with out.open("wb") as to_out, err.open("wb") as to_err:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                env=os.environ | variables,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """How it ended, or None."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its status, once it has ended."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from None

    def close(self) -> None:
        """Kill it and all of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class Python(Program):
    """`python WORDS…`, whose output goes into its folder."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__([sys.executable, *words], folder, folder / "out", folder / "err", variables)


Found = TypeVar("Found")
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Started]
"""Starts `python` with these words, in a folder, with more variables than this process has."""


class MortalRun:
    """A run under way."""

    def __init__(self, folder: Path, process: Started, orders: Path, patience_s: float = PATIENCE_S) -> None:
        self.folder = folder / "runs" / "run"
        self.rounds: list[Round] = []
        self._process, self._orders, self._patience_s = process, orders, patience_s
        self._num_orders = self._place = 0

    def read(self) -> None:
        """Take in what the ledger has more."""
        path = self.folder / "ledger.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        now_s, whole = time.time(), text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if line["kind"] == "round":
                count = sum(end - begin for own in line["samples"] for begin, end in own)
                members, returned = tuple(line["members"]), line.get("returned", 0)
                self.rounds.append(Round(line["batch"], members, count, now_s, returned))
            else:
                self.rounds = [one for one in self.rounds if one.batch < line["batch"]]

    def wait_until_whole(self, num_replicas: int, *, after: int = 0) -> Round:
        """The first batch from that place in the ledger on in which all replicas have a part."""
        return self._first(lambda one: len(one.members) == num_replicas, after)

    def wait_for_others(self, replica: int, after: int) -> Round:
        """The first batch from that place in the ledger on in which that replica has no part."""
        return self._first(lambda one: replica not in one.members, after)

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Read the ledger until that holds; `what` says in an error that it does not."""
        self._awaited(lambda: is_so() or None, what)

    def _first(self, is_so: Callable[[Round], bool], after: int) -> Round:
        return self._awaited(lambda: next(filter(is_so, self.rounds[after:]), None), "no such batch")

    def order(self, replica: int, stage: int, at: float | str, number: signal.Signals) -> None:
        """Have a rank send itself a signal, after that part of a batch or while it saves."""
        self._num_orders += 1
        words = {"number": self._num_orders, "replica": replica, "stage": stage, "at": at}
        text = json.dumps({**words, "signal": int(number)})
        write_text_atomically(self._orders / "order.json", text)

    def hit(self) -> Hit:
        """What came of the last order, once the rank is about to do it."""
        path = self._orders / f"hit-{self._num_orders}.json"
        self._awaited(lambda: path.exists() or None, "the rank does not come to what was ordered")
        return Hit(**json.loads(path.read_text()))

    @property
    def leader(self) -> int:
        """The member that has trained for longest."""
        left = set(self.rounds[-1].members)
        for one in reversed(self.rounds):
            if not left & set(one.members):
                break
            left &= set(one.members)
        return min(left)

    def kill_coordinator(self) -> None:
        """Kill the process that decides who is a member."""
        for pid in living(self._process.pid):
            if name_of(pid).startswith("bireme coordina"):
                os.kill(pid, signal.SIGKILL)

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self._process.err.read_text()

    def stop(self) -> None:
        """Ask it to end with a checkpoint."""
        os.kill(self._process.pid, signal.SIGTERM)

    def mistake(self) -> None:
        """Let the next start of a rank fail by what is told as a mistake of the user."""
        (self._orders / MISTAKE).touch()

    def ended(self) -> Ended:
        """What came of it, once it has ended."""
        try:
            status = self._process.wait(self._patience_s)
        except TimeoutError:
            raise BiremeError(f"The run does not end. It said: {self.said}") from None
        ends_s = time.monotonic() + PARTING_S
        while (left := len(living(self._process.pid))) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
        self.read()
        text = self._process.out.read_text()
        return Ended(status, json.loads(text) if not status else {}, self.said, left)

    def _awaited(self, find: Callable[[], Found | None], what: str) -> Found:
        ends_s = time.monotonic() + self._patience_s
        while True:
            self.read()
            found = find()
            if found is not None:
                return found
            if self._process.poll() is not None or time.monotonic() > ends_s:
                raise BiremeError(f"In {self._patience_s:g} s {what}. The run said: {self.said[-4000:]}")
            time.sleep(POLL_S)


@contextmanager
def mortal_run(
    folder: Path,
    num_replicas: int,
    num_stages: int,
    schedule: str,
    *,
    lease_s: float,
    grace_s: float = 1.0,
    pace_s: float = 0.0,
    samples: int = 8,
    save_every: int = 200,
    start: Start = Python,
) -> Iterator[MortalRun]:
    """A run of so many replicas, each with that share of a batch; none of it is left afterwards."""
    orders = folder / "orders"
    orders.mkdir(parents=True)
    cuts = {1: (), 2: (2,)}[num_stages]
    plan = {"cuts": cuts, "num_microbatches": 2, "schedule": schedule, "width": num_replicas}
    (folder / "plan.json").write_text(json.dumps({"format": 1, "plan": plan}))
    text = RUN.format(
        injector=INJECTOR,
        steps=STEPS,
        batch=samples * num_replicas,
        plan=folder / "plan.json",
        ranks=num_stages * num_replicas,
        lease_s=float(lease_s),
        grace_s=float(grace_s),
        save_every=save_every,
        runs=folder / "runs",
    )
    (folder / "run.toml").write_text(text)
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = {ORDERS: str(orders), PACE: str(pace_s), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = start(["-m", "bireme", "train", str(folder / "run.toml"), "--json"], folder, variables)
    try:
        yield MortalRun(folder, process, orders)
    finally:
        process.close()


def losses_of_one_process(path: Path, *, num_microbatches: int | None = None) -> list[float]:
    """What one process makes of the samples of a run's ledger, batch by batch, each in that number of
    micro-batches, by default as many as in the run's plan.
    """
    torch.set_num_threads(1)
    folder = RunFolder.of(path)
    asked = folder.load_run()
    model, graph = RunModel.of(asked, 1), load_graph(folder.graph)
    data = data_of(asked, model)
    order = data.order(asked.data.seed)
    records = [json.loads(line) for line in folder.ledger.read_text().splitlines()]

    def batch(record: dict[str, Any]) -> dict[str, Any]:
        places = [pair for own in record["samples"] for pair in own]
        numbers = [int(one) for begin, end in places for one in order.numbers(begin, end - begin)]
        return dict(data.training.take(numbers))

    plan = load_plan(folder.plan).plan
    alone = replace(plan, cuts=(), width=1, updates_early=False, micro_batch_sizes=(), devices=())
    alone = replace(alone, num_microbatches=num_microbatches or alone.num_microbatches)
    training = asked.training
    pipeline = Pipeline(
        graph,
        alone,
        weights=model.weights(graph),
        optimizer=optimizer_of(training),
        settings=PipelineSettings(
            clip_norm=training.clip_norm or None, lr=rate_factor(training), seed=training.seed
        ),
    )
    counted = {one["batch"]: one for one in records if one["kind"] == "round"}
    return [result.loss for result in pipeline.train(batch(counted[number]) for number in sorted(counted))]
