"""`[memory]` of a run file: what of a stage may lie on the host or on a disk, and what replicas share."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bireme.bounds import bytes_of
from bireme.errors import BiremeError
from bireme.train.run_file.table import Table, Text

__all__ = ["AUTO", "Memory"]

AUTO = "auto"
"""As much as there is."""


def _as_text(value: Any) -> Any:
    """A plain number of bytes is an amount too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(int(value)) if is_number and float(value).is_integer() else value


def _amount(value: str) -> str:
    if value.strip().lower() == AUTO:
        return AUTO
    try:
        bytes_of(value, "it")
    except BiremeError:
        raise ValueError('auto, or bytes such as "6GB", "24GiB" or "5e9"') from None
    return value.strip()


Amount = Annotated[str, BeforeValidator(_as_text), AfterValidator(_amount)]


class Memory(Table):
    """`[memory]`."""

    device: Amount | None = Field(
        default=None,
        description="Memory that each process may use of its device, such as 6GB; auto is all of it. What "
        "does not fit is paged to the host. If not set, nothing is paged",
        examples=["6GB"],
    )
    host: Amount = Field(
        default=AUTO,
        description="Host memory that each process may page to, 0 for none; auto is its share of the host's",
    )
    disk: Text | None = Field(
        default=None,
        description="Folder on a disk of each machine that may be paged to; the file in it is removed when "
        "the run ends",
        examples=["/scratch"],
    )
    disk_bytes: Amount = Field(
        default=AUTO,
        description="Bytes of the disk that each process may use, such as 200GB; auto is its share of what "
        "is free in the folder",
    )
    stashes: bool = Field(
        default=True, description="Page the activations of micro-batches too, not only weights and optimizer"
    )
    optimizer: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the optimizer steps what is paged: on the device, after what it remembers was "
        "fetched; on the host, where that stays, and only gradients come down and weights go up; or wherever "
        "a batch is predicted to take less time (auto). On GPUs it steps on the device",
        examples=["host"],
    )
    updates: Literal["agreed", "apart"] = Field(
        default="agreed",
        description="When stages that are paged step: after all have agreed on the gradient's norm and on "
        "whether the batch counts (agreed), or each as soon as it has its own gradients, where a batch is "
        "predicted to take less time so (apart). The latter needs training.clip_norm = 0, one replica, and a "
        "schedule that drains between batches",
        examples=["apart"],
    )
    shard: Literal["none", "optimizer", "weights"] = Field(
        default="none",
        description="What the replicas of a stage share: nothing (none); the optimizer, of which each "
        "replica then keeps and steps a part, and sends the others the new weights of it; or weights and "
        "gradients too (weights), which are then gathered where they are used",
        examples=["optimizer"],
    )

    @property
    def is_on(self) -> bool:
        """Whether anything may be paged."""
        return self.device is not None

    @property
    def device_bytes(self) -> int | None:
        """What a process may use of its device; None where it is all of it."""
        return None if self.device is None else _bytes(self.device, "memory.device")

    @property
    def host_bytes(self) -> int | None:
        """What a process may use of the host; None leaves it to the machine."""
        return _bytes(self.host, "memory.host")

    @property
    def most_disk_bytes(self) -> int | None:
        """What a process may use of the disk, 0 where there is no folder; None leaves it to the machine."""
        return 0 if self.disk is None else _bytes(self.disk_bytes, "memory.disk_bytes")


def _bytes(amount: str, key: str) -> int | None:
    return None if amount == AUTO else bytes_of(amount, key)
