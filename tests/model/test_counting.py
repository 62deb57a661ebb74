"""What a loss is the mean of, read off the graph: only then do micro-batches weigh what they should."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.model.capture import capture
from bireme.model.counting import count_of
from bireme.model.gpt import GPT, GPTConfig


def ids_and_labels() -> dict[str, Tensor]:
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 3:], labels[1, :] = -100, -100
    return {"input_ids": ids, "labels": labels}


@cache
def model_and_count() -> tuple[GPT, Callable[[dict[str, Tensor]], float]]:
    model = GPT(GPTConfig(layers=1, width=8, heads=2, vocab=11, context=8))
    return model, count_of(capture(model, ids_and_labels()))


@pytest.mark.slow
def test_tokens_that_are_left_out_of_the_loss_do_not_count() -> None:
    """The first label of a row is never a target: nothing comes before it."""
    _, count = model_and_count()
    inputs = ids_and_labels()
    assert count(inputs) == float((inputs["labels"][:, 1:] != -100).sum()) == 2 + 0 + 7
    rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(3)]
    assert [count(row) for row in rows] == [2, 0, 7]


@pytest.mark.slow
def test_the_losses_of_micro_batches_add_up_to_that_of_the_batch_by_these_counts() -> None:
    model, count = model_and_count()
    inputs = ids_and_labels()
    parts = [{key: value[rows] for key, value in inputs.items()} for rows in ([0, 1], [2])]
    with torch.no_grad():
        weighted = sum(count(part) * float(model(**part)["loss"]) for part in parts) / count(inputs)
        assert weighted == pytest.approx(float(model(**inputs)["loss"]), rel=1e-5)


class Classes(nn.Module):
    """A classifier with a loss of one's choice."""

    def __init__(self, reduction: str = "mean", weights: bool = False, ignored: int = -100) -> None:
        super().__init__()
        self.line = nn.Linear(4, 5)
        self.loss = nn.CrossEntropyLoss(
            weight=torch.ones(5) if weights else None, reduction=reduction, ignore_index=ignored
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.line(x), labels)
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Classes(ignored=2), 3.0),
        (Classes(ignored=-1), 6.0),
        (Classes(reduction="sum"), 6.0),
        (Classes(weights=True), 6.0),
    ],
)
def test_a_plain_mean_counts_the_targets_that_are_not_left_out(model: Classes, expected: float) -> None:
    """Sums, and means that weigh classes, count samples."""
    inputs = {"x": torch.randn(6, 4), "labels": torch.tensor([0, 4, 2, 2, 1, 2])}
    assert count_of(capture(model, inputs))(inputs) == expected


def test_other_losses_count_samples() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(self.line(x), y)

    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 1)}
    count = count_of(capture(Squares(), inputs))
    assert count(inputs) == 6.0
    assert count({key: value[:2] for key, value in inputs.items()}) == 2.0
