"""Which codec, in words and plain numbers: what people write, plans carry and sizes follow from. No torch.

    none            as it is
    bfloat16        two bytes a value
    int8            8 bits a value and a scale for each 32 values
    int7 … int1     fewer bits, after a Hadamard rotation of each 32 values
    topk:0.25       the largest quarter of each row, and which these are: one bit an entry, or less
    topk:0.25:8     the same, in 8 bits a value and a scale a row
    topk:0.25:8:50  the largest quarter of the whole tensor, by a threshold that lives 50 batches
    my_codecs:mine  one's own: what that module holds under that name

A row is the last axis of a tensor: the numbers of one token.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

from bireme.errors import BiremeError, closest

# How long a codec takes for a value.


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Seconds for a value of a tensor. `back` is for gradients: `topk` takes the entries that it knows."""

    codec: str
    encode_s: float
    decode_s: float
    back_encode_s: float
    back_decode_s: float


def sum_name(codec: object) -> str:
    """What a codec of sums over replicas is called among others: a boundary may have one of the same name."""
    return f"{codec} in sums"


BLOCK = 32
"""Values that share a scale."""

FEWEST_ENTRIES = 256
"""Smaller tensors are sent as they are."""

_KEPT_BITS = (4, 8)
"""Bits that the values of `topk` may have; else they stay in the type of the tensor."""

LEAST_GAIN = 0.5
"""Places are sent in another way than as a mask if they take at most this share of it."""

MOST_LOW_BITS = 24

_FEWEST_OF_ROW = 8
"""Rows of which fewer entries are kept share a scale with the next ones."""

DENSITY_SLACK = 2
"""How many times more or fewer entries than asked for an old threshold may send over a boundary."""

ALIGNMENT_BYTES = 8
"""The parts of an encoded tensor begin at multiples of this, so that they can be viewed in any type."""

_MOST_LIFE = 10**9

_NAMES = ("none", "bfloat16", "int8", "int4", "topk:0.25:8")
"""Examples of each codec, for errors."""

INTEGERS = re.compile(r"int(\d+)")
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec and its numbers. `str()` gives the words that `parse_codec` reads."""

    name: str = "none"
    """none, bfloat16, int, topk or own."""
    bits: int | None = None
    """Bits a value, of int and topk; topk without has the values in the tensor's own type."""
    share: float | None = None
    """The share of the entries that topk keeps."""
    life: int | None = None
    """How many batches a threshold of topk over the whole tensor lives; by rows there is none."""
    where: str | None = None
    """The module of one's own codec, and its name there, with a colon between."""

    def __str__(self) -> str:
        if self.where is not None:
            return self.where
        if self.name == "int":
            return f"int{self.bits}"
        if self.name == "topk":
            numbers = [f"{self.share:g}", *(str(one) for one in (self.bits, self.life) if one is not None)]
            return ":".join(["topk", *numbers])
        return self.name

    @property
    def is_bounded(self) -> bool:
        """Whether only the most bytes of a message follow from the tensor's shape, not exactly how many."""
        return self.life is not None or self.where is not None

    @property
    def is_rotated(self) -> bool:
        """Whether values are rotated before they are rounded."""
        return self.name == "int" and self.bits is not None and self.bits < 8


NONE = CodecChoice()


def parse_codec(word: str) -> CodecChoice:
    """The codec that a word names; an error says which words there are."""
    name, *numbers = word.strip().lower().split(":")
    if name in ("none", "bfloat16", "bf16"):
        _take_no_numbers(word, numbers)
        return NONE if name == "none" else CodecChoice("bfloat16")
    found = INTEGERS.fullmatch(name)
    if found is not None:
        _take_no_numbers(word, numbers)
        bits = int(found[1])
        if not 1 <= bits <= 8:
            raise BiremeError(f"{word!r} is no codec: values have 1 to 8 bits. Write int8 or int4.")
        return CodecChoice("int", bits)
    if name == "topk":
        return _topk(word, numbers)
    if name == "projection":
        raise BiremeError(
            f"{word!r} is no codec: a projection learns, so it is a part of the model. Put a "
            "bireme.model.projection.Projection between two layers, and a codec on top of it if you like."
        )
    if _OWN.fullmatch(word.strip()):
        return CodecChoice("own", where=word.strip())
    near = closest(name, [one.partition(":")[0] for one in _NAMES])
    raise BiremeError(
        f"{word!r} is not a codec. {near} Examples: {', '.join(_NAMES)}; or "
        "module:attribute for a codec of your own."
    )


def _topk(word: str, numbers: list[str]) -> CodecChoice:
    how = "Write topk:SHARE, topk:SHARE:BITS or topk:SHARE:BITS:BATCHES, such as topk:0.25:8"
    if not 1 <= len(numbers) <= 3:
        raise BiremeError(f"{word!r} is no codec: topk needs the share of the entries to keep. {how}.")
    try:
        share = float(numbers[0])
        bits, life = (int(one) for one in (*numbers[1:], "-1", "-1")[:2])
    except ValueError:
        raise BiremeError(f"{word!r} is no codec: {':'.join(numbers)} are no numbers. {how}.") from None
    if not 0 < share <= 1:
        raise BiremeError(f"{word!r} keeps a share of {share:g}; it must be above 0 and at most 1. {how}.")
    if len(numbers) > 1 and bits not in _KEPT_BITS:
        known = " or ".join(map(str, _KEPT_BITS))
        raise BiremeError(f"{word!r} has values of {bits} bits; they may have {known}. {how}.")
    if len(numbers) > 2 and not 1 <= life <= _MOST_LIFE:
        raise BiremeError(
            f"The threshold of {word!r} holds for {life} batches; it must hold for 1 to {_MOST_LIFE}. {how}."
        )
    return CodecChoice("topk", bits if len(numbers) > 1 else None, share, life if len(numbers) > 2 else None)


def _take_no_numbers(word: str, numbers: list[str]) -> None:
    if numbers:
        raise BiremeError(f"{word!r} is no codec: {word.partition(':')[0]} takes no numbers after a colon.")


def bits_a_value(choice: CodecChoice, value_bytes: int, *, is_back: bool = False) -> float:
    """Bits that are sent for each value of a tensor, scales and mask counted, where its rows are long.

    What one's own codec sends is not known here, and counts as the tensor itself.
    """
    raw, scale = 8.0 * value_bytes, 16 / BLOCK
    match choice.name:
        case "bfloat16":
            return 16.0
        case "int":
            assert choice.bits is not None
            return choice.bits + scale
        case "topk":
            assert choice.share is not None
            values = choice.share * (raw if choice.bits is None else choice.bits)
            if choice.life is not None:
                values += choice.share * scale
            sparse = min(choice.share * (low + 1) + 0.5**low for low in range(MOST_LOW_BITS))
            places = sparse if choice.life is None and sparse <= LEAST_GAIN else 1.0
            return values if is_back else values + places
        case _:
            return raw


def encoded_bytes(
    choice: CodecChoice, shape: tuple[int, ...], value_bytes: int, *, is_back: bool = False
) -> int:
    """The bytes of an encoded tensor whose values have so many bytes; the most of them by a codec whose
    messages are bounded. They follow from its shape alone, except by one's own codec, which is asked itself.

    `is_back` asks for the gradient, which `topk` sends without the mask.
    """
    assert choice.where is None, "one's own codec says how much it sends"
    count = prod(shape)
    match choice.name:
        case "bfloat16":
            return 2 * count
        case "int":
            assert choice.bits is not None
            return blocks_bytes(count, choice.bits)
        case "topk":
            assert choice.share is not None
            if choice.life is not None:
                assert choice.bits is not None
                values = blocks_bytes(most_above(count, choice.share), choice.bits)
                return values if is_back else mask_bytes(count) + values
            width = shape[-1] if shape else 1
            values = kept_bytes(count, width, choice.share, choice.bits, value_bytes)
            return values if is_back else place_bytes(count, num_kept(count, width, choice.share)) + values
        case _:
            return count * value_bytes


def blocks_bytes(count: int, bits: int, block: int = BLOCK) -> int:
    """Bytes of so many values, rounded to so many bits in blocks that share a scale of two bytes."""
    num_blocks = -(-count // block)
    return aligned(2 * num_blocks) + bits * -(-num_blocks * block // 8)


def kept_of_row(width: int, share: float) -> int:
    """How many entries of a row are kept: at least one."""
    return max(1, round(share * width))


def num_kept(count: int, width: int, share: float) -> int:
    """How many of so many entries in rows of that width are kept."""
    return count // width * kept_of_row(width, share) if width else 0


def kept_block(kept: int) -> int:
    """How many values share a scale where so many of a row are kept: a row's, or those of some rows."""
    return kept if kept >= _FEWEST_OF_ROW else kept * (BLOCK // kept)


def kept_bytes(count: int, width: int, share: float, bits: int | None, value_bytes: int) -> int:
    """Bytes of the values that `topk` sends of so many entries in rows of that width."""
    sent = num_kept(count, width, share)
    if bits is None:
        return sent * value_bytes
    return blocks_bytes(sent, bits, kept_block(kept_of_row(width, share)))


def most_above(count: int, share: float) -> int:
    """The most of so many entries that a threshold over all of them lets through.

    A few more than the slack: the gradient of a whole is that of two halves, each rounded by itself.
    """
    return min(DENSITY_SLACK * (max(1, round(share * count)) + 2), count)


def mask_bytes(count: int) -> int:
    """Bytes of one bit an entry."""
    return aligned(-(-count // 8))


def place_bytes(count: int, num_sent: int) -> int:
    """Bytes that say which of so many entries are sent, where that number is known: a mask, or less."""
    low = low_bits(count, num_sent)
    return mask_bytes(count) if low is None else _sparse_bytes(count, num_sent, low)


@lru_cache(maxsize=256)
def low_bits(count: int, num_sent: int) -> int | None:
    """How many bits of each place are sent as they are; None where there is a mask instead.

    To find and to spread places takes longer than to copy a mask, so it has to gain enough.
    """
    best = min(range(MOST_LOW_BITS), key=lambda low: _sparse_bytes(count, num_sent, low))
    return best if _sparse_bytes(count, num_sent, best) <= LEAST_GAIN * mask_bytes(count) else None


def _sparse_bytes(count: int, num_sent: int, low: int) -> int:
    return aligned(low * -(-num_sent // 8) + -(-(num_sent + (count >> low) + 1) // 8))


def aligned(num_bytes: int, to: int = ALIGNMENT_BYTES) -> int:
    """The next place where a part may begin."""
    return -(-num_bytes // to) * to


# Which codecs the boundaries of a pipeline have, direction by direction and over a run. No torch.
#
# A codec depends on the number of the batch alone, so that both ends of a boundary, and a run that is
# resumed, agree on it without a word.


@dataclass(frozen=True, slots=True)
class BoundaryCodecs:
    """The codecs of one boundary: of what crosses it forward, and of the gradients that come back."""

    forward: str = "none"
    backward: str = "none"

    def __post_init__(self) -> None:
        there, back = parse_codec(self.forward), parse_codec(self.backward)
        if (there.share, there.life) != (back.share, back.life):
            raise BiremeError(
                f"A boundary has the codec {self.forward} forward and {self.backward} backward. The gradient "
                "of what topk sends goes back for the same entries: give both directions topk with the same "
                "share and the same batches, or none of the two."
            )

    def choice(self, *, forward: bool) -> CodecChoice:
        """The codec of one direction."""
        word = self.forward if forward else self.backward
        return NONE if word == "none" else parse_codec(word)

    @property
    def is_none(self) -> bool:
        """Whether everything is sent as it is."""
        return self.choice(forward=True) == self.choice(forward=False) == NONE


AS_IT_IS = BoundaryCodecs()


@dataclass(frozen=True, slots=True)
class CodecPhase:
    """The codecs from batch `first_batch` on: `boundaries[s]` has those between stage s and s+1."""

    first_batch: int
    boundaries: tuple[BoundaryCodecs, ...]


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """The codecs of all boundaries over a run. Without phases, and beyond the boundaries named, there are
    none.
    """

    phases: tuple[CodecPhase, ...] = ()

    def __post_init__(self) -> None:
        begins = [phase.first_batch for phase in self.phases]
        assert begins == sorted(set(begins)), "phases come in the order of their batches"
        assert not begins or begins[0] == 0, "the first phase begins with the run"

    @staticmethod
    def steady(boundaries: tuple[BoundaryCodecs, ...]) -> "LinkCodecs":
        """The same codecs all the time."""
        return (
            LinkCodecs((CodecPhase(0, boundaries),))
            if any(not one.is_none for one in boundaries)
            else NO_CODECS
        )

    def of(self, boundary: int, batch: int) -> BoundaryCodecs:
        """The codecs of a boundary for a batch."""
        if not self.phases:
            return AS_IT_IS
        boundaries = self._phase(batch).boundaries
        return boundaries[boundary] if boundary < len(boundaries) else AS_IT_IS

    def held(self, batch: int) -> "LinkCodecs":
        """The codecs of that batch, all the time."""
        return LinkCodecs.steady(self._phase(batch).boundaries) if self.phases else self

    def between(self, rank_of_stage: Sequence[int]) -> "LinkCodecs":
        """Without those of boundaries between two stages of a rank, where nothing is sent."""
        far = [one != other for one, other in pairwise(rank_of_stage)]
        phases = (
            replace(phase, boundaries=tuple(map(_where, phase.boundaries, far))) for phase in self.phases
        )
        return LinkCodecs(tuple(phases))

    def _phase(self, batch: int) -> CodecPhase:
        return self.phases[bisect_right([phase.first_batch for phase in self.phases], batch) - 1]


NO_CODECS = LinkCodecs()


def _where(codecs: BoundaryCodecs, is_far: bool) -> BoundaryCodecs:
    return codecs if is_far else AS_IT_IS
