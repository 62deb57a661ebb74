"""Processes of `bireme train` are killed at every place of a batch, one after the other; the run continues.

    python benchmarks/kills.py [--quick] [--json] [--section NAME]

`--section` measures a part alone: `walks`, which the rest of this text is about; `last-copy`
(`killing/last_copy.py`): a host with the only first copy of a stage is killed, and the run goes on from its
second copies; `lost-machine` (`killing/lost_machine.py`): a machine of `bireme coordinate` is lost for good,
and the run goes on over the others; or `join`: such a machine comes back by `bireme join`.

With `sync.mode = "quorum"` and two and three replicas of two stages. A rank kills itself (SIGKILL), or stops
(SIGSTOP) until its lease has been over for long, right before some instruction of a batch: in turns on each
rank, at places that spread over the batch. Now and then the coordinator is killed as well, or the next start
of the replica fails by what is told as a mistake. The next one follows once all replicas train again. At the
end the run is asked to stop, and the rank that saves the last checkpoint is killed while it does so.

Each run must end with status 0, with a checkpoint of its last step, every sample in one committed round at
most, the losses of one process on the samples of the ledger (to rounding, in float32), no replica with other
weights than its peers, and no process left over. In the median a batch of the others counts within one and a
half leases of a kill.
"""

import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_most, exactly
from benchmarks.killing.injector import SAVING
from benchmarks.killing.last_copy import last_copy_rows, last_copy_verdicts
from benchmarks.killing.lost_machine import (
    joined_rows,
    joined_verdicts,
    lost_machine_rows,
    lost_machine_verdicts,
)
from benchmarks.killing.mortal_run import Ended, MortalRun, losses_of_one_process, mortal_run
from bireme.documents import read_json_lines
from bireme.sync.coordinator.ledger_check import check_ledger

LEASE_S = 2.0
AWAKE_LEASES = 1.75
"""A rank that was stopped continues after so many leases."""
PACE_S = 0.002
SPREAD = 0.618034
"""Of places in a batch: multiples of it, without their whole part, come close to every place."""
STOP_EVERY, COORDINATOR_EVERY, MISTAKE_EVERY = 5, 9, 11
MOST_LEASES, MOST_DIFFERENCE = 1.5, 1e-5


@dataclass(frozen=True, slots=True)
class Walk:
    """A run of so many replicas of two stages, and so many kills in it."""

    replicas: int
    schedule: str
    kills: int

    @property
    def name(self) -> str:
        return f"{self.replicas} of 2, {self.schedule}"


PARTS = ("detect_s", "transfer_s", "catch_up_s")
"""Of a recovery."""

WALKS = (Walk(2, "2bw", 25), Walk(3, "1f1b", 25))
QUICK = (Walk(2, "2bw", 2),)


def walk_through(run: MortalRun, walk: Walk) -> Iterator[dict[str, Any]]:
    """Kill one rank after the other, each once all replicas train."""
    run.wait_until_whole(walk.replicas)
    for number in range(walk.kills):
        replica, stage = number % walk.replicas, number // walk.replicas % 2
        stops = number % STOP_EVERY == STOP_EVERY - 4
        began, is_mistaken = len(run.rounds), number % MISTAKE_EVERY == 0
        if is_mistaken:
            run.mistake()
        run.order(replica, stage, (number + 1) * SPREAD % 1, signal.SIGSTOP if stops else signal.SIGKILL)
        hit = run.hit()
        with_coordinator = number % COORDINATOR_EVERY == COORDINATOR_EVERY - 1
        if with_coordinator:
            run.kill_coordinator()
        others = run.wait_for_others(replica, began)
        if stops:
            time.sleep(max(hit.at_s + AWAKE_LEASES * LEASE_S - time.time(), 0.0))
            with suppress(ProcessLookupError):
                os.kill(hit.pid, signal.SIGCONT)
        whole = run.wait_until_whole(walk.replicas, after=run.rounds.index(others))
        row = {
            "walk": walk.name,
            "replica": replica,
            "stage": stage,
            "life": hit.life,
            "signal": "SIGSTOP" if stops else "SIGKILL",
            "coordinator_too": with_coordinator,
            "mistake_after": is_mistaken,
            "before": hit.where,
            "next_batch_s": others.at_s - hit.at_s,
            "whole_again_s": whole.at_s - hit.at_s,
        }
        log(f"{number + 1} of {walk.kills}: {row}")
        yield row


def ended(run: MortalRun) -> Ended:
    """Ask the run to stop, and kill who saves its last checkpoint."""
    run.order(run.leader, 0, SAVING, signal.SIGKILL)
    run.stop()
    run.hit()
    return run.ended()


def row_of(walk: Walk, kills: list[dict[str, Any]], run: MortalRun, end: Ended) -> dict[str, Any]:
    """What a run has come to, and what one process makes of the samples of its ledger."""
    ledger = check_ledger(run.folder / "ledger.jsonl")
    told = [
        record
        for record in read_json_lines(run.folder / "metrics.jsonl", start="start").records.values()
        if record["kind"] == "train"
    ]
    expected = losses_of_one_process(run.folder)
    off = [abs(one["loss"] / expected[one["step"] - 1] - 1) for one in told]
    seconds = [one["next_batch_s"] for one in kills]
    whole = [one["whole_again_s"] for one in kills]
    return {
        "walk": walk.name,
        "kills": len(kills) + 1,
        "status": end.status,
        "steps": end.document.get("steps"),
        "checkpoint": end.document.get("checkpoint"),
        "rounds": ledger.rounds,
        "ledger_is_whole": ledger.is_whole,
        "redone": end.document.get("sync", {}).get("samples_redone"),
        "steps_told": len({one["step"] for one in told}),
        "greatest_difference_of_losses": max(off),
        "difference_of_the_last": off[-1],
        "other_weights": end.said.count("has other weights"),
        "orphans": end.orphans,
        "median_leases_to_next_batch": median(seconds) / LEASE_S,
        "longest_leases_to_next_batch": max(seconds) / LEASE_S,
        "median_s_until_whole": median(whole),
        "longest_s_until_whole": max(whole),
        "recoveries": len(recoveries(end)),
        **{f"median_{part}": _median(recoveries(end), part) for part in PARTS},
    }


def recoveries(end: Ended) -> list[dict[str, Any]]:
    """The recoveries of a run, each with the seconds of its parts."""
    found: list[dict[str, Any]] = end.document.get("sync", {}).get("recoveries", [])
    return found


def _median(rows: list[dict[str, Any]], part: str) -> float | None:
    known = [row[part] for row in rows if row[part] is not None]
    return median(known) if known else None


def verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    for row in rows:
        walk = f"{row['walk']}, {row['kills']} kills"
        yield exactly(f"{walk}: status", row["status"], 0)
        yield exactly(
            f"{walk}: the last checkpoint is of the last step", row["checkpoint"] == row["steps"], True
        )
        yield exactly(f"{walk}: the ledger has each sample once", row["ledger_is_whole"], True)
        yield at_most(
            f"{walk}: losses, difference from one process",
            row["greatest_difference_of_losses"],
            MOST_DIFFERENCE,
        )
        yield exactly(f"{walk}: replicas with other weights", row["other_weights"], 0)
        yield exactly(f"{walk}: processes left over", row["orphans"], 0)
        leases = row["median_leases_to_next_batch"]
        yield at_most(f"{walk}: leases from a kill to the next batch, median", leases, MOST_LEASES)


def walks(is_quick: bool) -> Findings:
    rows, kills, recovered = [], [], list[dict[str, Any]]()
    for walk in QUICK if is_quick else WALKS:
        with (
            TemporaryDirectory() as folder,
            mortal_run(Path(folder), walk.replicas, 2, walk.schedule, lease_s=LEASE_S, pace_s=PACE_S) as run,
        ):
            own = list(walk_through(run, walk))
            end = ended(run)
            rows.append(row_of(walk, own, run, end))
            kills += own
            recovered += [{"walk": walk.name, **one} for one in recoveries(end)]
    sections = [
        Section("Runs in which processes were killed", rows),
        Section("Each kill", kills),
        Section("Each recovery", recovered),
    ]
    return Findings(sections, list(verdicts(rows)))


def last_copy(is_quick: bool) -> Findings:
    rows = last_copy_rows(is_quick)
    return Findings([Section("The only first copy of a stage is lost", rows)], [*last_copy_verdicts(rows)])


def lost_machine(is_quick: bool) -> Findings:
    rows = lost_machine_rows(is_quick)
    return Findings([Section("A machine is lost for good", rows)], [*lost_machine_verdicts(rows)])


def joined(_is_quick: bool) -> Findings:
    rows = joined_rows()
    return Findings([Section("A machine joins a run under way", rows)], [*joined_verdicts(rows)])


SECTIONS: dict[str, Callable[[bool], Findings]] = {
    "walks": walks,
    "last-copy": last_copy,
    "lost-machine": lost_machine,
    "join": joined,
}


def measure(asked: Namespace) -> Findings:
    found = [SECTIONS[name](asked.quick) for name in asked.section or SECTIONS]
    return Findings(
        [section for one in found for section in one.sections],
        [verdict for one in found for verdict in one.verdicts],
    )


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--section", action="append", choices=list(SECTIONS), help="measure this part alone; repeatable"
    )


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="three kills in one run, one host, and two machines", options=options)
