"""How long codecs take on a device of this machine.

Measured once for each codec, type of values, device and number of threads, and kept with the other figures of
the machine. A codec takes about as long for every value, so one size of tensor serves all.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bireme.codec.above import KeepAbove
from bireme.codec.codec import Codec, Masking
from bireme.codec.description import parse_codec
from bireme.codec.of_choice import codec_of
from bireme.codec.rate import CodecRate
from bireme.compiled import IS_COMPILED
from bireme.profile.cache import cache_path, cached_figures, keep_figures
from bireme.profile.here import device_here, versions_here
from bireme.profile.profile import Profile
from bireme.profile.timing import Clock

__all__ = ["with_codec_rates"]

SHAPE = (1024, 1024)
ROUNDS = 5
TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def with_codec_rates(
    profile: Profile, words: Iterable[str], value_bytes: int, device: torch.device, *, use_cache: bool = True
) -> Profile:
    """A profile that was measured on a device of this machine, with the seconds of these codecs."""
    before = torch.get_num_threads()
    torch.set_num_threads(profile.num_threads)
    try:
        dtype = TYPES[value_bytes]
        rates = tuple(_rate(word, dtype, device, use_cache=use_cache) for word in words)
        return replace(profile, codecs=rates)
    finally:
        torch.set_num_threads(before)


def _rate(word: str, dtype: torch.dtype, device: torch.device, *, use_cache: bool) -> CodecRate:
    """As it was measured before, else as it is now."""
    choice = parse_codec(word)
    own = (device_here(device), versions_here(), torch.get_num_threads(), dtype, word, IS_COMPILED)
    path = cache_path(own, "codecs")
    # One's own codec may change under its name.
    known = cached_figures(path, CodecRate) if use_cache and choice.where is None else None
    if known is not None:
        return known
    found = _measured(word, codec_of(choice), dtype, device)
    if choice.where is None:
        keep_figures(found, path)
    return found


def _measured(word: str, codec: Codec, dtype: torch.dtype, device: torch.device) -> CodecRate:
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    there, message = _seconds(codec, tensor)
    back = there
    if isinstance(codec, Masking):
        back, _ = _seconds(codec.back(codec.mask_of(message, SHAPE).clone()), tensor)
    return CodecRate(word, *there, *back)


def _seconds(codec: Codec, tensor: Tensor) -> tuple[tuple[float, float], Tensor]:
    """To encode and to decode a value; and a message. A threshold that lives is there already."""
    room = torch.empty(codec.most_bytes(SHAPE, tensor.dtype), dtype=torch.uint8, device=tensor.device)
    encode: Callable[[Tensor, Tensor], int] = codec.encode
    if isinstance(codec, KeepAbove):
        encode = partial(codec.encode, threshold=codec.threshold_of(tensor))
    message = room[: encode(tensor, room)]
    clock = Clock(tensor.device)

    def seconds_of(work: Callable[[], object]) -> float:
        work()  # what is compiled is compiled now
        clock.lap()
        laps = []
        for _ in range(ROUNDS):
            work()
            laps.append(clock.lap())
        return statistics.median(laps) / tensor.numel()

    encode_s = seconds_of(lambda: encode(tensor, room))
    decode_s = seconds_of(lambda: codec.decode(message, SHAPE, tensor.dtype))
    return (encode_s, decode_s), message
