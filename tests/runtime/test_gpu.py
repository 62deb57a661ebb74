"""On a real GPU: the numbers of the CPU, ranks that share it, and timelines by its own clock."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bireme import devices
from bireme.runtime.gathering import Recorder
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from bireme.schedule.instruction import Kind
from bireme.train.outcome import MemoryUsed
from tests.support.engine_parity import Setting, plan_for
from tests.support.small_models import gpt, token_batches

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

GPU = torch.device("cuda", 0)
MODEL = "layers=3"
SETTINGS = [
    Setting(plan_for("1f1b", 2, recompute="all"), clip_norm=0.05),
    Setting(plan_for("2bw", 2), clip_norm=0.05),
    Setting(plan_for("2bw-fresh", 2)),
    Setting(plan_for("gpipe", 2), "muon"),
    Setting(plan_for("zbv"), "sgd"),
]


@dataclass(frozen=True, slots=True)
class Seen:
    losses: list[float]
    weights: dict[str, Tensor]
    evaluated: float


def trained(world: World, setting: Setting) -> Seen:
    model = gpt(MODEL, evaluates=True)
    pipeline = Pipeline(
        model.graph,
        setting.plan,
        world,
        weights=model.given,
        optimizer=setting.factory,
        settings=PipelineSettings(
            evaluation=model.evaluation, clip_norm=setting.clip_norm, device=world.device
        ),
    )
    data = token_batches(8, 4)
    losses = [result.loss for result in pipeline.train(data)]
    seen = Seen(losses, pipeline.full_state_dict(), pipeline.evaluate(data[:2]).loss)
    pipeline.close()
    return seen


def check_alike(near: list[Seen], far: list[Seen], setting: Setting) -> None:
    # Muon multiplies in bfloat16 whatever the weights are, so its steps differ by rounding.
    rel, atol = (1e-4, 5e-3) if setting.optimizer == "muon" else (1e-9, 1e-8)
    for one, other in zip(near, far, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=rel)
        assert other.evaluated == pytest.approx(one.evaluated, rel=rel)
        for name, tensor in one.weights.items():
            torch.testing.assert_close(other.weights[name], tensor, rtol=atol, atol=atol)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.plan.schedule}-{one.optimizer}")
def test_two_ranks_that_share_a_gpu_train_as_on_the_cpu(setting: Setting) -> None:
    near = launch(trained, 2, setting, device="cpu")
    far = launch(trained, 2, setting, device="cuda")
    check_alike(near, far, setting)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.plan.schedule}-{one.optimizer}")
def test_two_gpus_over_nccl_train_as_on_the_cpu(setting: Setting) -> None:
    near = launch(trained, 2, setting, device="cpu")
    far = launch(trained, 2, setting, backend="nccl")
    check_alike(near, far, setting)


def test_a_timeline_has_the_work_of_the_device_one_after_the_other() -> None:
    model, setting = gpt(MODEL), Setting(plan_for("1f1b", 1))
    pipeline = Pipeline(
        model.graph,
        setting.plan,
        weights=model.given,
        optimizer=setting.factory,
        settings=PipelineSettings(device=GPU),
    )
    list(pipeline.train(token_batches(8, 2)))
    list(pipeline.train(token_batches(8, 3), record=True))
    (rank,) = pipeline.timeline().ranks
    intervals = list(rank.intervals())
    for before, after in pairwise(intervals):
        assert before.start_s <= before.end_s
        assert before.end_s <= after.start_s + 1e-5
    assert all(one.end_s > one.start_s for one in intervals if one.instruction.kind is Kind.BACKWARD)


def test_a_mark_tells_when_the_device_was_there_and_not_the_host() -> None:
    size = 4096
    one = torch.randn(size, size, device=GPU)
    one = (one @ one).clamp_(-1, 1)  # the first product also loads what multiplies
    recorder = Recorder(GPU)
    for count in (1, 20):
        begin = recorder.now()
        for _ in range(count):
            one = (one @ one).clamp_(-1, 1)
        recorder.note(begin, recorder.now())
    starts, ends = recorder.recording()
    assert ends[1] - starts[1] > ends[0] - starts[0] > 0


def test_peaks_are_those_of_the_devices_allocator() -> None:
    num_bytes = 64 * 2**20
    memory = MemoryUsed(GPU)
    held = torch.empty(num_bytes, dtype=torch.uint8, device=GPU)
    del held
    assert memory.peak_bytes() == pytest.approx(num_bytes, rel=0.01)


def test_pinned_memory_goes_to_the_device_while_the_host_goes_on() -> None:
    host = devices.pinned(1 << 20)
    assert host.is_pinned()
    host.fill_(7)
    there = host.to(GPU, non_blocking=True)
    devices.synchronize(GPU)
    assert bool((there == 7).all())
    assert devices.num_accelerators() >= 1
    assert devices.properties_of(GPU).memory_bytes > devices.allocated_bytes(GPU)


def test_draws_of_a_device_are_its_default_generators() -> None:
    generator = devices.default_generator(GPU)
    generator.manual_seed(3)
    first = torch.rand(4, device=GPU)
    generator.manual_seed(3)
    assert torch.equal(torch.rand(4, device=GPU), first)
