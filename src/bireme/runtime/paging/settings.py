"""What paging needs to know of a run, besides its program."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bireme.runtime.paging.mover import Mover, ThreadMover

__all__ = ["PagingSettings"]


@dataclass(frozen=True, slots=True)
class PagingSettings:
    """`folder` is where the disk's file is made; `mover` makes what copies. With `poisons` chunks that are
    not there read as NaN; for tests, on a CPU.
    """

    folder: Path | None = None
    mover: Callable[[torch.device], Mover] = ThreadMover
    poisons: bool = False
