"""The weights of a stage of which each replica keeps a part: whole while the stage computes, and let go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bireme.memory.arena import Arena, LentArena
from bireme.runtime.optimizers import StageMemory
from bireme.runtime.parameter_groups import (
    ParameterGroupWeights,
    Tensors,
    parameter_groups_of,
    part_of,
)
from bireme.runtime.shared_weights import SharedWeights, Sharers, whole_copy
from bireme.runtime.stepper import Stepper
from bireme.runtime.trial import Trials
from bireme.schedule.instruction import Item
from bireme.sync.group import Pending


class FrozenParts:
    """The weights of a stage that do not learn, of which each replica keeps a part. They are whole while any
    version is.
    """

    def __init__(self, sharers: Sharers, weights: Tensors, memory: StageMemory) -> None:
        self._sharers = sharers
        self._memory = memory
        groups = parameter_groups_of(weights, dict.fromkeys(weights, 0))
        device = next(iter(weights.values())).device if weights else torch.device("cpu")
        self.parts = [part_of(group, sharers.member, sharers.num_members) for group in groups]
        own = memory.frozen_parts()
        self._own = [Arena(part.own.slots, part.own.dtype, device, own) for part in self.parts]
        self._arenas = [LentArena(group.slots, group.dtype, device) for group in groups]
        self.views: Tensors = {name: view for arena in self._arenas for name, view in arena.views.items()}
        """The weights whole; undefined while no version is taken."""
        self.pieces: Tensors = {name: view for own in self._own for name, view in own.views.items()}
        """This replica's pieces."""
        self._num_taken = 0
        self._arriving: list[Pending] = []
        self.put(weights)

    @property
    def num_bytes(self) -> int:
        """The bytes that are there for good."""
        return sum(own.num_bytes for own in self._own)

    def put(self, weights: Tensors) -> None:
        """Take over copies of this replica's pieces of some weights, given whole."""
        with self._memory.opened(Item.FROZEN):
            for part, own in zip(self.parts, self._own, strict=True):
                for name, piece in own.views.items():
                    if name in weights:
                        piece.copy_(part.piece(name, weights[name]))

    def take(self, *, trains: bool) -> None:
        """Begin to gather them, if no version is taken. Take part with the others."""
        self._num_taken += 1
        if self._num_taken > 1:
            return
        for part, own, arena in zip(self.parts, self._own, self._arenas, strict=True):
            arena.take()
            part.of(arena.unversioned).copy_(own.flat if trains else self._memory.read(own.flat))
        flats = [
            (arena.unversioned, part.parts) for arena, part in zip(self._arenas, self.parts, strict=True)
        ]
        self._arriving = self._sharers.gather(flats, trains=trains)

    def arrive(self) -> None:
        """Wait until they are there."""
        while self._arriving:
            self._arriving.pop(0).wait()

    def let_go(self) -> None:
        """Give their memory back, but for this replica's pieces, if no version is taken any more."""
        self._num_taken -= 1
        if not self._num_taken:
            self.arrive()
            for arena in self._arenas:
                arena.let_go()

    def copies(self) -> dict[str, Tensor]:
        """Copies of them; take part with the others."""
        found: dict[str, Tensor] = {}
        for part, own, arena in zip(self.parts, self._own, self._arenas, strict=True):
            found |= whole_copy(self._sharers, arena.slots, part, self._memory.read(own.flat))
        return found


class GatheredWeights(SharedWeights):
    """As `SharedWeights`, but a version that was made is gathered when it is asked for, with the `frozen`
    weights.
    """

    def __init__(
        self,
        sharers: Sharers,
        stepper: Stepper,
        trials: Trials,
        stores: Sequence[ParameterGroupWeights],
        num_banks: int,
        frozen: FrozenParts,
    ) -> None:
        super().__init__(sharers, stepper, trials, stores, num_banks)
        self.frozen = frozen
        self.part_of = {**self.part_of, **{name: part for part in frozen.parts for name in part.pieces}}
        self.shapes |= {name: tuple(view.shape) for name, view in frozen.views.items()}

    @property
    def sharers(self) -> Sharers:
        """The replicas that have the other parts."""
        return self._sharers

    def made(self, bank: int) -> None:
        """This replica has its part of a version; nobody needs the whole yet."""

    def make_whole(self, bank: int) -> None:
        """Nobody needs the whole of a bank yet."""

    def take(self, version: int, *, trains: bool = True) -> None:
        """Begin to gather a version. Take part with the others."""
        bank = version % len(self._arriving)
        for store in self._stores:
            store.take(bank)
        self.frozen.take(trains=trains)
        self.gather(bank, trains=trains)

    def arrive(self, version: int) -> None:
        """Wait until all parts of a version, or of the bank of that number, are there."""
        super().arrive(version)
        self.frozen.arrive()

    def let_go(self, version: int) -> None:
        """Give back the memory of a version, but for this replica's part."""
        self.arrive(version)
        for store in self._stores:
            store.let_go(version % len(self._arriving))
        self.frozen.let_go()

    @contextmanager
    def lent(self, version: int) -> Iterator[bool]:
        """Within this context a version is whole; False, and nothing is, while another stage has one lent.
        Take part with the others.
        """
        sharers = self._sharers
        if sharers.has_lent:
            yield False
            return
        sharers.has_lent = True
        self.take(version, trains=False)
        self.arrive(version)
        try:
            yield True
        finally:
            self.let_go(version)
            sharers.has_lent = False

    def newest(self, bank: int, *, alone: bool) -> Tensors:
        """Copies of the newest weights, as they are stepped, for nobody has them whole; take part with the
        others. With `alone` all are left out.
        """
        if alone:
            return {}
        trained = self._whole_copies(
            (store, store.memory.read(store.newest_part(bank))) for store in self._stores
        )
        return {**trained, **self.frozen.copies()}

    def run_on(self, version: int, *, alone: bool) -> Tensors:
        """The same of a version that is computed with."""
        bank = version % len(self._arriving)
        return (
            {}
            if alone
            else self._whole_copies((store, store.memory.read(store.own(bank))) for store in self._stores)
        )

    def own_newest(self, bank: int) -> Tensors:
        """This replica's pieces of the newest weights."""
        trained = {name: view for store in self._stores for name, view in store.stepped(bank).items()}
        return {**trained, **self.frozen.pieces}

    def own_run_on(self, version: int) -> Tensors:
        """This replica's pieces of a version that is computed with."""
        bank = version % len(self._arriving)
        return {name: view for store in self._stores for name, view in store.pieces(bank).items()}
