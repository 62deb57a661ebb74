"""The engine compared with its limits, the simulator and torch.distributed.pipelining, with verdicts.

    python benchmarks/engine.py [--quick] [--json] [--hosts]

`bireme bench engine` runs it. It is as wide in a file as in a terminal. Progress goes to standard error.
All contenders take turns in one run; figures are medians, with the least and the greatest.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import benchmark
from benchmarks.engine_bench.effort import FULL, QUICK
from benchmarks.engine_bench.report import EngineReport, bench_engine
from benchmarks.engine_bench.table import engine_document, print_engine_report


@dataclass(frozen=True, slots=True)
class Found:
    report: EngineReport

    def document(self) -> dict[str, Any]:
        return engine_document(self.report)

    def show(self, console: Console) -> None:
        print_engine_report(self.report, console)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--hosts", action="store_true", help="also two replicas over a slow link; needs root")


def measure(asked: Namespace) -> Found:
    return Found(bench_engine(replace(QUICK if asked.quick else FULL, hosts=asked.hosts)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="one shape and the overhead", options=options)
