"""One task of `make gpu` in a process of its own: prints its rows as the last line.

python -m benchmarks.on_gpu.work TASK [--quick] [--on cpu]
"""

import argparse
import json

from benchmarks.on_gpu.capabilities import capabilities
from benchmarks.on_gpu.peers import loop, peer
from benchmarks.on_gpu.tasks import card, cards, units

TASKS = {
    "capabilities": capabilities,
    "card": card,
    "cards": cards,
    "units": units,
    "loop": loop,
    "peer": peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--on", default="cuda", choices=("cuda", "cpu"), help="cpu tries the task itself")
    asked = parser.parse_args()
    print(json.dumps(TASKS[asked.task](asked.on, quick=asked.quick)))


if __name__ == "__main__":
    main()
