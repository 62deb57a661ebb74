"""The launcher of one host in a run whose replicas may die: from what rank 0 has sent to all to the run's
end.

After the hosts have learned from each other where their coordinators listen, none of them needs what it met
the others by. So any host may die, also the first. One that is started again finds in the run's folder where
the others are, and goes on with its replicas in their next incarnations.
"""

import atexit
import fcntl
import hashlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from pydantic import TypeAdapter

from bireme.cluster.cluster_file import read_cluster
from bireme.devices import VISIBLE
from bireme.errors import BiremeError, tell
from bireme.files import write_text_atomically
from bireme.plan.plan_file import load_plan
from bireme.report.terminal import progress_bar
from bireme.runtime.board import RankFailed, RunFailed, WeightsLost
from bireme.runtime.coordinator_client import Address, Observer
from bireme.runtime.coordinator_process import CoordinatorOrder, CoordinatorProcess
from bireme.runtime.copies.copier import CopyOrders
from bireme.runtime.copies.folder_server import digests_at, read_file
from bireme.runtime.copies.keeper import KeeperAddress, talk_to
from bireme.runtime.processes import environment
from bireme.runtime.replicas.hosts import LaunchHost
from bireme.train.checkpoint.checkpoint import other_machines
from bireme.train.export import has_ended
from bireme.train.finishing import DONE, FinishedRun, finish
from bireme.train.folder import RunFolder, load_asked
from bireme.train.launching import (
    gpus_here,
    launch_here,
    replica_settings,
    signals_passed_on,
)
from bireme.train.outcome import Outcome, first_of
from bireme.train.prepare import PreparedRun, prepared_before
from bireme.train.rank_zero_setup import RunSetup, parts_of_hosts
from bireme.train.rendezvous import Announcements, Environment, HostOrders, Orders, until
from bireme.train.run_checkpoints import HostKeeper
from bireme.train.run_file import RunFile
from bireme.wire.listener import own_address

_TOKEN_BYTES = 16
_WAY_ON = "Start bireme train on all hosts again: the run resumes from its newest checkpoint."
_END_S = 30.0
"""How long the host that leads at the end may take to write down how the run ended."""
_WRITTEN_S, _TRIES = 1.0, 3
_ASK_S = 5.0
"""How long a coordinator may take to answer a host that has been started again."""

_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""What the processes of a replica must not take for theirs."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """What the folder of a run has of its hosts: `began_s` is when it began, in seconds of the epoch. Once it
    has ended, `reason` is why, after that many `steps`; `is_finished` is whether its results are written.
    `phase` is the number in a run of `bireme join`.
    """

    orders: Orders
    hosts: tuple[Address, ...]
    began_s: float
    reason: str = ""
    steps: int = 0
    phase: int = 0
    is_finished: bool = False


_UNDER_WAY = TypeAdapter(_UnderWay)


def host_orders(led: RunSetup, hosts_of_ranks: Sequence[int]) -> HostOrders:
    """What launchers of hosts are told, if replicas may die."""
    settings = replica_settings(led.prepared, led.folder, led.checkpoint)
    parts = parts_of_hosts(led.places, led.nodes, settings.num_stages)
    token = secrets.token_hex(_TOKEN_BYTES)
    return HostOrders(settings, token, tuple(map(tuple, parts)), tuple(hosts_of_ranks), led.copies)


def meet_hosts(
    orders: Orders, own: HostOrders, place: Environment, talk: Announcements, keeper: HostKeeper
) -> LaunchHost | None:
    """Start the coordinator of this host, and learn where those of the others listen; likewise the keeper of
    second copies, which sends them to that of the next host. None if this process is not the launcher of its
    host.
    """
    folder, rank = orders.folder, place.rank
    number = own.hosts_of_ranks[rank]
    if rank != own.launcher(number):
        return None
    coordinator = _started_coordinator(own, number, folder)
    heard = talk.gather("coordinator", [own_address(), coordinator.port], number, len(own.parts))
    hosts = tuple((str(address), int(port)) for address, port in heard)
    if own.copies:
        talk.say(f"keeper/{number}", asdict(keeper.started(folder.load_run())))
        follower = talk.hear(f"keeper/{(number + 1) % len(hosts)}") if len(hosts) > 1 else None
        keeper.follow(None if follower is None else KeeperAddress(**follower))
    if number == 0 or orders.start.machines is not None:
        _write_under_way(folder, _UnderWay(orders, hosts, time.time(), phase=place.phase))
    return _launch_host(own, number, folder, coordinator, hosts)


def under_way(
    environment: Environment, run_file: Path | None, sets: Sequence[str]
) -> tuple[Orders, LaunchHost | None] | None:
    """The run that this process had a part in, if it goes on without this host. There is no host if this
    process is not the launcher of its host.
    """
    before = _begun_before(environment, run_file, sets)
    found = None if before is None else _under_way_in(before[1])
    orders = None if found is None else found.orders.hosts
    if found is None or found.reason or orders is None or found.phase != environment.phase:
        return None
    if len(orders.hosts_of_ranks) != environment.size:
        return None
    number = orders.hosts_of_ranks[environment.rank]
    # The only replica was lost with this host, and goes on from second copies once all hosts have met.
    is_lost = bool(orders.copies and orders.parts[number]) and orders.settings.num_replicas == 1
    if is_lost or not _answers(found.hosts, orders.token):
        return None
    if environment.rank != orders.launcher(number):
        return found.orders, None
    address, port = found.hosts[number]
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise BiremeError(
            f"The run in {found.orders.folder.path} is still going, but port {port}, where the coordinator "
            f"of this host was, cannot be opened ({error.strerror}). End the bireme train that was started "
            "here before."
        ) from None
    folder, since_s = found.orders.folder, max(time.time() - found.began_s, 1.0)
    coordinator = _started_coordinator(orders, number, folder, port)
    tell(f"The run is still going. Replicas of this host, {address}, start again.")
    return found.orders, _launch_host(orders, number, folder, coordinator, found.hosts, since_s)


def _launch_host(
    orders: HostOrders,
    number: int,
    folder: RunFolder,
    coordinator: CoordinatorProcess,
    hosts: tuple[Address, ...],
    since_s: float = 0.0,
) -> LaunchHost:
    """This host in a run that began that many seconds ago."""
    return LaunchHost(
        number,
        coordinator,
        hosts,
        orders.token,
        orders.parts[number],
        time.monotonic() - since_s,
        # Each incarnation takes longer than a second, so none before has that number.
        first_life=int(since_s),
        how_it_ended=partial(_how_it_ended, folder, orders.token),
    )


# The processes of a host beside its launcher, where something like torchrun starts one for each rank. They
# wait until the launcher has ended: it holds a lock that the system frees, whatever ends it.

_LAUNCHER_S = 300.0
"""How long a launcher may take to appear."""


def wait_for_launcher(orders: HostOrders, rank: int) -> None:
    """Return once the launcher of this host has come and ended."""
    host = orders.hosts_of_ranks[rank]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # which are for the launcher, and end this process with it
    lock = _open_lock(orders, host)

    def is_held() -> bool:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(lock, fcntl.LOCK_UN)
        return False

    if not until(is_held, _LAUNCHER_S):
        raise BiremeError(
            f"Rank {rank} waited {_LAUNCHER_S:g} s for rank {orders.launcher(host)}, which starts the "
            "processes of this host, and did not appear."
        )
    fcntl.lockf(lock, fcntl.LOCK_SH)
    fcntl.lockf(lock, fcntl.LOCK_UN)


def _lock_of(orders: HostOrders, host: int) -> Path:
    digest = hashlib.sha256(orders.token.encode()).hexdigest()[:16]
    return Path(gettempdir()) / f"bireme-{digest}-{host}.lock"


def _open_lock(orders: HostOrders, host: int) -> int:
    return os.open(_lock_of(orders, host), os.O_RDWR | os.O_CREAT, 0o600)


def how_it_ended_before(environment: Environment, run_file: Path | None, sets: Sequence[str]) -> str:
    """The sentence for a host that is started after the run has done all its steps; empty if it has not."""
    before = _begun_before(environment, run_file, sets)
    found = None if before is None else _under_way_in(before[1])
    if before is None or found is None or not found.reason or not has_ended(*before, found.steps):
        return ""
    return f"{before[1].path} has finished its {found.steps} steps. To train further, set more."


def _begun_before(
    environment: Environment, run_file: Path | None, sets: Sequence[str]
) -> tuple[RunFile, RunFolder] | None:
    """What is asked, and the folder of the run of that name, if it was begun over several hosts."""
    try:
        run = load_asked(run_file, sets)
    except BiremeError:
        return None  # rank 0 says what is wrong
    name = run.log.name or environment.job
    folder = None if name is None else RunFolder((Path(run.log.folder) / name).resolve())
    return None if folder is None or run.sync.mode == "allreduce" else (folder.completed(run), folder)


class RunLostError(Exception):
    """All replicas have ended, and there may be second copies from which the run goes on."""


def train_on_host(
    orders: Orders,
    own: HostOrders,
    host: LaunchHost,
    prepared: PreparedRun | None,
    keeper: HostKeeper,
) -> FinishedRun | None:
    """Train the replicas of this host. If one of them leads at the end, write down what came of the run,
    unless it goes on in another phase. Raises a `RunLostError` if all replicas are lost and the run has
    second copies.
    """
    folder, run = orders.folder, orders.folder.load_run()
    start = orders.start_of(host.num_ranks, is_shown=True, census={})
    # A host that comes back while the run goes on has no keeper that the others know.
    if own.copies and keeper.address is not None:
        start = replace(start, copying=CopyOrders(keeper.address, own.copies, own.settings.first))
        start = replace(start, copies=start.copies and start.copies.nearest(keeper.address))
    devices = load_plan(folder.plan).plan.devices
    names = [devices[rank][part.replica] for part in host.parts for rank in part.ranks if devices]
    gpus = gpus_here(names, read_cluster(folder.cluster), orders.device)
    # The address of this host is the same while it is cut off.
    own_environment = dict.fromkeys(_OF_THE_LAUNCHER) | {VISIBLE: gpus, "BIREME_ADDRESS": own_address()}
    came: list[int] = []
    try:
        with signals_passed_on() as came, environment(own_environment):
            outcomes = launch_here(
                run,
                folder,
                own.settings,
                start,
                backend=orders.backend,
                device=orders.device,
                host=host,
            )
    except RunFailed as failure:
        tell(str(failure))
        if own.copies and not came:
            raise RunLostError from None
        if isinstance(failure, RankFailed | WeightsLost) and not orders.start.is_phase:
            tell(_WAY_ON)
        raise SystemExit(1) from None
    if outcomes is None and not until(lambda: bool(host.how_it_ended()), _END_S):
        tell(
            "All replicas have ended, and the run's folder does not say that the run has. The output of the "
            f"other hosts may say why. {_WAY_ON}"
        )
        raise SystemExit(1)
    if not outcomes or not first_of(outcomes).leads:
        ended = "The run has ended. A replica on another host led it; its launcher shows the result."
        tell(host.how_it_ended() or ended)
        return None
    note_end(orders, first_of(outcomes))
    if goes_on(keeper, outcomes):
        return None
    if prepared is None:
        with progress_bar("reading the run") as progress:
            prepared = prepared_before(run, folder, progress, is_alone=False)
    return finish(prepared, folder, outcomes)


def goes_on(keeper: HostKeeper, outcomes: Sequence[Outcome]) -> bool:
    """Whether a run that has stopped here goes on in another phase, which shows what comes of it."""
    attended = keeper.attended
    return attended is not None and first_of(outcomes).reason not in DONE and attended.is_switch()


def _write_under_way(folder: RunFolder, found: _UnderWay) -> None:
    # A process that knows the token is of this run.
    write_text_atomically(folder.hosts, _UNDER_WAY.dump_json(found).decode(), is_private=True)


def _under_way_in(folder: RunFolder, token: str | None = None) -> _UnderWay | None:
    """What a run's folder has of its hosts, for the run with this token if one is given; None if there is
    nothing, or it cannot be read.
    """
    try:
        found = _UNDER_WAY.validate_json(folder.hosts.read_text())
    except (OSError, ValueError):
        return None
    return found if token in (None, _token_of(found.orders)) else None


def note_begin(orders: Orders, phase: int) -> None:
    """Write down that a run begins whose machines share no folder and whose ranks all end together."""
    _write_under_way(orders.folder, _UnderWay(orders, (), time.time(), phase=phase))


def note_end(orders: Orders, outcome: Outcome) -> None:
    """Write down that the run has ended, for hosts that are cut off."""
    folder = orders.folder
    found = _under_way_in(folder, _token_of(orders))
    if found is not None:
        with suppress(BiremeError, OSError):  # as on a full disk: then such hosts find their calls refused
            _write_under_way(folder, replace(found, reason=outcome.reason, steps=outcome.steps))


def _how_it_ended(folder: RunFolder, token: str) -> str:
    """The sentence for a host that was cut off when the run with this token ended; empty if it has not."""
    found = _under_way_in(folder, token)
    place = folder.path if found is None or found.orders.start.machines is None else "its folder there"
    if found is not None and not found.reason and found.orders.start.machines is not None:
        found = _ended_elsewhere(folder, found)
    if found is None or not found.reason:
        return ""
    return (
        f"The run ended after step {found.steps} ({found.reason}). A replica on another host led it; the "
        f"results are in {place}."
    )


# If machines share no folder, the host that led at the end has that in its own, and the others ask for it.


def _ended_elsewhere(folder: RunFolder, own: _UnderWay) -> _UnderWay | None:
    """What the host that led has of a run that has ended; None if no host that answers has that."""
    for address in other_machines(folder.path):
        found = _under_way_at(address, folder, own)
        if found is not None and found.reason:
            with suppress(BiremeError):
                _write_under_way(folder, replace(own, reason=found.reason, steps=found.steps))
            return found
    return None


def _under_way_at(address: KeeperAddress, folder: RunFolder, own: _UnderWay) -> _UnderWay | None:
    """What another host has of this run; None if it does not answer."""
    for _ in range(_TRIES):  # it may be written anew while it is read
        served = digests_at(address, [folder.hosts.name], _ASK_S)[0]
        if served is None:
            break
        with suppress(BiremeError, ValueError):
            found = _UNDER_WAY.validate_json(read_file([address], folder.hosts.name, served, _ASK_S))
            return found if _token_of(found.orders) == _token_of(own.orders) else None
    return None


def _token_of(orders: Orders) -> str:
    return "" if orders.hosts is None else orders.hosts.token


def part(orders: Orders, others: Sequence[KeeperAddress], *, leads: bool) -> None:
    """Part from the other machines of a run, once this one has copied what it keeps of theirs. The machine
    that led writes down that the results are written, and waits until no other one copies files from here
    any more; the others wait until it has, for it may read files there. A machine that is gone is not waited
    for. `others` served in this start: the folder may name those of the next phase, which is prepared.
    """
    folder, own = orders.folder, _under_way_in(orders.folder)
    if own is None:
        return
    if not leads:
        _wait_until_finished(lambda: _ended_elsewhere(folder, own))
        return
    with suppress(BiremeError, OSError):
        _write_under_way(folder, replace(own, is_finished=True))

    def wait_for(address: KeeperAddress) -> None:
        if not _is_listening(address):
            return  # its process has ended
        # One that led too, as the last replica that it knew of, does not copy.
        _wait_until_finished(partial(_under_way_at, address, folder, own))

    # One that is cut off takes seconds; and Ctrl-C waits for none.
    threads = [threading.Thread(target=wait_for, args=(one,), daemon=True) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _is_listening(address: KeeperAddress) -> bool:
    """Whether a process of another machine listens there, or its machine does not answer."""
    try:
        with talk_to(address, _ASK_S):
            return True
    except (OSError, BiremeError) as error:
        return not isinstance(error, ConnectionRefusedError)


def _wait_until_finished(look: Callable[[], _UnderWay | None]) -> None:
    num_missed = 0
    while True:
        found = look()
        num_missed = num_missed + 1 if found is None else 0
        if num_missed == _TRIES or (found is not None and found.is_finished):
            return
        time.sleep(_WRITTEN_S)


def _started_coordinator(
    orders: HostOrders, number: int, folder: RunFolder, port: int = 0
) -> CoordinatorProcess:
    """Be the launcher of a host until this process ends, which removes the file of its lock, and start the
    host's coordinator. That of the first one begins the run, if it was not started before.
    """
    with suppress(OSError):  # another launcher that has not ended yet: the port of its coordinator tells that
        fcntl.lockf(_open_lock(orders, number), fcntl.LOCK_EX | fcntl.LOCK_NB)
        atexit.register(_lock_of(orders, number).unlink, missing_ok=True)
    begins = number == 0 and not port
    num_hosts = len(orders.parts)
    order = CoordinatorOrder(
        orders.settings, number, num_hosts, orders.token, folder.ledger, port=port, begins=begins
    )
    coordinator = CoordinatorProcess(order)
    coordinator.start()
    return coordinator


def _answers(hosts: Sequence[Address], token: str) -> bool:
    """Whether one of them coordinates a run that has members."""
    observer = Observer(hosts, token)
    observer.start()

    def is_known() -> bool:
        return bool(observer.word.members) or all(map(observer.refused_s, range(len(hosts))))

    try:
        return until(is_known, _ASK_S) and bool(observer.word.members) and not observer.word.is_lost
    finally:
        observer.close(waits=False)
