"""Whole batches of a loader: dicts of tensors, without a stamp, so that no sample is read for one."""

from collections.abc import Iterator

from bireme.train.data.loader import RankBatches
from bireme.train.data.samples import Batch
from bireme.train.data.workers import Made


class WholeBatches(RankBatches):
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # it gives what `_given` does
        return super().__iter__()  # type: ignore[return-value]  # as above

    def _given(self, done: Made) -> Batch:  # type: ignore[override]  # as above
        return done.parts[None]
