"""The end of a batch: sums over replicas and tied copies, and the whole norm and loss, in the background."""

import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bireme.codec.sum_description import parse_sum_codec
from bireme.memory.arena import Arena, Slots
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients, SentBytes, squared_norm, sum_parts
from bireme.sync.group import CollectiveError, DistGroup, Group, Pending, SingleRankGroup
from bireme.sync.reducer import GroupReducer, Reduced, Reduction
from bireme.sync.slices import NUM_IN_FLIGHT, beside_parts
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_processes, run_threads

NOTHING = BatchGradients({}, set())

MakeGroup = Callable[[Sequence[int]], Group | None]

SHAPES = {"a": (3,), "b": (2, 5), "large": (40, 8), "scalar": (), "z": (7, 1, 2)}
SMALL_SLICE_BYTES = 160
NUM_BATCHES = 3
ALL = (0, 1, 2, 3)
LEFT, RIGHT = (0, 2), (1, 3)
"""Four ranks: two stages, and two replicas of each. Both stages use the parameter `tied`."""


def _own(rank: int, batch: int) -> dict[str, Tensor]:
    """The gradients of a rank's stage, whose names begin with the stage."""
    own = torch.Generator().manual_seed(100 * batch + rank)  # threads share torch's own
    shapes = {f"{rank % 2}.{name}": shape for name, shape in SHAPES.items()} | {"tied": (4, 6)}
    return {name: torch.randn(shape, dtype=torch.float64, generator=own) for name, shape in shapes.items()}


def _laid_out(tensors: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> BatchGradients:
    """Gradients as a stage has them: in an arena, but for the tied, and nonsense where there is none."""
    slots = Slots({name: tensor.shape for name, tensor in like.items() if name != "tied"})
    dtype = next(iter(like.values())).dtype if like else torch.float32
    arena = Arena(slots, dtype, torch.device("cpu"))
    arena.flat.fill_(math.nan)
    views = dict(arena.views)
    if "tied" in like:
        views["tied"] = torch.empty_like(like["tied"])
    held = {name for name, tensor in tensors.items() if tensor is not None}
    for name in held:
        views[name].copy_(_tensor(tensors[name]))
    return BatchGradients(views, held, [arena.flat])


def _group(make: MakeGroup, ranks: Sequence[int]) -> Group:
    group = make(ranks)
    assert group is not None
    return group


def _started(reducer: GroupReducer, batch: int, gradients: BatchGradients, loss_sum: Any = 0.0) -> Reduction:
    reduction = Reduction(batch, gradients, loss_sum)
    reducer.start(reduction)
    return reduction


def _reducer(rank: int, make: MakeGroup) -> GroupReducer:
    left, right, everyone, tied = make(LEFT), make(RIGHT), make(ALL), make(ALL)
    assert everyone is not None
    assert tied is not None
    return GroupReducer(
        everyone,
        replicas=right if rank % 2 else left,
        tied={"tied": tied},
        counted={name for name in _own(rank, 0) if rank < 2 and (name != "tied" or rank == 0)},
        slice_bytes=SMALL_SLICE_BYTES,
    )


Outcome = tuple[Reduced, BatchGradients]


def _train(rank: int, make: MakeGroup) -> list[Outcome]:
    """Each batch is started before the one before it is finished."""
    reducer = _reducer(rank, make)
    given = [_laid_out(_own(rank, batch), _own(rank, 0)) for batch in range(NUM_BATCHES)]
    under_way: list[Reduction] = []
    results = []
    for batch in range(NUM_BATCHES):
        under_way.append(_started(reducer, batch, given[batch], loss_sum=0.25 * 2**rank + batch))
        if batch:
            results.append(reducer.finish(under_way.pop(0)))
    results.append(reducer.finish(under_way.pop(0)))
    reducer.close()
    return list(zip(results, given, strict=True))


def _check_training(of_ranks: list[list[Outcome]]) -> None:
    for batch in range(NUM_BATCHES):
        given = [_own(rank, batch) for rank in ALL]
        results = [of_ranks[rank][batch] for rank in ALL]
        totals: dict[str, Tensor] = {}
        for rank in ALL:
            for name, found in results[rank][1].views.items():
                if name == "tied":
                    assert torch.equal(found, results[0][1].views[name]), "tied copies differ"
                    expected = sum(part[name] for part in given)
                    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
                else:
                    one, other = given[rank % 2][name], given[rank % 2 + 2][name]
                    assert torch.equal(found, one + other), name
                totals[name] = found
        norm = math.sqrt(sum(float(total.square().sum()) for total in totals.values()))
        for reduced, _ in results:
            assert reduced.loss == 0.25 * 15 + 4 * batch
            assert reduced.grad_norm == pytest.approx(norm, rel=1e-13)
            assert reduced.grad_norm == results[0][0].grad_norm
            assert reduced.is_finite


def _tensor(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _on_threads(num_ranks: int, work: Callable[[int, MakeGroup], Any]) -> list[Any]:
    fabric = ThreadFabric(num_ranks)
    return run_threads(num_ranks, lambda rank: work(rank, fabric.of(rank).group))


def test_replicas_and_tied_copies_are_summed_exactly_while_batches_overlap() -> None:
    _check_training(_on_threads(4, _train))


def _in_parts(group: Group) -> list[Tensor]:
    """Sums in few bits, in several slices."""
    sums, found = GradientSummation(parse_sum_codec("int2")), list[Tensor]()
    for batch in range(2):
        draw = torch.Generator().manual_seed(group.rank)
        own = {"w": torch.randn(70, 90, generator=draw), "b": torch.randn(90, generator=draw)}
        sums.sum(group, [*own], BatchGradients(own, set(own)), 4096, SentBytes(), batch=batch)
        sums.settle(counts=True)
        found += own.values()
    return found


def _over_gloo(rank: int, folder: Path) -> dict[str, Any]:
    def make(ranks: Sequence[int]) -> Group | None:
        group = dist.new_group(list(ranks))
        return DistGroup(group, torch.device("cpu")) if rank in ranks else None

    everyone = _group(make, ALL)
    tensor = torch.full((3,), float(rank))
    everyone.copy_from(tensor, 2).wait()
    message = torch.full((5,), rank, dtype=torch.uint8)
    gathered = [torch.empty_like(message) for _ in ALL]
    everyone.gather(message, gathered).wait()
    outcome = {"training": _train(rank, make), "copied": tensor, "gathered": gathered}
    outcome["coded"] = _in_parts(everyone)
    doomed = _group(make, ALL)
    if rank == 3:
        torch.save(outcome, folder / "last words")
        os.kill(os.getpid(), signal.SIGKILL)
    reducer = GroupReducer(doomed)
    reduction = _started(reducer, 0, NOTHING)
    with pytest.raises(CollectiveError, match="A sum over the processes 0, 1, 2, 3 failed: ") as caught:
        reducer.finish(reduction)
    with pytest.raises(CollectiveError) as again:
        _started(reducer, 1, NOTHING)
    assert again.value is caught.value
    outcome["size"] = (doomed.rank, doomed.size)
    return outcome


@pytest.mark.slow
def test_processes_sum_as_threads_do_and_learn_when_one_is_killed(tmp_path: Path) -> None:
    *survivors, _ = run_processes(4, _over_gloo, tmp_path, tmp_path, dying=(3,))
    killed = torch.load(tmp_path / "last words", weights_only=False)
    _check_training([outcome["training"] for outcome in (*survivors, killed)])
    fabric = ThreadFabric(4)
    coded = run_threads(4, lambda rank: _in_parts(fabric.of(rank).everyone()))[0]
    for rank, outcome in enumerate(survivors):
        assert all(map(torch.equal, outcome["coded"], coded))
        assert outcome["copied"].tolist() == [2.0] * 3
        assert [one.tolist() for one in outcome["gathered"]] == [[member] * 5 for member in ALL]
        assert outcome["size"] == (rank, 4)


def _together(given: Sequence[Mapping[str, Tensor | None]], like: Mapping[str, Tensor]) -> list[Outcome]:
    """One batch on replicas with these gradients."""
    ranks = range(len(given))

    def work(rank: int, make: MakeGroup) -> Outcome:
        counted = None if rank == 0 else ()
        reducer = GroupReducer(_group(make, ranks), replicas=_group(make, ranks), counted=counted)
        gradients = _laid_out(given[rank], like)
        reduced = reducer.finish(_started(reducer, 0, gradients, loss_sum=torch.tensor(0.5)))
        reducer.close()
        return reduced, gradients

    return _on_threads(len(given), work)


def test_a_gradient_that_nobody_has_stays_absent_and_one_that_some_have_is_completed() -> None:
    like = {name: torch.empty(2) for name in ("both", "first", "nobody", "second")}
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    first = {"both": one, "first": one, "nobody": None, "second": None}
    second = {"both": two, "first": None, "nobody": None, "second": two}
    for reduced, gradients in _together([first, second], like):
        found = {name: gradients.views[name].tolist() for name in sorted(gradients.held)}
        assert found == {"both": [11.0, 22.0], "first": [1.0, 2.0], "second": [10.0, 20.0]}
        assert reduced.loss == 1.0
        assert reduced.grad_norm == pytest.approx(math.sqrt(121 + 484 + 1 + 4 + 100 + 400))


def test_a_large_gradient_goes_in_slices_also_where_a_replica_lacks_it() -> None:
    # One of more than 25 MB used to go in one piece, which failed where that took longer than the timeout.
    like = {"large": torch.empty(26 * 2**18), "small": torch.empty(3)}
    first = {"large": torch.full((26 * 2**18,), 2.0), "small": torch.ones(3)}
    for _, gradients in _together([first, {"large": None, "small": torch.ones(3)}], like):
        assert gradients.views["large"].eq(2).all()
        assert gradients.views["small"].eq(2).all()


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_known_on_every_rank(wild: float) -> None:
    gradients = [{"a": torch.ones(3), "b": torch.ones(2)} for _ in range(2)]
    gradients[1]["b"][1] = wild
    for reduced, _ in _together(gradients, gradients[0]):
        assert not reduced.is_finite
        assert not math.isfinite(reduced.grad_norm)


def test_gradients_too_large_to_square_in_float32_are_finite() -> None:
    gradients = [{"a": torch.full((4,), 1e30)}] * 2
    for reduced, _ in _together(gradients, gradients[0]):
        assert reduced.is_finite
        assert reduced.grad_norm == pytest.approx(4e30, rel=1e-6)


# One rank alone, or among groups that are made up.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_squared_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size, 2, dtype=dtype).t() for size in (0, 1, 300_000)] + [
        torch.tensor(2, dtype=dtype)
    ]
    exact = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert squared_norm(tensors) == pytest.approx(exact, rel=1e-13 if dtype == torch.float64 else 1e-5)
    assert squared_norm([]) == 0.0


def test_a_complex_number_counts_with_both_its_parts() -> None:
    assert squared_norm([torch.full((3,), 3 + 4j)]) == pytest.approx(75.0)
    assert squared_norm([torch.full((2,), 2j).conj()]) == pytest.approx(8.0)
    assert not math.isfinite(squared_norm([torch.tensor([complex(0, math.nan)])]))


@pytest.mark.parametrize("in_background", [True, False])
def test_one_replica_gets_back_what_it_gave(in_background: bool) -> None:
    like = {"w": torch.empty(2), "unused": torch.empty(5)}
    gradients = _laid_out({"w": torch.tensor([3.0, 4.0]), "unused": None}, like)
    reducer = GroupReducer(SingleRankGroup(), in_background=in_background)
    assert not reducer.sums_gradients
    reduction = _started(reducer, 0, gradients, 1.5)
    assert reducer.finish(reduction) == Reduced(loss=1.5, grad_norm=5.0, is_finite=True)
    assert gradients.views["w"].tolist() == [3.0, 4.0]
    assert gradients.held == {"w"}
    reducer.close()


class _Held(SingleRankGroup):
    """A group of two, of whom the other brings zeros; its sums are held back until they are let go."""

    size = 2

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.under_way = 0
        self.most_under_way = 0
        self.messages: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> Pending:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.messages.append(tensor)
        return _HeldSum(self)


class _HeldSum:
    def __init__(self, group: _Held) -> None:
        self._group = group

    def wait(self) -> None:
        assert self._group.gate.wait(20)
        self._group.under_way -= 1


def _ones(num_elements: int = 2) -> BatchGradients:
    gradient = torch.ones(num_elements)
    return BatchGradients({"w": gradient}, {"w"}, [gradient])


def test_to_start_batches_waits_for_nothing() -> None:
    group = _Held()
    reducer = GroupReducer(SingleRankGroup(), replicas=group)
    under_way = [_started(reducer, batch, _ones(), loss_sum=batch) for batch in range(3)]
    group.gate.set()
    assert [reducer.finish(one).loss for one in under_way] == [0.0, 1.0, 2.0]
    reducer.close()


def test_gradients_are_summed_where_they_lie_a_few_slices_at_a_time() -> None:
    group = _Held()
    group.gate.set()
    reducer = GroupReducer(SingleRankGroup(), replicas=group, slice_bytes=80)
    gradients = _ones(600)
    reducer.finish(_started(reducer, 0, gradients))
    reducer.close()
    slices = [message for message in group.messages if message.dtype is torch.float32]
    assert [len(one) for one in slices] == [20] * 30
    assert {one.untyped_storage().data_ptr() for one in slices} == {gradients.flats[0].data_ptr()}
    assert group.most_under_way == NUM_IN_FLIGHT + 1, "the slices, and who has which gradient"


@pytest.mark.parametrize("num_members", [2, 3])
def test_sums_in_parts_are_in_order_and_take_the_memory_that_plans_count(num_members: int) -> None:
    """They took 200 MiB on each replica, more than sharing an optimizer saved, and nobody had counted it."""
    length = 400
    given = torch.randn(num_members, length, generator=torch.Generator().manual_seed(0))
    parts = tuple(place * length // num_members for place in range(num_members + 1))
    fabric = ThreadFabric(num_members)

    def work(rank: int) -> tuple[Tensor, int]:
        group = cast(Any, _group(fabric.of(rank).group, range(num_members)))
        flat = given[rank].clone()
        seen = _Beside(group.exchange, flat)
        group.exchange = seen.exchange
        gradients = BatchGradients({"w": flat}, {"w"}, [flat], parts=[parts])
        sum_parts(group, ["w"], gradients, SMALL_SLICE_BYTES, SentBytes())
        return flat[parts[rank] : parts[rank + 1]], seen.most

    found = run_threads(num_members, work)
    expected = given[0].clone()
    for other in given[1:]:
        expected += other
    assert torch.equal(torch.cat([own for own, _ in found]), expected)
    counted = beside_parts(num_members) * (NUM_IN_FLIGHT + 1) * SMALL_SLICE_BYTES
    assert 0.9 * counted < max(most for _, most in found) <= counted


class _Beside:
    """Counts what exchanges that are under way have in memory of their own, at most."""

    def __init__(self, exchange: Callable[..., Pending], flat: Tensor) -> None:
        self._exchange, self._flat = exchange, flat
        self._now = self.most = 0

    def exchange(self, given: Tensor, lengths: Sequence[int], taken: Tensor, others: Sequence[int]) -> Any:
        memory = self._flat.untyped_storage().data_ptr()
        own = [one.nbytes for one in (given, taken) if one.untyped_storage().data_ptr() != memory]
        self._now += sum(own)
        self.most = max(self.most, self._now)
        pending, ended = self._exchange(given, lengths, taken, others), self

        class Noting:
            def wait(self) -> None:
                pending.wait()
                ended._now -= sum(own)

        return Noting()


def test_a_finished_batch_is_forgotten() -> None:
    reducer = GroupReducer(SingleRankGroup())
    gradients = _ones()
    reducer.finish(_started(reducer, 0, gradients))
    reducer.finish(_started(reducer, 1, _ones()))
    lives = weakref.ref(gradients.flats[0])
    del gradients
    assert lives() is None
    reducer.close()


def test_what_is_not_begun_when_it_is_closed_is_dropped() -> None:
    group = _Held()
    reducer = GroupReducer(SingleRankGroup(), replicas=group)
    first, second = (_started(reducer, batch, _ones()) for batch in (0, 1))
    while not group.messages:
        threading.Event().wait(0.001)
    reducer.close(timeout_s=0.01)
    group.gate.set()
    assert reducer.finish(first).is_finite
    with pytest.raises(RuntimeError, match="closed before it began batch 1"):
        reducer.finish(second)
    with pytest.raises(RuntimeError, match="the reducer was closed"):
        _started(reducer, 2, _ones())


def test_a_lost_replica_fails_the_batch_and_all_that_follow() -> None:
    fabric = ThreadFabric(2)
    reducer = GroupReducer(SingleRankGroup(), replicas=_group(fabric.of(0).group, (0, 1)))
    under_way = [_started(reducer, batch, _ones()) for batch in (0, 1)]
    fabric.lose(1)
    for one in under_way:
        with pytest.raises(CollectiveError, match=r"waits for the members \[1\] in vain"):
            reducer.finish(one)
    reducer.close()


def test_members_that_disagree_about_a_collective_are_told() -> None:
    fabric = ThreadFabric(2)
    one, other = (_group(fabric.of(rank).group, (0, 1)) for rank in (0, 1))
    one.all_reduce(torch.ones(2))
    with pytest.raises(CollectiveError, match=r"sum of torch.float32 \[2\] on one, sum of .* \[3\]"):
        other.all_reduce(torch.ones(3))
