"""Codecs on boundaries: the engine computes what one process does with `decode∘encode` at the cuts.

In float64 and to the last bit: encoding is a fixed function of the tensor, wherever it runs.
"""

import pytest
import torch

from bireme.codec import NO_CODECS, BoundaryCodecs, CodecPhase, LinkCodecs, parse_codec
from bireme.plan.plan import Plan
from bireme.runtime.message_format import Coding, TensorSpec, WireFormat
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from bireme.schedule.instruction import Message
from tests.runtime.test_coded_sums import WIDTH, layers
from tests.support.engine_parity import (
    Setting,
    Trained,
    assert_equal,
    oracle,
    pipeline_of,
    plan_for,
    tolerance_of,
    train_on_threads,
    train_rank,
)
from tests.support.small_models import real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow


def everywhere(forward: str, backward: str = "", num_boundaries: int = 3) -> LinkCodecs:
    return LinkCodecs.steady((BoundaryCodecs(forward, backward or forward),) * num_boundaries)


EACH = {
    "bfloat16": everywhere("bfloat16"),
    "int8": everywhere("int8"),
    "int8 there, int4 back": everywhere("int8", "int4"),
    "topk": everywhere("topk:0.25"),
    "topk in few bits": everywhere("topk:0.5:8", "topk:0.5:4"),
    "each boundary its own": LinkCodecs.steady(
        (BoundaryCodecs("int3", "none"), BoundaryCodecs("topk:0.3:8", "topk:0.3"))
    ),
    "topk over the tensor": everywhere("topk:0.25:8:2"),
    "a user's own": everywhere("tests.support.own_codecs:Zipped"),
    "another one later": LinkCodecs(
        (
            CodecPhase(0, (BoundaryCodecs("int8", "int8"),) * 3),
            CodecPhase(2, (BoundaryCodecs("topk:0.25:8", "topk:0.25:8"),) * 3),
        )
    ),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("codecs", EACH.values(), ids=EACH)
def test_with_any_codec_training_equals_one_process_to_the_last_bit(codecs: LinkCodecs) -> None:
    model, data = tiny_text(), token_batches(8, 4)
    setting = Setting(plan_for("2bw-fresh"), codecs=codecs)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data))


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("zbv", {}),
        ("2bw", {}),
        ("2bw", {"recompute": "all"}),
        ("1f1b", {"recompute": "all"}),
        ("1f1b", {"width": 2}),
        ("1f1b", {}),
        ("1f1b-sliced", {}),
        ("interleaved", {}),
    ],
    ids=str,
)
def test_masks_hold_from_the_forward_to_the_backward_under_every_kind_of_program(
    schedule: str, more: dict[str, object]
) -> None:
    """With halves, split backwards, recomputed forwards and replicas."""
    model, data = tiny_text(), token_batches(8 * int(str(more.get("width", 1))), 3)
    setting = Setting(plan_for(schedule, **more), codecs=everywhere("topk:0.25"))  # type: ignore[arg-type]
    found = train_on_threads(model, setting, data, rendezvous=True)
    assert_equal(found, oracle(model, setting, data), tolerance=tolerance_of(schedule))


@pytest.mark.parametrize("codecs", ["another one later", "topk over the tensor"])
def test_going_on_from_a_snapshot_with_codecs_is_never_having_stopped(codecs: str) -> None:
    """The third batch has the threshold of the second: the run stops in the middle of its life."""
    model, data = tiny_text(), token_batches(8, 5)
    setting = Setting(plan_for("2bw"), codecs=EACH[codecs])
    whole = train_on_threads(model, setting, data)
    joined = ThreadFabric(3)
    stopped = run_threads(3, lambda rank: _train(pipeline_of(model, setting, joined.of(rank)), data, None, 3))
    parts = [one for _, one in stopped if one is not None]
    saved = Snapshot(
        parts[0].num_trained, parts[0].clip_scale, {k: v for one in parts for k, v in one.tensors.items()}
    )
    joined = ThreadFabric(3)
    gone_on = run_threads(
        3, lambda rank: _train(pipeline_of(model, setting, joined.of(rank)), data[3:], saved)
    )
    for (losses, _), expected in zip(gone_on, whole, strict=True):
        assert losses == expected.losses[3:]


def _train(
    pipeline: Pipeline, data: list[dict[str, torch.Tensor]], saved: Snapshot | None, stop: int | None = None
) -> tuple[list[float], Snapshot | None]:
    """Train from a snapshot on, and take one after so many batches, while more are under way."""
    try:
        if saved is not None:
            pipeline.restore(saved)
        losses, taken = [], None
        for result in pipeline.train(data):
            losses.append(result.loss)
            if result.batch + 1 == stop:
                taken = pipeline.snapshot()
        return losses, taken
    finally:
        pipeline.close()


def test_none_sends_the_same_bytes_as_ever_and_others_send_fewer() -> None:
    model, data = tiny_text(), token_batches(8, 2)
    sent: dict[str, list[tuple[int, int]]] = {}

    def note(codecs: LinkCodecs, name: str) -> list[Trained]:
        setting = Setting(plan_for("1f1b"), codecs=codecs)
        joined = ThreadFabric(3)

        def work(rank: int) -> Trained:
            pipeline = pipeline_of(model, setting, joined.of(rank))
            try:
                trained = train_rank(pipeline, setting, data)
                sent.setdefault(name, []).extend(
                    (one.raw_bytes, one.sent_bytes) for one in pipeline.traffic.values()
                )
                return trained
            finally:
                pipeline.close()

        return run_threads(3, work)

    plain = note(NO_CODECS, "plain")
    named = note(everywhere("none"), "none")
    note(everywhere("int8"), "int8")
    assert [one.losses for one in plain] == [one.losses for one in named]
    for one, other in zip(plain, named, strict=True):
        for name, tensor in one.weights[-1].items():
            assert torch.equal(tensor, other.weights[-1][name])
    assert sent["plain"] == sent["none"]
    assert all(raw == as_sent for raw, as_sent in sent["plain"])
    assert all(as_sent < raw / 4 for raw, as_sent in sent["int8"])


def test_an_evaluation_goes_through_codecs_where_it_is_asked_to() -> None:
    model, data = tiny_text(evaluates=True), token_batches(8, 2)
    setting = Setting(plan_for("1f1b"), codecs=everywhere("topk:0.1:4"))
    bare = Setting(plan_for("1f1b"))

    def evaluated(setting: Setting, *, through_codecs: bool) -> float:
        joined = ThreadFabric(3)

        def work(rank: int) -> float:
            pipeline = pipeline_of(model, setting, joined.of(rank))
            try:
                return pipeline.evaluate(data, through_codecs=through_codecs).loss
            finally:
                pipeline.close()

        losses: list[float] = run_threads(3, work)
        return losses[0]

    as_it_is = evaluated(setting, through_codecs=False)
    assert as_it_is == evaluated(bare, through_codecs=False) == evaluated(bare, through_codecs=True)
    assert evaluated(setting, through_codecs=True) != as_it_is


def test_several_tensors_of_a_boundary_are_encoded_each_by_itself_and_others_go_as_they_are() -> None:
    codecs = BoundaryCodecs("topk:0.25:8", "topk:0.25:8")
    choice = codecs.choice(forward=True)
    forward = WireFormat(
        [
            TensorSpec("one", (4, 64), torch.float32, choice),
            TensorSpec("two", (2, 8, 32), torch.float32, choice),
            TensorSpec("ids", (4, 64), torch.int64),
        ]
    )
    backward = WireFormat(
        [TensorSpec(s.name, s.shape, s.dtype, choice, is_back=True) for s in forward.specs[:2]]
    )
    tensors = {"one": torch.randn(4, 64), "two": torch.randn(2, 8, 32), "ids": torch.arange(256).view(4, 64)}
    sender, receiver = Coding(), Coding()
    there, back = Message(True, 1, 0, 3, None), Message(False, 0, 0, 3, None)
    found = _carried(forward, there, tensors, sender, receiver)
    assert torch.equal(found["ids"], tensors["ids"])
    for name in ("one", "two"):
        assert (found[name] != 0).sum(-1).eq(tensors[name].shape[-1] // 4).all()
    ones = {name: torch.ones_like(tensors[name]) for name in ("one", "two")}
    gradients = _carried(backward, back, ones, receiver, sender)
    for name, gradient in gradients.items():
        assert torch.equal(gradient != 0, found[name] != 0)
    assert not sender._masks
    assert not receiver._masks
    assert backward.num_bytes < forward.num_bytes


def test_a_codec_that_draws_gets_another_seed_for_each_message_and_the_same_again() -> None:
    spec = TensorSpec("x", (4, 64), torch.float32, parse_codec("tests.support.own_codecs:Seeded"))
    keys = [
        Message(forward, 1, batch, number, None)
        for forward in (True, False)
        for batch in (0, 1)
        for number in (0, 1)
    ]

    def drawn() -> list[float]:
        given = {"x": torch.zeros(4, 64)}
        return [
            float(_carried(WireFormat([spec]), key, given, Coding(), Coding())["x"][0, 0]) for key in keys
        ]

    assert len(set(drawn())) == len(keys)
    assert drawn() == drawn()


@pytest.mark.parametrize("codec", ["int4", "topk:0.25", "topk:0.25:8:2"])
def test_a_step_that_has_diverged_is_seen_through_codecs_and_skipped(codec: str) -> None:
    data = real_batches(64, 4, WIDTH)  # of a micro-batch 16 samples cross: enough to be encoded
    data[1]["x"][5, 3] = torch.nan
    setting = Setting(Plan((1,), 4, "2bw"), optimizer="sgd", codecs=everywhere(codec, num_boundaries=1))
    found = train_on_threads(layers(), setting, data)
    assert found[0].skipped == [False, True, False, False]
    assert_equal(found, oracle(layers(), setting, data))


def _carried(
    wire: WireFormat, key: Message, tensors: dict[str, torch.Tensor], sender: Coding, receiver: Coding
) -> dict[str, torch.Tensor]:
    parcel = wire.parcel(torch.device("cpu"))
    parcel.address(key)
    parcel.pack(tensors, sender)
    arrival = wire.arrival(key, torch.device("cpu"))
    arrival.message.copy_(parcel.message)
    return arrival.unpack(torch.device("cpu"), receiver)


def test_a_plan_carries_codecs_to_the_engine() -> None:
    plan = Plan((4,), 4, "1f1b", codecs=(BoundaryCodecs("int8", "int4"),))
    assert str(plan.by_program.codecs.of(0, 7).choice(forward=False)) == "int4"
