"""The stage messages of one rank: brings what instructions need from other stages, and takes away what they
make.

Between ranks it packs a micro-batch's tensors into one message; between stages of one rank it hands them over
as they are. It decides no order: the program's sends and receives do.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bireme.cluster.device import MOST_SENDS
from bireme.codec.above import Thresholds
from bireme.codec.description import NO_CODECS, LinkCodecs
from bireme.runtime.message_format import Arrival, Boundaries, Coding, OutgoingMessage, WireFormat
from bireme.runtime.microbatches import Feed
from bireme.schedule.instruction import Instruction, Message
from bireme.schedule.routes import Routes
from bireme.sync.group import Pending

_Tensors = dict[str, Tensor]

# How a message gets from one rank to another: the contract that every transport keeps.
#
# A message is one piece of memory, made by a `WireFormat`. Messages over different boundaries or in different
# directions never mix, even between the same two ranks: each pair (direction, stage) is a channel of its own.
# Within a channel messages are received in the order they were sent.


class Channel(NamedTuple):
    """One direction over one stage boundary."""

    forward: bool
    to_stage: int


class Transport(Protocol):
    """Point-to-point messages of one rank with the others of its pipeline.

    Ranks are places in the pipeline. `payload` is contiguous, of uint8, in the memory that the transport is
    for, and must stay alive, a sent one also unchanged, until `wait` of what is returned has returned. Stages
    that share a rank need no transport, and none sends to its own rank.

    A payload begins with the header that names its message. On the host a payload to receive into begins with
    the header expected. If another message comes in its place, that one's header is there afterwards and
    the rest is undefined, so whoever takes a message apart must compare. Only if it is a shorter message, as
    its header says, all of it is there.
    """

    @property
    def is_host(self) -> bool:
        """Whether payloads lie in host memory, or else on the device."""

    def send(self, key: Message, to: int, payload: Tensor, num_bytes: int | None = None) -> Pending:
        """Begin to send. To wait is to know that the payload may be used for something else.

        A message of `num_bytes`, as its header says, ends before the payload does. The receiver has room for
        the payload, and what comes after the end may be sent or not.
        """

    def receive(self, key: Message, source: int, payload: Tensor) -> Pending:
        """Begin to receive into the payload, which must have the message's size. To wait is to have it."""

    def close(self) -> None:
        """Let go of the transport. Every send and receive has been waited for."""

    def abort(self) -> None:
        """Give up: every thread that waits here, and every rank that waits for this one, fails at once."""


@dataclass(slots=True)
class BoundaryTraffic:
    """The bytes of all messages that went over a boundary in one direction: as sent, and without a codec."""

    raw_bytes: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class _Outgoing:
    """Messages over a boundary in one direction that are under way, and the room of earlier ones."""

    sent: deque[OutgoingMessage] = field(default_factory=deque)
    free: deque[OutgoingMessage] = field(default_factory=partial(deque, maxlen=MOST_SENDS))
    traffic: BoundaryTraffic = field(default_factory=BoundaryTraffic)

    def room(self, wire_format: WireFormat) -> OutgoingMessage | None:
        """Room whose last message has gone, if there is any of that format."""
        for place, parcel in enumerate(self.free):
            if parcel.wire_format is wire_format:
                del self.free[place]
                return parcel
        return None


@dataclass(eq=False)
class StageMessages:
    """Moves the messages of one rank. `begin` says which batches they are about, and by which codecs."""

    _routes: Routes
    _boundaries: Boundaries
    _transport: Transport
    _device: torch.device
    _own_codecs: LinkCodecs = NO_CODECS
    feed: Feed = field(init=False)

    def __post_init__(self) -> None:
        # Sockets cannot read what lies on an accelerator: there messages go through pinned host memory.
        self._memory = torch.device("cpu") if self._transport.is_host else self._device
        self._is_staged = self._memory.type != self._device.type
        self._made: dict[Message, _Tensors] = {}
        """Messages made here that are not sent yet, or are for another stage of this rank."""
        self._awaited: dict[Message, Arrival] = {}
        self._outgoing = defaultdict[tuple[bool, int], _Outgoing](_Outgoing)
        """By direction and receiving stage."""
        self._coding = Coding()
        self._codecs = self._own_codecs
        self.receive_bytes = 0
        """Of receives posted and not yet used."""
        self.most_receive_bytes = 0

    def begin(self, feed: Feed, evaluating: LinkCodecs | None = None) -> None:
        """Go on with the batches of a feed: to train, or to evaluate by these codecs."""
        self.feed = feed
        self._codecs = self._own_codecs if evaluating is None else evaluating
        self._coding.keeps_masks = evaluating is None

    def receive(self, step: Instruction) -> None:
        """Post a receive."""
        key = step.carries()
        arrival = self._format(key).arrival(key, self._memory, is_pinned=self._is_staged)
        source = self._routes.rank_of(key.from_stage, key.microbatch)
        arrival.pending = self._transport.receive(key, source, arrival.message)
        self._awaited[key] = arrival
        self.receive_bytes += arrival.message.numel()
        self.most_receive_bytes = max(self.most_receive_bytes, self.receive_bytes)

    def send(self, step: Instruction) -> None:
        """Begin to send what was made for it."""
        key = step.carries()
        tensors = self._here(key)
        if tensors is None:
            raise RuntimeError(f"{step} has nothing to send: the program is wrong.")
        channel = self._outgoing[key[:2]]
        if len(channel.sent) >= MOST_SENDS:
            oldest = channel.sent.popleft()
            oldest.pending.wait()
            channel.free.append(oldest)
        wire_format = self._format(key)
        parcel = channel.room(wire_format)
        if parcel is None:
            parcel = wire_format.parcel(self._memory, is_pinned=self._is_staged)
        parcel.address(key)
        parcel.pack(tensors, self._coding)
        if self._coding.keeps_masks:
            traffic = channel.traffic
            traffic.raw_bytes += wire_format.raw_bytes
            traffic.sent_bytes += parcel.num_bytes if self._transport.is_host else wire_format.num_bytes
        num_bytes = parcel.num_bytes if wire_format.is_bounded else None
        target = self._routes.rank_of(key.to_stage, key.microbatch)
        parcel.pending = self._transport.send(key, target, parcel.message, num_bytes)
        channel.sent.append(parcel)

    def take(self, step: Instruction) -> _Tensors:
        """What an instruction needs from a neighboring stage; waits until it is there."""
        key = step.needs(self._routes.num_stages)
        if key is None:
            return {}
        here = self._here(key)
        if here is not None:
            return here
        arrival = self._awaited.pop(key)
        arrival.pending.wait()
        self.receive_bytes -= arrival.message.numel()
        return arrival.unpack(self._device, self._coding)

    def put(self, step: Instruction, tensors: _Tensors) -> None:
        """What an instruction made for a neighboring stage."""
        key = step.makes(self._routes.num_stages)
        if key is not None:
            self._made[key] = tensors

    @property
    def thresholds(self) -> Thresholds:
        """What activations that are sent are compared with."""
        return self._coding.thresholds

    @property
    def traffic(self) -> dict[tuple[bool, int], BoundaryTraffic]:
        """What this rank has sent of training, by direction and boundary."""
        return {
            (forward, to_stage - forward): channel.traffic
            for (forward, to_stage), channel in self._outgoing.items()
            if channel.traffic.sent_bytes
        }

    @property
    def send_bytes(self) -> int:
        """Of the messages on their way and of the room that is kept for more."""
        kept = (parcel for channel in self._outgoing.values() for parcel in (*channel.sent, *channel.free))
        return sum(parcel.message.nbytes for parcel in kept)

    def drain(self) -> None:
        """Wait until everything that was sent has left this rank's memory."""
        for channel in self._outgoing.values():
            while channel.sent:
                channel.sent.popleft().pending.wait()

    def _here(self, key: Message) -> _Tensors | None:
        """What this rank made for a message, if it did. Halves are joined where the whole is asked for."""
        made = self._made.pop(key, None)
        if made is not None or key.half is not None or not self._made:
            return made
        first, second = key._replace(half=0), key._replace(half=1)
        if first not in self._made or second not in self._made:
            return None
        one, other = self._made.pop(first), self._made.pop(second)
        axes = {name: self._boundaries.batch_axis(name) or 0 for name in one}
        return {name: torch.cat([one[name], other[name]], axes[name]) for name in one}

    def _format(self, key: Message) -> WireFormat:
        assert key.microbatch is not None
        whole = self.feed.portion(key.batch).micro_batches[key.microbatch]
        one = whole if key.half is None else whole.halves[key.half]
        of_boundary = self._boundaries.forward if key.forward else self._boundaries.backward
        if not self._codecs.phases:
            return of_boundary(key.to_stage, one.num_samples)
        codecs = self._codecs.of(min(key.from_stage, key.to_stage), key.batch)
        codec = codecs.choice(forward=key.forward)
        return of_boundary(key.to_stage, one.num_samples, codec, whole.num_samples)
