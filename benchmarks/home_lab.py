"""A home lab trains: three unequal hosts on slow links, of which one is killed and one is cut off for 10 s.

    python benchmarks/home_lab.py [--quick] [--json]

Three hosts with speeds 4 : 2 : 1 and 100 Mbit/s between them. A GPT with tied weights trains as two replicas
of two stages, which the planner puts on four devices: two on the first host, one on each of the others.
`sync.mode` is quorum, `balance.mode` measured. int8 crosses stage boundaries, and int4 the sums, with
residuals. The third host is killed, all its processes at once, and started again; later the cable of the
second host is pulled for 10 s. The same run without faults follows, with as many steps and the same plan.

Devices sleep in proportion to their samples, besides what they really compute, so that four of them run on
few cores. The hosts are network namespaces, which needs root on Linux. Elsewhere they share the loopback:
then the links are not slow, and a host is stopped instead of cut off. The rows specify which.

Throughput is that of the ledger. The prediction is the run's own, from `bireme train --json`. While a replica
is away, it is what the planner predicts for the other one alone, with the whole batch. Both are of batches in
the middle of a run, so they are compared with batches that begin when the same replicas have trained for a
while. Rows have the throughput over all of the run too, with the waits that the faults cause.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most, exactly
from benchmarks.home.lab_run import BATCH, REPLICAS, evaluated_loss, lab_run, plan_text
from benchmarks.killing.mortal_run import Round
from bireme.cluster.cluster_file import read_cluster
from bireme.plan.plan_file import load_plan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import forecast_of
from bireme.profile.profile import load_profile
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.folder import RunFolder

KILLED, CUT = 2, 1
"""The host that is killed, and the one whose link is cut."""
CUT_S, AWAY_S = 10.0, 3.0
SETTLED = 6
"""Batches of the same replicas after which shares follow speeds, and throughput is compared."""
LEAST_THROUGHPUT, MOST_LOSS = 0.85, 0.01


STEPS = 1_000_000
"""More than a run with faults does before it is asked to stop."""


@dataclass(frozen=True, slots=True)
class Story:
    """Batches that all replicas train before a host is killed, before a link is cut, and before the end."""

    before: int
    between: int
    after: int


FULL, QUICK = Story(60, 80, 80), Story(16, 12, 12)


@dataclass(frozen=True, slots=True)
class Lived:
    """What came of a run, and the faults that it had."""

    name: str
    about: str
    statuses: Sequence[int]
    document: dict[str, Any]
    rounds: Sequence[Round]
    faults: Sequence[dict[str, Any]]
    is_whole: bool
    eval_loss: float
    alone_s: Sequence[float]
    """What a batch should take that a replica trains alone, for each of them."""

    @property
    def predicted_s(self) -> float:
        """Of a batch of all replicas."""
        return float(self.document["predicted_batch_s"])

    def expected_per_s(self, members: Sequence[int]) -> float:
        """Samples a second that are predicted for these replicas."""
        seconds = self.predicted_s if len(members) == REPLICAS else self.alone_s[members[0]]
        return BATCH / seconds

    def throughput(self) -> dict[str, float]:
        """Samples a second in settled batches while all replicas train, and in all batches; predictions, and
        their ratios. That of a replica alone is there if it has trained settled batches.
        """
        whole, alone, every = Pace(), Pace(), Pace()
        num_alike = 0
        for place, (before, own) in enumerate(pairwise(self.rounds)):
            num_alike = num_alike + 1 if before.members == own.members else 0
            seconds, expected = own.at_s - before.at_s, self.expected_per_s(own.members)
            if place >= SETTLED:
                every.add(seconds, own.num_samples, expected)
            if num_alike > SETTLED:
                (whole if len(own.members) == REPLICAS else alone).add(seconds, own.num_samples, expected)
        predicted = BATCH / self.predicted_s
        return {
            "whole_s": whole.seconds,
            "all_s": every.seconds,
            "samples_per_s": whole.samples / whole.seconds,
            "predicted_per_s": predicted,
            "of_predicted": whole.of_expected,
            **({"alone_of_predicted": alone.of_expected} if alone.seconds else {}),
            "over_all_per_s": every.samples / every.seconds,
            "over_all_of_predicted": every.of_expected,
            "over_all_of_faultless": every.samples / every.seconds / predicted,
        }


@dataclass(slots=True)
class Pace:
    """Seconds, the samples trained in them, and those that were expected."""

    seconds: float = 0.0
    samples: int = 0
    expected: float = 0.0

    def add(self, seconds: float, samples: int, expected_per_s: float) -> None:
        """Count a batch."""
        self.seconds += seconds
        self.samples += samples
        self.expected += seconds * expected_per_s

    @property
    def of_expected(self) -> float:
        """Samples, of those expected."""
        return self.samples / self.expected


def live(
    folder: Path, name: str, plan: str, *, story: Story | None, steps: int = STEPS, is_paced: bool = True
) -> Lived:
    """Train until the story of faults is over; without one so many steps."""
    log(f"the run {name}")
    faults = []
    with lab_run(folder, steps, plan, is_paced=is_paced) as run:
        if story is not None:
            run.wait_for_batch(story.before)
            faults.append(run.kill_and_start(KILLED, AWAY_S))
            run.wait_for_more(story.between)
            faults.append(run.cut_off(CUT, CUT_S))
            run.wait_for_more(story.after)
            run.stop()
        statuses, document = run.ended()
        about, path, rounds = run.lab.about, run.folder, tuple(run.rounds)
    ledger, loss = check_ledger(path / "ledger.jsonl"), evaluated_loss(path)
    alone = () if story is None else alone_s(path)  # a run whose plan is from a file has no profile
    return Lived(name, about, statuses, document, rounds, faults, ledger.is_whole, loss, alone)


def alone_s(path: Path) -> list[float]:
    """What the planner predicts for a batch that a replica trains alone, for each of them. Micro-batches are
    of the size that was profiled, and there are more of them.
    """
    folder = RunFolder(path)
    plan, cluster = load_plan(folder.plan).plan, read_cluster(folder.cluster)
    profile = load_profile(folder.profile)
    size = max(profile.micro_batches)
    found = []
    for replica in range(REPLICAS):
        own = replace(
            plan,
            width=1,
            devices=tuple((row[replica],) for row in plan.devices),
            num_microbatches=BATCH // size,
            micro_batch_sizes=(size,),
        )
        found.append(forecast_of(own, profile, cluster, PlanRequest(BATCH)).batch_s)
    return found


def row_of(run: Lived) -> dict[str, Any]:
    document = run.document
    sync, links = document["sync"], document["links"]
    raw, sent = (sum(one[key] for one in links) for key in ("raw_bytes", "sent_bytes"))
    return {
        "run": run.name,
        "made_of": run.about,
        "schedule": document["schedule"],
        "statuses": " ".join(map(str, run.statuses)),
        "steps": document["steps"],
        "ledger_is_whole": run.is_whole,
        "samples_redone": sync["samples_redone"],
        "eval_loss": run.eval_loss,
        "last_shares": " + ".join(map(str, document["shares"][-1]["shares"])),
        "boundary_times_fewer": raw / sent,
        "sums_times_fewer": sync["raw_bytes"] / sync["sent_bytes"],
        **run.throughput(),
    }


def verdicts(faulty: Lived, calm: Lived) -> Iterator[Verdict]:
    for run in (faulty, calm):
        yield exactly(f"{run.name}: hosts that ended with status 0", run.statuses.count(0), len(run.statuses))
        yield exactly(f"{run.name}: the ledger has each sample once", run.is_whole, True)
    yield exactly("all replicas trained again after each fault", len(faulty.faults), 2)
    yield at_most("loss, more than without faults", faulty.eval_loss / calm.eval_loss - 1, MOST_LOSS)
    found = faulty.throughput()
    yield at_least("throughput of all replicas, of predicted", found["of_predicted"], LEAST_THROUGHPUT)
    if "alone_of_predicted" in found:
        alone = found["alone_of_predicted"]
        yield at_least("throughput of one replica, of predicted", alone, LEAST_THROUGHPUT)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--schedule", default="2bw", help="the schedule of the pipelines")
    parser.add_argument("--folder", type=Path, help="a new folder for the runs, to keep them")


def measure(asked: Namespace) -> Findings:
    with TemporaryDirectory(prefix="home-lab-") as scratch:
        folder = asked.folder or Path(scratch)
        plan, story = plan_text(asked.schedule), QUICK if asked.quick else FULL
        faulty = live(folder / "faults", "with faults", plan, story=story)
        own = f'file = "{folder / "faults" / "runs" / "run" / "plan.json"}"'
        steps = faulty.document["steps"]
        calm = live(folder / "calm", "without faults", own, story=None, steps=steps, is_paced=not asked.quick)
    sections = [
        Section("Runs over three hosts, speeds 4 : 2 : 1", [row_of(faulty), row_of(calm)]),
        Section("Faults", faulty.faults),
        Section("Time to recover", faulty.document["sync"].get("recoveries", ())),
    ]
    return Findings(sections, list(verdicts(faulty, calm)))


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        quick="fewer steps, and devices that do not sleep in the run without faults",
        options=options,
    )
