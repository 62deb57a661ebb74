"""Trial steps of replicas that share an optimiser.

Every replica tries a step with gradients of its own, and for that needs moments that others have. So it sends
each owner its gradient of the owner's part; the owner tries a step of its part for each replica, and sends
back what came of it. All of that goes a chunk of every part at a time.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from bireme.runtime.sharers import Sharers
from bireme.runtime.shelf_part import ParameterGroupPart
from bireme.runtime.shelf_weights import ParameterGroupWeights
from bireme.runtime.stepper import Home, Stepper
from bireme.runtime.trial import CHUNK_ELEMENTS, ParameterRows, Trials, Tried
from bireme.sync.parts import pieces_of, rounds_of

__all__ = ["make_shared_trial"]


@torch.no_grad()
def make_shared_trial(
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
        for begin in rounds_of(part.parts, CHUNK_ELEMENTS):
            given = pieces_of(flat, part.parts, begin, CHUNK_ELEMENTS)
            gradients = _exchanged(sharers, given, [given[sharers.member].numel()] * sharers.num_members)
            sharers.summed_bytes += _sent_bytes(sharers, given)
            made = [torch.empty_like(one, dtype=store.banks[bank].flat.dtype) for one in gradients]
            for member, (gradient, goal) in enumerate(zip(gradients, made, strict=True)):
                chunk = list(_tried(part, homes, source.flat, begin, gradient, goal, helds[member]))
                trials.try_chunk(chunk, lr_factor=lr_factor, factor=factors[member])
            sharers.gathered_bytes += _sent_bytes(sharers, made)
            target = pieces_of(store.banks[bank].flat, part.parts, begin, CHUNK_ELEMENTS)
            for piece, came in zip(target, _exchanged(sharers, made, [*map(len, target)]), strict=True):
                piece.copy_(came)


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
        here = slice(first - begin, last - begin)
        yield Tried(
            ParameterRows(homes[name], slice(first - slot.begin, last - slot.begin)),
            source[first:last],
            goal[here],
            gradient[here] if name in held else None,
        )
