"""Codecs for sums of gradients by themselves: what is sent, what is kept, and what the words say of both."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bireme.codec.above import Threshold, new_memory
from bireme.codec.blocks import BlockCodec
from bireme.codec.lowrank import PART_VALUES, as_matrix, first_basis, next_basis, orthonormal, product
from bireme.codec.sum_description import SUM_DENSITY_SLACK, parse_sum_codec, sum_cost
from bireme.errors import BiremeError


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def through(codec: Threshold, tensor: Tensor, memory: Tensor | None = None) -> Tensor:
    message = torch.empty(codec.most_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8)
    used = codec.encode(tensor, message, memory)
    return codec.decode(message[:used].clone(), tensor.shape, tensor.dtype)


@given(
    num_entries=st.sampled_from([1, 7, 256, 70_000]),
    share=st.sampled_from([1e-9, 0.003, 0.03, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 3),
)
def test_what_is_sent_and_what_is_left_are_the_whole_and_apart(
    num_entries: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    tensor = numbers(num_entries, seed=seed).to(dtype)
    sent = through(Threshold(share), tensor)
    left = tensor - sent
    assert torch.equal(sent + left, tensor)
    assert not bool(((sent != 0) & (left != 0)).any())
    wanted = max(1, int(num_entries * share))
    assert int((sent != 0).sum()) == wanted
    assert float(sent.abs()[sent != 0].amin()) >= float(left.abs().amax())


def test_a_threshold_lives_its_steps_and_is_renewed_where_it_fits_no_more() -> None:
    codec, memory = Threshold(0.01, life=3), new_memory()
    found = []
    for step in range(6):
        through(codec, numbers(10_000, seed=step), memory)
        found.append(float(memory[0]))
    assert found[0] == found[1] == found[2] != found[3]
    assert found[3] == found[4] == found[5]
    through(codec, numbers(10_000, seed=6), memory)
    sent = through(codec, 100 * numbers(10_000, seed=7), memory)
    assert int((sent != 0).sum()) == 100
    assert int((through(codec, numbers(10_000, seed=8) / 100, memory) != 0).sum()) == 100


def test_entries_of_one_size_do_not_fill_the_link() -> None:
    sent = through(Threshold(0.01), torch.ones(1000))
    assert int((sent != 0).sum()) == SUM_DENSITY_SLACK * 10
    assert not bool(through(Threshold(0.01), torch.zeros(1000)).any())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_kept_unseen(value: float) -> None:
    tensor = numbers(1000)
    tensor[17] = value
    assert bool(through(Threshold(0.01, 5), tensor, new_memory()).isnan().all())
    assert bool(orthonormal(tensor.view(250, 4)).isnan().any())


@pytest.mark.parametrize("shape", [(40, 30), (8, 3, 5, 5), (300, 2)])
def test_columns_are_orthonormal_and_matrices_of_the_rank_arrive_whole(shape: tuple[int, ...]) -> None:
    rows, columns = numbers(shape[0], 2).double(), numbers(math.prod(shape[1:]), 2, seed=1).double()
    matrix = product(rows, columns)
    columns = orthonormal(numbers(shape[0], 2).double())
    assert torch.allclose(columns.T @ columns, torch.eye(2, dtype=torch.float64), atol=1e-12)
    given = as_matrix(matrix.view(shape))
    left = orthonormal(given @ first_basis(given.shape[1], 2, seed=0))
    assert torch.allclose(product(left, given.T @ left), matrix, atol=1e-9)


def test_a_column_that_adds_nothing_is_zero_and_starts_again() -> None:
    one = numbers(50, 1)
    columns = orthonormal(torch.cat([one, 3 * one, numbers(50, 1, seed=1)], 1))
    assert not bool(columns[:, 1].any())
    assert columns[:, 2].norm() == pytest.approx(1.0, rel=1e-5)
    basis = next_basis(torch.cat([one, torch.zeros(50, 1)], 1), seed=3)
    assert torch.equal(basis[:, 1], first_basis(50, 2, seed=3)[:, 1].float())


def test_what_gives_the_same_bits_everywhere_is_what_was_meant() -> None:
    left, right = numbers(70, 3), numbers(41, 3, seed=1)
    assert torch.allclose(product(left, right), left @ right.T, atol=1e-5)
    high = numbers(PART_VALUES // 20, 3, seed=2)  # its product is made in several parts
    assert torch.allclose(product(high, right), high @ right.T, atol=1e-5)
    exact = torch.linalg.qr(left.double()).Q
    found = orthonormal(left).double()
    assert torch.allclose(found @ found.T, exact @ exact.T, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    ["none", "int8", "int4", "int2", "threshold:0.01:50", "threshold:0.01:50:10", "lowrank:4", "lowrank:4:0"],
)
def test_words_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_sum_codec(text)) == text
    assert parse_sum_codec(text).has_feedback == (
        text in ("int2", "threshold:0.01:50", "threshold:0.01:50:10", "lowrank:4", "lowrank:4:0")
    )


def test_short_words_stand_for_whole_ones() -> None:
    short = {"3bit": "int3", "threshold": "threshold:0.01:50", "lowrank": "lowrank:4"}
    assert {text: str(parse_sum_codec(text)) for text in short} == short


@pytest.mark.parametrize(
    "text",
    [
        "int9",
        "int16",
        "topk",
        "threshold:0",
        "threshold:2",
        "threshold:nan",
        "threshold:0.1:0.5",
        "lowrank:0",
    ],
)
def test_an_impossible_codec_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(BiremeError, match=r"lowrank:RANK"):
        parse_sum_codec(text)


def test_the_cost_of_a_codec_is_what_its_messages_have() -> None:
    shapes = [(1000, 300), (300,), (10,)]
    entries = sum(map(math.prod, shapes))
    for text, coder in {"int8": BlockCodec(8), "int2": BlockCodec(2, is_rotated=True)}.items():
        sent = sum(coder.most_bytes(shape, torch.float32) for shape in shapes[:2]) + 40
        assert sum_cost(parse_sum_codec(text), shapes).message_share == pytest.approx(sent / (4 * entries))
    codec = parse_sum_codec("threshold:0.01:1")
    message = torch.empty(2**20, dtype=torch.uint8)
    used = Threshold(0.01).encode(numbers(1000, 300), message)
    assert codec.message_bytes((1000, 300)) == pytest.approx(used, rel=0.01)
    low = sum_cost(parse_sum_codec("lowrank:4"), shapes)
    assert low.message_share == pytest.approx((4 * 1300 + 310) / entries)
    assert low.kept_share == pytest.approx(2 * 300_000 / entries)
    assert low.hop_share(2) == low.message_share
    int8, int4, int2, int1, sparse = (
        sum_cost(parse_sum_codec(text), shapes) for text in ("int8", "int4", "int2", "int1", "threshold")
    )
    assert int8.hop_share(4) == pytest.approx(1.5 * int8.message_share)
    assert int2.hop_share(4) == pytest.approx(0.75 * (int2.message_share + int4.message_share))
    for width, cost in ((4, int1), (2, int8), (4, sparse)):
        assert cost.hop_share(width) == (width - 1) * cost.message_share
    assert int1.hop_share(5) < 4 * int1.message_share
