"""How fast codecs encode and decode on one core, and how many bits they send.

    python benchmarks/codec_speed.py [--quick] [--json]

A tensor of activations of a GPT's size, with the deviations from token to token that activations have, is
encoded and decoded over and over by one thread, codec after codec in turns, in float32 and in bfloat16.
Speeds are bytes of the tensor, as it is given, over seconds of the processor. Where numba is installed, each
codec runs by the loops that numba compiles, and by operations of torch and numpy alone: the messages are the
same, byte for byte. The limits are for the way that runs take here, which is numba's where it is installed.

A machine that others use is slower than it could be, so all seconds are also given in copies: of the same
tensor, by torch, in turns with the codecs. The conversion of bfloat16 to float32 is in the tables too.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import Verdict, at_least
from bireme import compiled
from bireme.codec import Codec, TopK, TopKAbove, codec_of, parse_codec

SHAPE = (8, 512, 768)
WORDS = (
    "bfloat16",
    "int8",
    "int5",
    "int4",
    "int3",
    "int2",
    "topk:0.5:4",
    "topk:0.25:8",
    "topk:0.25",
    "topk:0.125:8",
    "topk:0.05:8",
    "topk:0.25:8:50",
)
LEAST_GB_PER_S = {"int8": 1.0, "topk:0.25:8": 1.0, "topk:0.125:8": 1.0, "int4": 0.5}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WITH_NUMBA, WITHOUT = "numba", "torch and numpy"
WAYS = (WITH_NUMBA, WITHOUT) if compiled.IS_COMPILED else (WITHOUT,)
ROUNDS, QUICK_ROUNDS = 15, 3


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


class Case:
    """A codec at work on a tensor in one way, and what it took, round by round."""

    def __init__(self, word: str, codec: Codec, tensor: torch.Tensor, copied: torch.Tensor, way: str) -> None:
        self.word, self.codec, self.tensor, self.copied, self.way = word, codec, tensor, copied, way
        self.shape = tuple(tensor.shape)
        self.message = torch.empty(codec.most_bytes(self.shape, tensor.dtype), dtype=torch.uint8)
        self.used = len(self.message)
        self.threshold = codec.threshold_of(tensor) if isinstance(codec, TopKAbove) else None
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self.copy_s: list[float] = []

    def go(self) -> None:
        compiled.IS_COMPILED = self.way == WITH_NUMBA
        self.copy_s.append(seconds_of(lambda: self.copied.copy_(self.tensor)))
        self.encode_s.append(seconds_of(self.encode))
        self.decode_s.append(
            seconds_of(lambda: self.codec.decode(self.message[: self.used], self.shape, self.tensor.dtype))
        )

    def encode(self) -> None:
        """As a boundary does it: a threshold that lives is there already."""
        if isinstance(self.codec, TopKAbove):
            self.used = self.codec.encode(self.tensor, self.message, threshold=self.threshold)
        else:
            self.used = self.codec.encode(self.tensor, self.message)

    def row(self) -> dict[str, Any]:
        values, size = self.tensor.numel(), 1e-9 * self.tensor.nbytes
        return {
            "codec": self.word,
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "way": self.way,
            "bits": 8 * self.used / values,
            "encode_GB_per_s": size / median(self.encode_s),
            "decode_GB_per_s": size / median(self.decode_s),
            "encode_ns_per_value": 1e9 * median(self.encode_s) / values,
            "decode_ns_per_value": 1e9 * median(self.decode_s) / values,
            "encode_copies": median(self.encode_s) / median(self.copy_s),
            "decode_copies": median(self.decode_s) / median(self.copy_s),
        }


def cases(tensor: torch.Tensor, way: str) -> list[Case]:
    found, copied = [], torch.empty_like(tensor)
    for word in WORDS:
        codec = codec_of(parse_codec(word))
        found.append(Case(word, codec, tensor, copied, way))
        if isinstance(codec, TopK | TopKAbove):
            codec.encode(tensor, found[-1].message)
            mask = codec.mask_of(found[-1].message, tuple(tensor.shape)).clone()
            found.append(Case(f"{word}, gradient", codec.back(mask), tensor, copied, way))
    return found


def measure(asked: Namespace) -> Findings:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(SHAPE[:-1], generator=generator).mul(2).exp().unsqueeze(-1)
    tensor = torch.randn(SHAPE, generator=generator) * spread
    of = {name: [cases(tensor.to(dtype), way) for way in WAYS] for name, dtype in DTYPES.items()}
    # The same codec in both ways, one after the other, so that they share what else the machine does.
    in_turns = [case for ways in of.values() for pair in zip(*ways, strict=True) for case in pair]
    for number in range(1 + (QUICK_ROUNDS if asked.quick else ROUNDS)):
        for case in in_turns:
            case.go()
            if number == 0:  # memory is taken from the system in the first round, and loops are compiled
                for seconds in (case.encode_s, case.decode_s, case.copy_s):
                    seconds.clear()
    rows = [case.row() for case in in_turns]
    sections = [Section(f"{name}, on one core", [row for row in rows if row["dtype"] == name]) for name in of]
    return Findings([*sections, Section("torch's copies", copies(in_turns))], verdicts(rows))


def copies(found: list[Case]) -> list[dict[str, Any]]:
    """GB/s of a copy, in the median over all that was in turns with the codecs; and of a conversion."""
    rows = []
    for name, dtype in DTYPES.items():
        seconds = [second for case in found if case.tensor.dtype is dtype for second in case.copy_s]
        rows.append({"from": name, "to": name, "GB_per_s": 1e-9 * tensor_bytes(dtype) / median(seconds)})
    given, into = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(SHAPE)
    seconds = [seconds_of(lambda: into.copy_(given)) for _ in range(ROUNDS)]
    speed = 1e-9 * tensor_bytes(given.dtype) / median(seconds)
    return [*rows, {"from": "bfloat16", "to": "float32", "GB_per_s": speed}]


def tensor_bytes(dtype: torch.dtype) -> int:
    return prod(SHAPE) * dtype.itemsize


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    return [
        at_least(
            f"{row['codec']}: GB/s of {row['dtype']} encoded on a core",
            row["encode_GB_per_s"],
            LEAST_GB_PER_S[row["codec"]],
        )
        for row in rows
        if row["codec"] in LEAST_GB_PER_S and row["way"] == WAYS[0]
    ]


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="three rounds")
