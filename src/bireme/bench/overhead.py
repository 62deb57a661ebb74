"""What a runtime itself takes for a micro-batch, on two ranks with one tiny layer each."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bireme.bench.contenders import Contender, Ours, TorchFeed, closing, say, take_turns, torch_run
from bireme.bench.effort import BenchEffort
from bireme.bench.spread import Spread, ratios
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.plan.plan import Plan
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World

__all__ = ["NUM_RANKS", "Overhead", "OverheadTimes", "measure_overhead", "overhead_of", "tiny_graph"]

NUM_RANKS = 2
WIDTH = 8
OVERHEAD_SAMPLES = 2
"""In a micro-batch."""


@dataclass(frozen=True, slots=True)
class OverheadTimes:
    """One rank's seconds for a micro-batch, round by round."""

    names: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]
    others_share: float | None = None


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds for a micro-batch, on the slower rank; `peers` are torch's, `share` ours over torch's best.
    Other programs had `others_share` of the cores.
    """

    ours_s: Spread
    peers_s: dict[str, Spread]
    best_peer: str
    share: Spread
    others_share: float | None = None


class _Tiny(nn.Module):
    """Two layers, one for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """How far the result is from what is wanted."""
        return {"loss": nn.functional.mse_loss(self.second(self.first(given)), wanted)}


def tiny_graph() -> Graph:
    """The model, captured once for both ranks."""
    return capture(
        _Tiny(),
        {"given": torch.zeros(OVERHEAD_SAMPLES, WIDTH), "wanted": torch.zeros(OVERHEAD_SAMPLES, WIDTH)},
    )


def measure_overhead(world: World, effort: BenchEffort, graph: Graph) -> OverheadTimes:
    """On both ranks: ours, torch's hand-written 1F1B, and its runtime with the same order."""
    from torch.distributed.pipelining import PipelineStage

    m = effort.overhead_microbatches
    say(world, f"overhead of a micro-batch, {m} of them")
    torch.manual_seed(0)
    model = _Tiny()
    batch = {
        "given": torch.randn(OVERHEAD_SAMPLES * m, WIDTH),
        "wanted": torch.randn(OVERHEAD_SAMPLES * m, WIDTH),
    }
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = Plan((1,), m, "1f1b")
    pipeline = Pipeline(
        graph,
        plan,
        world,
        weights=lambda names: {name: own[name] for name in names},
        optimizer="sgd",
    )
    contenders: list[Contender] = [Ours("1f1b", pipeline, batch)]
    module = (model.first, model.second)[world.rank]

    def stage() -> PipelineStage:
        given, made = (
            torch.empty(OVERHEAD_SAMPLES, WIDTH, device="meta", requires_grad=learns)
            for learns in (world.rank > 0, True)
        )
        return PipelineStage(
            module, world.rank, NUM_RANKS, torch.device("cpu"), input_args=(given,), output_args=(made,)
        )

    feed = TorchFeed((batch["given"],), batch["wanted"])
    for kind in ("Schedule1F1B", plan.program(1)):
        contenders.append(torch_run(kind, [stage()], m, nn.functional.mse_loss, feed))
    with closing(contenders):
        turns = take_turns(contenders, counted=effort.overhead_batches, rounds=effort.overhead_rounds)
    return OverheadTimes(
        tuple(contender.name for contender in contenders),
        tuple(tuple(one / m for one in own) for own in turns.seconds),
        turns.others_share,
    )


def overhead_of(times: OverheadTimes, other: OverheadTimes) -> Overhead:
    """Both ranks' times together."""
    slower = [
        [max(pair) for pair in zip(one, two, strict=True)]
        for one, two in zip(times.seconds, other.seconds, strict=True)
    ]
    ours, *theirs = slower
    peers = dict(zip(times.names[1:], theirs, strict=True))
    best = min(peers, key=lambda name: Spread.of(peers[name]).median)
    return Overhead(
        ours_s=Spread.of(ours),
        peers_s={name: Spread.of(seconds) for name, seconds in peers.items()},
        best_peer=best,
        share=ratios(peers[best], ours),
        others_share=times.others_share,
    )
