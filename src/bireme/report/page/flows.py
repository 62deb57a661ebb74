"""Who runs what in a plan, and what flows between them: the facts under the drawing of the cluster."""

import math
from dataclasses import dataclass

from bireme.cluster.cluster import Cluster
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.report.page.figures import headline
from bireme.report.page.run import Run
from bireme.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Post:
    """A device that has a part in the plan: which rank of which replica it is, and its stages."""

    device: str
    rank: int
    replica: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes between two neighbors in a pipeline; nan is what nobody knows.

    `forth_bytes` a batch go from the first to the second, `back_bytes` the other way. `used_bytes_per_s` is
    the greater of the two while the run goes on, `most_bytes_per_s` what the way between them carries.
    """

    source: Post
    destination: Post
    forth_bytes: float
    back_bytes: float
    used_bytes_per_s: float
    most_bytes_per_s: float

    @property
    def share(self) -> float:
        """Of the way, how much is used; nan where it is not known."""
        if not self.most_bytes_per_s or math.isinf(self.most_bytes_per_s):
            return math.nan
        return self.used_bytes_per_s / self.most_bytes_per_s


def posts(run: Run) -> tuple[Post, ...]:
    """Every device in use, replica by replica; none where the plan names none."""
    if run.plan is None:
        return ()
    plan = run.plan.plan
    source = plan.source
    names = _names(run, plan, source.num_ranks)
    return tuple(
        Post(names[rank][replica], rank, replica, source.stages_of(rank))
        for replica in range(plan.width if names else 0)
        for rank in range(source.num_ranks)
    )


def flows(run: Run) -> tuple[Flow, ...]:
    """What goes between the devices of each replica, each pair once."""
    if run.plan is None:
        return ()
    hops = run.plan.plan.source.routes.hops()
    pairs = dict.fromkeys((min(pair), max(pair)) for _, *pair in hops)
    placed = {(post.replica, post.rank): post for post in posts(run)}
    replicas = sorted({replica for replica, _ in placed})
    return tuple(
        _flow(run, placed[replica, one], placed[replica, other])
        for replica in replicas
        for one, other in pairs
    )


def _names(run: Run, plan: Plan, num_ranks: int) -> tuple[tuple[str, ...], ...]:
    """The plan's devices by rank and replica, or those that the run began with."""
    if plan.devices:
        return plan.rank_devices
    started = run.metrics.starts[-1].devices if run.metrics.starts else ()
    if len(started) != num_ranks * plan.width:
        return ()
    return tuple(started[rank::num_ranks] for rank in range(num_ranks))


def _flow(run: Run, source: Post, destination: Post) -> Flow:
    figures = headline(run)
    batch_s = figures.measured_batch_s or figures.predicted_batch_s or math.nan
    known = next((one for one in (run.predicted, run.measured) if one is not None and one.transfers), None)
    forth = _bytes(known, source.rank, destination.rank)
    back = _bytes(known, destination.rank, source.rank)
    return Flow(
        source,
        destination,
        forth,
        back,
        max(forth, back) / batch_s,
        _bandwidth(run.cluster, source.device, destination.device),
    )


def _bytes(timeline: Timeline | None, source: int, destination: int) -> float:
    """Of a batch, from one rank to another."""
    if timeline is None:
        return math.nan
    sent = (
        sum(one.num_bytes)
        for one in timeline.transfers
        if (one.source, one.destination) == (source, destination)
    )
    return sum(sent) / timeline.program.num_batches


def _bandwidth(cluster: Cluster | None, source: str, destination: str) -> float:
    if cluster is None:
        return math.nan
    try:
        return cluster.bandwidth(cluster.number_of(source), cluster.number_of(destination))
    except BiremeError:
        return math.nan
