"""What the ranks agree on with the sum at a batch's end, and how far batches have been read when it comes."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.engine_parity import ALL, Setting, pipeline_of
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import Batch, real_batches
from tests.support.thread_transport import ThreadFabric
from tests.support.together import run_threads

pytestmark = pytest.mark.slow

ASKED_AFTER = 5


@pytest.mark.few(4)
@pytest.mark.parametrize(("schedule", "lookahead"), [*((name, 0) for name in ALL), ("2bw", 2)])
def test_all_ranks_stop_after_the_same_batch_that_one_of_them_asks_at(schedule: str, lookahead: int) -> None:
    """Each ends its batches `read_ahead` after the result that brings the wish, and none has read more.

    2bw reads further ahead at the greatest lookahead: there ranks ended after different batches.
    """
    model, data = regression(), real_batches(8, 40, WIDTH)
    setting = Setting(regression_plan(schedule, lookahead=lookahead))
    num_ranks = setting.plan.num_ranks
    fabric = ThreadFabric(num_ranks)

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
            return float(rank == num_ranks - 1 and trained >= ASKED_AFTER)

        seen = []
        try:
            for result in pipeline.train(batches(), votes=vote):
                trained = result.batch + 1
                assert num_read <= trained + pipeline.read_ahead
                seen.append(result.votes)
                if result.votes and ends is None:
                    ends = trained + pipeline.read_ahead
        finally:
            pipeline.close()
        return trained, seen

    torch.set_num_threads(1)
    found = run_threads(num_ranks, work)
    assert len({trained for trained, _ in found}) == 1
    assert ASKED_AFTER + 2 < found[0][0] < len(data)
    assert all(seen == found[0][1] for _, seen in found)
