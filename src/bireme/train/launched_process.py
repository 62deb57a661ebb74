"""`bireme train` where something like torchrun has started the processes: each of them joins the run.

Rank 0 prepares, tells the others, and at the end writes down what came of it. All talk goes through the
run's store. Every process may be anywhere and may have been started again: nothing but the environment, the
run file and the folder of the run is relied on.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_text, read_cluster
from bireme.cluster.machine import host_name
from bireme.devices import num_accelerators
from bireme.errors import BiremeError, first_line, system_errors, tell
from bireme.files import path_within
from bireme.model.graph_file import load_graph
from bireme.pieces import partial_files
from bireme.plan.plan import servers_of_places
from bireme.plan.plan_file import load_plan
from bireme.runtime.board import Board, RankFailed
from bireme.runtime.copies.keeper import KeeperAddress
from bireme.runtime.replicas.hosts import MOST_ALONE_S, LaunchHost
from bireme.runtime.stores import PrefixStore, Store
from bireme.runtime.world import FAILED_FIRST_S, World
from bireme.train.checkpoint.checkpoint import MACHINES, MachinesNote
from bireme.train.fetched import FetchProgress
from bireme.train.finishing import DONE, FinishedRun, check_kept, check_room, finish, kept_bytes
from bireme.train.folder import RunFolder, load_asked
from bireme.train.host_launcher import (
    RunLostError,
    goes_on,
    host_orders,
    how_it_ended_before,
    meet_hosts,
    note_begin,
    note_end,
    part,
    train_on_host,
    under_way,
    wait_for_launcher,
)
from bireme.train.joined_processes import Attended
from bireme.train.launching import run_start
from bireme.train.machines import LaunchedProcess, nodes_of, server_here
from bireme.train.model import RunModel
from bireme.train.outcome import Outcome, RestartLimitError, first_of
from bireme.train.prepare import PreparedRun, plan_ahead
from bireme.train.rank_part import SpreadMachines
from bireme.train.rank_zero_setup import RunSetup, set_up_run
from bireme.train.rendezvous import (
    ORDERS,
    Announcements,
    Environment,
    Orders,
    digest_of,
    encryption_of,
    rendezvous,
    until,
)
from bireme.train.resume_checks import check_files_here
from bireme.train.run_checkpoints import HostKeeper
from bireme.train.run_data import (
    Census,
    census_from,
    census_of,
    check_same_census,
    data_of,
    load_census,
    plain_census,
    write_census,
)
from bireme.train.run_file import paths_for_all
from bireme.train.run_machines import (
    MachineFolders,
    fetch_weights_of,
    put_mark,
    sees_mark,
    take_lines,
    take_run,
)
from bireme.train.worker import train_rank
from bireme.wire.encryption import set_encryption

_USER_ERROR, _NO_PROGRESS = 2, 3
"""Exit statuses of a run that cannot begin, and of one that reached its restart limit."""

SEEN_S = 30.0
"""How long a file may take to be seen on another machine: shared folders are late."""

_PARTING_S = 30.0
_AGAIN_S = 1.0
_UNUSED_S = 3.0
"""Within this time `bireme join` hears that a phase is not used, and kills its processes."""
_MEMBER = TypeAdapter(LaunchedProcess)

Show = Callable[[PreparedRun, RunFolder], None]


def join(
    run_file: Path | None, sets: Sequence[str], show: Show, *, anyway: bool = False
) -> FinishedRun | None:
    """Take part in the run that the environment places this process in, to its end; with `anyway` although
    the disk has no room for what the run saves.

    Rank 0 has the result, and `show` is called there once the run is ready. On other ranks, and where the
    run had done all its steps before, it is None. A mistake that shows before the run begins ends all
    processes with status 2; rank 0 prints it, and so does each other host.
    """
    environment = Environment.of(os.environ)
    with suppress(BiremeError):  # rank 0 says what is wrong
        set_encryption(load_asked(run_file, sets).links.encrypt)
    if sentence := how_it_ended_before(environment, run_file, sets):
        if environment.has_own_output:
            tell(sentence)
        return None
    with closing(HostKeeper(Attended.of(os.environ))) as keeper, closing(MachineFolders()) as folders:
        ends_s = None
        if (back := under_way(environment, run_file, sets)) is not None:
            with suppress(RunLostError):
                return _on_host(*back, environment.rank, None, keeper, folders)
            ends_s = _lost(environment)
        while True:
            try:
                store = rendezvous(environment) if ends_s is None else rendezvous(environment, MOST_ALONE_S)
                return _Joined(environment, store, keeper, folders, run_file, sets, anyway).go(show)
            except RunLostError:
                ends_s = _lost(environment)
            except dist.DistError as error:  # its text goes on with frames of C++
                if ends_s is not None and time.monotonic() < ends_s:
                    time.sleep(_AGAIN_S)  # the first host may be one that is to be started again
                    continue
                _wait_for_kill(environment)
                tell(
                    f"Rank {environment.rank} has lost rank 0, whose output may say why: {first_line(error)}"
                )
                raise SystemExit(1) from None


def _lost(environment: Environment) -> float:
    """Print how the run goes on. Returns until when its hosts may come (`time.monotonic`). In a run of
    `bireme join` this process ends: another phase begins, over the machines that are there.
    """
    if environment.phase:
        raise SystemExit(1)
    tell(
        "The run goes on from its second copies, or from its newest checkpoint, once all of its hosts are "
        "there. If bireme train has ended on a host, start it there again in the same way as before."
    )
    return time.monotonic() + MOST_ALONE_S


def _wait_for_kill(environment: Environment) -> None:
    """Let `bireme join` kill this process if its phase, which was prepared, is not used: rank 0 may have been
    killed before, and its loss would be reported as a failure.
    """
    if environment.phase:
        time.sleep(_UNUSED_S)


def _on_host(
    orders: Orders,
    host: LaunchHost | None,
    rank: int,
    prepared: PreparedRun | None,
    keeper: HostKeeper,
    folders: MachineFolders,
) -> FinishedRun | None:
    """Train the ranks of this host. If this process is not its launcher, wait for that."""
    assert orders.hosts is not None, "replicas may die"
    if host is not None:
        if orders.start.machines is not None and folders.note is None:
            fetched = orders.folder.fetched_paths()
            roots = [fetched.get(*one) for one in zip(orders.files, orders.roots, strict=True)]
            folders.begin_again(orders.folder, orders.folder.load_run(), roots, orders.kept_bytes)
        finished = train_on_host(orders, orders.hosts, host, prepared, keeper)
        if folders.note is not None:
            folders.finish()
            part(orders, folders.note.others, leads=finished is not None)
        return finished
    wait_for_launcher(orders.hosts, rank)
    return None


@dataclass
class _Joined:
    """This process in the run, after the rendezvous.

    `place` is its rank while the run is prepared, and then its place in the plan, which failures name.
    `nodes` are the processes of each machine, `firsts` the first rank of each, and `node` is the index of
    this machine. `_runs` is the folder for runs on this machine, `_taken` what this process was told, with
    the folder of the run on this machine. `_fetched` are the bytes of data and model files that it has
    fetched, by the names of machines.
    """

    _environment: Environment
    _store: Store
    _keeper: HostKeeper
    _folders: MachineFolders
    _run_file: Path | None
    _sets: Sequence[str]
    _anyway: bool
    _runs: Path | None = None
    _taken: Orders | None = None
    _fetched: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = self._environment.rank
        self._talk = Announcements(self._store)

    def go(self, show: Show) -> FinishedRun | None:
        """Prepare together, train, part."""
        try:
            return self._go(show)
        except RankFailed as failure:
            if self._taken is None:
                _wait_for_kill(self._environment)
            tell(f"rank {self.place} ends. {failure if failure.rank == self.place else failure.line}")
            if not self._environment.phase:
                time.sleep(FAILED_FIRST_S)
            raise SystemExit(1) from None

    def _go(self, show: Show) -> FinishedRun | None:
        rank, size = self._environment.rank, self._environment.size
        with World(PrefixStore("prepare", self._store), rank=rank, size=size):
            self.nodes = nodes_of(self._members())
            ranks = [[one.rank for one in members] for members in self.nodes.values()]
            self.node = next(number for number, own in enumerate(ranks) if rank in own)
            self.here, self.firsts = ranks[self.node], [own[0] for own in ranks]
            self.addresses = self._serve()
            led = None
            if rank == 0:
                led = self._lead(show)
            else:
                self._follow()
            status, told = self._talk.hear("status"), self._talk.hear("orders")
            if status and rank and self._environment.has_own_output:
                tell(self._talk.hear("complaint"))
            if status:
                # A launcher that sees the first of them end would end the others by a signal.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            host, orders = None, None if told is None else self._taken
            if not status and orders is not None:
                set_encryption(orders.folder.load_run().links.encrypt)
                orders = self._spread(orders)
            if not status and orders is not None and orders.hosts is not None:
                host = meet_hosts(orders, orders.hosts, self._environment, self._talk, self._keeper)
        if status:
            raise SystemExit(status)
        if orders is None:
            return None
        ahead = None if led is None else plan_ahead(led.folder, led.losses)
        try:
            return self._run(orders, host, led)
        finally:
            if ahead is not None:
                ahead.close()

    def _run(self, orders: Orders, host: LaunchHost | None, led: RunSetup | None) -> FinishedRun | None:
        """Train and part; rank 0 has `led` the preparation."""
        rank, size = self._environment.rank, self._environment.size
        if orders.hosts is not None:
            prepared = None if led is None else led.prepared
            return _on_host(orders, host, rank, prepared, self._keeper, self._folders)
        self._train(orders)
        is_spread = orders.start.machines is not None
        if led is None:
            if is_spread:
                self._talk.hear("ended")
            if self._folders.note is not None:
                self._folders.finish()
                part(orders, self._folders.note.others, leads=False)
            self._talk.count_in("parted")
            return None
        told = [self._talk.hear(f"outcome/{place}") for place in range(len(orders.places))]
        outcomes = TypeAdapter(list[Outcome]).validate_python(told)
        finished = None
        if self._folders.note is not None:
            take_lines(led.folder.path, self._folders.note)
            note_end(orders, first_of(outcomes))
            self._talk.say("ended", True)
            finished = self._finished(led, outcomes)
            self._folders.finish()
            part(orders, self._folders.note.others, leads=True)
        self._talk.count_in("parted")
        # The store may be in this process, and the others need it until they have said good-bye.
        until(lambda: self._talk.counted("parted") == size, _PARTING_S)
        return finished if is_spread else self._finished(led, outcomes)

    def _finished(self, led: RunSetup, outcomes: list[Outcome]) -> FinishedRun | None:
        """The end of the run, with its results written; None if it goes on in another phase."""
        return None if goes_on(self._keeper, outcomes) else finish(led.prepared, led.folder, outcomes)

    # If machines share no folder.

    def _serve(self) -> tuple[KeeperAddress, ...]:
        """Serve this machine's folder of the run; the addresses of all machines. None if there is one."""
        if len(self.nodes) == 1:
            return ()
        name = None
        with suppress(BiremeError):  # rank 0 says what is wrong
            run = load_asked(self._run_file, self._sets)
            self._runs, name = Path(run.log.folder).resolve(), run.log.name or self._environment.job
        if self._environment.rank in self.firsts:
            folder = None if self._runs is None or name is None else self._runs / name
            address = self._folders.served(folder)
            self._talk.say(f"folder/{self._environment.rank}", asdict(address))
        return tuple(KeeperAddress(**self._talk.hear(f"folder/{first}")) for first in self.firsts)

    def _spread(self, orders: Orders) -> Orders:
        """The orders with the machines that share no folder, if there are any: then this machine copies what
        the others write.
        """
        rank, folders = self._environment.rank, self._talk.hear("storages")
        if len(set(folders)) == 1:
            self._folders.close()
            if not rank:
                (orders.folder.path / MACHINES).unlink(missing_ok=True)
            return orders
        names = [members[0].host for members in self.nodes.values()]
        if len(set(names)) < len(names):
            names = [f"{name} ({number})" for number, name in enumerate(names)]
        own = folders[rank]
        if orders.hosts is None:
            places = [place for place, each in enumerate(orders.places) if folders[each] == own]
            first = tuple((0, place) for place in places[:1])
        else:
            is_own = self.node == own
            parts = orders.hosts.parts[self.node]
            first = tuple((one.replica, one.ranks[0]) for one in parts if is_own or own not in one.hosts)
        if self.node == own and rank == self.here[0]:
            note = MachinesNote(self.addresses, own)
            self._folders.begin(orders.folder, orders.folder.load_run(), note, orders.kept_bytes)
            if orders.hosts is None:
                note_begin(orders, self._environment.phase)
        machines = SpreadMachines(tuple(names), own, first)
        words = {**orders.start.words, "fetched_bytes": self._talk.hear("fetched")}
        return replace(orders, start=replace(orders.start, machines=machines, words=words))

    def _members(self) -> list[LaunchedProcess]:
        own = self._environment
        has_cuda = own.local_rank < num_accelerators()
        node, num_cuda = own.node or host_name(), num_accelerators()
        member = LaunchedProcess(own.rank, node, host_name(), has_cuda, num_cuda, self._keeper.address)
        told = self._talk.gather("member", _MEMBER.dump_python(member), own.rank, own.size)
        return [*map(_MEMBER.validate_python, told)]

    def _lead(self, show: Show) -> RunSetup | None:
        """Rank 0's part of preparing. A mistake is printed here, and reported to the others."""
        talk, led, status, complaint = self._talk, None, 0, ""
        nodes, addresses = self.nodes, self.addresses
        orders: Orders | None = None
        try:
            asked = load_asked(self._run_file, self._sets)
            attended = self._keeper.attended
            wait = None if attended is None else attended.wait_to_train
            note = MachinesNote(addresses, 0) if addresses else None
            led = set_up_run(self._environment, asked, nodes, self._ask_servers, tell, note, wait)
            if led is not None:
                if not self._anyway:
                    check_room(led.prepared, led.folder, led.step)
                orders = _orders(led, nodes, is_phase=self._environment.phase > 0)
                if addresses:
                    files = paths_for_all(led.folder.load_run())
                    tokens = led.prepared.data.token_folders()
                    roots = tuple(tokens.get(str(Path(path).resolve()), path) for path in files)
                    self._folders.served(led.folder.path)
                    self._folders.serve_roots(led.folder, roots)
                    needed = kept_bytes(led.prepared, led.folder, led.step, len(nodes))
                    orders = replace(
                        orders,
                        mark=put_mark(led.folder.path.parent),
                        files=files,
                        roots=roots,
                        kept_bytes=0 if self._anyway else needed,
                    )
                talk.say("orders", ORDERS.dump_python(orders, mode="json"))
                self._take(orders)
                led = self._hear_all(led)
        except BiremeError as error:
            complaint = str(error)
            tell(complaint)
            status = _NO_PROGRESS if isinstance(error, RestartLimitError) else _USER_ERROR
        finally:
            if orders is not None and orders.mark:
                with suppress(OSError):
                    (orders.folder.path.parent / orders.mark).unlink()
        for name in ("device", "orders"):
            if not talk.is_said(name):
                talk.say(name, None)
        if led is not None and not status:
            show(led.prepared, led.folder)
            if len(nodes) > 1 and orders is not None:
                tell(encryption_of(led.prepared.run, orders))
        talk.say("complaint", complaint)
        talk.say("status", status)
        return None if status else led

    def _hear_all(self, led: RunSetup) -> RunSetup:
        """Wait until all are ready. Raises the first complaint; else all learn the private samples of all."""
        told = [self._talk.hear(f"ready/{rank}") for rank in range(self._environment.size)]
        for complaint in filter(None, (own["complaint"] for own in told)):
            raise BiremeError(complaint)
        census = census_from({server: one for own in told for server, one in own["census"].items()})
        if led.checkpoint is not None:
            check_same_census(load_census(led.folder.private), census, str(led.folder.path), tell)
        self._talk.say("fetched", {one["host"]: one["fetched"] for one in told if one["fetched"]})
        write_census(led.folder.private, census)
        led.folder.record()
        self._talk.say("census", plain_census(census))
        self._talk.say("storages", [own["storage"] for own in told])
        return replace(led, prepared=replace(led.prepared, census=census))

    def _ask_servers(self, device: str, counts: list[int]) -> list[str]:
        """Ask all machines for that many devices of a kind; gives their texts in the order of machines."""
        self._talk.say("device", {"device": device, "counts": counts})
        self._say_server(device, counts)
        told = [self._talk.hear(f"server/{first}") for first in self.firsts]
        for one in told:
            if one["error"]:
                raise BiremeError(one["error"])
        return [one["text"] for one in told]

    def _say_server(self, device: str, counts: list[int]) -> None:
        """The first rank of a machine tells what the machine has."""
        rank = self._environment.rank
        if rank != self.here[0]:
            return
        try:
            cluster = Cluster((server_here(device, counts[self.node]),))
            found = {"text": cluster_text(cluster), "error": ""}
        except BiremeError as error:
            found = {"text": "", "error": f"On {host_name()}: {error}"}
        self._talk.say(f"server/{rank}", found)

    def _follow(self) -> None:
        """The part of every other rank in preparing."""
        asked = self._talk.hear("device")
        if asked is None:
            return
        self._say_server(asked["device"], asked["counts"])
        told = self._talk.hear("orders")
        if told is not None:
            self._take(ORDERS.validate_python(told))

    def _take(self, orders: Orders) -> None:
        """See to it that this process can do what it is told, and say so, or what is wrong."""
        census: Census = {}
        rank = self._environment.rank
        storage = self.node
        try:
            there = orders.folder.path
            runs = there.parent if rank == 0 or self._runs is None else self._runs
            folder = RunFolder(path_within(runs, there.name))
            self._taken = own = orders.moved(folder.path)
            if not orders.mark or rank == 0 or sees_mark(folder.path.parent, orders.mark):
                storage = 0
            elif rank == self.here[0]:
                self._fetch(orders, folder)
            orders = own
            self._check(orders)
            census, complaint = self._census(orders), ""
        except BiremeError as error:
            complaint = f"On {host_name()}: {error}"
        ready = {
            "complaint": complaint,
            "census": plain_census(census),
            "storage": storage,
            "fetched": self._fetched,
            "host": host_name(),
        }
        self._talk.say(f"ready/{rank}", ready)

    def _fetch(self, orders: Orders, folder: RunFolder) -> None:
        """Have the files of the run in this machine's folder, as rank 0 has them."""
        checkpoint = orders.start.checkpoint
        name = None if checkpoint is None else checkpoint.relative_to(orders.folder.path).as_posix()
        first = KeeperAddress(**self._talk.hear("folder/0"))
        with system_errors(f"{folder.path} cannot be written", "Set log.folder."):
            take_run(folder, name, first)
            check_kept(folder, orders.kept_bytes)
        self._folders.served(folder.path)
        note = MachinesNote(self.addresses, self.node)
        hosts = (members[0].host for members in self.nodes.values())
        names = dict(zip((one.address for one in self.addresses), hosts, strict=True))
        progress = FetchProgress(tell, names)
        self._folders.take_files(folder, orders.folder.path, orders.files, note, progress)
        places = [place for place, rank in enumerate(orders.places) if rank in self.here]
        fetch_weights_of(folder, places, progress, resumes=orders.start.resumes)
        progress.finish(partial_files(folder.path / "files"))
        self._fetched = progress.from_machines

    def _census(self, orders: Orders) -> Census:
        """The private samples of the servers that this machine is, which its first process counts for all."""
        folder = orders.folder
        run = folder.load_run()
        if self._environment.rank != self.here[0] or not run.data.private:
            return {}
        servers = servers_of_places(load_plan(folder.plan).plan, read_cluster(folder.cluster))
        places = [place for place, rank in enumerate(orders.places) if rank in self.here]
        if orders.hosts is not None:  # the ranks of a host are not processes of this world
            depth, parts = orders.hosts.settings.num_stages, orders.hosts.parts[self.node]
            places = [one.replica * depth + stage for one in parts for stage in one.ranks]
        own = {servers[place] for place in places}
        model = RunModel.of(run, 1)
        owned = sorted(own & run.data.private.keys())
        return census_of(run, model, load_graph(folder.graph), data_of(run, model), owned)

    def _check(self, orders: Orders) -> None:
        folder = orders.folder
        if not until(lambda: digest_of(folder) == orders.digest, SEEN_S):
            raise BiremeError(
                f"This machine does not see in {folder.path}, the run's folder, what rank 0 wrote there. "
                "Set log.folder to a folder that all machines share, or to one of its own on each."
            )
        if self._environment.rank in self.firsts[1:]:
            # Rank 0 has made the data ready on its own machine; here the first one does.
            check_files_here(folder)

    def _train(self, orders: Orders) -> None:
        """Train in the place that this process has, or wait until the others have."""
        rank, size = self._environment.rank, len(orders.places)
        store = PrefixStore("train", self._store)
        if rank not in orders.places:
            self._wait_for(size, Board(store, size))
            return
        place = self.place = orders.places.index(rank)
        with World(
            store,
            rank=place,
            size=size,
            local_rank=self._environment.local_rank,
            timeout_s=orders.timeout_s,
            backend=orders.backend,
            device=orders.device,
        ) as world:
            census = census_from(self._talk.hear("census"))
            start = orders.start_of(len(self.here), is_shown=place == 0, census=census)
            outcome = train_rank(world, start)
            if outcome.reason not in DONE:
                # All is saved. Who asked for the end asks more than once, and may kill who has not ended.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._talk.say(f"outcome/{place}", asdict(outcome))

    def _wait_for(self, size: int, board: Board) -> None:
        """Wait for the end of a run that has no place for this process."""
        outcomes = [f"outcome/{place}" for place in range(size)]
        until(lambda: all(map(self._talk.is_said, outcomes)) or board.cause() is not None)
        cause = board.cause()
        if cause is not None:
            raise cause.to_others()


def _orders(led: RunSetup, nodes: Mapping[str, Sequence[LaunchedProcess]], *, is_phase: bool) -> Orders:
    hosts = {one.rank: host for host, members in enumerate(nodes.values()) for one in members}
    hosts_of_ranks = [host for _, host in sorted(hosts.items())]
    machines = led.prepared.machines
    start = run_start(led.prepared, led.folder, led.checkpoint, led.threads)
    return Orders(
        replace(start, is_phase=is_phase),
        digest_of(led.folder),
        led.places,
        machines.backend,
        machines.device,
        led.prepared.run.cluster.timeout_s,
        host_orders(led, hosts_of_ranks) if led.prepared.run.sync.is_coordinated else None,
    )
