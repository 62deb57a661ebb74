"""Whether data are the data that a run was trained on: a digest of what its samples hold.

It tells nothing of where the data lie or what their files are called, so data that were moved or copied are
the same. Tokens are digested whole up to 64 million, and in blocks spread over them beyond. Of a stream its
first sample is, of other samples some: the first, the last and others between them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch

from bireme.train.data.mixture import MixedSamples
from bireme.train.data.samples import PackedSamples, SampleRange, Samples
from bireme.train.data.stream import StreamSamples

__all__ = ["is_repeatable", "samples_digest"]

NUM_READ, NUM_MADE = 1024, 8
"""How many samples are looked at: of those that only have to be read, and of those that take work."""


def samples_digest(samples: Samples) -> str:
    """SHA-256, in hexadecimal digits, of how many samples there are and of what they hold."""
    match samples:
        case PackedSamples():
            place = f"{samples.length} {samples.begin} {samples.end}"
            return sha256(f"{place} {samples.tokens.digest()}".encode()).hexdigest()
        case SampleRange():
            part = f"{samples.begin} {samples.end} {samples_digest(samples.samples)}"
            return sha256(part.encode()).hexdigest()
        case MixedSamples():
            parts = [f"{one.weight} {samples_digest(one.samples)}" for one in samples.sources]
            return sha256("\n".join(parts).encode()).hexdigest()
        case StreamSamples():
            first = samples.take([0])["input_ids"].numpy().tobytes()
            return sha256(f"{samples.order}".encode() + first).hexdigest()
    words = sha256(str(len(samples)).encode())
    most = NUM_READ if samples.is_quick or samples.is_columnar else NUM_MADE
    with _draws_put_back():
        for number in _spread(len(samples), most):
            # A draw begins with the sample's seed, as it does in training.
            for name, tensor in sorted(samples.take([number], seeds=[number]).items()):
                words.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                words.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return words.hexdigest()


def is_repeatable(samples: Samples, digest: str) -> bool:
    """Whether samples that have just had this digest have it again: some draw their own numbers each time."""
    return samples_digest(samples) == digest


def _spread(count: int, most: int) -> Iterator[int]:
    """At most so many numbers below `count`, the first and the last among them."""
    if count <= most:
        yield from range(count)
        return
    yield from (place * (count - 1) // (most - 1) for place in range(most))


@contextmanager
def _draws_put_back() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
