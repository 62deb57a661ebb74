"""The brake on a loop of crashes: who restarts a run whenever it ends must be told when that is of no use.

A small file in the run's folder counts how often it was started again from the same checkpoint.
"""

import json

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.train.folder import RunFolder

__all__ = ["MOST_STARTS", "NoProgressError", "check_progress", "note_start"]

MOST_STARTS = 3


class NoProgressError(BiremeError):
    """A run that was started again and again without coming to a new checkpoint."""


def check_progress(folder: RunFolder, step: int) -> None:
    """Refuse one more start from the checkpoint of `step`, 0 for none, if many have come to no newer one."""
    if _num_starts(folder, step) >= MOST_STARTS:
        raise NoProgressError(
            f"{folder.path} was started {MOST_STARTS} times from step {step}, and every time it ended before "
            f"a new checkpoint. See why (the end of {folder.metrics.name} has its last words), or let "
            "checkpoint.every_steps be less; then add --anyway."
        )


def note_start(folder: RunFolder, step: int) -> None:
    """Count a start from the checkpoint of `step`."""
    document = {"step": step, "starts": _num_starts(folder, step) + 1}
    write_text_atomically(folder.starts, json.dumps(document) + "\n")


def _num_starts(folder: RunFolder, step: int) -> int:
    """How many there were since a checkpoint newer than those before; none where nobody counted."""
    try:
        document = json.loads(folder.starts.read_text(encoding="utf-8"))
        return int(document["starts"]) if step <= int(document["step"]) else 0
    except (OSError, ValueError, TypeError, KeyError):
        return 0
