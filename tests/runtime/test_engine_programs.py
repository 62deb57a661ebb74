"""Programs that no schedule makes, and the control that shows the delay itself: parabolas, one to a stage."""

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.stepper import OptimizerFactory
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.proofs.deadlock import run_to_end
from bireme.schedule.routes import Routes
from bireme.schedule.source import source_of
from bireme.schedule.weave import Orders, lower, weave
from tests.support.engine_parity import (
    ALL,
    Setting,
    assert_equal,
    oracle,
    train_on_threads,
)
from tests.support.extent import examples
from tests.support.small_models import (
    Batch,
    Model,
    chained,
    made_of,
    real_batches,
)

pytestmark = pytest.mark.slow

WIDTH = 4


# --- any valid program


@dataclass(slots=True)
class Work:
    """What is left to do of one stage, and what has been done, each micro-batch in its order."""

    stage: int
    num_batches: int
    num_microbatches: int
    splits: bool
    lag: int
    """A batch begins once the one so many batches before has its gradients, on all stages."""
    done: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))

    def may(self, kind: Kind, before: "Work | None", after: "Work | None", num_ended: int) -> bool:
        k = self.done[kind]
        if k == self.num_batches * self.num_microbatches:
            return False
        batch = k // self.num_microbatches
        match kind:
            case Kind.FORWARD:
                return num_ended > batch - self.lag and (before is None or before.done[kind] > k)
            case Kind.BACKWARD_WEIGHT:
                return self.splits and self.done[Kind.BACKWARD_INPUT] > k
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                if self.splits is (kind is Kind.BACKWARD):
                    return False
                return self.done[Kind.FORWARD] > k and (after is None or after.num_back > k)
        return False

    @property
    def num_back(self) -> int:
        return self.done[Kind.BACKWARD] + self.done[Kind.BACKWARD_INPUT]

    @property
    def num_ended(self) -> int:
        done = self.done[Kind.BACKWARD_WEIGHT if self.splits else Kind.BACKWARD]
        return done // self.num_microbatches

    def step(self, kind: Kind) -> Instruction:
        batch, microbatch = divmod(self.done[kind], self.num_microbatches)
        self.done[kind] += 1
        return Instruction(kind, self.stage, batch, microbatch)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, shown as what each rank does."""

    program: Program
    rendezvous: bool

    def __repr__(self) -> str:
        shown = [f"{self.program.rule}, {self.program.rank_of_stage}, rendezvous={self.rendezvous}"]
        shown += [
            f"rank {rank}: {'; '.join(map(str, track))}" for rank, track in enumerate(self.program.tracks)
        ]
        return "\n".join(shown)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Stages on ranks in any way; at every moment any rank does anything that it could do."""
    rule = draw(st.sampled_from([Rule.SYNCHRONOUS, Rule.DELAYED, Rule.FRESH]))
    num_stages = draw(st.integers(1, 5))
    num_ranks = draw(st.integers(1, num_stages))
    rest = [draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks)]
    rank_of_stage = draw(st.permutations([*range(num_ranks), *rest]))
    rendezvous = draw(st.booleans())
    num_batches, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    lag = 1 if rule is Rule.SYNCHRONOUS else 2
    works = [Work(s, num_batches, num_microbatches, draw(st.booleans()), lag) for s in range(num_stages)]
    orders: Orders = [[] for _ in range(num_ranks)]
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    random = draw(st.randoms(use_true_random=False))
    while True:
        ready = [
            (work, kind)
            for work in works
            for kind in kinds
            if work.may(
                kind,
                works[work.stage - 1] if work.stage else None,
                works[work.stage + 1] if work.stage + 1 < num_stages else None,
                min(other.num_ended for other in works),
            )
        ]
        if not ready:
            break
        work, kind = random.choice(ready)
        orders[rank_of_stage[work.stage]].append(work.step(kind))
    recompute = draw(st.frozensets(st.integers(0, num_stages - 1)))
    program = weave(
        "random",
        rule,
        Routes(tuple(rank_of_stage)),
        orders,
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        recompute=recompute,
    )
    return Case(lower(program), rendezvous)


class Block(nn.Module):
    """A tensor with a gradient and one of whole numbers in, the same out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, both: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, places = both if isinstance(both, tuple) else (both, both.argmax(-1))
        return x + self.dropout(torch.tanh(self.linear(x))), (places + x.argmax(-1)) % WIDTH


def picked(returned: tuple[Tensor, Tensor], inputs: Any) -> Tensor:
    found = returned[0].gather(-1, returned[1].unsqueeze(-1))
    loss: Tensor = ((found - inputs["wanted"]) ** 2).mean()
    return loss


@cache
def blocks() -> Model:
    return chained(made_of([Block() for _ in range(5)]), real_batches(2, 1, WIDTH)[0], picked)


@examples(30)
@given(cases(), st.integers(1, 2))
def test_any_valid_program_computes_what_its_rule_says(case: Case, width: int) -> None:
    """Any number of stages on a rank in any order, half backwards and recomputation stage by stage."""
    program = case.program
    setting = Setting(ProgramPlan(source_of(program), tuple(range(1, program.num_stages)), width))
    data = real_batches(width * program.num_microbatches + 1, program.num_batches, WIDTH)
    found = train_on_threads(blocks(), setting, data, rendezvous=case.rendezvous)
    assert_equal(found, oracle(blocks(), setting, data))


# --- the sum over all ranks


@pytest.mark.few(4)
@pytest.mark.parametrize("schedule", ALL)
def test_no_schedule_waits_in_a_circle_for_the_sum_over_all_ranks(schedule: str) -> None:
    depths = (2, 4, 6) if schedule in ("interleaved", "zbv") else (1, 2, 3, 4, 5)
    able = SCHEDULES[schedule].most_lookahead
    for num_stages, more, num_batches in product(depths, range(4), (1, 2, 4)):
        num = num_stages + more
        lookaheads = {0, 1, num} if able is not None else {0}
        for lookahead in lookaheads:
            try:
                program = generate(
                    schedule,
                    num_stages=num_stages,
                    num_microbatches=num,
                    num_batches=num_batches,
                    lookahead=lookahead,
                )
            except BiremeError:
                continue  # so far ahead it may not run
            assert run_to_end(program, synchronous_sends=True) is None


# --- the delay


RATE = 0.1
CURVATURES = (1.0, 2.5, 4.0, 0.5)
NUM_STAGES, FEW_STAGES = len(CURVATURES), 2


class Parabola(nn.Module):
    """Adds λ/2·(w − x)² of each sample to the loss that comes in: a gradient for its own weight alone."""

    def __init__(self, stage: int, curvature: float) -> None:
        super().__init__()
        self.stage = stage
        self.curvature = curvature
        self.w = nn.Parameter(torch.tensor([1.0 + stage], dtype=torch.float64))

    def forward(self, both: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, total = both if isinstance(both, tuple) else (both, both.new_zeros(len(both)))
        return x, total + 0.5 * self.curvature * (self.w - x[:, self.stage]) ** 2


def total_of(returned: tuple[Tensor, Tensor], inputs: Any) -> Tensor:
    return returned[1].mean()


def parabolas(curvatures: tuple[float, ...]) -> Model:
    chain = nn.Sequential(*(Parabola(stage, curvature) for stage, curvature in enumerate(curvatures)))
    return chained(chain, real_batches(2, 1, len(curvatures))[0], total_of)


class PlainSGD(Setting):
    @property
    def factory(self) -> OptimizerFactory:
        return lambda named: SGD([tensor for _, tensor in named], lr=RATE)


def trajectories(curvatures: tuple[float, ...], schedule: str, data: list[Batch]) -> list[list[float]]:
    """The weight of every stage after each batch, the pipeline being as deep as there are parabolas."""
    stages = len(curvatures)
    plan = Plan(tuple(range(1, stages)), stages, schedule)
    setting = PlainSGD(plan, lr_factor=lambda _batch: 1.0)
    found = train_on_threads(parabolas(curvatures), setting, data)
    held = [{n: t for one in found for n, t in one.weights[step].items()} for step in range(len(data))]
    return [[float(weights[f"{stage}.w"]) for weights in held] for stage in range(stages)]


@pytest.mark.parametrize(
    ("schedule", "delay"), [("1f1b", 0), ("gpipe", 0), ("zb-h1", 0), ("interleaved", 0), ("2bw", 1)]
)
def test_the_delay_is_the_same_on_every_stage(schedule: str, delay: int) -> None:
    """W(t+1) = W(t) − ν∇f(W(t−delay)), worked out by hand; PipeDream's would be 3, 2, 1 and 0."""
    data = real_batches(4, 12, NUM_STAGES)
    for stage, found in enumerate(trajectories(CURVATURES, schedule, data)):
        history = [1.0 + stage]
        for t, batch in enumerate(data):
            mean = float(batch["x"][:, stage].mean())
            gradient = CURVATURES[stage] * (history[max(t - delay, 0)] - mean)
            history.append(history[t] - RATE * gradient)
        assert found == pytest.approx(history[1:], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    ("schedule", "limit", "num_batches"),
    [("1f1b", 2.0, 16), ("zb-h1", 2.0, 16), ("2bw", 1.0, 60), ("2bw-fresh", 2.0, 16)],
)
def test_steps_are_stable_up_to_the_limit_of_their_delay(
    schedule: str, limit: float, num_batches: int
) -> None:
    """Without a delay νλ < 2, with one νλ < 1, on all stages.

    2bw-fresh has none where micro-batches are alike, as here: one of them tells it all of the gradient. With
    a delay errors fade and grow slowly near the limit, as the root of what they do without.
    """
    data = [
        {**batch, "x": torch.zeros_like(batch["x"])} for batch in real_batches(4, num_batches, FEW_STAGES)
    ]
    below, above = (
        trajectories((factor * limit / RATE,) * FEW_STAGES, schedule, data) for factor in (0.9, 1.1)
    )
    for stage in range(FEW_STAGES):
        assert abs(below[stage][-1]) < 0.2 * (1.0 + stage)
        assert abs(above[stage][-1]) > 10.0 * (1.0 + stage)
