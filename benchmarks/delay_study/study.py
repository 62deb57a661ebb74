"""The study: which runs there are, in which order, and what is kept of each.

Every sample of every rule is of the same size, so equal steps are equal samples. A rule's learning rate is
searched for by itself: three rates at least, each twice the one before, and on until the best is between two
worse ones. Other seeds run at the rate that was best for the first one, and at the second best if that came
near; the better of these counts.
"""

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

import torch
from pydantic import TypeAdapter
from torch import Tensor

from benchmarks.delay_study.coded import CodedCuts, codecs_named
from benchmarks.delay_study.meetings import agreed_named
from benchmarks.delay_study.replicas import Replicas
from benchmarks.delay_study.rules import rule_named
from benchmarks.delay_study.simulation import Pipelining, Simulation
from benchmarks.delay_study.summed import Summed
from benchmarks.delay_study.task import SIZES, Text, text
from bireme.codec.description import AS_IT_IS
from bireme.codec.sum_description import parse_sum_codec
from bireme.model.gpt import GPT
from bireme.runtime.settings import named_optimizer
from bireme.runtime.stepper import OptimizerFactory

__all__ = ["CURVE_EVERY", "Bank", "Cell", "Known", "Run", "Setting", "next_setting", "rate_of", "run"]

NUM_STEPS = 300
CURVE_EVERY = 25
WARM_UP, LAST_RATE = 0.1, 0.1
"""The share of the steps in which the learning rate rises, and what is left of it at the end."""
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
BASE_RATE = {"adamw": 1e-3, "muon": 1e-3, "muon, slow rest": 1e-3, "sgd": 0.1}
SLOW_REST = 0.125
"""Muon leaves what is no hidden matrix to AdamW at the same rate, or at so much of it."""
HIGHEST_RUNG, LOWEST_RUNG = 6, -4
NEAR = 1.02
"""A second rate whose loss is that near the best one's is tried with other seeds too."""
DIVERGED = 99.0
"""The loss of a run that came to no end."""


class Bank(StrEnum):
    """What the banks are made of."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Cell:
    """Runs that differ by their learning rate and seed alone."""

    rule: str
    optimizer: str = "adamw"
    num_stages: int = 4
    num_microbatches: int = 8
    size: str = "small"
    bank: Bank = Bank.FLOAT32
    steps: int = NUM_STEPS
    lookahead: int = 0
    codec: str = "none"
    """Of all boundaries, in the words of `links.codec`; another one for gradients after a slash."""
    ending: float = 0.0
    """The share of the steps, at the end, with another codec."""
    replicas: int = 1
    """Each trains an equal part of every batch."""
    agreement: str = "allreduce"
    """How replicas agree, in the words of `meetings`; all of them sum gradients as one process does."""
    ending_codec: str = "int8"
    """The codec of the last part, if there is one."""
    sums: str = "none"
    """What the replicas' sums of gradients go through, in the words of `sync.codec`."""

    @property
    def has_curve(self) -> bool:
        """Whether its runs are looked at on the way: those of delayed updates are drawn."""
        return self.codec == "none" and self.replicas == 1

    def reference(self) -> "Cell":
        """The synchronous runs that these are compared with."""
        return Cell("synchronous", self.optimizer, 4, 8, self.size, self.bank, self.steps)


@dataclass(frozen=True, slots=True)
class Setting:
    """All that decides a run. The learning rate is a rung of a ladder: twice as much from one to the next."""

    cell: Cell
    rung: int
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run: the loss on held-out text at the end, and along the way every few steps where that
    is drawn; and the loss at the end through the codecs that the run ended with, if it had any.
    """

    setting: Setting
    loss: float
    curve: tuple[float, ...]
    processor_s: float
    text: str
    loss_through_codecs: float | None = None

    def to_line(self) -> str:
        """A line of a file of results."""
        return _RUNS.dump_json(self).decode()

    @classmethod
    def from_line(cls, line: str) -> "Run":
        """What `to_line` made."""
        return _RUNS.validate_json(line)


_RUNS = TypeAdapter(Run)


@dataclass(slots=True)
class Known:
    """The runs that are there."""

    runs: dict[Setting, Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Take a run in; one of the same setting makes room."""
        self.runs[run.setting] = run

    def rungs(self, cell: Cell, seed: int = 0) -> dict[int, float]:
        """The losses of a cell by learning rate."""
        return {
            setting.rung: run.loss
            for setting, run in self.runs.items()
            if setting.cell == cell and setting.seed == seed
        }

    def seeds(self, cell: Cell) -> dict[int, list[float]]:
        """The losses of a cell's seeds by learning rate."""
        found: dict[int, list[float]] = {}
        for setting, run in self.runs.items():
            if setting.cell == cell:
                found.setdefault(setting.rung, []).append(run.loss)
        return found

    def best_rung(self, cell: Cell) -> int | None:
        """The learning rate whose mean loss is the least, among those that most seeds ran at."""
        found = self.seeds(cell)
        most = max(map(len, found.values()), default=0)
        means = {rung: fmean(losses) for rung, losses in found.items() if len(losses) == most}
        return min(means, key=means.__getitem__) if means else None

    def best(self, cell: Cell, seed: int = 0) -> Run | None:
        """The run at the cell's best learning rate."""
        rung = self.best_rung(cell)
        return None if rung is None else self.runs.get(Setting(cell, rung, seed))


def rate_of(optimizer: str, rung: int) -> float:
    """A learning rate of the ladder."""
    return float(BASE_RATE[optimizer] * 2.0**rung)


def next_setting(
    cell: Cell, known: Known, *, first_rung: int, num_seeds: int, is_searched: bool = True
) -> Setting | None:
    """What is to be run next of a cell, or None if all is there. The search begins around `first_rung`, or
    stays there where the cell is not searched.
    """
    if not is_searched:
        wanted = (Setting(cell, first_rung, seed) for seed in range(num_seeds))
        return next((one for one in wanted if one not in known.runs), None)
    found = known.rungs(cell)
    for rung in (first_rung, first_rung - 1, first_rung + 1):
        if rung not in found:
            return Setting(cell, rung, 0)
    by_loss = sorted(found, key=found.__getitem__)
    of_all_seeds = known.best_rung(cell)
    for best in (by_loss[0], by_loss[0] if of_all_seeds is None else of_all_seeds):
        for rung in (best - 1, best + 1):
            if rung not in found and LOWEST_RUNG <= rung <= HIGHEST_RUNG:
                return Setting(cell, rung, 0)
    near = [rung for rung in by_loss[:2] if found[rung] <= NEAR * found[by_loss[0]]]
    for seed in range(1, num_seeds):
        for rung in near:
            if Setting(cell, rung, seed) not in known.runs:
                return Setting(cell, rung, seed)
    return None


def run(setting: Setting) -> Run:
    """Train, and look at the loss on the way and at the end. Takes one thread."""
    torch.set_num_threads(1)
    begin = time.process_time()
    cell, size, source = setting.cell, SIZES[setting.cell.size], text()
    torch.manual_seed(setting.seed)
    model = GPT(size.config)
    trained = _trained(setting, model, source)
    cuts = CodedCuts(model, cell.num_stages)
    curve: list[float] = []
    codecs, last = codecs_named(cell.codec), codecs_named(cell.ending_codec if cell.ending else cell.codec)
    for number in range(cell.steps):
        cuts.codecs = codecs if number < round((1 - cell.ending) * cell.steps) else last
        loss = trained.train(number)
        if not loss < DIVERGED:
            return _kept(setting, DIVERGED, curve, begin)
        if (number + 1) % CURVE_EVERY == 0 and cell.has_curve:
            curve.append(trained.evaluated(source.along_the_way()))
    cuts.codecs = AS_IT_IS
    loss = min(trained.evaluated(source.at_the_end()), DIVERGED)
    if last.is_none:
        return _kept(setting, loss, curve, begin)
    cuts.codecs = last
    return _kept(setting, loss, curve, begin, trained.evaluated(source.at_the_end()))


class _Alone:
    """One process, or replicas that sum gradients: it is the same."""

    def __init__(self, simulation: Simulation, batch_of: Callable[[int], Tensor]) -> None:
        self.simulation = simulation
        self.batch_of = batch_of

    def train(self, number: int) -> float:
        """Run a batch; its loss."""
        return self.simulation.train(self.batch_of(number))

    def evaluated(self, input_ids: Tensor) -> float:
        """The loss of the newest weights."""
        return self.simulation.loss_on_newest(input_ids)


def _trained(setting: Setting, model: GPT, source: Text) -> "_Alone | Replicas":
    """The model in training, with copies of it where replicas agree on weights."""
    cell, size, seed = setting.cell, SIZES[setting.cell.size], setting.seed
    if cell.agreement == "allreduce":
        return _Alone(_simulation(setting, model), lambda number: source.batch(size, seed, number))

    def part_of(replica: int, batch: int) -> Tensor:
        return source.batch(size, seed, batch).chunk(cell.replicas)[replica]

    copies = [model, *(copy.deepcopy(model) for _ in range(cell.replicas - 1))]
    together = Replicas(
        [_simulation(setting, one) for one in copies],
        agreed_named(cell.agreement),
        part_of,
        num_batches=cell.steps,
        seed=seed,
    )
    for one in together.simulations:
        # The rate follows the samples of all replicas, as it does where they sum gradients.
        one.lr_factor = lambda _: _factor(together.num_updates // cell.replicas, cell.steps)
    return together


def _simulation(setting: Setting, model: GPT) -> Simulation:
    cell = setting.cell
    made = (Summed if cell.replicas > 1 and cell.agreement == "allreduce" else Simulation)(
        model,
        rule_named(cell.rule),
        Pipelining(
            cell.num_stages,
            cell.num_microbatches,
            torch.bfloat16 if cell.bank is Bank.BFLOAT16 else None,
            cell.lookahead,
        ),
        _factory(cell.optimizer, rate_of(cell.optimizer, setting.rung)),
        num_batches=cell.steps,
        clip_norm=CLIP_NORM,
        lr_factor=lambda batch: _factor(batch, cell.steps),
    )
    if isinstance(made, Summed):
        made.share_among(cell.replicas, parse_sum_codec(cell.sums))
    return made


def _factory(optimizer: str, rate: float) -> OptimizerFactory:
    name, _, rest = optimizer.partition(", ")
    return named_optimizer(name, lr=rate, rest_lr=SLOW_REST * rate if rest else None, betas=BETAS)


def _kept(
    setting: Setting, loss: float, curve: Iterable[float], begin: float, through: float | None = None
) -> Run:
    spent_s = round(time.process_time() - begin, 2)
    short = tuple(round(one, 4) for one in curve)
    coded = None if through is None else round(through, 5)
    return Run(setting, round(loss, 5), short, spent_s, text().digest, coded)


def _factor(batch: int, num_batches: int) -> float:
    """A straight rise, and half a wave of a cosine down."""
    rise = max(round(WARM_UP * num_batches), 1)
    if batch < rise:
        return (batch + 1) / rise
    done = (batch - rise) / max(num_batches - rise, 1)
    half_wave = 0.5 * (1.0 + float(torch.cos(torch.tensor(torch.pi * done))))
    return LAST_RATE + (1.0 - LAST_RATE) * half_wave
