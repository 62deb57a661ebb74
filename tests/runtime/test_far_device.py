"""The engine on a device whose memory the host cannot read; `tests/support/far_device.py` stands in.

What mixes tensors of both raises there, and what forgets to move numbers computes others than the CPU. A
process of its own makes the device and runs everything; each test looks at its part.
"""

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from bireme import devices
from bireme.codec import BoundaryCodecs, Masking, codec_of, parse_codec
from bireme.errors import BiremeError
from bireme.model.sources import load_source
from bireme.model.torch_private import DispatchMode
from bireme.plan.plan import Plan
from bireme.runtime import world as worlds
from bireme.runtime.fabric import SingleRankFabric
from bireme.runtime.message_format import Coding, TensorSpec, WireFormat
from bireme.runtime.world import World
from bireme.schedule.instruction import Message
from tests.support.engine_parity import Setting, Trained, pipeline_of, plan_for, train_rank
from tests.support.extent import several
from tests.support.far_device import FAR, make_far_device
from tests.support.patience import patience_s
from tests.support.small_models import Model, captured, real_batches, token_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_processes, run_threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.accelerator.is_available(),
        reason="a process has one kind of accelerator, and here is a real one",
    ),
]

WIDTH = 6
TOLERANCE = 1e-9
"""An optimizer's steps in one kernel, as the CPU has them, round in another way."""

SETTINGS = {
    "2bw, clipped": Setting(plan_for("2bw", 2), clip_norm=0.05),
    "two replicas, recomputed": Setting(plan_for("2bw-fresh", 2, width=2, recompute="all"), "muon"),
    "halves of micro-batches": Setting(
        plan_for("1f1b-sliced", recompute="some", codecs=(BoundaryCodecs("topk:0.5", "topk:0.5"),)), "sgd"
    ),
    "halves of backwards": Setting(plan_for("zbv", codecs=(BoundaryCodecs("topk:0.25:8", "topk:0.25:4"),))),
    "few bits": Setting(
        plan_for("1f1b", codecs=(BoundaryCodecs("int8", "int4"), BoundaryCodecs("bfloat16", "int3")))
    ),
}

TRIED = several([*SETTINGS], 6)


def claims() -> dict[str, Callable[[], None]]:
    """What the other process runs, each by its name."""
    return {
        **{name: partial(trains, SETTINGS[name]) for name in TRIED},
        "buffers": normalizes,
        "resume": goes_on,
        "messages": crosses,
        "codecs": encodes_without_waiting,
        "memory": sources_load,
        "refused": refuses,
        "mixing": mixes,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    (found,) = run_processes(1, run_claims, tmp_path_factory.mktemp("far"))
    told: dict[str, str] = found
    return told


def run_claims(_rank: int) -> dict[str, str]:
    """Of each claim what went wrong, or nothing."""
    make_far_device()
    devices.KINDS = (*devices.KINDS, FAR)
    outcomes = {}
    for name, claim in claims().items():
        try:
            claim()
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
    return outcomes


@pytest.mark.parametrize("name", TRIED)
def test_training_on_a_device_gives_the_numbers_of_the_cpu(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


def test_buffers_that_a_forward_writes_are_the_devices_own(outcomes: dict[str, str]) -> None:
    assert not outcomes["buffers"], outcomes["buffers"]


def test_a_snapshot_is_on_the_host_and_goes_on_on_the_device(outcomes: dict[str, str]) -> None:
    assert not outcomes["resume"], outcomes["resume"]


def test_a_message_of_a_device_is_checked_on_the_host(outcomes: dict[str, str]) -> None:
    assert not outcomes["messages"], outcomes["messages"]


def test_codecs_only_queue_work_on_a_device(outcomes: dict[str, str]) -> None:
    assert not outcomes["codecs"], outcomes["codecs"]


def test_a_source_is_loaded_onto_a_device(outcomes: dict[str, str]) -> None:
    assert not outcomes["memory"], outcomes["memory"]


def test_the_stand_in_refuses_what_an_accelerator_does(outcomes: dict[str, str]) -> None:
    assert not outcomes["mixing"], outcomes["mixing"]


def test_a_device_that_bireme_does_not_compute_on_is_refused(outcomes: dict[str, str]) -> None:
    assert not outcomes["refused"], outcomes["refused"]


MIXED = {
    "stages": Setting(plan_for("1f1b", 2), clip_norm=0.05),
    "stages of 2bw": Setting(plan_for("2bw", 2, codecs=(BoundaryCodecs("int8", "int8"),))),
    "replicas": Setting(plan_for("1f1b", 1, width=2), clip_norm=0.05),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_run_over_a_device_and_a_cpu_gives_the_numbers_of_cpus(name: str, tmp_path: Path) -> None:
    """Messages and sums go through the memory of the host, over sockets and gloo."""
    mixed = run_processes(2, on_its_own_device, tmp_path, name, str(tmp_path / "store"))
    data = token_batches(8 * MIXED[name].plan.width, 2)
    alike = on_threads(dropping(evaluates=True), MIXED[name], data, torch.device("cpu"))
    for one, (losses, norms, weights) in zip(alike, mixed, strict=True):
        assert losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert norms == pytest.approx(one.norms, rel=TOLERANCE)
        for name_of, tensor in one.weights[-1].items():
            torch.testing.assert_close(weights[name_of], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def on_its_own_device(rank: int, name: str, store: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train as rank 0 on the device, and as rank 1 on the CPU."""
    dist.destroy_process_group()
    kind = "cpu" if rank else FAR
    if not rank:
        make_far_device()
        devices.KINDS = (*devices.KINDS, FAR)
        setattr(worlds, "KINDS", devices.KINDS)  # noqa: B010
    setting = MIXED[name]
    with World(FileStore(store, 2), rank=rank, size=2, timeout_s=patience_s(), device=kind) as world:
        pipeline = pipeline_of(dropping(evaluates=True), setting, world, device=world.device)
        data = token_batches(8 * setting.plan.width, 2)
        trained = train_rank(pipeline, setting, data)
        trained.losses.append(pipeline.evaluate(data).loss)
        assert {one.device.type for one in trained.weights[-1].values()} == {kind}
        weights = {one: tensor.cpu() for one, tensor in trained.weights[-1].items()}
        pipeline.close()
    return trained.losses, trained.norms, weights


def dropping(*, evaluates: bool = False) -> Model:
    return tiny_text(tied=True, dropout=0.3, evaluates=evaluates)


def trains(setting: Setting) -> None:
    compare(dropping(evaluates=True), setting, token_batches(8 * setting.plan.width, 2))


def compare(model: Model, setting: Setting, data: list[dict[str, Tensor]]) -> None:
    near, far = (on_threads(model, setting, data, torch.device(kind)) for kind in ("cpu", FAR))
    for one, other in zip(near, far, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert other.norms == pytest.approx(one.norms, rel=TOLERANCE)
        for kept, also in ((one.weights[-1], other.weights[-1]), (one.buffers, other.buffers)):
            for name, tensor in kept.items():
                assert also[name].device.type == FAR
                torch.testing.assert_close(also[name].cpu(), tensor, rtol=TOLERANCE, atol=TOLERANCE)


def on_threads(
    model: Model, setting: Setting, data: list[dict[str, Tensor]], device: torch.device
) -> list[Trained]:
    joined = ThreadFabric(setting.plan.num_ranks)

    def work(rank: int) -> Trained:
        pipeline = pipeline_of(model, setting, joined.of(rank), device=device)
        try:
            trained = train_rank(pipeline, setting, data)
            if model.evaluation is not None:
                trained.losses.append(pipeline.evaluate(data).loss)
            whole = pipeline.full_state_dict()
            assert all(tensor.device.type == "cpu" for tensor in whole.values())
            return trained
        finally:
            pipeline.close()

    return run_threads(setting.plan.num_ranks, work)


class Normalized(nn.Module):
    """Batch norm, whose forward writes, beside a mask that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3))
        ).double()
        self.mask: Tensor
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        loss = ((self.layers(x) * self.mask).mean(-1, keepdim=True) - wanted).square().mean()
        return {"loss": loss}


def normalizes() -> None:
    torch.manual_seed(3)
    data = real_batches(8, 3, WIDTH)
    model = captured(Normalized(), data[0], evaluates=True)
    compare(model, Setting(Plan((1,), 2, "2bw", recompute=(0, 1))), data)


def goes_on() -> None:
    model, setting, data = dropping(), Setting(Plan((), 2, "2bw")), token_batches(4, 4)
    far = torch.device(FAR)
    straight = pipeline_of(model, setting, SingleRankFabric(), device=far)
    whole = train_rank(straight, setting, data)
    first = pipeline_of(model, setting, SingleRankFabric(), device=far)
    train_rank(first, setting, data[:2])
    saved = first.snapshot(all_held=True)
    assert all(tensor.device.type == "cpu" for tensor in saved.tensors.values())
    second = pipeline_of(model, setting, SingleRankFabric(), device=far)
    second.restore(saved)
    losses = [result.loss for result in second.train(data[2:])]
    assert losses == whole.losses[2:]


def crosses() -> None:
    format_ = WireFormat(
        [TensorSpec("hidden", (2, 3), torch.float32), TensorSpec("place", (2,), torch.int64)]
    )
    key, other = Message(True, 1, 0, 0, None), Message(True, 1, 0, 1, None)
    given = {"hidden": torch.randn(2, 3, device=FAR), "place": torch.ones(2, dtype=torch.int64, device=FAR)}
    parcel = format_.parcel(torch.device(FAR))
    parcel.address(key)
    parcel.pack(given)
    arrival = format_.arrival(key, torch.device(FAR))
    arrival.message.copy_(parcel.message)
    for name, tensor in arrival.unpack(torch.device(FAR)).items():
        assert tensor.device.type == FAR
        assert torch.equal(tensor.cpu(), given[name].cpu())
    strange = format_.arrival(other, torch.device(FAR))
    strange.message.copy_(parcel.message)
    with pytest.raises(BiremeError, match="do not follow the same program"):
        strange.unpack(torch.device(FAR))


class Queueing(DispatchMode):
    """Refuses whatever would wait for the device: the host's look at numbers of it, or shapes that depend on
    them.
    """

    SHAPED = ("nonzero", "masked_select", "unique", "bincount", "_unique2")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(one is not None and one.dtype is torch.bool for one in args[1])
        if is_far((args, kwargs)) and (not is_far(found) or name in self.SHAPED or by_mask):
            raise AssertionError(f"{func} waits for the device")
        return found


def is_far(values: Any) -> bool:
    return any(isinstance(one, Tensor) and one.device.type == FAR for one in tree_leaves(values))


def encodes_without_waiting() -> None:
    """Messages that are staged on the host are decoded by the length that the host knows."""
    x = torch.randn(8, 16, 64).to(FAR)
    shape, dtype = tuple(x.shape), x.dtype
    with pytest.raises(AssertionError, match="waits for the device"), Queueing():
        float(x.sum())
    for word in ("bfloat16", "int8", "int3", "topk:0.3", "topk:0.25:8", "topk:0.05:4", "topk:0.25:8:50"):
        choice = parse_codec(word)
        codec, spec = codec_of(choice), TensorSpec("x", shape, dtype, choice)
        message = torch.empty(spec.num_bytes, dtype=torch.uint8, device=FAR)
        back = torch.empty_like(message)
        sender, receiver = Coding(), Coding()
        there, here = Message(True, 1, 0, 0, None), Message(False, 0, 0, 0, None)
        codec.encode(x, message)  # what is made once for a device is there from now on
        with Queueing():
            sender.encode(there, spec, x, message)
        staged = message.cpu()
        with Queueing():
            found = receiver.decode(there, spec, message, staged)
            of_back = replace(spec, is_back=True)
            receiver.encode(here, of_back, found, back)
        came = back.cpu()
        with Queueing():
            gradient = sender.decode(here, of_back, back, came)
        on_host = Coding().decode(there, spec, staged)
        torch.testing.assert_close(found.cpu(), on_host, msg=word)
        if isinstance(codec, Masking):
            assert torch.equal(gradient.cpu() != 0, on_host != 0), word


def sources_load() -> None:
    source = load_source("gpt:layers=1,width=8,heads=2,vocab=32,context=8", device=FAR)
    assert {p.device.type for p in source.model.parameters()} == {FAR}
    loss = source.model(**source.example_inputs)["loss"]
    loss.backward()
    assert loss.device.type == FAR


def refuses() -> None:
    devices.KINDS = tuple(kind for kind in devices.KINDS if kind != FAR)
    try:
        with pytest.raises(BiremeError, match="Bireme computes on cpu, cuda, xpu, mps, not on far"):
            pipeline_of(dropping(), Setting(Plan((), 2)), SingleRankFabric(), device=FAR)
        assert devices.num_accelerators() == 0
    finally:
        devices.KINDS = (*devices.KINDS, FAR)


def mixes() -> None:
    far, near = torch.ones(2, device=FAR), torch.ones(2)
    with pytest.raises(RuntimeError, match="of the cpu"):
        far + near
    with pytest.raises(RuntimeError, match="of the cpu"):
        torch.stack([far, near])
    with pytest.raises((RuntimeError, TypeError), match="numpy"):
        far.numpy()
    assert torch.equal((far + torch.tensor(1.0)).cpu(), near + 1)
