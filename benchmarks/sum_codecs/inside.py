"""All contenders, one after the other, in a network of their own; prints what came of each as JSON.

Both replicas are in one network namespace of Linux and talk over its loopback device, which both directions
share: it gets twice the rate of the link that it stands for.
"""

import json
import subprocess
import sys
from dataclasses import asdict

from benchmarks.sum_codecs.contender import REPLICAS, train
from bireme.runtime.launch import launch

BURST_BYTES, MOST_WAIT = 65536 * 2, "2s"
TIMEOUT_S = 120.0


def main() -> None:
    """`inside MBIT SEED,… STEPS CODEC…`."""
    mbit, seeds, steps, *codecs = sys.argv[1:]
    _shape(2 * float(mbit))
    found = []
    for seed in map(int, seeds.split(",")):
        for codec in codecs:
            sys.stderr.write(f"{codec}, seed {seed}\n")
            outcomes = launch(
                train, REPLICAS, codec, seed, int(steps), timeout_s=TIMEOUT_S, threads_per_process=1
            )
            found.append(asdict(outcomes[0]))
    print(json.dumps(found))


def _shape(mbit: float) -> None:
    for words in (
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {mbit:g}mbit burst {BURST_BYTES} latency {MOST_WAIT}",
    ):
        subprocess.run(words.split(), check=True)


if __name__ == "__main__":
    main()
