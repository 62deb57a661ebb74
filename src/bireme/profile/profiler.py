"""Profile a graph: what each of its units takes and keeps, on a device that is here or only described.

Bytes are counted on tensors without memory, so they are exact everywhere. Seconds are measured on the device,
units of the same work once; for a device that is only described they are estimated.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from bireme.cluster.device import Device, EngineCost
from bireme.errors import BiremeError, Progress
from bireme.grouping import grouped
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.model.halves import backward_input
from bireme.model.stage import Resolve, torch_operator
from bireme.model.torch_private import fake_tensors, storage_id
from bireme.profile.control import cache_path, cached, check_measurable, device_here, keep, versions_here
from bireme.profile.estimate import (
    Seconds,
    computed_dtype,
    estimate_unit,
    estimated_update_s,
    rates_of,
    unit_work,
)
from bireme.profile.measuring import (
    BatchEndTimes,
    Here,
    Measured,
    Measurer,
    MeasuringJob,
    ProfiledUnits,
    bench_of,
    pieces_of,
    state_bytes,
)
from bireme.profile.optimizers import check_optimizer, has_masters, optimizer_flops
from bireme.profile.profile import (
    KeptMemory,
    Profile,
    SharedState,
    UnitCost,
    UnitProfile,
    load_profile,
    plain_profile,
)
from bireme.profile.timing import Effort, Workbench
from bireme.profile.trace import StorageTrace

# What units keep for their backward, counted to the byte on tensors that hold no memory.
#
# Autograd is asked through `saved_tensors_hooks`; memory is counted once however many tensors look at it. A
# piece that a neighbor may keep too, because it crosses the cut between them or both make it for themselves,
# is recognized by its names.


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
class _Residue:
    """What one micro-batch of a unit keeps for its backward and also needs. Names are those in the graph.

    `kept_bytes` are what is saved, what came in and what goes out. Of a backward in halves, gradients of
    `waiting_bytes` wait for the second half, and `halves_workspace_bytes` is what else is alive at the worst
    moment of the first.
    """

    saved_bytes: int
    kept_bytes: int
    boundary_bytes: int
    workspace_bytes: int
    shared: tuple[KeptMemory, ...]
    waiting_bytes: int | None = None
    halves_workspace_bytes: int | None = None


def _residue_of(bench: Workbench, common: frozenset[str], *, halves: bool = False) -> _Residue:
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
    residue = _Residue(
        saved_bytes=saved.num_bytes,
        kept_bytes=kept_bytes,
        boundary_bytes=boundary_bytes,
        workspace_bytes=max(0, peak_bytes - fixed_bytes - kept_bytes),
        shared=shared,
    )
    return _with_halves(bench, residue) if halves else residue


def _with_halves(bench: Workbench, residue: _Residue) -> _Residue:
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
        more_bytes = trace.peak_bytes - fixed_bytes - residue.kept_bytes - waiting_bytes
    return replace(residue, waiting_bytes=waiting_bytes, halves_workspace_bytes=max(0, more_bytes))


def _adopted(trace: StorageTrace, bench: Workbench) -> int:
    """Let a trace count what a bench has from the start; the bytes of what does not come in."""
    given = bench.given.values()
    trace.adopt([*bench.parameters.values(), *bench.buffers.values(), *given], owner="input")
    trace.adopt([tensor.grad for tensor in bench.trainable if tensor.grad is not None], owner="gradient")
    return trace.live_bytes - _num_bytes(given)


def _named(
    bench: Workbench, results: Mapping[str, Tensor], common: frozenset[str], saved: Saved
) -> tuple[KeptMemory, ...]:
    """The memory that has a name outside the unit: what comes in, what goes out, what neighbors make too."""
    tensors = {
        **bench.given,
        **{n: t for n, t in results.items() if n in common or n in bench.function.sends},
    }
    groups = grouped((storage_id(tensor), name) for name, tensor in tensors.items())
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


Graphs = Graph | Callable[[int], Graph]
"""A graph for every micro-batch size, or a way to have one for each."""

COUNTED = "with the gradients that wait in halves, of the process, and the work of units"
"""What profiles say of bytes, so that the cache has none that says less."""

_COUNTING_FRACTION = 0.1
"""Of the work that counting bytes is, as the progress tells it."""


def profile(
    graphs: Graphs,
    device: torch.device | Device,
    micro_batches: Sequence[int],
    *,
    examples: Mapping[str, Tensor] | None = None,
    optimizer: str = "adamw",
    halves: bool = False,
    effort: Effort | None = None,
    use_cache: bool = True,
    progress: Progress = lambda done, what: None,
    resolve: Resolve = torch_operator,
    measurer: Measurer | None = None,
) -> Profile:
    """What a graph costs on a device at some micro-batch sizes.

    A torch device is measured; a `Device` is a description, and seconds are estimated from it. `examples` are
    inputs of the model. With `halves` the two halves of the backward are measured apart. A profile that was
    measured before under the same circumstances is read from the cache, if its graph says all that is run: a
    chain's does not, which needs `resolve`. `measurer` runs the units; without one this process does, alone.
    """
    if not micro_batches or min(micro_batches) < 1:
        raise BiremeError("Name the micro-batch sizes to profile; each must be at least 1.")
    check_optimizer(optimizer)
    is_measured = isinstance(device, torch.device)
    if isinstance(device, torch.device):
        check_measurable(device)
    sizes = tuple(dict.fromkeys(micro_batches))
    captured = {size: _graph_for(graphs, size) for size in sizes}
    first = captured[sizes[0]]
    described = device if isinstance(device, Device) else device_here(device)
    effort = effort or Effort()
    num_threads = torch.get_num_threads() if isinstance(device, torch.device) and device.type == "cpu" else 0
    prints = [graph_hash(graph) for graph in captured.values()]
    measurer = measurer or Here(resolve)
    circumstances = [described, num_threads, versions_here(), optimizer, halves, effort]
    circumstances += [COUNTED, *measurer.circumstances]
    path = cache_path([first.name, prints, sizes, *circumstances])
    # To estimate again is quick, and how it is done may have been changed.
    is_cacheable = is_measured and not any(operator.is_of_chain for operator in first.operators)
    known = cached(path, load_profile) if is_cacheable and use_cache else None
    if known is not None:
        return known
    pieces = {size: pieces_of(graph) for size, graph in captured.items()}
    work = _Work(pieces, optimizer, examples, resolve, progress)
    if isinstance(device, Device):
        work.count(torch.device("cpu"), halves=halves)
        work.estimate(device, halves=halves)
    else:
        work.count(device, halves=halves)
        work.measure(device, described.memory_bytes, effort, measurer, halves=halves)
    progress(1.0, "done")
    found = Profile(
        model=first.name,
        graph=prints[0],
        device=described.name,
        device_kind=described.kind,
        num_threads=num_threads,
        versions=versions_here(),
        is_measured=is_measured,
        optimizer=optimizer,
        num_operators=len(first.operators),
        parameter_bytes=first.parameter_bytes,
        units=work.units(),
        engine=work.engine,
        master_weights=has_masters(first.parameters),
        rates=rates_of(described, _main_dtype(first)),
    )
    if is_cacheable:
        keep(path, plain_profile(found))
    return found


def _main_dtype(graph: Graph) -> str:
    """The type of number that most of a graph's arithmetic is done in."""
    flops = defaultdict[str, float](float)
    for operator in graph.operators:
        flops[computed_dtype(graph, operator)] += operator.flops
    return max(flops, key=flops.__getitem__, default="float32")


def _graph_for(graphs: Graphs, size: int) -> Graph:
    graph = graphs if isinstance(graphs, Graph) else graphs(size)
    if not graph.any_batch and graph.batch != size:
        raise BiremeError(
            f"The graph of {graph.name} holds for micro-batches of {graph.batch} samples only, not of "
            f"{size}: the model's code fixes the size. Give a way to capture each size, such as "
            "`Captures(...).graph`."
        )
    return graph


@dataclass(eq=False)
class _Work:
    """The units at every size, and what is found out about those that stand for all others."""

    pieces: dict[int, ProfiledUnits]
    optimizer: str
    examples: Mapping[str, Tensor] | None
    resolve: Resolve
    progress: Progress

    def __post_init__(self) -> None:
        self.first = next(iter(self.pieces.values()))
        for size, other in self.pieces.items():
            if other.firsts != self.first.firsts:
                raise BiremeError(
                    f"{other.graph.name} is another chain of units at {size} samples than at "
                    f"{next(iter(self.pieces))}. Profile each size by itself."
                )
        self.residues: dict[int, dict[int, _Residue]] = {size: {} for size in self.pieces}
        self.seconds: dict[int, dict[int, Seconds]] = {size: {} for size in self.pieces}
        self.ends: dict[int, BatchEndTimes] = {}
        self.engine: EngineCost | None = None

    def count(self, device: torch.device, *, halves: bool) -> None:
        """Find the bytes that units keep, with what runs for an operator on a device."""
        num_all = len(self.pieces) * len(self.first.distinct)
        for size, one in self.pieces.items():
            for index in one.distinct:
                num_done = sum(map(len, self.residues.values()))
                self.progress(_COUNTING_FRACTION * num_done / num_all, "counting bytes")
                self.residues[size][index] = self._residue(size, index, device, halves=halves)

    def estimate(self, device: Device, *, halves: bool) -> None:
        """Find the seconds from the description of a device."""
        for size, one in self.pieces.items():
            for index in one.distinct:
                found = estimate_unit(one.graph, one.units[index], one.learned, size, device)
                if not halves:
                    found = replace(found, backward_input_s=None, backward_weight_s=None)
                self.seconds[size][index] = found
        for index in self.first.distinct:
            unit, state = self.first.units[index], self._state_of(index)
            flops = sum(
                optimizer_flops(one, self.optimizer)
                for one in self.first.graph.parameters
                if one.name in unit.parameters
            )
            update_s = estimated_update_s(state.gradient_bytes, state.optimizer_bytes, flops, device)
            self.ends[index] = BatchEndTimes(0.0, update_s, update_s)

    def measure(
        self, device: torch.device, memory_bytes: int, effort: Effort, measurer: Measurer, *, halves: bool
    ) -> None:
        """Find the seconds by running the units on a device."""
        needed = {
            size: {index: self._needed_bytes(size, index) for index in one.distinct}
            for size, one in self.pieces.items()
        }
        for size, own in needed.items():
            for index, num_bytes in own.items():
                if num_bytes > memory_bytes:
                    raise BiremeError(
                        f"{self.first.units[index].name} needs {num_bytes / 2**30:.1f} GiB with {size} "
                        f"samples, and the device has {memory_bytes / 2**30:.1f} GiB. Profile smaller "
                        "micro-batches, or estimate on the meta device."
                    )
        message_bytes = max(one.boundary_bytes for own in self.residues.values() for one in own.values())
        counted = self.pieces, needed, memory_bytes, message_bytes
        job = MeasuringJob(*counted, device, self.optimizer, self.examples, halves, effort)

        def tell(done: float, what: str) -> None:
            self.progress(_COUNTING_FRACTION + (1 - _COUNTING_FRACTION) * done, what)

        found: Measured = measurer(job, tell)
        self.seconds = {size: dict(seconds) for size, seconds in found.seconds.items()}
        self.ends, self.engine = dict(found.ends), found.engine

    def units(self) -> tuple[UnitProfile, ...]:
        """Everything that was found, unit by unit."""
        return tuple(self._unit(index) for index in range(len(self.first.units)))

    def _unit(self, index: int) -> UnitProfile:
        unit, first = self.first.units[index], self.first.firsts[index]
        return UnitProfile(
            structure=unit.structure,
            same_as=first if first != index else None,
            receives=unit.receives,
            sends=unit.sends,
            inputs=unit.inputs,
            **asdict(self.ends[first]),
            tied=self.first.tied(unit, self.optimizer),
            costs=tuple(self._cost(size, index) for size in self.pieces),
            **asdict(self._state_of(index)),
        )

    def _cost(self, size: int, index: int) -> UnitCost:
        one = self.pieces[size]
        first = one.firsts[index]
        residue, seconds = self.residues[size][first], self.seconds[size][first]
        return UnitCost(
            micro_batch=size,
            saved_bytes=residue.saved_bytes,
            boundary_bytes=residue.boundary_bytes,
            workspace_bytes=residue.workspace_bytes,
            shared=one.translated(residue.shared, index),
            returned_bytes=one.returned_bytes(index, size),
            waiting_bytes=residue.waiting_bytes,
            halves_workspace_bytes=residue.halves_workspace_bytes,
            work=unit_work(one.graph, one.units[first], size),
            **asdict(seconds),
        )

    def _residue(self, size: int, index: int, device: torch.device, *, halves: bool) -> _Residue:
        one = self.pieces[size]
        made = (
            value.name for place in one.units[index].operators for value in one.graph.operators[place].made
        )
        common = tuple(name for name in made if name in one.common)
        with fake_tensors():
            bench = bench_of(one, index, size, device, self.examples, self.resolve, also=common)
            return _residue_of(bench, frozenset(common), halves=halves)

    def _state_of(self, index: int) -> SharedState:
        """What of a unit stays from one micro-batch to the next."""
        graph, unit = self.first.graph, self.first.units[index]
        own = [state for state in graph.parameters if state.name in unit.parameters]
        own += [state for state in graph.buffers if state.name in unit.buffers]
        return state_bytes(unit.name, own, self.optimizer)

    def _needed_bytes(self, size: int, index: int) -> int:
        """What measuring a unit takes: it is there once, with gradients, optimizer and one micro-batch."""
        residue, state = self.residues[size][index], self._state_of(index)
        own = state.parameter_bytes + state.gradient_bytes + state.optimizer_bytes + state.buffer_bytes
        return own + residue.kept_bytes + residue.workspace_bytes
