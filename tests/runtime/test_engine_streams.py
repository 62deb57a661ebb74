"""Streams of batches: one call of train() or several, evaluations between, bad batches, slow messages."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from bireme.cluster.device import MOST_SENDS
from bireme.plan.plan import Plan
from bireme.runtime.evaluation import Evaluation
from bireme.runtime.microbatches import apportioned
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.stepper import OptimizerFactory
from bireme.schedule.instruction import Instruction, Message
from tests.support.engine_parity import (
    ALL,
    DELAYED,
    FLUSH,
    Setting,
    assert_equal,
    evaluated,
    oracle,
    pipeline_of,
    plan_for,
    tolerance_of,
    train_on_threads,
)
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import Batch, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text, tiny_text_module
from tests.support.together import run_threads

pytestmark = pytest.mark.slow


# --- one call or several


@pytest.mark.parametrize(
    ("schedule", "windows"), [("1f1b", (3, 2, 7)), ("zbv", (1, 11)), ("2bw", (3, 2, 7)), ("2bw", (1, 1, 10))]
)
def test_several_calls_of_train_are_one_long_one(schedule: str, windows: tuple[int, ...]) -> None:
    """Twelve batches are a loop in one piece, and written out in several."""
    model, data = regression(), real_batches(8, 12, WIDTH)
    whole = train_on_threads(model, Setting(regression_plan(schedule)), data)
    parts = train_on_threads(model, Setting(regression_plan(schedule), windows=windows), data)
    for one, other in zip(whole, parts, strict=True):
        assert one.losses == other.losses
        for before, after in zip(one.weights, other.weights, strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.few(4)
@pytest.mark.parametrize("schedule", ALL)
def test_every_call_of_train_goes_on_where_the_last_one_ended(schedule: str) -> None:
    """Under 2bw-fresh a call begins on W itself, for no gradient is under way: the judge knows that."""
    setting = Setting(regression_plan(schedule), windows=(2, 11, 1))
    model, data = regression(), real_batches(8, 14, WIDTH)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data), tolerance=tolerance_of(schedule))


def test_no_batches_are_no_training() -> None:
    setting = Setting(regression_plan("2bw"), windows=(0, 3, 0, 2))
    model, data = regression(), real_batches(8, 5, WIDTH)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data))


# --- evaluation


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("schedule", "width"),
    [("sequential", 2), ("interleaved", 1), ("zbv", 2), ("1f1b", 1), ("2bw", 2), ("2bw-fresh", 1)],
)
def test_an_evaluation_is_that_of_one_process_and_leaves_no_trace(schedule: str, width: int) -> None:
    """The dropout is off, the batches are of any size, and training goes on as if nothing had been."""
    model = tiny_text(dropout=0.3, evaluates=True)
    setting = Setting(plan_for(schedule, width=width), windows=(2, 1, 0))
    data = token_batches(8 * width, 3)
    sizes = (8, 3, 9, 1)
    held_out = [batch for place, size in enumerate(sizes) for batch in token_batches(size, 1, 50 + place)]
    seen: list[tuple[int, Evaluation]] = []

    def evaluate(pipeline: Pipeline) -> None:
        seen.append((pipeline.num_trained, pipeline.evaluate(held_out)))

    found = train_on_threads(model, setting, data, between=evaluate)
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)
    weights = [model.weights, *(merged(step) for step in zip(*(one.weights for one in found), strict=True))]
    assert len(seen) == 3 * len(found)
    for num_trained, evaluation in seen:
        assert evaluation.num_samples == sum(sizes)
        assert evaluation.weight == sum(map(model.count, held_out))
        assert evaluation.loss == pytest.approx(evaluated(model, weights[num_trained], held_out), rel=1e-12)


def merged(step: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for rank in step for name, tensor in rank.items()}


def test_an_evaluation_of_bfloat16_banks_runs_on_the_newest_of_them() -> None:
    """Under 2bw-fresh no bank holds the newest weights: they are cast from the masters."""
    model = tiny_text(dtype="bfloat16", evaluates=True)
    data = token_batches(8, 3)
    losses: list[float] = []
    for schedule in ("1f1b", *DELAYED):
        setting = Setting(plan_for(schedule), bank_dtype=torch.bfloat16, windows=(3, 0))
        losses.clear()
        found = train_on_threads(
            model, setting, data, between=lambda pipeline: losses.append(pipeline.evaluate(data).loss)
        )
        newest = {name: t.bfloat16() for one in found for name, t in one.weights[-1].items()}
        # A micro-batch's loss is a bfloat16 itself.
        assert losses[-1] == pytest.approx(evaluated(model, newest, data), rel=1e-2)
        assert losses[-1] < losses[0]


# --- batches that do not count, or count in part


@pytest.mark.few(3)
@pytest.mark.parametrize(("schedule", "width"), [*zip(ALL, cycle([1, 2]), strict=False)])
def test_a_batch_without_a_finite_gradient_is_skipped_on_all_ranks(schedule: str, width: int) -> None:
    """Versions rotate all the same; and its numbers reach no trial step."""
    setting = Setting(regression_plan(schedule, width=width), clip_norm=0.5)
    data = real_batches(8 * width, 6, WIDTH)
    data[2]["x"][-1] = math.inf
    data[4]["wanted"][1] = math.nan
    model = regression()
    found = train_on_threads(model, setting, data)
    assert found[0].skipped == [False, False, True, False, True, False]
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-sliced", "zb-h1", "2bw"])
def test_a_micro_batch_in_which_nothing_counts_changes_nothing(schedule: str) -> None:
    """Its own loss is 0 / 0. For the judge it is not there."""
    setting = Setting(plan_for(schedule), clip_norm=0.5)
    model, data = tiny_text(), token_batches(8, 3)
    for batch in data:
        batch["labels"][2:4] = -100
    found = train_on_threads(model, setting, data)
    assert all(map(math.isfinite, found[0].losses))
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize(("schedule", "width"), [*zip(ALL, cycle([2, 1]), strict=False)])
def test_a_batch_in_which_nothing_counts_takes_no_step(schedule: str, width: int) -> None:
    """It once ended the run. One process leaves it out: no decay, no momentum, no count of steps, no NaN."""
    setting = Setting(plan_for(schedule, width=width), clip_norm=0.5)
    model, data = tiny_text(), token_batches(8 * width, 6)
    for empty in (0, 3):
        data[empty]["labels"][:] = -100
    found = train_on_threads(model, setting, data)
    assert found[0].skipped == [True, False, False, True, False, False]
    assert [math.isnan(loss) for loss in found[0].losses] == found[0].skipped
    assert found[0].norms[0] == found[0].norms[3] == 0.0
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)


def test_an_evaluation_leaves_out_batches_in_which_nothing_counts() -> None:
    model, data = tiny_text(evaluates=True), token_batches(8, 3)
    data[1]["labels"][:] = -100
    seen: list[Evaluation] = []

    def evaluate(pipeline: Pipeline) -> None:
        seen.extend((pipeline.evaluate(data), pipeline.evaluate([data[1]])))

    train_on_threads(model, Setting(plan_for("1f1b", 2), windows=(0,)), [], between=evaluate)
    for some, nothing in zip(seen[::2], seen[1::2], strict=True):
        assert some.loss == pytest.approx(evaluated(model, model.weights, [data[0], data[2]]), rel=1e-12)
        assert some.num_samples == 24
        assert (nothing.weight, nothing.num_samples) == (0.0, 8)
        assert math.isnan(nothing.loss)


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", ALL)
def test_micro_batches_may_be_of_unequal_sizes_from_batch_to_batch(schedule: str) -> None:
    """A shape that changes never meets what was meant for another one."""
    sizes = (8, 11, 9, 16, 8, 13)
    data = [batch for place, size in enumerate(sizes) for batch in real_batches(size, 1, WIDTH, first=place)]
    setting = Setting(regression_plan(schedule), clip_norm=0.5)
    found = train_on_threads(regression(), setting, data)
    assert_equal(found, oracle(regression(), setting, data), tolerance=1e-12)


def test_room_for_messages_does_not_grow_with_the_number_of_batch_sizes() -> None:
    """Each size once had room of its own for ever: 300 sizes of a toy model kept 58 MB."""
    model, setting = regression(), Setting(regression_plan("1f1b"))
    sizes = range(4, 4 * 50, 4)
    data = [real_batches(size, 1, WIDTH)[0] for size in sizes]
    fabric = ThreadFabric(setting.plan.num_ranks)

    def work(rank: int) -> int:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        most = max(pipeline.stage_messages.send_bytes for _ in pipeline.train(data))
        pipeline.close()
        return most

    header_bytes, value_bytes, num_boundaries = 64, 8, 2
    largest = header_bytes + 64 * -(-max(sizes) // 4 * WIDTH * value_bytes // 64)
    # As many messages on their way as may be, as much room again, and what is about to be sent.
    for most in run_threads(setting.plan.num_ranks, work):
        assert 0 < most <= num_boundaries * (2 * MOST_SENDS + 1) * largest


# --- the module itself, in an ordinary loop


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", FLUSH)
def test_a_flush_schedule_trains_as_an_ordinary_loop_over_the_module_does(schedule: str) -> None:
    """No stage, no micro-batch, no weight of a micro-batch: the module, backward, clip, step."""
    module = tiny_text_module()
    data = token_batches(9, 4)
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = module(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())

    setting = PlainSGD(plan_for(schedule), clip_norm=0.5, lr_factor=lambda _batch: 1.0)
    found = train_on_threads(tiny_text(), setting, data)
    assert found[0].losses == pytest.approx(losses, rel=1e-12)
    newest = merged([one.weights[-1] for one in found])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(newest[name], parameter.detach(), rtol=1e-10, atol=1e-12)


class PlainSGD(Setting):
    @property
    def factory(self) -> OptimizerFactory:
        return lambda named: SGD([tensor for _, tensor in named], lr=0.1, momentum=0.9)


# --- slow messages, long lookahead


def sleepy(seed: int) -> Callable[..., None]:
    random = Random(seed)

    def sleep(_step: Instruction) -> None:
        if random.random() < 0.1:
            time.sleep(random.random() * 0.004)

    return sleep


def slow(seed: int) -> Callable[[Message], float]:
    random = Random(seed)
    return lambda _key: random.random() * 0.004


@pytest.mark.few(3)
@pytest.mark.parametrize("schedule", ALL)
def test_random_sleeps_change_nothing(schedule: str) -> None:
    setting = Setting(regression_plan(schedule, width=2), clip_norm=0.5)
    model, data = regression(), real_batches(16, 3, WIDTH)
    calm = train_on_threads(model, setting, data)
    for seed, rendezvous in ((1, False), (2, True)):
        found = train_on_threads(
            model, setting, data, on_instruction=sleepy(seed), delay=slow(seed), rendezvous=rendezvous
        )
        for one, other in zip(found, calm, strict=True):
            assert one.losses == other.losses
            assert one.norms == other.norms
            assert all(
                torch.equal(one.weights[-1][name], other.weights[-1][name]) for name in one.weights[-1]
            )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "lookahead", "rendezvous"),
    [
        ("1f1b", 4, 1, False),
        ("1f1b", 6, 3, True),
        ("2bw", 4, 1, True),
        ("2bw", 7, 4, False),
        ("2bw-fresh", 4, 1, False),
        ("2bw-fresh", 6, 3, True),
    ],
)
def test_lookahead_changes_no_version(
    schedule: str, num_microbatches: int, lookahead: int, rendezvous: bool
) -> None:
    """Under 2bw-fresh it changes how much of a gradient a trial step has seen: the program says how much."""
    setting = Setting(Plan((1, 3), num_microbatches, schedule, lookahead=lookahead))
    model, data = regression(), real_batches(2 * num_microbatches, 11, WIDTH)
    assert_equal(train_on_threads(model, setting, data, rendezvous=rendezvous), oracle(model, setting, data))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_replicas_may_take_unequal_shares_of_a_batch(schedule: str) -> None:
    """As the fast and the slow of them need, and it is still the mean over all samples."""
    plan = Plan((1, 3), 4, schedule, width=2, micro_batch_sizes=(3, 1))
    model, data = regression(), real_batches(16, 5, WIDTH)
    assert_equal(train_on_threads(model, Setting(plan), data), oracle(model, Setting(plan), data))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_are_as_near_as_whole_samples_can_be(shares: list[int], more: int) -> None:
    num_samples = len(shares) + more
    sizes = apportioned(num_samples, shares)
    assert sum(sizes) == num_samples
    assert min(sizes) >= 1
    exact = [num_samples * share / sum(shares) for share in shares]
    assert all(size == 1 or size - part < 1 for size, part in zip(sizes, exact, strict=True))
    if num_samples % sum(shares) == 0:
        assert sizes == exact


def test_a_stream_is_read_only_a_little_ahead() -> None:
    """An endless source of batches may wait for what the model makes of the last ones."""
    model = regression()
    (batch,) = real_batches(8, 1, WIDTH)
    num_read = 0

    def source() -> Iterator[Batch]:
        nonlocal num_read
        for number in range(60):
            num_read = number + 1
            yield batch

    for schedule in ("1f1b", *DELAYED):
        pipeline = Pipeline(model.graph, Plan((), 4, schedule), weights=model.given, optimizer="sgd")
        ahead = [num_read - result.batch for result in pipeline.train(source())]
        pipeline.close()
        assert len(ahead) == 60
        assert max(ahead) <= 8
