"""What the ranks put together: whole tensors on rank 0, and nothing on those that need nothing."""

import threading
from array import array
from time import perf_counter

import pytest
import torch
from torch import Tensor

from bireme.model.graph import ModelState
from bireme.runtime import gathering
from bireme.runtime.gathering import gather_tensors, gather_times
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

OWNED = {
    0: {"first": torch.arange(12.0).reshape(3, 4)},
    1: {"turned": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T, "nothing": torch.empty(0, 7)},
    2: {"number": torch.tensor(2.5, dtype=torch.float64), "flags": torch.ones(11, dtype=torch.bool)},
}
OWNER = {name: rank for rank, own in OWNED.items() for name in own}
STATES = [
    ModelState(name, tuple(tensor.shape), "float32") for own in OWNED.values() for name, tensor in own.items()
]


def test_tensors_go_to_rank_0_alone_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was broadcast whole: every rank of a long pipeline had room for, and was sent, the whole model."""
    monkeypatch.setattr(gathering, "PIECE_ELEMENTS", 5)
    fabric = ThreadFabric(3)
    sent: dict[int, list[tuple[int, int]]] = {rank: [] for rank in OWNED}

    def work(rank: int) -> dict[str, Tensor]:
        group = fabric.of(rank).everyone()
        send = group.send

        def noting(tensor: Tensor, to: int) -> None:
            sent[rank].append((to, tensor.numel()))
            send(tensor, to)

        group.send = noting  # type: ignore[method-assign]
        return dict(gather_tensors(group, STATES, OWNED[rank], OWNER))

    whole, *others = run_threads(3, work)
    assert others == [{}, {}]
    assert list(whole) == [state.name for state in STATES]
    for name, tensor in whole.items():
        own = OWNED[OWNER[name]][name]
        assert tensor.dtype == own.dtype
        assert torch.equal(tensor, own)
        assert tensor.data_ptr() != own.data_ptr() or not tensor.numel()
    assert sent == {0: [], 1: [(0, 5), (0, 5), (0, 2)], 2: [(0, 1), (0, 5), (0, 5), (0, 1)]}


def test_times_are_on_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, own = ThreadFabric(2), threading.local()
    monkeypatch.setattr("bireme.runtime.gathering.perf_counter", lambda: perf_counter() + own.ahead_s)

    def work(rank: int) -> list[float]:
        own.ahead_s = 1000.0 * rank
        now = array("d", [perf_counter() + own.ahead_s])
        found = gather_times(fabric.of(rank).everyone(), (now, now))
        return [starts[0] for starts, _ in found]

    for first, second in run_threads(2, work):
        assert abs(first - second) < 500
