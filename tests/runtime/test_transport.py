"""Messages between ranks: they come in order, each on its own channel, or there is an error that says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bireme.devices import use
from bireme.errors import BiremeError
from bireme.runtime.board import PeerLost
from bireme.runtime.fabric import NcclTransport
from bireme.runtime.message_format import TensorSpec, WireFormat
from bireme.runtime.stage_messages import Transport
from bireme.schedule.instruction import Message
from bireme.schedule.routes import Routes
from tests.runtime.test_message_format import ACTIVATION, KEY, every_dtype, packed, same_bits
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_processes, run_threads

NUM_MESSAGES = 24
HOST = torch.device("cpu")


def _key(microbatch: int, *, forward: bool = True, to_stage: int = 1) -> Message:
    return Message(forward, to_stage, 0, microbatch, None)


# What every transport does, written once, and run over threads here and over sockets elsewhere.


def _numbered(microbatch: int, *, forward: bool = True, to_stage: int = 1) -> dict[str, Tensor]:
    return {"hidden": torch.full((4, 16), microbatch + 100.0 * to_stage + (0.5 if forward else 0.0))}


def _dtypes(rank: int, transport: Transport) -> bool:
    wire, tensors = every_dtype()
    if rank == 0:
        transport.send(KEY, 1, packed(wire, tensors, KEY)).wait()
        return True
    arrival = wire.arrival(KEY, HOST)
    transport.receive(KEY, 0, arrival.message).wait()
    return all(same_bits(found, tensors[name]) for name, found in arrival.unpack(HOST).items())


def _many_in_flight(rank: int, transport: Transport) -> bool:
    """Both directions at once: all receives are posted first, all sends are waited for last."""
    other = 1 - rank
    mine = [_key(i, forward=rank == 0, to_stage=other) for i in range(NUM_MESSAGES)]
    theirs = [_key(i, forward=rank == 1, to_stage=rank) for i in range(NUM_MESSAGES)]
    arrivals = [ACTIVATION.arrival(key, HOST) for key in theirs]
    received = [transport.receive(key, other, one.message) for key, one in zip(theirs, arrivals, strict=True)]
    sent = [
        transport.send(key, other, packed(ACTIVATION, _numbered(i, forward=rank == 0, to_stage=other), key))
        for i, key in enumerate(mine)
    ]
    for i, (pending, arrival) in enumerate(zip(received, arrivals, strict=True)):
        pending.wait()
        found = arrival.unpack(HOST)["hidden"]
        if not torch.equal(found, _numbered(i, forward=rank == 1, to_stage=rank)["hidden"]):
            return False
    for pending in sent:
        pending.wait()
    return True


def _several_boundaries(rank: int, transport: Transport) -> bool:
    """Stages 0, 2, 4 on one rank, 1, 3, 5 on the other: they receive in another order than was sent."""
    boundaries = [(True, 1), (True, 3), (True, 5), (False, 1), (False, 3)]
    keys = [_key(i, forward=forward, to_stage=stage) for forward, stage in boundaries for i in range(4)]
    if rank == 0:
        pending = [
            transport.send(
                key,
                1,
                packed(
                    ACTIVATION,
                    _numbered(key.microbatch or 0, forward=key.forward, to_stage=key.to_stage),
                    key,
                ),
            )
            for key in keys
        ]
        for sent in pending:
            sent.wait()
        return True
    mixed = sorted(keys, key=lambda key: (key.microbatch, -key.to_stage))
    for key in mixed:
        arrival = ACTIVATION.arrival(key, HOST)
        transport.receive(key, 0, arrival.message).wait()
        expected = _numbered(key.microbatch or 0, forward=key.forward, to_stage=key.to_stage)["hidden"]
        if not torch.equal(arrival.unpack(HOST)["hidden"], expected):
            return False
    return True


def _other_shapes(rank: int, transport: Transport, waiting: int) -> str:
    """Rank 0 sends a shorter micro-batch than rank 1 waits for; one of them finds out."""
    short = WireFormat([TensorSpec("hidden", (3, 16), torch.float32)])
    key = _key(0)
    if rank == 0:
        message = packed(short, {"hidden": torch.ones(3, 16)}, key)
        pending = transport.send(key, 1, message)
    else:
        message = torch.full((ACTIVATION.num_bytes,), 7, dtype=torch.uint8)
        pending = transport.receive(key, 0, message)
    if rank != waiting:
        return ""
    with pytest.raises(BiremeError) as caught:
        pending.wait()
    assert rank == 0 or message.eq(7).all(), "something came"
    return str(caught.value)


NOT_TAKEN = (
    "Rank 1 did not take the activation of micro-batch 0 of batch 0 into stage 1 (256 bytes) within 1 s"
)
NOT_COME = (
    "activation of micro-batch 0 of batch 0 into stage 1 (320 bytes) did not arrive from rank 0 within 1 s"
)


SCENARIOS: dict[str, Callable[[int, Transport], Any]] = {
    "dtypes": _dtypes,
    "many in flight": _many_in_flight,
    "several boundaries": _several_boundaries,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_between_threads_all_arrives_in_order(name: str) -> None:
    fabric = ThreadFabric(2)
    assert run_threads(2, lambda rank: SCENARIOS[name](rank, fabric.of(rank).transport())) == [True, True]


def test_between_threads_all_arrives_in_order_however_long_it_takes() -> None:
    fabric = ThreadFabric(2, delay=lambda key: 0.01 * ((key.microbatch or 0) % 3))
    work = lambda rank: _several_boundaries(rank, fabric.of(rank).transport())  # noqa: E731
    assert run_threads(2, work) == [True, True]


def test_between_threads_a_message_of_another_size_is_never_taken() -> None:
    fabric = ThreadFabric(2, timeout_s=1)
    texts = run_threads(2, lambda rank: _other_shapes(rank, fabric.of(rank).transport(), waiting=1))
    assert NOT_COME in texts[1]
    assert "batch has other shapes" in texts[1] or "batch of other shapes" in texts[1]


# What only threads can show.


def _send_then_receive(rank: int, transport: Transport) -> bool:
    """Both ranks send before they post their receive."""
    other = 1 - rank
    out, back = _key(0, forward=rank == 0, to_stage=other), _key(0, forward=rank == 1, to_stage=rank)
    sent = transport.send(out, other, packed(ACTIVATION, _numbered(rank), out))
    arrival = ACTIVATION.arrival(back, HOST)
    transport.receive(back, other, arrival.message).wait()
    sent.wait()
    return torch.equal(arrival.unpack(HOST)["hidden"], _numbered(other)["hidden"])


def test_rendezvous_finds_the_deadlock_that_buffers_hide() -> None:
    patient = ThreadFabric(2)
    assert run_threads(2, lambda rank: _send_then_receive(rank, patient.of(rank).transport())) == [True] * 2
    strict = ThreadFabric(2, rendezvous=True, timeout_s=0.2)
    with pytest.raises(BiremeError, match=r"did not take the (activation|gradient) of micro-batch 0"):
        run_threads(2, lambda rank: _send_then_receive(rank, strict.of(rank).transport()))


def test_rendezvous_lets_through_what_posts_its_receives_first() -> None:
    fabric = ThreadFabric(2, rendezvous=True)
    assert run_threads(2, lambda rank: _many_in_flight(rank, fabric.of(rank).transport())) == [True, True]


def test_a_thread_that_is_lost_is_named_at_once() -> None:
    fabric = ThreadFabric(3)
    payload = torch.empty(64, dtype=torch.uint8)

    def work(rank: int) -> str:
        transport = fabric.of(rank).transport([2, 1, 0])
        if rank == 2:
            fabric.lose(2)
            return ""
        with pytest.raises(PeerLost) as caught:
            transport.receive(KEY, 0, payload.clone()).wait()
        return str(caught.value)

    assert run_threads(3, work)[:2] == ["Rank 0 is gone: its thread has ended"] * 2


def test_what_was_sent_may_be_changed_and_what_came_is_a_copy() -> None:
    fabric = ThreadFabric(2)
    sender, receiver = fabric.of(0).transport(), fabric.of(1).transport()
    sent, received = torch.ones(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    sender.send(KEY, 1, sent).wait()
    sent.zero_()
    receiver.receive(KEY, 0, received).wait()
    assert received.eq(1).all()


def test_transports_made_twice_do_not_hear_each_other() -> None:
    fabric = ThreadFabric(2, timeout_s=0.1)
    ranks = [fabric.of(0), fabric.of(1)]
    first, second = ([rank.transport() for rank in ranks] for _ in range(2))
    first[0].send(KEY, 1, torch.ones(64, dtype=torch.uint8)).wait()
    with pytest.raises(BiremeError, match="did not arrive from rank 0 within"):
        second[1].receive(KEY, 0, torch.zeros(64, dtype=torch.uint8)).wait()


# CUDA devices.


def _over_nccl(rank: int) -> dict[str, Any]:
    use(torch.device("cuda", rank))
    device = torch.device("cuda", rank)
    transport = NcclTransport((0, 1), Routes((0, 1, 0, 1, 0, 1)), device)
    message = torch.full((64,), rank, dtype=torch.uint8, device=device)
    payload = torch.empty_like(message)
    key, back = _key(0, forward=rank == 0, to_stage=1 - rank), _key(0, forward=rank == 1, to_stage=rank)
    received = transport.receive(back, 1 - rank, payload)
    transport.send(key, 1 - rank, message).wait()
    received.wait()
    outcome = {"came": payload.tolist() == [1 - rank] * 64}
    transport.close()
    return outcome


@pytest.mark.slow
@pytest.mark.gpu(2)
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_cuda_devices_exchange_messages_over_nccl(tmp_path: Path) -> None:
    assert run_processes(2, _over_nccl, tmp_path) == [{"came": True}] * 2
