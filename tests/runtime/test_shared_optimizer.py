"""Replicas that share an optimizer compute what they do with one each, in less memory, and save all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.parameter_groups import BankMemory
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot, joined
from bireme.schedule.instruction import Kind
from bireme.sync.exchange import SentBytes
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.paged import paged, sizes_of
from tests.support.poisoned import poisoned
from tests.support.small_models import Batch, Model, token_batches
from tests.support.strict_mover import StrictMover
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

TAKEN_AFTER = 3
"""Batches, of which more are under way then."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank saw: of every batch the loss, the verdict and the weights after it; a snapshot on the way
    and one at the end; all that it held then; the losses of evaluations, of one sample and of a batch, what
    its stages keep, and what it had sent at the end.
    """

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    weights: list[dict[str, Tensor]]
    amid: Snapshot | None
    end: Snapshot
    held: Snapshot
    evaluated: list[float]
    memory: list[BankMemory]
    sent: SentBytes


def train(
    model: Model, setting: Setting, data: Sequence[Batch], saved: Sequence[Snapshot] = ()
) -> list[Seen]:
    fabric = ThreadFabric(setting.plan.num_ranks, timeout_s=60.0)

    def work(rank: int) -> Seen:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        try:
            if saved:
                pipeline.restore(saved[rank % len(saved)])
            return follow(pipeline)
        finally:
            pipeline.close()

    def follow(pipeline: Pipeline) -> Seen:
        results, weights, amid = [], [], None
        for result in pipeline.train(data):
            results.append(result)
            weights.append({name: one.clone() for name, one in pipeline.parameters().items()})
            if result.batch + 1 == TAKEN_AFTER:
                amid = pipeline.snapshot()
        end = pipeline.snapshot()
        return Seen(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            [result.is_skipped for result in results],
            weights,
            amid,
            end,
            pipeline.snapshot(all_held=True),
            [pipeline.evaluate([one]).loss for one in (first_of(data[0]), data[0])],
            [stage.banks.memory() for stage in pipeline.stages.values()],
            pipeline.sum_bytes,
        )

    torch.set_num_threads(1)
    return run_threads(setting.plan.num_ranks, work)


def first_of(batch: Batch) -> Batch:
    """The first sample alone, of which all replicas but one have no part."""
    return {name: rows[:1] for name, rows in batch.items()}


def together(snapshots: Sequence[Snapshot | None]) -> Snapshot:
    """The whole of what the ranks took, in which nothing is there twice."""
    parts = [one for one in snapshots if one is not None]
    names = [name for part in parts for name in part.tensors]
    assert len(names) == len(set(names))
    return replace(parts[0], tensors={n: t for part in parts for n, t in part.tensors.items()})


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0) -> None:
    assert set(found) == set(expected)
    for name, one in expected.items():
        if not torch.equal(found[name], one):
            torch.testing.assert_close(found[name], one, rtol=tolerance, atol=tolerance, msg=name)


def model_of(setting: Setting, *, tied: bool, freeze: tuple[str, ...] = ()) -> Model:
    """A model to compute with in float64, or in the banks' bfloat16."""
    dtype = "float64" if setting.bank_dtype is None else "bfloat16"
    return tiny_text(tied=tied, dtype=dtype, evaluates=True, freeze=freeze)


SHORT = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """How replicas train, whether the first and the last stage share a table, and how much may differ."""

    alone: Setting
    tied: bool = False
    tolerance: float = 0.0
    has_whole: bool = False
    """Whether each matrix is of one replica, so parts are less equal."""
    freeze: tuple[str, ...] = ()
    """What does not learn."""

    @property
    def model(self) -> Model:
        return model_of(self.alone, tied=self.tied, freeze=self.freeze)


MATRICES = ("layers.*.weight", "tokens.*", "head.*")

IN_BFLOAT16 = Case(Setting(plan_for("2bw", width=2), "sgd", bank_dtype=SHORT))
ON_ONE_RANK = Plan((2, 4, 6), 4, "2bw", width=3, stages_per_rank=4)

CASES = {
    "tied over ranks": Case(Setting(plan_for("1f1b", width=2)), tied=True),
    "unequal shares": Case(Setting(plan_for("2bw-fresh", width=2, micro_batch_sizes=(1, 3))), tied=True),
    "short": IN_BFLOAT16,
    "short and clipped": Case(
        Setting(plan_for("2bw-fresh", width=3), clip_norm=0.5, bank_dtype=SHORT), tolerance=1e-5
    ),
    "tied on one rank": Case(Setting(ON_ONE_RANK, clip_norm=0.5), tied=True, tolerance=1e-12),
    "frozen": Case(Setting(plan_for("2bw", width=2)), freeze=MATRICES),
    "Muon": Case(Setting(plan_for("1f1b", width=2), "muon"), has_whole=True),
    "Muon, short, with trial steps": Case(
        Setting(plan_for("2bw-fresh", width=3), "muon", bank_dtype=SHORT), has_whole=True
    ),
}

WEIGHTS_TOO = {
    "parts in sweeps": Case(
        Setting(Plan((2, 4, 6), 4, "1f1b", width=2, stages_per_rank=2, sweep=4, recompute=(1,)))
    ),
    "short": IN_BFLOAT16,
    "tied on one rank": Case(
        Setting(replace(ON_ONE_RANK, whole_weights=1), clip_norm=0.5), tied=True, tolerance=1e-12
    ),
    "frozen": Case(Setting(plan_for("2bw", width=2), bank_dtype=SHORT), freeze=MATRICES),
    "frozen in sweeps": Case(
        Setting(Plan((2, 4, 6), 4, "1f1b", width=2, stages_per_rank=2, sweep=4)), freeze=MATRICES
    ),
    "split backwards": Case(Setting(plan_for("zb-h1", width=2))),
    "Muon": Case(Setting(plan_for("2bw", width=2), "muon", clip_norm=0.5), tolerance=1e-12, has_whole=True),
}
"""The same for replicas that share the weights as well."""

NUM_BATCHES, NOTHING = 4, 2
"""How many batches a case has, and in which of them nothing counts."""


def data_for(plan: Plan) -> list[Batch]:
    data = token_batches(8 * plan.width, NUM_BATCHES)
    data[NOTHING] = {**data[NOTHING], "labels": torch.full_like(data[NOTHING]["labels"], -100)}
    return data


@cache
def trained_alone(case: Case) -> list[Seen]:
    """What replicas with an optimizer each see."""
    assert isinstance(case.alone.plan, Plan)
    return train(case.model, case.alone, data_for(case.alone.plan))


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("shard", "name"),
    [*(("optimizer", name) for name in CASES), *(("weights", name) for name in WEIGHTS_TOO)],
)
def test_it_computes_what_replicas_with_an_optimizer_each_do(shard: str, name: str) -> None:
    """To the last bit, but for the norm, which is a sum of other pieces. One batch counts for nothing. The
    optimizer's part of each is of equal size, and so is that of the weights that only it steps; and those of
    weights and gradients, where these are shared too.
    """
    case = (CASES if shard == "optimizer" else WEIGHTS_TOO)[name]
    plan, tolerance = case.alone.plan, case.tolerance
    assert isinstance(plan, Plan)
    width = plan.width
    expected = trained_alone(replace(case, alone=replace(case.alone, plan=replace(plan, whole_weights=0))))
    found = train(case.model, replace(case.alone, shard=shard), data_for(plan))
    for one, other in zip(found, expected, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=tolerance or 1e-15, nan_ok=True)
        assert one.norms == pytest.approx(other.norms, rel=max(tolerance, 1e-6))
        assert one.skipped == other.skipped == [place == NOTHING for place in range(NUM_BATCHES)]
        for weights, wanted in zip(one.weights, other.weights, strict=True):
            assert_alike(weights, wanted, tolerance)
        assert one.evaluated == pytest.approx(other.evaluated, rel=tolerance or 1e-15)
    for moment in ("amid", "end"):
        saved, plain = (together([getattr(one, moment) for one in seen]) for seen in (found, expected))
        assert_alike(joined(saved.tensors), plain.tensors, tolerance)
    per_replica = len(found) // width
    for place in range(per_replica):
        for stage, whole in enumerate(expected[place].memory):
            own = [found[place + replica * per_replica].memory[stage] for replica in range(width)]
            kinds = ["apart_bytes", "optimizer_bytes"]
            kinds += ["banks_bytes", "frozen_bytes"] * (shard == "weights")
            for kind in kinds:
                sizes, size = [getattr(one, kind) for one in own], getattr(whole, kind)
                assert_parts(sizes, size, size / 4 if case.has_whole else 1024)
            if shard == "optimizer":
                assert all(one.banks_bytes == whole.banks_bytes for one in own)
                assert all(one.frozen_bytes == whole.frozen_bytes for one in own)
    if shard == "weights":
        assert_gathered(found, expected, replace(plan, whole_weights=plan.whole_weights or 2))


def assert_gathered(found: Sequence[Seen], plain: Sequence[Seen], plan: Plan) -> None:
    """Training has sent the weights that the program gathers, to the byte, with those that do not learn once
    while a stage has any version whole. Evaluations are not counted; what else was sent are sums.
    """
    program = plan.source.program(NUM_BATCHES)
    for place in range(program.num_ranks):
        own = [found[place + replica * program.num_ranks].sent for replica in range(plan.width)]
        whole = {
            stage: plain[place].memory[number].banks_bytes // program.banks[stage]
            for number, stage in enumerate(program.stages_of(place))
        }
        steps = [step for step in program.tracks[place] if step.kind is Kind.FETCH]
        gathered = sum(whole[step.stage] for step in steps)
        frozen = {
            stage: plain[place].memory[number].frozen_bytes
            for number, stage in enumerate(program.stages_of(place))
        }
        num_whole = dict.fromkeys(frozen, 0)
        for step in program.tracks[place]:
            if step.kind is Kind.FETCH:
                gathered += 0 if num_whole[step.stage] else frozen[step.stage]
                num_whole[step.stage] += 1
            elif step.kind is Kind.EVICT:
                num_whole[step.stage] -= 1
        gathered *= plan.width - 1
        assert sum(one.gathered for one in own) == gathered > 0
        assert all(one.gathered < one.sent for one in own)


def assert_parts(sizes: Sequence[int], whole: int, more: float) -> None:
    """These are equal parts, but for what the owners of pieces of one parameter count each, and for places
    where parts may begin, which make the largest `more` than the mean.
    """
    assert whole <= sum(sizes) <= whole + 500
    assert max(sizes) <= whole / len(sizes) + more


@pytest.mark.few(1)
@pytest.mark.parametrize("shard", ["weights", "optimizer"])
def test_what_is_offloaded_too_is_saved_evaluated_and_gone_on_from_to_the_last_bit(shard: str) -> None:
    plan = Plan((2, 4, 6), 4, "2bw", width=2, stages_per_rank=4, updates_halfway=shard == "optimizer")
    plan = replace(plan, whole_weights=2 if shard == "weights" else 0)
    alone = Setting(plan, shard=shard, bank_dtype=SHORT)
    model, data = model_of(alone, tied=False, freeze=("layers.0.*",)), token_batches(12, 5)
    sizes = sizes_of(model, plan, bank_dtype=SHORT, stash=40_000)
    offloading = replace(
        alone,
        plan=paged(plan, sizes, 0.1, is_summed=shard == "optimizer"),
        paging=PagingSettings(mover=StrictMover, memory=poisoned),
    )
    expected, found = (train(model, setting, data) for setting in (alone, offloading))
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert one.evaluated == other.evaluated
        assert_alike(one.held.tensors, other.held.tensors)
    for moment in ("amid", "end"):
        saved, plain = (together([getattr(one, moment) for one in seen]) for seen in (found, expected))
        assert_alike(saved.tensors, plain.tensors)
    rest = train(model, offloading, data[TAKEN_AFTER:], [together([one.amid for one in expected])])
    assert rest[0].losses == expected[0].losses[TAKEN_AFTER:]
    assert_alike(rest[0].weights[-1], expected[0].weights[-1])


@pytest.mark.parametrize("schedule", ["2bw", "2bw-fresh"])
def test_resuming_from_a_snapshot_with_it_or_without_is_never_having_stopped(schedule: str) -> None:
    alone = Setting(plan_for(schedule, width=2))
    model, data = model_of(alone, tied=True), token_batches(12, 5)
    shared = replace(alone, shard="optimizer")
    expected = train(model, alone, data)
    saved = together([one.amid for one in train(model, shared, data[: TAKEN_AFTER + 1])])
    resumed = {
        "2bw": [(alone, saved)],
        "2bw-fresh": [(shared, saved), (shared, together([one.amid for one in expected]))],
    }
    for setting, snapshot in resumed[schedule]:
        rest = train(model, setting, data[TAKEN_AFTER:], [snapshot])
        assert rest[0].losses == expected[0].losses[TAKEN_AFTER:]
        assert_alike(rest[0].weights[-1], expected[0].weights[-1])
    if schedule == "2bw":  # trial versions are of each replica, and others begin with the newest weights
        rest = train(model, replace(shared, plan=plan_for(schedule, width=3)), data[TAKEN_AFTER:], [saved])
        assert rest[0].losses == pytest.approx(expected[0].losses[TAKEN_AFTER:], rel=1e-12)


@pytest.mark.parametrize("later", ["2bw-fresh", "2bw"])
def test_the_schedule_can_change_on_the_way(later: str) -> None:
    """As it does after a delay warm-up: each rank makes its next pipeline from all that it held."""
    data, seen = token_batches(8, 4), []
    for shard in ("none", "optimizer"):
        first = Setting(plan_for("1f1b", width=2), bank_dtype=SHORT, shard=shard)
        model = model_of(first, tied=False)
        held = [one.held for one in train(model, first, data[:2])]
        seen.append(train(model, replace(first, plan=plan_for(later, width=2)), data[2:], held))
    expected, found = seen
    assert found[0].losses == expected[0].losses
    for one, other in zip(found, expected, strict=True):
        assert_alike(one.weights[-1], other.weights[-1])


def test_what_does_not_go_with_it_is_refused_in_a_sentence() -> None:
    model, plan = tiny_text(tied=True), plan_for("1f1b", width=2)
    refused = {
        "There is no shard 'gradients'": Setting(plan, shard="gradients"),
        "gradients of one replica before any sum": Setting(plan_for("2bw-fresh", width=2), shard="weights"),
        'but shard is "none"': Setting(replace(plan, whole_weights=2)),
    }
    for sentence, setting in refused.items():
        with pytest.raises(BiremeError, match=sentence):
            pipeline_of(model, setting, ThreadFabric(plan.num_ranks).of(0))
