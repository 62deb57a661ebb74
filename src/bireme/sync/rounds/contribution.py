"""What members contribute to a round, and its sum: as it is, or through a codec and as principal components.

All members contribute the same kind of tensors: gradients, weights, or drifts of weights.
"""

from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bireme.sync.coded import GradientSummation
from bireme.sync.components import HostStream, labelled, merge_components
from bireme.sync.exchange import BatchGradients, FlatViews, SentBytes
from bireme.sync.feedback import BASIS
from bireme.sync.group import Group
from bireme.sync.rounds.round_group import LineBroken, RoundGroup
from bireme.sync.slices import SLICE_BYTES

# Digests of weights, by which replicas notice that they no longer have the same bits.
#
# Each member sends its last digest along with its contribution, so all members of a round and a stage know
# the same digests, and find the same members that differ: those with other weights than most or, if neither
# side has more, than the member that has trained for longest.


SLICE = 1 << 20
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number, so that no bit of what it multiplies is lost."""
_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What elements of that many bytes count as. Longer ones count as fours, so that no product is cut short."""


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
    """This replica has other weights than the others: it ends, and its next incarnation takes theirs."""


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


@dataclass(frozen=True, slots=True)
class Contribution:
    """A member's part of a round: flat tensors on the host, a mean of `nominal` in weight.

    `weight` is the weight of its samples. `holds` says for each parameter whether it has a gradient there; if
    not, `flats` are zero. `numbers` are further ones to add up: those in `means` as the gradients, the others
    as they are. `digest` is the last one of the member's weights. `firsts` gives for each flat a number that
    fixes at which member its sum begins, the same on all members, or None: then that follows from its place.
    """

    flats: Sequence[Tensor]
    holds: bytes
    weight: float
    nominal: float
    means: tuple[float, ...] = ()
    numbers: tuple[float, ...] = ()
    digest: Digest = NO_DIGEST
    firsts: Sequence[int | None] = ()


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum over all members: the mean of their samples, of so much `weight`. The flats lie where it was
    asked for; `more` are tensors that belong to the sum, the same on all members.
    """

    holds: bytes
    weight: float
    means: tuple[float, ...]
    numbers: tuple[float, ...]
    more: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class CodedFlats:
    """How the contributions to a round of that `number` are added up; `coded` is what large tensors go
    through, but those in `plain`. `views` are the tensors in a contribution's flats. Members may hold those
    in `apart` in other flats too, so each of these is summed by itself.
    """

    number: int
    views: FlatViews
    coded: GradientSummation | None
    sent: SentBytes
    plain: Collection[str] = ()
    apart: Collection[str] = ()
    streams: Mapping[str, HostStream] = field(default_factory=dict)

    def sum(
        self,
        group: Group,
        own: Contribution,
        into: Sequence[Tensor],
        factors: Sequence[float],
        sender: int,
    ) -> tuple[bytes, Mapping[str, Tensor]]:
        """Write the sum over a group; gives which tensors any member has, the bases and the components."""
        names = [*self.views.slots]
        # Contributions that do not say so have all of their tensors.
        holds = own.holds or bytes([1]) * len(names)
        held = {name for name, one in zip(names, holds, strict=True) if one}
        streams = {name: replace(one, factor=factors[group.rank]) for name, one in self.streams.items()}
        gradients = BatchGradients(self.views.in_(into), held, into, streams=streams)
        for flat, mine in zip(into, own.flats, strict=True):
            flat.copy_(mine)
        coded = self.coded or GradientSummation()
        coded.sum(
            group,
            names,
            gradients,
            SLICE_BYTES,
            self.sent,
            batch=self.number,
            factors=factors,
            sender=sender,
            plain=self.plain,
            apart=self.apart,
        )
        if streams:
            merge_components(group, gradients, self.sent)
        more = {f"{BASIS}/{name}": one for name, one in coded.common.items()}
        more |= labelled(gradients.components)
        return bytes(name in gradients.held for name in names) if own.holds else b"", more


def bases_in(more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The bases of low rank that belong to a sum, by the name of the tensor."""
    return {key.partition("/")[2]: one for key, one in more.items() if key.startswith(f"{BASIS}/")}


def sum_over(
    own: Contribution, into: Sequence[Tensor], group: RoundGroup, how: CodedFlats | None = None
) -> Summed:
    """The sum over the members of an attempt; its gradients are written into flats like its own.

    Raises `LineBroken` if a member is lost or has other weights than the rest of them, and
    `OtherWeightsError` if this member has.
    """
    me = group.members[group.rank]
    all_own = _gathered(own, group)
    check_same({member: one.digest for member, one in zip(group.members, all_own, strict=True)}, me)
    weight = sum(one.weight for one in all_own)
    factors = [one.nominal / weight if weight else 0.0 for one in all_own]
    holds = bytes(map(max, *(one.holds for one in all_own))) if len(all_own) > 1 else own.holds
    more: Mapping[str, Tensor] = {}
    if how is not None:
        holds, more = how.sum(group, own, into, factors, me)
    else:
        group.add_up(own.flats, into, factors[group.rank], own.firsts).wait()
    means = tuple(
        sum(factor * one.means[place] for factor, one in zip(factors, all_own, strict=True))
        for place in range(len(own.means))
    )
    numbers = tuple(map(sum, zip(*(one.numbers for one in all_own), strict=True)))
    return Summed(holds, weight, means, numbers, more)


def _gathered(own: Contribution, group: RoundGroup) -> list[Contribution]:
    """All contributions without their flats, in the order of the members."""
    plain = array("d", [own.weight, own.nominal, *own.means, *own.numbers])
    digest = array("q", [own.digest.version, own.digest.value, own.digest.kind, own.digest.first])
    message = bytearray(plain.tobytes() + digest.tobytes() + own.holds)
    received = [bytearray(len(message)) for _ in group.members]
    of_all = [torch.frombuffer(one, dtype=torch.uint8) for one in received]
    group.gather(torch.frombuffer(message, dtype=torch.uint8), of_all).wait()

    def read(it: bytearray) -> Contribution:
        end = len(plain) * plain.itemsize
        weight, nominal, *rest = array("d", bytes(it[:end]))
        its_digest = Digest(*array("q", bytes(it[end : end + len(digest) * digest.itemsize])))
        holds = bytes(it[end + len(digest) * digest.itemsize :])
        means, numbers = tuple(rest[: len(own.means)]), tuple(rest[len(own.means) :])
        return Contribution((), holds, weight, nominal, means, numbers, its_digest)

    return [read(it) for it in received]
