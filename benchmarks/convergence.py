"""What updating late costs in loss at equal steps, and which remedies help.

    python -m benchmarks.convergence run [--until SECONDS]     go on with the study; stop at any time
    python -m benchmarks.convergence show                      tables of what is there, in Markdown
    python -m benchmarks.convergence draw                      curves of it, to docs/pictures/convergence.svg

One line of JSON for each finished run goes into docs/convergence.jsonl, so a study that was stopped goes on
where it was. Takes one thread; a small run takes ten seconds of a processor.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from bireme.bench.convergence.clock import NetworkSpeed, batch_time
from bireme.bench.convergence.picture import curves
from bireme.bench.convergence.study import Bank, Cell, Known, Run, Setting, next_setting, run
from bireme.bench.convergence.table import Excess, Row, rows
from bireme.report.svg import svg

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "convergence.svg"
RESULTS = Path(__file__).parent.parent / "docs" / "convergence.jsonl"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A cell to be searched, from which learning rate on and with how many seeds."""

    cell: Cell
    first_rung: int
    num_seeds: int = 1


def sweeps() -> Iterator[Sweep]:
    """The study, what tells most first."""
    yield Sweep(Cell("synchronous"), 2, 3)
    for m in (8, 4):
        yield Sweep(Cell("2bw-fresh", num_microbatches=m), 1, 3)
    yield Sweep(Cell("fresh+switch"), 2, 3)
    yield Sweep(Cell("2bw"), 0, 3)
    for rule in ("fresh-last", "repeat", "2bw+switch"):
        yield Sweep(Cell(rule), 1)
    for steps in (240, 180, 120):
        yield Sweep(Cell("synchronous", steps=steps), 2)
    yield Sweep(Cell("synchronous", "muon"), 4, 3)
    yield Sweep(Cell("synchronous", "sgd"), 2, 3)
    for rule in ("2bw-fresh", "2bw", "fresh+switch"):
        yield Sweep(Cell(rule, "muon"), 4)
        yield Sweep(Cell(rule, "sgd"), 2)
    for optimizer, rung in (("muon", 4), ("sgd", 2)):
        yield Sweep(Cell("2bw-fresh", optimizer, num_microbatches=4), rung)
    for rule in ("2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, num_microbatches=16), 1, 3)
    yield Sweep(Cell("2bw-fresh", lookahead=3), 1)
    yield Sweep(Cell("2bw+feedback"), 1)
    yield Sweep(Cell("momentum"), 1)
    for d, m in ((8, 16), (2, 4)):
        yield Sweep(Cell("2bw-fresh", num_stages=d, num_microbatches=m), 1)
    yield Sweep(Cell("2bw-fresh", num_stages=1), 1)
    for rule in ("2bw", "2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, "muon"), 4, 3)
    yield Sweep(Cell("fresh+warm-up"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", num_microbatches=4), 1, 3)
    yield Sweep(Cell("fresh+switch+warm-up"), 2)
    for rule, rung in (("synchronous", 1), ("2bw-fresh", 1), ("2bw", 0)):
        yield Sweep(Cell(rule, size="larger"), rung)
    yield Sweep(Cell("2bw+warm-up"), 1)
    for rule in ("synchronous", "2bw-fresh"):
        yield Sweep(Cell(rule, bank=Bank.BFLOAT16), 1)
    for rule in ("2bw-fresh", "fresh+switch"):
        yield Sweep(Cell(rule, "sgd"), 2, 3)
    yield Sweep(Cell("synchronous", steps=1200), 1)
    yield Sweep(Cell("2bw-fresh", steps=1200), 1)
    for steps in (180, 120):
        yield Sweep(Cell("synchronous", "muon", steps=steps), 4)
    yield Sweep(Cell("2bw", steps=1200), 0)
    yield Sweep(Cell("synchronous", steps=600), 1)
    yield Sweep(Cell("fresh+switch", size="larger"), 1)
    yield Sweep(Cell("fresh+switch", num_microbatches=16, lookahead=3), 1)
    yield Sweep(Cell("2bw-fresh", num_stages=8, num_microbatches=8), 1)
    yield Sweep(Cell("fresh+switch", bank=Bank.BFLOAT16), 1)
    for rule in ("synchronous", "2bw-fresh", "fresh+switch", "2bw"):
        yield Sweep(Cell(rule, "muon, slow rest"), 4)
    yield Sweep(Cell("2bw-fresh", "muon, slow rest", num_microbatches=4), 4)
    for rule in ("2bw", "last-gradient", "fresh-zero"):
        yield Sweep(Cell(rule, num_microbatches=4 if rule == "fresh-zero" else 8), 1)


def read() -> Known:
    known = Known()
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            known.add(Run.from_line(line))
    return known


def waiting(known: Known) -> Setting | None:
    for sweep in sweeps():
        found = next_setting(sweep.cell, known, first_rung=sweep.first_rung, num_seeds=sweep.num_seeds)
        if found is not None:
            return found
    return None


def go_on(until_s: float) -> None:
    begin = time.monotonic()
    known = read()
    while time.monotonic() - begin < until_s:
        setting = waiting(known)
        if setting is None:
            return
        done = run(setting)
        with RESULTS.open("a") as file:
            file.write(done.to_line() + "\n")
        known.add(done)
        print(f"{setting.cell} rung {setting.rung} seed {setting.seed}: {done.loss}", file=sys.stderr)


def show(known: Known) -> None:
    """Tables as a document has them."""
    found = rows(known)
    print("| rule | optimiser | d | m | model | banks | L | steps | rate | loss | excess | seeds | penalty |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in found:
        print(row_text(row))
    print()
    print("| schedule | d | m | network | lookahead | batch | steps for one | time to the same loss |")
    print("|---|---|---|---|---|---|---|---|")
    for time_to in times(found):
        print(time_to)


def row_text(row: Row) -> str:
    cell = row.cell
    rate = f"{row.rate:.2g}{' (?)' if row.is_at_edge else ''}"
    shape = (
        f"{cell.num_stages} | {cell.num_microbatches} | {cell.size} | {cell.bank.value} | {cell.lookahead}"
    )
    seeds = 0 if row.excess is None else row.excess.num_seeds
    steps = "" if row.penalty is None else f"{row.penalty:.2f}"
    text = f"{cell.steps} | {rate} | {row.loss:.3f} | {over_text(row.excess)} | {seeds} | {steps}"
    return f"| {cell.rule} | {cell.optimizer} | {shape} | {text} |"


def over_text(excess: Excess | None) -> str:
    if excess is None:
        return ""
    if excess.num_seeds == 1:
        return f"{100 * excess.median:+.1f} %"
    return f"{100 * excess.median:+.1f} % ({100 * excess.least:+.1f} to {100 * excess.greatest:+.1f})"


def times(found: Sequence[Row]) -> Iterator[str]:
    """How long each schedule takes to a loss with AdamW, by its batches and by the steps of its rule."""
    rules = {"1f1b": "synchronous", "zb-h1": "synchronous", "2bw": "2bw", "2bw-fresh": "2bw-fresh"}
    for speed, num_stages, of_stages in product(NetworkSpeed, (4, 8), (1, 2, 4)):
        m = of_stages * num_stages
        for schedule, rule in rules.items():
            may_look_ahead = speed is NetworkSpeed.SLOW
            time = batch_time(schedule, num_stages, m, speed, may_look_ahead=may_look_ahead)
            steps = steps_for_one(found, rule, of_stages, time.lookahead > 0)
            yield (
                f"| {schedule} | {num_stages} | {m} | {speed.name.lower()} | {time.lookahead} "
                f"| {time.batch:.3f} | {'?' if steps is None else f'{steps:.2f}'} "
                f"| {'?' if steps is None else f'{time.batch * steps:.2f}'} |"
            )


def steps_for_one(found: Sequence[Row], rule: str, of_stages: int, looks_ahead: bool) -> float | None:
    """As measured on four stages with as many micro-batches to a stage; with a lookahead, with two."""
    if rule == "synchronous":
        return 1.0
    cell = Cell(rule, num_microbatches=8 if rule == "2bw" else 4 * of_stages)
    if looks_ahead and rule != "2bw":
        cell = replace(cell, num_microbatches=8, lookahead=3)
    return next((row.penalty for row in found if row.cell == cell), None)


def draw(known: Known) -> None:
    """The curves of rules with AdamW, each at its best rate."""
    named = (
        ("synchronous", Cell("synchronous")),
        ("2bw-fresh with switch, m = 2d", Cell("fresh+switch")),
        ("2bw-fresh, m = 2d", Cell("2bw-fresh")),
        ("2bw-fresh, m = d", Cell("2bw-fresh", num_microbatches=4)),
        ("repeated steps", Cell("repeat")),
        ("2bw", Cell("2bw")),
    )
    runs = [(name, run) for name, cell in named if (run := known.best(cell)) is not None]
    PICTURE.write_text(svg(curves("Loss on held-out text, AdamW, 4 stages", runs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("verb", choices=("run", "show", "draw"))
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no run begins")
    asked = parser.parse_args()
    if asked.verb == "run":
        go_on(asked.until)
    elif asked.verb == "show":
        show(read())
    else:
        draw(read())


if __name__ == "__main__":
    main()
