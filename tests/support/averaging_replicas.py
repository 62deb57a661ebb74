"""Several replicas of a program on plain numbers: what its averages compute, beside a plain loop.

A stage is one number W. The gradient of a micro-batch is a number of its own times the weights it ran on; a
step takes a tenth of it. All replicas are in the group of every batch.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule

__all__ = ["in_a_loop", "interpreted"]

RATE = 0.1
Used = dict[tuple[int, int, int, int], float]
"""By replica, stage, batch and micro-batch, the weights that it ran on."""


def slope(replica: int, stage: int, batch: int, microbatch: int) -> float:
    return 1.0 + ((7 * replica + 5 * stage + 3 * batch + microbatch) % 11) / 16


@dataclass(slots=True)
class _Stage:
    newest: float
    banks: dict[int, float]
    sums: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class _Replicas:
    def __init__(self, program: Program, num_replicas: int) -> None:
        self.program = program
        self.used: Used = {}
        self.offered: dict[tuple[int, int, int], float] = {}
        self.stages = {
            (replica, stage): _Stage(1.0 + stage, dict.fromkeys(range(program.banks[stage]), 1.0 + stage))
            for replica in range(num_replicas)
            for stage in range(program.num_stages)
        }
        self.num_replicas = num_replicas

    def run(self, replica: int, rank: int) -> Iterator[None]:
        """Goes through a track; gives control back where it waits for an average."""
        for step in self.program.tracks[rank]:
            if step.kind is Kind.AVERAGE_END:
                while any((r, step.stage, step.batch) not in self.offered for r in range(self.num_replicas)):
                    yield
            self._do(replica, step)

    def _do(self, replica: int, step: Instruction) -> None:
        own = self.stages[replica, step.stage]
        place = step.version or 0, self.program.banks[step.stage]
        where = replica, step.stage, step.batch, step.microbatch or 0
        is_fresh = self.program.rule is Rule.FRESH
        match step.kind:
            case Kind.FORWARD:
                self.used[where] = own.banks[place[0] % place[1]]
            case Kind.BACKWARD:
                assert own.banks[place[0] % place[1]] == self.used[where], "both passes on the same weights"
                own.sums[step.batch] += slope(*where) * self.used[where]
            case Kind.TRIAL:
                seen = own.sums[step.batch - 1] * self.program.num_microbatches / (step.seen or 1)
                own.banks[place[0] % place[1]] = own.newest - RATE * seen
            case Kind.UPDATE:
                own.newest -= RATE * own.sums.pop(step.batch)
            case Kind.AVERAGE_START:
                self.offered[replica, step.stage, step.batch] = own.newest
            case Kind.AVERAGE_END:
                offers = [self.offered[r, step.stage, step.batch] for r in range(self.num_replicas)]
                own.newest += sum(offers) / len(offers) - offers[replica]
        if step.kind in (Kind.UPDATE, Kind.AVERAGE_END) and not is_fresh:
            own.banks[place[0] % place[1]] = own.newest


def interpreted(program: Program, num_replicas: int) -> tuple[Used, dict[tuple[int, int], float]]:
    """What each micro-batch ran on, and the weights of each replica's stages in the end."""
    replicas = _Replicas(program, num_replicas)
    running = [replicas.run(r, rank) for r in range(num_replicas) for rank in range(program.num_ranks)]
    while running:
        running = [one for one in running if next(one, running) is None]
    return replicas.used, {place: own.newest for place, own in replicas.stages.items()}


def in_a_loop(program: Program, num_replicas: int) -> tuple[Used, dict[tuple[int, int], float]]:
    """The same from the update rule and the definition of an average, batch by batch."""
    m, lag = program.num_microbatches, program.average_lag
    assert lag is not None, "replicas average"
    seen = {
        (s.stage, s.batch): s.seen or 0 for track in program.tracks for s in track if s.kind is Kind.TRIAL
    }
    used: Used = {}
    ends: dict[tuple[int, int], float] = {}
    for stage in range(program.num_stages):
        newest = [1.0 + stage] * num_replicas
        before, tried = list(newest), list(newest)
        offered: list[list[float]] = []
        for batch in program.batches:
            grads = []
            for replica in range(num_replicas):
                runs_on = {Rule.DELAYED: before, Rule.FRESH: tried}.get(program.rule, newest)[replica]
                parts = [slope(replica, stage, batch, k) * runs_on for k in range(m)]
                used |= {(replica, stage, batch, k): runs_on for k in range(m)}
                grads.append(parts)
            count = seen.get((stage, batch + 1), m)
            tried = [w - RATE * sum(g[:count]) * m / count for w, g in zip(newest, grads, strict=True)]
            before = list(newest)
            newest = [w - RATE * sum(g) for w, g in zip(newest, grads, strict=True)]
            if lag == 0:
                newest = [sum(newest) / num_replicas] * num_replicas
                continue
            if len(offered) >= lag:
                newest = _with_mean(newest, offered[-lag])
            offered.append(newest)
        for late in offered[max(len(offered) - lag, 0) :] if lag else []:
            newest = _with_mean(newest, late)
        ends |= {(replica, stage): w for replica, w in enumerate(newest)}
    return used, ends


def _with_mean(weights: list[float], offers: list[float]) -> list[float]:
    mean = sum(offers) / len(offers)
    return [weight + mean - offer for weight, offer in zip(weights, offers, strict=True)]
