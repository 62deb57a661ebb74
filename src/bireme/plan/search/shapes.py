"""The shapes a plan can have, and what each takes at the least: the closed forms that prune a search.

A shape says everything but the devices and the cuts: schedule, ranks of a pipeline, its replicas with the
samples of their micro-batches, and how many of these make a batch.

The bound of a shape knows no messages. With W the seconds of a micro-batch's work on a device of speed 1, m
micro-batches and p ranks,

    a batch ≥ m · W / (the p fastest speeds added up)           all work must be done
    a batch ≥ m · (the longest unit) / (the fastest speed)      no unit is divided
    a batch ≥ W / Σ v_s · (1 − 1/m)^s / m                       1F1B and GPipe drain

The last follows from the way of the first and the last micro-batch: what all stages before stage s take once
and stage s takes m times is never more than a batch, so with a batch of 1 stage s has at most (1 − 1/m)^s / m
of work, on the s-fastest device in the best case.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from bireme.errors import BiremeError
from bireme.plan.forecast import PlanKind
from bireme.plan.search.problem import PlanningProblem
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.generators.shape import Shape as ScheduleShape
from bireme.schedule.program import Rule

PARTS = {"interleaved": (2, 4), "zbv": (2,)}
"""How many stages a rank may have, where it has several."""

PATH_BOUND = frozenset({"gpipe", "1f1b"})
"""Schedules in which a micro-batch's backward on a stage is whole, and each stage's last comes last."""

_MOST_UNLIKE = 8
"""Up to so many replicas, every number of them may have larger micro-batches than the others."""

_MANY = 16
"""Past that not every depth and width is tried, but those of at most three binary digits."""

_MOST_BATCHES = 16
"""Sizes of a batch to try, where the user leaves a choice."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan without devices and cuts; `sizes` are the samples of each replica's micro-batches, falling.

    `updates_early` lets stages update while the first rank has one set of gradients, and `updates_halfway`
    in time for what replicas make of a shared optimizer to travel. Replicas share within `sites`. With
    `stage_widths` the plan is one pipeline whose stages have these numbers of replicas.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    sizes: tuple[int, ...]
    num_microbatches: int
    updates_early: bool = False
    updates_halfway: bool = False
    sites: int = 1
    stage_widths: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """How many replicas of the pipeline there are."""
        return len(self.sizes)

    @property
    def most_replicas(self) -> int:
        """The most replicas of any stage."""
        return max(self.stage_widths, default=self.width)

    @property
    def microbatches_of_rank(self) -> int:
        """The micro-batches of a batch that a rank takes, in the mean."""
        if not self.stage_widths:
            return self.num_microbatches
        return max(1, self.num_microbatches * self.num_ranks // self.num_devices)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.num_ranks * self.stages_per_rank

    @property
    def batch_size(self) -> int:
        """The samples of a step."""
        return self.num_microbatches * sum(self.sizes)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return _rank_of_stage(self.schedule, self.num_stages, self.num_microbatches, self.stages_per_rank)

    @property
    def kind(self) -> PlanKind:
        """The kind of its plans."""
        return PlanKind.of(self.schedule, self.num_stages, self.width)

    @property
    def num_devices(self) -> int:
        """How many devices it takes."""
        return sum(self.stage_widths) or self.num_ranks * self.width

    def penalty(self, problem: PlanningProblem, lookahead: int = 0) -> float:
        """The cost in steps, if steps count for the goal, but for the part of codecs on stage boundaries."""
        request, optimizer = problem.request, problem.profile.optimizer
        rule, width = schedule_named(self.schedule).rule, self.most_replicas
        steps = request.penalty(
            rule, optimizer, self.num_stages, self.microbatches_of_rank, lookahead=lookahead, width=width
        )
        steps *= request.agreement_penalty(width, optimizer, rule)
        return steps * request.sum_penalty(width, optimizer)


@lru_cache(maxsize=4096)
def _rank_of_stage(
    schedule: str, num_stages: int, num_microbatches: int, stages_per_rank: int
) -> tuple[int, ...]:
    shape = ScheduleShape(num_stages, num_microbatches, 1, stages_per_rank)
    return schedule_named(schedule).routes(shape).rank_of_stage


class Outlines:
    """All shapes that the request allows, with their bounds."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._speeds = np.sort([problem.most_speeds[device] for device in problem.devices])[::-1]
        self._fastest = np.concatenate(([0.0], np.cumsum(self._speeds)))
        self._work: dict[int, tuple[float, float]] = {}
        self._paces: dict[tuple[int, tuple[int, ...]], float] = {}
        self._paths: dict[tuple[int, int], float] = {}
        self.refusal = ""
        """Why the last shape that no schedule allows is none."""
        self.is_unequal = bool(self._speeds[0] != self._speeds[-1])
        most = len(self._speeds)
        few = range(1, min(most, _MANY) + 1)
        self._depths = [*few, *(depth for depth in range(_MANY + 1, most + 1) if _is_round(depth))]
        self._widths = [*few, *(width for width in range(_MANY + 1, most + 1) if _is_round(width))]

    def __iter__(self) -> Iterator[Outline]:
        request = self._problem.request
        # Whoever agrees by a coordinator goes on without those who die, which takes two at least.
        least = 1 if request.rounds is None else 2
        widths = [request.width] if request.width else [width for width in self._widths if width >= least]
        for width in widths:
            for sizes in self._sizes(width) if width % request.sites == 0 else ():
                for m in self.counts(sum(sizes)):
                    yield from self._of(sizes, m)

    def _of(self, sizes: tuple[int, ...], num_microbatches: int) -> Iterator[Outline]:
        problem, request = self._problem, self._problem.request
        most = min(len(problem.devices) // len(sizes), problem.num_units)
        depths = (request.depth,) if request.depth else self._depths
        # Delayed updates hide sums over replicas also behind the next batch of a single device.
        delayed = {name for name in problem.schedules if schedule_named(name).rule is not Rule.SYNCHRONOUS}
        alone = {"sequential"} | (delayed if len(sizes) > 1 else set())
        for depth in depths:
            if depth > most:
                continue
            for name in problem.schedules:
                if depth == 1 and request.schedule == "auto" and name not in alone:
                    continue  # where there is no pipeline schedules with one rule are all the same
                if name == "1f1b-sliced" and any(size % 2 for size in sizes):
                    self.refusal = "1f1b-sliced halves each micro-batch. Make its samples an even number."
                    continue
                is_early = problem.updates_early(name, depth, sizes)
                is_shared = request.num_sharers(len(sizes)) > 1 and not request.shares_weights
                is_halfway = is_shared and schedule_named(name).rule is Rule.DELAYED
                for parts in PARTS.get(name, (1,)):
                    outline = Outline(
                        name, depth, parts, sizes, num_microbatches, is_early, is_halfway, request.sites
                    )
                    if self._is_possible(outline):
                        yield outline

    def _is_possible(self, outline: Outline) -> bool:
        if outline.num_stages > self._problem.num_units or (
            outline.stages_per_rank > 1 and outline.num_ranks < 2
        ):
            return False
        try:
            shape = ScheduleShape(outline.num_stages, outline.num_microbatches, 1, outline.stages_per_rank)
            schedule_named(outline.schedule).refuse(shape)
        except BiremeError as error:
            self.refusal = str(error)
            return False
        return True

    def _sizes(self, width: int) -> Iterator[tuple[int, ...]]:
        """Equal micro-batches in all replicas; where devices are unequal or few, of two sizes."""
        sizes = self._problem.sizes
        for size in sizes:
            yield (size,) * width
        if not self.is_unequal and len(self._speeds) > _MOST_UNLIKE:
            return
        for small, large in combinations(sizes, 2):
            for num_large in self._numbers(width):
                yield (large,) * num_large + (small,) * (width - num_large)

    def _numbers(self, width: int) -> list[int]:
        """How many replicas may be given larger micro-batches."""
        if width <= _MOST_UNLIKE:
            return list(range(1, width))
        share = (self._speeds > self._speeds[-1]).mean()
        found = {width // 4, width // 2, 3 * width // 4, int(width * share)}
        return sorted(number for number in found if 0 < number < width)

    def counts(self, samples: int) -> list[int]:
        """The numbers of micro-batches of a batch, if one micro-batch of each replica makes `samples`."""
        batches = self._problem.batches
        least, most = -(-batches.start // samples), (batches.stop - 1) // samples
        if most - least < _MOST_BATCHES:
            return list(range(least, most + 1))
        return sorted({least, *np.geomspace(least, most, _MOST_BATCHES - 1, dtype=int).tolist(), most})

    def least_s(self, outline: Outline) -> float:
        """What a batch takes at the least, whatever the devices and the cuts."""
        m, p = outline.num_microbatches, outline.num_ranks
        if outline.stage_widths:
            work_s, longest_s = self._work_of(outline.sizes[0])
            widest = self._fastest[max(outline.stage_widths)]
            return float(m * max(work_s / self._fastest[outline.num_devices], longest_s / widest))
        least_s = m * self.least_pace_s(outline)
        for size in set(outline.sizes):
            work_s, _ = self._work_of(size)
            if outline.schedule in PATH_BOUND:
                least_s = max(least_s, work_s / self._most_path(p, m))
            elif outline.schedule == "sequential":
                least_s = max(least_s, m * work_s / float(self._speeds[0]))
        return least_s

    def least_pace_s(self, outline: Outline) -> float:
        """What a micro-batch in every replica takes at the least if none waits."""
        key = outline.num_ranks, outline.sizes
        if key not in self._paces:
            works = {size: self._work_of(size) for size in set(outline.sizes)}
            total_s = sum(work_s * outline.sizes.count(size) for size, (work_s, _) in works.items())
            least_s = total_s / self._fastest[outline.num_devices]
            for work_s, longest_s in works.values():
                least_s = max(least_s, work_s / self._fastest[outline.num_ranks], longest_s / self._speeds[0])
            self._paces[key] = float(least_s)
        return self._paces[key]

    def _most_path(self, num_ranks: int, num_microbatches: int) -> float:
        """The most work of a micro-batch that the fastest ranks could do in a batch of a second."""
        key = num_ranks, num_microbatches
        if key not in self._paths:
            shares = (1 - 1 / num_microbatches) ** np.arange(num_ranks) / num_microbatches
            self._paths[key] = float(self._speeds[:num_ranks] @ shares)
        return self._paths[key]

    def _work_of(self, size: int) -> tuple[float, float]:
        """All work of a micro-batch, and its longest unit."""
        if size not in self._work:
            chain = self._problem.merged(size)
            both_s = chain.forward_s + chain.backward_s
            self._work[size] = float(both_s.sum()), float(both_s.max())
        return self._work[size]


def _is_round(number: int) -> bool:
    """Whether the number has at most three binary digits, followed by zeros, such as 24, 40 and 448."""
    return number >> max(number.bit_length() - 3, 0) << max(number.bit_length() - 3, 0) == number
