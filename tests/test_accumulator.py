"""Gradients are summed in place, for each batch apart, and None stays None."""

from contextlib import suppress

import torch
from torch import Tensor

from bireme.runtime.accumulator import GradientAccumulator
from tests.feed_forward import assert_same


def accumulating() -> tuple[GradientAccumulator, dict[str, Tensor]]:
    leaves = {"w": torch.ones(3, requires_grad=True), "idle": torch.ones(2, requires_grad=True)}
    return GradientAccumulator(leaves), leaves


def test_batches_on_the_same_leaves_are_summed_apart() -> None:
    accumulator, leaves = accumulating()
    for batch, factor in ((0, 1.0), (1, 10.0), (0, 2.0), (1, 20.0)):
        with accumulator.into(batch, leaves):
            torch.autograd.backward((leaves["w"] * factor).sum())
        assert leaves["w"].grad is None
    assert_same(accumulator.gradients(0), {"w": torch.full((3,), 3.0), "idle": None})
    assert_same(accumulator.gradients(1), {"w": torch.full((3,), 30.0), "idle": None})
    accumulator.release(0)
    assert_same(accumulator.gradients(0), {"w": None, "idle": None})


def test_sums_are_made_in_place() -> None:
    accumulator, leaves = accumulating()
    places = set()
    for _ in range(3):
        with accumulator.into(0, leaves):
            torch.autograd.backward(leaves["w"].square().sum())
        total = accumulator.gradients(0)["w"]
        assert total is not None
        places.add(total.data_ptr())
    assert len(places) == 1


def test_a_backward_that_fails_leaves_no_gradient_on_a_leaf() -> None:
    accumulator, leaves = accumulating()
    with suppress(RuntimeError), accumulator.into(0, leaves):
        torch.autograd.backward(leaves["w"].square().sum())
        raise RuntimeError
    assert leaves["w"].grad is None


def test_gradients_computed_apart_are_added_without_being_kept() -> None:
    accumulator, leaves = accumulating()
    total = leaves["w"] + leaves["w"].new_zeros(3)
    (gradient,) = torch.autograd.grad(total.sum(), [leaves["w"]])
    accumulator.add(0, "w", gradient)
    accumulator.add(0, "w", gradient)
    with accumulator.into(0, leaves):
        torch.autograd.backward(leaves["w"].sum())
    assert_same(accumulator.gradients(0), {"w": torch.full((3,), 3.0), "idle": None})
    assert torch.equal(gradient, torch.ones(3))
