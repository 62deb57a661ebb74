"""Every pair of capabilities that is not excluded trains, and computes what one process does.

By default several capabilities train at once, in sets that hold every pair. All tests train each pair alone
as well, which shows which two a failure is about.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
import torch

from bireme.capabilities import CAPABILITIES, exclusion, pairs
from bireme.sync.coordinator.groups import Arrived, Paces
from tests.support.composition import Composition, looseness
from tests.support.extent import TRY_ALL

pytestmark = pytest.mark.slow

ORDER = {name: number for number, name in enumerate(CAPABILITIES)}
TOGETHER = [
    (one.name, other.name)
    for one, other in pairs(CAPABILITIES.values())
    if exclusion(one.name, other.name) is None
]
MOST_TOGETHER = 6


def held_by(names: Sequence[str]) -> set[tuple[str, str]]:
    """The pairs among these capabilities whose numbers are compared as closely here as alone."""
    limit = looseness(names)
    return {pair for pair in combinations(names, 2) if looseness(pair) >= limit}


def sets_with_every_pair() -> list[tuple[str, ...]]:
    """Sets of capabilities that go together; each pair is held by one of them."""
    sets = list[tuple[str, ...]]()
    allowed, left = set(TOGETHER), dict.fromkeys(TOGETHER)
    while left:
        names: tuple[str, ...] = next(iter(left))
        held = held_by(names) & left.keys()
        while len(names) < MOST_TOGETHER:
            larger = [
                tuple(sorted((*names, name), key=ORDER.__getitem__)) for name in ORDER if name not in names
            ]
            more = [one for one in larger if allowed.issuperset(combinations(one, 2))]
            best = max(more, key=lambda one: len(held_by(one) & left.keys()), default=names)
            if len(held_by(best) & left.keys()) <= len(held):
                break
            names, held = best, held_by(best) & left.keys()
        sets.append(names)
        left = dict.fromkeys(pair for pair in left if pair not in held)
    return sets


SETS = sets_with_every_pair()


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiled stage is the stage: what torch makes of it is compared in tests/model/test_compiled.py."""
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "compile", lambda function: function)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is of all replicas that do not drain, and no window ends early, as in test_averaging."""
    monkeypatch.setattr(Paces, "with_arrival", lambda own, *_: own)
    monkeypatch.setattr(
        Paces,
        "arrived",
        lambda _, stage, replica, batch, _wait_s: Arrived(stage, replica, batch, 60.0, 60.0),
    )


@pytest.mark.parametrize("names", dict.fromkeys([*TOGETHER, *SETS]) if TRY_ALL else SETS, ids=" and ".join)
def test_capabilities_together_compute_what_one_process_does(names: Sequence[str]) -> None:
    Composition(frozenset(names)).check()


def test_every_pair_is_held_by_a_set() -> None:
    assert set(TOGETHER) == set().union(*map(held_by, SETS))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("quorum sum-codec boundary-codec balance tied", id="a home lab"),
        pytest.param("diloco sum-codec boundary-codec zbv tied", id="two sites"),
        pytest.param("groups sum-codec interleaved lora private-data", id="an adapter on private data"),
        pytest.param("quorum principal stream mixture recompute", id="a mixture of streams"),
        pytest.param("2bw sum-codec boundary-codec tied balance", id="all that saves bytes"),
        pytest.param("2bw-fresh diloco boundary-codec lora", id="fresh updates that are averaged"),
        pytest.param("2bw shard-optimizer tied lora bfloat16", id="a shared optimizer of an adapter"),
        pytest.param(
            "1f1b private-data balance recompute boundary-codec", id="unequal servers with own data"
        ),
        pytest.param("2bw quorum shard-optimizer tied balance", id="unequal sites that share"),
        pytest.param("quorum shard-weights lora bfloat16", id="an adapter in sites"),
        pytest.param("zbv groups shard-weights", id="sites whose ranks have several stages"),
        pytest.param("2bw-fresh quorum shard-optimizer muon", id="fresh updates in sites"),
        pytest.param("quorum shard-optimizer sum-codec boundary-codec", id="sites through codecs"),
        pytest.param("offloading shard-weights lora bfloat16", id="a base that replicas share and offload"),
        pytest.param("2bw offloading shard-optimizer tied sum-codec", id="parts of an optimizer on the host"),
        pytest.param("quorum offloading shard-weights", id="sites that share and offload"),
        pytest.param("diloco offloading shard-optimizer", id="sites with averages that offload"),
        pytest.param("2bw-fresh offloading copies", id="fresh updates that are offloaded and copied"),
        pytest.param("offloading recompute tied boundary-codec sum-codec", id="little memory and slow links"),
    ],
)
def test_more_than_two_do_so_too(names: str) -> None:
    Composition(frozenset(names.split())).check()
