"""What a rank knows of its run before it has a pipeline: how it was started, and its part of the run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import read_cluster
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.profile.control import Control
from bireme.profile.profile import Profile, load_profile
from bireme.runtime.copies.copier import Copier, CopyOrders, CopySource
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.world import World
from bireme.train.checkpoint.checkpoint import Holders
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import SpreadPlace
from bireme.train.data.loader import PartlyRead, RankBatches
from bireme.train.data.placing import SampleOrder
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import Samples
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.outcome import MemoryUsed, Stops
from bireme.train.replica import AveragingReplica, Replica
from bireme.train.resume_checks import data_identity, load_base, load_identity, names_in_base, run_conditions
from bireme.train.run_checkpoints import RunCopies
from bireme.train.run_data import Census, ReadableData
from bireme.train.run_file import RunFile


@dataclass(frozen=True, slots=True)
class SpreadMachines:
    """The names of the machines of a run that share no folder, and the index of this one. `first` are the
    ranks here that take care of the folder, with the replica of each if replicas may die, else 0.
    """

    names: tuple[str, ...]
    own: int
    first: tuple[tuple[int, int], ...]

    def place_of(self, replica: int, rank: int) -> SpreadPlace:
        """The place of a rank of this machine."""
        return SpreadPlace(self.names, self.own, (replica, rank) in self.first)


@dataclass(frozen=True, slots=True)
class RunStart:
    """Which run, from which checkpoint if any, and what else the processes need beyond what its folder says.

    `is_shown` lets rank 0 speak of its steps; `words` are the first values of its log. `passed_over` are the
    damaged checkpoints after the one to resume from. If there are `copies` the run goes on from these instead
    of a checkpoint; `copying` says where ranks give second copies. With `may_replan` the starter of the run
    makes a new plan for it if it ends to that end; in a phase of `bireme coordinate` (`is_phase`) the
    coordinator decides. `census` counts the private samples of all servers.
    Updates are delayed after `first_delayed_step`. If machines share no folder, these are the `machines`, and
    `holders` have the files of the checkpoint.
    """

    folder: Path
    checkpoint: Path | None
    threads: int | None
    is_shown: bool
    words: dict[str, Any]
    passed_over: tuple[Path, ...] = ()
    may_replan: bool = False
    is_phase: bool = False
    census: Census = field(default_factory=dict)
    first_delayed_step: int = 0
    copies: CopySource | None = None
    copying: CopyOrders | None = None
    holders: Holders = field(default_factory=dict)
    machines: SpreadMachines | None = None

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a state that it had before."""
        return self.checkpoint is not None or self.copies is not None


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank has before it has a pipeline; `home` is what it reads where some samples are private. With
    an `order` it is of a replica that may die, which `member` is then.
    """

    world: World
    start: RunStart
    folder: RunFolder
    run: RunFile
    model: RunModel
    data: RunData
    memory: MemoryUsed
    stops: Stops
    home: ReadableData | None = None
    order: ReplicaOrder | None = None
    member: Replica | AveragingReplica | None = None

    @property
    def samples(self) -> Samples:
        """What it reads to train on."""
        return self.data.training if self.home is None else self.home.samples

    @property
    def cluster(self) -> Cluster:
        """The devices that the run was planned for."""
        return read_cluster(self.folder.cluster)

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from; None if it came from a file."""
        return load_profile(self.folder.profile) if self.folder.profile.is_file() else None

    def copies(self) -> RunCopies | None:
        """The second copies of this rank, if the run has any."""
        if self.start.copying is None:
            return None
        world, member = self.world, self.member
        copier = Copier(self.start.copying, world.rank, world.size, world.timeout_s)
        return RunCopies(copier, world.size, lambda: member is None or member.leads)

    def control(self) -> Control | None:
        """What is timed in turns with training on a processor. That ranks share its cores is predicted."""
        if self.world.device.type != "cpu":
            return None
        return Control(counts_waits=not any(server.num_cores for server in self.cluster.servers))

    def in_base(self, graph: Graph) -> frozenset[str]:
        """The weights that checkpoints and replicas that heal do without, as they are in the run's base."""
        return frozenset() if load_base(self.folder.base) is None else names_in_base(graph)

    def meta(self, pipeline: Pipeline) -> CheckpointMeta:
        """What each checkpoint says of the run. The digest of the data is the one in the folder, which was
        written before any process started, so no process reads the data twice.
        """
        plan, run = pipeline.plan, self.run
        identity = load_identity(self.folder.data) or data_identity(run, self.data)
        return CheckpointMeta(
            next_batch=0,
            seed=run.data.seed,
            schedule=plan.source.name,
            num_stages=plan.num_stages,
            width=plan.width,
            graph_hash=graph_hash(pipeline.graph),
            extra=run_conditions(run, identity, load_base(self.folder.base)),
        )


# What a rank reads while it trains: one loader, from window to window.
#
# Its worker processes stay, and its next batches are ready when an evaluation is over.


class RunReading:
    """What one rank reads, until it is closed."""

    def __init__(self, part: RankPart) -> None:
        self._run, self._data, self._home, self._member = part.run, part.data, part.home, part.member
        self._open = ExitStack()
        self._loader: RankBatches | None = None
        self._batches: Iterator[PartlyRead] | None = None

    def begin(self, pipeline: Pipeline, first: int) -> None:
        """Begin to read the batches of the run from that one on."""
        self._batches = iter(self._loader_from(pipeline, first))

    def batches(self, pipeline: Pipeline, first: int) -> Iterator[PartlyRead]:
        """The batches of the run, the first of which is the next one."""
        if self._batches is None:
            self.begin(pipeline, first)
        assert self._batches is not None, "reading has just begun"
        return self._batches

    def window(self, pipeline: Pipeline) -> Iterator[PartlyRead]:
        """The batches that are assigned to this replica up to the end of its window."""
        return iter(self._loader_from(pipeline, pipeline.num_trained))

    def close(self) -> None:
        """End what reads. Another pipeline may begin to read then."""
        self._open.close()
        self._loader = self._batches = None

    def _loader_from(self, pipeline: Pipeline, first: int) -> RankBatches:
        """What reads the batches of the run; that one is its first."""
        if self._loader is None:
            asked = self._run.data
            make: Callable[..., RankBatches] = RankBatches
            if self._member is not None:
                private = None if self._home is None else self._home.added(self._member.number)
                make = partial(self._member.batches, private=private)
            self._loader = make(
                *self._samples(pipeline),
                self._run.training.batch_size,
                first,
                self._run.training.steps - first,
                prefetch=asked.prefetch,
                num_workers=asked.num_workers,
                timeout_s=self._run.cluster.timeout_s,
                wanted=pipeline.cutter.wanted,
            )
            self._open.enter_context(self._loader)
            if pipeline.balancer is not None:
                self._open.callback(pipeline.balancer.close)  # or the loader may wait for shares
        return self._loader

    def _samples(self, pipeline: Pipeline) -> tuple[Samples, SampleOrder]:
        """What this rank reads, and in which order."""
        if self._home is None:
            return self._data.training, self._data.order(self._run.data.seed)
        if self._member is not None:
            return self._home.samples, self._home.public
        batch_size = self._run.training.batch_size
        return self._home.samples, self._home.order(
            lambda step: pipeline.cutter.rows_of_replicas(step, batch_size)
        )
