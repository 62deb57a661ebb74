"""The chain of units that partitioners cut: seconds of each unit, and the exact bytes of every range of them.

It is made of a profile at one micro-batch size. A chain whose units are layers is a
chain of half-layers with fewer places to cut.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bireme.errors import BiremeError
from bireme.profile.profile import KeptMemory, Profile, UnitCost, UnitProfile
from bireme.profile.stages import stage_cost
from bireme.sync.slices import DENSE_BYTES_IN_FLIGHT, beside_parts

# The bytes of every range of units that could be a stage, all at once.
#
# They are those of `profile/stages.py` to the byte, which works one range out alone. Here ranges that differ
# by their first unit are worked out from each other: only what involves that unit and the boundary after it
# changes.

Bytes = npt.NDArray[np.int64]
"""Bytes, of one thing each."""

NEVER = -(2**60)
"""Less than any bytes can make up for."""


@dataclass(frozen=True, slots=True, eq=False)
class RangeBytes:
    """Tables whose entry [begin, end] is for the units from `begin` up to but without `end`.

    The fields mean what they do in a `StageCost`; where there is no unit they are zero. `input_bytes` is
    what came into a micro-batch of the range, all that it keeps if it runs its forward again; `frozen` is
    what of `buffer` are weights that do not learn.
    """

    parameter: Bytes
    gradient: Bytes
    optimizer: Bytes
    buffer: Bytes
    saved: Bytes
    kept: Bytes
    inputs: Bytes
    workspace: Bytes
    frozen: Bytes
    waiting: Bytes
    halves: Bytes

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).setflags(write=False)

    @property
    def state(self) -> Bytes:
        """One version of the weights, its gradients, what the optimizer keeps, and buffers."""
        return self.parameter + self.gradient + self.optimizer + self.buffer

    def between(self, bounds: Sequence[int]) -> "RangeBytes":
        """The tables of a chain whose units are those between the bounds."""
        index = np.ix_(bounds, bounds)
        return RangeBytes(*(getattr(self, field.name)[index] for field in fields(self)))


def _range_bytes(profile: Profile, micro_batch: int) -> RangeBytes:
    """The tables of a profile at a micro-batch size."""
    units = profile.units
    costs = [unit.at(micro_batch) for unit in units]
    parameter, gradient, optimizer, buffer, frozen = (
        _sums(np.array([getattr(unit, name) for unit in units], np.int64)) for name in _STATE
    )
    for name, table in zip(_STATE, (parameter, gradient, optimizer, buffer, frozen), strict=True):
        _count_tied_once(table, units, name)
    pieces, odd = _pieces(units, costs)
    saved, kept, inputs, peak = _Memory(units, costs, pieces).tables()
    for begin, end in zip(*np.nonzero(odd), strict=True):
        if begin < end:
            one = stage_cost(profile, int(begin), int(end), micro_batch)
            saved[begin, end], kept[begin, end] = one.saved_bytes, one.kept_bytes
            peak[begin, end] = one.kept_bytes + one.workspace_bytes
    came = np.minimum(inputs, kept)
    waiting, halves = _halves(costs, gradient, peak - kept)
    return RangeBytes(
        parameter, gradient, optimizer, buffer, saved, kept, came, peak - kept, frozen, waiting, halves
    )


_STATE = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "frozen_bytes")


def _halves(costs: Sequence[UnitCost], gradient: Bytes, workspace: Bytes) -> tuple[Bytes, Bytes]:
    """The gradients that wait between the halves of a backward, and the workspace that these take besides."""
    known = [cost.waiting_bytes for cost in costs if cost.waiting_bytes is not None]
    if len(known) < len(costs):
        return np.zeros_like(gradient), np.zeros_like(gradient)
    back = np.array([cost.back_bytes for cost in costs], np.int64)
    learns = np.concatenate(([False], back > 0))[:, None]
    alone = np.triu(np.broadcast_to(np.append(0, back), gradient.shape), 1)
    waiting = np.where(learns, _sums(np.array(known, np.int64)), alone)
    own = np.array([cost.halves_workspace_bytes or 0 for cost in costs], np.int64)
    most = np.zeros_like(gradient)
    for begin in range(len(costs)):
        most[begin, begin + 1 :] = np.maximum.accumulate(own[begin:])
    more = np.triu(np.maximum(gradient - waiting, 0), 1)
    return waiting, np.where(learns, np.maximum(np.maximum(more, most) - workspace, 0), more)


def _sums(values: Bytes) -> Bytes:
    sums = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return np.triu(sums[None, :] - sums[:, None])


def _count_tied_once(table: Bytes, units: Sequence[UnitProfile], field: str) -> None:
    """Take away what is tied, once for every two neighboring uses that a range holds both of."""
    uses: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, unit in enumerate(units):
        for held in unit.tied:
            uses[held.name].append((place, getattr(held, field)))
    for places in uses.values():
        for (before, _), (after, num_bytes) in pairwise(places):
            table[: before + 1, after + 1 :] -= num_bytes


class _Piece:
    """A piece of memory that units share, and which of them know it as what."""

    def __init__(self, num_units: int) -> None:
        self.num_bytes = np.zeros(num_units, np.int64)
        """As large as each unit says."""
        self.is_known, self.is_saved, self.comes, self.goes, self.is_input = np.zeros(
            (5, num_units), np.bool_
        )


def _pieces(
    units: Sequence[UnitProfile], costs: Sequence[UnitCost]
) -> tuple[list[dict[int, _Piece]], npt.NDArray[np.bool_]]:
    """The pieces that each unit knows, and the ranges in which they are not what they are in the whole chain.

    Those with a name in common are one piece, and a name that joins two may be known to a unit outside.
    """
    num_units = len(units)
    number = _numbered(kept for cost in costs for kept in cost.shared)
    pieces: dict[int, _Piece] = {}
    known: list[dict[int, _Piece]] = [{} for _ in units]
    last: dict[int, tuple[int, KeptMemory]] = {}
    odd = np.zeros((num_units + 1, num_units + 1), np.bool_)
    for place, cost in enumerate(costs):
        for kept in cost.shared:
            one = number[kept.names[0]]
            piece = pieces.setdefault(one, _Piece(num_units))
            if one in last:
                before, other = last[one]
                if not set(kept.names) & set(other.names):
                    odd[: before + 1, place + 1 :] = True
            last[one] = place, kept
            if not piece.is_known[place]:
                piece.is_known[place], piece.num_bytes[place] = True, kept.num_bytes
            piece.is_saved[place] |= kept.is_saved
            known[place][one] = piece
    for place, (unit, cost) in enumerate(zip(units, costs, strict=True)):
        own_names = {name for kept in cost.shared for name in kept.names}
        for names, field in ((unit.receives, "comes"), (unit.sends, "goes"), (unit.inputs, "is_input")):
            for name in names:
                if name in own_names:
                    getattr(pieces[number[name]], field)[place] = True
                elif name in number:
                    for elsewhere in np.flatnonzero(pieces[number[name]].is_known).tolist():
                        first, last_unit = sorted((place, elsewhere))
                        odd[: first + 1, last_unit + 1 :] = True
    return known, odd


def _numbered(all_kept: Iterable[KeptMemory]) -> dict[str, int]:
    """The piece of each name."""
    number: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for fresh, kept in enumerate(all_kept):
        joined = {number[name] for name in kept.names if name in number}
        names = {*kept.names, *(name for one in joined for name in members.pop(one))}
        members[fresh] = list(names)
        number.update(dict.fromkeys(names, fresh))
    return number


@dataclass(slots=True)
class _Share:
    """What a piece adds to the ranges of one begin, and in the backwards of which of their units."""

    num_bytes: int
    is_saved: npt.NDArray[np.bool_]
    is_inside: npt.NDArray[np.bool_]
    """By unit: whether it is saved by then, comes into the unit or goes out of it."""
    has_come: npt.NDArray[np.bool_]
    """By last unit: whether it came into the range."""
    is_at_ends: npt.NDArray[np.bool_]
    """By last unit: whether it came into the range or goes out of it."""


class _Memory:
    """The bytes of a micro-batch for one begin after the other, from the last unit to the first."""

    def __init__(
        self, units: Sequence[UnitProfile], costs: Sequence[UnitCost], known: Sequence[dict[int, _Piece]]
    ) -> None:
        self._units = units
        self._costs = costs
        self._known = known
        self._shares: dict[int, _Share] = {}
        num_units = len(units)
        self._saved, self._kept, self._inputs, self._ends = np.zeros((4, num_units), np.int64)
        """Of the ranges that start at the present unit, by their last."""
        self._alive = np.tril(np.full((num_units, num_units), NEVER, np.int64), -1)
        """The same, by the unit whose backward runs and the last."""
        self._uses: dict[str, list[int]] = {}
        """The units from here on that use what is tied."""

    def tables(self) -> list[Bytes]:
        """What is saved, kept, came in, and there is at the worst moment."""
        num_units = len(self._units)
        tables = list(np.zeros((4, num_units + 1, num_units + 1), np.int64))
        for begin in reversed(range(num_units)):
            self._put_before(begin)
            found = self._saved, self._kept, self._inputs, self._alive[begin:].max(axis=0)
            for table, row in zip(tables, found, strict=True):
                table[begin, begin + 1 :] = row[begin:]
        return tables

    def _put_before(self, begin: int) -> None:
        """Let the ranges start with one unit more."""
        cost = self._costs[begin]
        own = cost.saved_bytes - sum(kept.num_bytes for kept in cost.shared if kept.is_saved)
        self._alive[begin, begin:] = self._ends[begin:] + cost.workspace_bytes
        self._alive[begin:, begin:] += own
        self._saved[begin:] += own
        self._kept[begin:] += own
        changed = dict(self._known[begin])
        if begin + 1 < len(self._units):
            # What came into the range before comes out of this unit now.
            changed |= {n: p for n, p in self._known[begin + 1].items() if p.comes[begin + 1]}
        for number, piece in changed.items():
            old = self._shares.get(number)
            if old is not None:
                self._add(begin, old, -old.num_bytes)
            new = self._shares[number] = _share(piece, begin)
            self._add(begin, new, new.num_bytes)
        for held in self._units[begin].tied:
            places = self._uses.setdefault(held.name, [])
            self._wait(places, -self._gradient_bytes(places, held.name))
            if not places or places[0] != begin:
                places.insert(0, begin)
            self._wait(places, self._gradient_bytes(places, held.name))

    def _add(self, begin: int, share: _Share, num_bytes: int) -> None:
        here = slice(begin, None)
        self._saved[here] += num_bytes * share.is_saved[here]
        self._kept[here] += num_bytes * (share.is_saved | share.is_at_ends)[here]
        self._inputs[here] += num_bytes * share.has_come[here]
        self._ends[here] += num_bytes * share.is_at_ends[here]
        is_alive = share.is_inside[here, None] | share.is_at_ends[None, here]
        self._alive[here, here] += num_bytes * is_alive

    def _gradient_bytes(self, places: Sequence[int], name: str) -> int:
        held = (held for place in places[:1] for held in self._units[place].tied if held.name == name)
        return next((one.parameter_bytes for one in held if one.gradient_bytes), 0)

    def _wait(self, places: Sequence[int], num_bytes: int) -> None:
        """The gradient that an earlier unit adds to, from the backward of the last that uses it."""
        for last, nearest in enumerate([*places[1:], len(self._units)][1:], 1):
            here = slice(places[last], nearest)
            self._alive[places[0] : places[last] + 1, here] += num_bytes


def _share(piece: _Piece, begin: int) -> _Share:
    known = np.flatnonzero(piece.is_known[begin:])
    nothing_before = np.arange(len(piece.is_known)) >= begin
    is_saved = np.logical_or.accumulate(piece.is_saved & nothing_before)
    has_come = np.logical_or.accumulate(piece.is_input & nothing_before) | piece.comes[begin]
    return _Share(
        num_bytes=int(piece.num_bytes[begin + known[0]]) if len(known) else 0,
        is_saved=is_saved,
        is_inside=is_saved | ((piece.comes | piece.goes) & nothing_before),
        has_come=has_come & nothing_before,
        is_at_ends=(has_come | piece.goes) & nothing_before,
    )


Seconds = npt.NDArray[np.float64]
"""Seconds, of one thing each."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The units in the order they run, on a device of speed 1.

    The seconds are per unit and mean what they do in a `UnitCost`; `boundary_bytes` goes over the cut after
    each unit, and `returned_bytes` comes back as gradients.
    """

    names: tuple[str, ...]
    micro_batch: int
    forward_s: Seconds
    backward_s: Seconds
    recompute_backward_s: Seconds
    backward_input_s: Seconds | None
    reduce_s: Seconds
    update_s: Seconds
    trial_s: Seconds
    boundary_bytes: Bytes
    returned_bytes: Bytes
    bytes: RangeBytes
    backward_weight_s: Seconds | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self.names)

    @property
    def has_halves(self) -> bool:
        """Whether the seconds of both halves of the backward are known."""
        return self.backward_input_s is not None and self.backward_weight_s is not None

    def bounds(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """The first unit of each stage, and the end."""
        bounds = (0, *cuts, self.num_units)
        if any(begin >= end for begin, end in pairwise(bounds)):
            raise BiremeError(
                f"The cuts {list(cuts)} leave a stage of a chain of {self.num_units} units empty: they must "
                f"rise, from 1 to {self.num_units - 1}."
            )
        return bounds

    def merged(self, bounds: Sequence[int]) -> "Chain":
        """The chain whose units are those between the bounds, such as layers of their halves.

        A cut of it at unit i is one of this chain at `bounds[i]`.
        """
        bounds = self.bounds(bounds[1:-1])
        lasts = [end - 1 for end in bounds[1:]]
        seconds: dict[str, Any] = {name: getattr(self, name) for name in _SECONDS}
        for name, own in seconds.items():
            seconds[name] = None if own is None else np.add.reduceat(own, bounds[:-1])
        return replace(
            self,
            names=tuple(
                self.names[a] if b == a + 1 else f"{self.names[a]} … {self.names[b - 1]}"
                for a, b in pairwise(bounds)
            ),
            boundary_bytes=self.boundary_bytes[lasts],
            returned_bytes=self.returned_bytes[lasts],
            bytes=self.bytes.between(bounds),
            **seconds,
        )

    def with_seconds_of(self, chains: Sequence["Chain"], stages: Sequence[tuple[int, int]]) -> "Chain":
        """The chain with the seconds of other chains of the same units, one for each stage."""
        found: dict[str, Any] = dict.fromkeys(_SECONDS)
        for name in found:
            values = [getattr(chain, name) for chain in chains]
            if all(value is not None for value in values):
                parts = zip(values, stages, strict=True)
                found[name] = np.concatenate([one[begin:end] for one, (begin, end) in parts])
        return replace(self, **found)

    def with_newest(self) -> "Chain":
        """The chain whose newest weights are kept with the optimizer's state."""
        kept = self.bytes.optimizer + self.bytes.parameter
        return replace(self, bytes=replace(self.bytes, optimizer=kept))

    def with_residuals(self, share: float) -> "Chain":
        """The chain that keeps, in addition to the optimizer's state, so many bytes for each byte of
        gradients.
        """
        kept = np.round(share * self.bytes.gradient).astype(np.int64)
        return replace(self, bytes=replace(self.bytes, optimizer=self.bytes.optimizer + kept))

    def with_sharers(self, sharers: int, more_of_an_owner: float = 0.0) -> "Chain":
        """The chain of which so many replicas each keep and step a part of the optimizer's, with what summing
        gradients in parts takes besides. One of them keeps more than its part, where parts are unequal.
        """
        own = self.bytes
        beside = beside_parts(sharers) * np.minimum(own.gradient, DENSE_BYTES_IN_FLIGHT)
        workspace = own.workspace + np.ceil(beside).astype(np.int64)
        most = np.minimum((1 - 1 / sharers) * own.optimizer, more_of_an_owner).astype(np.int64)
        kept = replace(own, optimizer=-(-own.optimizer // sharers) + most, workspace=workspace)
        return replace(self, bytes=kept, update_s=self.update_s / sharers)


_OF_COSTS = ("forward_s", "backward_s", "recompute_backward_s", "backward_input_s", "backward_weight_s")
_OF_UNITS = ("reduce_s", "update_s", "trial_s")
_SECONDS = (*_OF_COSTS, *_OF_UNITS)
"""The fields of a chain that depend on the device: by micro-batch, and whatever that is."""


def chain_of(profile: Profile, micro_batch: int, known: RangeBytes | None = None) -> Chain:
    """The chain of a profile's units at a micro-batch size that it knows, with the bytes that are known of it
    from another device.
    """
    units = profile.units
    costs = [unit.at(micro_batch) for unit in units]
    each = {name: [getattr(cost, name) for cost in costs] for name in _OF_COSTS}
    each |= {name: [getattr(unit, name) for unit in units] for name in _OF_UNITS}
    seconds: dict[str, Any] = {name: None if None in one else np.array(one) for name, one in each.items()}
    return Chain(
        names=tuple(unit.name for unit in units),
        micro_batch=micro_batch,
        boundary_bytes=np.array([cost.boundary_bytes for cost in costs], np.int64),
        returned_bytes=np.array([cost.back_bytes for cost in costs], np.int64),
        bytes=_range_bytes(profile, micro_batch) if known is None else known,
        **seconds,
    )


def layer_bounds(names: Sequence[str]) -> tuple[int, ...]:
    """Where the layers begin, and the end: units whose names agree up to their first number are one layer.

    A unit without a number in its name is a layer of its own.
    """
    layers = [(match.group() if (match := _LAYER.match(name)) else None) for name in names]
    begins = [
        place
        for place, layer in enumerate(layers)
        if place == 0 or layer is None or layer != layers[place - 1]
    ]
    return (*begins, len(names))


_LAYER = re.compile(r".*?(?:^|\.)\d+(?=\.|$)")
"""A module's name up to its first number."""
