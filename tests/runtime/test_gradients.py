"""Gradients are summed in place in their arenas, for each batch apart, and what has none stays without."""

from contextlib import suppress

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bireme.memory.arena import Slots
from bireme.runtime.gradients import GradientPool
from bireme.runtime.parameter_groups import parameter_groups_of
from tests.support.feed_forward import assert_same


def summing() -> tuple[GradientPool, dict[str, Tensor]]:
    leaves = {"w": torch.ones(3, requires_grad=True), "idle": torch.ones(2, requires_grad=True)}
    return GradientPool(
        parameter_groups_of(leaves, dict.fromkeys(leaves)), [*leaves], torch.device("cpu")
    ), leaves


def test_batches_on_the_same_leaves_are_summed_apart() -> None:
    pool, leaves = summing()
    batches = [pool.open(0), pool.open(1)]
    for batch, factor in ((0, 1.0), (1, 10.0), (0, 2.0), (1, 20.0)):
        with pool.lend(batches[batch], leaves):
            torch.autograd.backward((leaves["w"] * factor).sum())
        assert leaves["w"].grad is None
    assert_same(dict(batches[0].items()), {"w": torch.full((3,), 3.0), "idle": None})
    assert_same(dict(batches[1].items()), {"w": torch.full((3,), 30.0), "idle": None})
    pool.release(batches[0])
    assert_same(dict(pool.open(2).items()), {"w": None, "idle": None})
    assert pool.num_bytes == 2 * 4 * 5


def test_sums_stay_in_their_arena() -> None:
    pool, leaves = summing()
    sums = pool.open(0)
    for _ in range(3):
        with pool.lend(sums, leaves):
            torch.autograd.backward(leaves["w"].square().sum())
        assert sums.views["w"].untyped_storage().data_ptr() == sums.arenas[0].flat.data_ptr()
    assert torch.equal(sums.views["w"], torch.full((3,), 6.0))


def test_a_gradient_that_comes_in_a_later_micro_batch_only_is_there_from_then_on() -> None:
    pool, leaves = summing()
    sums = pool.open(0)
    for used in (("w",), ("w", "idle"), ("idle",)):
        with pool.lend(sums, leaves):
            torch.autograd.backward(sum((leaves[name].sum() for name in used), torch.zeros(())))
    assert_same(dict(sums.items()), {"w": torch.full((3,), 2.0), "idle": torch.full((2,), 2.0)})


def test_a_backward_that_fails_leaves_no_gradient_on_a_leaf() -> None:
    pool, leaves = summing()
    with suppress(RuntimeError), pool.lend(pool.open(0), leaves):
        torch.autograd.backward(leaves["w"].square().sum())
        raise RuntimeError
    assert leaves["w"].grad is None
    torch.autograd.backward(leaves["w"].square().sum())
    assert leaves["w"].grad is not None  # nothing moves it now


def test_gradients_computed_apart_are_added_without_being_kept() -> None:
    pool, leaves = summing()
    sums = pool.open(0)
    total = leaves["w"] + leaves["w"].new_zeros(3)
    (gradient,) = torch.autograd.grad(total.sum(), [leaves["w"]])
    sums.add("w", gradient)
    sums.add("w", gradient)
    with pool.lend(sums, leaves):
        torch.autograd.backward(leaves["w"].sum())
    assert_same(dict(sums.items()), {"w": torch.full((3,), 3.0), "idle": None})
    assert torch.equal(gradient, torch.ones(3))


@given(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=12))
def test_parameter_groups_have_no_gaps_and_everything_once_with_odd_lengths_last(
    shapes: list[list[int]],
) -> None:
    parameters = {f"p{place}": torch.empty(shape, device="meta") for place, shape in enumerate(shapes)}
    parameter_groups = parameter_groups_of(parameters, {name: int(name[1:]) % 2 for name in parameters})
    assert sorted(name for parameter_group in parameter_groups for name in parameter_group.slots) == sorted(
        parameters
    )
    for parameter_group in parameter_groups:
        end, was_odd = 0, False
        for name, slot in parameter_group.slots.items():
            assert slot.begin == end
            assert slot.end - slot.begin == parameters[name].numel()
            is_odd = parameters[name].numel() % 16 != 0
            assert is_odd or not was_odd
            end, was_odd = slot.end, is_odd
        assert parameter_group.slots.num_elements == end


def test_slots_are_laid_in_the_order_given() -> None:
    slots = Slots({"b": (2, 3), "a": (), "c": (0,)})
    assert [*slots] == ["b", "a", "c"]
    assert [(slot.begin, slot.end) for _, slot in slots.items()] == [(0, 6), (6, 7), (7, 7)]
    assert slots.num_elements == 7
    assert len(slots) == 3
