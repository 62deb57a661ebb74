"""What happens to tensor storages: born, read, written, dead, one event after the other.

It is data and imports no torch. A block is one storage from its allocation to its release; it has a number of
its own, for addresses are used again. Seconds are of the clock of the trace that recorded the events.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Event", "EventKind", "Owner", "Phase", "Storage"]


class Owner(StrEnum):
    """What a block is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    """Saved by a forward for its backward."""
    INPUT = "input"
    WORKSPACE = "workspace"
    """Everything else: results on their way to the next operator."""


class Phase(StrEnum):
    """The parts of a training iteration."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class EventKind(StrEnum):
    """What can happen to a block."""

    BIRTH = "birth"
    READ = "read"
    WRITE = "write"
    DEATH = "death"


@dataclass(frozen=True, slots=True)
class Storage:
    """A block as the trace knows it.

    `name` is that of the parameter, buffer or input it holds or belongs to, `module` the one whose code made
    it; both are empty where unknown. `address` is None where the storage has no memory.
    """

    block: int
    num_bytes: int
    owner: Owner
    name: str = ""
    module: str = ""
    address: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a block.

    `operator` is what did it, empty where no operator did. It ran from `start_s` to `end_s`.
    """

    kind: EventKind
    block: int
    num_bytes: int
    operator: str
    phase: Phase | None
    start_s: float
    end_s: float
