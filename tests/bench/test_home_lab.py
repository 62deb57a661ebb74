"""The home lab's own arithmetic, and its model. The run itself is in the benchmark."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.common.paced import SPEED, PacedDropout, PacedNorm
from benchmarks.home import model as home
from benchmarks.home_lab import SETTLED, Lived
from benchmarks.killing.mortal_run import Round
from bireme.model.capture import capture
from bireme.profile.timing import Clock

BATCH_S, ALONE_S = 0.5, 1.0
CPU = torch.device("cpu")


def lived(rounds: list[Round], **more: Any) -> Lived:
    document = {"predicted_batch_s": BATCH_S}
    return Lived("", "", [0, 0, 0], document, rounds, [], True, 3.0, [ALONE_S, 2 * ALONE_S], **more)


def rounds_of(*parts: tuple[int, tuple[int, ...], float]) -> list[Round]:
    """So many batches with these members, each of which takes so long."""
    found, at_s = list[Round](), 0.0
    for count, members, seconds in parts:
        for _ in range(count):
            at_s += seconds
            found.append(Round(len(found), members, 24, at_s))
    return found


def test_a_run_that_is_as_fast_as_predicted_also_while_a_replica_is_away_has_a_ratio_of_one() -> None:
    whole, some = (0, 1), SETTLED + 5
    rounds = rounds_of((some, whole, BATCH_S), (some, (0,), ALONE_S), (some, whole, BATCH_S))
    found = lived(rounds).throughput()
    assert found["of_predicted"] == pytest.approx(1.0)
    assert found["alone_of_predicted"] == pytest.approx(1.0)
    assert found["over_all_of_predicted"] == pytest.approx(1.0)
    assert found["over_all_of_faultless"] < 1.0
    assert found["samples_per_s"] == pytest.approx(24 / BATCH_S)


def test_waits_after_a_fault_and_batches_of_replicas_that_settle_count_in_the_throughput_over_all_alone() -> (
    None
):
    """A prediction is of a batch in the middle of a run."""
    whole, some = (0, 1), SETTLED + 5
    rounds = rounds_of(
        (some, whole, BATCH_S), (1, (1,), 60.0), (SETTLED, whole, 3 * BATCH_S), (5, whole, BATCH_S)
    )
    found = lived(rounds).throughput()
    assert found["of_predicted"] == pytest.approx(1.0)
    assert "alone_of_predicted" not in found
    assert found["over_all_of_predicted"] < 0.5


def test_a_profile_counts_the_seconds_that_a_layer_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPEED, "0.5")
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clock, x = Clock(CPU), torch.ones(3, 2, 2, requires_grad=True)
        half = nn.Sequential(PacedNorm(nn.LayerNorm(2), 0, 0.25), PacedDropout(nn.Dropout(0.0), 0, 0.25))
        half(x).sum().backward()
        assert clock.lap() >= 2 * 3 * 3 * 0.25
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_model_has_tied_weights_and_sleeps_in_every_layer() -> None:
    model, inputs = home.model()
    graph = capture(model, inputs)
    assert graph.any_batch
    for name in ("begin", "end", "weight"):
        found = sum(one.target.startswith(f"paced.{name}") for one in graph.operators)
        assert found == 2 * home.CONFIG.layers
    (embedding,) = (one for one in graph.parameters if one.aliases)
    assert {embedding.name, *embedding.aliases} == {"tokens.weight", "head.weight"}
