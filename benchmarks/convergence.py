"""What updating late costs in loss at equal steps, and which remedies help.

    python benchmarks/convergence.py [show] [--quick] [--json]  what the runs come to, in Markdown
    python benchmarks/convergence.py run [--until SECONDS]      train what is left first; stop at any time
    python benchmarks/convergence.py codecs [--until SECONDS]   train with codecs on boundaries first
    python benchmarks/convergence.py sums [--until SECONDS]     train with codecs in sums of gradients first
    python benchmarks/convergence.py pairs [--until SECONDS]    train with codecs of sums and more first
    python benchmarks/convergence.py replicas [--until SECONDS] train replicas that average weights first
    python benchmarks/convergence.py draw                       also its curves, to docs/pictures

One line of JSON for each finished run goes into docs/convergence.jsonl, so a study that was stopped continues
where it was. A run takes one thread, and a small one ten seconds of a processor; `--workers 2` has two of
them at a time. The smoke run also trains for a few steps, and keeps nothing of it.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import print_verdicts
from benchmarks.delay_study.codec_cells import codec_lines, codec_picture, codec_sweeps
from benchmarks.delay_study.delay_tables import delay_lines, law_lines, short_lines, time_lines
from benchmarks.delay_study.pair_cells import pair_lines, pair_sweeps
from benchmarks.delay_study.pictures import curves
from benchmarks.delay_study.promises import verdicts
from benchmarks.delay_study.replica_cells import replica_lines, replica_sweeps
from benchmarks.delay_study.replica_times import replica_time_lines
from benchmarks.delay_study.results import go_on, read
from benchmarks.delay_study.study import Cell, Known, Setting, run
from benchmarks.delay_study.sum_cells import sum_lines, sum_sweeps
from benchmarks.delay_study.sweeps import delay_sweeps
from benchmarks.delay_study.table import Row, rows
from bireme.report.markup import svg

SMOKE_STEPS = 10
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
STUDIES = {
    "run": delay_sweeps,
    "codecs": codec_sweeps,
    "sums": sum_sweeps,
    "pairs": pair_sweeps,
    "replicas": replica_sweeps,
}


def tables(found: Sequence[Row]) -> Iterator[Iterator[str]]:
    """As a document has them."""
    yield short_lines(found)
    yield delay_lines(found)
    yield replica_lines(found)
    yield replica_time_lines(found)
    yield codec_lines(found)
    yield sum_lines(found)
    yield pair_lines(found)
    yield time_lines()
    yield law_lines(found)


def draw(known: Known) -> None:
    """The curves of rules with AdamW, each at its best rate; and the loss of codecs against their bits."""
    named = (
        ("synchronous", Cell("synchronous")),
        ("2bw-fresh, 20 % without delay, m = 2d", Cell("fresh+warm-up")),
        ("2bw-fresh, m = 2d", Cell("2bw-fresh")),
        ("2bw-fresh, m = d", Cell("2bw-fresh", num_microbatches=4)),
        ("2bw, 20 % without delay", Cell("2bw+warm-up")),
        ("2bw", Cell("2bw")),
    )
    runs = [(name, run) for name, cell in named if (run := known.best(cell)) is not None]
    pictures = {
        "convergence": curves("Loss on held-out text, AdamW, 4 stages", runs),
        "codecs": codec_picture(rows(known)),
    }
    for name, picture in pictures.items():
        if picture is not None:
            (PICTURES / f"{name}.svg").write_text(svg(picture))


def plain(row: Row) -> dict[str, Any]:
    excess = None if row.excess is None else row.excess.median
    figures = {"rate": row.rate, "loss": row.loss, "excess": excess, "seeds": row.num_seeds}
    return {**asdict(row.cell), **figures, "penalty": row.penalty}


@dataclass(frozen=True, slots=True)
class Found:
    found: Sequence[Row]

    def document(self) -> dict[str, Any]:
        section = Section("Loss and steps", [plain(row) for row in self.found])
        return Findings([section], list(verdicts(self.found))).document()

    def show(self, console: Console) -> None:
        for table in tables(self.found):
            print("\n".join(table), end="\n\n")
        print_verdicts(list(verdicts(self.found)), console)


def options(parser: ArgumentParser) -> None:
    words = ("show", *STUDIES, "draw")
    parser.add_argument("verb", nargs="?", choices=words, help="show is the default")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no run begins")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each in a process of its own")


def measure(asked: Namespace) -> Found:
    if asked.verb in STUDIES:
        go_on(STUDIES[asked.verb], until_s=asked.until, num_workers=asked.workers)
    if asked.verb == "draw":
        draw(read())
    if asked.quick:
        setting = Setting(Cell("2bw-fresh", steps=SMOKE_STEPS), 1, 0)
        log(f"{setting.cell}: {run(setting).loss}")
    return Found(rows(read()))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="a few steps of training, and the runs that are kept", options=options)
