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

from bireme.bounds import ANY
from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_in, load_cluster, read_cluster, save_cluster
from bireme.cluster.machine import num_cores
from bireme.devices import ACCELERATOR, UNTESTED
from bireme.errors import BiremeError, Tell
from bireme.files import scratch_folder
from bireme.machines.measured_lines import lines_in_variable
from bireme.machines.phases import PhaseForecast
from bireme.plan.plan import Plan, servers_of_places
from bireme.plan.plan_file import load_plan, write_plan
from bireme.report.terminal import progress_bar
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.replicas.hosts import ReplicaPart
from bireme.train.captured_run import is_divided, micro_batches
from bireme.train.checkpoint.checkpoint import Checkpoint, MachinesNote, fetch_manifests, step_after
from bireme.train.choices import with_agreement
from bireme.train.export import has_ended
from bireme.train.folder import RunFolder
from bireme.train.launching import write_predicted
from bireme.train.machines import CPU_WORKERS, LaunchedProcess, check_kinds, cluster_of, places_in, ranks_on
from bireme.train.outcome import RestartLimitError, check_restart_limit, count_start
from bireme.train.plan_search import ProfiledRun, chooses_batch, with_batch_of
from bireme.train.prepare import (
    AfterLoss,
    PreparedRun,
    may_plan_ahead,
    prepare,
    prepared_again,
    write_prepared,
)
from bireme.train.rendezvous import Environment
from bireme.train.resume_checks import check_finds_checkpoints, check_none_left, check_rate, check_same_run
from bireme.train.run_checkpoints import newest_state, start_name
from bireme.train.run_file import RunFile
from bireme.train.run_file.planning import AUTO
from bireme.train.run_machines import bring_run
from bireme.train.shares import as_slow_as_found

# The hosts of a run whose replicas may die: which ranks each of them starts.
#
# Something like torchrun starts processes on each host. The first of a host is its launcher: it starts the
# ranks of the host, as many as there are devices, and starts them again if they die. The others wait for its
# end. So the starter of these processes never sees a rank die.

Nodes = Mapping[str, Sequence[LaunchedProcess]]

_ALIKE = 1.1
"""Devices of one speed are equal if none has so many times the memory of another."""


def check_launchers(nodes: Nodes, mode: str) -> None:
    """Refuse hosts that have the same name: several processes of one host name, and no launcher numbers the
    hosts as torchrun does.
    """
    for members in nodes.values():
        name = members[0].host
        if len(members) > 1 and members[0].node == name:
            raise BiremeError(
                f'sync.mode is "{mode}", with which each host has one launcher, but {len(members)} processes '
                f"were started on hosts that call themselves {name}. If these are {len(members)} hosts, give "
                "each a name of its own. If it is one host, start one process there, which starts the "
                "others; or set GROUP_RANK to the number of the host, as torchrun does."
            )


def processes_of(
    run: RunFile, nodes: Nodes, *, is_mode_chosen: bool = False
) -> dict[str, list[LaunchedProcess]]:
    """The processes that the launchers of all hosts will start, numbered host by host. If the planner chooses
    the mode, they are as many as were started, so that every mode has the same devices.
    """
    counts = [*map(len, nodes.values())]
    if not is_mode_chosen:
        counts = _counts(run, [members[0] for members in nodes.values()], counts)
    found, first = dict[str, list[LaunchedProcess]](), 0
    for (node, (launcher, *_)), count in zip(nodes.items(), counts, strict=True):
        found[node] = [
            replace(launcher, rank=first + place, has_cuda=place < launcher.num_cuda)
            for place in range(count)
        ]
        first += count
    return found


def _counts(run: RunFile, launchers: Sequence[LaunchedProcess], started: Sequence[int]) -> list[int]:
    """The ranks of each host. If several processes were started there, as many, unless the run file says."""
    asked = run.cluster
    if asked.source is not None:
        servers = {server.name: len(server.devices) for server in load_cluster(asked.source).servers}
        if len(servers) != len(launchers):
            raise BiremeError(
                f"cluster.source is {asked.source}, which has {len(servers)} servers, but bireme train was "
                f"started on {len(launchers)} hosts. Start it on each of them."
            )
        by_name = [servers.get(one.host) for one in launchers]
        known = [count for count in by_name if count is not None]
        return known if len(known) == len(launchers) else list(servers.values())
    if asked.workers is not None:
        return [asked.workers] * len(launchers)
    uses_gpus = asked.device != "cpu" and asked.backend != "gloo" and all(one.num_cuda for one in launchers)
    own = [one.num_cuda if uses_gpus else CPU_WORKERS for one in launchers]
    return [num if num > 1 else count for num, count in zip(started, own, strict=True)]


def within_servers(plan: Plan, cluster: Cluster, width: int = 1) -> Plan:
    """A plan with as many replicas, or sites of so many, on one server as its devices allow: this plan, or
    with other devices in the place of equal ones. Replicas that share a server stay in their order.
    """
    depth = plan.source.num_ranks
    if not _spans_servers(plan, cluster, width):
        return plan
    devices = {placed.name: placed for placed in cluster.devices()}
    used = {name for row in plan.devices for name in row} & devices.keys()
    found = [devices[name].device for name in used]
    sizes = [one.memory_bytes for one in found]
    are_equal = len({(one.kind, one.speed) for one in found}) == 1 and max(sizes) <= _ALIKE * min(sizes)
    by_server: dict[int, list[str]] = {}
    for name, placed in devices.items():
        if name in used:
            by_server.setdefault(placed.server, []).append(name)
    if not found or not are_equal or max(map(len, by_server.values())) < depth * width:
        return plan
    whole = {server: len(names) // (depth * width) * depth * width for server, names in by_server.items()}
    ordered = [name for server, names in by_server.items() for name in names[: whole[server]]]
    ordered += [name for server, names in by_server.items() for name in names[whole[server] :]]
    replicas = [ordered[first : first + depth] for first in range(0, len(ordered), depth)]
    return replace(plan, devices=tuple(zip(*replicas, strict=True)))


def _spans_servers(plan: Plan, cluster: Cluster, width: int) -> bool:
    """Whether a replica, or a site of so many, is on more than one server."""
    servers, num = servers_of_places(plan, cluster), plan.source.num_ranks * width
    return any(len(set(servers[first : first + num])) > 1 for first in range(0, len(servers), num))


def parts_of_hosts(places: Sequence[int], nodes: Nodes, depth: int) -> list[list[ReplicaPart]]:
    """The parts of replicas of each host, where the process `places[p]` takes the place p of the plan."""
    host_of = {one.rank: host for host, members in enumerate(nodes.values()) for one in members}
    found: list[list[ReplicaPart]] = [[] for _ in nodes]
    for replica in range(len(places) // depth):
        own = [host_of[process] for process in places[replica * depth : (replica + 1) * depth]]
        hosts = tuple(dict.fromkeys(own))
        for host in hosts:
            ranks = tuple(rank for rank, each in enumerate(own) if each == host)
            found[host].append(ReplicaPart(replica, ranks, hosts))
    return found


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A run that is ready for all to join.

    `places[p]` is the rank that takes place p of the plan; `threads` are those of each process that were
    asked for. Where replicas may die, `nodes` are the processes that the
    launchers of all hosts will start, and ranks are theirs. If the run has second copies, `copies` is the
    name of this start in them. `losses` are the run without one of its machines, for plans that are made
    ahead.
    """

    prepared: PreparedRun
    folder: RunFolder
    checkpoint: Checkpoint | None
    places: list[int]
    threads: int | None
    nodes: Nodes
    copies: str = ""
    losses: tuple[AfterLoss, ...] = ()

    @property
    def step(self) -> int:
        """The step to go on after."""
        return step_after(self.checkpoint)


def set_up_run(
    environment: Environment,
    asked: RunFile,
    nodes: Nodes,
    ask_servers: Callable[[str, list[int]], list[str]],
    tell: Tell,
    machines: MachinesNote | None = None,
    wait: Callable[[PhaseForecast], None] | None = None,
) -> RunSetup | None:
    """Make a run ready, new or begun before; None if it has done all its steps.

    `ask_servers` has every machine say so many devices of a kind, `tell` is for sentences to people.
    `machines` serve their folders of the run. In a run of `bireme join`, `wait` takes what is predicted, and
    returns once the phase before this one has ended: only then its state is read.
    """
    keepers = [one.keeper for members in nodes.values() for one in members if one.keeper is not None]
    started, is_mode_chosen = nodes, asked.sync.mode == AUTO
    if asked.sync.mode != "allreduce":
        check_launchers(nodes, asked.sync.mode)
    if asked.sync.is_coordinated:
        nodes = processes_of(asked, nodes)
    named = _named(asked, environment)
    if machines is not None and named.log.name is not None:
        bring_run((Path(named.log.folder) / named.log.name).resolve(), machines)
    begun = _begun(named, environment)
    if begun is not None:
        begun.restore(tell)
        named = begun.completed(begun.with_fetched(named))
        check_finds_checkpoints(named, begun)
        if is_mode_chosen and begun.is_begun:
            named = with_kept_mode(named, begun, sum(map(len, nodes.values())))
    follows = wait is not None and begun is not None and environment.phase > 1
    state = None
    if not follows and (state := _newest(named, begun, environment, keepers, tell)) is None:
        return None
    device = _device(named, nodes)
    counts = [len(members) for members in nodes.values()]
    texts = ask_servers(device, counts)
    cluster = _cluster(named, nodes, device, texts, tell)
    before = begun if follows and begun is not None and begun.is_begun else None
    if before is not None and cluster is not None and named.balance.replan and before.cluster.is_file():
        plan_before = load_plan(before.plan).plan
        cluster = as_slow_as_found(cluster, read_cluster(before.cluster), plan_before, before.metrics)
    settled = _settled(named, nodes, device, cluster, is_mode_chosen=is_mode_chosen)
    is_same = begun is not None and _is_for(begun, settled, cluster)
    begins = state is None or state[0] is None
    prepared = None
    if not is_same:
        is_depth_free = named.plan.depth is None
        prepared = _planned_anew(settled, cluster, begun, before, begins=begins, is_depth_free=is_depth_free)
    sync = named.sync if prepared is None else prepared.run.sync
    if is_mode_chosen and sync.is_coordinated:
        nodes = processes_of(named, nodes, is_mode_chosen=True)
    if wait is not None:
        wait(replace(_forecast(prepared, begun, nodes), survives=sync.is_coordinated))
    if state is None and (state := _newest(named, begun, environment, keepers, tell)) is None:
        return None
    checkpoint, number = state
    if prepared is None:
        assert begun is not None, "it was begun on these devices"
        folder = begun
        with progress_bar("preparing") as progress:
            again = _with_source(settled, cluster, begun.cluster)
            found = prepared_again(again, begun, progress, checkpoint, tell, is_alone=False)
        prepared = _on_hosts(found)
        if prepared.plan != found.plan:
            write_plan(folder.plan, prepared.plan)
            folder.record()
    else:
        prepared, folder = _written(prepared, settled, cluster, begun, checkpoint, tell)
    if begun is not None:
        count_start(begun, step_after(checkpoint))
    ranks = ranks_on(prepared.machines.cluster, nodes)
    places = places_in(prepared.plan.plan, prepared.machines.cluster, ranks)
    idle = ", ".join(str(rank) for rank in sorted(set(ranks) - set(places)))
    if idle:
        tell(f"The plan uses {len(places)} of {len(ranks)} processes; rank {idle} has no work.")
    write_predicted(prepared, folder.predicted_timeline)
    threads = asked.cluster.threads_per_worker
    copies = start_name(number) if has_copies(prepared.run, prepared.plan.plan.width, started) else ""
    kept = with_agreement(named, sync.mode, AUTO)
    plans_ahead = wait is not None and may_plan_ahead(kept)
    losses = _losses(kept, nodes, texts, is_mode_chosen=is_mode_chosen) if plans_ahead else ()
    return RunSetup(prepared, folder, checkpoint, places, threads, nodes, copies, losses)


def with_kept_mode(run: RunFile, begun: RunFolder, num_processes: int) -> RunFile:
    """The run with the mode that the planner chose when it was begun, also on other devices. A process trains
    alone if there is no other one: an average of one is itself. Then the planner chooses anew for several.
    """
    if num_processes < 2:
        return with_agreement(run, "allreduce", AUTO)
    was_alone = read_cluster(begun.cluster).num_devices < 2
    return run if was_alone else with_agreement(run, begun.load_run().sync.mode, AUTO)


def _newest(
    run: RunFile,
    begun: RunFolder | None,
    environment: Environment,
    keepers: Sequence[KeeperAddress],
    tell: Tell,
) -> tuple[Checkpoint | None, int] | None:
    """The newest state of a run, if there is any, and the number of its next start; None if it has done all
    its steps.
    """
    if begun is None:
        return None, 0
    but = fetch_manifests(begun.path, run.checkpoint.folder)
    checkpoint, number = newest_state(begun.checkpoints(run), keepers, run, on_bad=tell, but=but)
    at = step_after(checkpoint)
    if has_ended(run, begun, at):
        tell(f"{begun.path} has finished its {run.training.steps} steps. To train further, set more.")
        return None
    check_rate(run, begun, at, tell)
    if environment.phase < 2:  # `bireme coordinate` bounds the phases that fail
        _check_progress(begun, at)
    source = "" if checkpoint is None or checkpoint.copies is None else ", from second copies"
    tell(f"{begun.path} resumes after step {at} of {run.training.steps}{source}.")
    return checkpoint, number


def has_copies(run: RunFile, width: int, started: Nodes) -> bool:
    """Whether a run that something like torchrun has started has second copies. `started` are its processes.

    Raises a `BiremeError` if the run asks for copies that it cannot have.
    """
    copies, mode = run.memory.copies, run.sync.mode
    most = max(map(len, started.values()))
    if copies and not run.sync.is_coordinated:
        raise BiremeError(
            f'memory.copies is {copies}, but sync.mode is "{mode}", in which a launcher such as torchrun '
            "starts the ranks and ends all processes of a host with one of them, and its copies too. Set "
            'sync.mode = "quorum", which has one replica go on as well, or leave out memory.copies.'
        )
    if run.has_copies(width) and most > 1:
        raise BiremeError(
            f"The state of this run has a second copy (memory.copies), but {most} processes were started on "
            "one host. Start one process on each host (torchrun --nproc-per-node 1): it starts the ranks and "
            "keeps the copies."
        )
    return run.has_copies(width)


def _check_progress(begun: RunFolder, step: int) -> None:
    try:
        check_restart_limit(begun, step)
    except RestartLimitError as error:
        raise RestartLimitError(f"{error} Under a launcher, remove {begun.starts} instead.") from None


def _named(run: RunFile, environment: Environment) -> RunFile:
    """The run under a name that a restart finds again."""
    name = run.log.name or environment.job
    if name is None and environment.may_restart:
        raise BiremeError(
            "The launcher may restart this run, which must then find its folder. Give the run a name "
            "with --set log.name=NAME, or pass --rdzv-id to torchrun."
        )
    return run.with_keys("log", name=name)


def _device(run: RunFile, nodes: Nodes) -> str:
    """Where all compute: on GPUs if each process has one."""
    asked, members = run.cluster, [one for node in nodes.values() for one in node]
    if asked.device in UNTESTED:
        return asked.device
    lacking = next((one for one in members if not one.has_cuda), None)
    if lacking is None:
        on_cpu = asked.device == "cpu" or (asked.device == "auto" and asked.backend == "gloo")
        return "cpu" if on_cpu else ACCELERATOR
    for key, value, needed in (("device", asked.device, ACCELERATOR), ("backend", asked.backend, "nccl")):
        if value == needed:
            raise BiremeError(
                f"cluster.{key} is {value}, but rank {lacking.rank} on {lacking.host} has no CUDA device of "
                f"its own. Start fewer processes there, or set cluster.{key} to auto."
            )
    return "cpu"


def _cluster(run: RunFile, nodes: Nodes, device: str, texts: Sequence[str], tell: Tell) -> Cluster | None:
    """The devices that were asked for or gathered; None where it is the cores of one machine."""
    num_ranks = sum(map(len, nodes.values()))
    if run.cluster.source is not None:
        cluster = load_cluster(run.cluster.source)
        if cluster.num_devices != num_ranks:
            raise BiremeError(
                f"cluster.source is {run.cluster.source}, which has {cluster.num_devices} devices, but "
                f"{num_ranks} processes were started. Start one per device."
            )
        check_kinds(run, cluster, device)
        return cluster
    if len(nodes) == 1 and device == "cpu":
        return None
    found = [cluster_in(text, f"what machine {place} says") for place, text in zip(nodes, texts, strict=True)]
    servers = [server for one in found for server in one.servers]
    if len(servers) == 1:
        return Cluster(tuple(servers))
    known = {number: place for place, number in enumerate(nodes)}
    lines = [
        replace(one, first=known[str(one.first)], second=known[str(one.second)])
        for one in lines_in_variable()
        if {str(one.first), str(one.second)} <= known.keys()
    ]
    cluster, note = cluster_of(servers, lines)
    tell(note)
    return cluster


def _settled(
    run: RunFile, nodes: Nodes, device: str, cluster: Cluster | None, *, is_mode_chosen: bool
) -> RunFile:
    """The run with its devices as they are. Unless the run file says otherwise it is one pipeline of all, or
    if replicas may die, whole replicas on each host; if the planner chooses the mode, it chooses this too.
    """
    asked, num_ranks = run.cluster, sum(map(len, nodes.values()))
    if cluster is None:
        return run.with_keys("cluster", device=device, workers=num_ranks)
    threads = asked.threads_per_worker
    if threads is None and device == "cpu":
        threads = max(1, num_cores() // len(next(iter(nodes.values()))))
    backend = "gloo" if device == "cpu" else asked.backend.replace("auto", "nccl")
    run = run.with_keys("cluster", device=device, workers=None, threads_per_worker=threads, backend=backend)
    plan = run.plan
    is_free = plan.file is None and plan.depth is None and plan.width is None and not run.data.private
    is_free = is_free and plan.stage_widths == ANY and not is_mode_chosen
    if is_free and run.sync.is_coordinated:
        depth = gcd(*map(len, nodes.values()))  # whole replicas on each host
        width = most_replicas(run, num_ranks // depth)
        return run.with_keys("plan", depth=depth, width=width)
    if asked.source is None and is_free:
        # What joins the machines is not known, and a pipeline needs least of it.
        return run.with_keys("plan", depth=num_ranks)
    return run


def most_replicas(run: RunFile, most: int) -> int:
    """The replicas, at most that many, among which the batch can be divided in micro-batches of one or two
    sizes; the other machines stand by. It is `most` if no number of replicas will do.
    """
    if run.plan.largest_batch is not None:
        return most
    sizes = micro_batches(run)
    least = 1 if run.has_copies(1) else 2
    widths = (one for one in range(most, least - 1, -1) if one % (run.sync.sites or 1) == 0)
    return next((one for one in widths if is_divided(run, one, sizes)), most)


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
    run: RunFile,
    cluster: Cluster | None,
    begun: RunFolder | None,
    before: RunFolder | None,
    *,
    begins: bool,
    is_depth_free: bool,
) -> PreparedRun:
    """The run with a new plan; nothing is written yet. The last two and `before` are as for `prepare`."""
    if begun is not None and begun.is_begun and chooses_batch(run):
        # It keeps the batch that it has chosen.
        run = with_batch_of(run, begun.load_run()).with_keys("plan", largest_batch=None)
    with progress_bar("preparing") as progress, scratch_folder() as scratch:
        path = Path(scratch) / "cluster.toml"
        if cluster is not None:
            save_cluster(cluster, path)
        asked = _with_source(run, cluster, path)
        prepared = prepare(
            asked, progress, is_alone=False, begins=begins, before=before, is_depth_free=is_depth_free
        )
    return _on_hosts(prepared)


def _written(
    prepared: PreparedRun,
    run: RunFile,
    cluster: Cluster | None,
    begun: RunFolder | None,
    checkpoint: Checkpoint | None,
    tell: Tell,
) -> tuple[PreparedRun, RunFolder]:
    """The run with its folder, which has all that the other processes read."""
    if checkpoint is not None and begun is not None:
        check_none_left(prepared.run, begun, step_after(checkpoint))
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
