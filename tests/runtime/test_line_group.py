"""Groups over sockets of their own: sums of the same bits on all members, in every way they are made."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bireme.runtime.board import PeerLost
from bireme.runtime.fabric import DistFabric
from bireme.runtime.line_group import GroupLines, LineGroup
from bireme.runtime.socket_transport import hosts_met, met
from bireme.runtime.stores import HashStore
from bireme.runtime.world import World
from bireme.sync.group import AbortedError, CollectiveError, OwnedGroup
from bireme.sync.rounds.round_group import PeerLine, Stamp, Tag, bytes_of
from tests.support.patience import patience_s
from tests.support.together import run_threads

APART, TOGETHER, PAIRS = "abcd", "aaaa", "aabb"
"""Members on hosts of their own, on one host, and two on each of two hosts, which sum in a ring."""


def on_threads(
    num: int, work: Callable[[LineGroup], Any], hosts: str = APART, timeout_s: float | None = None
) -> list[Any]:
    store, waits_s = HashStore(), patience_s() if timeout_s is None else timeout_s

    def run(rank: int) -> Any:
        ranks, others = range(num), [one for one in range(num) if one != rank]
        sockets, _ = met(store, "here", rank, ranks, others, patience_s())
        assert len(set(hosts_met(store, "here", ranks))) == 1
        lines = GroupLines({peer: one for (peer, _), one in sockets.items()}, hosts[:num])
        group = LineGroup(rank, ranks, lines, timeout_s=waits_s)
        try:
            return work(group)
        finally:
            group.close()

    return run_threads(num, run)


def own_of(rank: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * seed + rank))


@pytest.mark.parametrize("hosts", [APART, TOGETHER, PAIRS])
@pytest.mark.parametrize("num", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_members_however_many_are_under_way(num: int, hosts: str) -> None:
    sizes = (1, 3, 1000, 70_001, 2 * 2**20)

    def work(group: LineGroup) -> list[Tensor]:
        tensors = [own_of(group.rank, size, seed) for seed, size in enumerate(sizes)]
        flags = torch.ones(5, dtype=torch.int32)
        under_way = [group.all_reduce(one) for one in (flags, *tensors)]
        numbers = torch.full((3,), float(group.rank), dtype=torch.float64)
        under_way.append(group.all_reduce(numbers))
        for pending in under_way:
            pending.wait()
            pending.wait()  # again, which changes nothing
        assert flags.tolist() == [num] * 5
        assert numbers.tolist() == [sum(range(num))] * 3
        return tensors

    of_ranks = on_threads(num, work, hosts)
    for seed, size in enumerate(sizes):
        first = of_ranks[0][seed]
        assert all(torch.equal(one[seed], first) for one in of_ranks)
        total = sum((own_of(rank, size, seed).double() for rank in range(num)), torch.zeros(size).double())
        torch.testing.assert_close(first.double(), total, rtol=1e-5, atol=1e-5)


def test_parts_go_to_their_owners_whatever_their_lengths() -> None:
    lengths = [[0, 2, 5], [1, 0, 3], [4, 1, 0]]

    def work(group: LineGroup) -> tuple[list[float], list[float], list[float]]:
        own, rank = lengths[group.rank], group.rank
        given = torch.full((sum(own),), float(rank))
        taken_lengths = [one[rank] for one in lengths]
        taken = torch.empty(sum(taken_lengths))
        group.exchange(given, own, taken, taken_lengths).wait()
        into = [torch.empty(2, 2) for _ in lengths]
        group.gather(torch.full((2, 2), float(rank)), into).wait()
        copied = torch.full((3,), float(rank))
        group.copy_from(copied, 1).wait()
        return taken.tolist(), [float(one.sum()) for one in into], copied.tolist()

    for rank, (taken, gathered, copied) in enumerate(on_threads(3, work)):
        assert taken == [float(one) for one, own in enumerate(lengths) for _ in range(own[rank])]
        assert (gathered, copied) == ([0.0, 4.0, 8.0], [1.0] * 3)


def test_who_waits_for_a_member_that_is_gone_or_silent_is_told_which() -> None:
    def ends(group: LineGroup) -> str:
        if group.rank == 2:
            return ""
        with pytest.raises(CollectiveError, match="exchange over the processes 0, 1, 2 failed: ") as caught:
            group.all_reduce(torch.ones(2**20)).wait()
        assert isinstance(caught.value.__cause__, PeerLost)
        return str(caught.value)

    first, second, _ = on_threads(3, ends)
    assert "2" in first.rpartition("failed")[2]
    assert second

    over = threading.Event()

    def is_silent(group: LineGroup) -> None:
        if group.rank:
            over.wait(patience_s())
            return
        with pytest.raises(CollectiveError, match=r"nothing has moved for 0\.2 s"):
            group.all_reduce(torch.ones(3)).wait()
        over.set()

    on_threads(2, is_silent, timeout_s=0.2)


@pytest.mark.parametrize("num_elements", [3, 2**20])
def test_who_gives_up_waits_no_longer(num_elements: int) -> None:
    waits, over = threading.Event(), threading.Event()

    def work(group: LineGroup) -> None:
        if group.rank:
            over.wait(patience_s())
            return

        def kill() -> None:
            waits.wait(patience_s())
            group.abort()

        killer = threading.Thread(target=kill)
        killer.start()
        pending = group.all_reduce(torch.ones(num_elements))
        waits.set()
        with pytest.raises(AbortedError, match="given up the group of the processes 0, 1"):
            pending.wait()
        killer.join()
        over.set()
        with pytest.raises(AbortedError):
            group.all_reduce(torch.ones(num_elements)).wait()

    on_threads(2, work)


def test_messages_between_two_members_come_in_their_order_whatever_all_do_in_between() -> None:
    def work(group: LineGroup) -> list[float]:
        found = torch.empty(2)
        told = []
        if group.rank == 2:
            group.send(torch.full((2,), 7.0), 0)
            group.send(torch.full((2,), 8.0), 0)
        for turn in range(2):
            if group.rank == 0:
                group.receive(found, 2)
                told.append(float(found.sum()))
            total = torch.ones(3) * turn
            group.all_reduce(total).wait()
            assert total.tolist() == [3.0 * turn] * 3
        return told

    assert on_threads(3, work)[0] == [14.0, 16.0]


def test_sums_of_other_kinds_of_numbers() -> None:
    kinds: Sequence[torch.dtype] = (torch.bfloat16, torch.float64, torch.int64, torch.complex64)

    def work(group: LineGroup) -> list[Tensor]:
        tensors = [torch.full((40_000,), group.rank + 1).to(kind) for kind in kinds]
        for one in tensors:
            group.all_reduce(one).wait()
        return tensors

    for tensors in on_threads(3, work):
        assert all(bool((one == 6).all()) for one in tensors)


def test_what_comes_for_a_device_is_not_read_from_there_first() -> None:
    """Memory that a message was to fill went to the host before it: half of the bytes of each exchange."""

    def work(group: LineGroup) -> None:
        if group.rank:
            group.copy_from(torch.zeros(8), 1).wait()
            group.send(torch.zeros(8), 0)
        else:
            unreadable = torch.empty(8, device="meta")
            group.copy_from(unreadable, 1).wait()
            group.receive(unreadable, 1)

    on_threads(2, work)


def test_a_group_uses_the_lines_of_the_one_before_whoever_is_slower() -> None:
    """A member may be in the second group, and have sent there, while another one waits in the first."""

    def work(group: LineGroup) -> list[float]:
        found = []
        lines = group._lines
        for turn in range(3):
            now = group if turn == 0 else LineGroup(group.rank, range(3), lines, timeout_s=patience_s())
            if now.rank == 0 and turn == 0:
                threading.Event().wait(0.1)
            for size in (3, 70_000):
                total = torch.full((size,), float(now.rank + turn))
                now.all_reduce(total).wait()
                found.append(float(total[-1]))
        return found

    assert on_threads(3, work) == [[3.0, 3.0, 6.0, 6.0, 9.0, 9.0]] * 3


@pytest.mark.parametrize("num", [2, 3])
def test_after_one_member_has_given_up_a_group_all_meet_anew(num: int) -> None:
    """The others have kept their lines, those of another group of the same ranks too, which stay in use."""
    store = HashStore()
    ended = threading.Barrier(num)

    def work(rank: int) -> tuple[list[float], int]:
        watch = SimpleNamespace(abort_on_failure=lambda _: None)
        world = SimpleNamespace(store=store, rank=rank, size=num, timeout_s=patience_s(), watch=watch)
        world.backend, world.group_lines = "gloo", {}
        fabric, found = DistFabric(cast("World", world)), []

        def made() -> list[OwnedGroup]:
            return [one for one in (fabric.group(range(num)) for _ in range(2)) if one is not None]

        pair = made()
        for turn in range(3):
            for group in pair:
                total = torch.ones(3)
                group.all_reduce(total).wait()
                found.append(float(total.sum()))
            if turn == 0 and rank == 1:
                pair[0].abort()
            for group in pair:
                group.close()
            if turn == 0:
                ended.wait(patience_s())
            pair = made()
        for group in pair:
            group.abort()
            group.close()
        return found, store.add(f"group {'-'.join(map(str, range(num)))} of {rank}", 0)

    assert run_threads(num, work) == [([3.0 * num] * 6, 3)] * num


def test_a_frame_of_the_next_group_that_has_come_in_part_is_not_lost() -> None:
    """The slower member is in the middle of reading it when its own first group ends."""
    ends = socket.socketpair()
    fast, slow = (PeerLine(place, made, reads_early=True) for place, made in enumerate(ends))
    first, second = Stamp(0, 1, 0), Stamp(0, 2, 0)
    slow.begin(first)
    fast.begin(second)
    given, taken = torch.arange(2**20, dtype=torch.float32), torch.zeros(2**20)
    slow.expect(Tag(first, 1, 0), bytes_of(torch.zeros(1)))  # so that it reads
    fast.send(Tag(second, 1, 0), bytes_of(given))
    fast.move()
    assert slow.move() == []
    assert not fast.has_sent, "the rest waits for room"

    slow.begin(second)
    slow.expect(Tag(second, 1, 0), bytes_of(taken))
    end_s, arrived = time.monotonic() + patience_s(), list[Tag]()
    while not arrived and time.monotonic() < end_s:
        fast.move()
        arrived = slow.move()
    assert arrived == [Tag(second, 1, 0)]
    assert torch.equal(taken, given)
    for one in ends:
        one.close()
