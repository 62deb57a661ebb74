"""Starting the processes of a run on this machine, or joining those that torchrun has started.

A signal to the process that people started is passed on to its ranks, which agree on where to stop; the
processes are ended the hard way only if a second signal comes.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bireme.cluster.cluster import Cluster
from bireme.devices import ACCELERATOR, VISIBLE, Backend, num_accelerators
from bireme.errors import BiremeError, SampleError, tell
from bireme.machines.orders import phase_of
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.plan.plan_file import planned_units, saved_plan
from bireme.plan.search.search import timeline_of
from bireme.report.timeline_document import write_recorded
from bireme.runtime.board import RankFailed, RunFailed, WeightsLost
from bireme.runtime.launch import launch, signal_ranks
from bireme.runtime.layout import layout_of
from bireme.runtime.processes import environment
from bireme.runtime.replicas.hosts import LaunchHost
from bireme.runtime.replicas.launch import launch_replicas
from bireme.sync.coordinator.samples import CoordinatorSettings, GroupSettings, SyncMode
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good, step_after
from bireme.train.choices import sums_of
from bireme.train.finishing import FinishedRun, finish
from bireme.train.folder import RunFolder
from bireme.train.machines import visible_gpus
from bireme.train.outcome import REPLAN, Outcome, SyncFigures, count_start, first_of
from bireme.train.plan_search import (
    RECORDED,
    chooses_batch,
    first_delayed_step,
    full_request_of,
    plan_request_of,
    planned,
    with_batch_of,
)
from bireme.train.prepare import PreparedRun, write_prepared
from bireme.train.rank_part import RunStart
from bireme.train.resume_checks import left_at
from bireme.train.run_checkpoints import HostKeeper, newest_state
from bireme.train.run_data import learns, most_added
from bireme.train.run_file import RunFile
from bireme.train.shares import share_limits, slowed
from bireme.train.worker import train_rank, train_replica

# A new plan for a run on its way, one of whose devices has become slow.


def _replanned(prepared: PreparedRun, outcome: Outcome) -> PreparedRun:
    """The run with the best plan for its devices as they are now, or as it is if that would be no faster.

    What is known of the machines stays as it was: a device that is slow today may be its old self tomorrow.
    """
    if prepared.profile is None or outcome.slow is None:
        return prepared
    cluster = slowed(prepared.machines.cluster, prepared.plan.plan, outcome.slow)
    run, names = prepared.run, [unit.name for unit in prepared.profile.units]
    request = full_request_of(run, sums_of(run, prepared.graph), prepared.graph, names, cluster)
    answer = planned(prepared.profile, cluster, request, lambda _done, _what: None, is_brief=False)
    if outcome.batch_s is not None and answer.best.forecast.batch_s >= outcome.batch_s:
        return prepared
    return replace(prepared, plan=saved_plan(answer, planned_units(prepared.profile)), answer=answer)


# A few batches of a run as the simulator foresees them, to be drawn above those that were measured.


def write_predicted(prepared: PreparedRun, path: Path) -> None:
    """Write the predicted timeline; nothing if the plan does not name devices or there is no profile."""
    if prepared.profile is None or not prepared.plan.plan.devices:
        return
    timeline = timeline_of(
        prepared.plan.plan,
        prepared.profile,
        prepared.machines.cluster,
        plan_request_of(prepared.run, sums_of(prepared.run, prepared.graph), prepared.graph),
        num_batches=RECORDED,
    )
    write_recorded(timeline, path)


_USUAL_RESTARTS = 3


def start(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    *,
    is_shown: bool,
    restarts: int | None = None,
) -> FinishedRun:
    """Run the processes of a prepared run to their end, then write what came of it.

    One that ends because a stage has become slow goes on with a new plan, once. One that fails goes on from
    its newest checkpoint, unless so many `restarts` in a row have reached no new one: then the failure is
    raised. By default there are `_USUAL_RESTARTS` if replicas may die or there are second copies, and none
    otherwise.
    """
    has_copies = prepared.run.has_copies(prepared.plan.plan.width)
    if restarts is None:
        restarts = _USUAL_RESTARTS if prepared.run.sync.is_coordinated or has_copies else 0
    with closing(HostKeeper()) as host:
        keeper = host if has_copies else None
        outcomes = _run_through(prepared, folder, checkpoint, keeper, is_shown=is_shown, restarts=restarts)
        if first_of(outcomes).reason == REPLAN:
            if chooses_batch(prepared.run):  # its ranks have, and the folder remembers
                prepared = replace(prepared, run=with_batch_of(prepared.run, folder.load_run()))
            prepared = replace(_replanned(prepared, first_of(outcomes)), initial=None)
            newest = newest_good(folder.checkpoints(prepared.run))
            write_prepared(prepared, folder, newest)
            outcomes = _run(prepared, folder, newest, keeper, is_shown=is_shown, may_replan=False)
    return finish(prepared, folder, outcomes)


def _run_through(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    keeper: HostKeeper | None = None,
    *,
    is_shown: bool,
    restarts: int,
) -> list[Outcome]:
    """What the ranks of a run come to, after as many restarts as it takes and may take."""
    num_in_vain = 0
    while True:
        step, num_ledger_bytes = step_after(checkpoint), _size_of(folder.ledger)
        try:
            return _run(prepared, folder, checkpoint, keeper, is_shown=is_shown, may_replan=True)
        except (BiremeError, RunFailed) as failure:
            # A user's mistake shows before anything is trained, and would only show again; so would a sample.
            is_mistake = isinstance(failure, BiremeError) and _size_of(folder.ledger) == num_ledger_bytes
            if is_mistake or isinstance(failure, SampleError):
                raise
            keepers = [] if keeper is None or keeper.address is None else [keeper.address]
            with suppress(BiremeError):  # if all checkpoints are damaged, the failure says more
                checkpoint, _ = newest_state(folder.checkpoints(prepared.run), keepers, prepared.run)
            num_in_vain = 0 if step_after(checkpoint) > step else num_in_vain
            if num_in_vain >= restarts:
                raise
            num_in_vain += 1
            count_start(folder, step_after(checkpoint))
            why = failure.line if isinstance(failure, RankFailed) else str(failure)
            at = f"after step {step_after(checkpoint)}" if checkpoint else "from its beginning"
            at += ", from second copies" if checkpoint and checkpoint.copies else ""
            count = f"restart {num_in_vain} of at most {restarts} in a row without a new checkpoint"
            tell(f"{why} The run continues {at} ({count}).")


def _size_of(path: Path) -> int:
    """Of a file, in bytes; 0 if there is none. A ledger grows with every batch that counts."""
    return path.stat().st_size if path.is_file() else 0


def _run(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    keeper: HostKeeper | None,
    *,
    is_shown: bool,
    may_replan: bool,
) -> list[Outcome]:
    """What the ranks of a run come to."""
    plan, machines = prepared.plan.plan, prepared.machines
    write_predicted(prepared, folder.predicted_timeline)
    begin = run_start(prepared, folder, checkpoint, machines.threads)
    begin = replace(begin, is_shown=is_shown, may_replan=may_replan, census=prepared.census)
    if keeper is not None:
        begin = replace(begin, copying=keeper.orders(prepared.run, step_after(checkpoint)))
    gpus = gpus_here(plan.process_devices, machines.cluster, machines.device)
    with signals_passed_on(), environment({VISIBLE: gpus}):
        if prepared.run.sync.mode != "allreduce":
            settings = replica_settings(prepared, folder, checkpoint)
            found = launch_here(
                prepared.run,
                folder,
                settings,
                begin,
                backend=machines.backend,
                device=machines.device,
            )
            return found or []
        return launch(
            train_rank,
            plan.num_ranks,
            begin,
            timeout_s=prepared.run.cluster.timeout_s,
            threads_per_process=machines.threads,
            backend=machines.backend,
            device=machines.device,
        )


def gpus_here(names: Sequence[str], cluster: Cluster, device: str) -> str | None:
    """The GPUs that processes of this host have to see to compute on these devices; None if all."""
    visible = os.environ.get(VISIBLE)
    if device != ACCELERATOR:
        return visible
    return visible_gpus(names, cluster, visible, num_cuda=num_accelerators())


def run_start(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None, threads: int | None
) -> RunStart:
    """What all ranks of a run are told. A rank that is started again has no checkpoint to find out by itself
    after which step updates are delayed.
    """
    resumed = None if checkpoint is None else checkpoint.manifest
    copies = None if checkpoint is None else checkpoint.copies
    return RunStart(
        folder.path,
        None if checkpoint is None or copies is not None else checkpoint.folder,
        threads,
        is_shown=False,
        words=first_words(prepared),
        passed_over=() if checkpoint is None else checkpoint.passed_over,
        first_delayed_step=first_delayed_step(prepared.run, prepared.plan, resumed),
        copies=copies,
        holders={} if checkpoint is None else checkpoint.holders,
    )


# Replicas that may die: what their coordinators are told, and what is said of them at the end.


def replica_settings(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None
) -> CoordinatorSettings:
    """What coordinators are told of a run."""
    run, plan = prepared.run, prepared.plan.plan
    step = step_after(checkpoint)
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
    backend: Backend,
    device: str,
    host: LaunchHost | None = None,
) -> list[Outcome] | None:
    """What the ranks of a replica of this host come to, of one that leads at the end if its rank 0 is here;
    nothing if the rank 0 of each is elsewhere. None if no replica here has come to the end. Without a `host`
    all replicas are here. Raises `WeightsLost` if all replicas were lost on other hosts.
    """
    launched = launch_replicas(
        train_replica,
        settings,
        begin,
        ledger=folder.ledger,
        tell=tell,
        timeout_s=run.cluster.timeout_s,
        threads_per_process=begin.threads,
        backend=backend,
        device=device,
        host=host,
    )
    if not launched.results and launched.is_lost:
        raise WeightsLost("All replicas have ended on other hosts.")
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


def first_words(prepared: PreparedRun) -> dict[str, Any]:
    """What the log of a run begins with."""

    from bireme import __version__

    plan, forecast, cluster = prepared.plan.plan, prepared.plan.forecast, prepared.machines.cluster
    devices, phase = plan.process_devices, phase_of(os.environ)
    own = {placed.name: placed.device.memory_bytes for placed in cluster.devices()}
    return {
        "version": __version__,
        **({"phase": phase} if phase else {}),
        "torch": torch.__version__,
        "schedule": plan.schedule,
        "num_stages": plan.num_stages,
        "width": plan.width,
        "devices": list(devices),
        "device_bytes": [own.get(name) for name in devices],
        "link_bytes_per_s": _links_onward(plan, cluster),
        "predicted_batch_s": None if forecast is None else forecast.batch_s,
        "learns": learns(prepared.run, prepared.data, prepared.graph),
        **({"sync_mode": plan.sync_mode, "sum_codec": plan.sum_codec} if plan.sync_mode else {}),
    }


def _links_onward(plan: Plan, cluster: Cluster) -> list[float | None]:
    """The bandwidth from the device of each rank to that of the next rank of its replica, if it has one."""
    devices = plan.process_devices
    found: list[float | None] = [None] * len(devices)
    for rank in range(len(devices) - 1):
        if devices[rank] != devices[rank + 1] and (rank + 1) % plan.source.num_ranks:
            speed = cluster.bandwidth(*map(cluster.number_of, devices[rank : rank + 2]))
            found[rank] = speed if isfinite(speed) else None
    return found


@contextmanager
def signals_passed_on() -> Iterator[list[int]]:
    """Pass signals to the ranks as a request to stop. The second interrupt ends everything. Gives the list of
    the signals that have come.

    Processes that are started inside hold such requests back until they can take them, for this thread holds
    them back and they inherit that; another one is there to take them here.
    """
    interrupts, came = 0, list[int]()
    over = threading.Event()
    taker = threading.Thread(target=over.wait, name="bireme signals", daemon=True)
    taker.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        came.append(number)
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt
        if not signal_ranks(signal.SIGUSR1):  # there is nothing to save yet, or any more
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        tell("stopping after this step and saving …")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    try:
        yield came
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
