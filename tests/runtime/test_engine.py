"""The engine computes what one process would: every schedule, against plain loops over the same model.

Ranks are threads here, with the engine's own interpreter and messages copied between them; `test_processes`
runs real ones.
"""

from collections.abc import Iterator
from itertools import combinations, product

import pytest
import torch

from bireme.plan.plan import Plan
from tests.support.engine_parity import (
    ALL,
    Setting,
    assert_equal,
    oracle,
    plan_for,
    tolerance_of,
    train_on_threads,
)
from tests.support.small_models import gpt, token_batches
from tests.support.tiny_text import tiny_text

FACTORS = {
    "schedule": ALL,
    "precision": ("float64", "float32", "bfloat16"),
    "optimizer": ("adamw", "sgd", "muon"),
    "width": ("1", "2"),
    "recompute": ("off", "all", "some"),
    "clip": ("none", "norm"),
    "transport": ("buffered", "rendezvous"),
}
Row = tuple[str, ...]
SPLITS_BACKWARD = ("zb-h1", "zbv")


def pairs_of(row: Row) -> set[tuple[int, str, int, str]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def is_possible(row: Row) -> bool:
    """Half backwards cannot recompute single units.

    And an adaptive step takes the sign of a gradient that is hardly there for as good as any other, so that
    sums of bfloat16 in another order, as those of halves, tell nothing there.
    """
    schedule, precision, optimizer, _, recompute, *_ = row
    halves = schedule in SPLITS_BACKWARD and recompute == "some"
    return not halves and (schedule, precision, optimizer == "sgd") != ("1f1b-sliced", "bfloat16", False)


def covering() -> Iterator[Row]:
    """Settings in which every two values of two factors meet; next comes the one with the most new pairs."""
    rows = [row for row in product(*FACTORS.values()) if is_possible(row)]
    bits: dict[tuple[int, str, int, str], int] = {}
    pairs = {row: sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of(row)) for row in rows}
    missing = (1 << len(bits)) - 1
    while missing:
        best = max(rows, key=lambda row: (pairs[row] & missing).bit_count())
        missing &= ~pairs[best]
        yield best


ROWS = list(covering())


@pytest.mark.slow
@pytest.mark.few(20)
@pytest.mark.parametrize("recompute", ["off", "all"])
@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_computes_what_one_process_does_to_the_last_bit(schedule: str, recompute: str) -> None:
    model = gpt("layers=3,tied=false")
    setting = Setting(plan_for(schedule, recompute=recompute))
    data = token_batches(8, 3)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data), tolerance=tolerance_of(schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw", "2bw-fresh"])
def test_neighboring_stages_on_a_rank_compute_what_the_one_does_of_which_they_are_parts(
    schedule: str,
) -> None:
    """To the last bit, the norm that clips included; and what one process does."""
    model, data = tiny_text(), token_batches(8, 5)
    apart = Setting(Plan((2, 4, 6), 4, schedule, stages_per_rank=2), clip_norm=0.5)
    whole = Setting(Plan((4,), 4, schedule), clip_norm=0.5)
    found, expected = (train_on_threads(model, setting, data) for setting in (apart, whole))
    assert_equal(found, oracle(model, apart, data), tolerance=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for weights, wanted in zip(one.weights, other.weights, strict=True):
            assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_one_device_that_runs_the_model_in_parts_computes_what_it_does_whole() -> None:
    model, data = tiny_text(), token_batches(8, 3)
    in_parts = Plan((2, 4, 6), 4, "sequential", stages_per_rank=4, recompute=(0, 1, 2))
    setting = Setting(in_parts, clip_norm=0.5)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data, norms=dict(enumerate(found[0].norms))), tolerance=1e-12)


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=["-".join(row) for row in ROWS])
def test_all_that_can_be_set_goes_together(row: Row) -> None:
    """Every two values of two factors are in some row; weights differ by micro-batch, so do sizes."""
    named = dict(zip(FACTORS, row, strict=True))
    schedule, precision = named["schedule"], named["precision"]
    setting = Setting(
        plan_for(schedule, recompute=named["recompute"], width=int(named["width"])),
        optimizer=named["optimizer"],
        clip_norm=0.5 if named["clip"] == "norm" else None,
        bank_dtype=torch.bfloat16 if precision == "bfloat16" else None,
    )
    # The last micro-batches are smaller than the first ones.
    data = token_batches(18 if named["width"] == "2" else 10, 4)
    model = tiny_text(dtype=precision)
    found = train_on_threads(model, setting, data, rendezvous=named["transport"] == "rendezvous")
    expected = oracle(model, setting, data, norms=dict(enumerate(found[0].norms)))
    assert_equal(found, expected, tolerance=tolerance_of(schedule, precision))
