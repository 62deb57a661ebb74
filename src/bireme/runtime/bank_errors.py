"""What a program does wrong with weight versions. No program that the checker proves right comes to that."""

from collections.abc import Collection

__all__ = ["BankInUse", "DeadVersion"]


class BankInUse(RuntimeError):  # noqa: N818 (named for what happened)
    """A bank was to be written while a micro-batch still needs the version in it. The program is wrong."""

    def __init__(self, stage: int, version: int | None, made: int, num_held: int) -> None:
        super().__init__(
            f"Stage {stage} cannot replace version {version} by version {made}, because "
            f"{num_held} micro-batches in flight still need it."
        )


class DeadVersion(RuntimeError):  # noqa: N818 (named for what happened)
    """A version was asked for that is not made yet, or overwritten. The program is wrong."""

    def __init__(self, stage: int, version: int, living: Collection[int]) -> None:
        has = ", ".join(map(str, living))
        super().__init__(f"Stage {stage} must run on version {version}, but has version {has}.")
