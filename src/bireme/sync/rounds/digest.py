"""Digests of weights, by which replicas notice that they no longer have the same bits.

Each member tells its last digest along with its contribution, so all members of a round and a stage know the
same ones, and find the same members that differ: those that have other weights than most, or than the one
that has trained for longest where neither side has more.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.sync.rounds.peer_line import LineBroken

SLICE = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, so that no bit of what it multiplies is lost."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What elements of so many bytes count as. Longer ones count as fours, so that no product is cut short."""


@dataclass(frozen=True, slots=True)
class Digest:
    """That of a rank's weights after `version` batches, on a device of some `kind`. Its replica trains since
    the batch `first`.
    """

    version: int
    value: int
    kind: int
    first: int


NO_DIGEST = Digest(-1, 0, 0, 0)


class OtherWeightsError(Exception):
    """This replica has other weights than the others: its life is over, and its next one takes theirs."""


@torch.no_grad()
def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """64 bits, others wherever a single bit of a tensor is another one; the same on all devices.

    Each element counts as an integer of 32 bits at most, times an odd factor of its place; sums are modulo
    2^64, so their order changes nothing.
    """
    total = 0
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        flat = flat.view(_INTEGERS.get(flat.itemsize, torch.int32))
        factors = torch.arange(1, min(flat.numel(), SLICE) + 1, device=flat.device)
        factors.mul_(_FACTOR).bitwise_or_(1)
        found = torch.zeros((), dtype=torch.int64, device=flat.device)
        for piece in torch.split(flat, SLICE) if flat.numel() else ():
            found = found * _FACTOR + (piece.to(torch.int64) * factors[: piece.numel()]).sum()
        total = _signed(total * _FACTOR + int(found))
    return total


def differing(digests: Mapping[int, Digest]) -> set[int]:
    """The members that differ from the others with digests of the same version on the same kind of device."""
    alike: dict[tuple[int, int], dict[int, Digest]] = defaultdict(dict)
    for member, one in digests.items():
        if one != NO_DIGEST:
            alike[one.version, one.kind][member] = one
    found = set[int]()
    for own in alike.values():
        equal: dict[int, set[int]] = defaultdict(set)
        for member in sorted(own):
            equal[own[member].value].add(member)
        leader = min(own, key=lambda member: (own[member].first, member))
        right = max(equal.values(), key=lambda members: (len(members), leader in members))
        found |= own.keys() - right
    return found


def check_same(digests: Mapping[int, Digest], me: int) -> None:
    """Raise `OtherWeightsError` if this member differs, and `LineBroken` of another one that does."""
    wrong = differing(digests)
    if me in wrong:
        others = _named(digests.keys() - wrong)
        raise OtherWeightsError(
            f"replica {me} has other weights than {others} after {digests[me].version} batches, and takes "
            "theirs."
        )
    if wrong:
        raise LineBroken(min(wrong), "it has other weights")


def _named(members: Collection[int]) -> str:
    numbers = " and ".join(map(str, sorted(members)))
    return f"replica{'s' if len(members) > 1 else ''} {numbers}"


def _signed(number: int) -> int:
    """Modulo 2^64, as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
