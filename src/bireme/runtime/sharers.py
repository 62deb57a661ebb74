"""The replicas of a stage that share its optimizer, or its weights and gradients too: how they reach each
other, and the gradients of which each keeps its parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bireme.errors import BiremeError, closest
from bireme.memory.arena import Arena, ArenaAllocator, LentArena
from bireme.memory.system_memory import give_back_heap
from bireme.plan.plan_request import SHARDS
from bireme.runtime.layout import Layout
from bireme.runtime.paging.chunk_store import CopyJob, ThreadMover
from bireme.runtime.parameter_groups import ParameterGroupPart
from bireme.runtime.stepper import StepShare
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import BatchGradients, Parts, SentBytes
from bireme.sync.group import Group, Pending
from bireme.sync.slices import PART_SLICE_BYTES, SLICE_BYTES


class Sharers:
    """The `num_members` replicas of a rank's stages, of which this one is `member`. They share the optimizer,
    or with `gathers` the weights and the gradients too.
    """

    group: Group
    """What joins them. It belongs to the rank's own thread."""
    sums: Group
    """What joins them for what is posted here, if they share the weights."""

    def __init__(self, member: int, num_members: int, *, gathers: bool = False) -> None:
        self.member = member
        self.num_members = num_members
        self.gathers = gathers
        self.has_lent = False
        """Whether an evaluation has the weights of a stage gathered."""
        self.gathered_bytes = 0
        """What this replica has sent the others in training so far of weights that it makes or keeps."""
        self.summed = SentBytes()
        """What it has sent them of gradients, besides what the sums at the end of a batch send."""
        self.how = GradientSummation(in_parts=True)
        """How gradients are summed."""
        self._worker: ThreadMover | None = None

    def join(
        self,
        group: Group,
        sums: Group | None,
        device: torch.device,
        how: GradientSummation | None = None,
    ) -> None:
        """From now on the members can reach each other."""
        self.group, self._worker = group, ThreadMover(device)
        if sums is not None:
            self.sums = sums
        self.how = how or self.how

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

    @property
    def membership(self) -> StepShare:
        """Which of the members this replica is."""
        return StepShare(self.member, self.num_members)

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


# The gradients of a batch if replicas share weights: whole while a stage adds to them, else only the parts of
# their sums over all replicas that this replica owns.


class GradientParts:
    """Of one batch: this replica's parts of some arenas. `held` are the parameters that any replica has had a
    gradient of, as far as they have been summed.
    """

    __slots__ = ("_arenas", "_device", "_own", "_under_way", "held", "names", "views")

    def __init__(
        self,
        arenas: Sequence[LentArena],
        parts: Sequence[ParameterGroupPart],
        device: torch.device,
        memory: ArenaAllocator,
    ) -> None:
        self._device = device
        self._arenas = [*zip(arenas, parts, strict=True)]
        self._own = [Arena(part.own.slots, part.own.dtype, device, memory) for part in parts]
        self.names = [name for arena in arenas for name in arena.views]
        self.views: Mapping[str, Tensor] = {
            name: view for own in self._own for name, view in own.views.items()
        }
        """This replica's pieces."""
        self.held: set[str] = set()
        self._under_way: tuple[BatchGradients, CopyJob] | None = None

    @property
    def flats(self) -> list[Tensor]:
        """The memory in which this replica's pieces lie."""
        return [own.flat for own in self._own]

    @property
    def num_bytes(self) -> int:
        """The bytes that are there for good."""
        return sum(own.num_bytes for own in self._own)

    def take(self) -> None:
        """Have memory for whole gradients."""
        for arena, _ in self._arenas:
            arena.take()

    def piece(self, name: str) -> Tensor | None:
        """This replica's piece of a gradient, if there is one."""
        return self.views.get(name) if name in self.held else None

    def begin_sums(self, batch: int, held: set[str], sharers: Sharers) -> None:
        """Begin to add up the whole gradients of all replicas, each its own part; those of this replica that
        were `held` no longer are. Take part with the others, and add nothing before `end_sums`.

        What backwards have freed goes back to the system, for the next weights lie elsewhere.
        """
        self.take()
        if self._device.type == "cpu":
            give_back_heap()
        gradients = BatchGradients(
            {name: view for arena, _ in self._arenas for name, view in arena.views.items()},
            held.intersection(self.names),
            [arena.flat for arena, _ in self._arenas],
            parts=[part.parts for _, part in self._arenas],
            cuts={name: cuts for _, part in self._arenas for name, cuts in part.cuts.items()},
        )
        held.difference_update(self.names)
        self._under_way = gradients, sharers.post(partial(self._sum, batch, gradients, sharers))

    @torch.no_grad()
    def _sum(self, batch: int, gradients: BatchGradients, sharers: Sharers) -> None:
        """Add the sums to what there is of the batch; the rest is not needed from then on."""
        sharers.how.sum(sharers.sums, self.names, gradients, PART_SLICE_BYTES, sharers.summed, batch=batch)
        for arena, part in self._arenas:
            for name, piece in part.views(arena.flat).items():
                if name in gradients.held and name in self.held:
                    self.views[name].add_(piece)
                elif name in gradients.held:
                    self.views[name].copy_(piece)
            arena.let_go_of_pages()

    def end_sums(self, sharers: Sharers) -> None:
        """Wait for that, and give the memory of whole gradients back."""
        assert self._under_way is not None, "sums that end have begun"
        (gradients, job), self._under_way = self._under_way, None
        sharers.wait(job)
        for arena, _ in self._arenas:
            arena.let_go()
        self.held |= gradients.held
