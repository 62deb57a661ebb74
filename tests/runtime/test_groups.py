"""Process groups: they end with the pipeline that made them, and no failure leaves a rank waiting in one."""

import time
from pathlib import Path

import pytest
import torch

from bireme.runtime.board import RankFailed
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.world import World
from bireme.sync.group import AbortedError
from tests.support.engine_parity import Setting, pipeline_of
from tests.support.ranks import until
from tests.support.regression import WIDTH, regression, regression_plan
from tests.support.small_models import Model, real_batches

OWN = Path("/proc/self")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OWN.exists(), reason="counts what Linux shows of a process"),
]

TIMEOUT_S = 30.0


def count_after_pipelines(world: World, model: Model) -> list[tuple[int, int]]:
    """The descriptors and threads of this process after each of three pipelines of two replicas."""
    found = []
    for _ in range(3):
        pipeline = pipeline_of(model, Setting(regression_plan("1f1b", 1, width=2)), world)
        list(pipeline.train(real_batches(8, 2, WIDTH)))
        pipeline.close()
        found.append((num_left("fd"), num_left("task")))
    return found


def num_left(what: str) -> int:
    """How many there are of a kind. A thread that was joined may still be on its way out of the system."""
    counts = []
    for _ in range(20):
        counts.append(len(list((OWN / what).iterdir())))
        time.sleep(0.005)
    return min(counts)


def test_a_closed_pipeline_leaves_no_groups() -> None:
    """Each left ten descriptors and six threads, and a run that changes its schedule has several."""
    for first, *others in launch(
        count_after_pipelines, 2, regression(), timeout_s=TIMEOUT_S, threads_per_process=1
    ):
        assert others == [first, first]


def wait_while_another_fails(world: World, folder: Path) -> None:
    """Rank 1 has failed and yet stays, so that no broken connection tells of it."""
    group = DistFabric(world).group([0, 1])
    assert group is not None
    if world.rank == 1:
        world.watch.failed(ArithmeticError("the sum is wrong"))
        until((folder / "freed").exists)
        raise ArithmeticError("the sum is wrong")
    try:
        group.all_reduce(torch.ones(3)).wait()
    except AbortedError:
        (folder / "freed").touch()
        raise


def test_a_rank_that_waits_in_a_group_is_freed_when_another_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="the sum is wrong") as caught:
        launch(wait_while_another_fails, 2, tmp_path, timeout_s=TIMEOUT_S)
    assert caught.value.rank == 1
    assert (tmp_path / "freed").exists()
