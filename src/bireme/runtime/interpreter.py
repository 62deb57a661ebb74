"""The interpreter: one rank's part of any program, instruction by instruction.

A table leads from each kind of instruction to what is done for it; there is no loop of any schedule's own.
What takes long runs in other threads: messages in the transport, the sums of gradients in the reducer.

An evaluation is a program too, of nothing but forwards and their messages: it runs here on other stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from bireme.codec.description import NO_CODECS, LinkCodecs
from bireme.runtime.balancer import Stopwatch
from bireme.runtime.exchange.averages import Averages
from bireme.runtime.gathering import Moment, Recorder
from bireme.runtime.microbatches import Feed, MicroBatch
from bireme.runtime.paging.rank_paging import RankPaging
from bireme.runtime.settings import OnInstruction
from bireme.runtime.stage import Place, Stage
from bireme.runtime.stage_messages import StageMessages
from bireme.runtime.updates import FinishedBatch, Updates
from bireme.schedule.instruction import AVERAGES, COMPUTE, PAGING, SHARING, Instruction, Item, Kind
from bireme.schedule.program import Block

_USE_CHUNKS = (*SHARING, *AVERAGES, Kind.REDUCE, Kind.UPDATE, Kind.TRIAL)
"""What besides passes uses chunks."""


class _RunsForward(Protocol):
    """What a forward needs of a stage."""

    def forward(
        self, place: Place, version: int, micro_batch: MicroBatch, received: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run a micro-batch, or half of one; gives what goes to the next stage."""
        ...


class Interpreter:
    """Runs one rank of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        stage_messages: StageMessages,
        updates: Updates,
        on_instruction: OnInstruction,
        stopwatch: Stopwatch | None = None,
        paging: RankPaging | None = None,
        averages: Averages | None = None,
    ) -> None:
        self._stages = stages
        self._forwards: Mapping[int, _RunsForward] = stages
        self._stage_messages = stage_messages
        self._updates = updates
        self._on_instruction = on_instruction
        self._stopwatch = stopwatch
        self._paging = paging
        self._now: Callable[[], Moment] = _nobody_asks
        self._began: Moment = 0.0
        """When the instruction under way began to work: after its wait for a message or a sum."""
        self._actions: dict[Kind, Callable[[Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.RECOMPUTE: self._recompute,
            Kind.SEND_FORWARD: stage_messages.send,
            Kind.SEND_BACKWARD: stage_messages.send,
            Kind.RECV_FORWARD: stage_messages.receive,
            Kind.RECV_BACKWARD: stage_messages.receive,
            Kind.REDUCE: self._reduce,
            Kind.UPDATE: self._update,
            Kind.TRIAL: updates.trial,
        }
        self._evaluates = dict(self._actions)
        """The same actions, for stages that train nothing, and so page and share nothing."""
        if any(stage.banks.shared is not None for stage in stages.values()):
            for kind in COMPUTE:
                self._actions[kind] = self._when_whole(self._actions[kind])
            self._actions |= {
                Kind.SCATTER: lambda step: stages[step.stage].begin_sums(step.batch),
                Kind.COLLECT: updates.collect,
            }
        if averages is not None:
            self._actions |= {Kind.AVERAGE_START: averages.start, Kind.AVERAGE_END: averages.end}
        self._move_whole: Callable[[Instruction], None] = self._moved_whole
        if paging is not None:
            self._move_whole = paging.around(self._moved_whole, self._begin)
            for kind in self._actions.keys() & {*COMPUTE, *_USE_CHUNKS}:
                self._actions[kind] = paging.around(self._actions[kind], self._begin)
        self._actions |= dict.fromkeys(PAGING, self._move)

    def run(
        self,
        blocks: Iterable[Block],
        feed: Feed,
        recorder: Recorder | None = None,
        *,
        forwards: Mapping[int, _RunsForward] | None = None,
        codecs: LinkCodecs = NO_CODECS,
    ) -> Iterator[FinishedBatch]:
        """Run what the blocks say on the batches of the feed; gives what came of each batch when it is
        done. Forwards are those of the stages that train, or of `forwards`, by these codecs.
        """
        self._forwards = self._stages if forwards is None else forwards
        self._stage_messages.begin(feed, None if forwards is None else codecs)
        actions = self._actions if forwards is None else self._evaluates
        stopwatch = self._stopwatch if forwards is None else None
        asks = recorder or stopwatch
        self._now = _nobody_asks if asks is None else asks.now
        tell, now, finished = self._on_instruction, self._now, self._updates.finished
        for block in blocks:
            for written in block.instructions:
                step = written.shifted(block.batches, block.versions) if block.batches else written
                tell(step)
                self._began = now()
                actions[step.kind](step)
                if recorder is not None:
                    recorder.note(self._began, now())
                if stopwatch is not None and step.kind in COMPUTE:
                    stopwatch.note(step.batch, self._began, now())
                if finished:
                    yield from self._updates.take_finished()
        self._stage_messages.drain()

    def _begin(self) -> None:
        self._began = self._now()

    def _forward(self, step: Instruction) -> None:
        received = self._stage_messages.take(step)
        micro_batch = _micro_batch_of(step, self._stage_messages.feed)
        self._began = self._now()
        assert step.version is not None
        sends = self._forwards[step.stage].forward(_place_of(step), step.version, micro_batch, received)
        self._stage_messages.put(step, sends)

    def _when_whole(self, action: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        """A pass on weights that other replicas make or keep a part of."""

        def run(step: Instruction) -> None:
            self._stages[step.stage].banks.arrive(step.version or 0)
            self._began = self._now()
            action(step)

        return run

    def _move(self, step: Instruction) -> None:
        """A FETCH or EVICT: of a chunk between two tiers, or of whole weights from the replicas."""
        if step.moves_whole:
            self._move_whole(step)
            return
        assert self._paging is not None, "a rank whose chunks move offloads"
        assert step.page is not None, "FETCH and EVICT have a page"
        banks = self._stages[step.stage].banks
        if step.kind is Kind.EVICT and step.page.item is Item.WEIGHTS and banks.gathered is None:
            banks.arrive(step.version or 0)  # other replicas may have made parts of them
        self._paging.move(step)

    def _moved_whole(self, step: Instruction) -> None:
        gathered = self._stages[step.stage].banks.gathered
        assert gathered is not None, "replicas share the weights"
        assert step.version is not None, "weights have a version"
        (gathered.take if step.kind is Kind.FETCH else gathered.let_go)(step.version)

    def _backward(self, step: Instruction) -> None:
        gradients = self._stage_messages.take(step)
        self._began = self._now()
        stage, is_whole = self._stages[step.stage], step.kind is Kind.BACKWARD
        if is_whole:
            self._updates.before_backward(step, self._stage_messages.feed.portion(step.batch))
        run = stage.backward if is_whole else stage.backward_input
        self._stage_messages.put(step, run(_place_of(step), gradients))

    def _backward_weight(self, step: Instruction) -> None:
        self._stages[step.stage].backward_weight(_place_of(step))

    def _recompute(self, step: Instruction) -> None:
        assert step.version is not None
        self._stages[step.stage].recompute(_place_of(step), step.version)

    def _reduce(self, step: Instruction) -> None:
        self._updates.reduce(step, self._stage_messages.feed.portion(step.batch))

    def _update(self, step: Instruction) -> None:
        if not step.is_apart:
            self._updates.wait(step.batch)
        self._began = self._now()
        self._updates.update(step)


def _nobody_asks() -> Moment:
    """The time where nothing is recorded, so that no mark is made on a device."""
    return 0.0


def _place_of(step: Instruction) -> Place:
    assert step.microbatch is not None
    return Place(step.batch, step.microbatch)


def _micro_batch_of(step: Instruction, feed: Feed) -> MicroBatch:
    """What the model is given of it, or of the half that it is about."""
    assert step.microbatch is not None
    whole = feed.portion(step.batch).micro_batches[step.microbatch]
    return whole if step.half is None else whole.halves[step.half]
