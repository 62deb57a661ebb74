"""Shares that follow speed: unequal replicas on emulated devices, many weak ones on the simulator's clock.

    python benchmarks/balance.py [--quick] [--json]

(a) Two replicas of two stages at speeds 1 : 10, with equal shares and with shares that follow.
(b) Four replicas, one of which drops to a third of its speed at step 50 and recovers at step 150; without
chance, and with batches that take up to 20 % longer or shorter. What is possible is what the same batches
take, chance and all, for one who knows every speed beforehand.
(c) A host and 24 weak devices, 33 and 3.1 images a second, with a sum of gradients at each step: simulated.
Joules per image follow from watts that you give, or from assumed ones.

(a) and (b) run in the engine, in processes that sleep where they would compute. Each policy of (b) is also
compared on the simulator's clock over many draws of chance.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import Spread, Verdict, at_least
from benchmarks.replica_speeds.balanced_run import Fixed, Following, Informed, ReplicaCost, balanced_run
from benchmarks.replica_speeds.unequal import Trained, Trial, possible_s, train_unequal
from bireme.balance import Policy, limits_of
from bireme.plan.forecast import joules_per_sample, total_watts

LEAST_OF_SUM, LEAST_OF_POSSIBLE = 0.9, 0.9
FAST_S = 0.003
"""Of a sample on a fast device. A batch takes a quarter of a second, so the engine's own time is little."""
SOON = 10
"""Batches after a change of speed within which shares must have followed."""
LEAST_BETWEEN = 20
"""Batches between two changes of shares while no speed changes."""
DROP, BACK, END, QUIET = 50, 150, 220, 10
HOST, WEAK, NUM_WEAK = 33.0, 3.1, 24
"""Images per second of the host and of a weak device, and how many of these there are."""
HOST_BATCH, WEAK_BATCH = 315, 25
HOST_WATTS, WEAK_WATTS = 300.0, 12.0
"""Assumed: a host with one processor at work, and a drive that computes. Nothing published says them."""
SYNC_S = 0.3
"""A sum of 14 MB of gradients, there and back, at 100 MB/s."""
LEAST_TIMES, WANTED_TIMES = 2.7, 2.9


def one_to_ten(quick: bool) -> list[dict[str, Any]]:
    costs = (ReplicaCost(10 * FAST_S), ReplicaCost(FAST_S))
    rows = []
    for name, policy, num_batches in (("equal", None, 12), ("following", Policy(), 30 if quick else 60)):
        about = f"1 : 10, {name} shares"
        trial = Trial(about, costs, 88, num_batches, depth=2, schedule="2bw", policy=policy)
        trained = train_unequal(trial)
        begin, end = num_batches // 2, num_batches - 3
        rate, ideal = trained.samples_per_s(begin, end), sum(1 / one.sample_s for one in costs)
        rows.append(
            {
                "shares": name,
                "last_shares": " + ".join(map(str, trained.shares[-1])),
                "samples_per_s": rate,
                "sum_of_speeds": ideal,
                "share_of_sum": rate / ideal,
                "changes": len(trained.changes),
            }
        )
    return rows


def dropping(jitter: float, sample_s: float = FAST_S) -> tuple[ReplicaCost, ...]:
    usual = ReplicaCost(sample_s, jitter=jitter)
    return (replace(usual, speeds=((DROP, 1 / 3), (BACK, 1.0))), usual, usual, usual)


def spans(end: int) -> tuple[tuple[str, int, int], ...]:
    found = (
        ("before", QUIET, DROP),
        ("slow", DROP + SOON, BACK),
        ("recovered", BACK + SOON, END),
    )
    return tuple(one for one in found if one[2] <= end)


def least_between(changes: tuple[int, ...]) -> int:
    """The fewest batches between two changes that no change of speed lies before."""
    caused = [next((b for b in changes if b >= at), -1) for at in (DROP, BACK)]
    gaps = [after - before for before, after in pairwise(changes) if after not in caused]
    return min(gaps, default=END)


def one_drops(quick: bool) -> list[dict[str, Any]]:
    rows = []
    end = BACK if quick else END
    for jitter in (0.0, 0.2)[: 1 if quick else 2]:
        trial = Trial("", dropping(jitter), 320, end)
        for name, policy in (("equal", None), ("following", Policy())):
            if quick and policy is None:
                continue
            asked = replace(
                trial, name=f"one of four drops, chance {jitter:.0%}, {name} shares", policy=policy
            )
            trained: Trained = train_unequal(asked)
            row: dict[str, Any] = {"jitter": jitter, "shares": name}
            for span, begin, stop in spans(end):
                row[f"{span}_of_possible"] = possible_s(asked, begin, stop) / trained.seconds(begin, stop)
            row |= {"changes": len(trained.changes), "least_between": least_between(trained.changes)}
            rows.append(row)
    return rows


def policies(num_draws: int) -> list[dict[str, Any]]:
    """The same on the simulator's clock, for several rules over many draws of chance."""
    rows = []
    for jitter in (0.0, 0.2):
        costs = dropping(jitter, 0.01)
        limits = limits_of(4, [320] * 4)
        for name in ("equal", "following", "following, margin 0", "following, any time"):
            found: dict[str, list[float]] = {span: [] for span, _, _ in spans(END)}
            changes, between = [], []
            for seed in range(num_draws):
                policy = Policy(margin=0.0 if name.endswith("0") else 0.05, every=4 if "any" in name else 20)
                rule = Fixed((80,) * 4) if name == "equal" else Following((80,) * 4, limits, policy, 3)
                run = balanced_run(costs, END, rule, seed=seed)
                informed = balanced_run(costs, END, Informed(costs, 320, limits), seed=seed)
                for span, begin, end in spans(END):
                    found[span].append(run.samples_per_s(begin, end) / informed.samples_per_s(begin, end))
                changes.append(float(len(run.changes)))
                between.append(float(least_between(run.changes)))
            row: dict[str, Any] = {"jitter": jitter, "shares": name}
            row |= {f"{span}_of_possible": Spread.of(one) for span, one in found.items()}
            rows.append(row | {"changes": Spread.of(changes), "least_between": min(between)})
    return rows


def many_weak(host_watts: float, weak_watts: float) -> list[dict[str, Any]]:
    watts = total_watts((host_watts, *(weak_watts,) * NUM_WEAK))
    rows = []
    batch_size = HOST_BATCH + NUM_WEAK * WEAK_BATCH
    for jitter in (0.0, 0.05):
        costs = (ReplicaCost(1 / HOST, jitter=jitter), *(ReplicaCost(1 / WEAK, jitter=jitter),) * NUM_WEAK)
        limits = limits_of(1, [batch_size] * len(costs))
        equal, left = divmod(batch_size, len(costs))
        first = tuple(equal + (place < left) for place in range(len(costs)))
        run = balanced_run(costs, 60, Following(first, limits, Policy(), 2), sync_s=SYNC_S)
        rate = run.samples_per_s(30)
        row: dict[str, Any] = {
            "jitter": jitter,
            "images_per_s": rate,
            "times_the_host": rate / HOST,
            "sum_of_speeds": HOST + NUM_WEAK * WEAK,
            "host_share": run.shares[-1][0],
            "weak_share": run.shares[-1][1],
        }
        row |= {"host_watts": host_watts, "weak_watts": weak_watts}
        row["joules_per_image"] = joules_per_sample(watts, rate)
        row["joules_per_image_of_host_alone"] = joules_per_sample(host_watts, HOST)
        rows.append(row)
    return rows


def verdicts(a: list[dict[str, Any]], b: list[dict[str, Any]], c: list[dict[str, Any]]) -> Iterator[Verdict]:
    reached = next(row["share_of_sum"] for row in a if row["shares"] == "following")
    yield at_least("(a) 1 : 10, shares that follow, of the sum of speeds", reached, LEAST_OF_SUM)
    for row in b:
        if row["shares"] != "following":
            continue
        what = f"(b) chance {row['jitter']:.0%}"
        for span in ("slow", "recovered"):
            if f"{span}_of_possible" in row:
                yield at_least(
                    f"{what}, {span}, of what is possible", row[f"{span}_of_possible"], LEAST_OF_POSSIBLE
                )
        yield at_least(f"{what}, batches between changes", row["least_between"], LEAST_BETWEEN)
    for row in c:
        what = f"(c) host and {NUM_WEAK} weak devices, chance {row['jitter']:.0%}, times the host"
        yield at_least(what, row["times_the_host"], LEAST_TIMES)
        yield at_least(f"{what}, wanted", row["times_the_host"], WANTED_TIMES)


def options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--host-watts", type=float, default=HOST_WATTS, help="power of the host in (c), for joules per image"
    )
    parser.add_argument("--weak-watts", type=float, default=WEAK_WATTS, help="power of a weak device in (c)")


def measure(asked: Namespace) -> Findings:
    a, b = one_to_ten(asked.quick), one_drops(asked.quick)
    c = many_weak(asked.host_watts, asked.weak_watts)
    sections = [
        Section("(a) Two replicas of two stages at speeds 1 : 10", a),
        Section(f"(b) One of four replicas: a third of its speed from step {DROP} to {BACK}", b),
        Section("(b) on the simulator's clock", policies(5 if asked.quick else 50)),
        Section("(c) A host and many weak devices, simulated", c),
    ]
    return Findings(sections, list(verdicts(a, b, c)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="fewer batches, and (b) without chance and recovery", options=options)
