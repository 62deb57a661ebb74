"""Replicas that need not wait and replicas that may die: how many samples each mode trains.

    python benchmarks/agreement.py [--quick] [--json] [--only LETTERS]

All but (e) and a part of (d) is on the simulator's clock, with the coordinator's own rules as event handlers.
A batch takes a tenth of a second in (a) to (c), on 4 replicas of 2 stages and on 8 of 1.

(a) Equal replicas: each mode compared with `allreduce`.
(b) One replica k times slower: each mode compared with `allreduce` and with the ideal, the sum of all
    replicas' speeds. AD-PSGD is the real one, of asynchronous pairs; HetPipe-like is a bound of 10 batches on
    how far one may be before the slowest, with a server on one link.
(c) Each forward and each backward is held up for h seconds with a probability of a tenth: each mode compared
    with `allreduce`, and `groups` with the bounds of a simulation without any cost of messages.
(d) A replica is killed every 30 seconds for ten minutes, in `quorum`, on 4 replicas of 2 stages with batches
    of a second: the samples that count, of those without kills; the time from a kill to the next batch of
    the others; the time until all replicas train again. How long a start and a snapshot take is assumed, and
    that the launcher of a replica sees its death at once, but for one row: there the lease has to end, as for
    a machine that is out of reach. The bound is what the devices that are left could train: all others, as
    long as a replica is away. Then the same in the engine, for four minutes, with real processes whose
    samples take as long as on devices so slow.
(e) `groups` and `allreduce` in the engine: 4 processes with a stage each that sleeps for 240 ms where it
    would compute a batch, equal and with one of them slower. Their windows end with the mean over all
    replicas. The replicas also train `alone`, all at the same time and without any agreement: that is what
    processes which share this machine's cores can reach of the ideal, so the modes are compared with it too.
    All three take turns, as the machine may do other things meanwhile: ratios are of one round, and the
    median of rounds is shown.

At the end it says what each section took.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import Verdict, at_least, at_most
from benchmarks.killing.goodput import Kills, goodput_row
from benchmarks.replica_speeds.agreements import AsynchronousPairs, BoundedStaleness, QuorumRounds
from benchmarks.replica_speeds.averaging import ALONE, measure_agreement
from benchmarks.replica_speeds.mortal import Kill, MortalReplicas, UnevenSpeed
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import RECEIVES, SENDS
from bireme.schedule.program import Program, Track
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.agreements import DilocoRounds, Everyone, GroupsAgreement
from bireme.simulate.together import Agreement, Exchange, Ran, SampleWork, Speed
from bireme.sync.coordinator.samples import SILENT_LEASES, GroupSettings

BATCH_S = 0.1
CONNECT_EVERY, DILOCO_EVERY, MOST_BEFORE = 10, 50, 10
"""P of `groups`, H of `diloco`, and the bound of the HetPipe-like baseline."""
SHARE = 16
"""Samples of a batch for each replica, where shares are equal."""
EXCHANGE = Exchange(num_bytes=1e6, bytes_per_s=1e9, latency_s=1e-4, control_s=5e-4)
"""A megabyte of weights a stage over ten gigabits a second; half a millisecond to ask the coordinator."""
GRACE_S, LEASE_S = 1.0, 3.0
DILOCO_GRACE_S = BATCH_S / 2
"""So that the outer step is ready within the batch of overlap."""
UNTIL_S, QUICK_S, BEGIN = 120.0, 20.0, 0.25
"""Seconds of a run, and the share of them that does not count."""
SLOWER = (2.0, 5.0, 10.0, 20.0)
HELD = {0.1: 1.36, 0.5: 2.4, 1.0: 3.1}
"""Seconds of the hold-ups, and how many times `allreduce` a simulation without costs of messages reaches."""
HELD_CHANCE = 0.1
ENGINE_REPLICAS, ENGINE_S, ENGINE_QUICK_S, ENGINE_ROUNDS = 4, 20.0, 8.0, 2
"""Processes in the engine, about how long each mode takes in a round, and the rounds."""
ENGINE_SLOWER = (1.0, 2.0, 5.0, 10.0)
TITLES = {
    "a": "(a) Equal replicas, simulated",
    "b": "(b) One replica k times slower, simulated",
    "c": "(c) Forwards and backwards held up at chance, simulated",
    "d": "(d) A replica killed every 30 seconds, simulated",
    "k": "(d) The same in the engine",
    "e": "(e) One replica k times slower, in the engine",
}
"""Sections by the letters of `--only`; k are the kills of (d) with real processes."""
LEAST_STEADY, LEAST_OF_IDEAL, LEAST_GOODPUT, MOST_LEASES = 0.97, 0.9, 0.9, 1.5
KILL_EVERY_S, KILLS_UNTIL_S, KILL_BATCH_S = 30.0, 600.0, 1.0
DEATHS = ((0.1, 4.0, 2.0), (LEASE_S, 4.0, 2.0), (0.1, 10.0, 5.0))
"""Seconds until a death is known (a launcher says so, or the lease ends), until the replica runs again, and
until it has a snapshot of its weights: assumed.
"""
ENGINE = Kills(replicas=4, batch_s=1.0, calm_s=45.0, every_s=KILL_EVERY_S, num=8, lease_s=LEASE_S)
QUICK_ENGINE = Kills(replicas=2, batch_s=0.2, calm_s=4.0, every_s=8.0, num=2, lease_s=LEASE_S)


@dataclass(frozen=True, slots=True)
class Shape:
    """Replicas of so many stages, and the schedule of each."""

    replicas: int
    stages: int
    schedule: str

    @property
    def name(self) -> str:
        return f"{self.replicas} of {self.stages}"

    @property
    def microbatches(self) -> int:
        return 4 if self.stages > 1 else 1


SHAPES = (Shape(4, 2, "2bw-fresh"), Shape(8, 1, "1f1b"))
MODES: dict[str, Callable[[Shape], Agreement]] = {
    "ideal": lambda _: Agreement(),
    "allreduce": lambda _: Everyone(),
    "quorum": lambda _: QuorumRounds(grace_s=GRACE_S, noticed_s=LEASE_S),
    "groups": lambda shape: GroupsAgreement(GroupSettings(CONNECT_EVERY), shape.stages),
    "diloco": lambda _: DilocoRounds(DILOCO_EVERY, DILOCO_GRACE_S),
    "AD-PSGD": lambda _: AsynchronousPairs(),
    "HetPipe-like": lambda _: BoundedStaleness(MOST_BEFORE),
}


@cache
def program_of(shape: Shape, average_lag: int | None, num_batches: int, first_batch: int) -> Program:
    program = generate(
        shape.schedule,
        num_stages=shape.stages,
        num_microbatches=shape.microbatches,
        num_batches=num_batches,
        first_batch=first_batch,
        timing=UpdateTiming(early=True, average_lag=average_lag),
    )
    return replace(program, tracks=tuple(map(_computing, program.tracks)))


def _computing(track: Track) -> Track:
    """The track without sends and receives: messages take no time here."""
    parts = (track.head, track.body, track.tail)
    head, body, tail = (tuple(one for one in part if one.kind not in SENDS | RECEIVES) for part in parts)
    return replace(track, head=head, body=body, tail=tail)


def ran(
    shape: Shape,
    agreement: Agreement,
    speeds: Sequence[Speed],
    until_s: float,
    batch_s: float = BATCH_S,
    kills: tuple[Kill, ...] = (),
) -> Ran:
    """A stage takes a third of a batch's time for its forwards. The ideal holds nobody up."""
    part_s = batch_s / SHARE / 3
    work = SampleWork((part_s,) * shape.stages, (2 * part_s,) * shape.stages, message_s=batch_s / 500)
    lag = agreement.average_lag
    together = MortalReplicas(
        lambda num_batches, first_batch: program_of(shape, lag, num_batches, first_batch),
        work,
        speeds,
        agreement,
        EXCHANGE,
        batch_size=SHARE * shape.replicas,
        kills=kills,
    )
    return together.until(until_s, round(2 * until_s / batch_s))


def rates(shape: Shape, speeds: Sequence[Speed], until_s: float) -> dict[str, float]:
    return {
        name: ran(shape, agreement(shape), speeds, until_s).samples_per_s(BEGIN * until_s)
        for name, agreement in MODES.items()
    }


def modes(about: dict[str, Any], found: dict[str, float]) -> Iterator[dict[str, Any]]:
    for mode, rate in found.items():
        yield about | {
            "mode": mode,
            "measured": "simulated",
            "samples_per_s": rate,
            "times_allreduce": rate / found["allreduce"],
            "of_ideal": rate / found["ideal"],
        }


def steady(until_s: float) -> Iterator[dict[str, Any]]:
    for shape in (*SHAPES, Shape(4, 2, "1f1b")):
        about = {"replicas": shape.name, "schedule": shape.schedule}
        yield from modes(about, rates(shape, [Speed()] * shape.replicas, until_s))


def one_slower(until_s: float) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        for times in SLOWER:
            speeds = [UnevenSpeed(slowness=((0.0, times),)), *[Speed()] * (shape.replicas - 1)]
            about = {"replicas": shape.name, "schedule": shape.schedule, "slower": times}
            yield from modes(about, rates(shape, speeds, until_s))


def held_up(until_s: float) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        for held_s, bound in HELD.items():
            speeds = [UnevenSpeed(held_s=held_s, held_chance=HELD_CHANCE)] * shape.replicas
            about = {"replicas": shape.name, "schedule": shape.schedule, "held_s": held_s}
            for row in modes(about, rates(shape, speeds, until_s)):
                yield row | {"bound_times_allreduce": bound if shape.stages == 1 else None}


def killed(until_s: float) -> Iterator[dict[str, Any]]:
    shape = Shape(4, 2, "1f1b")
    speeds = [Speed()] * shape.replicas
    for known_s, back_s, heal_s in DEATHS:

        def quorum(known_s: float = known_s, heal_s: float = heal_s) -> QuorumRounds:
            return QuorumRounds(
                grace_s=GRACE_S, noticed_s=known_s, heal_s=heal_s, silent_s=SILENT_LEASES * LEASE_S
            )

        # At odd moments of a batch, and one replica after the other.
        kills = tuple(
            Kill(number % shape.replicas, at_s, back_s) for number, at_s in enumerate(kill_times(until_s))
        )
        calm = ran(shape, quorum(), speeds, until_s, KILL_BATCH_S)
        agreement = quorum()
        found = ran(shape, agreement, speeds, until_s, KILL_BATCH_S, kills)
        waits = [next_s(found, kill, shape.replicas, whole=False) for kill in kills]
        whole = [next_s(found, kill, shape.replicas, whole=True) for kill in kills]
        goodput = found.samples_per_s() / calm.samples_per_s()
        bound = most_goodput(kills, back_s + heal_s, shape.replicas, until_s)
        yield {
            "replicas": shape.name,
            "schedule": shape.schedule,
            "mode": "quorum",
            "measured": "simulated",
            "known_s": known_s,
            "back_s": back_s,
            "snapshot_s": heal_s,
            "lease_s": LEASE_S,
            "kills": len(kills),
            "goodput": goodput,
            "bound": bound,
            "of_bound": goodput / bound,
            "samples_redone": agreement.redone,
            "median_to_next_batch_s": median(waits),
            "longest_to_next_batch_s": max(waits),
            "median_to_full_strength_s": median(whole),
        }


def most_goodput(kills: tuple[Kill, ...], away_s: float, num_replicas: int, until_s: float) -> float:
    """What is left of the devices' time where each killed replica is away for so long."""
    lost_s = sum(min(away_s, until_s - kill.at_s) for kill in kills)
    return 1.0 - lost_s / (num_replicas * until_s)


def in_engine(seconds: float, rounds: int) -> Iterator[dict[str, Any]]:
    for times in ENGINE_SLOWER:
        found = [
            {row.mode: row for row in measure_agreement(ENGINE_REPLICAS, times, seconds, CONNECT_EVERY)}
            for _ in range(rounds)
        ]
        for mode in found[0]:
            own = [each[mode] for each in found]
            rates = [row.samples_per_s for row in own]
            yield {
                "replicas": f"{ENGINE_REPLICAS} of 1",
                "schedule": "1f1b",
                "slower": times,
                "mode": mode,
                "measured": "engine",
                "samples_per_s": median(rates),
                "times_allreduce": median(
                    rate / each["allreduce"].samples_per_s for rate, each in zip(rates, found, strict=True)
                ),
                "of_ideal": median(row.samples_per_s / row.ideal_per_s for row in own),
                "of_alone": median(
                    rate / each[ALONE].samples_per_s for rate, each in zip(rates, found, strict=True)
                ),
                "processor_s_per_batch": median(row.processor_s for row in own),
            }


def kill_times(until_s: float) -> Iterator[float]:
    number = 1
    while number * KILL_EVERY_S < until_s:
        yield number * KILL_EVERY_S + 0.37 * number % KILL_BATCH_S
        number += 1


def next_s(found: Ran, kill: Kill, num_replicas: int, *, whole: bool) -> float:
    """From a kill to the next committed batch, of all replicas or of the others; else to the end."""
    after = (
        one.at_s
        for one in found.trained
        if one.at_s > kill.at_s
        and (len(one.replicas) == num_replicas if whole else kill.replica not in one.replicas)
    )
    return min(after, default=found.until_s) - kill.at_s


def verdicts(
    a: list[dict[str, Any]],
    b: list[dict[str, Any]],
    c: list[dict[str, Any]],
    d: list[dict[str, Any]],
    e: list[dict[str, Any]],
) -> Iterator[Verdict]:
    for row in a:
        if row["mode"] in ("quorum", "groups"):
            what = f"(a) {row['replicas']}, {row['schedule']}: {row['mode']}, of allreduce"
            yield at_least(what, row["times_allreduce"], LEAST_STEADY)
    for row in b:
        if row["mode"] == "groups" and row["slower"] <= CONNECT_EVERY:
            what = f"(b) {row['replicas']}, one {row['slower']:g} times slower: groups, of the ideal"
            yield at_least(what, row["of_ideal"], LEAST_OF_IDEAL)
    for row in c:
        if row["mode"] == "groups":
            what = f"(c) {row['replicas']}, held up for {row['held_s']} s: groups, times allreduce"
            yield at_least(what, row["times_allreduce"], 1.0)
    for row in d:
        if row["measured"] == "engine":
            what = f"(d) in the engine, back after {row['median_to_full_strength_s']:.1f} s"
        else:
            what = f"(d) known after {row['known_s']:g} s, back after {row['back_s'] + row['snapshot_s']:g} s"
            yield at_least(f"{what}: goodput, of its bound", row["of_bound"], LEAST_GOODPUT)
        yield at_least(f"{what}: goodput", row["goodput"], LEAST_GOODPUT)
        leases = row["median_to_next_batch_s"] / LEASE_S
        yield at_most(f"{what}: leases from a kill to the next batch, median", leases, MOST_LEASES)
    for row in e:
        if row["mode"] == "groups" and row["slower"] == 1:
            yield at_least(
                "(e) engine, equal replicas: groups, of allreduce", row["times_allreduce"], LEAST_STEADY
            )
        elif row["mode"] == "groups":
            what = f"(e) engine, one {row['slower']:g} times slower: groups, of"
            yield at_least(f"{what} the ideal", row["of_ideal"], LEAST_OF_IDEAL)
            yield at_least(f"{what} replicas that agree on nothing", row["of_alone"], LEAST_OF_IDEAL)


def letters(text: str) -> str:
    """The sections that are asked for; a `ValueError` for any other."""
    if not text or set(text) - set(TITLES):
        raise ValueError(text)
    return text


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", type=letters, default="".join(TITLES), help="sections to run, such as abc")


def measure(asked: Namespace) -> Findings:
    until_s = QUICK_S if asked.quick else UNTIL_S
    run: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "a": lambda: steady(until_s),
        "b": lambda: one_slower(until_s),
        "c": lambda: held_up(until_s),
        "d": lambda: killed(KILLS_UNTIL_S / 5 if asked.quick else KILLS_UNTIL_S),
        "k": lambda: iter([goodput_row(QUICK_ENGINE if asked.quick else ENGINE)]),
        "e": lambda: in_engine(ENGINE_QUICK_S, 1) if asked.quick else in_engine(ENGINE_S, ENGINE_ROUNDS),
    }
    rows: dict[str, list[dict[str, Any]]] = {letter: [] for letter in TITLES}
    took = []
    for letter, title in TITLES.items():
        if letter in asked.only:
            begin_s, used_s = perf_counter(), process_time()
            rows[letter] = list(run[letter]())
            took.append(
                {
                    "what": title,
                    "seconds": perf_counter() - begin_s,
                    "of_this_process": process_time() - used_s,
                }
            )
    sections = [Section(title, rows[letter]) for letter, title in TITLES.items() if rows[letter]]
    found = verdicts(rows["a"], rows["b"], rows["c"], rows["d"] + rows["k"], rows["e"])
    return Findings([*sections, Section("What this took, in seconds", took)], list(found))


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        quick="20 simulated seconds instead of 120, and two minutes of kills",
        options=options,
    )
