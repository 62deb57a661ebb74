"""If nothing fits: the plan that comes nearest, and which changes would make one fit.

Whether anything fits is asked of the exact partition, which knows the bytes of every stage of every cut.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from bireme.bounds import bytes_text
from bireme.capabilities import exclusion
from bireme.codec.sum_description import DENSE_SUMS
from bireme.errors import BiremeError
from bireme.plan.forecast import NothingFits, StageForecast
from bireme.plan.partition.loads import DeviceRow, DeviceSlot, Recompute, RowLink, StageSetting, loads_of
from bireme.plan.partition.partition import Partition, exact
from bireme.plan.plan_request import TierLimits
from bireme.plan.search.cutting import loads_on
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.evaluated import EvaluatedDraft
from bireme.plan.search.mapping import given_up, keeps_home, promising_grids
from bireme.plan.search.paged_walk import PagedWalk
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines
from bireme.profile.profile import Profile, UnitCost, UnitProfile
from bireme.schedule.catalogue import schedule_named

_ADAPTER_SHARE = 0.02
"""Of the weights: what an adapter of LoRA takes at most, in a model of billions of parameters."""

_MOST_ASKED = 40
"""Pairs of a shape and a mapping that are asked whether they fit."""

_MOST_NAMED = 3
"""Devices in a sentence."""

_MOST_MORE = 64
"""Devices more to think of."""


def nearest_misfit(
    problem: PlanningProblem, asked: Sequence[NothingFits | Draft], evaluated: Sequence[EvaluatedDraft]
) -> NothingFits:
    """Of all plans the one whose worst device misses least.

    `asked` are the answers of `asked_of`. `evaluated` are plans that were simulated and do not fit: all there
    is of several stages on a rank, of which the partition knows no bytes.
    """
    misfits = [found for found in asked if isinstance(found, NothingFits)]
    simulated = [_nothing(problem, one.draft.outline, one.forecast.stages) for one in evaluated]
    near = min([*misfits, *simulated], key=lambda one: (one.missing_bytes, _num_devices(one)), default=None)
    if near is None and problem.owners and not problem.pins:
        raise BiremeError(
            "No plan keeps private samples at home: the model reads inputs in its units "
            f"{', '.join(map(str, problem.readers))}, whose stages must all be on the owner's devices. Put a "
            "whole replica there (depth 1)."
        )
    if near is None or near.missing_bytes == math.inf:
        freed = [words for words, changes in given_up(problem.request) if _would_fit(problem, **changes)]
        instead = f", or plan with {' or '.join(freed)}" if freed else ""
        raise BiremeError(f"No plan keeps all pinned units on their devices. Pin fewer of them{instead}.")
    return near


def _num_devices(nothing: NothingFits) -> int:
    return len({device for stage in nothing.stages for device in stage.devices})


def _nothing(problem: PlanningProblem, outline: Outline, stages: tuple[StageForecast, ...]) -> NothingFits:
    """That a plan of these stages does not fit."""
    missing = [max(stage.peak_bytes - stage.limit_bytes, 0.0) for stage in stages]
    stage = missing.index(max(missing))
    return NothingFits(
        schedule=outline.schedule,
        depth=outline.num_ranks,
        width=outline.width,
        micro_batch=max(outline.sizes),
        stages=stages,
        stage=stage,
        device=_tightest(problem, stages[stage].devices),
        missing_bytes=missing[stage],
    )


def _near_of(problem: PlanningProblem, outline: Outline, grid: Grid, nearest: Partition) -> NothingFits:
    return _nothing(
        problem,
        outline,
        tuple(
            StageForecast(
                begin=problem.bounds[stage.begin],
                end=problem.bounds[stage.end],
                devices=tuple(problem.names[device] for device in row),
                recompute=stage.recompute,
                busy_s=outline.num_microbatches * stage.busy_s,
                peak_bytes=stage.peak_bytes + problem.process_bytes[row[0]],
                limit_bytes=stage.limit_bytes + problem.process_bytes[row[0]],
                process_bytes=problem.process_bytes[row[0]],
            )
            for stage, row in zip(nearest.stages, grid, strict=True)
        ),
    )


def _tightest(problem: PlanningProblem, devices: Sequence[str]) -> str:
    """The device of a stage that has least memory."""
    return min(devices, key=lambda name: problem.limits[problem.cluster.number_of(name)])


def asked_of(problem: PlanningProblem, shapes: Sequence[Outline]) -> Iterator[NothingFits | Draft]:
    """The shapes that take the fewest bytes, on likely mappings: drafts that fit, and misfits."""
    seen: set[tuple[str, int, int, int]] = set()
    num_asked = 0
    for outline in sorted(shapes, key=lambda one: (max(one.sizes), -one.num_ranks, one.width)):
        key = outline.schedule, outline.num_ranks, outline.width, max(outline.sizes)
        if outline.stages_per_rank > 1 or key in seen:
            continue
        seen.add(key)
        for grid in islice(promising_grids(problem, outline), 3):
            num_asked += 1
            found = exact(loads_on(problem, outline, grid))
            if not found.fits:
                yield _near_of(problem, outline, grid, found)
                continue
            cuts = tuple(problem.bounds[cut] for cut in found.cuts)
            if keeps_home(problem, outline, grid, cuts):
                yield Draft(outline, grid, cuts, found.recompute)
        if num_asked >= _MOST_ASKED:
            return


class Remedies:
    """Changes that would make a plan fit, each tried alone by the cheap test: the exact partition, or where
    chunks may be paged, a walk from two drafts.

    `nothing` is the plan that comes nearest.
    """

    def __init__(self, problem: PlanningProblem, nothing: NothingFits) -> None:
        self._problem = problem
        self._request = problem.request
        self._nothing = nothing
        self.enough: list[str] = []
        self.too_little: list[str] = []

    def advice(self) -> str:
        """The sentences on what would make a plan fit, and what would not be enough."""
        self._try_all()
        would = f" What would make one fit: {'; or '.join(self.enough)}." if self.enough else ""
        few = f" Not enough alone: {'; '.join(self.too_little)}." if self.too_little else ""
        return would + few

    def _try_all(self) -> None:
        if isinstance(self._request.stage_widths, tuple):  # it is not known what would be enough
            self._try_giving_up()
        else:
            self._try_changes()
        self._more_memory()

    def _try_giving_up(self) -> None:
        for words, changes in given_up(self._request):
            if self._fits(None, **changes):
                self.enough.append(words)

    def _try_changes(self) -> None:
        request, profile = self._request, self._problem.profile
        if request.recompute is Recompute.NEVER:
            self._try("recomputation (plan.recompute)", recompute=Recompute.WHERE_NEEDED)
        self._try_smaller()
        if request.memory_fraction < 1:
            self._try("all of the devices' memory (plan.memory_fraction = 1)", memory_fraction=1.0)
        self._try_giving_up()
        self._try_offloading()
        if _learns_all(profile):
            words = f"LoRA (model.lora) with an adapter of at most {_ADAPTER_SHARE:.0%} of the weights"
            self._record(words, fits=self._fits(profile=_with_adapter(profile)))
        self._try_sharing()

    def _record(self, words: str, *, fits: bool) -> None:
        (self.enough if fits else self.too_little).append(words)

    def _try(self, words: str, **changes: object) -> None:
        self._record(words, fits=self._fits(None, **changes))

    def _fits(self, profile: Profile | None = None, **changes: object) -> bool:
        """Whether anything would fit with another request or profile."""
        if _would_fit(self._problem, profile, **changes):
            return True
        with suppress(BiremeError):
            other = _changed(self._problem, profile, **changes)
            if other.request.memory is not None:
                walk = PagedWalk(other, is_brief=True)
                return any(walk.can_fit(seed) for seed in self._seeds(other))
        return False

    def _seeds(self, problem: PlanningProblem) -> Iterator[Draft]:
        """Drafts to page: one stage on the device with most memory, and the stages of the nearest plan."""
        batch, size = problem.request.batch_size, min(problem.sizes)
        num_microbatches = batch // size
        roomiest = max(problem.devices, key=problem.limits.__getitem__)
        asked = problem.request
        if num_microbatches * size == batch and (asked.depth or 1) * (asked.width or 1) == 1:
            yield Draft(Outline("sequential", 1, 1, (size,), num_microbatches), ((roomiest,),), ())
        stages = self._nothing.stages
        grid = tuple(tuple(map(problem.cluster.number_of, stage.devices)) for stage in stages)
        width = self._nothing.width
        if len({row[0] for row in grid}) == len(stages) > 1 and batch % (size * width) == 0:
            shape = Outline("1f1b", len(stages), 1, (size,) * width, batch // (size * width))
            yield Draft(shape, grid, tuple(stage.begin for stage in stages[1:]))

    def _try_smaller(self) -> None:
        """Micro-batches of fewer samples, fewer samples a batch, and samples of half the length."""
        request, profile = self._request, self._problem.profile
        smallest = min(self._problem.sizes)
        fits = [
            size
            for size in sorted({1, *profile.micro_batches})
            if size < smallest and self._fits(_with_size(profile, smallest, size), micro_batch=size)
        ]
        if fits:
            self.enough.append(f"micro-batches of {max(fits)} samples")
        elif smallest > 1:
            self.too_little.append("micro-batches of 1 sample")
        batch = request.batch_size // 2
        if batch >= smallest and not fits and self._fits(batch_size=batch, largest_batch=None):
            self.enough.append(f"a batch of {batch} samples")
        half = _with_costs(profile, lambda cost: cost, None, 0.5)  # of attention it would be a quarter
        self._record("samples of half the length (data.length)", fits=self._fits(half))

    def _try_offloading(self) -> None:
        """The host's memory, and the disk where its size is known."""
        request = self._request
        if request.memory is None:
            self._try('offloading to the host (memory.device = "auto")', memory=TierLimits())
        has_disk = all(server.disk_bytes for server in self._problem.cluster.servers)
        allows_disk = request.memory is not None and request.memory.disk_bytes != 0
        if has_disk and not allows_disk:
            limits = replace(request.memory or TierLimits(), disk_bytes=None)
            self._try("offloading to the disk too (memory.disk)", memory=limits)

    def _try_sharing(self) -> None:
        """Replicas that share an optimizer."""
        request = self._request
        uses = {
            "sum-codec": request.sums != DENSE_SUMS,
            "principal": request.whole_backwards,
            "muon": self._problem.profile.optimizer == "muon",
        }
        may_share = not any(exclusion("shard-optimizer", name) for name, is_used in uses.items() if is_used)
        has_replicas = request.width != 1 and len(self._problem.devices) > 1
        if request.shard == "none" and has_replicas and may_share:
            self._try('replicas that share the optimizer (memory.shard = "optimizer")', shard="optimizer")

    def _more_memory(self) -> None:
        """More memory on the devices that lack some, or more devices."""
        nothing, request = self._nothing, self._request
        short = dict.fromkeys(
            _tightest(self._problem, stage.devices)
            for stage in nothing.stages
            if stage.peak_bytes > stage.limit_bytes
        )
        where = f"{'each of ' if len(short) > 1 else ''}{', '.join(short)}"
        if len(short) > _MOST_NAMED:
            where = f"each of {len(short)} devices"
        without = " without offloading" * (request.memory is not None)
        more_bytes = bytes_text(nothing.missing_bytes / request.memory_fraction)
        self.enough.append(f"{more_bytes} more on {where}{without}")
        is_fixed = request.depth is not None or isinstance(request.stage_widths, tuple)
        more = None if is_fixed else _devices_more(self._problem, nothing)
        if more is not None:
            self.enough.append(f"{more} device{'s' if more > 1 else ''} more like {nothing.device}")


def _would_fit(problem: PlanningProblem, profile: Profile | None = None, **changes: object) -> bool:
    """Whether anything would fit without paging, with another request or profile."""
    with suppress(BiremeError):
        other = _changed(problem, profile, **changes)
        # The partition knows stages of equal width only.
        shapes = [] if isinstance(other.request.stage_widths, tuple) else list(Outlines(other))
        return any(isinstance(found, Draft) for found in asked_of(other, shapes))
    return False


def _changed(problem: PlanningProblem, profile: Profile | None, **changes: object) -> PlanningProblem:
    request = replace(problem.request, **changes)  # type: ignore[arg-type]  # named as in `PlanRequest`
    return PlanningProblem(profile or problem.profile, problem.cluster, request)


def _learns_all(profile: Profile) -> bool:
    """Whether most weights learn: an adapter would leave them frozen."""
    learning = sum(unit.parameter_bytes for unit in profile.units)
    return learning > sum(unit.frozen_bytes for unit in profile.units)


def _with_adapter(profile: Profile) -> Profile:
    """The profile with its weights frozen, beside adapters of at most `_ADAPTER_SHARE` of them.

    An adapter's activations, which are of its rank, are left out.
    """

    def frozen(unit: UnitProfile) -> UnitProfile:
        share = {
            name: math.ceil(_ADAPTER_SHARE * getattr(unit, name))
            for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        }
        kept = unit.parameter_bytes
        return replace(
            unit,
            **share,
            buffer_bytes=unit.buffer_bytes + kept,
            frozen_bytes=unit.frozen_bytes + kept,
            tied=(),
        )

    return replace(profile, units=tuple(map(frozen, profile.units)))


def _with_size(profile: Profile, known: int, size: int) -> Profile:
    """The profile with micro-batches of `size` samples, scaled from `known` where they were not measured."""
    if size in profile.micro_batches:
        return profile
    return _with_costs(profile, lambda cost: replace(cost, micro_batch=size), known, size / known)


def _with_costs(
    profile: Profile, change: Callable[[UnitCost], UnitCost], only: int | None, share: float
) -> Profile:
    """The profile with a share of the activations of its micro-batches, or of those of one size `only`."""

    def scaled(cost: UnitCost) -> UnitCost:
        return replace(
            change(cost),
            saved_bytes=math.ceil(share * cost.saved_bytes),
            boundary_bytes=math.ceil(share * cost.boundary_bytes),
            returned_bytes=None if cost.returned_bytes is None else math.ceil(share * cost.returned_bytes),
            shared=tuple(replace(one, num_bytes=math.ceil(share * one.num_bytes)) for one in cost.shared),
        )

    units = tuple(
        replace(unit, costs=tuple(scaled(cost) for cost in unit.costs if only in (None, cost.micro_batch)))
        for unit in profile.units
    )
    kinds = tuple(
        replace(kind, profile=_with_costs(kind.profile, change, only, share)) for kind in profile.kinds
    )
    return replace(profile, units=units, kinds=kinds)


def _devices_more(problem: PlanningProblem, nothing: NothingFits) -> int | None:
    """How many devices like the one that misses most would make a pipeline deep enough, if so many do."""
    tightest = [problem.cluster.number_of(_tightest(problem, stage.devices)) for stage in nothing.stages]
    if len(set(tightest)) < len(tightest):
        return None  # several stages on a rank
    device = tightest[nothing.stage]
    seats = [DeviceSlot(problem.names[own], problem.speeds[own], problem.limits[own]) for own in tightest]
    request = problem.request
    name = nothing.schedule if schedule_named(nothing.schedule).stages_per_rank == 1 else "1f1b"
    name = "1f1b" if name == "sequential" else name
    rule = schedule_named(name).rule
    has_masters = request.has_masters or request.shares_newest(rule, nothing.width)
    chain = problem.merged(nothing.micro_batch, nothing.width, rule)
    num_microbatches = request.batch_size // (nothing.width * nothing.micro_batch)
    most = min(_MOST_MORE, chain.num_units - len(seats))

    def fits(more: int) -> bool:
        depth = len(seats) + more
        line = DeviceRow(
            (*seats, *[DeviceSlot("more", problem.speeds[device], problem.limits[device])] * more),
            (RowLink(),) * (depth - 1),  # bytes do not depend on the links
        )
        setting = StageSetting(name, max(num_microbatches, depth), request.recompute, has_masters=has_masters)
        return exact(loads_of(chain, line, setting)).fits

    more = 1
    while more < most and not fits(more):
        more = min(2 * more, most)
    if more < 1 or more > most or not fits(more):
        return None
    least = more // 2 + 1
    return next((one for one in range(least, more) if fits(one)), more)
