"""The batches of a run as far as one rank needs them: what its stages do not take is not read.

The ranks of a run are given the same batches, and none of them has a whole one. That they are the same shows
in a stamp, which is made from what each batch is, and not from what was read of it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import torch

from bireme.errors import BiremeError
from bireme.runtime.batches import Rows
from bireme.train.data.home import ELSEWHERE
from bireme.train.data.loader import Loader
from bireme.train.data.samples import Batch
from bireme.train.data.workers import Made

__all__ = ["PartlyRead", "RankBatches"]


@dataclass(frozen=True, slots=True)
class PartlyRead:
    """A batch of which there is what the rank wants, and nothing else."""

    num_samples: int
    stamp: int
    parts: Mapping[Rows | None, Batch]

    def rows(self, wanted: Rows) -> Batch:
        """What was wanted in these words."""
        if wanted not in self.parts:
            raise RuntimeError(
                f"{wanted} is asked for, and what was read is {', '.join(map(str, self.parts))}."
            )
        return self.parts[wanted]


class RankBatches(Loader[PartlyRead]):
    """Like `Batches`, of which there is what is wanted and no more."""

    def _given(self, done: Made) -> PartlyRead:
        # Private samples count alike: a rank knows the numbers of its own server's alone.
        numbers = np.maximum(np.asarray(done.task.numbers, np.int64), ELSEWHERE)
        return PartlyRead(len(numbers), crc32(numbers.tobytes(), self._identity), done.parts)

    @cached_property
    def _identity(self) -> int:
        """What ranks would have differently whose samples are others, or in another order.

        Not with workers: what samples draw is the same on all ranks in them alone. Computed once, for a
        stream goes back for it.
        """
        identity = crc32(f"{self._order} {self._batch_size}".encode())
        if self._has_workers:
            return identity
        for place in self._order.probes:
            with suppress(BiremeError):  # which is raised where a batch needs the sample, if one does
                for name, tensor in self._samples.take([place]).items():
                    plain = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                    identity = crc32(plain.data, crc32(name.encode(), identity))
        return identity
