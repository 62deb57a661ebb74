"""Sums of gradients through codecs in the study: as the engine makes them."""

import pytest
import torch

from benchmarks.delay_study.results import waiting
from benchmarks.delay_study.rules import rule_named
from benchmarks.delay_study.simulation import Pipelining, Simulation
from benchmarks.delay_study.study import Known, Run, Setting
from benchmarks.delay_study.sum_cells import sum_lines, sum_sweeps, times_fewer
from benchmarks.delay_study.summed import CodedSums, Summed
from benchmarks.delay_study.table import rows
from bireme.codec.sum_description import DENSE, parse_sum_codec
from bireme.model.gpt import GPT, GPTConfig
from bireme.runtime.settings import named_optimizer
from tests.support.coded_oracle import CodedOracle

NUM_REPLICAS, NUM_BATCHES = 3, 7
CONTEXT, VOCAB = 8, 16


@pytest.mark.parametrize("word", ["int8", "int2", "threshold:0.1:3:2", "lowrank:2:1"])
def test_a_sum_of_the_study_is_the_sum_of_the_engine(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)  # the oracle knows no bundles
    shapes = {"matrix": (24, 20), "small": (8, 4), "other": (1300,)}
    draw, oracle = torch.Generator().manual_seed(0), CodedOracle(word)
    sums = CodedSums(parse_sum_codec(word), NUM_REPLICAS)
    for batch in range(NUM_BATCHES):
        parts = {
            replica: {
                name: torch.randn(shape, generator=draw, dtype=torch.float64)
                for name, shape in shapes.items()
            }
            for replica in range(NUM_REPLICAS)
        }
        wanted = oracle.sum(batch, parts)
        oracle.settle(counts=True)
        sums.add_up(batch, [*parts.values()])
        for found in parts.values():
            for name, expected in wanted.items():
                assert expected is not None
                if word.startswith("lowrank"):
                    assert torch.allclose(found[name], expected, rtol=0.0, atol=1e-10)
                else:
                    assert torch.equal(found[name], expected)


def test_replicas_that_send_gradients_as_they_are_are_one_process() -> None:
    together, alone = simulation_of(Summed), simulation_of(Simulation)
    assert isinstance(together, Summed)
    together.share_among(NUM_REPLICAS, DENSE)
    for number in range(NUM_BATCHES):
        draw = torch.Generator().manual_seed(number)
        batch = torch.randint(VOCAB, (2 * NUM_REPLICAS, CONTEXT), generator=draw)
        assert together.train(batch) == pytest.approx(alone.train(batch), rel=1e-12)
    assert torch.allclose(together.newest.whole, alone.newest.whole, rtol=0.0, atol=1e-12)


def simulation_of(kind: type[Simulation]) -> Simulation:
    torch.manual_seed(0)
    model = GPT(GPTConfig(1, 16, 2, vocab=VOCAB, context=CONTEXT, tied=False)).double()
    return kind(
        model,
        rule_named("synchronous"),
        Pipelining(1, 2),
        named_optimizer("adamw", lr=0.01),
        num_batches=NUM_BATCHES,
        clip_norm=1.0,
    )


def test_two_runs_at_a_time_are_of_two_cells_and_none_is_made_twice() -> None:
    known = Known()
    under_way: list[Setting] = []
    for _ in range(4):
        setting = waiting(known, sum_sweeps, under_way)
        assert setting is not None
        assert setting not in under_way
        under_way.append(setting)
    assert len({setting.cell for setting in under_way}) == 4
    known.add(Run(under_way[0], 2.5, (), 1.0, "text"))
    assert waiting(known, sum_sweeps, under_way[1:]) not in under_way
    assert list(sum_lines(rows(known)))[-1].startswith(f"| int8 | {times_fewer('int8', 'small'):.1f} | 2 |")
