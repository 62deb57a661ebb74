"""The end of a batch: sums over replicas and tied copies, and the whole norm and loss, in the background."""

import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bireme.errors import BiremeError
from bireme.sync.buckets import NUM_IN_FLIGHT
from bireme.sync.group import CollectiveError, DistGroup, Group, LonelyGroup, Pending
from bireme.sync.norm import squared_norm
from bireme.sync.reduced import Reduced
from bireme.sync.reducer import Reducer
from tests.thread_transport import ThreadFabric
from tests.together import run_processes, run_threads

MakeGroup = Callable[[Sequence[int]], Group | None]

SHAPES = {"a": (3,), "b": (2, 5), "large": (40, 8), "scalar": (), "z": (7, 1, 2)}
SMALL_BUCKET_BYTES = 160
NUM_BATCHES = 3
ALL = (0, 1, 2, 3)
LEFT, RIGHT = (0, 2), (1, 3)
"""Four ranks: two stages, and two replicas of each. Both stages use the parameter `tied`."""


def _own(rank: int, batch: int) -> dict[str, Tensor]:
    """The gradients of a rank's stage, whose names begin with the stage."""
    own = torch.Generator().manual_seed(100 * batch + rank)  # threads share torch's own
    shapes = {f"{rank % 2}.{name}": shape for name, shape in SHAPES.items()} | {"tied": (4, 6)}
    return {name: torch.randn(shape, dtype=torch.float64, generator=own) for name, shape in shapes.items()}


def _templates(rank: int) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in _own(rank, 0).items()}


def _group(make: MakeGroup, ranks: Sequence[int]) -> Group:
    group = make(ranks)
    assert group is not None
    return group


def _reducer(rank: int, make: MakeGroup, *, keep: bool = True) -> Reducer:
    left, right, everyone, tied = make(LEFT), make(RIGHT), make(ALL), make(ALL)
    replicas = right if rank % 2 else left
    assert replicas is not None
    assert everyone is not None
    assert tied is not None
    counted = {name for name in _templates(rank) if rank < 2 and (name != "tied" or rank == 0)}
    return Reducer(
        _templates(rank),
        replicas,
        everyone,
        keep_gradients=keep,
        tied={"tied": tied},
        counted=counted,
        bucket_bytes=SMALL_BUCKET_BYTES,
    )


def _train(rank: int, make: MakeGroup, keep: bool = True) -> list[Reduced]:
    """Each batch is started before the one before it is finished."""
    reducer = _reducer(rank, make, keep=keep)
    given = [_own(rank, batch) for batch in range(NUM_BATCHES)]
    before = [_own(rank, batch) for batch in range(NUM_BATCHES)]
    results = []
    for batch in range(NUM_BATCHES):
        reducer.start(batch, given[batch], loss_sum=0.25 * 2**rank + batch)
        if batch:
            results.append(reducer.finish(batch - 1))
    results.append(reducer.finish(NUM_BATCHES - 1))
    reducer.close()
    for tensors, copies, reduced in zip(given, before, results, strict=True):
        for name, tensor in tensors.items():
            if keep:
                assert torch.equal(tensor, copies[name]), f"{name} was changed"
            else:
                assert reduced.gradients[name] is tensor, f"{name} is not in place"
    return results


def _check_training(of_ranks: list[list[Reduced]]) -> None:
    for batch in range(NUM_BATCHES):
        given = [_own(rank, batch) for rank in ALL]
        results = [of_ranks[rank][batch] for rank in ALL]
        totals: dict[str, Tensor] = {}
        for rank in ALL:
            for name, found in results[rank].gradients.items():
                assert found is not None
                if name == "tied":
                    assert torch.equal(found, _tensor(results[0].gradients[name])), "tied copies differ"
                    expected = sum(part[name] for part in given)
                    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
                else:
                    one, other = given[rank % 2][name], given[rank % 2 + 2][name]
                    assert torch.equal(found, one + other), name
                totals[name] = found
        norm = math.sqrt(sum(float(total.square().sum()) for total in totals.values()))
        for reduced in results:
            assert reduced.loss == 0.25 * 15 + 4 * batch
            assert reduced.grad_norm == pytest.approx(norm, rel=1e-13)
            assert reduced.grad_norm == results[0].grad_norm
            assert reduced.is_finite


def _tensor(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def _on_threads(num_ranks: int, work: Callable[[int, MakeGroup], Any]) -> list[Any]:
    fabric = ThreadFabric(num_ranks)
    return run_threads(num_ranks, lambda rank: work(rank, fabric.of(rank).group))


@pytest.mark.parametrize("keep", [True, False])
def test_replicas_and_tied_copies_are_summed_exactly_while_batches_overlap(keep: bool) -> None:
    _check_training(_on_threads(4, lambda rank, make: _train(rank, make, keep)))


def _over_gloo(rank: int, folder: Path) -> dict[str, Any]:
    def make(ranks: Sequence[int]) -> Group | None:
        group = dist.new_group(list(ranks))
        return DistGroup(group) if rank in ranks else None

    everyone = _group(make, ALL)
    tensor = torch.full((3,), float(rank))
    everyone.broadcast(tensor, 2)
    everyone.barrier()
    outcome = {"keep": _train(rank, make), "in place": _train(rank, make, keep=False), "broadcast": tensor}
    doomed = _group(make, ALL)
    if rank == 3:
        torch.save(outcome, folder / "last words")
        os.kill(os.getpid(), signal.SIGKILL)
    reducer = Reducer({}, LonelyGroup(), doomed, keep_gradients=False)
    reducer.start(0, {}, loss_sum=0.0)
    with pytest.raises(CollectiveError, match="A sum over the processes 0, 1, 2, 3 failed: ") as caught:
        reducer.finish(0)
    with pytest.raises(CollectiveError) as again:
        reducer.start(1, {}, loss_sum=0.0)
    assert again.value is caught.value
    outcome["size"] = (doomed.rank, doomed.size)
    return outcome


@pytest.mark.slow
def test_processes_sum_as_threads_do_and_learn_when_one_is_killed(tmp_path: Path) -> None:
    *survivors, _ = run_processes(4, _over_gloo, tmp_path, tmp_path, dying=(3,))
    killed = torch.load(tmp_path / "last words", weights_only=False)
    for way in ("keep", "in place"):
        _check_training([outcome[way] for outcome in (*survivors, killed)])
    for rank, outcome in enumerate(survivors):
        assert outcome["broadcast"].tolist() == [2.0] * 3
        assert outcome["size"] == (rank, 4)


def _two(
    gradients: Sequence[Mapping[str, Tensor | None]], *, keep: bool = True, templates: Mapping[str, Tensor]
) -> list[Reduced]:
    """One batch on replicas with these gradients."""
    ranks = range(len(gradients))

    def work(rank: int, make: MakeGroup) -> Reduced:
        reducer = Reducer(
            templates,
            _group(make, ranks),
            _group(make, ranks),
            keep_gradients=keep,
            counted=None if rank == 0 else (),
        )
        reducer.start(0, gradients[rank], loss_sum=torch.tensor(0.5))
        reduced = reducer.finish(0)
        reducer.close()
        return reduced

    return _on_threads(len(gradients), work)


@pytest.mark.parametrize("keep", [True, False])
def test_a_gradient_that_nobody_has_stays_none_and_one_that_some_have_is_completed(keep: bool) -> None:
    templates = {name: torch.empty(2) for name in ("both", "first", "nobody", "second")}
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    first = {"both": one.clone(), "first": one.clone(), "nobody": None, "second": None}
    second = {"both": two.clone(), "first": None, "nobody": None, "second": two.clone()}
    for reduced in _two([first, second], keep=keep, templates=templates):
        found = {name: None if g is None else g.tolist() for name, g in reduced.gradients.items()}
        assert found == {"both": [11.0, 22.0], "first": [1.0, 2.0], "nobody": None, "second": [10.0, 20.0]}
        assert reduced.loss == 1.0
        assert reduced.grad_norm == pytest.approx(math.sqrt(121 + 484 + 1 + 4 + 100 + 400))


@pytest.mark.parametrize("keep", [True, False])
def test_a_large_gradient_that_one_replica_lacks_has_its_own_bucket_all_the_same(keep: bool) -> None:
    templates = {"large": torch.empty(26 * 2**18), "small": torch.empty(3)}
    first = {"large": torch.full((26 * 2**18,), 2.0), "small": torch.ones(3)}
    second = {"large": None, "small": torch.ones(3)}
    for reduced in _two([first, second], keep=keep, templates=templates):
        assert _tensor(reduced.gradients["large"]).eq(2).all()
        assert _tensor(reduced.gradients["small"]).eq(2).all()
    assert _tensor(first["large"]).eq(2).all()


@pytest.mark.parametrize("keep", [True, False])
def test_bfloat16_gradients_are_summed_in_float32(keep: bool) -> None:
    """256 + 1 is 256 in bfloat16, so a sum in bfloat16 would lose what the replicas bring one by one."""
    gradients = [{"w": torch.tensor([value], dtype=torch.bfloat16)} for value in (256.0, 1.0, 1.0, 2.0)]
    for reduced in _two(gradients, keep=keep, templates=gradients[0]):
        assert _tensor(reduced.gradients["w"]).dtype is torch.bfloat16
        assert _tensor(reduced.gradients["w"]).item() == 260


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_known_on_every_rank(wild: float) -> None:
    gradients = [{"a": torch.ones(3), "b": torch.ones(2)} for _ in range(2)]
    gradients[1]["b"][1] = wild
    for reduced in _two(gradients, templates=gradients[0]):
        assert not reduced.is_finite
        assert not math.isfinite(reduced.grad_norm)


def test_gradients_too_large_to_square_in_float32_are_finite() -> None:
    gradients = [{"a": torch.full((4,), 1e30)}] * 2
    for reduced in _two(gradients, templates=gradients[0]):
        assert reduced.is_finite
        assert reduced.grad_norm == pytest.approx(4e30, rel=1e-6)


# One rank alone, or among groups that are made up.


def _alone(templates: Mapping[str, Tensor], group: Group | None = None, **options: Any) -> Reducer:
    return Reducer(templates, group or LonelyGroup(), LonelyGroup(), **{"keep_gradients": False} | options)


def test_a_complex_number_counts_with_both_its_parts() -> None:
    assert squared_norm(torch.full((3,), 3 + 4j)) == 75.0
    assert squared_norm(torch.full((2,), 2j).conj()) == 8.0
    assert not math.isfinite(squared_norm(torch.tensor([complex(0, math.nan)])))


@pytest.mark.parametrize("keep", [True, False])
def test_one_replica_gets_back_what_it_gave(keep: bool) -> None:
    gradients: dict[str, Tensor | None] = {"w": torch.tensor([3.0, 4.0]), "unused": None}
    templates = {"w": torch.empty(2), "unused": torch.empty(5)}
    reducer = _alone(templates, keep_gradients=keep)
    reducer.start(0, gradients, loss_sum=1.5)
    assert reducer.finish(0) == Reduced(gradients, loss=1.5, grad_norm=5.0, is_finite=True)
    reducer.close()


class _Held:
    """A group of two, of whom the other brings zeros; its sums are held back until they are let go."""

    rank = 0
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

    def broadcast(self, tensor: Tensor, source: int) -> None: ...

    def barrier(self) -> None: ...


class _HeldSum:
    def __init__(self, group: _Held) -> None:
        self._group = group

    def wait(self) -> None:
        assert self._group.gate.wait(20)
        self._group.under_way -= 1


def test_to_start_batches_waits_for_nothing() -> None:
    group = _Held()
    reducer = _alone({"w": torch.empty(2)}, group)
    for batch in range(3):
        reducer.start(batch, {"w": torch.full((2,), float(batch))}, loss_sum=batch)
    group.gate.set()
    assert [reducer.finish(batch).loss for batch in (0, 1, 2)] == [0.0, 1.0, 2.0]
    reducer.close()


def test_what_is_summed_in_place_takes_the_memory_of_a_few_buckets_for_ever() -> None:
    group = _Held()
    group.gate.set()
    templates = {f"w{i:02}": torch.empty(10) for i in range(60)}
    reducer = _alone(templates, group, bucket_bytes=80)
    for batch in range(4):
        reducer.start(batch, {name: torch.ones(10) for name in templates}, loss_sum=0.0)
        reducer.finish(batch)
    reducer.close()
    messages = [message for message in group.messages if message.dtype is torch.float32]
    assert len(messages) == 4 * 30
    assert len({message.untyped_storage().data_ptr() for message in messages}) == NUM_IN_FLIGHT
    assert group.most_under_way == NUM_IN_FLIGHT + 1, "the buckets, and who has which gradient"


def test_a_large_gradient_is_summed_where_it_is() -> None:
    group = _Held()
    group.gate.set()
    gradient = torch.ones(100)
    reducer = _alone({"w": torch.empty(100)}, group, bucket_bytes=80)
    reducer.start(0, {"w": gradient}, loss_sum=0.0)
    assert reducer.finish(0).gradients["w"] is gradient
    assert group.messages[-1] is gradient
    reducer.close()


def test_a_finished_batch_is_forgotten() -> None:
    reducer = _alone({"w": torch.empty(2)})
    gradient = torch.ones(2)
    reducer.start(0, {"w": gradient}, loss_sum=0.0)
    reducer.finish(0)
    reducer.start(1, {"w": torch.ones(2)}, loss_sum=0.0)
    reducer.finish(1)
    lives = weakref.ref(gradient)
    del gradient
    assert lives() is None
    reducer.close()


def test_gradients_that_do_not_fit_the_templates_are_refused() -> None:
    reducer = _alone({"w": torch.empty(2), "v": torch.empty(1)})
    with pytest.raises(ValueError, match="differ in the names v, x"):
        reducer.start(0, {"w": None, "x": None}, loss_sum=0.0)
    with pytest.raises(ValueError, match=r"w is torch.float64 \(2,\), but its template is torch.float32"):
        reducer.start(0, {"w": torch.empty(2, dtype=torch.float64), "v": None}, loss_sum=0.0)
    reducer.start(0, {"w": None, "v": None}, loss_sum=0.0)
    with pytest.raises(RuntimeError, match="batch 0 is started twice"):
        reducer.start(0, {"w": None, "v": None}, loss_sum=0.0)
    assert reducer.finish(0).grad_norm == 0.0
    reducer.close()


def test_what_is_not_begun_when_it_is_closed_is_dropped() -> None:
    group = _Held()
    reducer = _alone({"w": torch.empty(2)}, group)
    for batch in (0, 1):
        reducer.start(batch, {"w": torch.ones(2)}, loss_sum=0.0)
    while not group.messages:
        threading.Event().wait(0.001)
    reducer.close(timeout_s=0.01)
    group.gate.set()
    assert reducer.finish(0).is_finite
    with pytest.raises(RuntimeError, match="closed before it began batch 1"):
        reducer.finish(1)
    with pytest.raises(RuntimeError, match="the reducer was closed"):
        reducer.start(2, {"w": None}, loss_sum=0.0)


def test_a_lost_replica_fails_the_batch_and_all_that_follow() -> None:
    fabric = ThreadFabric(2, timeout_s=30)
    group = _group(fabric.of(0).group, (0, 1))
    reducer = _alone({"w": torch.empty(2)}, group)
    reducer.start(0, {"w": torch.ones(2)}, loss_sum=0.0)
    reducer.start(1, {"w": torch.ones(2)}, loss_sum=0.0)
    fabric.lose(1)
    for batch in (0, 1):
        with pytest.raises(CollectiveError, match=r"waits for the members \[1\] in vain"):
            reducer.finish(batch)
    reducer.close()


def test_members_that_disagree_about_a_collective_are_told() -> None:
    fabric = ThreadFabric(2)
    one, other = (_group(fabric.of(rank).group, (0, 1)) for rank in (0, 1))
    one.all_reduce(torch.ones(2))
    with pytest.raises(CollectiveError, match=r"sum of torch.float32 \[2\] on one, sum of .* \[3\]"):
        other.all_reduce(torch.ones(3))


def test_complex_gradients_are_refused_where_they_must_be_summed() -> None:
    _alone({"w": torch.empty(2, dtype=torch.complex64)}).close()
    with pytest.raises(BiremeError, match=r"gradient of w is of torch.complex64. .* train with one replica"):
        _alone({"w": torch.empty(2, dtype=torch.complex64)}, _Held())
