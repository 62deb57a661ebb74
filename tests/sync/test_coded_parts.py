"""Sums of three and more replicas through few bits, in parts: all have the same bits, and nothing is lost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from bireme.codec.sum_description import parse_sum_codec, sum_cost
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients, SentBytes
from bireme.sync.feedback import RESIDUAL
from bireme.sync.rounds.round_group import Stamp
from tests.runtime.test_member_sums import Mesh
from tests.support.coded_oracle import CodedOracle
from tests.support.extent import examples
from tests.support.together import run_threads

Gradients = Mapping[str, Tensor]

REPLICAS = st.integers(3, 5)
SIZES = st.lists(st.sampled_from((0, 1, 31, 256, 257, 300, 1000, 2081)), min_size=1, max_size=5)


@dataclass
class Member:
    """What a member got of each batch, what it has not sent, and the bytes that it has sent."""

    sums: list[dict[str, Tensor]]
    unsent: dict[str, Tensor]
    sent: SentBytes


def gradients_of(num: int, sizes: Sequence[int], num_batches: int) -> list[list[dict[str, Tensor]]]:
    """By batch and member."""
    draw = torch.Generator().manual_seed(num_batches)

    def of_member() -> dict[str, Tensor]:
        drawn = [torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]
        return {f"w{place}": one for place, one in enumerate(drawn)}

    return [[of_member() for _ in range(num)] for _ in range(num_batches)]


def summed(
    codec: str,
    batches: Sequence[Sequence[Gradients]],
    factors: Sequence[float] | None = None,
    *,
    apart: Sequence[str] = (),
    slice_bytes: int = 1 << 20,
    counts: Sequence[bool] = (),
) -> list[Member]:
    num = len(batches[0])
    mesh = Mesh(num)

    def work(me: int) -> Member:
        coded, sent, found = GradientSummation(parse_sum_codec(codec)), SentBytes(), []
        for batch, of_members in enumerate(batches):
            own = {name: one.clone() for name, one in of_members[me].items()}
            group = mesh.group(me, range(num), Stamp(0, batch, 0))
            held = BatchGradients(own, set(own))
            coded.sum(group, [*own], held, slice_bytes, sent, batch=batch, factors=factors, apart=apart)
            coded.settle(counts=counts[batch] if counts else True)
            found.append(own)
        kept = {} if coded.feedback is None else coded.feedback.after(coded.feedback.num_batches)
        return Member(found, {name: one[RESIDUAL].clone() for name, one in kept.items()}, sent)

    return run_threads(num, work)


def assert_alike(members: Sequence[Member]) -> None:
    first, *others = members
    for other in others:
        for one, also in zip(first.sums, other.sums, strict=True):
            assert all(torch.equal(one[name], also[name]) for name in one)


@examples(15)
@given(REPLICAS, SIZES, st.integers(1, 4), st.sampled_from(("int3", "int2", "int1")), st.booleans())
@example(3, [0], 1, "int2", True)
def test_what_arrives_and_what_is_unsent_are_all_that_there_was(
    num: int, sizes: list[int], num_batches: int, codec: str, are_weighed: bool
) -> None:
    """Also with a member whose part does not count: it owns nothing, so it keeps nothing of a sum."""
    factors = [0.25 * member for member in range(num)] if are_weighed else [1.0] * num
    batches = gradients_of(num, sizes, num_batches)
    members = summed(codec, batches, factors if are_weighed else None, slice_bytes=4096)

    assert_alike(members)
    for name in batches[0][0]:
        arrived = torch.stack([one[name] for one in members[0].sums]).sum(0)
        for factor, one in zip(factors, members, strict=True):
            arrived += factor * one.unsent.get(name, torch.zeros(())) if factor else 0.0
        whole = [factor * own[name] for of in batches for factor, own in zip(factors, of, strict=True)]
        torch.testing.assert_close(arrived, torch.stack(whole).sum(0), rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_three_replicas_get_what_plain_loops_with_the_same_codec_get(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)
    batches, oracle = gradients_of(3, (1000, 40, 2081, 300), 4), CodedOracle(codec)
    members = summed(codec, batches)
    for batch, (of_members, found) in enumerate(zip(batches, members[0].sums, strict=True)):
        expected = oracle.sum(batch, dict(enumerate(of_members)))
        oracle.settle(counts=True)
        assert all(torch.equal(found[name], one) for name, one in expected.items() if one is not None)
    assert_alike(members)


@pytest.mark.parametrize("num", [2, 3])
def test_small_tensors_in_a_bundle_get_what_they_get_alone(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor begins with a block of its own there, so nothing of its neighbors is in its codes."""
    batches, found = gradients_of(num, (1000, 40, 2081, 300, 31, 4096), 4), []
    for most in (2**16, 1500, 0):
        monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", most)
        found.append(summed("int2", batches, slice_bytes=2**14))
        assert_alike(found[-1])
    whole, some, alone = (members[0] for members in found)
    for one, also, expected in zip(whole.sums, some.sums, alone.sums, strict=True):
        assert all(torch.equal(one[name], expected[name]) for name in expected)
        assert all(torch.equal(also[name], expected[name]) for name in expected)
    assert all(torch.equal(whole.unsent[name], one) for name, one in alone.unsent.items())


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_rounding_by_chance_shifts_no_mean(codec: str) -> None:
    """The sum of a batch is as far off as its codec rounds; the mean of many is far closer."""
    (of_members,) = gradients_of(4, (1024,), 1)
    members = summed(codec, [of_members] * 36)
    whole = sum((one["w0"] for one in of_members), torch.zeros(()))
    errors = [one["w0"] - whole for one in members[0].sums]
    single, mean = errors[0].norm() / whole.norm(), torch.stack(errors).mean(0).norm() / whole.norm()
    assert 0 < single < (0.02 if codec == "int8" else 0.4)
    assert mean < single / 4


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "int1"])
@pytest.mark.parametrize("num", [2, 3, 5])
def test_members_send_the_bytes_that_plans_count(codec: str, num: int) -> None:
    shapes = [(200, 100), (300,), (7000,), (64, 64)]
    batch = [
        {name: one.float() for name, one in own.items()}
        for own in gradients_of(num, [math.prod(shape) for shape in shapes], 1)[0]
    ]
    members = summed(codec, [batch])
    cost, raw = sum_cost(parse_sum_codec(codec), shapes), 4 * sum(map(math.prod, shapes))
    for one in members:
        assert one.sent.sent == pytest.approx(cost.hop_share(num) * raw, rel=0.03)
        assert one.sent.raw == pytest.approx(2 * (num - 1) / num * raw, rel=0.03)


@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_a_gradient_apart_has_the_same_sum_whatever_lies_beside_it(codec: str) -> None:
    batches = gradients_of(4, (1000, 3000), 2)
    alone = [[{"w0": own["w0"]} for own in of_members] for of_members in batches]
    first = [[{"w1": own["w1"], "w0": own["w0"]} for own in of_members] for of_members in batches]
    found = [summed(codec, some, apart=["w0"])[0].sums for some in (batches, alone, first)]
    for one, other, another in zip(*found, strict=True):
        assert torch.equal(one["w0"], other["w0"])
        assert torch.equal(one["w0"], another["w0"])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_batch_that_is_not_finite_is_so_everywhere_and_leaves_nothing(value: float) -> None:
    batches = gradients_of(3, (1000, 300), 3)
    batches[1][1]["w0"][500] = value
    members = summed("int2", batches, counts=(True, False, True))
    assert all(not torch.isfinite(one.sums[1]["w0"]).all() for one in members)
    without = summed("int2", [batches[0], batches[2]])
    for one, other in zip(members, without, strict=True):
        assert torch.equal(one.sums[2]["w0"], other.sums[1]["w0"])
        assert all(torch.equal(one.unsent[name], other.unsent[name]) for name in one.unsent)


@pytest.mark.parametrize("codec", ["int4", "int2", "threshold:0.05:3"])
@pytest.mark.parametrize("num", [2, 3])
def test_what_no_member_has_a_gradient_of_is_as_if_the_batch_had_been_without_it(
    num: int, codec: str
) -> None:
    """What one member has of a gradient is summed, with what the others have not sent of it before."""
    batches = gradients_of(num, (1000, 300), 3)
    mesh = Mesh(num)

    def work(me: int) -> list[tuple[set[str], dict[str, Tensor]]]:
        coded, found = GradientSummation(parse_sum_codec(codec)), []
        for batch, of_members in enumerate(batches):
            own = {name: one.clone() for name, one in of_members[me].items()}
            held = {"w1"} if batch == 1 and me == 0 else set[str]() if batch == 1 else {"w0", "w1"}
            gradients = BatchGradients(own, held)
            group = mesh.group(me, range(num), Stamp(0, batch, 0))
            coded.sum(group, [*own], gradients, 1 << 20, SentBytes(), batch=batch)
            coded.settle(counts=True)
            kept = {} if coded.feedback is None else coded.feedback.after(coded.feedback.num_batches)
            unsent = {name: one[RESIDUAL].clone() for name, one in kept.items()}
            found.append((gradients.held, {"sum": own["w1"], **unsent}))
        return found

    members = run_threads(num, work)
    for of_member in members:
        (_, first), (held, second), _ = of_member
        assert held == {"w1"}
        assert all(torch.equal(second[name], first[name]) for name in ("w0",) if name in first)
        assert "w1" not in first or not torch.equal(second["w1"], first["w1"])
        assert torch.equal(second["sum"], members[0][1][1]["sum"])
