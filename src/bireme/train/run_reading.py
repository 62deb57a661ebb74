"""What a rank reads while it trains: one loader, from window to window.

Its worker processes stay, and its next batches are ready when an evaluation is over.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from bireme.runtime.pipeline import Pipeline
from bireme.train.averaging_replica import AveragingReplica
from bireme.train.data.order import SampleOrder
from bireme.train.data.prepare import RunData
from bireme.train.data.rank_batches import PartlyRead, RankBatches
from bireme.train.data.samples import Samples
from bireme.train.home_data import ReadableData
from bireme.train.replica import Replica
from bireme.train.run_file import RunFile

__all__ = ["RunReading"]


class RunReading:
    """What one rank reads. `home` is that in the place of `data.training` where some is private; `member` is
    its replica where replicas may die. The end of a `with` block ends it.
    """

    def __init__(
        self,
        run: RunFile,
        data: RunData,
        home: ReadableData | None,
        member: Replica | AveragingReplica | None,
    ) -> None:
        self._run, self._data, self._home, self._member = run, data, home, member
        self._open = ExitStack()
        self._loader: RankBatches | None = None
        self._batches: Iterator[PartlyRead] | None = None

    def begin(self, pipeline: Pipeline, first: int) -> None:
        """Begin to read the batches of the run from that one on."""
        self._batches = iter(self._loader_from(pipeline, first))

    def batches(self, pipeline: Pipeline, first: int) -> Iterator[PartlyRead]:
        """The batches of the run, the first of which is the next one."""
        if self._batches is None:
            self.begin(pipeline, first)
        assert self._batches is not None, "reading has just begun"
        return self._batches

    def window(self, pipeline: Pipeline) -> Iterator[PartlyRead]:
        """The batches that are dealt to this replica up to the end of its window."""
        return iter(self._loader_from(pipeline, pipeline.num_trained))

    def close(self) -> None:
        """End what reads. Another pipeline may begin to read then."""
        self._open.close()
        self._loader = self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loader_from(self, pipeline: Pipeline, first: int) -> RankBatches:
        """What reads the batches of the run; that one is its first."""
        if self._loader is None:
            asked = self._run.data
            make = RankBatches if self._member is None else self._member.batches
            self._loader = make(
                *self._samples(pipeline),
                self._run.training.batch_size,
                first,
                self._run.training.steps - first,
                prefetch=asked.prefetch,
                num_workers=asked.num_workers,
                timeout_s=self._run.cluster.timeout_s,
                wanted=pipeline.cutter.wanted,
            )
            self._open.enter_context(self._loader)
            if pipeline.balancer is not None:
                self._open.callback(pipeline.balancer.close)  # or the loader may wait for shares
        return self._loader

    def _samples(self, pipeline: Pipeline) -> tuple[Samples, SampleOrder]:
        """What this rank reads, and in which order."""
        if self._home is None:
            return self._data.training, self._data.order(self._run.data.seed)
        batch_size = self._run.training.batch_size
        return self._home.samples, self._home.order(
            lambda step: pipeline.cutter.rows_of_replicas(step, batch_size)
        )
