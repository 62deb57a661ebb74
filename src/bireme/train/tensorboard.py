"""The curves of a run for TensorBoard: files in a folder of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bireme.train.tracker import Tracker, curves_of

__all__ = ["TensorBoard"]

FLUSH_S = 10


class TensorBoard(Tracker):
    """Writes curves into a folder, which may have those of earlier starts of the run.

    The first step hides what an earlier start has written from it on, for it is trained again. Once there is
    a checkpoint all before it is on the disk, since no start will write it again.
    """

    title = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from torch.utils.tensorboard import SummaryWriter  # takes a second that others need not wait

        self._open = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        curves = curves_of(kind, values)
        if curves and self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=step, flush_secs=FLUSH_S)
        for name, value in curves.items():
            self._writer.add_scalar(name, value, step)
        if kind == "checkpoint" and self._writer is not None:
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
