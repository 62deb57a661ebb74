"""The codec of gradient sums in the words of a run file: what it keeps, and how many bytes it sends.

A description only, without tensors, so planners can read it. `sync/coded.py` does what it says.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bireme.codec.description import FEWEST_ENTRIES, blocks_bytes
from bireme.errors import BiremeError, closest

# How the gradients of weights are kept, in the words of a run file: whole, or as components of a low rank.
#
# A description only, without tensors, so planners can read it. `principal.py` has the mathematics.

_GRADIENT_WORDS = "whole, principal:RANK or principal:RANK:PAIRS"

_MOST, _MOST_STEPS = 65536, 10**9

_PRINCIPAL = re.compile(r"principal:([0-9]+)(?::([0-9]+))?")


@dataclass(frozen=True, slots=True)
class GradientForm:
    """Components of `rank`, which turn after every `piece` pairs of an input and what flows back into its
    output; 0 stands for all pairs that a micro-batch brings at once.

    `patterns` name the weights that it is for; None stands for all that it makes smaller.
    """

    rank: int
    piece: int = 0
    patterns: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """As a run file has it."""
        return f"principal:{self.rank}" + (f":{self.piece}" if self.piece else "")

    def num_elements(self, rows: int, columns: int) -> int:
        """The numbers that stand for a gradient of so many rows and columns: k (a + b + 1)."""
        return self.rank * (rows + columns + 1)

    def is_smaller(self, rows: int, columns: int) -> bool:
        """Whether they are fewer than the gradient has."""
        return self.num_elements(rows, columns) < rows * columns


def parse_gradient(text: str, patterns: tuple[str, ...] | None = None) -> GradientForm | None:
    """The form that a text names, None if gradients are whole; a `BiremeError` where there is none such."""
    word = text.strip()
    if word == "whole":
        return None
    found = _PRINCIPAL.fullmatch(word)
    if found is None:
        raise BiremeError(f"Gradients cannot be kept as {text!r}. Use {_GRADIENT_WORDS}.")
    rank, piece = int(found[1]), int(found[2] or 0)
    if not 1 <= rank <= _MOST:
        raise BiremeError(
            f"{text!r} is impossible: the rank {rank} must be 1 to {_MOST}. Use {_GRADIENT_WORDS}."
        )
    if found[2] is not None and not 1 <= piece <= _MOST:
        raise BiremeError(
            f"{text!r} is impossible: {piece} pairs, where 1 to {_MOST} can be. Use {_GRADIENT_WORDS}."
        )
    return GradientForm(rank, piece, patterns)


_LEAST_BITS_ALONE = 4
"""With fewer bits, what rounding loses is kept and added to the next gradient."""

SUM_DENSITY_SLACK = 4
"""How many times more entries than asked for an old threshold may send before it is renewed."""

_INDEX_BYTES, _MASK_BYTES = 2, 1 / 8
"""What the place of an entry takes: by itself, or as one bit for each entry of the tensor."""

ENTRY_BYTES = 4
"""Of a gradient in float32."""

_KEPT_COPIES = 2
"""Residuals: as of the last batch that counted, and as the batch under way leaves them."""

WHOLE_STEPS = 10
"""Steps before low rank begins, so that optimizers which divide by the size of gradients know it first."""

_SUM_CODEC_WORDS = "none, int8 to int1, threshold:SHARE:STEPS:FIRST or lowrank:RANK:FIRST"

BITS = re.compile(r"int([1-8])|([1-8])bit")


class SumKind(StrEnum):
    """How gradients travel."""

    DENSE = "none"
    BITS = "bits"
    THRESHOLD = "threshold"
    LOWRANK = "lowrank"


@dataclass(frozen=True, slots=True)
class SumCodec:
    """Entries of few `bits`; the largest `share` of them, whose threshold lives `life` steps; or a matrix of
    `rank`, after so many `whole_steps`.
    """

    kind: SumKind
    bits: int = 0
    share: float = 0.0
    life: int = 0
    rank: int = 0
    whole_steps: int = 0

    def __str__(self) -> str:
        """As a run file has it."""
        match self.kind:
            case SumKind.BITS:
                return f"int{self.bits}"
            case SumKind.THRESHOLD:
                more = f":{self.whole_steps}" if self.whole_steps else ""
                return f"threshold:{self.share:g}:{self.life}{more}"
            case SumKind.LOWRANK:
                more = "" if self.whole_steps == WHOLE_STEPS else f":{self.whole_steps}"
                return f"lowrank:{self.rank}{more}"
        return "none"

    @property
    def has_feedback(self) -> bool:
        """Whether what is not sent is kept and added to the next gradient."""
        few = self.kind is SumKind.BITS and self.bits < _LEAST_BITS_ALONE
        return few or self.kind in (SumKind.THRESHOLD, SumKind.LOWRANK)

    @property
    def of_sums(self) -> "SumCodec":
        """What sums of parts go through: four bits at least, for fewer cost much loss there."""
        few = self.kind is SumKind.BITS and self.bits < _LEAST_BITS_ALONE
        return SumCodec(SumKind.BITS, bits=_LEAST_BITS_ALONE) if few else self

    def is_cut(self, num_members: int) -> bool:
        """Whether each of `num_members` sends parts of its message and a sum of parts, because whole messages
        to all others would be longer.
        """
        if self.kind is not SumKind.BITS:
            return False
        own, of_sum = (blocks_bytes(FEWEST_ENTRIES, one.bits) for one in (self, self.of_sums))
        return own + of_sum < num_members * own

    def codes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape goes through the codec, and not as it is."""
        num_entries = math.prod(shape)
        if self.kind is SumKind.DENSE or num_entries < FEWEST_ENTRIES:
            return False
        if self.kind is SumKind.LOWRANK:
            rows, columns = _matrix_shape(shape)
            return len(shape) > 1 and 2 * self.rank * (rows + columns) < num_entries
        return True

    def message_bytes(self, shape: Sequence[int]) -> float:
        """About how many bytes a replica's message or factors take, for a float32 gradient of this shape."""
        num_entries = math.prod(shape)
        if not self.codes(shape):
            return num_entries * ENTRY_BYTES
        if self.kind is SumKind.LOWRANK:
            return self.rank * sum(_matrix_shape(shape)) * ENTRY_BYTES
        if self.kind is SumKind.BITS:
            return blocks_bytes(num_entries, self.bits)
        sent = max(1.0, self.share * num_entries)
        return sent * ENTRY_BYTES + min(sent * _INDEX_BYTES, num_entries * _MASK_BYTES)


DENSE = SumCodec(SumKind.DENSE)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Gradients of a unit that replicas gather and do not sum, as principal components: the bytes of each
    replica's message, and of what one replica finds from all messages and gives to the others.
    """

    message_bytes: int
    found_bytes: int

    def sent_bytes(self, width: int) -> float:
        """What each of so many replicas sends, in the mean over them."""
        return (width - 1) * (self.message_bytes + self.found_bytes / width)


@dataclass(frozen=True, slots=True)
class SumCost:
    """What a codec makes of a model's sums: bytes for each byte of its gradients, in the mean over them.

    `message_share` is a replica's message or factors, `sum_share` the message of a sum, `kept_share` what is
    kept from batch to batch. `gathered` has the gradients of each unit that are not summed, whose bytes are
    those that are found; empty where there are none. `gradient_bytes` is the mean size of a gradient.
    """

    codec: SumCodec = DENSE
    message_share: float = 1.0
    kept_share: float = 0.0
    gathered: tuple[Gathered, ...] = ()
    sum_share: float = 1.0
    gradient_bytes: float = math.inf

    @property
    def is_dense(self) -> bool:
        """Whether all that is summed or averaged is sent as it is."""
        return self.codec == DENSE and not self.gathered

    def hop_share(self, width: int) -> float:
        """What each of so many replicas sends for each byte of gradients, if all get the sum: around a ring,
        in parts and sums of parts, or to all others.
        """
        if self.codec.kind in (SumKind.DENSE, SumKind.LOWRANK):
            return 2 * (width - 1) / width * self.message_share
        if self.codec.is_cut(width):
            return (width - 1) / width * (self.message_share + self.sum_share)
        return (width - 1) * self.message_share

    def part_share(self, width: int) -> float:
        """What each of so many replicas sends, for each byte of gradients, if each gets its own part of the
        sum: of factors of low rank, which all get, no more than this.
        """
        times = 2 if self.codec.kind is SumKind.LOWRANK else 1
        return times * (width - 1) / width * self.message_share

    def hop_bytes(self, gradient_bytes: float, units: slice, width: int) -> float:
        """What each of so many replicas sends on of the gradients of some units, which are so many bytes."""
        apart = self.gathered[units]
        summed = gradient_bytes - sum(one.found_bytes for one in apart)
        return self.hop_share(width) * summed + sum(one.sent_bytes(width) for one in apart)


DENSE_SUMS = SumCost()


@dataclass(frozen=True, slots=True)
class SiteRounds:
    """What sites of replicas send each other, in addition to the sums within each of them. A site may be a
    single replica.

    Without `averages` it is the gradients of every batch, which the update waits for. With `averages` it is
    weights, and `state_share` bytes of what optimizers remember for each byte of gradients: of one fragment
    after another, each of `fragments` once in `every` batches, while a replica trains `lag` batches more. If
    `in_parts`, each replica of a site sends its own part. On the host a rank keeps `kept_share` bytes for
    each byte of the gradients or weights that it sends. Groups connect all replicas within `connect_every`
    batches of each; 0 if the averages are DiLoCo's.
    """

    averages: bool = False
    every: int = 1
    fragments: int = 1
    lag: int = 0
    state_share: float = 0.0
    in_parts: bool = False
    kept_share: float = 2.0
    """By default the sum that is made and the one before, which others may lack."""
    connect_every: int = 0

    @property
    def agreement(self) -> tuple[str, int]:
        """The mode in the words of a run file, and in how many batches all replicas agree."""
        if not self.averages:
            return "quorum", 1
        return ("groups", self.connect_every) if self.connect_every else ("diloco", self.every)


def sum_cost(codec: SumCodec, shapes: Iterable[Sequence[int]]) -> SumCost:
    """The cost of sums of gradients in these shapes."""
    sizes = list(shapes)
    total = sum(math.prod(shape) for shape in sizes)
    if codec == DENSE or not total:
        return DENSE_SUMS
    coded = sum(math.prod(shape) for shape in sizes if codec.codes(shape))
    message, of_sums = (
        sum(one.message_bytes(shape) for shape in sizes) / (ENTRY_BYTES * total)
        for one in (codec, codec.of_sums)
    )
    kept = _KEPT_COPIES * coded / total if codec.has_feedback else 0.0
    mean_bytes = ENTRY_BYTES * total / len(sizes)
    return SumCost(codec, message, kept, sum_share=of_sums, gradient_bytes=mean_bytes)


def parse_sum_codec(text: str) -> SumCodec:
    """The codec that a text names; a `BiremeError` where there is none such."""
    word, *numbers = text.strip().split(":")
    if (found := BITS.fullmatch(word)) and not numbers:
        return SumCodec(SumKind.BITS, bits=int(found[1] or found[2]))
    if word == "none" and not numbers:
        return DENSE
    if word == "threshold" and len(numbers) <= 3:
        share, life, steps = (*numbers, *("0.01", "50", "0")[len(numbers) :])
        part = _number(text, share, "a share of the entries, above 0 and up to 1")
        if not 0 < part <= 1:
            raise _impossible(text, f"the share {part:g} must be above 0 and up to 1")
        lives, first = _whole(text, life, 1, _MOST_STEPS), _whole(text, steps, 0, _MOST_STEPS)
        return SumCodec(SumKind.THRESHOLD, share=part, life=lives, whole_steps=first)
    if word == "lowrank" and len(numbers) <= 2:
        rank, steps = (*numbers, *("4", str(WHOLE_STEPS))[len(numbers) :])
        first = _whole(text, steps, 0, _MOST_STEPS)
        return SumCodec(SumKind.LOWRANK, rank=_whole(text, rank, 1, _MOST), whole_steps=first)
    advice = closest(word, ["none", "int8", "int4", "int2", "threshold", "lowrank"])
    raise BiremeError(f"There is no codec {text!r} for sums of gradients. {advice} Use {_SUM_CODEC_WORDS}.")


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A gradient as a matrix: its first axis, and all others together."""
    return shape[0], math.prod(shape[1:])


def _whole(text: str, part: str, least: int, most: int) -> int:
    wanted = f"a whole number from {least} to {most}"
    number = _number(text, part, wanted)
    if number != int(number) or not least <= number <= most:
        raise _impossible(text, f"{number:g} must be {wanted}")
    return int(number)


def _number(text: str, part: str, wanted: str) -> float:
    if not re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", part):
        raise _impossible(text, f"{part!r} must be {wanted}")
    try:
        return float(part)
    except ValueError:
        raise _impossible(text, f"{part!r} must be {wanted}") from None


def _impossible(text: str, why: str) -> BiremeError:
    return BiremeError(f"The codec {text!r} is impossible: {why}. Use {_SUM_CODEC_WORDS}.")
