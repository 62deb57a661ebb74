"""The last linear layer and its cross-entropy as one operator, compared with torch's own two.

    python benchmarks/head.py [--quick] [--json]

Both run forward and backward in turns, on one thread, on the hidden states of a micro-batch. Seconds are of
the processor. Peaks are all bytes that live besides the inputs and the sum of the weight's gradients. With
few rows the operator keeps the gradient of the logits, with many that of the weight.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process, log
from benchmarks.common.verdicts import Spread, Verdict, at_most, ratios
from bireme.model.fused_loss import MEAN, keeps_logits
from bireme.model.fused_operator import linear_cross_entropy
from bireme.profile.behavior import Owner
from bireme.profile.trace import StorageTrace

IGNORED = -100
WARM_UP, COUNTED, QUICK_COUNTED = 1, 5, 2
MOST_SECONDS, MOST_BYTES = 1.05, 1.0

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in one process."""

    vocabulary: int
    width: int
    rows: int
    dtype: str
    counted: int


CASES = (
    (32_000, 512, 512, "float32"),
    (32_000, 512, 2048, "float32"),
    (32_000, 512, 2048, "bfloat16"),
    (150_000, 256, 256, "float32"),
    (150_000, 256, 1024, "float32"),
)
QUICK = CASES[:2]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As models of transformers do it."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets, ignore_index=IGNORED)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, None, targets, (), torch.float32, MEAN, IGNORED)


def step(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    hidden.grad = None
    torch.autograd.backward(loss(hidden, weight, targets))


def peak_bytes(loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> int:
    trace = StorageTrace(device="cpu")
    trace.adopt([*given, *(one.grad for one in given if one.grad is not None)], Owner.WORKSPACE)
    before = trace.live_bytes
    with trace:
        step(loss, *given)
    return trace.peak_bytes - before


def row_of(case: Case) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(case.rows, case.width, generator=generator).to(dtype).requires_grad_()
    weight = (
        torch.randn(case.vocabulary, case.width, generator=generator).mul_(0.02).to(dtype).requires_grad_()
    )
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(weight.shape)
    targets = torch.randint(case.vocabulary, (case.rows,), generator=generator)
    given = hidden, weight, targets
    seconds = []
    for _ in range(WARM_UP + case.counted):
        begin = process_time()
        step(plain, *given)
        between = process_time()
        step(fused, *given)
        seconds.append((between - begin, process_time() - between))
    theirs, ours = zip(*seconds[WARM_UP:], strict=True)
    ratio = ratios(theirs, ours)
    theirs_bytes, ours_bytes = peak_bytes(plain, given), peak_bytes(fused, given)
    return {
        "vocabulary": case.vocabulary,
        "width": case.width,
        "rows": case.rows,
        "dtype": case.dtype,
        "keeps": "logits" if keeps_logits(case.rows, case.width, dtype.itemsize, learns=True) else "weight",
        "torch_s": Spread.of(theirs).median,
        "ours_s": Spread.of(ours).median,
        "ratio": ratio.median,
        "ratio_least": ratio.least,
        "ratio_greatest": ratio.greatest,
        "torch_peak_bytes": theirs_bytes,
        "ours_peak_bytes": ours_bytes,
        "bytes_ratio": ours_bytes / theirs_bytes,
    }


def verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    for row in rows:
        where = f"{row['vocabulary']:,} classes, {row['rows']:,} rows, {row['dtype']}"
        yield at_most(f"{where}: processor seconds / torch's", row["ratio"], MOST_SECONDS)
        yield at_most(f"{where}: peak bytes / torch's", row["bytes_ratio"], MOST_BYTES)


def measure(asked: Namespace) -> Findings:
    rows = []
    for vocabulary, width, num_rows, dtype in QUICK if asked.quick else CASES:
        log(f"{vocabulary:,} classes, {num_rows:,} rows, {dtype}")
        counted = QUICK_COUNTED if asked.quick else COUNTED
        rows.append(in_process(row_of, Case(vocabulary, width, num_rows, dtype, counted)))
    return Findings([Section("A head and its loss, one thread", rows)], list(verdicts(rows)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="32,000 classes, few rounds")
