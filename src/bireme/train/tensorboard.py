"""The curves of a run for TensorBoard, a package that is needed by no one who does not ask for them.

They are a copy: what a run knows of itself is in its log. So a disk that takes none ends them, not the run.
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bireme.errors import BiremeError

__all__ = ["TensorBoard", "check_tensorboard"]

CURVES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "samples_per_s",
    "perplexity",
    "bits_per_byte",
)
KINDS = ("train", "evaluation")
FLUSH_S = 10


def check_tensorboard(*, is_asked: bool) -> None:
    """See whether curves can be written, if they are asked for, before anything has been done."""
    if is_asked and find_spec("tensorboard") is None:
        raise BiremeError(
            "log.tensorboard is set, and TensorBoard is not installed: install it with pip install "
            '"bireme[track]".'
        )


class TensorBoard:
    """Writes curves into a folder, which may have those of earlier starts of the run."""

    def __init__(self, folder: Path) -> None:
        check_tensorboard(is_asked=True)
        from torch.utils.tensorboard import SummaryWriter  # takes a second that others need not wait

        self._open = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self.failure: str | None = None
        """Why there are no more curves."""

    def note(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Take what is a curve from a line of the log; from any thread.

        The first step hides what an earlier start has written from it on, for it is trained again. Once
        there is a checkpoint all before it is on the disk, since no start will write it again.
        """
        if self.failure is not None:
            return
        try:
            if kind in KINDS:
                self._add(kind, step, values)
            elif kind == "checkpoint" and self._writer is not None:
                self._writer.flush()
        except OSError as error:
            self.failure = str(error.strerror or error)

    def close(self) -> None:
        """End the file."""
        if self._writer is not None and self.failure is None:
            with suppress(OSError):
                self._writer.close()

    def _add(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=step, flush_secs=FLUSH_S)
        for name in CURVES:
            if isinstance(values.get(name), float):
                self._writer.add_scalar(f"{kind}/{name}", values[name], step)
