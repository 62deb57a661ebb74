"""What the ranks agree on with the sum at a batch's end, and how far batches have been read when it comes."""

from collections.abc import Iterator

import pytest
import torch

from bireme.runtime.pipeline import READ_AHEAD
from tests.engine_parity import ALL, Setting, pipeline_of
from tests.regression import WIDTH, regression, regression_plan
from tests.small_models import Batch, real_batches
from tests.thread_transport import ThreadFabric
from tests.together import run_threads

pytestmark = pytest.mark.slow

ASKED_BEHIND = 5


@pytest.mark.parametrize("schedule", ALL)
def test_all_ranks_stop_behind_the_same_batch_that_one_of_them_asks_at(schedule: str) -> None:
    """Each ends its batches `READ_AHEAD` behind the result that brings the wish, and none has read more."""
    model, data = regression(), real_batches(8, 40, WIDTH)
    setting = Setting(regression_plan(schedule))
    num_ranks = setting.plan.num_ranks
    fabric = ThreadFabric(num_ranks, timeout_s=60.0)

    def work(rank: int) -> tuple[int, list[float]]:
        pipeline = pipeline_of(model, setting, fabric.of(rank))
        ends: int | None = None
        num_read = 0
        trained = 0

        def batches() -> Iterator[Batch]:
            nonlocal num_read
            for number, batch in enumerate(data):
                if ends is not None and number >= ends:
                    return
                num_read = number + 1
                yield batch

        def vote() -> float:
            return float(rank == num_ranks - 1 and trained >= ASKED_BEHIND)

        seen = []
        try:
            for result in pipeline.train(batches(), votes=vote):
                trained = result.batch + 1
                assert num_read <= trained + READ_AHEAD
                seen.append(result.votes)
                if result.votes and ends is None:
                    ends = trained + READ_AHEAD
        finally:
            pipeline.close()
        return trained, seen

    torch.set_num_threads(1)
    found = run_threads(num_ranks, work)
    assert len({trained for trained, _ in found}) == 1
    assert ASKED_BEHIND + READ_AHEAD < found[0][0] < len(data)
    assert all(seen == found[0][1] for _, seen in found)
