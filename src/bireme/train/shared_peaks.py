"""The memory that each rank has had at most, told to rank 0 through the store."""

from bireme.runtime.world import World

__all__ = ["SharedPeaks"]


class SharedPeaks:
    """Tells the others how much memory this rank has had, and rank 0 what the others last told."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, own: int | None) -> list[int | None]:
        """The bytes of every rank, as far as known; of the others only on rank 0."""
        world = self._world
        world.store.set(f"memory/{world.rank}", str(own or 0))
        if world.rank:
            return []
        keys = [f"memory/{rank}" for rank in range(world.size)]
        return [int(world.store.get(key)) or None if world.store.check([key]) else None for key in keys]
