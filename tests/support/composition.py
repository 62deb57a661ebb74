"""Runs of a few capabilities at once, as threads: what tests/composition/ trains and compares.

The names of capabilities say how a run is made: its model, plan, data, and how its replicas agree. The model
is as small as a model with all that can be: a table, layers, and a head that may share the table.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import isfinite
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.balance import Policy, limits_of
from bireme.capabilities import CAPABILITIES
from bireme.codec.description import BoundaryCodecs
from bireme.model.nf4 import with_nf4
from bireme.model.weights import packing
from bireme.plan.plan import Plan
from bireme.runtime.balancer import Sharing
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averages import DilocoSettings
from bireme.runtime.microbatches import apportioned
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.sync.coordinator.messages import RankId, SamplePlaces
from bireme.train.data.documents import Cut, DocumentSamples, StreamSamples
from bireme.train.data.hub import Content, SavedRows
from bireme.train.data.loader import RankBatches
from bireme.train.data.mixture import ELSEWHERE, MixedSamples, MixedSource, ReadableSamples, order_of
from bireme.train.data.placing import SampleOrder, Stock
from bireme.train.data.samples import Samples, Tokens
from bireme.train.replica import DealtBatches
from bireme.train.run_data import ReadableData
from tests.support.averaging_oracle import expected_of_groups, expected_of_outer_steps
from tests.support.averaging_threads import AveragingReplicas
from tests.support.engine_parity import Setting, Trained, assert_equal, note_training, oracle, pipeline_of
from tests.support.mortal_replicas import Replicas
from tests.support.oracles import Update
from tests.support.paged import paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.second_copies import all_copied
from tests.support.small_models import CONTEXT, VOCAB, Batch, Model, captured, num_tokens, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

__all__ = ["Composition", "looseness"]

NUM_BATCHES, BATCH, NUM_MICROBATCHES, WIDTH, SEED = 3, 8, 2, 2, 5
OWNERS = (0, 1)
"""Each replica is at home on a server with private samples of its own."""

INEXACT = frozenset({"principal", "sum-codec", "bfloat16"})
"""Capabilities after which numbers are not those of one process to the last bit."""

OTHER_ORDER = frozenset({"1f1b-sliced", "tied", "muon", "shard-weights"})
"""Capabilities after which sums are made in another order than in one process."""

PARTLY_SEEN = frozenset({"quorum", "groups", "diloco", "shard-optimizer"})
"""Capabilities with which weights are compared, but not the optimizer's state after each batch."""


def looseness(names: Collection[str]) -> int:
    """How closely a run with these is compared with one process: 0 to the last bit, 1 but for the
    order of sums or the optimizer's state, 2 by losses that are near.
    """
    return 2 if INEXACT & {*names} else 1 if (OTHER_ORDER | PARTLY_SEEN) & {*names} else 0


class Words(nn.Module):
    """Each place sees its own token alone."""

    def __init__(self, *, tied: bool, adapted: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, CONTEXT)
        self.layers = nn.ModuleList(nn.Linear(CONTEXT, CONTEXT) for _ in range(3))
        self.head = nn.Linear(CONTEXT, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if adapted:
            self.requires_grad_(False)
            self.layers = nn.ModuleList(_Adapted(cast(nn.Linear, layer)) for layer in self.layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class _Adapted(nn.Module):
    """A layer that is frozen, and two small matrices beside it that learn."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(CONTEXT, 2, bias=False)
        self.up = nn.Linear(2, CONTEXT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made


@cache
def words(*, tied: bool, adapted: bool, dtype: str, packs: bool = False) -> Model:
    """Its graph and weights, made once in a process; those that are frozen are packed, if it `packs`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Words(tied=tied, adapted=adapted).to(getattr(torch, dtype))
    model = captured(
        module,
        token_batches(2, 1)[0],
        name=f"three words {tied} {adapted} {dtype}",
        is_kept=True,
        count=num_tokens,
    )
    learns = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    states = tuple(replace(one, trainable=one.name in learns) for one in model.graph.parameters)
    weights = {
        name: tensor.float() if dtype == "bfloat16" else tensor for name, tensor in model.weights.items()
    }
    graph = replace(model.graph, parameters=states)
    if packs:
        graph = with_nf4(graph)
        given = packing(graph, lambda names: {name: weights[name] for name in names})
        weights = dict(given([*weights]))
    return replace(model, graph=graph, weights=weights)


def _tokens(count: int, seed: int) -> DocumentSamples:
    """Samples of tokens, of which some do not count."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count, CONTEXT), generator=draws)
    flat = torch.where(torch.rand(ids.shape, generator=draws) < 0.3, -1 - ids, ids).reshape(-1).numpy()
    return Cut(CONTEXT, "stream", 0).samples(Tokens("tokens", flat, has_uncounted=True))


def _stream() -> StreamSamples:
    rows = [{"input_ids": ids} for ids in _tokens(50, 6).take(range(50))["input_ids"].tolist()]
    saved = SavedRows("rows", lambda: enumerate(rows), None, ("input_ids",), Content.IDS, "rows")
    return StreamSamples(saved, None, Cut(CONTEXT, "stream", 0), seed=SEED, shuffle_buffer=8)


PRIVATE = (_tokens(9, 2), _tokens(12, 3))


@dataclass(frozen=True)
class Composition:
    """A run of these capabilities; what is not named is as usual: 1f1b over two ranks, two replicas."""

    names: frozenset[str]

    def check(self) -> None:
        """Train three batches, and compare with one process as far as numbers can be equal."""
        torch.set_num_threads(1)
        with all_copied() if "copies" in self.names else nullcontext():
            match self._of_axis("how replicas agree"):
                case "quorum":
                    self._check_quorum()
                case "groups" | "diloco":
                    self._check_averages()
                case _:
                    self._check_allreduce()

    def _check_allreduce(self) -> None:
        plan = self.setting.plan
        fabric = ThreadFabric(plan.num_ranks)
        readers: dict[int, Pipeline] = {}

        def work(rank: int) -> Trained:
            pipeline = pipeline_of(self.model, self.setting, fabric.of(rank), sharing=self._sharing)
            readers[rank] = pipeline
            trained, replica = Trained(), rank // plan.source.num_ranks
            samples, order = self._data(OWNERS[replica], pipeline)
            try:
                batches = RankBatches(
                    samples,
                    order,
                    self.num_samples,
                    num_batches=NUM_BATCHES,
                    wanted=pipeline.cutter.wanted,
                    prefetch=0,
                )
                if self.setting.shard == "none":
                    note_training(pipeline, batches, trained)
                else:
                    _note_whole(pipeline, batches, trained)
            finally:
                pipeline.close()
            return trained

        found = run_threads(plan.num_ranks, work)
        sizes = [
            [size for share in shares for size in apportioned(share, [1] * NUM_MICROBATCHES)]
            for shares in found[0].shares
        ]
        norms = dict(enumerate(found[0].norms))
        data = [self._whole(step, readers[0]) for step in range(NUM_BATCHES)]
        expected = oracle(self.model, self._of_oracle(self.setting), data, sizes=sizes, norms=norms)
        if self._is_exact and self.setting.shard == "none":
            assert_equal(found, expected, tolerance=self._tolerance)
            return
        for trained in found if self._is_exact else ():
            _check_close(trained.weights[-1], expected[-1].weights, max(self._tolerance, 1e-11))
        assert all(trained.losses == found[0].losses for trained in found)
        self._check_near(found[0].losses, expected)
        _check_same([(one.weights[-1], one.states[-1] if one.states else {}) for one in found])

    def _check_quorum(self) -> None:
        run = _ReadingReplicas(self)
        run.run()
        plan = cast(Plan, self.setting.plan)
        setting = self._of_oracle(replace(self.setting, plan=replace(plan, width=WIDTH * plan.width)))
        norms = dict(norm for seen in run.seen.values() for norm in seen.norms.items())
        parts = run.parts()
        data = [{name: torch.cat([one[name] for one in own]) for name in own[0]} for own in parts]
        sizes = [
            [
                size
                for one in own
                for size in apportioned(len(one["labels"]), [1] * (plan.width * NUM_MICROBATCHES))
            ]
            for own in parts
        ]
        expected = oracle(self.model, setting, data, sizes=sizes, norms=norms)
        assert len(expected) == NUM_BATCHES
        _check_ledger([line.samples for line in run.hub.rounds], self.num_samples)
        last = NUM_BATCHES - 1
        _check_same([(seen.weights[last], {}) for seen in run.seen.values()])
        for stage in range(run.depth):  # replicas of a site have other pieces of what optimizers remember
            of_stage = [seen for rank, seen in run.seen.items() if rank.stage == stage]
            _check_same([({}, seen.states[last]) for seen in of_stage])
        for seen in run.seen.values():
            self._check_near([seen.losses[batch] for batch in sorted(seen.losses)], expected)
            for batch, weights in seen.weights.items() if self._is_exact else ():
                _check_close(weights, expected[batch].weights, max(self._tolerance, 1e-11))

    def _check_averages(self) -> None:
        diloco = DilocoSettings(2) if "diloco" in self.names else None
        run = _ReadingAverages(self, diloco)
        run.run()
        _check_ledger([line.samples for line in run.hub.rounds], self.num_samples)
        _check_same([(told.weights[-1], {}) for told in run.told.values()])
        expected = expected_of_groups(run) if diloco is None else expected_of_outer_steps(run, diloco)
        for rank, told in run.told.items():
            updates = expected[rank.replica]
            self._check_near([told.losses[one.batch] for one in updates], updates)
            if self._is_exact:
                _check_close(
                    told.weights[-1], updates[told.ends[-1] - 1].weights, max(self._tolerance, 1e-11)
                )

    @cached_property
    def model(self) -> Model:
        """The model of the run."""
        return words(
            tied="tied" in self.names,
            adapted=bool(self.names & {"lora", "nf4"}),
            packs="nf4" in self.names,
            dtype="bfloat16" if "bfloat16" in self.names else "float64",
        )

    @cached_property
    def setting(self) -> Setting:
        """How its pipelines train; with replicas that may die, of one, or of a site of two that share."""
        names = self.names
        mode = self._of_axis("how replicas agree")
        share = self._of_axis("what replicas share")
        is_one = mode in ("quorum", "groups", "diloco") and share is None
        schedule = self._of_axis("schedule") or "1f1b"
        num_stages = 4 if schedule in ("interleaved", "zbv") else 2
        num_units = len(self.model.units)
        plan = Plan(
            tuple(stage * num_units // num_stages for stage in range(1, num_stages)),
            NUM_MICROBATCHES,
            schedule,
            width=1 if is_one else WIDTH,
            recompute=tuple(range(num_stages)) if "recompute" in names else (),
            codecs=(BoundaryCodecs("int8", "int8"),) * (num_stages - 1) if "boundary-codec" in names else (),
            updates_early=False,
            whole_weights=2 if share == "shard-weights" and "offloading" in names else 0,
        )
        bank_dtype = torch.bfloat16 if "bfloat16" in names else None
        if "offloading" in names:
            sizes = sizes_of(self.model, plan, bank_dtype=bank_dtype, stash=4096)
            plan = paged(
                replace(plan, updates_halfway=share == "shard-optimizer"),
                sizes,
                0.5,
                is_summed=True,
                stashes="compile" not in names,
            )
        return Setting(
            plan,
            optimizer="muon" if "muon" in names else "adamw",
            bank_dtype=bank_dtype,
            reads_apart="private-data" in names and mode in (None, "allreduce"),
            sum_codec="int4" if "sum-codec" in names and mode not in ("groups", "diloco") else "none",
            gradient="principal:1" if "principal" in names else "whole",
            shard=(share or "shard-none").removeprefix("shard-"),
            compiles="compile" in names,
            paging=PagingSettings(mover=partial(StrictMover, seed=SEED), memory=poisoned),
        )

    def _of_oracle(self, setting: Setting) -> Setting:
        """What one process is to do: it has no memory to save."""
        plan = replace(cast(Plan, setting.plan), paging=None)
        return replace(setting, plan=plan, shard="none", compiles=False, gradient="whole")

    @property
    def num_samples(self) -> int:
        """The samples of a batch. Replicas of sites have half as many each, too few to slice."""
        shares = self._of_axis("what replicas share") is not None
        is_of_sites = shares and self._of_axis("how replicas agree") in ("quorum", "groups", "diloco")
        return BATCH * self._least if is_of_sites else BATCH

    @property
    def _sharing(self) -> Sharing | None:
        if "balance" not in self.names:
            return None
        most = self.num_samples // NUM_MICROBATCHES
        limits = limits_of(NUM_MICROBATCHES, [most, most], least_per_microbatch=self._least)
        even = (self.num_samples // WIDTH,) * WIDTH
        return Sharing(even, limits, Policy(every=1), 0, lambda _batch, rank, samples: (1 + rank) * samples)

    @property
    def _least(self) -> int:
        return 2 if "1f1b-sliced" in self.names else 1

    @property
    def _is_exact(self) -> bool:
        return not self.names & INEXACT

    @property
    def _tolerance(self) -> float:
        """How far weights may be from those of one process."""
        return 1e-11 if self.names & OTHER_ORDER else 0.0

    def _of_axis(self, axis: str) -> str | None:
        return next((name for name in self.names if CAPABILITIES[name].axis == axis), None)

    def public(self) -> Samples:
        """The samples that every rank may read, made anew: a stream can be read by one alone."""
        samples: Samples = _stream() if "stream" in self.names else _tokens(20, 1)
        if "mixture" in self.names:
            return MixedSamples((MixedSource("one", 3.0, _tokens(12, 4)), MixedSource("other", 1.0, samples)))
        return samples

    def _data(self, own: int, pipeline: Pipeline) -> tuple[Samples, SampleOrder]:
        home = self.home(own)
        if home is None:
            public = self.public()
            return public, order_of(public, SEED)
        rows = pipeline.cutter.rows_of_replicas
        return home.samples, home.order(lambda step: rows(step, self.num_samples))

    def home(self, own: int, *, is_added: bool = False) -> ReadableData | None:
        """What a replica reads on its server; None if nothing is private."""
        if "private-data" not in self.names:
            return None
        public = self.public()
        num_public = NUM_BATCHES * self.num_samples if "stream" in self.names else len(public)
        return ReadableData(
            ReadableSamples(public, PRIVATE[own], f"server{own}"),
            order_of(public, SEED),
            Stock(num_public, tuple(map(len, PRIVATE)), self.num_samples, is_added),
            SEED,
            ("server0", "server1"),
            OWNERS,
            own,
            (self.num_samples // WIDTH,) * WIDTH,
        )

    def dealt(
        self,
        replica: int,
        pipeline: Pipeline,
        num_batches: int,
        deal: Callable[[int], Sequence[range] | None],
    ) -> DealtBatches:
        """What a replica reads of the samples that a coordinator assigns."""
        home = self.home(OWNERS[replica], is_added=True)
        samples = self.public() if home is None else home.samples
        return DealtBatches(
            samples,
            order_of(samples, SEED) if home is None else home.public,
            self.num_samples,
            pipeline.num_trained,
            num_batches,
            prefetch=0,
            wanted=pipeline.cutter.wanted,
            deal=deal,
            private=None if home is None else home.added(replica),
        )

    def read(self, replica: int, batch: int, places: Sequence[SamplePlaces]) -> Batch:
        """The same of one batch, as one process reads it."""
        home = self.home(OWNERS[replica], is_added=True)
        samples = self.public() if home is None else home.samples
        order = order_of(samples, SEED) if home is None else home.public
        numbers = [int(number) for one in places for number in order.numbers(one.begin, one.count)]
        if home is not None:
            numbers += home.added(replica)(batch).tolist()
        return dict(samples.take(numbers))

    def _whole(self, step: int, pipeline: Pipeline) -> Batch:
        """A batch as somebody has it who may read everything."""
        views = [self._data(own, pipeline) for own in OWNERS]
        numbers = np.array([order.numbers(step * self.num_samples, self.num_samples) for _, order in views])
        found: list[Mapping[str, Tensor]] = []
        for column in numbers.T.tolist():
            owner = next((own for own, number in enumerate(column) if number < ELSEWHERE), 0)
            found.append(views[owner][0].take([column[owner]]))
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}

    def _check_near(self, losses: Sequence[float], expected: Sequence[Update]) -> None:
        """Losses are those of one process, or near them after updates that a codec has changed."""
        assert len(losses) == len(expected)
        for number, (loss, update) in enumerate(zip(losses, expected, strict=True)):
            most = 1e-9 if self._is_exact else 0.01 if number == 0 else 0.3
            assert isfinite(loss)
            assert abs(loss - update.loss) <= most * abs(update.loss), (number, loss, update.loss)


def _note_whole(pipeline: Pipeline, batches: RankBatches, trained: Trained) -> None:
    """Train where replicas share: they have the whole weights together, and no one all optimizer state."""
    for result in pipeline.train(batches):
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.shares.append(result.shares)
    trained.weights.append(pipeline.state_dict())


class _ReadingReplicas(Replicas):
    """Replicas that may die, each with a loader of its own."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        super().__init__(
            composition.model,
            composition.setting,
            WIDTH,
            {},
            NUM_BATCHES,
            composition.num_samples,
            balances="balance" in composition.names,
            least=composition._least,
        )

    def _batches(self, agent: ExchangeAgent, pipeline: Pipeline) -> Iterator[Any]:
        def deal(number: int) -> Sequence[range]:
            dealt = agent.deals.dealt(number)
            assert dealt is not None, "batches of all replicas have no windows"
            return _ranges(dealt.samples)

        left = NUM_BATCHES - pipeline.num_trained
        return iter(self._composition.dealt(agent.own.replica, pipeline, left, deal))

    def parts(self) -> list[list[Batch]]:
        """What each member of each committed round has read."""
        return [
            [
                self._composition.read(replica, line.batch, own)
                for replica, own in zip(line.members, line.samples, strict=True)
            ]
            for line in self.hub.rounds
        ]


class _ReadingAverages(AveragingReplicas):
    """Replicas that average weights, each with a loader of its own."""

    def __init__(self, composition: Composition, diloco: DilocoSettings | None) -> None:
        self._composition = composition
        super().__init__(
            composition.model,
            composition.setting,
            WIDTH,
            {},
            (NUM_BATCHES,),
            composition.num_samples,
            diloco=diloco,
            lag=0 if diloco is None else 1,
            in_step=True,
            of_replicas=composition.setting.shard != "none",
            codec="int4" if "sum-codec" in composition.names else "none",
        )

    def batch(self, replica: int, number: int, samples: Sequence[SamplePlaces]) -> Batch:
        return self._composition.read(replica, number, samples)

    def _batches(self, rank: RankId, agent: ExchangeAgent, pipeline: Pipeline) -> Iterator[Any]:
        def deal(number: int) -> Sequence[range] | None:
            dealt = self._dealt(rank, agent, number)
            if dealt is None:
                return None
            self.told[rank].dealt[number] = dealt.samples
            return _ranges(dealt.samples)

        return iter(self._composition.dealt(rank.replica, pipeline, 1 << 20, deal))


def _ranges(samples: Sequence[SamplePlaces]) -> list[range]:
    return [range(one.begin, one.end) for one in samples]


def _check_ledger(rounds: Sequence[Sequence[Sequence[SamplePlaces]]], num_samples: int) -> None:
    """Every sample of the run counts once, with so many in a batch."""
    places = [place for line in rounds for own in line for one in own for place in range(one.begin, one.end)]
    assert sorted(places) == list(range(NUM_BATCHES * num_samples))


def _check_same(held: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]]) -> None:
    """What several ranks hold is the same to the last bit, and all of it is finite."""
    first: dict[str, Tensor] = {}
    for weights, states in held:
        own = {f"{key} of {name}": value for name, one in states.items() for key, value in one.items()}
        for what, tensor in {**weights, **own}.items():
            assert bool(tensor.isfinite().all()), what
            assert torch.equal(tensor, first.setdefault(what, tensor)), what


def _check_close(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    for name, tensor in weights.items():
        if name in expected:
            torch.testing.assert_close(
                tensor, expected[name].to(tensor.dtype), rtol=tolerance, atol=tolerance
            )
