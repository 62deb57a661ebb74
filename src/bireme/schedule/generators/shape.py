"""What a generator is given, and what it is: the two small types all generators share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from bireme.errors import BiremeError
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.routes import Routes, shares_of_stages
from bireme.schedule.weave import Orders, every_batch, lower

_MOST_PASSES = 1_000_000
"""Forwards in a batch, over all stages; more is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers a schedule is made for.

    `stages_per_rank` matters to schedules that give a rank several stages, `num_sliced` to those that slice
    micro-batches, `lookahead` to those that can run further ahead than they must. `sweep` is how many
    micro-batches a rank takes through a stage before the next. `shares` are those of `Routes`, if stages are
    on several ranks.
    """

    num_stages: int
    num_microbatches: int
    num_batches: int
    stages_per_rank: int = 1
    num_sliced: int = 0
    lookahead: int = 0
    sweep: int = 1
    shares: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for count, what in (
            (self.num_stages, "stage"),
            (self.num_microbatches, "micro-batch"),
            (self.num_batches, "batch"),
            (self.stages_per_rank, "stage per rank"),
            (self.sweep, "micro-batch in a sweep"),
        ):
            if count < 1:
                raise BiremeError(f"A schedule needs at least one {what}, not {count}.")
        if self.num_stages * self.num_microbatches > _MOST_PASSES:
            raise BiremeError(
                f"{self.num_stages} stages and {self.num_microbatches} micro-batches are "
                f"{self.num_stages * self.num_microbatches:,} forwards a batch; the most is {_MOST_PASSES:,}."
            )
        if self.lookahead < 0:
            raise BiremeError(f"The lookahead is {self.lookahead}; it must be 0 or more micro-batches.")
        if self.num_stages % self.stages_per_rank:
            raise BiremeError(
                f"{self.num_stages} stages cannot be divided evenly, {self.stages_per_rank} per rank. "
                f"Use a number of stages that {self.stages_per_rank} divides."
            )
        if self.num_microbatches % self.sweep:
            raise BiremeError(
                f"{self.num_microbatches} micro-batches cannot be divided into sweeps of {self.sweep}. Use a "
                f"number of micro-batches that {self.sweep} divides."
            )
        if self.shares and len(self.shares) != self.num_stages:
            raise BiremeError(
                f"There are shares for the ranks of {len(self.shares)} stages, and {self.num_stages} stages. "
                "Give each stage the shares of its ranks."
            )
        shares_of_stages(tuple(map(len, self.shares)), self.shares, self.num_microbatches)

    @property
    def num_ranks(self) -> int:
        """How many ranks the stages are assigned to, if each stage is on one rank."""
        return self.num_stages // self.stages_per_rank

    def num_ranks_from(self, stage: int) -> int:
        """How many ranks a stage and the stages after it have, if each rank has one stage."""
        return sum(map(len, self.shares[stage:])) if self.shares else self.num_stages - stage


def _one_each(shape: Shape) -> tuple[int, ...]:
    return tuple(range(shape.num_stages))


def _anything(_shape: Shape) -> None:
    return


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule's name and how to make its order.

    `orders` gives each rank's forwards and backwards over the whole window, batches counted from 0.
    `check` raises where the schedule is not legal for a shape.

    A schedule that has one stage on each rank can have several neighbors there: these run one after the
    other as the one stage would, of which they are parts. The functions are then asked for a stage on each
    rank.

    In sweeps of g, a rank takes g micro-batches through a stage before it turns to the next stage, as if they
    were one. The functions are then asked for m/g micro-batches. Where parts of a rank are paged, each comes
    to the device once for g micro-batches.
    """

    name: str
    summary: str
    rule: Rule
    orders: Callable[[Shape], Orders]
    placement: Callable[[Shape], tuple[int, ...]] = _one_each
    check: Callable[[Shape], None] = _anything
    stages_per_rank: int = 1
    """How many stages a rank has unless the user says otherwise."""
    slices: bool = False
    splits_backward: bool = False
    """Whether gradients of weights are made apart from those that go on to the stage before."""
    most_lookahead: Callable[[Shape], int] | None = None
    """The greatest lookahead of a shape, for schedules that have one."""
    widens: bool = False
    """Whether a stage may be on several ranks. Each rank then runs its micro-batches of the stage's order."""

    def whole(self, shape: Shape) -> Shape:
        """The shape with the neighbors of each rank as one stage, and each sweep as one micro-batch."""
        swept = replace(shape, num_microbatches=shape.num_microbatches // shape.sweep, sweep=1)
        if self.num_neighbors(shape) == 1:
            return swept
        return replace(swept, num_stages=shape.num_ranks, stages_per_rank=1)

    def num_neighbors(self, shape: Shape) -> int:
        """How many neighboring stages run as if they were one."""
        return shape.stages_per_rank if self.stages_per_rank == 1 else 1

    def routes(self, shape: Shape) -> Routes:
        """The ranks of each stage."""
        if shape.shares:
            return Routes.wide(shape.shares)
        ranks = self.placement(self.whole(shape))
        return Routes(tuple(rank for rank in ranks for _ in range(self.num_neighbors(shape))))

    def in_order(self, shape: Shape) -> Orders:
        """The orders of all ranks, with neighboring stages of a rank one after the other.

        Each rank of a stage runs its own micro-batches in the stage's order. So if the orders of the stages
        can run, those of the ranks can: the same instructions may run at the same times.
        """
        num = self.num_neighbors(shape)
        orders = self.orders(self.whole(shape))
        if shape.shares:
            routes = self.routes(shape)
            return [
                [step for step in orders[stage] if routes.rank_of(stage, step.microbatch) == rank]
                for stage, rank in routes.places()
            ]
        if num > 1:
            orders = [list(_apart(order, num)) for order in orders]
        return orders if shape.sweep == 1 else [list(_swept(order, shape.sweep)) for order in orders]

    def refuse(self, shape: Shape) -> None:
        """Raise where the schedule is not legal for the shape."""
        if self.num_neighbors(shape) > 1 and self.rule is Rule.STASHED:
            raise BiremeError(
                f"{self.name} puts one stage on each rank, not {shape.stages_per_rank}: the delay of updates "
                "depends on the stage, so parts of a stage would not learn what the whole does."
            )
        if shape.sweep > 1 and (self.slices or self.rule is Rule.STASHED):
            why = "slices micro-batches" if self.slices else "updates after every micro-batch"
            raise BiremeError(f"{self.name} {why}, so it has no sweeps. Leave out the sweep, or use 1f1b.")
        if shape.shares and (not self.widens or shape.stages_per_rank > 1 or shape.sweep > 1):
            why = "its order is made for one rank for each stage"
            if self.widens:
                why = "each of these ranks has one stage, and takes one micro-batch at a time through it"
            raise BiremeError(
                f"{self.name} cannot put a stage on several ranks here: {why}. Use 1f1b, gpipe or 2bw "
                "without sweep and stages_per_rank, or replicas of the whole pipeline (plan.width)."
            )
        self.check(self.whole(shape))


def _swept(order: Iterable[Instruction], sweep: int) -> Iterator[Instruction]:
    """Each step for the micro-batches of a sweep, one after the other."""
    for step in order:
        first = (step.microbatch or 0) * sweep
        for microbatch in range(first, first + sweep):
            yield step._replace(microbatch=microbatch)


def _apart(order: Iterable[Instruction], num: int) -> Iterator[Instruction]:
    """Each step of a stage as a step of each of its parts: forwards from the first on, the others from the
    last.
    """
    for step in order:
        parts = range(step.stage * num, (step.stage + 1) * num)
        for part in parts if step.kind is Kind.FORWARD else reversed(parts):
            yield step._replace(stage=part)


def draining(order: Callable[[Shape, int], list[Instruction]], shape: Shape) -> Orders:
    """The orders of a schedule that drains between batches, from the order of each rank in one batch."""
    return every_batch([order(shape, rank) for rank in range(shape.num_ranks)], shape.num_batches)


def forward(stage: int, microbatch: int, batch: int = 0, half: int | None = None) -> Instruction:
    """A forward that has no version yet."""
    return Instruction(Kind.FORWARD, stage, batch, microbatch, half=half)


def backward(stage: int, microbatch: int, batch: int = 0, kind: Kind = Kind.BACKWARD) -> Instruction:
    """A backward, or a part of one, that has no version yet."""
    return Instruction(kind, stage, batch, microbatch)


# Forward only: what an evaluation runs. It makes no version, so it is no schedule to train by.


@lru_cache(maxsize=64)
def forward_only(routes: Routes, num_microbatches: int) -> Program:
    """One batch forward through all stages, each rank's stages one after the other. The batch may have fewer
    micro-batches than the routes are for.
    """
    return lower(
        Program(
            name="evaluation",
            rule=Rule.SYNCHRONOUS,
            routes=routes,
            num_microbatches=num_microbatches,
            num_batches=1,
            banks=(1,) * routes.num_stages,
            tracks=tuple(Track(_order(routes, rank, num_microbatches)) for rank in range(routes.num_ranks)),
        )
    )


def _order(routes: Routes, rank: int, num_microbatches: int) -> tuple[Instruction, ...]:
    return tuple(
        forward(stage, k)._replace(version=0)
        for stage in routes.stages_of(rank)
        for k in range(num_microbatches)
        if routes.rank_of(stage, k) == rank
    )
