"""What units keep for their backward, counted to the byte on tensors that hold no memory.

Autograd is asked through `saved_tensors_hooks`; memory is counted once however many tensors look at it. A
piece that a neighbour may keep too, because it crosses the cut between them or both make it for themselves,
is told apart by its names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bireme.model.halves import backward_input
from bireme.model.torch_private import storage_id
from bireme.profile.profile import KeptMemory
from bireme.profile.trace import StorageTrace
from bireme.profile.workbench import Workbench

__all__ = ["Residue", "Saved", "residue_of"]


class Saved:
    """While active, notes the memory that autograd keeps, but for that of the tensors given."""

    def __init__(self, but: Mapping[str, Tensor]) -> None:
        self._but = {storage_id(tensor) for tensor in but.values()}
        self._bytes: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._alive.clear()

    @property
    def num_bytes(self) -> int:
        """All that is kept."""
        return sum(self._bytes.values())

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is among it."""
        return storage_id(tensor) in self._bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_id(tensor)
        if key not in self._but and key not in self._bytes:
            self._bytes[key] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor)  # so that no other memory takes its identity
        return tensor.detach()  # itself it would hold the node that holds it, for ever


@dataclass(frozen=True, slots=True)
class Residue:
    """What one micro-batch of a unit keeps for its backward and also needs. Names are those in the graph.

    `kept_bytes` are what is saved, what came in and what goes out.
    """

    saved_bytes: int
    kept_bytes: int
    boundary_bytes: int
    workspace_bytes: int
    shared: tuple[KeptMemory, ...]
    halves: "Halves | None" = None


@dataclass(frozen=True, slots=True)
class Halves:
    """What a backward in halves takes besides: gradients that wait for the second half, and what else is
    alive at the worst moment of the first.
    """

    waiting_bytes: int
    workspace_bytes: int


def residue_of(bench: Workbench, common: frozenset[str], *, halves: bool = False) -> Residue:
    """Run a workbench of fake tensors once and see, with `halves` again for a backward in halves.

    `common` are values that several units make for themselves.
    The bench's function must give those among its results.
    """
    fixed = {**bench.parameters, **bench.buffers}
    with StorageTrace() as trace:
        fixed_bytes = _adopted(trace, bench)
        with Saved(fixed) as saved:
            results = bench.forward()
            shared = _named(bench, results, common, saved)
        boundary_bytes = _num_bytes(results[name] for name in bench.function.sends)
        results = bench.differentiable(results)
        bench.backward(results)
        peak_bytes = trace.peak_bytes
    del results
    ends = {*bench.given, *bench.function.sends}
    kept_bytes = saved.num_bytes + sum(
        kept.num_bytes for kept in shared if not kept.is_saved and ends.intersection(kept.names)
    )
    return Residue(
        saved_bytes=saved.num_bytes,
        kept_bytes=kept_bytes,
        boundary_bytes=boundary_bytes,
        workspace_bytes=max(0, peak_bytes - fixed_bytes - kept_bytes),
        shared=shared,
        halves=_halves_of(bench, kept_bytes) if halves else None,
    )


def _halves_of(bench: Workbench, kept_bytes: int) -> Halves:
    """Run it once more, with the first half of a backward."""
    fixed = {**bench.parameters, **bench.buffers}
    with StorageTrace() as trace:
        fixed_bytes = _adopted(trace, bench)
        with Saved(fixed) as saved:
            roots = bench.differentiable(bench.forward())
            known = {storage_id(tensor) for tensor in (*bench.given.values(), *roots.values())}
        received = [tensor for tensor in bench.received.values() if tensor.requires_grad]
        rest = backward_input(list(roots.values()), bench.output_gradients(roots), received, bench.trainable)
        waiting = {
            storage_id(tensor): tensor.untyped_storage().nbytes()
            for tensor in rest.waiting
            if tensor.ndim  # that of a loss is one for all micro-batches
            and storage_id(tensor) not in known
            and not saved.keeps(tensor)
        }
        waiting_bytes = sum(waiting.values())
        peak_bytes = trace.peak_bytes
    return Halves(waiting_bytes, max(0, peak_bytes - fixed_bytes - kept_bytes - waiting_bytes))


def _adopted(trace: StorageTrace, bench: Workbench) -> int:
    """Let a trace count what a bench has from the start; the bytes of what does not come in."""
    given = bench.given.values()
    trace.adopt([*bench.parameters.values(), *bench.buffers.values(), *given], owner="input")
    trace.adopt([tensor.grad for tensor in bench.trainable if tensor.grad is not None], owner="gradient")
    return trace.live_bytes - _num_bytes(given)


def _named(
    bench: Workbench, results: Mapping[str, Tensor], common: frozenset[str], saved: Saved
) -> tuple[KeptMemory, ...]:
    """The memory that has a name outside the unit: what comes in, what goes out, what neighbours make too."""
    tensors = {
        **bench.given,
        **{n: t for n, t in results.items() if n in common or n in bench.function.sends},
    }
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(storage_id(tensor), []).append(name)
    return tuple(
        KeptMemory(
            names=tuple(names),
            num_bytes=tensors[names[0]].untyped_storage().nbytes(),
            is_saved=saved.keeps(tensors[names[0]]),
        )
        for names in groups.values()
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, without what lies around them in their storage."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
