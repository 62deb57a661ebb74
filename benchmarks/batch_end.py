"""What the end of a batch takes on one rank, compared with torch's own optimizer on the same tensors.

    python benchmarks/batch_end.py [--quick] [--json]

The engine's own pipeline of one stage trains a GPT on so few tokens that its weights are all that matters.
Timed are its REDUCE, TRIAL and UPDATE: from the last backward to the weights of the next version, with the
norm of the gradients, and clipping where that is asked for. The peer is torch's AdamW, one foreach step (two
under 2bw-fresh, which makes two) and `clip_grad_norm_`. Both go batch by batch in turns, on one thread.

Bytes are counted in a run of their own: all storages that live in those instructions, but for inputs and what
forwards keep for their backwards. Next to them is what the banks themselves say that they keep.
"""

import gc
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process, log
from benchmarks.common.verdicts import Spread, Verdict, at_most, exactly, ratios
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.weights import materialize
from bireme.plan.plan import Plan
from bireme.profile.behavior import Owner
from bireme.profile.trace import StorageTrace
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import OnInstruction, PipelineSettings
from bireme.schedule.instruction import Instruction, Kind

RULES = ("2bw", "2bw-fresh", "1f1b")
MODELS = {
    10: "gpt:layers=12,width=256,heads=4,vocab=2048,context=8",
    100: "gpt:layers=12,width=768,heads=12,vocab=20480,context=8",
}
"""By millions of parameters: large matrices and many small vectors."""
COUNTED = {10: 40, 100: 12}
QUICK_COUNTED = 5
WARM_UP, LAST = 3, 2
"""Batches before those that count, and at the end, where a stream drains."""
CLIP_NORM = 0.1
"""Below the norm of every batch, so that each is clipped."""
WHOSE = Owner.WORKSPACE
"""It makes no difference here."""
ENDS = (Kind.REDUCE, Kind.TRIAL, Kind.UPDATE)
MOST_RATIO, MOST_CLIPPED_RATIO = 1.15, 1.25


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in one process; `millions` of parameters."""

    rule: str
    millions: int
    counted: int


@dataclass(frozen=True, slots=True)
class Model:
    """The GPT, captured; every pipeline gets weights of its own."""

    graph: Graph
    module: nn.Module
    batch: dict[str, Tensor]

    @staticmethod
    def load(millions: int) -> "Model":
        source = load_source(MODELS[millions], batch=1)
        graph = capture(source.model, source.example_inputs, name=MODELS[millions])
        ids = torch.arange(8).reshape(1, 8)
        return Model(graph, source.model, {"input_ids": ids, "labels": ids})

    def pipeline(self, rule: str, *, clip: bool, tell: OnInstruction) -> Pipeline:
        """The engine, as a rank alone has it. `tell` hears of each instruction before it runs."""
        return Pipeline(
            self.graph,
            Plan((), 1, rule),
            weights=lambda names: materialize(self.module, names, seed=0),
            optimizer="adamw",
            settings=PipelineSettings(clip_norm=CLIP_NORM if clip else None, on_instruction=tell),
        )


def counted_bytes(pipeline: Pipeline) -> int:
    """What the engine's own table says that weights, gradients and optimizer take on this rank."""
    return sum(stage.banks.memory().total_bytes for stage in pipeline.stages.values())


@dataclass(slots=True)
class Clock:
    """Adds up the seconds that pass in the ends of batches."""

    seconds: float = 0.0
    since: float | None = None

    def __call__(self, step: Instruction) -> None:
        self.pause()
        if step.kind in ENDS:
            self.since = perf_counter()

    def pause(self) -> None:
        """The instruction under way, if there is one, is over."""
        if self.since is not None:
            self.seconds += perf_counter() - self.since
            self.since = None

    def take(self) -> float:
        """The seconds since it was last asked."""
        self.pause()
        taken, self.seconds = self.seconds, 0.0
        return taken


class Peer:
    """Torch's optimizer on parameters and gradients of the same shapes."""

    def __init__(self, gradients: list[Tensor], *, num_steps: int, clip: bool, fused: bool) -> None:
        self.parameters = [nn.Parameter(gradient.clone()) for gradient in gradients]
        self.gradients = gradients
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, foreach=not fused, fused=fused)
        self.num_steps = num_steps
        self.clip = clip

    def seconds(self) -> float:
        """Of one batch's end, on gradients that a backward would have written just before."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()
        begin = perf_counter()
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM, foreach=True)
        for _ in range(self.num_steps):
            self.optimizer.step()
        taken = perf_counter() - begin
        self.optimizer.zero_grad()
        return taken


@dataclass(slots=True)
class Count:
    """Follows the storages that live in the ends of batches, from the first one's backward on."""

    before: list[Tensor] = field(default_factory=lambda: [*live_tensors()])
    """Held, so that their storages stay what they are: nobody gets them again."""
    others: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    """The storages that lived when the last forward began."""
    after_forward: bool = False
    is_first: bool = True
    trace: StorageTrace | None = None
    peak_bytes: int = 0

    def __call__(self, step: Instruction) -> None:
        self.pause()
        if self.after_forward:
            # Under rules that delay updates the next batch's forward may be done before this batch's end.
            self.leave_out(tensor for tensor in live_tensors() if storage_of(tensor) not in self.known)
        self.after_forward = step.kind is Kind.FORWARD
        if self.after_forward:
            self.known = {storage_of(tensor) for tensor in live_tensors()}
        if step.kind not in ENDS:
            return
        if self.is_first:
            self.is_first = False
            # What a backward begins with is made once and kept; an optimizer's numbers do not exist yet.
            self.leave_out([*self.before, *(tensor for tensor in live_tensors() if tensor.ndim == 0)])
        self.trace = StorageTrace(device="cpu")
        self.trace.adopt((one for one in live_tensors() if storage_of(one) not in self.others), WHOSE)
        self.trace.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        new = list(tensors)
        self.before += new
        self.others |= {storage_of(tensor) for tensor in new}

    def pause(self) -> None:
        if self.trace is not None:
            self.trace.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self.peak_bytes = max(self.peak_bytes, self.trace.peak_bytes)
            self.trace = None


def live_tensors() -> Iterator[Tensor]:
    """All that there are with numbers of a float type."""
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu" and one.is_floating_point():
            yield one


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def measured_bytes(model: Model, rule: str, *, clip: bool) -> tuple[int, int]:
    """The peak of the ends of some batches, and what the engine counts."""
    gc.collect()
    count = Count()
    pipeline = model.pipeline(rule, clip=clip, tell=count)
    for _ in pipeline.train(repeat(model.batch, WARM_UP + LAST)):
        count.pause()
    pipeline.close()
    return count.peak_bytes, counted_bytes(pipeline)


def rows_of(case: Case) -> list[dict[str, Any]]:
    """In a process of its own: without clipping, and with."""
    torch.set_num_threads(1)
    model = Model.load(case.millions)
    rows = []
    for clip in (False, True):
        peak_bytes, own_bytes = measured_bytes(model, case.rule, clip=clip)
        clock = Clock()
        pipeline = model.pipeline(case.rule, clip=clip, tell=clock)
        parameters = pipeline.parameters()
        num_steps = 2 if case.rule == "2bw-fresh" else 1
        gradients = [torch.randn_like(tensor) for tensor in parameters.values()]
        peer = Peer(gradients, num_steps=num_steps, clip=clip, fused=False)
        fused = Peer(gradients, num_steps=num_steps, clip=clip, fused=True)
        seconds = []
        for _ in pipeline.train(repeat(model.batch, WARM_UP + case.counted + LAST)):
            seconds.append((clock.take(), peer.seconds(), fused.seconds()))
        pipeline.close()
        ours, theirs, fused_s = zip(*seconds[WARM_UP:-LAST], strict=True)
        ratio = ratios(theirs, ours)
        rows.append(
            {
                "rule": case.rule,
                "clip": clip,
                "parameters": sum(tensor.numel() for tensor in parameters.values()),
                "ours_ms": Spread.of(ours).median * 1e3,
                "torch_ms": Spread.of(theirs).median * 1e3,
                "ratio": ratio.median,
                "ratio_least": ratio.least,
                "ratio_greatest": ratio.greatest,
                "ratio_to_fused": ratios(fused_s, ours).median,
                "peak_bytes": peak_bytes,
                "counted_bytes": own_bytes,
            }
        )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    for row in rows:
        clipping = "with clipping" if row["clip"] else "without clipping"
        where = f"{row['rule']}, {row['parameters'] / 1e6:.0f} M parameters, {clipping}"
        most = MOST_CLIPPED_RATIO if row["clip"] else MOST_RATIO
        yield at_most(f"{where}: end of a batch / torch's AdamW", row["ratio"], most)
        yield exactly(f"{where}: peak bytes", row["peak_bytes"], row["counted_bytes"])


def measure(asked: Namespace) -> Findings:
    rows = []
    for millions in (10,) if asked.quick else MODELS:
        for rule in RULES:
            log(f"{rule}, {millions} M parameters")
            counted = QUICK_COUNTED if asked.quick else COUNTED[millions]
            rows += in_process(rows_of, Case(rule, millions, counted))
    return Findings([Section("The end of a batch on one rank, one thread", rows)], list(verdicts(rows)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="10 M parameters, few batches")
