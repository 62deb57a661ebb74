"""What a user allows a process to use of each tier of memory."""

from dataclasses import dataclass

from bireme.errors import BiremeError, closest

__all__ = ["PLACES", "TierLimits"]

PLACES = ("auto", "device", "host")
"""Where the optimiser may step."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bytes of one process; None leaves them to the machine, and 0 is none of that tier.

    Without `stashes` activations stay on the device. `optimizer` says where updates are made of what is
    paged: on the device, on the host, or wherever a batch is predicted to take less time (auto). With
    `updates_apart` stages may be updated before all have their gradients.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = 0
    stashes: bool = True
    optimizer: str = "auto"
    updates_apart: bool = False

    def __post_init__(self) -> None:
        if self.device_bytes is not None and self.device_bytes < 1:
            raise BiremeError(f"The device memory is {self.device_bytes} bytes; it must be 1 or more.")
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise BiremeError("There is neither host memory nor a disk to page to. Give one of them.")
        if self.optimizer not in PLACES:
            raise BiremeError(
                f"The optimizer cannot step on {self.optimizer!r}. {closest(self.optimizer, PLACES)}"
            )
        if self.optimizer == "host" and self.host_bytes == 0:
            raise BiremeError(
                "The optimizer is to step on the host, which has no memory to page to. Give it some, or let "
                "the optimizer step on the device."
            )
