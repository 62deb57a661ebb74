"""What one process of a run with private data reads: public samples, and those of its own server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.homes import homes_of, servers_of_places
from bireme.plan.plan import Plan
from bireme.runtime.microbatches import apportioned
from bireme.train.data.home import ReadableOrder, ReadableSamples
from bireme.train.data.placing import Epoch, Stock
from bireme.train.data.samples import Samples
from bireme.train.model import RunModel
from bireme.train.private_census import Census
from bireme.train.run_data import private_samples_of
from bireme.train.run_file import RunFile

__all__ = ["ReadableData", "readable_data", "readers_of"]


def readers_of(graph: Graph) -> tuple[int, ...]:
    """The units that read inputs of the model, which must be where private samples are."""
    return tuple(unit.index for unit in units_of(graph) if unit.inputs)


@dataclass(frozen=True, slots=True)
class ReadableData:
    """The samples that this process may read, and where all samples are placed.

    `owners` are the servers with private samples, `homes` the place in it of each replica's home, and `own`
    that of this process's server; None where nothing private is there. `planned` are the rows of a batch that
    the plan gives each replica.
    """

    samples: Samples
    stock: Stock
    seed: int
    owners: tuple[str, ...]
    homes: tuple[int | None, ...]
    own: int | None
    planned: tuple[int, ...]

    def order(self, rows: Callable[[int], Sequence[int]]) -> ReadableOrder:
        """The order of the run, where `rows(step)` are those that each replica has of a batch."""
        return ReadableOrder(self.stock, self.seed, self.homes, self.planned, rows, own=self.own)

    @property
    def placement(self) -> dict[str, Any]:
        """What an epoch takes and leaves, as planned, for JSON."""
        epoch = self._epoch
        return {
            "steps_per_epoch": self.stock.steps_per_epoch,
            "private_taken": dict(zip(self.owners, epoch.own, strict=True)),
            "private_left_out": dict(zip(self.owners, epoch.own_left_out, strict=True)),
            "public_taken": min(epoch.public, self.stock.num_public),
            "public_left_out": epoch.public_left_out,
            "public_repeated": epoch.public_repeated,
        }

    @property
    def sentence(self) -> str:
        """The same for people."""
        epoch, stock = self._epoch, self.stock
        own = ", ".join(
            f"{taken} of {there} private samples of {server}"
            for server, taken, there in zip(self.owners, epoch.own, stock.num_private, strict=True)
        )
        repeated = f", {epoch.public_repeated} more than once" if epoch.public_repeated else ""
        public = f"{min(epoch.public, stock.num_public)} of {stock.num_public} public ones{repeated}"
        return f"An epoch has {stock.steps_per_epoch} steps and takes {own}, and {public}."

    @property
    def _epoch(self) -> Epoch:
        return self.order(lambda _step: self.planned).placing.epoch


def readable_data(
    run: RunFile,
    model: RunModel,
    graph: Graph,
    public: Samples,
    census: Census,
    plan: Plan,
    cluster: Cluster,
    place: int,
) -> ReadableData:
    """What the process at a place of the plan reads. It opens the private data of its own server alone."""
    owners = tuple(sorted(census))
    numbers = {name: number for number, name in enumerate(owners)}
    server = servers_of_places(plan, cluster)[place]
    own = private_samples_of(run, model, server) if server in census else None
    homes = homes_of(plan, cluster, readers_of(graph))
    m, size = plan.num_microbatches, run.training.batch_size
    shares = plan.micro_batch_sizes or (1,) * plan.width
    rows = apportioned(size, [share for share in shares for _ in range(m)])
    return ReadableData(
        ReadableSamples(public, own, server),
        Stock(len(public), tuple(census[name].num_samples for name in owners), size),
        run.data.seed,
        owners,
        tuple(None if home is None else numbers.get(home) for home in homes),
        numbers.get(server),
        tuple(sum(rows[first : first + m]) for first in range(0, len(rows), m)),
    )
