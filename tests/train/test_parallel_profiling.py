"""What the engine takes is measured once on a machine, and a short run is measured briefly."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from bireme.cluster.device import EngineCost
from bireme.profile.profiler import profile
from bireme.profile.timing import BRIEF
from bireme.runtime.measuring import batch_end
from bireme.runtime.measuring.batch_end import wake_costs
from bireme.runtime.world import World
from bireme.train import captured_run
from bireme.train.captured_run import ParallelMeasurer
from bireme.train.data.loader import RankBatches
from bireme.train.model import RunModel
from bireme.train.plan_search import is_short
from bireme.train.run_data import data_of
from bireme.train.run_file import load_run_file

pytestmark = pytest.mark.slow

MODEL = "gpt:layers=1,width=8,heads=2,vocab=257,context=8"


def test_what_is_read_beside_the_probe_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches read far ahead of the probe would count for those that it takes."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 50)
    sets = [f"data.source={text}", "data.length=8", "data.prefetch=1024", "training.batch_size=4"]
    run = load_run_file(None, [f"model.source={MODEL}", *sets])
    data = data_of(run, RunModel.of(run, 1))
    given: dict[str, Any] = {}

    def batches(*words: Any, **more: Any) -> RankBatches:
        given.update(more, size=words[2])
        return RankBatches(*words, **more)

    monkeypatch.setattr(captured_run, "RankBatches", batches)
    with captured_run._reading(run, data) as reads:
        assert len([*islice(reads, 3)]) == 3
    assert given == {"size": 4, "prefetch": 2}
    with captured_run._reading(run, None) as reads:
        assert [*islice(reads, 2)] == [None, None]


def test_what_the_engine_takes_is_measured_once_unless_others_had_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 50)
    run = load_run_file(None, [f"model.source={MODEL}", f"data.source={text}", "data.length=8"])
    model = RunModel.of(run, 2)
    given: list[object] = []

    def launch_here(function: Callable[..., Any], _count: int, *arguments: Any, **_ways: Any) -> list[Any]:
        given.append(arguments[4])
        with World.alone() as world:
            return [function(world, *arguments)]

    def measured(num_workers: int = 1) -> EngineCost:
        measurer = ParallelMeasurer(run, num_workers=num_workers, num_threads=1, num_cores=1)
        found = profile(
            model.training.graph,
            torch.device("cpu"),
            [2],
            examples=model.source.example_inputs,
            effort=BRIEF,
            use_cache=False,
            measurer=measurer,
        )
        assert found.engine is not None
        return found.engine

    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(captured_run, "launch", launch_here)
    monkeypatch.setattr(captured_run, "waited_s", perf_counter)
    measured()  # on a machine with other things to do
    monkeypatch.setattr(captured_run, "waited_s", lambda: 0.0)
    first, again = measured(), measured()
    assert [isinstance(one, EngineCost) for one in given] == [False, False, True]
    assert again.update_s == first.update_s
    assert again.process_bytes > 2**26, "the process of this run, and not only what was kept"
    assert again.control_s != first.control_s, "how fast the machine is now"
    monkeypatch.setattr(captured_run, "wake_costs", lambda num_cores: (num_cores / 4, 0.5))
    assert (first.wake_share, first.wake_s) == (0.0, 0.0), "nobody waits for a core"
    short, known = measured(2), measured(2)
    assert [(one.wake_share, one.wake_s) for one in (short, known)] == [(0.25, 0.5)] * 2


def test_what_is_lost_when_processes_wake_is_never_less_than_nothing() -> None:
    """On a busy machine every process of the ring waits long, but no core is idle."""
    assert min(wake_costs(2)) >= 0.0


@pytest.mark.parametrize(
    ("ring", "lost"),
    [
        ("print(10.0, 0.117)", (0.2, 0.117 / (3 * 25))),  # s of idle cores, for 3 × 195 and 3 × 25 tokens
        ("print(0.1, 0.117)", (0.0, 0.0)),  # of cores that the ring could not have
    ],
)
def test_idle_cores_are_shared_out_among_the_tokens(
    ring: str, lost: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_end, "_PASS_ON", ring)
    assert wake_costs(2) == pytest.approx(lost)


def test_a_ring_in_which_a_process_dies_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for tokens that do not come."""
    dying = "import sys\nif int(sys.argv[1]) == min(map(int, sys.argv[1:3])):\n    sys.exit(3)\n"
    monkeypatch.setattr(batch_end, "_PASS_ON", dying + batch_end._PASS_ON)
    assert wake_costs(2) == (0.0, 0.0)


def test_a_run_is_short_by_its_steps_and_by_what_they_compute() -> None:
    run = load_run_file(None, [f"model.source={MODEL}", "data.length=8", "training.steps=8"])
    graph = RunModel.of(run, 2).training.graph(2)
    long = load_run_file(None, [f"model.source={MODEL}", "data.length=8", "training.steps=100000"])
    assert is_short(run, graph)
    assert not is_short(long, graph)
