"""What updating late costs in loss at equal steps, and which remedies help.

    python benchmarks/convergence.py [show] [--quick] [--json]  what the runs come to, in Markdown
    python benchmarks/convergence.py run [--until SECONDS]      go on with the study first; stop at any time
    python benchmarks/convergence.py codecs [--until SECONDS]   the same with codecs on borders
    python benchmarks/convergence.py replicas [--until SECONDS] the same with replicas that average weights
    python benchmarks/convergence.py draw                       also its curves, to docs/pictures

One line of JSON for each finished run goes into docs/convergence.jsonl, so a study that was stopped goes on
where it was. Takes one thread; a small run takes ten seconds of a processor. The smoke run trains for a few
steps besides, and keeps nothing of it.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.delay_study.bits_picture import Point, against_bits
from benchmarks.delay_study.clock import NetworkSpeed, Time, batch_time
from benchmarks.delay_study.coded import mean_bits
from benchmarks.delay_study.law import LAWS, law
from benchmarks.delay_study.picture import curves
from benchmarks.delay_study.replica_cells import replica_cells, replica_lines
from benchmarks.delay_study.study import Bank, Cell, Known, Run, Setting, next_setting, run
from benchmarks.delay_study.table import Excess, Row, rows
from benchmarks.delay_study.task import SIZES
from bireme.bench.document import Verdict, at_most, print_verdicts
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP, MEASURED, steps_for_one, unseen_share
from bireme.report.svg import svg
from bireme.schedule.rule import Rule

MOST_EXCESS = {"fresh+warm-up": 0.01, "2bw-fresh": 0.03}
"""Above the loss of the synchronous run, which docs/convergence.md promises of a rule."""
MOST_OFF = 0.01
SMOKE_STEPS = 10
BITS_TITLE = (
    "Loss over that of the synchronous run without codecs; larger model, AdamW, 2bw-fresh with its start"
)
SEEN_EXCESS = 0.001
"""The losses without and through a codec that lie nearer to each other are one point."""
BITS_SERIES = ("without the codec", "through the codec")
BITS_PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "codecs.svg"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "convergence.svg"
RESULTS = Path(__file__).parent.parent / "docs" / "convergence.jsonl"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A cell to be searched, from which learning rate on and with how many seeds. One that is not searched
    has this learning rate alone.
    """

    cell: Cell
    first_rung: int
    num_seeds: int = 1
    is_searched: bool = True


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
    yield Sweep(Cell("fresh+short warm-up"), 2, 3)
    yield from optimizers()
    yield from shapes()
    yield Sweep(Cell("synchronous", steps=1200), 1)
    yield Sweep(Cell("2bw-fresh", steps=1200), 1)
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


def optimizers() -> Iterator[Sweep]:
    """What the engine does by default, and what it costs in steps, with the other optimisers."""
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for m in (8, 4):
            yield Sweep(Cell("fresh+warm-up", optimizer, num_microbatches=m), rung, 3)
        for steps in (240, 180, 120, 60):
            yield Sweep(Cell("synchronous", optimizer, steps=steps), rung)
        yield Sweep(Cell("2bw+warm-up", optimizer), rung)
        yield Sweep(Cell("2bw-fresh", optimizer, num_microbatches=4), rung, 3)


def shapes() -> Iterator[Sweep]:
    """What the engine does by default on other pipelines, models and banks."""
    for d in (2, 4, 8):
        for of_stages in (1, 2, 4):
            # Those of four stages are above, and a batch of sixteen windows makes no more micro-batches.
            if (d, of_stages) not in ((4, 1), (4, 2), (8, 4)):
                cell = Cell("fresh+warm-up", num_stages=d, num_microbatches=of_stages * d)
                yield Sweep(cell, 2, 1 if of_stages == 4 else 3)
    yield Sweep(Cell("fresh+warm-up", lookahead=3), 2, 3)
    yield Sweep(Cell("synchronous", bank=Bank.BFLOAT16), 1, 3)
    for m in (8, 4):
        yield Sweep(Cell("fresh+warm-up", bank=Bank.BFLOAT16, num_microbatches=m), 2, 3)
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for rule in ("synchronous", "fresh+warm-up"):
            yield Sweep(Cell(rule, optimizer, bank=Bank.BFLOAT16), rung)
    yield Sweep(Cell("synchronous", size="larger"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", size="larger"), 1, 3)
    yield Sweep(Cell("fresh+warm-up", size="larger", num_microbatches=4), 1)
    for optimizer, rung in (("muon", 4), ("sgd", 1)):
        for rule in ("synchronous", "fresh+warm-up"):
            yield Sweep(Cell(rule, optimizer, size="larger"), rung)
    for d in (2, 8):
        for optimizer, rung in (("muon", 4), ("sgd", 1)):
            yield Sweep(Cell("fresh+warm-up", optimizer, num_stages=d, num_microbatches=2 * d), rung)


CODED = (
    ("int6", 0.0),
    ("keep:0.5:4", 0.06),
    ("keep:0.125:8", 0.05),
    ("keep:0.25:8", 0.06),
    ("int8/int4", 0.0),
    ("keep:0.25:4", 0.2),
)
"""Codecs and the last share of a run with int8, so that a value has 6.5, 3 or 2 bits over the run."""

NUM_REPEATED = 3
"""So many of them, one for each number of bits, get three seeds and a search."""


def codec_sweeps() -> Iterator[Sweep]:
    """Codecs on borders, what tells most first: the larger model under 2bw-fresh with its start.

    All codecs come at the best rate of no codec before any of them is searched.
    """
    larger = [Cell("fresh+warm-up", size="larger", codec=word, ending=end) for word, end in CODED]
    for cell in larger:
        yield Sweep(cell, 1, is_searched=False)
    for cell in larger[:NUM_REPEATED]:
        yield Sweep(cell, 1, 3, is_searched=False)
    for cell in larger[:NUM_REPEATED]:
        yield Sweep(cell, 1, 3)
    others = [
        Cell("synchronous", codec="keep:0.25:8", ending=0.06),
        Cell("synchronous", codec="keep:0.25:8"),
        Cell("fresh+warm-up", "muon", codec="keep:0.25:8", ending=0.06),
    ]
    for cell in others:
        yield Sweep(cell, 4 if cell.optimizer == "muon" else 1, is_searched=False)
    for word, ending in (*CODED, ("int8", 0.0), ("int5", 0.0), ("int4", 0.0)):
        for rule in ("synchronous", "fresh+warm-up"):
            yield Sweep(Cell(rule, codec=word, ending=ending), 1, 3)
    for word, ending in CODED[:NUM_REPEATED]:
        yield Sweep(Cell("fresh+warm-up", "muon", codec=word, ending=ending), 4, 3)


def replica_sweeps() -> Iterator[Sweep]:
    """Replicas that average weights."""
    return (Sweep(cell, rung, 3) for cell, rung in replica_cells())


STUDIES = {"run": sweeps, "codecs": codec_sweeps, "replicas": replica_sweeps}


def read() -> Known:
    known = Known()
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            known.add(Run.from_line(line))
    return known


def waiting(known: Known, study: Callable[[], Iterator[Sweep]]) -> Setting | None:
    for sweep in study():
        found = next_setting(
            sweep.cell,
            known,
            first_rung=sweep.first_rung,
            num_seeds=sweep.num_seeds,
            is_searched=sweep.is_searched,
        )
        if found is not None:
            return found
    return None


def go_on(until_s: float, study: Callable[[], Iterator[Sweep]]) -> None:
    begin = time.monotonic()
    known = read()
    while time.monotonic() - begin < until_s:
        setting = waiting(known, study)
        if setting is None:
            return
        done = run(setting)
        with RESULTS.open("a") as file:
            file.write(done.to_line() + "\n")
        known.add(done)
        log(f"{setting.cell} rung {setting.rung} seed {setting.seed}: {done.loss}")


def show(found: Sequence[Row]) -> None:
    """Tables as a document has them."""
    print("| what the engine does, on four stages | AdamW | Muon | SGD with momentum |")
    print("|---|---|---|---|")
    for line in in_short(found):
        print(line)
    print()
    print("| rule | optimiser | d | m | model | banks | L | steps | rate | loss | excess | seeds | penalty |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in found:
        if row.cell.codec == "none" and row.cell.agreement == "all":
            print(row_text(row))
    print()
    for line in replica_lines(found):
        print(line)
    print()
    for line in codec_lines(found):
        print(line)
    print()
    print("| schedule | d | m | network | lookahead | batch | steps for one | time to the same loss |")
    print("|---|---|---|---|---|---|---|---|")
    for line in times():
        print(line)
    print()
    print("| rule | start | optimiser | steps for one |")
    print("|---|---|---|---|")
    for line in laws(found):
        print(line)


def in_short(found: Sequence[Row]) -> Iterator[str]:
    """The excess of each rule that the engine has."""
    excesses = {row.cell: row.excess for row in found}
    for (rule, starts), name in LAWS.items():
        for m in (8,) if rule is Rule.DELAYED else (4, 8):
            cells = [
                over_text(excesses.get(Cell(name, one, num_microbatches=m)))
                for one in ("adamw", "muon", "sgd")
            ]
            schedule = "2bw" if rule is Rule.DELAYED else f"2bw-fresh, m = {'d' if m == 4 else '2d'}"
            start = ", a fifth of the run before it under 1f1b" if starts else ""
            yield f"| {schedule}{start} | {' | '.join(cells)} |"


def codec_lines(found: Sequence[Row]) -> Iterator[str]:
    """The runs with codecs on borders: bits a value, and the loss without the codec and through it."""
    names = "codec, last part in int8, bits (mean of both ways), rule, optimiser, model, steps, loss, excess"
    heads = [*names.split(", "), "through the codec", "seeds", "penalty"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in found:
        cell = row.cell
        if cell.codec != "none":
            seeds = 0 if row.excess is None else row.excess.num_seeds
            through = "" if row.through is None else f"{100 * row.through:+.1f} %"
            steps = "" if row.penalty is None else f"{row.penalty:.2f}"
            yield (
                f"| {cell.codec} | {cell.ending:g} | {bits_of(cell):.2f} | {cell.rule} "
                f"| {cell.optimizer} | {cell.size} | {cell.steps} | {row.loss:.3f} | {over_text(row.excess)} "
                f"| {through} | {seeds} | {steps} |"
            )


def bits_of(cell: Cell) -> float:
    return mean_bits(cell.codec, cell.ending, SIZES[cell.size].config.width)


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


def laws(found: Sequence[Row]) -> Iterator[str]:
    """What plans count, by rule, start and optimiser; tests hold `bireme.plan.penalties` to it."""
    for (rule, starts), name in LAWS.items():
        schedule = "2bw" if rule is Rule.DELAYED else "2bw-fresh"
        for optimizer in MEASURED[rule, starts]:
            steps = law(name, optimizer, found)
            start = "a fifth without delay" if starts else "delayed from the first step"
            text = "?" if steps is None else f"{steps.seen:.2f}"
            if steps is not None and rule is Rule.FRESH:
                text += f" + {steps.unseen:.2f} · unseen"
            yield f"| {schedule} | {start} | {optimizer} | {text} |"


RULES = {
    "1f1b": Rule.SYNCHRONOUS,
    "zb-h1": Rule.SYNCHRONOUS,
    "2bw": Rule.DELAYED,
    "2bw-fresh": Rule.FRESH,
}


def times() -> Iterator[str]:
    """How long each schedule takes to a loss with AdamW: its batches, and those of a start under 1f1b, times
    the steps that plans count.
    """
    for speed, num_stages, of_stages in product(NetworkSpeed, (4, 8), (1, 2, 4)):
        m = of_stages * num_stages

        def time_of(schedule: str, speed: NetworkSpeed = speed, d: int = num_stages, m: int = m) -> Time:
            return batch_time(schedule, d, m, speed, may_look_ahead=speed is NetworkSpeed.SLOW)

        drained = time_of("1f1b").batch
        for schedule, rule in RULES.items():
            time = time_of(schedule)
            for starts in (False, True) if rule is not Rule.SYNCHRONOUS else (False,):
                unseen = unseen_share(num_stages, m, time.lookahead)
                steps = steps_for_one(
                    rule, "adamw", delay_warmup=DEFAULT_DELAY_WARMUP if starts else 0.0, unseen=unseen
                )
                batch = (
                    (1 - DEFAULT_DELAY_WARMUP) * time.batch + DEFAULT_DELAY_WARMUP * drained
                    if starts
                    else time.batch
                )
                yield (
                    f"| {schedule}{' from a fifth on' if starts else ''} | {num_stages} | {m} "
                    f"| {speed.name.lower()} | {time.lookahead} | {batch:.3f} | {steps:.2f} "
                    f"| {batch * steps:.2f} |"
                )


def draw(known: Known) -> None:
    """The curves of rules with AdamW, each at its best rate."""
    named = (
        ("synchronous", Cell("synchronous")),
        ("2bw-fresh, a fifth without delay, m = 2d", Cell("fresh+warm-up")),
        ("2bw-fresh, m = 2d", Cell("2bw-fresh")),
        ("2bw-fresh, m = d", Cell("2bw-fresh", num_microbatches=4)),
        ("2bw, a fifth without delay", Cell("2bw+warm-up")),
        ("2bw", Cell("2bw")),
    )
    runs = [(name, run) for name, cell in named if (run := known.best(cell)) is not None]
    PICTURE.write_text(svg(curves("Loss on held-out text, AdamW, 4 stages", runs)))
    points = [*codec_points(rows(known))]
    if points:
        BITS_PICTURE.write_text(svg(against_bits(BITS_TITLE, BITS_SERIES, points)))


def codec_points(found: Sequence[Row]) -> Iterator[Point]:
    """The codecs of the larger model with AdamW under 2bw-fresh with its start: without the codec at the
    end, and through the codec that the run ended with.
    """
    for row in found:
        cell, excess = row.cell, row.excess
        if (cell.size, cell.rule, cell.optimizer) != ("larger", "fresh+warm-up", "adamw") or excess is None:
            continue
        if cell.codec == "none" and cell.num_microbatches == 8:
            yield Point("none, 32 bits", 0, 10.0, excess.median, excess.least, excess.greatest)
        elif cell.codec != "none":
            name = f"{cell.codec}, int8 at the end" if cell.ending else cell.codec
            yield Point(name, 0, bits_of(cell), excess.median, excess.least, excess.greatest)
            if row.through is not None and abs(row.through - excess.median) > SEEN_EXCESS:
                yield Point(name, 1, bits_of(cell), row.through, row.through, row.through)


def verdicts(found: Sequence[Row]) -> Iterator[Verdict]:
    """What docs/convergence.md promises, and how near plans come to what was measured."""
    excesses = {row.cell: row.excess for row in found}
    for name, most in MOST_EXCESS.items():
        for optimizer in ("adamw", "muon", "sgd"):
            for m in (4, 8):
                excess = excesses.get(Cell(name, optimizer, num_microbatches=m))
                if excess is not None:
                    words = f"{name}, {optimizer}, m = {m}: loss above that of the synchronous run"
                    yield at_most(words, excess.median, most)
    for (rule, starts), name in LAWS.items():
        for optimizer, counted in MEASURED[rule, starts].items():
            steps = law(name, optimizer, found)
            if steps is not None:
                off = max(abs(counted.at(unseen) - steps.at(unseen)) for unseen in (0.0, 1.0))
                yield at_most(f"{name}, {optimizer}: steps for one that plans count, off by", off, MOST_OFF)


def plain(row: Row) -> dict[str, Any]:
    excess = None if row.excess is None else row.excess.median
    seeds = 0 if row.excess is None else row.excess.num_seeds
    figures = {"rate": row.rate, "loss": row.loss, "excess": excess, "seeds": seeds, "penalty": row.penalty}
    return {**asdict(row.cell), **figures}


@dataclass(frozen=True, slots=True)
class Found:
    found: Sequence[Row]

    def document(self) -> dict[str, Any]:
        section = Section("Loss and steps", [plain(row) for row in self.found])
        return Findings([section], list(verdicts(self.found))).document()

    def show(self, console: Console) -> None:
        show(self.found)
        print()
        print_verdicts(list(verdicts(self.found)), console)


def options(parser: ArgumentParser) -> None:
    words = ("show", *STUDIES, "draw")
    parser.add_argument("verb", nargs="?", choices=words, help="show is the default")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no run begins")


def measure(asked: Namespace) -> Found:
    if asked.verb in STUDIES:
        go_on(asked.until, STUDIES[asked.verb])
    if asked.verb == "draw":
        draw(read())
    if asked.quick:
        setting = Setting(Cell("2bw-fresh", steps=SMOKE_STEPS), 1, 0)
        log(f"{setting.cell}: {run(setting).loss}")
    return Found(rows(read()))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="a few steps of training, and the runs that are kept", options=options)
