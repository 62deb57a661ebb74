"""Events about checkpoints that a run receives."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointEvent", "CheckpointSaved", "CheckpointWarning"]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was written and verified; `num_bytes` over all ranks.

    `stall_s` is how long this rank's training waited, `write_s` the time from then until it was complete.
    """

    step: int
    folder: Path
    num_bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class CheckpointWarning:
    """Something the user should know, in one or two sentences; the run continues."""

    step: int
    text: str


CheckpointEvent = CheckpointSaved | CheckpointWarning
