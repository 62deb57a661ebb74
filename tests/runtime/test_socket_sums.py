"""Sums of a few numbers over the sockets of a pipeline: each rank sends its numbers to all."""

import pytest
import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.board import PeerLost
from bireme.runtime.fabric import SocketSums
from bireme.runtime.socket_transport import LARGE_BYTES
from tests.support.sockets import Receive, key, mesh, send
from tests.support.together import run_threads


def part(rank: int, number: int) -> Tensor:
    return torch.tensor([rank + 0.1, 1e-9 * rank, float(number)], dtype=torch.float64)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_sums_are_added_in_the_order_of_the_ranks_however_many_are_under_way(num_ranks: int) -> None:
    transports = mesh(num_ranks)
    num_sums = 6

    def work(rank: int) -> list[list[float]]:
        sums = SocketSums(transports[rank], rank, num_ranks)
        given = [part(rank, number) for number in range(num_sums)]
        pending = [sums.all_reduce(one) for one in given[:4]]
        for one in pending[:2]:
            one.wait()
        pending += [sums.all_reduce(one) for one in given[4:]]
        for one in pending[2:]:
            one.wait()
        return [one.tolist() for one in given]

    found = run_threads(num_ranks, work)
    for transport in transports:
        transport.close()
    wanted = []
    for number in range(num_sums):
        total = part(0, number)
        for rank in range(1, num_ranks):
            total += part(rank, number)
        wanted.append(total.tolist())
    assert all(own == wanted for own in found)


@pytest.mark.parametrize("size", [8, LARGE_BYTES + 1])
def test_a_rank_has_its_sum_while_another_waits_for_a_message(size: int) -> None:
    """Rank 1 sends it only when it knows the sum, so otherwise neither would continue."""
    transports = mesh(2, timeout_s=5.0)

    def work(rank: int) -> float:
        sums, own = SocketSums(transports[rank], rank, 2), part(rank, 0)
        pending = sums.all_reduce(own)
        message = torch.full((size,), rank, dtype=torch.uint8)
        if rank == 0:
            assert set(Receive(transports[0], key(0, forward=False), 1, size).wait().tolist()) == {1}
            pending.wait()
        else:
            pending.wait()
            send(transports[1], key(0, forward=False), 0, message).wait()
        return float(own[0])

    assert run_threads(2, work) == [0.1 + 1.1] * 2
    for transport in transports:
        transport.close()


def test_a_sum_whose_rank_is_gone_says_so() -> None:
    transports = mesh(3)
    transports[2].close()

    def work(rank: int) -> None:
        if rank == 0:
            SocketSums(transports[0], 0, 3).all_reduce(part(0, 0)).wait()

    with pytest.raises(PeerLost):
        run_threads(1, work)
    for transport in transports[:2]:
        transport.close()


def test_a_part_of_a_sum_that_never_comes_is_named() -> None:
    transports = mesh(2, timeout_s=0.3)
    with pytest.raises(BiremeError, match=r"part of sum 0 \(128 bytes\) did not arrive from rank 1"):
        SocketSums(transports[0], 0, 2).all_reduce(part(0, 0)).wait()
    for transport in transports:
        transport.close()
