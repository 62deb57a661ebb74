"""Proof that a program ends, or the circle of ranks that wait for each other.

Two semantics. *Synchronous sends*: a send completes only when its receive has been posted, so the sending
rank waits until then; a program without deadlock under them has none anywhere. *Buffered*: a send completes
at once. In both a receive only posts, and the instruction that uses the message waits for it.

In both, the UPDATE of a batch waits until every rank has come to the batch's REDUCE of all its stages: all
ranks agree on a batch before any of them steps. An UPDATE that is apart waits for none.

Replicas that average weights run the same program side by side, and meet at AVERAGE_END alone: it waits until
every member of the group that was granted has come to its AVERAGE_START. A grant names for each member its
batch, for replicas may be batches apart. Without grants the longest wait of all is taken: every replica is in
the group of every batch. Any grant that names only replicas that are there already lets its members go on at
once, so a program that ends with that wait ends with all such grants. A forced group waits for replicas that
are not there; as one stage forces at a time, these wait nowhere, and come.

Waiting never helps: a rank that can go on still can later. So it is enough to let each rank run as far as
it gets, in any order, and to look at what waits in the end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bireme.schedule.grid import circle, sum_of
from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program
from bireme.schedule.proofs.messages import channel_of

_TWO = 2
"""Replicas that are enough to show a circle between replicas that run alike."""


@dataclass(frozen=True, slots=True)
class _Standstill:
    """Ranks that wait for ever: in a circle, or for what nobody does.

    With several replicas the ranks of the second are counted on after those of the first.
    """

    waits: dict[int, str]
    """For each rank that waits, where and for what."""
    cycle: tuple[int, ...]
    """Ranks that each wait for the next and the last for the first; empty where there is no circle."""


def run_to_end(
    program: Program, *, synchronous_sends: bool, meetings: "Meetings | None" = None
) -> _Standstill | None:
    """None where the program ends, else the ranks that wait for ever.

    Replicas are simulated together where they average weights: two, or those of the `meetings`.
    """
    meetings = meetings or Meetings(1 if program.average_lag is None else _TWO)
    sums: dict[tuple[int, int], _Sum] = {}
    ranks = [
        _Rank(program, replica, rank, sums, meetings)
        for replica in range(meetings.num_replicas)
        for rank in range(program.num_ranks)
    ]
    channels: dict[tuple[int, int], _Channel] = {}
    runnable = list(range(len(ranks)))
    while runnable:
        runnable.extend(ranks[runnable.pop()].run(channels, synchronous_sends=synchronous_sends))
    stuck = {rank.number: rank for rank in ranks if rank.waits_for is not None}
    if not stuck:
        return None
    return _Standstill(
        {number: rank.describe() for number, rank in stuck.items()},
        circle({number: rank.waits_for for number, rank in stuck.items() if rank.waits_for is not None}),
    )


@dataclass(slots=True, eq=False)
class Meetings:
    """Where replicas meet: who has offered which average, and whom each average waits for."""

    num_replicas: int
    offered: set[tuple[int, int, int]] = field(default_factory=set)
    """Replica, stage and batch."""
    waiting: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """By what they wait for, the ranks."""

    def members(self, replica: int, step: Instruction) -> Mapping[int, int]:
        """The group of an AVERAGE_END: for each member, by its number, the batch. By default all replicas."""
        return dict.fromkeys(range(self.num_replicas), step.batch)

    def offer(self, replica: int, step: Instruction) -> list[int]:
        """A replica has come to an AVERAGE_START; the ranks that may go on now."""
        what = replica, step.stage, step.batch
        self.offered.add(what)
        return self.waiting.pop(what, [])

    def missing(self, replica: int, step: Instruction) -> tuple[int, int, int] | None:
        """A member of the group whose mean an AVERAGE_END waits for that is not there yet."""
        wanted = ((member, step.stage, batch) for member, batch in self.members(replica, step).items())
        return next((one for one in wanted if one not in self.offered), None)


@dataclass(slots=True)
class _Channel:
    """How many sends and receives have been reached on a channel."""

    num_sent: int = 0
    num_posted: int = 0


@dataclass(slots=True)
class _Sum:
    """The sum of a batch: the stages and ranks that have come to it, and the ranks that wait for others."""

    reduced: set[tuple[int, int]] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Rank:
    """One rank of a replica and how far it has got. `sums` are by replica and batch."""

    program: Program
    replica: int
    rank: int
    sums: dict[tuple[int, int], _Sum]
    meetings: Meetings

    def __post_init__(self) -> None:
        self.first = self.replica * self.program.num_ranks
        """The number of the replica's first rank."""
        self.number = self.first + self.rank
        self.rest: Iterator[Instruction] = iter(self.program.tracks[self.rank])
        self.current: Instruction | None = next(self.rest, None)
        self.expected: dict[Message, tuple[tuple[int, int], int]] = {}
        """The messages whose receive is posted, each with its place in its channel."""
        self.waits_for: int | None = None
        """The rank that must do something before this one can go on."""

    def run(self, channels: dict[tuple[int, int], _Channel], *, synchronous_sends: bool) -> list[int]:
        """Go as far as possible; return the ranks that may go on now."""
        freed: list[int] = []
        self.waits_for = None
        while self.current is not None and self.waits_for is None:
            step = self.current
            if step.kind in COMPUTE:
                self._compute(step, channels)
            elif step.kind in SENDS or step.kind in RECEIVES:
                self._communicate(step, channels, freed, synchronous_sends=synchronous_sends)
            elif (batch := sum_of(step)) is not None:
                self._sum(step, self.sums.setdefault((self.replica, batch), _Sum()), freed)
            elif step.kind is Kind.AVERAGE_START:
                freed.extend(self.meetings.offer(self.replica, step))
            elif step.kind is Kind.AVERAGE_END:
                self._meet(step)
            if self.waits_for is None:
                self.current = next(self.rest, None)
        return freed

    def _meet(self, step: Instruction) -> None:
        missing = self.meetings.missing(self.replica, step)
        if missing is not None:
            self.meetings.waiting.setdefault(missing, []).append(self.number)
            self.waits_for = missing[0] * self.program.num_ranks + self.program.rank_of_stage[step.stage]

    def _compute(self, step: Instruction, channels: dict[tuple[int, int], _Channel]) -> None:
        message = step.needs(self.program.num_stages)
        posted = None if message is None else self.expected.get(message)
        if message is None or posted is None:
            return
        channel, place = posted
        if channels[channel].num_sent <= place:
            self.waits_for = channel[0]
        else:
            del self.expected[message]

    def _communicate(
        self,
        step: Instruction,
        channels: dict[tuple[int, int], _Channel],
        freed: list[int],
        *,
        synchronous_sends: bool,
    ) -> None:
        between = channel_of(self.program, step)
        if between is None or between[0] == between[1]:
            return
        ends = self.first + between[0], self.first + between[1]
        channel = channels.setdefault(ends, _Channel())
        if step.kind in RECEIVES:
            self.expected[step.carries()] = ends, channel.num_posted
            channel.num_posted += 1
            freed.append(ends[0])
        elif synchronous_sends and channel.num_posted <= channel.num_sent:
            self.waits_for = ends[1]
        else:
            channel.num_sent += 1
            freed.append(ends[1])

    def _sum(self, step: Instruction, batch_sum: _Sum, freed: list[int]) -> None:
        missing = set(self.program.routes.places()) - batch_sum.reduced
        if step.kind is Kind.UPDATE and missing:
            batch_sum.waiting.append(self.number)
            self.waits_for = self.first + min(missing)[1]
        elif step.kind is Kind.REDUCE:
            batch_sum.reduced.add((step.stage, self.number - self.first))
            freed.extend(batch_sum.waiting)
            batch_sum.waiting.clear()

    def describe(self) -> str:
        step, other = self.current, self.waits_for
        if step is None:
            return f"rank {self.number} has ended"
        if step.kind is Kind.UPDATE:
            return f"rank {self.number} waits at {step} for rank {other} to reach that batch's REDUCE"
        if step.kind is Kind.AVERAGE_END:
            return f"rank {self.number} waits at {step} for rank {other} to reach its AVERAGE_START"
        if step.kind in SENDS:
            return f"rank {self.number} waits at {step} for rank {other} to post the receive"
        message = step.needs(self.program.num_stages)
        return f"rank {self.number} waits at {step} for rank {other} to send the {message}"
