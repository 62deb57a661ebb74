"""Proofs about messages: each is made, sent, received and used once, and both ends agree on the order.

A channel is all messages from one rank to another, whichever stages they belong to: a transport without
tags delivers them in the order they are sent.
"""

from collections.abc import Iterator

from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Message
from bireme.schedule.program import Program

__all__ = ["channel_of", "message_problems"]


def channel_of(program: Program, instruction: Instruction) -> tuple[int, int] | None:
    """The (source, destination) ranks of a send or receive; None where it leads out of the pipeline."""
    message = instruction.carries()
    from_stage = message.to_stage - 1 if message.forward else message.to_stage + 1
    if not (0 <= message.to_stage < program.num_stages and 0 <= from_stage < program.num_stages):
        return None
    return program.rank_of_stage[from_stage], program.rank_of_stage[message.to_stage]


def message_problems(program: Program) -> Iterator[str]:
    """What is wrong with the messages of a lowered program."""
    channels: dict[tuple[int, int], _Channel] = {}
    for rank in range(program.num_ranks):
        yield from _rank_problems(program, rank, channels)
    for (source, destination), channel in sorted(channels.items()):
        yield from channel.problems(source, destination)


class _Channel:
    """The two ends of a channel, compared as they come: only what differs so far is kept."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.received: list[Message] = []

    def problems(self, source: int, destination: int) -> Iterator[str]:
        for number, (sent, received) in enumerate(zip(self.sent, self.received, strict=False)):
            if sent != received:
                yield (
                    f"From rank {source} to rank {destination}, message {number} is sent as the {sent} but "
                    f"received as the {received}: both ranks must have them in one order."
                )
                return
        for sent in self.sent[len(self.received) :]:
            yield f"Rank {source} sends the {sent}, but rank {destination} never posts a receive for it."
        for received in self.received[len(self.sent) :]:
            yield f"Rank {destination} receives the {received}, but rank {source} never sends it."


def _rank_problems(program: Program, rank: int, channels: dict[tuple[int, int], _Channel]) -> Iterator[str]:
    """Walk through one rank: what it sends must be there, what it uses must have been received."""
    unsent = _Outbox()
    posted: set[Message] = set()
    for instruction in program.tracks[rank]:
        if instruction.kind in COMPUTE:
            yield from _use(program, rank, instruction, posted, unsent)
            unsent.put(instruction.makes(program.num_stages))
        elif instruction.kind in SENDS or instruction.kind in RECEIVES:
            channel = channel_of(program, instruction)
            is_send = instruction.kind in SENDS
            if channel is None:
                yield f"Rank {rank} holds {instruction}, but there is no stage on the other side."
                continue
            if channel[0] == channel[1]:
                yield f"Rank {rank} holds {instruction}, but both stages are on that rank."
                continue
            message = instruction.carries()
            ends = channels.setdefault(channel, _Channel())
            (ends.sent if is_send else ends.received).append(message)
            if is_send and not unsent.take(message):
                yield f"Rank {rank} sends the {message}, which it has not computed yet or already sent."
            if not is_send and message in posted:
                yield f"Rank {rank} posts {instruction} a second time."
            if not is_send:
                posted.add(message)
    for message in sorted(posted, key=str):
        yield f"Rank {rank} receives the {message} but does not use it afterwards."
    for message in unsent.left():
        to_rank = program.rank_of_stage[message.to_stage]
        if to_rank != rank:
            yield f"Rank {rank} computes the {message} but never sends it to rank {to_rank}."


def _use(
    program: Program, rank: int, instruction: Instruction, posted: set[Message], unsent: "_Outbox"
) -> Iterator[str]:
    message = instruction.needs(program.num_stages)
    if message is None:
        return
    from_stage = message.to_stage - 1 if message.forward else message.to_stage + 1
    from_rank = program.rank_of_stage[from_stage]
    if from_rank == rank:
        if not unsent.take(message):
            yield f"Rank {rank} runs {instruction} before stage {from_stage} has made the {message}."
    elif message in posted:
        posted.discard(message)
    else:
        yield (
            f"Rank {rank} runs {instruction} without a receive for the {message}: post "
            f"{message.to_stage}{'RECV_F' if message.forward else 'RECV_B'}{message.microbatch} before it."
        )


class _Outbox:
    """The messages a rank has computed and not passed on yet, in halves where they were made so."""

    def __init__(self) -> None:
        self.halves: dict[Message, set[int]] = {}

    def put(self, message: Message | None) -> None:
        if message is not None:
            halves = self.halves.setdefault(message._replace(half=None), set())
            halves.update((0, 1) if message.half is None else (message.half,))

    def take(self, message: Message) -> bool:
        whole = message._replace(half=None)
        wanted = {0, 1} if message.half is None else {message.half}
        there = self.halves.get(whole, set())
        if not wanted <= there:
            return False
        there -= wanted
        if not there:
            del self.halves[whole]
        return True

    def left(self) -> list[Message]:
        return sorted(self.halves, key=str)
