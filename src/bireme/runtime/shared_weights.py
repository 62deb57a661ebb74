"""The weights of which replicas that share step their parts: whole in every replica, or whole only while the
stage computes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.runtime.optimizers import StageMemory
from bireme.runtime.parameter_groups import (
    ParameterGroupPart,
    ParameterGroupWeights,
    Tensors,
    parameter_groups_of,
    part_of,
)
from bireme.runtime.sharers import Sharers
from bireme.runtime.stepper import Home, Stepper
from bireme.runtime.trial import CHUNK_ELEMENTS, ParameterRows, Trials, Tried
from bireme.schedule.instruction import Item
from bireme.sync.exchange import Parts, rounds_of
from bireme.sync.group import Pending

# Trial steps of replicas that share an optimizer.
#
# Every replica tries a step with gradients of its own, and for that needs moments that others have. So it
# sends each owner its gradient of the owner's part; the owner tries a step of its part for each replica, and
# sends back what came of it. All of that goes a chunk of every part at a time.


@torch.no_grad()
def _make_shared_trial(
    sharers: Sharers,
    stepper: Stepper,
    trials: Trials,
    stores: Sequence[ParameterGroupWeights],
    bank: int,
    flats: Sequence[Tensor],
    held: Collection[str],
    *,
    lr_factor: float,
    factor: float,
) -> None:
    """Write into a bank of each of `stores` what a step with this replica's gradients would make of the
    newest weights: those in `held` times `factor`, which lie in `flats`. All members must call it.
    """
    names = [name for store in stores for name in store.leaves[bank]]
    own = torch.tensor([factor, *(float(name in held) for name in names)], dtype=torch.float64)
    told = [torch.empty_like(own) for _ in range(sharers.num_members)]
    device = stores[0].banks[bank].flat.device if stores else own.device
    told = [one.to(device) for one in told]
    sharers.group.gather(own.to(device), told).wait()
    of_all = [one.tolist() for one in told]
    factors = [float(one[0]) for one in of_all]
    helds = [{name for name, has in zip(names, one[1:], strict=True) if has} for one in of_all]
    homes = {home.name: home for home in stepper.homes}
    for store, flat in zip(stores, flats, strict=True):
        part, source = store.part, store.apart
        assert part is not None, "what is tried is shared"
        assert source is not None, "trial versions are made from weights apart"
        for pieces in _trial_rounds(part):
            given = [flat[piece] for piece in pieces]
            gradients = _exchanged(sharers, given, [given[sharers.member].numel()] * sharers.num_members)
            sharers.summed.add(_sent_bytes(sharers, given))
            made = [torch.empty_like(one, dtype=store.banks[bank].flat.dtype) for one in gradients]
            for member, (gradient, goal) in enumerate(zip(gradients, made, strict=True)):
                begin = pieces[sharers.member].start - part.parts[sharers.member]
                chunk = list(_tried(part, homes, source.flat, begin, gradient, goal, helds[member]))
                trials.try_chunk(chunk, lr_factor=lr_factor, factor=factors[member])
            sharers.gathered_bytes += _sent_bytes(sharers, made)
            target = [store.banks[bank].flat[piece] for piece in pieces]
            for piece, came in zip(target, _exchanged(sharers, made, [*map(len, target)]), strict=True):
                piece.copy_(came)


def _trial_rounds(part: ParameterGroupPart) -> Iterator[list[slice]]:
    """The elements of every member's part that are tried together: some, or the next whole parameter."""
    if not part.is_whole:
        for begin in rounds_of(part.parts, CHUNK_ELEMENTS):
            yield [
                slice(min(first + begin, end), min(first + begin + CHUNK_ELEMENTS, end))
                for first, end in pairwise(part.parts)
            ]
        return
    ends = [*part.parts[:-1]]
    owned = zip_longest(*part.sizes, fillvalue=0)
    for sizes in owned:
        yield [slice(end, end + size) for end, size in zip(ends, sizes, strict=True)]
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]


def _exchanged(sharers: Sharers, given: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
    """What all members send, so many elements each, for what they are given here."""
    whole = torch.cat([*given])
    taken = whole.new_empty(sum(lengths))
    sharers.group.exchange(whole, [*map(len, given)], taken, lengths).wait()
    return torch.split(taken, [*lengths])


def _sent_bytes(sharers: Sharers, given: Sequence[Tensor]) -> int:
    """The bytes that go to other members of what they are given here."""
    return sum(one.nbytes for member, one in enumerate(given) if member != sharers.member)


def _tried(
    part: ParameterGroupPart,
    homes: dict[str, Home],
    source: Tensor,
    begin: int,
    gradient: Tensor,
    goal: Tensor,
    held: Collection[str],
) -> Iterator[Tried]:
    """The pieces of a chunk that begins there in the part, with their gradients if these are held."""
    end = begin + len(gradient)
    for name, slot in part.own.slots.items():
        first, last = max(slot.begin, begin), min(slot.end, end)
        if first >= last:
            continue
        shape = slot.shape if part.is_whole else (last - first,)
        rows = None if part.is_whole else slice(first - slot.begin, last - slot.begin)
        here = slice(first - begin, last - begin)
        yield Tried(
            ParameterRows(homes[name], rows),
            source[first:last].view(shape),
            goal[here].view(shape),
            gradient[here].view(shape) if name in held else None,
        )


_ONCE = frozenset({"eta", "mu", "mu_product", "step"})
"""What torch's optimizers remember once for all elements of a parameter, which may have no axes itself."""


class SharedWeights:
    """One replica's side of it. What takes part with the others must be called by all, in the same order.

    `frozen` weights do not learn; this replica has its parts of them.
    """

    def __init__(
        self,
        sharers: Sharers,
        stepper: Stepper,
        trials: Trials,
        stores: Sequence[ParameterGroupWeights],
        num_banks: int,
        frozen: Sequence[ParameterGroupWeights] = (),
    ) -> None:
        self._sharers = sharers
        self._stepper = stepper
        self._trials = trials
        self._stores = stores
        self._frozen = frozen
        self._arriving: list[list[Pending]] = [[] for _ in range(num_banks)]
        self._frozen_arriving: list[Pending] = []
        parts = (*stepper.parts, *(store.part for store in frozen if store.part is not None))
        self.part_of: Mapping[str, ParameterGroupPart] = {
            name: part for part in parts for name in part.pieces
        }
        """Of each parameter that this replica owns a piece of, the part that this lies in."""
        self.shapes = {
            name: slot.shape for store in (*stores, *frozen) for name, slot in store.banks[0].slots.items()
        }

    def own(self, tensors: Tensors) -> dict[str, Tensor]:
        """This replica's pieces of some tensors, by the names of their parameters."""
        return {
            name: self.part_of[name].piece(name, one) for name, one in tensors.items() if name in self.part_of
        }

    def piece_of_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """This replica's piece of what an optimizer remembers of a parameter under a key, given whole or as
        the piece; what it remembers once for all elements is no piece.
        """
        is_whole = tuple(value.shape) == self.shapes[name] and (value.ndim > 0 or key not in _ONCE)
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
        self._arriving[bank] = self._gathered(self._stores, bank, trains=trains)

    def _gathered(self, stores: Sequence[ParameterGroupWeights], bank: int, *, trains: bool) -> list[Pending]:
        return self._sharers.gather(
            ((store.to_gather(bank, trains=trains), _parts(store)) for store in stores), trains=trains
        )

    def make_whole(self, bank: int) -> None:
        """Get the others' parts of a bank at once, whichever tiers have it. Take part with the others."""
        for store in self._stores:
            flat = store.banks[bank].flat
            whole = store.memory.read(flat)
            for pending in self._sharers.gather([(whole, _parts(store))], trains=False):
                pending.wait()
            store.memory.put_back(flat, whole)

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
            for one in self._stepper.parameter_groups
        )
        _make_shared_trial(
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
                found |= self._whole_copies([(store, store.memory.read(store.apart.flat))])
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
            assert store.part is not None, "the stores of shared weights have parts"
            whole = Arena(store.banks[0].slots, own.dtype, own.device)
            store.part.of(whole.flat).copy_(own)
            for pending in self._sharers.gather([(whole.flat, store.part.parts)], trains=False):
                pending.wait()
            found |= whole.views
        return found


def frozen_parts(sharers: Sharers, weights: Tensors, memory: StageMemory) -> list[ParameterGroupWeights]:
    """This replica's parts of the weights of a stage that do not learn, in one bank each."""
    dtypes = {name: one.dtype for name, one in weights.items()}
    return [
        ParameterGroupWeights(
            group,
            weights,
            dtypes,
            1,
            memory,
            is_apart=False,
            part=part_of(group, sharers.member, sharers.num_members),
            keeps_part=True,
            item=Item.FROZEN,
        )
        for group in parameter_groups_of(weights, dict.fromkeys(weights, 0))
    ]


class GatheredWeights(SharedWeights):
    """As `SharedWeights`, but each replica keeps its part only, also of the `frozen` weights. FETCH gathers a
    version from all replicas, and the frozen weights with the first; EVICT gives their memory back.
    """

    _num_taken = 0
    """The versions that are whole, or on their way."""

    @property
    def sharers(self) -> Sharers:
        """The replicas that have the other parts."""
        return self._sharers

    @property
    def frozen_bytes(self) -> int:
        """The bytes of frozen weights that are there for good."""
        return sum(store.num_bank_bytes for store in self._frozen)

    def put_frozen(self, weights: Tensors) -> None:
        """Take over copies of this replica's pieces of some frozen weights, given whole."""
        for store in self._frozen:
            store.put(0, weights)

    def made(self, bank: int) -> None:
        """This replica has its part of a version; no pass needs the whole yet."""

    def make_whole(self, bank: int) -> None:
        """No pass needs the whole of a bank yet."""

    def take(self, version: int, *, trains: bool = True) -> None:
        """Begin to gather a version. Take part with the others."""
        bank = version % len(self._arriving)
        if not self._num_taken:
            for store in self._frozen:
                store.lent(0).take()
            self._frozen_arriving = self._gathered(self._frozen, 0, trains=trains)
        self._num_taken += 1
        for store in self._stores:
            store.lent(bank).take()
        self.gather(bank, trains=trains)

    def arrive(self, version: int) -> None:
        """Wait until all parts of a version, or of the bank of that number, are there."""
        super().arrive(version)
        while self._frozen_arriving:
            self._frozen_arriving.pop(0).wait()

    def let_go(self, version: int) -> None:
        """Give back the memory of a version, but for this replica's part."""
        self.arrive(version)
        self._num_taken -= 1
        for store in self._stores:
            store.lent(version % len(self._arriving)).let_go()
        for store in () if self._num_taken else self._frozen:
            store.lent(0).let_go()

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
        """Copies of the newest weights, as they are stepped, for no replica has them whole; take part with
        the others. With `alone` all are left out.
        """
        both = [*((store, bank) for store in self._stores), *((store, 0) for store in self._frozen)]
        owned = ((store, store.memory.read(store.newest_part(number))) for store, number in both)
        return {} if alone else self._whole_copies(owned)

    def run_on(self, version: int, *, alone: bool) -> Tensors:
        """The same of a version that is computed with."""
        bank = version % len(self._arriving)
        owned = ((store, store.memory.read(store.own(bank))) for store in self._stores)
        return {} if alone else self._whole_copies(owned)

    def own_newest(self, bank: int) -> Tensors:
        """This replica's pieces of the newest weights."""
        trained = {name: view for store in self._stores for name, view in store.stepped(bank).items()}
        return {**trained, **{name: view for store in self._frozen for name, view in store.pieces(0).items()}}

    def own_run_on(self, version: int) -> Tensors:
        """This replica's pieces of a version that is computed with."""
        bank = version % len(self._arriving)
        return {name: view for store in self._stores for name, view in store.pieces(bank).items()}


def _parts(store: ParameterGroupWeights) -> Parts:
    assert store.part is not None, "the stores of shared weights have parts"
    return store.part.parts
