"""The gradients of a batch where replicas share weights: whole while a stage adds to them, else only this
replica's parts of what they come to over all replicas.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bireme.memory.arena import Arena
from bireme.memory.lent_arena import LentArena
from bireme.memory.system_memory import give_back_heap
from bireme.runtime.paging.mover import CopyJob
from bireme.runtime.sharers import Sharers
from bireme.runtime.shelf_part import ParameterGroupPart
from bireme.sync.exchange import SentBytes
from bireme.sync.gradients import BatchGradients
from bireme.sync.parts import sum_parts
from bireme.sync.slices import PART_SLICE_BYTES

__all__ = ["GradientParts"]


class GradientParts:
    """Of one batch: this replica's parts of some arenas. `held` are the parameters that any replica has had a
    gradient of, as far as they have been summed.
    """

    __slots__ = ("_arenas", "_device", "_own", "_under_way", "held", "names", "views")

    def __init__(
        self, arenas: Sequence[LentArena], parts: Sequence[ParameterGroupPart], device: torch.device
    ) -> None:
        self._device = device
        self._arenas = [*zip(arenas, parts, strict=True)]
        self._own = [Arena(part.own.slots, part.own.dtype, device) for part in parts]
        self.names = [name for arena in arenas for name in arena.views]
        self.views: Mapping[str, Tensor] = {
            name: view for own in self._own for name, view in own.views.items()
        }
        """This replica's pieces."""
        self.held: set[str] = set()
        self._under_way: tuple[BatchGradients, CopyJob] | None = None

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

    def begin_sums(self, held: set[str], sharers: Sharers) -> None:
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
        )
        held.difference_update(self.names)
        self._under_way = gradients, sharers.post(partial(self._sum, gradients, sharers))

    @torch.no_grad()
    def _sum(self, gradients: BatchGradients, sharers: Sharers) -> None:
        """Add the sums to what there is of the batch; the rest is not needed from then on."""
        sent = SentBytes()
        sum_parts(sharers.sums, self.names, gradients, PART_SLICE_BYTES, sent)
        sharers.summed_bytes += sent.sent
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
