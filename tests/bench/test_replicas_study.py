"""Replicas of the study that average weights: what an average may and may not change."""

import copy

import pytest
import torch
from torch import Tensor

from benchmarks.delay_study.meetings import Agreed, agreed_named, meetings
from benchmarks.delay_study.replica_cells import replica_lines, replica_sweeps
from benchmarks.delay_study.replicas import DilocoStep, Replicas, mean_of
from benchmarks.delay_study.rules import rule_named
from benchmarks.delay_study.simulation import Pipelining, Simulation
from benchmarks.delay_study.study import Cell, Known, Run, Setting, run
from benchmarks.delay_study.table import rows
from bireme.errors import BiremeError
from bireme.model.gpt import GPT, GPTConfig
from bireme.runtime.settings import named_optimizer
from bireme.sync.coordinator.groups import is_connected

pytestmark = pytest.mark.slow

NUM_REPLICAS, NUM_BATCHES, NUM_SAMPLES = 4, 6, 8
CONTEXT, VOCAB = 8, 16


def model_of() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(2, 16, 2, vocab=VOCAB, context=CONTEXT, tied=False)).double()


def batch_of(number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (NUM_SAMPLES, CONTEXT), generator=draw)


def part_of(replica: int, batch: int) -> Tensor:
    return batch_of(batch).chunk(NUM_REPLICAS)[replica]


def simulation_of(model: GPT, num_microbatches: int, rule: str, optimizer: str = "sgd") -> Simulation:
    return Simulation(
        model,
        rule_named(rule),
        Pipelining(2, num_microbatches),
        named_optimizer(optimizer, lr=0.05),
        num_batches=NUM_BATCHES,
        clip_norm=None,
    )


def replicas_of(agreed: Agreed, rule: str = "synchronous", optimizer: str = "sgd") -> Replicas:
    model = model_of()
    copies = [copy.deepcopy(model) for _ in range(NUM_REPLICAS)]
    simulations = [simulation_of(one, 2, rule, optimizer) for one in copies]
    return Replicas(simulations, agreed, part_of, num_batches=NUM_BATCHES)


AT_ONE_PACE = Agreed(1, held_s=0.0)


@pytest.mark.parametrize("rule", ["synchronous", "2bw"])
def test_sgd_at_one_pace_with_everyone_in_each_group_is_one_process(rule: str) -> None:
    """P = 1, equal speeds, equal starts: an average of weights is an average of gradients."""
    together = replicas_of(AT_ONE_PACE, rule)
    alone = simulation_of(model_of(), NUM_REPLICAS * 2, rule)
    for number in range(NUM_BATCHES):
        assert together.train(number) == pytest.approx(alone.train(batch_of(number)), rel=1e-12)
        for one in together.simulations:
            assert torch.allclose(one.newest.whole, alone.newest.whole, rtol=0.0, atol=1e-13)


def test_an_optimizer_of_its_own_makes_averages_of_weights_something_else() -> None:
    together = replicas_of(AT_ONE_PACE, optimizer="adamw")
    alone = simulation_of(model_of(), NUM_REPLICAS * 2, "synchronous", "adamw")
    for number in range(NUM_BATCHES):
        together.train(number)
        alone.train(batch_of(number))
    assert not torch.allclose(together.simulations[0].newest.whole, alone.newest.whole, rtol=0.0, atol=1e-6)


def test_a_group_has_equal_weights_and_the_mean_of_all_stays() -> None:
    together = replicas_of(Agreed(2))
    agree, seen = together._agree, []

    def watched(group: dict[int, int]) -> None:
        before = mean_of([one.newest.whole for one in together.simulations])
        agree(group)
        after = mean_of([one.newest.whole for one in together.simulations])
        first = together.simulations[next(iter(group))].newest.whole
        assert all(torch.equal(together.simulations[one].newest.whole, first) for one in group)
        assert torch.allclose(before, after, rtol=0.0, atol=1e-14)
        seen.append(len(group))

    together._agree = watched  # type: ignore[method-assign, assignment]
    for number in range(NUM_BATCHES):
        together.train(number)
    assert 1 < max(seen) <= NUM_REPLICAS
    assert sum(seen) == together.num_updates >= NUM_BATCHES * NUM_REPLICAS


def test_mixing_is_symmetric_and_gives_away_nothing() -> None:
    """As a matrix over replicas: averages of unit vectors, group by group."""
    for group in meetings(Agreed(5), NUM_REPLICAS, 40):
        mixed = torch.eye(NUM_REPLICAS, dtype=torch.float64)
        mixed[list(group)] = mean_of(list(mixed[list(group)]))
        assert torch.equal(mixed, mixed.T)
        assert torch.allclose(mixed.sum(dim=0), torch.ones(NUM_REPLICAS, dtype=torch.float64))


def test_each_replica_trains_each_of_its_batches_once_and_in_order() -> None:
    due = dict.fromkeys(range(8), 0)
    sizes = []
    for group in meetings(agreed_named("groups:5:4"), 8, 400):
        sizes.append(len(group))
        for replica, batch in group.items():
            assert batch == due[replica]
            due[replica] += 1
    assert sum(due.values()) >= 400
    assert due[0] < 0.5 * due[1], "the slow one has done less"
    assert {1, 8} & set(sizes)


@pytest.mark.parametrize("every", [1, 5])
def test_the_groups_of_any_two_periods_connect_all_replicas(every: int) -> None:
    """A period is P batches of each replica, and one more update of each while a group is being forced."""
    num = 8
    groups = list(meetings(agreed_named(f"groups:{every}:6"), num, 1200))
    for begin in range(0, len(groups), 7):
        met, updates, pairs = begin, 0, []
        while met < len(groups) and updates < 2 * (every * num + num):
            members = list(groups[met])
            pairs += [(members[0], one) for one in members]
            met, updates = met + 1, updates + len(members)
        assert met == len(groups) or is_connected(range(num), pairs), (begin, groups[begin:met])


def test_an_outer_step_with_rate_one_and_no_momentum_is_the_mean() -> None:
    anchor, ends = torch.tensor([1.0, 2.0]), [torch.tensor([0.0, 3.0]), torch.tensor([1.0, 5.0])]
    step = DilocoStep(anchor, 1.0, 0.0)
    assert torch.equal(step.step(mean_of([anchor - one for one in ends])), mean_of(ends))


def test_outer_steps_follow_the_formula_and_come_one_batch_late() -> None:
    """Against a plain loop with SGD: drift, Nesterov, and what was done meanwhile on top."""
    every, rate, momentum = 2, 0.7, 0.9
    together = replicas_of(Agreed(every, is_diloco=True, rate=rate, momentum=momentum))
    plain = [simulation_of(model_of(), 2, "synchronous") for _ in range(NUM_REPLICAS)]
    anchor = plain[0].newest.whole.clone()
    memory = torch.zeros_like(anchor)
    given: list[Tensor] = []
    for number in range(NUM_BATCHES):
        for replica, one in enumerate(plain):
            one.train(part_of(replica, number))
        if given:
            drift = mean_of([anchor - one for one in given])
            memory = momentum * memory + drift
            anchor = anchor - rate * (drift + momentum * memory)
            for one, offered in zip(plain, given, strict=True):
                one.newest.whole.add_(anchor - offered)
            given = []
        if (number + 1) % every == 0:
            given = [one.newest.whole.clone() for one in plain]
        together.train(number)
        for one, other in zip(together.simulations, plain, strict=True):
            assert torch.allclose(one.newest.whole, other.newest.whole, rtol=0.0, atol=1e-13)


def test_what_says_no_agreement_is_refused() -> None:
    for word in ("groups", "groups:x", "diloco:5:0.7", "pairs:3"):
        with pytest.raises(BiremeError, match="says no agreement"):
            agreed_named(word)


def test_a_cell_with_replicas_runs_and_comes_into_the_table() -> None:
    cell = Cell("synchronous", num_stages=2, num_microbatches=2, steps=2, replicas=8, agreement="groups:5")
    setting = Setting(cell, 2, 0)
    found = run(setting)
    assert Run.from_line(found.to_line()) == found
    known = Known({setting: found})
    assert "| groups, P = 5 | 8 | synchronous | adamw | 2 | 2 |" in list(replica_lines(rows(known)))[-1]
    assert len({sweep.cell for sweep in replica_sweeps()}) == 2 * 2 * 2 * (4 + 3 + 1)
