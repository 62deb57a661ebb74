"""Where samples go when some are private: every step, place and sample accounted for, and seen by its own."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.train.data.mixture import ELSEWHERE, ReadableOrder, ReadableSamples
from bireme.train.data.placing import Epoch, Numbers, Order, Stock
from bireme.train.data.samples import Samples
from bireme.train.run_data import ReadableData


@dataclass(frozen=True)
class Case:
    """Replicas with their rows, the owner that each is home of, and what there is of samples."""

    stock: Stock
    rows: tuple[int, ...]
    owners: tuple[int | None, ...]
    seed: int

    def order(self, own: int | None) -> ReadableOrder:
        return ReadableOrder(self.stock, self.seed, self.owners, self.rows, lambda _step: self.rows, own=own)

    @property
    def epoch(self) -> Epoch:
        return self.order(None).placing.epoch

    def replica_of(self, row: int) -> int:
        return int(np.searchsorted(list(accumulate(self.rows)), row, side="right"))


@dataclass(frozen=True)
class Mixed:
    """An order that is not of one source."""

    num_samples: int
    seed: int = 0
    probes: tuple[int, ...] = ()

    def numbers(self, first: int, count: int) -> Numbers:
        return np.arange(first, first + count)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    num_owners = draw(st.integers(1, len(rows)))
    owners = draw(
        st.permutations(
            [
                *range(num_owners),
                *draw(
                    st.lists(
                        st.one_of(st.none(), st.integers(0, num_owners - 1)),
                        min_size=len(rows) - num_owners,
                        max_size=len(rows) - num_owners,
                    )
                ),
            ]
        )
    )
    private = tuple(draw(st.lists(st.integers(1, 40), min_size=num_owners, max_size=num_owners)))
    stock = Stock(draw(st.integers(sum(rows), 60)), private, sum(rows))
    return Case(stock, rows, tuple(owners), draw(st.integers(0, 2**40)))


def ledger(case: Case, own: int | None, steps: range) -> list[list[int]]:
    """The numbers of the samples in each batch, as a rank of that owner's server sees them."""
    order = case.order(own)
    return [order.numbers(step * case.stock.batch_size, case.stock.batch_size).tolist() for step in steps]


@given(cases(), st.integers(0, 2))
def test_an_epoch_takes_every_sample_that_has_a_place_once(case: Case, epoch: int) -> None:
    """And a private one only in rows of replicas whose home is its owner, so the steps are alike for all."""
    steps = case.stock.steps_per_epoch
    window = range(epoch * steps, (epoch + 1) * steps)
    views = [ledger(case, own, window) for own in range(len(case.stock.num_private))]
    nobody = ledger(case, None, window)

    public = Counter(number for batch in nobody for number in batch if number != ELSEWHERE)
    assert sum(public.values()) == case.epoch.public
    assert len(public) == case.stock.num_public - case.epoch.public_left_out
    assert max(public.values(), default=0) <= 1 + case.epoch.public_repeated
    if not case.epoch.public_repeated:
        assert set(public.values()) <= {1}
    assert set(public) <= set(range(case.stock.num_public))

    for owner, view in enumerate(views):
        seen = Counter[int]()
        for batch in view:
            assert len(batch) == case.stock.batch_size
            for row, number in enumerate(batch):
                if number < ELSEWHERE:
                    assert case.owners[case.replica_of(row)] == owner
                    seen[ELSEWHERE - 1 - number] += 1
        assert set(seen) <= set(range(case.stock.num_private[owner]))
        assert set(seen.values()) <= {1}
        assert len(seen) == case.epoch.own[owner]
        assert case.epoch.own_left_out[owner] == case.stock.num_private[owner] - len(seen)
    assert case.epoch.public + sum(case.epoch.own) == steps * case.stock.batch_size


@given(cases())
def test_all_ranks_agree_on_a_batch_and_each_knows_its_own_samples_alone(case: Case) -> None:
    steps = range(2 * case.stock.steps_per_epoch)
    nobody = ledger(case, None, steps)
    for own in range(len(case.stock.num_private)):
        view = ledger(case, own, steps)
        assert [[max(one, ELSEWHERE) for one in batch] for batch in view] == nobody
    assert all(number >= ELSEWHERE for batch in nobody for number in batch)
    assert len({str(case.order(own)) for own in (None, *range(len(case.stock.num_private)))}) == 1


@given(cases(), st.integers(0, 60))
def test_a_run_resumes_from_the_number_of_its_step_alone(case: Case, step: int) -> None:
    whole = ledger(case, 0, range(step + 2))
    assert ledger(case, 0, range(step, step + 2)) == whole[step:]
    size = case.stock.batch_size
    numbers = case.order(0).numbers(step * size + 1, size)
    assert numbers.tolist() == [*whole[step][1:], whole[step + 1][0]]


@given(cases())
def test_an_owner_with_more_samples_than_places_goes_through_all_of_them(case: Case) -> None:
    for owner, there in enumerate(case.stock.num_private):
        taken = case.epoch.own[owner]
        epochs = -(-there // taken) if taken else 0
        view = ledger(case, owner, range(epochs * case.stock.steps_per_epoch))
        assert len({one for batch in view for one in batch if one < ELSEWHERE}) == (there if taken else 0)


@given(cases(), st.integers(0, 1000))
def test_shares_that_change_leave_batches_full_and_private_samples_at_home(case: Case, draw: int) -> None:
    """Rows go from one replica to another while the batch stays what it is, and a step knows no other one."""
    pieces = len(case.rows)

    def rows(step: int) -> Sequence[int]:
        moved = np.random.default_rng(draw + step // 3).multinomial(
            case.stock.batch_size - pieces, [1 / pieces] * pieces
        )
        return [int(one) + 1 for one in moved]

    steps, size = case.stock.steps_per_epoch, case.stock.batch_size
    order = ReadableOrder(case.stock, case.seed, case.owners, case.rows, rows, own=0)
    view = [order.numbers(step * size, size).tolist() for step in range(steps)]
    for step, batch in enumerate(view):
        whose = np.repeat([-1 if one is None else one for one in case.owners], rows(step))
        assert all(whose[row] == 0 for row, number in enumerate(batch) if number < ELSEWHERE)
        assert all(number < case.stock.num_public for number in batch)
    private = [one for batch in view for one in batch if one < ELSEWHERE]
    assert len(private) == len(set(private)) <= case.epoch.own[0]
    assert order.numbers((steps - 1) * size, size).tolist() == view[-1]


def test_every_epoch_is_shuffled_and_has_private_samples_throughout() -> None:
    case = Case(Stock(900, (100,), 10), (4, 6), (0, None), 3)
    first, second = (ledger(case, 0, range(begin, begin + 100)) for begin in (0, 100))
    assert first != second
    assert [sum(one < ELSEWHERE for one in batch) for batch in first] == [1] * 100
    assert case.epoch.own_left_out == (0,)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(BiremeError, match="at least one sample"):
        Stock(100, (0,), 10)
    with pytest.raises(BiremeError, match="all of them a batch"):
        Stock(3, (2,), 10)


@given(cases(), st.integers(0, 3))
def test_replicas_that_add_private_samples_take_each_of_their_home_once_in_an_epoch(
    case: Case, epoch: int
) -> None:
    """The replicas of one home divide its samples; one that is elsewhere knows how many there are."""
    stock = replace(case.stock, is_added=True)

    def home(own: int | None) -> ReadableData:
        public = Order(stock.num_public, case.seed)
        samples = ReadableSamples(cast(Samples, []), None, "")
        return ReadableData(samples, public, stock, case.seed, (), case.owners, own, case.rows)

    steps = range(epoch * stock.steps_per_epoch, (epoch + 1) * stock.steps_per_epoch)
    for owner, count in enumerate(stock.num_private):
        replicas = [number for number, one in enumerate(case.owners) if one == owner]
        most = sum(case.rows[one] for one in replicas)
        found: list[int] = []
        for step in steps:
            own = [home(owner).added(one)(step) for one in replicas]
            elsewhere = [home(None).added(one)(step) for one in replicas]
            assert [len(one) for one in own] == [len(one) for one in elsewhere]
            assert all((one == ELSEWHERE).all() for one in elsewhere)
            assert sum(map(len, own)) <= most
            found += (ELSEWHERE - 1 - np.concatenate(own)).tolist()
        assert len(set(found)) == len(found) == min(count, most * stock.steps_per_epoch)
        assert set(found) <= set(range(count))
    assert all(len(home(None).added(one)(0)) == 0 for one, own in enumerate(case.owners) if own is None)


def test_public_samples_of_any_order_have_the_places_that_private_ones_leave() -> None:
    """They go on from step to step, as those of a mixture do, each with its source's own epochs."""
    stock, rows = Stock(40, (7,), 6), (6,)
    order = Mixed(1000)
    for own in (None, 0):
        readable = ReadableOrder(stock, 3, (0,), rows, lambda _step: rows, own=own, public=order)
        found = [
            number for step in range(30) for number in readable.numbers(step * 6, 6).tolist() if number >= 0
        ]
        assert found == list(range(len(found)))
