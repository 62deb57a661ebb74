"""The sum over members of a round: exact, the same on all, and made again without those that are lost."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bireme.sync.rounds.contribution import Contribution, Summed, sum_over
from bireme.sync.rounds.round_group import PIECE_BYTES, LineBroken, PeerLine, RoundGroup, Stamp, Tag
from tests.support.together import run_threads

LENGTHS = (3 * PIECE_BYTES // 8 + 5, 0, 7)
"""Of flats: several pieces, none, less than one."""


class Mesh:
    """A line between each two of some members."""

    def __init__(self, num: int) -> None:
        pairs = [(one, other) for one in range(num) for other in range(one)]
        self.lines: dict[tuple[int, int], PeerLine] = {}
        for one, other in pairs:
            here, there = socket.socketpair()
            self.lines[one, other], self.lines[other, one] = PeerLine(other, here), PeerLine(one, there)

    def lose(self, member: int) -> None:
        """As if its process had died."""
        for (own, _), line in self.lines.items():
            if own == member:
                with suppress(OSError):
                    line.socket.shutdown(socket.SHUT_RDWR)

    def sum(
        self,
        own: Contribution,
        me: int,
        members: Sequence[int],
        stamp: Stamp,
        *,
        timeout_s: float = 60.0,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Summed, list[Tensor]]:
        into = [torch.full_like(flat, torch.nan) for flat in own.flats]
        group = self.group(me, members, stamp, timeout_s=timeout_s, check=check)
        return sum_over(own, into, group), into

    def group(
        self,
        me: int,
        members: Sequence[int],
        stamp: Stamp,
        *,
        timeout_s: float = 60.0,
        check: Callable[[], None] = lambda: None,
    ) -> RoundGroup:
        return RoundGroup(
            me, members, lambda member: self.lines[me, member], stamp, timeout_s=timeout_s, check=check
        )


def contributions(
    num: int, weights: Sequence[float] = (), lengths: Sequence[int] = LENGTHS
) -> list[Contribution]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for member in range(num):
        flats = [torch.randn(length, dtype=torch.float64, generator=generator) for length in lengths]
        weight = weights[member] if weights else 4.0
        nominal = 4.0 * num if not weights else weight * num
        numbers = (1.0, float(member))
        found.append(Contribution(flats, bytes([1, member == 1]), weight, nominal, (0.5 * member,), numbers))
    return found


def mean_of(parts: Sequence[Contribution]) -> list[Tensor]:
    weight = sum(one.weight for one in parts)
    factors = [one.nominal / weight for one in parts]
    return [
        sum((one.flats[place] * by for one, by in zip(parts, factors, strict=True)), torch.zeros(()).double())
        for place in range(len(parts[0].flats))
    ]


@pytest.mark.parametrize(
    ("num", "weights"), [(1, ()), (2, ()), (2, (3.0, 5.0)), (3, (1.0, 4.0, 2.0)), (5, ())]
)
def test_all_members_get_the_same_bits_and_the_weighted_mean(num: int, weights: Sequence[float]) -> None:
    mesh, parts = Mesh(num), contributions(num, weights)
    found = run_threads(num, lambda me: mesh.sum(parts[me], me, range(num), Stamp(0, 7, 0)))

    expected = mean_of(parts)
    for summed, flats in found:
        assert summed == found[0][0]
        for flat, first, wanted in zip(flats, found[0][1], expected, strict=True):
            assert torch.equal(flat, first)
            torch.testing.assert_close(flat, wanted, rtol=0, atol=0 if num <= 2 else 1e-14)
    assert found[0][0].holds == bytes([1, num > 1])
    assert found[0][0].weight == sum(one.weight for one in parts)
    assert found[0][0].numbers == (float(num), float(sum(range(num))))


@pytest.mark.parametrize("length", [7, 2 * PIECE_BYTES // 8 + 5])
def test_a_flat_with_a_first_member_has_the_same_bits_wherever_it_lies(length: int) -> None:
    num, first = 5, 1_000_003
    alone = [replace(one, firsts=(first,)) for one in contributions(num, lengths=(length,))]
    after_others = [
        replace(one, flats=[*one.flats, own.flats[0]], firsts=(None, None, None, first))
        for one, own in zip(contributions(num), alone, strict=True)
    ]

    def summed(parts: Sequence[Contribution]) -> list[Tensor]:
        mesh = Mesh(num)
        found = run_threads(num, lambda me: mesh.sum(parts[me], me, range(num), Stamp(0, 7, 0)))
        flats: list[Tensor] = found[0][1]
        assert all(torch.equal(own[-1], flats[-1]) for _, own in found)
        return flats

    assert torch.equal(summed(alone)[0], summed(after_others)[-1])


@pytest.mark.parametrize("members", [(0, 1), (1, 2, 4), (0, 1, 2, 3, 4)])
def test_a_group_mixes_weights_so_that_the_mean_of_all_replicas_stays_where_it_was(
    members: tuple[int, ...],
) -> None:
    """Its mixing matrix is symmetric, and its rows and columns add up to one."""
    num = 5
    mesh, before = Mesh(num), torch.eye(num, dtype=torch.float64)

    def mixed(me: int) -> Tensor:
        if me not in members:
            return before[me]
        own = Contribution([before[me]], b"", 1.0, 1.0)  # as ranks in groups contribute their weights
        return mesh.sum(own, me, members, Stamp(0, 7, 0))[1][0]

    mixing = torch.stack(run_threads(num, mixed))
    assert torch.equal(mixing, mixing.T)
    for axis in (0, 1):
        torch.testing.assert_close(mixing.sum(axis), torch.ones(num).double(), rtol=0, atol=1e-15)
    weights = torch.randn(num, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close((mixing @ weights).mean(0), weights.mean(0), rtol=0, atol=1e-14)


class Died(Exception):  # noqa: N818 (it is an event)
    """What happens to a member whose process is killed: it does nothing more."""


def dies_at(moves: int, mesh: Mesh, me: int) -> None:
    """Have a member die right after it has moved its lines so often, however many frames moved along.

    Counting looks would not do: a member looks only while something is missing, and a fast other one may have
    sent all of it.
    """
    left = [moves]

    class MortalLine(PeerLine):
        def move(self) -> list[Tag]:
            found = super().move()
            left[0] -= 1
            if not left[0]:
                mesh.lose(me)
                raise Died
            return found

    for (own, other), line in list(mesh.lines.items()):
        if own == me:
            mesh.lines[own, other] = MortalLine(other, line.socket)


@pytest.mark.parametrize("num", [2, 3, 4])
def test_an_attempt_that_lost_a_member_is_made_again_from_the_kept_contributions(num: int) -> None:
    """The last member dies when its first frames have come; what was sent by it and to it is dropped."""
    mesh, parts = Mesh(num), contributions(num)
    before = [[flat.clone() for flat in one.flats] for one in parts]
    gone = threading.Event()
    dies_at(num, mesh, num - 1)  # its first move of pieces, after each line has moved once for the numbers

    def work(me: int) -> list[Tensor] | None:
        if me == num - 1:
            with pytest.raises(Died):
                mesh.sum(parts[me], me, range(num), Stamp(0, 7, 0))
            gone.set()
            return None

        def superseded() -> None:
            if gone.is_set():
                raise InterruptedError

        with suppress(LineBroken, InterruptedError):
            mesh.sum(parts[me], me, range(num), Stamp(0, 7, 0), check=superseded)
        gone.wait()
        again = mesh.sum(parts[me], me, range(num - 1), Stamp(0, 7, 1))[1]
        assert all(map(torch.equal, parts[me].flats, before[me]))
        return again

    found = run_threads(num, work)[:-1]
    for flats in found:
        assert all(map(torch.equal, flats, found[0]))
        for flat, wanted in zip(flats, mean_of(parts[:-1]), strict=True):
            torch.testing.assert_close(flat, wanted, rtol=0, atol=0 if num <= 3 else 1e-14)


def test_frames_of_an_old_attempt_change_nothing() -> None:
    """Both are interrupted at different places of three attempts in a row, on the same lines."""
    mesh, parts = Mesh(2), contributions(2)

    def work(me: int) -> list[Tensor]:
        for attempt in range(3):
            looks = iter(range(attempt + 2 * me))

            def stop(looks: "object" = looks) -> None:
                if next(looks, None) is None:  # type: ignore[call-overload]
                    raise InterruptedError

            with suppress(InterruptedError):
                mesh.sum(parts[me], me, range(2), Stamp(0, 7, attempt), check=stop)
        own = Contribution(
            parts[me].flats, parts[me].holds, parts[me].weight, parts[me].nominal, parts[me].means, (9.0, 9.0)
        )
        summed, flats = mesh.sum(own, me, range(2), Stamp(1, 7, 0))
        assert summed.numbers == (18.0, 18.0)
        return flats

    for flats in run_threads(2, work):
        for flat, wanted in zip(flats, mean_of(parts), strict=True):
            assert torch.equal(flat, wanted)


def test_a_silent_member_is_named() -> None:
    mesh, parts = Mesh(3), contributions(3)

    def work(me: int) -> int:
        if me == 2:
            return me
        with pytest.raises(LineBroken) as caught:
            mesh.sum(parts[me], me, range(3), Stamp(0, 7, 0), timeout_s=0.3)
        return caught.value.member

    assert run_threads(3, work)[:2] == [2, 2]
