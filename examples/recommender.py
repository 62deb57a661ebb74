"""A recommender in two stages and two replicas, with fewer bytes on its links.

    python examples/recommender.py [--steps 300] [--json]

The model is of DLRM's kind: embedding tables for what is known by a number, a small network for what is
measured, products of all pairs of their vectors, and a second network that says how likely a click is. The
first stage has the tables, the second one the rest; four processes train on made-up clicks that follow hidden
tastes. What goes over the boundary between the stages, and what the replicas sum, is dense at first, then
goes through a codec. AUC is the chance that a clicked sample is ranked above one that was not.
"""

import json
import math
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import bireme
from bireme.codec.description import BoundaryCodecs, CodecPhase, LinkCodecs
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.runtime.fabric import Fabric
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World

NUM_TABLES, NUM_ROWS, NUM_MEASURED, WIDTH = 6, 500, 8, 16
NUM_REPLICAS, NUM_MICROBATCHES, BATCH = 2, 2, 512
RATE = 0.05
FIRST_SIZE = 0.3
"""Of entries of tables: with large ones, products of pairs are noise for long."""
TOPK, THRESHOLD = "int2, then topk:0.05:4", "threshold:0.02:25"
LAST_SHARE = 0.5
"""Of the steps, with the codec that a boundary has after another one."""
WAYS = (("none", "none"), (TOPK, "none"), ("none", THRESHOLD), (TOPK, THRESHOLD))
"""The codecs of the boundary and of the sums.

Vectors of tables need a part of the run in which every entry gets its gradient: the largest ones are the same
whenever a number comes, and the others would never grow.
"""
SEEDING = threading.Lock()
"""Ranks may be threads of one process, which share torch's generator."""


class Recommender(nn.Module):
    """Clicks from numbers in tables and measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(NUM_ROWS, WIDTH) for _ in range(NUM_TABLES))
        for table in self.tables:
            nn.init.normal_(table.get_parameter("weight"), std=FIRST_SIZE)
        self.bottom = nn.Sequential(nn.Linear(NUM_MEASURED, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        num_pairs = (NUM_TABLES + 1) * NUM_TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(WIDTH + num_pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(NUM_TABLES + 1, NUM_TABLES + 1, 1), persistent=False)

    def vectors(self, measured: Tensor, numbers: Tensor) -> Tensor:
        """A vector for the measurements and one for each number; (samples, tables + 1, width)."""
        found = [table(numbers[:, place]) for place, table in enumerate(self.tables)]
        return torch.stack([self.bottom(measured), *found], 1)

    def scores(self, vectors: Tensor) -> Tensor:
        """How likely a click is, before the sigmoid."""
        products = vectors @ vectors.transpose(1, 2)
        pairs = self.get_buffer("pairs")
        made: Tensor = self.top(torch.cat([vectors[:, 0], products[:, pairs[0], pairs[1]]], 1))
        return made.squeeze(1)

    def forward(self, measured: Tensor, numbers: Tensor, clicked: Tensor) -> dict[str, Tensor]:
        scores = self.scores(self.vectors(measured, numbers))
        return {"loss": functional.binary_cross_entropy_with_logits(scores, clicked)}


class Clicks:
    """Made-up clicks: every number has a hidden taste, and tastes that agree make a click likely."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._tastes = torch.randn(NUM_TABLES, NUM_ROWS, 4, generator=draw)
        self._weights = torch.randn(NUM_MEASURED, generator=draw) * 0.5

    def batch(self, number: int, num_samples: int = BATCH) -> dict[str, Tensor]:
        """A batch, the same for the same number. Some numbers come often, most hardly ever."""
        clicked, inputs, _ = self._drawn(number, num_samples)
        return {**inputs, "clicked": clicked}

    def best_auc(self, num_samples: int = 20_000) -> float:
        """That of the chances themselves, which no model can surpass but by luck."""
        clicked, _, chance = self._drawn(-1, num_samples)
        return area_under(chance, clicked)

    def _drawn(self, number: int, num_samples: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Clicks, what is known of them, and how likely each was."""
        draw = torch.Generator().manual_seed(1_000_003 + number)
        share = torch.rand(num_samples, NUM_TABLES, generator=draw)
        numbers = (NUM_ROWS * share**3).long().clamp(max=NUM_ROWS - 1)
        measured = torch.randn(num_samples, NUM_MEASURED, generator=draw)
        tastes = torch.stack([self._tastes[place, numbers[:, place]] for place in range(NUM_TABLES)], 1)
        agree = (tastes.sum(1).square().sum(1) - tastes.square().sum((1, 2))) / (2 * NUM_TABLES)
        chance = torch.sigmoid(2 * agree + measured @ self._weights - 0.5)
        clicked = (torch.rand(num_samples, generator=draw) < chance).float()
        return clicked, {"measured": measured, "numbers": numbers}, chance


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a run, of all ranks together: bytes on the boundary there and back, and in the sums."""

    boundary: str
    sums: str
    auc: float
    boundary_bytes: int
    raw_boundary_bytes: int
    sum_bytes: int
    raw_sum_bytes: int


def recommender() -> Graph:
    """The model as a graph, for micro-batches of any size."""
    return capture(Recommender(), Clicks().batch(0, BATCH // NUM_REPLICAS // NUM_MICROBATCHES))


def train(
    world: World | Fabric, graph: Graph, boundary: str, sums: str, steps: int, seed: int = 0
) -> Trained:
    """Train as one of four ranks; each says what it has sent, and rank 0 how good the model is."""
    with SEEDING:
        torch.manual_seed(seed)
        model = Recommender()
    clicks = Clicks(seed)
    units = units_of(graph)
    with_tables = [unit.index for unit in units if any(name.startswith("tables") for name in unit.parameters)]
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    pipeline = Pipeline(
        graph,
        Plan(
            (1 + max(with_tables),),
            NUM_MICROBATCHES,
            "1f1b",
            width=NUM_REPLICAS,
        ),
        world,
        weights=lambda names: {name: held[name].detach().clone() for name in names},
        optimizer=lambda named: torch.optim.Adagrad([one for _, one in named], lr=RATE),
        settings=PipelineSettings(sum_codec=sums, codecs=boundary_codecs(boundary, steps)),
    )
    try:
        for _ in pipeline.train(_batches(clicks, steps)):
            pass
        weights = pipeline.full_state_dict()
        found, messages = pipeline.sum_bytes, pipeline.traffic.values()
    finally:
        pipeline.close()
    auc = math.nan
    if world.rank == 0:
        model.load_state_dict(weights, strict=False)
        auc = auc_of(model, clicks.batch(-1, 20_000))
    return Trained(
        boundary,
        sums,
        auc,
        sum(one.sent_bytes for one in messages),
        sum(one.raw_bytes for one in messages),
        found.sent,
        found.raw,
    )


def boundary_codecs(words: str, steps: int) -> LinkCodecs:
    """A codec for all steps, or `CODEC, then CODEC`: another one for the last part."""
    first, _, last = words.partition(", then ")
    phases = [CodecPhase(0, (BoundaryCodecs(first, first),))]
    if last:
        phases.append(CodecPhase(round((1 - LAST_SHARE) * steps), (BoundaryCodecs(last, last),)))
    return LinkCodecs(tuple(phases))


def together(ranks: list[Trained]) -> Trained:
    """What all ranks have sent."""
    return replace(
        ranks[0],
        boundary_bytes=sum(one.boundary_bytes for one in ranks),
        raw_boundary_bytes=sum(one.raw_boundary_bytes for one in ranks),
        sum_bytes=sum(one.sum_bytes for one in ranks),
        raw_sum_bytes=sum(one.raw_sum_bytes for one in ranks),
    )


def _batches(clicks: Clicks, steps: int) -> Iterator[dict[str, Tensor]]:
    return (clicks.batch(number) for number in range(steps))


@torch.no_grad()
def auc_of(model: Recommender, samples: dict[str, Tensor]) -> float:
    """The chance that a clicked sample has a higher score than one that was not."""
    return area_under(
        model.scores(model.vectors(samples["measured"], samples["numbers"])), samples["clicked"]
    )


def area_under(scores: Tensor, clicked: Tensor) -> float:
    """The chance that a clicked sample has a higher score than one that was not."""
    ranks, is_clicked = scores.argsort().argsort().double() + 1, clicked > 0
    num_clicked, num_others = int(is_clicked.sum()), int((~is_clicked).sum())
    above = float(ranks[is_clicked].sum()) - num_clicked * (num_clicked + 1) / 2
    return above / (num_clicked * num_others)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    asked = parser.parse_args()
    graph, found = recommender(), []
    for boundary, sums in WAYS:
        words = graph, boundary, sums, asked.steps
        ranks = bireme.launch(train, 2 * NUM_REPLICAS, *words, threads_per_process=1)
        found.append(together(ranks))
    if asked.json:
        print(json.dumps({"rows": [asdict(one) for one in found]}))
        return
    for one in found:
        of_boundary, of_sums = one.raw_boundary_bytes / one.boundary_bytes, one.raw_sum_bytes / one.sum_bytes
        print(
            f"boundary {one.boundary:26} sums {one.sums:18} AUC {one.auc:.4f}   "
            f"times fewer bytes: boundary {of_boundary:5.1f}, sums {of_sums:5.1f}"
        )


if __name__ == "__main__":
    main()
