"""The noun of this room: a `Plan`, how a model is cut and which schedule trains it.

It says nothing about times; who made it, by hand or by search, does not show.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from threading import RLock
from typing import Annotated, Any

from annotated_types import doc

from bireme.bounds import Bytes, Count, Place, widths_text
from bireme.cluster.cluster import Cluster
from bireme.codec.description import BoundaryCodecs, LinkCodecs
from bireme.errors import BiremeError, closest
from bireme.plan.program_plan import ProgramPlan, units_between
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets, Cut, cut_memory
from bireme.schedule.catalogue import generate, source_named
from bireme.schedule.gathering import gathered
from bireme.schedule.paging import PagedPrograms
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.routes import shares_of_stages
from bireme.schedule.source import LONG, SETTLED, WRITTEN_OUT, ProgramSource, source_like
from bireme.schedule.tiers import Chunk
from bireme.schedule.weave import UpdateTiming

# Many devices in few words: server0/gpu0…3, or server0…127/gpu0, 2 for two of each of many equal servers.


def device_ranges(names: Iterable[str]) -> str:
    """The names in the order given; those of a server, and equal ones of several, are drawn together."""
    by_server = [
        (server, _ranges([name.rpartition("/")[2] for name in group]))
        for server, group in groupby(names, key=lambda name: name.rpartition("/")[0])
    ]
    found = []
    for devices, servers in groupby(by_server, key=lambda pair: pair[1]):
        for run in _runs([server for server, _ in servers]):
            found.append(f"{run}/{devices}" if run else devices)
    return ", ".join(found)


def _ranges(names: Sequence[str]) -> str:
    """Such as gpu0…3, 5: what begins as the one before it is only a number."""
    parts: list[str] = []
    stem = ""
    for run in _runs(names):
        own = _stem(run.partition("…")[0])
        is_number = parts and own == stem and own != run
        parts.append(run.removeprefix(own) if is_number else run)
        stem = own
    return ", ".join(parts)


def _runs(names: Sequence[str]) -> list[str]:
    """Such as gpu0…3 and gpu5, of names that follow each other by number."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}…{run[-1].removeprefix(_stem(run[-1]))}" for run in runs]


def _follows(one: str, other: str) -> bool:
    stem = _stem(one)
    number = one.removeprefix(stem)
    return bool(number) and other == f"{stem}{int(number) + 1}" and number == str(int(number))


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


# How a plan pages: budgets, chunks and choices, from which its programs get their FETCH and EVICT.
#
# A plan's source gives programs that are paged already. How memory is cut depends on the plan alone and not
# on the length of a window, so all windows have the same chunks and capacities.

MOST_CHUNKS = 256
"""Of a rank, where their size is searched: a plan tries many programs, and more chunks make them longer."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The paging of one replica; all replicas page alike, within the least budgets of any.

    `budgets` and `chunk_bytes` are of each rank; a chunk size of 0 is searched, and unused where all of the
    rank's memory fits. `sizes` are the bytes of each stage that the chunks are counted from; what the engine
    keeps must not be larger. Fetched chunks are to be there `ahead` instructions before they are used. With
    `updates_together` a rank updates all its stages when it updates the first, and with `updates_apart` each
    stage as soon as it has its gradients. `is_summed` where gradients are summed over replicas, or over
    stages that share parameters. Without `stashes` activations stay on the device. With `host_updates` all
    stages that can are updated on the host.
    """

    budgets: tuple[Budgets, ...]
    sizes: Sizes
    chunk_bytes: tuple[Bytes, ...] = ()
    ahead: Place = 1
    updates_together: bool = False
    is_summed: bool = False
    stashes: bool = True
    host_updates: bool = False
    updates_apart: bool = False

    def check(self, num_ranks: int, num_stages: int) -> None:
        """Refuse paging that is not of so many ranks and stages."""
        if len(self.budgets) != num_ranks or len(self.chunk_bytes) not in (0, num_ranks):
            raise BiremeError(
                f"The plan offloads on {len(self.budgets)} ranks with {len(self.chunk_bytes)} sizes of "
                f"chunks, but has {num_ranks} ranks. Give each rank its budgets."
            )
        if len(self.sizes.version) != num_stages:
            raise BiremeError(
                f"The plan offloads {len(self.sizes.version)} stages, but has {num_stages}. Give the bytes "
                "of each."
            )

    def cut(self, settled: Program, page_bytes: int = 0) -> Cut:
        """How each rank's memory is cut, from a window that shows all that longer ones keep; in whole pages
        where they are known.
        """
        return cut_memory(
            settled,
            self.sizes,
            self.budgets,
            chunk_bytes=self.chunk_bytes or 0,
            stashes=self.stashes,
            most_chunks=MOST_CHUNKS,
            page_bytes=page_bytes,
            host_updates=self.host_updates and not self.is_summed,
        )

    def paged(self, program: Program, cut: Cut) -> PagedPrograms:
        """The program with the copies in it, for any lead of theirs; itself where nothing is cut."""
        return PagedPrograms(
            program,
            cut,
            is_summed=self.is_summed,
            updates_together=self.updates_together,
            updates_apart=self.updates_apart,
        )

    def with_chunks(self, cut: Cut) -> "Paging":
        """The same with the sizes of chunks that were found."""
        return replace(self, chunk_bytes=tuple(0 if one is None else one.chunk_bytes for one in cut))


def values_of(one: object, names: Iterable[str]) -> dict[str, Any]:
    """The values of some fields by their names, which another class has too."""
    return {name: getattr(one, name) for name in names}


_MAKING = RLock()

KNOWN: dict[tuple["Plan", int, int], Program] = {}
"""Windows of plans that page which were planned elsewhere."""

_COMPARED = 2
"""A loop is found from its shortest window and from those of up to so many batches more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages, replicas and schedule.

    `cuts` are the units at which a new stage begins, without the first stage's 0. `width` is how many
    replicas of the pipeline there are; a batch is `width` · `num_microbatches` micro-batches. `recompute`
    names the stages that run their forward again before the backward, `recompute_units` single units that do
    so within theirs. `micro_batch_sizes` are the samples of a micro-batch in each replica, to which batches
    are cut in proportion; left out, replicas get equal shares. `devices[rank][replica]` names the device of
    each process, for who starts them. `updates_early` lets 2bw and 2bw-fresh update while the first rank has
    one set of gradients, which costs time where gradients are summed over ranks; left out, it is so where
    there is one replica, and the engine takes it back where ranks share parameters. `codecs` are those of the
    boundaries, from the first on; left out, everything is sent as it is. `sweep` is how many micro-batches a
    rank takes through a stage before it turns to the next. `paging` says what leaves the device; left out,
    nothing does. `updates_halfway` lets 2bw update early enough for the weights to travel, where replicas
    share an optimizer. Where they share the weights too, `whole_weights` says how many stages of a rank, or
    versions of one, have theirs whole at a time; 0 where every replica has its own. Replicas are assigned to
    `sites` in their order, equally many to each, and share within a site. `shard` is what they share, if the
    planner chose it (`memory.shard = "auto"`), `sync_mode` how they agree, and `sum_codec` the codec of what
    they send each other; empty otherwise.

    `stage_widths` are the replicas of each stage, if stages are of unequal width: then `width` is 1, each
    rank has one stage, and `devices[stage]` names the devices of the stage's replicas. `stage_shares` are,
    for each stage, the micro-batches of a batch that each replica takes; left out, they are as equal as
    possible.
    """

    cuts: Annotated[tuple[Place, ...], doc("the units at which a new stage begins, without the first 0")]
    num_microbatches: Annotated[Count, doc("micro-batches of a batch in each replica")]
    schedule: str = "2bw"
    width: Count = 1
    stages_per_rank: Count | None = None
    num_sliced: Place | None = None
    lookahead: Place = 0
    recompute: tuple[Place, ...] = ()
    recompute_units: tuple[Place, ...] = ()
    micro_batch_sizes: tuple[Count, ...] = ()
    devices: tuple[tuple[str, ...], ...] = ()
    updates_early: bool | None = None
    codecs: tuple[BoundaryCodecs, ...] = ()
    sweep: Count = 1
    paging: Paging | None = None
    updates_halfway: bool = False
    whole_weights: Place = 0
    sites: Count = 1
    shard: str = ""
    sync_mode: str = ""
    sum_codec: str = ""
    stage_widths: tuple[Count, ...] = ()
    stage_shares: tuple[tuple[Count, ...], ...] = ()

    def __post_init__(self) -> None:
        self._check_widths()
        if self.width % self.sites:
            raise BiremeError(
                f"The plan has {self.width} replicas for {self.sites} sites, which must have equally many. "
                "Make width a multiple of sites."
            )
        num_ranks = self.by_program.source.num_ranks
        widths = list(self.stage_widths) or [self.width] * num_ranks
        if self.devices and [len(names) for names in self.devices] != widths:
            if self.stage_widths:
                raise BiremeError(
                    f"The plan names {', '.join(str(len(names)) for names in self.devices)} devices for its "
                    f"stages, which have {', '.join(map(str, widths))} replicas. Name one for each replica."
                )
            raise BiremeError(
                f"The plan names devices for {len(self.devices)} ranks; it needs one for each of "
                f"{self.width} replicas of each of {num_ranks} ranks."
            )
        if len(self.codecs) > self.num_stages - 1:
            raise BiremeError(
                f"The plan has codecs for {len(self.codecs)} boundaries; {self.num_stages} stages have "
                f"{self.num_stages - 1}."
            )
        if self.paging is not None:
            self.paging.check(num_ranks, self.num_stages)

    def _check_widths(self) -> None:
        if self.stage_widths and len(self.stage_widths) != self.num_stages:
            raise BiremeError(
                f"The plan has {len(self.stage_widths)} stage_widths for {self.num_stages} stages. Give each "
                "stage its width."
            )
        if self.stage_widths and (self.width > 1 or self.stages_per_rank not in (None, 1)):
            raise BiremeError(
                f"The plan has stage_widths, width {self.width} and stages_per_rank {self.stages_per_rank}. "
                "A pipeline of unequal widths is one pipeline with one stage on each rank: leave out width "
                "and stages_per_rank."
            )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    @property
    def num_ranks(self) -> int:
        """How many processes it takes, replicas counted."""
        return self.width * self.source.num_ranks

    @property
    def replicas_text(self) -> str:
        """How many replicas there are, after the number of stages; nothing if there is one."""
        if self.stage_widths:
            return f" of {widths_text(self.stage_widths)} replicas"
        return f", {self.width} replicas" if self.width > 1 else ""

    @property
    def rank_devices(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each rank, one for each replica of the pipeline; empty if the plan names none."""
        if not self.stage_widths:
            return self.devices
        return tuple((name,) for names in self.devices for name in names)

    @property
    def process_devices(self) -> tuple[str, ...]:
        """The device of each process, as the engine numbers them: replica by replica."""
        return tuple(row[replica] for replica in range(self.width) for row in self.rank_devices)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of a batch that each replica of each stage takes, if `stage_widths` are given."""
        return shares_of_stages(self.stage_widths, self.stage_shares, self.num_microbatches)

    @property
    def is_early(self) -> bool:
        """Whether it updates early, as far as the plan can tell."""
        is_summed = self.width > 1 or bool(self.stage_widths)
        return not is_summed if self.updates_early is None else self.updates_early

    @property
    def known_shard(self) -> str:
        """What its replicas share, as far as the plan says; `none` otherwise."""
        return self.shard or ("weights" if self.whole_weights else "none")

    @property
    def source(self) -> ProgramSource:
        """What each rank of one replica does."""
        return _source(self)

    @property
    def by_program(self) -> ProgramPlan:
        """The same with its programs instead of a schedule's name, which is all that the engine asks for."""
        return ProgramPlan(
            self.source,
            self.cuts,
            self.width,
            self.recompute_units,
            self.micro_batch_sizes,
            LinkCodecs.steady(self.codecs),
        )

    def on_pages(self, page_bytes: int) -> "Plan":
        """The plan where memory is mapped in pages of so many bytes: each chunk is a whole number of them."""
        found = [0 if one is None else one.chunk_bytes for one in _cut(self)]
        if self.paging is None or not any(size % page_bytes for size in found):
            return self
        sizes = tuple(-(-size // page_bytes) * page_bytes for size in found)
        return replace(self, paging=replace(self.paging, chunk_bytes=sizes))

    def averaging(self, lag: int) -> ProgramPlan:
        """The same with averages of weights in its programs, which may come so many updates late."""
        source = source_like(_resident(self, 1, 0, lag), partial(_program, self, lag))
        return replace(self.by_program, source=source)

    def program(self, num_batches: int, first_batch: int = 0) -> Program:
        """What each rank of one replica does in a window of batches."""
        return self.source.program(num_batches, first_batch)

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage, of so many in all."""
        return units_between(self.cuts, stage, num_units)


_OF_PROGRAMS = (
    *("num_stages", "num_microbatches", "stages_per_rank"),
    *("num_sliced", "lookahead", "sweep", "recompute"),
)
"""The fields of a plan that its programs depend on."""


@lru_cache(maxsize=64)
def _source(plan: Plan) -> ProgramSource:
    window = partial(_program, plan, None)
    if plan.stage_widths or plan.whole_weights:
        return source_like(_resident(plan, 1, 0), window)
    return source_named(plan.schedule, window, **values_of(plan, _OF_PROGRAMS))


def know_window(
    plan: Plan,
    num_batches: int,
    first_batch: int,
    tracks: Sequence[Track],
    begins: Sequence[Mapping[Chunk, int] | None],
) -> None:
    """Have a window of a plan that pages at hand, which was planned elsewhere. `begins` says of each rank
    where its chunks lie when the window begins, None if it keeps all on the device.
    """
    tiers = tuple(
        None if own is None or begin is None else replace(own, begin=begin)
        for own, begin in zip(_cut(plan), begins, strict=True)
    )
    KNOWN[plan, num_batches, first_batch] = replace(
        _resident(plan, 1, 0),
        tracks=tuple(tracks),
        num_batches=num_batches,
        first_batch=first_batch,
        tiers=tiers,
    )


def _program(plan: Plan, average_lag: int | None, num_batches: int, first_batch: int) -> Program:
    """The program of a window. Threads that ask for the same at once have it made once."""
    with _MAKING:
        return _remembered(plan, num_batches, first_batch, average_lag)


@lru_cache(maxsize=64)
def _remembered(plan: Plan, num_batches: int, first_batch: int, average_lag: int | None = None) -> Program:
    known = None if average_lag is not None else KNOWN.get((plan, num_batches, first_batch))
    if known is not None:
        return known
    base = min(first_batch, 1) if plan.source.rule is Rule.DELAYED else 0
    if first_batch > base:
        return _remembered(plan, num_batches, base, average_lag).later(first_batch - base)
    if plan.paging is None:
        return _resident(plan, num_batches, first_batch, average_lag)
    if num_batches > WRITTEN_OUT and num_batches != LONG:
        loop = _remembered(plan, LONG, first_batch, average_lag)
        if num_batches > LONG - min(track.repeats for track in loop.tracks) + _COMPARED:
            return loop.of_length(num_batches)
    resident = _resident(plan, num_batches, first_batch, average_lag)
    return plan.paging.paged(resident, _cut(plan)).fetched(plan.paging.ahead)


@lru_cache(maxsize=64)
def _cut(plan: Plan) -> Cut:
    if plan.paging is None:
        return ()
    return plan.paging.cut(_resident(plan, SETTLED, 0))


def _resident(plan: Plan, num_batches: int, first_batch: int, average_lag: int | None = None) -> Program:
    """The program without paging, with whole weights from the replicas if these share them."""
    program = generate(
        plan.schedule,
        num_batches=num_batches,
        first_batch=first_batch,
        shares=plan.shares,
        timing=UpdateTiming(early=plan.is_early, halfway=plan.updates_halfway, average_lag=average_lag),
        **values_of(plan, _OF_PROGRAMS),
    )
    return gathered(program, plan.width // plan.sites, plan.whole_weights)


# Homes of replicas: the server that reads a replica's samples and labels, so that private ones stay on it.
#
# The inputs of a model enter its first stage and the labels its last; some models read inputs between them
# too. A replica is at home on a server if all stages that read are on the server's devices: the whole
# replica, both ends of a schedule that comes back to its first device, or first and last stage on two devices
# of the server.


def servers_of_places(plan: Plan, cluster: Cluster) -> list[str]:
    """The server of each process of a plan, counted as the engine does, replica by replica.

    A plan that names no devices, or those of another cluster, takes them in their order.
    """
    servers = {placed.name: cluster.servers[placed.server].name for placed in cluster.devices()}
    named = plan.process_devices
    if named and set(named) <= servers.keys():
        return [servers[name] for name in named]
    return list(servers.values())[: plan.num_ranks]


def ranks_that_read(
    cuts: Sequence[int], rank_of_stage: Sequence[int], readers: Iterable[int]
) -> frozenset[int]:
    """The ranks of a pipeline that hold the units of these numbers, which read inputs of the model."""
    return frozenset(rank_of_stage[bisect_right(cuts, unit)] for unit in readers)


def homes_of(plan: Plan, cluster: Cluster, readers: Iterable[int]) -> tuple[str | None, ...]:
    """The home of each replica, None where its samples are read on several servers."""
    servers, per_replica = servers_of_places(plan, cluster), plan.source.num_ranks
    ranks = ranks_that_read(plan.cuts, plan.source.rank_of_stage, readers)
    reading = ({servers[replica * per_replica + rank] for rank in ranks} for replica in range(plan.width))
    return tuple(found.pop() if len(found) == 1 else None for found in reading)


def check_servers(names: Iterable[str], cluster: Cluster) -> None:
    """Refuse private data of a server that is not in the cluster."""
    known = [server.name for server in cluster.servers]
    for name in names:
        if name not in known:
            raise BiremeError(
                f"data.private names the server {name!r}, which the cluster lacks. {closest(name, known)} "
                "A machine that has left must join again."
            )


def check_homes(plan: Plan, cluster: Cluster, readers: Iterable[int], owners: Collection[str]) -> None:
    """Refuse a plan in which an owner of private samples is no replica's home."""
    homes = homes_of(plan, cluster, readers)
    homeless = sorted(set(owners) - set(homes))
    if homeless:
        raise BiremeError(
            f"The plan does not keep the private samples of {', '.join(homeless)} there: in no replica are "
            "all stages that read samples or labels on its devices. Put a whole replica on it, take a "
            "schedule that comes back to its first device (zbv), or put the first and the last stage on "
            "devices of that server."
        )
