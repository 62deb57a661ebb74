"""Who takes part, and what each is tuned over: at most four ways to learn and four shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
AUTO = {"links.codec": "auto", "sync.codec": "auto", "sync.mode": "auto"}
DENSE = {"links.codec": "none", "sync.codec": "none", "sync.mode": "allreduce"}
SYNCHRONOUS = "ddp-bf16"
"""Whose learning rate all have that train synchronously or let Bireme choose."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One who takes part.

    `module` is its code in this package, empty for Bireme, whose choices are keys of the run file. Of `ways`
    (to learn) the one that needs the fewest steps is taken, without regard to time; without any, the way of
    `like`. Of `shapes` the one with the fastest step in the setting is taken.
    """

    name: str
    module: str
    ways: Sequence[Mapping[str, Any]] = ()
    shapes: Sequence[Mapping[str, Any]] = ({},)
    like: str = SYNCHRONOUS
    package: str = ""
    """What must be installed beside torch, if Bireme's own environment does not have it."""

    @property
    def is_ours(self) -> bool:
        """Whether this is Bireme."""
        return not self.module


def _pipeline(schedule: str) -> Contender:
    shapes = [
        {"schedule": schedule, "dtype": dtype, "microbatches": num}
        for dtype, num in product(("bfloat16", "float32"), (4, 8))
    ]
    return Contender(f"torch-{schedule}", "pipelining", shapes=shapes)


def _ours(name: str, keys: Mapping[str, Any]) -> Contender:
    return Contender(name, "", shapes=[keys])


_ROUNDS = [{"inner_steps": steps, "learning_rate": rate} for steps, rate in product((10, 50), (1e-3, 2e-3))]
RIVALS = (
    _pipeline("1f1b"),
    _pipeline("interleaved-zb"),
    Contender(SYNCHRONOUS, "ddp", [{"hook": "bf16", "learning_rate": rate} for rate in RATES]),
    Contender(
        "ddp-powersgd",
        "ddp",
        [
            {"hook": "powersgd", "rank": rank, "learning_rate": rate}
            for rank, rate in product((1, 4), (1e-3, 2e-3))
        ],
    ),
    Contender("diloco", "diloco", _ROUNDS),
    Contender("torchft-diloco", "torchft_diloco", _ROUNDS, package="torchft"),
)
CHOSEN, DENSE_BEST = "bireme", "bireme-synchronous-dense"
HAND = (
    _ours("bireme-hand-2bw-fresh-int8", DENSE | {"plan.schedule": "2bw-fresh", "links.codec": "int8"}),
    _ours("bireme-hand-int4-sums", DENSE | {"plan.depth": 1, "plan.width": 4, "sync.codec": "int4"}),
    _ours("bireme-hand-int8-sums", DENSE | {"plan.depth": 1, "plan.width": 4, "sync.codec": "int8"}),
    _ours(
        "bireme-hand-diloco",
        DENSE | {"plan.depth": 1, "plan.width": 4, "sync.mode": "diloco", "sync.diloco_every": 10},
    ),
)
"""Settings of Bireme that a user may choose by hand: `auto` is compared with the best of them."""
WITHOUT = (
    _ours("bireme-without-boundary-codecs", AUTO | {"links.codec": "none"}),
    _ours("bireme-without-sum-codecs", AUTO | {"sync.codec": "none"}),
    _ours("bireme-without-averaging", AUTO | {"sync.mode": "allreduce"}),
    _ours("bireme-without-delay", AUTO | {"plan.synchronous": True}),
    _ours("bireme-without-lookahead", AUTO | {"plan.lookahead": False}),
    _ours("bireme-without-balance", AUTO | {"balance.mode": "off"}),
)
CONTENDERS = {
    one.name: one
    for one in (
        *RIVALS,
        _ours(CHOSEN, AUTO),
        _ours(DENSE_BEST, DENSE | {"plan.synchronous": True}),
        *HAND,
        *WITHOUT,
    )
}
