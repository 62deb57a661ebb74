"""Machines come and go by a trace: how much a run trains of what the machines that are there could train.

    python benchmarks/churn.py [--quick] [--json] [--section NAME] [--trace FILE] [--torchft PYTHON]

`run`: `bireme train` in `quorum` on emulated hosts with links of 100 Mbit/s, one replica on each, over a
trace of spot machines (`churning/trace.py`). A machine that is lost has its processes killed; one that
arrives has its launcher started. The ideal is what the machines that are there train in peace, from the
moment at which they arrive: it includes the start of their processes. The ledger must have every sample once,
all launchers that are there must end with status 0, and no process and no file may be left.

`clock`: the same trace with the real coordinator on a simulated clock. How long a start, a state, a sum and a
sample take is given, or taken from the run before.

`many`: a trace of many machines on the same clock. The coordinator's state machine may take 5 % of a core
with 1,000 members and one event of each a second, and messages of a batch must grow only as members do.

`torchft`: the same trace with torchft's data-parallel replicas and its lighthouse, if `--torchft` names an
interpreter with torchft.

`--trace` is a trace of your own (`time_s,machine,event`, or a published format of `churning/trace.py`),
`--unit` the seconds of its unit of time (Bamboo: 3600; Parcae and Oobleck: 0.001), and `--scale` multiplies
all times, so that hours pass in minutes. A machine that arrives takes the place of one that has gone.
`--write-trace` writes the trace that is used, and ends.
"""

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.churning.real_run import LEASE_S, SAMPLES, Churned, churned, row_of
from benchmarks.churning.simulated import Costs, Ran, simulated
from benchmarks.churning.torchft_peer import torchft_row, why_not
from benchmarks.churning.trace import Kind, Market, Trace, TraceEvent, generated, read_trace, write_trace
from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most, exactly

SPOT = Market(machines=4, end_s=600.0, lifetime_s=400.0, away_s=45.0, notice=0.3, zones=2, least=3)
"""A spot market in which a machine lives for hours, scaled so that it takes ten minutes."""
CALM_S, QUICK_CALM_S = 30.0, 4.0
LEAST_GOODPUT, PUBLISHED = 0.90, 0.88
MEMBERS, QUICK_MEMBERS = (10, 100, 1000), (10, 100)
MOST_SHARE = 0.05
"""Of a core, for the state machine with 1,000 members at one event a second each."""
MOST_GROWTH = 1.1
"""Messages of a batch and a member with the most members, compared with the fewest. Many machines have more
losses and returns in a batch, of which all members hear.
"""
MANY_S = 30.0


def quick_trace() -> Trace:
    """Three machines, one of which is lost and comes back."""
    events = [TraceEvent(0.0, name, Kind.ARRIVES) for name in "abc"]
    return Trace((*events, TraceEvent(2.0, "c", Kind.LOST), TraceEvent(4.0, "c", Kind.ARRIVES)), 24.0)


@dataclass(slots=True)
class Measured:
    """What sections have found so far."""

    sections: list[Section] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


def run(trace: Trace, is_quick: bool, found: Measured) -> Churned:
    """The real run."""
    made = churned(trace, QUICK_CALM_S if is_quick else CALM_S)
    found.sections += [
        Section("A run over the trace", [row_of(made, trace)]),
        Section("Recoveries of the run", made.recoveries),
    ]
    if not is_quick:  # in which the start of a process takes most of the time
        found.verdicts.append(at_least(f"goodput (published: {PUBLISHED:g})", made.goodput, LEAST_GOODPUT))
    found.verdicts += [
        exactly("the ledger has every sample once", made.is_whole, True),
        exactly("launchers that ended with another status than 0", sum(map(bool, made.statuses)), 0),
        exactly("processes and files left over", len(made.left_over), 0),
    ]
    for one in made.left_over:
        log(f"left over: {one}")
    return made


def costs_of(made: Churned | None, count: int) -> Costs:
    """Seconds as the run had them; those of `Costs` where there was no run."""
    if made is None:
        return Costs()
    costs = replace(Costs(), sample_s=count / made.calm_per_s, sum_s=0.0)
    if made.recoveries:
        costs = replace(costs, transfer_s=median(one["transfer_s"] for one in made.recoveries))
    if made.returns_s and made.recoveries:
        own_s = median(one["transfer_s"] + one["catch_up_s"] for one in made.recoveries)
        costs = replace(costs, start_s=max(median(made.returns_s) - own_s, 0.0))
    return costs


def clock_row(trace: Trace, costs: Costs, samples: int, ran: Ran) -> dict[str, Any]:
    """The figures of a run on the clock."""
    count, batch = len(trace.machines), samples * len(trace.machines)
    detected = [one.detect_s for one in ran.recoveries if one.detect_s is not None]
    return {
        "machines": count,
        "seconds": trace.end_s,
        "departures": trace.count(Kind.LOST, Kind.LEAVES),
        "goodput": ran.samples_from(0.0) * costs.sample_s / trace.machine_s,
        "rounds": len(ran.committed),
        "batches_lost": ran.samples_redone / batch,
        "recoveries": len(ran.recoveries),
        "median_detect_s": median(detected) if detected else None,
        "median_start_s": _median([one.start_s for one in ran.recoveries]),
        "median_transfer_s": _median([one.transfer_s for one in ran.recoveries]),
        "median_catch_up_s": _median([one.catch_up_s for one in ran.recoveries]),
    }


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def clock(trace: Trace, made: Churned | None, found: Measured) -> None:
    """The trace on a clock."""
    costs = costs_of(made, len(trace.machines))
    ran = simulated(trace, costs, samples=SAMPLES, lease_s=LEASE_S, grace_s=2.0)
    row = clock_row(trace, costs, SAMPLES, ran) | {
        f"given_{name}": own for name, own in asdict(costs).items()
    }
    found.sections.append(Section("The trace on a clock", [row]))


def many(is_quick: bool, found: Measured) -> None:
    """Many machines on a clock, with one event of each a second."""
    rows = []
    for count in QUICK_MEMBERS if is_quick else MEMBERS:
        # Three reports of a batch, and a few beats between them, are one event a second.
        costs, samples = Costs(sample_s=0.4, sum_s=0.1), 8
        market = Market(count, MANY_S, 3600.0, 60.0, notice=0.3, zones=5, least=count // 2 + 1)
        trace = generated(market, seed=1)
        gc.freeze()  # as in the coordinator's process: what was imported is not looked through again
        ran = simulated(trace, costs, samples=samples)
        rows.append(many_row(trace, costs, samples, ran))
        log(str(rows[-1]))
    found.sections.append(Section("The coordinator with many members", rows))
    found.verdicts += many_verdicts(rows)


def many_row(trace: Trace, costs: Costs, samples: int, ran: Ran) -> dict[str, Any]:
    """What the coordinator did, and what it took."""
    count, rounds = len(trace.machines), max(len(ran.committed), 1)
    return clock_row(trace, costs, samples, ran) | {
        "events_a_member_a_second": ran.num_reports / count / trace.end_s,
        "us_an_event": ran.busy_s / max(ran.num_reports, 1) * 1e6,
        "share_of_a_core": ran.busy_s / trace.end_s,
        "messages_a_batch_a_member": (ran.num_reports + ran.num_replies) / rounds / count,
        "bytes_a_reply": ran.reply_bytes / max(ran.num_replies, 1),
    }


def many_verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    """What was promised of many members."""
    first, last = rows[0], rows[-1]
    events = last["machines"] * 1.0
    share = last["us_an_event"] * 1e-6 * events
    yield at_most(f"{last['machines']} members, an event a second each: share of a core", share, MOST_SHARE)
    growth = last["messages_a_batch_a_member"] / first["messages_a_batch_a_member"]
    yield at_most(
        f"messages of a batch and a member, {last['machines']} to {first['machines']}", growth, MOST_GROWTH
    )


def torchft(trace: Trace, python: str, is_quick: bool, found: Measured) -> None:
    """The peer."""
    if reason := why_not(python):
        log(f"torchft is left out: {reason}")
        return
    row = torchft_row(trace, QUICK_CALM_S if is_quick else CALM_S, python)
    found.sections.append(Section("torchft over the same trace", [row]))


SECTIONS = ("run", "clock", "many", "torchft")


def asked_trace(asked: Namespace) -> Trace:
    """The trace of a file, or a generated one."""
    if asked.trace is not None:
        return read_trace(asked.trace, unit_s=asked.unit).in_places().scaled(asked.scale)
    return quick_trace() if asked.quick else generated(SPOT, asked.seed).scaled(asked.scale)


def measure(asked: Namespace) -> Findings:
    trace, found, made = asked_trace(asked), Measured(), None
    if asked.write_trace is not None:
        write_trace(trace, asked.write_trace)
        return Findings(
            [Section("Written", [{"machines": len(trace.machines), "events": len(trace.events)}])], []
        )
    sections = asked.section or SECTIONS
    if "run" in sections:
        made = run(trace, asked.quick, found)
    if "clock" in sections:
        clock(trace, made, found)
    if "many" in sections:
        many(asked.quick, found)
    if "torchft" in sections and asked.torchft:
        torchft(trace, asked.torchft, asked.quick, found)
    return Findings(found.sections, found.verdicts)


def _above_zero(text: str) -> float:
    if not 0 < float(text) < inf:
        raise ValueError(text)  # argparse makes a sentence of it
    return float(text)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--section", action="append", choices=SECTIONS, help="measure this alone; repeatable")
    parser.add_argument("--trace", type=Path, help="a file of arrivals and departures")
    parser.add_argument("--unit", type=_above_zero, help="seconds of the trace's unit of time")
    parser.add_argument("--scale", type=_above_zero, default=1.0, help="multiply all times of the trace")
    parser.add_argument("--seed", type=int, default=0, help="of a generated trace (0)")
    parser.add_argument("--write-trace", type=Path, help="write the trace to this file, and end")
    parser.add_argument("--torchft", help="an interpreter that has torchft, for the peer")


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="one loss and one return, and 100 members", options=options)
