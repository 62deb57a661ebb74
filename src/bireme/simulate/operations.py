"""Instructions as the simulator's inner loop wants them: what to do, how long, with which message."""

from collections.abc import Iterator
from typing import NamedTuple

from bireme.errors import BiremeError
from bireme.schedule.instruction import AVERAGES, COMPUTE, RECEIVES, SENDS, Instruction, Kind, Message
from bireme.schedule.program import Program
from bireme.schedule.proofs.messages import channel_of
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path
from bireme.simulate.parcels import SimulatedChannel

__all__ = ["AGREED", "AVERAGE", "LOCAL", "RECEIVE", "REDUCE", "SEND", "UPDATE", "USE", "Op", "Operations"]

LOCAL, USE, SEND, RECEIVE, REDUCE, UPDATE = range(6)

AVERAGE = 6
"""The place of a stage's average among its keys."""
AGREED = 1
"""From the key of a sync to the key of the agreement of all ranks after it."""


class Op(NamedTuple):
    """An instruction as the inner loop wants it: what to do, how long, and with which message."""

    code: int
    seconds: float
    key: int
    """The message or sync it is about; batches later, so many strides more."""
    channel: int
    num_bytes: float
    instruction: Instruction


class _Like(NamedTuple):
    """What operations of one kind, stage and half share; `key` is that of micro-batch 0 of batch 0."""

    code: int
    seconds: float
    key: int
    channel: int
    num_bytes: float


class Operations:
    """The operations of a program's ranks, and the channels that their messages go through."""

    def __init__(self, program: Program, costs: Costs, network: Network, *, agree: bool) -> None:
        self.channels: list[SimulatedChannel] = []
        self._program = program
        self._costs = costs
        self._network = network
        self._agree = agree
        self._number_of_channel: dict[tuple[int, int, bool], int] = {}

    def of_rank(self, rank: int) -> Iterator[tuple[Op, int]]:
        """A rank's track as operations, each with the shift of its key."""
        num_microbatches, each = self._program.num_microbatches, self._program.num_stages * 8
        ready: dict[int, list[Op]] = {}
        alike: dict[tuple[Kind, int, int | None, bool], _Like] = {}

        def made(step: Instruction) -> Op:
            what = step.kind, step.stage, step.half, step.is_apart
            like = alike.get(what)
            if like is None:
                like = alike[what] = self._like(step, rank)
            code, seconds, key, channel, num_bytes = like
            if code != LOCAL:
                key += (step.batch * num_microbatches + (step.microbatch or 0)) * each
            return Op(code, seconds, key, channel, num_bytes, step)

        for block in self._program.tracks[rank].blocks():
            ops = ready.get(id(block.instructions))
            if ops is None:
                ops = ready[id(block.instructions)] = [made(step) for step in block.instructions]
            shift = block.batches * num_microbatches * each
            for op in ops:
                yield op, shift

    def _like(self, step: Instruction, rank: int) -> _Like:
        program, costs = self._program, self._costs
        if step.kind in SENDS or step.kind in RECEIVES:
            ends = channel_of(program, step)
            if ends is None:
                raise BiremeError(f"Rank {rank} holds {step}, but there is no stage on the other side.")
            is_send = step.kind in SENDS
            num_bytes = costs.border_bytes(step) if is_send else 0.0
            code, key = SEND if is_send else RECEIVE, _key(step.carries())
            return _Like(code, costs.seconds(step, rank), key, self._channel(*ends), num_bytes)
        if step.kind in (Kind.REDUCE, Kind.UPDATE):
            key = step.stage * 8 + 4
            num_bytes = costs.reduce_bytes[step.stage] if program.average_lag is None else 0.0
            code = REDUCE if step.kind is Kind.REDUCE else UPDATE
            tiers = program.tiers_of(rank)
            on_host = code == UPDATE and tiers is not None and step.stage in tiers.host_updates
            if code == UPDATE and self._agree:
                key += AGREED
            seconds = costs.seconds(step, rank, on_host=on_host)
            if step.is_apart:
                return _Like(LOCAL, seconds, 0, -1, 0.0)
            return _Like(code, seconds, key, self._channel(rank, rank), num_bytes)
        if step.kind in AVERAGES:
            # What gradients would move with replicas, weights move; only REDUCE and UPDATE agree on a batch.
            key, channel = step.stage * 8 + AVERAGE, self._channel(rank, rank, averages=True)
            if step.kind is Kind.AVERAGE_START:
                return _Like(REDUCE, costs.seconds(step, rank), key, channel, costs.reduce_bytes[step.stage])
            return _Like(UPDATE, costs.seconds(step, rank), key, channel, 0.0)
        needed = step.needs(program.num_stages) if step.kind in COMPUTE else None
        if needed is not None:
            source = program.rank_of_stage[needed.from_stage]
            if source != rank:
                seconds = costs.seconds(step, rank, takes_bytes=costs.message_of(needed))
                return _Like(USE, seconds, _key(needed), self._channel(source, rank), 0.0)
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
        if path is None and any(self._costs.reduce_bytes):
            raise BiremeError(
                f"The costs have reduce_bytes, but the network has no path for rank {rank}'s gradient sync. "
                "Give sync_paths, or the time as reduce_s."
            )
        return Path(()) if path is None else path


def _key(message: Message) -> int:
    """The key of a message of micro-batch 0 of batch 0."""
    half = 0 if message.half is None else message.half + 1
    return message.to_stage * 8 + (half if message.forward else 3)
