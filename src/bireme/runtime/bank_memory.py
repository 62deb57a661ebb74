"""What training a stage keeps, in bytes.

Bytes for each trainable parameter, with Adam, which also counts its steps in 4 bytes for each tensor:

                float32 banks                        bfloat16 banks
    rule        banks  W  Adam  gradient  all        banks  W  Adam  gradient  all
    synchronous   4    -   8       4       16          2    4   8       4       18
    delayed       8    -   8       4       20          4    4   8       4       20
    fresh         8    4   8       4       24          4    4   8       4       20

W is the newest weights where they are kept apart from the banks: as float32 master weights of bfloat16 banks,
and under the FRESH rule, whose banks hold trial versions. There is a gradient for each batch whose gradients
are under way on the stage at once, and under the FRESH rule with replicas one more, for their sum. Trial
steps take the copies of one chunk besides, and the norm of the gradients 20 bytes for each 2^18 elements of a
parameter. Of w replicas that share an optimiser each has 1/w of W and of Adam's.
"""

from dataclasses import dataclass

__all__ = ["BankMemory"]


@dataclass(frozen=True, slots=True)
class BankMemory:
    """What training a stage keeps besides activations and buffers.

    `apart` is W where it is kept apart from the banks, `gradient` the sums of gradients, `workspace` the
    copies that trial steps are made with and what the norm of the gradients takes.
    """

    banks_bytes: int
    frozen_bytes: int
    apart_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        weights = self.banks_bytes + self.frozen_bytes + self.apart_bytes
        return weights + self.optimizer_bytes + self.gradient_bytes + self.workspace_bytes
