"""The engine beside its limits, the simulator and torch.distributed.pipelining, with verdicts.

    python benchmarks/engine.py [--quick] [--hosts]

The same as `bireme bench engine`, but as wide in a file as in a terminal. Progress goes to standard error.
All contenders take turns in one run; figures are medians, with the least and the greatest.
"""

import argparse
from dataclasses import replace

from rich.console import Console

from bireme.bench.effort import FULL, QUICK
from bireme.bench.engine import bench_engine
from bireme.bench.table import print_engine_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one shape and the overhead")
    parser.add_argument("--hosts", action="store_true", help="also two replicas over a slow link; needs root")
    asked = parser.parse_args()
    report = bench_engine(replace(QUICK if asked.quick else FULL, hosts=asked.hosts))
    print_engine_report(report, Console(width=170))


if __name__ == "__main__":
    main()
