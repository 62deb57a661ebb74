"""Every pair of capabilities that is not excluded trains, and computes what one process does."""

from collections.abc import Iterator

import pytest
import torch

from bireme.capabilities import CAPABILITIES, exclusion, pairs
from bireme.sync.coordinator.groups import Arrived
from bireme.sync.coordinator.state import Paces
from tests.support.composition import Composition

pytestmark = pytest.mark.slow

TOGETHER = [
    (one.name, other.name)
    for one, other in pairs(CAPABILITIES.values())
    if exclusion(one.name, other.name) is None
]


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


@pytest.mark.parametrize("pair", TOGETHER, ids=" and ".join)
def test_two_capabilities_together_compute_what_one_process_does(pair: tuple[str, str]) -> None:
    Composition(frozenset(pair)).check()


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
        pytest.param("2bw-fresh quorum shard-optimizer muon", id="fresh updates in sites"),
        pytest.param("quorum shard-optimizer sum-codec boundary-codec", id="sites through codecs"),
        pytest.param("offloading recompute tied boundary-codec sum-codec", id="little memory and slow links"),
    ],
)
def test_more_than_two_do_so_too(names: str) -> None:
    Composition(frozenset(names.split())).check()
