"""What consecutive units cost together as one stage, from what each costs alone.

Seconds add up. Bytes do too, but what two units of a stage both keep is there once, as is a parameter that
two of them use. The worst moment is that of the unit where what is saved up to it and its own workspace are
most together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bireme.errors import BiremeError
from bireme.profile.profile import Profile, SharedState, UnitCost, UnitProfile


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage at one micro-batch size; the fields mean what they do for a unit.

    `kept_bytes` is what stays of a micro-batch between its forward and its backward: what is saved, and what
    came in and goes out besides. Where the backward runs in halves, `waiting_bytes` of gradients wait for the
    second one, and `halves_bytes` of workspace are needed besides; 0 where nobody asked for halves.
    """

    forward_s: float
    backward_s: float
    recompute_backward_s: float
    backward_input_s: float | None
    backward_weight_s: float | None
    reduce_s: float
    update_s: float
    trial_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    saved_bytes: int
    kept_bytes: int
    boundary_bytes: int
    workspace_bytes: int
    waiting_bytes: int = 0
    halves_bytes: int = 0

    def peak_bytes(self, *, num_versions: int = 1, num_stashed: int = 1) -> int:
        """What a device holds at the worst moment, with so many weight versions and micro-batches kept."""
        state = self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes
        state += num_versions * self.parameter_bytes
        return state + num_stashed * self.kept_bytes + self.workspace_bytes


def stage_cost(profile: Profile, begin: int, end: int, micro_batch: int) -> StageCost:
    """The cost of the units from `begin` up to but without `end`."""
    units = profile.units[begin:end]
    if not units:
        raise BiremeError(f"A stage needs at least one unit, and there is none from {begin} up to {end}.")
    costs = [unit.at(micro_batch) for unit in units]
    twice = list(_repeated(units))

    def own_bytes(name: str) -> int:
        num_bytes: int = sum(getattr(unit, name) for unit in units)
        num_twice: int = sum(getattr(held, name) for held in twice)
        return num_bytes - num_twice

    memory = _memory(units, costs)
    workspace_bytes = memory.peak_bytes - memory.kept_bytes
    gradient_bytes = own_bytes("gradient_bytes")
    before = profile.units[begin - 1].at(micro_batch) if begin else None
    waiting_bytes = _waiting_bytes(costs, before)
    return StageCost(
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs),
        recompute_backward_s=sum(cost.recompute_backward_s for cost in costs),
        backward_input_s=_sum_if_known([cost.backward_input_s for cost in costs]),
        backward_weight_s=_sum_if_known([cost.backward_weight_s for cost in costs]),
        reduce_s=sum(unit.reduce_s for unit in units),
        update_s=sum(unit.update_s for unit in units),
        trial_s=sum(unit.trial_s for unit in units),
        parameter_bytes=own_bytes("parameter_bytes"),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=own_bytes("optimizer_bytes"),
        buffer_bytes=own_bytes("buffer_bytes"),
        saved_bytes=memory.saved_bytes,
        kept_bytes=memory.kept_bytes,
        boundary_bytes=costs[-1].boundary_bytes,
        workspace_bytes=workspace_bytes,
        waiting_bytes=waiting_bytes,
        halves_bytes=_halves_bytes(costs, before, gradient_bytes - waiting_bytes, workspace_bytes),
    )


def _waiting_bytes(costs: Sequence[UnitCost], before: UnitCost | None) -> int:
    """The gradients that wait for the second half of a backward of units after that one.

    Where none goes back to it, the first half has nothing to do, and what came in is all that waits.
    """
    waiting = [cost.waiting_bytes for cost in costs]
    known = [one for one in waiting if one is not None]
    if len(known) < len(waiting):
        return 0
    return sum(known) if before is not None and before.back_bytes else costs[-1].back_bytes


def _halves_bytes(
    costs: Sequence[UnitCost], before: UnitCost | None, more_bytes: int, workspace_bytes: int
) -> int:
    """What halves take beyond the workspace of a whole backward. Nothing that was saved is gone before the
    second half; that one gives all gradients of the weights at once, `more_bytes` more than have waited.
    """
    if any(cost.waiting_bytes is None for cost in costs):
        return 0
    if before is None or not before.back_bytes:
        return max(more_bytes, 0)
    return max(more_bytes, *(cost.halves_workspace_bytes or 0 for cost in costs), workspace_bytes) - (
        workspace_bytes
    )


def _sum_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _repeated(units: Iterable[UnitProfile]) -> Iterable[SharedState]:
    """The tied parameters again each time that a unit uses one which another of them has already."""
    seen: set[str] = set()
    for unit in units:
        for held in unit.tied:
            if held.name in seen:
                yield held
            seen.add(held.name)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of one micro-batch: what is saved, what stays between the passes, and the most there is at once."""

    saved_bytes: int
    kept_bytes: int
    peak_bytes: int


def _memory(units: Sequence[UnitProfile], costs: Sequence[UnitCost]) -> _Memory:
    pieces = _Pieces(costs)
    ends = pieces.named(
        *units[0].receives, *units[-1].sends, *(name for unit in units for name in unit.inputs)
    )
    saved: set[int] = set()
    saved_bytes = peak_bytes = 0
    waiting_bytes = _tied_bytes(units)
    for place, (unit, cost) in enumerate(zip(units, costs, strict=True)):
        shared_bytes = sum(kept.num_bytes for kept in cost.shared if kept.is_saved)
        more = pieces.named(*(kept.names[0] for kept in cost.shared if kept.is_saved)) - saved
        saved |= more
        saved_bytes += cost.saved_bytes - shared_bytes + pieces.num_bytes(more)
        # Backwards of later units are done by then, so that what they saved is gone.
        around = ends | pieces.named(*unit.receives, *unit.sends)
        alive_bytes = saved_bytes + pieces.num_bytes(around - saved) + cost.workspace_bytes
        peak_bytes = max(peak_bytes, alive_bytes + waiting_bytes[place])
    return _Memory(saved_bytes, saved_bytes + pieces.num_bytes(ends - saved), peak_bytes)


def _tied_bytes(units: Sequence[UnitProfile]) -> list[int]:
    """What may wait in each unit's backward: gradients of tied weights that an earlier unit adds to."""
    seen: set[str] = set()
    waiting = [0] * len(units)
    last = {held.name: place for place, unit in enumerate(units) for held in unit.tied}
    for place, unit in enumerate(units):
        for held in unit.tied:
            if held.name not in seen:
                for between in range(place, last[held.name] + 1 if place < last[held.name] else place):
                    waiting[between] += held.parameter_bytes if held.gradient_bytes else 0
            seen.add(held.name)
    return waiting


class _Pieces:
    """The pieces of memory that units share, numbered; those with a name in common are one.

    It is as large as the first of the units says, which is the one that makes it.
    """

    def __init__(self, costs: Iterable[UnitCost]) -> None:
        self._bytes: list[int] = []
        self._number: dict[str, int] = {}
        for kept in (kept for cost in costs for kept in cost.shared):
            same = self.named(*kept.names)
            one = min(same, default=len(self._bytes))
            if not same:
                self._bytes.append(kept.num_bytes)
            names = [name for name, number in self._number.items() if number in same] if len(same) > 1 else []
            self._number.update(dict.fromkeys((*kept.names, *names), one))

    def named(self, *names: str) -> set[int]:
        """The pieces of these names."""
        return {self._number[name] for name in names if name in self._number}

    def num_bytes(self, numbers: Iterable[int]) -> int:
        """How large some pieces are together."""
        return sum(self._bytes[number] for number in numbers)
