"""Principal components of a gradient that is never formed: what they promise of any pairs."""

import pytest
import torch
from torch import Tensor

from bireme.codec.lowrank import Components, PrincipalStream, first_components, merged
from bireme.codec.sum_description import parse_gradient
from bireme.errors import BiremeError

SHAPES = ((12, 20), (20, 12), (9, 9))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(rows: int, columns: int, rank: int, count: int = 320) -> tuple[Tensor, Tensor]:
    """Rows of both sides whose products' sum is of a rank."""
    causes = numbers(count, rank)
    return causes @ numbers(rank, rows, seed=1), causes @ numbers(rank, columns, seed=2)


def beginning(rows: int, columns: int, rank: int) -> Components:
    return first_components(rows, columns, rank, seed=3, dtype=torch.float64)


def after(before: Components, left: Tensor, right: Tensor, *, piece: int = 0, calls: int = 1) -> Components:
    stream = PrincipalStream(before, piece=piece)
    for own in zip(left.chunk(calls), right.chunk(calls), strict=True):
        stream.feed(*own)
    return merged([stream.factors()], stream.rank)


def whole(one: Components) -> Tensor:
    return one.product((len(one.left), len(one.right))).rows()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [0, 7])
def test_the_full_rank_is_the_whole_gradient(shape: tuple[int, int], piece: int) -> None:
    components = beginning(*shape, min(shape))
    for seed in range(3):  # what went before must leave nothing in it
        left, right = numbers(50, shape[0], seed=seed), numbers(50, shape[1], seed=seed + 9)
        components = after(components, left, right, piece=piece, calls=3)
        assert torch.allclose(whole(components), left.T @ right, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece", [0, 1, 32])
def test_components_are_orthonormal_never_negative_and_no_better_than_the_best(
    shape: tuple[int, int], piece: int
) -> None:
    left, right = numbers(330, shape[0]), numbers(330, shape[1], seed=1)
    gradient = left.T @ right
    least = float(torch.linalg.svdvals(gradient)[3:].norm())
    components, eye = beginning(*shape, 3), torch.eye(3, dtype=torch.float64)
    for _ in range(3):
        components = after(components, left, right, piece=piece)
        assert torch.allclose(components.left.T @ components.left, eye, atol=1e-10)
        assert torch.allclose(components.right.T @ components.right, eye, atol=1e-10)
        assert bool((components.values >= 0).all())
        error = float((gradient - whole(components)).norm())
        assert least * (1 - 1e-10) <= error
    assert error <= 1.3 * least
    assert components.num_bytes == 8 * 3 * (sum(shape) + 1)


@pytest.mark.parametrize("count", [1, 320])
def test_a_gradient_of_the_rank_is_found_whole(count: int) -> None:
    left, right = pairs(12, 20, min(count, 3), count)
    components = beginning(12, 20, 3)
    for _ in range(4):
        components = after(components, left, right, piece=32)
    assert torch.allclose(whole(components), left.T @ right, atol=1e-6 * count)


def test_what_batches_have_in_common_is_found_from_pieces_that_hardly_show_it() -> None:
    """Each piece is nearly all noise; without what went before, its own noise would be what is kept."""
    signal_left, signal_right = numbers(1, 40, seed=7), numbers(1, 60, seed=8)
    components, errors = beginning(40, 60, 2), []
    for batch in range(12):
        noise_left, noise_right = numbers(256, 40, seed=batch), numbers(256, 60, seed=batch + 50)
        left, right = noise_left + signal_left / 2, noise_right + signal_right / 2
        components = after(components, left, right, piece=8)
        errors.append(float((whole(components) - left.T @ right).norm()) / float((left.T @ right).norm()))
    best = float(torch.linalg.svdvals(left.T @ right)[2:].norm()) / float((left.T @ right).norm())
    assert errors[-1] <= 1.25 * best


def test_replicas_are_merged_into_the_best_of_the_rank() -> None:
    factors = [(numbers(12, 3, seed=n), numbers(20, 3, seed=n + 5)) for n in range(2)]
    outer, values, inner = torch.linalg.svd(sum((p @ q.T for p, q in factors), torch.zeros(12, 20)))
    assert torch.allclose(whole(merged(factors, 3)), outer[:, :3] * values[:3] @ inner[:3], atol=1e-10)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_kept_unseen(value: float) -> None:
    left, right = numbers(40, 12), numbers(40, 20, seed=1)
    left[7, 3] = value
    found = after(beginning(12, 20, 3), left, right, piece=8)
    assert bool(found.values.isnan().all())


def test_words_are_read_as_they_are_written() -> None:
    assert parse_gradient("whole") is None
    assert [str(parse_gradient(text)) for text in ("principal:8", "principal:1:1")] == [
        "principal:8",
        "principal:1:1",
    ]
    for text in ("principal", "principal:0", "principal:8:0", "principal:x", "pca:3"):
        with pytest.raises(BiremeError, match="principal:RANK"):
            parse_gradient(text)
