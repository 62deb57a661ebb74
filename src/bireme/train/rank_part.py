"""What a rank knows of its run before it has a pipeline: how it was started, and its part of the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import read_cluster
from bireme.profile.profile import Profile, load_profile
from bireme.runtime.copies.copier import CopyOrders, CopySource
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.world import World
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import Samples
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.private_census import Census, ReadableData
from bireme.train.replica import AveragingReplica, Replica
from bireme.train.run_file import RunFile


@dataclass(frozen=True, slots=True)
class RunStart:
    """Which run, from which checkpoint if any, and what else the processes need beyond what its folder says.

    `is_shown` lets rank 0 speak of its steps; `words` are the first values of its log. `passed_over` are the
    damaged checkpoints after the one to resume from. If there are `copies` the run goes on from these instead
    of a checkpoint; `copying` says where ranks give second copies. With `may_replan` the starter of the run
    makes a new plan for it if it ends to that end. `census` counts the private samples of all servers.
    Updates are delayed after `first_delayed_step`.
    """

    folder: Path
    checkpoint: Path | None
    threads: int | None
    is_shown: bool
    words: dict[str, Any]
    passed_over: tuple[Path, ...] = ()
    may_replan: bool = False
    census: Census = field(default_factory=dict)
    first_delayed_step: int = 0
    copies: CopySource | None = None
    copying: CopyOrders | None = None

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
