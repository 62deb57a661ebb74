"""The replicas of a stage that share its optimizer, or its weights and gradients too: how they reach each
other, and the weights of which each steps its parts. These are whole in every replica, or whole only while
the stage computes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from bireme.errors import BiremeError, closest
from bireme.memory.arena import Arena
from bireme.plan.plan_request import SHARDS
from bireme.runtime.layout import Layout
from bireme.runtime.paging.mover import CopyJob, ThreadMover
from bireme.runtime.paging.stage_memory import StageMemory
from bireme.runtime.parameter_groups import (
    ParameterGroupPart,
    ParameterGroupWeights,
    Tensors,
    parameter_groups_of,
    part_of,
)
from bireme.runtime.stepper import Home, Stepper
from bireme.runtime.trial import CHUNK_ELEMENTS, ParameterRows, Trials, Tried
from bireme.schedule.instruction import Item
from bireme.sync.arrivals import Parts, rounds_of
from bireme.sync.coded import GradientSummation
from bireme.sync.exchange import SentBytes
from bireme.sync.group import Group, Pending
from bireme.sync.slices import SLICE_BYTES


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


# Trial steps of replicas that share an optimizer.
#
# Every replica tries a step with gradients of its own, and for that needs moments that others have. So it
# sends each owner its gradient of the owner's part; the owner tries a step of its part for each replica, and
# sends back what came of it. All of that goes a chunk of every part at a time.


def _trial_rounds(part: ParameterGroupPart) -> Iterator[list[slice]]:
    """The elements of every member's part that are tried together: some, or the next whole parameter."""
    if not part.is_whole:
        for begin in rounds_of(part.parts, CHUNK_ELEMENTS):
            yield [
                slice(min(first + begin, end), min(first + begin + CHUNK_ELEMENTS, end))
                for first, end in pairwise(part.parts)
            ]
        return
    ends = [*part.parts[:-1]]
    owned = zip_longest(*part.sizes, fillvalue=0)
    for sizes in owned:
        yield [slice(end, end + size) for end, size in zip(ends, sizes, strict=True)]
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]


def _exchanged(sharers: Sharers, given: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[Tensor]:
    """What all members send, so many elements each, for what they are given here."""
    whole = torch.cat([*given])
    taken = whole.new_empty(sum(lengths))
    sharers.group.exchange(whole, [*map(len, given)], taken, lengths).wait()
    return torch.split(taken, [*lengths])


def _sent_bytes(sharers: Sharers, given: Sequence[Tensor]) -> int:
    """The bytes that go to other members of what they are given here."""
    return sum(one.nbytes for member, one in enumerate(given) if member != sharers.member)


def _tried(
    part: ParameterGroupPart,
    homes: dict[str, Home],
    source: Tensor,
    begin: int,
    gradient: Tensor,
    goal: Tensor,
    held: Collection[str],
) -> Iterator[Tried]:
    """The pieces of a chunk that begins there in the part, with their gradients if these are held."""
    end = begin + len(gradient)
    for name, slot in part.own.slots.items():
        first, last = max(slot.begin, begin), min(slot.end, end)
        if first >= last:
            continue
        shape = slot.shape if part.is_whole else (last - first,)
        rows = None if part.is_whole else slice(first - slot.begin, last - slot.begin)
        here = slice(first - begin, last - begin)
        yield Tried(
            ParameterRows(homes[name], rows),
            source[first:last].view(shape),
            goal[here].view(shape),
            gradient[here].view(shape) if name in held else None,
        )


_ONCE = frozenset({"eta", "mu", "mu_product", "step"})
"""What torch's optimizers remember once for all elements of a parameter, which may have no axes itself."""


class SharedWeights:
    """One replica's side of it. What takes part with the others must be called by all, in the same order.

    `frozen` weights do not learn; this replica has its parts of them.
    """

    def __init__(
        self,
        sharers: Sharers,
        stepper: Stepper,
        trials: Trials,
        stores: Sequence[ParameterGroupWeights],
        num_banks: int,
        frozen: Sequence[ParameterGroupWeights] = (),
    ) -> None:
        self._sharers = sharers
        self._stepper = stepper
        self._trials = trials
        self._stores = stores
        self._frozen = frozen
        self._arriving: list[list[Pending]] = [[] for _ in range(num_banks)]
        self._frozen_arriving: list[Pending] = []
        parts = (*stepper.parts, *(store.part for store in frozen if store.part is not None))
        self.part_of: Mapping[str, ParameterGroupPart] = {
            name: part for part in parts for name in part.pieces
        }
        """Of each parameter that this replica owns a piece of, the part that this lies in."""
        self.shapes = {
            name: slot.shape for store in (*stores, *frozen) for name, slot in store.banks[0].slots.items()
        }

    def own(self, tensors: Tensors) -> dict[str, Tensor]:
        """This replica's pieces of some tensors, by the names of their parameters."""
        return {
            name: self.part_of[name].piece(name, one) for name, one in tensors.items() if name in self.part_of
        }

    def piece_of_state(self, name: str, key: str, value: Tensor) -> Tensor:
        """This replica's piece of what an optimizer remembers of a parameter under a key, given whole or as
        the piece; what it remembers once for all elements is no piece.
        """
        is_whole = tuple(value.shape) == self.shapes[name] and (value.ndim > 0 or key not in _ONCE)
        return self.part_of[name].piece(name, value).clone() if is_whole else value

    def made(self, bank: int) -> None:
        """This replica has made its part of a version: begin to give it to the others, and to get theirs."""
        self.gather(bank)

    def gather(self, bank: int, *, trains: bool = True) -> None:
        """Begin to send this replica's parts of a bank, and to get the others'. Take part with the others."""
        self._arriving[bank] = self._gathered(self._stores, bank, trains=trains)

    def _gathered(self, stores: Sequence[ParameterGroupWeights], bank: int, *, trains: bool) -> list[Pending]:
        return self._sharers.gather(
            ((store.to_gather(bank, trains=trains), _parts(store)) for store in stores), trains=trains
        )

    def make_whole(self, bank: int) -> None:
        """Get the others' parts of a bank at once, whichever tiers have it. Take part with the others."""
        for store in self._stores:
            flat = store.banks[bank].flat
            whole = store.memory.read(flat)
            for pending in self._sharers.gather([(whole, _parts(store))], trains=False):
                pending.wait()
            store.memory.put_back(flat, whole)

    def arrive(self, version: int) -> None:
        """Wait until all parts of a version, or of the bank of that number, are there."""
        for under_way in (self._arriving[version % len(self._arriving)], self._frozen_arriving):
            while under_way:
                under_way.pop(0).wait()

    def arrive_all(self) -> None:
        """Wait until nothing is on its way."""
        for bank in range(len(self._arriving)):
            self.arrive(bank)

    @torch.no_grad()
    def try_step(
        self,
        bank: int,
        flats: Sequence[Tensor],
        held: Collection[str],
        *,
        lr_factor: float,
        factor: float,
    ) -> None:
        """Write into a bank what a step with this replica's gradients would make of the newest weights: with
        those in `held`, times `factor`; `flats` has the memory they lie in. Take part with the others.
        """
        sharers, stores = self._sharers, self._stores
        device = stores[0].banks[bank].flat.device if stores else torch.device("cpu")
        nothing = (
            torch.zeros((), dtype=one.dtype, device=device).expand(one.slots.num_elements)
            for one in self._stepper.parameter_groups
        )
        names = [name for store in stores for name in store.leaves[bank]]
        has = [float(name in held) for name in names]
        own = torch.tensor([factor, *has], dtype=torch.float64, device=device)
        told = [torch.empty_like(own) for _ in range(sharers.num_members)]
        sharers.group.gather(own, told).wait()
        of_all = [one.tolist() for one in told]
        helds = [{name for name, has in zip(names, one[1:], strict=True) if has} for one in of_all]
        homes = {home.name: home for home in self._stepper.homes}
        for store, flat in zip(stores, flats or [*nothing], strict=True):
            part, source, target = store.part, store.apart, store.banks[bank].flat
            assert part is not None, "what is tried is shared"
            assert source is not None, "trial versions are made from weights apart"
            for pieces in _trial_rounds(part):
                given = [flat[piece] for piece in pieces]
                gradients = _exchanged(sharers, given, [given[sharers.member].numel()] * sharers.num_members)
                sharers.summed.add(_sent_bytes(sharers, given))
                made = [torch.empty_like(one, dtype=target.dtype) for one in gradients]
                begin = pieces[sharers.member].start - part.parts[sharers.member]
                for member, (gradient, goal) in enumerate(zip(gradients, made, strict=True)):
                    chunk = list(_tried(part, homes, source.flat, begin, gradient, goal, helds[member]))
                    self._trials.try_chunk(chunk, lr_factor=lr_factor, factor=float(of_all[member][0]))
                sharers.gathered_bytes += _sent_bytes(sharers, made)
                goals = [target[piece] for piece in pieces]
                for piece, came in zip(goals, _exchanged(sharers, made, [*map(len, goals)]), strict=True):
                    piece.copy_(came)

    @torch.no_grad()
    def copies(self, bank: int) -> Tensors:
        """Copies of the newest weights that no replica has whole, as they are stepped. Take part with the
        others.
        """
        found: dict[str, Tensor] = {}
        newest = (*((store, bank) for store in self._stores), *((store, 0) for store in self._frozen))
        for store, number in newest:
            part = store.part
            if part is None or store.held(number, is_newest=True)[1]:
                continue
            own = store.memory.read(store.newest_part(number))
            whole = Arena(store.banks[0].slots, own.dtype, own.device)
            part.of(whole.flat).copy_(own)
            for pending in self._sharers.gather([(whole.flat, part.parts)], trains=False):
                pending.wait()
            found |= whole.views
        return found


def frozen_parts(sharers: Sharers, weights: Tensors, memory: StageMemory) -> list[ParameterGroupWeights]:
    """This replica's parts of the weights of a stage that do not learn, in one bank each."""
    dtypes = {name: one.dtype for name, one in weights.items()}
    return [
        ParameterGroupWeights(
            group,
            weights,
            dtypes,
            1,
            memory,
            is_apart=False,
            part=part_of(group, sharers.member, sharers.num_members),
            keeps_part=True,
            item=Item.FROZEN,
        )
        for group in parameter_groups_of(weights, dict.fromkeys(weights, 0))
    ]


class GatheredWeights(SharedWeights):
    """As `SharedWeights`, but each replica keeps its part only, also of the `frozen` weights. FETCH gathers a
    version from all replicas, and the frozen weights with the first; EVICT gives their memory back.
    """

    _num_taken = 0
    """The versions that are whole, or on their way."""

    def made(self, bank: int) -> None:
        """This replica has its part of a version; no pass needs the whole yet."""

    def make_whole(self, bank: int) -> None:
        """No pass needs the whole of a bank yet."""

    def take(self, version: int, *, trains: bool = True) -> None:
        """Begin to gather a version. Take part with the others."""
        bank = version % len(self._arriving)
        if not self._num_taken:
            for store in self._frozen:
                store.lent(0).take()
            self._frozen_arriving = self._gathered(self._frozen, 0, trains=trains)
        self._num_taken += 1
        for store in self._stores:
            store.lent(bank).take()
        self.gather(bank, trains=trains)

    def let_go(self, version: int) -> None:
        """Give back the memory of a version, but for this replica's part."""
        self.arrive(version)
        self._num_taken -= 1
        for store in self._stores:
            store.lent(version % len(self._arriving)).let_go()
        for store in () if self._num_taken else self._frozen:
            store.lent(0).let_go()

    @contextmanager
    def lent(self, version: int) -> Iterator[bool]:
        """Within this context a version is whole; False, and nothing is, while another stage has one lent.
        Take part with the others.
        """
        sharers = self._sharers
        if sharers.has_lent:
            yield False
            return
        sharers.has_lent = True
        self.take(version, trains=False)
        self.arrive(version)
        try:
            yield True
        finally:
            self.let_go(version)
            sharers.has_lent = False


def _parts(store: ParameterGroupWeights) -> Parts:
    assert store.part is not None, "the stores of shared weights have parts"
    return store.part.parts
