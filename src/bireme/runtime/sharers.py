"""The replicas of a stage that share its optimiser or weights: who owns what, and how all get the rest."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from bireme.errors import BiremeError, closest
from bireme.plan.plan_request import SHARDS
from bireme.runtime.layout import Layout
from bireme.runtime.paging.mover import CopyJob, ThreadMover
from bireme.runtime.shelf import ParameterGroup
from bireme.runtime.shelf_part import ParameterGroupPart, part_of
from bireme.sync.gradients import Parts
from bireme.sync.group import Pending, SharingGroup
from bireme.sync.slices import SLICE_BYTES

__all__ = ["Sharers", "sharers_of"]


class Sharers:
    """The `num_members` replicas of a rank's stages, of which this one is `member`. They share the optimiser,
    or with `gathers` the weights and the gradients too.
    """

    def __init__(self, member: int, num_members: int, *, gathers: bool = False) -> None:
        self.member = member
        self.num_members = num_members
        self.gathers = gathers
        self.has_lent = False
        """Whether an evaluation has the weights of a stage gathered."""
        self.gathered_bytes = 0
        """What this replica has sent the others in training so far of weights that it makes or keeps."""
        self.summed_bytes = 0
        """What it has sent them of gradients, besides what the sums at the end of a batch send."""
        self._group: SharingGroup | None = None
        self._sums: SharingGroup | None = None
        self._worker: ThreadMover | None = None

    @property
    def group(self) -> SharingGroup:
        """What joins them. It belongs to the rank's own thread."""
        assert self._group is not None, "a pipeline is joined before it trains"
        return self._group

    @property
    def sums(self) -> SharingGroup:
        """What joins them for what is posted here, where they share the weights."""
        assert self._sums is not None, "who sums stage by stage is joined for that"
        return self._sums

    def join(self, group: SharingGroup, sums: SharingGroup | None, device: torch.device) -> None:
        """From now on the members can reach each other."""
        self._group, self._sums, self._worker = group, sums, ThreadMover(device)

    def post(self, work: Callable[[], None]) -> CopyJob:
        """Have work done in a thread, one after the other; only that thread uses `sums`."""
        assert self._worker is not None, "a pipeline is joined before it trains"
        job = CopyJob((0, False), 0, work)
        self._worker.post(job)
        return job

    def wait(self, job: CopyJob) -> None:
        """Wait for work that was posted; raises what went wrong."""
        assert self._worker is not None, "what was posted has a worker"
        self._worker.wait(job)

    def close(self) -> None:
        """End the thread, once what was posted is done or has failed."""
        if self._worker is not None:
            self._worker.close()

    def cut(self, shelf: ParameterGroup) -> ParameterGroupPart:
        """This replica's part of a shelf."""
        return part_of(shelf, self.member, self.num_members)

    def gather(self, flats: Iterable[tuple[Tensor, Parts]], *, trains: bool = True) -> list[Pending]:
        """Begin to fill flat tensors with all members' parts; a member's own must be there.

        All members must call it with the same ones in the same order. It is counted if training needs it.
        """
        under_way = []
        for flat, parts in flats:
            for owner in range(self.num_members):
                part = flat[parts[owner] : parts[owner + 1]]
                if not len(part):
                    continue
                if owner == self.member:
                    self.gathered_bytes += (self.num_members - 1) * part.nbytes if trains else 0
                for piece in torch.split(part, max(SLICE_BYTES // part.itemsize, 1)):
                    under_way.append(self.group.copy_from(piece, owner))
        return under_way


def sharers_of(shard: str, layout: Layout) -> Sharers | None:
    """The replicas of a rank as sharers of that; None if nothing is shared, or nobody is there."""
    if shard not in SHARDS:
        raise BiremeError(f"There is no shard {shard!r}. {closest(shard, SHARDS)}")
    if shard == "none" or layout.width == 1:
        return None
    return Sharers(layout.replica, layout.width, gathers=shard == "weights")
