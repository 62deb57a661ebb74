"""The weights of a stage whose optimiser replicas share: each makes its parts and gets the others'."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.runtime.shared_trial import make_shared_trial
from bireme.runtime.sharers import Sharers
from bireme.runtime.shelf_part import ParameterGroupPart
from bireme.runtime.shelf_weights import ParameterGroupWeights
from bireme.runtime.stepper import Stepper
from bireme.runtime.trial import Trials
from bireme.sync.gradients import Parts
from bireme.sync.group import Pending

__all__ = ["SharedWeights"]

Tensors = Mapping[str, Tensor]

ONCE = frozenset({"eta", "mu", "mu_product", "step"})
"""What torch's optimisers remember once for all elements of a parameter, which may have no axes itself."""


class SharedWeights:
    """One replica's side of it. What takes part with the others must be called by all, in the same order."""

    def __init__(
        self,
        sharers: Sharers,
        stepper: Stepper,
        trials: Trials,
        stores: Sequence[ParameterGroupWeights],
        num_banks: int,
    ) -> None:
        self._sharers = sharers
        self._stepper = stepper
        self._trials = trials
        self._stores = stores
        self._arriving: list[list[Pending]] = [[] for _ in range(num_banks)]
        self.part_of: Mapping[str, ParameterGroupPart] = {
            name: part for part in stepper.parts for name in part.pieces
        }
        """Of each parameter that this replica owns a piece of, the part that this lies in."""
        self.shapes = {name: slot.shape for store in stores for name, slot in store.banks[0].slots.items()}

    def own(self, tensors: Tensors) -> dict[str, Tensor]:
        """This replica's pieces of some tensors, by the names of their parameters."""
        return {
            name: self.part_of[name].piece(name, one) for name, one in tensors.items() if name in self.part_of
        }

    def piece_of_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """This replica's piece of what an optimiser remembers of a parameter under a key, given whole or as
        the piece; what it remembers once for all elements is no piece.
        """
        is_whole = tuple(value.shape) == self.shapes[name] and (value.ndim > 0 or key not in ONCE)
        return self.part_of[name].piece(name, value).clone() if is_whole else value

    def own_newest(self, _bank: int) -> Tensors:
        """This replica's pieces of the newest weights that nobody has whole."""
        return {name: view for one in self._stores if one.apart for name, view in one.apart.views.items()}

    def own_run_on(self, _version: int) -> Tensors:
        """The same of a version that is computed with, which all have whole."""
        return {}

    def made(self, bank: int) -> None:
        """This replica has made its part of a version: begin to give it to the others, and to get theirs."""
        self.gather(bank)

    def gather(self, bank: int, *, trains: bool = True) -> None:
        """Begin to send this replica's parts of a bank, and to get the others'. Take part with the others."""
        self._arriving[bank] = self._sharers.gather(
            ((store.to_gather(bank), _parts(store)) for store in self._stores), trains=trains
        )

    def arrive(self, version: int) -> None:
        """Wait until all parts of a version, or of the bank of that number, are there."""
        under_way = self._arriving[version % len(self._arriving)]
        while under_way:
            under_way.pop(0).wait()

    def arrive_all(self) -> None:
        """Wait until nothing is on its way."""
        for bank in range(len(self._arriving)):
            self.arrive(bank)

    def try_step(
        self,
        bank: int,
        flats: Sequence[Tensor],
        held: Collection[str],
        *,
        lr_factor: float,
        factor: float,
    ) -> None:
        """Write into a bank what a step with this replica's gradients would make of the newest weights: with
        those in `held`, times `factor`; `flats` has the memory they lie in. Take part with the others.
        """
        device = self._stores[0].banks[bank].flat.device if self._stores else None
        nothing = (
            torch.zeros((), dtype=one.dtype, device=device).expand(one.slots.num_elements)
            for one in self._stepper.shelves
        )
        make_shared_trial(
            self._sharers,
            self._stepper,
            self._trials,
            self._stores,
            bank,
            flats or [*nothing],
            held,
            lr_factor=lr_factor,
            factor=factor,
        )

    def newest(self, bank: int, *, alone: bool) -> Tensors:
        """The newest weights, as they are stepped; take part with the others. Those apart are copies, and are
        left out with `alone`, as nobody has them whole.
        """
        self.arrive(bank)
        found: dict[str, Tensor] = {}
        for store in self._stores:
            if store.apart is None:
                found |= store.leaves[bank]
            elif not alone:
                found |= self._whole_copies([(store, store.apart.flat)])
        return found

    def run_on(self, version: int, *, alone: bool) -> Tensors:
        """A version that is computed with; with `alone` without what nobody has whole, which is nothing."""
        self.arrive(version)
        bank = version % len(self._arriving)
        return {name: leaf for store in self._stores for name, leaf in store.leaves[bank].items()}

    def _whole_copies(self, owned: Iterable[tuple[ParameterGroupWeights, Tensor]]) -> Tensors:
        """Copies of weights of some stores, of each of which this is the part that this replica has; take
        part with the others.
        """
        found: dict[str, Tensor] = {}
        for store, own in owned:
            whole = Arena(store.banks[0].slots, own.dtype, own.device)
            assert store.part is not None, "the stores of shared weights have parts"
            store.part.of(whole.flat).copy_(own)
            for pending in self._sharers.gather([(whole.flat, store.part.parts)], trains=False):
                pending.wait()
            found |= whole.views
        return found


def _parts(store: ParameterGroupWeights) -> Parts:
    assert store.part is not None, "the stores of shared weights have parts"
    return store.part.parts
