"""Rendezvous: the processes that a launcher such as torchrun has started find each other.

All that is assumed is the environment that such a launcher sets and the store it names. Ranks may be on
other machines after a restart, and there may be more or fewer of them; what an earlier start left in the
store must not be taken for news.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bireme.cluster.machine import num_cores
from bireme.devices import Backend
from bireme.errors import BiremeError
from bireme.files import path_within
from bireme.machines.orders import phase_of
from bireme.runtime.replicas.hosts import ReplicaPart
from bireme.runtime.stores import PrefixStore, Store, part_of
from bireme.runtime.world import number_of, store_of_starter
from bireme.sync.coordinator.samples import CoordinatorSettings
from bireme.train.folder import RunFolder
from bireme.train.rank_part import RunStart
from bireme.train.run_data import Census
from bireme.train.run_file import RunFile
from bireme.wire.listener import KEY

# What rank 0 tells the processes that a launcher has started, once it has made a run ready.


@dataclass(frozen=True, slots=True)
class HostOrders:
    """What rank 0 tells the launchers of all hosts: the settings of coordinators, the parts of replicas of
    each host, and the host of each process that was started. If ranks have second copies, `copies` is the
    name of this start of the run in them.
    """

    settings: CoordinatorSettings
    token: str
    parts: tuple[tuple[ReplicaPart, ...], ...]
    hosts_of_ranks: tuple[int, ...]
    copies: str = ""

    def launcher(self, host: int) -> int:
        """The rank of the process that is the launcher of a host: the first there."""
        return self.hosts_of_ranks.index(host)


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 tells the others. `places[p]` is the rank that takes place p of the plan. Where replicas
    may die each process is the launcher of its host or waits for it, as `hosts` specifies. Machines that see
    the file `mark` beside the folder of the run share it. All machines read the `files` and folders on that
    of rank 0, which serves `roots` for them: those that have none at these paths fetch them. A machine with a
    folder of its own needs room for `kept_bytes` there.
    """

    start: RunStart
    digest: str
    places: list[int]
    backend: Backend
    device: str
    timeout_s: float
    hosts: HostOrders | None = None
    mark: str = ""
    files: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    kept_bytes: int = 0

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(self.start.folder)

    def moved(self, folder: Path) -> "Orders":
        """The same for a machine that has the run in a folder of its own."""
        start = self.start

        def place(path: Path) -> Path:
            return path_within(folder, path.relative_to(start.folder).as_posix())

        checkpoint = None if start.checkpoint is None else place(start.checkpoint)
        passed_over = tuple(map(place, start.passed_over))
        moved = replace(start, folder=folder, checkpoint=checkpoint, passed_over=passed_over)
        return replace(self, start=moved)

    def start_of(self, num_here: int, *, is_shown: bool, census: Census) -> RunStart:
        """What a rank is told, if that many ranks are on its host."""
        threads = self.start.threads
        if threads is None and self.device == "cpu":
            threads = max(1, num_cores() // max(1, num_here))
        return replace(self.start, threads=threads, is_shown=is_shown, census=census)


ORDERS = TypeAdapter(Orders)


def digest_of(folder: RunFolder) -> str:
    """What tells whether two machines see the same folder; nothing where they see none."""
    try:
        return hashlib.sha256(folder.run_file.read_bytes() + folder.plan.read_bytes()).hexdigest()
    except OSError:
        return ""


_FIND_S = 300.0
"""How long the processes have to find each other: a machine may have to start first."""

LOOK_S = 0.05

_NO_ID = "none"
"""What torchrun calls a run without an id."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the launcher tells this process. `node` and `job` are None where it does not say.

    `job` is the same for all restarts of a run. `may_restart` is whether the launcher starts the processes
    again if one fails, and `is_restart` whether it has done so. `has_own_output` is whether people may see
    what this process prints apart from what rank 0 prints. `phase` is that of `bireme join`, 0 elsewhere.
    """

    rank: int
    size: int
    local_rank: int
    node: str | None
    job: str | None
    may_restart: bool
    is_restart: bool
    has_own_output: bool
    phase: int = 0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> "Environment":
        """What these variables say. Those that every launcher sets must be there."""
        rank, size = number_of(variables, "RANK"), number_of(variables, "WORLD_SIZE")
        if rank >= size:
            raise BiremeError(
                f"The environment says RANK = {rank} and WORLD_SIZE = {size}: ranks count from 0, so the "
                f"last is {size - 1}. Set both as the launcher does, or neither."
            )
        name = variables.get("TORCHELASTIC_RUN_ID", _NO_ID)
        # Torchrun shows the output of all processes of a host together, and rank 0 is on its first one.
        is_first_of_host = variables.get("LOCAL_RANK", "0") == "0" and variables.get("GROUP_RANK") != "0"
        return cls(
            rank=rank,
            size=size,
            local_rank=number_of(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank,
            node=variables.get("GROUP_RANK"),
            job=None if name == _NO_ID else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or None,
            may_restart=variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
            is_restart=variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
            has_own_output=rank == 0 or is_first_of_host,
            phase=phase_of(variables),
        )


def rendezvous(environment: Environment, limit_s: float = _FIND_S) -> Store:
    """A part of the launcher's store that the processes alive now share with each other alone.

    Returns once all have come, within that time. From then on this process ends when its agent does, if it
    has one.
    """
    rank = environment.rank
    store = store_of_starter(rank, limit_s)
    lookup = PrefixStore("bireme-rendezvous", store)
    word = _answer(lookup, rank, limit_s) if rank else _call_all(lookup, environment.size, limit_s)
    return part_of(store, f"bireme-{word}", rank, timeout_s=_FIND_S)


class Announcements:
    """Things that ranks tell each other by name, each name once. To hear waits until it was said."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("talk", store)

    def say(self, name: str, what: Any) -> None:
        """Tell all. It goes through JSON."""
        self._store.set(name, json.dumps(what))

    def is_said(self, name: str) -> bool:
        """Whether that was said."""
        return bool(self._store.check([name]))

    def hear(self, name: str) -> Any:
        """What was said; a caller relies on the watch to be freed if that never happens."""
        until(lambda: self.is_said(name))
        return json.loads(self._store.get(name))

    def gather(self, name: str, what: Any, rank: int, size: int) -> list[Any]:
        """What each of `size` ranks, or hosts by number, says under this name, once all have said it."""
        self.say(f"{name}/{rank}", what)
        return [self.hear(f"{name}/{other}") for other in range(size)]

    def count_in(self, name: str) -> int:
        """Be one more who has done something, and learn how many have."""
        return int(self._store.add(name, 1))

    def counted(self, name: str) -> int:
        """How many have."""
        return int(self._store.add(name, 0))


def until(predicate: Callable[[], bool], limit_s: float | None = None) -> bool:
    """Wait until that is so, or for so long. Returns whether it is so."""
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while not predicate():
        if end_s is not None and time.monotonic() > end_s:
            return False
        time.sleep(LOOK_S)
    return True


def _call_all(store: Store, size: int, limit_s: float) -> str:
    """Rank 0's part: give a word to every process that answers to it.

    A number of restarts cannot be that word: every machine's agent counts its own. A process of an earlier
    start has left its name here, but it does not answer any more; who does is alive.
    """
    word = secrets.token_hex(8)
    missing, end_s = set(range(1, size)), time.monotonic() + limit_s
    told: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            key = f"here/{rank}"
            if store.check([key]):
                name = store.get(key).decode()
                if told.get(rank) != name:
                    told[rank] = name
                    store.set(f"word/{name}", word)
                if store.check([f"heard/{word}/{name}"]):
                    missing.discard(rank)
        if missing and time.monotonic() > end_s:
            ranks = ", ".join(map(str, sorted(missing)[:8]))
            raise BiremeError(
                f"Of {size} processes these did not appear within {limit_s:g} s: {ranks}. Start as many as "
                "WORLD_SIZE says, and make sure that they can reach each other."
            )
        time.sleep(LOOK_S if missing else 0.0)
    return word


def _answer(store: Store, rank: int, limit_s: float) -> str:
    name = secrets.token_hex(8)
    store.set(f"here/{rank}", name)
    if not until(lambda: store.check([f"word/{name}"]), limit_s):
        raise BiremeError(f"Rank {rank} waited {limit_s:g} s for rank 0, which did not appear.")
    word = store.get(f"word/{name}").decode()
    store.set(f"heard/{word}/{name}", "")
    return word


def encryption_of(run: RunFile, orders: Orders) -> str:
    """What of a run over several hosts is encrypted."""
    if not run.links.encrypt:
        return "Lines between hosts are not encrypted (links.encrypt = false)."
    text = "Lines between hosts are encrypted"
    hosts = orders.hosts
    spans_hosts = hosts is None or not all(part.is_whole for own in hosts.parts for part in own)
    if orders.backend == "nccl" and spans_hosts:
        text += ", but not those of NCCL: people on the network can read and change its sums"
    if KEY not in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        text += f". Set one {KEY} on all hosts, for torchrun's store passes the key of the run on unencrypted"
    return f"{text} (docs/security.md)."
