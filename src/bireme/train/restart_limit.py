"""The restart limit: stops a script that restarts a run again and again without progress.

A small file in the run's folder counts the starts from the same checkpoint.
"""

import json

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.train.folder import RunFolder

__all__ = ["MOST_STARTS", "RestartLimitError", "check_restart_limit", "count_start"]

MOST_STARTS = 3


class RestartLimitError(BiremeError):
    """A run was started too often without reaching a new checkpoint."""


def check_restart_limit(folder: RunFolder, step: int) -> None:
    """Refuse another start from the checkpoint of `step`, 0 for none, if too many reached no newer one."""
    if _num_starts(folder, step) >= MOST_STARTS:
        raise RestartLimitError(
            f"{folder.path} was started {MOST_STARTS} times from step {step} and always ended before "
            f"a new checkpoint. Find out why (see the end of {folder.metrics.name}), or lower "
            "checkpoint.every_steps; then add --anyway."
        )


def count_start(folder: RunFolder, step: int) -> None:
    """Count a start from the checkpoint of `step`."""
    document = {"step": step, "starts": _num_starts(folder, step) + 1}
    write_text_atomically(folder.starts, json.dumps(document) + "\n")


def _num_starts(folder: RunFolder, step: int) -> int:
    """The number of starts since the most recent checkpoint; 0 if there is no count."""
    try:
        document = json.loads(folder.starts.read_text(encoding="utf-8"))
        return int(document["starts"]) if step <= int(document["step"]) else 0
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return 0
