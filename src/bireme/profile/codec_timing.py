"""How long codecs take on a device of this machine.

Measured once for each codec, type of values, device and number of threads, and kept with the other figures of
the machine. A codec takes about as long for every value, so one size of tensor serves all.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from bireme.codec.above import TopKAbove
from bireme.codec.choice import codec_of
from bireme.codec.codec import Codec, Masking
from bireme.codec.description import CodecRate, parse_codec, sum_name
from bireme.codec.sum_description import DENSE, SumCodec
from bireme.compiled import IS_COMPILED
from bireme.profile.control import cache_path, cached_figures, device_here, keep, versions_here
from bireme.profile.profile import Profile
from bireme.profile.timing import Clock
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients, SentBytes
from bireme.sync.group import Pending, SingleRankGroup, Waiting
from bireme.sync.slices import SLICE_BYTES

SHAPE = (1024, 1024)
_ROUNDS = 5
_FIRST_ROUNDS = 10
"""While what was not sent grows fast, thresholds are renewed again and again."""

_NUM_GRADIENTS, _NUM_MEMBERS = 4, (2, 4)
"""Of sums through a codec. What is the same for all gradients of a batch counts little in one of many."""

_TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def with_codec_rates(
    profile: Profile,
    words: Iterable[str],
    value_bytes: int,
    device: torch.device,
    *,
    sums: Iterable[SumCodec] = (),
    use_cache: bool = True,
) -> Profile:
    """A profile that was measured on a device of this machine, with the seconds of these codecs of
    boundaries, and of those of sums over replicas.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(profile.num_threads or before)  # it has none on accelerators
    try:
        dtype = _TYPES[value_bytes]
        rates = [_rate(word, dtype, device, use_cache=use_cache) for word in words]
        rates += [_sum_rate(one, device, use_cache=use_cache) for one in sums if one != DENSE]
        return replace(profile, codecs=tuple(rates))
    finally:
        torch.set_num_threads(before)


def _rate(word: str, dtype: torch.dtype, device: torch.device, *, use_cache: bool) -> CodecRate:
    """Of a codec of boundaries. One's own may change under its name, and is measured again."""
    choice = parse_codec(word)
    measure = partial(_measured, word, codec_of(choice), dtype, device)
    return measure() if choice.where is not None else _kept(measure, word, dtype, device, use_cache=use_cache)


def _sum_rate(codec: SumCodec, device: torch.device, *, use_cache: bool) -> CodecRate:
    """Of a codec of sums."""
    word = sum_name(codec)
    measure = partial(_measured_sum, word, codec, device)
    return _kept(measure, word, torch.float32, device, use_cache=use_cache)


def _kept(
    measure: Callable[[], CodecRate], word: str, dtype: torch.dtype, device: torch.device, *, use_cache: bool
) -> CodecRate:
    """As it was measured before, else as it is now."""
    own = (device_here(device), versions_here(), torch.get_num_threads(), dtype, word, IS_COMPILED)
    path = cache_path(own, "codecs")
    known = cached_figures(path, CodecRate) if use_cache else None
    if known is None:
        known = measure()
        keep(path, asdict(known))
    return known


def _measured(word: str, codec: Codec, dtype: torch.dtype, device: torch.device) -> CodecRate:
    tensor = _tensor(device, dtype)
    encode: Callable[[Tensor, Tensor], int] = codec.encode
    if isinstance(codec, TopKAbove):  # a threshold that lives is there already
        encode = partial(codec.encode, threshold=codec.threshold_of(tensor))
    there, message = _seconds(encode, codec, tensor)
    back = there
    if isinstance(codec, Masking):
        masked = codec.back(codec.mask_of(message, SHAPE).clone())
        back, _ = _seconds(masked.encode, masked, tensor)
    return CodecRate(word, *there, *back)


def _measured_sum(word: str, codec: SumCodec, device: torch.device) -> CodecRate:
    """All that a replica does for a sum but wait. If every message goes to every member, each further member
    adds the seconds in which its message is decoded.
    """
    few, many = (_seconds_of_sum(codec, size, device) for size in _NUM_MEMBERS)
    decode_s = max((many - few) / (_NUM_MEMBERS[1] - _NUM_MEMBERS[0]), 0.0)
    encode_s = max(few - _NUM_MEMBERS[0] * decode_s, 0.0)
    return CodecRate(word, encode_s, decode_s, encode_s, decode_s)


def _seconds_of_sum(codec: SumCodec, size: int, device: torch.device) -> float:
    """A value's, in a group of so many."""
    given = _tensor(device, torch.float32)
    kept = given.clone()
    views = {str(number): part for number, part in enumerate(kept.chunk(_NUM_GRADIENTS))}
    gradients = BatchGradients(views, set(views))
    sums, group = GradientSummation(replace(codec, whole_steps=0)), _Alike(size)

    def once() -> None:
        sums.sum(group, [*views], gradients, SLICE_BYTES, SentBytes(), batch=0)
        sums.settle(counts=True)

    def renew() -> None:
        kept.copy_(given)

    for _ in range(_FIRST_ROUNDS if codec.has_feedback else 0):
        renew()
        once()
    return _median_s(once, device, before=renew) / given.numel()


class _Alike(SingleRankGroup):
    """A group whose members all have what this one has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Pending:
        """As often as there are members."""
        tensor *= self.size
        return super().all_reduce(tensor)

    def exchange(
        self, given: Tensor, _lengths: Sequence[int], taken: Tensor, _taken_lengths: Sequence[int]
    ) -> Waiting:
        """Take from each other member what this one gives it."""
        times = -(-len(taken) // max(len(given), 1))
        taken.copy_(given.repeat(times)[: len(taken)])
        return Waiting()


def _tensor(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _seconds(
    encode: Callable[[Tensor, Tensor], int], codec: Codec, tensor: Tensor
) -> tuple[tuple[float, float], Tensor]:
    """To encode and to decode a value; and a message."""
    room = torch.empty(codec.most_bytes(SHAPE, tensor.dtype), dtype=torch.uint8, device=tensor.device)
    message = room[: encode(tensor, room)]
    encode_s = _median_s(lambda: encode(tensor, room), tensor.device)
    decode_s = _median_s(lambda: codec.decode(message, SHAPE, tensor.dtype), tensor.device)
    return (encode_s / tensor.numel(), decode_s / tensor.numel()), message


def _median_s(
    work: Callable[[], object], device: torch.device, *, before: Callable[[], object] = lambda: None
) -> float:
    """The seconds of some work, of some rounds; what comes `before` each does not count."""
    clock, laps = Clock(device), []
    for _ in range(1 + _ROUNDS):
        before()
        clock.lap()
        work()
        laps.append(clock.lap())
    return statistics.median(laps[1:])  # in the first, what is compiled is compiled
