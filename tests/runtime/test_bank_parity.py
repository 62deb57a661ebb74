"""A stage that follows a program on weight banks computes what its update rule demands, number by number.

One process runs the order of one stage of a pipeline, with the whole model in that stage: what other stages
do to the order is there, and nothing has to be sent.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from bireme.runtime.banks import WeightBanks
from bireme.runtime.gradients import GradientSums
from bireme.runtime.settings import named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule
from tests.support.feed_forward import (
    ADAMW,
    TRAINABLE,
    NothingMore,
    WholeModel,
    assert_same,
    assert_same_state,
    batches,
    weights,
)
from tests.support.oracles import Microbatch, run_oracle, seen_by

CLIP_NORM = 0.05
"""Low enough to matter in every batch."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lr_factor(batch: int) -> float:
    return 1.0 / (1 + batch)


@dataclass
class Follower:
    """Follows the instructions of one stage, as an engine would."""

    program: Program
    banks: WeightBanks
    batches: Sequence[Sequence[Microbatch]]
    stage: int = 0
    scale: float = 1.0
    graphs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    shares: dict[int | tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums: dict[int | tuple[int, int], GradientSums] = {}
        self.model = WholeModel()

    def updates(self) -> Iterator[dict[str, Tensor | None]]:
        """Run all; after each update, the gradients that it was made from."""
        track = self.program.tracks[self.program.rank_of_stage[self.stage]]
        for step in track:
            match step.kind:
                case Kind.FORWARD:
                    self.forward(step)
                case Kind.BACKWARD:
                    self.backward(step)
                case Kind.TRIAL:
                    self.trial(step)
                case Kind.UPDATE:
                    yield self.update(step)

    def key(self, batch: int, k: int | None) -> int | tuple[int, int]:
        return (batch, k) if self.program.rule is Rule.STASHED and k is not None else batch

    def forward(self, step: Instruction) -> None:
        assert step.version is not None
        assert step.microbatch is not None
        self.banks.hold(step.version)
        inputs = self.batches[step.batch][step.microbatch].inputs
        loss = self.model(self.banks.leaves(step.version), {}, inputs)["loss"]
        self.graphs[step.batch, step.microbatch] = loss

    def backward(self, step: Instruction) -> None:
        assert step.version is not None
        assert step.microbatch is not None
        key = self.key(step.batch, step.microbatch)
        batch = self.batches[step.batch]
        total = sum(one.weight for one in batch) if key == step.batch else batch[step.microbatch].weight
        share = batch[step.microbatch].weight / total
        loss = self.graphs.pop((step.batch, step.microbatch))
        if key not in self.sums:
            self.sums[key] = self.banks.gradients.open(100 * step.batch + step.microbatch)
        with self.banks.gradients.lend(self.sums[key], self.banks.leaves(step.version)):
            torch.autograd.backward(loss, torch.full_like(loss, share))
        self.shares[key] = self.shares.get(key, 0.0) + share
        self.banks.release(step.version)

    def trial(self, step: Instruction) -> None:
        assert step.version is not None
        before = step.batch - 1
        self.banks.trial(
            step.version,
            dict(self.sums[before].items()),
            gradient_scale=1.0 / self.shares[before],
            lr_factor=lr_factor(before),
            scale=self.scale,
        )

    def update(self, step: Instruction) -> dict[str, Tensor | None]:
        assert step.version is not None
        key = self.key(step.batch, step.microbatch)
        sums = self.sums.pop(key)
        gradients = {name: None if one is None else one.clone() for name, one in sums.items()}
        squares = (float(torch.linalg.vector_norm(g)) ** 2 for g in gradients.values() if g is not None)
        norm = math.sqrt(sum(squares))
        if math.isfinite(norm):
            self.scale = min(1.0, CLIP_NORM / (norm + 1e-6))
        self.banks.update(
            step.version,
            dict(sums.items()),
            lr_factor=lr_factor(step.batch),
            scale=self.scale,
            skip=not math.isfinite(norm),
        )
        self.banks.gradients.release(sums)
        return gradients


def banks_for(
    program: Program, start: Mapping[str, Tensor], factory: OptimizerFactory, short: bool = False
) -> WeightBanks:
    return WeightBanks(
        {name: tensor.clone() for name, tensor in start.items()},
        TRAINABLE,
        rule=program.rule,
        num_banks=program.banks[0],
        factory=factory,
        bank_dtype=torch.bfloat16 if short else None,
    )


SCHEDULES = ["sequential", "1f1b", "2bw", "2bw-fresh", "pipedream"]


@pytest.mark.few(10)
@pytest.mark.parametrize("short", [False, True], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_six_batches_are_the_oracles(schedule: str, optimizer: str, short: bool) -> None:
    num_stages = 1 if schedule == "sequential" else 3
    program = generate(schedule, num_stages=num_stages, num_microbatches=4, num_batches=6)
    factory = named_optimizer(optimizer, lr=0.01, weight_decay=0.1)
    start = weights(dtype=torch.float32 if short else torch.float64)
    data = batches(6, 4, broken=[3])
    expected = run_oracle(
        program.rule,
        [WholeModel(), *[NothingMore()] * (num_stages - 1)],
        start,
        data,
        factory,
        trainable=TRAINABLE,
        clip_norm=CLIP_NORM,
        lr_factor=lr_factor,
        seen=seen_by(program),
        compute_dtype=torch.bfloat16 if short else None,
    )
    banks = banks_for(program, start, factory, short)
    for update, gradients in zip(expected, Follower(program, banks, data).updates(), strict=True):
        assert_same(gradients, update.gradients)
        newest = banks.newest()
        assert_same({name: newest[name] for name in TRAINABLE}, update.weights)
        assert_same_state(banks.optimizer_state(), update.optimizer_state)
    assert sum(update.is_skipped for update in expected) == 1
    assert not torch.equal(expected[-1].weights["layers.0.up.bias"], expected[-2].weights["layers.0.up.bias"])


@pytest.mark.parametrize("short", [False, True], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(schedule: str, short: bool) -> None:
    def window(num_batches: int, first_batch: int) -> Program:
        return generate(
            schedule, num_stages=3, num_microbatches=4, num_batches=num_batches, first_batch=first_batch
        )

    data = batches(5, 4)
    start = weights(dtype=torch.float32 if short else torch.float64)
    banks = banks_for(window(3, 0), start, ADAMW, short)
    first = Follower(window(3, 0), banks, data)
    list(first.updates())
    banks.settle()
    older = {v: copy.deepcopy(dict(banks.leaves(v))) for v in banks.living if v < 3}
    saved = copy.deepcopy(dict(banks.newest())), copy.deepcopy(banks.optimizer_state())
    list(Follower(window(2, 3), banks, data, scale=first.scale).updates())

    resumed = banks_for(window(2, 3), weights(5, torch.float32 if short else torch.float64), ADAMW, short)
    resumed.load(*saved, version=3, older=older)
    list(Follower(window(2, 3), resumed, data, scale=first.scale).updates())
    assert resumed.newest_version == banks.newest_version == 5
    assert_same(resumed.newest(), banks.newest())
    assert_same_state(resumed.optimizer_state(), banks.optimizer_state())
