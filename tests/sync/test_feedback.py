"""What a codec has not sent: two copies of it, whichever batches count and whenever that is known."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bireme.sync.feedback import BASIS, RESIDUAL, Feedback


def value(number: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([number], dtype=torch.float64)}


def residual(feedback: Feedback, num_batches: int) -> float:
    return float(feedback.after(num_batches)["w"][RESIDUAL])


BATCHES = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 9)), min_size=1, max_size=8)


@given(BATCHES)
def test_only_batches_that_count_leave_anything_however_often_they_are_tried(
    batches: list[tuple[int, bool, int]],
) -> None:
    """All of a gradient stays unsent here. Each batch is tried a few times, as after a member was lost."""
    feedback, expected = Feedback(), 0.0
    feedback.load({"w": {RESIDUAL: value(0.0)["w"]}}, num_batches=0)
    for number, (num_tries, counts, gradient) in enumerate(batches):
        for _ in range(num_tries):
            opened = feedback.open(value(gradient))["w"]
            assert float(opened[RESIDUAL]) == expected + gradient
            opened[BASIS] = torch.tensor(float(number))
        before, expected = expected, expected + gradient * counts
        feedback.settle(counts=counts)
        assert (residual(feedback, number), residual(feedback, number + 1)) == (before, expected)


@given(BATCHES, st.booleans())
def test_gradients_that_come_some_at_a_time_are_added_up(
    batches: list[tuple[int, bool, int]], is_late: bool
) -> None:
    """A batch may begin before the one before is known to count; a batch that does not is not finite."""
    feedback, expected, unknown = Feedback(), 0.0, list[bool]()
    for number, (num_parts, counts, gradient) in enumerate(batches):
        for _ in range(num_parts):
            opened = feedback.open(value(gradient if counts else math.inf), number)["w"]
        expected += num_parts * gradient * counts
        assert not counts or float(opened[RESIDUAL]) == expected
        unknown.append(counts)
        while len(unknown) > is_late:
            feedback.settle(counts=unknown.pop(0))
    if not is_late:
        assert residual(feedback, len(batches)) == expected
