"""Instructions as the inner loop of the simulator wants them: what to do, how long, with which message."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError
from bireme.schedule.instruction import AVERAGES, COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Block, Program
from bireme.schedule.proofs.messages import channel_of
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, SimulatedChannel

LOCAL, USE, SEND, RECEIVE, REDUCE, UPDATE, POSTING_USE, WAITING_SEND, IDLE_RECEIVE = range(9)
"""Without overlap at the receiver a RECEIVE is idle, and the use of the message posts it. Without any, a rank
waits for its sends.
"""
PASSING = frozenset({SEND, RECEIVE, WAITING_SEND, IDLE_RECEIVE})
"""What a rank does without waiting for its sends."""
FREE = PASSING | {LOCAL}
"""What waits for nothing that comes from elsewhere."""

SYNC, AVERAGE = 4, 6
"""The places of a stage's sum and of its average among its keys."""
AGREED = 1
"""From the key of a sync to the key of the agreement of all ranks after it."""
EARLY = 3
"""From the key of a sync to the key of the part of it that crosses during the last backward."""


class Operation(NamedTuple):
    """An instruction as the inner loop wants it: what to do, how long, and with which message."""

    code: int
    seconds: float
    key: int
    """The message or sync it is about; batches later, so many strides more."""
    channel: int
    num_bytes: float
    instruction: Instruction


_op: Callable[[tuple[int, float, int, int, float, Instruction]], Operation] = partial(
    tuple.__new__, Operation
)
"""Makes an operation in less time: there is one for each instruction."""


class _Like(NamedTuple):
    """The common part of operations of one kind, stage and half; `key` is that of micro-batch 0 of batch 0.
    If stages are on several ranks, these are operations of one micro-batch: its messages cross between the
    same ranks.
    """

    code: int
    seconds: float
    key: int
    channel: int
    num_bytes: float


@dataclass(eq=False)
class Operations:
    """The operations of a program's ranks, and the channels that their messages go through."""

    _program: Program
    _costs: Costs
    _network: Network
    _agree: bool

    def __post_init__(self) -> None:
        self.channels: list[SimulatedChannel] = []
        self.stride = self._program.num_stages * 8
        """From the keys of a micro-batch to those of the next."""
        self._number_of_channel: dict[tuple[int, int, bool], int] = {}
        self.begins_sum: dict[int, tuple[Operation, Operation]] = {}
        """A last backward, and the sum that begins while it runs, by the identity of the backward. It is
        kept here, or another operation could get its identity after a rank has ended.
        """

    def of_rank(self, rank: int) -> Iterator[tuple[Operation, int]]:
        """A rank's track as operations, each with the shift of its key."""
        num_microbatches, each = self._program.num_microbatches, self.stride
        is_wide = bool(self._program.routes.shares)
        ready: dict[int, list[Operation]] = {}
        alike: dict[tuple[Kind, int, int | None, bool, int | None], _Like] = {}

        def made(step: Instruction) -> Operation:
            kind, stage, batch, microbatch, _, half, _, _, is_apart = step
            what = kind, stage, half, is_apart, microbatch if is_wide else None
            like = alike.get(what)
            if like is None:
                like = alike[what] = self._like(step, rank)
            code, seconds, key, channel, num_bytes = like
            if code != LOCAL:
                key += (batch * num_microbatches + (microbatch or 0)) * each
            return _op((code, seconds, key, channel, num_bytes, step))

        def shifted(block: Block) -> Iterator[tuple[Operation, int]]:
            ops = ready.get(id(block.instructions))
            if ops is None:
                ops = ready[id(block.instructions)] = [made(step) for step in block.instructions]
                self._note_early(ops)
            return zip(ops, repeat(block.batches * num_microbatches * each))

        return chain.from_iterable(map(shifted, self._program.tracks[rank].blocks()))

    def _note_early(self, ops: Sequence[Operation]) -> None:
        """Note the backwards during which a sum begins."""
        last: dict[tuple[int, int], Operation] = {}
        for op in ops if any(self._costs.early_share) else ():
            step = op.instruction
            if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                last[step.stage, step.batch] = op
            elif step.kind is Kind.REDUCE and self._costs.early_share[step.stage]:
                backward = last.get((step.stage, step.batch))
                if backward is not None and backward.instruction.kind is Kind.BACKWARD:
                    self.begins_sum[id(backward)] = backward, op

    def _like(self, step: Instruction, rank: int) -> _Like:
        program, costs = self._program, self._costs
        if step.kind in SENDS or step.kind in RECEIVES:
            ends = channel_of(program, step)
            if ends is None:
                raise BiremeError(f"Rank {rank} holds {step}, but there is no stage on the other side.")
            is_send = step.kind in SENDS
            num_bytes = costs.boundary_bytes(step) if is_send else 0.0
            channel, key = self._channel(*ends), message_key(step.carries())
            overlap = self.channels[channel].path.overlap
            if is_send:
                code = WAITING_SEND if overlap is Overlap.NONE else SEND
            else:
                code = IDLE_RECEIVE if overlap is Overlap.RECEIVER else RECEIVE
            return _Like(code, costs.seconds(step, rank), key, channel, num_bytes)
        if step.kind in (Kind.REDUCE, Kind.UPDATE):
            first = program.rank_of_stage[step.stage]
            key = step.stage * 8 + SYNC + (rank - first) * self.stride  # each rank of a stage has its own
            num_bytes = costs.reduce_bytes[step.stage] if program.average_lag is None else 0.0
            code = REDUCE if step.kind is Kind.REDUCE else UPDATE
            tiers = program.tiers_of(rank)
            on_host = code == UPDATE and tiers is not None and step.stage in tiers.host_updates
            if code == UPDATE and self._agree:
                key += AGREED
            seconds = costs.seconds(step, rank, on_host=on_host)
            if step.is_apart:
                return _Like(LOCAL, seconds, 0, -1, 0.0)
            return _Like(code, seconds, key, self._channel(first, first), num_bytes)
        if step.kind in AVERAGES:
            # What gradients would move with replicas, weights move; only REDUCE and UPDATE agree on a batch.
            key, channel = step.stage * 8 + AVERAGE, self._channel(rank, rank, averages=True)
            if step.kind is Kind.AVERAGE_START:
                return _Like(REDUCE, costs.seconds(step, rank), key, channel, costs.reduce_bytes[step.stage])
            return _Like(UPDATE, costs.seconds(step, rank), key, channel, 0.0)
        needed = step.needs(program.num_stages) if step.kind in COMPUTE else None
        if needed is not None:
            source, _ = program.ends_of(needed)
            if source != rank:
                seconds = costs.seconds(step, rank, takes_bytes=costs.message_of(needed))
                channel = self._channel(source, rank)
                posts = self.channels[channel].path.overlap is Overlap.RECEIVER
                return _Like(POSTING_USE if posts else USE, seconds, message_key(needed), channel, 0.0)
        return _Like(LOCAL, costs.seconds(step, rank), 0, -1, 0.0)

    def _channel(self, source: int, destination: int, *, averages: bool = False) -> int:
        ends = source, destination
        number = self._number_of_channel.get((*ends, averages))
        if number is None:
            number = self._number_of_channel[*ends, averages] = len(self.channels)
            path = self._sync_path(source) if source == destination else self._path(ends)
            self.channels.append(SimulatedChannel(source, destination, path))
        return number

    def _path(self, ends: tuple[int, int]) -> Path:
        path = self._network.paths.get(ends)
        if path is None:
            raise BiremeError(f"The network has no path from rank {ends[0]} to rank {ends[1]}, which talk.")
        return path

    def _sync_path(self, rank: int) -> Path:
        path = self._network.sync_paths.get(rank)
        if path is None and any(self._costs.reduce_bytes[stage] for stage in self._program.stages_of(rank)):
            raise BiremeError(
                f"The costs have reduce_bytes, but the network has no path for rank {rank}'s gradient sync. "
                "Give sync_paths, or the time as reduce_s."
            )
        return Path(()) if path is None else path


def message_key(message: Message) -> int:
    """The key of a message of micro-batch 0 of batch 0."""
    half = 0 if message.half is None else message.half + 1
    return message.to_stage * 8 + (half if message.forward else 3)
