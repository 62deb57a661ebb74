"""What crosses the first boundary of a pipeline, and how many tokens a linear probe reads out of it.

    python benchmarks/leakage.py [--quick] [--json]

A small GPT learns Python sources, byte by byte, for a few hundred steps. It is then cut after 1, 2 and 4
half-layers after its embedding. Whoever has what crosses the boundary for texts that are known can fit a
probe: one linear layer with a softmax, from the numbers of one token to the token. It is tried on other
texts. The same is done with the gradients that come back over the boundary, and with each codec there is
between.

`recovered_share` is the share of tokens that the probe names rightly, `common_share` what the most frequent
token alone would give. Activations are tried for the token that they stand for, gradients for the next one,
which the model was to predict there. The probe is the weakest of attacks: published ones do better. A low
share is no proof that anything is safe.
"""

import importlib
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.model.weights import materialize
from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings

MODEL, LENGTH, VOCABULARY = "gpt:layers=4,width=64,heads=4,vocab=257,context=128", 128, 257
HALF_LAYERS = (1, 2, 4)
STEPS, QUICK_STEPS, BATCH_SIZE = 200, 5, 8
KNOWN, UNKNOWN, QUICK_KNOWN, QUICK_UNKNOWN = 128, 48, 24, 8
"""Samples that the probe is fitted on, and those that it is tried on."""
PROBE_STEPS, QUICK_PROBE_STEPS, PROBE_BATCH, PROBE_RATE = 300, 60, 1024, 1e-2
TEXT_BYTES = 2_000_000
CODECS = ("bfloat16", "int8", "int4", "int2", "topk:0.25:8")

Batch = dict[str, Tensor]
RoundTrip = Callable[[Tensor], Tensor]


def round_trips() -> dict[str, RoundTrip]:
    """What comes out at the other end of a boundary, for each codec."""
    found: dict[str, RoundTrip] = {"plain": lambda tensor: tensor}
    if find_spec("bireme.codec") is not None:
        found |= {name: through(name) for name in CODECS}
    return found


def through(name: str) -> RoundTrip:
    codecs = importlib.import_module("bireme.codec")
    codec = codecs.codec_of(codecs.parse_codec(name))

    def round_trip(tensor: Tensor) -> Tensor:
        message = torch.empty(codec.most_bytes(tuple(tensor.shape), tensor.dtype), dtype=torch.uint8)
        used = codec.encode(tensor, message, seed=1)
        decoded: Tensor = codec.decode(message[:used], tuple(tensor.shape), tensor.dtype)
        return decoded

    return round_trip


def text() -> Tensor:
    """The beginnings of the sources of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    joined = b"".join(path.read_bytes()[:40_000] for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(joined[:TEXT_BYTES]), dtype=torch.uint8).long()


def batches(ids: Tensor, count: int, size: int, seed: int) -> Iterator[Batch]:
    """Samples from anywhere in the text."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(ids) - LENGTH, (size,), generator=draws)
        rows = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        yield {"input_ids": rows, "labels": rows}


def trained(ids: Tensor, steps: int) -> tuple[Graph, Mapping[str, Tensor], Mapping[str, Tensor], float]:
    """The model after some steps: its graph, parameters and buffers, and its last loss."""
    source = load_source(MODEL, batch=2)
    graph = capture(source.model, source.example_inputs, name=MODEL)
    pipeline = Pipeline(
        graph,
        Plan((), 1, "sequential"),
        weights=lambda names: materialize(source.model, names, seed=0),
        optimizer="adamw",
        settings=PipelineSettings(clip_norm=1.0),
    )
    loss = 0.0
    for result in pipeline.train(batches(ids, steps, BATCH_SIZE, seed=1)):
        loss = result.loss
        if result.batch % 50 == 0:
            log(f"step {result.batch}: loss {loss:.3f}")
    buffers = {name: tensor for stage in pipeline.stages.values() for name, tensor in stage.buffers.items()}
    found = graph, pipeline.parameters(), buffers, loss
    pipeline.close()
    return found


def crossing(
    graph: Graph, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], cut: int, batch: Batch
) -> dict[str, Tensor]:
    """What crosses the boundary before unit `cut`: activations forward, their gradients back."""
    units = units_of(graph)
    first = StageFunction(graph, units[:cut])
    rest = StageFunction(graph, units[cut:], outputs=("loss",))
    with torch.no_grad():
        sent = first(weights, buffers, batch)
    learned = {name: sent[name].requires_grad_(sent[name].is_floating_point()) for name in first.sends}
    torch.autograd.backward(rest(weights, buffers, {**batch, **learned})["loss"])
    (activations,) = (one for one in learned.values() if one.is_floating_point())
    assert activations.grad is not None
    return {"activations": activations.detach(), "gradients": activations.grad}


def recovered(known: Tensor, known_ids: Tensor, unknown: Tensor, unknown_ids: Tensor, steps: int) -> float:
    """The share of tokens that a probe fitted on known texts reads out of others."""
    mean, spread = known.mean(0), known.std(0).clamp_min(1e-12)
    known, unknown = (known - mean) / spread, (unknown - mean) / spread
    torch.manual_seed(0)
    probe = nn.Linear(known.shape[1], VOCABULARY)
    optimizer = torch.optim.AdamW(probe.parameters(), PROBE_RATE, weight_decay=1e-3)
    draws = torch.Generator().manual_seed(2)
    for _ in range(steps):
        rows = torch.randint(len(known), (PROBE_BATCH,), generator=draws)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(probe(known[rows]), known_ids[rows]))
        optimizer.step()
    with torch.no_grad():
        return float((probe(unknown).argmax(1) == unknown_ids).double().mean())


def measure(asked: Namespace) -> Findings:
    torch.set_num_threads(1)  # the model is so small that two would mostly wait for each other
    ids = text()
    middle = len(ids) * 3 // 4  # the model and the probe learn the first part, the last is for the trial
    steps = QUICK_STEPS if asked.quick else STEPS
    graph, weights, buffers, loss = trained(ids[:middle], steps)
    num_known, num_unknown = (QUICK_KNOWN, QUICK_UNKNOWN) if asked.quick else (KNOWN, UNKNOWN)
    known = next(batches(ids[:middle], 1, num_known, seed=3))
    unknown = next(batches(ids[middle:], 1, num_unknown, seed=4))
    ids_of = [one["input_ids"] for one in (known, unknown)]
    common = float((ids_of[1] == ids_of[0].reshape(-1).mode().values).double().mean())
    rows: list[dict[str, Any]] = []
    for half_layers in HALF_LAYERS:
        cut = 1 + half_layers
        sent = [crossing(graph, weights, buffers, cut, batch) for batch in (known, unknown)]
        for what, begin in (("activations", 0), ("gradients", 1)):
            known_ids, unknown_ids = (one[:, begin:].reshape(-1) for one in ids_of)
            for name, round_trip in round_trips().items():
                there, here = (round_trip(one[what])[:, : LENGTH - begin].flatten(0, 1) for one in sent)
                share = recovered(
                    there, known_ids, here, unknown_ids, QUICK_PROBE_STEPS if asked.quick else PROBE_STEPS
                )
                log(f"{half_layers} half-layers, {what}, {name}: {share:.1%}")
                rows.append(
                    {
                        "half_layers": half_layers,
                        "what": what,
                        "codec": name,
                        "recovered_share": share,
                        "common_share": common,
                        "loss": loss,
                    }
                )
    return Findings([Section("Tokens that a linear probe reads at the first boundary", rows)], verdicts(rows))


def verdicts(rows: list[dict[str, Any]]) -> list[Verdict]:
    """What docs/private-data.md says: plain activations at the first boundaries tell most of the tokens."""
    return [
        at_least(f"tokens read from activations after {one['half_layers']} half-layers", share, 0.5)
        for one in rows
        if one["what"] == "activations" and one["codec"] == "plain"
        for share in [one["recovered_share"]]
    ]


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="a model of a few steps, a probe of few samples")
