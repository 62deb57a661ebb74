"""The word of the language: one instruction of one rank.

An instruction says what to do and to what: never how long it takes or how it is done. It must stay small,
frozen and free of meaning that only one interpreter knows. It is a tuple because a search makes millions,
which takes a dataclass that is frozen five times as long.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple


class Kind(StrEnum):
    """What an instruction does. The values are the tokens of torch's schedule files where torch has one."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters in one go."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "RECOMPUTE"
    """Run the forward again, on the same version, to have its activations for the backward."""
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    """Post the receive. It does not wait: the instruction that uses the message does."""
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"
    """Start to sum a batch's gradients over the replicas of the stage."""
    UPDATE = "UPDATE"
    """Finish that sum, step the optimizer, and so make a weight version."""
    TRIAL = "TRIAL"
    """Make the weights of a batch by a trial step with the gradients accumulated so far.

    They are this replica's own sum, which the step must not change; on the last stage it comes right after
    the REDUCE of that sum, which therefore must work on a copy.
    """
    AVERAGE_START = "AVERAGE_START"
    """Say that the weights of an update are ready to be averaged with replicas. It does not wait."""
    AVERAGE_END = "AVERAGE_END"
    """Wait for the mean over the group that was granted, and make it part of a weight version."""
    FETCH = "FETCH"
    """Post the copy of a chunk from the tier below, or of whole weights from the replicas that own their
    parts. It does not wait: the instruction that uses the chunk or the weights does."""
    EVICT = "EVICT"
    """Give back a chunk's slot in a tier, once its copy to the tier below is complete if it needs one; or the
    memory of whole weights, whose parts stay with their owners."""
    SCATTER = "SCATTER"
    """Start an exchange of parts: sum a stage's gradients of a batch so far over the replicas, each part at
    its owner. It does not wait: COLLECT does."""
    COLLECT = "COLLECT"
    """End that exchange: wait for the sums, add this replica's part to its gradients of the batch, and give
    back the memory of whole gradients."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE})
GRADIENT_DONE = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""The kinds after which a micro-batch's gradient is in the accumulator."""
BACKWARDS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""The kinds that take a gradient from the next stage and give one to the stage before."""
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
_MOVES = {
    Kind.SEND_FORWARD: (True, 1),
    Kind.SEND_BACKWARD: (False, -1),
    Kind.RECV_FORWARD: (True, 0),
    Kind.RECV_BACKWARD: (False, 0),
}
"""Whether the message goes forward, and how far from the instruction's stage the receiving one is."""
AVERAGES = frozenset({Kind.AVERAGE_START, Kind.AVERAGE_END})
PAGING = frozenset({Kind.FETCH, Kind.EVICT})
SHARING = frozenset({Kind.SCATTER, Kind.COLLECT})

HALF_LETTERS = "ab"


class Message(NamedTuple):
    """What crosses the boundary into `to_stage`; the same for the send, the receive and the use of it."""

    forward: bool
    to_stage: int
    batch: int
    microbatch: int | None
    half: int | None

    @property
    def from_stage(self) -> int:
        """The stage that makes it; past either end of the pipeline there may be none."""
        return self.to_stage - 1 if self.forward else self.to_stage + 1

    def __str__(self) -> str:
        """Such as `activation of micro-batch 3b of batch 1 into stage 2`."""
        what = "activation" if self.forward else "gradient"
        half = "" if self.half is None else HALF_LETTERS[self.half]
        which = f"micro-batch {self.microbatch}{half} of batch {self.batch}"
        return f"{what} of {which} into stage {self.to_stage}"


_message: Callable[[tuple[bool, int, int, int | None, int | None]], Message] = partial(tuple.__new__, Message)
"""Makes a message in a third of the time: programs have one or two for each instruction."""


class Item(StrEnum):
    """What of a stage is paged. The values are the words of tables."""

    WEIGHTS = "weights"
    """One bank."""
    GRADIENT = "gradients"
    """The sum of a batch; of a micro-batch where each has an update of its own."""
    OPTIMIZER = "optimizer"
    """Its state, with the master copy of the weights where it keeps one."""
    STASH = "activations"
    """What a micro-batch keeps between its forward and its backward."""
    FROZEN = "frozen weights"
    """The weights that do not learn; nobody writes to them, so a copy below stays valid."""
    WHOLE = "whole weights"
    """All weights of a version, with the frozen ones, if each replica keeps a part of them. They are no
    chunks of a tier below: their parts are on the other replicas."""


class Page(NamedTuple):
    """What FETCH and EVICT move: one chunk of an item, into the tier or out of it.

    Tier 0 is the device's memory, 1 the one below it, and so on. The item is that of the instruction's stage
    and of its version (weights), batch (gradients) or micro-batch (activations). Whole weights are one chunk.
    """

    item: Item
    chunk: int
    tier: int = 0
    is_copied: bool = True
    """Whether the chunk is copied between two tiers of the rank. An EVICT need not copy it if a valid copy is
    below already, or if no instruction reads it again; whole weights never are."""


def moved_item(step: "Instruction") -> Item:
    """What a FETCH, EVICT or SCATTER moves."""
    return Item.GRADIENT if step.page is None else step.page.item


class Instruction(NamedTuple):
    """One step of a rank.

    `version` is the weight version that a compute instruction runs on, the one that UPDATE and TRIAL make,
    the one that AVERAGE_START reads and AVERAGE_END completes, and the one whose weights FETCH and EVICT
    move; communication has none. `half` is 0 or 1 where a micro-batch's forward is sliced. `seen` is, for
    TRIAL, how many micro-batches of the batch before have their gradient in the accumulator. `page` is what
    FETCH and EVICT move. An UPDATE that `is_apart` waits for no other stage's gradients.
    """

    kind: Kind
    stage: int
    batch: int
    microbatch: int | None = None
    version: int | None = None
    half: int | None = None
    seen: int | None = None
    page: Page | None = None
    is_apart: bool = False

    def shifted(self, batches: int, versions: int) -> "Instruction":
        """The same instruction so many batches and versions later."""
        kind, stage, batch, microbatch, version, half, seen, page, is_apart = self
        if version is not None:
            version += versions
        return instruction_of((kind, stage, batch + batches, microbatch, version, half, seen, page, is_apart))

    @property
    def moves_whole(self) -> bool:
        """Whether it fetches or evicts whole weights."""
        return self.page is not None and self.page.item is Item.WHOLE

    def needs(self, num_stages: int) -> Message | None:
        """The message from a neighboring stage that this compute instruction cannot start without."""
        if self.kind is Kind.FORWARD and self.stage > 0:
            return _message((True, self.stage, self.batch, self.microbatch, self.half))
        if self.kind in BACKWARDS and self.stage < num_stages - 1:
            return _message((False, self.stage, self.batch, self.microbatch, None))
        return None

    def makes(self, num_stages: int) -> Message | None:
        """The message to a neighboring stage that this compute instruction has ready when it ends."""
        if self.kind is Kind.FORWARD and self.stage < num_stages - 1:
            return _message((True, self.stage + 1, self.batch, self.microbatch, self.half))
        if self.kind in BACKWARDS and self.stage > 0:
            return _message((False, self.stage - 1, self.batch, self.microbatch, None))
        return None

    def carries(self) -> Message:
        """The message that this send or receive moves."""
        if self.kind not in _MOVES:
            raise ValueError(f"{self} moves no message")
        forward, onward = _MOVES[self.kind]
        return _message((forward, self.stage + onward, self.batch, self.microbatch, self.half))

    def __str__(self) -> str:
        """The token of torch's files and what torch lacks, such as `2F3b of batch 1 on version 0`."""
        if self.page is not None:
            return self._paged()
        where = "" if self.microbatch is None else str(self.microbatch)
        half = "" if self.half is None else HALF_LETTERS[self.half]
        text = f"{self.stage}{self.kind.value}{where}{half} of batch {self.batch}"
        if self.kind in (Kind.UPDATE, Kind.TRIAL):
            text += f" making version {self.version}"
        elif self.kind is Kind.AVERAGE_END:
            text += f" completing version {self.version}"
        elif self.version is not None:
            text += f" on version {self.version}"
        if self.seen is not None:
            text += f" having seen {self.seen} micro-batches"
        if self.is_apart:
            text += " apart from other stages"
        return text

    def _paged(self) -> str:
        """Such as `2FETCH of chunk 3 of weights of version 5 into tier 0`."""
        assert self.page is not None, "FETCH and EVICT have a page"
        if self.moves_whole:
            where = "from the replicas" if self.kind is Kind.FETCH else "from the device"
            return f"{self.stage}{self.kind.value} of the whole weights of version {self.version} {where}"
        what = f"{self.stage}{self.kind.value} of chunk {self.page.chunk} of {self.page.item}"
        if self.version is not None:
            what += f" of version {self.version}"
        elif self.microbatch is not None:
            what += f" of micro-batch {self.microbatch} of batch {self.batch}"
        else:
            what += f" of batch {self.batch}"
        return f"{what} {'into' if self.kind is Kind.FETCH else 'from'} tier {self.page.tier}"


_Fields = tuple[Kind, int, int, int | None, int | None, int | None, int | None, Page | None, bool]

instruction_of: Callable[[_Fields], Instruction] = partial(tuple.__new__, Instruction)
"""Makes an instruction of all its fields in a third of the time."""
