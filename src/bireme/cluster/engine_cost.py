"""What the engine itself takes on a machine, in time and memory, besides the work of a model's stages."""

import math
from dataclasses import dataclass, fields

from bireme.errors import BiremeError

__all__ = ["MOST_SENDS", "NO_ENGINE", "EngineCost"]

MOST_SENDS = 4
"""Sends over one border in one direction that may be under way; before another, the oldest is waited for.
Each has memory of its own, which later messages use again."""


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Figures of one process of the engine on a machine; all zero where nobody measured them.

    `instruction_s` is what any instruction takes besides its work. The rank that sends a message is busy for
    `send_s`, the rank that gets it for `receive_s` when it posts the receive and for `take_s` when it uses
    the message; `late_s` passes between the two. Sending, taking and lateness grow with the bytes.
    REDUCE, UPDATE and TRIAL take `reduce_s`, `update_s` and `trial_s` however few the parameters are.
    `batch_s` is what a batch takes on each rank besides its instructions, `agree_s` how long after the last
    rank's REDUCE all know of it. `process_bytes` is what a process holds before it has a tensor of the model.

    `control_s` is what the control took: a fixed piece of work that no model changes, timed while
    `num_processes` computed at once.
    """

    instruction_s: float = 0.0
    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    receive_s: float = 0.0
    take_s: float = 0.0
    take_s_per_byte: float = 0.0
    late_s: float = 0.0
    late_s_per_byte: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    trial_s: float = 0.0
    batch_s: float = 0.0
    agree_s: float = 0.0
    process_bytes: int = 0
    control_s: float = 0.0
    num_processes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise BiremeError(f"{field.name} of the engine is {value}; it must be 0 or greater.")

    def sending_s(self, num_bytes: float) -> float:
        """For how long a rank is busy that sends so many bytes."""
        return self.send_s + self.send_s_per_byte * num_bytes

    def taking_s(self, num_bytes: float) -> float:
        """For how long a rank is busy that takes so many bytes which have come."""
        return self.take_s + self.take_s_per_byte * num_bytes

    def lateness_s(self, num_bytes: float) -> float:
        """How long so many bytes are under way on a machine, with nothing else in their way."""
        return self.late_s + self.late_s_per_byte * num_bytes


NO_ENGINE = EngineCost()
"""An engine that takes nothing."""
