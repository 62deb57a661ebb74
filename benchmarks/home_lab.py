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
is away, it is what the simulator predicts for the other one alone, with the whole batch.
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
from benchmarks.rehearsal.rehearsed import rehearsed, simulated_s
from bireme.cluster.cluster_file import read_cluster
from bireme.plan.plan_file import load_plan
from bireme.profile.profile import load_profile
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.folder import RunFolder

KILLED, CUT = 2, 1
"""The host that is killed, and the one whose link is cut."""
CUT_S, AWAY_S = 10.0, 3.0
SETTLED = 10
"""Batches after which the shares follow the speeds, and throughput is counted."""
LEAST_THROUGHPUT, MOST_LOSS = 0.85, 0.01


STEPS = 1_000_000
"""More than a run with faults does before it is asked to stop."""


@dataclass(frozen=True, slots=True)
class Story:
    """Batches that all replicas train before a host is killed, before a link is cut, and before the end."""

    before: int
    between: int
    after: int


FULL, QUICK = Story(60, 80, 80), Story(25, 15, 15)


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

    def throughput(self) -> dict[str, float]:
        """Samples a second while all replicas train, and over all of it; predictions, and their ratios."""
        whole_s = whole = all_s = every = expected = 0.0
        for before, own in pairwise(self.rounds[SETTLED:]):
            seconds = own.at_s - before.at_s
            all_s, every = all_s + seconds, every + own.num_samples
            if len(own.members) < REPLICAS:
                expected += seconds * BATCH / self.alone_s[own.members[0]]
                continue
            expected += seconds * BATCH / self.predicted_s
            if len(before.members) == REPLICAS:
                whole_s, whole = whole_s + seconds, whole + own.num_samples
        return {
            "whole_s": whole_s,
            "all_s": all_s,
            "samples_per_s": whole / whole_s,
            "predicted_per_s": BATCH / self.predicted_s,
            "of_predicted": whole / whole_s * self.predicted_s / BATCH,
            "over_all_per_s": every / all_s,
            "over_all_of_predicted": every / expected,
            "over_all_of_faultless": every / all_s * self.predicted_s / BATCH,
        }


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
    """What the simulator predicts for a batch that a replica trains alone, for each of them. Micro-batches
    are of the size that was profiled, and there are more of them.
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
        found.append(simulated_s(rehearsed(profile, cluster, own), cluster))
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
    off = abs(faulty.eval_loss / calm.eval_loss - 1)
    yield at_most("loss, difference from the run without faults", off, MOST_LOSS)
    found = faulty.throughput()
    yield at_least("throughput of all replicas, of predicted", found["of_predicted"], LEAST_THROUGHPUT)
    yield at_least("throughput over all, of predicted", found["over_all_of_predicted"], LEAST_THROUGHPUT)


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
