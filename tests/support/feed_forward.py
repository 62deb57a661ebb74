"""A small model in one stage with what weight banks must cope with: frozen, unused and twice-used weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bireme.runtime.settings import named_optimizer
from tests.support.oracles import Microbatch

SHAPES: dict[str, tuple[int, ...]] = {
    "table.weight": (5, 6),
    "layers.0.norm.weight": (6,),
    "layers.0.up.weight": (8, 6),
    "layers.0.up.bias": (8,),
    "layers.0.down.weight": (6, 8),
    "unused": (3,),
}
FROZEN = "table.weight"
TRAINABLE = tuple(name for name in SHAPES if name != FROZEN)

ADAMW = named_optimizer("adamw", lr=0.01, weight_decay=0.1)


class WholeModel:
    """A frozen table, and a feed-forward layer that uses one matrix twice."""

    parameters = tuple(SHAPES)

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        x = parameters["table.weight"][inputs["tokens"]]
        for _ in range(2):
            normed = functional.layer_norm(x, (6,), parameters["layers.0.norm.weight"])
            up = functional.linear(normed, parameters["layers.0.up.weight"], parameters["layers.0.up.bias"])
            x = x + functional.linear(torch.tanh(up), parameters["layers.0.down.weight"])
        return {"loss": (x - inputs["wanted"].to(x.dtype)).square().mean()}


class NothingMore:
    """A stage behind it, for the sake of the order."""

    parameters = ()

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {}


def weights(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def batches(num_batches: int, num_microbatches: int, broken: Sequence[int] = ()) -> list[list[Microbatch]]:
    """Micro-batches of several weights; those of a `broken` batch have no finite loss."""
    generator = torch.Generator().manual_seed(7)

    def microbatch(batch: int, k: int) -> Microbatch:
        wanted = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        tokens = torch.randint(0, 5, (4,), generator=generator)
        scale = math.nan if batch in broken and k == 0 else 1.0
        return Microbatch({"tokens": tokens, "wanted": wanted * scale}, weight=1.0 + k % 3)

    return [[microbatch(batch, k) for k in range(num_microbatches)] for batch in range(num_batches)]


def assert_same(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert other is tensor, name
        else:
            assert other.dtype == tensor.dtype
            assert torch.equal(other.nan_to_num(7.5), tensor.nan_to_num(7.5)), name


def assert_same_state(
    found: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> None:
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert_same(found[name], state)
