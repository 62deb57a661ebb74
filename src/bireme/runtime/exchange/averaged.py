"""What a rank averages with others: its weights as flats, the optimizer's state, drifts through a codec."""

from binascii import crc32
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.codec.sum_description import SumCodec
from bireme.devices import is_accelerator
from bireme.memory.arena import Arena, Slots
from bireme.runtime.exchange.rounds import RoundSum
from bireme.runtime.snapshot import piece_name
from bireme.runtime.stage import Stage
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import FlatViews, SentBytes
from bireme.sync.feedback import RESIDUAL
from bireme.sync.rounds.contribution import CodedFlats, bases_in

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Part:
    """A flat: a range of an arena of a stage, with the slots of its weights in it. If other stages hold its
    weight too, `first` fixes the order in which its mean is summed.
    """

    stage: int
    arena: int
    begin: int
    slots: Slots
    first: int | None

    def of(self, arena: Tensor) -> Tensor:
        """This part of an arena's flat."""
        return arena[self.begin : self.begin + self.slots.num_elements]


def _parts_of(stages: Sequence[Stage], shared: Collection[str]) -> Iterator[_Part]:
    """The parts of these stages; `shared` are the weights that several stages of the replica hold."""
    for number, stage in enumerate(stages):
        for place, (own, _) in enumerate(stage.banks.averaged):
            groups: list[list[str]] = []
            for name in own:
                if name in shared or not groups or groups[-1][-1] in shared:
                    groups.append([])
                groups[-1].append(name)
            for names in groups:
                slots = Slots({name: own[name].shape for name in names})
                first = crc32(names[0].encode()) if names[0] in shared else None
                yield _Part(number, place, own[names[0]].begin, slots, first)


class AveragedWeights:
    """The weights of a rank as flats: the arenas of all its stages, in their order.

    A weight that several stages of a replica hold (`shared`) is a flat of its own. The order of the additions
    in its mean follows from its name, so the mean has the same bits in all these stages, whatever else lies
    on their ranks.
    """

    def __init__(self, stages: Sequence[Stage], shared: Collection[str], device: torch.device) -> None:
        self.stages, self._device = stages, device
        self.parts = tuple(_parts_of(stages, shared))

    @property
    def everywhere(self) -> list[slice]:
        """The places of all weights."""
        return [slice(0, part.slots.num_elements) for part in self.parts]

    @property
    def flats(self) -> list[Tensor]:
        """The newest weights."""
        flats = [[flat for _, flat in stage.banks.averaged] for stage in self.stages]
        return [part.of(flats[part.stage][part.arena]) for part in self.parts]

    def write(self, write: Callable[[int, Tensor], object], *, is_drained: bool = False) -> None:
        """Change the newest weights in place: `write` is called with the number of each flat and the flat."""
        for place, stage in enumerate(self.stages):

            def write_all(flats: Sequence[Tensor], place: int = place) -> None:
                for number, part in enumerate(self.parts):
                    if part.stage == place:
                        write(number, part.of(flats[part.arena]))

            stage.banks.average(stage.banks.newest_version, write_all, is_drained=is_drained)

    def arenas(self) -> list[Arena]:
        """Memory on the host for values of all weights."""
        return [
            Arena(part.slots, flat.dtype, _HOST) for part, flat in zip(self.parts, self.flats, strict=True)
        ]

    def sections(
        self,
        section: str,
        arenas: Sequence[Arena],
        names: Collection[str] | None = None,
        pieces_of: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        """Copies of the values in arenas, by the names of a snapshot: of the weights in `names` or, by
        default, of all. Pieces that this rank owns are left to `pieces_of`, if that is given.
        """
        found: dict[str, Tensor] = {}
        for name, view, place in self._placed(arenas):
            key = f"{section}/{name}"
            if place is not None and pieces_of is not None:
                piece, shape = place
                if name in pieces_of:
                    found[piece_name(piece.start, shape, key)] = view.reshape(-1).clone()
            elif names is None or name in names:
                found[key] = view.clone()
        return found

    def load_section(self, section: str, arenas: Sequence[Arena], saved: Mapping[str, Tensor]) -> None:
        """Copy saved values into arenas."""
        for part, arena in zip(self.parts, arenas, strict=bool(arenas)):
            for name, view in arena.views.items():
                if (found := saved.get(f"{section}/{name}")) is None:
                    continue
                place = self.stages[part.stage].banks.averaged_piece(name)
                is_whole = place is not None and found.shape != view.shape
                view.copy_(found.reshape(-1)[place[0]] if is_whole and place is not None else found)

    def _placed(
        self, arenas: Sequence[Arena]
    ) -> Iterator[tuple[str, Tensor, tuple[slice, tuple[int, ...]] | None]]:
        """The name of each weight in arenas, its place there, and the piece that it is; of the first stage
        that has it.
        """
        stage_of: dict[str, int] = {}
        for part, arena in zip(self.parts, arenas, strict=bool(arenas)):
            for name, view in arena.views.items():
                if stage_of.setdefault(name, part.stage) == part.stage:
                    yield name, view, self.stages[part.stage].banks.averaged_piece(name)

    def event(self) -> torch.Event | None:
        """On an accelerator an event after all work that the rank's stream has now."""
        if not is_accelerator(self._device):
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event


@dataclass(frozen=True, slots=True)
class _Row:
    """What an optimizer keeps under a key of the weights in the part of that number."""

    number: int
    part: _Part
    key: str
    dtype: torch.dtype

    def length(self, places: Sequence[slice]) -> int:
        """The number of elements at these places."""
        return int(places[self.number].stop - places[self.number].start)


class Moments:
    """What the optimizer keeps of each weight, as flats that are averaged along with the weights.

    For each flat of weights there is a flat for each key of the optimizer's state, with elements at the same
    `places`: so a fragment of the weights is a fragment of them too. State that an optimizer has not made yet
    counts as zeros, with which it would begin, and is not written to.
    """

    def __init__(self, weights: AveragedWeights, *, is_on: bool) -> None:
        self._banks = [stage.banks for stage in weights.stages] if is_on else []
        kinds = [banks.state_kinds() for banks in self._banks]
        self._rows: list[_Row] = []
        for number, part in enumerate(weights.parts if is_on else ()):
            keys = dict(kind for name in part.slots for kind in kinds[part.stage].get(name, {}).items())
            self._rows += [_Row(number, part, key, keys[key]) for key in sorted(keys)]

    @property
    def firsts(self) -> list[int | None]:
        """What fixes the order of the additions in each flat."""
        return [row.part.first for row in self._rows]

    def like(self, places: Sequence[slice]) -> list[Tensor]:
        """Flats of the same lengths and kinds, without memory."""
        return [torch.empty(row.length(places), dtype=row.dtype, device="meta") for row in self._rows]

    def taken(self, places: Sequence[slice]) -> list[Tensor]:
        """Copies on the host."""
        states = [banks.optimizer_state() for banks in self._banks]
        found = []
        for row in self._rows:
            flat = torch.zeros(row.length(places), dtype=row.dtype)
            for own, place in _held(row, states[row.part.stage], places[row.number]):
                flat[place].copy_(own)
            found.append(flat)
        return found

    @torch.no_grad()
    def put(self, flats: Sequence[Tensor], places: Sequence[slice]) -> None:
        """Give the optimizer this state from now on."""
        states = [banks.optimizer_state() for banks in self._banks]
        for row, flat in zip(self._rows, flats, strict=True):
            for own, place in _held(row, states[row.part.stage], places[row.number]):
                own.copy_(flat[place])
        for banks, state in zip(self._banks, states, strict=True):
            banks.put_back_state(state)


def _held(row: _Row, state: Mapping[str, Mapping[str, Any]], whole: slice) -> Iterator[tuple[Tensor, slice]]:
    """The parts of an optimizer's tensors within a place, and where each of them is in its flat."""
    for name, slot in row.part.slots.items():
        own = state.get(name, {}).get(row.key)
        begin, end = max(slot.begin, whole.start), min(slot.end, whole.stop)
        if begin < end and isinstance(own, Tensor) and tuple(own.shape) == slot.shape:
            part = own.view(-1)[begin - slot.begin : end - slot.begin]
            yield part, slice(begin - whole.start, end - whole.start)


_UNSENT = "unsent"
"""The section of snapshots for what codecs keep."""


class CodedDrifts:
    """Sums, through a codec, of how far weights at some places are from where all replicas had the same.

    A codec loses a share of what it gets, and that share is kept and added to what it gets next. Of the
    weights themselves the share would be large; of their drift it is small. The optimizer's state goes as it
    is.
    """

    def __init__(
        self,
        codec: SumCodec,
        weights: AveragedWeights,
        places: Sequence[slice],
        moments: Moments,
        sent: SentBytes,
        *,
        keeps_basis: bool,
    ) -> None:
        self._coded, self._sent = GradientSummation(codec, keeps_basis=keeps_basis), sent
        slots: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        for number, (part, place) in enumerate(zip(weights.parts, places, strict=True)):
            for name, slot in part.slots.items():
                begin, end = max(slot.begin, place.start), min(slot.end, place.stop)
                if begin >= end:
                    continue
                is_whole = end - begin == slot.end - slot.begin
                label = name if is_whole else f"{name}:{begin - slot.begin}"
                label = f"{label}@{number}" if label in slots else label
                slots[label] = number, begin - place.start, slot.shape if is_whole else (end - begin,)
        firsts, num_parts = [*(part.first for part in weights.parts), *moments.firsts], len(weights.parts)
        for number, one in enumerate(moments.like(places), num_parts):
            slots[f"{number}"] = number, 0, (one.numel(),)
        self._views = FlatViews(slots)
        self._plain = {label for label, (number, _, _) in slots.items() if number >= num_parts}
        self._apart = {label for label, (number, _, _) in slots.items() if firsts[number] is not None}

    def how(self, number: int) -> CodedFlats:
        """How the contributions to the round of that number are added up."""
        return CodedFlats(number, self._views, self._coded, self._sent, plain=self._plain, apart=self._apart)

    def settle(self, result: RoundSum, *, is_own: bool) -> None:
        """A round counts, with this result. Its residuals are kept if this rank's own drift is in it."""
        is_own = is_own and result.is_made_here
        self._coded.settle(counts=is_own, common=None if is_own else bases_in(result.summed.more))

    def drop(self) -> None:
        """A round does not count after all."""
        self._coded.settle(counts=False)

    def add_unsent(self, drifts: Sequence[Tensor]) -> None:
        """Add what was not sent to drifts, in place."""
        views = self._views.in_([*drifts, *(drifts[0].new_empty(0) for _ in self._plain)])
        for label, kept in self._kept().items():
            if RESIDUAL in kept:
                views[label].add_(kept[RESIDUAL])

    def clear(self) -> None:
        """All replicas have the same weights: nothing is unsent."""
        if self._coded.feedback is not None:
            self._coded.feedback.clear_residuals()

    def sections(self, line: int) -> dict[str, Tensor]:
        """What is kept, by the names of a snapshot; copied."""
        return {
            f"{_UNSENT}/{line}/{label}/{key}": value.clone()
            for label, kept in self._kept().items()
            for key, value in kept.items()
        }

    def load(self, line: int, saved: Mapping[str, Tensor]) -> None:
        """Continue with what was kept elsewhere, or with nothing."""
        if self._coded.feedback is None:
            return
        found: dict[str, dict[str, Tensor]] = {}
        begin = f"{_UNSENT}/{line}/"
        for key, value in saved.items():
            if key.startswith(begin):
                label, _, what = key.removeprefix(begin).rpartition("/")
                found.setdefault(label, {})[what] = value
        self._coded.feedback.load(found, num_batches=0)

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        feedback = self._coded.feedback
        return {} if feedback is None else feedback.after(feedback.num_batches)
