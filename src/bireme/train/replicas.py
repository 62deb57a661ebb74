"""A run whose replicas may die: what it needs, its coordinator, and what is said of it at the end."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import Any

from bireme.errors import BiremeError
from bireme.model.units import units_of
from bireme.runtime.quorum.launch import launch_replicas
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.messages import Samples
from bireme.sync.coordinator.settings import Settings, SyncMode
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.data.stream import StreamSamples
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome, SyncFigures
from bireme.train.prepare import Prepared
from bireme.train.shares import share_limits
from bireme.train.worker import Start, train_replica

__all__ = ["check_replicas", "is_quorum", "run_replicas"]


def is_quorum(prepared: Prepared) -> bool:
    """Whether the replicas of a run may die."""
    return prepared.run.sync.mode == "quorum"


def check_replicas(prepared: Prepared) -> None:
    """Refuse a run whose replicas could not go on without each other. Nothing has started yet."""
    plan = prepared.plan.plan
    if plan.width < 2:
        raise BiremeError(
            'sync.mode is "quorum", but the plan has one replica, which nobody could go on without. Set '
            'plan.width to 2 or more, or use sync.mode = "all".'
        )
    if isinstance(prepared.data.training, StreamSamples):
        raise BiremeError(
            'sync.mode is "quorum", in which samples may be trained in another order than they come, but the '
            "data are a stream. Download them, or leave out streaming=true."
        )
    units = units_of(prepared.graph)
    source = plan.source
    holders: dict[str, set[int]] = {}
    for stage, rank in enumerate(source.rank_of_stage):
        for index in plan.units_of(stage, len(units)):
            for name in units[index].parameters:
                holders.setdefault(name, set()).add(rank)
    shared = sorted(name for name, ranks in holders.items() if len(ranks) > 1)
    if shared:
        raise BiremeError(
            f'{", ".join(shared)} is shared by stages of several ranks, and sync.mode = "quorum" does not '
            'sum such parameters. Do not tie the weights, use plan.depth = 1, or sync.mode = "all".'
        )


def run_replicas(
    prepared: Prepared, folder: RunFolder, checkpoint: Checkpoint | None, begin: Start
) -> list[Outcome]:
    """What the ranks of a replica come to, after a run in which others may have died and come back."""
    run, plan = prepared.run, prepared.plan.plan
    step = 0 if checkpoint is None else checkpoint.manifest.step
    ledger = _Ledger(folder.path / LEDGER)
    fresh, waiting = ledger.left_at(step, run.training.batch_size)
    limits = share_limits(prepared.plan, prepared.profile, run.training.batch_size, grows=False)
    settings = Settings(
        SyncMode.QUORUM,
        plan.width,
        plan.source.num_ranks,
        run.training.batch_size,
        limits,
        lease_s=run.sync.lease_s,
        grace_s=run.sync.grace_s,
        first=step,
        fresh=fresh,
        waiting=waiting,
        num_samples=prepared.data.order(run.data.seed).num_samples,
    )
    with ledger:
        launched = launch_replicas(
            train_replica,
            settings,
            begin,
            record=ledger.record,
            tell=_tell,
            timeout_s=run.cluster.timeout_s,
            threads_per_process=prepared.machines.threads,
            backend="nccl" if prepared.machines.backend == "nccl" else "gloo",
            device=prepared.machines.device,
        )
    figures = SyncFigures(
        SyncMode.QUORUM, launched.num_epochs, ledger.num_rounds, ledger.num_committed, launched.num_redone
    )
    return [replace(one, sync=figures) for one in launched.results]


LEDGER = "ledger.jsonl"


class _Ledger:
    """The committed rounds of a run, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self.num_rounds = self.num_committed = 0

    def left_at(self, step: int, batch_size: int) -> tuple[int, tuple[Samples, ...]]:
        """The first sample that nobody was given before a step, and those before it that do not count yet."""
        fresh, waiting = step * batch_size, tuple[Samples, ...]()
        for line in self._lines():
            if line.get("kind") == "round" and line["batch"] == step - 1:
                fresh, waiting = line["fresh"], tuple(Samples(*pair) for pair in line["open"])
        return fresh, waiting

    def record(self, line: Began | Committed) -> None:
        """Write a line, so that it stays."""
        self._file.write(dumps(line.document()) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if isinstance(line, Committed):
            self.num_rounds += 1
            self.num_committed += line.num_samples

    def __enter__(self) -> "_Ledger":
        self._file = self._path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _lines(self) -> Iterator[dict[str, Any]]:
        text = self._path.read_text() if self._path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                yield loads(line)


def _tell(sentence: str) -> None:
    print(f"bireme: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 (for people)
