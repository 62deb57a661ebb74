"""What a rank keeps while it runs its track: weight versions, gradients, stashed micro-batches, buffers.

All of it follows from the order of the instructions alone, so it is counted here once, without a clock, for
the checker (in pieces) and for the simulator (in bytes). An instruction takes what it needs when it starts
and gives back when it ends; peaks are therefore found at starts.

A message under way is part of what its sender has stashed, and is not counted again.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bireme.schedule.accesses import Sizes, unpaged
from bireme.schedule.chunk_account import Holding
from bireme.schedule.instruction import GRADIENT_DONE, RECEIVES, Instruction, Item, Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.tiers import RankTiers


@dataclass(frozen=True, slots=True)
class _TierUse:
    """What a rank keeps in a tier at most, and the bytes that are copied into it during the window."""

    name: str
    budget_bytes: int | None
    peak_bytes: float
    copied_in_bytes: float


@dataclass(frozen=True, slots=True)
class Residency:
    """The peaks of one rank. Counts are over all its stages, except versions: those of its greediest stage.

    `at_peak` says what the peak consists of; `series`, where asked for, holds the bytes kept while each
    instruction runs. All are of the device; `tiers` is of a rank that pages, the device first.
    """

    rank: int
    weight_versions: int
    peak_stashed_microbatches: int
    receive_buffers: int
    peak_bytes: float = 0.0
    peak_index: int = 0
    at_peak: dict[str, float] = field(default_factory=dict)
    series: "array[float] | None" = None
    tiers: tuple[_TierUse, ...] = ()


def copied_in_bytes(program: Program, rank: int, num_batches: int) -> tuple[int, ...]:
    """The bytes that a rank's FETCH and EVICT copy into each of its tiers, where the program is run with as
    many repetitions as so many batches need; nothing if the rank does not page.
    """
    tiers, track = program.tiers_of(rank), program.tracks[rank]
    if tiers is None:
        return ()
    track = track.repeated(track.repeats + num_batches - program.num_batches)
    parts = [copied_by(steps, tiers) for steps in (track.head, track.body, track.tail)]
    return tuple(head + track.repeats * body + tail for head, body, tail in zip(*parts, strict=True))


def copied_by(steps: Iterable[Instruction], tiers: RankTiers) -> list[int]:
    """The bytes that instructions of a rank copy into each of its tiers."""
    found = [0] * len(tiers.tiers)
    for step in steps:
        if step.page is not None and step.page.is_copied:
            found[step.page.tier + (step.kind is Kind.EVICT)] += tiers.chunk_bytes
    return found


def keeps_last_gradients(program: Program, rank: int) -> bool:
    """Whether no gradients leave a rank's device between the last backward of their batch and its update."""
    left = set[tuple[int, int]]()
    for step in program.tracks[rank]:
        page = step.page
        if step.kind is Kind.EVICT and page and (page.item, page.tier) == (Item.GRADIENT, 0):
            left.add((step.stage, step.batch))
        elif step.kind in GRADIENT_DONE:
            left.discard((step.stage, step.batch))
        elif step.kind is Kind.UPDATE and (step.stage, step.batch) in left:
            return False
    return True


_WHAT = ("weights", "gradients", "optimizer", "activations", "inputs", "receive buffers", "workspace")


_ITEM_WHAT = {Item.WEIGHTS: 0, Item.GRADIENT: 1, Item.OPTIMIZER: 2, Item.STASH: 3, Item.FROZEN: 0}
"""Where chunks of an item are counted."""


def resident(
    program: Program,
    rank: int,
    sizes: Sizes | None = None,
    *,
    series: bool = False,
    paged: Collection[tuple[Item, int]] = (),
) -> Residency:
    """Count what a rank keeps, instruction by instruction; of a rank that keeps all on its device without the
    items that are to be `paged`, each with its stage.
    """
    sizes = sizes or _weightless(program.num_stages)
    tiers = program.tiers_of(rank)
    holding = None if tiers is None else Holding(program, rank)
    ledger = _Ledger(program, rank, sizes, paged if tiers is None else tiers.chunks.keys(), series=series)
    index = 0
    entries: dict[_Like, _Entry] = {}
    for block in program.tracks[rank].blocks():
        for written in block.instructions:
            step = written
            if holding is not None:
                step = written.shifted(block.batches, block.versions)
                holding.start(step)
                ledger.hold(holding)
            kind, stage, batch, microbatch, _, half, _, page, _ = written
            what = kind, stage, half, page and page.item
            entry = entries.get(what)
            if entry is None:
                entry = entries[what] = ledger.entry(written)
            ledger.book(index, entry, batch + block.batches, microbatch)
            if holding is not None:
                holding.end(step)
            index += 1
    return ledger.result(holding)


def _weightless(num_stages: int) -> Sizes:
    nothing = (0.0,) * num_stages
    return Sizes(nothing, nothing, nothing, nothing, nothing, nothing, nothing)


_Like = tuple[Kind, int, int | None, Item | None]
"""Kind, stage, half and moved item: instructions that agree in these book the same."""


@dataclass(slots=True)
class _Entry:
    """What an instruction takes at its start and gives back at its end."""

    kind: Kind
    stage: int
    takes: list[tuple[int, float]] = field(default_factory=list)
    gives: list[tuple[int, float]] = field(default_factory=list)
    stashes: int = 0
    unstashes: int = 0
    posts: int = 0
    uses: int = 0
    accumulates: bool = False


_MAKES_VERSION = frozenset({Kind.UPDATE, Kind.TRIAL})


class _Ledger:
    """The running account of one rank."""

    def __init__(
        self,
        program: Program,
        rank: int,
        sizes: Sizes,
        paged: Collection[tuple[Item, int]],
        *,
        series: bool,
    ) -> None:
        self.program = program
        self.rank = rank
        self.whole = sizes
        self.sizes = unpaged(program, sizes, paged)
        """What is kept apart from chunks; of what replicas share, before it is cut into parts."""
        self.recomputed = program.recomputed
        stages = program.stages_of(rank)
        nothing = (0.0,) * program.num_stages
        self.kept = [0.0] * len(_WHAT)
        self.kept[0] = sum(self.sizes.version[stage] for stage in stages) / program.num_sharers
        self.kept[2] = sum(self.sizes.optimizer[stage] for stage in stages)
        if sizes.buffers:
            self.kept[2] += sum(self.sizes.buffers[stage] for stage in stages)
        frozen = self.sizes.frozen or nothing
        self.kept[2] -= (1 - 1 / program.num_sharers) * sum(frozen[stage] for stage in stages)
        self.frozen = sizes.frozen or nothing
        """The bytes of each stage that are whole besides a version."""
        if sizes.workspace:  # one pass runs at a time, and the allocator keeps what the largest took
            more = sizes.halves if sizes.halves and program.splits_backward else (0.0,) * program.num_stages
            self.kept[6] = max(sizes.workspace[stage] + more[stage] for stage in stages)
        self.bytes = sum(self.kept)
        self.versions = dict.fromkeys(stages, 1)
        beside = program.rule is Rule.FRESH and not self.sizes.master
        self.most_versions = {stage: program.banks[stage] + beside for stage in stages}
        """The banks, and under FRESH the newest weights besides the trial versions."""
        self.open: dict[tuple[int | None, ...], float] = {}
        """The bytes of gradients that are here: by stage, batch, and micro-batch where each is applied apart,
        from the first backward to the update; by stage and batch, where replicas share weights, what there is
        more than this replica's part."""
        tied = sizes.tied_gradient or nothing
        self.part_gradients = [whole - one for whole, one in zip(sizes.gradient, tied, strict=True)]
        self.kept_gradients = [
            (own - one) / program.num_sharers + one
            for own, one in zip(self.sizes.gradient, tied, strict=True)
        ]
        """What each stage has of a batch's gradients from its first backward to its update."""
        self.stashed = self.buffers = 0
        self.peak_stashed = self.peak_buffers = 0
        self.peak_bytes = self.bytes
        self.peak_index = 0
        self.at_peak = list(self.kept)
        self.series: array[float] | None = array("d") if series else None
        self.chunks: Counter[Item] = Counter()
        """The chunks on the device, in a rank that pages."""

    def entry(self, step: Instruction) -> _Entry:
        """What booking such an instruction does, whatever its batch."""
        entry = _Entry(step.kind, step.stage)
        takes, gives = entry.takes, entry.gives
        share = 1.0 if step.half is None else 0.5
        stash, inputs = self.sizes.stash[step.stage], self.sizes.inputs[step.stage]
        recomputed = step.stage in self.recomputed
        if step.kind in RECEIVES:
            takes.append((5, share * self._message_bytes(step.kind is Kind.RECV_FORWARD, step.stage)))
            entry.posts = 1
        needed = step.needs(self.program.num_stages)
        if needed is not None and self.program.ends_of(needed)[0] != self.rank:
            gives.append((5, share * self._message_bytes(step.kind is Kind.FORWARD, step.stage)))
            entry.uses = 1
        if step.kind is Kind.FORWARD:
            takes.append((4, share * inputs) if recomputed else (3, share * stash))
            entry.stashes = int(step.half != 1)
        elif step.kind is Kind.RECOMPUTE:
            takes.append((3, stash))
        elif step.kind is Kind.BACKWARD_INPUT:
            takes.append((3, self._waiting_bytes(step.stage)))
        elif step.kind in GRADIENT_DONE:
            gives.append((3, stash))
            if step.kind is Kind.BACKWARD_WEIGHT:
                gives.append((3, self._waiting_bytes(step.stage)))
            if recomputed:
                gives.append((4, inputs))
            entry.unstashes = 1
        elif step.kind is Kind.AVERAGE_START:
            takes.append((5, self.whole.version[step.stage]))
        elif step.kind is Kind.AVERAGE_END:
            gives.append((5, self.whole.version[step.stage]))
        elif step.moves_whole:
            moved = takes if step.kind is Kind.FETCH else gives
            moved += [(0, self.whole.version[step.stage]), (2, self.frozen[step.stage])]
        entry.accumulates = step.kind in GRADIENT_DONE
        return entry

    def hold(self, holding: Holding) -> None:
        """The bytes of chunks on the device are those of a rank that pages."""
        for item, count in holding.on_device.items():
            change, self.chunks[item] = count - self.chunks[item], count
            self._add(_ITEM_WHAT[item], change * holding.tiers.chunk_bytes)

    def book(self, index: int, entry: _Entry, batch: int, microbatch: int | None) -> None:
        """Let one instruction start and end."""
        for what, amount in entry.takes:
            self.kept[what] += amount
            self.bytes += amount
        self.stashed += entry.stashes
        self.buffers += entry.posts
        if entry.accumulates:
            own = microbatch if self.program.rule is Rule.STASHED else None
            self._open(self.kept_gradients[entry.stage], entry.stage, batch, own)
            if self.program.num_sharers > 1:
                self._open(self.part_gradients[entry.stage], entry.stage, batch)
        elif entry.kind in _MAKES_VERSION:
            self._open_version(entry)
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self.peak_index, self.at_peak = self.bytes, index, list(self.kept)
        if self.stashed > self.peak_stashed:
            self.peak_stashed = self.stashed
        if self.buffers > self.peak_buffers:
            self.peak_buffers = self.buffers
        if self.series is not None:
            self.series.append(self.bytes)
        for what, amount in entry.gives:
            self.kept[what] -= amount
            self.bytes -= amount
        self.stashed -= entry.unstashes
        self.buffers -= entry.uses
        if entry.kind is Kind.UPDATE:
            self._add(1, -self.open.pop((entry.stage, batch, microbatch), 0.0))
        elif entry.kind is Kind.COLLECT:
            self._add(1, -self.open.pop((entry.stage, batch), 0.0))

    def _open(self, num_bytes: float, *key: int | None) -> None:
        if key not in self.open:
            self.open[key] = num_bytes
            self._add(1, num_bytes)

    def _add(self, what: int, num_bytes: float) -> None:
        self.kept[what] += num_bytes
        self.bytes += num_bytes

    def _open_version(self, entry: _Entry) -> None:
        """A version made takes a bank of its own until all banks are in use."""
        in_place = self.program.rule is Rule.FRESH and entry.kind is Kind.UPDATE
        if not in_place and self.versions[entry.stage] < self.most_versions[entry.stage]:
            self.versions[entry.stage] += 1
            self._add(0, self.sizes.version[entry.stage] / self.program.num_sharers)

    def _waiting_bytes(self, stage: int) -> float:
        return self.sizes.waiting[stage] if self.sizes.waiting else 0.0

    def _message_bytes(self, forward: bool, stage: int) -> float:
        return (self.sizes.activation if forward else self.sizes.gradient_message)[stage]

    def result(self, holding: Holding | None) -> Residency:
        """What was found; chunks of a rank that pages are where they are."""
        tiers: tuple[_TierUse, ...] = ()
        if holding is not None:
            size = holding.tiers.chunk_bytes
            copied = copied_in_bytes(self.program, self.rank, self.program.num_batches)
            peaks = [self.peak_bytes, *(peak * size for peak in holding.peak[1:])]
            tiers = tuple(
                _TierUse(tier.name, tier.budget_bytes, peak, num_bytes)
                for tier, peak, num_bytes in zip(holding.tiers.tiers, peaks, copied, strict=True)
            )
        return Residency(
            rank=self.rank,
            weight_versions=max(self.versions.values(), default=0),
            peak_stashed_microbatches=self.peak_stashed,
            receive_buffers=self.peak_buffers,
            peak_bytes=self.peak_bytes,
            peak_index=self.peak_index,
            at_peak=dict(zip(_WHAT, self.at_peak, strict=True)),
            series=self.series,
            tiers=tiers,
        )
