"""Rank 0's setup of a run that other processes join: devices, plan, folder, checkpoint.

A run that torchrun has started again finds its folder by its name and goes on in it. Its plan stays as it
was if the devices did, and a new one is made if there are others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory

from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.cluster_file import load_cluster, read_cluster, save_cluster
from bireme.cluster.machine import num_cores
from bireme.devices import ACCELERATOR, UNTESTED
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.phases import PhaseForecast
from bireme.plan.plan import Plan, servers_of_places
from bireme.plan.plan_file import load_plan, write_plan
from bireme.plan.widths import ANY
from bireme.report.terminal import progress_bar
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.replicas.hosts import ReplicaPart
from bireme.train.captured_run import micro_batches
        return run.with_keys("plan", depth=depth, width=width)
    if asked.source is None and is_free:
        # What joins the machines is not known, and a pipeline needs least of it.
        return run.with_keys("plan", depth=num_ranks)
    return run


def most_replicas(run: RunFile, most: int) -> int:
    """The replicas, at most that many, among which the batch can be divided in micro-batches of one or two
    sizes; the other machines stand by. It is `most` if no number of replicas will do.
    """
    batch, asked = run.training.batch_size, run.plan
    if asked.largest_batch is not None:
        return most
    sizes = micro_batches(run)

    def is_divided(width: int) -> bool:
        own = {size * width for size in sizes}
        own |= {
            small * width + (large - small) * num
            for small in sizes
            for large in sizes
            for num in range(width)
        }
        counts = {batch // one for one in own if one > 0 and batch % one == 0}
        return bool(counts if asked.microbatches is None else counts & {asked.microbatches})

    least = 1 if run.has_copies(1) else 2
    widths = (one for one in range(most, least - 1, -1) if one % (run.sync.sites or 1) == 0)
    return next(filter(is_divided, widths), most)


def _forecast(prepared: PreparedRun | None, begun: RunFolder | None, nodes: Nodes) -> PhaseForecast:
    """What is predicted of a phase: with the plan that is `prepared`, else with the one that it was begun
    with.
    """
    if prepared is not None:
        plan, cluster = prepared.plan, prepared.machines.cluster
    else:
        assert begun is not None, "it was begun on these devices"
        plan, cluster = load_plan(begun.plan), read_cluster(begun.cluster)
    before_s = None
    if begun is not None and begun.is_begun and prepared is not None and prepared.profile is not None:
        with suppress(BiremeError):  # such as a plan for a machine that is gone
            now = ProfiledRun(prepared.run, cluster, prepared.graph, prepared.profile)
            before_s = now.given(begun.plan).answer.best.forecast.batch_s
    used = {*places_in(plan.plan, cluster, ranks_on(cluster, nodes))}
    ranks = [{one.rank for one in members} for members in nodes.values()]
    idle = tuple(number for number, own in enumerate(ranks) if not own & used)
    return PhaseForecast(None if plan.forecast is None else plan.forecast.batch_s, before_s, idle)


def _losses(
    run: RunFile, nodes: Nodes, texts: Sequence[str], *, is_mode_chosen: bool
) -> tuple[AfterLoss, ...]:
    """The run as it would be set up without each machine, but for this one, which has rank 0."""
    found = []
    for lost in [*nodes][1:] if run.cluster.source is None else ():
        left = {node: members for node, members in nodes.items() if node != lost}
        own = [text for node, text in zip(nodes, texts, strict=True) if node != lost]
        device = _device(run, left)
        cluster = _cluster(run, left, device, own, lambda _: None)
        found.append((_settled(run, left, device, cluster, is_mode_chosen=is_mode_chosen), cluster))
    return tuple(found)


def _begun(run: RunFile, environment: Environment) -> RunFolder | None:
    """The folder of this run if it was begun before, however little of it there is."""
    if run.log.name is None:
        return None
    folder = RunFolder((Path(run.log.folder) / run.log.name).resolve())
    is_own = environment.is_restart or folder.run_file.is_file() or folder.recorded() is not None
    return folder if folder.path.is_dir() and is_own else None


def _planned_anew(
    run: RunFile, cluster: Cluster | None, begun: RunFolder | None, before: RunFolder | None, *, begins: bool
) -> PreparedRun:
    """The run with a new plan; nothing is written yet. `before` is as for `prepare`."""
    if begun is not None and begun.is_begun and chooses_batch(run):
        # It keeps the batch that it has chosen.
        run = with_batch_of(run, begun.load_run()).with_keys("plan", largest_batch=None)
    with progress_bar("preparing") as progress, TemporaryDirectory() as scratch:
        path = Path(scratch) / "cluster.toml"
        if cluster is not None:
            save_cluster(cluster, path)
        asked = _with_source(run, cluster, path)
        prepared = prepare(asked, progress, is_alone=False, begins=begins, before=before)
    return _on_hosts(prepared)


def _written(
    prepared: PreparedRun,
    run: RunFile,
    cluster: Cluster | None,
    begun: RunFolder | None,
    checkpoint: Checkpoint | None,
    tell: Callable[[str], None],
) -> tuple[PreparedRun, RunFolder]:
    """The run with its folder, which has all that the other processes read."""
    if checkpoint is not None and begun is not None:
        check_same_run(
            checkpoint, begun, prepared.run, prepared.graph, prepared.data, prepared.identity, tell
        )
    folder = begun or RunFolder(RunFolder.new(run, datetime.now()).path.resolve())
    kept = ("data", "training", "plan", "memory", "sync")
    chosen = run.model_copy(update={name: getattr(prepared.run, name) for name in kept})
    initial = prepared.initial if checkpoint is None else None
    prepared = replace(prepared, run=_with_source(chosen, cluster, folder.cluster), initial=initial)
    write_prepared(prepared, folder, checkpoint)
    return prepared, folder


def _on_hosts(prepared: PreparedRun) -> PreparedRun:
    """With replicas on one host each where replicas may die and devices allow it."""
    sync = prepared.run.sync
    if not sync.is_coordinated:
        return prepared
    asked = prepared.plan.plan
    width = asked.width // sync.num_sites(asked.width)
    plan = within_servers(asked, prepared.machines.cluster, width)
    return replace(prepared, plan=replace(prepared.plan, plan=plan))


def _is_for(begun: RunFolder, run: RunFile, cluster: Cluster | None) -> bool:
    """Whether a run was begun on the devices that there are now. Its cluster is what is written last."""
    parts = (begun.run_file, begun.plan, begun.graph, begun.evaluation_graph, begun.cluster)
    if not all(path.is_file() for path in parts):
        return False
    before = read_cluster(begun.cluster)
    return before.num_devices == run.cluster.workers if cluster is None else before == cluster


def _with_source(run: RunFile, cluster: Cluster | None, path: Path) -> RunFile:
    """The run on a gathered cluster, which lies there."""
    if cluster is None or run.cluster.source is not None:
        return run
    return run.with_keys("cluster", source=str(path))
