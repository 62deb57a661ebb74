"""A run whose replicas may die: what it needs, its coordinator, and what is said of it at the end."""

import sys
from dataclasses import replace

from bireme.devices import Backend
from bireme.model.units import units_of
from bireme.runtime.layout import layout_of
from bireme.runtime.quorum.hosts import LaunchHost
from bireme.runtime.quorum.launch import launch_replicas
from bireme.sync.coordinator.samples import CoordinatorSettings, GroupSettings, SyncMode
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome, SyncFigures, first_of
from bireme.train.plan_search import first_delayed_step
from bireme.train.prepare import PreparedRun
from bireme.train.private_census import most_added
from bireme.train.rank_part import RunStart
from bireme.train.resume_checks import left_at
from bireme.train.run_file import RunFile
from bireme.train.shares import share_limits
from bireme.train.worker import train_replica


def run_replicas(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None, begin: RunStart
) -> list[Outcome]:
    """What the ranks of a replica come to, after a run in which others may have died and come back.

    It is one that knows of the newest checkpoint, as the one that wrote it does.
    """
    found = launch_here(
        prepared.run,
        folder,
        replica_settings(prepared, folder, checkpoint),
        with_delay(prepared, checkpoint, begin),
        threads=prepared.machines.threads,
        backend="nccl" if prepared.machines.backend == "nccl" else "gloo",
        device=prepared.machines.device,
    )
    return found or []


def with_delay(prepared: PreparedRun, checkpoint: Checkpoint | None, begin: RunStart) -> RunStart:
    """With the step after which updates are delayed: who is started again has no checkpoint that says it."""
    resumed = None if checkpoint is None else checkpoint.manifest
    return replace(begin, first_delayed_step=first_delayed_step(prepared.run, prepared.plan, resumed))


def replica_settings(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None
) -> CoordinatorSettings:
    """What coordinators are told of a run."""
    run, plan = prepared.run, prepared.plan.plan
    step = 0 if checkpoint is None else checkpoint.manifest.step
    fresh, waiting = left_at(folder.ledger, step, run.training.batch_size)
    limits = share_limits(prepared.plan, prepared.profile, run.training.batch_size, grows=False)
    if prepared.census:
        own = most_added(
            run, prepared.graph, prepared.data.training, prepared.census, plan, prepared.machines.cluster
        )
        most = (
            max(one - added, least) for one, added, least in zip(limits.most, own, limits.least, strict=True)
        )
        limits = replace(limits, most=tuple(most))
    num_sites = run.sync.num_sites(plan.width)
    width = plan.width // num_sites
    return CoordinatorSettings(
        SyncMode(run.sync.mode),
        num_sites,
        width * plan.source.num_ranks,
        run.training.batch_size,
        limits.of_sites(width),
        lease_s=run.sync.lease_s,
        grace_s=run.sync.grace_s,
        first=step,
        fresh=fresh,
        waiting=waiting,
        num_samples=prepared.data.order(run.data.seed).num_samples,
        num_lines=run.sync.diloco_fragments,
        timeout_s=run.cluster.timeout_s if run.sync.averages else 0.0,
        is_equal=run.sync.averages and run.balance.mode == "off",
        groups=GroupSettings(run.sync.connect_every, of_replicas=width > 1 or _shares_weights(prepared)),
    )


def _shares_weights(prepared: PreparedRun) -> bool:
    """Whether ranks of a replica share weights."""
    program, graph = prepared.plan.plan.by_program, prepared.graph
    return bool(layout_of(graph, units_of(graph), program, 0, program.num_ranks).tied)


def launch_here(
    run: RunFile,
    folder: RunFolder,
    settings: CoordinatorSettings,
    begin: RunStart,
    *,
    threads: int | None,
    backend: Backend,
    device: str,
    host: LaunchHost | None = None,
) -> list[Outcome] | None:
    """What the ranks of a replica of this host come to, of one that leads at the end if its rank 0 is here;
    nothing if the rank 0 of each is elsewhere. None if no replica here has come to the end. Without a `host`
    all replicas are here.
    """
    launched = launch_replicas(
        train_replica,
        settings,
        begin,
        ledger=folder.ledger,
        tell=_tell,
        timeout_s=run.cluster.timeout_s,
        threads_per_process=threads,
        backend=backend,
        device=device,
        host=host,
    )
    if not launched.results:
        return None
    found = [outcomes for outcomes in launched.results if outcomes]
    if not found:
        return []
    told = launched.ledger
    mode = SyncMode(run.sync.mode)
    figures = SyncFigures(mode, told.num_epochs, told.num_rounds, told.num_committed, told.num_redone)
    outcomes = max(found, key=_newest)
    return [replace(one, sync=figures) for one in outcomes]


def _newest(outcomes: list[Outcome]) -> tuple[bool, int]:
    own = first_of(outcomes)
    return own.leads, -1 if own.checkpoint is None else own.checkpoint


def _tell(sentence: str) -> None:
    print(f"bireme: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 (for people)
