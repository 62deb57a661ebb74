"""The example of a recommender: what it claims of codecs holds in a short run."""

import runpy
from pathlib import Path

from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "recommender.py"))


def test_a_recommender_learns_as_much_with_a_tenth_of_the_bytes() -> None:
    found = {}
    for sums in ("none", EXAMPLE["SUM_CODEC"]):
        fabric = ThreadFabric(4, timeout_s=60.0)
        found[sums] = run_threads(4, lambda rank, f=fabric, s=sums: EXAMPLE["train"](f.of(rank), s, 60))[0]
    dense, coded = found["none"], found[EXAMPLE["SUM_CODEC"]]
    assert dense.auc > 0.6
    assert coded.auc > dense.auc - 0.02
    assert dense.sum_bytes == dense.raw_sum_bytes == coded.raw_sum_bytes
    assert coded.sum_bytes < dense.sum_bytes / 10
