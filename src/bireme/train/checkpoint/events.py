"""What a run is told about its checkpoints."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointEvent", "CheckpointSaved", "CheckpointWarning"]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is there, whole, of `num_bytes` over all ranks.

    `stall_s` is how long it held up this rank's training, `write_s` how long from then until it was there.
    """

    step: int
    folder: Path
    num_bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class CheckpointWarning:
    """Something a person should know, in a sentence or two; the run goes on."""

    step: int
    text: str


CheckpointEvent = CheckpointSaved | CheckpointWarning
