"""A group of ranks that do the same at the same time: sums, broadcasts, barriers.

Collectives on one group are matched by the order of the calls, so every member must make the same ones in the
same order, and a group belongs to one thread of its process. Nothing here knows what the numbers mean.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.wire.connection import Bell


class AbortedError(Exception):
    """This rank itself has given up what joins it with others."""


class CollectiveError(Exception):
    """A collective did not come about, mostly because a member is gone. The group is of no use any more."""


class Pending(Protocol):
    """Something under way. The tensors it uses must stay alive and untouched until `wait` returns."""

    def wait(self) -> None:
        """Return when it is done, or raise why it never will be.

        On a CUDA device the wait may be put into the current stream instead of holding up the caller.
        """


class Waiting:
    """Something under way that is done once a function has returned."""

    __slots__ = ("is_done", "wait")

    def __init__(
        self, wait: Callable[[], None] = lambda: None, is_done: Callable[[], bool] = lambda: False
    ) -> None:
        self.wait = wait
        self.is_done = is_done
        """Whether all that others send is known to have come."""


class Sums(Protocol):
    """Some ranks that add up."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the group; the same bits on every member."""


class Group(Sums, Protocol):
    """Some ranks, numbered from 0 within the group."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to fill `into` with the members' tensors, which are all alike, in the members' order."""

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part of `given`, and to fill `taken` with what all send here.

        Both are flat, and their parts lie in the members' order; `lengths` are counted in elements.
        """

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor, which is flat, with that of the member `source`."""

    def go_on(self, bell: Bell) -> None:
        """Move what has begun until the bell rings, or for a while: some of it may be done then."""


class OwnedGroup(Group, Protocol):
    """A group in the hands of who had it made, and ends it."""

    def abort(self) -> None:
        """Give up: all threads that wait here get an error at once. The group is of no use any more."""

    def close(self) -> None:
        """Give back what the group holds. No thread waits here any more."""


class MessageGroup(OwnedGroup, Protocol):
    """A group whose members can also send to one another; a send and its receive are matched by order."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to the member `to`; returns when the tensor may be used for something else."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor with what the member `source` sends."""


class DistGroup:
    """A process group of torch.distributed for this exchange alone, as its collectives have no names. Tensors
    go through the memory of `device`.

    Collectives give up after the timeout that the process group was made with.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._held: dist.ProcessGroup | None = process_group
        self._device = device
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._members = ", ".join(map(str, dist.get_process_group_ranks(process_group)))
        self._is_aborted = False

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begin to replace the tensor, in place, by its sum over the group."""
        here = tensor.to(self._device)
        return self._begun(
            "sum", lambda group: dist.all_reduce(here, group=group, async_op=True), [(here, tensor)]
        )

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """Begin to fill `into` with the members' tensors."""
        own, here = tensor.to(self._device), [one.to(self._device) for one in into]
        return self._begun(
            "gathering",
            lambda group: dist.all_gather(here, own, group=group, async_op=True),
            [*zip(here, into, strict=True)],
        )

    def exchange(
        self, given: Tensor, lengths: Sequence[int], taken: Tensor, taken_lengths: Sequence[int]
    ) -> Waiting:
        """Begin to send every member its part of `given`, and to fill `taken` with theirs."""
        own, here = given.to(self._device), taken.to(self._device)
        # As bytes, because not all types are known there.
        return self._begun(
            "exchange",
            lambda group: dist.all_to_all_single(
                here.view(torch.uint8),
                own.view(torch.uint8),
                [given.itemsize * length for length in taken_lengths],
                [given.itemsize * length for length in lengths],
                group=group,
                async_op=True,
            ),
            [(here, taken)],
        )

    def copy_from(self, tensor: Tensor, source: int) -> Pending:
        """Begin to fill the tensor with that of the member `source`."""
        here = tensor.to(self._device)
        whole = here.view(torch.uint8)
        return self._begun(
            "copy",
            lambda group: dist.broadcast(whole, group=group, group_src=source, async_op=True),
            [(here, tensor)],
        )

    def go_on(self, bell: Bell) -> None:
        """NCCL moves what has begun in threads of its own."""
        bell.listen()

    def abort(self) -> None:
        """Give up, from any thread."""
        group = self._held
        if self._is_aborted or group is None:
            return
        self._is_aborted = True
        with suppress(RuntimeError):
            group.abort()

    def close(self) -> None:
        """Destroy the process group, unless torch.distributed has done that with all of them."""
        group, self._held = self._held, None  # its threads and sockets live as long as anything knows it
        if group is not None:
            with suppress(ValueError):
                dist.destroy_process_group(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._held is None:
            raise RuntimeError(f"the group of the processes {self._members} has been closed")
        return self._held

    def _begun(
        self,
        what: str,
        begin: Callable[[dist.ProcessGroup], dist.Work | None],
        places: list[tuple[Tensor, Tensor]],
    ) -> Waiting:
        """What has begun, and ends once the tensors that torch.distributed wrote are where they belong."""
        try:
            work = begin(self._group)
        except RuntimeError as error:
            raise self._failed(what, error) from error
        assert work is not None, "a process that is no member of the group cannot have made a DistGroup of it"

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(what, error) from error
            while places:  # only once
                here, there = places.pop()
                if here is not there:
                    there.copy_(here)

        return Waiting(wait, work.is_completed)

    def _failed(self, what: str, error: RuntimeError) -> Exception:
        if self._is_aborted:
            return AbortedError(f"This rank has given up the group of the processes {self._members}.")
        return CollectiveError(f"A {what} over the processes {self._members} failed: {error}")


def add_in_order(own: Tensor, member: int, others: Sequence[Tensor]) -> None:
    """Replace what that member has by its sum with what all others have, which is lost. The sum has the same
    bits whoever makes it.
    """
    in_order = [*others[:member], own, *others[member:]]
    total = in_order[0]
    for one in in_order[1:]:
        total.add_(one)
    if total is not own:
        own.copy_(total)


class SingleRankGroup:
    """A group of this rank alone, which agrees with itself at once."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Pending:
        """The sum of one tensor is the tensor."""
        return Waiting()

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Pending:
        """The only member's tensor is its own."""
        into[0].copy_(tensor)
        return Waiting()

    def exchange(
        self, given: Tensor, _lengths: Sequence[int], taken: Tensor, _taken_lengths: Sequence[int]
    ) -> Waiting:
        """The only member gets what it gives."""
        taken.copy_(given)
        return Waiting()

    def copy_from(self, _tensor: Tensor, _source: int) -> Pending:
        """The tensor is its own source."""
        return Waiting()

    def go_on(self, bell: Bell) -> None:
        """Nothing is under way."""
        bell.listen()

    def abort(self) -> None:
        """No replica waits."""

    def close(self) -> None:
        """Nothing is held."""

    def send(self, tensor: Tensor, to: int) -> None:
        """There is no rank to send to."""
        raise RuntimeError(f"There is no rank {to} to send to.")

    def receive(self, tensor: Tensor, source: int) -> None:
        """No rank sends."""
        raise RuntimeError(f"There is no rank {source} to receive from.")
