"""The gradients of a stage's batches under way, each batch's in arenas of its own.

Two batches may run on the same leaves at once (under 2BW the first two both run on the first version), so a
leaf's own `.grad` belongs to no batch. Here it is lent, for one backward at a time, the sum of the batch that
the backward is for, and autograd adds in place. Sums have at least 32 bits, whatever the leaves have.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.lowrank import Components, PrincipalStream, Product, first_components
from bireme.codec.sum_description import GradientForm
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, Arena, ArenaAllocator, LentArena
from bireme.memory.system_memory import give_back_heap
from bireme.model.units import LinearMap
from bireme.runtime.paging.mover import CopyJob
from bireme.runtime.parameter_groups import ParameterGroup, ParameterGroupPart, without
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.stepper import Home, Stepped, Stepper
from bireme.runtime.trial import ParameterRows, pieces_of
from bireme.schedule.program import Rule
from bireme.sync.arrivals import Arrivals
from bireme.sync.exchange import BatchGradients
from bireme.sync.slices import DENSE_SLICE_BYTES

# Gradients that are kept as principal components: a stream for each batch, and what streams go on from.
#
# What one batch has found takes effect at the stage's UPDATE, as its weights do, so it depends on the program
# alone. A batch goes on from what was settled when its weights were: one batch before it, or two where
# updates are delayed.

_Settled = Mapping[str, Components]

_PARTS = ("left", "values", "right")


class BatchStreams:
    """The streams of one batch, and the components of the whole batch once they are known."""

    __slots__ = ("components", "shapes", "streams")

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], streams: Mapping[str, PrincipalStream]) -> None:
        self.shapes = shapes
        self.streams = streams
        self.components: Mapping[str, Components] | None = None

    def feed(self, name: str, left: Tensor, right: Tensor) -> None:
        """Take pairs of a weight."""
        self.streams[name].feed(left, right)

    def items(self) -> Iterator[tuple[str, Product | None]]:
        """Each weight with its gradient, if it has one: of the whole batch where that is known."""
        for name, stream in self.streams.items():
            if self.components is None:
                found = Product(*stream.factors(), self.shapes[name]) if stream.num_pairs else None
            else:
                known = self.components.get(name)
                found = None if known is None else known.product(self.shapes[name])
            yield name, found

    @property
    def num_bytes(self) -> int:
        """What streams and components take."""
        found = sum(stream.num_bytes for stream in self.streams.values())
        return found + sum(one.num_bytes for one in (self.components or {}).values())


class PrincipalGradients:
    """The components of some weights of one stage. With `is_delayed` a batch goes on from those that the
    batch two before it has left.
    """

    def __init__(
        self,
        maps: Mapping[str, LinearMap],
        form: GradientForm,
        dtypes: Mapping[str, torch.dtype],
        *,
        is_delayed: bool,
        device: torch.device,
    ) -> None:
        self._form = form
        self._delay = int(is_delayed)
        self._dtypes, self._device = {name: dtypes[name] for name in maps}, device
        self.shapes = {name: one.shape for name, one in maps.items()}
        """The weights, by name."""
        self._settled: dict[int, _Settled] = {
            0: {
                name: first_components(
                    one.rows,
                    one.columns,
                    form.rank,
                    seed=crc32(name.encode()),
                    dtype=dtypes[name],
                    device=device,
                )
                for name, one in maps.items()
            }
        }
        """What there was after so many updates; the last of them, and where updates are delayed one more."""

    def open(self, batch: int) -> BatchStreams:
        """Streams for a batch that begins."""
        before = self.after(batch - self._delay)
        return BatchStreams(
            self.shapes,
            {name: PrincipalStream(one, piece=self._form.piece) for name, one in before.items()},
        )

    def after(self, num_updates: int) -> _Settled:
        """What was settled after so many updates, or after the first that is known."""
        return self._settled[max(num_updates, min(self._settled))]

    def settle(self, num_updates: int, found: _Settled) -> None:
        """Keep what a batch has found after so many updates; the rest stays as it was."""
        last = self.after(num_updates - 1)
        kept = {num_updates - 1: last} if self._delay else {}
        self._settled = kept | {num_updates: {name: found.get(name, one) for name, one in last.items()}}

    def state(self, num_updates: int) -> dict[str, Tensor]:
        """What the next batches go on from, as `AGE/NAME/PART`: age 0 is after so many updates. No copies."""
        return {
            f"{age}/{name}/{part}": getattr(one, part)
            for age in range(self._delay + 1)
            for name, one in self.after(num_updates - age).items()
            for part in _PARTS
        }

    def load(self, saved: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Go on from such a state after so many updates. What is missing or of another rank starts again."""
        first = self.after(0)
        found: dict[int, _Settled] = {}
        for age in range(self._delay + 1):
            own = {name: self._loaded(saved, f"{age}/{name}", one) for name, one in first.items()}
            newest = found.get(num_updates, first)
            found[num_updates - age] = {name: one or newest[name] for name, one in own.items()}
        self._settled = {number: one for number, one in found.items() if number >= 0}

    def _loaded(self, saved: Mapping[str, Tensor], key: str, like: Components) -> Components | None:
        parts = [saved.get(f"{key}/{part}") for part in _PARTS]
        wanted = [getattr(like, part) for part in _PARTS]
        found = [
            part.to(self._device, one.dtype, copy=True)
            for part, one in zip(parts, wanted, strict=True)
            if part is not None and part.shape == one.shape
        ]
        return Components(*found) if len(found) == len(_PARTS) else None

    @property
    def most_itemsize(self) -> int:
        """The bytes of the largest kind of number."""
        return max(dtype.itemsize for dtype in self._dtypes.values())

    @property
    def num_bytes(self) -> int:
        """What is settled takes, after each number of updates that is kept."""
        return sum(one.num_bytes for settled in self._settled.values() for one in settled.values())


def principal_of(
    maps: Mapping[str, LinearMap],
    form: GradientForm | None,
    dtypes: Mapping[str, torch.dtype],
    rule: Rule,
    device: torch.device,
) -> PrincipalGradients | None:
    """The components of those in `maps` among a stage's weights, which have these types; None if no gradients
    are kept so.
    """
    own = {name: one for name, one in maps.items() if name in dtypes}
    if form is None or not own:
        return None
    return PrincipalGradients(own, form, dtypes, is_delayed=rule is not Rule.SYNCHRONOUS, device=device)


# The gradients of a batch if replicas share weights: whole while a stage adds to them, else only the parts of
# their sums over all replicas that this replica owns.


class GradientParts:
    """Of one batch: this replica's parts of some arenas. `held` are the parameters that any replica has had a
    gradient of, as far as they have been summed.
    """

    __slots__ = ("_arenas", "_device", "_own", "_sharers", "_under_way", "held", "names", "views")

    def __init__(
        self,
        arenas: Sequence[LentArena],
        parts: Sequence[ParameterGroupPart],
        device: torch.device,
        memory: ArenaAllocator,
        sharers: Sharers,
    ) -> None:
        self._device = device
        self._sharers = sharers
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

    def begin_sums(self, batch: int, held: set[str]) -> None:
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
        self._under_way = gradients, self._sharers.post(partial(self._sum, batch, gradients))

    @torch.no_grad()
    def _sum(self, batch: int, gradients: BatchGradients) -> None:
        """Add the sums to what there is of the batch; the rest is not needed from then on."""
        sharers = self._sharers
        sharers.how.sum(sharers.sums, self.names, gradients, DENSE_SLICE_BYTES, sharers.summed, batch=batch)
        for arena, part in self._arenas:
            for name, piece in part.views(arena.flat).items():
                if name in gradients.held and name in self.held:
                    self.views[name].add_(piece)
                elif name in gradients.held:
                    self.views[name].copy_(piece)
            arena.let_go_of_pages()

    def end_sums(self) -> None:
        """Wait for that, and give the memory of whole gradients back."""
        assert self._under_way is not None, "sums that end have begun"
        (gradients, job), self._under_way = self._under_way, None
        self._sharers.wait(job)
        for arena, _ in self._arenas:
            arena.let_go()
        self.held |= gradients.held


class GradientSums:
    """The sums of one batch. `held` are the parameters that have had a gradient.

    A parameter without one has no sum, not zero: an optimizer leaves it alone then, and does not even decay
    it. `streams` has those gradients that are kept as principal components, if any are. `parts` has this
    replica's parts of those in `views` that replicas add up as they come, if any do.
    """

    __slots__ = ("arenas", "held", "memory", "parts", "source", "streams", "views", "whole_views")

    def __init__(
        self,
        arenas: Sequence[Arena],
        names: Sequence[str],
        memory: ArenaAllocator,
        source: Callable[[], ArenaAllocator],
        parts: GradientParts | None = None,
    ) -> None:
        self.arenas = tuple(arenas)
        self.parts = parts
        self.memory, self.source = memory, source
        views = {name: view for arena in arenas for name, view in arena.views.items()}
        self.views: Mapping[str, Tensor] = {name: views[name] for name in names}
        self.whole_views = self.views
        """Those that are not kept in parts."""
        if parts is not None:
            apart = self.views.keys() - set(parts.names)
            self.whole_views = {name: views[name] for name in names if name in apart}
        self.held: set[str] = set()
        self.streams: BatchStreams | None = None

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that was computed apart, as by the weight half of a split backward."""
        if self.parts is not None:
            self.parts.take()
        if name in self.held:
            self.views[name].add_(gradient)
        else:
            self.views[name].copy_(gradient)
            self.held.add(name)

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each parameter in the arenas with its sum, or the piece of it, if it has one."""
        parts = self.parts
        if parts is not None:
            yield from ((name, parts.piece(name)) for name in parts.names)
        whole = self.whole_views.items()
        yield from ((name, view if name in self.held else None) for name, view in whole)

    def all_items(self) -> Iterator[tuple[str, Tensor | Product | None]]:
        """Each parameter with its gradient, if it has one."""
        yield from self.items()
        if self.streams is not None:
            yield from self.streams.items()


def _plain() -> ArenaAllocator:
    return PLAIN


class GradientPool:
    """Arenas for as many batches as are under way at once; those of a batch that is done are used again.

    `names` are the parameters in the order in which sums are gone through. Those of `principal` are in no
    arena. `memory` gives the memory of each batch's sums; copies of sums lie with torch in any case. `parts`
    are those of the parameter groups, where replicas share the optimizer. Where `sharers` share the weights
    too, sums are kept in parts, but those of the parameters in `summed_apart`.
    """

    def __init__(
        self,
        parameter_groups: Sequence[ParameterGroup],
        names: Sequence[str],
        device: torch.device,
        principal: PrincipalGradients | None = None,
        memory: Callable[[], ArenaAllocator] | None = None,
        parts: Sequence[ParameterGroupPart] = (),
        *,
        summed_apart: Collection[str] = (),
        sharers: Sharers | None = None,
    ) -> None:
        self.parts = parts
        self._summed_apart, self._sharers = frozenset(summed_apart), sharers
        memory = memory or _plain
        apart = {} if principal is None else principal.shapes
        self._parameter_groups = without(parameter_groups, apart) if apart else tuple(parameter_groups)
        self._names = tuple(name for name in names if name not in apart)
        self.principal = principal
        self._most_stream_bytes = 0
        self._device = device
        self._memory = memory
        self._free: dict[Callable[[], ArenaAllocator], list[GradientSums]] = {memory: [], _plain: []}
        """By who gave their memory."""
        self._of_batch: dict[int, GradientSums] = {}
        """The sums of the batches under way."""
        self._lending = _Lending()
        self._hooked: dict[int, Mapping[str, Tensor]] = {}
        """The leaves that have hooks, of every bank, by their identity."""
        self._num_sets = 0
        self._set_bytes = sum(parameter_group.num_bytes for parameter_group in self._parameter_groups)

    def reserve(self, batch: int) -> ArenaAllocator:
        """The memory of the sums of a batch, which may not have begun yet."""
        return self._sums_of(batch).memory

    def open(self, batch: int) -> GradientSums:
        """Sums for a batch that begins."""
        sums = self._sums_of(batch)
        if self.principal is not None:
            sums.streams = self.principal.open(batch)
        return sums

    def _sums_of(self, batch: int) -> GradientSums:
        if batch not in self._of_batch:
            self._of_batch[batch] = self._opened(self._memory)
        return self._of_batch[batch]

    def _opened(self, source: Callable[[], ArenaAllocator]) -> GradientSums:
        if self._free[source]:
            return self._free[source].pop()
        self._num_sets += 1
        memory, sharers, device = source(), self._sharers, self._device
        groups = [(group.slots, group.dtype) for group in self._parameter_groups]
        if sharers is None:
            arenas = [Arena(slots, dtype, device, memory) for slots, dtype in groups]
            return GradientSums(arenas, self._names, memory, source)
        is_apart = [not self._summed_apart.isdisjoint(slots) for slots, _ in groups]
        whole = [Arena(slots, dtype, device) for slots, dtype in compress(groups, is_apart)]
        in_parts = [not one for one in is_apart]
        lent = [LentArena(slots, dtype, device) for slots, dtype in compress(groups, in_parts)]
        own = GradientParts(lent, [*compress(self.parts, in_parts)], device, memory, sharers)
        self._set_bytes = sum(arena.num_bytes for arena in whole) + own.num_bytes
        return GradientSums([*whole, *lent], self._names, memory, source, own)

    def lend(
        self, sums: GradientSums, leaves: Mapping[str, Tensor], arrivals: Arrivals | None = None
    ) -> "_Lending":
        """Within this context `torch.autograd.backward` adds the leaves' gradients to the sums. With
        `arrivals` it is called once, and those that it adds are final.
        """
        if sums.parts is not None:
            sums.parts.take()
        lending = self._lending
        if id(leaves) not in self._hooked:
            self._hooked[id(leaves)] = leaves
            for name in sums.views:
                leaves[name].register_post_accumulate_grad_hook(partial(lending.come, name))
        lending.sums, lending.leaves, lending.arrivals = sums, leaves, arrivals
        return lending

    @torch.no_grad()
    def open_copy(self, sums: GradientSums) -> GradientSums:
        """A copy of sums, in arenas of its own, with torch. Streams, which no sum changes, are the same."""
        copy = self._opened(_plain)
        copy.streams = sums.streams and BatchStreams(sums.streams.shapes, sums.streams.streams)
        for target, source in zip(copy.arenas, sums.arenas, strict=True):
            target.flat.copy_(source.flat)
        copy.held |= sums.held
        return copy

    def release(self, sums: GradientSums) -> None:
        """Take back sums that have been applied."""
        self._of_batch = {batch: own for batch, own in self._of_batch.items() if own is not sums}
        sums.held.clear()
        if sums.parts is not None:
            sums.parts.held.clear()
        if sums.streams is not None:
            self._most_stream_bytes = max(self._most_stream_bytes, sums.streams.num_bytes)
            sums.streams = None
        self._free[sums.source].append(sums)

    @property
    def num_bytes(self) -> int:
        """The bytes of all arenas that stay, and the most that streams have taken in addition."""
        return self._num_sets * (self._set_bytes + self._most_stream_bytes)


class _Lending:
    """Lends sums to the leaves of a stage and takes them back; a generator would cost several times as much.

    Autograd allocates the gradient of a leaf that has no sum. It is moved into the arena as soon as it is
    there, so no more than one gradient lies outside at a time. The hooks that do so stay on the leaves: to
    register them for each backward costs as much as a tenth of the backward of a small model. Between
    backwards nothing here keeps the leaves.
    """

    __slots__ = ("arrivals", "leaves", "sums")

    def __init__(self) -> None:
        self.sums: GradientSums | None = None
        self.leaves: Mapping[str, Tensor] = {}
        self.arrivals: Arrivals | None = None

    def __enter__(self) -> None:
        assert self.sums is not None, "there is something to lend"
        for name in self.sums.held:
            self.leaves[name].grad = self.sums.views[name]

    def __exit__(self, *_error: object) -> None:
        for name in self.sums.views if self.sums is not None else ():
            self.leaves[name].grad = None
        self.sums = self.arrivals = None
        self.leaves = {}

    def come(self, name: str, leaf: Tensor) -> None:
        """A gradient is there; note it if it is final. A leaf's first one of a batch is moved into its
        place.
        """
        sums = self.sums
        if sums is None:
            return
        if name not in sums.held:
            assert leaf.grad is not None, "the hook is called when a gradient has come"
            if leaf.grad.is_sparse:
                raise BiremeError(
                    f"The gradient of {name} is sparse, and the engine sums dense ones only. Make its "
                    "embedding with sparse=False."
                )
            leaf.grad = sums.views[name].copy_(leaf.grad)
            sums.held.add(name)
        if self.arrivals is not None:
            self.arrivals.note(name)


# Steps of weights whose gradients are products of two thin matrices, a chunk of rows at a time.
#
# The gradient of a whole weight is so never there, unless its optimizer needs it whole.


@torch.no_grad()
def step_all(
    stepper: Stepper,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | Product | None],
    *,
    lr_factor: float,
    scale: float,
    cut: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """Step the weights that have gradients, times `scale`, in place; gradients are changed.

    `cut` gives the pieces of gradients that are stepped, where not all of them is. An optimizer that is not
    known to treat parameters apart gets all of them at once, products too.
    """
    whole = {name: one for name, one in gradients.items() if isinstance(one, Tensor)}
    own = whole if cut is None else cut(whole)
    given = {name: gradient.to(weights[name].dtype) for name, gradient in own.items()}
    if scale != 1.0 and given:
        torch._foreach_mul_([*given.values()], scale)
    products = {
        name: gradient.scaled(scale) for name, gradient in gradients.items() if isinstance(gradient, Product)
    }
    homes = [home for home in stepper.homes if home.name in products]
    together = {home.name: products[home.name].rows() for home in homes if not home.may_be_apart}
    stepper.step(weights, given | together, lr_factor=lr_factor)
    for home in homes:
        if home.may_be_apart:
            _step(stepper, home, weights[home.name], products[home.name], lr_factor)


def most_piece_elements(stepper: Stepper, names: Collection[str]) -> int:
    """How much of a gradient is there at once at most."""
    pieces = (piece for home in stepper.homes if home.name in names for piece in pieces_of(home))
    return max((num_elements for _, num_elements in pieces), default=0)


def _step(stepper: Stepper, home: Home, weight: Tensor, product: Product, lr_factor: float) -> None:
    known = stepper.state(home.name)
    state: dict[str, Any] = {}
    for piece, _ in pieces_of(home):
        own = dict(_own_state(known, piece))
        one = Stepped(home, piece.of(weight), product.rows(piece.rows).to(weight.dtype), own)
        stepper.run([one], lr_factor)
        for key, value in one.state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape == one.tensor.shape:
                state[key] = stepper.room(home.name, key, value)
                place = piece.of(state[key])
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            else:
                state[key] = value
    stepper.keep(Stepped(home, weight, weight, state))


def _own_state(known: Mapping[str, Any], piece: ParameterRows) -> Iterator[tuple[str, Any]]:
    """What a piece is stepped with: its rows of what there is for each element, and copies of the rest."""
    for key, value in known.items():
        if isinstance(value, Tensor):
            is_of_each_element = value.ndim > 0 and value.shape == piece.home.shape
            yield key, piece.of(value) if is_of_each_element else value.clone()
        else:
            yield key, value
