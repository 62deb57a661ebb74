"""What a user allows a process to use of each tier of memory."""

from dataclasses import dataclass

from bireme.errors import BiremeError

__all__ = ["TierLimits"]


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bytes of one process; None leaves them to the machine, and 0 is none of that tier.

    Without `stashes` activations stay on the device.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = 0
    stashes: bool = True

    def __post_init__(self) -> None:
        if self.device_bytes is not None and self.device_bytes < 1:
            raise BiremeError(f"The device memory is {self.device_bytes} bytes; it must be 1 or more.")
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise BiremeError("There is neither host memory nor a disk to page to. Give one of them.")
