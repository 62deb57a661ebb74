"""The noun of this room: a `Plan`, how a model is cut and which schedule trains it.

It says nothing about times; who made it, by hand or by search, does not show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import RLock
from typing import Annotated

from annotated_types import doc

from bireme.bounds import Count, Place
from bireme.codec.border import BorderCodecs, LinkCodecs
from bireme.errors import BiremeError
from bireme.plan.paging import Paging
from bireme.plan.program_plan import ProgramPlan, units_between
from bireme.schedule.budgets import Cut
from bireme.schedule.catalogue import generate
from bireme.schedule.folding import WRITTEN_OUT
from bireme.schedule.gathering import gathered
from bireme.schedule.program import Program, Track
from bireme.schedule.rule import Rule
from bireme.schedule.source import SETTLED, ProgramSource, source_like
from bireme.schedule.stream import LONG
from bireme.schedule.tiers import Chunk

__all__ = ["Plan", "know_window"]

MAKING = RLock()

KNOWN: dict[tuple["Plan", int, int], Program] = {}
"""Windows of plans that page which were planned elsewhere."""

COMPARED = 2
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
    there is one replica, and the engine takes it back where ranks share parameters. `codecs` are those of
    the borders, from the first on; left out, everything is sent as it is. `sweep` is how many micro-batches
    a rank takes through a stage before it turns to the next. `paging` says what leaves the device; left out,
    nothing does. `updates_halfway` lets 2bw update early enough for the weights to travel, where replicas
    share an optimiser. Where they share the weights too, `whole_weights` says how many stages of a rank, or
    versions of one, have theirs whole at a time; 0 where every replica has its own.
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
    codecs: tuple[BorderCodecs, ...] = ()
    sweep: Count = 1
    paging: Paging | None = None
    updates_halfway: bool = False
    whole_weights: Place = 0

    def __post_init__(self) -> None:
        num_ranks = self.by_program.source.num_ranks
        if self.devices and [len(names) for names in self.devices] != [self.width] * num_ranks:
            raise BiremeError(
                f"The plan names devices for {len(self.devices)} ranks; it needs one for each of "
                f"{self.width} replicas of each of {num_ranks} ranks."
            )
        if len(self.codecs) > self.num_stages - 1:
            raise BiremeError(
                f"The plan has codecs for {len(self.codecs)} borders; {self.num_stages} stages have "
                f"{self.num_stages - 1}."
            )
        if self.paging is not None:
            self.paging.check(num_ranks, self.num_stages)
            if self.whole_weights:
                raise BiremeError(
                    "The plan pages, and its replicas share weights, which are gathered where they are used "
                    "and not paged. Leave out paging or whole_weights."
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
    def is_early(self) -> bool:
        """Whether it updates early, as far as the plan can tell."""
        return self.width == 1 if self.updates_early is None else self.updates_early

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
        source = source_like(_resident(self, 1, 0, lag), partial(_averaging, self, lag))
        return replace(self.by_program, source=source)

    def program(self, num_batches: int, first_batch: int = 0) -> Program:
        """What each rank of one replica does in a window of batches."""
        return self.source.program(num_batches, first_batch)

    def units_of(self, stage: int, num_units: int) -> range:
        """The units of a stage, of so many in all."""
        return units_between(self.cuts, stage, num_units)


@lru_cache(maxsize=64)
def _source(plan: Plan) -> ProgramSource:
    return source_like(_resident(plan, 1, 0), partial(_program, plan))


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


def _program(plan: Plan, num_batches: int, first_batch: int) -> Program:
    """The program of a window. Threads that ask for the same at once have it made once."""
    with MAKING:
        return _remembered(plan, num_batches, first_batch)


@lru_cache(maxsize=64)
def _remembered(plan: Plan, num_batches: int, first_batch: int) -> Program:
    if plan.paging is None:
        resident = _resident(plan, num_batches, first_batch)
        return gathered(resident, plan.width, plan.whole_weights) if plan.whole_weights else resident
    known = KNOWN.get((plan, num_batches, first_batch))
    if known is not None:
        return known
    base = min(first_batch, 1) if plan.source.rule is Rule.DELAYED else 0
    if first_batch > base:
        return _remembered(plan, num_batches, base).later(first_batch - base)
    if num_batches > WRITTEN_OUT and num_batches != LONG:
        loop = _remembered(plan, LONG, first_batch)
        if num_batches > LONG - min(track.repeats for track in loop.tracks) + COMPARED:
            return loop.of_length(num_batches)
    return plan.paging.paged(_resident(plan, num_batches, first_batch), _cut(plan))


@lru_cache(maxsize=64)
def _cut(plan: Plan) -> Cut:
    return () if plan.paging is None else plan.paging.cut(_resident(plan, SETTLED, 0))


@lru_cache(maxsize=64)
def _averaging(plan: Plan, lag: int, num_batches: int, first_batch: int) -> Program:
    return _resident(plan, num_batches, first_batch, lag)


def _resident(plan: Plan, num_batches: int, first_batch: int, average_lag: int | None = None) -> Program:
    """The program without paging."""
    return generate(
        plan.schedule,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        num_batches=num_batches,
        stages_per_rank=plan.stages_per_rank,
        num_sliced=plan.num_sliced,
        lookahead=plan.lookahead,
        sweep=plan.sweep,
        recompute=plan.recompute,
        first_batch=first_batch,
        updates_early=plan.is_early,
        updates_halfway=plan.updates_halfway,
        average_lag=average_lag,
    )
