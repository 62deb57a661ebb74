"""Streaming principal components: what they promise of any gradient, and of the layers that feed them."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.principal_components.layers import streamed, streams_of
from benchmarks.principal_components.stream import FirstComponent, PrincipalComponents, merged

EYE = torch.eye(3)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs(rank: int, count: int = 320) -> tuple[Tensor, Tensor]:
    """Inputs (20) and outputs (12) whose products' sum has nearly that rank."""
    causes = numbers(count, rank)
    return causes @ numbers(rank, 20, seed=1), causes @ numbers(rank, 12, seed=2)


def test_components_are_orthonormal_positive_and_no_better_than_the_best() -> None:
    inputs, outputs = numbers(330, 20), numbers(330, 12, seed=1)
    whole = outputs.T @ inputs
    stream = PrincipalComponents(12, 20, 3)
    for _ in range(3):
        stream.feed(inputs, outputs)
        assert torch.allclose(stream.inputs.T @ stream.inputs, EYE, atol=1e-5)
        assert torch.allclose(stream.outputs.T @ stream.outputs, EYE, atol=1e-5)
        assert bool((stream.values > 0).all())
        left, right = stream.factors()
        stream.close()
        least = torch.linalg.svdvals(whole)[3:].norm()
        assert float((whole - left @ right.T).norm()) >= float(least) * (1 - 1e-5)
    assert stream.num_bytes == 4 * 3 * (12 + 20 + 1)


def test_a_gradient_of_the_rank_is_found_whole_after_a_warm_up() -> None:
    inputs, outputs = pairs(3)
    stream = PrincipalComponents(12, 20, 3)
    for _ in range(30):
        stream.close()
        stream.feed(inputs, outputs)
    left, right = stream.factors()
    whole = outputs.T @ inputs
    assert float((whole - left @ right.T).norm() / whole.norm()) < 0.05


def test_pairs_that_fill_no_piece_count_too() -> None:
    inputs, outputs = pairs(1, 1)
    stream = PrincipalComponents(12, 20, 1, piece=32)
    for _ in range(400):
        stream.close()
        stream.feed(inputs, outputs)
    left, right = stream.factors()
    assert torch.allclose(left @ right.T, outputs.T @ inputs, rtol=1e-2, atol=1e-3)
    assert stream.num_pairs == 1


def test_gradients_of_nothing_and_of_opposite_signs_leave_numbers() -> None:
    stream = PrincipalComponents(12, 20, 2)
    stream.feed(torch.zeros(40, 20), torch.zeros(40, 12))
    inputs, outputs = pairs(2)
    stream.feed(inputs, outputs)
    stream.feed(inputs, -3 * outputs)
    left, right = stream.factors()
    assert bool((left @ right.T).isfinite().all())


def test_replicas_are_merged_into_the_best_of_the_rank() -> None:
    factors = [(numbers(12, 3, seed=n), numbers(20, 3, seed=n + 5)) for n in range(2)]
    whole = sum((left @ right.T for left, right in factors), torch.zeros(12, 20))
    left, right = merged(factors, 3)
    outer, values, inner = torch.linalg.svd(whole)
    assert torch.allclose(left @ right.T, outer[:, :3] * values[:3] @ inner[:3], atol=1e-4)


def test_one_pair_after_the_other_finds_the_first_component() -> None:
    inputs, outputs = pairs(1)
    one = FirstComponent(12, 20)
    for _ in range(3):
        one.feed(inputs, outputs)
    left, right = one.mean()
    mean = outputs.T @ inputs / len(inputs)
    assert float((mean - left @ right.T).norm() / mean.norm()) < 0.05


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(20, 12), (40, 20)), (nn.Conv2d(3, 8, 3, padding=1, stride=2), (4, 3, 9, 7))],
)
def test_layers_give_what_they_gave_and_no_gradient_of_their_weight(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    plain, fed = numbers(*shape).requires_grad_(), numbers(*shape).requires_grad_()
    wanted = layer(plain)
    wanted.square().sum().backward()
    weight = layer.get_parameter("weight")
    whole, weight.grad = weight.grad, None
    model = streamed(nn.Sequential(layer), 8)
    found = model(fed)
    found.square().sum().backward()
    assert torch.allclose(found, wanted, atol=1e-5)
    assert plain.grad is not None
    assert fed.grad is not None
    assert torch.allclose(fed.grad, plain.grad, atol=1e-4)
    assert weight.grad is None
    assert whole is not None
    left, right = streams_of(model)[0].stream.factors()
    assert (left @ right.T).shape == whole.view(len(whole), -1).shape
    before = weight.detach().clone()
    streams_of(model)[0].step(0.1)
    step = (before - weight.detach()).view(len(weight), -1)
    assert torch.allclose(step, 0.1 * left @ right.T, atol=1e-4)
