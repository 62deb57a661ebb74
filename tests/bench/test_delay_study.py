"""The study of update rules: which runs it makes, what it keeps of them, and the figures of its tables."""

from collections.abc import Mapping

import pytest
import torch

from benchmarks.delay_study.clock import NetworkSpeed, batch_time
from benchmarks.delay_study.pictures import curves
from benchmarks.delay_study.study import Bank, Cell, Known, Run, Setting, next_setting
from benchmarks.delay_study.table import penalty, rows
from benchmarks.delay_study.task import SIZES, text
from bireme.report.markup import svg

pytestmark = pytest.mark.slow


def test_batches_are_the_same_for_every_rule_and_others_for_every_seed() -> None:
    source, size = text(), SIZES["small"]
    assert torch.equal(source.batch(size, 1, 7), source.batch(size, 1, 7))
    assert not torch.equal(source.batch(size, 1, 7), source.batch(size, 2, 7))
    assert source.batch(size, 0, 0).shape == (size.num_samples, size.config.context)
    assert int(source.at_the_end().max()) < size.config.vocab


def made(cell: Cell, losses: Mapping[tuple[int, int], float]) -> Known:
    """Runs by their rung and seed."""
    known = Known()
    for (rung, seed), loss in losses.items():
        known.add(Run(Setting(cell, rung, seed), loss, (), 0.0, "text"))
    return known


@pytest.mark.parametrize(("slope", "at_seeds"), [(0.01, [3, 2, 3, 2]), (1.0, [3, 3])])
def test_rates_are_tried_until_the_best_lies_between_two_worse_ones(
    slope: float, at_seeds: list[int]
) -> None:
    """The loss has its least at rung 3, two rungs from where the search begins."""
    cell, known, tried = Cell("2bw"), Known(), []
    while (setting := next_setting(cell, known, first_rung=1, num_seeds=3)) is not None:
        tried.append((setting.rung, setting.seed))
        known.add(Run(setting, 2.0 + slope * abs(setting.rung - 3), (), 0.0, "text"))
    assert tried[:5] == [(1, 0), (0, 0), (2, 0), (3, 0), (4, 0)]
    assert [rung for rung, _ in tried[5:]] == at_seeds
    assert [seed for _, seed in tried[5:]] == sorted(seed for _, seed in tried[5:])


def test_a_run_comes_back_from_its_line() -> None:
    run = Run(Setting(Cell("2bw", bank=Bank.BFLOAT16), -1, 2), 2.5, (3.0, 2.75), 1.5, "text")
    assert Run.from_line(run.to_line()) == run


def test_the_excess_is_that_over_the_synchronous_run_of_the_same_seed() -> None:
    known = made(Cell("synchronous"), {(1, 0): 2.5, (2, 0): 2.0, (2, 1): 4.0})
    for run in made(Cell("2bw"), {(0, 0): 2.5, (1, 0): 2.4, (0, 1): 4.4}).runs.values():
        known.add(run)
    row = rows(known)[1]
    assert row.rate == pytest.approx(1e-3)
    assert row.is_at_edge
    assert row.excess is not None
    assert row.excess.median == pytest.approx((0.25 + 0.1) / 2)
    assert (row.excess.least, row.excess.greatest) == pytest.approx((0.1, 0.25))


def test_the_penalty_is_the_steps_for_one_of_a_synchronous_run() -> None:
    """150 synchronous steps come to 3.0, 300 to 2.0; so does a rule with 2.5 as far as 150·√2 of them."""
    known = Known()
    for steps, loss in ((150, 3.0), (300, 2.0)):
        known.add(Run(Setting(Cell("synchronous", steps=steps), 0, 0), loss, (), 0.0, "text"))
    assert penalty(2.0, Cell("2bw"), known) == pytest.approx(1.0)
    assert penalty(3.0, Cell("2bw"), known) == pytest.approx(2.0)
    assert penalty(2.5, Cell("2bw"), known) == pytest.approx(2**0.5)
    assert penalty(3.5, Cell("2bw"), known) is None


def test_a_delay_saves_the_bubble_and_more_where_links_are_slow() -> None:
    def batch(schedule: str, speed: NetworkSpeed) -> float:
        return batch_time(schedule, 4, 8, speed, may_look_ahead=True).batch

    for speed in NetworkSpeed:
        assert 1.0 <= batch("2bw", speed) < batch("2bw-fresh", speed) < batch("zb-h1", speed)
        assert batch("zb-h1", speed) < batch("1f1b", speed) or speed is NetworkSpeed.SLOW
    saved = [batch("1f1b", speed) / batch("2bw", speed) for speed in (NetworkSpeed.FAST, NetworkSpeed.SLOW)]
    assert saved[0] < saved[1]


def test_a_picture_names_every_curve() -> None:
    runs = [
        (name, Run(Setting(Cell(name), 0, 0), loss, (4.0, 3.0, loss), 0.0, "text"))
        for name, loss in (("synchronous", 2.0), ("2bw", 2.5))
    ]
    picture = svg(curves("Two rules", runs))
    assert ">synchronous<" in picture
    assert ">2bw<" in picture
    assert picture.count("<line") >= 4
