"""The task of the study: the next byte of Python's own standard library, by a small GPT.

The text is on every machine that can run the study; another version of Python has another text, so losses
of two versions must not be compared. Batches and the evaluation are the same for every rule.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bireme.model.gpt import GPTConfig

__all__ = ["SIZES", "Size", "Text", "text"]

CONTEXT = 48
NUM_CURVE, NUM_FINAL = 96, 512
"""Windows of the held-out text that are looked at along the way, and at the end."""
HELD_OUT_EVERY = 12
"""Of so many files one is kept for the evaluation."""
BYTES = 128
"""Those that are not of ASCII, hardly one in ten thousand, count as the last."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its batch."""

    name: str
    config: GPTConfig
    num_samples: int


def _size(name: str, layers: int, width: int, heads: int, num_samples: int) -> Size:
    config = GPTConfig(layers, width, heads, vocab=BYTES, context=CONTEXT, tied=False)
    return Size(name, config, num_samples)


SIZES = {size.name: size for size in (_size("small", 4, 64, 2, 16), _size("larger", 6, 128, 4, 16))}


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes to learn from and those held out, and a name for exactly these."""

    learned: Tensor
    held_out: Tensor
    digest: str

    def batch(self, size: Size, seed: int, number: int) -> Tensor:
        """The windows of a batch, the same for all rules; (samples, context)."""
        return _windows(self.learned, size.num_samples, 1_000_003 * (seed + 1) + number)

    def along_the_way(self) -> Tensor:
        """The windows for the curve of a run."""
        return _windows(self.held_out, NUM_CURVE, 1)

    def at_the_end(self) -> Tensor:
        """The windows for the loss of a run."""
        return _windows(self.held_out, NUM_FINAL, 2)


@cache
def text() -> Text:
    """The sources of this Python's standard library, its packages' too, but not their tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in (*root.glob("*.py"), *root.glob("*/*.py"))
        if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts)
    )
    sources = [path.read_bytes() for path in paths]
    held_out = b"".join(sources[::HELD_OUT_EVERY])
    learned = b"".join(source for place, source in enumerate(sources) if place % HELD_OUT_EVERY)
    digest = hashlib.sha256(learned + held_out).hexdigest()[:12]
    return Text(_tensor(learned), _tensor(held_out), digest)


def _tensor(source: bytes) -> Tensor:
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).clamp(max=BYTES - 1)


def _windows(source: Tensor, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - CONTEXT, (count, 1), generator=draw)
    return source[starts + torch.arange(CONTEXT)].long()
