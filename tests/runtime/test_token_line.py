"""Tokens by ranks in a line: those of one rank that has all parts, whatever ends the text."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bireme.runtime.message_format import TensorSpec
from bireme.runtime.token_line import SCORES, ModelPart, Tensors, TokenLine, continued
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

NUM_TOKENS = 17
FIRST = (3, 5, 8)


class Adding(ModelPart):
    """A part that adds what it has been given so far; the last one scores tokens by the sum."""

    def __init__(self, rank: int, size: int, context: int, *, has_cache: bool) -> None:
        self.context, self.has_cache = context, has_cache
        self._rank, self._is_last = rank, rank == size - 1
        self._kept = torch.zeros(0)
        self.num_run = 0

    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        self.num_run += count
        fresh = torch.tensor(ids[-count:]).float() if self._rank == 0 else received["state"][0]
        self._kept = fresh if count == len(ids) else torch.cat([self._kept, fresh])
        assert len(self._kept) == len(ids)
        made = self._kept.cumsum(0) * (self._rank + 1) % 101
        if not self._is_last:
            return {"state": made[-count:].unsqueeze(0)}
        return {SCORES: -((torch.arange(NUM_TOKENS) - made[-1] % NUM_TOKENS) ** 2)}

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("state", (1, count), torch.float32),)

    sends = receives


def choose_until(end: int | None) -> Callable[[Tensor], int | None]:
    def choose(scores: Tensor) -> int | None:
        found = int(scores.argmax())
        return None if found == end else found

    return choose


def by_ranks(size: int, context: int, most: int, end: int | None, *, has_cache: bool) -> list[list[int]]:
    fabric = ThreadFabric(size, rendezvous=True)

    def work(rank: int) -> list[int]:
        line = TokenLine(fabric.of(rank), torch.device("cpu"))
        line.meet()
        part = Adding(rank, size, context, has_cache=has_cache)
        found = list(continued(part, FIRST, choose_until(end), most, line))
        line.close()
        assert not has_cache or context < 20 or part.num_run < len(FIRST) + most
        return found

    found: list[list[int]] = run_threads(size, work)
    return found


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("context", [100, 6, 2])
def test_a_line_gives_the_tokens_of_the_same_parts_in_any_number(has_cache: bool, context: int) -> None:
    for size in (2, 4):
        whole = by_ranks(size, context, 12, None, has_cache=has_cache)
        assert len(whole[0]) == 12
        other = by_ranks(size, context, 12, None, has_cache=not has_cache)
        assert other[0] == whole[0], "a cache changes nothing"
        for end in dict.fromkeys(whole[0]):
            short = by_ranks(size, context, 12, end, has_cache=has_cache)
            assert short[0] == whole[0][: whole[0].index(end)]


def test_one_rank_needs_no_line() -> None:
    part = Adding(0, 1, 100, has_cache=True)
    found = list(continued(part, FIRST, choose_until(None), 5))
    expected, ids = [], list(FIRST)
    for _ in range(5):
        ids.append(sum(ids) % 101 % NUM_TOKENS)
        expected.append(ids[-1])
    assert found == expected
    assert part.num_run == len(FIRST) + 4
