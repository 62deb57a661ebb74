"""When instructions ran, on the host and on a device that works after the calls that asked it to.

The device here is made of a list: marks get their times when the device is waited for, as events of an
accelerator do.
"""

from dataclasses import dataclass, field

import pytest
import torch

from bireme.runtime import gathering as under_test
from bireme.runtime.fabric import SingleRankFabric
from bireme.runtime.gathering import Recorder
from bireme.schedule.instruction import Kind
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.small_models import token_batches
from tests.support.tiny_text import tiny_text

FAR = torch.device("cuda", 0)
SLOWNESS = 10
"""Seconds of the device for everything it is asked."""


@dataclass(slots=True)
class Queue:
    """A device: what it was asked, and when it did it. Nothing happens before somebody waits."""

    asked: list["Mark | str"] = field(default_factory=list)
    now_ms: float = 5_000.0
    num_waits: int = 0

    def mark(self, _device: torch.device) -> "Mark":
        self.asked.append(mark := Mark())
        return mark

    def wait(self, _device: torch.device) -> None:
        self.num_waits += 1
        for one in self.asked:
            if isinstance(one, Mark):
                one.at_ms = self.now_ms
            else:
                self.now_ms += SLOWNESS * 1e3
        self.asked.clear()


@dataclass(slots=True)
class Mark:
    at_ms: float | None = None

    def elapsed_time(self, other: "Mark") -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None, "the device was not waited for"
        return other.at_ms - self.at_ms


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(under_test, "mark", made.mark)
    monkeypatch.setattr(under_test, "synchronize", made.wait)
    return made


def test_work_on_a_device_takes_what_the_device_needs_and_not_the_call(queue: Queue) -> None:
    recorder = Recorder(FAR)
    begin = recorder.now()
    queue.asked.append("a forward")
    recorder.note(begin, recorder.now())
    queue.asked.append("a message that the stream waits for")
    begin = recorder.now()
    queue.asked.append("a backward")
    recorder.note(begin, recorder.now())
    waits = queue.num_waits
    starts, ends = recorder.recording()
    assert queue.num_waits == waits + 1, "a look at the clock must not hold up the device"
    took = [end - start for start, end in zip(starts, ends, strict=True)]
    assert took == pytest.approx([SLOWNESS, SLOWNESS])
    assert starts[1] - ends[0] == pytest.approx(SLOWNESS)


def test_marks_are_put_on_the_clock_of_the_host(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "perf_counter", lambda: 77.0)
    recorder = Recorder(FAR)
    recorder.note(recorder.now(), recorder.now())
    starts, _ = recorder.recording()
    queue.asked.append("something that was not recorded")
    assert list(starts) == pytest.approx([77.0])


def test_a_training_that_is_not_recorded_makes_no_marks(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is makes them around what the device does, but for what it waits for."""
    pipeline = pipeline_of(tiny_text(), Setting(plan_for("1f1b", 1)), SingleRankFabric())
    monkeypatch.setattr(pipeline, "device", FAR)
    list(pipeline.train(token_batches(8, 1)))
    assert not queue.asked
    assert queue.num_waits == 0
    runs_on(queue, monkeypatch)
    list(pipeline.train(token_batches(8, 2), record=True))
    timeline = pipeline.timeline()
    (rank,) = timeline.ranks
    took = [(one.instruction.kind, one.end_s - one.start_s) for one in rank.intervals()]
    for kind, seconds in took:
        works = kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
        assert seconds == pytest.approx(SLOWNESS if works else 0.0), kind


def runs_on(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stages ask the device for work, and the wait for a sum put a wait into its stream."""
    from bireme.runtime.stage import Stage
    from bireme.runtime.updates import Updates

    for owner, name in ((Stage, "forward"), (Stage, "backward"), (Updates, "wait"), (Updates, "update")):
        before = getattr(owner, name)

        def asks(self: object, *given: object, before: object = before, name: str = name) -> object:
            queue.asked.append(name)
            return before(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, asks)
