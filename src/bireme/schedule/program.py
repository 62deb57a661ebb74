"""The noun of this room: a `Program`, what every rank does and in which order.

A program covers a window of batches, from a first forward to the last update, and holds nothing but
instructions: interpreters bring time, bytes and processes. It is made by a generator, by `lower` or from a
file, and never changed.

A long program is a loop. Each rank's `Track` is a head, a body that repeats once a batch, and a tail, so a
thousand batches take the memory of a few.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import overload

from bireme.schedule.instruction import RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.routes import Routes
from bireme.schedule.tiers import RankTiers

# Which weight version a micro-batch runs on: the part of a schedule that decides what is computed.
#
# W(v) is the weights after v updates. Batches and micro-batches count from 0; d is the number of stages,
# s the stage, m the micro-batches of a batch, t the batch, k = t·m + micro-batch.


class Rule(StrEnum):
    """The update rules. All but STASHED give every stage the same delay."""

    SYNCHRONOUS = "synchronous"
    """Batch t runs on W(t): what one process would compute."""
    DELAYED = "delayed"
    """Batch t runs on W(max(t−1, 0)): a delay of one update, on every stage, in both passes."""
    FRESH = "fresh"
    """Batch t runs on a trial version t, made from W(t−1) and the gradients of batch t−1 seen so far."""
    STASHED = "stashed"
    """An update after every micro-batch; micro-batch k runs on W(k−(d−1−s)), stage by stage, or on the
    window's first version."""


def banks_needed(rule: Rule, stage: int, num_stages: int) -> int:
    """How many versions to compute with a stage must be able to hold at once.

    Under FRESH these are trial versions; W itself is kept in addition, in the optimizer's master copy
    where there is one.
    """
    match rule:
        case Rule.SYNCHRONOUS:
            return 1
        case Rule.DELAYED | Rule.FRESH:
            return 2
        case Rule.STASHED:
            return num_stages - stage


def updates_per_batch(rule: Rule, num_microbatches: int) -> int:
    """How many versions a batch makes."""
    return num_microbatches if rule is Rule.STASHED else 1


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a track: `instructions`, each to be read `batches` batches and `versions` versions later."""

    instructions: tuple[Instruction, ...]
    batches: int
    versions: int


@dataclass(frozen=True, slots=True)
class Track(Sequence[Instruction]):
    """One rank's instruction list, compressed: `head`, then `body` `repeats` times, then `tail`.

    Repetition i of the body is the body shifted by i batches, and by i · `versions_per_batch` versions;
    head and tail are read as they are.
    """

    head: tuple[Instruction, ...]
    body: tuple[Instruction, ...] = ()
    repeats: int = 0
    tail: tuple[Instruction, ...] = ()
    versions_per_batch: int = 1

    def blocks(self) -> Iterator[Block]:
        """The track as runs with their shifts, for interpreters that need no object per instruction."""
        yield Block(self.head, 0, 0)
        for i in range(self.repeats):
            yield Block(self.body, i, i * self.versions_per_batch)
        yield Block(self.tail, 0, 0)

    def written(self) -> Iterator[Instruction]:
        """Every instruction that is written down: each one of the body once."""
        yield from self.head
        if self.repeats:
            yield from self.body
        yield from self.tail

    def steady(self, num_batches: int) -> tuple[tuple[Instruction, ...], int]:
        """A batch of the steady state, or all of a window of `num_batches` where there is none, and the
        number of its batches.
        """
        return (self.body, 1) if self.repeats else (self.head, num_batches)

    def of(self, steps: Iterable[Instruction]) -> "Track":
        """These instructions, written out, in place of its own."""
        return Track(tuple(steps), versions_per_batch=self.versions_per_batch)

    def repeated(self, repeats: int) -> "Track":
        """The same loop, run so many times."""
        more = repeats - self.repeats
        tail = tuple(step.shifted(more, more * self.versions_per_batch) for step in self.tail)
        return Track(self.head, self.body, repeats, tail, self.versions_per_batch)

    def later(self, batches: int) -> "Track":
        """The same so many batches later."""
        versions = batches * self.versions_per_batch
        head, body, tail = (
            tuple(step.shifted(batches, versions) for step in steps)
            for steps in (self.head, self.body, self.tail)
        )
        return Track(head, body, self.repeats, tail, self.versions_per_batch)

    def __len__(self) -> int:
        return len(self.head) + len(self.body) * self.repeats + len(self.tail)

    def __iter__(self) -> Iterator[Instruction]:
        for block in self.blocks():
            if block.batches == 0:
                yield from block.instructions
            else:
                for instruction in block.instructions:
                    yield instruction.shifted(block.batches, block.versions)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Instruction]: ...
    def __getitem__(self, index: int | slice) -> Instruction | list[Instruction]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(index)
        if position < len(self.head):
            return self.head[position]
        position -= len(self.head)
        if position < len(self.body) * self.repeats:
            i, within = divmod(position, len(self.body))
            return self.body[within].shifted(i, i * self.versions_per_batch)
        return self.tail[position - len(self.body) * self.repeats]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTraits:
    """What programs of one kind have in common, whatever their batches.

    `routes` give a rank any number of stages, neighbors or not, or a stage several ranks. `banks` is how many
    weight versions each stage may keep: version v lives in bank v mod `banks[stage]`, so making version v
    destroys version v − banks.
    """

    name: str
    rule: Rule
    routes: Routes
    num_microbatches: int
    banks: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()
    """The stages that keep only their inputs and run their forward again before the backward."""

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank of each stage, or the first of its ranks."""
        return self.routes.rank_of_stage

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.routes.num_stages

    @property
    def num_ranks(self) -> int:
        """How many processes one replica has."""
        return self.routes.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank, in the model's order."""
        return self.routes.stages_of(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(ProgramTraits):
    """What each rank does in a window of batches, and what an interpreter must know to do it."""

    num_batches: int
    tracks: tuple[Track, ...]
    first_batch: int = 0
    tiers: tuple[RankTiers | None, ...] = ()
    """For each rank how its memory is cut, None where all stays on the device; empty where no rank pages."""
    average_lag: int | None = None
    """Where replicas average weights after each update: how many updates later the mean may become part of
    the weights. None where they do not."""
    num_sharers: int = 1
    """The replicas that share the weights of each stage: each keeps a part, and gathers all where they are
    used. 1 where each replica has its weights whole."""

    @property
    def moves_memory(self) -> bool:
        """Whether ranks copy chunks between tiers, or exchange parts with the replicas that own them."""
        return bool(self.tiers) or self.num_sharers > 1

    def ends_of(self, message: Message) -> tuple[int, int]:
        """The rank that makes a message and the rank that uses it."""
        source = self.routes.rank_of(message.from_stage, message.microbatch)
        return source, self.routes.rank_of(message.to_stage, message.microbatch)

    @property
    def num_instructions(self) -> int:
        """Over all ranks, communication included."""
        return sum(len(track) for track in self.tracks)

    @property
    def batches(self) -> range:
        """The batches of the window."""
        return range(self.first_batch, self.first_batch + self.num_batches)

    @property
    def is_lowered(self) -> bool:
        """Whether communication has been put in."""
        kinds = SENDS | RECEIVES
        return any(instruction.kind in kinds for track in self.tracks for instruction in track.written())

    @property
    def updates_apart(self) -> bool:
        """Whether any stage is updated before the others have their gradients."""
        return any(instruction.is_apart for track in self.tracks for instruction in track.written())

    @property
    def splits_backward(self) -> bool:
        """Whether any backward runs in two halves."""
        return any(i.kind is Kind.BACKWARD_INPUT for track in self.tracks for i in track.written())

    @property
    def num_sliced(self) -> int:
        """How many micro-batches of a batch go forward in halves on the first stage."""
        first = self.tracks[self.rank_of_stage[0]].written()
        return sum(
            i.half == 0 and i.stage == 0 and i.kind is Kind.FORWARD and i.batch == self.first_batch
            for i in first
        )

    def of_length(self, num_batches: int) -> "Program":
        """The same loop, run for so many batches."""
        more = num_batches - self.num_batches
        if not more:
            return self
        tracks = tuple(track.repeated(track.repeats + more) for track in self.tracks)
        return replace(self, tracks=tracks, num_batches=num_batches)

    def later(self, batches: int) -> "Program":
        """The same so many batches later, which is right where the rule asks for versions as much later."""
        if not batches:
            return self
        return replace(
            self,
            tracks=tuple(track.later(batches) for track in self.tracks),
            first_batch=self.first_batch + batches,
            tiers=tuple(
                None if one is None else one.later(batches * track.versions_per_batch, self.banks)
                for one, track in zip(self.tiers, self.tracks, strict=False)
            ),
        )

    def version_of(self, step: Instruction) -> int:
        """The version that the rule asks for where a compute instruction of a micro-batch runs.

        A window starts drained: W(first_batch) is made, and under DELAYED the version before it is still
        there.
        """
        match self.rule:
            case Rule.SYNCHRONOUS | Rule.FRESH:
                return step.batch
            case Rule.DELAYED:
                return max(step.batch - 1, 0)
            case Rule.STASHED:
                newest = self.first_batch * self.num_microbatches
                k = step.batch * self.num_microbatches + (step.microbatch or 0)
                return max(k - (self.num_stages - 1 - step.stage), newest)

    def completed_by(self, batch: int) -> int:
        """The version that the mean after a batch's update becomes a part of; not past the window's last."""
        return min(batch + 1 + (self.average_lag or 0), self.batches.stop)

    def tiers_of(self, rank: int) -> RankTiers | None:
        """How a rank's memory is cut into chunks and tiers; None where all stays on the device."""
        return self.tiers[rank] if self.tiers else None
