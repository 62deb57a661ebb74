"""Plans for the losses that a run of `bireme coordinate` is likely to have: of one machine, whichever it is.

Rank 0 has another process make them while it trains, one after the other and with the lowest priority. They
lie in the folder of the run on that machine. A phase that follows takes its plan from there if it is for the
same run, devices and profile. If that machine is lost, the phase that follows plans by itself.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import cluster_hash, save_cluster
from bireme.cluster.machine import available_bytes
from bireme.errors import BiremeError
from bireme.model.graph_file import load_graph
from bireme.plan.plan_file import SavedPlan, load_plan, planned_units, profile_hash, saved_plan, write_plan
from bireme.profile.profile import load_profile
from bireme.runtime.processes import Process, start_process
from bireme.train.folder import RunFolder
from bireme.train.machines import planning_machines
from bireme.train.plan_search import ProfiledRun, chooses_batch
from bireme.train.run_file import RunFile, with_model_defaults

MOST_PLANS = 16
"""Losses that are planned for, at most."""
LEAST_FREE_BYTES = 1 << 30
"""Without that much free memory no plan is made ahead: a process that plans takes about 0.2 GiB."""
_IDLE = 19
"""The lowest priority of Linux: about 1 % of a core that other processes want."""

Loss = tuple[RunFile, Cluster | None]
"""A run as it would be without a machine: its settings, and its devices as rank 0 gathers them."""


def plan_ahead(folder: RunFolder, losses: Sequence[Loss]) -> Process | None:
    """A process that makes plans for these losses; it ends when it is closed. None if there is nothing to do,
    or too little memory.
    """
    if not losses or not folder.profile.is_file() or available_bytes() < LEAST_FREE_BYTES:
        return None
    process, talk = start_process("bireme plans", _plan, folder.path, [*losses][:MOST_PLANS])
    talk.close()
    return process


def may_plan_ahead(run: RunFile) -> bool:
    """Whether plans of a run depend on its settings, its devices and its profile alone."""
    is_free = run.plan.file is None and not chooses_batch(run) and not run.data.private
    return is_free and not run.memory.is_on


def plan_made_ahead(folder: RunFolder, wanted: ProfiledRun) -> SavedPlan | None:
    """The plan that was made ahead for this run, cluster and profile."""
    with suppress(BiremeError, OSError):
        return load_plan(_path_of(folder, wanted))
    return None


def make_plan(folder: RunFolder, wanted: ProfiledRun) -> None:
    """Make a plan, and keep it in the folder of the run. If none fits, nothing is kept."""
    path = _path_of(folder, wanted)
    if path.is_file():
        return
    with suppress(BiremeError):
        found = wanted.planned(lambda _done, _what: None)
        path.parent.mkdir(exist_ok=True)
        write_plan(path, saved_plan(found.answer, planned_units(found.profile)))


def _path_of(folder: RunFolder, wanted: ProfiledRun) -> Path:
    run = wanted.run
    tables = run.model_dump(mode="json", exclude={"log"})
    del tables["cluster"]["source"]  # the file of a cluster, which counts by its content
    words = [tables, cluster_hash(wanted.cluster), profile_hash(wanted.profile)]
    digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]
    return folder.path / "plans" / f"{digest}.json"


def _plan(talk: Connection, path: Path, losses: Sequence[Loss]) -> None:
    talk.close()
    os.nice(_IDLE)
    folder = RunFolder(path)
    graph, profile = load_graph(folder.graph), load_profile(folder.profile)
    for asked, cluster in losses:
        run = with_model_defaults(asked)
        with suppress(BiremeError), TemporaryDirectory() as scratch:
            if cluster is not None and run.cluster.source is None:
                file = Path(scratch) / "cluster.toml"
                save_cluster(cluster, file)
                run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"source": str(file)})})
            machines = planning_machines(run, computes=False)
            make_plan(folder, ProfiledRun(run, machines.cluster, graph, profile))
