"""A run whose replicas may die: what it needs, its coordinator, and what is said of it at the end."""

import sys
from dataclasses import replace

from bireme.runtime.quorum.launch import launch_replicas
from bireme.sync.coordinator.settings import GroupSettings, Settings, SyncMode
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.delay_warmup import first_delayed_step
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome, SyncFigures, first_of
from bireme.train.prepare import Prepared
from bireme.train.samples_left import left_at
from bireme.train.shares import share_limits
from bireme.train.worker import Start, train_replica

__all__ = ["run_replicas"]


def run_replicas(
    prepared: Prepared, folder: RunFolder, checkpoint: Checkpoint | None, begin: Start
) -> list[Outcome]:
    """What the ranks of a replica come to, after a run in which others may have died and come back.

    It is one that knows of the newest checkpoint, as the one that wrote it does.
    """
    run, plan = prepared.run, prepared.plan.plan
    step = 0 if checkpoint is None else checkpoint.manifest.step
    fresh, waiting = left_at(folder.ledger, step, run.training.batch_size)
    limits = share_limits(prepared.plan, prepared.profile, run.training.batch_size, grows=False)
    mode = SyncMode(run.sync.mode)
    settings = Settings(
        mode,
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
        num_lines=run.sync.outer_fragments,
        groups=GroupSettings(run.sync.connect_every),
    )
    resumed = None if checkpoint is None else checkpoint.manifest
    launched = launch_replicas(
        train_replica,
        settings,
        replace(begin, first_delayed_step=first_delayed_step(run, prepared.plan, resumed)),
        ledger=folder.ledger,
        tell=_tell,
        timeout_s=run.cluster.timeout_s,
        threads_per_process=prepared.machines.threads,
        backend="nccl" if prepared.machines.backend == "nccl" else "gloo",
        device=prepared.machines.device,
    )
    told = launched.ledger
    figures = SyncFigures(mode, told.num_epochs, told.num_rounds, told.num_committed, told.num_redone)
    outcomes = max(launched.results, key=_newest)
    return [replace(one, sync=figures) for one in outcomes]


def _newest(outcomes: list[Outcome]) -> int:
    step = first_of(outcomes).checkpoint
    return -1 if step is None else step


def _tell(sentence: str) -> None:
    print(f"bireme: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 (for people)
