"""Proofs about messages: each is made, sent, received and used once, and both ends agree on the order.

A channel is all messages from one rank to another, whichever stages they belong to: a transport without
tags delivers them in the order they are sent.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program

# Proofs about exchanges of parts: every gradient reaches its owner.
#
# What is proved: the gradients of every backward are summed over the replicas before their batch is reduced,
# and no others; nothing is added to them while that is under way, which ends before the last REDUCE of the
# batch on the rank; and a rank sums those of one stage at a time. That passes find their weights whole is
# proved with all that tiers hold (`schedule/chunk_account.py`).


def exchange_problems(program: Program) -> Iterator[str]:
    """What is wrong with the sums of parts of replicas that share weights. Every instruction must be in its
    place.
    """
    if program.num_sharers == 1:
        return
    for rank, track in enumerate(program.tracks):
        proof = _PartSums(len(program.stages_of(rank)))
        for step in track:
            yield from proof.step(step)
        if proof.under_way is not None:
            yield f"The sums of stage {proof.under_way[0]} are still under way when the window ends."


class _PartSums:
    """The gradients of one rank while its track goes by."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_reduced: Counter[int] = Counter()
        self.unsummed: set[tuple[int, int]] = set()
        """Stages and batches with gradients of this replica alone."""
        self.under_way: tuple[int, int] | None = None
        """The stage and batch whose gradients are being summed."""

    def step(self, step: Instruction) -> Iterator[str]:
        gradients = step.stage, step.batch
        match step.kind:
            case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
                self.unsummed.add(gradients)
                if gradients == self.under_way:
                    yield f"{step} adds to gradients that are being summed over replicas."
            case Kind.SCATTER:
                if gradients not in self.unsummed:
                    yield f"{step} finds no gradient that is not summed yet."
                if self.under_way is not None:
                    yield f"{step} comes while the sums of stage {self.under_way[0]} are under way."
                self.unsummed.discard(gradients)
                self.under_way = gradients
            case Kind.COLLECT:
                if gradients != self.under_way:
                    yield f"{step} waits for sums that are not under way."
                self.under_way = None
            case Kind.REDUCE:
                self.num_reduced[step.batch] += 1
                is_last = self.num_reduced[step.batch] == self.num_stages
                is_under_way = self.under_way is not None and self.under_way[1] == step.batch
                if gradients in self.unsummed or (is_last and is_under_way):
                    yield f"{step} comes before the gradients of its stages have been summed over replicas."


def channel_of(program: Program, instruction: Instruction) -> tuple[int, int] | None:
    """The (source, destination) ranks of a send or receive; None where it leads out of the pipeline."""
    message = instruction.carries()
    if not all(0 <= stage < program.num_stages for stage in (message.from_stage, message.to_stage)):
        return None
    return program.ends_of(message)


def message_problems(program: Program) -> Iterator[str]:
    """What is wrong with the messages of a lowered program, whose instructions are all in their places.

    All ranks are walked through side by side, so that both ends of a channel can be compared as they come.
    """
    channels: dict[tuple[int, int], _Channel] = {}
    walks = [_Walk(program, rank, channels) for rank in range(program.num_ranks)]
    for steps in zip_longest(*program.tracks):
        for walk, step in zip(walks, steps, strict=True):
            if step is not None:
                yield from walk.step(step)
    for walk in walks:
        yield from walk.finish()
    for channel in channels.values():
        yield from channel.finish()


@dataclass(slots=True, eq=False)
class _Channel:
    """The two ends of a channel: what one has sent or received that the other has not come to yet."""

    source: int
    destination: int
    sent: deque[Message] = field(default_factory=deque)
    received: deque[Message] = field(default_factory=deque)
    number: int = 0
    out_of_order: str | None = None

    def match(self) -> None:
        """Compare what both ends have come to."""
        while self.sent and self.received:
            sent, received = self.sent.popleft(), self.received.popleft()
            if sent != received and self.out_of_order is None:
                self.out_of_order = (
                    f"From rank {self.source} to rank {self.destination}, message {self.number} is sent as "
                    f"the {sent} but received as the {received}: both ranks must have them in one order."
                )
            self.number += 1

    def finish(self) -> Iterator[str]:
        if self.out_of_order is not None:
            yield self.out_of_order
            return
        for sent in self.sent:
            yield f"Rank {self.source} sends the {sent}, but rank {self.destination} posts no receive for it."
        for received in self.received:
            yield f"Rank {self.destination} receives the {received}, but rank {self.source} never sends it."


@dataclass(slots=True, eq=False)
class _Outbox:
    """The messages a rank has computed and not passed on yet, in halves where they were made so."""

    parts: dict[Message, set[int | None]] = field(default_factory=dict)
    """For each whole message {None} where it was made whole, else the halves that are there."""

    def put(self, message: Message | None) -> None:
        if message is not None:
            self.parts.setdefault(message._replace(half=None), set()).add(message.half)

    def take(self, message: Message) -> bool:
        """Pass a message on: a half that was made, the whole, or both halves as the whole."""
        whole = message._replace(half=None)
        there = self.parts.get(whole, set())
        if message.half in there:
            there.discard(message.half)
        elif message.half is None and there == {0, 1}:
            there.clear()
        else:
            return False
        if not there:
            del self.parts[whole]
        return True

    def left(self) -> list[Message]:
        return sorted(self.parts, key=str)


@dataclass(slots=True, eq=False)
class _Walk:
    """One rank's messages while its instructions go by: what is sent must be there, what is used received."""

    program: Program
    rank: int
    channels: dict[tuple[int, int], _Channel]
    posted: set[Message] = field(default_factory=set)
    unsent: _Outbox = field(default_factory=_Outbox)

    def step(self, instruction: Instruction) -> Iterator[str]:
        if instruction.kind in COMPUTE:
            yield from self._use(instruction)
            self.unsent.put(instruction.makes(self.program.num_stages))
        elif instruction.kind in SENDS or instruction.kind in RECEIVES:
            yield from self._move(instruction)

    def _move(self, instruction: Instruction) -> Iterator[str]:
        ends = channel_of(self.program, instruction)
        if ends is None:
            return
        message = instruction.carries()
        channel = self.channels.setdefault(ends, _Channel(*ends))
        if instruction.kind in SENDS:
            if not self.unsent.take(message):
                yield f"Rank {self.rank} sends the {message}, which it has not computed yet or already sent."
            channel.sent.append(message)
        else:
            if message in self.posted:
                yield f"Rank {self.rank} posts {instruction} a second time."
            self.posted.add(message)
            channel.received.append(message)
        channel.match()

    def _use(self, instruction: Instruction) -> Iterator[str]:
        message = instruction.needs(self.program.num_stages)
        if message is None:
            return
        if self.program.ends_of(message)[0] == self.rank:
            if not self.unsent.take(message):
                yield (
                    f"Rank {self.rank} runs {instruction} before stage {message.from_stage} has made the "
                    f"{message}."
                )
        elif message in self.posted:
            self.posted.discard(message)
        else:
            receive = Kind.RECV_FORWARD if message.forward else Kind.RECV_BACKWARD
            post = f"{message.to_stage}{receive.value}{message.microbatch}"
            yield (
                f"Rank {self.rank} runs {instruction} without a receive for the {message}: post {post} "
                "before it."
            )

    def finish(self) -> Iterator[str]:
        for message in sorted(self.posted, key=str):
            yield f"Rank {self.rank} receives the {message} but does not use it afterwards."
        for message in self.unsent.left():
            to_rank = self.program.ends_of(message)[1]
            if to_rank != self.rank:
                yield f"Rank {self.rank} computes the {message} but never sends it to rank {to_rank}."
