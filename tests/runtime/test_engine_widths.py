"""Stages of unequal width compute what one process does: sums over the ranks of a stage, once each batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bireme.codec.description import BoundaryCodecs, LinkCodecs
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.runtime.layout import refuse_with_widths
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from bireme.schedule.routes import Routes
from tests.support.engine_parity import (
    Setting,
    Trained,
    assert_equal,
    evaluated,
    oracle,
    pipeline_of,
    train_on_threads,
    train_rank,
)
from tests.support.small_models import Batch, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

ROUNDING = 1e-12


def wide(schedule: str, **more: Any) -> Plan:
    """Six micro-batches over 2, 1 and 3 ranks, for a model of eight units."""
    asked = {"stage_widths": (2, 1, 3), "stage_shares": ((4, 2), (6,), (2, 3, 1))} | more
    return Plan((3, 5), 6, schedule, **asked)


@pytest.mark.parametrize(
    ("schedule", "rendezvous"), [("gpipe", False), ("1f1b", True), ("2bw", True), ("2bw", False)]
)
def test_every_schedule_computes_what_one_process_does(schedule: str, *, rendezvous: bool) -> None:
    model = tiny_text(tied=True, dropout=0.3)
    setting = Setting(wide(schedule), clip_norm=0.5, windows=(3, 2))
    data = token_batches(13, 5)
    found = train_on_threads(model, setting, data, rendezvous=rendezvous)
    assert_equal(found, oracle(model, setting, data), tolerance=ROUNDING)


INT8 = LinkCodecs.steady((BoundaryCodecs("int8", "int8"),) * 2)

TOGETHER: dict[str, tuple[Plan, dict[str, Any]]] = {
    "recomputation": (wide("1f1b", recompute=(0, 2), recompute_units=(4,)), {}),
    "bfloat16": (wide("2bw"), {"bank_dtype": torch.bfloat16}),
    "codecs": (wide("2bw"), {"codecs": INT8}),
    "Muon": (wide("2bw"), {"optimizer": "muon"}),
    "one stage": (Plan((), 4, "1f1b", stage_widths=(3,), stage_shares=((1, 2, 1),)), {}),
    "lookahead": (wide("1f1b", lookahead=1), {}),
    "labels that stay on their server": (wide("1f1b"), {"reads_apart": True}),
}


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("case", TOGETHER)
def test_it_goes_with(case: str) -> None:
    plan, more = TOGETHER[case]
    model = tiny_text(dtype="bfloat16") if case == "bfloat16" else tiny_text(tied=True)
    setting = Setting(plan, clip_norm=0.5, **more)
    data = token_batches(13, 4)
    found = train_on_threads(model, setting, data)
    tolerance = {"bfloat16": 2e-2, "Muon": 1e-8}.get(case, ROUNDING)
    assert_equal(found, oracle(model, setting, data), tolerance=tolerance)


def _whole(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The tensors of all ranks, of which none is there twice."""
    names = [name for one in snapshots for name in one.tensors]
    assert len(names) == len(set(names))
    return replace(snapshots[0], tensors={n: t for one in snapshots for n, t in one.tensors.items()})


def _trained_on(
    plan: Plan, window: list[Batch], saved: Snapshot | None
) -> tuple[list[float], Snapshot, list[float], dict[str, Tensor]]:
    """The losses of a window from a snapshot on, the next snapshot, the loss on HELD_OUT, and all weights."""
    model, fabric = tiny_text(tied=True, evaluates=True), ThreadFabric(plan.num_ranks)

    def work(rank: int) -> tuple[list[float], Snapshot, float, dict[str, Tensor]]:
        pipeline = pipeline_of(model, Setting(plan), fabric.of(rank))
        if saved is not None:
            pipeline.restore(saved)
        losses = [result.loss for result in pipeline.train(window)]
        evaluation = pipeline.evaluate(HELD_OUT)
        assert evaluation.num_samples == 9
        found = losses, pipeline.snapshot(), evaluation.loss, pipeline.full_state_dict()
        pipeline.close()
        return found

    losses, snapshots, evaluations, weights = zip(*run_threads(plan.num_ranks, work), strict=True)
    return losses[0], _whole(snapshots), list(evaluations), weights[0]


HELD_OUT = [*token_batches(7, 1, 50), *token_batches(2, 1, 51)]


@pytest.mark.slow
def test_a_run_goes_on_from_other_widths_and_evaluates_the_same() -> None:
    """A stage is saved once, whatever its width; a batch to evaluate may have fewer samples than ranks."""
    model, data = tiny_text(tied=True, evaluates=True), token_batches(13, 4)
    plans = [wide("1f1b"), Plan((2, 5), 6, "1f1b", stage_widths=(1, 2, 1)), Plan((4,), 3, "1f1b", width=2)]
    windows = [data[:1], data[1:2], data[2:]]
    saved: Snapshot | None = None
    losses: list[float] = []
    for plan, window in zip(plans, windows, strict=True):
        more, saved, evaluations, weights = _trained_on(plan, window, saved)
        losses += more
        assert evaluations == pytest.approx([evaluated(model, weights, HELD_OUT)] * plan.num_ranks)
    alone = oracle(model, Setting(Plan((4,), 6, "1f1b")), data)
    assert losses == pytest.approx([update.loss for update in alone], rel=1e-11)


def test_a_rank_reads_the_rows_of_its_own_microbatches() -> None:
    """And all labels, which give the weights of micro-batches. Runs of neighbors are read at once."""
    model, plan = tiny_text(), wide("1f1b")
    fabric = ThreadFabric(plan.num_ranks)

    def work(rank: int) -> list[tuple[tuple[str, ...], int, int]]:
        pipeline = pipeline_of(model, Setting(plan), fabric.of(rank))
        wanted = pipeline.cutter.wanted(0, 12)
        pipeline.close()
        return [(one.names, one.begin, one.end) for one in wanted]

    labels = (("labels",), 0, 12)
    first, second, middle, *last = run_threads(plan.num_ranks, work)
    ids = ("input_ids",)
    assert first == [labels, (ids, 0, 2), (ids, 4, 8), (ids, 10, 12)]
    assert second == [labels, (ids, 2, 4), (ids, 8, 10)]
    assert middle == [labels]
    assert last == [[labels]] * 3


def test_the_ranks_of_a_stage_send_their_sums_through_a_codec() -> None:
    """All ranks of a stage get the same bits, and the rest that was not sent is kept for each of them."""
    model = tiny_text()
    setting = Setting(wide("2bw"), sum_codec="int2", optimizer="sgd")
    data = token_batches(12, 4)
    fabric = ThreadFabric(setting.plan.num_ranks)

    def work(rank: int) -> tuple[Trained, Snapshot, int]:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        trained = train_rank(pipeline, setting, data)
        taken, sent = pipeline.snapshot(), pipeline.sum_bytes.sent
        pipeline.close()
        return trained, taken, sent

    ranks = run_threads(setting.plan.num_ranks, work)
    for name, tensor in ranks[0][0].weights[-1].items():
        assert torch.equal(tensor, ranks[1][0].weights[-1][name]), name
    whole = _whole([taken for _, taken, _ in ranks])
    members = {key.split("/")[1] for key in whole.tensors if key.startswith("feedback/")}
    assert members == {"0-of-2", "1-of-2", "0-of-3", "1-of-3", "2-of-3"}
    sent = [one for *_, one in ranks]
    assert sent[2] == 0
    assert min(sent[:2] + sent[3:]) > 0
    dense = [update.loss for update in oracle(model, replace(setting, sum_codec="none"), data)]
    assert ranks[0][0].losses == pytest.approx(dense, rel=0.05)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_what_replicas_of_whole_pipelines_do_is_refused(shard: str) -> None:
    model, plan = tiny_text(), wide("1f1b")
    with pytest.raises(BiremeError, match=r"stages of unequal width \(2, 1, 3 ranks\)"):
        pipeline_of(model, Setting(plan, shard=shard), ThreadFabric(plan.num_ranks).of(0))


def test_capabilities_of_whole_pipelines_are_refused_with_wide_stages_alone() -> None:
    used = {"quorum": "there is an agreement"}
    refuse_with_widths(Routes((0, 1)), used)
    with pytest.raises(BiremeError, match="there is an agreement, which is for replicas of whole pipelines"):
        refuse_with_widths(Routes.wide(((2, 2), (4,))), used)


def test_a_pipeline_needs_as_many_processes_as_its_stages_have_ranks() -> None:
    with pytest.raises(BiremeError, match=r"The plan is for 6 processes"):
        Pipeline(tiny_text().graph, wide("1f1b"), ThreadFabric(3).of(0), weights=tiny_text().given)
