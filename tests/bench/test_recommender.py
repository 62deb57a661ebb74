"""The example of a recommender: what it claims of codecs holds in a short run."""

import runpy
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.graphs import captured_once
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

PATH = Path(__file__).parents[2] / "examples" / "recommender.py"
EXAMPLE = runpy.run_path(str(PATH))


def train(boundary: str, sums: str, steps: int) -> Any:
    own = f"recommender of {sha256(PATH.read_bytes()).hexdigest()}"
    fabric, graph = ThreadFabric(4), captured_once(own, EXAMPLE["recommender"], is_kept=True)
    train = EXAMPLE["train"]
    return EXAMPLE["together"](
        run_threads(4, lambda rank: train(fabric.of(rank), graph, boundary, sums, steps))
    )


@pytest.mark.long
def test_a_recommender_learns_as_much_with_fewer_bytes_on_both_links() -> None:
    dense, *_, both = (
        train(boundary, sums, 40) for boundary, sums in (EXAMPLE["WAYS"][0], EXAMPLE["WAYS"][3])
    )
    assert dense.auc > 0.7  # without what tables learn it is 0.64
    assert both.auc > dense.auc - 0.03
    assert dense.sum_bytes == dense.raw_sum_bytes == both.raw_sum_bytes
    assert dense.boundary_bytes == dense.raw_boundary_bytes
    assert both.sum_bytes < dense.sum_bytes / 8
    assert both.boundary_bytes < dense.boundary_bytes / 3
