"""What a micro-batch keeps between its passes, in a range that chunks come and go in.

Autograd is asked through `saved_tensors_hooks` to put what it saves there, memory by memory, so that several
views of one memory take room once; what it saves comes back as views of the range, with the strides that it
had. What lies in a range already, as weights do, and what is always there, as buffers, stays where it is.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.memory.address_range import AddressRange
from bireme.model.torch_private import storage_id, storage_watch, version_of
from bireme.runtime.stage_memory import Stash

__all__ = ["PagedStash"]


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor whose memory was copied to `flat`."""

    flat: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor as it was saved."""
        memory = self.flat.view(self.dtype)
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)


class PagedStash(Stash):
    """Room in a range. `is_paged` tells of memory by its tensor whether it lies in any range; `leave` is told
    the bytes of what stays with torch because the range has no room for it.
    """

    def __init__(
        self,
        own: AddressRange,
        is_paged: Callable[[Tensor], bool],
        leave: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        self._own = own
        self._is_paged = is_paged
        self._leave = leave

    def keep(self, tensor: Tensor) -> Tensor:
        """As `Stash` says; what there is no room for stays where it is."""
        flat = self._room(tensor.nbytes) if tensor.is_contiguous() else None
        if flat is None:
            self._leave(tensor.untyped_storage().nbytes())
            return tensor
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    @contextmanager
    def saving(self, _others: Iterable[Tensor]) -> Iterator[None]:
        """As `Stash` says."""
        apart = {storage_id(tensor) for tensor in _others}
        copies: dict[tuple[int, int], tuple[object, Tensor | None]] = {}

        def pack(tensor: Tensor) -> Tensor | _Copied:
            # Itself it would hold the node that holds it, for ever.
            saved = tensor.detach()
            if not self._may_move(saved) or storage_id(saved) in apart or self._is_paged(saved):
                return saved
            storage = saved.untyped_storage()
            key = storage_id(saved), version_of(saved)
            if key not in copies:
                flat = self._room(storage.nbytes())
                if flat is None:
                    self._leave(storage.nbytes())
                else:
                    flat.copy_(torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage))
                copies[key] = storage_watch(saved), flat
            copy = copies[key][1]
            if copy is None:
                return saved
            return _Copied(copy, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

        def unpack(saved: Tensor | _Copied) -> Tensor:
            return saved.tensor() if isinstance(saved, _Copied) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _may_move(self, tensor: Tensor) -> bool:
        """Whether a tensor is its bytes on the device, read with strides; others stay as they are."""
        is_plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.device == self._own.bytes.device and tensor.numel() > 0

    @torch.no_grad()
    def _room(self, num_bytes: int) -> Tensor | None:
        """So many bytes of the range, if its chunks have them."""
        if not num_bytes or not self._own.has_room(num_bytes):
            return None
        return self._own.carve(num_bytes, torch.uint8, self._own.bytes.device)
